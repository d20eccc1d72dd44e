"""Ray as a run uses it: a cluster that is named, or one of its own that only this machine may reach."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from serve.ray_start import start_ray
from train.config import RunConfig
from train.demand import Demand
from train.failures import RunFailed, Unmendable, catch_signals

LOOPBACK = "127.0.0.1"
NAMES_TIMEOUT_S = 60.0
NAMES_POLL_S = 0.2
ROOM_POLL_S = 1.0
Report = Callable[[dict[str, Any]], None]


def start_run_ray(config: RunConfig, report: Report) -> None:
    """Join the cluster at ``RAY_ADDRESS`` once it has room for the run, or start one here in which its actors fit.

    Raises:
        RunFailed: Ray did not start, or the cluster does not answer.
        Unmendable: there is no room within ``cluster_timeout``.
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
    if not own:
        wait_for_room(demand, config.cluster_timeout, report)


def wait_for_room(demand: Demand, timeout_s: float, report: Report) -> None:
    """Until all that the run asks for is free at once: nodes of a new cluster may still join, and others may use it.

    It is reserved as a whole, and given back to the actors that are started then. Only so does an autoscaler hear of
    it, and is it known that every actor finds a node, and every fraction a GPU.

    Raises:
        Unmendable: there is no room within ``timeout_s``.
    """
    if not demand.bundles:
        return
    deadline = time.monotonic() + timeout_s
    reserved = placement_group([dict(bundle) for bundle in demand.bundles])
    try:
        while not reserved.wait(ROOM_POLL_S):
            lack = _lack(demand)
            if time.monotonic() > deadline:
                raise Unmendable(f"no room in the Ray cluster within cluster_timeout {timeout_s:g} s: {lack}")
            report({"phase": f"waiting for room in the Ray cluster: {lack}"})
    finally:
        remove_placement_group(reserved)


def _lack(demand: Demand) -> str:
    """What the run needs, and what the cluster has. Not what is free there, of which Ray takes off what it tries to
    reserve."""
    has = ray.cluster_resources()
    needs = {name: needed for name in ("GPU", "CPU") if (needed := demand.total(name))}
    words = [f"{needed:g} {name}s of {has.get(name, 0):g}" for name, needed in needs.items()]
    enough = all(needed <= has.get(name, 0) for name, needed in needs.items())
    why = ", which others use, or no node (of a fraction: no GPU) has room for one of its parts" if enough else ""
    return f"it needs {' and '.join(words)}{why}"


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
