"""The run's instances: making, lending, keeping alive and deleting them, in plain asyncio.

Control plane only: no tool call passes through here.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from actors.circuit_breaker import BreakerState, CircuitBreaker
from actors.envs.fleet import Account, FleetFailure, QuotaReached
from actors.lease_table import (
    Create,
    Creation,
    EnvSpec,
    Grant,
    LeaseFileError,
    LeaseTable,
    Slot,
    SlotState,
    Waiter,
    load_slots,
)

logger = logging.getLogger(__name__)

# Statuses of an instance that no longer runs, and so needs no deleting.
ENDED = frozenset({"stopped", "error", "terminated", "deleted"})
HEARTBEAT_INTERVALS_S = (30, 3600)  # what the control plane accepts
RUN_PREFIX = "fleet-rl"


def run_prefix(run_name: str) -> str:
    """With what the run ids of all pools of a run name begin, and of no other."""
    return f"{RUN_PREFIX}:{run_name.replace(':', '-')}:"


@dataclass(frozen=True)
class PoolSettings:
    """What a pool is given. Times in seconds.

    Attributes:
        run_name: instances of this name's earlier pools are deleted at start.
        nonce: tells this run from others of its name. A pool that is restarted with the same nonce takes over its
            instances and leases; one with another nonce deletes them.
        table_path: where the table is kept; None: nowhere.
        budget_s: the longest a lease lasts; an instance held longer is taken back.
        margin_s: an instance outlives the longest lease by this much.
        ttl_s: lifetime of an instance; default: two leases and the margin.
        heartbeat_s: between heartbeats; the control plane ends an instance that misses three. None: no heartbeats.
        max_instances: our own bound; None: what the account allows.
        max_idle, idle_s: how many instances wait for reuse, and how long.
        create_concurrency, create_interval_s: makes in flight, and the mean pause between the starts of two.
        create_attempts, create_timeout_s, create_backoff_s: tries of one make, the bound of each, the first pause.
        breaker_failures: after so many makes of an environment failed in a row, its breaker opens: none is begun.
        breaker_s, breaker_max_s: the breaker's first pause, and the longest; each trial that fails doubles it.
        account_s, reconcile_s: between looks at the account while somebody waits, and at the list of instances.
        tick_s: between looks at deadlines.
        save_s: from a change of the table to its being on disk; begins and ends of leases are answered after that.
    """

    run_name: str
    nonce: str
    table_path: Path | None = None
    budget_s: float = 1800.0
    margin_s: float = 60.0
    ttl_s: int | None = None
    heartbeat_s: float | None = 60.0
    max_instances: int | None = None
    max_idle: int = 16
    idle_s: float = 60.0
    create_concurrency: int = 16
    create_interval_s: float = 0.01
    create_attempts: int = 5
    create_timeout_s: float = 300.0
    create_backoff_s: float = 2.0
    breaker_failures: int = 5
    breaker_s: float = 30.0
    breaker_max_s: float = 480.0
    account_s: float = 5.0
    reconcile_s: float = 300.0
    tick_s: float = 0.5
    save_s: float = 0.02

    @property
    def prefix(self) -> str:
        """Of the run ids of every pool of this run name."""
        return run_prefix(self.run_name)

    @property
    def run_id(self) -> str:
        return self.prefix + self.nonce

    @property
    def need_s(self) -> float:
        """What must be left of an instance's TTL when it is lent."""
        return self.budget_s + self.margin_s

    @property
    def ttl_seconds(self) -> int:
        ttl = self.ttl_s if self.ttl_s is not None else 2 * self.budget_s + self.margin_s
        if ttl < self.need_s:
            raise ValueError(f"ttl_s {ttl:.0f} is shorter than a lease and its margin, {self.need_s:.0f} s")
        return int(ttl) + 1

    @property
    def heartbeat_interval(self) -> int | None:
        if self.heartbeat_s is None:
            return None
        shortest, longest = HEARTBEAT_INTERVALS_S
        return int(min(longest, max(shortest, 3 * self.heartbeat_s)))


@dataclass(frozen=True)
class Lease:
    """The right to use one instance until ``deadline`` (epoch seconds).

    ``instance`` is the control plane's own description; its URLs are all a worker needs. ``reused``: another episode
    had it before, so it must be reset.
    """

    lease_id: str
    instance: dict[str, Any]
    deadline: float
    reused: bool


