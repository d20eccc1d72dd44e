"""Tickets and buffered groups, as plain Python: what is in flight is bounded, and only fresh groups reach the learner.

Staleness is bounded twice, because neither bound is enough alone. A ticket is given only while

    accepted + in flight < (max_staleness + trained batches + 1) * batch_size

where ``accepted`` counts the groups that were trained, are in training or are buffered: groups that are taken in start
order are fresh then. But a slow group may be overtaken by faster ones, so a group that is too old when it comes, or
when the version moves on, is dropped, and its ticket may be given anew.
"""

from __future__ import annotations

import enum
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from actors.ledger import Ledger
from actors.length_bias import LengthBias
from actors.lineage import Lineage
from actors.trajectory import OUTCOME_NAMES, Cancelled, Group, Outcome

logger = logging.getLogger(__name__)

NAMED_TICKETS = 5  # in the message of a batch that does not come


class TicketState(enum.StrEnum):
    """Where a ticket's group is."""

    ISSUED = "issued"  # its task is being chosen
    DISPATCHED = "dispatched"  # a worker has it: waiting for a place, an instance or a reset
    GENERATING = "generating"  # its first turn was asked for
    BUFFERED = "buffered"  # waiting to be trained on
    TRAINING = "training"  # in the learner's batch, not acknowledged yet
    TRAINED = "trained"
    DROPPED = "dropped"


TRANSITIONS: dict[TicketState, frozenset[TicketState]] = {
    TicketState.ISSUED: frozenset({TicketState.DISPATCHED, TicketState.DROPPED}),
    # Who notes the first turn may die before the note arrives, or every episode before its first turn.
    TicketState.DISPATCHED: frozenset({TicketState.GENERATING, TicketState.BUFFERED, TicketState.DROPPED}),
    # Dispatched again where the run is continued by another process.
    TicketState.GENERATING: frozenset({TicketState.BUFFERED, TicketState.DROPPED, TicketState.DISPATCHED}),
    TicketState.BUFFERED: frozenset({TicketState.TRAINING, TicketState.DROPPED}),
    # Back to the buffer with a learner that died before it acknowledged the batch.
    TicketState.TRAINING: frozenset({TicketState.TRAINED, TicketState.BUFFERED}),
    TicketState.TRAINED: frozenset(),
    TicketState.DROPPED: frozenset(),
}

IN_FLIGHT = (TicketState.ISSUED, TicketState.DISPATCHED, TicketState.GENERATING)


class TicketError(ValueError):
    """A ticket was used in a way its state does not allow. The call has changed nothing."""


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

    def state(self) -> dict[str, Any]:
        """As plain JSON values."""
        outcomes = {i: [OUTCOME_NAMES[type(o)], *vars(o).values()] for i, o in self.outcomes.items()}
        return vars(self) | {"outcomes": outcomes, "rewards": list(self.rewards)}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> GroupHeader:
        kinds = {name: kind for kind, name in OUTCOME_NAMES.items()}
        outcomes = {i: kinds[name](*rest) for i, (name, *rest) in state["outcomes"].items()}
        return cls(**state | {"outcomes": outcomes, "rewards": tuple(state["rewards"])})


@dataclass
class Ticket:
    """The right to have one group in flight."""

    ticket_id: int
    version: int  # trained version when it was issued
    since: float  # seconds of the buffer's clock: when it came into its state
    state: TicketState = TicketState.ISSUED
    task_key: str = "?"
    worker: str = ""
    episode_ids: list[str] = field(default_factory=list)
    header: GroupHeader | None = None
    payload: Any = None

    def __str__(self) -> str:
        return f"#{self.ticket_id} {self.task_key} {self.state.value}" + (f" on {self.worker}" if self.worker else "")


