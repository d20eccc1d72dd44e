"""``fleet-rl analyze`` as a user meets it: three files, or one line that says what is wrong."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from deploy.cli import main
from tests.s3_server import ENVIRONMENT, serving_s3
from tests.skyrl_dumps import solved, write_dump
from train.analysis.scan import IN_ONE_PROCESS_BYTES

FILES = {"report.html", "analysis.json", "experiments.md"}


@pytest.fixture
def run(tmp_path) -> Path:
    folder = tmp_path / "my-run"
    for step, reward in [(0, 0.0), (30, 1.0)]:
        write_dump(folder, step, [solved(f"t{i}") | {"score": [reward]} for i in range(20)])
    return folder


def test_a_run_leaves_a_page_json_and_markdown(run, tmp_path, capsys):
    assert main(["analyze", str(run), "--out", str(tmp_path / "new/out")]) == 0
    out = tmp_path / "new/out"
    assert {path.name for path in out.iterdir()} == FILES
    assert json.loads((out / "analysis.json").read_text())["run"] == "my-run"
    assert (out / "experiments.md").read_text().startswith("## my-run: step 0 → 30\n")
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith("IMPROVED: github (")
    assert shown[-1].startswith(f"{out}/report.html shows 40 of 40 episodes")


def test_the_smallest_change_that_matters_is_given_in_points(run, tmp_path):
    assert main(["analyze", str(run), "--out", str(tmp_path / "out"), "--min-change", "35"]) == 0
    assert json.loads((tmp_path / "out/analysis.json").read_text())["min_change"] == 0.35


def test_a_run_is_found_by_its_name(run, tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    run.rename(tmp_path / "runs" / "my-run")
    monkeypatch.chdir(tmp_path)
    assert main(["analyze", "my-run", "--out", "out"]) == 0


@pytest.mark.parametrize(
    "options", [["--min-change", "0"], ["--min-change", "x"], ["--max-episodes", "-1"], ["--baseline", "x"], []]
)
def test_wrong_options_are_refused(run, tmp_path, options, capsys):
    out = ["--out", str(tmp_path / "out")] if options else []
    with pytest.raises(SystemExit) as ended:
        main(["analyze", str(run), *out, *options])
    assert ended.value.code == 2
    assert "fleet-rl analyze: error:" in capsys.readouterr().err


def complaint(capsys, *arguments: str) -> str:
    """The one line of a refusal."""
    assert main(["analyze", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("fleet-rl: ")
    return line


def test_what_cannot_be_read_costs_one_line_and_leaves_nothing(run, tmp_path, capsys):
    out = tmp_path / "out"
    assert "no folder" in complaint(capsys, str(tmp_path / "nowhere"), "--out", str(out))
    assert "--baseline 7" in complaint(capsys, str(run), "--out", str(out), "--baseline", "7")
    path = run / "evals/global_step_30/github.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert "global_step_30/github.jsonl, line 20: the file ends" in complaint(capsys, str(run), "--out", str(out))
    path.unlink()
    (run / "metrics.jsonl").write_text("{}\n")
    assert "metrics.jsonl, line 1: no line of metrics" in complaint(capsys, str(run), "--out", str(out))
    assert not out.exists()


def test_a_result_that_cannot_be_written_is_one_line(run, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    assert "file" in complaint(capsys, str(run), "--out", str(tmp_path / "file"))


def test_sigterm_leaves_no_copy_and_no_process(run, tmp_path):
    long = solved("t") | {"env_extras": {"task_key": "t", "ballast": "x" * 2**20}}
    write_dump(run, 40, [long] * (IN_ONE_PROCESS_BYTES // 2**20))
    scratch, out = tmp_path / "scratch", tmp_path / "out"
    scratch.mkdir()
    command = [sys.executable, "-m", "deploy.cli", "analyze", str(run), "--out", str(out)]
    process = psutil.Popen(command, env=os.environ | {"TMPDIR": str(scratch)})
    try:
        deadline = time.monotonic() + 60
        all_of_them = 1 + min(3, len(os.sched_getaffinity(0)))  # what tracks them, and a worker for each part
        while len(process.children()) < all_of_them and time.monotonic() < deadline:
            time.sleep(0.02)
        children = process.children()
        assert [path.name[:17] for path in scratch.iterdir()] == ["fleet-rl-analyze-"]
        process.terminate()
        assert process.wait(30) == 143
    finally:
        if process.poll() is None:
            process.kill()
    _, left = psutil.wait_procs(children, timeout=10)
    assert left == [] and list(scratch.iterdir()) == [] and not out.exists()


@pytest.fixture
def bucket(monkeypatch):
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with serving_s3() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        server.backend.create_bucket("skyrl-trajectories", "eu-central-1")
        yield server


def test_a_run_in_s3_is_analysed_like_one_on_disk(run, tmp_path, bucket, capsys):
    for path in run.rglob("*.jsonl"):
        key = f"evals/my-run/{path.relative_to(run / 'evals')}"
        bucket.backend.put_object("skyrl-trajectories", key, path.read_bytes())
    bucket.backend.put_object("skyrl-trajectories", "evals/my-run-2/global_step_0/github.jsonl", b"broken")
    bucket.backend.put_object("skyrl-trajectories", "evals/my-run/global_step_0/huge.bin", b"x")
    assert main(["analyze", "s3://skyrl-trajectories/evals/my-run", "--out", str(tmp_path / "s3")]) == 0
    assert main(["analyze", str(run), "--out", str(tmp_path / "disk")]) == 0
    of_s3, of_disk = (json.loads((tmp_path / name / "analysis.json").read_text()) for name in ("s3", "disk"))
    assert of_s3 | {"location": ""} == of_disk | {"location": ""}
    assert bucket.count("GET /skyrl-trajectories/evals/my-run/global_step_0/huge.bin") == 0
    out = str(tmp_path / "out")
    capsys.readouterr()
    assert "no such bucket" in complaint(capsys, "s3://nowhere/x", "--out", out)
    assert "holds no episodes" in complaint(capsys, "s3://skyrl-trajectories/empty", "--out", out)