@dataclass(frozen=True)
class CloseReport:
    """The end of a pool: how many instances were ended, and which are still running."""

    deleted: int
    left: tuple[str, ...]


class NoInstance(Exception):
    """There is no instance for this acquire, and the message says why."""


class Control(Protocol):
    """What the pool needs of the control plane; :class:`actors.envs.fleet.FleetControl` has it."""

    async def make(self, env_key: str, **fields: Any) -> dict[str, Any]: ...
    async def list(self, run_id: str | None = None, status: str | None = "running") -> list[dict[str, Any]]: ...
    async def delete(self, instance_id: str) -> bool: ...
    async def delete_run(self, run_id: str) -> int: ...
    async def heartbeat(self, instance_id: str) -> float | None: ...
    async def account(self) -> Account: ...
    def busy_s(self) -> float: ...


async def delete_instances(
    control: Control, prefix: str, *, keep: str | None = None, known: Set[str] = frozenset(), timeout_s: float = 60.0
) -> CloseReport:
    """The janitor: delete every instance whose run id begins with ``prefix``, and see in the list that they are gone.

    Works without a pool, so that it can also run after one died.

    Args:
        keep: a run id to leave alone.
        known: instances that are believed to exist; one that is not listed any more counts as ended.
    """
    deadline = time.monotonic() + timeout_s
    # The answers to the deletes do not say what has ended: one that is lost is repeated, and then says that there was
    # nothing to do. The list does.
    ended, left = set(known), {}
    wait = 0.2
    while True:
        try:
            left = await _listed(control, prefix, keep)
            ended |= set(left)
            for run_id in sorted(set(left.values())):
                await control.delete_run(run_id)
            if left:
                left = await _listed(control, prefix, keep)
            if not left:
                return CloseReport(len(ended), ())
        except FleetFailure as failure:
            if not failure.transient or time.monotonic() + wait > deadline:
                raise
            logger.warning("deleting the instances of %s*: %s", prefix, failure)
        if time.monotonic() + wait > deadline:
            return CloseReport(len(ended - set(left)), tuple(left))
        await asyncio.sleep(wait)
        wait = min(2 * wait, 5.0)


async def _listed(control: Control, prefix: str, keep: str | None) -> dict[str, str]:
    """Run ids by instance id, of what has not ended."""
    found = [i for i in await control.list(status=None) if i["status"] not in ENDED]
    runs = {i["instance_id"]: i["run_id"] or "" for i in found}
    return {name: run_id for name, run_id in runs.items() if run_id.startswith(prefix) and run_id != keep}


