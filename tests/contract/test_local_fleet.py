"""The local Fleet as its clients see it: the unmodified Fleet SDK and MCP client, over HTTP, against a real server."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import inspect
import io
import json
import os
import pickle
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
import uvloop
from fleet import AsyncFleet, Fleet
from fleet._async.exceptions import (
    FleetAPIError,
    FleetAuthenticationError,
    FleetBadRequestError,
    FleetEnvironmentNotFoundError,
    FleetInstanceLimitError,
    FleetRegionError,
    FleetVersionNotFoundError,
)
from fleet._async.tasks import Task
from fleet.instance.models import Resource, ResourceMode, ResourceType
from fleet.resources.sqlite import SQLiteResource
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from actors.envs import fleet as fleet_client
from actors.envs.fleet import FleetControl
from actors.envs.local_fleet import verifier_sandbox
from actors.envs.local_fleet.application import Tool, ToolError
from actors.envs.local_fleet.faults import Fault, FaultFileError, FaultInjector, FaultPlan, load_fault_plan
from actors.envs.local_fleet.process import LocalFleetError, LocalFleetProcess
from actors.envs.local_fleet.server import FOLDER_PREFIX, Settings, create_app
from actors.envs.local_fleet.verifier_sandbox import Verification, VerifierSandbox
from actors.envs.local_fleet.verifier_worker import Database, can_limit_reading
from actors.envs.local_fleet.verifiers import BundleStore, decode_arguments
from actors.envs.local_fleet.wire import ApiError
from benchmarks.processes import command_line

REPOSITORY = Path(__file__).resolve().parents[2]
KEY = "sk-test"
LIMIT = 6
VERIFIER_TIMEOUT_S = 1.0


# ------------------------------------------------------------------------------------------- a small application


def _add(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    cursor = connection.execute("INSERT INTO notes (text) VALUES (?)", (arguments["text"],))
    return {"id": cursor.lastrowid, "by": env_variables.get("LOGGED_IN_USER")}


def _add_then_refuse(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    connection.execute("INSERT INTO notes (text) VALUES ('half done')")
    raise ToolError("the notebook is full")


def _add_then_crash(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    connection.execute("INSERT INTO notes (text) VALUES ('half done')")
    return 1 / 0


class Notes:
    env_key = "notes"
    name = "Notes"
    description = "A notebook"
    versions = ("v1.0.0", "v1.1.0")
    add_schema = {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]}
    tools = (
        Tool("add", "add a note", add_schema, _add),
        Tool("refuse", "add a note, in vain", {"type": "object", "properties": {}}, _add_then_refuse),
        Tool("crash", "a tool with a bug", {"type": "object", "properties": {}}, _add_then_crash),
    )

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        if data_key == "absent":
            raise ValueError("there is no such notebook")
        connection.execute("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL, stars INTEGER)")
        connection.executemany(
            "INSERT INTO notes (text, stars) VALUES (?, ?)",
            [("milk", 3), ("bread", None), (f"from {data_key}/{data_version}", 5)],
        )


class Server:
    """The ASGI application in a thread of its own, behind a real socket."""

    def __init__(self, settings: Settings) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        app = create_app({"notes": Notes()}, settings)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._thread = threading.Thread(target=self._server.run, args=([listener],), daemon=True)
        self._thread.start()
        _wait_for(lambda: self._server.started, "the server starts")

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path).raise_for_status().json()

    def arm(self, *faults: dict[str, Any], seed: int = 0) -> None:
        httpx.post(f"{self.url}/_local/faults", json={"seed": seed, "faults": faults}).raise_for_status()

    def fleet(self, **options: Any) -> AsyncFleet:
        return AsyncFleet(api_key=KEY, base_url=self.url, **options)

    def without_retries(self) -> AsyncFleet:
        return self.fleet(max_retries=0)


def _wait_for(condition: Any, what: str, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.02)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    server = Server(Settings(instance_limit=LIMIT, verifier_timeout_s=VERIFIER_TIMEOUT_S))
    yield server
    server.stop()


@pytest.fixture
def server(shared: Server) -> Iterator[Server]:
    """The shared server; afterwards without instances and without faults."""
    yield shared
    shared.arm()
    httpx.delete(
        f"{shared.url}/v1/env/instances/batch?profile_id=self", headers={"Authorization": f"Bearer {KEY}"}
    ).raise_for_status()


@contextlib.asynccontextmanager
async def tools_of(env: Any, path: str = "mcp") -> Any:
    async with streamable_http_client(env.urls.root + path) as (read, write, _), ClientSession(read, write) as session:
        await session.initialize()
        yield session


async def texts(env: Any, database: str = "current") -> list[str]:
    await env.instance.load()
    response = await env.db(database).query("SELECT text FROM notes ORDER BY id")
    return [row[0] for row in response.rows]


# -------------------------------------------------------------------------------------------------- control plane


@pytest.mark.asyncio
async def test_sdk_lives_through_the_life_of_an_instance(server: Server) -> None:
    fleet = server.fleet()
    before = await fleet.account()
    env = await fleet.make(
        "notes:1.0.0",  # the SDK makes it v1.0.0
        data_key="home:v2",
        env_variables={"LOGGED_IN_USER": "ana"},
        run_id="run-a",
        ttl_seconds=60,
        heartbeat_interval=30,
    )
    other = await fleet.make("notes", run_id="run-b")

    assert (env.env_key, env.version, env.data_key, env.data_version) == ("notes", "v1.0.0", "home", "v2")
    assert (env.status, env.run_id, env.env_variables) == ("running", "run-a", {"LOGGED_IN_USER": "ana"})
    assert other.version == "v1.1.0", "without a version, the latest"
    assert await texts(env) == ["milk", "bread", "from home/v2"]
    assert (before.instance_count, before.instance_limit) == (0, LIMIT)
    assert (await fleet.account()).instance_count == 2
    assert (await fleet.instance(env.instance_id)).instance_id == env.instance_id
    assert [i.instance_id for i in await fleet.instances(run_id="run-a", status="running")] == [env.instance_id]
    assert await fleet.instances(run_id="run-a", status="stopped") == []

    beat = await env.heartbeat()
    assert beat.interval_seconds == 30 and 29 < beat.deadline_timestamp - time.time() < 31
    assert (await other.heartbeat()).interval_seconds is None
    assert {run.run_id: run.running_count for run in await fleet.list_runs()} == {"run-a": 1, "run-b": 1}

    assert (await env.close()).status == "stopped"
    assert (await env.close()).status == "stopped", "deleting twice is not an error"
    closed = await fleet.close_all(run_id="run-b")
    assert [i.instance_id for i in closed] == [other.instance_id]
    assert await fleet.close_all(run_id="run-b") == []
    assert (await fleet.account()).instance_count == 0


def test_synchronous_sdk_works_too(server: Server) -> None:
    fleet = Fleet(api_key=KEY, base_url=server.url)
    env = fleet.make("notes", run_id="sync")
    env.instance.load()
    assert env.db("current").query("SELECT count(*) FROM notes").rows == [[3]]
    assert env.reset().success
    assert env.instance.manager_health_check().status == "healthy"
    assert env.close().status == "stopped"


@pytest.mark.asyncio
async def test_environments_are_listed(server: Server) -> None:
    fleet = server.fleet()
    (listed,) = await fleet.list_envs()
    assert (listed.env_key, listed.default_version) == ("notes", "v1.1.0")
    assert set(listed.versions) == set(Notes.versions)
    assert await fleet.environment("notes") == listed
    assert await fleet.list_regions() == ["us-west-1"]


@pytest.mark.asyncio
async def test_refusals_reach_the_caller_as_the_sdks_own_errors(server: Server) -> None:
    fleet = server.without_retries()
    with pytest.raises(FleetEnvironmentNotFoundError, match="nowhere"):
        await fleet.make("nowhere")
    with pytest.raises(FleetVersionNotFoundError, match="v9"):
        await fleet.make("notes:v9")
    with pytest.raises(FleetRegionError):
        await fleet.make("notes", region="moon-1")
    with pytest.raises(FleetBadRequestError, match="there is no such notebook"):
        await fleet.make("notes", data_key="absent")
    with pytest.raises(FleetAPIError, match="ttl_seconds"):
        await fleet.make("notes", ttl_seconds=0)
    with pytest.raises(FleetAPIError, match="'zzz' not found"):
        await fleet.instance("zzz")
    with pytest.raises(FleetAuthenticationError):
        await AsyncFleet(api_key="wrong", base_url=server.url, max_retries=0).account()
    assert (await fleet.account()).instance_count == 0


@pytest.mark.asyncio
async def test_quota_refuses_and_a_delete_makes_room(server: Server) -> None:
    fleet = server.without_retries()
    envs = [await fleet.make("notes") for _ in range(LIMIT)]
    with pytest.raises(FleetInstanceLimitError) as refused:
        await fleet.make("notes")
    assert (refused.value.running_instances, refused.value.instance_limit) == (LIMIT, LIMIT)
    await envs[0].close()
    assert (await fleet.make("notes")).status == "running"


def test_repeated_request_id_makes_no_second_instance(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-ID": "the-same"}
    first = httpx.post(f"{server.url}/v1/env/instances", json={"env_key": "notes"}, headers=headers)
    again = httpx.post(f"{server.url}/v1/env/instances", json={"env_key": "notes"}, headers=headers)
    assert (first.status_code, again.status_code) == (200, 409)
    detail = again.json()["detail"]
    assert (detail["error"], detail["instance_id"]) == ("duplicate_request_id", first.json()["instance_id"])
    assert server.get("/_local/stats")["running"] == 1


@pytest.mark.asyncio
async def test_instances_expire_by_ttl_and_by_missed_heartbeat_but_not_while_it_beats(server: Server) -> None:
    fleet = server.without_retries()
    short = await fleet.make("notes", ttl_seconds=1)
    silent = await fleet.make("notes", heartbeat_interval=1)
    beating = await fleet.make("notes", heartbeat_interval=3)
    for _ in range(8):
        await asyncio.sleep(0.5)
        await beating.heartbeat()
    # Only the reaper has looked at these two.
    ends = {i["instance_id"]: i["end_reason"] for i in server.get("/_local/instances")}
    assert (ends[short.instance_id], ends[silent.instance_id], ends[beating.instance_id]) == ("ttl", "heartbeat", None)
    assert [i.instance_id for i in await fleet.instances(status="running")] == [beating.instance_id]
    with pytest.raises(FleetBadRequestError, match="stopped"):
        await silent.heartbeat()
    assert httpx.post(short.urls.root + "mcp", json={}).status_code == 502
    assert httpx.post(short.urls.manager.reset).status_code == 502


# ------------------------------------------------------------------------------------------- state, tools, queries


@pytest.mark.asyncio
async def test_instances_are_isolated_and_reset_restores_the_seed(server: Server) -> None:
    fleet = server.fleet()
    one, two = await fleet.make("notes", data_key="d"), await fleet.make("notes", data_key="d")
    seed = await texts(one, "seed")
    async with tools_of(one) as tools:
        await tools.call_tool("add", {"text": "only in one"})
    assert await texts(one) == [*seed, "only in one"]
    assert await texts(two) == seed
    assert await texts(one, "seed") == seed

    assert (await one.reset(seed=3)).success
    assert await texts(one) == seed
    async with tools_of(one) as tools:  # the tools see the restored state, too
        added = await tools.call_tool("add", {"text": "again"})
    assert json.loads(added.content[0].text)["id"] == 4


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["mcp", "api/v1/mcp"])
async def test_mcp_client_lists_and_calls_tools(server: Server, path: str) -> None:
    env = await server.fleet().make("notes", env_variables={"LOGGED_IN_USER": "ana"})
    async with tools_of(env, path) as tools:
        listed = (await tools.list_tools()).tools
        assert [(t.name, t.description, t.inputSchema) for t in listed] == [
            (t.name, t.description, t.input_schema) for t in Notes.tools
        ]
        result = await tools.call_tool("add", {"text": "tea"})
        assert (result.isError, json.loads(result.content[0].text)) == (False, {"id": 4, "by": "ana"})
        await tools.send_ping()


@pytest.mark.asyncio
async def test_failing_tools_answer_with_an_error_and_leave_no_trace(server: Server) -> None:
    env = await server.fleet().make("notes")
    seed = await texts(env)
    async with tools_of(env) as tools:
        refused = await tools.call_tool("refuse", {})
        crashed = await tools.call_tool("crash", {})
        unknown = await tools.call_tool("fly", {})
        assert (await tools.call_tool("add", {"text": "after"})).isError is False
    assert (refused.isError, refused.content[0].text) == (True, "the notebook is full")
    assert crashed.isError and "ZeroDivisionError" in crashed.content[0].text
    assert (unknown.isError, unknown.content[0].text) == (True, "unknown tool fly")
    assert await texts(env) == [*seed, "after"]


@pytest.mark.asyncio
async def test_malformed_mcp_requests_are_refused_by_the_book(server: Server) -> None:
    url = (await server.fleet().make("notes")).urls.root + "mcp"

    def post(**message: Any) -> Any:
        return httpx.post(url, json={"jsonrpc": "2.0", "id": 1, **message}).json()["error"]["code"]

    assert httpx.post(url, content=b"{").json()["error"]["code"] == -32700
    assert post(method=7) == -32600
    assert post(method="resources/list") == -32601
    assert post(method="tools/call", params=[1]) == -32602
    assert post(method="tools/call", params={"name": "add", "arguments": "text"}) == -32602
    assert httpx.get(url).status_code == 405


@pytest.mark.asyncio
async def test_databases_can_be_described_and_queried_but_only_current_written(server: Server) -> None:
    env = await server.fleet().make("notes")
    await env.instance.load()
    current, seed = env.db("current"), env.db("seed")

    (table,) = (await current.describe()).tables
    assert table.name == "notes" and table.sql.startswith("CREATE TABLE notes")
    assert [(c["name"], c["primary_key"], c["notnull"]) for c in table.columns] == [
        ("id", True, False),
        ("text", False, True),
        ("stars", False, False),
    ]
    found = await current.query("SELECT text, stars FROM notes WHERE stars > ?", [3])
    assert (found.columns, found.rows) == (["text", "stars"], [["from None/None", 5]])
    assert await current.table("notes").eq("text", "milk").first() == {"id": 1, "text": "milk", "stars": 3}

    written = await current.exec("UPDATE notes SET stars = 1")
    assert (written.success, written.rows_affected) == (True, 3)
    for refused in (
        await current.query("DELETE FROM notes"),
        await seed.exec("DELETE FROM notes"),
        await current.query("SELECT nothing FROM notes"),
        await current.query("SELECT 1; SELECT 2"),
    ):
        assert refused.success is False and refused.error
    assert [row[0] for row in (await current.query("SELECT stars FROM notes")).rows] == [1, 1, 1]
    assert (await seed.query("SELECT count(*) FROM notes")).rows == [[3]]


@pytest.mark.asyncio
async def test_a_query_reaches_no_other_instance_and_does_not_hold_up_the_server(server: Server) -> None:
    fleet = server.fleet()
    mine, theirs = await fleet.make("notes"), await fleet.make("notes")
    await mine.instance.load()
    folder = _newest_folder(os.getpid())
    target = folder / f"{theirs.instance_id}.db"
    assert target.exists()
    for statement in (f"ATTACH '{target}' AS theirs", f"VACUUM INTO '{folder}/copy.db'", "PRAGMA journal_mode = WAL"):
        refused = await mine.db("current").exec(statement)
        assert refused.success is False, statement
    endless = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"
    started = time.monotonic()
    refused = await mine.db("current").query(endless)
    assert "longer than" in refused.error and time.monotonic() - started < 6


# ----------------------------------------------------------------------------------------------------- verifiers


async def verify(env: Any, code: str, **keywords: Any) -> Any:
    return await Task(key="t", prompt="p", env_id="notes", verifier_func=code).verify_detailed_async(env, **keywords)


COUNTS_NOTES = """
def verify(env, final_answer=None, conversation=None):
    env.instance.load()
    new = env.db("current").table("notes").count() - env.db("seed").table("notes").count()
    print("new:", new, "answer:", final_answer, "turns:", len(conversation or []))
    return 1.0 if new == 1 and final_answer == "done" else 0.0
