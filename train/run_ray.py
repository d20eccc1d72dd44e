"""Ray as a run uses it: a cluster that is named, or one of its own that only this machine may reach."""

from __future__ import annotations

import logging
import math
import os
import time
from typing import Any

import ray

from serve.ray_start import start_ray
from train.cluster_room import Patience, Report, take_turn
from train.config import RunConfig
from train.demand import Demand
from train.failures import RunFailed, catch_signals

LOOPBACK = "127.0.0.1"
NAMES_TIMEOUT_S = 60.0
NAMES_POLL_S = 0.2


def start_run_ray(config: RunConfig, report: Report, run_until: float = math.inf) -> Any | None:
    """Join the cluster at ``RAY_ADDRESS`` once it has room for the run, or start one here in which its actors fit.

    Whatever becomes of it, ``ray.shutdown`` is the caller's.

    Args:
        run_until: when the run's time is over, on the clock of ``time.monotonic``.

    Returns:
        In a cluster, the :class:`train.cluster_room.StartTurn` that the caller ends once the run's parts are up.

    Raises:
        RunFailed: Ray did not start, or the cluster does not answer.
        Unmendable, OutOfTime: it had no room in time.
    """
    demand = Demand.of(config)
    own = not os.environ.get("RAY_ADDRESS")
    namespace = f"fleet-rl-{config.name}"
    settings: dict[str, Any] = {"namespace": namespace, "logging_level": "warning", "log_to_driver": False}
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    if own:
        settings |= {
            # Else a cluster that somebody started on this machine, or that died here, would be joined.
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, int(1 + demand.total("CPU")) + 1),
            "include_dashboard": False,
            # Only this machine may reach it; train/run.py says what follows from that.
            "_node_ip_address": LOOPBACK,
            "object_store_memory": config.object_store_bytes,
        }
    try:
        start_ray(**settings)
    except Exception as error:  # of any type, down to a bare Exception where its own processes are too slow
        raise RunFailed(f"Ray: {(str(error).splitlines() or [type(error).__name__])[0]}") from None
    catch_signals()
    # Those of this run's last life a cluster ends after their driver.
    wait_for_names()
    if own or not demand.bundles:
        return None
    patience = Patience(time.monotonic() + config.cluster_timeout, config.cluster_timeout, run_until)
    turn = take_turn(demand, patience, report)
    report({"phase": "starting"})
    return turn


def wait_for_names(*names: str) -> None:
    """Until the run has no actors of these names, or, if none is given, of any.

    Raises:
        RunFailed: they do not go.
    """
    deadline = time.monotonic() + NAMES_TIMEOUT_S
    while names_left := [name for name in ray.util.list_named_actors() if not names or name in names]:
        if time.monotonic() > deadline:
            raise RunFailed(f"Ray: a run of this name has actors in this cluster: {', '.join(sorted(names_left))}")
        time.sleep(NAMES_POLL_S)
