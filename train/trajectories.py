"""Training batches on disk: one JSON line a trajectory, exact to the token, so that a batch can be read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from actors.trajectory import OUTCOME_NAMES, Group, Trajectory


def write_batch(path: Path, groups: list[Group]) -> None:
    """Write the trajectories of a batch, groups in the order they were started, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(as_line(t), ensure_ascii=False) for group in groups for t in group.trajectories]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


def as_line(trajectory: Trajectory) -> dict[str, Any]:
    """A trajectory as JSON: ids, mask and logprobs per token, ``spans`` as ``[version, start, end]``."""
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_key": trajectory.task_key,
        "env_key": trajectory.env_key,
        "group_id": trajectory.group_id,
        "ids": trajectory.ids.tolist(),
        "mask": trajectory.mask.tolist(),
        # The shortest decimal of each 32-bit number; reading it back gives the same number.
        "logprobs": [float(str(value)) for value in trajectory.logprobs],
        "prompt_length": trajectory.prompt_length,
        "starts": trajectory.starts,
        "spans": [[span.version, span.start, span.end] for span in trajectory.spans],
        "stop_reason": trajectory.stop_reason.value,
        "outcome": OUTCOME_NAMES[type(trajectory.outcome)],
        "reward": trajectory.reward,
        "reason": getattr(trajectory.outcome, "reason", None),
        "turns": trajectory.turns,
        "tool_calls": trajectory.tool_calls,
        "tool_errors": trajectory.tool_errors,
        "duration_s": round(trajectory.duration_s, 3),
        "phase_s": {phase: round(seconds, 3) for phase, seconds in trajectory.phase_s.items()},
        "messages": trajectory.messages,
    }
