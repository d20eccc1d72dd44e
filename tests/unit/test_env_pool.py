"""The pool's core against a real local Fleet over HTTP; only the clock is ours."""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import asynccontextmanager, suppress
from datetime import datetime
from itertools import pairwise

import pytest

from actors.env_pool_core import EnvPoolCore, Lease, NoInstance, PoolSettings, delete_instances
from actors.envs.fleet import FleetControl, FleetFailure
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.lease_table import EnvSpec, SlotState, load_slots
from tests.fleet_faults import KEY, LocalFleet, leaving_nothing

LIMIT = 4
SPEC = EnvSpec("tracker", "v1.0.0", "desk", "s1", {"LOGGED_IN_USER": "dan"})
OTHER = EnvSpec("tracker", "v1.0.0", "desk", "s2", {"LOGGED_IN_USER": "dan"})


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess(instance_limit=LIMIT) as process:
        yield LocalFleet(process)


@pytest.fixture(autouse=True)
async def clean(local_fleet):
    async with leaving_nothing(local_fleet):
        yield


class Clock:
    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.time() + self.ahead


def settings(**overrides):
    values = {"nonce": "n1", "create_backoff_s": 0.05, "tick_s": 0.05, "heartbeat_s": None}
    return PoolSettings(run_name=overrides.pop("run_name", f"t-{uuid.uuid4().hex[:6]}"), **(values | overrides))


@asynccontextmanager
async def pool(local_fleet, clock=time.time, **overrides):
    core = EnvPoolCore(FleetControl(KEY, local_fleet.url), settings(**overrides), clock=clock)
    await core.start()
    try:
        yield core
    finally:
        local_fleet.arm()
        report = await core.close_all()
        assert report.left == ()


