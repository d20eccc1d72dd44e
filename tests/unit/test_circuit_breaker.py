"""The circuit breaker, alone: its three states, and random lives of it against what nothing may break."""

from __future__ import annotations

import logging

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.circuit_breaker import TRANSITIONS, BreakerEvent, BreakerState, CircuitBreaker


def opened(pause_s=10.0, max_pause_s=35.0):
    breaker = CircuitBreaker("red", 2, pause_s, max_pause_s)
    breaker.failed("a", 0.0)
    assert breaker.state is BreakerState.CLOSED and breaker.may_begin(0.0)
    breaker.failed("b", 0.0)
    assert breaker.state is BreakerState.OPEN
    return breaker


def test_only_failures_in_a_row_open_it():
    breaker = CircuitBreaker("red", 2, 10.0, 40.0)
    for number in range(10):
        breaker.failed(f"f{number}", 0.0)
        breaker.worked(f"w{number}", 0.0)
    assert breaker.state is BreakerState.CLOSED and breaker.times_opened == 0


def test_after_the_pause_one_trial_begins_and_its_success_closes():
    breaker = opened()
    assert not breaker.may_begin(9.9) and breaker.may_begin(10.0)
    assert breaker.begin("trial", 10.0)
    assert breaker.state is BreakerState.HALF_OPEN and not breaker.may_begin(1e9)
    breaker.worked("trial", 11.0)
    assert breaker.state is BreakerState.CLOSED and breaker.may_begin(11.0)
    assert not breaker.begin("next", 11.0)


def test_each_trial_that_fails_doubles_the_pause_up_to_its_bound_and_a_success_makes_it_short_again():
    breaker, now, pauses = opened(), 0.0, []
    for number in range(4):
        now = breaker.retry_at
        breaker.begin(f"t{number}", now)
        breaker.failed(f"t{number}", now)
        pauses.append(breaker.retry_at - now)
    assert pauses == [20.0, 35.0, 35.0, 35.0]
    breaker.begin("good", breaker.retry_at)
    breaker.worked("good", 200.0)
    for name in "xy":
        breaker.failed(name, 200.0)
    assert breaker.retry_at == 210.0


def test_stragglers_do_not_end_a_trial_but_their_success_counts():
    breaker = opened()
    breaker.failed("straggler", 5.0)
    assert breaker.retry_at == 10.0, "the pause is not made longer by what began before it"
    breaker.begin("trial", 10.0)
    breaker.failed("straggler 2", 11.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.worked("straggler 3", 12.0)
    assert breaker.state is BreakerState.CLOSED
    breaker.failed("trial", 13.0)
    assert breaker.state is BreakerState.CLOSED


def test_an_abandoned_trial_leaves_its_place_to_the_next():
    breaker = opened()
    breaker.begin("trial", 10.0)
    breaker.abandoned("trial", 12.0)
    assert breaker.state is BreakerState.OPEN and breaker.may_begin(12.0)
    assert breaker.begin("again", 12.0)


def test_every_transition_is_logged_and_shown_with_the_id_that_caused_it(caplog):
    caplog.set_level(logging.INFO, "actors.circuit_breaker")
    breaker = opened()
    breaker.begin("trial", 10.0)
    breaker.worked("trial", 11.0)
    shown = breaker.snapshot(11.0)
    steps = [(t["before"], t["event"], t["after"], t["attempt_id"]) for t in shown["transitions"]]
    assert steps == [
        ("closed", "tripped", "open", "b"),
        ("open", "trial_begun", "half_open", "trial"),
        ("half_open", "worked", "closed", "trial"),
    ]
    assert (shown["state"], shown["times_opened"], shown["retry_in_s"]) == ("closed", 1, 0.0)
    assert len(caplog.records) == 3 and all("red" in record.getMessage() for record in caplog.records)
    assert "next trial in 10 s" in caplog.records[0].getMessage()


@pytest.mark.parametrize("state", BreakerState)
def test_every_state_can_be_left_for_closed_without_a_restart(state):
    reached, ahead = set(), {state}
    while ahead:
        reached |= ahead
        ahead = {after for (before, _), after in TRANSITIONS.items() if before in reached} - reached
    assert BreakerState.CLOSED in reached
    assert {event for _, event in TRANSITIONS} == set(BreakerEvent)


class Machine(RuleBasedStateMachine):
    """Attempts that begin whenever they may and end in any order."""

    def __init__(self):
        super().__init__()
        self.breaker = CircuitBreaker("red", 3, 10.0, 60.0)
        self.now = 0.0
        self.under_way: list[str] = []
        self.count = 0

    @rule()
    def begins(self):
        if not self.breaker.may_begin(self.now):
            return
        was = self.breaker.state
        self.count += 1
        name = f"m{self.count}"
        assert self.breaker.begin(name, self.now) == (was is BreakerState.OPEN)
        self.under_way.append(name)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), how=st.sampled_from(["worked", "failed", "abandoned"]))
    def ends(self, data, how):
        name = data.draw(st.sampled_from(self.under_way))
        self.under_way.remove(name)
        was, opened_before = self.breaker.state, self.breaker.times_opened
        was_trial = name == self.breaker.trial_id
        getattr(self.breaker, how)(name, self.now)
        if how == "worked":
            assert self.breaker.state is BreakerState.CLOSED
        if self.breaker.times_opened > opened_before:
            assert how == "failed" and (was is BreakerState.CLOSED or was_trial)

    @rule(seconds=st.floats(0.1, 100))
    def time_passes(self, seconds):
        self.now += seconds

    @invariant()
    def a_trial_is_under_way_exactly_while_it_is_half_open(self):
        half_open = self.breaker.state is BreakerState.HALF_OPEN
        assert (self.breaker.trial_id is not None) == half_open
        assert not half_open or self.breaker.trial_id in self.under_way

    @invariant()
    def it_is_never_shut_for_ever(self):
        if self.breaker.state is BreakerState.OPEN:
            assert self.breaker.retry_at - self.now <= 60.0
        if not self.under_way:
            assert self.breaker.may_begin(self.now + 60.0)

    @invariant()
    def every_change_is_one_of_the_table(self):
        for step in self.breaker.transitions:
            assert TRANSITIONS[step.before, step.event] is step.after


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
