"""The small actor between the learner's ranks and whoever started it. Light to import: it is a process of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True)
class Decision:
    """What rank 0 learnt about a step, for all ranks: the buffer's batch, or why there is none."""

    batch: Any | None
    stopped: bool = False  # by the caller, as opposed to: no more batches will come


@ray.remote(num_cpus=0)
class LearnerControl:
    """The stop flag, rank 0's decision about the step, and the first failure."""

    def __init__(self) -> None:
        self._stop = asyncio.Event()
        self._heeded = False
        self._begun = asyncio.Event()
        self._published_first = asyncio.Event()
        self._first_version: int | None = None
        self._announced = asyncio.Condition()
        self._step = -1
        self._decision: Decision | None = None
        self._failure: tuple[str, bool] | None = None

    async def stop(self) -> bool:
        """Returns whether rank 0 heeds it: it has begun to train."""
        self._stop.set()
        return self._heeded

    async def stopped(self) -> None:
        """Returns once ``stop`` was called."""
        self._heeded = True
        self._begun.set()
        await self._stop.wait()

    async def begun(self) -> None:
        """Returns once all ranks are up."""
        await self._begun.wait()

    async def published_first(self, version: int) -> None:
        self._first_version = version
        self._published_first.set()

    async def first_version(self) -> int:
        """The version that a resumed learner's weights got, once replicas have them."""
        await self._published_first.wait()
        return self._first_version

    async def announce(self, step: int, decision: Decision) -> None:
        """Rank 0's answer for ``step``. A Ray call carries object references; a torch collective would lose them."""
        async with self._announced:
            self._step, self._decision = step, decision
            self._announced.notify_all()

    async def announced(self, step: int) -> Decision:
        async with self._announced:
            await self._announced.wait_for(lambda: self._step == step)
            return self._decision

    async def fail(self, reason: str, unmendable: bool = False) -> None:
        """Keep the first reason: the others mostly follow from it."""
        self._failure = self._failure or (reason, unmendable)

    async def failure(self) -> tuple[str, bool] | None:
        """The first reason, and whether another learner would fail for it too."""
        return self._failure
