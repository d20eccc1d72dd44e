"""The instances: who holds them, until when, and the SQLite state of each."""

from __future__ import annotations

import secrets
import shutil
import sqlite3
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from actors.envs.local_fleet.application import Application, Tool, ToolError, at_version
from actors.envs.local_fleet.wire import ApiError

REGIONS = ("us-west-1",)
TEAM_ID = PROFILE_ID = "local"
DEFAULT_TTL_S = 3600
MAX_TTL_S = 86_400
MAX_STOPPED_RECORDS = 2000  # stopped instances stay listable, but a long run must not grow without bound
MAX_REQUEST_IDS = 10_000


class MakeRequest(BaseModel):
    """Body of ``POST /v1/env/instances``. Unknown fields are ignored: newer SDKs may send more."""

    env_key: str = Field(min_length=1)
    env_version: str | None = None
    data_key: str | None = None
    data_version: str | None = None
    region: str | None = None
    env_variables: dict[str, Any] | None = None
    ttl_seconds: int | None = Field(None, ge=1, le=MAX_TTL_S)
    run_id: str | None = None
    heartbeat_interval: int | None = Field(None, ge=1, le=3600)


def utc_now() -> str:
    return datetime.now(UTC).isoformat()


class SeedStore:
    """One seed database per (env_key, version, data_key, data_version), built once and never written again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[tuple[str | None, ...], Path] = {}

    def get(self, application: Application, version: str, data_key: str | None, data_version: str | None) -> Path:
        """Path of the seed database.

        Raises:
            ApiError: 400 where the application has no such data.
        """
        key = (application.env_key, version, data_key, data_version)
        path = self._paths.get(key)
        if path is None:
            path = self._paths[key] = self._build(application, data_key, data_version)
        return path

    def _build(self, application: Application, data_key: str | None, data_version: str | None) -> Path:
        path = self._folder / f"seed-{len(self._paths)}.db"
        try:
            with closing(sqlite3.connect(path)) as connection:
                connection.execute("PRAGMA synchronous = OFF")
                application.seed(connection, data_key, data_version)
                connection.commit()
        except BaseException as error:
            path.unlink(missing_ok=True)  # half a seed must not be met by the next attempt
            if isinstance(error, (ToolError, ValueError)):
                raise ApiError(400, f"Data '{data_key}:{data_version}' cannot be loaded: {error}") from error
            raise
        return path


def open_read_only(path: Path, immutable: bool) -> sqlite3.Connection:
    """``immutable`` spares the locks; only for files that nobody writes any more."""
    return sqlite3.connect(f"file:{path}?mode=ro{'&immutable=1' if immutable else ''}", uri=True)


@dataclass(eq=False)
class Instance:
    """One running (or stopped) copy of an application. All deadlines are on the monotonic clock, in seconds."""

    instance_id: str
    application: Application
    version: str
    seed_path: Path
    current_path: Path
    request: MakeRequest
    expires_at: float
    heartbeat_due: float | None
    created_at: str = field(default_factory=utc_now)
    updated_at: str = field(default_factory=utc_now)
    terminated_at: str | None = None
    status: str = "running"
    end_reason: str | None = None  # "deleted", "ttl" or "heartbeat"
    _connection: sqlite3.Connection | None = field(default=None, repr=False)

    @property
    def running(self) -> bool:
        return self.status == "running"

    @property
    def env_variables(self) -> dict[str, Any]:
        return self.request.env_variables or {}

    def open(self) -> None:
        # isolation_level=None: transactions are ours to begin and end. Nothing here must survive a power cut.
        self._connection = sqlite3.connect(self.current_path, isolation_level=None)
        self._connection.execute("PRAGMA synchronous = OFF")
        self._connection.execute("PRAGMA journal_mode = MEMORY")
        self._connection.execute("PRAGMA foreign_keys = ON")
        self.reset()

    def reset(self) -> None:
        """Make the current database equal to the seed again."""
        with closing(open_read_only(self.seed_path, immutable=True)) as seed:
            seed.backup(self._live())

    def call(self, tool: Tool, arguments: dict[str, Any]) -> Any:
        """Run one tool in a transaction of its own: all of its changes happen, or, where it raises, none."""
        connection = self._live()
        connection.execute("BEGIN")
        try:
            value = tool.call(connection, arguments, self.env_variables)
        except BaseException:
            connection.rollback()
            raise
        connection.commit()
        return value

    def snapshot(self) -> Path:
        """A copy of the current database for one verification; whoever asks deletes it."""
        path = self.current_path.with_name(f"{self.instance_id}-{secrets.token_hex(4)}.snapshot")
        shutil.copyfile(self.current_path, path)
        return path

    def beat(self) -> None:
        if self.request.heartbeat_interval:
            self.heartbeat_due = time.monotonic() + self.request.heartbeat_interval

    def end(self, reason: str) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self.current_path.unlink(missing_ok=True)
        self.status, self.end_reason = "stopped", reason
        self.terminated_at = self.updated_at = utc_now()

    def view(self, base_url: str) -> dict[str, Any]:
        """The instance as the Fleet API shows it. ``base_url``: how the asker reaches this server."""
        root = f"{base_url}/i/{self.instance_id}/"
        manager = f"{root}api/v1/env"
        return {
            "instance_id": self.instance_id,
            "env_key": self.application.env_key,
            "version": self.version,
            "status": self.status,
            "subdomain": self.instance_id,
            "created_at": self.created_at,
            "updated_at": self.updated_at,
            "terminated_at": self.terminated_at,
            "team_id": TEAM_ID,
            "region": self.request.region or REGIONS[0],
            "env_variables": self.request.env_variables,
            "data_key": self.request.data_key,
            "data_version": self.request.data_version,
            "health": self.running,
            "run_id": self.request.run_id,
            "profile_id": PROFILE_ID,
            "heartbeat_interval": self.request.heartbeat_interval,
            "heartbeat_region": None,
            "urls": {
                "root": root,
                "app": [root],
                "api": f"{root}raw",
                "health": f"{root}health",
                "api_docs": None,
                "manager": {
                    "api": manager,
                    "docs": f"{manager}/docs",
                    "reset": f"{manager}/reset",
                    "diff": f"{manager}/diff",
                    "snapshot": f"{manager}/snapshot",
                    "execute_verifier_function": f"{manager}/execute_verifier_function",
                    "execute_verifier_function_with_upload": f"{manager}/execute_verifier_function_with_upload",
                },
            },
        }

    def _live(self) -> sqlite3.Connection:
        if self._connection is None:
            raise ApiError(502, f"Instance '{self.instance_id}' is stopped ({self.end_reason})")
        return self._connection


class InstanceTable:
    """All instances of one local Fleet. Not thread-safe: it lives on the server's event loop."""

    def __init__(
        self, applications: Mapping[str, Application], folder: Path, instance_limit: int, stats: Counter[str]
    ) -> None:
        self._applications = applications
        self._folder = folder
        self._seeds = SeedStore(folder)
        self._stats = stats
        self._running: dict[str, Instance] = {}
        self._stopped: OrderedDict[str, Instance] = OrderedDict()
        self._request_ids: OrderedDict[str, str] = OrderedDict()
        self.instance_limit = instance_limit
        self.default_ttl_s = DEFAULT_TTL_S

    @property
    def running_count(self) -> int:
        self.expire()
        return len(self._running)

    def make(self, body: MakeRequest, request_id: str | None) -> Instance:
        """Create an instance.

        Raises:
            ApiError: 400 unknown environment, version, region or data; 403 quota; 409 ``request_id`` was used before.
        """
        self.expire()
        if request_id in self._request_ids:
            self._stats["makes_repeated"] += 1
            detail = {
                "error": "duplicate_request_id",
                "instance_id": self._request_ids[request_id],
                "message": f"Request '{request_id}' was already accepted",
            }
            raise ApiError(409, detail)
        application, version = self._resolve(body)
        if len(self._running) >= self.instance_limit:
            self._stats["makes_over_quota"] += 1
            raise ApiError(403, self._quota_detail())
        instance = self._create(application, version, body)
        if request_id:
            self._request_ids[request_id] = instance.instance_id
            _trim(self._request_ids, MAX_REQUEST_IDS)
        self._stats["makes"] += 1
        return instance

    def get(self, instance_id: str) -> Instance:
        """The instance, running or stopped.

        Raises:
            ApiError: 404.
        """
        instance = self._running.get(instance_id)
        if instance is not None:
            self._expire_if_due(instance, time.monotonic())
            return instance
        if instance_id in self._stopped:
            return self._stopped[instance_id]
        raise ApiError(404, f"Instance '{instance_id}' not found")

    def get_running(self, instance_id: str) -> Instance:
        """Like :meth:`get`, but a stopped instance answers 502, as a hosted one does once its TTL has passed."""
        instance = self.get(instance_id)
        if not instance.running:
            raise ApiError(502, f"Instance '{instance_id}' is stopped ({instance.end_reason})")
        return instance

    def all(self) -> Iterator[Instance]:
        self.expire()
        yield from self._stopped.values()
        yield from self._running.values()

    def delete(self, instance: Instance) -> None:
        if instance.running:
            self._stop(instance, "deleted")
            self._stats["deletes"] += 1

    def expire(self) -> None:
        """End every instance whose TTL or heartbeat deadline has passed."""
        now = time.monotonic()
        for instance in list(self._running.values()):
            self._expire_if_due(instance, now)

    def close(self) -> None:
        for instance in list(self._running.values()):
            self._stop(instance, "shutdown")

    def _expire_if_due(self, instance: Instance, now: float) -> None:
        if now >= instance.expires_at:
            self._stop(instance, "ttl")
            self._stats["expiries_ttl"] += 1
        elif instance.heartbeat_due is not None and now >= instance.heartbeat_due:
            self._stop(instance, "heartbeat")
            self._stats["expiries_heartbeat"] += 1

    def _resolve(self, body: MakeRequest) -> tuple[Application, str]:
        application = self._applications.get(body.env_key)
        if application is None:
            known = ", ".join(sorted(self._applications)) or "none"
            raise ApiError(400, f"Environment '{body.env_key}' not found. Hosted here: {known}")
        version = body.env_version or application.versions[-1]
        if version not in application.versions:
            # The word "environment" must stay out of this sentence: with it the SDK raises the wrong error type.
            known = ", ".join(application.versions)
            raise ApiError(400, f"Version '{version}' not found for '{body.env_key}'. Hosted here: {known}")
        if body.region is not None and body.region not in REGIONS:
            raise ApiError(400, f"Region {body.region} not supported. Please use {list(REGIONS)}")
        return at_version(application, version), version

    def _create(self, application: Application, version: str, body: MakeRequest) -> Instance:
        instance_id = secrets.token_hex(6)
        now = time.monotonic()
        instance = Instance(
            instance_id=instance_id,
            application=application,
            version=version,
            seed_path=self._seeds.get(application, version, body.data_key, body.data_version),
            current_path=self._folder / f"{instance_id}.db",
            request=body,
            expires_at=now + (body.ttl_seconds or self.default_ttl_s),
            heartbeat_due=now + body.heartbeat_interval if body.heartbeat_interval else None,
        )
        instance.open()
        self._running[instance_id] = instance
        return instance

    def _stop(self, instance: Instance, reason: str) -> None:
        del self._running[instance.instance_id]
        instance.end(reason)
        self._stopped[instance.instance_id] = instance
        _trim(self._stopped, MAX_STOPPED_RECORDS)

    def _quota_detail(self) -> dict[str, Any]:
        running, limit = len(self._running), self.instance_limit
        return {
            "error_type": "instance_limit_exceeded",
            "message": f"You have {running} running instances out of a maximum of {limit}. Instance limit reached.",
            "running_instances": running,
            "instance_limit": limit,
        }


def _trim(records: OrderedDict[str, Any], limit: int) -> None:
    while len(records) > limit:
        records.popitem(last=False)
