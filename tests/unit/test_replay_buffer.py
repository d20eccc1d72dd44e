"""Tickets, ledger and staleness, as plain Python."""

import asyncio
from pathlib import Path

import pytest

from actors.replay_buffer import BatchTimeout, ReplayBuffer
from actors.replay_buffer_core import TRANSITIONS, GroupHeader, ReplayBufferCore, TicketError, TicketState
from actors.rollout_worker import announced_once
from actors.trajectory import Cancelled, Graded, InfraFailed, Ungraded
from train.config import ConfigError, load_config


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


def started(core, size=2, task="task"):
    ticket = core.issue()
    core.start(ticket.ticket_id, task, [f"{ticket.ticket_id}/{i}" for i in range(size)])
    return ticket


def committed(core, ticket, rewards=(0.0, 1.0), version=0, nbytes=100):
    return core.commit(ticket.ticket_id, header(ticket.episode_ids, rewards, version, nbytes=nbytes), ["ref"])


def test_the_deadline_names_the_outstanding_tickets_and_where_they_are():
    now = [0.0]
    core = buffer(batch_size=3, clock=lambda: now[0])
    core.issue()
    started(core, task="waits-for-an-instance")
    generating = started(core, task="find-the-printer")
    now[0] = 40.0
    core.generating(generating.ticket_id, "rollout_worker_1")
    now[0] = 100.0
    committed(core, started(core))
    assert core.outstanding() == (
        "1 of 3 groups are buffered; tickets out: 1 issued, 1 dispatched, 1 generating; the oldest: "
        "#0 ? issued for 100 s; #1 waits-for-an-instance dispatched for 100 s; "
        "#2 find-the-printer generating on rollout_worker_1 for 60 s"
    )


def test_where_nothing_is_out_the_deadline_says_so():
    assert buffer().outstanding() == "0 of 2 groups are buffered; no ticket is out, 4 could be given"


def test_a_note_that_comes_late_or_twice_changes_nothing():
    core = buffer()
    ticket = started(core)
    core.generating(ticket.ticket_id, "a")
    core.generating(ticket.ticket_id, "b")
    assert ticket.worker == "a"
    committed(core, ticket)
    core.generating(ticket.ticket_id, "c")
    core.generating(99, "c")
    assert core.count(TicketState.BUFFERED) == 1 and ticket.worker == "a"


def test_every_state_can_be_reached_and_left_unless_it_is_final():
    reached = {TicketState.ISSUED}.union(*TRANSITIONS.values())
    assert reached == set(TicketState) == set(TRANSITIONS)
    assert {s for s in TicketState if not TRANSITIONS[s]} == {TicketState.TRAINED, TicketState.DROPPED}


def test_a_ticket_used_out_of_turn_is_an_error_that_names_it_and_changes_nothing():
    core = buffer()
    ticket = core.issue()
    with pytest.raises(TicketError, match=r"ticket #0 \? issued cannot become buffered"):
        core.commit(0, header(["0/0", "0/1"], (0.0, 1.0), 0), ["ref"])
    core.start(0, "task", ["0/0", "0/1"])
    with pytest.raises(TicketError, match="ticket #0 task dispatched cannot become dispatched"):
        core.start(0, "task", ["0/2"])
    with pytest.raises(TicketError, match="committed and dispatched episodes differ: 0/1, 0/7"):
        core.commit(0, header(["0/0", "0/7"], (0.0, 1.0), 0), ["ref"])
    with pytest.raises(TicketError, match="unpublished version"):
        committed(core, ticket, version=1)
    with pytest.raises(TicketError, match="ticket #5 is not in flight"):
        core.commit(5, header(["a"], (1.0,), 0), ["ref"])
    assert core.ledger.in_flight == 2 and committed(core, ticket) == "buffered"
    with pytest.raises(TicketError, match="ticket #0 task buffered cannot become buffered"):
        committed(core, ticket)


def test_a_version_that_does_not_grow_is_refused():
    core = buffer(batch_size=1)
    committed(core, started(core))
    core.take()
    with pytest.raises(TicketError, match="version 0 is not newer than 0"):
        core.acknowledge(0)
    assert core.count(TicketState.TRAINING) == 1


