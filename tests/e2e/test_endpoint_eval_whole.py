"""``fleet-rl eval`` of an endpoint as its users start it: with the servers it starts itself, and what it leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from actors.envs.local_fleet.apps.tracker_tasks import problems
from actors.task import load_tasks
from tests import teacher_server
from tests.e2e.runs import MARK, Run
from tests.teacher_server import MODEL, serving_teacher

PROBLEMS = {problem.prompt: problem for _, problem in problems("heldout", 160, 1)}


@pytest.fixture
def teacher():
    with serving_teacher() as server:
        server.problems = PROBLEMS
        yield server


def start(teacher, folder: Path, *options: str) -> Run:
    """The command in a process of its own, marked so that whatever it starts can be found again."""
    mark, scratch = uuid.uuid4().hex, folder / "scratch"
    scratch.mkdir()
    asked = ["--endpoint", teacher.url, "--model", MODEL, "--out", str(folder / "out"), "--json"]
    process = subprocess.Popen(
        [sys.executable, "-m", "deploy.cli", "eval", *options, *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {MARK: mark, "OPENAI_API_KEY": teacher_server.KEY, "TMPDIR": str(scratch)},
    )
    return Run(process, folder / "out", mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_130_and_leaves_nothing(teacher, tmp_path, number):
    teacher.pause_s = 0.2
    run = start(teacher, tmp_path, "configs/demo.yaml", "--samples", "4", "--concurrency", "4")
    deadline = time.monotonic() + 60
    while len(teacher.seen) < 8 and run.process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(teacher.seen) >= 8 and len(run.leftovers(0)) >= 2  # itself and the local Fleet
    run.process.send_signal(number)
    run.process.send_signal(number)  # in haste
    out, err = run.process.communicate(timeout=30)
    assert (run.process.returncode, out, err) == (130, "", "fleet-rl: stopped\n")
    assert run.leftovers() == [] and list((tmp_path / "scratch").iterdir()) == []
    assert not (tmp_path / "out").exists()


def test_tasks_of_an_openenv_server_are_attempted_by_the_same_command(teacher, tmp_path):
    tasks = load_tasks("configs/tasks/browse_heldout.json")[:2]
    right, wrong = ({"role": "assistant", "content": f"{a}<done>"} for a in (tasks[0].openenv_reset["answer"], "no"))
    teacher.replies = [(right, "stop"), (wrong, "stop")]
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([task.model_dump(exclude_none=True) for task in tasks]))
    asked = ["--split", str(path), "--samples", "1", "--concurrency", "1"]
    run = start(teacher, tmp_path, "configs/browse.yaml", *asked)
    out, err = run.process.communicate(timeout=120)
    assert run.process.returncode == 0, err
    said = json.loads(out.splitlines()[-1])
    assert (said["graded"], said["pass_at_1"], said["ledger"]["instances"]) == (2, 0.5, None)
    assert {tool["function"]["name"] for tool in teacher.bodies[0]["tools"]} >= {"search", "open", "answer"}
    assert run.leftovers() == [] and list((tmp_path / "scratch").iterdir()) == []