class EnvPoolCore:
    """Leases on instances, in plain asyncio on one loop.

    Args:
        clock: epoch seconds.
        jitter: a number in [0, 1) that spreads makes and retries in time.
    """

    def __init__(
        self,
        control: Control,
        settings: PoolSettings,
        *,
        clock: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._control = control
        self._settings = settings
        self._clock = clock
        self._jitter = jitter
        self._ttl = settings.ttl_seconds
        self._table = LeaseTable(settings.max_instances, settings.need_s)
        self._counters: Counter[str] = Counter()
        self._grants: dict[Waiter, asyncio.Future[Lease]] = {}
        self._tasks: set[asyncio.Task] = set()
        self._makes: dict[Creation, asyncio.Task] = {}
        self._jobs: dict[str, asyncio.Task] = {}  # background work of which one at a time runs, by name
        self._making = asyncio.Semaphore(settings.create_concurrency)
        self._next_make = 0.0  # loop time
        self._strangers: dict[str, set[Creation]] = {}  # listed instances that are not in the table, see _reconcile
        self._gone: set[str] = set()  # instances that ended since the list was last asked for
        self._unknown_makes = 0
        self._inherited_until = 0.0  # until then makes that a dead pool asked for may still succeed
        self._account_at = self._reconciled_at = 0.0
        self._closing = False
        self._background: asyncio.Task | None = None
        self._saving: asyncio.Future[None] | None = None  # done once what has changed is on disk
        self._unwritable = settings.table_path is None  # or the disk failed: the next tick tries again

    # -- life

    async def start(self) -> CloseReport:
        """Delete what earlier pools of this run name left, or take over what this very run had; then read the quota.

        Raises:
            FleetFailure: the control plane cannot be used.
        """
        settings = self._settings
        adopted = await self._adopt()
        report = await delete_instances(self._control, settings.prefix, keep=settings.run_id if adopted else None)
        if report.left:
            logger.warning("instances of earlier runs named %s still run: %s", settings.run_name, report.left)
        await self._read_account()
        self._background = asyncio.create_task(self._tick_forever())
        return report

    async def close_all(self, timeout_s: float = 60.0) -> CloseReport:
        """Refuse all waiters, end every instance of the run, and see in the list that none is left. May be repeated."""
        self._closing = True
        for waiter in list(self._table.queue):
            self._refuse(waiter, "the pool is closing")
        if self._background is not None:
            self._background.cancel()
        for creation, task in self._makes.items():
            if not creation.asked:
                task.cancel()
        # A make that is cut off may still succeed at the control plane; one that ends is seen by the list below.
        under_way = [task for task in self._tasks if task.get_name() in ("make", "delete")]
        if under_way:
            await asyncio.wait(under_way, timeout=min(10.0, timeout_s / 3))
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)
        known = set(self._table.slots)
        report = await delete_instances(self._control, self._settings.run_id, known=known, timeout_s=timeout_s)
        self._counters["deleted"] += report.deleted
        for instance_id in set(self._table.slots).difference(report.left):
            self._table.drop(instance_id)
        self._save()
        return report

    # -- leases

    async def acquire(self, spec: EnvSpec, timeout_s: float, *, owner: str = "", lease_id: str | None = None) -> Lease:
        """Wait for an instance of ``spec``. Waiters are served in the order they came, also at the quota.

        Args:
            owner: who asks; named to others who wait for what it holds.
            lease_id: made by the caller where it must be able to release a lease whose grant never reached it. Asking
                again with the same one gives the same lease.

        Raises:
            NoInstance: none within ``timeout_s``, or none can be made; says why.
        """
        if self._closing:
            raise NoInstance("the pool is closing")
        if lease_id is not None:
            slot = self._table.leased(lease_id)
            if slot is not None:
                return Lease(lease_id, slot.instance, slot.deadline, slot.uses > 1)
            earlier = self._table.waiting(lease_id)
            if earlier is not None:
                self._refuse(earlier, "it was asked for again")
        waiter = Waiter(lease_id or uuid.uuid4().hex, spec, spec.key, owner, self._clock())
        granted: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        self._grants[waiter] = granted
        self._table.enqueue(waiter)
        self._pump()
        received = False
        try:
            lease = await self._granted(waiter, granted, timeout_s)
            await self._durable()
            received = True
        finally:
            # A refused call has no lease, even if one of the same name was given to whoever asked again.
            got = granted.done() and not granted.cancelled() and granted.exception() is None
            self._leave(waiter, unclaimed=got and not received)
        return lease

    async def _granted(self, waiter: Waiter, granted: asyncio.Future[Lease], timeout_s: float) -> Lease:
        try:
            async with asyncio.timeout(timeout_s):
                return await granted
        except TimeoutError:
            if self._table.waiting(waiter.lease_id) is None:
                return granted.result()  # granted in the very moment the time was up
            why = self._table.why_waiting(waiter, self._clock())
            raise NoInstance(f"no instance of {waiter.spec.env_key} within {timeout_s:.0f} s: {why}") from None

    async def release(self, lease_id: str, reusable: bool) -> bool:
        """End a lease, or withdraw an acquire that still waits. False: there is no such lease (any more).

        A reusable instance waits for the next acquire of an equal spec; any other is deleted.
        """
        waiter = self._table.waiting(lease_id)
        if waiter is not None:
            self._refuse(waiter, "it was withdrawn")
            return True
        slot = self._table.leased(lease_id)
        if slot is None:
            return False
        self._take_back(slot, reusable)
        self._pump()
        await self._durable()
        return True

    async def release_owner(self, owner: str) -> int:
        """End all leases and waits of an owner that died; returns how many leases."""
        for waiter in [waiter for waiter in self._table.queue if waiter.owner == owner]:
            self._refuse(waiter, f"{owner} is gone")
        held = [slot for slot in self._table.in_state(SlotState.LEASED) if slot.owner == owner]
        for slot in held:
            self._take_back(slot, reusable=False)
        self._pump()
        await self._durable()
        return len(held)

    def stats(self) -> dict[str, Any]:
        """Gauges (leased, idle, ..., by environment), counters since the start (made, reused, ...), and breakers."""
        names = ("made", "reused", "deleted", "expired", "overdue", "failed", "refused", "heartbeats", "lost")
        counters = {name: self._counters[name] for name in names}
        now = self._clock()
        breakers = {env_key: breaker.snapshot(now) for env_key, breaker in sorted(self._table.breakers.items())}
        resting = sum(breaker["state"] != BreakerState.CLOSED for breaker in breakers.values())
        named = {"breakers": breakers, "breakers_open": resting, "run_id": self._settings.run_id}
        return {**self._table.counts(), **counters, **named}

    # -- decisions and what they set going

    def _pump(self) -> None:
        """Carry out what the table decides until it decides nothing more."""
        while not self._closing and (step := self._table.next_step(self._clock())) is not None:
            if isinstance(step, Grant):
                self._grant(step)
            elif isinstance(step, Create):
                creation = self._table.begin(step.waiter)
                creation.trial = self._breaker(creation).begin(creation.make_id, self._clock())
                self._makes[creation] = self._spawn(self._create(creation), "make")
            else:
                self._delete_later(step.slot)
        if self._table.unsaved and self._saving is None and not self._unwritable and not self._closing:
            # Soon and not at once: many changes make one write.
            loop = asyncio.get_running_loop()
            self._saving = loop.create_future()
            loop.call_later(self._settings.save_s, self._save)

    async def _durable(self) -> None:
        """Until the changes so far are on disk. Whoever is told of a lease's begin or end may rely on it: a pool that
        dies afterwards comes back with that lease, or without it.
        """
        if self._saving is not None:
            await asyncio.shield(self._saving)

    def _breaker(self, creation: Creation) -> CircuitBreaker:
        settings, env_key = self._settings, creation.spec.env_key
        breaker = self._table.breakers.get(env_key)
        if breaker is None:
            breaker = self._table.breakers[env_key] = CircuitBreaker(
                env_key, settings.breaker_failures, settings.breaker_s, settings.breaker_max_s
            )
        return breaker

    def _grant(self, grant: Grant) -> None:
        now = self._clock()
        deadline = now + self._settings.budget_s
        self._table.grant(grant, now, deadline)
        reused = grant.slot.uses > 1
        self._counters["reused"] += reused
        lease = Lease(grant.waiter.lease_id, grant.slot.instance, deadline, reused)
        granted = self._grants.pop(grant.waiter)
        if not granted.done():
            granted.set_result(lease)

    def _refuse(self, waiter: Waiter, why: str) -> None:
        self._table.withdraw(waiter)
        granted = self._grants.pop(waiter)
        if not granted.done():
            granted.set_exception(NoInstance(f"no instance of {waiter.spec.env_key}: {why}"))

    def _leave(self, waiter: Waiter, unclaimed: bool) -> None:
        """After an acquire that ended in any way: it waits no more, and a lease that nobody received comes back."""
        if self._grants.pop(waiter, None) is not None:
            self._table.withdraw(waiter)
        slot = self._table.leased(waiter.lease_id) if unclaimed else None
        if slot is not None:
            self._take_back(slot, reusable=True)  # nobody has touched it
        self._pump()

    def _take_back(self, slot: Slot, reusable: bool) -> None:
        if not reusable or self._closing:
            self._delete_later(slot)
            return
        self._table.set_state(slot, SlotState.IDLE, self._clock())

    def _delete_later(self, slot: Slot) -> None:
        self._table.set_state(slot, SlotState.DELETING, self._clock())
        self._spawn(self._delete(slot), "delete")

    async def _delete(self, slot: Slot) -> None:
        """Until it is acknowledged. What the control plane refuses to delete stays in the table until its TTL ends."""
        wait = 0.5
        while slot.instance_id in self._table.slots:
            try:
                existed = await self._control.delete(slot.instance_id)
            except FleetFailure as failure:
                logger.warning("%s", failure)
            else:
                if existed:
                    self._forget(slot, "deleted")
                else:
                    self._expire(slot, "it was gone when it was to be deleted")
                return
            await asyncio.sleep(wait * (1 + self._jitter()))
            wait = min(2 * wait, 30.0)

    def _forget(self, slot: Slot, count_as: str) -> None:
        if not self._table.drop(slot.instance_id):
            return
        self._gone.add(slot.instance_id)
        self._counters[count_as] += 1
        self._pump()

    def _expire(self, slot: Slot, why: str) -> None:
        logger.warning(
            "instance %s of %s, %s, ended without a delete: %s", slot.instance_id, slot.env_key, slot.state, why
        )
        self._forget(slot, "expired")

    async def _create(self, creation: Creation) -> None:
        try:
            async with self._making:
                instance = await self._make(creation)
            now = self._clock()
            self._table.made(creation, instance, now, now + self._ttl)
            self._counters["made"] += 1
            self._breaker(creation).worked(creation.make_id, now)
        except QuotaReached as failure:
            self._table.learn_refusal(failure.limit, failure.running)
            self._counters["refused"] += 1
            logger.info("%s", failure)
        except FleetFailure as failure:
            self._make_failed(creation, failure)
        finally:
            del self._makes[creation]
            self._table.end(creation)
            # A trial that neither worked nor failed, say at the quota, must not keep the environment shut.
            self._breaker(creation).abandoned(creation.make_id, self._clock())
        self._pump()

    async def _make(self, creation: Creation) -> dict[str, Any]:
        settings, spec = self._settings, creation.spec
        attempts = 1 if creation.trial else settings.create_attempts
        attempt = 0
        while True:
            attempt += 1
            await self._pace()
            if self._closing:
                raise FleetFailure("the pool is closing")
            creation.asked = True
            try:
                return await self._control.make(
                    spec.env_key,
                    env_version=spec.env_version,
                    data_key=spec.data_key,
                    data_version=spec.data_version,
                    env_variables=spec.env_variables,
                    ttl_seconds=self._ttl,
                    run_id=settings.run_id,
                    heartbeat_interval=settings.heartbeat_interval,
                    timeout_s=settings.create_timeout_s,
                )
            except FleetFailure as failure:
                # It may exist nevertheless; the next looks at the list will find it.
                self._unknown_makes += failure.unknown
                if not failure.transient or attempt == attempts or self._closing:
                    raise
                logger.info("%s, attempt %d: %s", creation.make_id, attempt, failure)
            await asyncio.sleep(settings.create_backoff_s * 2 ** (attempt - 1) * (0.5 + self._jitter()))

    async def _pace(self) -> None:
        """Spread the starts of makes: on average one every ``create_interval_s``, none while silence is asked for."""
        now = asyncio.get_running_loop().time()
        start = max(now + self._control.busy_s(), self._next_make)
        self._next_make = start + self._settings.create_interval_s * 2 * self._jitter()
        if start > now:
            await asyncio.sleep(start - now)

    def _make_failed(self, creation: Creation, failure: FleetFailure) -> None:
        self._counters["failed"] += 1
        # A request that is wrong, or one too many of them, says nothing about the environment.
        if (failure.transient or failure.unknown) and failure.status != 429:
            self._breaker(creation).failed(creation.make_id, self._clock())
        if self._table.waiting(creation.waiter.lease_id) is not None:
            self._refuse(creation.waiter, str(failure))

    # -- background

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(self._settings.tick_s)
            try:
                self.tick()
            except Exception:
                # The pool must go on lending; what broke is logged with its trace and counted.
                logger.exception("the pool's periodic work failed")
                self._counters["tick_errors"] += 1

    def tick(self) -> None:
        """Periodic work, each part bounded: ends of leases, TTLs and idle times; heartbeats; quota; list; file."""
        now, settings = self._clock(), self._settings
        for slot in list(self._table.slots.values()):
            if slot.expires_at <= now:
                self._expire(slot, "its time to live was over")
            elif slot.state is SlotState.LEASED and slot.deadline + settings.margin_s / 2 <= now:
                logger.warning("%s held %s beyond its lease", slot.owner or "somebody", slot.instance_id)
                self._counters["overdue"] += 1
                self._take_back(slot, reusable=False)
            elif slot.state is SlotState.IDLE and (
                now - slot.since >= settings.idle_s or slot.expires_at - now < settings.need_s
            ):
                self._delete_later(slot)
        idle = sorted(self._table.in_state(SlotState.IDLE), key=lambda slot: slot.since)
        for slot in idle[: max(0, len(idle) - settings.max_idle)]:
            self._delete_later(slot)
        if settings.heartbeat_s is not None and any(self._beat_due(slot, now) for slot in self._table.slots.values()):
            self._job("heartbeat", self._beat)
        if self._table.queue and now - self._account_at >= settings.account_s:
            self._job("account", self._read_account)
        suspicious = self._unknown_makes or self._strangers or now < self._inherited_until
        every = settings.reconcile_s / (10 if suspicious else 1)
        if now - self._reconciled_at >= every:
            self._job("reconcile", self._reconcile)
        self._pump()
        if self._table.unsaved:
            self._save()

    def _beat_due(self, slot: Slot, now: float) -> bool:
        return slot.state is not SlotState.DELETING and now - slot.beat_at >= self._settings.heartbeat_s

    async def _beat(self) -> None:
        now = self._clock()
        due = [slot for slot in self._table.slots.values() if self._beat_due(slot, now)]
        bounded = asyncio.Semaphore(16)

        async def beat(slot: Slot) -> None:
            async with bounded:
                try:
                    await self._control.heartbeat(slot.instance_id)
                except FleetFailure as failure:
                    logger.warning("%s", failure)
                    if not failure.transient:
                        self._reconciled_at = 0.0  # it may have ended; the list says so for certain
                    return
            self._table.beaten(slot, now)
            self._counters["heartbeats"] += 1

        await asyncio.gather(*(beat(slot) for slot in due))

    def _lost(self, slot: Slot) -> None:
        """The control plane says that it does not run. Who leases it will notice; nobody else gets it."""
        self._counters["lost"] += 1
        self._expire(slot, "the control plane lists it no more; its heartbeats were missed, or somebody else ended it")

    async def _read_account(self) -> None:
        self._account_at = self._clock()
        account = await self._control.account()
        self._table.learn_account(account.instance_limit, account.instance_count)
        self._pump()

    async def _reconcile(self) -> None:
        """Compare the table with the control plane's list.

        A listed instance that is not in the table may be a make whose answer is on its way. It is a stray, and deleted,
        once every make that was under way when it was first seen has ended and it still is not in the table.
        """
        self._reconciled_at = self._clock()
        self._gone.clear()
        before = set(self._table.slots)
        listed = {i["instance_id"]: i for i in await self._control.list(run_id=self._settings.run_id)}
        for instance_id in before.difference(listed):
            slot = self._table.slots.get(instance_id)
            if slot is not None and slot.state is not SlotState.DELETING:
                self._lost(slot)
        under_way = set(self._table.creations)
        strangers = set(listed) - before - set(self._table.slots) - self._gone
        self._strangers = {i: self._strangers.get(i, set(under_way)) & under_way for i in strangers}
        if not self._table.creations and not strangers:
            self._unknown_makes = 0
        for instance_id in [i for i, makes in self._strangers.items() if not makes]:
            logger.warning("deleting %s, which a make without an answer left behind", instance_id)
            del self._strangers[instance_id]
            # Through the table, as all others: a delete whose answer is lost is repeated, and what ended is counted.
            stray = Slot(listed[instance_id], "", self._clock() + self._ttl)
            self._table.add(stray)
            self._delete_later(stray)

    async def _adopt(self) -> bool:
        """Take over the instances of a pool with the same run id that died; false if there was none."""
        settings = self._settings
        if settings.table_path is None:
            return False
        try:
            saved = load_slots(settings.table_path, settings.run_id)
        except LeaseFileError as error:
            logger.warning("%s; its instances are deleted", error)
            return False
        if not saved:
            return False
        running = {i["instance_id"] for i in await self._control.list(run_id=settings.run_id)}
        for slot in saved:
            if slot.instance_id not in running:
                self._table.drop(slot.instance_id)  # the dead pool had it deleted, and was not told in time
                continue
            self._table.add(slot)
            if slot.state is SlotState.DELETING:
                self._delete_later(slot)
        # What runs but was not saved is found by looks at the list, of which the first may be too early.
        self._reconciled_at = 0.0
        self._inherited_until = self._clock() + settings.create_timeout_s
        return True

    def _job(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Start background work unless it still runs. A failure is logged; the work is tried again when it is due."""
        running = self._jobs.get(name)
        if running is not None and not running.done():
            return

        async def guarded() -> None:
            try:
                await work()
            except FleetFailure as failure:
                logger.warning("%s: %s", name, failure)

        self._jobs[name] = self._spawn(guarded(), name)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            logger.error("the pool's %s failed", task.get_name(), exc_info=task.exception())
            self._counters["tick_errors"] += 1

    def _save(self) -> None:
        saving, self._saving = self._saving, None
        try:
            if self._settings.table_path is not None and self._table.unsaved:
                self._write()
        finally:
            if saving is not None:
                saving.set_result(None)

    def _write(self) -> None:
        try:
            self._table.save(self._settings.table_path, self._settings.run_id)
            self._unwritable = False
        except LeaseFileError as error:
            self._unwritable = True
            # A full disk must not stop the lending; the list at the control plane still knows the instances.
            logger.warning("%s", error)
            self._counters["save_errors"] += 1
