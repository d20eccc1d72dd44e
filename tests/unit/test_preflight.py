"""What is wrong with a run's input is said in one line, with exit code 2, before any actor starts."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from train import preflight
from train.config import ConfigError, load_config
from train.preflight import RunFolder, check_disk, check_gpus, check_inputs
from train.run import main

DEMO = Path("configs/demo.yaml")
MODEL = Path("configs/models/tiny-tracker")


def complaint(capsys, tmp_path, *overrides) -> str:
    """The one line ``python -m train.run`` prints for an input it refuses."""
    code = main([str(DEMO), "--output_dir", str(tmp_path / "runs"), "--name", "refused", *map(str, overrides)])
    printed = capsys.readouterr()
    assert code == 2 and printed.out == "" and printed.err.count("\n") == 1, printed
    return printed.err


def model_without(tmp_path, *names) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    for name in names:
        (folder / name).unlink()
    return folder


def task_file(tmp_path, tasks) -> Path:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(tasks))
    return path


def test_an_unknown_key(capsys, tmp_path):
    assert "the nearest known key is 'trainer.max_steps'" in complaint(capsys, tmp_path, "--trainer.max_step", "3")


def test_a_missing_task_file(capsys, tmp_path):
    assert "absent.json does not exist" in complaint(capsys, tmp_path, "--data.train_tasks", "absent.json")


def test_a_malformed_task_names_task_and_field(capsys, tmp_path):
    path = task_file(tmp_path, [{"task_key": "a", "prompt": "p", "env_key": ""}])
    assert "task 0 (a): field 'env_key'" in complaint(capsys, tmp_path, "--data.train_tasks", path)


def test_an_empty_split(capsys, tmp_path):
    assert "no training task" in complaint(capsys, tmp_path, "--data.train_tasks", task_file(tmp_path, []))


def test_a_task_of_an_unsupported_modality(capsys, tmp_path):
    task = {"task_key": "a", "prompt": "p", "env_key": "e", "task_modality": "computer_use"}
    assert "task a: modality computer_use" in complaint(
        capsys, tmp_path, "--data.train_tasks", task_file(tmp_path, [task])
    )


@pytest.mark.parametrize(
    ("missing", "part"),
    [
        ("config.json", "no config.json"),
        ("model.safetensors", "no *.safetensors"),
        ("tokenizer.json", "no tokenizer"),
        ("chat_template.jinja", "no chat template"),
    ],
)
def test_an_incomplete_model_folder(capsys, tmp_path, missing, part):
    folder = model_without(tmp_path, missing)
    assert part in complaint(capsys, tmp_path, "--trainer.policy.model.path", folder)


@pytest.mark.parametrize("kept", [5, 1000, -7])
def test_weights_whose_download_broke_off(capsys, tmp_path, kept):
    folder = model_without(tmp_path, "model.safetensors")
    (folder / "model.safetensors").write_bytes((MODEL / "model.safetensors").read_bytes()[:kept])
    line = complaint(capsys, tmp_path, "--trainer.policy.model.path", folder)
    assert "model.safetensors are damaged" in line and "fetch or write them again" in line


def test_a_model_folder_that_does_not_exist(capsys, tmp_path):
    assert "does not exist" in complaint(capsys, tmp_path, "--trainer.policy.model.path", tmp_path / "absent")


def test_a_prompt_longer_than_the_context(capsys, tmp_path):
    line = complaint(capsys, tmp_path, "--generator.max_input_length", "20")
    assert "exceeds generator.max_input_length 20" in line


def test_a_tool_call_format_that_vllm_does_not_know(capsys, tmp_path):
    assert "generator.tool_call_format 'hermess'" in complaint(
        capsys, tmp_path, "--generator.tool_call_format", "hermess"
    )


def test_the_hosted_fleet_without_a_key(capsys, tmp_path, monkeypatch):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    assert "FLEET_API_KEY is not set" in complaint(capsys, tmp_path, "--environment.fleet", "hosted")


def test_more_gpus_than_this_machine_has(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("train.preflight.DEVICES", tmp_path)
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = complaint(capsys, tmp_path, "--policy.num_gpus", "1", "--policy.num_replicas", "2")
    assert "the run needs 2 GPUs" in line and "this machine has 1" in line


def test_fractions_that_cannot_share_a_gpu(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("train.preflight.DEVICES", tmp_path)
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    line = complaint(capsys, tmp_path, "--policy.num_gpus", "0.6", "--policy.num_replicas", "3")
    assert "the run needs 3 GPUs" in line and "two above 0.5 do not share one" in line and "this machine has 2" in line


def test_fractions_that_fill_the_gpus_to_the_last_are_enough(tmp_path, monkeypatch):
    """In floating point the sum is above 3."""
    monkeypatch.setattr("train.preflight.DEVICES", tmp_path)
    for number in range(3):
        (tmp_path / f"nvidia{number}").touch()
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    options = {"--policy.num_gpus": "0.8", "--policy.num_replicas": "3", "--trainer.learner.use_gpu": "true"}
    options |= {"--trainer.learner.num_gpus": "0.1", "--trainer.learner.num_workers": "6"}
    check_gpus(load_config(DEMO, [word for option in options.items() for word in option]))


def test_a_malformed_fault_file(capsys, tmp_path):
    path = tmp_path / "faults.yaml"
    path.write_text("faults: [{route: nowhere, kind: hang}]")
    assert "faults.yaml" in complaint(capsys, tmp_path, "--environment.local_faults", path)


def test_an_application_of_ones_own_that_cannot_be_hosted(capsys, tmp_path):
    own = ("--environment.local_applications", '["no_such_module:Notes"]')
    assert "no_such_module" in complaint(capsys, tmp_path, *own)
    assert "for environment.fleet 'local' only" in complaint(capsys, tmp_path, *own, "--environment.fleet", "hosted")


def test_an_earlier_run_is_kept_unless_told_otherwise(capsys, tmp_path):
    kept = tmp_path / "runs" / "refused" / "summary.json"
    kept.parent.mkdir(parents=True)
    kept.write_text("{}")
    for told in ("false", "true"):  # to resume a run that ended without a checkpoint is to begin in its place
        given = ("--overwrite", "false", "--resume", told)
        assert "holds an earlier run" in complaint(capsys, tmp_path, *given)
    assert kept.read_text() == "{}"


def test_a_run_that_was_interrupted_before_its_first_checkpoint_begins_anew_when_resumed(tmp_path):
    overrides = ["--output_dir", str(tmp_path), "--name", "early", "--overwrite", "false", "--resume", "true"]
    config = load_config(DEMO, overrides)
    config.run_dir.mkdir()
    (config.run_dir / "metrics.jsonl").write_text("{}")
    folder = RunFolder(config)
    folder.close()
    assert not folder.resumed and [entry.name for entry in config.run_dir.iterdir()] == ["run.lock"]


def test_a_second_run_with_the_same_name(tmp_path):
    config = load_config(DEMO, ["--output_dir", str(tmp_path), "--name", "twice"])
    held = RunFolder(config)
    try:
        second = subprocess.run(
            [sys.executable, "-m", "train.run", str(DEMO), "--output_dir", str(tmp_path), "--name", "twice"],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        held.close()
    assert second.returncode == 2
    assert second.stderr == f"fleet-rl: run 'twice' is already running (process {os.getpid()}); pass another --name\n"


def test_too_little_disk_says_how_much_is_needed(tmp_path, monkeypatch):
    config = load_config(DEMO, ["--output_dir", str(tmp_path)])
    full = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: full)
    with pytest.raises(ConfigError, match=r"0\.00 GB free, 0\.08 GB needed \(3 checkpoints x 0\.00 GB"):
        check_disk(config)


def test_the_demo_itself_is_accepted(tmp_path):
    inputs = check_inputs(load_config(DEMO, ["--output_dir", str(tmp_path)]))
    assert len(inputs.train_tasks) >= 400 and len(inputs.eval_tasks) >= 64
