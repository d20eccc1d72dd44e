"""From the table of episodes to what a run did: statuses, signal, error patterns and curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import polars as pl

from train.analysis.dumps import DumpError, RunFiles, read_aggregated
from train.analysis.error_patterns import PATTERNS
from train.analysis.scan import EXAMPLES, Example
from train.analysis.status import MIN_CHANGE, Outcomes, Success, Verdict, judge, success_of
from train.evaluate import ALL, Attempt, aggregate, env_name
from train.metrics_file import read_metrics
from train.statistics import CONFIDENCE, Interval, cluster_bootstrap_interval, wilson_interval

AGREES_WITHIN = 1e-6
MEAN_RESAMPLES = 500  # of means that no status stands on
GRADED = pl.col("reward").is_not_null()
SOLVED = pl.col("reward") > 0
# Curves that metrics.jsonl has and that are worth seeing; the part before the environment, and the part after it.
_CURVES = {
    "reward": ("reward/", "/pass_at_1"),
    "variance": ("reward/", "/variance_per_prompt"),
    "signal": ("reward/", "/signal_ratio"),
}


@dataclass(frozen=True)
class Mean:
    """A mean over episodes with its interval, resampled by task; ``None`` where one task has no spread."""

    value: float
    interval: Interval | None


@dataclass(frozen=True)
class StepSummary:
    """Episodes of one environment at one step. ``success`` is ``None`` where none was graded."""

    step: int
    episodes: int
    not_graded: int
    success: Success | None
    turns: Mean
    calls: Mean
    failed_call_share: float
    thinking_share: float


@dataclass(frozen=True)
class EnvSummary:
    """One environment, or all together under the name ``all``. ``verdict``: only with two steps."""

    env: str
    before: StepSummary | None
    after: StepSummary | None
    verdict: Verdict | None


@dataclass(frozen=True)
class Signal:
    """How much an environment's groups could teach. ``source`` says what it was computed from."""

    env: str
    source: str
    steps: int
    variance: float
    steps_with_signal: float
    signal_ratio: float


@dataclass(frozen=True)
class PatternCount:
    """Episodes of an environment in which a pattern was found, at one step."""

    env: str
    step: int
    episodes: int
    of: int
    findings: int
    interval: Interval


@dataclass(frozen=True)
class TaskChange:
    env: str
    task: str
    before: float | None
    after: float | None
    attempts_before: int
    attempts_after: int


@dataclass(frozen=True)
class Analysis:
    """All that ``analysis.json`` holds. Rates are shares, not percentages."""

    run: str
    location: str
    baseline: int
    last: int
    label: str
    confidence: float
    min_change: float
    files: int
    bytes: int
    episodes: int
    steps: list[int]
    environments: list[EnvSummary]
    overall: EnvSummary
    signal: list[Signal]
    patterns: dict[str, list[PatternCount]]
    examples: list[Example]
    tasks: list[TaskChange]
    curves: dict[str, dict[str, list[list[float]]]]
    warnings: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """With numbers that are not finite as null."""
        return _finite(asdict(self))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


def summarise(
    run: RunFiles,
    table: pl.DataFrame,
    examples: Sequence[Example],
    baseline: int | None = None,
    min_change: float = MIN_CHANGE,
) -> Analysis:
    """The analysis of a run: its last evaluation against its first, or against that of step ``baseline``.

    Evaluations under the run's own sampling count, or those of another label where there are no such. Without any, or
    with one, there are no statuses.

    Raises:
        DumpError: there is no episode at all, no evaluation at ``baseline``, or none after it.
        MetricsError: a line of ``metrics.jsonl`` is none.
    """
    if table.height == 0:
        raise DumpError(f"{run.location} holds no episodes: its {len(run.episodes)} files are empty")
    evals = table.filter(pl.col("label") != "train")
    label = _judged_label(sorted(evals["label"].unique()))
    judged = evals.filter(pl.col("label") == label)
    train = table.filter(pl.col("label") == "train")
    shown = judged if judged.height else train
    steps = sorted(shown["step"].unique())
    first, last = _two_steps(steps, baseline)
    envs = sorted(shown["env"].unique())
    both = judged.filter(pl.col("step").is_in([first, last]))
    metrics = read_metrics(run.metrics) if run.metrics else []
    return Analysis(
        run=run.name,
        location=run.location,
        baseline=first,
        last=last,
        label=label,
        confidence=CONFIDENCE,
        min_change=min_change,
        files=len(run.episodes),
        bytes=run.nbytes,
        episodes=table.height,
        steps=steps,
        environments=[_env_summary(env, shown.filter(pl.col("env") == env), first, last, min_change) for env in envs],
        overall=_env_summary(ALL, shown, first, last, min_change),
        signal=_signal(metrics, train, judged),
        patterns=_pattern_counts(shown, [first, last]),
        examples=_chosen(examples, label, last),
        tasks=_task_changes(both, first, last),
        curves=_curves(metrics, table, train),
        warnings=_warnings(run, evals, shown),
    )


