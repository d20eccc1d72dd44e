"""The pool as a Ray actor, with its client: what a RolloutWorker sees of it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
import ray

from actors.conductor import Conductor, ConductorSettings
from actors.config import DeadlinesConfig
from actors.env_pool import EnvPoolClient, PoolSettings, create_env_pool
from actors.env_pool_core import NoInstance
from actors.envs.fleet import FleetFailure, close_clients
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.lease_table import EnvSpec
from actors.rollout_worker import GroupOrder, Peers
from actors.task import parse_task
from actors.trajectory import Cancelled, Graded, Group, InfraFailed
from serve.ray_start import start_ray
from serve.sampling import Sampling
from tests.fleet_faults import KEY, LocalFleet
from train.data.sampler import TaskSampler

TASK = parse_task(
    {
        "task_key": "t",
        "prompt": "p",
        "env_key": "tracker",
        "data_key": "desk",
        "data_version": "s1",
        "verifier_code": "def verify(env):\n    return 1.0",
    },
    "test",
)


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess(instance_limit=2) as process:
        yield LocalFleet(process)


@pytest.fixture(scope="module")
def actor(local_fleet, tmp_path_factory):
    start_ray("local", num_cpus=1, include_dashboard=False, log_to_driver=False, namespace="env-pool-test")
    try:
        table = tmp_path_factory.mktemp("run") / "leases.db"
        handle = create_env_pool(PoolSettings("actor", "n", table_path=table, tick_s=0.05), KEY, local_fleet.url)
        ray.get(handle.start.remote(), timeout=60)
        yield handle
    finally:
        ray.shutdown()


@pytest.fixture
async def client(actor, local_fleet):
    yield EnvPoolClient(actor, api_key=KEY, base_url=local_fleet.url, owner="worker-1")
    await close_clients()


async def leased(actor):
    return (await actor.stats.remote())["leased"]


async def test_an_environment_is_opened_on_a_lease_and_its_close_gives_it_back(actor, client, local_fleet):
    env = await client.open(TASK, DeadlinesConfig())
    observed = await env.reset_async()
    assert observed.tools and (await env.step_async({"tool": "list_users", "params": {}})).result["users"]
    assert await env.verify_async("", []) == Graded(1.0)
    assert await leased(actor) == 1
    await env.close_async()
    assert env.close_error is None and await leased(actor) == 0
    again = await client.open(TASK, DeadlinesConfig())
    assert again.state.step_count == 0 and len(local_fleet.running()) == 1
    await again.close_async()


async def test_a_cancelled_acquire_keeps_no_instance_and_a_late_one_says_who_has_them(actor, client):
    spec = EnvSpec.of(TASK)
    held = [await client.acquire(spec, 20) for _ in range(2)]
    with pytest.raises(NoInstance, match="worker-1 holds 2 of tracker"):
        await client.acquire(spec, 0.3)
    waiting = asyncio.create_task(client.acquire(spec, 60))
    await asyncio.sleep(0.3)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for lease in held:
        assert await client.release(lease.lease_id, True)
    stats = await actor.stats.remote()
    assert (stats["leased"], stats["waiting"]) == (0, 0)


async def test_an_actor_that_died_comes_back_with_its_leases(actor, client, local_fleet):
    lease, ended = [await client.acquire(EnvSpec.of(TASK), 20) for _ in range(2)]
    await asyncio.sleep(0.3)  # a tick writes the table
    ray.kill(actor, no_restart=False)
    with pytest.raises(TimeoutError):  # an episode whose time to close is over before the pool is back
        await asyncio.wait_for(client.release(ended.lease_id, True), 0.1)
    deadline = time.monotonic() + 60
    made = None
    while made != 0:  # the counters begin anew with the actor
        assert time.monotonic() < deadline
        try:
            made = (await actor.stats.remote())["made"]
        except ray.exceptions.RayActorError:
            await asyncio.sleep(0.2)
    while await leased(actor) != 1:
        assert time.monotonic() < deadline, "the lease of the episode that gave up is still held"
        await asyncio.sleep(0.1)
    assert await client.release(lease.lease_id, True)
    assert lease.instance["instance_id"] in local_fleet.running()
    assert (await actor.close_all.remote()).left == ()
    assert local_fleet.running() == []


async def test_a_pool_that_is_gone_for_good_is_not_waited_for():
    pool = SlowPool.remote()
    assert await pool.released.remote() == []
    ray.kill(pool)
    begun = time.monotonic()
    for call in (EnvPoolClient(pool).acquire(EnvSpec.of(TASK), 60), EnvPoolClient(pool).release("lease", True)):
        with pytest.raises(ray.exceptions.ActorDiedError):
            await call
    assert time.monotonic() - begun < 20


@ray.remote(num_cpus=0)
class SlowPool:
    """Takes leases back, slowly, and only after it has failed for some time."""

    def __init__(self, failures: int = 0) -> None:
        self._failures = failures
        self._released = []

    async def acquire(self, spec, timeout_s, owner, lease_id):
        raise FleetFailure("the control plane is away", transient=True, status=503)

    async def release(self, lease_id, reusable):
        if self._failures > 0:
            self._failures -= 1
            raise FleetFailure("the control plane is away", transient=True, status=503)
        await asyncio.sleep(1.0)
        self._released.append(lease_id)
        return True

    async def released(self):
        return self._released


@ray.remote(num_cpus=0)
class Releasing:
    """A RolloutWorker whose groups consist of nothing but giving a lease back."""

    def __init__(self, pool: Any) -> None:
        self._client = EnvPoolClient(pool)

    async def evaluate_group(self, order: GroupOrder) -> Group:
        await self._client.release("the lease", True)
        return Group(order.group_id, order.task.task_key, order.task.env_key, [])


async def until_released(pool):
    deadline = time.monotonic() + 20
    while not (released := await pool.released.remote()):
        assert time.monotonic() < deadline, "the lease is still held"
        await asyncio.sleep(0.1)
    return released


async def test_a_group_that_is_cancelled_does_not_take_the_releases_under_way_with_it(actor):
    pool = SlowPool.remote()
    worker = Releasing.remote(pool)
    await worker.__ray_ready__.remote()
    settings = ConductorSettings(TaskSampler([TASK], seed=0), 1, Sampling(), 60.0)
    conductor = Conductor.options(max_concurrency=10).remote(settings, [worker], Peers(None, None, None))
    (group,) = await conductor.evaluate.remote("e", [TASK], 1, Sampling(), 0.5)
    assert [type(t.outcome) for t in group.trajectories] == [InfraFailed]
    assert await until_released(pool) == ["the lease"]


@ray.remote(num_cpus=0)
class Evaluating:
    """A RolloutWorker that counts the groups it has at once."""

    def __init__(self) -> None:
        self._now = self._most = 0

    async def evaluate_group_beside(self, order: GroupOrder) -> Group:
        self._now += 1
        self._most = max(self._most, self._now)
        try:
            await asyncio.sleep(60.0 if order.task.task_key.startswith("slow") else 0.05)
        finally:
            self._now -= 1
        return Group(order.group_id, order.task.task_key, order.task.env_key, [])

    async def stats(self):
        counts = {"sampled_tokens": 0, "episodes": 0, "phases": {}, "episode_s": {}, "loop_lag": []}
        return counts | {"now": self._now, "most": self._most}


async def evaluating(*keys: str):
    worker = Evaluating.options(max_concurrency=100).remote()
    settings = ConductorSettings(TaskSampler([TASK], seed=0), 1, Sampling(), 60.0)
    conductor = Conductor.options(max_concurrency=10).remote(settings, [worker], Peers(None, None, None))
    tasks = [TASK.model_copy(update={"task_key": key}) for key in keys]
    return worker, conductor, conductor.evaluate.remote("e", tasks, 2, Sampling(), 60.0, at_once=3)


async def test_an_evaluation_beside_training_has_no_more_groups_at_once_than_it_may(actor):
    worker, _, call = await evaluating(*(f"t{i}" for i in range(10)))
    assert [group.task_key for group in await call] == [f"t{i}" for i in range(10)]
    assert (await worker.stats.remote())["most"] == 3


async def test_an_evaluation_that_is_stopped_has_an_outcome_and_a_reason_for_every_episode(actor):
    worker, conductor, call = await evaluating(*(f"slow{i}" for i in range(5)))
    deadline = time.monotonic() + 20
    while (await worker.stats.remote())["now"] < 3:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    await conductor.stop_evaluations.remote("the run is ending", 20.0)
    outcomes = [t.outcome for group in await call for t in group.trajectories]
    assert outcomes == [Cancelled("evaluation: the run is ending")] * 10
    ledger = (await conductor.status.remote())["eval_ledger"]
    assert (ledger["cancelled"], ledger["in_flight"], ledger["balanced"]) == (10, 0, True)
    assert (await worker.stats.remote())["now"] == 0


async def test_a_lease_is_given_back_once_a_restarted_pool_could_take_its_instances_over(actor):
    pool = SlowPool.remote(failures=2)
    assert await EnvPoolClient(pool).release("the lease", True)
    assert await until_released(pool) == ["the lease"]


async def test_an_acquire_that_fails_for_any_reason_is_withdrawn(actor):
    """The lease may stand in the table that the pool left behind."""
    pool = SlowPool.remote()
    with pytest.raises(FleetFailure, match="the control plane is away"):
        await EnvPoolClient(pool).acquire(EnvSpec.of(TASK), 1.0)
    assert len(await until_released(pool)) == 1