"""


@pytest.mark.asyncio
async def test_a_verifier_grades_the_state_and_the_answer(server: Server) -> None:
    env = await server.fleet().make("notes")
    untouched = await verify(env, COUNTS_NOTES, final_answer="done")
    async with tools_of(env) as tools:
        await tools.call_tool("add", {"text": "tea"})
    conversation = [{"role": "user", "content": "hi"}]
    right = await verify(env, COUNTS_NOTES, final_answer="done", conversation=conversation)
    wrong = await verify(env, COUNTS_NOTES, final_answer="dunno")
    assert [(r.success, r.result) for r in (untouched, right, wrong)] == [(True, 0.0), (True, 1.0), (True, 0.0)]
    assert right.stdout == "new: 1 answer: done turns: 1\n"
    assert right.execution_id != wrong.execution_id
    no_keywords = await verify(env, "def verify(env):\n    return env.env_variables == {}\n", final_answer="ignored")
    assert (no_keywords.success, no_keywords.result) == (True, True)


@pytest.mark.asyncio
async def test_a_bundle_is_uploaded_once(server: Server) -> None:
    env = await server.fleet().make("notes")
    task = Task(key="t", prompt="p", env_id="notes", verifier_func="def verify(env):\n    return 1\n")
    first, second = await task.verify_detailed_async(env), await task.verify_detailed_async(env)
    assert (first.bundle_cache_hit, second.bundle_cache_hit) == (False, True)
    assert (first.result, second.result) == (1, 1)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return undefined_name", "NameError"),
        ("raise ValueError('no such ticket')", "ValueError: no such ticket"),
        ("raise SystemExit(0)", "SystemExit"),
        ("return object()", "not JSON serializable"),
        ("return float('nan')", "ValueError"),
        ("return env.db('current').table('no_such_table').all()", "no such table"),
        ("return 'x' * (1 << 30)", "MemoryError"),
        ("import os; os._exit(0)", "ended without a verdict"),
        ("import time; time.sleep(60)", "killed"),
        ("while True: pass", "killed"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import os; os.kill(os.getppid(), 9)", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "Error"),
        ("open('/tmp/fleet-rl-forbidden', 'w')", "PermissionError"),
        ("import os; os.unlink('/etc/hostname')", "PermissionError"),
        ("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (9, 9))", "not allowed"),
        ("env.db('current').execute('DELETE FROM notes', ())", "readonly"),
        ("import os; os.chmod('/tmp', 0o777)", "PermissionError"),
        ("import os; os.truncate('/etc/hostname', 0)", "PermissionError"),
        ("open('/proc/self/mem', 'rb+')", "PermissionError"),
        ("import urllib.request; urllib.request.urlopen('http://127.0.0.1:9')", "Operation not permitted"),
        ("import mmap; mmap.mmap(-1, 1 << 30)", "annot allocate memory"),
        ("import resource; resource.setrlimit(resource.RLIMIT_CPU, (9999, 9999))", "not allowed"),
        (
            "import threading\n    def burn():\n        while True: pass\n"
            "    for _ in range(4): threading.Thread(target=burn).start()\n    burn()",
            "killed",
        ),
        (
            "import sqlite3; sqlite3.connect('/tmp/fleet-rl-forbidden').execute('CREATE TABLE t (x)')",
            "unable to open database file",
        ),
        ("import os; os.write(3, b'\\0\\0\\0\\2{}'); import time; time.sleep(60)", "ended without a verdict"),
    ],
)
async def test_a_failing_or_forbidden_verifier_is_a_failure_and_never_a_score(
    server: Server, body: str, error: str
) -> None:
    env = await server.without_retries().make("notes")
    seconds = []
    while not seconds or (min(seconds) > VERIFIER_TIMEOUT_S + 3 and len(seconds) < 2):  # other work shares this machine
        started = time.monotonic()
        failed = await verify(env, f"def verify(env, final_answer=None):\n    {body}\n")
        seconds.append(time.monotonic() - started)
        assert (failed.success, failed.result) == (False, None), failed
        assert error in failed.error["message"], failed.error
    assert min(seconds) < VERIFIER_TIMEOUT_S + 3
    assert not os.path.exists("/tmp/fleet-rl-forbidden")
    healthy = await verify(env, "def verify(env):\n    return env.db('current').table('notes').count()\n")
    assert (healthy.success, healthy.result) == (True, 3)


@pytest.mark.asyncio
async def test_a_child_is_used_again_unless_a_verifier_failed_in_it_or_left_a_thread(server: Server) -> None:
    env = await server.fleet().make("notes")
    ask = "def verify(env):\n    import os, sys, threading, time\n    {}\n    return os.getpid()\n"

    async def children() -> set[int]:
        return {(await verify(env, ask.format("pass"))).result for _ in range(6)}

    kept = await children()
    assert len(kept) <= 2 and await children() == kept, "two workers, one child each"
    for _ in range(4):
        assert (await verify(env, ask.format("sys.setrecursionlimit(50); raise ValueError"))).success is False
        assert (await verify(env, ask.format("threading.Thread(target=time.sleep, args=(60,)).start()"))).success
    assert not kept & await children()


@pytest.mark.asyncio
async def test_sandboxed_code_sees_no_secret_of_the_server(server: Server) -> None:
    env = await server.fleet().make("notes")
    code = "def verify(env):\n    import os\n    return [sorted(os.environ), sorted(os.listdir('/proc/self/fd'))]\n"
    names, descriptors = (await verify(env, code)).result
    assert set(names) <= {"PATH", "LANG", "TZ", "LC_CTYPE"}
    assert descriptors == ["0", "1", "2", "3", "4"], "null three times, the worker's socket, and the listing itself"


@pytest.mark.asyncio
@pytest.mark.skipif(not can_limit_reading("/tmp"), reason="this kernel has no Landlock")
async def test_sandboxed_code_reads_its_own_databases_and_no_other_file(server: Server, tmp_path: Path) -> None:
    fleet = server.without_retries()
    env, other = await fleet.make("notes"), await fleet.make("notes")
    (tmp_path / "secret").write_text("swordfish")
    folder = _newest_folder(os.getpid())
    assert list(folder.glob("*.db")), "there is something to find"
    attacks = [
        f"return open({str(tmp_path / 'secret')!r}).read()",
        f"return open({str(REPOSITORY / 'pyproject.toml')!r}).read()",
        f"return open('/proc/{os.getpid()}/environ').read()",
        "return open('/etc/passwd').read()",
        f"import os; return os.listdir({str(folder)!r})",
        "import os; return os.listdir('/')",
    ]
    for attack in attacks:
        failed = await verify(env, f"def verify(env):\n    {attack}\n")
        assert failed.success is False and "PermissionError" in failed.error["message"], (attack, failed)
    reads = "import decimal, zoneinfo\ndef verify(env):\n    return env.db('seed').table('notes').count()\n"
    assert (await verify(other, reads)).result == 3


@pytest.mark.asyncio
async def test_verifiers_can_use_the_sdks_own_helpers_and_diff(server: Server) -> None:
    env = await server.fleet().make("notes")
    async with tools_of(env) as tools:
        await tools.call_tool("add", {"text": "tea"})
    code = """
