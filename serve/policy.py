"""The policy as a Ray Serve application: replicas around an engine each, and the client everybody talks to it with."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any, Protocol

import ray
from ray import serve
from ray.exceptions import ActorDiedError, OwnerDiedError, RayError, RayTaskError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

from serve.config import PolicyConfig
from serve.engine_errors import EngineDead, ModelRefused
from serve.fork_server import close_fork_server, start_fork_server
from serve.loop_lag import LoopLag
from serve.quick_loading import quick_loading
from serve.sampling import Completion, Sampling
from serve.shared_folder import SharedFolder, remove_abandoned
from serve.side_thread import in_thread
from serve.state_clock import StateClock
from serve.weight_routes import Invitation, Member, RouteSetting, WeightUpdate

if TYPE_CHECKING:
    from serve.engine import Engine, UpdateReport

DEPLOYMENT = "Policy"
HEALTH_PERIOD_S = 2.0
STATUS_POLL_S = 0.2
SHUTDOWN_TIMEOUT_S = 30.0
CONSTRUCTOR_TRIES = 2
GENERATE_TRIES = 3
RETRY_PAUSE_S = 1.0  # for the router to learn of a death
ROLL_CALL_TIMEOUT_S = 10.0  # a replica answers at once, whatever its engine does
# Serve's defaults favour user code that blocks: they run it, and each caller's router, on threads of their own. Ours
# never blocks, and the hops between threads cost more than the request itself.
REPLICA_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
CALLER_ENVIRONMENT = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}  # for actors that only await the policy

_ENGINE_SAID = re.compile(rf"(?:{EngineDead.__name__}|{ModelRefused.__name__}): ")  # in a traceback
logger = logging.getLogger(__name__)


class PolicyUpdateError(RuntimeError):
    """Some replica does not hold the version it was told to load. The message names replica and reason."""


class PolicyStartError(RuntimeError):
    """The policy did not become healthy. The message says why."""


class Collective(Protocol):
    """The learner's part in an update that all replicas and it perform together."""

    def run(self) -> None:
        """Returns when it is done, or raises."""

    def abort(self) -> None:
        """End a ``run`` that hangs, from another thread."""


