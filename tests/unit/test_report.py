"""What a run says while it goes on and at its end, as a user sees it."""

from __future__ import annotations

import io
import json
import math
import struct
from pathlib import Path

import pytest
from rich.console import Console

from train import report
from train.evaluate import EvalResult, PassRate
from train.progress import ProgressDisplay


def result(label: str, step: int, overall: float, **per_env: float) -> EvalResult:
    rates = {env: PassRate(value, 0.05, 32, 96, 0) for env, value in per_env.items()}
    return EvalResult(label, step, step, PassRate(overall, 0.04, 64, 192, 1), rates)


BEFORE = [result("sampled", 0, 0.35, tracker=0.4, calendar=0.3), result("greedy", 0, 0.75, tracker=0.7, calendar=0.8)]
AFTER = [result("sampled", 50, 0.89, tracker=0.9, calendar=0.88), result("greedy", 50, 0.7, tracker=0.7, calendar=0.7)]
HISTORY = [{"step": step, "reward/avg_raw_reward": 0.4 + step / 100} for step in range(1, 51)]
SUMMARY = {"pass_at_1_before": 0.35, "pass_at_1_after": 0.89, "wall_s": 512.25, "ledger": {"dispatched": 6400}}


def written(tmp_path: Path, *arguments) -> str:
    """What the console shows of one report."""
    text = io.StringIO()
    report.write_report(tmp_path, *arguments, console=Console(file=text, width=120))
    return text.getvalue()


def test_the_last_line_is_the_summary_as_json_and_so_is_the_file(tmp_path, capsys):
    written(tmp_path, HISTORY, BEFORE, AFTER, {**SUMMARY, "stderr": math.nan, "path": tmp_path})
    last = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert last == {**SUMMARY, "stderr": None, "path": str(tmp_path)}
    assert json.loads((tmp_path / "summary.json").read_text(encoding="utf-8")) == last


def test_the_table_shows_every_environment_and_both_kinds(tmp_path):
    table = written(tmp_path, HISTORY, BEFORE, AFTER, SUMMARY)
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if "│" in line]
    rows = {(name, label): values for name, tasks, label, *values in cells}
    assert rows["tracker", "sampled"] == ["0.400 ±0.05", "0.900 ±0.05", "+0.500"]
    assert rows["tracker", "greedy"] == ["0.700 ±0.05", "0.700 ±0.05", "+0.000"]
    assert rows["all", "sampled"] == ["0.350 ±0.04", "0.890 ±0.04", "+0.540"]
    assert rows["all", "greedy"] == ["0.750 ±0.04", "0.700 ±0.04", "-0.050"]
    assert {(name, tasks) for name, tasks, *_ in cells} == {("calendar", "32"), ("tracker", "32"), ("all", "64")}
    assert max(len(line) for line in table.splitlines() if "│" in line) <= 80
    assert str(tmp_path / "reward_curve.png") in table


def test_the_curve_is_a_picture_of_a_readable_size(tmp_path):
    written(tmp_path, HISTORY, BEFORE, AFTER, SUMMARY)
    content = (tmp_path / "reward_curve.png").read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    assert width >= 1000 and height >= 600


@pytest.mark.parametrize("after", [[], [result("sampled", 3, math.nan)]])
def test_a_run_that_ended_early_still_gets_a_report(tmp_path, after):
    table = written(tmp_path, [], [], after, {"pass_at_1_after": None})
    assert (tmp_path / "summary.json").exists() and (tmp_path / "reward_curve.png").exists()
    assert ("no evaluation" in table) == (not after)


def test_the_curve_joins_evaluations_of_the_history_and_of_the_ends():
    history = [{"step": 10, "eval/all/pass_at_1": 0.5, "eval/all/pass_at_1_stderr": 0.03}, {"step": 11}]
    points = report.eval_points(history, "", BEFORE[0], AFTER[0])
    assert points == [(0, 0.35, 0.04), (10, 0.5, 0.03), (50, 0.89, 0.04)]


def test_the_last_value_of_a_step_counts_and_gaps_are_left_out():
    history = [{"step": 2, "x": 1.0}, {"step": 1, "x": 3.0}, {"step": 2, "x": 5.0}, {"step": 3, "x": math.nan}]
    assert report.series(history, "x") == ([1, 2], [3.0, 5.0])
    assert report.moving_mean([1, 2, 3, 4], 2) == [1, 1.5, 2.5, 3.5]


STATUS = {
    "phase": "training",
    "step": 12,
    "reward": 0.412,
    "pass_at_1": 0.344,
    "tokens_per_s": 2413.2,
    "staleness": 1.25,
    "version": 11,
    "buffered": 9,
    "running": 23,
    "leases": 96,
    "waiting": 12,
    "episodes": 1408,
}


def test_the_live_panel_shows_every_figure_within_80_columns():
    text = io.StringIO()
    console = Console(file=text, width=80, force_terminal=True, color_system=None)
    display = ProgressDisplay("demo", 50, console)
    display.update(STATUS)
    console.print(display.render())
    shown = text.getvalue()
    for word in ("training", "step 12/50", "reward 0.412", "pass@1 0.344", "tokens/s 2,413", "staleness 1.25"):
        assert word in shown
    for word in ("buffer 9", "in flight 23", "leases 96", "waiting 12", "version 11", "episodes 1,408"):
        assert word in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_without_a_terminal_there_is_one_line_a_step_and_a_phase():
    text = io.StringIO()
    with ProgressDisplay("demo", 50, Console(file=text, width=80)) as display:
        display.update({"phase": "starting the policy"})
        display.update({"phase": "starting the policy"})
        for step in (0, 1, 1, 2):
            display.update({**STATUS, "step": step})
    lines = text.getvalue().splitlines()
    assert [line.partition("step ")[2].partition(" ")[0] for line in lines] == ["0/50", "0/50", "1/50", "2/50"]
    assert "\x1b" not in text.getvalue()


def test_what_an_update_does_not_hold_keeps_its_value():
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    display = ProgressDisplay("demo", 50, console)
    display.update(STATUS)
    display.update({"phase": "evaluating", "reward": None})
    console.print(display.render())
    assert "reward 0.412" in console.file.getvalue() and "evaluating" in console.file.getvalue()
