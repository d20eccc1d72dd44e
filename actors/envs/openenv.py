"""Any OpenEnv server as an environment: one WebSocket, one session of the server, one episode.

Why not openenv's own client: when its socket is gone it connects again, to a new environment that nobody has reset, and
the episode goes on in there, to a reward of zero; a call that times out drops the socket, and with it the episode; the
code of an error is only found in the error's text; and its close may take the ten seconds of a handshake.
Here a socket is never replaced: losing it is losing the episode, with a reason.

Replies carry no id, they come in the order of the requests. So a request waits until no reply is owed any more.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from actors.config import DeadlinesConfig
from actors.envs.http_session import http_session
from actors.envs.mcp_tools import UNKNOWN_OUTCOME, ToolResult, normalise_schema, openai_tool, tool_result
from actors.task import Task
from actors.trajectory import Graded, InfraFailed, Outcome, Ungraded

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0  # one attempt; attempts are repeated until deadlines.provision
CLOSE_TIMEOUT_S = 1.0  # for the server's half of the closing handshake
PING_INTERVAL_S = 40.0  # a peer that does not answer for half of it is gone
MAX_MESSAGE_BYTES = 100 * 2**20
MAX_ERROR_CHARS = 500
ANSWER = "{answer}"
# Errors after which the server closes the session.
FATAL_CODES = ("CAPACITY_REACHED", "FACTORY_ERROR", "SESSION_ERROR")
# What an MCP environment says of every call once the server has ended its session behind an open socket.
REAPED = "environment is closed"


class OpenEnvFailure(Exception):
    """The server cannot be used, or did not answer in time.

    Attributes:
        transient: connecting again makes sense.
    """

    def __init__(self, message: str, *, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class EpisodeLost(OpenEnvFailure):
    """The server's session is gone, and the episode with it."""


@dataclass(frozen=True)
class OpenEnvObservation:
    """What the environment answered.

    Attributes:
        tools: OpenAI function format; set by reset.
        result: what reset or the action gave; text, a dict, a list, or OpenAI content blocks.
        error: why there is no result, in words for the policy.
        done: the server ended the episode.
        reward: None where the server gave none.
    """

    tools: list[dict[str, Any]] = field(default_factory=list)
    result: Any = None
    error: str | None = None
    done: bool = False
    reward: float | None = None


# ---------------------------------------------------------------------------------------------------------------
# Socket


