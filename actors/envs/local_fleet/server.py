"""The local Fleet: a control plane that speaks the Fleet HTTP API, with the instances behind it in the same process.

Everything runs on one event loop. Only verifiers, which are other people's code, run in :mod:`.verifier_sandbox`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import secrets
import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from actors.envs.local_fleet import faults
from actors.envs.local_fleet.application import Application
from actors.envs.local_fleet.faults import FaultInjector, FaultPlan
from actors.envs.local_fleet.instances import (
    DEFAULT_TTL_S,
    PROFILE_ID,
    REGIONS,
    TEAM_ID,
    Instance,
    InstanceTable,
    MakeRequest,
    utc_now,
)
from actors.envs.local_fleet.mcp import McpEndpoint
from actors.envs.local_fleet.runner import Runner
from actors.envs.local_fleet.verifier_sandbox import VerifierSandbox
from actors.envs.local_fleet.verifiers import Verifiers
from actors.envs.local_fleet.wire import ApiError, JsonReply, checked_body, error_reply

FOLDER_PREFIX = "fleet-rl-local-fleet-"
REAP_INTERVAL_S = 0.5
MAX_BODY_BYTES = 16 << 20
STATUSES = ("pending", "running", "stopped", "error")


@dataclass(frozen=True)
class Settings:
    """How a local Fleet behaves."""

    instance_limit: int = 256
    verifier_workers: int = 2
    verifier_timeout_s: float = 10.0
    faults: FaultPlan = field(default_factory=FaultPlan)


class ControlPlane:
    """Route handlers under ``/v1``, except for verifiers."""

    def __init__(self, applications: Mapping[str, Application], table: InstanceTable, stats: Counter[str]) -> None:
        self._applications = applications
        self._table = table
        self._stats = stats

    async def account(self, request: Request) -> Response:
        return JsonReply(
            {
                "team_id": TEAM_ID,
                "team_name": "Local Fleet",
                "instance_limit": self._table.instance_limit,
                "instance_count": self._table.running_count,
                "profile_id": PROFILE_ID,
                "profile_name": PROFILE_ID,
            }
        )

    async def runner_token(self, request: Request) -> Response:
        # The runner here is not gated. The SDK asks all the same, and keeps the answer.
        return JsonReply({"token": "local"})

    async def regions(self, request: Request) -> Response:
        return JsonReply(list(REGIONS))

    async def environments(self, request: Request) -> Response:
        return JsonReply([_environment(application) for application in self._applications.values()])

    async def environment(self, request: Request) -> Response:
        key = request.path_params["env_key"]
        if key not in self._applications:
            raise ApiError(400, f"Environment '{key}' not found")
        return JsonReply(_environment(self._applications[key]))

    async def runs(self, request: Request) -> Response:
        by_run: dict[str, list[Instance]] = defaultdict(list)
        for instance in self._table.all():
            if instance.request.run_id is not None:
                by_run[instance.request.run_id].append(instance)
        wanted = request.query_params.get("active", "active")
        runs = [_run(run_id, instances) for run_id, instances in by_run.items()]
        return JsonReply([run for run in runs if wanted == "all" or (run["running_count"] > 0) == (wanted == "active")])

    async def make(self, request: Request) -> Response:
        body = await checked_body(request, MakeRequest)
        instance = self._table.make(body, request.headers.get("x-request-id"))
        return JsonReply(instance.view(_base_url(request)))

    async def list(self, request: Request) -> Response:
        status = request.query_params.get("status")
        if status is not None and status not in STATUSES:
            raise ApiError(422, f"field 'status': must be one of {', '.join(STATUSES)}")
        base_url = _base_url(request)
        found = _filtered(self._table.all(), request.query_params)
        return JsonReply([i.view(base_url) for i in found if status is None or i.status == status])

    async def get(self, request: Request) -> Response:
        return JsonReply(self._instance(request).view(_base_url(request)))

    async def delete(self, request: Request) -> Response:
        instance = self._instance(request)
        self._table.delete(instance)
        return JsonReply(instance.view(_base_url(request)))

    async def delete_batch(self, request: Request) -> Response:
        if not (request.query_params.get("run_id") or request.query_params.get("profile_id")):
            raise ApiError(400, "run_id or profile_id must be given")
        ended = [i for i in _filtered(self._table.all(), request.query_params) if i.running]
        for instance in ended:
            self._table.delete(instance)
        base_url = _base_url(request)
        return JsonReply([instance.view(base_url) for instance in ended])

    async def heartbeat(self, request: Request) -> Response:
        instance = self._instance(request)
        if not instance.running:
            raise ApiError(400, f"Instance '{instance.instance_id}' is stopped ({instance.end_reason})")
        interval = instance.request.heartbeat_interval
        instance.beat()
        self._stats["heartbeats"] += 1
        return JsonReply(
            {
                "success": True,
                "instance_id": instance.instance_id,
                "last_heartbeat": utc_now() if interval else None,
                "deadline_timestamp": time.time() + interval if interval else None,
                "interval_seconds": interval,
            }
        )

    def _instance(self, request: Request) -> Instance:
        return self._table.get(request.path_params["instance_id"])


def _environment(application: Application) -> dict[str, Any]:
    return {
        "env_key": application.env_key,
        "name": application.name,
        "description": application.description,
        "default_version": application.versions[-1],
        "versions": {version: version for version in application.versions},
    }


def _run(run_id: str, instances: list[Instance]) -> dict[str, Any]:
    created = sorted(instance.created_at for instance in instances)
    return {
        "run_id": run_id,
        "running_count": sum(instance.running for instance in instances),
        "total_count": len(instances),
        "first_created_at": created[0],
        "last_created_at": created[-1],
        "profile_id": PROFILE_ID,
    }


def _filtered(instances: Any, query: Mapping[str, str]) -> list[Instance]:
    run_id, region, profile = query.get("run_id"), query.get("region"), query.get("profile_id")
    if profile not in (None, "self", PROFILE_ID):
        return []
    return [
        instance
        for instance in instances
        if (run_id is None or instance.request.run_id == run_id)
        and (region is None or (instance.request.region or REGIONS[0]) == region)
    ]


def _base_url(request: Request) -> str:
    # By the name that the asker used: with --host 0.0.0.0 every machine gets addresses it can reach.
    return str(request.base_url).rstrip("/")


class LocalRoutes:
    """``/_local``: for tests and for a run's own accounting. Not part of the Fleet API; this machine only."""

    def __init__(self, table: InstanceTable, injector: FaultInjector, stats: Counter[str], instance_limit: int) -> None:
        """``instance_limit``: where the scenario sets none."""
        self._table = table
        self._injector = injector
        self._stats = stats
        self._instance_limit = instance_limit
        self._started = time.monotonic()

    def play(self, plan: FaultPlan) -> None:
        """Replace faults and limits by those of a scenario."""
        self._injector.arm(plan)
        self._table.instance_limit = plan.instance_limit or self._instance_limit
        self._table.default_ttl_s = plan.default_ttl_s or DEFAULT_TTL_S

    async def set_faults(self, request: Request) -> Response:
        self.play(await checked_body(request, FaultPlan))
        return JsonReply({"faults": self._injector.report()})

    async def get_faults(self, request: Request) -> Response:
        return JsonReply({"faults": self._injector.report()})

    async def instances(self, request: Request) -> Response:
        base_url = _base_url(request)
        return JsonReply([{**i.view(base_url), "end_reason": i.end_reason} for i in self._table.all()])

    async def stats(self, request: Request) -> Response:
        return JsonReply(
            {
                **self._stats,
                "verifier_cpu_s": self._stats["verifier_cpu_us"] / 1e6,
                "running": self._table.running_count,
                "uptime_s": time.monotonic() - self._started,
                "cpu_s": time.process_time(),  # of the server alone, without the verifiers
            }
        )


