"""Evaluation: pass rates of groups of attempts, with their uncertainty, and the dumps that others' tools read."""

from __future__ import annotations

import json
import math
import shutil
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from actors.trajectory import Graded, Group, Trajectory
from train.dialogue import split_dialogue
from train.statistics import Interval, cluster_bootstrap_interval, pass_at_k, pass_hat_k, rate_interval

AGGREGATED = "aggregated_results.jsonl"
ALL = "all"  # all environments together
SAMPLED, GREEDY = "sampled", "greedy"


@dataclass(frozen=True)
class PassRate:
    """Share of graded attempts that earned a reward.

    ``stderr`` is the standard error of the mean over *tasks*: attempts at one task are not independent.
    """

    pass_at_1: float
    stderr: float
    tasks: int
    attempts: int
    not_graded: int


@dataclass(frozen=True)
class EvalResult:
    """One evaluation.

    Attributes:
        label: ``sampled`` or ``greedy``.
        step: the optimiser step it follows.
        version: the policy version it was asked for: the newest one when it began.
        oldest_version, newest_version: of the weights that sampled any of its tokens; ``None`` if there are none. Equal
            to ``version`` unless training went on beside it.
        metrics: beyond the pass rates, under their final names.
    """

    label: str
    step: int
    version: int
    overall: PassRate
    per_env: dict[str, PassRate]
    metrics: dict[str, float] = field(default_factory=dict)
    oldest_version: int | None = None
    newest_version: int | None = None


def save_results(path: Path, results: list[EvalResult]) -> None:
    """For :func:`load_results`; whole or absent."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([asdict(result) for result in results]), encoding="utf-8")
    partial.replace(path)


def load_results(path: Path) -> list[EvalResult]:
    """What was saved; none if nothing was."""
    if not path.is_file():
        return []
    return [
        EvalResult(
            **row
            | {
                "overall": PassRate(**row["overall"]),
                "per_env": {env: PassRate(**rate) for env, rate in row["per_env"].items()},
            }
        )
        for row in json.loads(path.read_text(encoding="utf-8"))
    ]


def evaluate_groups(label: str, step: int, version: int, groups: list[Group]) -> EvalResult:
    """Pass rates over all groups and per environment. Attempts that were not graded are counted, not scored."""
    by_env: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        by_env[group.env_key].append(group)
    per_env = {env: pass_rate(members) for env, members in sorted(by_env.items())}
    versions = [span.version for group in groups for t in group.trajectories for span in t.spans]
    oldest, newest = min(versions, default=None), max(versions, default=None)
    return EvalResult(label, step, version, pass_rate(groups), per_env, oldest_version=oldest, newest_version=newest)


def pass_rate(groups: list[Group]) -> PassRate:
    means, attempts, not_graded = [], 0, 0
    for group in groups:
        rewards = [t.outcome.reward > 0 for t in group.trajectories if isinstance(t.outcome, Graded)]
        attempts += len(rewards)
        not_graded += len(group.trajectories) - len(rewards)
        if rewards:
            means.append(sum(rewards) / len(rewards))
    n = len(means)
    if n == 0:
        return PassRate(float("nan"), float("nan"), 0, 0, not_graded)
    mean = sum(means) / n
    variance = sum((m - mean) ** 2 for m in means) / (n - 1) if n > 1 else float("nan")
    return PassRate(mean, math.sqrt(variance / n), n, attempts, not_graded)


class Attempt(NamedTuple):
    """One attempt at one task; ``reward`` is ``None`` where it was not graded."""

    env: str
    task: str
    reward: float | None


def attempts_of(groups: Iterable[Group]) -> list[Attempt]:
    """The attempts of ``groups`` in order, as :func:`aggregate` takes them."""
    return [Attempt(t.env_key, t.task_key, t.reward) for group in groups for t in group.trajectories]


def env_name(env_key: str) -> str:
    """An environment's key as part of a metric's or a file's name."""
    return env_key.replace("/", "_")


