"""The last stage of a training step: new weights go to the WeightStore and from there to every replica."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import ray
import torch

from serve.policy import PolicyClient
from serve.weight_transfer import pack_weights


class WeightPublisher:
    """Called by learner rank 0 after the optimiser step.

    The snapshot travels through the object store, which is shared memory on one host; replicas pull it from there, and
    so does one that joins later.
    """

    def __init__(self, store: Any, policy: PolicyClient, timeout_s: float) -> None:
        self._store = store
        self._policy = policy
        self._timeout_s = timeout_s
        self.last: dict[str, float] = {}  # seconds by phase of the last publication

    def __call__(self, named_tensors: Iterable[tuple[str, torch.Tensor]], step: int) -> int:
        """Publish and wait until every replica confirms. Returns the new policy version.

        Raises:
            PolicyUpdateError: a replica did not take the weights in time; it does not answer with mixed weights.
        """
        begun = time.monotonic()
        ref = ray.put(pack_weights(dict(named_tensors)))
        version = ray.get(self._store.publish.remote([ref]), timeout=self._timeout_s)
        packed = time.monotonic()
        self._policy.update(version, self._timeout_s)
        self.last = {"sync/pack_s": packed - begun, "sync/update_s": time.monotonic() - packed}
        return version