class Session:
    """One connection to a server's ``/ws``, which is one session there. It is never opened twice.

    ``lost`` is the reason why it is gone, or None.
    """

    def __init__(self, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._ws = ws
        self._reply: asyncio.Future[dict[str, Any] | None] | None = None  # owed by the server
        self.lost: str | None = None
        self.lost_code: str | None = None  # OpenEnv's error code, where the server gave one
        self._reading = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, url: str, headers: Mapping[str, str]) -> Session:
        """Open a connection. The server accepts it before it knows whether it has room: ask something to find out."""
        ws = await http_session().ws_connect(
            f"{url}/ws",
            headers=headers,
            timeout=aiohttp.ClientWSTimeout(ws_close=CLOSE_TIMEOUT_S),
            heartbeat=PING_INTERVAL_S,
            max_msg_size=MAX_MESSAGE_BYTES,
        )
        return cls(ws)

    async def request(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a message and wait for the server's. A caller that gives up leaves the reply owed, see :meth:`settle`.

        Raises:
            EpisodeLost: the connection is gone.
        """
        if self._reply is not None:
            raise RuntimeError("a reply is still owed")
        self._check()
        self._reply = asyncio.get_running_loop().create_future()
        try:
            await self._ws.send_str(json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
        except (aiohttp.ClientError, ConnectionError) as error:
            self._lose(f"the connection broke while sending: {_one_line(error)}")
        return await self.settle()

    async def settle(self) -> dict[str, Any] | None:
        """Wait for the reply that is owed, and return it. None where none is.

        Raises:
            EpisodeLost: the connection is gone.
        """
        if self._reply is None:
            self._check()
            return None
        reply = await asyncio.shield(self._reply)
        self._check()
        self._reply = None
        return reply

    async def close(self) -> None:
        """End the session. Takes little more than ``CLOSE_TIMEOUT_S``, whatever the server does."""
        self._lose("it was closed")
        try:
            async with asyncio.timeout(1.5 * CLOSE_TIMEOUT_S):
                await self._ws.close()
        except TimeoutError:
            logger.debug("the socket was closed without the server's agreement")
        finally:
            self._reading.cancel()

    def _check(self) -> None:
        if self.lost is not None:
            raise EpisodeLost(self.lost, transient=self.lost_code in (None, "CAPACITY_REACHED"))

    async def _read(self) -> None:
        """Runs as long as the connection, so that its end is known at once, and pings are answered between requests."""
        while self.lost is None:
            message = await self._ws.receive()
            if message.type is aiohttp.WSMsgType.TEXT:
                self._deliver(message.data)
            elif message.type is aiohttp.WSMsgType.ERROR:
                self._lose(f"the connection to the server broke: {_one_line(message.data)}")
            else:
                self._lose(f"the connection to the server ended (code {self._ws.close_code})")

    def _deliver(self, text: str) -> None:
        try:
            message = json.loads(text)
        except (ValueError, RecursionError):
            message = None
        if not isinstance(message, dict):
            return self._lose("the server sent something that is not a JSON object")
        error = error_of(message)
        if error is not None and error.code in FATAL_CODES:
            self.lost_code = error.code
            return self._lose(f"the server ended the session: {error.message} ({error.code})")
        if self._reply is None or self._reply.done():
            return self._lose("the server sent a message nobody asked for")
        self._reply.set_result(message)

    def _lose(self, reason: str) -> None:
        self.lost = self.lost or reason
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(None)


@dataclass(frozen=True)
class ServerError:
    """An ``error`` message of the server."""

    code: str
    message: str


def error_of(message: dict[str, Any]) -> ServerError | None:
    """The error a message carries; None where it is not one."""
    if message.get("type") != "error":
        return None
    data = message.get("data")
    data = data if isinstance(data, dict) else {}
    text = str(data.get("message") or "no reason given")
    details = data.get("errors")
    if isinstance(details, list):
        text += ": " + "; ".join(_validation(item) for item in details if isinstance(item, dict))
    return ServerError(str(data.get("code", "UNKNOWN")), text[:MAX_ERROR_CHARS])


def _validation(item: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in item.get("loc", ()))
    return f"{where}: {item.get('msg', 'invalid')}" if where else str(item.get("msg", "invalid"))


# ---------------------------------------------------------------------------------------------------------------
# Actions and observations


def custom_tool(schema: dict[str, Any]) -> dict[str, Any] | None:
    """The tool that stands for a server's own action class; None where the server takes MCP actions.

    Args:
        schema: JSON schema of the action class, from ``/schema``.
    """
    properties = {name: item for name, item in schema.get("properties", {}).items() if name != "metadata"}
    kind = properties.get("type", {}).get("const")
    if not properties or kind in ("call_tool", "list_tools"):
        return None
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+", schema.get("title", "").removesuffix("Action"))
    parameters = normalise_schema({key: item for key, item in schema.items() if key not in ("title", "description")})
    parameters["properties"] = {name: item for name, item in parameters["properties"].items() if name in properties}
    return {
        "type": "function",
        "function": {
            "name": "_".join(words).lower() or "act",
            "description": " ".join(schema.get("description", "").split()),
            "parameters": parameters,
        },
    }


def read_mcp(observation: dict[str, Any]) -> ToolResult:
    """The observation of a ``call_tool`` action as content or error."""
    error = observation.get("error")
    if error is not None:
        message = error.get("message") if isinstance(error, dict) else error
        return ToolResult(error=str(message or "the tool failed without saying why")[:MAX_ERROR_CHARS])
    result = observation.get("result")
    if not isinstance(result, dict) or not isinstance(result.get("content"), list):
        return ToolResult(content=result)
    # FastMCP's dataclass on the wire, whose names differ from the protocol's.
    return tool_result(
        {
            "content": result["content"],
            "isError": result.get("is_error", result.get("isError")),
            "structuredContent": result.get("structured_content", result.get("structuredContent")),
        }
    )


def read_custom(observation: dict[str, Any]) -> ToolResult:
    """The observation of a server's own class: its fields, without the empty ones."""
    fields = {key: item for key, item in observation.items() if key != "metadata" and item not in (None, [], {})}
    if set(fields) == {"error"}:
        return ToolResult(error=str(fields["error"])[:MAX_ERROR_CHARS])
    return ToolResult(content=fields)


def answer_arguments(tool: dict[str, Any], template: dict[str, Any] | None, answer: str) -> dict[str, Any]:
    """The arguments that submit an answer.

    Args:
        template: arguments in which the value ``"{answer}"`` stands for the answer. None: the tool has one argument
            that could only be the answer.

    Raises:
        ValueError: it has not; the message says what to do.
    """
    if template is not None:
        return {name: answer if value == ANSWER else value for name, value in template.items()}
    parameters = tool["function"]["parameters"]
    names = list(parameters.get("required") or parameters.get("properties") or ())
    if len(names) != 1:
        raise ValueError(
            f"openenv_answer_tool '{tool['function']['name']}' takes {len(names)} arguments; "
            "say in openenv_answer_arguments which is the answer"
        )
    return {names[0]: answer}


def seed_of(task: Task) -> int:
    """A seed that depends on the task alone: all episodes of a group must begin alike."""
    return int.from_bytes(hashlib.blake2b(task.task_key.encode(), digest_size=4).digest(), "big") >> 1


def _reward(value: Any) -> float | None:
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)


