"""The lease table's decisions, as plain data."""

import json

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.circuit_breaker import CircuitBreaker
from actors.lease_table import (
    Create,
    EnvSpec,
    Evict,
    Grant,
    LeaseFileError,
    LeaseTable,
    SlotState,
    Waiter,
    load_slots,
)

RED, BLUE = EnvSpec("red"), EnvSpec("blue")
NEED_S = 10.0


def instance(name, env_key="red"):
    return {"instance_id": name, "env_key": env_key}


def wait(table, name, spec=RED, now=0.0):
    waiter = Waiter(name, spec, spec.key, "owner", now)
    table.enqueue(waiter)
    return waiter


def idle(table, name, spec=RED, since=0.0, expires_at=1e9):
    waiter = wait(table, "filler", spec)
    slot = table.made(table.begin(waiter), instance(name, spec.env_key), since, expires_at)
    table.withdraw(waiter)
    return slot


def test_equal_specs_have_equal_keys_whatever_the_order_of_their_variables():
    one = EnvSpec("e", "v1", "d", "s1", {"a": 1, "b": {"x": 1, "y": 2}})
    two = EnvSpec("e", "v1", "d", "s1", {"b": {"y": 2, "x": 1}, "a": 1})
    assert one.key == two.key
    others = [EnvSpec("e", "v2", "d", "s1", {"a": 1}), EnvSpec("e", "v1", "d", "s2"), EnvSpec("e", "v1", "d", "s1")]
    assert len({one.key, *(other.key for other in others)}) == 4


def test_an_idle_instance_of_the_same_spec_is_granted_and_another_is_not():
    table = LeaseTable(None, NEED_S)
    slot = idle(table, "i1", BLUE)
    wait(table, "red")
    assert isinstance(table.next_step(0.0), Create)
    table.withdraw(table.waiting("red"))
    waiter = wait(table, "blue", BLUE)
    assert table.next_step(0.0) == Grant(waiter, slot)


def test_an_instance_with_too_little_life_left_is_deleted_not_granted():
    table = LeaseTable(None, NEED_S)
    slot = idle(table, "i1", expires_at=100.0)
    wait(table, "w")
    assert isinstance(table.next_step(90.0), Grant)
    assert table.next_step(90.1) == Evict(slot)


def test_at_the_quota_the_longest_idle_instance_makes_room_and_nothing_else_is_made_meanwhile():
    table = LeaseTable(2, NEED_S)
    older, _newer = idle(table, "i1", BLUE, since=1.0), idle(table, "i2", BLUE, since=2.0)
    wait(table, "w")
    assert table.next_step(5.0) == Evict(older)
    table.set_state(older, SlotState.DELETING, 5.0)
    assert table.next_step(5.0) is None
    table.drop("i1")
    assert isinstance(table.next_step(5.0), Create)


def test_a_waiter_at_the_quota_is_not_overtaken_by_one_whose_instance_is_idle():
    table = LeaseTable(1, NEED_S)
    slot = idle(table, "i1", BLUE)
    wait(table, "red-first")
    wait(table, "blue-second", BLUE)
    assert table.next_step(0.0) == Evict(slot)


def test_one_creation_is_begun_per_waiter():
    table = LeaseTable(None, NEED_S)
    waiters = [wait(table, "a"), wait(table, "b")]
    begun = []
    while isinstance(step := table.next_step(0.0), Create):
        begun.append(step.waiter)
        table.begin(step.waiter)
    assert begun == waiters


def test_a_blocked_environment_does_not_hold_up_the_others():
    table = LeaseTable(1, NEED_S)
    breaker = table.breakers["red"] = CircuitBreaker("red", failures=1, pause_s=100.0, max_pause_s=100.0)
    breaker.failed("make-0", 0.0)
    red = wait(table, "red")
    wait(table, "red 2")
    blue = wait(table, "blue", BLUE)
    assert table.next_step(99.0) == Create(blue)
    table.withdraw(blue)
    assert table.next_step(99.0) is None
    assert "red could not be made lately and is tried again in 1 s" in table.why_waiting(red, 99.0)
    assert table.next_step(100.0) == Create(red)
    trial = table.begin(red)
    assert breaker.begin(trial.make_id, 100.0)
    table.max_instances = None
    assert table.next_step(100.0) is None, "one make is on trial; the other waits for what it says"
    assert "is on trial now" in table.why_waiting(red, 100.0)
    breaker.worked(trial.make_id, 101.0)
    assert isinstance(table.next_step(101.0), Create)


