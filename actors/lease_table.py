"""Who uses which instance, who waits, and what to do next. Plain data and decisions: no clock, no network, no tasks."""

from __future__ import annotations

import enum
import json
import sqlite3
from collections import Counter
from collections.abc import ValuesView
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from actors.circuit_breaker import BreakerState, CircuitBreaker
from actors.task import Task


@dataclass(frozen=True)
class EnvSpec:
    """What an instance is made from. Equal specs give interchangeable instances (after a reset)."""

    env_key: str
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, task: Task) -> EnvSpec:
        return cls(task.env_key, task.env_version, task.data_key, task.data_version, dict(task.env_variables))

    @property
    def key(self) -> str:
        """A text that is equal exactly for equal specs."""
        return json.dumps(asdict(self), sort_keys=True)


class SlotState(enum.StrEnum):
    LEASED = "leased"
    IDLE = "idle"
    DELETING = "deleting"


@dataclass
class Slot:
    """One instance that exists, or may still exist, at the control plane. Times are epoch seconds."""

    instance: dict[str, Any]
    key: str
    expires_at: float  # the end of its TTL
    state: SlotState = SlotState.IDLE
    since: float = 0.0  # in this state
    lease_id: str | None = None
    owner: str = ""
    deadline: float = 0.0  # of the lease
    beat_at: float = 0.0  # last heartbeat
    uses: int = 0

    @property
    def instance_id(self) -> str:
        return self.instance["instance_id"]

    @property
    def env_key(self) -> str:
        return self.instance["env_key"]


@dataclass(eq=False)
class Waiter:
    """An acquire that has no instance yet."""

    lease_id: str
    spec: EnvSpec
    key: str
    owner: str
    since: float
    order: int = 0  # in the queue; given when it enters


@dataclass(eq=False)
class Creation:
    """An instance being made. ``waiter`` is who it was begun for; whoever waits longest for its key will get it.

    ``asked``: the control plane was asked at least once, so there may be an instance. ``trial``: its environment's
    breaker is half-open, and this make decides.
    """

    spec: EnvSpec
    key: str
    waiter: Waiter
    make_id: str
    asked: bool = False
    trial: bool = False


@dataclass(frozen=True)
class Grant:
    waiter: Waiter
    slot: Slot


@dataclass(frozen=True)
class Create:
    waiter: Waiter


@dataclass(frozen=True)
class Evict:
    slot: Slot