def _judged_label(labels: list[str]) -> str:
    """Of the labels of the evaluations, the one that statuses stand on."""
    if not labels:
        return "train"
    return next((label for label in ("sampled", "greedy") if label in labels), labels[0])


def _two_steps(steps: list[int], baseline: int | None) -> tuple[int, int]:
    if baseline is None:
        return steps[0], steps[-1]
    there_are = f"there are {', '.join(map(str, steps[:20]))}"
    if baseline not in steps:
        raise DumpError(f"--baseline {baseline}: no evaluation at this step; {there_are}")
    if baseline == steps[-1]:
        raise DumpError(f"--baseline {baseline} is the last step, so nothing comes after it; {there_are}")
    return baseline, steps[-1]


def _env_summary(env: str, rows: pl.DataFrame, first: int, last: int, min_change: float) -> EnvSummary:
    before, after = (rows.filter(pl.col("step") == step) for step in (first, last))
    verdict = None
    # Training batches are of different tasks and of other sampling: they show no before and after.
    if first != last and "train" not in rows["label"]:
        verdict = judge(_outcomes(before), _outcomes(after), min_change)
    return EnvSummary(env, _step_summary(first, before), _step_summary(last, after), verdict)


def _outcomes(rows: pl.DataFrame) -> Outcomes:
    graded = rows.filter(GRADED).with_columns(solved=SOLVED)
    # Two environments may use one key for different tasks.
    grouped = graded.group_by("env", "task", maintain_order=True).agg("solved")
    return {f"{env}/{task}": solved for env, task, solved in grouped.rows()}


def _step_summary(step: int, rows: pl.DataFrame) -> StepSummary | None:
    if rows.height == 0:
        return None
    tasks = rows["task"].to_list()
    calls, written = rows["calls"].sum(), rows["policy_chars"].sum()
    return StepSummary(
        step=step,
        episodes=rows.height,
        not_graded=rows.filter(~GRADED).height,
        success=success_of(_outcomes(rows)),
        turns=_mean(rows["turns"], tasks),
        calls=_mean(rows["calls"], tasks),
        failed_call_share=rows["failed_calls"].sum() / calls if calls else 0.0,
        thinking_share=rows["thinking_chars"].sum() / written if written else 0.0,
    )


def _mean(values: pl.Series, tasks: list[str]) -> Mean:
    interval = cluster_bootstrap_interval(values.to_numpy(), tasks, resamples=MEAN_RESAMPLES)
    return Mean(float(values.mean()), interval if math.isfinite(interval.low) else None)


# -- signal


def _signal(metrics: list[dict[str, Any]], train: pl.DataFrame, judged: pl.DataFrame) -> list[Signal]:
    """From the run's own metrics if it has them, else from its training batches, else from its evaluations."""
    if of_metrics := _signal_of_metrics(metrics):
        return of_metrics
    rows, source = (train, "training batches") if train.height else (judged, "evaluations")
    steps = (
        rows.filter(GRADED)
        .with_columns(solved=SOLVED.cast(pl.Float64))
        .group_by("env", "step", "task")
        .agg(pl.len(), variance=pl.col("reward").var(ddof=0))
        .filter(pl.col("len") >= 2)
        .group_by("env", "step")
        .agg(pl.col("variance").mean(), signal=(pl.col("variance") > 0).mean())
        .sort("env", "step")
    )
    return [_signal_row(str(env), source, part["variance"], part["signal"]) for (env,), part in _by_env(steps)]