def test_a_batch_is_taken_only_after_the_last_one_was_acknowledged_or_given_back():
    core = buffer(batch_size=1)
    committed(core, started(core))
    committed(core, started(core))
    (first,) = core.take()
    with pytest.raises(TicketError, match="the batch of #0 is still in training"):
        core.take()
    core.give_back()
    assert core.take() == [first]
    core.acknowledge(1)
    with pytest.raises(TicketError, match="no batch is in training"):
        core.acknowledge(2)


def test_a_batch_given_back_after_the_version_moved_on_is_dropped_where_it_is_stale():
    core = buffer(batch_size=1, max_staleness=1)
    committed(core, started(core))
    core.take()
    core.advance(2)
    core.give_back()
    assert core.dropped == {"stale": 1} and core.capacity == 2


def test_a_batch_is_of_the_oldest_that_are_ready():
    core = buffer(batch_size=2, max_staleness=2)
    tickets = [started(core) for _ in range(4)]
    for index in (3, 1):
        committed(core, tickets[index])
    assert [t.ticket_id for t in core.take()] == [1, 3]


def test_a_window_waits_for_slow_groups_that_are_older():
    core = buffer(batch_size=2, max_staleness=2, window=3)
    tickets = [started(core) for _ in range(5)]
    for index in (4, 3, 1):
        committed(core, tickets[index])
    assert core.take() is None, "of the three oldest only one is ready"
    committed(core, tickets[2])
    assert [t.ticket_id for t in core.take()] == [1, 2]


def test_a_window_of_a_batch_keeps_the_order_of_the_starts():
    core = buffer(batch_size=2, max_staleness=2, window=2)
    tickets = [started(core) for _ in range(6)]
    order = []
    for index in (5, 4, 1, 3, 2, 0):
        committed(core, tickets[index])
        while (batch := core.take()) is not None:
            order += [t.ticket_id for t in batch]
            core.acknowledge(core.version + 1)
    assert order == [0, 1, 2, 3, 4, 5]


def test_groups_in_flight_count_by_their_expected_size():
    core = buffer(max_bytes=500, max_staleness=9)
    committed(core, started(core), nbytes=100)
    assert core.capacity == 4
    started(core)
    assert core.capacity == 3


def test_the_next_batch_always_finds_room_whatever_its_size():
    core = buffer(batch_size=3, max_bytes=10)
    for _ in range(3):
        assert committed(core, started(core), nbytes=1000) == "buffered"
    assert core.capacity == 0 and len(core.take()) == 3


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"max_running": 0}, "max_inflight_episodes allows less than one group"),
        ({"batch_size": 0}, "a batch of 0 groups"),
        ({"max_staleness": -1}, r"max_staleness -1 leaves \(-1 \+ 1\) \* 2 tickets"),
        ({"max_bytes": 0}, "max_bytes 0"),
        ({"window": 1}, "a window of 1 groups never holds a batch of 2: make window at least 2"),
    ],
)
def test_sizes_with_which_no_batch_is_ever_filled_are_refused(sizes, words):
    with pytest.raises(ValueError, match=words):
        buffer(**sizes)


def test_a_draining_buffer_gives_nothing_and_says_what_it_dropped():
    core = buffer()
    late = started(core)
    roll_out(core)
    core.drain("the last step is trained")
    assert core.issue() is None and committed(core, late) == "draining"
    assert core.dropped == {"the last step is trained": 1, "draining": 1}


@pytest.mark.parametrize(("outcome", "reason"), [(InfraFailed("x"), "failed"), (Cancelled("y"), "cancelled")])
def test_a_group_that_will_not_come_returns_its_ticket_once(outcome, reason):
    core = buffer()
    ticket = started(core)
    core.abandon(ticket.ticket_id, outcome)
    core.abandon(ticket.ticket_id, outcome)
    assert core.dropped == {reason: 1} and core.capacity == 4 and core.ledger.in_flight == 0


