"""The Conductor assigns work: one task per ticket to a RolloutWorker, evaluations in between, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray

from actors.coalescer import Coalescer
from actors.env_pool import ACTOR_NAME, insist, release_owner
from actors.ledger import Ledger
from actors.replay_buffer_core import GroupHeader, TicketError
from actors.rollout_worker import MAX_RESTARTS, GroupOrder, Peers
from actors.task import Task
from actors.trajectory import Cancelled, Group, InfraFailed, Outcome, StopReason, Trajectory
from serve.loop_lag import LoopLag
from serve.sampling import Sampling

TICKET_POLL_S = 5.0
TICKETS_AT_ONCE = 64  # asked for in one call
RELEASE_TIMEOUT_S = 20.0  # for a pool that is being started again
STATS_TIMEOUT_S = 2.0  # for a worker to say how far it is
WATCH_PERIOD_S = 2.0  # between two looks at the workers
KEPT_LAGS = 10_000  # measurements of all workers, should nobody ask

logger = logging.getLogger(__name__)


def worker_name(index: int) -> str:
    """Name of a RolloutWorker: of its actor, and of the leases it holds."""
    return f"rollout_worker_{index}"


class NoWorkerLeft(RuntimeError):
    """Every RolloutWorker has died; nothing can be rolled out any more."""


class TaskOrder(Protocol):
    """An endless iterator over tasks that knows where it stands."""

    def __next__(self) -> Task: ...

    def state_dict(self) -> dict[str, Any]:
        """Plain JSON, from which the order can be taken up again."""


@dataclass(frozen=True)
class ConductorSettings:
    """What the Conductor is given.

    Attributes:
        order: the training tasks in the order they are used, with a ``state_dict``.
        worker_restarts: how often Ray starts each worker again.
        worker_timeout_s: a worker that says nothing for longer hangs: it is killed, and started again as a dead one is.
        restart_timeout_s: so does one that is started again and not ready by then.
        group_timeout_s: a group that takes longer is abandoned, with all its episodes, as infra-failed.
    """

    order: TaskOrder
    n_samples: int
    sampling: Sampling
    group_timeout_s: float
    worker_restarts: int = MAX_RESTARTS
    worker_timeout_s: float = 60.0
    restart_timeout_s: float = 120.0


@ray.remote(num_cpus=0)
class Conductor:
    """Named actor; every method is async and returns within its deadline."""

    def __init__(self, settings: ConductorSettings, workers: list[Any], peers: Peers) -> None:
        self._settings = settings
        self._workers = workers
        self._load = [0] * len(workers)
        self._dead: set[int] = set()
        self._deaths: Counter[int] = Counter()  # by worker
        self._revivals: dict[int, asyncio.Task[None]] = {}  # of dead workers that may come back
        self._stats: dict[int, dict[str, Any]] = {}  # by worker: what it said last
        self._past: Counter[str] = Counter()  # what workers had counted when they died
        self._heard: dict[int, float] = {}  # by worker: when it last said something, on the loop's clock
        self._watch: asyncio.Task[None] | None = None
        self._past_s: Counter[str] = Counter()  # seconds of their episodes by phase
        self._loop_lag = LoopLag()
        self._workers_lag: deque[float] = deque(maxlen=KEPT_LAGS)  # of their loops, since the last status
        self._buffer = peers.buffer
        self._peers = peers
        self._commit = Coalescer(self._send_groups)
        self._eval_ledger = Ledger()
        self._eval_groups: set[asyncio.Task] = set()
        self._eval_ends = ""  # why, once evaluations are cancelled
        self._rollouts: asyncio.Task | None = None
        self._groups: set[asyncio.Task] = set()
        self._steps: list[dict[str, float]] = []

    async def report_step(self, metrics: dict[str, float]) -> None:
        """The learner's account of one training step; kept for whoever follows the run."""
        self._steps.append(metrics)

    async def steps_since(self, count: int) -> list[dict[str, float]]:
        """The accounts of all steps after the first ``count``."""
        return self._steps[count:]

    async def start_rollouts(self, resumed: Sequence[GroupOrder] = ()) -> None:
        """Begin to turn tickets into groups; goes on until :meth:`stop_rollouts`.

        Args:
            resumed: groups whose tickets the buffer had given out already before its checkpoint; they go first.
        """
        self._begin_watch()
        self._rollouts = asyncio.create_task(self._assign(resumed))

    async def stop_rollouts(self, reason: str, timeout_s: float) -> None:
        """Drain: no further ticket, running groups cancelled and waited for, so that their leases are back."""
        await self._buffer.drain.remote(reason)
        if self._rollouts is not None:
            self._rollouts.cancel()
            await asyncio.wait([self._rollouts], timeout=timeout_s)
        for group in self._groups:
            group.cancel()
        if self._groups:
            await asyncio.wait(self._groups, timeout=timeout_s)

    async def evaluate(
        self, label: str, tasks: list[Task], n: int, sampling: Sampling, timeout_s: float, at_once: int | None = None
    ) -> list[Group]:
        """Attempt every task ``n`` times. Episodes of a group that broke or was cancelled are there, without tokens.

        Args:
            timeout_s: of a group, from when it is given to a worker.
            at_once: training goes on beside it, so that no more groups are with workers at the same time; ``None``: it
                does not, and all are.

        Raises:
            NoWorkerLeft: there is nobody to attempt anything.
        """
        self._begin_watch()
        orders = [
            GroupOrder(task, index, tuple(f"{label}/{task.task_key}/{i}" for i in range(n)), sampling)
            for index, task in enumerate(tasks)
        ]
        for order in orders:
            self._eval_ledger.dispatch(list(order.episode_ids))
        room = asyncio.Semaphore(at_once or len(orders))
        method = "evaluate_group" if at_once is None else "evaluate_group_beside"
        running = [asyncio.create_task(self._evaluate(method, order, timeout_s, room)) for order in orders]
        self._eval_groups.update(running)
        groups = await asyncio.gather(*running)
        self._eval_groups.difference_update(running)
        if not self._living() and not self._revivals:
            raise NoWorkerLeft("every rollout worker has died")
        return groups

    async def stop_evaluations(self, reason: str, timeout_s: float) -> None:
        """Cancel what evaluations are still at, and wait until its leases are back."""
        self._eval_ends = reason
        for group in self._eval_groups:
            group.cancel()
        if self._eval_groups:
            await asyncio.wait(self._eval_groups, timeout=timeout_s)

    async def status(self) -> dict[str, Any]:
        """Counts and seconds of all workers so far, and how late loops were since the last call."""
        await asyncio.gather(*(self._ask(index) for index in self._living()))
        stats = self._stats.values()
        phases: Counter[str] = Counter()
        episode_s = Counter(self._past_s)
        for one in stats:
            phases.update(one["phases"])
            episode_s.update(one["episode_s"])
        workers_lag = list(self._workers_lag)
        self._workers_lag.clear()
        return {
            "sampled_tokens": self._past["sampled_tokens"] + sum(one["sampled_tokens"] for one in stats),
            "episodes": self._past["episodes"] + sum(one["episodes"] for one in stats),
            "phases": dict(phases),
            "episode_s": dict(episode_s),
            "loop_lag": {"rollout_worker": workers_lag, "conductor": self._loop_lag.take()},
            "eval_ledger": self._eval_ledger.snapshot(),
            "error": self._rollout_error(),
        }

    def _rollout_error(self) -> str | None:
        """Why no more work is assigned, or nobody looks whether workers hang, without anybody having asked for it."""
        for task in (self._rollouts, self._watch):
            if task is not None and task.done() and not task.cancelled():
                return _first_line(task.exception())
        return None

    async def _assign(self, resumed: Sequence[GroupOrder]) -> None:
        for order in resumed:
            self._begin(order)
        while await self._some_living():
            tickets = await self._buffer.issue.remote(TICKET_POLL_S, TICKETS_AT_ONCE)
            if not tickets:
                continue
            orders = [self._order(ticket_id) for ticket_id, _ in tickets]
            groups = [(o.group_id, o.task.task_key, list(o.episode_ids)) for o in orders]
            await self._buffer.start.remote(groups, self._settings.order.state_dict())
            for order in orders:
                self._begin(order)

    def _order(self, ticket_id: int) -> GroupOrder:
        """The next task, for that ticket."""
        task = next(self._settings.order)
        ids = tuple(f"{ticket_id}/{task.task_key}/{i}" for i in range(self._settings.n_samples))
        return GroupOrder(task, ticket_id, ids, self._settings.sampling)

    def _begin(self, order: GroupOrder) -> None:
        group = asyncio.create_task(self._roll_out(order))
        self._groups.add(group)
        group.add_done_callback(self._groups.discard)

    async def _roll_out(self, order: GroupOrder) -> None:
        """One group on the least loaded worker, and into the buffer. Whatever happens, its ticket is redeemed or
        returned."""
        outcome: Outcome | None = None
        try:
            header, group = await self._on_worker("run_group", order, self._settings.group_timeout_s)
            await self._commit((order.group_id, header, group))
        except asyncio.CancelledError:
            outcome = Cancelled("the run is ending")
        except TimeoutError:
            outcome = InfraFailed(f"the group took longer than {self._settings.group_timeout_s:.0f} s")
        except (ray.exceptions.RayError, NoWorkerLeft) as error:
            outcome = InfraFailed(f"rollout worker: {_first_line(error)}")
        except TicketError as error:
            outcome = InfraFailed(f"replay buffer: {error}")
        if outcome is not None:
            await self._buffer.abandon.remote(order.group_id, outcome)

    async def _send_groups(self, groups: list[tuple[int, GroupHeader, ray.ObjectRef]]) -> list[str | Exception]:
        return await self._buffer.commit.remote(groups)

    async def _evaluate(self, method: str, order: GroupOrder, timeout_s: float, room: asyncio.Semaphore) -> Group:
        try:
            async with room:
                (group,) = await self._on_worker(method, order, timeout_s)
        except asyncio.CancelledError:
            group = _without_episodes(order, Cancelled(f"evaluation: {self._eval_ends}"))
        except (TimeoutError, ray.exceptions.RayError, NoWorkerLeft) as error:
            group = _without_episodes(order, InfraFailed(f"evaluation: {_first_line(error)}"))
        for trajectory in group.trajectories:
            self._eval_ledger.end(trajectory.trajectory_id, trajectory.outcome)
        return group

    async def _on_worker(self, method: str, order: GroupOrder, timeout_s: float) -> tuple[Any, ...]:
        """What the worker returns first, and references to what it returns besides."""
        living = await self._some_living()
        index = min(living, key=self._load.__getitem__)
        life = self._deaths[index]
        self._load[index] += 1
        returned = getattr(self._workers[index], method).remote(order)
        call, *others = returned if isinstance(returned, list) else [returned]
        try:
            return await asyncio.wait_for(call, timeout_s), *others
        except (asyncio.CancelledError, TimeoutError):
            # The worker cancels the group's episodes and closes their environments before the call ends. By default Ray
            # would cancel the calls it has made itself as well: a lease on its way back would never arrive.
            ray.cancel(call, recursive=False)
            await asyncio.wait([asyncio.ensure_future(_ended(call))], timeout=60.0)
            raise
        except ray.exceptions.RayActorError:
            await self._bury(index, life)
            raise
        finally:
            self._load[index] -= 1

    def _living(self) -> list[int]:
        return [index for index in range(len(self._workers)) if index not in self._dead]

    async def _some_living(self) -> list[int]:
        """Those that can be given work; waits for one that is being started again.

        Raises:
            NoWorkerLeft: there is none, and none will come back.
        """
        while not (living := self._living()):
            if not self._revivals:
                raise NoWorkerLeft("every rollout worker has died")
            await asyncio.wait(self._revivals.values(), return_when=asyncio.FIRST_COMPLETED)
        return living

    def _begin_watch(self) -> None:
        """From the first work on: until then workers are being started, by somebody who waits for that."""
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_workers())

    async def _watch_workers(self) -> None:
        """Nobody else would notice that a worker hangs before the deadlines of its groups."""
        now = asyncio.get_running_loop().time
        while True:
            await asyncio.gather(*(self._ask(index) for index in self._living()))
            for index in self._living():
                silent_s = now() - self._heard.setdefault(index, now())
                if silent_s > self._settings.worker_timeout_s:
                    logger.warning("%s is killed: it has said nothing for %.0f s", worker_name(index), silent_s)
                    ray.kill(self._workers[index], no_restart=False)
                    await self._bury(index, self._deaths[index])
            await asyncio.sleep(WATCH_PERIOD_S)

    async def _ask(self, index: int) -> None:
        life = self._deaths[index]
        try:
            limit_s = min(STATS_TIMEOUT_S, self._settings.worker_timeout_s)
            stats = await asyncio.wait_for(self._workers[index].stats.remote(), limit_s)
        except TimeoutError:
            return  # what it said last stays
        except ray.exceptions.RayActorError:
            stats = None
        if stats is None:
            await self._bury(index, life)
        elif index not in self._dead:
            self._workers_lag.extend(stats.pop("loop_lag"))
            self._stats[index] = stats
            self._heard[index] = asyncio.get_running_loop().time()

    async def _bury(self, index: int, life: int) -> None:
        """A worker is dead: it gets no more work, and its leases go back to the pool before it is made ready again.

        Args:
            life: how often it had died when it was seen alive; the news of a death may come after the next life began.
        """
        if index in self._dead or life < self._deaths[index]:
            return
        self._dead.add(index)
        self._deaths[index] += 1
        self._heard.pop(index, None)
        if counted := self._stats.pop(index, None):
            self._past.update(sampled_tokens=counted["sampled_tokens"], episodes=counted["episodes"])
            self._past_s.update(counted["episode_s"])
        if self._deaths[index] <= self._settings.worker_restarts:
            self._revivals[index] = asyncio.create_task(self._revive(index))
        else:
            await self._release_leases(index)

    async def _revive(self, index: int) -> None:
        try:
            # The next one has the same name: what is released later could be a lease of its own.
            await self._release_leases(index)
            ready = insist(lambda _: self._workers[index].start.remote(self._peers), self._settings.restart_timeout_s)
            await asyncio.wait_for(ready, self._settings.restart_timeout_s)
            self._dead.discard(index)
            logger.warning("%s works again", worker_name(index))
        except TimeoutError:
            await self._revive_anew(index)
        except ray.exceptions.RayError as error:
            logger.warning("%s did not come back: %s", worker_name(index), _first_line(error))
        finally:
            if self._revivals.get(index) is asyncio.current_task():
                del self._revivals[index]

    async def _revive_anew(self, index: int) -> None:
        """It hangs while it is made ready: one death more."""
        timeout_s = self._settings.restart_timeout_s
        logger.warning("%s is killed: it was not ready after %.0f s", worker_name(index), timeout_s)
        ray.kill(self._workers[index], no_restart=False)
        self._dead.discard(index)
        await self._bury(index, self._deaths[index])

    async def _release_leases(self, index: int) -> None:
        name = worker_name(index)
        try:
            returned = await release_owner(ray.get_actor(ACTOR_NAME), name, RELEASE_TIMEOUT_S)
        except (ValueError, TimeoutError, ray.exceptions.RayError) as error:
            # They end at their deadlines, or with the run.
            logger.warning("%s died, and its leases could not be given back: %s", name, _first_line(error))
            return
        logger.warning("%s died; %d leases of it were given back", name, returned)


def _without_episodes(order: GroupOrder, outcome: Outcome) -> Group:
    """A group of which nothing is known but how it ended."""
    task = order.task
    trajectories = [
        Trajectory(
            trajectory_id=episode_id,
            task_key=task.task_key,
            env_key=task.env_key,
            group_id=order.group_id,
            sample_index=index,
            ids=np.zeros(0, np.int32),
            mask=np.zeros(0, np.uint8),
            logprobs=np.zeros(0, np.float32),
            prompt_length=0,
            spans=[],
            stop_reason=StopReason.ERROR,
            outcome=outcome,
        )
        for index, episode_id in enumerate(order.episode_ids)
    ]
    return Group(order.group_id, task.task_key, task.env_key, trajectories)


async def _ended(call: Any) -> None:
    try:
        await call
    except ray.exceptions.RayError:
        return


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]
