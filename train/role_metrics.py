"""What each role of a run spends its time on, and how late its event loops are.

Roles report seconds that only grow, with what they report anyway; here they become the shares of one training step.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from actors.episode import OWN_WORK, QUEUED

Metrics = dict[str, float]

KEPT_LAGS = 10_000  # of a role between two steps, should a run stand still

# What is shown of each role, and of which of the seconds that it counts it is made.
LEARNER = {
    "wait_for_batch": ("wait_for_batch",),
    "train": ("forward_backward", "optimizer"),
    "publish": ("publish",),
    "checkpoint": ("checkpoint",),
    "other": ("other",),
}
ROLLOUT = {
    "queued": (QUEUED,),
    "provision": ("provision",),
    "generate": ("generate",),
    "env": ("reset", "step", "close"),
    "verify": ("verify",),
    "own_work": (OWN_WORK,),
}
POLICY = {state: (state,) for state in ("generate", "update", "idle", "down")}


def share_metrics(role: str, shown: Mapping[str, Iterable[str]], seconds: Mapping[str, float]) -> Metrics:
    """``time_share/{role}/*`` of ``seconds``; their sum is 1. Empty where no time has passed."""
    total = sum(seconds.values())
    if total <= 0:
        return {}
    return {
        f"time_share/{role}/{name}": sum(seconds.get(state, 0.0) for state in states) / total
        for name, states in shown.items()
    }


def loop_lag_metrics(role: str, late: Sequence[float]) -> Metrics:
    """``loop_lag/{role}/*`` from seconds of lateness, measured at intervals."""
    if not late:
        return {}
    return {
        f"loop_lag/{role}/max_s": max(late),
        f"loop_lag/{role}/p99_s": float(np.percentile(late, 99, method="higher")),
    }


class TimeShares:
    """Shares of the time since the last report, from seconds that grow.

    Args:
        shown: see :func:`share_metrics`.
    """

    def __init__(self, role: str, shown: Mapping[str, Iterable[str]]) -> None:
        self._role, self._shown = role, shown
        self._last: dict[str, Mapping[str, float]] = {}

    def since_last(self, seconds: Mapping[str, Mapping[str, float]]) -> Metrics:
        """The shares of all sources together.

        Args:
            seconds: by source and state. The first report of a source is where its time begins to count.
        """
        spent: Counter[str] = Counter()
        for source, now in seconds.items():
            before = self._last.get(source, now)
            # Never less than before but for the last digits of what is reckoned as a difference.
            spent.update({state: max(0.0, value - before.get(state, 0.0)) for state, value in now.items()})
            self._last[source] = now
        return share_metrics(self._role, self._shown, spent)


class ReplicaLoad:
    """``time_share/policy/*`` and ``loop_lag/replica/*``, from what replicas answer to an update."""

    def __init__(self) -> None:
        self._shares = TimeShares("policy", POLICY)

    def metrics(self, answers: Iterable[Mapping[str, Any]]) -> Metrics:
        """Of the time since the last update."""
        answers = list(answers)
        late = [lag for answer in answers for lag in answer["loop_lag"]]
        seconds = {answer["replica"]: answer["time_spent"] for answer in answers}
        return self._shares.since_last(seconds) | loop_lag_metrics("replica", late)


class RolloutLoad:
    """``time_share/rollout/*``, ``loop_lag/*`` and the rate of sampling, from what is polled between two steps."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._shares = TimeShares("rollout", ROLLOUT)
        self._late: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=KEPT_LAGS))
        self._work: Mapping[str, Any] | None = None
        self._now = 0.0  # when the work was reported
        self._tokens: tuple[float, int] | None = None  # when, and how many by then, at the last step

    def add_work(self, status: Mapping[str, Any]) -> None:
        """What :meth:`actors.conductor.Conductor.status` says."""
        for role, late in status["loop_lag"].items():
            self.add_lag(role, late)
        self._work, self._now = status, self._clock()
        if self._tokens is None:  # counting begins here
            self.end_step()

    def add_lag(self, role: str, late: list[float]) -> None:
        """Seconds that an event loop was late."""
        self._late[role] += late

    def lag_metrics(self) -> Metrics:
        """``loop_lag/*`` since the last step."""
        metrics: Metrics = {}
        for role, late in self._late.items():
            metrics |= loop_lag_metrics(role, late)
        return metrics

    def end_step(self) -> Metrics:
        """What came since the last step, up to the last report of work."""
        metrics = self.lag_metrics()
        self._late.clear()
        if self._work is None:
            return metrics
        tokens = self._work["sampled_tokens"]
        since, before = self._tokens or (self._now, tokens)
        if self._now > since:
            metrics["generate/tokens_per_s"] = (tokens - before) / (self._now - since)
        self._tokens = self._now, tokens
        return metrics | self._shares.since_last({"workers": self._work["episode_s"]})
