"""Scenario files: the shipped ones load and say what their names promise, and faults keep to their time."""

from collections import Counter
from pathlib import Path
from typing import get_args

import pytest
from pydantic import ValidationError

from actors.envs.local_fleet.faults import Fault, FaultInjector, FaultPlan, Kind, load_fault_plan

SCENARIOS = sorted(Path("configs/faults").glob("*.yaml"))


def test_there_are_three_scenarios():
    assert [path.stem for path in SCENARIOS] == ["bad_day", "judge_brownout", "quota"]


def test_a_bad_day_has_every_kind_of_fault_at_five_percent_and_no_long_wait():
    plan = load_fault_plan("configs/faults/bad_day.yaml")
    assert {fault.kind for fault in plan.faults} == set(get_args(Kind))
    assert {fault.probability for fault in plan.faults} == {0.05}
    assert all(fault.seconds <= 5 for fault in plan.faults if fault.kind in ("slow", "hang", "slow_start"))


def test_the_quota_scenario_limits_the_account():
    plan = load_fault_plan("configs/faults/quota.yaml")
    assert (plan.instance_limit, plan.default_ttl_s) == (8, 300)


def test_a_brownout_begins_and_ends_by_the_clock():
    plan = load_fault_plan("configs/faults/judge_brownout.yaml").faults[:1]
    injector = FaultInjector(FaultPlan(faults=plan), Counter())
    (armed,) = injector._armed
    struck = [armed.strikes("verify", None, elapsed_s) for elapsed_s in (0, 59.9, 60, 179.9, 180)]
    assert struck == [False, False, True, True, False]
    assert injector.report()[0]["struck"] == 2


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ({"route": "make", "kind": "slow_start", "status": 502}, "needs 'seconds'"),
        ({"route": "make", "kind": "slow_start", "seconds": 1}, "404 or 502, not 503"),
        ({"route": "reset", "kind": "slow_start", "status": 502, "seconds": 1}, "works on route 'make' only"),
        ({"route": "tool", "kind": "verifier_crash"}, "works on route 'verify' only"),
        ({"route": "verify", "kind": "judge_error", "for_s": 0}, "greater than 0"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused(fault, reason):
    with pytest.raises(ValidationError, match=reason):
        Fault(**fault)
