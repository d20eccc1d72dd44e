"""Tickets, ledger and staleness, as plain Python."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.ledger import Ledger, LedgerError
from actors.replay_buffer import GroupHeader, ReplayBufferCore
from actors.trajectory import Cancelled, Graded, InfraFailed, Ungraded


def header(ids, rewards, version, *, ungraded=(), nbytes=100):
    outcomes = {i: Graded(r) for i, r in zip(ids, rewards, strict=False)}
    outcomes |= {i: Ungraded("judge") for i in ungraded}
    return GroupHeader("task", "env", outcomes, tuple(rewards), version, version, nbytes, 10)


def buffer(**overrides):
    settings_ = {"batch_size": 2, "max_staleness": 1, "max_running": 100, "max_bytes": 10**9} | overrides
    return ReplayBufferCore(**settings_)


def roll_out(core, rewards=(0.0, 1.0), version=None):
    ticket = core.issue()
    ids = [f"{ticket.ticket_id}/{i}" for i in range(len(rewards))]
    core.start(ticket.ticket_id, "task", ids)
    return core.commit(ticket.ticket_id, header(ids, rewards, core.version if version is None else version), ["ref"])


def test_tickets_are_bounded_by_staleness():
    core = buffer(batch_size=2, max_staleness=1)
    assert [core.issue() is not None for _ in range(5)] == [True, True, True, True, False]


def test_tickets_are_bounded_by_episodes_in_flight():
    core = buffer(max_staleness=9, max_running=3)
    assert [core.issue() is not None for _ in range(4)] == [True, True, True, False]


def test_at_staleness_zero_the_next_batch_starts_only_after_the_last_was_trained():
    core = buffer(max_staleness=0)
    assert roll_out(core) == roll_out(core) == "buffered"
    assert core.issue() is None
    assert len(core.take()) == 2
    assert core.issue() is None
    core.acknowledge(1)
    assert core.capacity == 2


def test_a_stale_group_is_dropped_when_the_batch_is_taken_and_its_ticket_comes_back():
    core = buffer(batch_size=1, max_staleness=1)
    slow, fast = core.issue(), core.issue()
    for ticket in (slow, fast):
        core.start(ticket.ticket_id, "task", [f"{ticket.ticket_id}/0", f"{ticket.ticket_id}/1"])
    core.commit(fast.ticket_id, header(["1/0", "1/1"], (0.0, 1.0), 0), ["ref"])
    core.take()
    core.acknowledge(1)
    assert roll_out(core) == "buffered"
    core.take()
    core.acknowledge(2)
    assert core.commit(slow.ticket_id, header(["0/0", "0/1"], (0.0, 1.0), 0), ["ref"]) == "stale"
    assert core.dropped == {"stale": 1} and core.capacity == 2


def test_a_group_with_fewer_than_two_graded_members_is_dropped_and_counted():
    core = buffer()
    ticket = core.issue()
    core.start(ticket.ticket_id, "task", ["a", "b"])
    assert core.commit(ticket.ticket_id, header(["a"], (1.0,), 0, ungraded=["b"]), ["ref"]) == "too_few_graded"
    assert core.ledger.ended == {"graded": 1, "ungraded": 1}
    assert core.capacity == 4


@pytest.mark.parametrize(("resample", "verdict"), [(False, "buffered"), (True, "zero_variance")])
def test_groups_without_variance_are_counted_and_replaced_only_on_request(resample, verdict):
    core = buffer(resample_zero_variance=resample)
    assert roll_out(core, (1.0, 1.0)) == roll_out(core, (0.0, 0.0)) == verdict
    assert core.zero_variance == {"all_solved": 1, "none_solved": 1}


def test_a_group_sampled_under_an_unpublished_version_is_refused():
    core = buffer()
    with pytest.raises(ValueError, match="unpublished"):
        roll_out(core, version=5)


def test_bytes_bound_the_buffer():
    core = buffer(max_bytes=150, max_staleness=9)
    roll_out(core)
    assert core.capacity > 0
    roll_out(core)
    assert core.capacity == 0


def test_the_deadline_names_the_outstanding_tickets():
    core = buffer()
    ticket = core.issue()
    core.start(ticket.ticket_id, "find-the-printer", ["a"])
    assert "#0 find-the-printer in episodes for 0 s" in core.outstanding()


def test_a_version_that_does_not_grow_is_refused():
    core = buffer()
    with pytest.raises(ValueError, match="not newer"):
        core.acknowledge(0)


def test_an_episode_ends_only_once():
    ledger = Ledger()
    ledger.dispatch(["a"])
    ledger.end("a", Graded(0.0))
    with pytest.raises(LedgerError):
        ledger.end("a", Graded(1.0))
    with pytest.raises(LedgerError):
        ledger.end("b", Graded(1.0))


def test_too_few_episodes_for_one_group_is_refused():
    with pytest.raises(ValueError, match="max_inflight_episodes"):
        buffer(max_running=0)


class BufferMachine(RuleBasedStateMachine):
    """Any order of tickets, results, failures, batches and updates keeps the account and the bound."""

    def __init__(self):
        super().__init__()
        self.core = buffer(batch_size=2, max_staleness=1, max_running=5)
        self.running = {}
        self.taken = False
        self.trained = set()

    @rule()
    def issue(self):
        ticket = self.core.issue()
        if ticket is not None:
            ids = [f"{ticket.ticket_id}/{i}" for i in range(2)]
            self.core.start(ticket.ticket_id, "task", ids)
            self.running[ticket.ticket_id] = (ids, self.core.version)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rewards=st.tuples(st.sampled_from([0.0, 1.0]), st.sampled_from([0.0, 1.0])))
    def commit(self, data, rewards):
        ticket_id = data.draw(st.sampled_from(sorted(self.running)))
        ids, version = self.running.pop(ticket_id)
        self.core.commit(ticket_id, header(ids, rewards, version), ["ref"])

    @precondition(lambda self: self.running)
    @rule(data=st.data(), outcome=st.sampled_from([InfraFailed("x"), Cancelled("y")]))
    def abandon(self, data, outcome):
        ticket_id = data.draw(st.sampled_from(sorted(self.running)))
        self.running.pop(ticket_id)
        self.core.abandon(ticket_id, outcome)

    @precondition(lambda self: not self.taken)
    @rule()
    def take(self):
        batch = self.core.take()
        if batch is not None:
            assert len(batch) == 2
            for ticket in batch:
                assert 0 <= self.core.lag(ticket.header) <= 1
                assert ticket.ticket_id not in self.trained
                self.trained.add(ticket.ticket_id)
            self.taken = True

    @precondition(lambda self: self.taken)
    @rule()
    def acknowledge(self):
        self.core.acknowledge(self.core.version + 1)
        self.taken = False

    @invariant()
    def balanced(self):
        assert self.core.ledger.balanced
        assert self.core.ledger.in_flight == 2 * len(self.running)
        assert self.core.running == len(self.running) <= 5
        assert self.core.accepted + self.core.running <= (1 + self.core.trained_steps + 1) * 2


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(st.lists(st.sampled_from(["graded", "ungraded", "failed", "cancelled"]), max_size=30))
def test_the_ledger_balances(outcomes):
    kinds = {"graded": Graded(1.0), "ungraded": Ungraded("a"), "failed": InfraFailed("b"), "cancelled": Cancelled("c")}
    ledger = Ledger()
    ledger.dispatch([str(i) for i in range(len(outcomes) + 2)])
    for index, name in enumerate(outcomes):
        ledger.end(str(index), kinds[name])
        assert ledger.balanced
    assert ledger.snapshot()["in_flight"] == 2
