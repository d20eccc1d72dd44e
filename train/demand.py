"""What a run asks of the machines."""

from __future__ import annotations

import math
from dataclasses import dataclass

from train.config import RunConfig


@dataclass(frozen=True)
class Demand:
    """What the actors of a run take, all together. Its light actors take nothing.

    Attributes:
        bundles: of each replica, worker and rank, what one node must have for it: Ray's names, and logical units.
        gpu_words: where the GPUs go, in the configuration's keys.
    """

    bundles: tuple[dict[str, float], ...]
    gpu_words: str

    @classmethod
    def of(cls, config: RunConfig) -> Demand:
        policy, generator, learner = config.policy, config.generator, config.trainer.learner
        replicas = policy.num_replicas + policy.eval_replicas if config.debug.train_only is None else 0
        workers = generator.num_workers if config.debug.train_only is None else 0
        ranks = learner.num_workers if not config.debug.rollout_only else 0
        bundles = [
            *replicas * [{"CPU": policy.num_cpus, "GPU": policy.num_gpus}],
            *workers * [{"CPU": generator.worker_num_cpus}],
            *ranks * [{"CPU": learner.num_cpus, "GPU": learner.num_gpus if learner.use_gpu else 0.0}],
        ]
        words = (
            f"policy.num_replicas + eval_replicas {replicas} x num_gpus {policy.num_gpus:g}, "
            f"trainer.learner.num_workers {learner.num_workers} x num_gpus {learner.num_gpus:g} where use_gpu is set"
        )
        some = ({name: amount for name, amount in bundle.items() if amount} for bundle in bundles)
        return cls(tuple(bundle for bundle in some if bundle), words)

    def total(self, resource: str) -> float:
        """Rounded as Ray counts, in ten-thousandths: fractions that fill a GPU to the last are not more than it."""
        return round(sum(bundle.get(resource, 0.0) for bundle in self.bundles), 4)

    @property
    def gpus(self) -> float:
        """How many there must be at least: two parts that take more than half of one do not share it."""
        parts = [bundle.get("GPU", 0.0) for bundle in self.bundles]
        return max(self.total("GPU"), sum(math.ceil(part) for part in parts if part > 0.5))
