"""The example of docs/local-fleet.md works as it is printed, and the scenario there loads."""

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from actors.envs.local_fleet.faults import load_fault_plan
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.task import load_tasks
from train.config import ConfigError, load_config
from train.preflight import check_inputs

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs/local-fleet.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_example_application_is_hosted_and_its_task_is_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    application, trial = blocks("python")
    (tmp_path / "notes_app.py").write_text(application)
    (tmp_path / "try_notes.py").write_text(trial)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(REPOSITORY))))

    def run(script: str, **variables: str) -> str:
        command = [sys.executable, str(tmp_path / script)]
        environment = {**os.environ, **variables}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    (tmp_path / "tasks.json").write_text(run("notes_app.py"))
    (task,) = load_tasks(tmp_path / "tasks.json")
    assert task.env_key == "notes"
    with LocalFleetProcess(arguments=["--applications", "notes_app:Notes"]) as process:
        lines = run("try_notes.py", FLEET_BASE_URL=process.url, FLEET_API_KEY="sk-local").splitlines()
    assert (lines[0], lines[-1]) == ("untouched: 0.0", "solved: 1.0")
    assert json.loads(lines[1]) == {"notes": [[1, "ana", "buy tea"]]}


def test_a_run_may_train_on_the_example_application(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "notes_app.py").write_text(blocks("python")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    task = runpy.run_path(str(tmp_path / "notes_app.py"))["TASK"]
    for name, key in (("train", "notes_1"), ("eval", "notes_2")):
        (tmp_path / f"{name}.json").write_text(json.dumps([task | {"task_key": key}]))
    files = ["--data.train_tasks", str(tmp_path / "train.json"), "--data.eval_tasks", str(tmp_path / "eval.json")]
    demo = REPOSITORY / "configs/demo.yaml"
    with pytest.raises(ConfigError, match="env_key 'notes' is neither"):
        check_inputs(load_config(demo, files))
    own = ["--environment.local_applications", '["notes_app:Notes"]']
    assert [task.env_key for task in check_inputs(load_config(demo, files + own)).train_tasks] == ["notes"]


def test_the_example_scenario_loads(tmp_path: Path) -> None:
    (scenario,) = blocks("yaml")
    (tmp_path / "scenario.yaml").write_text(scenario)
    assert len(load_fault_plan(tmp_path / "scenario.yaml").faults) == 3
