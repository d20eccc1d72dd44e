"""What a checkpoint keeps of the buffer, and what of a run's folder is taken back with it."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from actors.replay_buffer_core import GroupHeader, ReplayBufferCore, TicketError
from actors.task import load_tasks
from actors.trajectory import Graded, Group, Span, Ungraded
from tests.trajectories import make_trajectory
from train import buffer_state, checkpoint, resume, run
from train.config import load_config
from train.evaluate import evaluate_groups, load_results, save_results
from train.failures import OutOfTime, ResumeError, RunFailed, Unmendable
from train.preflight import Inputs, RunFolder
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


@pytest.fixture
def config(tmp_path):
    overrides = ["--output_dir", str(tmp_path), "--name", "resumed"]
    config = load_config(Path("configs/demo.yaml"), overrides)
    config.run_dir.mkdir()
    return config


TASKS = load_tasks("configs/tasks/tracker_train.json")[:3]
FACTS = {"ranks": 1, "zero_stage": 2, "dtype": "float32"}  # of configs/demo.yaml


def save(config, step, facts=FACTS):
    """A checkpoint after ``step`` with one group in flight, whose task was drawn by the run's sampler."""
    root = config.run_dir / resume.CHECKPOINTS
    folder = checkpoint.begin(root, step, 0)
    (folder / checkpoint.POLICY).mkdir()
    (folder / checkpoint.POLICY / "model.safetensors").write_text(f"weights of step {step}")
    core, sampler = ReplayBufferCore(**SIZES), resume.task_sampler(config, TASKS)
    next(sampler)
    started(core, sampler.state_dict())
    buffer_state.write(folder, core.state(), {}, Origin("train", step, step))
    steps = [{resume.STEP: float(s), "loss": float("nan")} for s in range(step - 1, step + 1)]
    (folder / checkpoint.STEPS).write_text(json.dumps(steps))
    return checkpoint.commit(root, step, facts)


def test_a_folder_is_taken_back_to_its_last_complete_checkpoint(config):
    folder = config.run_dir
    assert not resume.can_resume(folder)
    kept, cut = save(config, 2), save(config, 4)
    (cut / checkpoint.POLICY / "model.safetensors").write_text("cut")
    lines = [json.dumps({"step": step, resume.STEP: float(step), "x": step}) for step in (1, 3)]
    lines = ['{"step": 0, "eval": 0.5}', *lines, '{"step": 2, "eval": 0.7}']
    (folder / resume.METRICS).write_text("\n".join([*lines, '{"step": 4, "x"']))
    (folder / "summary.json").write_text("{}")
    (folder / "leases.db").write_text("kept: it names what must be deleted")

    point = resume.prepare(config, TASKS)
    assert point.step == 2 and point.groups == {}
    strict = {"parse_constant": lambda name: pytest.fail(f"{name} is no JSON")}
    rows = [json.loads(line, **strict) for line in (folder / resume.METRICS).read_text().splitlines()]
    assert [(row["step"], row.get("x"), row.get("eval")) for row in rows] == [
        (0, None, 0.5),
        (1, 1, None),
        (2,) + 2 * (None,),
    ]
    assert not (folder / "summary.json").exists() and (folder / "leases.db").exists()
    checkpoint._remove(kept)
    assert (point.policy / "model.safetensors").read_text() == "weights of step 2"