class LeaseTable:
    """Instances, creations under way, and a first-in-first-out queue of waiters.

    :meth:`next_step` decides; the owner carries out each step and reports what came of it. At all times
    ``len(slots) + len(creations) <= capacity`` for every creation it asks for.

    Every change goes through a method, which keeps the indices by which a step is found and the list of slots that are
    yet to be saved: a pool of thousands of instances decides several times for each episode.

    Args:
        max_instances: our own bound, whatever the account allows.
        need_s: an instance is given out only while this many seconds of its TTL are left.
    """

    def __init__(self, max_instances: int | None, need_s: float) -> None:
        self.max_instances = max_instances
        self.need_s = need_s
        self.breakers: dict[str, CircuitBreaker] = {}  # by environment; one without a breaker may always be made
        self.account_limit: int | None = None
        self.others = 0  # instances of the account that are not ours
        self.slots: dict[str, Slot] = {}  # by instance id; to be read only
        self.creations: dict[Creation, None] = {}  # a set in order; to be read only
        self._queue: dict[str, Waiter] = {}  # by lease id, in order
        self._leases: dict[str, Slot] = {}  # by lease id
        self._idle: dict[str, dict[str, Slot]] = {}  # by key, then by instance id
        self._waiting: dict[str, dict[str, Waiter]] = {}  # by key, then by lease id, in order
        self._coming: Counter[str] = Counter()  # creations, by key
        self._states: Counter[SlotState] = Counter()
        self._lacking: set[str] = set()  # keys for which more wait than are idle or being made
        self._ready: set[str] = set()  # keys for which somebody waits and an instance is idle
        self._unsaved: set[str] = set()
        self._begun = self._enqueued = 0

    # -- quota

    @property
    def used(self) -> int:
        return len(self.slots) + len(self.creations)

    @property
    def capacity(self) -> int | None:
        """How many instances may exist at once; None: no bound is known."""
        bounds = [self.max_instances]
        if self.account_limit is not None:
            bounds.append(max(0, self.account_limit - self.others))
        return min((bound for bound in bounds if bound is not None), default=None)

    def learn_account(self, limit: int, count: int) -> None:
        """Take over what the account says. Creations under way may or may not be in its count yet."""
        self.account_limit = limit
        self.others = max(0, count - self.used)

    def learn_refusal(self, limit: int | None, running: int | None) -> None:
        """The control plane refused one creation (still listed) for lack of quota."""
        ours = self.used - 1
        if limit is None:
            limit = self.account_limit if running is None else running
        if limit is None:
            limit = ours
        self.account_limit = limit
        # What runs and is not in the table is somebody else's, or one of our creations; the next account tells.
        self.others = max(self.others, limit - ours)

    # -- the queue

    @property
    def queue(self) -> ValuesView[Waiter]:
        """Who waits, the longest first."""
        return self._queue.values()

    def enqueue(self, waiter: Waiter) -> None:
        self._enqueued += 1
        waiter.order = self._enqueued
        self._queue[waiter.lease_id] = waiter
        self._waiting.setdefault(waiter.key, {})[waiter.lease_id] = waiter
        self._weigh(waiter.key)

    def withdraw(self, waiter: Waiter) -> None:
        """It waits no more."""
        del self._queue[waiter.lease_id]
        of_key = self._waiting[waiter.key]
        del of_key[waiter.lease_id]
        if not of_key:
            del self._waiting[waiter.key]
        self._weigh(waiter.key)

    def waiting(self, lease_id: str) -> Waiter | None:
        return self._queue.get(lease_id)

    def next_step(self, now: float) -> Grant | Create | Evict | None:
        """The next thing to do, or None. Strictly first in, first out: nobody overtakes a waiter that has nothing."""
        if not self._lacking and not self._ready:
            return None
        if self.capacity is None or self.used < self.capacity:
            return self._next_with_room(now)
        promised: Counter[str] = Counter()
        freeing = self._states[SlotState.DELETING]
        for waiter in self._queue.values():
            slot = self._idle_for(waiter.key)
            if slot is not None:
                return Grant(waiter, slot) if slot.expires_at - now >= self.need_s else Evict(slot)
            if promised[waiter.key] < self._coming[waiter.key]:
                promised[waiter.key] += 1
                continue
            if not self._may_make(waiter, now):
                continue
            if freeing > 0:
                freeing -= 1
                continue
            idle = self._oldest_idle()
            return None if idle is None else Evict(idle)
        return None

    def _next_with_room(self, now: float) -> Grant | Create | Evict | None:
        """The same below the quota, where only the first waiter of each key can be next: with thousands of waiters
        for whom an instance is being made, looking at all of them for every step would take most of the pool's time.
        """
        first: Waiter | None = None
        for key in self._ready:
            waiter = next(iter(self._waiting[key].values()))
            first = waiter if first is None or waiter.order < first.order else first
        for key in self._lacking - self._ready:
            waiter = next(islice(self._waiting[key].values(), self._coming[key], None))
            if (first is None or waiter.order < first.order) and self._may_make(waiter, now):
                first = waiter
        if first is None:
            return None
        slot = self._idle_for(first.key)
        if slot is None:
            return Create(first)
        return Grant(first, slot) if slot.expires_at - now >= self.need_s else Evict(slot)

    def _may_make(self, waiter: Waiter, now: float) -> bool:
        breaker = self.breakers.get(waiter.spec.env_key)
        return breaker is None or breaker.may_begin(now)

    def _idle_for(self, key: str) -> Slot | None:
        return next(iter(self._idle.get(key, {}).values()), None)

    def _oldest_idle(self) -> Slot | None:
        return min(self.in_state(SlotState.IDLE), key=lambda slot: slot.since, default=None)

    def _weigh(self, key: str) -> None:
        waiting, coming, idle = len(self._waiting.get(key, ())), self._coming[key], len(self._idle.get(key, ()))
        (self._lacking.add if waiting > coming + idle else self._lacking.discard)(key)
        (self._ready.add if waiting and idle else self._ready.discard)(key)
        if not coming:
            del self._coming[key]

    # -- creations

    def begin(self, waiter: Waiter) -> Creation:
        self._begun += 1
        creation = Creation(waiter.spec, waiter.key, waiter, f"make-{self._begun}")
        self.creations[creation] = None
        self._coming[creation.key] += 1
        self._weigh(creation.key)
        return creation

    def end(self, creation: Creation) -> None:
        """A creation failed, or succeeded and its slot is in the table. Repeating it does nothing."""
        if creation in self.creations:
            del self.creations[creation]
            self._coming[creation.key] -= 1
            self._weigh(creation.key)

    def made(self, creation: Creation, instance: dict[str, Any], now: float, expires_at: float) -> Slot:
        """A creation succeeded. The instance is idle until the next step grants it."""
        self.end(creation)
        slot = Slot(instance, creation.key, expires_at, since=now, beat_at=now)
        self.add(slot)
        return slot

    # -- slots

    def add(self, slot: Slot) -> None:
        self.slots[slot.instance_id] = slot
        self._enter(slot)

    def drop(self, instance_id: str) -> bool:
        """The instance is no more, and its row goes with the next save, whoever wrote it. False: it is not in the
        table."""
        slot = self.slots.pop(instance_id, None)
        if slot is None:
            self._unsaved.add(instance_id)
            return False
        self._leave(slot)
        return True

    def grant(self, grant: Grant, now: float, deadline: float) -> None:
        slot, waiter = grant.slot, grant.waiter
        self.withdraw(waiter)
        self._leave(slot)
        slot.state, slot.since, slot.deadline = SlotState.LEASED, now, deadline
        slot.lease_id, slot.owner = waiter.lease_id, waiter.owner
        slot.uses += 1
        self._enter(slot)

    def set_state(self, slot: Slot, state: SlotState, now: float) -> None:
        """End its lease, if it has one, and change its state."""
        self._leave(slot)
        slot.state, slot.since = state, now
        slot.lease_id, slot.owner, slot.deadline = None, "", 0.0
        self._enter(slot)

    def beaten(self, slot: Slot, now: float) -> None:
        slot.beat_at = now
        self._unsaved.add(slot.instance_id)

    def leased(self, lease_id: str) -> Slot | None:
        return self._leases.get(lease_id)

    def in_state(self, state: SlotState) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.state is state] if self._states[state] else []

    def _enter(self, slot: Slot) -> None:
        self._states[slot.state] += 1
        self._unsaved.add(slot.instance_id)
        if slot.lease_id is not None:
            self._leases[slot.lease_id] = slot
        if slot.state is SlotState.IDLE:
            self._idle.setdefault(slot.key, {})[slot.instance_id] = slot
            self._weigh(slot.key)

    def _leave(self, slot: Slot) -> None:
        self._states[slot.state] -= 1
        self._unsaved.add(slot.instance_id)
        if slot.lease_id is not None:
            del self._leases[slot.lease_id]
        if slot.state is SlotState.IDLE:
            of_key = self._idle[slot.key]
            del of_key[slot.instance_id]
            if not of_key:
                del self._idle[slot.key]
            self._weigh(slot.key)

    # -- words and numbers

    def why_waiting(self, waiter: Waiter, now: float) -> str:
        """For the error of a waiter whose time is up: what is full, who holds it, and who stands before it."""
        ahead = list(self._queue).index(waiter.lease_id)
        parts = []
        breaker = self.breakers.get(waiter.spec.env_key)
        if breaker is not None and breaker.state is not BreakerState.CLOSED:
            pause_s = max(0.0, breaker.retry_at - now)
            again = "is on trial now" if breaker.trial_id is not None else f"is tried again in {pause_s:.0f} s"
            parts.append(f"{waiter.spec.env_key} could not be made lately and {again}")
        capacity = "unbounded" if self.capacity is None else self.capacity
        parts.append(
            f"{self.used} of {capacity} instances exist or are being made"
            f" (account limit {self.account_limit}, {self.others} not ours, own bound {self.max_instances})"
        )
        leased = self.in_state(SlotState.LEASED)
        if leased:
            holders = Counter((slot.env_key, slot.owner or "unnamed") for slot in leased)
            held = ", ".join(f"{owner} holds {n} of {env}" for (env, owner), n in holders.most_common(5))
            oldest = max(now - slot.since for slot in leased)
            parts.append(f"{held}, the oldest for {oldest:.0f} s")
        parts.append(f"{len(self.creations)} being made, {len(self.in_state(SlotState.DELETING))} being deleted")
        parts.append(f"{ahead} waiting before it")
        return "; ".join(parts)

    def counts(self) -> dict[str, Any]:
        """Gauges, in all and by environment."""
        by_env: dict[str, Counter] = {}
        for slot in self.slots.values():
            by_env.setdefault(slot.env_key, Counter())[slot.state.value] += 1
        for creation in self.creations:
            by_env.setdefault(creation.spec.env_key, Counter())["making"] += 1
        for waiter in self._queue.values():
            by_env.setdefault(waiter.spec.env_key, Counter())["waiting"] += 1
        total: Counter = sum(by_env.values(), Counter())
        names = ("leased", "idle", "deleting", "making", "waiting")
        return {
            **{name: total[name] for name in names},
            "capacity": self.capacity,
            "by_env": {env: {name: counter[name] for name in names} for env, counter in sorted(by_env.items())},
        }

    # -- on disk

    @property
    def unsaved(self) -> bool:
        return bool(self._unsaved)

    def save(self, path: Path, run_id: str) -> None:
        """Write what changed since the last save, all of it or nothing.

        Raises:
            LeaseFileError: nothing was written; the next save tries again.
        """
        changed = [(name, _as_row(self.slots[name])) for name in self._unsaved if name in self.slots]
        gone = [(name,) for name in self._unsaved if name not in self.slots]
        try:
            with closing(_open(path)) as file, file:
                if file.execute("SELECT run_id FROM run").fetchall() != [(run_id,)]:
                    # Another run's, or nobody's: it is this run's now.
                    file.execute("DELETE FROM run")
                    file.execute("DELETE FROM slot")
                    file.execute("INSERT INTO run VALUES (?)", (run_id,))
                file.executemany("INSERT OR REPLACE INTO slot VALUES (?, ?)", changed)
                file.executemany("DELETE FROM slot WHERE instance_id = ?", gone)
        except sqlite3.Error as error:
            raise LeaseFileError(f"lease table {path} cannot be written: {error}") from None
        self._unsaved.clear()