def _by_env(table: pl.DataFrame) -> Any:
    return table.group_by(["env"], maintain_order=True)


def _signal_of_metrics(metrics: list[dict[str, Any]]) -> list[Signal]:
    found = []
    for env in _envs_of_metrics(metrics):
        variance = _series(metrics, f"reward/{env}/variance_per_prompt")
        ratio = dict(_series(metrics, f"reward/{env}/signal_ratio"))
        if variance:
            ratios = [ratio.get(step, float(value > 0)) for step, value in variance]
            found.append(_signal_row(env, "metrics.jsonl", [value for _, value in variance], ratios))
    return found


def _signal_row(env: str, source: str, variance: Sequence[float], ratio: Sequence[float]) -> Signal:
    steps = len(variance)
    with_signal = sum(1 for value in ratio if value > 0) / steps
    return Signal(env, source, steps, sum(variance) / steps, with_signal, sum(ratio) / steps)


def _envs_of_metrics(metrics: list[dict[str, Any]]) -> list[str]:
    names = {name for row in metrics for name in row}
    return sorted({name.split("/")[1] for name in names if name.startswith("reward/") and name.count("/") == 2})


def _series(metrics: list[dict[str, Any]], name: str) -> list[tuple[int, float]]:
    """Steps and finite values of a metric; of a step logged twice, the last counts."""
    values = {row["step"]: float(row[name]) for row in metrics if isinstance(row.get(name), int | float)}
    return sorted((step, value) for step, value in values.items() if math.isfinite(value))


# -- error patterns


def _pattern_counts(rows: pl.DataFrame, steps: list[int]) -> dict[str, list[PatternCount]]:
    keys = [pattern.key for pattern in PATTERNS]
    counted = (
        rows.filter(pl.col("step").is_in(steps))
        .group_by("env", "step")
        .agg(
            pl.len(),
            *[(pl.col(key) > 0).sum().alias(f"{key}_episodes") for key in keys],
            *[pl.col(key).sum().alias(f"{key}_findings") for key in keys],
        )
        .sort("env", "step")
    )
    return {key: [_pattern_count(key, row) for row in counted.iter_rows(named=True)] for key in keys}


def _pattern_count(key: str, row: dict[str, Any]) -> PatternCount:
    episodes, of = row[f"{key}_episodes"], row["len"]
    interval = wilson_interval(episodes / of, of)
    return PatternCount(row["env"], row["step"], episodes, of, row[f"{key}_findings"], interval)


def _chosen(examples: Sequence[Example], label: str, last: int) -> list[Example]:
    """Of each pattern and environment ``EXAMPLES``, the latest first: what is still wrong matters most."""
    kept: dict[tuple[str, str], list[Example]] = {}
    for example in sorted(examples, key=lambda e: (e.label != label, e.step != last, -e.step)):
        group = kept.setdefault((example.pattern, example.env), [])
        if len(group) < EXAMPLES:
            group.append(example)
    return [example for _, group in sorted(kept.items()) for example in group]


# -- tasks and curves


def _task_changes(both: pl.DataFrame, first: int, last: int) -> list[TaskChange]:
    """The tasks of both steps, the largest changes first."""
    at = pl.col("step")
    tasks = (
        both.filter(GRADED)
        .group_by("env", "task")
        .agg(
            before=SOLVED.filter(at == first).mean(),
            after=SOLVED.filter(at == last).mean(),
            attempts_before=(at == first).sum(),
            attempts_after=(at == last).sum(),
        )
    )
    changes = [TaskChange(**row) for row in tasks.iter_rows(named=True)]
    return sorted(changes, key=lambda t: (-abs((t.after or 0) - (t.before or 0)), t.env, t.task))