from fleet.verifiers import IgnoreConfig
def verify(env, final_answer=None):
    assert normalized_contains("TEA", final_answer)
    difference = env.db("seed").diff(env.db("current"), IgnoreConfig(table_fields={"notes": {"stars"}}))
    difference.expect_only([{"table": "notes", "pk": 4, "field": None, "after": "__added__"}])
    return TASK_SUCCESSFUL_SCORE
"""
    right = await verify(env, code, final_answer="Some tea.")
    assert (right.success, right.result) == (True, 1), right.error
    unchanged = "def verify(env):\n    env.db('seed').diff(env.db('current')).expect_only([])\n    return 1\n"
    wrong = await verify(env, unchanged)
    assert wrong.success is False and "AssertionError: Unexpected" in wrong.error["message"], wrong


@pytest.mark.asyncio
async def test_many_verifications_at_once_do_not_mix(server: Server) -> None:
    fleet = server.fleet()
    envs = [await fleet.make("notes", data_key=f"d{i}") for i in range(LIMIT)]
    code = (
        "def verify(env, final_answer=None):\n    return env.db('current').table('notes').eq('id', 3).first()['text']\n"
    )
    verdicts = await asyncio.gather(*(verify(env, code) for env in envs * 20))
    assert [v.error for v in verdicts] == [None] * len(verdicts)
    assert [v.result for v in verdicts] == [f"from d{i}/None" for i in range(LIMIT)] * 20


def test_query_builder_agrees_with_the_sdks(tmp_path: Path) -> None:
    path = str(tmp_path / "notes.db")
    with contextlib.closing(sqlite3.connect(path)) as connection:
        Notes().seed(connection, "k", "v")
        connection.execute("CREATE TABLE authors (note INTEGER, name TEXT)")
        connection.executemany("INSERT INTO authors VALUES (?, ?)", [(1, "ana"), (3, "ben")])
        connection.commit()
    ours = Database("current", path)
    theirs = SQLiteResource(Resource(name="c", type=ResourceType.db, mode=ResourceMode.ro), db_path=path)
    chains = [
        lambda t: t.all(),
        lambda t: t.count(),
        lambda t: t.select("text", "stars").sort("text", desc=True).limit(2).all(),
        lambda t: t.eq("text", "milk").first(),
        lambda t: t.neq("text", "milk").sort("id").all(),
        lambda t: t.where({"text": "milk"}, stars=3).count(),
        lambda t: t.gt("stars", 3).all() + t.gte("stars", 3).all(),
        lambda t: t.lt("stars", 5).all() + t.lte("stars", 5).all(),
        lambda t: t.in_("id", [1, 3]).all() + t.not_in("id", [1]).all(),
        lambda t: t.is_null("stars").all() + t.not_null("stars").all(),
        lambda t: t.ilike("text", "M%").all(),
        lambda t: t.join("authors", {"id": "note"}).select("text", "name").sort("text").all(),
        lambda t: t.eq("text", "nothing").first(),
        lambda t: bool(t.eq("id", 1).assert_exists()) and bool(t.eq("id", 9).assert_none()),
        lambda t: bool(t.eq("id", 1).assert_eq("text", "milk")),
    ]
    for number, chain in enumerate(chains):
        assert chain(ours.table("notes")) == chain(theirs.table("notes")), number
    for builder in (ours.table("notes"), theirs.table("notes")):
        for broken in (lambda b: b.eq("id", 9).assert_exists(), lambda b: b.assert_none()):
            with pytest.raises(AssertionError):
                broken(builder)


# ------------------------------------------------------------------------------- what arrives over the network


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = str(path)

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def _execute(server: Server, instance_id: str, raw: bytes) -> httpx.Response:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("verifier.py", "def verify(env, **keywords):\n    return 1\n")
    bundle = buffer.getvalue()
    body = {
        "sha256": hashlib.sha256(bundle).hexdigest(),
        "bundle": base64.b64encode(bundle).decode(),
        "args": base64.b64encode(raw).decode(),
        "args_array": [{"env": instance_id}],
        "function_name": "verify",
    }
    headers = {"Authorization": f"Bearer {KEY}"}
    return httpx.post(f"{server.url}/v1/verifiers/execute", json=body, headers=headers, timeout=20)


@pytest.mark.asyncio
async def test_a_malicious_pickle_is_refused_and_does_nothing(server: Server, tmp_path: Path) -> None:
    env = await server.fleet().make("notes")
    mark = tmp_path / "touched"

    def wrap(value: Any, protocol: int = pickle.HIGHEST_PROTOCOL) -> bytes:
        return pickle.dumps({"args": (None, {"env": env.instance_id}), "kwargs": {"x": value}}, protocol)

    assert _execute(server, env.instance_id, wrap("plain")).json()["result"] == 1
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        refused = _execute(server, env.instance_id, wrap(_Touch(mark), protocol))
        assert refused.status_code == 400, refused.text
        assert "only a pickle of plain data" in refused.json()["detail"]
    assert not mark.exists()
    pickle.loads(wrap(_Touch(mark)))
    assert mark.exists(), "the pickle would have done harm"


def test_pickles_that_are_not_plain_data_or_explode_are_refused() -> None:
    def decode(raw: bytes) -> Any:
        return decode_arguments(base64.b64encode(raw).decode())

    def wrap(value: Any) -> bytes:
        return pickle.dumps({"args": (None, "a", {"env": "i"}), "kwargs": {"x": value}})

    plain = {"a": [1, -2.5, None, True, "é", (3,)], "b": {"c": 10**30}}
    assert decode(wrap(plain)) == (["a"], {"x": plain})
    bomb: list[Any] = ["x"] * 10
    for _ in range(30):
        bomb = [bomb, bomb]
    cycle: list[Any] = []
    cycle.append(cycle)
    memo_bomb = b"\x80\x04}r\xff\xff\xff\x7f."  # LONG_BINPUT to a slot that would claim gigabytes
    for bad in (wrap(bomb), wrap(cycle), wrap(b"bytes"), wrap({1: 2}), wrap({1, 2}), memo_bomb, b"\x80", b"junk."):
        with pytest.raises(ApiError, match="plain data"):
            decode(bad)
    with pytest.raises(ApiError, match="plain data"):
        decode_arguments("%%%")


def test_bundles_are_checked_and_the_oldest_leave_when_the_store_is_full() -> None:
    def bundle(source: str, name: str = "verifier.py") -> tuple[str, str]:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, source)
        data = buffer.getvalue()
        return hashlib.sha256(data).hexdigest(), base64.b64encode(data).decode()

    store = BundleStore(max_bytes=250)
    keys = []
    for letter in "abc":
        sha256, encoded = bundle(letter * 100)
        store.add(sha256, encoded)
        keys.append(sha256)
    assert [key in store for key in keys] == [False, True, True]
    assert store.get(keys[2]) == "c" * 100
    with pytest.raises(ApiError, match="bundle not found"):
        store.get(keys[0])
    for sha256, encoded, reason in (
        ("0" * 64, bundle("x")[1], "SHA-256"),
        (hashlib.sha256(b"no zip").hexdigest(), base64.b64encode(b"no zip").decode(), "zip"),
        (*bundle("x", "other.py"), "verifier.py"),
        (*bundle("x" * (2 << 20)), "larger"),
    ):
        with pytest.raises(ApiError, match=reason):
            store.add(sha256, encoded)


def test_a_body_that_is_not_as_it_should_be_is_refused_by_field(server: Server) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    for body, reason in ((b"{", "body"), (b"[]", "body"), (b"{}", "env_key"), (b'{"env_key": 3}', "env_key")):
        refused = httpx.post(f"{server.url}/v1/env/instances", content=body, headers=headers)
        assert refused.status_code == 422 and reason in refused.json()["detail"], refused.text


# -------------------------------------------------------------------------------------------------------- faults


@pytest.mark.asyncio
async def test_a_lost_reply_to_make_is_recovered_without_a_second_instance(server: Server) -> None:
    server.arm({"route": "make", "kind": "status", "status": 503, "stage": "after", "count": 1})
    env = await server.fleet().make("notes", run_id="lost")  # the SDK repeats the request and gets a 409
    assert env.status == "running"
    assert [i["instance_id"] for i in server.get("/_local/instances") if i["run_id"] == "lost"] == [env.instance_id]


@pytest.mark.asyncio
async def test_status_faults_strike_after_skip_and_up_to_count(server: Server) -> None:
    fleet = server.without_retries()
    server.arm({"route": "account", "kind": "status", "status": 500, "message": "boom", "skip": 1, "count": 2})
    outcomes = []
    for _ in range(5):
        try:
            await fleet.account()
            outcomes.append("ok")
        except FleetAPIError as error:
            outcomes.append(str(error.status_code))
    assert outcomes == ["ok", "500", "500", "ok", "ok"]
    (fault,) = server.get("/_local/faults")["faults"]
    assert (fault["met"], fault["struck"]) == (5, 2)
    server.arm({"route": "make", "kind": "status", "status": 429, "retry_after_s": 7, "retryable": True})
    reply = httpx.post(f"{server.url}/v1/env/instances", json={}, headers={"Authorization": f"Bearer {KEY}"})
    assert (reply.status_code, reply.headers["Retry-After"]) == (429, "7")
    assert reply.json()["detail"]["retryable"] is True


@pytest.mark.asyncio
async def test_verifier_and_judge_faults_look_like_the_real_ones(server: Server) -> None:
    env = await server.fleet().make("notes")
    server.arm(
        {"route": "verify", "kind": "verifier_failure", "message": "proxy 502", "count": 1},
        {"route": "verify", "kind": "judge_error", "message": "rate limit", "count": 1},
    )
    code = "def verify(env):\n    return 1.0\n"
    failed, judged, fine = [await verify(env, code) for _ in range(3)]
    assert (failed.success, failed.error["message"]) == (False, "proxy 502")
    assert (judged.success, judged.result, judged.stdout) == (True, 0.0, "JUDGE ERROR: rate limit\n")
    assert (fine.success, fine.result) == (True, 1.0)


@pytest.mark.asyncio
async def test_tool_faults_strike_one_tool_only_and_before_it_runs(server: Server) -> None:
    env = await server.fleet().make("notes")
    seed = await texts(env)
    server.arm({"route": "tool", "kind": "tool_error", "tool": "add", "message": "backend down", "count": 1})
    async with tools_of(env) as tools:
        assert "notebook" in (await tools.call_tool("refuse", {})).content[0].text
        failed = await tools.call_tool("add", {"text": "lost"})
        assert (failed.isError, failed.content[0].text) == (True, "backend down")
        assert await texts(env) == seed
        assert (await tools.call_tool("add", {"text": "kept"})).isError is False


@pytest.mark.asyncio
async def test_half_a_body_is_a_broken_connection_after_the_effect(server: Server) -> None:
    env = await server.fleet().make("notes")
    server.arm({"route": "tool", "kind": "partial_body", "count": 1})
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "add", "arguments": {"text": "tea"}}}
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post(env.urls.root + "mcp", json=call)
        assert (await texts(env))[-1] == "tea"
        assert (await client.post(env.urls.root + "mcp", json=call)).json()["result"]["isError"] is False


@pytest.mark.asyncio
@pytest.mark.parametrize("status", [404, 502])
async def test_an_instance_that_starts_slowly_is_running_but_not_reachable_at_first(
    server: Server, status: int
) -> None:
    fleet = server.without_retries()
    server.arm({"route": "make", "kind": "slow_start", "status": status, "seconds": 3, "count": 1})
    slow, quick = await fleet.make("notes"), await fleet.make("notes")
    call = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
    async with httpx.AsyncClient() as client:
        for method, path in (("POST", "mcp"), ("POST", "api/v1/env/reset"), ("GET", "health")):
            reply = await client.request(method, slow.urls.root + path, json=call if path == "mcp" else None)
            assert reply.status_code == status, path
            assert (await client.request(method, quick.urls.root + path, json=call)).status_code == 200
        assert (await fleet.instance(slow.instance_id)).status == "running"
        async with asyncio.timeout(20):
            while (await client.post(slow.urls.root + "mcp", json=call)).status_code != 200:
                await asyncio.sleep(0.1)


@pytest.mark.asyncio
async def test_a_crash_of_the_sandbox_is_a_failure_and_the_next_verifier_has_a_new_one(server: Server) -> None:
    env = await server.fleet().make("notes")
    server.arm({"route": "verify", "kind": "verifier_crash", "count": 1})
    code = "def verify(env):\n    import time; time.sleep(0.2)\n    return 1.0\n"
    crashed, fine = await verify(env, code), await verify(env, code)
    assert (crashed.success, crashed.result) == (False, None) and "worker was lost" in crashed.error["message"]
    assert (fine.success, fine.result) == (True, 1.0)


@pytest.mark.parametrize("loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_whatever_kills_its_workers_the_sandbox_goes_on(tmp_path: Path, loop: Any) -> None:
    """Also a worker that dies with nothing to do, after which uvloop has an error of its own for its pipe."""
    job = Verification("def verify(env):\n    return 1.0\n", "verify", [], {}, {}, "i", "e", {}, 5.0)

    async def drill() -> list[list[bool]]:
        sandbox = VerifierSandbox(tmp_path)
        sandbox.start()
        try:
            verdicts = [await asyncio.gather(*(sandbox.run(job, crash=n % 3 == 0) for n in range(6))) for _ in range(5)]
            for child in psutil.Process().children():
                if str(tmp_path) in command_line(child):
                    child.kill()
            await asyncio.sleep(0.5)  # the loop has seen them go
            verdicts.append(await asyncio.gather(*(sandbox.run(job) for _ in range(6))))
            return [[verdict.success for verdict in round_] for round_ in verdicts]
        finally:
            await sandbox.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        rounds = runner.run(asyncio.wait_for(drill(), 60))
    assert [sum(successes) for successes in rounds[:-1]] == [4] * 5, "only those that were to crash have failed"
    assert rounds[-1] == [True] * 6, "nothing was under way in the workers that were killed"


@pytest.mark.asyncio
async def test_a_worker_that_hangs_costs_one_verdict_and_is_ended(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(verifier_sandbox, "_ANSWER_MARGIN_S", 0.5)
    job = Verification("def verify(env):\n    return 1.0\n", "verify", [], {}, {}, "i", "e", {}, 0.5)
    sandbox = VerifierSandbox(tmp_path, workers=1)
    sandbox.start()
    try:
        async with asyncio.timeout(30):
            while not (await sandbox.run(job)).success:  # the first one waits for the worker
                await asyncio.sleep(0.1)
        (worker,) = (child for child in psutil.Process().children() if str(tmp_path) in command_line(child))
        worker.suspend()
        hung = await sandbox.run(job)
        assert (hung.success, hung.error["message"]) == (False, "the verifier's worker was lost: no answer within 1 s")
        worker.wait(10)
        assert (await sandbox.run(replace(job, timeout_s=10.0))).success
    finally:
        await sandbox.close()


def test_a_worker_is_given_up_on_before_the_client_gives_up_on_the_verdict() -> None:
    waits_s = inspect.signature(FleetControl.verify).parameters["timeout_s"].default
    assert fleet_client.VERIFIER_TIMEOUT_S + verifier_sandbox._ANSWER_MARGIN_S < waits_s


@pytest.mark.asyncio
async def test_a_judge_brownout_ends(server: Server) -> None:
    env = await server.fleet().make("notes")
    code = "def verify(env):\n    return 1.0\n"
    await verify(env, code)  # what takes its time the first time
    server.arm({"route": "verify", "kind": "judge_error", "after_s": 0, "for_s": 2.0})
    during = await verify(env, code)
    await asyncio.sleep(2.05)
    assert ("JUDGE ERROR" in during.stdout, (await verify(env, code)).result) == (True, 1.0)


@pytest.mark.asyncio
async def test_a_scenario_sets_quota_and_time_to_live_until_the_next_one(server: Server) -> None:
    fleet = server.without_retries()
    httpx.post(f"{server.url}/_local/faults", json={"instance_limit": 1, "default_ttl_s": 1}).raise_for_status()
    assert (await fleet.account()).instance_limit == 1
    await fleet.make("notes")
    with pytest.raises(FleetInstanceLimitError):
        await fleet.make("notes")
    await asyncio.sleep(1.1)
    assert (await fleet.account()).instance_count == 0, "ended by the TTL of the scenario"
    server.arm()
    assert (await fleet.account()).instance_limit == LIMIT


@pytest.mark.asyncio
async def test_hanging_and_slow_replies_hold_up_nobody_else(server: Server) -> None:
    env = await server.fleet().make("notes")
    server.arm(
        {"route": "reset", "kind": "hang", "count": 1},
        {"route": "reset", "kind": "hang", "seconds": 0.1, "count": 1},
        {"route": "reset", "kind": "slow", "seconds": 0.3, "count": 1},
    )
    async with httpx.AsyncClient(timeout=30) as client:
        hanging = asyncio.create_task(client.post(env.urls.manager.reset, timeout=1.0))
        async with asyncio.timeout(10):
            while not (await client.get(f"{server.url}/_local/faults")).json()["faults"][0]["struck"]:
                await asyncio.sleep(0.02)
        assert (await client.post(env.urls.manager.reset)).status_code == 504
        started = time.monotonic()
        assert (await client.post(env.urls.manager.reset)).status_code == 200
        assert time.monotonic() - started >= 0.3
        assert (await client.post(env.urls.manager.reset)).status_code == 200
        with pytest.raises(httpx.ReadTimeout):
            await hanging


def test_the_same_seed_strikes_the_same_requests() -> None:
    def pattern(seed: int) -> list[bool]:
        injector = FaultInjector(FaultPlan(seed=seed, faults=(Fault(route="get", kind="hang", probability=0.5),)), {})
        return [injector._armed[0].strikes("get", None) for _ in range(64)]

    assert pattern(1) == pattern(1) != pattern(2)
    assert 16 < sum(pattern(1)) < 48


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("faults: [{route: make, kind: status, statuss: 500}]", "statuss"),
        ("faults: [{route: make, kind: judge_error}]", "works on route 'verify' only"),
        ("faults: [{route: reset, kind: slow}]", "needs 'seconds'"),
        ("faults: [{route: nowhere, kind: hang}]", "route"),
        ("faults: [", "not valid YAML"),
        ("[]", "the whole file"),
    ],
)
def test_a_bad_fault_file_is_one_clear_line(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "faults.yaml"
    path.write_text(text)
    with pytest.raises(FaultFileError) as refused:
        load_fault_plan(path)
    assert reason in str(refused.value) and str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_stats_count_what_happened(server: Server) -> None:
    before = server.get("/_local/stats")
    fleet = Fleet(api_key=KEY, base_url=server.url)
    env = fleet.make("notes")
    env.reset()
    call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "refuse"}}
    httpx.post(env.urls.root + "mcp", json=call)
    env.close()
    after = server.get("/_local/stats")
    grown = {
        key: after[key] - before.get(key, 0) for key in ("makes", "resets", "tool_calls", "tool_errors", "deletes")
    }
    assert grown == {"makes": 1, "resets": 1, "tool_calls": 1, "tool_errors": 1, "deletes": 1}


# -------------------------------------------------------------------------------------------------- the process


def _newest_folder(pid: int) -> Path:
    """A server of the same process id may have been killed here, and have left its own."""
    return max(_folders(pid), key=lambda folder: folder.stat().st_mtime)


def _folders(pid: int) -> list[Path]:
    return list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}{pid}-*"))


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            found += [int(child), *_children(int(child))]
    return found


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _wait_until_gone(server_pid: int, workers: list[int]) -> None:
    _wait_for(lambda: not any(map(_alive, [server_pid, *workers])), "server and workers end")
    _wait_for(lambda: not _folders(server_pid), "the temporary folder is removed")


def _warm(url: str, pid: int) -> list[int]:
    """Wait until both sandbox workers and their children are there; their ids."""
    assert httpx.get(f"{url}/v1/account", headers={"Authorization": f"Bearer {KEY}"}).status_code == 200
    _wait_for(lambda: len(_children(pid)) >= 4, "two workers with a child each")
    assert len(_folders(pid)) == 1
    return _children(pid)


def test_the_process_starts_in_two_seconds_and_serves_its_registered_applications() -> None:
    seconds: list[float] = []
    while len(seconds) < 6 and min(seconds, default=9.0) >= 2.0:  # other work shares this machine, at times all of it
        started = time.monotonic()
        with LocalFleetProcess() as fleet:
            seconds.append(time.monotonic() - started)
            keys = [env.env_key for env in Fleet(api_key=KEY, base_url=fleet.url).list_envs()]
    assert min(seconds) < 2.0, seconds
    assert keys == ["tracker", "booking", "mail", "office"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_told_to_end_it_leaves_no_process_and_no_folder_even_with_a_request_hanging(
    tmp_path: Path, number: int
) -> None:
    faults = tmp_path / "faults.yaml"
    faults.write_text("faults: [{route: account, kind: hang, skip: 1}]")
    fleet = LocalFleetProcess(faults=faults).start()
    workers = _warm(fleet.url, fleet.pid)
    hanging = threading.Thread(target=_ignore_errors, args=(fleet.url,), daemon=True)
    hanging.start()
    time.sleep(0.2)
    os.kill(fleet.pid, number)
    started = time.monotonic()
    assert fleet.stop() == 0
    assert time.monotonic() - started < 5
    _wait_until_gone(fleet.pid, workers)


def _ignore_errors(url: str) -> None:
    with contextlib.suppress(httpx.HTTPError):
        httpx.get(f"{url}/v1/account", headers={"Authorization": f"Bearer {KEY}"}, timeout=20)


PARENT = """
import sys, time
from actors.envs.local_fleet.process import LocalFleetProcess
fleet = LocalFleetProcess().start()
print(fleet.url, fleet.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("victim", ["parent", "server"])
def test_killed_outright_it_leaves_no_process_and_no_folder(victim: str) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, cwd=REPOSITORY, text=True)
    try:
        url, pid = parent.stdout.readline().split()
        workers = _warm(url, int(pid))
        os.kill(parent.pid if victim == "parent" else int(pid), signal.SIGKILL)
        _wait_until_gone(int(pid), workers)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()


