"""Ray Train's TorchTrainer without the helpers that cost a learner seconds and serve nothing here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import ray
from ray.train import Result
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.constants import get_env_vars_to_propagate
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy


class PrivateScaling(FixedScalingPolicy):
    """For a Ray without an autoscaler: nobody is asked for machines, and no actor is started that would be asked."""

    def after_controller_start(self, train_run_context: Any) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


class LeanTorchTrainer(TorchTrainer):
    """Starts fewer actors than its base class, and tells ``on_controller`` of the one whose death ends all others.

    ``fit`` blocks until training has ended, and Ray Train ends it early only from the main thread, by SIGINT.

    The manager of Ray Data sets is of no use: batches come from the replay buffer. The cleaner of placement groups
    watches the controller through the dashboard. A Ray that the run starts for itself has none, so that the cleaner
    waits for an answer until its deadline and each end of a learner takes over 10 s; and such a Ray ends with the run.
    Can go once the cleaner asks the GCS instead: https://github.com/ray-project/ray/issues/65443.
    """

    def __init__(self, *arguments: Any, on_controller: Callable[[Any], None], **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._on_controller = on_controller

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        if _ray_is_private():
            arguments["scaling_policy"] = PrivateScaling(self.scaling_config)
        driver = ray.get_runtime_context().get_node_id()
        options = {
            "num_cpus": 0,
            "label_selector": {ray._raylet.RAY_NODE_ID_KEY: driver},
            "runtime_env": {"env_vars": {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"} | get_env_vars_to_propagate()},
        }
        controller = ray.remote(**options)(TrainController).remote(**arguments)
        self._on_controller(controller)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())

    def _create_default_callbacks(self) -> list[Any]:
        unneeded: tuple[type, ...] = (DatasetsCallback,)
        if _ray_is_private():
            unneeded += (PlacementGroupCleanerCallback,)
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, unneeded)]


def _ray_is_private() -> bool:
    """Whether the run has started it for itself."""
    return not os.environ.get("RAY_ADDRESS")
