"""Tickets, buffer and ledger under any order of events, against a model; and saved and restored anywhere."""

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from actors.ledger import MAX_REASONS, OTHER_REASONS, Ledger, LedgerError
from actors.replay_buffer_core import IN_FLIGHT, GroupHeader, ReplayBufferCore, TicketState
from actors.trajectory import Cancelled, Graded, InfraFailed, Ungraded

KINDS = {
    "graded": Graded(1.0),
    "ungraded": Ungraded("a"),
    "infra_failed": InfraFailed("b"),
    "cancelled": Cancelled("c"),
}
ENDS = st.sampled_from([Graded(0.0), Graded(1.0), Ungraded("judge"), InfraFailed("network")])


def copied(core: ReplayBufferCore, sizes: dict) -> ReplayBufferCore:
    """What a new process makes of the state that this one wrote as JSON."""
    copy = ReplayBufferCore(**sizes)
    copy.restore(json.loads(json.dumps(core.state())), core.payloads())
    return copy


class BufferMachine(RuleBasedStateMachine):
    """The model keeps of each group where it is, by which the bounds are checked without the buffer's own counts."""

    @initialize(
        batch=st.integers(1, 3),
        staleness=st.integers(0, 3),
        running=st.integers(1, 6),
        max_bytes=st.sampled_from([150, 1000, 10**9]),
        resample=st.booleans(),
        window=st.one_of(st.none(), st.integers(0, 3)),
    )
    def begin(self, batch, staleness, running, max_bytes, resample, window):
        self.sizes = {
            "batch_size": batch,
            "max_staleness": staleness,
            "max_running": running,
            "max_bytes": max_bytes,
            "resample_zero_variance": resample,
            "window": None if window is None else batch + window,
        }
        self.core = ReplayBufferCore(**self.sizes)
        self.where: dict[int, str] = {}  # by ticket: issued, started, buffered, training, trained or dropped
        self.oldest: dict[int, int] = {}  # version a group was sampled under
        self.ended = Counter()
        self.version = self.steps = self.dispatched = 0

    def those(self, *places):
        return [ticket for ticket, place in self.where.items() if place in places]

    @rule()
    def issue(self):
        ticket = self.core.issue()
        flying, accepted = self.those("issued", "started"), self.those("buffered", "training", "trained")
        fresh = (self.sizes["max_staleness"] + self.steps + 1) * self.sizes["batch_size"]
        allowed = len(accepted) + len(flying) < fresh and len(flying) < self.sizes["max_running"]
        if ticket is None:
            waiting = len(self.those("buffered", "issued", "started"))
            assert not allowed or waiting >= self.sizes["batch_size"], "only bytes may hold it back, and no whole batch"
        else:
            assert allowed and ticket.ticket_id not in self.where
            self.where[ticket.ticket_id] = "issued"

    @precondition(lambda self: self.those("issued"))
    @rule(data=st.data())
    def start(self, data):
        ticket = data.draw(st.sampled_from(self.those("issued")))
        self.core.start(ticket, "task", [f"{ticket}/{i}" for i in range(3)])
        self.where[ticket], self.oldest[ticket] = "started", self.version
        self.dispatched += 3

    @precondition(lambda self: self.those("started"))
    @rule(data=st.data())
    def note(self, data):
        self.core.generating(data.draw(st.sampled_from(self.those("started"))), "worker")

    @precondition(lambda self: self.those("started"))
    @rule(data=st.data(), ends=st.lists(ENDS, min_size=3, max_size=3), nbytes=st.integers(1, 200))
    def commit(self, data, ends, nbytes):
        ticket = data.draw(st.sampled_from(self.those("started")))
        rewards = tuple(end.reward for end in ends if isinstance(end, Graded))
        oldest = self.oldest[ticket]
        outcomes = {f"{ticket}/{i}": end for i, end in enumerate(ends)}
        header = GroupHeader("task", "env", outcomes, rewards, oldest, self.version, nbytes, 10)
        verdict = self.core.commit(ticket, header, f"payload {ticket}")
        too_old = self.version - oldest > self.sizes["max_staleness"]
        dull = self.sizes["resample_zero_variance"] and len(set(rewards)) == 1
        expected = (
            "too_few_graded" if len(rewards) < 2 else "stale" if too_old else "zero_variance" if dull else "buffered"
        )
        assert verdict == expected
        self.where[ticket] = "buffered" if verdict == "buffered" else "dropped"
        self.ended.update(type(end) for end in ends)

    @precondition(lambda self: self.those("issued", "started"))
    @rule(data=st.data(), outcome=st.sampled_from([InfraFailed("x"), Cancelled("y")]))
    def abandon(self, data, outcome):
        ticket = data.draw(st.sampled_from(self.those("issued", "started")))
        self.ended[type(outcome)] += 3 * (self.where[ticket] == "started")
        self.core.abandon(ticket, outcome)
        self.where[ticket] = "dropped"

    @precondition(lambda self: not self.those("training"))
    @rule()
    def take(self):
        batch = self.core.take()
        alive = sorted(self.those("issued", "started", "buffered"))[: self.sizes["window"]]
        ready = [ticket for ticket in alive if self.where[ticket] == "buffered"]
        if batch is None:
            assert len(ready) < self.sizes["batch_size"]
            return
        assert [t.ticket_id for t in batch] == ready[: self.sizes["batch_size"]]
        for ticket in batch:
            assert 0 <= self.version - self.oldest[ticket.ticket_id] <= self.sizes["max_staleness"]
            assert ticket.payload == f"payload {ticket.ticket_id}"
            self.where[ticket.ticket_id] = "training"

    @precondition(lambda self: self.those("training"))
    @rule(ahead=st.integers(1, 2))
    def acknowledge(self, ahead):
        self.where |= dict.fromkeys(self.those("training"), "trained")
        self.version, self.steps = self.version + ahead, self.steps + 1
        self.core.acknowledge(self.version)
        self.forget_the_old()

    @rule()
    def learner_starts_again(self):
        """It gives its batch back and publishes its weights anew."""
        self.where |= dict.fromkeys(self.those("training"), "buffered")
        self.core.give_back()
        self.version += 1
        self.core.advance(self.version)
        self.forget_the_old()

    def forget_the_old(self):
        for ticket in self.those("buffered"):
            if self.version - self.oldest[ticket] > self.sizes["max_staleness"]:
                self.where[ticket] = "dropped"

    @rule()
    def buffer_starts_again(self):
        self.core = copied(self.core, self.sizes)

    @invariant()
    def the_ledger_balances(self):
        ledger = self.core.ledger
        assert ledger.balanced and ledger.dispatched == self.dispatched
        assert ledger.in_flight == 3 * len(self.those("started"))
        assert ledger.snapshot() | {name: self.ended[type(kind)] for name, kind in KINDS.items()} == ledger.snapshot()

    @invariant()
    def no_group_is_lost(self):
        core = self.core
        assert sum(core.dropped.values()) == core.count(TicketState.DROPPED) == len(self.those("dropped"))
        assert core.count(TicketState.TRAINED) == len(self.those("trained"))
        assert core.count(TicketState.TRAINING) == len(self.those("training"))
        assert core.buffered == len(self.those("buffered"))
        assert sum(core.count(state) for state in IN_FLIGHT) == len(self.those("issued", "started"))
        assert len(core.payloads()) == len(self.those("buffered", "training"))

    @invariant()
    def it_never_stands_still(self):
        """With nothing in flight and nothing in training, there is a batch or a ticket."""
        if not self.those("issued", "started", "training"):
            assert self.core.capacity > 0 or self.core.buffered >= self.sizes["batch_size"]


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)

