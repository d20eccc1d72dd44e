"""In the learner's place where nothing is trained: every batch is described and kept, and the next one may come."""

from __future__ import annotations

from typing import Any

import ray

from train.beside import Beside
from train.learner import CALL_TIMEOUT_S, LearnerError, LearnerSettings, Metrics, StepReport, one_line
from train.metrics import batch_metrics
from train.step_timer import StepTimer
from train.trajectory_store import TrajectoryStore
from train.trajectory_table import Origin


class BatchKeeper(Beside):
    """Used as :class:`train.learner.LearnerHandle` is. The policy keeps its version: nothing is ever stale.
    ``join`` raises :class:`train.learner.LearnerError` where a batch did not come.

    Args:
        buffer: actor handle of the replay buffer.
        store: gets every batch.
        on_step: called with the metrics of every batch.
    """

    def __init__(self, settings: LearnerSettings, buffer: Any, store: TrajectoryStore, on_step: StepReport) -> None:
        super().__init__("batch-keeper")
        self._settings, self._buffer, self._store, self._on_step = settings, buffer, store, on_step
        self._timer = StepTimer()

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the batch in progress. Does not raise where it failed: ``join`` does."""
        if self.done:
            return
        try:
            ray.get(self._buffer.drain.remote("the run is ending"), timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayError:
            # Without a buffer it ends by itself.
            pass
        self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            for step in range(1, self._settings.total_steps + 1):
                if (metrics := self._keep(step)) is None:
                    break
                self._on_step(metrics)
        except Exception as error:  # raised again by join, in the caller's thread
            self._error = LearnerError(one_line(error))

    def _keep(self, step: int) -> Metrics | None:
        """One batch. ``None``: no more will come."""
        timeout_s = self._settings.batch_timeout_s
        with self._timer("wait_for_batch"):
            batch = ray.get(self._buffer.get_batch.remote(step, timeout_s), timeout=timeout_s + CALL_TIMEOUT_S)
        if batch is None:
            return None
        groups = ray.get(batch["refs"], timeout=timeout_s)
        self._store.put(groups, Origin("train", step, batch["lineage"].newest))
        ray.get(self._buffer.ack.remote(step, None), timeout=CALL_TIMEOUT_S)
        return {
            **batch_metrics(groups, self._settings.samples_per_task, batch["lineage"]),
            **self._store.report().metrics(),
            **self._timer.end_step(),
            "trainer/global_step": float(step),
        }
