"""Parts that die or hang, without the rest of a run: workers under the Conductor, and the weight store."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil
import pytest
import ray
import torch

from actors.conductor import Conductor, ConductorSettings
from actors.rollout_worker import GroupOrder, Peers
from actors.task import parse_task
from actors.trajectory import Group, InfraFailed
from actors.weight_store import ACTOR_NAME, PinnedWeights, SnapshotLost, WeightStore
from benchmarks.processes import children, command_line
from serve.policy import PolicyUpdateError
from serve.ray_start import start_ray
from serve.sampling import Sampling
from serve.weight_transfer import pack_weights
from train.data.sampler import TaskSampler
from train.publisher import WeightPublisher

TIMEOUT_S = 2.0
RESTART_TIMEOUT_S = 15.0
TASK = parse_task({"task_key": "t", "prompt": "p", "env_key": "tracker"}, "test")


@ray.remote(num_cpus=0, max_restarts=5)
class Worker:
    """What the Conductor needs of a RolloutWorker. A group takes as long as its task's prompt says, and blocks the
    whole process where that is negative."""

    def __init__(self, starts: Path) -> None:
        self._starts = starts  # of process ids; beside a file with the suffix .hang the next start hangs
        self._started = False

    async def start(self, peers: Peers) -> int:
        with self._starts.open("a") as file:
            file.write(f"{os.getpid()}\n")
        hang = self._starts.with_suffix(".hang")
        if hang.exists():
            hang.unlink()
            time.sleep(60)
        self._started = True
        return os.getpid()

    async def evaluate_group(self, order: GroupOrder) -> Group:
        seconds = float(order.task.prompt)
        if seconds < 0:
            time.sleep(-seconds)
        else:
            await asyncio.sleep(seconds)
        return Group(order.group_id, order.task.task_key, order.task.env_key, [])

    async def stats(self) -> dict | None:
        counts = {"sampled_tokens": 0, "episodes": 0, "phases": {}, "episode_s": {}, "loop_lag": []}
        return counts if self._started else None


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_kill_worker_timeout_milliseconds", "500")  # instead of 10 s, for one that does not react
        start_ray("local", num_cpus=1, include_dashboard=False, log_to_driver=False)
        yield
        ray.shutdown()


@pytest.fixture
def starts(tmp_path):
    return tmp_path / "starts"


@pytest.fixture
def worker(cluster, starts):
    return Worker.options(max_concurrency=10).remote(starts)


@pytest.fixture
def evaluate(worker):
    timeouts = {"worker_timeout_s": TIMEOUT_S, "restart_timeout_s": RESTART_TIMEOUT_S}
    settings = ConductorSettings(TaskSampler([TASK], seed=0), 1, Sampling(), 60.0, worker_restarts=5, **timeouts)
    conductor = Conductor.options(max_concurrency=10).remote(settings, [worker], Peers(None, None, None))

    def evaluate(seconds):
        task = TASK.model_copy(update={"prompt": str(seconds)})
        return conductor.evaluate.remote("e", [task], 1, Sampling(), 60.0)

    return evaluate


def test_a_worker_that_hangs_loses_its_groups_and_works_again(worker, evaluate):
    pid = ray.get(worker.start.remote(None), timeout=30)
    call = evaluate(30)
    ray.wait([call], timeout=1.0)
    stopped = time.monotonic()
    os.kill(pid, signal.SIGSTOP)
    (group,) = ray.get(call, timeout=30)
    assert time.monotonic() - stopped > TIMEOUT_S - 1
    (trajectory,) = group.trajectories
    assert isinstance(trajectory.outcome, InfraFailed) and "actor" in trajectory.outcome.reason
    assert ray.get(evaluate(0), timeout=30)[0].trajectories == []


def test_a_worker_that_hangs_while_it_is_started_again_is_killed_once_more(worker, evaluate, starts):
    first = ray.get(worker.start.remote(None), timeout=30)
    ray.wait([call := evaluate(30)], timeout=1.0)
    starts.with_suffix(".hang").touch()
    os.kill(first, signal.SIGKILL)
    ray.get(call, timeout=30)
    (group,) = ray.get(evaluate(0), timeout=120)
    assert group.trajectories == []
    pids = [int(line) for line in starts.read_text().split()]
    assert len(set(pids)) == len(pids) >= 3 and not psutil.pid_exists(pids[1])


def test_a_worker_that_is_gone_for_good_is_not_waited_for(worker, evaluate):
    ray.get(worker.start.remote(None), timeout=30)
    ray.wait([call := evaluate(30)], timeout=1.0)
    ray.kill(worker)
    killed = time.monotonic()
    while not nobody_is_left(call):  # the group is lost at once, the worker given up a moment later
        call = evaluate(0)
    assert time.monotonic() - killed < RESTART_TIMEOUT_S / 2


def nobody_is_left(evaluation) -> bool:
    try:
        ray.get(evaluation, timeout=30)
    except ray.exceptions.RayTaskError as error:
        assert "every rollout worker has died" in str(error)
        return True
    return False


def test_a_worker_that_is_busy_for_less_is_left_alone(worker, evaluate):
    pid = ray.get(worker.start.remote(None), timeout=30)
    assert ray.get(evaluate(-(TIMEOUT_S - 1)), timeout=30)[0].trajectories == []
    assert ray.get(worker.start.remote(None), timeout=30) == pid


class NoActor:
    """Stands where a worker's handle should, says nothing, and cannot be killed."""

    @property
    def stats(self):
        return self

    def remote(self):
        return asyncio.sleep(3600)