def test_it_can_end_when_stdin_closes() -> None:
    command = [sys.executable, "-m", "actors.envs.local_fleet", "--until-stdin-closes"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=REPOSITORY) as process:
        hello = json.loads(process.stdout.readline())
        assert hello["pid"] == process.pid
        workers = _warm(hello["url"], process.pid)
        process.stdin.close()
        assert process.wait(10) == 0
    _wait_until_gone(process.pid, workers)


def _failing_start(*arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "actors.envs.local_fleet", *arguments]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20)
    return ended.returncode, ended.stderr


def test_one_that_died_is_started_again_where_its_clients_look_for_it() -> None:
    with LocalFleetProcess() as fleet:
        url, pid = fleet.url, fleet.pid
        workers = _warm(url, pid)
        Fleet(api_key=KEY, base_url=url).make("tracker")
        os.kill(pid, signal.SIGKILL)
        _wait_until_gone(pid, workers)
        with pytest.raises(LocalFleetError, match="the local Fleet ended with exit code -9"):
            fleet.check()
        fleet.restart()
        fleet.check()
        assert fleet.url == url and fleet.pid != pid
        assert Fleet(api_key=KEY, base_url=url).instances() == []


def test_a_start_that_cannot_work_is_one_clear_line_and_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, said = _failing_start("--port", str(port))
        assert code == 2 and said.count("\n") == 1 and f"127.0.0.1:{port}: port in use" in said, said
        with pytest.raises(LocalFleetError, match="exit code 2.*port in use"):
            LocalFleetProcess(port=port).start()
    code, said = _failing_start("--faults", str(tmp_path / "none.yaml"))
    assert code == 2 and said.count("\n") == 1 and "none.yaml" in said, said
    code, said = _failing_start("--host", "192.0.2.1")
    assert code == 2 and said.count("\n") == 1 and "192.0.2.1" in said, said


