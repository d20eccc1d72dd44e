"""The instance manager: what a running instance answers under ``{root}api/v1/env`` (reset, SQLite, health)."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from actors.envs.local_fleet.instances import Instance, InstanceTable, open_read_only, utc_now
from actors.envs.local_fleet.wire import ApiError, JsonReply, checked_body

DATABASES = ("seed", "current")
MAX_ROWS = 50_000
QUERY_LIMIT_S = 1.0  # queries run on the event loop: a runaway one must not hold up everybody
_PROGRESS_STEPS = 10_000  # SQLite instructions between two looks at the clock


class ResetBody(BaseModel):
    timestamp: int | None = None
    seed: int | None = None


class QueryBody(BaseModel):
    query: str
    args: list[Any] | None = None
    read_only: bool | None = True


class Runner:
    """Route handlers. Every one works on the instance that the path names."""

    def __init__(self, table: InstanceTable, stats: Counter[str]) -> None:
        self._table = table
        self._stats = stats

    def _instance(self, request: Request) -> Instance:
        return self._table.get_running(request.path_params["instance_id"])

    async def health(self, request: Request) -> Response:
        instance = self._instance(request)
        return JsonReply({"status": "healthy", "timestamp": utc_now(), "service": instance.application.env_key})

    async def reset(self, request: Request) -> Response:
        # The sample applications hold no clock and no randomness, so `timestamp` and `seed` are checked and not needed.
        await checked_body(request, ResetBody)
        self._instance(request).reset()
        self._stats["resets"] += 1
        return JsonReply({"success": True, "message": "The current database equals the seed again"})

    async def resources(self, request: Request) -> Response:
        self._instance(request)
        modes = {"seed": "ro", "current": "rw"}
        return JsonReply([{"name": n, "type": "sqlite", "mode": modes[n], "label": None} for n in DATABASES])

    async def describe(self, request: Request) -> Response:
        name = request.path_params["database"]
        path = _database(self._instance(request), name)
        with closing(open_read_only(path, immutable=name == "seed")) as connection:
            tables = _describe(connection)
        return JsonReply({"success": True, "resource_name": name, "tables": tables, "message": "Schema read"})

    async def query(self, request: Request) -> Response:
        body = await checked_body(request, QueryBody)
        name = request.path_params["database"]
        path = _database(self._instance(request), name)
        self._stats["queries"] += 1
        writable = body.read_only is False and name == "current"
        # A connection of its own: nothing a client sets can leak into the one the tools work on.
        connection = sqlite3.connect(path, isolation_level=None) if writable else open_read_only(path, name == "seed")
        with closing(connection):
            return JsonReply(_query(connection, body, writable))


def _database(instance: Instance, name: str) -> Path:
    if name not in DATABASES:
        raise ApiError(400, f"Unknown database '{name}'. This instance has: {', '.join(DATABASES)}")
    return instance.seed_path if name == "seed" else instance.current_path


def _describe(connection: sqlite3.Connection) -> list[dict[str, Any]]:
    tables = connection.execute(
        "SELECT name, sql FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    ).fetchall()
    return [{"name": name, "sql": sql, "columns": _columns(connection, name)} for name, sql in tables]


def _columns(connection: sqlite3.Connection, table: str) -> list[dict[str, Any]]:
    rows = connection.execute('SELECT name, type, "notnull", dflt_value, pk FROM pragma_table_info(?)', (table,))
    return [
        {"name": name, "type": kind, "notnull": bool(notnull), "default_value": default, "primary_key": pk > 0}
        for name, kind, notnull, default, pk in rows
    ]


def _query(connection: sqlite3.Connection, body: QueryBody, writable: bool) -> dict[str, Any]:
    """Run one statement. A statement that fails is an answer with ``success: false``, as on a hosted instance."""
    connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)  # no way to other instances' files
    if writable:
        connection.execute("PRAGMA synchronous = OFF")
        connection.set_authorizer(_refuse_pragma)
    deadline = time.monotonic() + QUERY_LIMIT_S
    connection.set_progress_handler(lambda: time.monotonic() > deadline, _PROGRESS_STEPS)
    try:
        cursor = connection.execute(body.query, body.args or [])
        rows = cursor.fetchmany(MAX_ROWS + 1)
    except (sqlite3.Error, sqlite3.Warning, OverflowError) as error:
        reason = f"took longer than {QUERY_LIMIT_S:g} s" if time.monotonic() > deadline else str(error)
        return {"success": False, "columns": None, "rows": None, "error": reason, "message": f"Query failed: {reason}"}
    if len(rows) > MAX_ROWS:
        reason = f"more than {MAX_ROWS} rows; add a LIMIT"
        return {"success": False, "columns": None, "rows": None, "error": reason, "message": f"Query failed: {reason}"}
    selects = cursor.description is not None
    return {
        "success": True,
        "columns": [column[0] for column in cursor.description] if selects else None,
        "rows": rows if selects else None,
        "rows_affected": None if selects or cursor.rowcount < 0 else cursor.rowcount,
        "last_insert_id": None if selects else cursor.lastrowid,
        "error": None,
        "message": "Query executed",
    }


def _refuse_pragma(action: int, *_: Any) -> int:
    # `PRAGMA journal_mode = WAL` would stay in the file and hide later changes from the verifier's copy of it.
    return sqlite3.SQLITE_DENY if action == sqlite3.SQLITE_PRAGMA else sqlite3.SQLITE_OK
