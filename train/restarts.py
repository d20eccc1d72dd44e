"""Whether a run that failed is started again."""

from __future__ import annotations


class Restarts:
    """Starts that a run is still given: ``limit`` after a failure, and as many again once it has got further than ever.

    So a run of weeks outlives any number of failures, while one that fails at the same place every time comes to an
    end, and one that never came up is not started again at all.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._left = 0
        self._furthest = -1

    def reached(self, step: int) -> None:
        """``step`` steps are trained; 0: every part of the run is up."""
        if step > self._furthest:
            self._furthest, self._left = step, self._limit

    @property
    def untouched(self) -> bool:
        """Whether none was used since the run has got as far as it is."""
        return self._left == self._limit > 0

    def take(self) -> bool:
        """Use one of them, after a failure. Returns whether there was one."""
        if self._left == 0:
            return False
        self._left -= 1
        return True
