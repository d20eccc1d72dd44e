"""EnvPool: the actor that owns the run's instances, and what a RolloutWorker holds of it."""

from __future__ import annotations

import asyncio
import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any

import ray

from actors.config import DeadlinesConfig
from actors.env_pool_core import CloseReport, EnvPoolCore, Lease, NoInstance, PoolSettings
from actors.envs.fleet import FleetControl, FleetFailure, FleetTaskEnv, close_clients
from actors.garbage import search_seldom
from actors.lease_table import EnvSpec
from actors.task import Task
from serve.loop_lag import LoopLag

ACTOR_NAME = "env_pool"
RELEASE_TIMEOUT_S = 60.0  # for a worker that gives a lease back; its episode usually allows less
RESTART_PAUSE_S = 0.5  # between two calls of a pool that has died and that Ray starts again
# Everybody who waits for an instance occupies one call of the actor; Ray's default of 1000 would be a hidden queue.
MAX_CONCURRENT_CALLS = 20_000


logger = logging.getLogger(__name__)


@ray.remote(num_cpus=0, max_concurrency=MAX_CONCURRENT_CALLS, max_restarts=3)
class EnvPool:
    """Named actor: settings in, leases out. Call ``start`` first: a control plane that refuses shows there.

    An actor that Ray restarts starts its core again on the next call, and takes its instances over.
    """

    def __init__(self, settings: PoolSettings, api_key: str | None = None, base_url: str | None = None) -> None:
        self._settings = settings
        self._api_key = api_key
        self._base_url = base_url
        self._core: EnvPoolCore | None = None
        self._starting = asyncio.Lock()
        self._loop_lag = LoopLag()

    async def start(self) -> CloseReport | None:
        """Make the pool ready; returns what it cleaned up. None: it was ready."""
        async with self._starting:
            if self._core is not None:
                return None
            core = EnvPoolCore(FleetControl(self._api_key, self._base_url), self._settings)
            report = await core.start()
            self._core = core
            search_seldom()
            return report

    async def acquire(self, spec: EnvSpec, timeout_s: float, owner: str, lease_id: str) -> Lease:
        await self.start()
        return await self._core.acquire(spec, timeout_s, owner=owner, lease_id=lease_id)

    async def release(self, lease_id: str, reusable: bool) -> bool:
        await self.start()
        return await self._core.release(lease_id, reusable)

    async def release_owner(self, owner: str) -> int:
        await self.start()
        return await self._core.release_owner(owner)

    async def close_all(self, timeout_s: float = 60.0) -> CloseReport:
        await self.start()
        report = await self._core.close_all(timeout_s)
        await close_clients()
        return report

    async def stats(self) -> dict[str, Any]:
        """As :meth:`EnvPoolCore.stats`; and ``loop_lag``, how late the actor's loop was since the last call."""
        await self.start()
        return self._core.stats() | {"loop_lag": self._loop_lag.take()}


def create_env_pool(
    settings: PoolSettings, api_key: str | None = None, base_url: str | None = None, *, namespace: str | None = None
) -> Any:
    """The named actor's handle. ``start`` is the first thing to call on it."""
    return EnvPool.options(name=ACTOR_NAME, namespace=namespace).remote(settings, api_key, base_url)


async def release_owner(actor: Any, owner: str, timeout_s: float) -> int:
    """As :meth:`EnvPoolCore.release_owner`, also of a pool that is being started again.

    Raises:
        RayActorError: the pool is gone for good, or did not come back in time.
    """
    return await insist(lambda left_s: actor.release_owner.remote(owner), timeout_s)


