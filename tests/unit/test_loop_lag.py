"""The lag of an event loop, in a loop that is blocked on purpose."""

from __future__ import annotations

import asyncio
import time

from serve import loop_lag
from serve.loop_lag import LoopLag

INTERVAL_S = 0.02
BLOCK_S = 0.3


async def measured(seconds: float, block_s: float = 0.0) -> list[float]:
    lag = LoopLag(INTERVAL_S)
    assert lag.take() == []  # from now on
    await asyncio.sleep(seconds / 2)
    time.sleep(block_s)  # noqa: ASYNC251 (what is to be seen)
    await asyncio.sleep(seconds / 2)
    late = lag.take()
    lag.stop()
    return late


async def test_a_loop_that_is_blocked_once_is_late_once_by_as_much():
    late = await measured(0.4, BLOCK_S)
    assert len([seconds for seconds in late if seconds >= BLOCK_S - INTERVAL_S]) == 1
    assert min(late) >= 0.0


async def test_a_free_loop_is_hardly_late_and_measured_again_and_again():
    late = await measured(1.0)
    assert 5 <= len(late) <= 50
    assert sorted(late)[len(late) // 2] < BLOCK_S / 2


async def test_each_measurement_is_told_once():
    lag = LoopLag(INTERVAL_S)
    lag.take()
    await asyncio.sleep(5 * INTERVAL_S)
    assert lag.take() and lag.take() == []
    await asyncio.sleep(5 * INTERVAL_S)
    assert lag.take()
    lag.stop()


async def test_after_its_end_nothing_is_measured_and_nothing_pends():
    lag = LoopLag(INTERVAL_S)
    lag.take()
    lag.stop()
    lag.stop()
    await asyncio.sleep(5 * INTERVAL_S)
    assert not lag._late and asyncio.all_tasks() == {asyncio.current_task()}


def test_what_nobody_asks_for_is_bounded(monkeypatch):
    monkeypatch.setattr(loop_lag, "KEPT", 3)

    async def many() -> list[float]:
        lag = LoopLag(0.001)
        lag.take()
        await asyncio.sleep(0.1)
        late = lag.take()
        lag.stop()
        return late

    assert len(asyncio.run(many())) == 3