def _refusal(request: Request) -> Response | None:
    """Who may ask for what. The paths of an instance carry its id, which is secret enough here."""
    path = request.scope["path"]
    if path.startswith("/_local/"):
        host = request.client.host if request.client else ""
        if not _is_loopback(host):
            return error_reply(403, "/_local answers this machine only")
    elif path.startswith("/v1/"):
        if not (
            request.headers.get("authorization", "").startswith("Bearer sk-") or request.headers.get("x-jwt-token")
        ):
            return error_reply(401, "Invalid API key: any key that starts with 'sk-' will do here")
    return None


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def create_app(applications: Mapping[str, Application], settings: Settings | None = None) -> Starlette:
    """The ASGI application of one local Fleet. Its temporary folder lives from start-up to shutdown."""
    settings = settings or Settings()
    folder = Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
    stats: Counter[str] = Counter()
    injector = FaultInjector(FaultPlan(), stats)
    table = InstanceTable(applications, folder, settings.instance_limit, stats)
    sandbox = VerifierSandbox(folder, settings.verifier_workers, settings.verifier_timeout_s)
    local = LocalRoutes(table, injector, stats, settings.instance_limit)
    local.play(settings.faults)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        folder.mkdir(mode=0o700)
        reaper = asyncio.create_task(_reap(table))
        sandbox.start()
        try:
            yield
        finally:
            reaper.cancel()
            await asyncio.gather(reaper, return_exceptions=True)
            await sandbox.close()
            table.close()
            shutil.rmtree(folder, ignore_errors=True)

    return Starlette(
        routes=_routes(
            injector,
            ControlPlane(applications, table, stats),
            Runner(table, stats),
            McpEndpoint(table, injector, stats),
            Verifiers(table, sandbox, settings.verifier_timeout_s, stats),
            local,
        ),
        lifespan=lifespan,
        max_body_size=MAX_BODY_BYTES,
        exception_handlers={
            ApiError: lambda _, error: error_reply(error.status, error.detail),
            HTTPException: lambda _, error: error_reply(error.status_code, error.detail, error.headers),
            Exception: lambda _, error: error_reply(500, f"internal error: {type(error).__name__}: {error}"),
        },
    )


