"""Jobs that all progress at one speed, which changes with the load: processor sharing, in virtual time."""

from __future__ import annotations

import heapq
import math
from typing import Any, Protocol


class Job(Protocol):
    gone: bool  # it was removed before its end


class Station:
    """Where jobs are served at once, each at ``speed`` units of its demand a second.

    What every job has progressed by is one number, so a change of speed costs nothing, whatever the number of jobs.
    """

    __slots__ = ("jobs", "speed", "_progress", "_updated", "_heap", "_added")

    def __init__(self, speed: float = 1.0) -> None:
        self.jobs = 0
        self.speed = speed
        self._progress = 0.0
        self._updated = 0.0
        self._heap: list[tuple[float, int, Any]] = []  # progress at which a job is done, order of coming, job
        self._added = 0

    def advance(self, now: float) -> None:
        """Serve until ``now`` seconds, at the speed of the time since the last call."""
        self._progress += self.speed * (now - self._updated)
        self._updated = now

    def add(self, job: Job, demand: float) -> None:
        self.jobs += 1
        self._added += 1
        heapq.heappush(self._heap, (self._progress + demand, self._added, job))

    def remove(self, job: Job) -> None:
        """Take a job out before its end; for good."""
        job.gone = True
        self.jobs -= 1

    def due(self) -> float:
        """When the next job is done, in seconds; infinity if none will be."""
        heap = self._heap
        while heap and heap[0][2].gone:
            heapq.heappop(heap)
        if not heap or self.speed <= 0:
            return math.inf
        return self._updated + max(0.0, heap[0][0] - self._progress) / self.speed

    def pop(self) -> Any:
        """The job that is done first."""
        self.jobs -= 1
        return heapq.heappop(self._heap)[2]
