"""The replay buffer: tickets bound what is in flight, and only fresh, informative groups reach the learner.

Staleness is bounded twice (async-RL practice shows that one of them is not enough): a ticket is given only while

    accepted + running < (max_staleness + trained steps + 1) * batch size

so that groups taken in start order are fresh by construction, and a batch is checked again when it is taken.
"""

from __future__ import annotations

import asyncio
import enum
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.ledger import Ledger
from actors.trajectory import Cancelled, Group, Outcome


class TicketState(enum.Enum):
    RUNNING = "running"
    BUFFERED = "buffered"
    TRAINING = "training"
    TRAINED = "trained"
    DROPPED = "dropped"


_TRANSITIONS = {
    TicketState.RUNNING: {TicketState.BUFFERED, TicketState.DROPPED},
    TicketState.BUFFERED: {TicketState.TRAINING, TicketState.DROPPED},
    TicketState.TRAINING: {TicketState.TRAINED},
    TicketState.TRAINED: set(),
    TicketState.DROPPED: set(),
}


@dataclass(frozen=True)
class GroupHeader:
    """What the buffer knows of a group without fetching its payload."""

    task_key: str
    env_key: str
    outcomes: dict[str, Outcome]  # by episode id
    rewards: tuple[float, ...]  # of the members that enter the group's statistics
    oldest_version: int | None
    newest_version: int | None
    nbytes: int
    sampled_tokens: int

    @classmethod
    def of(cls, group: Group, overlong_filtering: bool) -> GroupHeader:
        members = group.members(overlong_filtering)
        versions = [span.version for t in members for span in t.spans]
        return cls(
            task_key=group.task_key,
            env_key=group.env_key,
            outcomes={t.trajectory_id: t.outcome for t in group.trajectories},
            rewards=tuple(t.reward for t in members),
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            nbytes=group.nbytes,
            sampled_tokens=sum(int(t.mask.sum()) for t in group.trajectories),
        )


@dataclass
class Ticket:
    """The right to have one group in flight."""

    ticket_id: int
    issued_at: float  # monotonic seconds
    version: int  # trained version when it was issued
    episode_ids: list[str] = field(default_factory=list)
    task_key: str = ""
    phase: str = "issued"
    state: TicketState = TicketState.RUNNING
    header: GroupHeader | None = None
    payload: Any = None


class BatchTimeout(TimeoutError):
    """No batch was ready in time. The message names the outstanding tickets."""


