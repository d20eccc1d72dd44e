"""The policy as a Ray Serve application: replicas around an engine each, and the client everybody talks to it with."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import serve
from ray.exceptions import ActorDiedError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import ApplicationStatus, LoggingConfig

from serve.config import PolicyConfig
from serve.sampling import Completion, Sampling
from serve.weight_transfer import SharedFolder, remove_abandoned

if TYPE_CHECKING:
    from serve.engine import Engine, UpdateReport

DEPLOYMENT = "Policy"
HEALTH_PERIOD_S = 2.0
STATUS_POLL_S = 0.2
SHUTDOWN_TIMEOUT_S = 30.0
CONSTRUCTOR_TRIES = 2
# Serve's defaults favour user code that blocks: they run it, and each caller's router, on threads of their own. Ours
# never blocks, and the hops between threads cost more than the request itself.
REPLICA_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
CALLER_ENVIRONMENT = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}  # for actors that only await the policy

logger = logging.getLogger(__name__)


class PolicyUpdateError(RuntimeError):
    """Some replica does not hold the version it was told to load. The message names replica and reason."""


class PolicyStartError(RuntimeError):
    """The policy did not become healthy. The message says why."""


class Policy:
    """One replica: an engine that holds the published weights, or is unhealthy."""

    async def __init__(self, config: PolicyConfig, model_path: str, weight_store: Any | None, app_name: str) -> None:
        """Returns once the engine runs with the version the weight store has published.

        Args:
            weight_store: actor handle of :class:`actors.weight_store.WeightStore`; ``None`` serves the model as it is.
        """
        from serve.engine import Engine  # vLLM takes seconds to import; callers of the policy do without

        began = time.monotonic()
        remove_abandoned()
        self._app_name = app_name
        self._store = weight_store
        self._catching_up = asyncio.Lock()
        self._report: UpdateReport | None = None
        self._replica = serve.get_replica_context().replica_id.unique_id
        version, ref = await self._published()
        self._folder = SharedFolder(app_name)
        at_model_path = version if ref is None else 0
        self._engine: Engine = await Engine.start(config, model_path, self._folder, at_model_path)
        engine_s = time.monotonic() - began
        try:
            await self._catch_up()
        except BaseException:
            await self._engine.shutdown()
            raise
        logger.info("replica %s serves version %d, engine up in %.1f s", self._replica, self._engine.version, engine_s)

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, request_id: str, cache_salt: str | None
    ) -> Completion:
        """See :meth:`serve.engine.Engine.generate`."""
        return await self._engine.generate(prompt_ids, sampling, request_id=request_id, cache_salt=cache_salt)

    async def update_weights(self, version: int) -> dict[str, Any]:
        """Load the newest published weights, which must be ``version``.

        Returns:
            ``replica``, ``version`` as it is now, ``error`` (``None`` if all went well), and of the last update
            ``seconds`` by phase and ``checksums`` of a sample of the tensors.
        """
        result: dict[str, Any] = {"replica": self._replica, "error": None}
        try:
            await self._catch_up()
        except (RuntimeError, ValueError, OSError, RayError) as error:
            result["error"] = str(error)
        result |= {"version": self._engine.version, "seconds": {}, "checksums": {}}
        if self._report is not None:
            result |= {"seconds": self._report.seconds, "checksums": self._report.checksums}
        if result["error"] is None and result["version"] != version:
            result["error"] = f"it holds version {result['version']}, not {version}"
        return result

    async def _catch_up(self) -> None:
        """Load what the weight store has published, until it has nothing newer.

        One at a time: an announced update and a health check may see the same new version, and whoever loads it first
        removes the file that the other would read.
        """
        async with self._catching_up:
            while (published := await self._published())[0] > self._engine.version:
                self._report = await self._load(*published)

    async def _published(self) -> tuple[int, ray.ObjectRef | None]:
        """Newest version and its snapshot. Without a weight store, and so without its run, the policy ends."""
        if self._store is None:
            return 0, None
        try:
            return await self._store.latest.remote()
        except ActorDiedError:
            logger.error("the weight store is gone, so is the run of %s: the policy ends", self._app_name)
            await asyncio.to_thread(serve.delete, self._app_name, _blocking=False)
            raise

    async def _load(self, version: int, ref: ray.ObjectRef) -> UpdateReport:
        began = time.monotonic()
        snapshot = await ref
        with self._folder.snapshot_file(snapshot, version) as path:
            fetched_s = time.monotonic() - began
            report = await self._engine.update(path, version)
        report.seconds["fetch"] = fetched_s
        return report

    async def version(self) -> int:
        return self._engine.version

    async def stats(self) -> dict[str, Any]:
        """What this replica has done so far, and what it is doing."""
        engine = self._engine
        return {
            "replica": self._replica,
            "version": engine.version,
            "requests_in_flight": engine.requests_in_flight,
            "finished_requests": engine.finished_requests,
            "sampled_tokens": engine.sampled_tokens,
        }

    async def check_health(self) -> None:
        """Called by Serve, which replaces a replica for which this raises three times in a row.

        Also closes the gap in which weights were published while this replica was not yet known to those who announce
        them.
        """
        await self._engine.check()
        await self._catch_up()

    async def __del__(self) -> None:
        await self._engine.shutdown()


class PolicyClient:
    """What actors hold of the policy. Can be pickled into them."""

    def __init__(self, app_name: str, handle: DeploymentHandle, sticky: bool) -> None:
        """Use :func:`deploy_policy`. ``sticky`` keeps the requests of a session on one replica."""
        self._app_name = app_name
        self._handle = handle
        # Serve's gRPC transport instead of actor calls: 1.6 ms of CPU for a request in place of 2.9, on both sides
        # together, because an actor call that Serve may reject is a stream, whose items pass through threads.
        self._requests = handle.options(_by_reference=False)
        self._sticky = sticky

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

        Args:
            session_id: requests of one session meet the replica that knows their prefix.

        Raises:
            RayError: the replica died or cannot be reached.
        """
        handle = self._requests.options(session_id=session_id) if self._sticky and session_id else self._requests
        response = handle.generate.remote(list(prompt_ids), sampling, request_id, cache_salt)
        try:
            return await response
        except asyncio.CancelledError:
            response.cancel()  # else the replica would go on sampling for nobody
            raise

    def update(self, version: int, timeout_s: float) -> list[dict[str, Any]]:
        """Have all replicas load the newest published weights at once, and wait for them.

        A replica that starts meanwhile loads them before it is healthy.

        Returns:
            What :meth:`Policy.update_weights` returns, for each replica.

        Raises:
            PolicyUpdateError: a replica failed, died, or did not confirm ``version`` in time. Replicas that failed
                answer nothing any more and are being replaced.
        """
        results = self._broadcast("update_weights", version, timeout_s=timeout_s)
        failures = [
            f"replica {result['replica']}: {result['error']}" if isinstance(result, dict) else str(result)
            for result in results
            if not isinstance(result, dict) or result["error"] is not None
        ]
        if failures:
            raise PolicyUpdateError(f"update to version {version}: {'; '.join(failures)}")
        return results

    def versions(self, timeout_s: float = 60.0) -> list[int]:
        """The version of each replica."""
        return [stats["version"] for stats in self.stats(timeout_s)]

    def stats(self, timeout_s: float = 60.0) -> list[dict[str, Any]]:
        """What :meth:`Policy.stats` returns, for each replica that answers."""
        return [result for result in self._broadcast("stats", timeout_s=timeout_s) if isinstance(result, dict)]

    def _broadcast(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        # Ray 2.60 calls this interface alpha; nothing else reaches every replica in one call.
        try:
            return self._handle.broadcast(method, *args).results(timeout_s=timeout_s, return_exceptions=True)
        except TimeoutError:
            raise PolicyUpdateError(f"{method}: not all replicas answered within {timeout_s:g} s") from None
        except RayServeException as error:
            raise PolicyUpdateError(f"{method}: no replica answers: {error}") from None

    def shutdown(self) -> None:
        """End the replicas and wait until they are gone. Idempotent.

        Serve's own controller stays, as part of the Ray cluster: other applications may use it, and it ends with Ray.
        """
        if ray.is_initialized() and self._app_name in serve.status().applications:
            serve.delete(self._app_name)


def deploy_policy(config: PolicyConfig, model_path: str, weight_store: Any | None, app_name: str) -> PolicyClient:
    """Start the policy and wait until every replica is healthy.

    Args:
        model_path: folder (or name in the local Hugging Face cache) of the model that is version 0.
        weight_store: see :class:`Policy`.
        app_name: of the Serve application, as the dashboard shows it.

    Raises:
        PolicyStartError: a replica failed to start, or not all were healthy within ``startup_timeout_s``.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    # No proxies: nobody speaks HTTP to the policy, and each would cost a process.
    serve.start(proxy_location="Disabled", logging_config=LoggingConfig(log_level="WARNING", enable_access_log=False))
    sticky = config.num_replicas > 1
    application = _deployment(config, sticky).bind(config, model_path, weight_store, app_name)
    handle = serve.run_many(
        [serve.RunTarget(application, name=app_name, route_prefix=None)], wait_for_applications_running=False
    )[0]
    client = PolicyClient(app_name, handle, sticky)
    try:
        _wait_until_running(app_name, config.startup_timeout_s)
    except BaseException:
        client.shutdown()
        raise
    return client


def _deployment(config: PolicyConfig, sticky: bool) -> serve.Deployment:
    options: dict[str, Any] = {}
    if sticky:
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
        if application.status in (ApplicationStatus.DEPLOY_FAILED, ApplicationStatus.UNHEALTHY):
            reasons = [deployment.message for deployment in application.deployments.values()]
            raise PolicyStartError(f"the policy did not start: {_reason(' '.join(reasons) or application.message)}")
        if time.monotonic() > deadline:
            raise PolicyStartError(f"the policy was not healthy within policy.startup_timeout_s {timeout_s:g} s")
        time.sleep(STATUS_POLL_S)


def _reason(message: str) -> str:
    """The engine's own words in the traceback that Serve reports, else the traceback's last line."""
    lines = [line.strip() for line in message.splitlines() if line.strip()] or ["no reason given"]
    reason = next((line for line in reversed(lines) if "EngineDead: " in line), lines[-1])
    return f"{reason.rpartition('EngineDead: ')[2]} (more in its worker's log, usually in /tmp/ray/session_latest/logs)"
