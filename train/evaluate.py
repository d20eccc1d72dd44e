"""Evaluation: pass rates of groups of attempts, with their uncertainty, and the dumps that others' tools read."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from actors.trajectory import Graded, Group, Trajectory


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
    """One evaluation of one policy version."""

    label: str  # "sampled" or "greedy"
    step: int
    version: int
    overall: PassRate
    per_env: dict[str, PassRate]
    metrics: dict[str, float] = field(default_factory=dict)  # beyond the pass rates, under their final names


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
    return EvalResult(label, step, version, pass_rate(groups), per_env)


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


def dump_eval(directory: Path, result: EvalResult, groups: list[Group], prompter: Any) -> None:
    """Write ``{env_key}.jsonl`` and ``aggregated_results.jsonl`` in SkyRL's dump format.

    ``score`` is a per-token list over the response with the reward at its last token; an attempt that was not graded
    has ``null`` there and its reason under ``env_extras``.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lines: dict[str, list[str]] = defaultdict(list)
    for group in groups:
        for trajectory in group.trajectories:
            line = json.dumps(_eval_line(trajectory, prompter), ensure_ascii=False)
            lines[trajectory.env_key.replace("/", "_")].append(line)
    for env_key, rows in lines.items():
        (directory / f"{env_key}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    aggregated = {f"eval/{env}/pass_at_1": rate.pass_at_1 for env, rate in result.per_env.items()}
    aggregated["eval/all/pass_at_1"] = result.overall.pass_at_1
    (directory / "aggregated_results.jsonl").write_text(json.dumps(aggregated) + "\n", encoding="utf-8")


def _eval_line(trajectory: Trajectory, prompter: Any) -> dict[str, Any]:
    ids = [int(i) for i in trajectory.ids]
    response = [i for part in trajectory.sequences() for i in ids[_first_new(trajectory, part) : part.stop]]
    score = [0.0] * len(response)
    if score:
        score[-1] = trajectory.reward
    extras: dict[str, Any] = {"task_key": trajectory.task_key, "data_source": trajectory.env_key}
    reason = getattr(trajectory.outcome, "reason", None)
    if reason is not None:
        extras["not_graded"] = reason
    return {
        "input_prompt": prompter.tokenizer.decode(ids[: trajectory.prompt_length]),
        "output_response": prompter.tokenizer.decode(response),
        "score": score,
        "stop_reason": trajectory.stop_reason.value,
        "env_class": "fleet_task",
        "env_extras": extras,
        "data_source": trajectory.env_key,
    }


def _first_new(trajectory: Trajectory, part: slice) -> int:
    """Where a sequence leaves what stands in an earlier one: at its prompt's end, or at its first sampled token."""
    if part.start == 0:
        return trajectory.prompt_length
    return part.start + int(np.flatnonzero(trajectory.mask[part])[0])