# ---------------------------------------------------------------------------------------------------------------
# Environment


class OpenEnvServers:
    """The OpenEnv servers a worker uses.

    Args:
        urls: by ``env_key``; ``http``, ``https``, ``ws`` or ``wss``.
        max_sessions: this worker's sessions with one server at once.
        headers: by ``env_key``; sent with every request.
    """

    def __init__(
        self, urls: dict[str, str], max_sessions: int, headers: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._urls = urls
        self._headers = headers or {}
        self._max_sessions = max_sessions
        self._free = {env_key: asyncio.Semaphore(max_sessions) for env_key in urls}

    def __contains__(self, env_key: str) -> bool:
        return env_key in self._urls

    async def open(self, task: Task, deadlines: DeadlinesConfig) -> OpenEnvTaskEnv:
        """A connected environment for one episode; its close frees the session.

        Raises:
            OpenEnvFailure: no session within ``deadlines.provision``; says why.
        """
        loop = asyncio.get_running_loop()
        # Answer before the caller's own deadline for the phase, to be heard.
        deadline = loop.time() + max(0.8 * deadlines.provision, deadlines.provision - 2.0)
        url, free = self._urls[task.env_key], self._free[task.env_key]
        try:
            async with asyncio.timeout_at(deadline):
                await free.acquire()
        except TimeoutError:
            raise OpenEnvFailure(
                f"all {self._max_sessions} sessions with {url} are in use (environment.openenv_max_sessions)"
            ) from None
        headers = self._headers.get(task.env_key)
        env = OpenEnvTaskEnv(task, url, headers=headers, deadlines=deadlines, on_close=free.release)
        try:
            await env.connect_async(deadline - loop.time())
        except BaseException:
            await env.close_async()
            raise
        return env


class OpenEnvTaskEnv:
    """One task on one session of an OpenEnv server.

    MCP environments give their tools; of any other server, the action class is the one tool. Actions are
    ``{"tool": name, "params": {...}}``. The task says by ``openenv_reset`` what reset is given, and by
    ``openenv_answer_tool`` which tool takes the final answer of a policy that did not call it itself.

    Args:
        url: of the server.
        headers: sent with every request, the WebSocket's opening included.
        deadlines: of each phase. One attempt to connect takes at most ``CONNECT_TIMEOUT_S``.
        on_close: called once, when the session has ended.
    """

    def __init__(
        self,
        task: Task,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        deadlines: DeadlinesConfig | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self.task = task
        self._url = re.sub(r"^ws", "http", url.rstrip("/"))
        self._headers = headers or {}
        self._deadlines = deadlines or DeadlinesConfig()
        self._on_close = on_close
        self._session: Session | None = None
        self._custom: dict[str, Any] | None = None
        self._tools: dict[str, dict[str, Any]] = {}
        self._ready = self._done = False
        self._reward: float | None = None  # of the last observation
        self._outcome: Outcome | None = None
        self._closing: asyncio.Task | None = None

    async def connect_async(self, timeout_s: float | None = None) -> None:
        """Open the session, and see that the server has room for it.

        Args:
            timeout_s: default ``deadlines.provision``. A server that is full or not up yet is asked again until then.

        Raises:
            OpenEnvFailure: no session.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + (self._deadlines.provision if timeout_s is None else timeout_s)
        wait = 0.1
        while True:
            try:
                self._session = await self._connect(min(CONNECT_TIMEOUT_S, max(0.1, deadline - loop.time())))
                return
            except OpenEnvFailure as failure:
                if not failure.transient or loop.time() + wait >= deadline:
                    raise
                logger.debug("%s", failure)
            await asyncio.sleep(wait)
            wait = min(2 * wait, 2.0)

    async def reset_async(self) -> OpenEnvObservation:
        """Start the episode; the observation has the tools.

        Raises:
            OpenEnvFailure: the server failed, refused, or did not answer within ``deadlines.reset`` or, when asked for
                its tools, ``deadlines.list``.
            RuntimeError: after close.
        """
        if self._closing is not None:
            raise RuntimeError("reset after close: make a new environment")
        if self._session is None:
            await self.connect_async()
        self._ready = self._done = False
        self._outcome = None
        data = {"seed": seed_of(self.task), **self.task.openenv_reset}
        begun = self._take(await self._within(self._deadlines.reset, "reset", "reset", data))
        if self._done:
            raise OpenEnvFailure("reset: the server ended the episode before its first step")
        tools = await self._list_tools()
        self._tools = {tool["function"]["name"]: tool for tool in tools}
        self._ready = True
        return OpenEnvObservation(tools=tools, result=begun.result or None)

    async def step_async(self, action: dict[str, Any]) -> OpenEnvObservation:
        """Carry out one action. What a tool does wrong is an observation, never an exception.

        A call without an answer within ``deadlines.step`` is an error that says so; it is not repeated. While the
        server still works on it, no further call is sent.

        Raises:
            EpisodeLost: the session is gone.
            RuntimeError: before reset, or after the episode is done.
        """
        if not self._ready:
            raise RuntimeError("step before reset")
        if self._done:
            raise RuntimeError(f"step after the episode of task {self.task.task_key} is done; reset starts a new one")
        name = action["tool"]
        if name not in self._tools:
            near = difflib.get_close_matches(name, self._tools, n=3, cutoff=0.4) or sorted(self._tools)[:10]
            return OpenEnvObservation(error=f"there is no tool '{name}'; did you mean {', '.join(near)}?")
        seconds, sent = self._deadlines.step, False
        try:
            async with asyncio.timeout(seconds):
                late = await self._settle()
                if late is not None and late.done:
                    return late
                sent = True
                return self._take(await self._session.request("step", self._payload(name, action.get("params") or {})))
        except TimeoutError:
            if sent:
                return OpenEnvObservation(error=f"{name}: no answer within {seconds:g} s. {UNKNOWN_OUTCOME}")
            return OpenEnvObservation(
                error=f"{name} was not called: the environment is still busy with an earlier call, after {seconds:g} s"
            )

    async def verify_async(
        self, final_answer: str | None = None, conversation: list[dict[str, Any]] | None = None
    ) -> Outcome:
        """Grade the episode. Asked again, it answers the same.

        The server's own ``done`` and its reward stand. Otherwise the final answer, an empty one where the policy gave
        none, is submitted by the task's ``openenv_answer_tool``; a task without one is graded by the reward of the last
        observation, which is reset's where the policy did nothing.

        Args:
            conversation: not used; OpenEnv servers do not take it.

        Returns:
            ``Graded``; ``Ungraded`` where the server gave no reward; ``InfraFailed`` where the session is gone.
        """
        if self._outcome is None:
            self._outcome = await self._verify(final_answer or "")
        return self._outcome

    async def close_async(self) -> None:
        """End the session. Never raises for what fails. Cancelling the caller does not stop it."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    # -- parts

    async def _connect(self, timeout_s: float) -> Session:
        session: Session | None = None
        try:
            async with asyncio.timeout(timeout_s):
                session = await Session.connect(self._url, self._headers)
                await session.request("state")  # whatever it answers, it has a session for us
                self._custom = await self._read_action_schema()
                return session
        except BaseException as error:
            if session is not None:
                await session.close()
            if isinstance(error, TimeoutError):
                raise OpenEnvFailure(f"{self._url}: no session within {timeout_s:.1f} s", transient=True) from None
            if isinstance(error, aiohttp.WSServerHandshakeError):
                hint = " (environment.openenv_headers)" if error.status in (401, 403) else ""
                raise OpenEnvFailure(
                    f"{self._url}/ws answers {error.status} instead of opening a WebSocket{hint}",
                    transient=error.status >= 500,
                ) from None
            if isinstance(error, EpisodeLost):
                raise OpenEnvFailure(f"{self._url}: {error}", transient=error.transient) from None
            if isinstance(error, (aiohttp.ClientError, ConnectionError)):
                raise OpenEnvFailure(f"{self._url}: {_one_line(error)}", transient=True) from None
            raise

    async def _read_action_schema(self) -> dict[str, Any] | None:
        async with http_session().get(f"{self._url}/schema", headers=self._headers) as reply:
            text = await reply.text(errors="replace")
            if reply.status != 200:
                raise OpenEnvFailure(f"{self._url}/schema answers {reply.status}", transient=reply.status >= 500)
        try:
            return custom_tool(json.loads(text)["action"])
        except (ValueError, KeyError, TypeError, AttributeError):
            raise OpenEnvFailure(f"{self._url}/schema does not hold the schema of an action") from None

    async def _within(self, seconds: float, phase: str, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """A request whose failure of any kind ends the episode."""
        try:
            async with asyncio.timeout(seconds):
                await self._session.settle()
                message = await self._session.request(kind, data)
        except TimeoutError:
            raise OpenEnvFailure(f"{phase}: no answer within {seconds:.3g} s") from None
        error = error_of(message)
        if error is not None:
            raise OpenEnvFailure(f"{phase}: {error.message} ({error.code})")
        return message

    async def _list_tools(self) -> list[dict[str, Any]]:
        if self._custom is not None:
            return [self._custom]
        message = await self._within(self._deadlines.list, "listing the tools", "step", {"type": "list_tools"})
        observation = _observation(message)
        try:
            tools = [openai_tool({**tool, "inputSchema": tool.get("input_schema")}) for tool in observation["tools"]]
        except (KeyError, TypeError, AttributeError):
            raise OpenEnvFailure("listing the tools: the answer cannot be read") from None
        if not tools:
            why = (observation.get("metadata") or {}).get("error", "the server has none")
            raise OpenEnvFailure(f"listing the tools: {why}")
        return tools

    def _payload(self, name: str, params: dict[str, Any]) -> dict[str, Any]:
        return params if self._custom is not None else {"type": "call_tool", "tool_name": name, "arguments": params}

    async def _settle(self) -> OpenEnvObservation | None:
        """The reply to an earlier call that came too late for it."""
        message = await self._session.settle()
        return None if message is None else self._take(message)

    def _take(self, message: dict[str, Any]) -> OpenEnvObservation:
        """Read a reply to reset or step, and keep what it says of the episode."""
        error = error_of(message)
        if error is not None:
            self._refuse_reaped(error.message)
            return OpenEnvObservation(error=error.message)
        observation = _observation(message)
        called = self._custom is None and "tool_name" in observation
        result = read_mcp(observation) if called else read_custom(observation)
        self._refuse_reaped(result.error or "")
        data = message["data"]
        self._done, self._reward = bool(data.get("done")), _reward(data.get("reward"))
        return OpenEnvObservation(result=result.content, error=result.error, done=self._done, reward=self._reward)

    def _refuse_reaped(self, error: str) -> None:
        if REAPED in error:
            raise EpisodeLost("the server ended the session behind an open connection (its session_timeout?)")

    async def _verify(self, answer: str) -> Outcome:
        if not self._ready:
            return Ungraded("the environment was not reset")
        tool = self.task.openenv_answer_tool
        try:
            async with asyncio.timeout(self._deadlines.verify):
                await self._settle()
                if not self._done and tool is not None:
                    submitted = await self._submit(tool, answer)
                    if submitted.error is not None:
                        return Ungraded(f"submitting the answer by '{tool}': {submitted.error}")
        except TimeoutError:
            return Ungraded(f"not graded within {self._deadlines.verify:.0f} s")
        except EpisodeLost as lost:
            return InfraFailed(f"verify: {lost}")
        except ValueError as error:
            return Ungraded(str(error))
        if self._reward is not None:
            return Graded(self._reward)
        if self._done:
            return Ungraded("the server ended the episode without a reward")
        if tool is not None:
            return Ungraded(f"'{tool}' took the answer without a reward")
        return Ungraded("no reward in the last observation, and the task names no openenv_answer_tool")

    async def _submit(self, name: str, answer: str) -> OpenEnvObservation:
        if name not in self._tools:
            raise ValueError(f"openenv_answer_tool '{name}' is not a tool of the server: {', '.join(self._tools)}")
        arguments = answer_arguments(self._tools[name], self.task.openenv_answer_arguments, answer)
        return self._take(await self._session.request("step", self._payload(name, arguments)))

    async def _close(self) -> None:
        self._ready = False
        try:
            if self._session is not None:
                await self._session.close()
        finally:
            if self._on_close is not None:
                self._on_close()


def _observation(message: dict[str, Any]) -> dict[str, Any]:
    data = message.get("data")
    observation = data.get("observation") if isinstance(data, dict) else None
    if message.get("type") != "observation" or not isinstance(observation, dict):
        raise EpisodeLost(f"the server answered with a message of type '{message.get('type')}', not an observation")
    return observation


def _one_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
