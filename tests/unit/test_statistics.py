"""Pass rates against enumeration, intervals against simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.statistics import (
    Interval,
    change_interval,
    cluster_bootstrap_interval,
    difference_interval,
    pass_at_k,
    pass_hat_k,
    rate_interval,
    wilson_interval,
)

DRAWS = [(n, c, k) for n in range(1, 8) for c in range(n + 1) for k in range(1, n + 1)]


@pytest.mark.parametrize("attempts, successes, k", DRAWS)
def test_pass_at_k_and_pass_hat_k_are_shares_of_all_subsets_of_k_attempts(attempts, successes, k):
    outcomes = [i < successes for i in range(attempts)]
    subsets = list(itertools.combinations(outcomes, k))
    assert pass_at_k(attempts, successes, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-12)
    assert pass_hat_k(attempts, successes, k) == pytest.approx(sum(map(all, subsets)) / len(subsets), abs=1e-12)


def test_pass_at_k_is_exact_where_products_of_floats_would_lose_digits():
    assert pass_at_k(10_000, 1, 5_000) == 0.5
    assert pass_hat_k(10_000, 9_999, 5_000) == 0.5


@pytest.mark.parametrize("draw", [(3, 1, 4), (3, 1, 0), (3, 4, 1), (3, -1, 1), (0, 0, 1)])
def test_impossible_draws_are_refused(draw):
    for estimate in (pass_at_k, pass_hat_k):
        with pytest.raises(ValueError, match="attempts"):
            estimate(*draw)


def test_wilson_intervals_are_those_of_the_literature():
    # Newcombe 1998, "Two-sided confidence intervals for the single proportion", table I, method 3.
    for successes, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611)]:
        interval = wilson_interval(successes / trials, trials)
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


def test_the_difference_of_independent_rates_is_newcombes():
    # Newcombe 1998, "Interval estimation for the difference between independent proportions", table II, method 10.
    for a, m, b, n, low, high in [(56, 70, 48, 80, 0.0524, 0.3339), (9, 10, 3, 10, 0.1705, 0.8090)]:
        p, q = a / m, b / n
        found = difference_interval(q, wilson_interval(q, n), p, wilson_interval(p, m))
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_the_change_of_paired_outcomes_is_bonett_and_prices():
    gained, lost, tasks = 7, 2, 30
    a, b = (gained + 1) / (tasks + 2), (lost + 1) / (tasks + 2)
    margin = 1.959964 * math.sqrt((a + b - (a - b) ** 2) / (tasks + 2))
    found = change_interval([1] * gained + [-1] * lost + [0] * (tasks - gained - lost))
    assert found.low == pytest.approx(a - b - margin, abs=1e-6)
    assert found.high == pytest.approx(a - b + margin, abs=1e-6)


# Tasks differ from each other: Beta(a, b) is how often each is solved.
TASKS = [(1.0, 1.0), (0.3, 0.3), (0.3, 1.7), (4.0, 4.0)]


@pytest.mark.parametrize("tasks, attempts", [(5, 1), (8, 3), (20, 3), (30, 1), (100, 4)])
@pytest.mark.parametrize("a, b", TASKS)
def test_intervals_hold_the_truth_as_often_as_they_say(tasks, attempts, a, b):
    random = np.random.default_rng([tasks, attempts, int(10 * a)])
    runs, gain = 400, 0.3
    held = {"rate": 0, "change": 0}
    for _ in range(runs):
        solved = random.beta(a, b, tasks)
        before = random.binomial(attempts, solved) / attempts
        after = random.binomial(attempts, solved + gain * (1 - solved)) / attempts
        held["rate"] += holds(rate_interval(before, tasks * attempts), a / (a + b))
        held["change"] += holds(change_interval(after - before), gain * b / (a + b))
    for share in (count / runs for count in held.values()):
        # 95 %, less three standard errors of the simulation and two points that small samples may cost.
        assert share >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / runs) - 0.02


def holds(interval: Interval, truth: float) -> bool:
    return interval.low <= truth <= interval.high


def test_attempts_at_one_task_are_no_evidence_about_others():
    same_every_time = [1.0] * 5 + [0.0] * 5
    few, many = (rate_interval(same_every_time, attempts) for attempts in (10, 1000))
    assert few == many
    assert rate_interval([0.5] * 10, 1000) == wilson_interval(0.5, 10)


def test_no_change_in_a_few_tasks_proves_nothing():
    assert change_interval([0.0]).high > 0.8
    assert 0.35 < change_interval([0.0] * 5).high < 0.45
    assert change_interval([0.0] * 100).high < 0.03


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.integers(1, 5))
def test_a_rate_lies_in_its_interval_and_the_interval_in_the_unit(rates, attempts):
    found = rate_interval(rates, len(rates) * attempts)
    assert 0 <= found.low <= np.mean(rates) + 1e-12
    assert np.mean(rates) - 1e-12 <= found.high <= 1


def test_the_bootstrap_covers_the_mean_and_clusters_widen_it():
    random = np.random.default_rng(0)
    covered, wider, runs = 0, 0, 200
    for _ in range(runs):
        level = random.normal(10, 3, 40)
        values = np.repeat(level, 4) + random.normal(0, 0.5, 160)
        by_task = cluster_bootstrap_interval(values, np.repeat(np.arange(40), 4), resamples=400)
        covered += holds(by_task, 10)
        by_attempt = cluster_bootstrap_interval(values, range(160), resamples=400)
        wider += by_task.high - by_task.low > 1.5 * (by_attempt.high - by_attempt.low)
    assert covered / runs > 0.89
    assert wider == runs


def test_the_bootstrap_is_repeatable_and_weighs_clusters_by_their_size():
    values, clusters = [0.0] * 9 + [10.0], ["a"] * 9 + ["b"]
    found = cluster_bootstrap_interval(values, clusters)
    assert found == cluster_bootstrap_interval(values, clusters)
    assert (found.low, found.high) == (0, 10)
    # A hundred clusters of nine zeros and a hundred of one ten: the mean of all values is 1.
    uneven = cluster_bootstrap_interval([0.0] * 900 + [10.0] * 100, [*(i // 9 for i in range(900)), *range(100, 200)])
    assert 0.5 < uneven.low < 1 < uneven.high < 1.5
    assert cluster_bootstrap_interval([1.0, 2.0], ["a", "a"]) == Interval(-np.inf, np.inf)
    for wrong in ([], [1.0, 2.0]):
        with pytest.raises(ValueError, match="bootstrap"):
            cluster_bootstrap_interval(wrong, ["a"])
