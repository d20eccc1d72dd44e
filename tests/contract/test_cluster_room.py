"""A run waits for room in a cluster that it joins, one after the other, and says what is lacking."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from train.cluster_room import Patience, take_turn, turn_is_free
from train.config import load_config
from train.demand import Demand
from train.failures import OutOfTime, Unmendable

DEMO = Path("configs/demo.yaml")


@pytest.fixture(scope="module")
def cluster():
    """A head with four logical CPUs, and a node with two logical GPUs; nobody looks whether there are any."""
    cluster = Cluster(initialize_head=True, connect=False, head_node_args={"num_cpus": 4, "num_gpus": 0})
    cluster.add_node(num_cpus=4, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="warning")
    yield cluster
    ray.shutdown()
    cluster.shutdown()


class Waiting:
    """A run that waits in a thread of its own."""

    def __init__(self, replicas: int, gpus: float, on_phase: Callable[[str], None] = lambda phase: None) -> None:
        self.phases: list[str] = []
        self.turn = None
        self._demand, self._on_phase = demand(replicas, gpus), on_phase
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self.turn = take(self._demand, 60, self._report)

    def _report(self, status: dict[str, str]) -> None:
        self.phases.append(status["phase"])
        self._on_phase(status["phase"])

    def join(self) -> None:
        self._thread.join(90)
        assert self.turn is not None, self.phases


class Holder:
    def held(self) -> str:
        return "held"


def demand(replicas: int, gpus: float) -> Demand:
    """Of the demo on GPUs, whose learner and worker take half a CPU each, and so does each replica."""
    keys = {"policy.num_replicas": replicas, "policy.num_gpus": gpus}
    return Demand.of(load_config(DEMO, [word for key, value in keys.items() for word in (f"--{key}", str(value))]))


def take(asked: Demand, timeout_s: float, report=lambda status: None, run_for_s: float = math.inf):
    now = time.monotonic()
    return take_turn(asked, Patience(now + timeout_s, timeout_s, now + run_for_s), report)


def end(turn) -> None:
    """And see that its name is free, also here, where it has been looked up."""
    turn.end.remote([], 30.0)
    until(turn_is_free)


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_run_gets_all_that_it_has_waited_for(cluster):
    turn = take(demand(4, 0.5), 60)
    holders = [ray.remote(num_gpus=0.5)(Holder).remote() for _ in range(4)]
    assert ray.get([holder.held.remote() for holder in holders], timeout=60) == ["held"] * 4
    for holder in holders:
        ray.kill(holder)
    end(turn)


def test_what_others_use_is_waited_for(cluster):
    holder = ray.remote(num_gpus=2)(Holder).remote()
    try:
        assert ray.get(holder.held.remote(), timeout=60) == "held"
        lack = "for room in the Ray cluster: it needs 1 GPUs of 2 and 1.5 CPUs of 8, which others use, or"
        with pytest.raises(Unmendable, match=f"^cluster_timeout 1 s passed while it waited {lack}"):
            take(demand(1, 1), 1)
        with pytest.raises(OutOfTime, match=f"^run_timeout passed while it waited {lack}"):
            take(demand(1, 1), 60, run_for_s=1)
        run = Waiting(1, 1, on_phase=lambda phase: ray.kill(holder))
        run.join()
        assert run.phases[0].startswith(f"waiting {lack}")
        end(run.turn)
    finally:
        ray.kill(holder)


def test_fractions_that_fit_no_single_gpu_are_not_taken_for_room(cluster):
    with pytest.raises(Unmendable, match="it needs 3 GPUs of 2 and"):
        take(demand(3, 0.6), 1)
    with pytest.raises(Unmendable, match="it needs 2 GPUs of 2 .* or no node .of a fraction: no GPU. has room"):
        take(demand(5, 0.4), 1)


def test_of_two_runs_that_wait_for_a_node_one_starts_after_the_other(cluster):
    runs = [Waiting(1, 3), Waiting(1, 3)]
    until(lambda: all(run.phases for run in runs))
    assert "it needs 3 GPUs of 2" in runs[0].phases[-1] and "it needs 3 GPUs of 2" in runs[1].phases[-1]
    node = cluster.add_node(num_cpus=1, num_gpus=3)
    try:
        until(lambda: any(run.turn for run in runs))
        first, second = runs if runs[0].turn else runs[::-1]
        until(lambda: "another run" in second.phases[-1])
        assert second.turn is None
        first.turn.end.remote([], 30.0)
        second.join()
        end(second.turn)
    finally:
        cluster.remove_node(node)


def test_a_turn_lasts_until_what_was_begun_is_there_or_too_late(cluster):
    holder = Begun.remote()
    turn = take(demand(1, 1), 60)
    turn.end.remote([holder.begun.remote()], 30.0)
    assert not any(turn_is_free() for _ in range(3))
    ray.kill(holder)
    until(turn_is_free)
    turn = take(demand(1, 1), 60)
    turn.end.remote([Begun.remote().begun.remote()], 0.5)
    until(turn_is_free)


@ray.remote(num_cpus=0)
class Begun:
    """A part that never comes up."""

    async def begun(self) -> None:
        await asyncio.Event().wait()


def test_a_run_that_waits_can_be_stopped(cluster, tmp_path):
    command = [sys.executable, "-m", "train.run", str(DEMO), "--output_dir", str(tmp_path), "--policy.num_gpus", "9"]
    run = subprocess.Popen(
        [*command, "--tracking.wandb", "false"],
        env=os.environ | {"RAY_ADDRESS": cluster.address},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        line = next(line for line in run.stdout if "waiting" in line)
        assert "waiting for room in the Ray cluster: it needs 9 GPUs of" in line
        run.send_signal(signal.SIGINT)
        _, said = run.communicate(timeout=60)
    finally:
        run.kill()
    assert (run.returncode, said.splitlines()[-1]) == (130, "fleet-rl: stopped")
    until(lambda: {group["state"] for group in placement_group_table().values()} == {"REMOVED"})
