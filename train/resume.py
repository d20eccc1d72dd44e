"""Where an interrupted run goes on: its last complete checkpoint, and what of its folder belongs to later steps."""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

from actors.task import Task
from actors.trajectory import Group
from train import buffer_state, checkpoint
from train.config import RunConfig
from train.data.sampler import TaskSampler
from train.failures import ResumeError

CHECKPOINTS = "checkpoints"
POLICY = "resumed_policy"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
STEP = "trainer/global_step"
TRAIN_ONLY = "train_only"  # in a buffer's state: there was no buffer
# Written at the end of a run, or by parts that begin anew.
_OUTDATED = ("ray_train", SUMMARY, "reward_curve.png", POLICY)


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


def prepare(config: RunConfig, train_tasks: list[Task]) -> ResumePoint:
    """Take a run's folder back to its last complete checkpoint. There must be one.

    Raises:
        ResumeError: the checkpoint is of another version or configuration; the folder is as it was.
    """
    run_dir = config.run_dir
    found = checkpoint.latest_complete(run_dir / CHECKPOINTS)
    assert found is not None
    try:
        state, groups = buffer_state.read(found)
        checkpointed = json.loads((found / checkpoint.STEPS).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ResumeError(
            f"{found} holds no {Path(error.filename).name}, so no run can go on from it; to begin with its weights, "
            f"set trainer.policy.model.path to {found / checkpoint.POLICY}"
        ) from None
    _check_same(config, train_tasks, found, state)
    for name in _OUTDATED:
        _remove(run_dir / name)
    step = checkpoint.step_of(found)
    _take_back_metrics(run_dir / METRICS, step, checkpointed)
    policy = run_dir / POLICY
    # The same bytes under a second name: pruning the checkpoint does not take them away.
    shutil.copytree(found / checkpoint.POLICY, policy, copy_function=_link)
    return ResumePoint(step, found.absolute(), policy.absolute(), state, groups)


def _check_same(config: RunConfig, train_tasks: list[Task], found: Path, state: dict[str, Any]) -> None:
    """What a checkpoint's state is tied to is as it was."""
    learner = config.trainer.learner
    here = {"ranks": learner.num_workers, "zero_stage": learner.zero_stage, "dtype": config.trainer.policy.dtype}
    there = {name: value for name, value in checkpoint.read_manifest(found).items() if name in here}
    if here != there:
        raise ResumeError(f"{found} was written with {there}; the configuration has {here}: they must be the same")
    if state.get(TRAIN_ONLY, False) != (config.debug.train_only is not None):
        raise ResumeError(
            f"{found} was written {'with' if TRAIN_ONLY in state else 'without'} debug.train_only: go on as it was "
            f"begun, or set trainer.policy.model.path to {found / checkpoint.POLICY} to begin with its weights"
        )
    if state["sampler"] is not None:
        try:
            task_sampler(config, train_tasks).load_state_dict(state["sampler"])
        except ValueError as error:
            raise ResumeError(f"{found}: {error}; the run cannot be resumed with them") from None


def task_sampler(config: RunConfig, train_tasks: list[Task]) -> TaskSampler:
    """The order in which the run uses its tasks.

    Raises:
        ValueError: ``data.mix`` cannot be had of these tasks.
    """
    return TaskSampler(train_tasks, config.seed, config.data.mix, config.trainer.train_batch_size)


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
    """Leave the lines up to ``step``, and add those that were not written in time. The last one may be half written.

    An evaluation at ``step`` itself is done again.
    """
    kept: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            row = json.loads(line)
            kept += [row] if row["step"] < step or (row["step"] == step and STEP in row) else []
        except (ValueError, KeyError, TypeError):
            continue
    written = {row["step"] for row in kept if STEP in row}
    missing = [row for row in checkpointed if row[STEP] not in written]
    finite = [{k: v if math.isfinite(v) else None for k, v in row.items()} for row in missing]
    kept += [{"step": int(row[STEP]), "time": time.time(), **row} for row in finite]
    partial = path.with_suffix(".partial")
    partial.write_text(
        "".join(json.dumps(row) + "\n" for row in sorted(kept, key=itemgetter("step"))), encoding="utf-8"
    )
    os.replace(partial, path)