async def eventually(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def states(shared):
    """Of the slots in a pool's table on disk."""
    return sorted(slot.state for slot in load_slots(shared.table_path, shared.run_id))


# -- lending and reuse


async def test_a_lease_names_a_running_instance_of_the_spec(local_fleet):
    async with pool(local_fleet, run_name="named", ttl_s=4000, heartbeat_s=60) as core:
        lease = await core.acquire(SPEC, 5)
        made = local_fleet.instances("fleet-rl:named:n1")
        assert [i["instance_id"] for i in made] == [lease.instance["instance_id"]]
        assert (made[0]["env_key"], made[0]["version"]) == ("tracker", "v1.0.0")
        assert (made[0]["data_key"], made[0]["data_version"]) == ("desk", "s1")
        assert made[0]["env_variables"] == {"LOGGED_IN_USER": "dan"}
        assert made[0]["heartbeat_interval"] == 180
        assert lease.instance["urls"]["manager"]["api"].startswith(local_fleet.url)
        assert lease.deadline == pytest.approx(time.time() + 1800, abs=5)
        assert not lease.reused


async def test_a_reusable_instance_serves_the_next_equal_spec_and_no_other(local_fleet):
    async with pool(local_fleet) as core:
        first = await core.acquire(SPEC, 5)
        assert await core.release(first.lease_id, reusable=True)
        other = await core.acquire(OTHER, 5)
        again = await core.acquire(SPEC, 5)
        assert again.instance == first.instance and again.reused
        assert other.instance["instance_id"] != first.instance["instance_id"]
        assert again.lease_id != first.lease_id
        stats = core.stats()
        assert (stats["made"], stats["reused"], stats["leased"]) == (2, 1, 2)
        assert stats["by_env"]["tracker"]["leased"] == 2


async def test_a_broken_lease_is_deleted_and_acknowledged(local_fleet):
    async with pool(local_fleet) as core:
        lease = await core.acquire(SPEC, 5)
        await core.release(lease.lease_id, reusable=False)
        await eventually(lambda: core.stats()["deleted"] == 1)
        assert local_fleet.running() == []
        assert not await core.release(lease.lease_id, reusable=False), "a lease ends once"


async def test_an_instance_without_life_for_another_episode_is_not_reused(local_fleet):
    clock = Clock()
    async with pool(local_fleet, clock, budget_s=100, margin_s=10, ttl_s=150, idle_s=1e9) as core:
        first = await core.acquire(SPEC, 5)
        clock.ahead = 30.0
        await core.release(first.lease_id, reusable=True)
        second = await core.acquire(SPEC, 5)
        assert second.instance == first.instance, "120 s are left, 110 are needed"
        clock.ahead = 45.0
        await core.release(second.lease_id, reusable=True)
        third = await core.acquire(SPEC, 5)
        assert third.instance != first.instance, "105 s are left"
        await eventually(lambda: core.stats()["deleted"] == 1)


async def test_idle_instances_are_bounded_in_number_and_time(local_fleet):
    clock = Clock()
    async with pool(local_fleet, clock, max_idle=2, idle_s=30) as core:
        leases = [await core.acquire(SPEC, 5) for _ in range(3)]
        for lease in leases:
            await core.release(lease.lease_id, reusable=True)
        await eventually(lambda: core.stats()["deleted"] == 1)
        assert core.stats()["idle"] == 2
        clock.ahead = 31.0
        await eventually(lambda: core.stats()["deleted"] == 3)
        assert local_fleet.running() == []


async def test_a_ttl_shorter_than_a_lease_and_its_margin_is_refused():
    with pytest.raises(ValueError, match="shorter than a lease"):
        _ = settings(budget_s=100, margin_s=10, ttl_s=105).ttl_seconds


# -- the quota


async def test_at_the_quota_waiters_queue_and_are_served_in_order(local_fleet):
    async with pool(local_fleet) as core:
        holding = [await core.acquire(SPEC, 5) for _ in range(LIMIT)]
        served = []

        async def one(number):
            lease = await core.acquire(OTHER if number % 2 else SPEC, 20)
            served.append(number)
            await asyncio.sleep(0.02)
            await core.release(lease.lease_id, reusable=bool(number % 3))

        waiting = [asyncio.create_task(one(number)) for number in range(12)]
        await asyncio.sleep(0.2)
        assert served == [] and core.stats()["waiting"] == 12
        for lease in holding:
            await core.release(lease.lease_id, reusable=True)
        await asyncio.gather(*waiting)
        # The first come first; makes that run at once may end in any order.
        assert all(abs(place - number) < LIMIT for place, number in enumerate(served)), served
        assert core.stats()["refused"] == 0, "the account's limit was known"


async def test_whoever_waits_too_long_is_told_who_holds_what(local_fleet):
    async with pool(local_fleet, max_instances=1) as core:
        lease = await core.acquire(SPEC, 5, owner="worker-7")
        begun = time.monotonic()
        with pytest.raises(NoInstance) as error:
            await core.acquire(OTHER, 0.3)
        assert 0.25 < time.monotonic() - begun < 5
        message = str(error.value)
        assert "tracker" in message and "1 of 1 instances" in message and "worker-7 holds 1 of tracker" in message
        assert core.stats()["waiting"] == 0
        await core.release(lease.lease_id, reusable=True)
        assert (await core.acquire(OTHER, 5)).instance["data_version"] == "s2"


async def test_others_of_the_account_fill_the_quota_and_their_leaving_is_noticed(local_fleet):
    stranger = FleetControl(KEY, local_fleet.url)
    async with pool(local_fleet, account_s=0.1) as core:
        theirs = [await stranger.make("tracker", timeout_s=5) for _ in range(LIMIT)]
        waiting = asyncio.create_task(core.acquire(SPEC, 10))
        await eventually(lambda: core.stats()["refused"] >= 1)
        assert not waiting.done() and core.stats()["waiting"] == 1
        for instance in theirs:
            await stranger.delete(instance["instance_id"])
        lease = await waiting
        assert lease.instance["instance_id"] in local_fleet.running()


async def test_withdrawing_a_waiting_acquire_ends_it(local_fleet):
    async with pool(local_fleet, max_instances=1) as core:
        await core.acquire(SPEC, 5)
        waiting = asyncio.create_task(core.acquire(SPEC, 30, lease_id="mine"))
        await eventually(lambda: core.stats()["waiting"] == 1)
        assert await core.release("mine", reusable=False)
        with pytest.raises(NoInstance, match="withdrawn"):
            await waiting


async def test_what_a_dead_owner_held_and_awaited_comes_back(local_fleet):
    async with pool(local_fleet, max_instances=2) as core:
        for _ in range(2):
            await core.acquire(SPEC, 5, owner="dead")
        waiting = asyncio.create_task(core.acquire(SPEC, 30, owner="dead"))
        alive = asyncio.create_task(core.acquire(SPEC, 30, owner="alive"))
        await eventually(lambda: core.stats()["waiting"] == 2)
        assert await core.release_owner("dead") == 2
        with pytest.raises(NoInstance, match="dead is gone"):
            await waiting
        await alive


# -- makes that fail


async def test_a_make_that_fails_for_a_while_is_repeated(local_fleet):
    async with pool(local_fleet) as core:
        local_fleet.arm({"route": "make", "kind": "status", "status": 500, "count": 2})
        await core.acquire(SPEC, 10)
        assert local_fleet.struck() == 2
        assert (core.stats()["made"], core.stats()["failed"]) == (1, 0)


async def test_a_retryable_flag_in_the_body_is_heeded(local_fleet):
    async with pool(local_fleet) as core:
        local_fleet.arm({"route": "make", "kind": "status", "status": 425, "retryable": True, "count": 1})
        await core.acquire(SPEC, 10)
        assert local_fleet.struck() == 1


async def test_a_make_that_cannot_work_is_not_repeated_and_says_why(local_fleet):
    async with pool(local_fleet) as core:
        begun = time.monotonic()
        with pytest.raises(NoInstance, match="nosuch"):
            await core.acquire(EnvSpec("nosuch"), 30)
        assert time.monotonic() - begun < 5
        assert core.stats()["failed"] == 1 and core.stats()["waiting"] == 0


async def test_a_make_that_hangs_is_cut_off_and_tried_again(local_fleet):
    async with pool(local_fleet, create_timeout_s=0.4) as core:
        local_fleet.arm({"route": "make", "kind": "hang", "count": 1})
        lease = await core.acquire(SPEC, 10)
        assert lease.instance["instance_id"] in local_fleet.running()


async def test_an_instance_whose_make_was_never_answered_is_found_and_deleted(local_fleet):
    async with pool(local_fleet, create_timeout_s=0.5, reconcile_s=2.0, run_name="stray") as core:
        local_fleet.arm({"route": "make", "kind": "hang", "stage": "after", "count": 1})
        lease = await core.acquire(SPEC, 10)
        await eventually(lambda: local_fleet.running("stray") == [lease.instance["instance_id"]])
        assert len(local_fleet.instances("stray")) == 2
        assert core.stats()["leased"] == 1


async def test_after_repeated_failures_an_environment_rests_and_then_serves_again(local_fleet):
    async with pool(local_fleet, breaker_failures=2, breaker_s=1.0, create_attempts=1) as core:
        local_fleet.arm({"route": "make", "kind": "status", "status": 500})
        for _ in range(2):
            with pytest.raises(NoInstance, match="injected fault"):
                await core.acquire(SPEC, 5)
        seen = local_fleet.struck()
        with pytest.raises(NoInstance, match="could not be made lately"):
            await core.acquire(SPEC, 0.3)
        assert local_fleet.struck() == seen, "nothing is asked for while it rests"
        assert core.stats()["breakers"]["tracker"]["state"] == "open" and core.stats()["breakers_open"] == 1
        local_fleet.arm()
        await core.acquire(SPEC, 5)
        assert core.stats()["breakers_open"] == 0
        breaker = core.stats()["breakers"]["tracker"]
        assert [t["after"] for t in breaker["transitions"]] == ["open", "half_open", "closed"]
        assert [t["attempt_id"] for t in breaker["transitions"]] == ["make-2", "make-3", "make-3"]


async def test_a_trial_asks_once_and_its_failure_makes_the_pause_longer(local_fleet):
    clock = Clock()
    async with pool(local_fleet, clock, breaker_failures=1, breaker_s=10, breaker_max_s=15, create_attempts=2) as core:
        local_fleet.arm({"route": "make", "kind": "status", "status": 500})
        with pytest.raises(NoInstance, match="injected fault"):
            await core.acquire(SPEC, 30)
        waiting = [asyncio.create_task(core.acquire(SPEC, 30)) for _ in range(3)]
        seen = local_fleet.struck()
        for waited, more in ((9.0, 0), (1.0, 1), (14.0, 0)):
            clock.ahead += waited
            seen += more
            await eventually(lambda so_many=seen: local_fleet.struck() >= so_many)
            await asyncio.sleep(0.3)
            assert local_fleet.struck() == seen
        local_fleet.arm()
        clock.ahead += 1.0
        served = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(result) for result in served] == [NoInstance, Lease, Lease], "the trial was the first one's"