class Policy:
    """One replica: an engine that holds the published weights, or is unhealthy.

    An engine that dies is replaced here, which takes the time to load the model; Serve replaces a replica, which has to
    import vLLM first. Requests wait meanwhile, and those that were in the dead engine begin again.
    """

    async def __init__(self, config: PolicyConfig, model_path: str, weight_store: Any | None, app_name: str) -> None:
        """Returns once the engine runs with the version the weight store has published.

        Args:
            weight_store: actor handle of :class:`actors.weight_store.WeightStore`; ``None`` serves the model as it is.
        """
        remove_abandoned()
        self._config = config
        self._model_path = model_path
        self._app_name = app_name
        self._store = weight_store
        self._catching_up = asyncio.Lock()
        self._abandoned = 0  # version of the last update that the learner gave up
        self._report: UpdateReport | None = None
        self._replica = serve.get_replica_context().replica_id.unique_id
        self._engine: Engine | None = None
        self._renewal: asyncio.Task[None] | None = None  # under way, or failed
        self._closing = False
        self._ended: Counter[str] = Counter()  # what the engines before this one did
        self._loop_lag = LoopLag()
        self._time_spent = StateClock()
        start_fork_server(config, app_name)
        await self._start_engine()
        self._began = time.monotonic() - sum(self._time_spent.seconds().values())

    async def _start_engine(self) -> None:
        """Returns once there is one that holds what is published."""
        with quick_loading():  # vLLM takes seconds to import; callers of the policy do without
            from serve.engine import Engine

        began = time.monotonic()
        limit_s = self._config.startup_timeout_s
        version, ref = await self._published()
        self._folder = SharedFolder(self._app_name)
        at_model_path = version if ref is None else 0
        engine = await Engine.start(
            self._config, self._model_path, self._folder, at_model_path, time_spent=self._time_spent
        )
        if self._engine is not None:
            self._ended.update(
                finished_requests=self._engine.finished_requests, sampled_tokens=self._engine.sampled_tokens
            )
        self._engine = engine
        engine_s = time.monotonic() - began
        try:
            async with asyncio.timeout(limit_s):
                await self._catch_up(wait=True)
        except BaseException as error:
            await self._engine.shutdown()
            if isinstance(error, TimeoutError):
                late = f"the snapshot of the newest version did not arrive within {limit_s:g} s"
                raise EngineDead(late) from None
            raise
        logger.info("replica %s serves version %d, engine up in %.1f s", self._replica, self._engine.version, engine_s)

    async def _living_engine(self) -> Engine:
        """The engine that requests may be given; another one, if it has died.

        Raises:
            EngineDead: there will be none in this replica.
        """
        if self._engine.dead:
            self._begin_renewal()
        if self._renewal is not None:
            await asyncio.shield(self._renewal)
        return self._engine

    def _begin_renewal(self) -> None:
        if self._renewal is None and not self._closing:
            self._renewal = asyncio.create_task(self._renew())

    async def _renew(self) -> None:
        dead = self._engine
        if dead.finished_requests < 2:
            dead.require_alive()  # it answered nothing since its start: another one would fare no better
        logger.warning("replica %s: a new engine takes the place of the one that died", self._replica)
        await self._start_engine()
        self._renewal = None

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, cache_salt: str | None
    ) -> Completion:
        """See :meth:`serve.engine.Engine.generate`. A request whose engine dies begins again, once."""
        engine = await self._living_engine()
        try:
            return await engine.generate(prompt_ids, sampling, request_id=request_id, cache_salt=cache_salt)
        except EngineDead:
            engine = await self._living_engine()
        return await engine.generate(prompt_ids, sampling, request_id=request_id, cache_salt=cache_salt)

    async def roll_call(self) -> Member:
        """What a publication needs to know of this replica.

        Raises:
            EngineDead: it has none that is ready.
        """
        self._engine.require_alive()
        if self._renewal is not None:
            raise EngineDead("a new engine is being started")
        return Member(self._replica, self._engine.gpus, self._engine.version, self._engine.epoch)

    async def join_group(self, invitation: Invitation) -> dict[str, Any]:
        """Join the broadcast group, if invited. Returns ``replica`` and ``error`` (``None`` if all went well)."""
        offset = invitation.offsets.get(self._replica)
        if offset is None:
            return {"replica": self._replica, "error": None}
        return await self._answer(self._engine.join(invitation, offset))

    async def update_weights(self, version: int) -> dict[str, Any]:
        """Load the newest published snapshot, which must be ``version``.

        Returns:
            ``replica``, ``version`` as it is now, ``error`` (``None`` if all went well), and of the last update
            ``seconds`` by phase and ``checksums`` of the tensors that were compared; ``time_spent`` so far, in seconds
            by what it did, and ``loop_lag``, seconds that its event loop was late, since the last update.
        """
        result = await self._answer(self._catch_up_alive())
        if result["error"] is None and result["version"] != version:
            result["error"] = f"it holds version {result['version']}, not {version}"
        return result | self._load_report()

    async def receive_weights(self, update: WeightUpdate) -> dict[str, Any]:
        """Load what the learner sends, if this replica is among those it is sent to.

        A replica that is not was unknown when the learner called the roll: it loads the snapshot that follows.

        Returns:
            As :meth:`update_weights`, and ``member``: whether it was meant.
        """
        result = await self._answer(self._receive(update))
        return result | self._load_report() | {"member": self._replica in update.members}

    async def _receive(self, update: WeightUpdate) -> None:
        if self._replica not in update.members:
            return
        async with self._catching_up:
            if update.version <= self._abandoned:
                raise PolicyUpdateError("the learner gave it up before it began")
            if update.route == "nccl" and update.epoch != self._engine.epoch:
                raise PolicyUpdateError(f"it is in the broadcast group {self._engine.epoch}, not {update.epoch}")
            if update.version > self._engine.version:
                self._report = await self._engine.receive(update)

    async def abandon_update(self, version: int, reason: str) -> None:
        """Some member of the group is gone, and so the weights of ``version`` will not come: this engine ends too."""
        self._abandoned = version
        if self._engine.version < version:
            await self._engine.abandon(f"update to version {version} abandoned: {reason}")

    async def _answer(self, work: Coroutine[Any, Any, None]) -> dict[str, Any]:
        """The result of an update, whatever became of it."""
        result: dict[str, Any] = {"replica": self._replica, "error": None}
        try:
            await work
        except (RuntimeError, ValueError, OSError, RayError) as error:
            result["error"] = str(error)
        result |= {"version": self._engine.version, "seconds": {}, "checksums": {}}
        if self._report is not None:
            result |= {"seconds": self._report.seconds, "checksums": self._report.checksums}
        return result

    def _load_report(self) -> dict[str, Any]:
        spent = self._time_spent.seconds()
        # An engine that is dead counts nothing, and neither does one that is not made yet.
        spent["down"] = max(0.0, time.monotonic() - self._began - sum(spent.values()))
        return {"time_spent": spent, "loop_lag": self._loop_lag.take()}

    async def _catch_up_alive(self) -> None:
        await self._living_engine()
        await self._catch_up()

    async def _catch_up(self, wait: bool = False) -> None:
        """Load what the weight store has published, until it has nothing newer.

        One at a time: an announced update and a health check may see the same new version, and whoever loads it first
        removes the file that the other would read.

        Args:
            wait: for a snapshot that is still on its way to the store. A replica that starts must hold it; one that
                runs may be getting the same weights from the learner this moment.
        """
        async with self._catching_up:
            while (published := await self._published(wait))[0] > self._engine.version:
                try:
                    self._report = await self._load(*published)
                except OwnerDiedError:  # the weight store has died since; the next one says what there is
                    continue
                wait = False  # or a learner that publishes faster than this loads would keep it waiting

    async def _published(self, wait: bool = False) -> tuple[int, ray.ObjectRef | None]:
        """Newest version and its snapshot. Without a weight store, and so without its run, the policy ends."""
        if self._store is None:
            return 0, None
        try:
            return await self._store.latest.remote(wait)
        except ActorDiedError:
            logger.error("the weight store is gone, so is the run of %s: the policy ends", self._app_name)
            await asyncio.to_thread(serve.delete, self._app_name, _blocking=False)
            raise

    async def _load(self, version: int, ref: ray.ObjectRef) -> UpdateReport:
        self._engine.require_alive()  # the files of a dead one are gone
        began = time.monotonic()
        snapshot = await ref
        with self._folder.snapshot_file(snapshot, version) as path:
            fetched_s = time.monotonic() - began
            report = await self._engine.update(path, version)
        report.seconds["fetch"] = fetched_s
        return report

    async def stats(self) -> dict[str, Any]:
        """What this replica has done so far, and what it is doing."""
        engine = self._engine
        return {
            "replica": self._replica,
            "version": engine.version,
            "requests_in_flight": engine.requests_in_flight,
            "finished_requests": engine.finished_requests + self._ended["finished_requests"],
            "sampled_tokens": engine.sampled_tokens + self._ended["sampled_tokens"],
        }

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica for which this raises three times in a row.

        Also closes the gap in which weights were published while this replica was not yet known to those who announce
        them.
        """
        if self._renewal is None:
            try:
                await self._engine.check()
                await self._catch_up()
            except EngineDead:
                self._begin_renewal()
        # It has a deadline of its own, and the replica is healthy until it has failed.
        if self._renewal is not None and self._renewal.done():
            self._renewal.result()

    async def __del__(self) -> None:
        self._closing = True
        if self._renewal is not None:
            self._renewal.cancel()
            await asyncio.wait([self._renewal], timeout=SHUTDOWN_TIMEOUT_S)
        if self._engine is not None:
            await self._engine.shutdown()
        close_fork_server()


class PolicyClient:
    """What actors hold of the policy. Can be pickled into them."""

    def __init__(self, app_name: str, handle: DeploymentHandle, config: PolicyConfig) -> None:
        """Use :func:`deploy_policy`."""
        self.route: RouteSetting = config.weight_transfer
        self.check_weights = config.check_weights
        self._app_name = app_name
        self._num_replicas = config.num_replicas
        self._replicas = _Replicas(handle)
        # Serve's gRPC transport instead of actor calls: 1.6 ms of CPU for a request in place of 2.9, on both sides
        # together, because an actor call that Serve may reject is a stream, whose items pass through threads.
        self._requests = handle.options(_by_reference=False)
        self._sticky = _sticky(config)  # requests of a session go to one replica

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: Sampling,
        *,
        request_id: str,
        session_id: str = "",
        cache_salt: str | None = None,
    ) -> Completion:
        """Sample one turn on some replica; see :meth:`serve.engine.Engine.generate` for what it raises besides.

        The caller bounds the time it takes. A turn whose replica dies begins again on another, or on its successor: it
        has changed nothing, and its prompt holds all of the episode.

        Args:
            session_id: requests of one session meet the replica that knows their prefix.

        Raises:
            RayError: one replica after the other died or could not be reached.
        """
        handle = self._requests.options(session_id=session_id) if self._sticky and session_id else self._requests
        for attempt in range(1, GENERATE_TRIES + 1):
            response = handle.generate.remote(list(prompt_ids), sampling, request_id, cache_salt)
            try:
                return await response
            except asyncio.CancelledError:
                response.cancel()  # else the replica would go on sampling for nobody
                raise
            except RayError as error:
                if attempt == GENERATE_TRIES or not _died(error):
                    raise
                logger.info("request %s begins again elsewhere: %s", request_id, error)
            await asyncio.sleep(RETRY_PAUSE_S)

    def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Have all replicas load the newest published weights at once, and wait for them.

        A replica that starts meanwhile loads them before it is healthy.

        Returns:
            What :meth:`Policy.update_weights` returns, for each replica.

        Raises:
            PolicyUpdateError: a replica failed, died, or did not confirm ``version`` in time. Replicas that failed
                answer nothing any more and are being replaced.
        """
        results = self._replicas.ask("update_weights", version, timeout_s=timeout_s)
        _raise_failures(version, results)
        return results

    def roll_call(self, timeout_s: float = ROLL_CALL_TIMEOUT_S) -> list[Member]:
        """The replicas that can take part in an update now. Those that are starting or dying do not answer."""
        try:
            answers = list(self._replicas.answers("roll_call", timeout_s=timeout_s))
        except PolicyUpdateError:
            return []
        return [answer for answer in answers if isinstance(answer, Member)]

    def join_group(self, invitation: Invitation) -> list[str]:
        """Have the invited replicas join a broadcast group. Returns what went wrong, one line each."""
        answers = self._replicas.ask("join_group", invitation, timeout_s=invitation.timeout_s + ROLL_CALL_TIMEOUT_S)
        return _failures(answers)

    def transfer(
        self, update: WeightUpdate, timeout_s: float, collective: Collective | None = None
    ) -> list[dict[str, Any]]:
        """Have all members take ``update`` from the learner at once, and wait for them.

        A collective runs beside the call that it belongs to, because only the call tells of a replica that fails. Then
        those that still wait for weights are ended, too, for they would wait for ever: half-loaded.

        Returns:
            What :meth:`Policy.receive_weights` returns, for each member.

        Raises:
            PolicyUpdateError: a member failed, died, or did not confirm in time; see :meth:`update`.
        """
        running = None if collective is None else in_thread(collective.run)
        results: list[Any] = []
        given_up = False
        for answer in self._replicas.answers("receive_weights", update, timeout_s=timeout_s):
            results.append(answer)
            sent = running is None or (running.done() and running.exception() is None)  # then nobody waits for more
            if not sent and not given_up and self._lost(answer, update.members):
                given_up = True
                collective.abort()
                self.abandon(update.version, "a replica failed")
        if running is not None and not given_up:
            results += _outcome(running, collective, timeout_s)
        meant = [result for result in results if isinstance(result, Exception) or result["member"]]
        _raise_failures(update.version, meant)
        missing = set(update.members) - {result["replica"] for result in meant}
        if missing:
            raise PolicyUpdateError(f"update to version {update.version}: no answer from {', '.join(sorted(missing))}")
        return meant

    def abandon(self, version: int, reason: str) -> None:
        """End the engines that wait for an update, ``version`` at most, that will not come. One that does not answer is
        ended by Serve."""
        for _ in self._replicas.answers("abandon_update", version, reason, timeout_s=ROLL_CALL_TIMEOUT_S):
            pass

    def _lost(self, answer: Any, members: Sequence[str]) -> bool:
        """Whether an answer means that some member will not do its part of a collective."""
        if isinstance(answer, dict):
            return answer["member"] and answer["error"] is not None
        if isinstance(answer, TimeoutError):
            return True
        # The answer of the dead does not say who they were; perhaps no member.
        return not set(members) <= {member.replica for member in self.roll_call()}

    def holds(self, version: int) -> bool:
        """Whether some replica has ``version`` or a newer one."""
        return any(member.version >= version for member in self.roll_call())

    def versions(self, timeout_s: float = 60.0) -> list[int]:
        """The version of each replica."""
        return [stats["version"] for stats in self.stats(timeout_s)]

    def stats(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """What :meth:`Policy.stats` returns, for each replica that answers."""
        answers = self._replicas.ask("stats", timeout_s=timeout_s)
        return [answer for answer in answers if isinstance(answer, dict)]

    def wait_until_healthy(self, timeout_s: float) -> None:
        """Return once every replica is healthy, and can be reached from here.

        Raises:
            PolicyStartError: a replica failed to start, or not all were healthy in time.
        """
        deadline = time.monotonic() + timeout_s
        _wait_until_running(self._app_name, timeout_s)
        # Serve's controller knows of its replicas before its handles do: a second or more on a busy machine.
        while self._reachable() < self._num_replicas:
            if time.monotonic() > deadline:
                raise PolicyStartError(f"the policy's replicas are running, but not all answer within {timeout_s:g} s")
            time.sleep(STATUS_POLL_S)

    def _reachable(self) -> int:
        try:
            return len(self.stats(ROLL_CALL_TIMEOUT_S))
        except PolicyUpdateError:
            return 0

    def shutdown(self) -> None:
        """End the replicas and wait until they are gone. Idempotent.

        Serve's own controller stays, as part of the Ray cluster: other applications may use it, and it ends with Ray.
        """
        if ray.is_initialized() and self._app_name in serve.status().applications:
            serve.delete(self._app_name)
            remove_abandoned()  # of replicas that were killed, for example while they started


def _died(error: RayError) -> bool:
    """Whether the replica is at fault, and not the request."""
    return isinstance(error, EngineDead) or not isinstance(error, RayTaskError)


class _Replicas:
    """Reaches every running replica in one call.

    The only place that knows Serve's ``broadcast``: Ray 2.60 calls it alpha, and its answers can only be had all at
    once, where a failure must be known before the others have answered.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle

    def ask(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        """The answer of each replica, or the exception in its place, in any order.

        Raises:
            PolicyUpdateError: there is no replica, or one did not answer in time.
        """
        answers = list(self.answers(method, *args, timeout_s=timeout_s))
        if late := [answer for answer in answers if isinstance(answer, TimeoutError)]:
            raise PolicyUpdateError(f"{method}: {len(late)} replicas did not answer within {timeout_s:g} s")
        return answers

    def answers(self, method: str, *args: Any, timeout_s: float) -> Iterator[Any]:
        """As :meth:`ask`, each as it comes; a late one is a ``TimeoutError``."""
        try:
            calls = self._handle.broadcast(method, *args)._fetch_replica_results_sync(timeout_s)
        except TimeoutError:
            raise PolicyUpdateError(f"{method}: no replica answers within {timeout_s:g} s") from None
        except RayServeException as error:
            raise PolicyUpdateError(f"{method}: no replica answers: {error}") from None
        if not calls:
            raise PolicyUpdateError(f"{method}: no replica answers: none is running")
        with ThreadPoolExecutor(len(calls)) as threads:
            for answered in as_completed([threads.submit(call.get, timeout_s) for call in calls]):
                yield answered.exception() or answered.result()


def _outcome(running: Future[None], collective: Collective, timeout_s: float) -> list[Exception]:
    """What went wrong in the learner's part of an update, which is ended if it takes too long."""
    try:
        running.result(timeout_s)
    except TimeoutError:
        collective.abort()
        return [TimeoutError(f"the learner's part took over {timeout_s:g} s")]
    except Exception as error:
        return [error]
    return []


def _failures(answers: Sequence[Any]) -> list[str]:
    return [
        f"replica {answer['replica']}: {answer['error']}" if isinstance(answer, dict) else str(answer)
        for answer in answers
        if not isinstance(answer, dict) or answer["error"] is not None
    ]


def _raise_failures(version: int, answers: Sequence[Any]) -> None:
    if failures := _failures(answers):
        raise PolicyUpdateError(f"update to version {version}: {'; '.join(failures)}")


def deploy_policy(config: PolicyConfig, model_path: str, weight_store: Any | None, app_name: str) -> PolicyClient:
    """Have the policy's replicas started; see :meth:`PolicyClient.wait_until_healthy`.

    Args:
        model_path: folder (or name in the local Hugging Face cache) of the model that is version 0.
        weight_store: see :class:`Policy`.
        app_name: of the Serve application, as the dashboard shows it.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # No proxies: nobody speaks HTTP to the policy, and each would cost a process.
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False))
    application = _deployment(config).bind(config, model_path, weight_store, app_name)
    handle = serve.run_many(
        [serve.RunTarget(application, name=app_name, route_prefix=None)], wait_for_applications_running=False
    )[0]
    return PolicyClient(app_name, handle, config)


def _sticky(config: PolicyConfig) -> bool:
    return config.num_replicas > 1


def _deployment(config: PolicyConfig) -> serve.Deployment:
    options: dict[str, Any] = {}
    if _sticky(config):
        options["request_router_config"] = RequestRouterConfig(
            request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
        )
    return serve.deployment(
        Policy,
        name=DEPLOYMENT,
        num_replicas=config.num_replicas,
        max_ongoing_requests=config.request_limit,
        max_constructor_retry_count=CONSTRUCTOR_TRIES,
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=config.health_timeout_s + config.update_timeout_s,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=SHUTDOWN_TIMEOUT_S,
        logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False),
        ray_actor_options={
            "num_cpus": config.num_cpus,
            "num_gpus": config.num_gpus,
            "runtime_env": {"env_vars": config.environment() | REPLICA_ENVIRONMENT},
        },
        **options,
    )


def _wait_until_running(app_name: str, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        application = serve.status().applications[app_name]
        if application.status == ApplicationStatus.RUNNING:
            return
        said = " ".join(deployment.message for deployment in application.deployments.values()) or application.message
        failed = application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY)
        if failed or f"{ModelRefused.__name__}: " in said:  # of which Serve says that it tries again
            raise PolicyStartError(f"the policy did not start: {_reason(said)}")
        if time.monotonic() > deadline:
            raise PolicyStartError(f"the policy was not healthy within policy.startup_timeout_s {timeout_s:g} s")
        time.sleep(STATUS_POLL_S)


def _reason(message: str) -> str:
    """The engine's own words in the traceback that Serve reports, else the traceback's last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    reason = next((line for line in reversed(lines) if _ENGINE_SAID.search(line)), lines[-1])
    return f"{_ENGINE_SAID.split(reason)[-1]} (more in its worker's log, usually in /tmp/ray/session_latest/logs)"