def test_capacity_is_what_the_account_leaves_us():
    table = LeaseTable(8, NEED_S)
    assert table.capacity == 8
    idle(table, "i1")
    table.learn_account(limit=10, count=7)  # six are not ours
    assert table.capacity == 4
    table.learn_account(limit=100, count=1)
    assert table.capacity == 8


@pytest.mark.parametrize(("limit", "running"), [(5, 5), (None, 5), (None, None)])
def test_after_a_refusal_no_creation_is_begun_until_something_changes(limit, running):
    table = LeaseTable(None, NEED_S)
    idle(table, "i1", BLUE)
    table.set_state(table.slots["i1"], SlotState.LEASED, 0.0)
    creation = table.begin(wait(table, "w"))
    table.learn_refusal(limit, running)
    table.end(creation)
    assert table.next_step(0.0) is None
    table.learn_account(limit=5, count=1)
    assert isinstance(table.next_step(0.0), Create)


def test_the_reason_of_a_late_waiter_names_holders_and_quota():
    table = LeaseTable(1, NEED_S)
    first = wait(table, "first")
    slot = table.made(table.begin(first), instance("i1"), 0.0, 1e9)
    table.grant(Grant(first, slot), 0.0, 50.0)
    wait(table, "second")
    late = wait(table, "third")
    why = table.why_waiting(late, 30.0)
    assert "1 of 1 instances" in why and "owner holds 1 of red" in why and "30 s" in why and "1 waiting before" in why


def test_a_saved_table_is_read_back_by_the_same_run_only(tmp_path):
    path = tmp_path / "leases.db"
    table = LeaseTable(None, NEED_S)
    slot = idle(table, "i1")
    table.save(path, "run:1")
    assert load_slots(path, "run:1") == [slot]
    assert load_slots(path, "run:2") == []
    assert load_slots(tmp_path / "absent.db", "run:1") == []
    assert [p.name for p in tmp_path.iterdir()] == ["leases.db"]
    path.write_text("{" * 4096)
    with pytest.raises(LeaseFileError, match="leases.db"):
        load_slots(path, "run:1")
    table.drop("i1")
    with pytest.raises(LeaseFileError, match="leases.db"):
        table.save(path, "run:1")
    assert table.unsaved, "what could not be written is tried again"


def test_each_save_writes_what_changed_since_the_last(tmp_path):
    path = tmp_path / "leases.db"
    table = LeaseTable(None, NEED_S)
    first, second = idle(table, "i1"), idle(table, "i2")
    table.save(path, "run:1")
    assert not table.unsaved
    waiter = wait(table, "w")
    table.grant(table.next_step(0.0), 3.0, 50.0)
    table.drop("i2")
    table.save(path, "run:1")
    assert load_slots(path, "run:1") == [first]
    assert (first.lease_id, first.state, first.deadline) == (waiter.lease_id, SlotState.LEASED, 50.0)
    table.beaten(first, 7.0)
    table.save(path, "run:1")
    assert load_slots(path, "run:1")[0].beat_at == 7.0
    other = LeaseTable(None, NEED_S)
    kept = idle(other, "i3")
    other.save(path, "run:2")
    assert load_slots(path, "run:2") == [kept] and second.instance_id == "i2"
    assert load_slots(path, "run:1") == [], "a file belongs to the run that wrote it last"


