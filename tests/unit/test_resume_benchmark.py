"""What the benchmark of resumed runs draws, how it tells what a run was at, and that it finds any difference."""

import copy
import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from dataclasses import replace

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from actors.lease_table import EnvSpec, Grant, LeaseTable, Waiter
from actors.replay_buffer_core import GroupHeader, ReplayBufferCore
from actors.trajectory import Graded, Group, Span
from benchmarks.resume import AIMS, LAST_STEPS, STEPS_A_POINT, draw, kill_tree, phase_of
from benchmarks.run_difference import ASPECTS, differences, settled, unequal_leaves
from tests.trajectories import make_trajectory
from train import buffer_state, checkpoint
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin

STEPS, GROUPS, MEMBERS = 3, 2, 2


# The points


@given(st.integers(1, 60), st.integers(0, 100), st.integers())
def test_points_are_in_order_within_the_run_and_of_every_aim(count, more, seed):
    steps = STEPS_A_POINT * count + LAST_STEPS + more
    points = draw(count, steps, random.Random(seed))
    assert len(points) == count and points == draw(count, steps, random.Random(seed))
    found = [point.step for point in points]
    assert found == sorted(found) and found[0] >= 1 and found[-1] <= steps - LAST_STEPS
    assert all(b - a >= 1 for a, b in zip(found, found[2:], strict=False)), "no life has a step to itself"
    assert all(0 <= point.fraction < 1 for point in points)
    whole = len(AIMS) * (count // len(AIMS))
    assert Counter(p.aim for p in points[:whole]) == Counter(AIMS * (count // len(AIMS)))


# What a run was at


@pytest.fixture
def run_at(tmp_path):
    """A run's folder without half a checkpoint, by what was written last and whether a lease is out."""

    def make(last, leased):
        table = LeaseTable(None, 10.0)
        spec = EnvSpec("tracker")
        waiter = Waiter("lease", spec, spec.key, "owner", 0.0)
        table.enqueue(waiter)
        slot = table.made(table.begin(waiter), {"instance_id": "i", "env_key": "tracker"}, 0.0, 1e9)
        if leased:
            table.grant(Grant(waiter, slot), 0.0, 1e9)
        writers = {"leases": lambda: table.save(tmp_path / "leases.db", "run"), "weights": weights}
        for name in sorted(writers, key=lambda name: name == last):
            writers[name]()
            wait_for_another_time(tmp_path)
        return tmp_path

    def weights():
        (tmp_path / "weights.json").write_text("{}")

    return make


def wait_for_another_time(folder):
    """The clock of the file system ticks a few hundred times a second."""
    probe = folder / "probe"
    probe.touch()
    first = probe.stat().st_ctime_ns
    while probe.stat().st_ctime_ns == first:
        os.utime(probe)


@pytest.mark.parametrize(
    ("last", "leased", "phase"),
    [("leases", True, "rollout"), ("weights", False, "rollout"), ("leases", False, "training")],
)
def test_a_run_is_rolling_out_from_a_publication_until_the_last_lease_is_back(run_at, last, leased, phase):
    assert phase_of(run_at(last, leased), began_at=0.0) == phase


def test_half_a_checkpoint_counts_unless_an_earlier_life_left_it(run_at):
    folder = run_at("leases", False)
    partial = checkpoint.begin(folder / "checkpoints", 4, needed_bytes=0)
    assert phase_of(folder, began_at=0.0) == "checkpoint"
    assert phase_of(folder, began_at=partial.stat().st_ctime + 1) == "training"


def test_a_tree_of_processes_dies_at_one_moment_so_that_nobody_starts_a_dead_one_again(tmp_path):
    started = tmp_path / "started"
    again = f"while :; do echo x >> {started}; sleep 60; done"
    root = psutil.Popen(["sh", "-c", f"(sh -c '{again}') & (sh -c '{again}') & wait"])
    deadline = time.monotonic() + 20
    while not started.exists() or len(started.read_text()) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    everyone = [root, *root.children(recursive=True)]
    kill_tree(root)
    assert len(everyone) >= 5 and len(started.read_text()) == 4
    assert not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in everyone)
    assert root.wait(5) == -signal.SIGKILL


# A synchronous buffer at a checkpoint


def group(ticket, rewards=(1.0, 0.0), version=0):
    members = []
    for index, reward in enumerate(rewards):
        made = make_trajectory(ticket, index)
        spans = [Span(version, 0, int(made.mask.sum()))]
        name = f"{ticket}/task-{ticket}/{index}"
        members.append(replace(made, trajectory_id=name, spans=spans, outcome=Graded(reward)))
    return Group(ticket, f"task-{ticket}", members[0].env_key, members)


def start(core):
    ticket = core.issue().ticket_id
    sampler = {"fingerprint": "f", "batch": [], "drawn": {"all": ticket + 1}}
    core.start(ticket, f"task-{ticket}", [f"{ticket}/task-{ticket}/{i}" for i in range(MEMBERS)], sampler)
    return ticket


def commit(core, ticket, rewards=(1.0, 0.0)):
    found = group(ticket, rewards, core.version)
    core.commit(ticket, GroupHeader.of(found, True), found)


def trained_buffer():
    """A buffer with one batch trained and nothing begun."""
    core = ReplayBufferCore(batch_size=GROUPS, max_staleness=0, max_running=8, max_bytes=1 << 30)
    for _ in range(GROUPS):
        commit(core, start(core))
    core.take()
    core.acknowledge(1)
    return core


def as_saved(core):
    return json.loads(json.dumps(core.state()))


@given(
    issued=st.booleans(),
    begun=st.integers(0, GROUPS),
    generating=st.booleans(),
    done=st.lists(st.sampled_from([(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]), max_size=GROUPS),
)
def test_how_far_the_next_batch_is_makes_no_difference(issued, begun, generating, done):
    core = trained_buffer()
    expected = settled(as_saved(core))
    assert expected["drawn"] == expected["next_id"] == expected["trained_groups"] == GROUPS
    tickets = [start(core) for _ in range(begun)]
    for ticket in tickets if generating else []:
        core.generating(ticket, "rollout_worker_0")
    for ticket, rewards in zip(tickets, done, strict=False):
        commit(core, ticket, rewards)
    if issued and core.capacity:
        core.issue()
    assert settled(as_saved(core)) == expected


def test_another_number_of_tasks_drawn_or_episodes_ended_is_seen():
    core = trained_buffer()
    state, other = as_saved(core), as_saved(core)
    other["sampler"]["drawn"]["all"] += 1
    other["ledger"]["ended"]["graded"] -= 1
    changed = {name for name, value in settled(state).items() if settled(other)[name] != value}
    assert changed == {"drawn", "ended"}


# Two runs


def write_run(folder):
    """A folder as a run leaves it, as far as it is compared."""
    store = TrajectoryStore(StoreSettings(str(folder / "trajectories")))
    for step in range(1, STEPS + 1):
        store.put([group(GROUPS * step + i) for i in range(GROUPS)], Origin("train", step, step - 1))
    store.close()
    rows = [{"step": step, "time": 1.5, "policy/grad_norm": 0.25} for step in range(1, STEPS + 1)]
    rows = [
        {"step": 0, "eval/all/pass_at_1": 0.5},
        *(row | {"trainer/global_step": float(row["step"])} for row in rows),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = folder / "checkpoints"
    staging = checkpoint.begin(root, STEPS, needed_bytes=0)
    for part in (checkpoint.POLICY, f"{checkpoint.OPTIMIZER}/deepspeed"):
        (staging / part).mkdir(parents=True)
    save_file({"w": torch.arange(4.0)}, staging / checkpoint.POLICY / "model.safetensors")
    moments = {"state": [{"exp_avg": torch.arange(4.0), "step": torch.tensor(3.0)}], "clip_grad": 1.0}
    torch.save(moments, staging / checkpoint.OPTIMIZER / "deepspeed" / "states.pt")
    core = trained_buffer()
    start(core)
    buffer_state.write(staging, core.state(), {}, Origin("train", STEPS, STEPS))
    checkpoint.commit(root, STEPS, {})


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "undisturbed"
    write_run(folder)
    return folder


@pytest.fixture
def other(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "killed")


def found_in(finished, other):
    return {aspect for aspect, lines in differences(finished, other, STEPS).items() if lines}


def test_a_run_is_itself(finished, other):
    assert differences(finished, other, STEPS) == {aspect: [] for aspect in ASPECTS}


def edit_line(path, number, **changes):
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number] |= changes
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("changes", "aspect"),
    [
        ({"ids": [1, 2, 3]}, "tokens"),
        ({"logprobs": [-0.5]}, "tokens"),
        ({"messages": []}, "tokens"),
        ({"spans": [[0, 0, 1]]}, "tokens"),
        ({"reward": 0.5}, "rewards"),
        ({"task_key": "another"}, "data_order"),
        ({"group_id": 99}, "tickets"),
    ],
)
def test_a_trajectory_that_differs_is_found(finished, other, changes, aspect):
    edit_line(other / "trajectories" / "step_000002.jsonl", 1, **changes)
    assert found_in(finished, other) == {aspect}


def test_names_of_versions_and_times_of_day_are_no_difference(finished, other):
    path = other / "trajectories" / "step_000002.jsonl"
    spans = [[7, *rest] for _, *rest in json.loads(path.read_text().splitlines()[1])["spans"]]
    edit_line(path, 1, spans=spans, policy_version=7, started_at=0.0, duration_s=99.0)
    edit_line(other / "metrics.jsonl", 2, time=99.0)
    assert found_in(finished, other) == set()


def test_a_trajectory_or_a_batch_that_is_missing_is_found(finished, other):
    path = other / "trajectories" / "step_000002.jsonl"
    path.write_text("".join(line + "\n" for line in path.read_text().splitlines()[:-1]))
    assert found_in(finished, other) == {"data_order"}
    path.unlink()
    assert found_in(finished, other) == {"data_order", "steps"}


def test_metrics_that_differ_or_steps_that_are_there_twice_are_found(finished, other):
    path = other / "metrics.jsonl"
    edit_line(path, 2, **{"policy/grad_norm": 0.25000001})
    assert found_in(finished, other) == {"metrics"}
    shutil.copy(finished / "metrics.jsonl", path)
    with path.open("a") as file:
        file.write(path.read_text().splitlines()[-1] + "\n")
    assert found_in(finished, other) == {"steps"}


def checkpoint_with(other, change):
    """The last checkpoint again, after ``change`` of its folder, with a manifest that fits."""
    root = other / "checkpoints"
    staging = (root / f"global_step_{STEPS}").rename(checkpoint.staging(root, STEPS))
    (staging / checkpoint.MANIFEST).unlink()
    change(staging)
    checkpoint.commit(root, STEPS, {})


def another_weight(folder):
    weights = torch.arange(4.0)
    weights[3] = weights[3].nextafter(torch.tensor(9.0))
    save_file({"w": weights}, folder / checkpoint.POLICY / "model.safetensors")


def another_moment(folder):
    path = folder / checkpoint.OPTIMIZER / "deepspeed" / "states.pt"
    moments = torch.load(path)
    moments["state"][0]["exp_avg"][0] = -0.0
    torch.save(moments, path)


def another_task_of_a_ticket_in_flight(folder):
    state = json.loads((folder / buffer_state.STATE).read_text())
    state["tickets"][0]["task_key"] = "another"
    (folder / buffer_state.STATE).write_text(json.dumps(state))


@pytest.mark.parametrize(
    ("change", "aspect"),
    [(another_weight, "weights"), (another_moment, "optimizer"), (another_task_of_a_ticket_in_flight, "tickets")],
)
def test_a_checkpoint_that_differs_in_one_bit_is_found(finished, other, change, aspect):
    checkpoint_with(other, change)
    assert found_in(finished, other) == {aspect}


def test_a_checkpoint_that_is_broken_is_found(finished, other):
    (other / f"checkpoints/global_step_{STEPS}/policy/model.safetensors").write_bytes(b"")
    assert found_in(finished, other) == {"tickets", "weights", "optimizer"}


def test_leaves_of_another_shape_kind_or_place_are_found():
    one = {"a": [torch.zeros(2), 1.0], "b": None}
    assert list(unequal_leaves(one, copy.deepcopy(one))) == []
    for other in (
        {"a": [torch.zeros(3), 1.0], "b": None},
        {"a": [torch.zeros(2, dtype=torch.float64), 1.0], "b": None},
        {"a": [torch.zeros(2), 2.0], "b": None},
        {"a": [torch.zeros(2)], "b": None},
        {"a": [torch.zeros(2), 1.0], "c": None},
        {"a": [torch.zeros(2), 1.0], "b": torch.zeros(1)},
    ):
        assert list(unequal_leaves(one, other)) != []
