"""Faults on demand: what a hosted Fleet does on a bad day, made repeatable so that tests and drills can rely on it."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.envs.local_fleet.wire import JsonReply, error_reply

Route = Literal[
    "account", "envs", "make", "get", "list", "delete", "heartbeat",
    "reset", "resources", "describe", "query", "health", "mcp", "tool", "check", "verify",
]  # fmt: skip
Kind = Literal[
    "status", "slow", "hang", "partial_body", "slow_start",
    "verifier_failure", "verifier_crash", "judge_error", "tool_error",
]  # fmt: skip
Handler = Callable[[Request], Awaitable[Response]]

_ONLY_ON: dict[str, str] = {
    "slow_start": "make",
    "verifier_failure": "verify",
    "verifier_crash": "verify",
    "judge_error": "verify",
    "tool_error": "tool",
}
# What an instance itself answers, and what a gateway answers for it while it starts.
_OF_AN_INSTANCE = ("reset", "resources", "describe", "query", "health", "mcp")


class FaultFileError(ValueError):
    """A fault file that cannot be used. The message names the file and the field."""


class Fault(BaseModel):
    """One fault. It strikes the requests of ``route`` that come after the first ``skip``, each with ``probability``,
    until it has struck ``count`` times. ``mcp`` is any MCP request, ``tool`` only ``tools/call``.

    ``stage: after`` lets the request take effect first and then spoils the reply, as a broken connection would.
    ``partial_body`` always comes after: it sends the headers and half of the real reply, and closes the connection.
    ``slow_start`` lets an instance be made that answers ``status`` on its own paths for the next ``seconds``.
    ``verifier_crash`` kills the sandbox process in which the verifier runs.

    ``after_s`` and ``for_s`` bound the fault in time, in seconds since the plan was armed.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    route: Route
    kind: Kind
    status: int = Field(503, ge=400, le=599)  # for kinds "status" and "slow_start"
    seconds: float = Field(3600.0, gt=0, le=86_400)  # for "slow" and "slow_start"; for "hang" the longest wait
    message: str = "injected fault"
    retryable: bool | None = None  # for kind "status": adds this flag to the error body
    retry_after_s: int | None = Field(None, ge=0)  # for kind "status": a Retry-After header
    stage: Literal["before", "after"] = "before"
    tool: str | None = None  # for route "tool": only calls of this tool
    probability: float = Field(1.0, gt=0, le=1)
    count: int | None = Field(None, ge=1)
    skip: int = Field(0, ge=0)
    after_s: float = Field(0.0, ge=0)
    for_s: float | None = Field(None, gt=0)  # None: until the plan is replaced

    @model_validator(mode="after")
    def _fits_route(self) -> Fault:
        wanted = _ONLY_ON.get(self.kind, self.route)
        if self.route != wanted:
            raise ValueError(f"kind '{self.kind}' works on route '{wanted}' only, not on '{self.route}'")
        if self.tool is not None and self.route != "tool":
            raise ValueError(f"'tool' works on route 'tool' only, not on '{self.route}'")
        if self.kind in ("slow", "slow_start") and self.seconds == 3600.0:
            raise ValueError(f"kind '{self.kind}' needs 'seconds'")
        if self.kind == "slow_start" and self.status not in (404, 502):
            raise ValueError(f"kind 'slow_start' needs 'status' 404 or 502, not {self.status}")
        return self