EVENTS = st.lists(
    st.tuples(st.sampled_from(["issue", "note", "commit", "fail", "take", "ack", "back"]), st.integers(0, 9)),
    max_size=60,
)


def happen(core: ReplayBufferCore, event: str, choice: int) -> object:
    """One event, decided by nothing but the core's own state. Returns what it answered."""
    flying = [t["ticket_id"] for t in core.state()["tickets"] if t["state"] in IN_FLIGHT]
    if event == "issue":
        ticket = core.issue()
        if ticket is not None:
            core.start(ticket.ticket_id, f"task {choice}", [f"{ticket.ticket_id}/{i}" for i in range(2)])
        return ticket and ticket.ticket_id
    if event in ("note", "commit", "fail") and flying:
        ticket = flying[choice % len(flying)]
        if event == "note":
            return core.generating(ticket, "worker")
        if event == "fail":
            return core.abandon(ticket, InfraFailed("x"))
        outcomes = {f"{ticket}/{i}": Graded(float(i == choice % 3)) for i in range(2)}
        rewards = tuple(outcome.reward for outcome in outcomes.values())
        oldest = max(0, core.version - choice % 3)
        return core.commit(
            ticket, GroupHeader("t", "e", outcomes, rewards, oldest, core.version, 50, 10), f"of {ticket}"
        )
    training = core.count(TicketState.TRAINING)
    if event == "take" and not training:
        batch = core.take()
        return batch and [(t.ticket_id, t.payload, core.lag(t.header)) for t in batch]
    if event == "ack" and training:
        return core.acknowledge(core.version + 1 + choice % 2)
    return core.give_back() if event == "back" else None


