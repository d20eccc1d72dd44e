"""Evaluations of a run in S3, over the real wire."""

from __future__ import annotations

import pytest

from tests.s3_server import serving_bucket
from tests.trajectories import make_groups
from train import s3
from train.eval_upload import EvalUpload, eval_prefix
from train.evaluate import dump_eval, eval_folder


class Tokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def server():
    with serving_bucket("skyrl-trajectories") as server:
        yield server


def stored(prefix: str) -> dict[str, int]:
    return {item.location.removeprefix(prefix): item.size for item in s3.objects(prefix)}


def test_dumps_go_to_skyrls_layout_while_the_run_goes_on_and_what_is_missing_goes_later(server, tmp_path):
    prefix = eval_prefix("s3://skyrl-trajectories/", "fleet_tool_use_1a2b3c4d")
    assert prefix == "s3://skyrl-trajectories/evals/fleet_tool_use_1a2b3c4d/"
    with EvalUpload(tmp_path, prefix) as upload:
        upload.add(dump_eval(eval_folder(tmp_path, 10, "sampled"), make_groups(4), Tokenizer()))
    assert set(stored(prefix)) == {
        f"global_step_10/{name}.jsonl" for name in ("tracker", "booking_eu", "aggregated_results")
    }
    dump_eval(eval_folder(tmp_path, 10, "greedy"), make_groups(1), Tokenizer())  # by a process that was then killed
    server.arm()
    with EvalUpload(tmp_path, prefix) as upload:
        upload.add_missing()
    files = {path.relative_to(tmp_path).as_posix(): path.stat().st_size for path in tmp_path.rglob("*.jsonl")}
    assert stored(prefix) == files and "global_step_10/greedy/tracker.jsonl" in files
    assert server.count("PUT") == 2, "what was there was sent again"


def test_what_could_not_be_uploaded_is_named_with_what_to_do(server, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("train.eval_upload.CLOSE_TIMEOUT_S", 5.0)
    with EvalUpload(tmp_path, eval_prefix("s3://absent", "r")) as upload:
        upload.add(dump_eval(eval_folder(tmp_path, 1, "sampled"), make_groups(1), Tokenizer()))
        upload.add_missing()
    assert "no such bucket" in caplog.text and f"aws s3 sync {tmp_path} s3://absent/evals/r/" in caplog.text