class FaultPlan(BaseModel):
    """A scenario: all faults of one server, and the limits of its account. The same seed and the same order of requests
    strike the same requests, apart from faults bounded in time."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    seed: int = 0
    faults: tuple[Fault, ...] = ()
    instance_limit: int | None = Field(None, ge=1)  # running at once; None: as the server was started
    default_ttl_s: int | None = Field(None, ge=1, le=86_400)  # of an instance made without a TTL; None: one hour


def load_fault_plan(path: str | Path) -> FaultPlan:
    """Read a plan from YAML or JSON.

    Raises:
        FaultFileError: in one line.
    """
    path = Path(path)
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FaultFileError(f"fault file {path} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FaultFileError(f"fault file {path} is not valid YAML or JSON: {' '.join(str(error).split())}") from None
    try:
        return FaultPlan.model_validate(raw if raw is not None else {})
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the whole file"
        raise FaultFileError(f"fault file {path}: {field}: {first['msg']}") from None


class _Armed:
    """A fault and how often it was met and has struck."""

    def __init__(self, fault: Fault, seed: str) -> None:
        self.fault = fault
        self.met = 0
        self.struck = 0
        self._random = random.Random(seed)

    def strikes(self, route: str, tool: str | None, elapsed_s: float = 0.0) -> bool:
        """``elapsed_s``: since the plan was armed."""
        fault = self.fault
        if elapsed_s < fault.after_s or (fault.for_s is not None and elapsed_s >= fault.after_s + fault.for_s):
            return False
        if fault.route != route or (fault.tool is not None and fault.tool != tool):
            return False
        self.met += 1
        if self.met <= fault.skip or (fault.count is not None and self.struck >= fault.count):
            return False
        if self._random.random() >= fault.probability:
            return False
        self.struck += 1
        return True


class FaultInjector:
    """Stands between a route and its handler."""

    def __init__(self, plan: FaultPlan, stats: Counter[str]) -> None:
        self._stats = stats
        self._armed: list[_Armed] = []
        self._armed_at = 0.0
        self._starting: dict[str, tuple[float, Fault]] = {}  # by instance: until when, on the monotonic clock
        self.arm(plan)

    def arm(self, plan: FaultPlan) -> None:
        """Replace all faults and forget the old ones' counts."""
        self._armed = [_Armed(fault, f"{plan.seed}/{index}") for index, fault in enumerate(plan.faults)]
        self._armed_at = time.monotonic()
        self._starting.clear()

    def report(self) -> list[dict[str, Any]]:
        return [{**armed.fault.model_dump(), "met": armed.met, "struck": armed.struck} for armed in self._armed]

    async def guard(self, route: Route, request: Request, handler: Handler, tool: str | None = None) -> Response:
        """Answer the request: by the handler, or by the first fault that strikes."""
        if not self._armed:
            return await handler(request)
        starting = self._still_starting(route, request)
        if starting is not None:
            return error_reply(starting.status, starting.message)
        elapsed_s = time.monotonic() - self._armed_at
        fault = next((armed.fault for armed in self._armed if armed.strikes(route, tool, elapsed_s)), None)
        if fault is None:
            return await handler(request)
        self._stats["faults"] += 1
        if fault.kind == "partial_body":
            return _HalfReply(await handler(request))
        if fault.kind == "slow_start":
            return self._slow_start(fault, await handler(request))
        if fault.kind == "verifier_crash":
            request.state.crash_verifier = True
            return await handler(request)
        if fault.kind == "slow":
            return await self._slow(fault, request, handler)
        if fault.stage == "after":
            await handler(request)
        if fault.kind == "hang":
            return await self._hang(fault, request)
        return await _spoiled_reply(fault, request)

    def _slow_start(self, fault: Fault, made: Response) -> Response:
        instance_id = json.loads(made.body)["instance_id"]
        self._starting[instance_id] = (time.monotonic() + fault.seconds, fault)
        return made

    def _still_starting(self, route: Route, request: Request) -> Fault | None:
        """The fault because of which the instance asked is not up yet."""
        if not self._starting or route not in _OF_AN_INSTANCE:
            return None
        now = time.monotonic()
        self._starting = {key: start for key, start in self._starting.items() if start[0] > now}
        start = self._starting.get(request.path_params["instance_id"])
        return start[1] if start else None

    async def _slow(self, fault: Fault, request: Request, handler: Handler) -> Response:
        if fault.stage == "before":
            await asyncio.sleep(fault.seconds)
            return await handler(request)
        response = await handler(request)
        await asyncio.sleep(fault.seconds)
        return response

    async def _hang(self, fault: Fault, request: Request) -> Response:
        """Say nothing until the client gives up or the longest wait is over."""
        await request.body()  # what is received after the body can only be the disconnect
        try:
            async with asyncio.timeout(fault.seconds):
                while (await request.receive())["type"] != "http.disconnect":
                    pass
        except TimeoutError:
            return error_reply(504, fault.message)
        return Response(status_code=499)


class _HalfReply(Response):
    """The headers and half of the body of a reply. The server closes a connection whose reply is left unfinished."""

    def __init__(self, whole: Response) -> None:
        super().__init__(whole.body, whole.status_code)
        self.raw_headers = whole.raw_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body[: len(self.body) // 2], "more_body": True})


async def _spoiled_reply(fault: Fault, request: Request) -> Response:
    if fault.kind == "verifier_failure":
        error = {"type": "RuntimeError", "message": fault.message, "traceback": ""}
        return JsonReply({"success": False, "result": None, "error": error, "stdout": "", "execution_time_ms": 1})
    if fault.kind == "judge_error":
        stdout = f"JUDGE ERROR: {fault.message}\n"
        return JsonReply({"success": True, "result": 0.0, "error": None, "stdout": stdout, "execution_time_ms": 1})
    if fault.kind == "tool_error":
        content = [{"type": "text", "text": fault.message}]
        message_id = json.loads(await request.body())["id"]
        return JsonReply({"jsonrpc": "2.0", "id": message_id, "result": {"content": content, "isError": True}})
    detail: Any = fault.message
    if fault.retryable is not None:
        detail = {"message": fault.message, "retryable": fault.retryable}
    headers = None if fault.retry_after_s is None else {"Retry-After": str(fault.retry_after_s)}
    return error_reply(fault.status, detail, headers)