def by_looking_at_everything(table, now):
    """The steps that its definition allows next, without any index: which of several idle instances is left open."""
    slots, promised = list(table.slots.values()), [creation.key for creation in table.creations]
    idle = [slot for slot in slots if slot.state is SlotState.IDLE]
    freeing = len([slot for slot in slots if slot.state is SlotState.DELETING])
    for waiter in table.queue:
        fitting = [slot for slot in idle if slot.key == waiter.key]
        if fitting:
            return [Grant(waiter, s) if s.expires_at - now >= table.need_s else Evict(s) for s in fitting]
        if waiter.key in promised:
            promised.remove(waiter.key)
        elif table.used < table.capacity:
            return [Create(waiter)]
        elif freeing:
            freeing -= 1
        else:
            return [Evict(min(idle, key=lambda slot: slot.since))] if idle else [None]
    return [None]


class Machine(RuleBasedStateMachine):
    """Random lives of a pool of at most three instances, against the rules nothing may break."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable(3, NEED_S)
        self.now = 0.0
        self.names = iter(range(10**6))
        self.asked = []  # lease ids in the order they came, by spec
        self.got = []

    def settle(self):
        while (step := self.table.next_step(self.now)) is not None:
            assert step in by_looking_at_everything(self.table, self.now)
            if isinstance(step, Create):
                self.table.begin(step.waiter)
            elif isinstance(step, Evict):
                self.table.set_state(step.slot, SlotState.DELETING, self.now)
            else:
                earlier = [w for w in self.table.queue if w.key == step.waiter.key]
                assert earlier[0] is step.waiter, "of those who want the same, the first is served first"
                self.table.grant(step, self.now, self.now + 5)
                self.got.append(step.waiter.lease_id)
        assert by_looking_at_everything(self.table, self.now) == [None]

    @rule(spec=st.sampled_from([RED, BLUE]))
    def acquire(self, spec):
        wait(self.table, f"L{next(self.names)}", spec, self.now)
        self.settle()

    @precondition(lambda self: self.table.creations)
    @rule(data=st.data(), works=st.booleans())
    def creation_ends(self, data, works):
        creation = data.draw(st.sampled_from(list(self.table.creations)))
        if works:
            name = f"i{next(self.names)}"
            self.table.made(creation, instance(name, creation.spec.env_key), self.now, self.now + 30)
        else:
            self.table.end(creation)
            if creation.waiter in self.table.queue:
                self.table.withdraw(creation.waiter)
        self.settle()

    @precondition(lambda self: self.table.in_state(SlotState.LEASED))
    @rule(data=st.data(), reusable=st.booleans())
    def release(self, data, reusable):
        slot = data.draw(st.sampled_from(self.table.in_state(SlotState.LEASED)))
        self.table.set_state(slot, SlotState.IDLE if reusable else SlotState.DELETING, self.now)
        self.settle()

    @precondition(lambda self: self.table.in_state(SlotState.DELETING))
    @rule(data=st.data())
    def deleted(self, data):
        slot = data.draw(st.sampled_from(self.table.in_state(SlotState.DELETING)))
        self.table.drop(slot.instance_id)
        self.settle()

    @precondition(lambda self: self.table.queue)
    @rule(data=st.data())
    def gives_up(self, data):
        self.table.withdraw(data.draw(st.sampled_from(list(self.table.queue))))
        self.settle()

    @rule(seconds=st.floats(0.1, 15))
    def time_passes(self, seconds):
        self.now += seconds
        self.settle()

    @invariant()
    def never_more_than_the_quota(self):
        assert self.table.used <= 3

    @invariant()
    def leases_are_one_to_one(self):
        leased = [slot.lease_id for slot in self.table.in_state(SlotState.LEASED)]
        assert None not in leased and len(set(leased)) == len(leased)
        assert all(slot.lease_id is None for slot in self.table.slots.values() if slot.state is not SlotState.LEASED)

    @invariant()
    def nobody_waits_while_there_is_room(self):
        waiting = len(self.table.queue)
        coming = len(self.table.creations) + len(self.table.in_state(SlotState.DELETING))
        assert not (waiting > coming and self.table.used < 3)

    @invariant()
    def counts_add_up(self):
        counts = self.table.counts()
        assert json.dumps(counts)
        kinds = ("leased", "idle", "deleting", "making")
        assert sum(counts[kind] for kind in kinds) == self.table.used
        assert sum(sum(env[kind] for kind in kinds) for env in counts["by_env"].values()) == self.table.used


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
