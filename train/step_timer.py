"""Where the time of a training step goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from train.role_metrics import LEARNER, Metrics, share_metrics


class StepTimer:
    """Seconds by phase of one step after the other. What lies between the phases counts too, as ``other``.

    Args:
        clock: seconds, from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun = clock()
        self._seconds: Metrics = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """For as long as the context lasts; once a step."""
        begun = self._clock()
        yield
        self._seconds[phase] = self._clock() - begun

    def metrics(self) -> Metrics:
        """``timing/*`` and ``time_share/learner/*`` of the step so far."""
        step = self._clock() - self._begun
        other = max(0.0, step - sum(self._seconds.values()))
        timing = {f"timing/{phase}": seconds for phase, seconds in self._seconds.items()} | {"timing/step": step}
        return timing | share_metrics("learner", LEARNER, self._seconds | {"other": other})

    def end_step(self) -> Metrics:
        """:meth:`metrics` of the step; the next one begins now, with the report of this one."""
        metrics = self.metrics()
        self._begun, self._seconds = self._clock(), {}
        return metrics
