"""What a checkpoint keeps of the buffer, and what of a run's folder is taken back with it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from actors.replay_buffer_core import GroupHeader, ReplayBufferCore, TicketError
from actors.trajectory import Graded, Group, Span, Ungraded
from tests.trajectories import make_trajectory
from train import buffer_state, checkpoint, resume
from train.evaluate import evaluate_groups, load_results, save_results
from train.trajectory_table import Origin

SIZES = {"batch_size": 2, "max_staleness": 1, "max_running": 8, "max_bytes": 1 << 30}


def group(ticket, version):
    members = []
    for index, outcome in enumerate((Graded(1.0), Graded(0.0), Ungraded("the judge is ill"))):
        made = make_trajectory(ticket, index)
        spans = [Span(version, 0, int(made.mask.sum()))]
        members.append(replace(made, trajectory_id=f"{ticket}/t/{index}", task_key="t", spans=spans, outcome=outcome))
    return Group(ticket, "t", members[0].env_key, members)


def started(core, sampler_state=None):
    ticket = core.issue()
    core.start(ticket.ticket_id, "t", [f"{ticket.ticket_id}/t/{i}" for i in range(3)], sampler_state)
    return ticket.ticket_id


def committed(core, ticket, version):
    found = group(ticket, version)
    core.commit(ticket, GroupHeader.of(found, True), [found])
    return found


def test_a_buffer_goes_on_in_another_process_with_the_same_groups_tickets_and_tasks(tmp_path):
    core = ReplayBufferCore(**SIZES)
    for _ in range(2):
        committed(core, started(core), 0)
    core.take()
    core.acknowledge(1)
    kept = committed(core, started(core), 0)  # lags 1: the most that is allowed
    running = started(core, {"drawn": 4})
    core.generating(running, "rollout_worker_0")
    undecided = core.issue().ticket_id
    groups = {ticket: payload[0] for ticket, payload in core.payloads().items()}
    buffer_state.write(tmp_path, core.state(), groups, Origin("train", 1, 1))

    state, groups = buffer_state.read(tmp_path)
    assert state["sampler"] == {"drawn": 4}
    again = ReplayBufferCore(**SIZES)
    again.restore(state, {ticket: [found] for ticket, found in groups.items()})
    in_flight = again.resume(version=5)
    assert [(t.ticket_id, t.task_key) for t in in_flight] == [(running, "t")]
    assert (again.version, again.trained_steps, again.buffered) == (5, 1, 1), "a new name has made nothing stale"
    assert again.issue().ticket_id == undecided, "the task that was not chosen yet is chosen again"
    committed(again, running, 5)
    first, second = (ticket.payload[0] for ticket in again.take())
    assert [t.outcome for t in first.trajectories] == [t.outcome for t in kept.trajectories]
    for ours, theirs in zip(first.trajectories, kept.trajectories, strict=True):
        assert np.array_equal(ours.logprobs, theirs.logprobs) and ours.spans == theirs.spans
    again.acknowledge(6)
    assert again.ledger.balanced and again.lineage.lag(0) == 2
    with pytest.raises(TicketError, match="unpublished version"):
        committed(again, started(again), 3)  # of the line that was lost


def test_a_folder_is_taken_back_to_its_last_complete_checkpoint(tmp_path):
    root = tmp_path / resume.CHECKPOINTS
    assert not resume.can_resume(tmp_path)
    for step in (2, 4):
        folder = checkpoint.begin(root, step, 0)
        (folder / checkpoint.POLICY).mkdir()
        (folder / checkpoint.POLICY / "model.safetensors").write_text(f"weights of step {step}")
        buffer_state.write(folder, ReplayBufferCore(**SIZES).state(), {}, Origin("train", step, step))
        (folder / checkpoint.STEPS).write_text(json.dumps([{resume.STEP: float(s)} for s in range(step - 1, step + 1)]))
        checkpoint.commit(root, step, {})
    (root / "global_step_4" / checkpoint.POLICY / "model.safetensors").write_text("cut")
    lines = [json.dumps({"step": step, resume.STEP: float(step), "x": step}) for step in (1, 3)]
    lines = ['{"step": 0, "eval": 0.5}', *lines]
    (tmp_path / resume.METRICS).write_text("\n".join([*lines, '{"step": 4, "x"']))
    (tmp_path / "summary.json").write_text("{}")
    (tmp_path / "leases.db").write_text("kept: it names what must be deleted")

    point = resume.prepare(tmp_path)
    assert point.step == 2 and point.groups == {}
    rows = [json.loads(line) for line in (tmp_path / resume.METRICS).read_text().splitlines()]
    assert [(row["step"], row.get("x")) for row in rows] == [(0, None), (1, 1), (2, None)]
    assert not (tmp_path / "summary.json").exists() and (tmp_path / "leases.db").exists()
    checkpoint._remove(root / "global_step_2")
    assert (point.policy / "model.safetensors").read_text() == "weights of step 2"


def test_the_evaluation_before_training_outlives_the_process(tmp_path):
    path = tmp_path / "before.json"
    assert load_results(path) == []
    result = evaluate_groups("sampled", 0, 0, [group(0, 0), group(2, 0)])
    save_results(path, [result])
    assert load_results(path) == [result]