@pytest.mark.parametrize(
    "spoil, complaint",
    [
        (lambda config: save(config, 2, FACTS | {"ranks": 2}), "'ranks': 2.*'ranks': 1"),
        (lambda config: save(config.model_copy(update={"seed": 7}), 2), "of other tasks, or another seed"),
        (lambda config: save_without_buffer(config), "holds no buffer.json.*trainer.policy.model.path to .*policy"),
    ],
    ids=["other ranks", "another order of tasks", "written before buffers were saved"],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_the_folder_left_alone(config, spoil, complaint):
    spoil(config)
    (config.run_dir / "summary.json").write_text("{}")
    with pytest.raises(ResumeError, match=complaint):
        resume.prepare(config, TASKS)
    assert (config.run_dir / "summary.json").exists()


def save_without_buffer(config):
    root = config.run_dir / resume.CHECKPOINTS
    checkpoint.begin(root, 2, 0)
    checkpoint.commit(root, 2, FACTS)


def play(config, monkeypatch, *lives):
    """A run, each life of which is one of these functions of the run's ``Restarts``, and ends with what it returns.

    Returns:
        How the run ended, and the step at which each life began.
    """
    begun, left = [], iter(lives)

    def life(config, inputs, folder, started, point, restarts):
        begun.append(None if point is None else point.step)
        end = next(left)(restarts)
        if isinstance(end, Exception):
            raise end
        return end

    monkeypatch.setattr(run, "_run", life)
    folder = RunFolder(config)
    try:
        end = run._run_and_restart(config, Inputs(TASKS, [], None, None), folder, 0.0, None)
    except RunFailed as error:
        end = error
    finally:
        folder.close()
    assert next(left, None) is None, "a life was not lived"
    return end, begun


DIED = RunFailed("conductor: it died")


def trains_until(step, end=DIED):
    def life(restarts):
        restarts.reached(0)
        restarts.reached(step)
        return end

    return life


def writes_checkpoint(config, step, life):
    return lambda restarts: (save(config, step), life(restarts))[1]


def test_a_run_of_which_a_part_died_goes_on_from_its_checkpoint(config, monkeypatch, capsys):
    first = writes_checkpoint(config, 2, trains_until(3))
    assert play(config, monkeypatch, first, trains_until(2), trains_until(9, end=0)) == (0, [None, 2, 2])
    said = "fleet-rl: the run failed: conductor: it died; it goes on from its last checkpoint\n"
    assert capsys.readouterr().err == 2 * said


def test_a_run_that_fails_at_the_same_place_every_time_comes_to_an_end(config, monkeypatch):
    lives = [writes_checkpoint(config, 2, trains_until(3)), *[trains_until(3)] * config.max_restarts]
    assert play(config, monkeypatch, *lives) == (DIED, [None, *[2] * config.max_restarts])


def test_a_run_that_gets_further_every_time_may_fail_as_often_as_it_likes(config, monkeypatch):
    lives = [writes_checkpoint(config, step, trains_until(step)) for step in range(1, 9)]
    assert play(config, monkeypatch, *lives, trains_until(9, end=0)) == (0, [None, *range(1, 9)])


def test_a_run_that_never_came_up_is_not_started_again(config, monkeypatch):
    assert play(config, monkeypatch, lambda restarts: DIED) == (DIED, [None])


@pytest.mark.parametrize("end", [OutOfTime("run_timeout passed"), Unmendable("learner: no such route")])
def test_a_run_whose_end_would_be_the_same_is_not_started_again(config, monkeypatch, end):
    assert play(config, monkeypatch, writes_checkpoint(config, 2, trains_until(3, end=end))) == (end, [None])


def test_without_restarts_the_first_failure_ends_a_run(config, monkeypatch):
    config = config.model_copy(update={"max_restarts": 0})
    assert play(config, monkeypatch, writes_checkpoint(config, 2, trains_until(3))) == (DIED, [None])


def test_a_run_without_a_checkpoint_begins_anew_in_an_empty_folder(config, monkeypatch, capsys):
    seen = []

    def first(restarts):
        (config.run_dir / resume.METRICS).write_text('{"step": 1}')
        (config.run_dir / "trajectories").mkdir()
        return trains_until(1)(restarts)

    def second(restarts):
        seen.extend(sorted(path.name for path in config.run_dir.iterdir()))
        return 0

    assert play(config, monkeypatch, first, second) == (0, [None, None])
    assert seen == ["config.yaml", "run.lock"]
    assert "conductor: it died; it begins anew, for it has no checkpoint yet" in capsys.readouterr().err


def test_the_evaluation_before_training_outlives_the_process(tmp_path):
    path = tmp_path / "before.json"
    assert load_results(path) == []
    result = evaluate_groups("sampled", 0, 0, [group(0, 0), group(2, 0)])
    save_results(path, [result])
    assert load_results(path) == [result]


class Parts:
    """Stands for a run's system: what :func:`train.run._run` did with it, one word each, and what of it fails."""

    steps = 9

    def __init__(self, fails=(), can_go_back=True):
        self.did, self.fails, self.can_go_back = [], fails, can_go_back

    def __enter__(self):
        self.did.append("start")
        return self

    def __exit__(self, *exc):
        self.did.append("end")

    def start(self, report, *, run_until):
        pass

    def end_training_parts(self):
        self._do("end training")

    def go_back(self, point, report, deadline):
        self._do(f"go back to {point.step}")

    def _do(self, word):
        self.did.append(word)
        if word in self.fails:
            raise RunFailed(f"{word}: it failed")


def lives(config, monkeypatch, parts, *efforts):
    """A run whose training ends each time as one of ``efforts`` says: a step reached, and how. Returns how it ended."""
    left = iter(efforts)

    def trains(config, system, tracker, progress, deadline, point, restarts):
        step, end = next(left)
        restarts.reached(step)
        save(config, step)
        if isinstance(end, Exception):
            raise end
        return [], [], {}

    monkeypatch.setattr("train.system.System", lambda *arguments: parts)
    monkeypatch.setattr("train.report.write_report", lambda *arguments: None)
    monkeypatch.setattr(run, "_evaluate_and_train", trains)
    folder = RunFolder(config)
    try:
        return run._run_and_restart(config, Inputs(TASKS, [], None, None), folder, 0.0, None)
    except RunFailed as error:
        return error
    finally:
        folder.close()


WELL = 0


def test_a_part_that_holds_what_a_checkpoint_holds_is_replaced_while_the_others_live(config, monkeypatch):
    parts = Parts()
    assert lives(config, monkeypatch, parts, (2, DIED), (4, DIED), (9, WELL)) == 0
    assert parts.did == ["start", "end training", "go back to 2", "end training", "go back to 4", "end"]


def test_where_that_does_not_help_all_of_the_run_is_started_again(config, monkeypatch):
    parts = Parts()
    assert lives(config, monkeypatch, parts, (2, DIED), (2, DIED), (9, WELL)) == 0
    assert parts.did == ["start", "end training", "go back to 2", "end", "start", "end"]


@pytest.mark.parametrize("step", ["end training", "go back to 2"])
def test_where_that_fails_too_it_has_cost_one_restart(config, monkeypatch, step):
    config = config.model_copy(update={"max_restarts": 1})
    parts = Parts(fails=[step])
    assert lives(config, monkeypatch, parts, (2, DIED), (9, WELL)) == 0
    assert parts.did[-3:] == ["end", "start", "end"]


def test_a_part_whose_failure_would_come_again_is_not_replaced(config, monkeypatch):
    parts, end = Parts(), Unmendable("learner: no such route")
    assert lives(config, monkeypatch, parts, (2, end)) is end
    assert parts.did == ["start", "end"]


def test_a_run_that_is_not_in_training_or_may_not_is_not_taken_back_in_parts(config, monkeypatch):
    parts = Parts(can_go_back=False)
    assert lives(config, monkeypatch, parts, (2, DIED), (9, WELL)) == 0
    assert parts.did == ["start", "end", "start", "end"]
    never = config.model_copy(update={"max_restarts": 0})
    assert lives(never, monkeypatch, parts := Parts(), (2, DIED)) is DIED
    assert parts.did == ["start", "end"]


def test_a_run_whose_parts_fail_at_the_same_place_every_time_comes_to_an_end(config, monkeypatch):
    parts = Parts()
    assert lives(config, monkeypatch, parts, *[(2, DIED)] * (config.max_restarts + 1)) is DIED
    assert parts.did.count("start") == config.max_restarts and parts.did.count("end training") == 1
