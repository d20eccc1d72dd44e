"""Sixty episodes under every kind of fault: no wrong grade, no instance left, every episode accounted for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from actors.envs.local_fleet.apps.tracker_tasks import problems
from benchmarks.fault_soak import FAULTS, Audit, expert_turns, ideal_database, soak


@pytest.mark.timeout(240)
async def test_faults_cost_episodes_but_neither_grades_nor_instances():
    line = await soak(60, 0.08, seed=5)
    ended = {name: line[name] for name in ("graded", "ungraded", "infra_failed", "cancelled")}
    assert line["episodes"] == 60 == sum(ended.values()) and line["ledger_balanced"]
    assert line["graded"] >= 20 and line["solved"] >= 5, line
    assert (line["wrong_grades"], line["false_zeros"], line["instances_left"]) == (0, 0, 0), line
    assert line["instances_made"] == line["deletes_acknowledged"] + line["expired"] > 0, line
    assert set(line["faults_injected"]) == set(FAULTS) and sum(line["faults_injected"].values()) > 30, line


def test_the_audit_tells_a_false_zero_from_a_false_success():
    audit = Audit()
    for reward, solved in [(1.0, True), (0.0, False), (0.0, True), (1.0, False)]:
        audit.compare(reward, solved)
    assert (audit.checked, audit.solved, audit.wrong, audit.false_zeros) == (4, 2, 2, 1)


def test_the_ideal_database_differs_from_the_seed_exactly_where_something_is_to_be_changed():
    for _, problem in problems("train", 30, 3):
        untouched = ideal_database(replace(problem, calls=()))
        assert (ideal_database(problem) != untouched) == any(call.changes for call in problem.calls)


def test_a_slip_changes_what_the_expert_says():
    _, problem = problems("train", 1, 3)[0]
    assert expert_turns(problem, random.Random(0)) != expert_turns(problem, None)