def _curves(
    metrics: list[dict[str, Any]], table: pl.DataFrame, train: pl.DataFrame
) -> dict[str, dict[str, list[list[float]]]]:
    """For each environment: training reward and signal by step, and evaluations as ``[step, rate, low, high]``."""
    envs = sorted({*table["env"].unique(), *_env_keys(metrics, table)})
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for env in envs:
        series = {
            name: [list(point) for point in _series(metrics, f"{head}{env_name(env)}{tail}")]
            for name, (head, tail) in _CURVES.items()
        }
        if not metrics and train.height:
            series |= _curves_of_batches(train.filter(pl.col("env") == env))
        for label in ("sampled", "greedy"):
            rows = table.filter((pl.col("env") == env) & (pl.col("label") == label))
            series[label] = _eval_points(rows)
        curves[env] = {name: points for name, points in series.items() if points}
    return {env: series for env, series in curves.items() if series}


def _env_keys(metrics: list[dict[str, Any]], table: pl.DataFrame) -> list[str]:
    """Environments that only the metrics know, under the name they have there."""
    known = {env_name(env) for env in table["env"].unique()}
    return [env for env in _envs_of_metrics(metrics) if env not in known]


def _curves_of_batches(train: pl.DataFrame) -> dict[str, list[list[float]]]:
    tasks = (
        train.filter(GRADED)
        .group_by("step", "task")
        .agg(pl.len(), rate=SOLVED.mean(), variance=pl.col("reward").var(ddof=0))
    )
    rate = tasks.group_by("step").agg(pl.col("rate").mean()).sort("step")
    groups = tasks.filter(pl.col("len") >= 2).group_by("step")
    signal = groups.agg(pl.col("variance").mean(), signal=(pl.col("variance") > 0).mean()).sort("step")
    return {
        "reward": [list(row) for row in rate.rows()],
        "variance": [list(row) for row in signal.select("step", "variance").rows()],
        "signal": [list(row) for row in signal.select("step", "signal").rows()],
    }


def _eval_points(rows: pl.DataFrame) -> list[list[float]]:
    points = []
    for step in sorted(rows["step"].unique()):
        success = success_of(_outcomes(rows.filter(pl.col("step") == step)))
        if success is not None:
            points.append([step, success.rate, success.interval.low, success.interval.high])
    return points


# -- what does not fit


def _warnings(run: RunFiles, evals: pl.DataFrame, shown: pl.DataFrame) -> list[str]:
    warnings = []
    for (step, label), path in sorted(run.aggregated.items()):
        rows = evals.filter((pl.col("step") == step) & (pl.col("label") == label))
        warnings += _disagreements(f"step {step}", read_aggregated(path), rows)
    lost = shown.filter(~GRADED).height
    if lost:
        warnings.append(f"{lost} of {shown.height} episodes were not graded; they count nowhere, not as failures")
    return warnings


def pass_rates(rows: pl.DataFrame) -> dict[str, float]:
    """``eval/{env}/pass_at_{n}`` of the episodes of one evaluation, as ``aggregated_results.jsonl`` has them.

    ``n`` is every number of attempts that a task has, and 1. ``pass_at_1`` is the mean over tasks of the share of
    attempts solved, the others the share of tasks with any attempt solved.
    """
    tasks = rows.filter(GRADED).group_by("env", "task").agg(pl.len(), rate=SOLVED.mean(), any=SOLVED.any())
    rates: dict[str, float] = {}
    for env, part in [(ALL, tasks), *((str(key[0]), part) for key, part in _by_env(tasks))]:
        if part.height:
            rates |= {f"eval/{env_name(env)}/pass_at_{n}": part["any"].mean() for n in part["len"].unique()}
            rates[f"eval/{env_name(env)}/pass_at_1"] = part["rate"].mean()
    return rates


def _disagreements(where: str, aggregated: dict[str, float], rows: pl.DataFrame) -> list[str]:
    """Pass rates that the episodes beside them do not give, neither as SkyRL counts nor as an unbiased estimate."""
    if rows.height == 0:
        return []
    computed = pass_rates(rows)
    estimated = aggregate([Attempt(*row) for row in rows.select("env", "task", "reward").iter_rows()])
    wrong = [
        f"{name} is {value:.4f} in aggregated_results.jsonl of {where}, but its episodes give {computed[name]:.4f}"
        for name, value in sorted(aggregated.items())
        if name in computed
        and not any(abs(value - found) <= AGREES_WITHIN for found in (computed[name], estimated.get(name, math.nan)))
    ]
    return wrong[:5] + ([f"… and {len(wrong) - 5} more pass rates of {where}"] if len(wrong) > 5 else [])