class ReplayBufferCore:
    """Tickets, ledger and buffered groups: one caller at a time, no Ray, no waiting.

    Args:
        batch_size: groups of one training step.
        max_staleness: largest lag, in policy versions, of a group that is trained.
        max_running: groups in flight at once.
        max_bytes: no ticket is given while buffered groups, and those in flight at the mean size so far, are larger.
            The next batch always finds room, whatever its size: otherwise nothing would go on.
        resample_zero_variance: a group whose rewards are all equal is dropped instead of filling a place.
        window: a batch is taken from this many of the oldest groups, in flight ones included; ``batch_size`` takes
            groups strictly in the order they were started, ``None`` the oldest of all that are ready. A batch of the
            ready ones waits least; since fast groups fill it first, it favours short episodes.
        clock: seconds, from any origin.

    Raises:
        ValueError: sizes with which no batch could ever be filled.
    """

    def __init__(
        self,
        batch_size: int,
        max_staleness: int,
        max_running: int,
        max_bytes: int,
        resample_zero_variance: bool = False,
        window: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_sizes(batch_size, max_staleness, max_running, max_bytes, window)
        self.batch_size = batch_size
        self.max_staleness = max_staleness
        self.max_running = max_running
        self.max_bytes = max_bytes
        self.resample_zero_variance = resample_zero_variance
        self.window = window
        self.ledger = Ledger()
        self.lineage = Lineage()
        self.trained_steps = 0
        self.draining = False
        self.dropped: Counter[str] = Counter()
        self.zero_variance: Counter[str] = Counter()
        self.lengths = LengthBias()
        self._clock = clock
        self._tickets: dict[int, Ticket] = {}  # in flight, buffered and in training; in start order
        self._counts: Counter[TicketState] = Counter()  # of all tickets ever
        self._bytes = 0  # of the buffered groups
        self._committed = 0
        self._committed_bytes = 0
        self._next_id = 0
        self._sampler_state: Mapping[str, Any] | None = None

    # What there is

    @property
    def version(self) -> int:
        """The policy version the next batch will be trained from."""
        return self.lineage.newest

    def count(self, state: TicketState) -> int:
        """Groups in that state; of the two final states, all so far."""
        return self._counts[state]

    @property
    def running(self) -> int:
        """Groups in flight."""
        return sum(self._counts[state] for state in IN_FLIGHT)

    @property
    def buffered(self) -> int:
        return self._counts[TicketState.BUFFERED]

    @property
    def accepted(self) -> int:
        """Groups that hold a place in a batch: trained, in training or buffered."""
        return self._counts[TicketState.TRAINED] + self._counts[TicketState.TRAINING] + self.buffered

    @property
    def buffered_bytes(self) -> int:
        return self._bytes

    @property
    def capacity(self) -> int:
        """Tickets that may be given now."""
        if self.draining:
            return 0
        running = self.running
        fresh = (self.max_staleness + self.trained_steps + 1) * self.batch_size - (self.accepted + running)
        needed = self.batch_size - (self.buffered + running)
        return max(0, min(fresh, self.max_running - running, max(needed, self._room_in_bytes(running))))

    def _room_in_bytes(self, running: int) -> int:
        """Groups of mean size until ``max_bytes`` is reached."""
        if not self._committed_bytes:
            return self.max_running
        mean = self._committed_bytes / self._committed
        return math.ceil((self.max_bytes - self._bytes) / mean - running)

    def lag(self, header: GroupHeader) -> int:
        """Staleness of a group: updates from the oldest version in any of its spans to the trained one."""
        if header.oldest_version is None:
            return 0
        try:
            return self.lineage.lag(header.oldest_version)
        except ValueError as error:
            raise TicketError(f"group of {header.task_key} was sampled under an unpublished version: {error}") from None

    # The way of a ticket

    def issue(self) -> Ticket | None:
        if self.capacity == 0:
            return None
        ticket = Ticket(self._next_id, self.version, self._clock())
        self._next_id += 1
        self._tickets[ticket.ticket_id] = ticket
        self._counts[ticket.state] += 1
        return ticket

    def start(
        self, ticket_id: int, task_key: str, episode_ids: list[str], sampler_state: Mapping[str, Any] | None = None
    ) -> None:
        """Record what a ticket is used for: its episodes are in flight from now on.

        Args:
            sampler_state: where the sampler of tasks stands after this one; part of :meth:`state`.
        """
        ticket = self._ticket(ticket_id, TicketState.DISPATCHED)
        self.ledger.dispatch(episode_ids)
        self._sampler_state = sampler_state
        ticket.task_key, ticket.episode_ids = task_key, list(episode_ids)
        self._move(ticket, TicketState.DISPATCHED)

    def generating(self, ticket_id: int, worker: str) -> None:
        """A note that ``worker`` asked for the group's first turn. One that comes too late is of no interest."""
        ticket = self._tickets.get(ticket_id)
        if ticket is not None and ticket.state is TicketState.DISPATCHED:
            ticket.worker = worker
            self._move(ticket, TicketState.GENERATING)

    def commit(self, ticket_id: int, header: GroupHeader, payload: Any) -> str:
        """Redeem a ticket. Returns ``"buffered"`` or why the group was dropped.

        Raises:
            TicketError: the ticket is not in flight, its episodes are others, or a version was never published.
        """
        ticket = self._ticket(ticket_id, TicketState.BUFFERED)
        if header.outcomes.keys() != set(ticket.episode_ids):
            differ = sorted(header.outcomes.keys() ^ set(ticket.episode_ids))[:NAMED_TICKETS]
            raise TicketError(f"ticket {ticket}: committed and dispatched episodes differ: {', '.join(differ)}")
        verdict = self._judge(header)
        self.ledger.end_all(header.outcomes)
        ticket.header, ticket.payload = header, payload
        self._committed += 1
        self._committed_bytes += header.nbytes
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
        if ticket is None or ticket.state not in IN_FLIGHT:
            return
        self.ledger.end_all(dict.fromkeys(ticket.episode_ids, outcome))
        self._drop(ticket, "cancelled" if isinstance(outcome, Cancelled) else "failed")

    def take(self) -> list[Ticket] | None:
        """The next batch, in start order; ``None`` while too few groups are buffered in the window.

        Raises:
            TicketError: the last batch was neither acknowledged nor given back.
        """
        if self._counts[TicketState.TRAINING]:
            names = ", ".join(f"#{t.ticket_id}" for t in self._in(TicketState.TRAINING))
            raise TicketError(f"the batch of {names} is still in training: acknowledge it or give it back first")
        if self.buffered < self.batch_size:
            return None
        batch = list(islice(self._ready(), self.batch_size))
        if len(batch) < self.batch_size:
            return None
        for ticket in batch:
            self._move(ticket, TicketState.TRAINING)
        return batch

    def acknowledge(self, version: int | None) -> None:
        """The batch in training has been trained on, and its weights are published as ``version``.

        ``None``: it was used in another way, and the weights are those they were.
        """
        if not self._counts[TicketState.TRAINING]:
            raise TicketError(f"version {version} is acknowledged, but no batch is in training")
        if version is not None:
            self._check_newer(version)
        for ticket in self._in(TicketState.TRAINING):
            self._move(ticket, TicketState.TRAINED)
            self.lengths.end(ticket.header.sampled_tokens, trained=True)
        self.trained_steps += 1
        self.lengths.begin_step()
        if version is not None:
            self.advance(version)

    def give_back(self) -> None:
        """The batch in training was not trained on: its groups wait again, in their old order."""
        for ticket in self._in(TicketState.TRAINING):
            self._move(ticket, TicketState.BUFFERED)
        self._drop_stale()

    def advance(self, version: int) -> None:
        """Weights were published as ``version``; by a learner that starts again, without a batch."""
        self._check_newer(version)
        self.lineage.advance(version)
        self._drop_stale()

    def drain(self, reason: str) -> None:
        """Give no further ticket and drop what is buffered: the run ends."""
        self.draining = True
        for ticket in self._in(TicketState.BUFFERED):
            self._drop(ticket, reason)

    # Reports

    def outstanding(self) -> str:
        """What a batch waits for, in words: the tickets in flight by state, the oldest of them by name."""
        buffered = f"{self.buffered} of {self.batch_size} groups are buffered"
        tickets = [ticket for ticket in self._tickets.values() if ticket.state in IN_FLIGHT]
        if not tickets:
            return f"{buffered}; no ticket is out, {self.capacity} could be given"
        counts = ", ".join(f"{self._counts[s]} {s.value}" for s in IN_FLIGHT if self._counts[s])
        now = self._clock()
        oldest = "; ".join(f"{ticket} for {now - ticket.since:.0f} s" for ticket in tickets[:NAMED_TICKETS])
        return f"{buffered}; tickets out: {counts}; the oldest: {oldest}"

    def snapshot(self) -> dict[str, Any]:
        return {
            "version": self.version,
            "trained_steps": self.trained_steps,
            "running": self.running,
            "issued": self._counts[TicketState.ISSUED],
            "dispatched": self._counts[TicketState.DISPATCHED],
            "generating": self._counts[TicketState.GENERATING],
            "buffered": self.buffered,
            "training": self._counts[TicketState.TRAINING],
            "trained": self._counts[TicketState.TRAINED],
            "bytes": self._bytes,
            "capacity": self.capacity,
            "dropped": dict(self.dropped),
            "zero_variance": dict(self.zero_variance),
            "lengths": self.lengths.snapshot(),
            "ledger": self.ledger.snapshot(),
        }

    def state(self) -> dict[str, Any]:
        """Everything but sizes and payloads, as plain JSON values; see :meth:`restore`."""
        return {
            "lineage": self.lineage.stretches,
            "sampler": self._sampler_state,
            "trained_steps": self.trained_steps,
            "trained_groups": self._counts[TicketState.TRAINED],
            "next_id": self._next_id,
            "draining": self.draining,
            "committed": self._committed,
            "committed_bytes": self._committed_bytes,
            "dropped": dict(self.dropped),
            "zero_variance": dict(self.zero_variance),
            "lengths": self.lengths.state(),
            "ledger": self.ledger.state(),
            "tickets": [self._ticket_state(ticket) for ticket in self._tickets.values()],
        }

    def payloads(self) -> dict[int, Any]:
        """What :meth:`state` leaves out, by ticket."""
        return {t.ticket_id: t.payload for t in self._tickets.values() if t.header is not None}

    def restore(self, state: Mapping[str, Any], payloads: Mapping[int, Any]) -> None:
        """Go on where the buffer was that said ``state``; this one must be new. Sizes are this one's own.

        Raises:
            LedgerError: the account in ``state`` does not balance.
            KeyError: the payload of a group is missing.
        """
        self.ledger = Ledger.restored(state["ledger"])
        self.lineage, self.trained_steps = Lineage(state["lineage"]), state["trained_steps"]
        self._sampler_state = state["sampler"]
        self.draining, self._next_id = state["draining"], state["next_id"]
        self._committed, self._committed_bytes = state["committed"], state["committed_bytes"]
        self.dropped, self.zero_variance = Counter(state["dropped"]), Counter(state["zero_variance"])
        self.lengths = LengthBias(state.get("lengths", ()))  # no run fails to go on for want of a figure
        self._tickets = {t.ticket_id: t for t in (self._restored_ticket(s, payloads) for s in state["tickets"])}
        self._counts = Counter(ticket.state for ticket in self._tickets.values())
        self._counts[TicketState.DROPPED] = sum(self.dropped.values())
        self._counts[TicketState.TRAINED] = state["trained_groups"]
        self._bytes = sum(ticket.header.nbytes for ticket in self._in(TicketState.BUFFERED))

    def resume(self, version: int) -> list[Ticket]:
        """After :meth:`restore` in a new run of the same name: the same weights are now called ``version``, and whoever
        had a ticket is gone.

        Returns:
            The tickets whose groups must be rolled out anew, with the same episode ids, in start order.
        """
        self.lineage.rename(version)
        self.give_back()
        for ticket in self._in(TicketState.ISSUED):
            # What it would have been used for is not decided: the sampler's next task gets its number again.
            self._next_id = min(self._next_id, ticket.ticket_id)
            self._counts[ticket.state] -= 1
            del self._tickets[ticket.ticket_id]
        for ticket in self._in(TicketState.GENERATING):
            ticket.worker = ""
            self._move(ticket, TicketState.DISPATCHED)
        return self._in(TicketState.DISPATCHED)

    def _ticket_state(self, ticket: Ticket) -> dict[str, Any]:
        return {
            "ticket_id": ticket.ticket_id,
            "version": ticket.version,
            "seconds": self._clock() - ticket.since,  # another process has another clock
            "state": ticket.state.value,
            "task_key": ticket.task_key,
            "worker": ticket.worker,
            "episode_ids": list(ticket.episode_ids),
            "header": None if ticket.header is None else ticket.header.state(),
        }

    def _restored_ticket(self, state: Mapping[str, Any], payloads: Mapping[int, Any]) -> Ticket:
        has_group = state["header"] is not None
        return Ticket(
            ticket_id=state["ticket_id"],
            version=state["version"],
            since=self._clock() - state["seconds"],
            state=TicketState(state["state"]),
            task_key=state["task_key"],
            worker=state["worker"],
            episode_ids=list(state["episode_ids"]),
            header=GroupHeader.restored(state["header"]) if has_group else None,
            payload=payloads[state["ticket_id"]] if has_group else None,
        )

    # Inside

    def _judge(self, header: GroupHeader) -> str | None:
        lag = self.lag(header)
        if self.draining:
            return "draining"
        if len(header.rewards) < 2:
            return "too_few_graded"
        if lag > self.max_staleness:
            return "stale"
        if len(set(header.rewards)) == 1:
            self.zero_variance["all_solved" if header.rewards[0] > 0 else "none_solved"] += 1
            if self.resample_zero_variance:
                return "zero_variance"
        return None

    def _ready(self) -> Iterator[Ticket]:
        """Buffered groups of the window, oldest first. None is in training when this is asked."""
        waiting = islice(self._tickets.values(), self.window)
        return (ticket for ticket in waiting if ticket.state is TicketState.BUFFERED)

    def _in(self, state: TicketState) -> list[Ticket]:
        return [ticket for ticket in self._tickets.values() if ticket.state is state]

    def _check_newer(self, version: int) -> None:
        if version <= self.version:
            raise TicketError(f"published version {version} is not newer than {self.version}")

    def _drop_stale(self) -> None:
        """The bound at consumption. A group ages only when the version moves, so this is where it is too old first."""
        for ticket in self._in(TicketState.BUFFERED):
            if self.lag(ticket.header) > self.max_staleness:
                self._drop(ticket, "stale")

    def _ticket(self, ticket_id: int, goal: TicketState) -> Ticket:
        """The ticket, if it may go to ``goal``."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise TicketError(f"ticket #{ticket_id} is not in flight: never issued, or trained or dropped already")
        if goal not in TRANSITIONS[ticket.state]:
            raise TicketError(f"ticket {ticket} cannot become {goal.value}")
        return ticket

    def _move(self, ticket: Ticket, state: TicketState) -> None:
        self._ticket(ticket.ticket_id, state)
        logger.debug("ticket %s becomes %s", ticket, state.value)
        if ticket.header is not None:
            buffered = (state is TicketState.BUFFERED) - (ticket.state is TicketState.BUFFERED)
            self._bytes += buffered * ticket.header.nbytes
        self._counts[ticket.state] -= 1
        self._counts[state] += 1
        ticket.state, ticket.since = state, self._clock()
        if not TRANSITIONS[state]:
            del self._tickets[ticket.ticket_id]

    def _drop(self, ticket: Ticket, reason: str) -> None:
        self._move(ticket, TicketState.DROPPED)
        self.dropped[reason] += 1
        if ticket.header is not None:
            self.lengths.end(ticket.header.sampled_tokens, trained=False)


def _check_sizes(batch_size: int, max_staleness: int, max_running: int, max_bytes: int, window: int | None) -> None:
    if batch_size < 1:
        raise ValueError(f"a batch of {batch_size} groups is none: train_batch_size must be at least 1")
    if max_staleness < 0:
        raise ValueError(f"max_staleness {max_staleness} leaves ({max_staleness} + 1) * {batch_size} tickets: none")
    if max_running < 1:
        raise ValueError("max_inflight_episodes allows less than one group: raise it or lower n_samples_per_prompt")
    if max_bytes < 1:
        raise ValueError(f"max_bytes {max_bytes} holds no group: it must be at least 1")
    if window is not None and window < batch_size:
        raise ValueError(
            f"a window of {window} groups never holds a batch of {batch_size}: make window at least {batch_size}"
        )
