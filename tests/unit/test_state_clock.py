"""Seconds by state, against the intervals of each thing added up one by one."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve.state_clock import StateClock

STATES = st.sampled_from(["idle", "busy", "away"])


class Hands:
    """A clock that is moved by hand."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@given(st.lists(st.lists(st.tuples(st.floats(0, 10), STATES), max_size=6), max_size=5), st.floats(0, 60))
def test_the_seconds_of_many_things_are_the_sum_of_their_intervals(things, asked_at):
    """Each thing is a list of states and how long it stays in each; it goes away after the last."""
    hands, expected = Hands(), Counter()
    clock = StateClock(hands)
    moves = []
    for stays in things:
        when, old = 0.0, None
        for seconds, state in stays:
            moves.append((when, old, state))
            expected[state] += max(0.0, min(when + seconds, asked_at) - min(when, asked_at))
            when, old = when + seconds, state
        moves.append((when, old, None))
    for when, old, new in sorted(moves, key=lambda move: move[0]):  # the moves of one thing stay in their order
        if when > asked_at:
            break
        hands.now = 100.0 + when
        clock.move(old, new)
    hands.now = 100.0 + asked_at
    found = clock.seconds()
    assert found.keys() >= {state for state in expected if expected[state]}
    for state, seconds in found.items():
        assert seconds == pytest.approx(expected[state], abs=1e-9)
    assert clock.seconds() == pytest.approx(found)  # asking changes nothing


def test_whoever_leaves_by_an_error_is_counted_no_longer():
    hands = Hands()
    clock = StateClock(hands)
    with pytest.raises(KeyError), clock.inside("busy"):
        hands.now += 2
        raise KeyError
    hands.now += 5
    assert clock.seconds() == {"busy": 2.0}
