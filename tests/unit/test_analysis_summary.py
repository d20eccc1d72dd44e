"""From episodes to an analysis: rates recomputed, the signal table, curves, warnings, and the Markdown section."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import polars as pl
import psutil
import pytest

from actors.trajectory import Ungraded
from tests.skyrl_dumps import call, episode, result, solved, write_dump
from tests.trajectories import make_groups
from train.analysis import scan as scan_module
from train.analysis.dumps import DumpError, find_run
from train.analysis.markdown import markdown
from train.analysis.scan import scan
from train.analysis.summary import Analysis, pass_rates, summarise
from train.evaluate import dump_eval, evaluate_groups
from train.metrics import eval_group_metrics, eval_metrics
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin


def analysed(run: Path, **options) -> Analysis:
    files = find_run(str(run), run)
    return summarise(files, *scan(files.episodes), **options)


def attempts(rates: dict[str, list[int]], env: str = "github") -> list[dict]:
    """Episodes of tasks, each with its rewards."""
    return [solved(task, env) | {"score": [0.0, float(r)]} for task, rewards in rates.items() for r in rewards]


def write_metrics(run: Path, rows: list[dict]) -> None:
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# -- rates


def test_the_aggregated_file_equals_what_the_lines_beside_it_give(tmp_path):
    draw = np.random.default_rng(0)
    by_env: dict[str, dict[str, list[int]]] = {
        env: {f"{env}-{t}": draw.integers(0, 2, 3).tolist() for t in range(n)} for env, n in [("a", 7), ("b", 4)]
    }
    for env, rates in by_env.items():
        write_dump(tmp_path, 10, attempts(rates, env))
    # Again from the files, without any of the code that is tested.
    rewards = defaultdict(list)
    for path in (tmp_path / "evals/global_step_10").glob("*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            rewards[row["data_source"], row["env_extras"]["task_key"]].append(sum(row["score"]) > 0)
    expected = {}
    for env in ("a", "b", "all"):
        tasks = [r for (of, _), r in rewards.items() if env in (of, "all")]
        expected[f"eval/{env}/pass_at_3"] = sum(map(any, tasks)) / len(tasks)
        expected[f"eval/{env}/pass_at_1"] = sum(sum(r) / len(r) for r in tasks) / len(tasks)
    table, _ = scan(find_run(str(tmp_path), tmp_path).episodes)
    assert pass_rates(table) == pytest.approx(expected)
    aggregated = tmp_path / "evals/global_step_10/aggregated_results.jsonl"
    aggregated.write_text(json.dumps(expected) + "\n", encoding="utf-8")
    assert analysed(tmp_path).warnings == []
    aggregated.write_text(json.dumps(expected | {"eval/a/pass_at_3": 0.123}) + "\n", encoding="utf-8")
    (warning,) = analysed(tmp_path).warnings
    assert warning.startswith(
        "eval/a/pass_at_3 is 0.1230 in aggregated_results.jsonl of step 10, but its episodes give"
    )


class Tokenizer:
    def decode(self, ids):
        return "".join(f"<{i}>" for i in ids)


def test_what_our_evaluation_writes_agrees_with_itself_and_with_its_metrics(tmp_path):
    groups = make_groups(12, samples=3)
    groups[0].trajectories[0].outcome = Ungraded("the judge failed")  # one task with fewer graded attempts
    evaluated = evaluate_groups("sampled", 5, 5, groups)
    dump_eval(tmp_path / "evals/global_step_5", groups, Tokenizer())
    table, _ = scan(find_run(str(tmp_path), tmp_path).episodes)
    found = pass_rates(table)
    metrics = eval_metrics(evaluated) | eval_group_metrics(groups, 3)
    for env in ("tracker", "booking_eu", "all"):
        for name in (f"eval/{env}/pass_at_1", f"eval/{env}/pass_at_3"):
            assert found[name] == pytest.approx(metrics[name])
    assert [w for w in analysed(tmp_path).warnings if "aggregated" in w] == []
    assert table.filter(pl.col("reward").is_null()).height == metrics["eval/all/not_graded"]


def test_ungraded_attempts_count_nowhere_and_are_mentioned(tmp_path):
    lines = attempts({"a": [1, 1], "b": [0, 0]})
    lines[1]["score"] = [0.0, None]
    lines[1]["env_extras"]["not_graded"] = "verify: no answer"
    write_dump(tmp_path, 0, lines)
    found = analysed(tmp_path)
    success = found.overall.before.success
    assert (success.rate, success.attempts, found.overall.before.not_graded) == (0.5, 3, 1)
    assert found.warnings == ["1 of 4 episodes were not graded; they count nowhere, not as failures"]


def test_two_environments_may_use_one_key_for_different_tasks(tmp_path):
    write_dump(tmp_path, 0, [*attempts({"t": [1]}, "a"), *attempts({"t": [0]}, "b")])
    assert analysed(tmp_path).overall.before.success.tasks == 2


def test_several_processes_find_what_one_finds(tmp_path, monkeypatch):
    write_dump(tmp_path, 0, attempts({f"t{i}": [0, 1] for i in range(20)}))
    files = find_run(str(tmp_path), tmp_path).episodes
    alone = scan(files)
    monkeypatch.setattr(scan_module, "IN_ONE_PROCESS_BYTES", 0)
    table, examples = scan(files)
    assert table.equals(alone[0])
    assert examples == alone[1]


def test_a_worker_that_was_killed_is_one_error():
    with pytest.raises(DumpError, match="was killed, most likely for want of memory"):
        with scan_module.workers(scan_module.IN_ONE_PROCESS_BYTES + 1) as map_parts:
            list(map_parts(os._exit, [9]))


def test_workers_whose_parent_was_killed_end():
    program = (
        "import time; from train.analysis.scan import workers\n"
        "with workers(2**40) as map_parts: list(map_parts(time.sleep, [0.2] * 8)); print(flush=True); input()"
    )
    parent = psutil.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        parent.stdout.readline()
        children = parent.children(recursive=True)
    finally:
        parent.kill()
        parent.wait(30)
    _, left = psutil.wait_procs(children, timeout=10)
    for process in left:
        process.kill()
    assert len(children) >= 2 and left == []


# -- before and after


def test_the_last_evaluation_is_compared_with_the_first_or_with_the_baseline(tmp_path):
    for step, reward in [(0, 0), (20, 1), (40, 1)]:
        write_dump(tmp_path, step, attempts({f"t{i}": [reward] for i in range(20)}))
    found = analysed(tmp_path)
    assert (found.baseline, found.last, found.environments[0].verdict.status) == (0, 40, "IMPROVED")
    later = analysed(tmp_path, baseline=20)
    assert (later.baseline, later.last, later.environments[0].verdict.status) == (20, 40, "SATURATED")
    for baseline, words in [(10, "no evaluation at this step; there are 0, 20, 40"), (40, "nothing comes after it")]:
        with pytest.raises(DumpError, match=words):
            analysed(tmp_path, baseline=baseline)


def test_sampled_evaluations_count_and_greedy_ones_only_where_there_are_no_others(tmp_path):
    for step in (0, 9):
        write_dump(tmp_path, step, attempts({"t": [1]}), label="greedy")
    assert analysed(tmp_path).label == "greedy"
    write_dump(tmp_path, 0, attempts({"t": [0]}), label="sampled")
    found = analysed(tmp_path)
    assert (found.label, found.steps, found.overall.verdict) == ("sampled", [0], None)
    assert found.curves["github"]["greedy"][0][:2] == [0, 1.0]


def test_empty_files_are_no_run_and_an_empty_one_among_others_is_nothing(tmp_path):
    write_dump(tmp_path, 0, [])
    (tmp_path / "evals/global_step_0/empty.jsonl").write_text("\n")
    with pytest.raises(DumpError, match="holds no episodes: its 1 files are empty"):
        analysed(tmp_path)
    write_dump(tmp_path, 0, attempts({"a": [1]}))
    assert [row.env for row in analysed(tmp_path).environments] == ["github"]


def test_an_environment_of_one_step_only_has_no_status(tmp_path):
    write_dump(tmp_path, 0, attempts({"a": [1]}))
    write_dump(tmp_path, 5, [*attempts({"a": [1]}), *attempts({"b": [0]}, "new")])
    rows = {row.env: row for row in analysed(tmp_path).environments}
    assert (rows["new"].before, rows["new"].verdict) == (None, None)
    assert "| new | 1 | 0 → 1 | – → 2.0 |" in markdown(analysed(tmp_path))


def test_evaluations_of_another_label_do_where_there_are_no_others(tmp_path):
    for step in (0, 9):
        write_dump(tmp_path, step, attempts({f"t{i}": [step > 0] for i in range(20)}), label="endpoint")
    found = analysed(tmp_path)
    assert (found.label, found.overall.verdict.status) == ("endpoint", "IMPROVED")


def test_training_batches_alone_give_rates_but_no_status(tmp_path):
    store = TrajectoryStore(StoreSettings(str(tmp_path / "trajectories")))
    for step in (1, 2):
        store.put(make_groups(8), Origin("train", step, step - 1))
    store.close()
    found = analysed(tmp_path)
    assert found.label == "train"
    assert [row.verdict for row in (*found.environments, found.overall)] == [None] * 3
    assert "statuses need evaluations at two steps" in markdown(found)
    assert set(found.curves["tracker"]) == {"reward", "variance", "signal"}


def test_turns_and_calls_are_means_with_intervals_over_tasks(tmp_path):
    turns = [(call("a", n=1), result(1)), (call("b", n=2), "Error: no such thing"), ("<done>", None)]
    write_dump(tmp_path, 0, [episode(turns, task=f"t{i}") for i in range(6)] + [solved(f"s{i}") for i in range(6)])
    before = analysed(tmp_path).overall.before
    assert (before.turns.value, before.calls.value) == (2.5, 1.5)
    assert before.turns.interval.low < 2.5 < before.turns.interval.high
    assert before.failed_call_share == pytest.approx(6 / 18)


def test_tasks_are_listed_with_the_largest_changes_first(tmp_path):
    write_dump(tmp_path, 0, attempts({"same": [1, 1], "up": [0, 0], "half": [0, 1], "gone": [1]}))
    write_dump(tmp_path, 5, attempts({"same": [1, 1], "up": [1, 1], "half": [1, 1]}))
    tasks = analysed(tmp_path).tasks
    assert [(t.task, t.before, t.after) for t in tasks[:2] if t.task != "gone"] == [("up", 0.0, 1.0)]
    assert {t.task: (t.attempts_before, t.attempts_after) for t in tasks}["gone"] == (1, 0)


# -- signal and curves


def test_signal_comes_from_the_runs_metrics_first(tmp_path):
    write_dump(tmp_path, 0, attempts({"a": [1, 0]}))
    rows = [
        {"step": 1, "reward/github/variance_per_prompt": 0.1, "reward/github/signal_ratio": 0.5},
        {"step": 2, "reward/github/variance_per_prompt": 0.0, "reward/github/signal_ratio": 0.0},
        {"step": 3, "reward/github/variance_per_prompt": None, "reward/github/pass_at_1": 0.25},
        {"step": 4, "reward/avg_raw_reward": 1.0},
    ]
    write_metrics(tmp_path, rows)
    found = analysed(tmp_path)
    (signal,) = found.signal
    assert (signal.env, signal.source, signal.steps) == ("github", "metrics.jsonl", 2)
    assert (signal.variance, signal.steps_with_signal, signal.signal_ratio) == (0.05, 0.5, 0.25)
    assert found.curves["github"]["variance"] == [[1, 0.1], [2, 0.0]]
    assert found.curves["github"]["reward"] == [[3, 0.25]]


def test_without_metrics_signal_is_recomputed_and_equals_numpys(tmp_path):
    rewards = {"a": [1, 0, 0], "b": [1, 1, 1], "c": [0, 1, 1], "alone": [1]}
    write_dump(tmp_path, 0, attempts(rewards))
    (signal,) = analysed(tmp_path).signal
    groups = [r for r in rewards.values() if len(r) > 1]
    assert signal.source == "evaluations"
    assert signal.variance == pytest.approx(np.mean([np.var(r) for r in groups]))
    assert signal.signal_ratio == pytest.approx(np.mean([np.var(r) > 0 for r in groups]))


def test_an_environment_with_a_slash_finds_its_metrics(tmp_path):
    write_dump(tmp_path, 0, attempts({"a": [1]}, "booking/eu"))
    write_metrics(tmp_path, [{"step": 1, "reward/booking_eu/pass_at_1": 0.5}])
    found = analysed(tmp_path)
    assert list(found.curves) == ["booking/eu"]
    assert set(found.curves["booking/eu"]) == {"reward", "sampled"}


# -- output


def test_the_json_holds_only_finite_numbers_and_reads_back(tmp_path):
    write_dump(tmp_path, 0, attempts({"a": [1]}))
    write_dump(tmp_path, 1, attempts({"a": [1]}))
    known = json.loads(json.dumps(analysed(tmp_path).as_json(), allow_nan=False))
    assert known["environments"][0]["verdict"]["status"] == "SATURATED"
    assert known["overall"]["before"]["turns"] == {"value": 2.0, "interval": None}
    assert math.isclose(known["overall"]["after"]["success"]["rate"], 1.0)


def test_the_markdown_section_has_every_table_and_lets_no_text_break_it(tmp_path):
    hostile = "a|b `c` <script> *d*\n# e"
    for step, reward in [(0, 0), (8, 1)]:
        lines = attempts({f"{hostile}{i}": [reward, reward] for i in range(20)}, "hub")
        broken = [episode([(call("x"), f"Error: no {hostile} 5"), ("<done>", None)], 0.0, task=hostile, env="hub")]
        write_dump(tmp_path, step, [*lines, *broken])
    text = markdown(analysed(tmp_path))
    assert text.startswith(f"## {tmp_path.name.replace('_', chr(92) + '_')}: step 0 → 8\n")
    assert "- **IMPROVED**: hub (" in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4
    for table in tables:
        cells = {len(line.replace("\\|", "").split("|")) for line in table.splitlines()}
        assert len(cells) == 1, table
    assert "<script>" not in text.replace("\\<script\\>", "")