async def insist(call: Callable[[float], Any], timeout_s: float) -> Any:
    """The answer of a call that may be made twice. A pool that dies is asked again once Ray has started it anew; one
    that could not take its instances over, because the control plane failed, tries that again.

    Args:
        call: makes the actor call, given the seconds that are left for it.

    Raises:
        ActorDiedError: the actor is gone for good, at once. Of one that is being started again Ray says
            ``ActorUnavailableError``.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_s
    while True:
        left_s = max(0.1, deadline - loop.time())
        try:
            # The pool's own answer says more than ours would, so it gets the time to arrive.
            return await asyncio.wait_for(call(left_s), left_s + 10.0)
        except ray.exceptions.ActorDiedError:
            raise
        except (ray.exceptions.RayActorError, FleetFailure):
            if loop.time() + RESTART_PAUSE_S >= deadline:
                raise
        await asyncio.sleep(RESTART_PAUSE_S)


class PoolClient(ABC):
    """A pool as an episode sees it: environments to open.

    Args:
        api_key, base_url: of the control plane, for what is done on an instance itself.
    """

    def __init__(self, api_key: str | None = None, base_url: str | None = None) -> None:
        self._api_key = api_key
        self._base_url = base_url

    @abstractmethod
    async def acquire(self, spec: EnvSpec, timeout_s: float) -> Lease:
        """As :meth:`EnvPoolCore.acquire`."""

    @abstractmethod
    async def release(self, lease_id: str, reusable: bool) -> bool:
        """As :meth:`EnvPoolCore.release`."""

    async def open(self, task: Task, deadlines: DeadlinesConfig, *, partial_reward: bool = False) -> FleetTaskEnv:
        """An environment for one episode on a leased instance; its close gives the lease back.

        Its steps are unbounded and ungraded: the episode counts turns, and grades in a phase of its own.
        """
        # Answer before the caller's own deadline for the phase, to be heard.
        timeout_s = max(0.8 * deadlines.provision, deadlines.provision - 2.0)
        lease = await self.acquire(EnvSpec.of(task), timeout_s)
        return FleetTaskEnv(
            task,
            self._api_key,
            lease=lease,
            give_back=self.release,
            base_url=self._base_url,
            max_steps=None,
            grade_on_done=False,
            deadlines=deadlines,
            partial_reward=partial_reward,
        )


class EnvPoolClient(PoolClient):
    """A worker's side of the pool. Nothing that is cancelled here keeps an instance.

    Args:
        actor: handle of :class:`EnvPool`.
        owner: the worker's name; see :meth:`EnvPoolCore.release_owner`.
    """

    def __init__(self, actor: Any, *, api_key: str | None = None, base_url: str | None = None, owner: str = "") -> None:
        super().__init__(api_key, base_url)
        self._actor = actor
        self._owner = owner
        self._releases: set[asyncio.Task[Any]] = set()

    async def acquire(self, spec: EnvSpec, timeout_s: float) -> Lease:
        lease_id = uuid.uuid4().hex
        acquiring = asyncio.create_task(
            insist(lambda left_s: self._actor.acquire.remote(spec, left_s, self._owner, lease_id), timeout_s)
        )
        try:
            return await asyncio.shield(acquiring)
        except NoInstance:
            raise
        except BaseException:
            # A pool that died with its answer under way has the lease in its table, and so has the next one.
            self._keep(self._withdraw(lease_id, acquiring))
            raise

    async def _withdraw(self, lease_id: str, acquiring: asyncio.Task[Lease]) -> None:
        """End a call that nobody waits for. It waits still, or it was granted and nobody has touched the lease; or it
        reaches a pool that is being started after its own withdrawal did, and is granted then."""
        if not acquiring.done():
            self._actor.release.remote(lease_id, True)
        await asyncio.wait([acquiring])
        if not isinstance(acquiring.exception(), NoInstance):
            await insist(lambda _: self._actor.release.remote(lease_id, True), RELEASE_TIMEOUT_S)

    async def release(self, lease_id: str, reusable: bool) -> bool:
        # A lease that a dying pool was given back is still lent in the table it left behind. A pool may take longer to
        # come back than an episode has for its close: whoever gives up waiting does not end the call.
        call = insist(lambda _: self._actor.release.remote(lease_id, reusable), RELEASE_TIMEOUT_S)
        return await asyncio.shield(self._keep(call))

    def _keep(self, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """A call that goes on whoever stops waiting for it."""
        release = asyncio.create_task(call)
        self._releases.add(release)
        release.add_done_callback(self._released)
        return release

    def _released(self, release: asyncio.Task[Any]) -> None:
        self._releases.discard(release)
        if not release.cancelled() and (error := release.exception()) is not None:
            logger.warning("a lease could not be given back and waits for its deadline: %s", error)


class LocalPoolClient(PoolClient):
    """The same for a pool in this process and on this loop: for programs that need no Ray."""

    def __init__(self, core: EnvPoolCore, *, api_key: str | None = None, base_url: str | None = None) -> None:
        super().__init__(api_key, base_url)
        self._core = core

    async def acquire(self, spec: EnvSpec, timeout_s: float) -> Lease:
        return await self._core.acquire(spec, timeout_s)

    async def release(self, lease_id: str, reusable: bool) -> bool:
        return await self._core.release(lease_id, reusable)