async def test_requests_that_are_wrong_do_not_shut_an_environment(local_fleet):
    async with pool(local_fleet, breaker_failures=2) as core:
        for number in range(4):
            with pytest.raises(NoInstance):
                await core.acquire(EnvSpec("tracker", f"v9.0.{number}"), 5)
        assert core.stats()["breakers"]["tracker"]["state"] == "closed"
        await core.acquire(SPEC, 5)


async def test_makes_are_spread_in_time(local_fleet):
    async with pool(local_fleet, create_interval_s=0.3, max_instances=4) as core:
        begun = time.monotonic()
        await asyncio.gather(*(core.acquire(SPEC, 30) for _ in range(4)))
        made = sorted(i["created_at"] for i in local_fleet.instances(core._settings.run_id))
        moments = [datetime.fromisoformat(moment).timestamp() for moment in made]
        # Each pause is drawn between nothing and twice the mean.
        assert 0.05 < time.monotonic() - begun < 3 * 0.6 + 2
        assert max(after - before for before, after in pairwise(moments)) > 0.03


async def test_a_retry_after_silences_all_makes_not_only_the_one_that_was_told(local_fleet):
    async with pool(local_fleet) as core:
        local_fleet.arm({"route": "make", "kind": "status", "status": 429, "retry_after_s": 2, "count": 1})
        begun, begun_at = time.monotonic(), time.time()
        told = asyncio.create_task(core.acquire(SPEC, 30))
        await eventually(lambda: local_fleet.struck() == 1)
        await asyncio.gather(told, *(core.acquire(OTHER, 30) for _ in range(3)))
        made = local_fleet.instances(core._settings.run_id)
        assert time.monotonic() - begun > 1.5 and len(made) == 4
        first = min(datetime.fromisoformat(i["created_at"]).timestamp() for i in made)
        assert first - begun_at > 1.5
        assert core.stats()["breakers"]["tracker"]["failures_in_a_row"] == 0