class ReplayBufferCore:
    """Tickets, ledger and buffered groups. Plain Python: one caller at a time, no Ray, no waiting.

    Args:
        batch_size: groups of one training step.
        max_staleness: largest lag, in policy versions, of a group that is trained.
        max_running: groups in flight at once.
        max_bytes: bytes of buffered groups above which no ticket is given.
        resample_zero_variance: a group whose rewards are all equal is dropped instead of filling a place.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        max_running: int,
        max_bytes: int,
        resample_zero_variance: bool = False,
    ) -> None:
        if max_running < 1:
            raise ValueError("max_inflight_episodes allows less than one group: raise it or lower n_samples_per_prompt")
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.max_running = max_running
        self.max_bytes = max_bytes
        self.resample_zero_variance = resample_zero_variance
        self.ledger = Ledger()
        self.version = 0  # the version the next batch will be trained from
        self.trained_steps = 0
        self.draining = False
        self.dropped: Counter[str] = Counter()
        self.zero_variance: Counter[str] = Counter()
        self._tickets: dict[int, Ticket] = {}  # running, buffered and training; in start order
        self._trained_groups = 0
        self._next_id = 0

    def count(self, state: TicketState) -> int:
        return sum(ticket.state is state for ticket in self._tickets.values())

    @property
    def accepted(self) -> int:
        """Groups buffered, in training or trained: those that hold a place in a batch for good."""
        return self._trained_groups + self.count(TicketState.BUFFERED) + self.count(TicketState.TRAINING)

    @property
    def running(self) -> int:
        return self.count(TicketState.RUNNING)

    @property
    def buffered_bytes(self) -> int:
        return sum(t.header.nbytes for t in self._tickets.values() if t.state is TicketState.BUFFERED)

    @property
    def capacity(self) -> int:
        """Tickets that may be given now."""
        if self.draining or self.buffered_bytes >= self.max_bytes:
            return 0
        room = (self.max_staleness + self.trained_steps + 1) * self.batch_size - (self.accepted + self.running)
        return max(0, min(room, self.max_running - self.running))

    def issue(self) -> Ticket | None:
        if self.capacity == 0:
            return None
        ticket = Ticket(self._next_id, time.monotonic(), self.version)
        self._next_id += 1
        self._tickets[ticket.ticket_id] = ticket
        return ticket

    def start(self, ticket_id: int, task_key: str, episode_ids: list[str]) -> None:
        """Record what a ticket is used for."""
        ticket = self._running(ticket_id)
        self.ledger.dispatch(episode_ids)
        ticket.task_key, ticket.episode_ids, ticket.phase = task_key, episode_ids, "episodes"

    def commit(self, ticket_id: int, header: GroupHeader, payload: Any) -> str:
        """Redeem a ticket. Returns ``"buffered"`` or why the group was dropped."""
        ticket = self._running(ticket_id)
        for episode_id, outcome in header.outcomes.items():
            self.ledger.end(episode_id, outcome)
        ticket.header, ticket.payload = header, payload
        verdict = self._judge(header)
        if verdict is not None:
            self._drop(ticket, verdict)
            return verdict
        self._move(ticket, TicketState.BUFFERED)
        return "buffered"

    def abandon(self, ticket_id: int, outcome: Outcome) -> None:
        """Return a ticket whose group will not come; every episode of it ends with ``outcome``.

        A ticket that was redeemed meanwhile stays so: the group's commit may have overtaken its cancellation.
        """
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not TicketState.RUNNING:
            return
        for episode_id in ticket.episode_ids:
            self.ledger.end(episode_id, outcome)
        self._drop(ticket, "cancelled" if isinstance(outcome, Cancelled) else "failed")

    def take(self) -> list[Ticket] | None:
        """The next batch in start order, or ``None`` while too few fresh groups are buffered."""
        for ticket in [t for t in self._tickets.values() if t.state is TicketState.BUFFERED]:
            if self.lag(ticket.header) > self.max_staleness:
                self._drop(ticket, "stale")
        ready = [t for t in self._tickets.values() if t.state is TicketState.BUFFERED]
        if len(ready) < self.batch_size:
            return None
        batch = ready[: self.batch_size]
        for ticket in batch:
            self._move(ticket, TicketState.TRAINING)
        return batch

    def acknowledge(self, version: int) -> None:
        """The batch in training has been trained on, and its weights are published as ``version``."""
        if version <= self.version:
            raise ValueError(f"published version {version} is not newer than {self.version}")
        for ticket in [t for t in self._tickets.values() if t.state is TicketState.TRAINING]:
            self._move(ticket, TicketState.TRAINED)
            del self._tickets[ticket.ticket_id]
            self._trained_groups += 1
        self.version = version
        self.trained_steps += 1

    def lag(self, header: GroupHeader) -> int:
        """Staleness of a group: trained version minus the oldest version in any of its spans."""
        if header.oldest_version is None:
            return 0
        lag = self.version - header.oldest_version
        if lag < 0:
            raise ValueError(f"group of {header.task_key} was sampled under an unpublished version (lag {lag})")
        return lag

    def drain(self, reason: str) -> None:
        """Give no further ticket and drop what is buffered: the run ends."""
        self.draining = True
        for ticket in [t for t in self._tickets.values() if t.state is TicketState.BUFFERED]:
            self._drop(ticket, reason)

    def outstanding(self) -> str:
        """The running tickets, oldest first, in words."""
        now = time.monotonic()
        running = [t for t in self._tickets.values() if t.state is TicketState.RUNNING]
        named = [f"#{t.ticket_id} {t.task_key or '?'} in {t.phase} for {now - t.issued_at:.0f} s" for t in running[:8]]
        more = f" and {len(running) - 8} more" if len(running) > 8 else ""
        return ("; ".join(named) + more) or "none"

    def snapshot(self) -> dict:
        return {
            "version": self.version,
            "trained_steps": self.trained_steps,
            "running": self.running,
            "buffered": self.count(TicketState.BUFFERED),
            "training": self.count(TicketState.TRAINING),
            "trained": self._trained_groups,
            "bytes": self.buffered_bytes,
            "capacity": self.capacity,
            "dropped": dict(self.dropped),
            "zero_variance": dict(self.zero_variance),
            "ledger": self.ledger.snapshot(),
        }

    def _judge(self, header: GroupHeader) -> str | None:
        if self.draining:
            return "draining"
        if len(header.rewards) < 2:
            return "too_few_graded"
        if self.lag(header) > self.max_staleness:
            return "stale"
        if len(set(header.rewards)) == 1:
            self.zero_variance["all_solved" if header.rewards[0] > 0 else "none_solved"] += 1
            if self.resample_zero_variance:
                return "zero_variance"
        return None

    def _running(self, ticket_id: int) -> Ticket:
        ticket = self._tickets.get(ticket_id)
        if ticket is None or ticket.state is not TicketState.RUNNING:
            raise ValueError(f"ticket {ticket_id} is not in flight")
        return ticket

    def _move(self, ticket: Ticket, state: TicketState) -> None:
        if state not in _TRANSITIONS[ticket.state]:
            raise ValueError(f"ticket {ticket.ticket_id} cannot go from {ticket.state.value} to {state.value}")
        ticket.state = state

    def _drop(self, ticket: Ticket, reason: str) -> None:
        self._move(ticket, TicketState.DROPPED)
        self.dropped[reason] += 1
        del self._tickets[ticket.ticket_id]


@ray.remote(num_cpus=0)
class ReplayBuffer:
    """The actor around :class:`ReplayBufferCore`: long-polls for tickets and batches, nothing more."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._core = ReplayBufferCore(**settings)
        self._changed = asyncio.Condition()

    async def issue(self, timeout_s: float) -> tuple[int, int] | None:
        """A ticket as ``(ticket_id, trained version)``, or ``None`` when none became free in time."""
        ticket = await self._wait(self._core.issue, timeout_s)
        return None if ticket is None else (ticket.ticket_id, ticket.version)

    async def start(self, ticket_id: int, task_key: str, episode_ids: list[str]) -> None:
        self._core.start(ticket_id, task_key, episode_ids)

    async def commit(self, ticket_id: int, header: GroupHeader, payload: list) -> str:
        """``payload`` is a one-element list with the group's object reference, so that Ray does not fetch it here."""
        verdict = self._core.commit(ticket_id, header, payload)
        await self._notify()
        return verdict

    async def abandon(self, ticket_id: int, outcome: Outcome) -> None:
        self._core.abandon(ticket_id, outcome)
        await self._notify()

    async def get_batch(self, step: int, timeout_s: float) -> dict[str, Any] | None:
        """The batch for ``step``: ``{"refs", "headers", "lags", "version"}``; ``None`` when the run is draining.

        Raises:
            BatchTimeout: naming the outstanding tickets.
        """
        batch = await self._wait(lambda: [] if self._core.draining else self._core.take(), timeout_s)
        if batch is None:
            raise BatchTimeout(f"no batch for step {step} in {timeout_s:.0f} s; tickets: {self._core.outstanding()}")
        if not batch:
            return None
        await self._notify()
        return {
            "refs": [ticket.payload[0] for ticket in batch],
            "headers": [ticket.header for ticket in batch],
            "lags": [self._core.lag(ticket.header) for ticket in batch],
            "version": self._core.version,
        }

    async def ack(self, step: int, version: int) -> None:
        self._core.acknowledge(version)
        await self._notify()

    async def drain(self, reason: str) -> None:
        self._core.drain(reason)
        await self._notify()

    async def snapshot(self) -> dict:
        return self._core.snapshot()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, attempt, timeout_s: float):
        """Call ``attempt`` until it answers other than ``None``, whenever something changed, until the deadline."""
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while (answer := attempt()) is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    return None
            return answer
