"""Pass rates of repeated attempts, and intervals for them and for their changes. NumPy alone.

Attempts at one task are not independent, so the unit is the task: a rate is a mean over tasks, and its interval widens
as far as the tasks differ from each other, not as if every attempt were a new task.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

CONFIDENCE = 0.95
RESAMPLES = 2_000
FEW_TASKS = 5  # below, the spread between tasks is not worth an estimate
_RESAMPLES_AT_ONCE = 200  # bounds memory: this many counts per cluster


@dataclass(frozen=True)
class Interval:
    """A confidence interval, ``low <= high``."""

    low: float
    high: float


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of ``k`` attempts succeeds.

    Chen et al. 2021 (arXiv 2107.03374), equation 1: one minus the share of the subsets of ``k`` attempts that hold no
    success.

    Raises:
        ValueError: ``k`` attempts cannot be drawn from ``attempts``, or there are more successes than attempts.
    """
    _check_draw(attempts, successes, k)
    return 1.0 - comb(attempts - successes, k) / comb(attempts, k)


def pass_hat_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased estimate of the probability that all of ``k`` attempts succeed (pass^k of tau-bench, arXiv 2406.12045).

    Raises:
        ValueError: as :func:`pass_at_k`.
    """
    _check_draw(attempts, successes, k)
    return comb(successes, k) / comb(attempts, k)


def _check_draw(attempts: int, successes: int, k: int) -> None:
    if not 1 <= k <= attempts:
        raise ValueError(f"k is {k}, but there are {attempts} attempts")
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes in {attempts} attempts")


def normal_quantile(confidence: float) -> float:
    """The ``z`` of a two-sided interval: 1.96 for 0.95."""
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def wilson_interval(rate: float, trials: float, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a proportion; ``trials`` may be an effective number and need not be whole.

    Raises:
        ValueError: ``rate`` lies outside [0, 1] or there are no trials.
    """
    if not 0 <= rate <= 1 or not trials > 0:
        raise ValueError(f"a rate of {rate} in {trials} trials has no interval")
    z = normal_quantile(confidence)
    scale = 1 + z * z / trials
    centre = (rate + z * z / (2 * trials)) / scale
    margin = z / scale * np.sqrt(rate * (1 - rate) / trials + (z / (2 * trials)) ** 2)
    return Interval(max(0.0, float(centre - margin)), min(1.0, float(centre + margin)))


def rate_interval(task_rates: ArrayLike, attempts: int, confidence: float = CONFIDENCE) -> Interval:
    """Interval of a mean over tasks of rates within [0, 1].

    Wilson's interval with the effective sample size: as many independent trials as would give the spread between tasks
    that was seen, at least one and at most all attempts of each task (Franco et al. 2019,
    doi:10.1093/jssam/smy019). A task counts as one trial where all have the same rate, and where they are too few to
    show how far they differ.

    Args:
        task_rates: [tasks], a task's share of successes.
        attempts: of all tasks together.
    """
    rates = np.asarray(task_rates, dtype=float)
    mean, tasks = float(rates.mean()), len(rates)
    spread = float(rates.var(ddof=1)) if tasks >= FEW_TASKS else 0.0
    trials = float(tasks)
    if spread > 0 and 0 < mean < 1:
        trials = float(np.clip(mean * (1 - mean) / spread * tasks, tasks, max(tasks, attempts)))
    return wilson_interval(mean, trials, confidence)


def change_interval(changes: ArrayLike, confidence: float = CONFIDENCE) -> Interval:
    """Interval of the mean change of tasks that were attempted before and after.

    The adjusted Wald interval of Bonett and Price 2012 (doi:10.3102/1076998611411915), carried over from outcomes to
    rates: one task that changed by +1 and one that changed by -1 are added. So the interval stays open where no task
    changed at all, which a few tasks cannot prove.

    Args:
        changes: [tasks], a task's rate after minus its rate before, within [-1, 1].
    """
    values = np.concatenate([np.asarray(changes, dtype=float), [1.0, -1.0]])
    margin = normal_quantile(confidence) * values.std() / np.sqrt(len(values))
    mean = values.mean()
    return Interval(max(-1.0, float(mean - margin)), min(1.0, float(mean + margin)))


def difference_interval(before: float, of_before: Interval, after: float, of_after: Interval) -> Interval:
    """Interval of ``after - before`` of two independent rates from their own intervals (Newcombe 1998, method 10)."""
    change = after - before
    down = np.hypot(after - of_after.low, of_before.high - before)
    up = np.hypot(of_after.high - after, before - of_before.low)
    return Interval(max(-1.0, float(change - down)), min(1.0, float(change + up)))


def cluster_bootstrap_interval(
    values: ArrayLike,
    clusters: Sequence[object],
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap interval of a mean, resampling whole clusters (here: tasks with all their attempts).

    For means that are no rates, such as turns. Too narrow below some twenty clusters; a single one has no spread to
    resample, so its interval is the whole line.

    Args:
        values: [n].
        clusters: [n], the cluster of each value.

    Raises:
        ValueError: no values, or not as many clusters.
    """
    values = np.asarray(values, dtype=float)
    if len(values) == 0 or len(values) != len(clusters):
        raise ValueError(f"{len(values)} values in {len(clusters)} clusters have no bootstrap interval")
    ids: dict[object, int] = {}
    index = np.array([ids.setdefault(cluster, len(ids)) for cluster in clusters])
    if len(ids) == 1:
        return Interval(-np.inf, np.inf)
    sums, sizes = np.bincount(index, values), np.bincount(index)
    rng = np.random.default_rng(seed)
    means: list[np.ndarray] = []
    for start in range(0, resamples, _RESAMPLES_AT_ONCE):
        drawn = min(_RESAMPLES_AT_ONCE, resamples - start)
        counts = rng.multinomial(len(ids), np.full(len(ids), 1 / len(ids)), size=drawn)
        means.append(counts @ sums / (counts @ sizes))
    low, high = np.quantile(np.concatenate(means), [0.5 - confidence / 2, 0.5 + confidence / 2])
    return Interval(float(low), float(high))
