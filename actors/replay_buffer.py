"""The actor around :class:`ReplayBufferCore`: long polls for tickets and batches, nothing more."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import ray

from actors.replay_buffer_core import GroupHeader, ReplayBufferCore, TicketError
from actors.trajectory import Outcome
from serve.loop_lag import LoopLag


class BatchTimeout(TimeoutError):
    """No batch was ready in time. The message names the outstanding tickets."""


@ray.remote(num_cpus=0)
class ReplayBuffer:
    """``settings``: the arguments of :class:`ReplayBufferCore`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._core = ReplayBufferCore(**settings)
        self._changed = asyncio.Condition()
        self._loop_lag = LoopLag()

    async def issue(self, timeout_s: float, limit: int = 1) -> list[tuple[int, int]]:
        """Tickets as ``(ticket_id, trained version)``: ``limit`` at most, as soon as there are any, none if late."""
        first = await self._wait(self._core.issue, timeout_s)
        tickets = [] if first is None else [first, *(self._core.issue() for _ in range(limit - 1))]
        return [(ticket.ticket_id, ticket.version) for ticket in tickets if ticket is not None]

    async def start(
        self, groups: list[tuple[int, str, list[str]]], sampler_state: dict[str, Any] | None = None
    ) -> None:
        """What tickets are used for: ``(ticket_id, task_key, episode_ids)``. After them the sampler stands there."""
        for group in groups:
            self._core.start(*group, sampler_state)

    async def generating(self, ticket_ids: list[int], worker: str) -> None:
        """A worker's note that it asked for the first turns of these groups."""
        for ticket_id in ticket_ids:
            self._core.generating(ticket_id, worker)

    async def commit(self, groups: list[tuple[int, GroupHeader, Any]]) -> list[str | TicketError]:
        """Redeem tickets by ``(ticket_id, header, object reference of the group)``, which Ray does not fetch where it
        stands inside of a list. Returns a verdict for each, or why it was not redeemed."""
        verdicts = [self._commit(*group) for group in groups]
        await self._notify()
        return verdicts

    def _commit(self, ticket_id: int, header: GroupHeader, payload: Any) -> str | TicketError:
        try:
            return self._core.commit(ticket_id, header, payload)
        except TicketError as error:
            return error

    async def abandon(self, ticket_id: int, outcome: Outcome) -> None:
        self._core.abandon(ticket_id, outcome)
        await self._notify()

    async def get_batch(self, step: int, timeout_s: float) -> dict[str, Any] | None:
        """The batch for ``step``: ``{"refs", "headers", "lineage"}``; ``None`` when the run is draining.

        Raises:
            BatchTimeout: naming the outstanding tickets and where they are.
        """
        batch = await self._wait(lambda: [] if self._core.draining else self._core.take(), timeout_s)
        if batch is None:
            raise BatchTimeout(f"no batch for step {step} in {timeout_s:.0f} s: {self._core.outstanding()}")
        if not batch:
            return None
        await self._notify()
        return {
            "refs": [ticket.payload for ticket in batch],
            "headers": [ticket.header for ticket in batch],
            "lineage": self._core.lineage,
        }

    async def ack(self, step: int, version: int | None) -> None:
        """See :meth:`ReplayBufferCore.acknowledge`."""
        self._core.acknowledge(version)
        await self._notify()

    async def drain(self, reason: str) -> None:
        self._core.drain(reason)
        await self._notify()

    async def snapshot(self) -> dict[str, Any]:
        """As :meth:`ReplayBufferCore.snapshot`; and ``loop_lag``, how late the actor's loop was since the last call."""
        return self._core.snapshot() | {"loop_lag": self._loop_lag.take()}

    async def state(self) -> tuple[dict[str, Any], dict[int, ray.ObjectRef]]:
        """For a checkpoint: :meth:`ReplayBufferCore.state`, and by ticket its group's object reference."""
        return self._core.state(), self._core.payloads()

    async def resume(
        self, state: dict[str, Any], payloads: dict[int, ray.ObjectRef], version: int
    ) -> list[tuple[int, str, list[str]]]:
        """Go on from a checkpoint whose weights are now called ``version``. Only batches may have been asked for yet.

        Returns:
            Ticket, task and episodes of each group that must be rolled out anew, in start order.
        """
        self._core.restore(state, payloads)
        in_flight = [(t.ticket_id, t.task_key, t.episode_ids) for t in self._core.resume(version)]
        await self._notify()
        return in_flight

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait(self, attempt, timeout_s: float):
        """Call ``attempt`` until it answers other than ``None``, whenever something changed, until the deadline."""
        deadline = time.monotonic() + timeout_s
        async with self._changed:
            while (answer := attempt()) is None:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                try:
                    await asyncio.wait_for(self._changed.wait(), remaining)
                except TimeoutError:
                    return None
            return answer