# -- ends of leases


@pytest.mark.parametrize("when", ["queued", "being made", "granted"])
async def test_cancelling_an_acquire_leaves_nothing_leased(local_fleet, when):
    async with pool(local_fleet, max_instances=1) as core:
        held = await core.acquire(OTHER, 5) if when == "queued" else None
        local_fleet.arm({"route": "make", "kind": "slow", "seconds": 0.2})
        asking = asyncio.create_task(core.acquire(SPEC, 30))
        await eventually(lambda: core.stats()["waiting"] == 1)
        if when == "granted":
            while core.stats()["leased"] == 0:
                await asyncio.sleep(0)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            lease = await asking
            await core.release(lease.lease_id, reusable=True)
        assert core.stats()["waiting"] == 0
        if held is not None:
            await core.release(held.lease_id, reusable=True)
        assert core.stats()["leased"] == 0
        await core.acquire(SPEC, 5)


async def test_a_lease_held_beyond_its_time_is_taken_back(local_fleet):
    clock = Clock()
    async with pool(local_fleet, clock, budget_s=100, margin_s=20, max_instances=1) as core:
        lease = await core.acquire(SPEC, 5)
        clock.ahead = 105.0
        await asyncio.sleep(0.2)
        assert core.stats()["leased"] == 1
        clock.ahead = 111.0
        await core.acquire(SPEC, 5)
        assert core.stats()["overdue"] == 1
        assert not await core.release(lease.lease_id, reusable=True)