@given(
    events=EVENTS, cut=st.integers(0, 60), window=st.sampled_from([None, 2, 4]), max_bytes=st.sampled_from([120, 10**9])
)
@settings(max_examples=150, deadline=None)
def test_a_buffer_restored_anywhere_goes_on_as_if_nothing_had_happened(events, cut, window, max_bytes):
    sizes = {"batch_size": 2, "max_staleness": 1, "max_running": 3, "max_bytes": max_bytes, "window": window}
    sizes["clock"] = lambda: 0.0
    undisturbed = ReplayBufferCore(**sizes)
    for event in events[:cut]:
        happen(undisturbed, *event)
    restored = copied(undisturbed, sizes)
    assert restored.state() == undisturbed.state() and restored.snapshot() == undisturbed.snapshot()
    for event in events[cut:]:
        assert happen(restored, *event) == happen(undisturbed, *event)
    assert restored.state() == undisturbed.state() and restored.snapshot() == undisturbed.snapshot()


def test_times_survive_a_process_with_another_clock():
    sizes = {"batch_size": 1, "max_staleness": 0, "max_running": 1, "max_bytes": 1}
    core = ReplayBufferCore(**sizes, clock=iter([100.0, 130.0]).__next__)
    core.issue()
    restored = ReplayBufferCore(**sizes, clock=lambda: 5000.0)
    restored.restore(core.state(), {})
    assert restored.outstanding().endswith("#0 ? issued for 30 s")


def test_a_state_that_does_not_balance_or_lacks_a_payload_is_refused():
    sizes = {"batch_size": 1, "max_staleness": 0, "max_running": 1, "max_bytes": 1}
    core = ReplayBufferCore(**sizes)
    core.start(core.issue().ticket_id, "task", ["a", "b"])
    core.commit(0, GroupHeader("t", "e", {"a": Graded(0.0), "b": Graded(1.0)}, (0.0, 1.0), 0, 0, 1, 1), "payload")
    with pytest.raises(KeyError):
        ReplayBufferCore(**sizes).restore(core.state(), {})
    state = core.state()
    state["ledger"]["dispatched"] += 1
    with pytest.raises(LedgerError, match="does not balance"):
        ReplayBufferCore(**sizes).restore(state, core.payloads())


@given(st.lists(st.sampled_from(sorted(KINDS)), max_size=30))
def test_the_ledger_counts_every_end(ends):
    ledger = Ledger()
    ledger.dispatch([str(i) for i in range(len(ends) + 2)])
    for index, name in enumerate(ends):
        ledger.end(str(index), KINDS[name])
        assert ledger.balanced
    snapshot = ledger.snapshot()
    assert snapshot["in_flight"] == 2 and {name: snapshot[name] for name in KINDS} == {n: ends.count(n) for n in KINDS}
    assert Ledger.restored(json.loads(json.dumps(ledger.state()))).snapshot() == snapshot


def test_an_episode_begins_and_ends_only_once_and_an_error_changes_nothing():
    ledger = Ledger()
    ledger.dispatch(["a", "b"])
    for twice in (["c", "a"], ["c", "c"]):
        with pytest.raises(LedgerError, match="is dispatched twice"):
            ledger.dispatch(twice)
    with pytest.raises(LedgerError, match="episode z ended but is not in flight"):
        ledger.end_all({"a": Graded(1.0), "z": Graded(1.0)})
    ledger.end("a", Graded(0.0))
    with pytest.raises(LedgerError):
        ledger.end("a", Graded(1.0))
    assert ledger.snapshot()["graded"] == 1 and ledger.in_flight == 1 and ledger.dispatched == 2


def test_reasons_that_are_all_different_do_not_fill_the_memory():
    ledger = Ledger()
    names = [str(i) for i in range(MAX_REASONS + 50)]
    ledger.dispatch(names)
    for name in names:
        ledger.end(name, InfraFailed(f"request {name} failed"))
    assert len(ledger.reasons) == MAX_REASONS + 1 and ledger.reasons[OTHER_REASONS] == 50