NOTEBOOK = """
from actors.envs.local_fleet.application import Tool


class Notebook:
    env_key, name, description, versions = "notebook", "Notebook", "Pages", ("v1.0.0",)
    tools = (Tool("pages", "how many", {"type": "object", "properties": {}}, lambda c, a, v: {"pages": 3}),)

    def seed(self, connection, data_key, data_version):
        connection.execute("CREATE TABLE pages (id INTEGER PRIMARY KEY)")


class Toolless(Notebook):
    tools = ()


class Clash(Notebook):
    env_key = "mail"


broken = 7
"""


def test_an_application_of_the_users_own_is_hosted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_notebook.py").write_text(NOTEBOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with LocalFleetProcess(arguments=["--applications", "my_notebook:Notebook"]) as process:
        fleet = Fleet(api_key=KEY, base_url=process.url)
        assert "notebook" in [env.env_key for env in fleet.list_envs()]
        env = fleet.make("notebook")
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "pages"}}
        assert json.loads(httpx.post(env.urls.root + "mcp", json=call).json()["result"]["content"][0]["text"]) == {
            "pages": 3
        }
        env.close()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("my_notebook", "expected MODULE:ATTRIBUTE"),
        ("no_such_module:App", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("my_notebook:Missing", "has no attribute 'Missing'"),
        ("my_notebook:broken", "it has no 'env_key'"),
        ("my_notebook:Toolless", "'tools' must be"),
        ("my_notebook:Clash", "'mail' is hosted already"),
    ],
)
def test_an_application_that_cannot_be_hosted_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    (tmp_path / "my_notebook.py").write_text(NOTEBOOK)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, said = _failing_start("--applications", name)
    assert code == 2 and said.count("\n") == 1 and reason in said and name in said, said


@pytest.mark.asyncio
async def test_versions_of_an_application_differ_in_their_tools() -> None:
    with LocalFleetProcess() as process:
        fleet = AsyncFleet(api_key=KEY, base_url=process.url)
        found = {}
        for version in ("v1.0.0", "v1.1.0"):
            env = await fleet.make(f"booking:{version}", data_key="tower:s1")
            async with tools_of(env) as tools:
                found[version] = {tool.name for tool in (await tools.list_tools()).tools}
            await env.close()
    assert found["v1.1.0"] - found["v1.0.0"] == {"invite_guest"}
