"""How late an event loop wakes those who wait: what blocks an actor shows here before anything else does."""

from __future__ import annotations

import asyncio
import time
from collections import deque

INTERVAL_S = 0.25
KEPT = 1024  # measurements, should nobody ask


class LoopLag:
    """Has its event loop call it at intervals, and notes by how much the loop is late.

    Belongs to one actor, which ends with its loop. Measures from the first :meth:`take` on; in a loop that is blocked
    once, one measurement is as late as the block was long, less an interval at most.
    """

    def __init__(self, interval_s: float = INTERVAL_S) -> None:
        self._interval_s = interval_s
        self._late: deque[float] = deque(maxlen=KEPT)
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def take(self) -> list[float]:
        """Seconds the loop was late, of each measurement since the last call. To be called in the loop."""
        if self._timer is None:
            self._wait()
        late = list(self._late)
        self._late.clear()
        return late

    def stop(self) -> None:
        """Measure no more. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _wait(self) -> None:
        # A timer, and not a task that sleeps: nothing is pending when the loop ends.
        self._due = time.monotonic() + self._interval_s
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._measure)

    def _measure(self) -> None:
        # Not the loop's own time, which some loops read once a round: the round would not see how long it took.
        self._late.append(max(0.0, time.monotonic() - self._due))
        self._wait()
