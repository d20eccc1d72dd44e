"""What a learner has around it where it trains alone: batches from files, and nobody who waits for its weights."""

from __future__ import annotations

from typing import Any

import ray

from actors.replay_buffer_core import GroupHeader
from train.kept_batches import KeptBatches
from train.learner import Batch, Metrics, NamedWeights
from train.resume import TRAIN_ONLY


@ray.remote(num_cpus=0)
class KeptBatchSource:
    """A :class:`train.learner.BatchSource` in the place of the replay buffer; reads a batch when it is asked for.

    A learner that goes on from a checkpoint goes on with the batch after it: batches are called by their number.
    """

    def __init__(self, batches: KeptBatches) -> None:
        self._batches = batches
        self._reports: list[Metrics] = []

    def get_batch(self, step: int, timeout_s: float) -> Batch:
        """Batch number ``step``."""
        groups, lineage = self._batches.read(step)
        return {
            "refs": [ray.put(group) for group in groups],
            "headers": [GroupHeader.of(group, False) for group in groups],
            "lineage": lineage,
        }

    def ack(self, step: int, version: int) -> None:
        """Nothing waits for it."""

    def state(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """For a checkpoint: nothing is buffered, and no task was drawn."""
        return {"sampler": None, TRAIN_ONLY: True}, {}

    def report_step(self, metrics: Metrics) -> None:
        """The learner's account of one step, for whoever follows it."""
        self._reports.append(metrics)

    def steps_since(self, count: int) -> list[Metrics]:
        """The accounts of all steps after the first ``count``."""
        return self._reports[count:]


class NoPublisher:
    """In the place of the publisher where no policy waits for weights: counts versions."""

    def __init__(self) -> None:
        self.last: dict[str, float] = {}

    def __call__(self, weights: NamedWeights, step: int) -> int:
        return step

    def assist(self, weights: NamedWeights) -> None:
        pass

    def close(self) -> None:
        pass