async def test_deletes_are_repeated_until_they_are_acknowledged(local_fleet):
    async with pool(local_fleet) as core:
        lease = await core.acquire(SPEC, 5)
        local_fleet.arm({"route": "delete", "kind": "status", "status": 500, "count": 2})
        await core.release(lease.lease_id, reusable=False)
        await eventually(lambda: core.stats()["deleted"] == 1, 15)
        assert local_fleet.struck() == 2 and local_fleet.running() == []


async def test_heartbeats_keep_coming_for_leased_and_idle_instances(local_fleet):
    async with pool(local_fleet, heartbeat_s=0.2) as core:
        first, _second = await core.acquire(SPEC, 5), await core.acquire(OTHER, 5)
        await core.release(first.lease_id, reusable=True)
        before = local_fleet.stats().get("heartbeats", 0)
        await eventually(lambda: core.stats()["heartbeats"] >= 6)
        assert local_fleet.stats()["heartbeats"] - before >= 4  # two may have been counted before


async def test_every_expiry_is_counted_and_explained(local_fleet, caplog):
    clock = Clock()
    async with pool(local_fleet, clock) as core:
        gone, expiring = [(await core.acquire(SPEC, 5)).instance["instance_id"] for _ in range(2)]
        await FleetControl(KEY, local_fleet.url).delete(gone)
        core._reconciled_at = 0.0
        await eventually(lambda: core.stats()["expired"] == 1)
        clock.ahead = core._ttl + 1.0
        await eventually(lambda: core.stats()["expired"] == 2)
    first, second = [r.getMessage() for r in caplog.records if "ended without a delete" in r.getMessage()]
    assert gone in first and "lists it no more" in first
    assert expiring in second and "time to live was over" in second


async def test_an_instance_that_ended_by_itself_is_noticed_and_not_lent(local_fleet):
    async with pool(local_fleet, heartbeat_s=0.2) as core:
        lease = await core.acquire(SPEC, 5)
        await core.release(lease.lease_id, reusable=True)
        await FleetControl(KEY, local_fleet.url).delete(lease.instance["instance_id"])
        await eventually(lambda: core.stats()["lost"] == 1)
        assert core.stats()["expired"] == 1 and core.stats()["idle"] == 0
        assert (await core.acquire(SPEC, 5)).instance != lease.instance


# -- start, restart, end


