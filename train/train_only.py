"""The learner alone, on batches that a run has kept: metrics and checkpoints as always, nothing else of a run."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import ray

from train.actor_calls import CALL_TIMEOUT_S, answer
from train.config import RunConfig
from train.failures import OutOfTime
from train.kept_batch_source import KeptBatchSource, NoPublisher
from train.kept_batches import KeptBatches
from train.learner import LearnerError, LearnerHandle, Metrics
from train.memory import PeakMemory
from train.progress import ProgressDisplay
from train.report import write_report
from train.restarts import Restarts
from train.resume import STEP, ResumePoint
from train.run_ray import start_run_ray
from train.system import StepReporter, learner_settings
from train.tracking import Tracker

POLL_S = 0.5


def train_only(
    config: RunConfig, batches: KeptBatches, started: float, resume: ResumePoint | None, restarts: Restarts
) -> int:
    """Train on each batch once, or on the first ``trainer.max_steps``, and write the report of a run. ``restarts`` is
    told how far that gets.

    Raises:
        RunFailed: the learner could not go on; everything that was started is ended.
    """
    steps = min(len(batches), config.trainer.max_steps or len(batches))
    deadline = started + config.run_timeout
    with ProgressDisplay(config.name, steps) as progress, Tracker(config) as tracker, PeakMemory() as memory:
        progress.update({"phase": "starting", "step": resume.step if resume else 0})
        with ExitStack() as cleanup:
            cleanup.callback(ray.shutdown)
            turn = start_run_ray(config, progress.update, deadline)
            source = KeptBatchSource.remote(batches)
            settings = learner_settings(config, config.trainer.policy.model.path, steps)
            if resume is not None:
                settings = replace(settings, resume_from=str(resume.checkpoint))
            handle = LearnerHandle(settings, source, NoPublisher(), StepReporter(source))
            handle.start()
            cleanup.callback(handle.stop)
            if turn is not None:
                turn.end.remote([handle.begun], config.trainer.learner.start_timeout)
            seen = 0
            while not _ended(handle):
                if time.monotonic() > deadline:
                    raise OutOfTime("run_timeout passed")
                if new := _record(source, seen, tracker, progress):
                    seen += new
                    restarts.reached(seen + (resume.step if resume else 0))
                time.sleep(POLL_S)
            _record(source, seen, tracker, progress)
    facts: dict[str, Any] = {
        "steps": steps,
        "resumed_from_step": resume.step if resume else None,
        "peak_rss_gb": round(memory.peak_gb, 2),
        "wall_s": round(time.monotonic() - started, 1),
    }
    write_report(config.run_dir, tracker.history, [], [], facts)
    return 0


def _ended(learner: LearnerHandle) -> bool:
    try:
        return learner.done and learner.join(0)
    except LearnerError as error:
        raise error.of_run() from None


def _record(source: Any, seen: int, tracker: Tracker, progress: ProgressDisplay) -> int:
    """How many steps have ended since the first ``seen``."""
    steps: list[Metrics] = answer(source.steps_since.remote(seen), CALL_TIMEOUT_S, "kept batches")
    for metrics in steps:
        tracker.log(metrics)
        facts = {"reward": metrics["reward/avg_raw_reward"], "staleness": metrics.get("staleness/mean")}
        progress.update({"phase": "training", "step": int(metrics[STEP])} | facts)
    return len(steps)
