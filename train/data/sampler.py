"""The order in which training tasks are used."""

from __future__ import annotations

import random

from actors.task import Task


class TaskSampler:
    """Epoch after epoch over the tasks, each epoch in its own seeded order. An endless iterator with a cursor."""

    def __init__(self, tasks: list[Task], seed: int) -> None:
        if not tasks:
            raise ValueError("a sampler needs at least one task")
        self._tasks = tasks
        self._seed = seed
        self._order: list[int] = []
        self.drawn = 0

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self.drawn / len(self._tasks)

    def __iter__(self) -> TaskSampler:
        return self

    def __next__(self) -> Task:
        epoch, position = divmod(self.drawn, len(self._tasks))
        if position == 0 or not self._order:
            self._order = list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self.drawn += 1
        return self._tasks[self._order[position]]
