"""Who uses which instance, who waits, and what to do next. Plain data and decisions: no clock, no network, no tasks."""

from __future__ import annotations

import enum
import json
import os
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

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


@dataclass(eq=False)
class Creation:
    """An instance being made. ``waiter`` is who it was begun for; whoever waits longest for its key will get it.

    ``asked``: the control plane was asked at least once, so there may be an instance.
    """

    spec: EnvSpec
    key: str
    waiter: Waiter
    asked: bool = False


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

    Args:
        max_instances: our own bound, whatever the account allows.
        need_s: an instance is given out only while this many seconds of its TTL are left.
    """

    def __init__(self, max_instances: int | None, need_s: float) -> None:
        self.max_instances = max_instances
        self.need_s = need_s
        self.slots: dict[str, Slot] = {}
        self.queue: deque[Waiter] = deque()
        self.creations: list[Creation] = []
        self.blocked: dict[str, float] = {}  # environments whose instances cannot be made now: until when
        self.account_limit: int | None = None
        self.others = 0  # instances of the account that are not ours

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

    def next_step(self, now: float) -> Grant | Create | Evict | None:
        """The next thing to do, or None. Strictly first in, first out: nobody overtakes a waiter that has nothing."""
        promised = Counter(creation.key for creation in self.creations)
        freeing = sum(slot.state is SlotState.DELETING for slot in self.slots.values())
        for waiter in self.queue:
            slot = self._idle_for(waiter.key)
            if slot is not None:
                return Grant(waiter, slot) if slot.expires_at - now >= self.need_s else Evict(slot)
            if promised[waiter.key] > 0:
                promised[waiter.key] -= 1
                continue
            if self.blocked.get(waiter.spec.env_key, 0.0) > now:
                continue
            if self.capacity is None or self.used < self.capacity:
                return Create(waiter)
            if freeing > 0:
                freeing -= 1
                continue
            idle = self._oldest_idle()
            return None if idle is None else Evict(idle)
        return None

    def _idle_for(self, key: str) -> Slot | None:
        return next((s for s in self.slots.values() if s.state is SlotState.IDLE and s.key == key), None)

    def _oldest_idle(self) -> Slot | None:
        idle = [slot for slot in self.slots.values() if slot.state is SlotState.IDLE]
        return min(idle, key=lambda slot: slot.since, default=None)

    def begin(self, waiter: Waiter) -> Creation:
        creation = Creation(waiter.spec, waiter.key, waiter)
        self.creations.append(creation)
        return creation

    def made(self, creation: Creation, instance: dict[str, Any], now: float, expires_at: float) -> Slot:
        """A creation succeeded. The instance is idle until the next step grants it."""
        self.creations.remove(creation)
        slot = Slot(instance, creation.key, expires_at, since=now, beat_at=now)
        self.slots[slot.instance_id] = slot
        return slot

    def grant(self, grant: Grant, now: float, deadline: float) -> None:
        slot, waiter = grant.slot, grant.waiter
        self.queue.remove(waiter)
        slot.state, slot.since, slot.deadline = SlotState.LEASED, now, deadline
        slot.lease_id, slot.owner = waiter.lease_id, waiter.owner
        slot.uses += 1

    def set_state(self, slot: Slot, state: SlotState, now: float) -> None:
        slot.state, slot.since = state, now
        slot.lease_id, slot.owner, slot.deadline = None, "", 0.0

    def leased(self, lease_id: str) -> Slot | None:
        return next((slot for slot in self.slots.values() if slot.lease_id == lease_id), None)

    def waiting(self, lease_id: str) -> Waiter | None:
        return next((waiter for waiter in self.queue if waiter.lease_id == lease_id), None)

    def in_state(self, state: SlotState) -> list[Slot]:
        return [slot for slot in self.slots.values() if slot.state is state]

    # -- words and numbers

    def why_waiting(self, waiter: Waiter, now: float) -> str:
        """For the error of a waiter whose time is up: what is full, who holds it, and who stands before it."""
        ahead = list(self.queue).index(waiter)
        parts = []
        until = self.blocked.get(waiter.spec.env_key, 0.0)
        if until > now:
            parts.append(f"{waiter.spec.env_key} could not be made lately and is tried again in {until - now:.0f} s")
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
        for waiter in self.queue:
            by_env.setdefault(waiter.spec.env_key, Counter())["waiting"] += 1
        total: Counter = sum(by_env.values(), Counter())
        names = ("leased", "idle", "deleting", "making", "waiting")
        return {
            **{name: total[name] for name in names},
            "capacity": self.capacity,
            "by_env": {env: {name: counter[name] for name in names} for env, counter in sorted(by_env.items())},
        }

    # -- on disk

    def save(self, path: Path, run_id: str, now: float) -> None:
        """Write the table, whole or not at all."""
        slots = [{**asdict(slot), "state": slot.state.value} for slot in self.slots.values()]
        partial = path.with_name(path.name + ".partial")
        partial.write_text(json.dumps({"run_id": run_id, "saved_at": now, "slots": slots}), encoding="utf-8")
        os.replace(partial, path)


def load_slots(path: Path, run_id: str) -> list[Slot]:
    """The slots that an earlier pool of the same run id saved; none if there is no such file."""
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        # The control plane's own list still says what exists; only the leases' names are lost.
        raise LeaseFileError(f"lease table {path} cannot be read: {error}") from None
    if saved["run_id"] != run_id:
        return []
    return [Slot(**{**slot, "state": SlotState(slot["state"])}) for slot in saved["slots"]]


class LeaseFileError(ValueError):
    """A lease table on disk that cannot be read."""
