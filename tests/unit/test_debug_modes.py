"""Half a run: rollouts without a learner, and a learner on batches that were kept."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from actors.replay_buffer_core import GroupHeader, ReplayBufferCore
from actors.trajectory import Group
from tests.trajectories import facts, make_groups
from train import buffer_state, checkpoint, resume
from train.config import ConfigError, load_config
from train.failures import ResumeError
from train.kept_batches import KeptBatches
from train.preflight import check_gpus, check_inputs
from train.resume import TRAIN_ONLY
from train.run import main
from train.trajectory_reader import TrajectoryFileError
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin

DEMO = Path("configs/demo.yaml")


def demo(*overrides):
    return load_config(DEMO, [str(word) for word in overrides])


@pytest.fixture
def kept(tmp_path) -> tuple[Path, list[list[Group]]]:
    """A run's folder, and the batches of its steps 9 and 10. The fourth group of a batch has no graded member."""
    run = tmp_path / "runs" / "earlier"
    batches = [make_groups(4), make_groups(4, first=4)]
    store = TrajectoryStore(StoreSettings(str(run / "trajectories")))
    store.put(make_groups(3, first=20), Origin("eval", 8, 8, "sampled"))
    for step, groups in enumerate(batches, 9):
        store.put(groups, Origin("train", step, policy_version=4))
    store.close()
    return run, batches


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (
            ["--debug.rollout_only", "true"],
            ["debug.rollout_only", "trainer.dump_trajectories", "nothing would be kept"],
        ),
        (["--debug.rollout_only", "true", "--debug.train_only", "x"], ["two halves of a run"]),
        (
            ["--debug.rollout_only", "true", "--trainer.dump_trajectories", "true", "--resume", "true"],
            ["no checkpoint", "resume"],
        ),
        (["--debug.train_only", ""], ["'debug.train_only'", "at least 1 character"]),
        (["--debug.trainonly", "x"], ["'debug.trainonly'", "'debug.train_only'"]),
    ],
)
def test_what_does_not_go_together_is_said_in_one_line(overrides, parts):
    with pytest.raises(ConfigError) as error:
        demo(*overrides)
    assert "\n" not in str(error.value) and all(part in str(error.value) for part in parts), error.value


def test_kept_batches_come_back_as_they_were_trained_on(kept):
    run, batches = kept
    found = KeptBatches(str(run), overlong_filtering=True)
    assert len(found) == 2
    for number, batch in enumerate(batches, 1):
        groups, lineage = found.read(number)
        assert [group.group_id for group in groups] == [group.group_id for group in batch[:3]]
        ours, theirs = ([facts(t) for g in one for t in g.trajectories] for one in (groups, batch[:3]))
        assert ours == theirs
        assert (lineage.newest, lineage.lag(2)) == (4, 2)


def test_what_was_rolled_out_without_training_lags_by_the_updates_made_since(tmp_path):
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    for step in (1, 2, 3):
        store.put(make_groups(2), Origin("train", step, policy_version=0))
    store.close()
    found = KeptBatches(str(tmp_path), overlong_filtering=True)
    assert [found.read(number)[1].lag(0) for number in (1, 2, 3)] == [0, 1, 2]


def test_batches_that_cannot_be_trained_on_are_named(tmp_path, kept):
    run, batches = kept
    with pytest.raises(TrajectoryFileError, match="no such file, folder or run"):
        KeptBatches(str(tmp_path / "absent"), True)
    only = run / "trajectories" / "eval_000008_sampled.parquet"
    with pytest.raises(TrajectoryFileError, match="no training batches, only evaluations"):
        KeptBatches(str(only), True)
    line = json.loads((run / "trajectories" / "step_000009.jsonl").read_text().splitlines()[0])
    foreign = tmp_path / "step_000009.jsonl"
    foreign.write_text(json.dumps({name: value for name, value in line.items() if name != "group_id"}) + "\n")
    with pytest.raises(TrajectoryFileError, match="step 9 is not as a run keeps it .KeyError: 'group_id'."):
        KeptBatches(str(foreign), True).read(1)
    foreign.write_text(json.dumps(line) + "\n")
    with pytest.raises(TrajectoryFileError, match="step 9 has no group with two graded trajectories"):
        KeptBatches(str(foreign), True).read(1)


