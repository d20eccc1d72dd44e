"""Files that are broken in two hundred ways: each is one line, exit code 2 and nothing half-written, by every command.

``fleet-rl prepare`` is put to the same files in ``test_prepare.py``.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from actors.task import Task, TaskFileError, load_tasks
from actors.task_table import task_table
from deploy.cli import main
from tests.broken_task_files import GOOD, broken_task_files
from tests.skyrl_dumps import solved, write_dump
from tests.trajectories import make_groups
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin

BROKEN = list(broken_task_files())
# A run takes numbers of any size in fields that it does not use; a table has no place for them.
READ_BY_A_RUN = {"too-large-a-number", "difficulty-100000000000"}


def complaint(capsys, *arguments: object) -> str:
    """The one line of a refusal."""
    assert main([str(argument) for argument in arguments]) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert printed.out == "" and line.startswith("fleet-rl: ") and line.isprintable() and len(line) < 1200
    return line


@pytest.fixture
def keys(monkeypatch):
    """Of services that nobody is at: whatever gets as far as asking them fails otherwise."""
    for name in ("FLEET_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "sk-none")
    monkeypatch.setenv("FLEET_BASE_URL", "http://127.0.0.1:9")


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_validate_names_what_is_broken_in_a_task_file(content, words, keys, tmp_path, capsys):
    path = tmp_path / "tasks.json"
    path.write_bytes(content)
    line = complaint(capsys, "validate", "--tasks", path, "--out", tmp_path / "out")
    assert all(word in line for word in words), line
    assert os.listdir(tmp_path) == ["tasks.json"]


@pytest.mark.parametrize(("name", "content"), [case[:2] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_eval_names_what_is_broken_in_a_task_file(name, content, keys, tmp_path, capsys):
    path = tmp_path / "tasks.json"
    path.write_bytes(content)
    asked = ["--endpoint", "http://127.0.0.1:9/v1", "--model", "m", "--environment.fleet", "hosted"]
    line = complaint(capsys, "eval", "configs/demo.yaml", "--split", path, "--out", tmp_path / "out", *asked)
    assert ("tasks.json" in line) == (name not in READ_BY_A_RUN), line
    assert os.listdir(tmp_path) == ["tasks.json"]


def test_what_eval_takes_of_these_files_can_be_read(tmp_path):
    path = tmp_path / "tasks.json"
    for name, content, _ in BROKEN:
        path.write_bytes(content)
        if name in READ_BY_A_RUN:
            assert len(load_tasks(path)) == len(GOOD)
        elif not name.startswith("empty-"):
            with pytest.raises(TaskFileError):
                load_tasks(path)


def test_a_damaged_table_of_tasks_is_named_in_one_line_or_read_as_what_is_left(tmp_path):
    path = tmp_path / "tasks.parquet"
    pq.write_table(task_table([Task(**raw) for raw in GOOD]), path)
    whole, refused = path.read_bytes(), 0
    for number in range(200):
        path.write_bytes(damaged(whole, number))
        try:
            assert len(load_tasks(path)) <= len(GOOD)
        except TaskFileError as error:
            refused += 1
            assert str(path) in str(error) and str(error).isprintable() and len(str(error)) < 1200
    assert refused > 100


# -- dumps


def store(folder: Path) -> None:
    trajectories = TrajectoryStore(StoreSettings(str(folder / "trajectories"), jsonl=True))
    trajectories.put(make_groups(6), Origin("train", 3, 2))
    assert trajectories.close().waiting == 0


def damaged(content: bytes, number: int) -> bytes:
    """With a cut, with a stretch left out, or with some bytes changed, by ``number``."""
    draw = random.Random(number)
    at = draw.randrange(1, len(content) - 8)
    if number % 3 == 0:
        return content[:at]
    if number % 3 == 1:
        return content[:at] + content[at + draw.randrange(1, 200) :]
    return content[:at] + bytes(draw.choice(b'{}[]",:\\\x00\xff') for _ in range(4)) + content[at + 4 :]


DUMPS = {
    "evals/global_step_0/github.jsonl": 100,
    "trajectories/step_000003.jsonl": 60,
    "trajectories/step_000003.parquet": 60,
    "metrics.jsonl": 20,
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with a file of each kind, as bytes by name."""
    folder = tmp_path_factory.mktemp("whole")
    for step in (0, 30):
        write_dump(folder, step, [solved(f"t{i}") for i in range(3)])
    store(folder)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n, "a": 0.5}) + "\n" for n in range(1, 9)))
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


@pytest.mark.parametrize(("name", "count"), DUMPS.items(), ids=DUMPS)
def test_analyze_names_what_is_broken_in_a_dump_or_reads_what_is_left(whole, name, count, tmp_path, capsys):
    others = [n for n in whole if n.startswith("evals/") or n == name]  # lines of the store count where it has no table
    folder = tmp_path / "run"
    for other in others:
        (folder / other).parent.mkdir(parents=True, exist_ok=True)
        (folder / other).write_bytes(whole[other])
    refused = 0
    for number in range(count):
        (folder / name).write_bytes(damaged(whole[name], number))
        out = tmp_path / f"out{number}"
        code = main(["analyze", str(folder), "--out", str(out)])
        err = capsys.readouterr().err
        if code == 0:
            assert {path.name for path in out.iterdir()} == {"report.html", "analysis.json", "experiments.md"}
            continue
        (line,) = err.splitlines()
        assert code == 2 and line.startswith(f"fleet-rl: {name}") and line.isprintable() and len(line) < 600
        assert not out.exists()
        refused += 1
    assert refused > count / 3


def test_there_are_two_hundred_broken_dumps():
    assert sum(DUMPS.values()) >= 200
