"""What a run says at its end: held-out pass rates before and after, a reward curve, and where everything lies."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from train.evaluate import EvalResult, PassRate
from train.resume import SUMMARY

CURVE_FILE = "reward_curve.png"
SMOOTHING_STEPS = 5

# Files and folders of a run that are worth naming, if they are there.
_CONTENTS = {
    CURVE_FILE: "reward curve",
    SUMMARY: "the last line of this output",
    "metrics.jsonl": "every metric of every step",
    "tensorboard": "tensorboard --logdir",
    "wandb": "wandb sync",
    "checkpoints": "checkpoints in Hugging Face format",
    "evals": "evaluation episodes in full",
    "trajectories": "fleet-rl trajectories show",
}

History = Sequence[Mapping[str, float]]
Point = tuple[int, float, float]  # step, pass@1, its standard error


def write_report(
    run_dir: Path,
    history: History,
    before: Sequence[EvalResult],
    after: Sequence[EvalResult],
    summary: Mapping[str, Any],
    console: Console | None = None,
) -> None:
    """Write ``reward_curve.png`` and ``summary.json``, print the table and, as the last line, the summary as JSON.

    Args:
        history: one mapping a log call with its ``step`` (see :class:`train.tracking.Tracker`).
        before, after: evaluations with labels ``sampled`` and ``greedy``; either may be empty.
        summary: the run's figures. Numbers that are not finite become null.
    """
    console = console or Console()
    summary = plain(summary)
    draw_curve(run_dir / CURVE_FILE, run_dir.name, history, before, after)
    (run_dir / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    if before or after:
        console.print(pass_table(before, after))
    else:
        console.print("no evaluation was asked for")
    for name, what in _CONTENTS.items():
        if (run_dir / name).exists():
            console.print(f"  {run_dir / name}  [dim]{what}[/dim]", highlight=False, soft_wrap=True)
    print(json.dumps(summary), flush=True)


def plain(value: Any) -> Any:
    """As JSON can hold it: numbers that are not finite become null."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return str(value) if isinstance(value, Path) else value


def pass_table(before: Sequence[EvalResult], after: Sequence[EvalResult]) -> Table:
    """Held-out pass@1 per environment, sampled and greedy one below the other. Fits 80 columns."""
    table = Table(title="Held-out pass@1 (± standard error over tasks)", title_justify="left")
    table.add_column("environment")
    table.add_column("tasks", justify="right")
    table.add_column("decoding")
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right")
    names = {env for result in (*before, *after) for env in result.per_env}
    labels = [label for label in ("sampled", "greedy") if _labelled((*before, *after), label) is not None]
    for env in (*sorted(names), "all"):
        table.add_section()
        for label in labels:
            first, last = (_rate(_labelled(results, label), env) for results in (before, after))
            tasks = max((rate.tasks for rate in (first, last) if rate is not None), default=0)
            row = (env, str(tasks), label, _rate_text(first), _rate_text(last), _change_text(first, last))
            table.add_row(*row, style="bold" if env == "all" else "")
    return table


def _labelled(results: Sequence[EvalResult], label: str) -> EvalResult | None:
    return next((result for result in results if result.label == label), None)


def _rate(result: EvalResult | None, env: str) -> PassRate | None:
    if result is None:
        return None
    return result.overall if env == "all" else result.per_env.get(env)


def _rate_text(rate: PassRate | None) -> str:
    if rate is None or not math.isfinite(rate.pass_at_1):
        return "–"
    error = f" ±{rate.stderr:.2f}" if math.isfinite(rate.stderr) else ""
    return f"{rate.pass_at_1:.3f}{error}"


def _change_text(first: PassRate | None, last: PassRate | None) -> str:
    if first is None or last is None or not math.isfinite(change := last.pass_at_1 - first.pass_at_1):
        return "–"
    colour = "green" if change > 0 else "red" if change < 0 else "dim"
    return f"[{colour}]{change:+.3f}[/{colour}]"