def test_the_learner_alone_needs_neither_tasks_nor_keys_nor_gpus_of_others(kept, tmp_path, monkeypatch):
    run, _ = kept
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    alone = ["--output_dir", tmp_path, "--name", "alone", "--debug.train_only", run]
    inputs = check_inputs(
        demo(*alone, "--environment.fleet", "hosted", "--data.train_tasks", "absent.json", "--policy.num_gpus", 99)
    )
    assert len(inputs.kept) == 2
    rollouts = ["--debug.rollout_only", "true", "--trainer.dump_trajectories", "true"]
    check_gpus(demo(*rollouts, "--trainer.learner.use_gpu", "true", "--trainer.learner.num_gpus", 99))
    for wrong in ([*rollouts, "--policy.num_gpus", 99], [*alone, "--trainer.learner.use_gpu", "true"]):
        with pytest.raises(ConfigError, match="GPUs"):
            check_gpus(demo(*wrong, "--trainer.learner.num_gpus", 99))


def test_a_run_never_replaces_the_batches_it_is_told_to_train_on(kept, capsys):
    run, _ = kept
    own = [str(DEMO), "--output_dir", str(run.parent), "--name", run.name]  # which has overwrite: true
    for location in (run, run / "trajectories", run / "trajectories" / "step_000009.parquet"):
        assert main([*own, "--debug.train_only", str(location)]) == 2
        assert "is this run's own folder: pass another --name" in capsys.readouterr().err
    assert len(KeptBatches(str(run), True)) == 2


def test_a_batch_that_was_not_trained_on_leaves_the_version_and_makes_room_for_the_next():
    core = ReplayBufferCore(batch_size=1, max_staleness=0, max_running=4, max_bytes=1 << 30)
    group = make_groups(1)[0]
    for step in (1, 2, 3):
        ticket = core.issue()
        assert core.issue() is None, "synchronous: one batch at a time"
        members = [replace(t, spans=[replace(s, version=0) for s in t.spans]) for t in group.trajectories]
        core.start(ticket.ticket_id, "t", [t.trajectory_id for t in members])
        header = GroupHeader.of(replace(group, trajectories=members), True)
        assert core.commit(ticket.ticket_id, header, "ref") == "buffered"
        core.take()
        core.acknowledge(None)
        assert (core.version, core.trained_steps, core.running, core.buffered) == (0, step, 0, 0)
    assert core.ledger.balanced


@pytest.mark.parametrize("train_only", [True, False])
def test_a_checkpoint_is_gone_on_from_in_the_mode_it_was_written_in(tmp_path, train_only):
    model = ["--output_dir", tmp_path, "--name", "halved", "--resume", "true"]
    learner_alone, whole = demo(*model, "--debug.train_only", "x"), demo(*model)
    root = whole.run_dir / resume.CHECKPOINTS
    checkpoint.begin(root, 2, 0)
    folder = checkpoint.staging(root, 2)
    (folder / checkpoint.POLICY).mkdir()
    state = {"sampler": None, TRAIN_ONLY: True} if train_only else ReplayBufferCore(1, 0, 1, 1).state()
    buffer_state.write(folder, state, {}, Origin("train", 2, 2))
    (folder / checkpoint.STEPS).write_text("[]")
    facts = {"policy_version": 2, "ranks": 1, "zero_stage": 2, "dtype": "float32", "optimizer": True}
    checkpoint.commit(root, 2, facts)
    right, wrong = (learner_alone, whole) if train_only else (whole, learner_alone)
    with pytest.raises(ResumeError, match=f"was written {'with' if train_only else 'without'} debug.train_only"):
        resume.prepare(wrong, [])
    assert resume.prepare(right, []).step == 2