def load_slots(path: Path, run_id: str) -> list[Slot]:
    """The slots that an earlier pool of the same run id saved; none if there is no such file."""
    if not path.exists():
        return []
    try:
        with closing(_open(path)) as file:
            if file.execute("SELECT run_id FROM run").fetchall() != [(run_id,)]:
                return []
            rows = [json.loads(row) for (row,) in file.execute("SELECT slot FROM slot")]
        return [Slot(**{**row, "state": SlotState(row["state"])}) for row in rows]
    except (sqlite3.Error, ValueError, TypeError) as error:
        # The control plane's own list still says what exists; only the leases' names are lost.
        raise LeaseFileError(f"lease table {path} cannot be read: {error}") from None


def _open(path: Path) -> sqlite3.Connection:
    file = sqlite3.connect(path, timeout=5.0)
    try:
        # Safe against the death of the pool, which is what the file is for; after that of the host the control plane's
        # list is asked.
        file.execute("PRAGMA synchronous = OFF")
        file.execute("CREATE TABLE IF NOT EXISTS run (run_id TEXT)")
        file.execute("CREATE TABLE IF NOT EXISTS slot (instance_id TEXT PRIMARY KEY, slot TEXT)")
    except BaseException:
        file.close()
        raise
    return file


def _as_row(slot: Slot) -> str:
    return json.dumps({**vars(slot), "state": slot.state.value})


class LeaseFileError(ValueError):
    """A lease table on disk that cannot be read or written."""
