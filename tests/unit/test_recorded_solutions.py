"""Every shipped task of the sample applications records how it is solved, and its replay is a success."""

from __future__ import annotations

import json
from contextlib import closing

import pytest

from actors.envs.local_fleet.apps import APPLICATIONS
from actors.envs.local_fleet.apps.problems import open_database
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.envs.local_fleet.verifier_worker import run_verifier
from tests.fleet_faults import KEY
from train.data.candidate import read_candidate
from train.data.validation import ValidateOptions, Validation

FILES = [f"configs/tasks/{name}_{split}.json" for name in APPLICATIONS for split in ("train", "heldout")]


def shipped(path):
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def replayed(candidate, folder, calls):
    """The verifier's result after ``calls`` on the application itself, without any server in between."""
    task = candidate.task
    application = APPLICATIONS[task.env_key]
    tools = {tool.name: tool for tool in application.tools}
    paths = {}
    for name, carried_out in (("seed", ()), ("current", calls)):
        with closing(open_database(application, task.data_key, task.data_version)) as database:
            for call in carried_out:
                tools[call.name].call(database, call.arguments, task.env_variables)
            database.commit()
            paths[name] = str(folder / f"{name}.db")
            (folder / f"{name}.db").write_bytes(database.serialize())
    verifier = candidate.verifier
    job = {"code": task.verifier_code, "function_name": verifier.function_name, "args": [], "databases": paths,
           "kwargs": {"final_answer": candidate.answer}, "instance_id": "i", "env_key": task.env_key,
           "env_variables": task.env_variables}  # fmt: skip
    verdict = run_verifier(job)
    assert verdict["success"], verdict["error"]
    return verdict["result"]


@pytest.mark.parametrize("path", FILES)
def test_the_recorded_calls_of_every_shipped_task_solve_it(path, tmp_path):
    for raw in shipped(path):
        candidate = read_candidate(raw, path)
        assert len(candidate.calls) == candidate.task.difficulty and candidate.answer_known, raw["task_key"]
        assert replayed(candidate, tmp_path, candidate.calls) == 1.0, raw["task_key"]
        if "heldout" in path and candidate.answer == "":  # the last call of such a task changes something
            assert replayed(candidate, tmp_path, candidate.calls[:-1]) == 0.0, raw["task_key"]


async def test_validation_accepts_a_task_of_every_kind_after_its_replay(tmp_path):
    tasks = {(raw["env_key"], raw["data_key"], raw["kind"]): raw for path in FILES for raw in shipped(path)}
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(list(tasks.values())))
    with LocalFleetProcess() as fleet:
        validation = Validation(ValidateOptions(str(path), tmp_path / "out"))
        closed = await validation.run(KEY, fleet.url, None, lambda progress: None)
    report = validation.write()
    kinds = {(env_key, kind) for env_key, _, kind in tasks}
    assert closed.left == () and len(tasks) == 2 * len(kinds) > 90  # on both sides
    assert report.total.verdicts == {"accepted": len(tasks)} and report.total.replays == {"passed": len(tasks)}
