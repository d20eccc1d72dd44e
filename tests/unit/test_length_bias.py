"""Whether long groups are dropped more often, on groups made for it."""

from __future__ import annotations

import json

import pytest

from actors.length_bias import WINDOW_STEPS, LengthBias
from actors.replay_buffer_core import GroupHeader, ReplayBufferCore
from actors.trajectory import Cancelled, Graded
from train.metrics import buffer_metrics


def core(**changed) -> ReplayBufferCore:
    settings = {"batch_size": 2, "max_staleness": 1, "max_running": 100, "max_bytes": 10**9} | changed
    return ReplayBufferCore(**settings)


def start(buffer: ReplayBufferCore) -> int:
    ticket = buffer.issue()
    buffer.start(ticket.ticket_id, "task", [f"{ticket.ticket_id}/0", f"{ticket.ticket_id}/1"])
    return ticket.ticket_id


def commit(buffer: ReplayBufferCore, ticket_id: int, tokens: int, version: int) -> str:
    outcomes = {f"{ticket_id}/{i}": Graded(float(i)) for i in range(2)}
    return buffer.commit(ticket_id, GroupHeader("task", "e", outcomes, (0.0, 1.0), version, version, 100, tokens), "x")


def train(buffer: ReplayBufferCore) -> None:
    assert buffer.take() is not None
    buffer.acknowledge(buffer.version + 1)


def test_long_groups_that_come_too_late_show_as_a_bias():
    buffer = core()
    slow = [start(buffer), start(buffer)]
    for step in range(3):
        for _ in range(2):
            assert commit(buffer, start(buffer), tokens=100, version=step) == "buffered"
        train(buffer)
    assert [commit(buffer, ticket, tokens=400, version=0) for ticket in slow] == ["stale", "stale"]
    found = buffer_metrics(buffer.snapshot())
    ended = (6 * 100 + 2 * 400) / 8
    assert found["length/trained"] == 100 and found["length/ended"] == ended
    assert found["length/bias"] == pytest.approx(100 / ended)
    assert found["length/yield"] == pytest.approx(600 / 1400)


def test_without_drops_there_is_no_bias_however_different_the_lengths():
    buffer = core(batch_size=3, max_staleness=0)
    for step in range(4):
        for tokens in (10, 500, 3000):
            commit(buffer, start(buffer), tokens, step)
        train(buffer)
    found = buffer.snapshot()["lengths"]
    assert found == {"trained": 1170.0, "ended": 1170.0, "bias": 1.0, "yield": 1.0}


def test_before_the_first_batch_there_is_nothing_to_say_and_a_group_that_never_came_has_no_length():
    buffer = core()
    buffer.abandon(start(buffer), Cancelled("the run is ending"))
    assert buffer.snapshot()["lengths"] == {}
    for _ in range(2):
        commit(buffer, start(buffer), 50, 0)
    train(buffer)
    assert buffer.snapshot()["lengths"]["bias"] == 1.0


def test_what_lies_further_back_than_the_window_is_forgotten():
    lengths = LengthBias()
    lengths.end(1000, trained=False)
    for _ in range(WINDOW_STEPS - 1):
        lengths.end(10, trained=True)
        lengths.begin_step()
    assert lengths.snapshot()["bias"] < 0.5
    lengths.end(10, trained=True)
    lengths.begin_step()
    assert lengths.snapshot() == {"trained": 10.0, "ended": 10.0, "bias": 1.0, "yield": 1.0}


def test_it_goes_on_where_a_checkpoint_has_it():
    buffer = core(max_staleness=0)
    for tokens in (10, 70):
        commit(buffer, start(buffer), tokens, 0)
    train(buffer)
    again = core(max_staleness=0)
    again.restore(json.loads(json.dumps(buffer.state())), buffer.payloads())
    for one in (buffer, again):
        for tokens in (90, 20):
            commit(one, start(one), tokens, 1)
        train(one)
        assert one.snapshot()["lengths"]["trained"] == (10 + 70 + 90 + 20) / 4
    assert again.state() == buffer.state()
