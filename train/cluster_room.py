"""Room for a run in a cluster that it shares: waiting until there is some, one run after the other."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from train.demand import Demand
from train.failures import OutOfTime, RunFailed, Unmendable

POLL_S = 1.0
TURN, NAMESPACE = "start-turn", "fleet-rl"
Report = Callable[[dict[str, Any]], None]


@ray.remote(num_cpus=0)
class StartTurn:
    """There is one in a cluster at most: of the run that has found room, while its parts are put there. It ends with
    its run at the latest."""

    def end(self, begun: list[ray.ObjectRef], timeout_s: float) -> None:
        """Once all of ``begun`` are there or have failed, or the time is up."""
        if begun:
            ray.wait(begun, num_returns=len(begun), timeout=timeout_s)
        # After `exit_actor`, whoever has looked its name up before finds it taken for ever; perhaps not any more with
        # https://github.com/ray-project/ray/issues/44083.
        ray.kill(ray.get_runtime_context().current_actor)


@dataclass(frozen=True)
class Patience:
    """How long a run waits for room, on the clock of ``time.monotonic``.

    Attributes:
        until: its ``cluster_timeout``, which is ``timeout_s``, is over then.
        run_until: all of its time is over then.
    """

    until: float
    timeout_s: float
    run_until: float

    def check(self, lacking: str) -> None:
        """Raises :class:`Unmendable` or :class:`OutOfTime` if one of the two has come."""
        now = time.monotonic()
        if now > self.run_until:
            raise OutOfTime(f"run_timeout passed while it waited {lacking}")
        if now > self.until:
            raise Unmendable(f"cluster_timeout {self.timeout_s:g} s passed while it waited {lacking}")


def take_turn(demand: Demand, patience: Patience, report: Report) -> Any:
    """Wait until all that the run asks for is free at once: nodes of a new cluster may still join, and other runs may
    use it, or be about to.

    It is reserved as a whole, of which an autoscaler hears, and given back to the parts that are started then. Other
    runs leave it to them until the turn ends. Ray places the parts one by one, though: where nodes or GPUs are just
    enough, they may end up so that the last one finds no place that the reservation had.

    Returns:
        The actor handle of the :class:`StartTurn`, which the caller ends.

    Raises:
        Unmendable, OutOfTime: see :class:`Patience`.
        RunFailed: the cluster fails.
    """
    try:
        while True:
            _wait(turn_is_free, lambda: "until another run has started", patience, report)
            reserved = placement_group([dict(bundle) for bundle in demand.bundles])
            try:
                _wait(lambda group=reserved: group.wait(POLL_S), lambda: _lack(demand), patience, report)
                turn = _take()
            finally:
                remove_placement_group(reserved)
            if turn is not None:
                return turn
    except ray.exceptions.RayError as error:
        raise RunFailed(f"Ray: {(str(error).splitlines() or [type(error).__name__])[0]}") from None


def _wait(there: Callable[[], bool], lacking: Callable[[], str], patience: Patience, report: Report) -> None:
    """``there`` takes its time to say no."""
    while not there():
        words = lacking()
        patience.check(words)
        report({"phase": f"waiting {words}"})


def turn_is_free() -> bool:
    """Whether no run is being started now. Takes a second to say no."""
    try:
        ray.get_actor(TURN, namespace=NAMESPACE)
    except ValueError:
        return True
    time.sleep(POLL_S)
    return False


def _take() -> Any | None:
    """None: another run was faster."""
    try:
        return StartTurn.options(name=TURN, namespace=NAMESPACE).remote()
    except ray.exceptions.ActorAlreadyExistsError:
        return None


def _lack(demand: Demand) -> str:
    """What the run needs, and what the cluster has. Not what is free there, of which Ray takes off what it tries to
    reserve."""
    has = ray.cluster_resources()
    needs = {"GPU": demand.gpus, "CPU": demand.total("CPU")}
    words = [f"{needed:g} {name}s of {has.get(name, 0):g}" for name, needed in needs.items() if needed]
    enough = all(needed <= has.get(name, 0) for name, needed in needs.items())
    why = ", which others use, or no node (of a fraction: no GPU) has room for one of its parts" if enough else ""
    return f"for room in the Ray cluster: it needs {' and '.join(words)}{why}"
