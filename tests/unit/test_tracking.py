"""The tracker: what reaches the file, TensorBoard and W&B, and what must not."""

from __future__ import annotations

import json
import logging
import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train import tracking
from train.config import RunConfig
from train.evaluate import EvalResult, PassRate

ROOT = Path(__file__).resolve().parents[2]
SECRET = "sk-test-0123456789abcdef"


def config(tmp_path: Path, **values) -> RunConfig:
    tracked = {"tensorboard": False, "wandb": False, **values.pop("tracking", {})}
    data = {"train_tasks": "tasks.json"}
    return RunConfig.model_validate(
        {"name": "demo", "output_dir": str(tmp_path), "data": data, "tracking": tracked, **values}
    )


def lines(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_metrics_are_on_disk_before_the_run_ends_and_a_second_run_appends(tmp_path):
    settings = config(tmp_path)
    with tracking.Tracker(settings) as tracker:
        tracker.log({"trainer/global_step": 3, "policy/grad_norm": 0.5, "reward/avg_raw_reward": math.nan})
        first = lines(settings.run_dir)
        assert first[0]["step"] == 3 and first[0]["policy/grad_norm"] == 0.5
        assert first[0]["reward/avg_raw_reward"] is None  # JSON has no NaN
        assert tracker.history[0]["step"] == 3
    with tracking.Tracker(settings) as tracker:
        tracker.log({"policy/grad_norm": 0.25}, step=4)
    assert [line["step"] for line in lines(settings.run_dir)] == [3, 4]


def test_what_is_shown_between_two_steps_is_no_record(tmp_path):
    with tracking.Tracker(config(tmp_path)) as tracker:
        tracker.show({"buffer/bytes": 7})
    assert lines(tmp_path / "demo") == [] == tracker.history


def test_an_evaluation_is_recorded_at_its_own_step(tmp_path):
    rate = PassRate(0.5, 0.1, 8, 24, 0)
    with tracking.Tracker(config(tmp_path)) as tracker:
        tracker.log_eval(EvalResult("sampled", 12, 12, rate, {"tracker": rate}))
    assert tracker.history[0]["step"] == 12 and tracker.history[0]["eval/tracker/pass_at_1"] == 0.5
    assert not tracker.unknown


def test_a_name_outside_the_table_is_recorded_and_named_once(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), tracking.Tracker(config(tmp_path)) as tracker:
        tracker.log({"policy/typo": 1.0}, step=1)
        tracker.log({"policy/typo": 2.0}, step=2)
    assert tracker.unknown == {"policy/typo"} and lines(tmp_path / "demo")[1]["policy/typo"] == 2.0
    assert len([r for r in caplog.records if "policy/typo" in r.message]) == 1


def test_tensorboard_reads_what_was_logged(tmp_path):
    with tracking.Tracker(config(tmp_path, tracking={"tensorboard": True})) as tracker:
        for step in (1, 2):
            tracker.log({"reward/avg_raw_reward": step / 4}, step=step)
    events = EventAccumulator(str(tmp_path / "demo" / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/avg_raw_reward")] == [(1, 0.25), (2, 0.5)]


def test_wandb_is_offline_without_a_key_and_holds_no_secret(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FLEET_API_KEY", SECRET)
    monkeypatch.setattr(sys, "argv", ["run", "--environment.base_url", f"http://x/{SECRET}"])
    settings = config(
        tmp_path, tracking={"wandb": True}, environment={"fleet": "local", "base_url": f"http://x/{SECRET}"}
    )
    with tracking.Tracker(settings) as tracker:
        tracker.log({"reward/avg_raw_reward": 0.5}, step=1)
    records = list((tmp_path / "demo" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(records) == 1
    content = b"".join(path.read_bytes() for path in (tmp_path / "demo").rglob("*") if path.is_file())
    assert b"reward/avg_raw_reward" in content and b"max_staleness" in content
    assert SECRET.encode() not in content


def test_secrets_are_redacted_by_name_by_value_and_by_look(monkeypatch):
    monkeypatch.setenv("SLACK_BOT_TOKEN", "plainlookingvalue")
    value = {
        "api_key": "abc",
        "max_tokens": 256,
        "env_key": "github",
        "nested": [{"url": "http://u:plainlookingvalue@host"}, "sk-abcdefgh1234", "AKIAABCDEFGHIJKLMNOP"],
        "password": None,
    }
    assert tracking.redact(value) == {
        "api_key": "[redacted]",
        "max_tokens": 256,
        "env_key": "github",
        "nested": [{"url": "http://u:[redacted]@host"}, "[redacted]", "[redacted]"],
        "password": None,
    }


class Broken(tracking.Sink):
    def log(self, step, metrics):
        raise OSError("disk full")


class Recording(tracking.Sink):
    def __init__(self):
        self.steps, self.closed = [], False

    def log(self, step, metrics):
        self.steps.append(step)

    def close(self):
        self.closed = True


def test_a_record_that_fails_is_left_out_and_the_others_go_on(caplog):
    good = Recording()

    def unavailable():
        raise RuntimeError("no such service")

    with caplog.at_level(logging.WARNING):
        background = tracking.Background([unavailable, Broken, lambda: good])
        for step in range(3):
            background.put(step, {})
        background.close(10)
    assert good.steps == [0, 1, 2] and good.closed
    assert sorted(r.message.rpartition(": ")[2] for r in caplog.records) == ["disk full", "no such service"]


def test_a_record_that_hangs_holds_up_neither_the_run_nor_its_end(caplog):
    release = threading.Event()
    started = time.monotonic()
    background = tracking.Background([lambda: release.wait(60)])
    background.put(1, {})
    background.close(0.2)
    assert time.monotonic() - started < 5
    assert "metrics.jsonl is complete" in caplog.text
    release.set()


def test_run_names_are_those_of_the_project():
    name = tracking.default_run_name("tool_use")
    assert name.startswith("fleet_tool_use_") and len(name.rpartition("_")[2]) == 8
    int(name.rpartition("_")[2], 16)
    assert name != tracking.default_run_name("tool_use")


def test_prometheus_names_are_valid():
    assert tracking.prometheus_name("reward/avg_pass_at_4") == "fleet_rl_reward_avg_pass_at_4"
    assert tracking.prometheus_name("eval/a-b.c/pass_at_1") == "fleet_rl_eval_a_b_c_pass_at_1"


def test_the_tracker_loads_neither_torch_nor_tensorflow_nor_wandb_in_the_drivers_thread():
    code = "import sys, train.tracking; print([m for m in ('torch', 'tensorflow', 'wandb', 'ray') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert output.stdout.strip() == "[]", output.stderr


@pytest.mark.parametrize(("label", "expected"), [("sampled", "pass_at_1"), ("greedy", "greedy_pass_at_1")])
def test_both_kinds_of_evaluation_have_their_own_names(tmp_path, label, expected):
    rate = PassRate(0.25, float("nan"), 1, 1, 0)
    with tracking.Tracker(config(tmp_path)) as tracker:
        tracker.log_eval(EvalResult(label, 0, 0, rate, {}))
    assert tracker.history[0][f"eval/all/{expected}"] == 0.25