def aggregate(attempts: Sequence[Attempt]) -> dict[str, float]:
    """The numbers of ``aggregated_results.jsonl``: for ``all`` and each environment, under ``eval/{env}/``:

    - ``num_tasks`` (with a graded attempt), ``num_samples`` (graded attempts), ``not_graded``;
    - ``pass_at_{k}`` and ``pass_hat_{k}`` for each k up to the most graded attempts of a task: means over the
      ``num_tasks_at_{k}`` tasks with k of them, unbiased (see :mod:`train.statistics`);
    - ``pass_at_{k}_low`` and ``_high``: Wilson's interval, 95 %; ``pass_at_{k}_bootstrap_low`` and ``_high``: that of a
      bootstrap over tasks, where there are two or more;
    - ``variance_per_prompt`` (mean over tasks with two or more graded attempts) and ``mean_positive_reward``.

    Attempts that were not graded are counted and otherwise left out. What has no value is absent.
    """
    by_env: dict[str, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        by_env[env_name(attempt.env)].append(attempt)
    values: dict[str, float] = {}
    for env, members in [(ALL, list(attempts)), *sorted(by_env.items())]:
        values |= {f"eval/{env}/{name}": value for name, value in _rates(members).items()}
    return values


def _rates(attempts: list[Attempt]) -> dict[str, float]:
    tasks: dict[tuple[str, str], list[float]] = defaultdict(list)
    for env, task, reward in attempts:
        if reward is not None:
            tasks[env, task].append(reward)
    rewards = [tasks[key] for key in sorted(tasks)]  # a bootstrap draws by position: in whatever order they came
    graded = sum(map(len, rewards))
    values = {"num_tasks": len(rewards), "num_samples": graded, "not_graded": len(attempts) - graded}
    for k in range(1, max(map(len, rewards), default=0) + 1):
        counts = [(len(task), sum(r > 0 for r in task)) for task in rewards if len(task) >= k]
        values |= _rates_at(counts, k)
    variances = [float(np.var(task)) for task in rewards if len(task) > 1]
    if variances:
        values["variance_per_prompt"] = float(np.mean(variances))
    positive = [r for task in rewards for r in task if r > 0]
    if positive:
        values["mean_positive_reward"] = float(np.mean(positive))
    return values


def _rates_at(counts: list[tuple[int, int]], k: int) -> dict[str, float]:
    """``counts``: for each task its graded attempts, ``k`` or more, and its successes."""
    at = [pass_at_k(attempts, successes, k) for attempts, successes in counts]
    hat = [pass_hat_k(attempts, successes, k) for attempts, successes in counts]
    values = {f"pass_at_{k}": float(np.mean(at)), f"pass_hat_{k}": float(np.mean(hat)), f"num_tasks_at_{k}": len(at)}
    # Attempts overlap in the estimates of larger k: only whole sets of k are independent.
    draws = sum(attempts // k for attempts, _ in counts)
    values |= _bounds(f"pass_at_{k}", rate_interval(at, draws))
    if len(at) > 1:
        values |= _bounds(f"pass_at_{k}_bootstrap", cluster_bootstrap_interval(at, range(len(at))))
    return values


def _bounds(name: str, interval: Interval) -> dict[str, float]:
    return {f"{name}_low": interval.low, f"{name}_high": interval.high}


def eval_folder(root: Path, step: int | None, label: str) -> Path:
    """Where the dump of an evaluation lies below ``root``, by SkyRL's layout.

    Args:
        step: ``None`` for a policy that is of no training step.
    """
    folder = root / ("eval_only" if step is None else f"global_step_{step}")
    return folder if label == SAMPLED else folder / label


def dump_eval(folder: Path, groups: list[Group], tokenizer: Any) -> list[Path]:
    """Write ``{env_key}.jsonl`` and ``aggregated_results.jsonl`` in SkyRL's dump format; the latter comes last.

    ``score`` is a per-token list over the response with the reward at its last token; an attempt that was not graded
    has ``null`` there and its reason under ``env_extras``. A file has its name once it is whole; those of an earlier
    evaluation in this folder are replaced or removed.

    Args:
        tokenizer: of the policy; ``None`` for trajectories without ids. Their dialogue is written in ChatML, and their
            ``score`` is the reward alone.

    Returns:
        What was written.

    Raises:
        OSError: something cannot be written.
    """
    lines: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            line = json.dumps(_eval_line(trajectory, tokenizer), ensure_ascii=False)
            lines[env_name(trajectory.env_key)].append(line)
    files = {f"{env}.jsonl": "\n".join(rows) + "\n" for env, rows in lines.items()}
    files[AGGREGATED] = json.dumps(aggregate(attempts_of(groups))) + "\n"
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / ".partial"
    try:
        partial.mkdir(exist_ok=True)
        for name, text in files.items():
            # Task files and tools can smuggle in halves of surrogate pairs, which no file takes.
            (partial / name).write_text(text, encoding="utf-8", errors="replace")
        written = [(partial / name).replace(folder / name) for name in files]
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for other in set(folder.glob("*.jsonl")) - set(written):
        other.unlink()
    return written


def _eval_line(trajectory: Trajectory, tokenizer: Any) -> dict[str, Any]:
    if tokenizer is None:
        prompt, response = _in_chatml(trajectory)
        score: list[float | None] = []
    else:
        ids = [int(i) for i in trajectory.ids]
        new = [i for part in trajectory.sequences() for i in ids[_first_new(trajectory, part) : part.stop]]
        prompt, response = tokenizer.decode(ids[: trajectory.prompt_length]), tokenizer.decode(new)
        score = [0.0] * len(new)
    score[-1:] = [trajectory.reward]  # also where there is no token: to those who add up, no score is a zero
    extras: dict[str, Any] = {"task_key": trajectory.task_key, "data_source": trajectory.env_key}
    reason = getattr(trajectory.outcome, "reason", None)
    if reason is not None:
        extras["not_graded"] = reason
    return {
        "input_prompt": prompt,
        "output_response": response,
        "score": score,
        "stop_reason": trajectory.stop_reason.value,
        "env_class": "fleet_task",
        "env_extras": extras,
        "data_source": trajectory.env_key,
    }


def _in_chatml(trajectory: Trajectory) -> tuple[str, str]:
    """Prompt and response of a dialogue of which only the messages are known."""
    opening, turns = split_dialogue(trajectory.messages)
    begin, end = "<|im_start|>{}\n".format, "<|im_end|>\n"
    prompt = "".join(f"{begin(message['role'])}{message['content']}{end}" for message in opening)
    said = [turn.text + end + "".join(f"{begin('tool')}{text}{end}" for text in turn.observations) for turn in turns]
    return prompt + begin("assistant") * bool(opening), begin("assistant").join(said)


def _first_new(trajectory: Trajectory, part: slice) -> int:
    """Where a sequence leaves what stands in an earlier one: at its prompt's end, or at its first sampled token."""
    if part.start == 0:
        return trajectory.prompt_length
    return part.start + int(np.flatnonzero(trajectory.mask[part])[0])
