"""A run waits for room in a cluster that it joins, and says what is lacking."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from train.config import load_config
from train.demand import Demand
from train.failures import Unmendable
from train.run_ray import wait_for_room

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


def demand(replicas: int, gpus: float) -> Demand:
    """Of the demo on GPUs."""
    keys = {"policy.num_replicas": replicas, "policy.num_gpus": gpus}
    return Demand.of(load_config(DEMO, [word for key, value in keys.items() for word in (f"--{key}", str(value))]))


def waited(asked: Demand, timeout_s: float = 30.0) -> list[str]:
    phases: list[str] = []
    wait_for_room(asked, timeout_s, lambda status: phases.append(status["phase"]))
    return phases


def test_a_run_that_fits_is_not_held_up_and_gets_all_it_waited_for(cluster):
    assert waited(demand(4, 0.5)) == []
    holders = [ray.remote(num_gpus=0.5)(Holder).remote() for _ in range(4)]
    assert ray.get([holder.held.remote() for holder in holders], timeout=60) == ["held"] * 4
    for holder in holders:
        ray.kill(holder)


class Holder:
    def held(self) -> str:
        return "held"


def test_what_others_use_is_waited_for(cluster):
    holder = ray.remote(num_gpus=2)(Holder).remote()
    try:
        assert ray.get(holder.held.remote(), timeout=60) == "held"
        lack = "it needs 1 GPUs of 2 and 1.5 CPUs of 8, which others use, or"
        with pytest.raises(Unmendable, match=f"^no room in the Ray cluster within cluster_timeout 2 s: {lack}"):
            waited(demand(1, 1), timeout_s=2)
        threading.Timer(2.5, ray.kill, [holder]).start()
        assert lack in waited(demand(1, 1))[0]
    finally:
        ray.kill(holder)


def test_fractions_that_fit_no_single_gpu_are_not_taken_for_room(cluster):
    with pytest.raises(Unmendable, match="1.8 GPUs of 2 .* or no node .of a fraction: no GPU. has room"):
        waited(demand(3, 0.6), timeout_s=2)


def test_a_node_that_joins_later_is_waited_for(cluster):
    ended: list[list[str]] = []
    waiting = threading.Thread(target=lambda: ended.append(waited(demand(1, 3), timeout_s=60)))
    waiting.start()
    time.sleep(2)
    assert not ended
    node = cluster.add_node(num_cpus=1, num_gpus=3)
    waiting.join(60)
    cluster.remove_node(node)
    assert ended and ended[0][0].endswith("it needs 3 GPUs of 2 and 1.5 CPUs of 8")