def draw_curve(
    path: Path, title: str, history: History, before: Sequence[EvalResult], after: Sequence[EvalResult]
) -> None:
    """The mean training reward of every step, and held-out pass@1 wherever it was evaluated."""
    # Not pyplot: it keeps global state and looks for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps, rewards = series(history, "reward/avg_raw_reward")
    if steps:
        axes.plot(
            steps, rewards, color="#9ecae1", linewidth=1, marker=".", markersize=4, label="training reward, a step"
        )
        if len(steps) > SMOOTHING_STEPS:
            mean = f"training reward, mean of {SMOOTHING_STEPS} steps"
            axes.plot(steps, moving_mean(rewards, SMOOTHING_STEPS), color="#08519c", linewidth=2, label=mean)
    sampled = eval_points(history, "", _labelled(before, "sampled"), _labelled(after, "sampled"))
    greedy = eval_points(history, "greedy_", _labelled(before, "greedy"), _labelled(after, "greedy"))
    _draw_evaluations(axes, "sampled", sampled, greedy, "#d94801", "o")
    _draw_evaluations(axes, "greedy", greedy, sampled, "#525252", "s")
    axes.set_xlabel("optimiser step")
    axes.set_ylabel("reward, pass@1")
    # Rewards need not lie between 0 and 1; pass rates do.
    axes.set_ylim(min(0.0, *rewards, 0.0) - 0.02, max(1.0, *rewards, 1.0) + 0.06)
    axes.margins(x=0.06)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="lower right", fontsize=8, frameon=False)
    figure.savefig(path)


def _draw_evaluations(
    axes: Any, label: str, points: list[Point], others: list[Point], colour: str, marker: str
) -> None:
    """Points with error bars and the first and last value beside them, on the side away from the ``others``."""
    if not points:
        return
    axes.errorbar(
        [step for step, _, _ in points],
        [value for _, value, _ in points],
        yerr=[error for _, _, error in points],
        color=colour,
        marker=marker,
        # Two points are a before and an after: a line between them would claim to know the way.
        linestyle="-" if len(points) > 2 else "none",
        linewidth=1.2,
        capsize=3,
        label=f"held-out pass@1, {label}",
        zorder=3,
    )
    other_at = {step: value for step, value, _ in others}
    for step, value, error in {points[0], points[-1]}:
        sign = 1 if value >= other_at.get(step, -math.inf) else -1
        axes.annotate(
            f"{value:.2f}",
            (step, value + sign * error),
            textcoords="offset points",
            xytext=(0, 5 * sign),
            ha="center",
            va="bottom" if sign > 0 else "top",
            fontsize=8,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.75, "pad": 0.5},
            zorder=4,
        )


def series(history: History, name: str) -> tuple[list[int], list[float]]:
    """Steps and finite values of one metric, in order of steps. Of a step logged twice, the last value counts."""
    values = {int(row["step"]): row[name] for row in history if name in row and math.isfinite(row[name])}
    steps = sorted(values)
    return steps, [values[step] for step in steps]


def eval_points(history: History, prefix: str, before: EvalResult | None, after: EvalResult | None) -> list[Point]:
    """Every evaluation of one kind, in order of steps."""
    steps, values = series(history, f"eval/all/{prefix}pass_at_1")
    errors = dict(zip(*series(history, f"eval/all/{prefix}pass_at_1_stderr"), strict=True))
    points = {step: (step, value, errors.get(step, 0.0)) for step, value in zip(steps, values, strict=True)}
    for result in (before, after):
        if result is not None and math.isfinite(rate := result.overall.pass_at_1):
            error = result.overall.stderr
            points[result.step] = (result.step, rate, error if math.isfinite(error) else 0.0)
    return [points[step] for step in sorted(points)]


def moving_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and up to ``width - 1`` before it."""
    return [sum(window) / len(window) for i in range(len(values)) if (window := values[max(0, i - width + 1) : i + 1])]
