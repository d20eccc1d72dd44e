"""``fleet-rl eval``: which policy, which tasks, which sampling; and mistakes in one line, before anything starts."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from actors.task import load_tasks
from deploy import evaluate
from train import checkpoint_eval as job
from train import run as train_run
from train.checkpoint import begin, commit, export_policy
from train.config import ConfigError, load_config
from train.data.split import unit_hash

ROOT = Path(__file__).resolve().parents[2]
DEMO = "configs/demo.yaml"
MODEL = Path("configs/models/tiny-tracker")
HELD_OUT = "configs/tasks/tracker_heldout.json"


class Untouched:
    def save_pretrained(self, folder):
        shutil.copyfile(MODEL / "model.safetensors", folder / "model.safetensors")


@pytest.fixture
def run_folder(tmp_path):
    """A run with checkpoints of steps 5 and 10, as far as an evaluation looks at it."""
    config = load_config(Path(DEMO), ["--output_dir", str(tmp_path / "elsewhere"), "--name", "trained"])
    for step in (5, 10):
        export_policy(begin(config.run_dir / "checkpoints", step, 0) / "policy", Untouched(), MODEL)
        commit(config.run_dir / "checkpoints", step, {})
    train_run._save_config(config)
    return config.run_dir.rename(tmp_path / "moved")


def complaint(capsys, *arguments) -> str:
    try:
        code = evaluate.main([str(a) for a in arguments])
    except SystemExit as exit:  # argparse's own
        code = exit.code
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and "Traceback" not in printed.err, printed
    return printed.err.strip().splitlines()[-1]


def test_help_answers_at_once():
    command = [sys.executable, "-m", "deploy.cli", "eval", "--help"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0 and "--checkpoint" in answer.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["absent.yaml"], ["absent.yaml does not exist"]),
        (["absent"], ["there is no absent", "runs/"]),
        (["tests"], ["tests holds no config.yaml"]),
        ([DEMO, "--checkpoint", "absent"], ["no folder absent", "latest or base"]),
        ([DEMO, "--checkpoint", "tests"], ["tests", "config.json"]),
        ([DEMO, "--checkpoint", "latest", "--name", "never-ran"], ["runs/never-ran holds no complete checkpoint"]),
        ([DEMO, "--split", "absent.json"], ["absent.json does not exist"]),
        ([DEMO, "--samples", "0"], ["--samples", "'0'"]),
        ([DEMO, "--greedy", "--samples", "4"], ["4 samples at temperature 0", "--samples 1"]),
        ([DEMO, "--greedy", "--temperature", "0.7"], ["--greedy", "0.7"]),
        ([DEMO, "--temperature", "3"], ["--temperature", "'3'", "0 to 2"]),
        ([DEMO, "--temperature", "warm"], ["'warm' is not a number"]),
        ([DEMO, "--top-p", "0"], ["--top-p"]),
        ([DEMO, "--sample", "2"], ["unknown option --sample"]),
        ([DEMO, "--trainer.max_step", "2"], ["unknown key 'trainer.max_step'", "trainer.max_steps"]),
        ([DEMO, "--upload-to", "bucket"], ["--upload-to: bucket/: not a location in S3"]),
        ([DEMO, "--out", "pyproject.toml/evals"], ["pyproject.toml is no folder that you may write to"]),
        ([DEMO, "--policy.eval_replicas", "1"], ["policy.eval_replicas", "trainer.eval_interval"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_a_mistake_is_one_line_with_exit_code_2(capsys, tmp_path, arguments, words):
    out = [] if "--out" in arguments else ["--out", tmp_path / "out"]
    said = complaint(capsys, *arguments, *out)
    assert all(word in said for word in words), said
    assert list(tmp_path.iterdir()) == []


def test_an_evaluation_that_is_there_is_not_replaced_unasked(capsys, tmp_path):
    (tmp_path / "eval_only").mkdir()
    (tmp_path / "eval_only/aggregated_results.jsonl").write_text("{}")
    assert "--overwrite" in complaint(capsys, DEMO, "--out", tmp_path)
    config = load_config(Path(DEMO), [])
    attempts = job.choose_sampling(config)
    assert job.result_folder(tmp_path, job.Policy("m", None), attempts, overwrite=True) == tmp_path / "eval_only"
    assert job.result_folder(tmp_path, job.Policy("m", 3), attempts, overwrite=False) == tmp_path / "global_step_3"
    greedy = job.choose_sampling(config, temperature=0.0)
    assert job.result_folder(tmp_path, job.Policy("m", None), greedy, False) == tmp_path / "eval_only/greedy"


def test_a_run_is_found_where_it_lies_with_what_it_was_told(run_folder, monkeypatch):
    config, is_run = job.find_config(str(run_folder), ["--generator.max_turns", "3"])
    assert is_run and config.run_dir == run_folder
    assert (config.generator.max_turns, config.trainer.max_steps) == (3, 60)
    monkeypatch.setattr(job, "RUNS", run_folder.parent)
    assert job.find_config("moved", [])[0].run_dir == run_folder
    assert job.find_config(DEMO, [])[1] is False


def test_which_policy_is_meant(run_folder):
    config, _ = job.find_config(str(run_folder), [])
    checkpoints = run_folder / "checkpoints"
    ten, five = checkpoints / "global_step_10", checkpoints / "global_step_5"
    assert job.find_policy(config, "latest") == job.Policy(str(ten / "policy"), 10)
    assert job.find_policy(config, "base") == job.Policy(str(MODEL), None)
    assert job.find_policy(config, str(five)) == job.Policy(str(five / "policy"), 5)
    assert job.find_policy(config, str(five / "policy")) == job.Policy(str(five / "policy"), 5)
    assert job.find_policy(config, str(MODEL)) == job.Policy(str(MODEL), None)
    (ten / "policy/model.safetensors").write_bytes(b"cut off")
    assert job.find_policy(config, "latest").step == 5
    with pytest.raises(ConfigError, match="global_step_10 is not complete"):
        job.find_policy(config, str(ten))


def test_the_tasks_of_each_environment_are_the_same_few_whatever_else_is_there(tmp_path):
    config = load_config(Path(DEMO), [])
    assert len(job.choose_tasks(config, "eval")) == 128 == len(job.choose_tasks(config, HELD_OUT)[:128])
    tasks = [
        {"task_key": f"{env}-{i}", "prompt": "p", "env_key": env} for i in range(40) for env in ("tracker", "mail")
    ]
    (tmp_path / "few.json").write_text(json.dumps(tasks[:50]))
    (tmp_path / "all.json").write_text(json.dumps(tasks))
    chosen = job.choose_tasks(config, str(tmp_path / "all.json"), per_env=5)
    for env in ("tracker", "mail"):
        keys = [task.task_key for task in chosen if task.env_key == env]
        of_env = [task["task_key"] for task in tasks if task["env_key"] == env]
        assert set(keys) == set(sorted(of_env, key=unit_hash)[:5])
        few = {t.task_key for t in job.choose_tasks(config, str(tmp_path / "few.json"), per_env=5)}
        assert {key for key in keys if int(key.split("-")[1]) < 25} <= few
    order = [task.task_key for task in load_tasks(tmp_path / "all.json")]
    assert [t.task_key for t in chosen] == sorted((t.task_key for t in chosen), key=order.index)


def test_what_is_not_said_is_sampled_as_in_the_run():
    config = load_config(Path(DEMO), [])
    as_in_run = job.choose_sampling(config)
    assert (as_in_run.label, as_in_run.n) == ("sampled", 2)
    assert (as_in_run.sampling.temperature, as_in_run.sampling.top_p, as_in_run.sampling.max_tokens) == (1.0, 1.0, 80)
    said = job.choose_sampling(config, samples=5, temperature=0.6, top_p=0.9, max_tokens=32)
    assert (said.n, said.sampling.temperature, said.sampling.top_p, said.sampling.max_tokens) == (5, 0.6, 0.9, 32)
    greedy = job.choose_sampling(config, temperature=0.0)
    assert (greedy.label, greedy.n, greedy.sampling.temperature) == ("greedy", 1, 0.0)


def test_an_evaluation_needs_neither_the_learners_gpu_nor_the_runs_name(run_folder, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    keys = ["--trainer.learner.use_gpu", "true", "--trainer.learner.num_gpus", "64"]
    run, _ = job.find_config(str(run_folder), keys)
    tasks = job.choose_tasks(run, "eval", per_env=2)
    config, inputs = job.check(run, job.find_policy(run, "latest"), tasks)
    assert config.name != run.name and config.name.startswith("moved-eval-")
    assert config.trainer.policy.model.path == str(run_folder / "checkpoints/global_step_10/policy")
    assert inputs.eval_tasks == tasks and len(tasks) == 2


def test_the_saved_configuration_holds_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", "sk-very-secret-value")
    url = "--environment.base_url", "https://sk-very-secret-value@fleet.example"
    config = load_config(Path(DEMO), ["--output_dir", str(tmp_path), *url])
    config.run_dir.mkdir()
    train_run._save_config(config)
    text = (config.run_dir / "config.yaml").read_text()
    assert "sk-very" not in text and load_config(config.run_dir / "config.yaml", []).trainer == config.trainer
    assert os.listdir(config.run_dir) == ["config.yaml"]