async def _reap(table: InstanceTable) -> None:
    while True:
        await asyncio.sleep(REAP_INTERVAL_S)
        table.expire()


def _routes(
    injector: FaultInjector,
    control: ControlPlane,
    runner: Runner,
    mcp: McpEndpoint,
    verifiers: Verifiers,
    local: LocalRoutes,
) -> list[HttpRoute]:
    """All routes, the busiest first: they are tried in this order."""

    def on(method: str, path: str, handler: faults.Handler, fault_route: faults.Route | None = None) -> HttpRoute:
        async def endpoint(request: Request) -> Response:
            refusal = _refusal(request)
            if refusal is not None:
                return refusal
            if fault_route is None:
                return await handler(request)
            return await injector.guard(fault_route, request, handler)

        return HttpRoute(path, endpoint, methods=[method])

    root, manager = "/i/{instance_id}", "/i/{instance_id}/api/v1/env"
    return [
        on("POST", f"{root}/mcp", mcp.post, "mcp"),
        on("POST", f"{root}/api/v1/mcp", mcp.post, "mcp"),
        on("POST", f"{manager}/reset", runner.reset, "reset"),
        on("GET", "/v1/verifiers/check", verifiers.check, "check"),
        on("POST", "/v1/verifiers/execute", verifiers.execute, "verify"),
        on("POST", "/v1/env/instances", control.make, "make"),
        on("GET", "/v1/env/instances", control.list, "list"),
        on("DELETE", "/v1/env/instances/batch", control.delete_batch, "delete"),
        on("GET", "/v1/env/instances/{instance_id}", control.get, "get"),
        on("DELETE", "/v1/env/instances/{instance_id}", control.delete, "delete"),
        on("POST", "/v1/env/instances/{instance_id}/heartbeat", control.heartbeat, "heartbeat"),
        on("GET", "/v1/account", control.account, "account"),
        on("GET", "/v1/runner-auth/token", control.runner_token),
        on("GET", "/v1/regions", control.regions),
        on("GET", "/v1/env/", control.environments, "envs"),
        on("GET", "/v1/env/runs", control.runs),
        on("GET", "/v1/env/{env_key}", control.environment, "envs"),
        on("GET", f"{manager}/resources", runner.resources, "resources"),
        on("GET", f"{manager}/resources/sqlite/{{database}}/describe", runner.describe, "describe"),
        on("POST", f"{manager}/resources/sqlite/{{database}}/query", runner.query, "query"),
        on("GET", f"{manager}/health", runner.health, "health"),
        on("GET", f"{root}/health", runner.health, "health"),
        on("POST", "/_local/faults", local.set_faults),
        on("GET", "/_local/faults", local.get_faults),
        on("GET", "/_local/instances", local.instances),
        on("GET", "/_local/stats", local.stats),
    ]