def test_a_watch_that_has_ended_is_said_so(cluster):
    settings = ConductorSettings(TaskSampler([TASK], seed=0), 1, Sampling(), 60.0, worker_timeout_s=0.2)
    conductor = Conductor.options(max_concurrency=10).remote(settings, [NoActor()], Peers(None, None, None))
    assert get(conductor.status.remote())["error"] is None
    get(conductor.evaluate.remote("e", [], 1, Sampling(), 60.0))
    deadline = time.monotonic() + 30
    while (error := get(conductor.status.remote())["error"]) is None:
        assert time.monotonic() < deadline
    assert "ValueError" in error and "kill" in error


def weights(value):
    return pack_weights({"weight": torch.full((2, 3), float(value))})


class Weights:
    """The learner's, for a publisher."""

    def metadata(self):
        return [("weight", torch.float32, (2, 3))]

    def __iter__(self):
        yield "weight", torch.ones(2, 3)


class LosesItsReplica:
    """A policy whose only replica dies in the first update; the store dies before the next replica has asked it."""

    route, check_weights = "snapshot", "sample"

    def __init__(self) -> None:
        self.updates = []

    def update(self, version, timeout_s):
        self.updates.append(version)
        if len(self.updates) == 1:
            raise PolicyUpdateError("the replica died")
        return [{"replica": "next", "seconds": {}, "time_spent": {}, "loop_lag": []}]

    def holds(self, version):
        if len(self.updates) == 1:
            kill_newest_store()
        return False


def test_weights_whose_replica_and_store_died_are_published_again(cluster, tmp_path):
    store, policy = WeightStore.remote(str(tmp_path), "life"), LosesItsReplica()
    publish = WeightPublisher(store, policy, timeout_s=30)
    assert publish(Weights(), 1) == 2 and policy.updates == [1, 2]
    version, snapshot = get(store.latest.remote())
    assert version == 2 and bytes(get(snapshot)) == bytes(weights(1))


def get(call):
    return ray.get(call, timeout=30)


def kill_newest_store():
    """Returns once its process is gone: until then it may still answer."""
    store = max((p for p in children() if "WeightStore" in command_line(p)), key=psutil.Process.create_time)
    store.kill()
    assert psutil.wait_procs([store], timeout=10)[1] == []


def test_a_weight_store_that_dies_hands_out_nothing_between_its_folder_and_the_next_publication(cluster, tmp_path):
    store = WeightStore.options(name=ACTOR_NAME).remote(str(tmp_path), "life")
    pinned = PinnedWeights.remote()
    assert get(store.publish.remote(weights(1))) == 1
    assert get(pinned.pin.remote()) == 1
    kill_newest_store()
    assert get(store.latest.remote()) == (0, None), "what the model folder holds"
    newest = store.latest.remote(True)
    assert ray.wait([newest], timeout=1.0)[0] == [], "nobody is given what is not the newest"
    with pytest.raises(SnapshotLost):
        get(pinned.pin.remote())
    version, snapshot = get(pinned.latest.remote())
    assert version == 1 and bytes(get(snapshot)) == bytes(weights(1)), "an evaluation keeps its weights"
    assert get(store.publish.remote(weights(2))) == 2
    assert get(newest)[0] == 2 and get(pinned.pin.remote()) == 2


def test_calls_that_a_dying_weight_store_had_are_made_again(cluster, tmp_path):
    store = WeightStore.remote(str(tmp_path), "life")
    version = get(store.reserve.remote({"weight": (2, 3)}))
    waiting = store.latest.remote(True)
    ray.wait([waiting], timeout=0.5)
    kill_newest_store()
    get(store.deliver.remote(version, [ray.put(weights(1))]))
    assert get(waiting)[0] == version == 1