async def test_start_deletes_what_earlier_pools_of_the_same_name_left_and_nothing_else(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    for run_id in ("fleet-rl:again:old1", "fleet-rl:again:old2"):
        await control.make("tracker", run_id=run_id, timeout_s=5)
    theirs = await control.make("tracker", run_id="fleet-rl:again-not:x", timeout_s=5)
    async with pool(local_fleet, run_name="again", nonce="new"):
        assert local_fleet.running("again:") == []
    assert local_fleet.running() == [theirs["instance_id"]]
    await control.delete(theirs["instance_id"])


async def test_a_restarted_pool_of_the_same_run_takes_its_leases_over(local_fleet, tmp_path):
    shared = settings(run_name="adopt", nonce="same", table_path=tmp_path / "leases.db")
    dead = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await dead.start()
    held, idle = await dead.acquire(SPEC, 5, owner="w"), await dead.acquire(OTHER, 5)
    await dead.release(idle.lease_id, reusable=True)
    await eventually(lambda: states(shared) == [SlotState.IDLE, SlotState.LEASED])  # a tick writes the table
    dead._background.cancel()  # it dies without a word
    stray = await FleetControl(KEY, local_fleet.url).make("tracker", run_id=shared.run_id, timeout_s=5)

    reborn = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await reborn.start()
    assert (reborn.stats()["leased"], reborn.stats()["idle"]) == (1, 1)
    await eventually(lambda: stray["instance_id"] not in local_fleet.running())
    assert (await reborn.acquire(OTHER, 5)).instance == idle.instance
    assert await reborn.release(held.lease_id, reusable=True)
    assert (await reborn.acquire(SPEC, 5)).instance == held.instance
    assert (await reborn.close_all()).left == ()


async def test_what_a_dead_pool_had_deleted_does_not_stay_in_the_table(local_fleet, tmp_path):
    """It may die before it is told, or before it has written that it was."""
    shared = settings(run_name="gone", nonce="same", table_path=tmp_path / "leases.db")
    dead = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await dead.start()
    lease = await dead.acquire(SPEC, 5, owner="w")
    dead._background.cancel()  # it dies without a word
    await FleetControl(KEY, local_fleet.url).delete(lease.instance["instance_id"])
    assert load_slots(shared.table_path, shared.run_id) != []

    reborn = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await reborn.start()
    await eventually(lambda: load_slots(shared.table_path, shared.run_id) == [])
    assert (await reborn.close_all()).left == ()


async def test_what_a_dead_pool_asked_for_and_comes_late_is_found_soon(local_fleet, tmp_path):
    """Its request may be carried out after the next pool has looked at the list for the first time."""
    shared = settings(run_name="late", nonce="same", table_path=tmp_path / "leases.db", reconcile_s=20.0)
    dead = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await dead.start()
    await dead.acquire(SPEC, 5, owner="w")
    dead._background.cancel()  # it dies without a word

    reborn = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await reborn.start()
    await eventually(lambda: "reconcile" in reborn._jobs and reborn._jobs["reconcile"].done())
    late = await FleetControl(KEY, local_fleet.url).make("tracker", run_id=shared.run_id, timeout_s=5)
    await eventually(lambda: late["instance_id"] not in local_fleet.running())
    assert (await reborn.close_all()).left == ()


async def test_a_lease_that_is_asked_for_again_is_the_same_also_after_a_restart(local_fleet, tmp_path):
    shared = settings(run_name="again-and-again", nonce="same", table_path=tmp_path / "leases.db", tick_s=60.0)
    dead = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await dead.start()
    lease = await dead.acquire(SPEC, 5, lease_id="mine")
    assert await dead.acquire(SPEC, 5, lease_id="mine") == lease
    # The table is saved soon after a change, long before the next tick.
    await eventually(lambda: states(shared) == [SlotState.LEASED])
    dead._background.cancel()
    reborn = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await reborn.start()
    assert await reborn.acquire(SPEC, 5, lease_id="mine") == lease
    assert local_fleet.running("again-and-again:") == [lease.instance["instance_id"]]
    assert (await reborn.close_all()).left == ()


async def test_whoever_is_told_of_a_lease_finds_it_on_disk(local_fleet, tmp_path):
    path = tmp_path / "leases.db"
    async with pool(local_fleet, table_path=path, tick_s=60.0, max_instances=1) as core:
        run_id = core.stats()["run_id"]
        lease = await core.acquire(SPEC, 5, owner="w")
        assert [(s.lease_id, s.owner) for s in load_slots(path, run_id)] == [(lease.lease_id, "w")]
        await core.release(lease.lease_id, reusable=True)
        assert [s.state for s in load_slots(path, run_id)] == [SlotState.IDLE]
        await core.acquire(SPEC, 5, owner="w")
        await core.release_owner("w")
        assert SlotState.LEASED not in [s.state for s in load_slots(path, run_id)]


async def test_a_table_that_cannot_be_written_does_not_stop_the_lending(local_fleet, tmp_path):
    async with pool(local_fleet, table_path=tmp_path) as core:
        lease = await core.acquire(SPEC, 5)
        assert await core.release(lease.lease_id, reusable=True)
        assert core._counters["save_errors"] >= 1


async def test_asking_again_while_one_waits_withdraws_the_earlier_request(local_fleet):
    async with pool(local_fleet, max_instances=1) as core:
        held = await core.acquire(OTHER, 5)
        earlier = asyncio.create_task(core.acquire(SPEC, 30, lease_id="mine"))
        await eventually(lambda: core.stats()["waiting"] == 1)
        later = asyncio.create_task(core.acquire(SPEC, 30, lease_id="mine"))
        with pytest.raises(NoInstance, match="asked for again"):
            await earlier
        await core.release(held.lease_id, reusable=False)
        assert (await later).lease_id == "mine" and core.stats()["waiting"] == 0


async def test_a_pool_of_another_run_of_the_same_name_deletes_instead(local_fleet, tmp_path):
    path = tmp_path / "leases.db"
    shared = settings(run_name="replaced", nonce="one", table_path=path)
    dead = EnvPoolCore(FleetControl(KEY, local_fleet.url), shared)
    await dead.start()
    await dead.acquire(SPEC, 5)
    await eventually(lambda: states(shared) == [SlotState.LEASED])
    dead._background.cancel()
    async with pool(local_fleet, run_name="replaced", nonce="two", table_path=path) as core:
        assert local_fleet.running() == []
        assert core.stats()["leased"] == 0


async def test_closing_refuses_waiters_and_leaves_no_instance_even_one_being_made(local_fleet):
    core = EnvPoolCore(FleetControl(KEY, local_fleet.url), settings(run_name="end", max_instances=2))
    await core.start()
    await core.acquire(SPEC, 5)
    local_fleet.arm({"route": "make", "kind": "slow", "seconds": 0.3})
    waiting = [asyncio.create_task(core.acquire(SPEC, 30)) for _ in range(3)]
    await asyncio.sleep(0.1)
    report = await core.close_all()
    assert report.left == () and local_fleet.running() == []
    for task in waiting:
        with pytest.raises(NoInstance, match="closing"):
            await task
    with pytest.raises(NoInstance, match="closing"):
        await core.acquire(SPEC, 1)
    stats = core.stats()
    assert stats["made"] == stats["deleted"] + stats["expired"]
    assert (await core.close_all()).deleted == 0


async def test_closing_ends_a_make_between_two_attempts(local_fleet):
    core = EnvPoolCore(FleetControl(KEY, local_fleet.url), settings(create_backoff_s=0.4))
    await core.start()
    local_fleet.arm({"route": "make", "kind": "status", "status": 500})
    waiting = asyncio.create_task(core.acquire(SPEC, 30))
    await eventually(lambda: local_fleet.struck() == 1)
    assert (await core.close_all()).left == ()
    with pytest.raises(NoInstance):
        await waiting
    assert local_fleet.struck() == 1


async def test_the_janitor_insists_until_the_list_is_empty(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    for _ in range(2):
        await control.make("tracker", run_id="fleet-rl:janitor:x", timeout_s=5)
    local_fleet.arm({"route": "delete", "kind": "status", "status": 500, "count": 1})
    report = await delete_instances(control, "fleet-rl:janitor:")
    assert (report.deleted, report.left) == (2, ())
    assert local_fleet.running() == []


async def test_a_control_plane_that_refuses_the_key_shows_at_start(local_fleet):
    core = EnvPoolCore(FleetControl("wrong", local_fleet.url), settings())
    with pytest.raises(FleetFailure, match="API key was refused"):
        await core.start()


async def test_who_asks_again_keeps_the_lease_when_the_first_call_ends_late(local_fleet):
    """A worker whose connection broke asks again while its first call still waits in the pool."""
    async with pool(local_fleet) as core:
        go = asyncio.get_running_loop().create_future()
        real, answered = core._control.make, asyncio.Event()

        async def held_back(*args, **kwargs):
            made = await real(*args, **kwargs)
            answered.set()
            await go
            return made

        core._control.make = held_back
        first = asyncio.create_task(core.acquire(SPEC, 10, lease_id="asked-twice"))
        await asyncio.wait_for(answered.wait(), 10)
        again = asyncio.create_task(core.acquire(SPEC, 10, lease_id="asked-twice"))
        go.set_result(None)  # the instance is there in the very moment the first call is told to go
        lease = await again
        with pytest.raises(NoInstance, match="asked for again"):
            await first
        assert core.stats()["leased"] == 1
        assert (await core.acquire(SPEC, 10)).instance != lease.instance
        assert await core.release("asked-twice", reusable=True)


async def test_every_instance_that_closing_ended_is_counted_although_the_answer_was_lost(local_fleet):
    async with pool(local_fleet) as core:
        await asyncio.gather(*(core.acquire(SPEC, 10) for _ in range(3)))
        local_fleet.arm({"route": "delete", "kind": "status", "status": 502, "stage": "after", "count": 1})
        report = await core.close_all()
        assert local_fleet.struck() == 1
        assert (report.deleted, report.left) == (3, ()) and core.stats()["deleted"] == 3


async def leave_a_stray(core, local_fleet) -> str:
    """An instance of the pool's run that no make of the pool was told of."""
    made = await FleetControl(KEY, local_fleet.url).make("tracker", run_id=core._settings.run_id, timeout_s=5)
    return made["instance_id"]


@pytest.mark.parametrize("stage", ["before", "after"])
async def test_a_stray_whose_delete_has_no_answer_is_counted_once(local_fleet, stage):
    async with pool(local_fleet, reconcile_s=3600) as core:
        await eventually(lambda: "reconcile" in core._jobs and core._jobs["reconcile"].done())  # the pool's first
        stray = await leave_a_stray(core, local_fleet)
        # The client repeats a 502 by itself, and then the pool never hears of it; a 500 it does not.
        local_fleet.arm({"route": "delete", "kind": "status", "status": 500, "stage": stage, "count": 1})
        await core._reconcile()
        assert core.stats()["deleting"] == 1, "it counts against the quota as long as it may run"
        await eventually(lambda: core.stats()["deleting"] == 0)
        assert local_fleet.struck() == 1 and stray not in local_fleet.running()
        assert core.stats()["deleted"] + core.stats()["expired"] == 1


async def test_a_stray_that_is_being_deleted_when_the_pool_closes_is_counted(local_fleet):
    async with pool(local_fleet, reconcile_s=3600) as core:
        await eventually(lambda: "reconcile" in core._jobs and core._jobs["reconcile"].done())
        await leave_a_stray(core, local_fleet)
        local_fleet.arm({"route": "delete", "kind": "hang", "stage": "after", "count": 1})
        await core._reconcile()
        await eventually(lambda: local_fleet.struck() == 1)
        report = await core.close_all(timeout_s=3.0)
        assert (report.deleted, report.left) == (1, ()) and core.stats()["deleted"] == 1


async def test_an_instance_that_comes_and_goes_while_the_list_is_on_its_way_is_no_stray(local_fleet):
    async with pool(local_fleet, reconcile_s=3600) as core:
        await eventually(lambda: "reconcile" in core._jobs and core._jobs["reconcile"].done())
        ask = core._control.list

        async def late(**options):
            lease = await core.acquire(SPEC, 10)
            listed = await ask(**options)
            await core.release(lease.lease_id, reusable=False)
            await eventually(lambda: core.stats()["deleted"] == 1)
            return listed

        core._control.list = late
        await core._reconcile()
        core._control.list = ask
        assert core.stats()["deleting"] == 0
        assert (core.stats()["made"], core.stats()["deleted"], core.stats()["expired"]) == (1, 1, 0)
