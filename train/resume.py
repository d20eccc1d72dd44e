"""Where an interrupted run goes on: its last complete checkpoint, and what of its folder belongs to later steps."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from actors.trajectory import Group
from train import buffer_state, checkpoint

CHECKPOINTS = "checkpoints"
POLICY = "resumed_policy"
METRICS = "metrics.jsonl"
STEP = "trainer/global_step"
# Written at the end of a run, or by parts that begin anew.
_OUTDATED = ("ray_train", "summary.json", "reward_curve.png", POLICY)


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to go on from.

    Attributes:
        policy: model folder with its weights, for replicas to start from, whatever becomes of the checkpoint.
        buffer: see :meth:`actors.replay_buffer_core.ReplayBufferCore.state`.
        groups: the buffered ones, by ticket.
    """

    step: int
    checkpoint: Path
    policy: Path
    buffer: dict[str, Any]
    groups: dict[int, Group]


def can_resume(run_dir: Path) -> bool:
    """Whether there is a complete checkpoint to go on from."""
    return checkpoint.latest_complete(run_dir / CHECKPOINTS) is not None


def prepare(run_dir: Path) -> ResumePoint:
    """Take a run's folder back to its last complete checkpoint. There must be one."""
    found = checkpoint.latest_complete(run_dir / CHECKPOINTS)
    assert found is not None
    step = checkpoint.step_of(found)
    for name in _OUTDATED:
        _remove(run_dir / name)
    checkpointed = json.loads((found / checkpoint.STEPS).read_text(encoding="utf-8"))
    _take_back_metrics(run_dir / METRICS, step, checkpointed)
    policy = run_dir / POLICY
    # The same bytes under a second name: pruning the checkpoint does not take them away.
    shutil.copytree(found / checkpoint.POLICY, policy, copy_function=_link)
    state, groups = buffer_state.read(found)
    return ResumePoint(step, found.absolute(), policy.absolute(), state, groups)


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _take_back_metrics(path: Path, step: int, checkpointed: list[dict[str, Any]]) -> None:
    """Leave the lines up to ``step``, and add those that were not written in time. The last one may be half written."""
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            kept += [row] if row["step"] <= step else []
        except (ValueError, KeyError, TypeError):
            continue
    written = {row["step"] for row in kept if STEP in row}
    missing = [row for row in checkpointed if row[STEP] not in written]
    kept += [{"step": int(row[STEP]), "time": time.time(), **row} for row in missing]
    partial = path.with_suffix(".partial")
    partial.write_text(
        "".join(json.dumps(row) + "\n" for row in sorted(kept, key=itemgetter("step"))), encoding="utf-8"
    )
    os.replace(partial, path)
