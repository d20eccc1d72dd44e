"""Many small messages to one actor, in few calls."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Coalescer(Generic[Item, Answer]):
    """Sends items, one call at a time: what comes while a call is under way travels together in the next one.

    An item that comes alone leaves at once. Under load the calls grow instead of their number, which is what an actor's
    throughput is limited by. An item whose sender gave up before its call began is not sent.

    Args:
        send: takes items in the order they came; returns an answer for each, or the exception its sender is to get. One
            that it raises is everybody's.
    """

    def __init__(self, send: Callable[[list[Item]], Awaitable[list[Answer | Exception]]]) -> None:
        self._send = send
        self._waiting: list[tuple[Item, asyncio.Future[Answer]]] = []
        self._calls: asyncio.Task[None] | None = None

    async def __call__(self, item: Item) -> Answer:
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._calls is None:
            # In no one's context: a Ray task that is cancelled would take calls made in its own with it, all of them.
            self._calls = asyncio.create_task(self._send_all(), context=contextvars.Context())
        return await future

    async def _send_all(self) -> None:
        while self._waiting:
            batch = [(item, future) for item, future in self._waiting if not future.done()]
            self._waiting = []
            answers = await self._answers([item for item, _ in batch])
            for (_, future), answer in zip(batch, answers, strict=True):
                if future.done():
                    continue
                if isinstance(answer, Exception):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
        self._calls = None

    async def _answers(self, items: list[Item]) -> list[Answer | Exception]:
        if not items:
            return []
        try:
            answers = await self._send(items)
            if len(answers) != len(items):
                raise ValueError(f"{len(answers)} answers came for {len(items)} items")
            return answers
        except Exception as error:  # every sender gets it
            return [error] * len(items)
