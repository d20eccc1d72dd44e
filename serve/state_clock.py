"""Seconds spent in each state, by one thing or by many at once: what shares of time are made of."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StateClock:
    """Adds up how long things are in which state. A change costs a reading of the clock and two additions.

    What is in a state now counts up to the moment of the question, so that the sum over all states is at any moment
    the time of everything counted so far, long or short.

    Args:
        clock: seconds, from any origin.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._inside: defaultdict[str, int] = defaultdict(int)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._settled: dict[str, float] = {}  # up to when a state's seconds are counted

    def move(self, old: str | None, new: str | None) -> None:
        """One thing goes from ``old`` to ``new``; from ``None`` it comes, to ``None`` it goes away."""
        now = self._clock()
        if old is not None:
            self._settle(old, now)
            self._inside[old] -= 1
        if new is not None:
            self._settle(new, now)
            self._inside[new] += 1

    @contextmanager
    def inside(self, state: str, outside: str | None = None) -> Iterator[None]:
        """One thing is in ``state`` for as long as the context lasts, and in ``outside`` before and after."""
        self.move(outside, state)
        try:
            yield
        finally:
            self.move(state, outside)

    def seconds(self) -> dict[str, float]:
        """Until now, by state."""
        now = self._clock()
        for state in self._settled:
            self._settle(state, now)
        return dict(self._seconds)

    def _settle(self, state: str, now: float) -> None:
        self._seconds[state] += self._inside[state] * (now - self._settled.get(state, now))
        self._settled[state] = now
