"""What a run did to an environment, decided by intervals: a change counts where chance does not explain it, and "no
change" only where one that matters would have shown."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from train.statistics import (
    CONFIDENCE,
    FEW_TASKS,
    Interval,
    change_interval,
    difference_interval,
    normal_quantile,
    pass_at_k,
    pass_hat_k,
    rate_interval,
)

MIN_CHANGE = 0.2  # the smallest change of the success rate that matters
_MOST_TASKS = 1_000_000

Outcomes = Mapping[str, Sequence[bool]]  # task: whether each graded attempt was solved


class Status(enum.StrEnum):
    SATURATED = "SATURATED"
    IMPROVED = "IMPROVED"
    FLAT = "FLAT"
    FAILING = "FAILING"
    REGRESSED = "REGRESSED"
    TOO_FEW = "TOO FEW"


@dataclass(frozen=True)
class Success:
    """Success at one step. ``rate`` is the mean over tasks of the share of attempts solved (pass@1).

    ``k`` is how many attempts most tasks have; ``pass_at_k`` and ``pass_hat_k`` are over the tasks with at least so
    many.
    """

    rate: float
    interval: Interval
    tasks: int
    attempts: int
    k: int
    pass_at_k: float
    pass_at_k_interval: Interval
    pass_hat_k: float
    pass_hat_k_interval: Interval


@dataclass(frozen=True)
class Verdict:
    """The status of an environment and why.

    Attributes:
        change: of the mean over ``tasks``; with ``paired``, those attempted at both steps.
        tasks: unique tasks that the status stands on.
        needed: unique tasks that would decide it, about; only with TOO FEW.
    """

    status: Status
    change: float
    interval: Interval
    tasks: int
    paired: bool
    needed: int | None
    why: str


def success_of(outcomes: Outcomes, confidence: float = CONFIDENCE) -> Success | None:
    """Success over all graded attempts; ``None`` where there are none."""
    tasks = {task: attempts for task, attempts in outcomes.items() if attempts}
    if not tasks:
        return None
    counts = [len(attempts) for attempts in tasks.values()]
    k = max(set(counts), key=lambda n: (counts.count(n), n))
    drawn = [(len(attempts), sum(attempts)) for attempts in tasks.values() if len(attempts) >= k]
    rates = _rates(tasks)
    any_of_k = [pass_at_k(n, solved, k) for n, solved in drawn]
    all_of_k = [pass_hat_k(n, solved, k) for n, solved in drawn]
    return Success(
        rate=float(np.mean(rates)),
        interval=rate_interval(rates, sum(counts), confidence),
        tasks=len(tasks),
        attempts=sum(counts),
        k=k,
        pass_at_k=float(np.mean(any_of_k)),
        pass_at_k_interval=rate_interval(any_of_k, len(drawn), confidence),
        pass_hat_k=float(np.mean(all_of_k)),
        pass_hat_k_interval=rate_interval(all_of_k, len(drawn), confidence),
    )


def _rates(outcomes: Outcomes) -> list[float]:
    return [sum(attempts) / len(attempts) for attempts in outcomes.values()]


def judge(
    before: Outcomes, after: Outcomes, min_change: float = MIN_CHANGE, confidence: float = CONFIDENCE
) -> Verdict | None:
    """The status of one environment from the same tasks at two steps; ``None`` where one of them has no graded attempt.

    Where no task was attempted at both steps, the two rates are compared as independent ones.
    """
    common = {task for task in before if before[task] and after.get(task)}
    paired = bool(common)
    if paired:
        before = {task: before[task] for task in common}
        after = {task: after[task] for task in common}
    first, last = success_of(before, confidence), success_of(after, confidence)
    if first is None or last is None:
        return None
    change = last.rate - first.rate
    if paired:
        changes = np.array([_rates({"": after[t]})[0] - _rates({"": before[t]})[0] for t in sorted(common)])
        interval, variance = change_interval(changes, confidence), float(changes.var())
    else:
        interval = difference_interval(first.rate, first.interval, last.rate, last.interval)
        variance = float(np.var(_rates(before)) + np.var(_rates(after)))
    tasks = min(first.tasks, last.tasks)
    status = _status(first, last, interval, min_change)
    needed = None
    if status is Status.TOO_FEW:
        needed = tasks_needed(tasks, change, variance, min_change, confidence)
    why = _why(status, first, last, interval, tasks, needed, min_change)
    return Verdict(status, change, interval, tasks, paired, needed, why)


def _status(first: Success, last: Success, change: Interval, min_change: float) -> Status:
    if change.low > 0:
        return Status.IMPROVED
    if change.high < 0:
        return Status.REGRESSED
    if first.rate == 1 and last.rate == 1:
        return Status.SATURATED
    if last.interval.high < min_change:
        return Status.FAILING
    if -min_change < change.low and change.high < min_change:
        return Status.FLAT
    return Status.TOO_FEW


def tasks_needed(tasks: int, change: float, variance: float, min_change: float, confidence: float = CONFIDENCE) -> int:
    """About how many unique tasks would decide the status, if the change stays what it is.

    The interval must get so narrow that it leaves out either zero or a change of ``min_change``.

    Args:
        variance: of the tasks' changes. Fewer than ``FEW_TASKS`` tell neither it nor the change; then it is taken to be
            0.25, as of tasks that are solved every other time in two attempts.
    """
    if tasks < FEW_TASKS:
        change, variance = 0.0, 0.25
    target = max(abs(change), min_change - abs(change))
    low, high = tasks + 1, _MOST_TASKS
    while low < high:
        middle = (low + high) // 2
        # As change_interval has it, with its two added tasks.
        spread = (middle * variance + 2) / (middle + 2)
        if normal_quantile(confidence) * math.sqrt(spread / (middle + 2)) < target:
            high = middle
        else:
            low = middle + 1
    return low


def _why(
    status: Status, first: Success, last: Success, change: Interval, tasks: int, needed: int | None, min_change: float
) -> str:
    on = f"{tasks} unique task{'' if tasks == 1 else 's'}"
    span = f"{100 * change.low:+.0f} to {100 * change.high:+.0f} points"
    match status:
        case Status.SATURATED:
            reach = f"{100 * min(first.interval.low, last.interval.low):.0f} %"
            return f"every attempt solved at both steps, on {on}; beyond these, success may be as low as {reach}"
        case Status.FAILING:
            return f"at most {100 * last.interval.high:.0f} % solved, on {on}, and no change shown"
        case Status.FLAT:
            return f"{span} on {on}: a change of {100 * min_change:.0f} points would have shown"
        case Status.TOO_FEW:
            return f"{on}, about {needed} would decide: {span} leaves open whether anything changed"
        case _:
            return f"{span} on {on}"