def test_an_abandonment_that_its_groups_commit_overtook_changes_nothing():
    core = buffer()
    ticket = started(core)
    committed(core, ticket)
    core.abandon(ticket.ticket_id, InfraFailed("deadline"))
    assert core.count(TicketState.BUFFERED) == 1 and core.ledger.ended == {"graded": 2}


# The actor, without Ray

Actor = ReplayBuffer.__ray_metadata__.modified_class


def actor(**overrides):
    return Actor({"batch_size": 2, "max_staleness": 1, "max_running": 100, "max_bytes": 10**9} | overrides)


async def groups_in(buffer, count):
    """``count`` tickets with two episodes each, and a group for each."""
    tickets = await buffer.issue(0.0, count)
    await buffer.start([(ticket, "task", [f"{ticket}/0", f"{ticket}/1"]) for ticket, _ in tickets])
    return [(t, header([f"{t}/0", f"{t}/1"], (0.0, 1.0), version), f"ref {t}") for t, version in tickets]


async def test_tickets_come_several_at_once_and_none_when_the_time_is_up():
    buffer = actor()
    assert await buffer.issue(0.0, 3) == [(0, 0), (1, 0), (2, 0)]
    assert await buffer.issue(0.0, 3) == [(3, 0)]
    assert await buffer.issue(0.01, 3) == []


async def test_a_batch_is_handed_over_as_soon_as_it_is_complete():
    buffer = actor()
    waiting = asyncio.create_task(buffer.get_batch(1, 5.0))
    groups = await groups_in(buffer, 2)
    assert await buffer.commit(groups[:1]) == ["buffered"] and not waiting.done()
    assert await buffer.commit(groups[1:]) == ["buffered"]
    batch = await waiting
    assert batch["refs"] == ["ref 0", "ref 1"] and batch["lineage"].newest == 0
    await buffer.ack(1, 1)
    assert (await buffer.snapshot())["trained"] == 2


async def test_a_group_that_is_refused_does_not_hold_up_those_that_came_with_it():
    buffer = actor()
    good, other = await groups_in(buffer, 2)
    first, refused, second = await buffer.commit([good, (7, *good[1:]), other])
    assert (first, second) == ("buffered", "buffered") and "ticket #7 is not in flight" in str(refused)


async def test_a_batch_that_does_not_come_says_what_is_out_and_where():
    buffer = actor()
    groups = await groups_in(buffer, 3)
    await buffer.commit(groups[:1])
    await buffer.generating([1], "rollout_worker_0")
    with pytest.raises(BatchTimeout) as timeout:
        await buffer.get_batch(7, 0.01)
    assert str(timeout.value) == (
        "no batch for step 7 in 0 s: 1 of 2 groups are buffered; tickets out: 1 dispatched, 1 generating; "
        "the oldest: #1 task generating on rollout_worker_0 for 0 s; #2 task dispatched for 0 s"
    )


async def test_a_learner_that_waits_learns_that_the_run_ends():
    buffer = actor()
    waiting = asyncio.create_task(buffer.get_batch(1, 5.0))
    await asyncio.sleep(0)
    await buffer.drain("the run is ending")
    assert await waiting is None


async def test_only_the_first_turn_of_a_group_is_announced():
    announced, asked = [], []

    async def generate(prompt_ids, sampling, **ids):
        asked.append((announced[:], ids["request_id"]))

    turn = announced_once(generate, lambda: announced.append("group"))
    for request_id in ("a-0", "b-0", "a-1"):
        await turn([1], None, request_id=request_id)
    assert asked == [(["group"], "a-0"), (["group"], "b-0"), (["group"], "a-1")]


def test_a_run_whose_window_is_smaller_than_its_batch_does_not_start():
    demo = Path(__file__).parents[2] / "configs/demo.yaml"
    with pytest.raises(ConfigError, match=r"buffer.window 15 never holds a batch of trainer.train_batch_size 16"):
        load_config(demo, ["--buffer.window", "15"])
    assert load_config(demo, ["--buffer.window", "16"]).buffer.window == 16
