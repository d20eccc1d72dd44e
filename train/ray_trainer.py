"""Ray Train's TorchTrainer without the helpers that cost a learner seconds and serve nothing here."""

from __future__ import annotations

import os
from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback


class LeanTorchTrainer(TorchTrainer):
    """Starts two actors less than its base class.

    The manager of Ray Data sets is of no use: batches come from the replay buffer. The cleaner of placement groups
    watches the controller through the dashboard. A Ray that the run starts for itself has none, so that the cleaner
    waits for an answer until its deadline and each end of a learner takes over 10 s; and such a Ray ends with the run.
    Can go once the cleaner asks the GCS instead: https://github.com/ray-project/ray/issues/65443.
    """

    def _create_default_callbacks(self) -> list[Any]:
        unneeded: tuple[type, ...] = (DatasetsCallback,)
        if not os.environ.get("RAY_ADDRESS"):
            unneeded += (PlacementGroupCleanerCallback,)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unneeded)]
