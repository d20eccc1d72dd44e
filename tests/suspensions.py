"""Cancelling a piece of work at each of its suspensions, one after the other."""

from __future__ import annotations

import asyncio
import functools
import time
import types
from collections.abc import Coroutine
from typing import Any


@types.coroutine
def _cancelling_at(work, suspension, cancelled_at):
    """Await ``work``; at its n-th suspension, cancel the task that does so."""
    iterator = work.__await__()
    count = 0
    resume = lambda: iterator.send(None)  # noqa: E731
    while True:
        try:
            waiting = resume()
        except StopIteration:
            return
        count += 1
        if count == suspension:
            asyncio.current_task().cancel()
            cancelled_at.append(time.monotonic())
        try:
            value = yield waiting
        except BaseException as error:
            resume = functools.partial(iterator.throw, error)
        else:
            resume = functools.partial(iterator.send, value)


async def runs_to_its_end(work: Coroutine[Any, Any, Any], suspension: int, within_s: float) -> bool:
    """False: it was cancelled at its n-th suspension, and ended within so many seconds; true: it has fewer."""
    cancelled_at: list[float] = []

    async def run() -> None:
        await _cancelling_at(work, suspension, cancelled_at)

    try:
        await asyncio.create_task(run())
    except asyncio.CancelledError:
        assert time.monotonic() - cancelled_at[0] < within_s, f"cancelled at suspension {suspension}"
        return False
    return True
