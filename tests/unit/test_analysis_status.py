"""What a run did to an environment: decided by intervals, on data whose truth is known."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from train.analysis.status import Status, judge, success_of, tasks_needed

# Step 0 → 80 of an earlier training: unique tasks, attempts at each, success before and after.
TRAINING = {
    "github": (60, 3, 0.467, 0.700),
    "booking": (104, 3, 0.538, 0.577),
    "fira": (5, 3, 0.400, 0.400),
    "reddit": (72, 3, 0.667, 0.667),
    "zillow": (4, 3, 0.500, 0.500),
    "ticketmaster": (1, 28, 0.036, 0.071),
    "hubspot": (2, 3, 1.0, 1.0),
    "outlook": (3, 3, 1.0, 1.0),
}
EXPECTED = {
    "github": Status.IMPROVED,
    "booking": Status.FLAT,
    "fira": Status.TOO_FEW,
    "reddit": Status.FLAT,
    "zillow": Status.TOO_FEW,
    "ticketmaster": Status.TOO_FEW,
    "hubspot": Status.SATURATED,
    "outlook": Status.SATURATED,
}


def outcomes(tasks: int, attempts: int, rate: float) -> dict[str, list[bool]]:
    """As close to ``rate`` as whole attempts allow, tasks as alike as they can be."""
    solved = round(rate * tasks * attempts)
    flat = [i * solved // (tasks * attempts) != (i + 1) * solved // (tasks * attempts) for i in range(tasks * attempts)]
    return {f"task-{t}": flat[t * attempts : (t + 1) * attempts] for t in range(tasks)}


def drawn(tasks: int, attempts: int, rate: float, random: np.random.Generator) -> dict[str, list[bool]]:
    return {f"task-{t}": (random.random(attempts) < rate).tolist() for t in range(tasks)}


@pytest.mark.parametrize("env", TRAINING)
def test_the_statuses_of_a_known_training_are_right(env):
    tasks, attempts, before, after = TRAINING[env]
    verdict = judge(outcomes(tasks, attempts, before), outcomes(tasks, attempts, after))
    assert verdict.status is EXPECTED[env]
    # What can be generated differs from the rate by half an attempt at most.
    assert verdict.change == pytest.approx(after - before, abs=1 / (tasks * attempts))
    assert verdict.tasks == tasks


def test_one_unique_task_is_too_few_however_often_it_was_attempted_and_says_how_many_would_do():
    verdict = judge(outcomes(1, 28, 0.036), outcomes(1, 28, 0.071))
    assert verdict.status is Status.TOO_FEW
    assert verdict.needed > 10
    assert verdict.why.startswith(f"1 unique task, about {verdict.needed} would decide")


@pytest.mark.parametrize("env", ["github", "booking", "fira", "reddit", "zillow", "hubspot"])
def test_drawn_at_random_they_come_out_the_same_most_of_the_time_and_never_the_opposite(env):
    tasks, attempts, before, after = TRAINING[env]
    random = np.random.default_rng(1)
    found = Counter(
        judge(drawn(tasks, attempts, before, random), drawn(tasks, attempts, after, random)).status for _ in range(200)
    )
    assert found[EXPECTED[env]] >= 150
    assert found[Status.REGRESSED] <= 10
    if before == after:
        assert found[Status.IMPROVED] <= 10


def test_where_nothing_changes_a_change_is_claimed_no_more_often_than_the_confidence_allows():
    random = np.random.default_rng(2)
    claimed = runs = 0
    for _ in range(300):
        level = random.beta(1, 1, 30)
        before, after = ({f"{t}": (random.random(3) < level[t]).tolist() for t in range(30)} for _ in range(2))
        claimed += judge(before, after).status in (Status.IMPROVED, Status.REGRESSED)
        runs += 1
    assert claimed / runs <= 0.07


def test_flat_needs_data_that_could_have_shown_a_change():
    for tasks, status in [(5, Status.TOO_FEW), (11, Status.TOO_FEW), (12, Status.FLAT), (100, Status.FLAT)]:
        same = {f"task-{t}": [t % 2 == 0] for t in range(tasks)}
        assert judge(same, same).status is status, tasks
    wide = {f"task-{t}": [t % 2 == 0] for t in range(12)}
    assert judge(wide, wide, min_change=0.1).status is Status.TOO_FEW


def test_failing_is_said_only_of_what_is_surely_rare():
    assert judge(outcomes(40, 3, 0.0), outcomes(40, 3, 0.0)).status is Status.FAILING
    assert judge(outcomes(10, 3, 0.0), outcomes(10, 3, 0.0)).status is Status.TOO_FEW
    assert judge(outcomes(40, 3, 0.0), outcomes(40, 3, 0.15)).status is Status.IMPROVED


def test_a_fall_is_a_regression_even_from_everything_solved():
    assert judge(outcomes(40, 3, 1.0), outcomes(40, 3, 0.6)).status is Status.REGRESSED
    assert judge(outcomes(40, 3, 0.7), outcomes(40, 3, 0.3)).status is Status.REGRESSED
    # One lost attempt is no regression, but neither is it "nothing to win".
    assert judge(outcomes(40, 3, 1.0), outcomes(40, 3, 119 / 120)).status is Status.FLAT


def test_only_tasks_of_both_steps_are_compared():
    before = {"a": [True], "b": [False], "only before": [True], "not graded": []}
    after = {"a": [True], "b": [True], "only after": [False], "not graded": [True]}
    verdict = judge(before, after)
    assert (verdict.tasks, verdict.change, verdict.paired) == (2, 0.5, True)


def test_without_common_tasks_two_independent_rates_are_compared():
    before = {f"old-{t}": [t < 10] for t in range(40)}
    after = {f"new-{t}": [t < 30] for t in range(40)}
    verdict = judge(before, after)
    assert (verdict.status, verdict.paired, verdict.change) == (Status.IMPROVED, False, 0.5)
    assert 0.28 < verdict.interval.low < 0.32


def test_where_nothing_was_graded_there_is_no_status():
    assert judge({"a": []}, {"a": [True]}) is None
    assert judge({}, {}) is None
    assert success_of({"a": []}) is None


def test_success_counts_tasks_alike_and_pass_at_k_at_the_usual_number_of_attempts():
    found = success_of({"a": [True, False, False], "b": [False, False, False], "c": [True], "d": [True, True, True]})
    assert found.rate == pytest.approx((1 / 3 + 0 + 1 + 1) / 4)
    assert (found.k, found.tasks, found.attempts) == (3, 4, 10)
    assert found.pass_at_k == pytest.approx(2 / 3)  # "c" has too few attempts to say
    assert found.pass_hat_k == pytest.approx(1 / 3)


def test_as_many_tasks_as_are_said_to_be_needed_do_decide():
    random = np.random.default_rng(3)
    for _ in range(20):
        before, after = drawn(15, 3, 0.5, random), drawn(15, 3, 0.55, random)
        verdict = judge(before, after)
        if verdict.status is not Status.TOO_FEW:
            continue
        assert verdict.needed > 15
        times = -(-verdict.needed // 15) + 1  # the same tasks again, and a few for the rounding
        more = [{f"{t}/{i}": o for t, o in outcome.items() for i in range(times)} for outcome in (before, after)]
        assert judge(*more).status is not Status.TOO_FEW


def test_more_spread_needs_more_tasks():
    assert tasks_needed(20, 0.0, 0.05, 0.2) < tasks_needed(20, 0.0, 0.5, 0.2) < tasks_needed(20, 0.0, 0.5, 0.1)
