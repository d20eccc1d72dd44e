"""An instance's tools over MCP (streamable HTTP): listing them, calling them, and saying truly what became of a call.

Why not the ``mcp`` library: its sessions belong to the task that opened them (anyio cancel scopes), so an episode that
is cancelled, or stepped from another task, breaks them; it lists the tools again after the first call of every session;
its errors do not say whether a request was sent, which decides whether a call may be repeated; and it costs more.
CPU of the client for a session with two calls on one core: 8 ms with the library over a shared HTTP client, 29 ms over
the one it opens by default, 1 ms here.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from actors.envs.http_session import NOT_SENT, http_session

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = "2025-06-18"
# Where an instance may serve MCP, under its root URL. Some images answer on the first, some only on the second.
PATHS = ("mcp", "api/v1/mcp")
MAX_BACKOFF_S = 2.0
UNKNOWN_OUTCOME = "It is not known whether the call took effect: check the state before you repeat it."


class ToolsUnavailable(Exception):
    """The instance's tools could not be listed or reached within the deadline."""


class NotServed(Exception):
    """The address does not speak MCP (404 or 405)."""


class NotExecuted(Exception):
    """The request was certainly not carried out, so it may be repeated."""


class OutcomeUnknown(Exception):
    """The request was sent, and whether it was carried out is not known."""


class Refused(Exception):
    """The server read the request and refused it; repeating it will not help."""


@dataclass(frozen=True)
class ToolResult:
    """What a call came to.

    Attributes:
        content: a dict or list where the tool answered JSON, text otherwise, or OpenAI content blocks where it
            answered with images.
        error: why there is no result, in words for the policy.
    """

    content: Any = None
    error: str | None = None


@dataclass(frozen=True)
class ToolList:
    """Tools in OpenAI's function format, and which path serves which.

    ``complete`` is false when one of the paths failed while another listed its tools.
    """

    tools: tuple[dict[str, Any], ...]
    owners: dict[str, str] = field(repr=False)
    complete: bool = True


class McpSession:
    """One MCP session with one address: initialised once, then JSON-RPC requests over pooled connections."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.session_id: str | None = None
        self.started = False
        self._headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
        self._ids = itertools.count(1)

    async def start(self) -> None:
        """The protocol's handshake. Repeating it opens a new session."""
        self.session_id = None
        self._headers.pop("mcp-session-id", None)
        self._headers.pop("mcp-protocol-version", None)
        result = await self.request(
            "initialize",
            {
                "protocolVersion": PROTOCOL_VERSION,
                "capabilities": {},
                "clientInfo": {"name": "fleet-rl", "version": "1"},
            },
        )
        self._headers["mcp-protocol-version"] = str(result.get("protocolVersion", PROTOCOL_VERSION))
        await self._post({"jsonrpc": "2.0", "method": "notifications/initialized"})
        self.started = True

    async def list_tools(self) -> list[dict[str, Any]]:
        """All pages of ``tools/list``, as the server wrote them."""
        tools: list[dict[str, Any]] = []
        params: dict[str, Any] = {}
        while True:
            result = await self.request("tools/list", params)
            tools += result.get("tools", [])
            if not result.get("nextCursor"):
                return tools
            params = {"cursor": result["nextCursor"]}

    async def request(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        """One JSON-RPC request; returns its result object.

        Raises:
            NotServed, NotExecuted, OutcomeUnknown, Refused: see there.
        """
        reply = await self._post({"jsonrpc": "2.0", "id": next(self._ids), "method": method, "params": params})
        if reply is None:
            raise OutcomeUnknown(f"{method}: the server accepted the request without answering it")
        if "error" in reply:
            error = reply["error"]
            raise Refused(str(error.get("message", error)) if isinstance(error, dict) else str(error))
        result = reply.get("result")
        if not isinstance(result, dict):
            raise OutcomeUnknown(f"{method}: the server's reply has no result")
        return result

    async def end(self) -> None:
        """Tell a server that keeps sessions that this one is over; others are not asked."""
        if self.session_id is None:
            return
        try:
            async with http_session().delete(self.url, headers=self._headers):
                self.session_id, self.started = None, False
        except aiohttp.ClientError as error:
            logger.debug("MCP session at %s was not ended: %s", self.url, error)

    async def _post(self, message: dict[str, Any]) -> dict[str, Any] | None:
        """Send one message; returns the reply to it, or ``None`` for a notification."""
        try:
            async with http_session().post(self.url, data=json.dumps(message).encode(), headers=self._headers) as reply:
                await self._check_status(reply)
                if message["method"] == "initialize":
                    self._remember_session(reply)
                return await _read_reply(reply, message.get("id"))
        except NOT_SENT as error:
            raise NotExecuted(f"no connection: {error or type(error).__name__}") from error
        except aiohttp.ClientError as error:
            raise OutcomeUnknown(f"the connection broke: {str(error) or type(error).__name__}") from error

    async def _check_status(self, reply: aiohttp.ClientResponse) -> None:
        status = reply.status
        if status < 300:
            return
        text = (await reply.read()).decode(errors="replace")[:200]
        if status == 404 and self.session_id is not None:
            # The protocol's way of saying that the session is gone.
            self.started = False
            raise NotExecuted("the server forgot the session")
        if status in (404, 405):
            raise NotServed(f"{self.url} answered {status}")
        if status == 429:
            raise NotExecuted("the server is busy (429)")
        if status >= 500:
            raise OutcomeUnknown(f"the server answered {status} {text}".strip())
        raise Refused(f"the server answered {status} {text}".strip())

    def _remember_session(self, reply: aiohttp.ClientResponse) -> None:
        self.session_id = reply.headers.get("mcp-session-id")
        if self.session_id is not None:
            self._headers["mcp-session-id"] = self.session_id


async def _read_reply(reply: aiohttp.ClientResponse, message_id: int | None) -> dict[str, Any] | None:
    """The JSON-RPC reply with this id, from a JSON body or from an event stream."""
    if message_id is None or reply.status in (202, 204):
        return None
    if reply.content_type == "text/event-stream":
        return await _read_events(reply, message_id)
    body = await reply.read()
    try:
        value = json.loads(body)
    except ValueError as error:
        raise OutcomeUnknown(f"the server's reply is not JSON: {body[:80]!r}") from error
    answer = _reply_in(value, message_id)
    if answer is None:
        raise OutcomeUnknown("the server's reply does not answer the request")
    return answer


async def _read_events(reply: aiohttp.ClientResponse, message_id: int) -> dict[str, Any]:
    """Read server-sent events up to the reply; notifications before it are dropped."""
    data: list[bytes] = []
    rest = b""
    async for chunk in reply.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                answer = _event(b"\n".join(data), message_id)
                if answer is not None:
                    return answer
                data = []
    raise OutcomeUnknown("the server ended the stream before its reply")


def _event(data: bytes, message_id: int) -> dict[str, Any] | None:
    try:
        return _reply_in(json.loads(data), message_id)
    except ValueError as error:
        raise OutcomeUnknown("the server sent an event that is not JSON") from error


def _reply_in(value: Any, message_id: int) -> dict[str, Any] | None:
    for item in value if isinstance(value, list) else [value]:
        if isinstance(item, dict) and item.get("id") == message_id and ("result" in item or "error" in item):
            return item
    return None


class McpTools:
    """The tools of one instance. One session per serving path, kept for the life of the instance.

    Args:
        root: the instance's root URL; ends with ``/``.
    """

    def __init__(self, root: str) -> None:
        self._sessions = {path: McpSession(root + path) for path in PATHS}
        self._owners: dict[str, str] = {}
        # Set where a call may still be at work or the server cannot be reached: no other episode may get the instance.
        self.suspect = False

    @property
    def names(self) -> frozenset[str]:
        """The tools that the instance itself serves."""
        return frozenset(self._owners)

    async def open(self, known: ToolList | None, timeout_s: float) -> ToolList:
        """Connect, and list the tools unless they are known already.

        Args:
            known: an earlier complete listing of the same image; only the handshake with its paths is made then.

        Raises:
            ToolsUnavailable: no path listed any tool, or a known path did not answer, within ``timeout_s``.
        """
        deadline = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                listing = await self._connect(known) if known is not None else await self._list(deadline)
        except TimeoutError:
            raise ToolsUnavailable(f"the instance's tools did not answer within {timeout_s:.0f} s") from None
        self._owners = listing.owners
        return listing

    async def call(self, name: str, arguments: dict[str, Any], timeout_s: float) -> ToolResult:
        """Call a listed tool once. Never raises for what the tool, the server or the network does.

        A call that may have been carried out is never sent a second time.
        """
        session = self._sessions[self._owners[name]]
        try:
            async with asyncio.timeout(timeout_s):
                return await self._call(session, {"name": name, "arguments": arguments})
        except TimeoutError:
            self.suspect = True
            return ToolResult(error=f"{name} did not answer within {timeout_s:.0f} s. {UNKNOWN_OUTCOME}")
        except OutcomeUnknown as error:
            self.suspect = True
            return ToolResult(error=f"{name}: {error}. {UNKNOWN_OUTCOME}")
        except (NotExecuted, NotServed) as error:
            self.suspect = True
            return ToolResult(error=f"{name} was not carried out: {error}")
        except Refused as error:
            return ToolResult(error=f"{name} was refused: {error}")
        except asyncio.CancelledError:
            self.suspect = True
            raise

    async def close(self, timeout_s: float = 2.0) -> None:
        """End sessions that a server keeps. Bounded; a server that does not answer is left to its own time-out."""
        try:
            async with asyncio.timeout(timeout_s):
                for session in self._sessions.values():
                    await session.end()
        except TimeoutError:
            logger.debug("MCP sessions were not ended within %.0f s", timeout_s)

    async def _connect(self, known: ToolList) -> ToolList:
        """The handshake with every path that owns a known tool, retried until the caller's deadline."""
        for path in sorted(set(known.owners.values())):
            session = self._sessions[path]
            wait = 0.1
            while not session.started:
                try:
                    await session.start()
                except (NotExecuted, OutcomeUnknown) as error:
                    logger.debug("%s: %s", session.url, error)
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, MAX_BACKOFF_S)
                except (NotServed, Refused) as error:
                    raise ToolsUnavailable(f"an instance of the same image served MCP there, but {error}") from error
        return known

    async def _list(self, deadline: float) -> ToolList:
        """List every path. Paths that fail are retried: all of them until one lists tools, then for a short while."""
        loop = asyncio.get_running_loop()
        pending = list(PATHS)
        failures: dict[str, str] = {}
        tools: list[dict[str, Any]] = []
        owners: dict[str, str] = {}
        wait = 0.1
        while True:
            for path in list(pending):
                try:
                    listed = await self._list_one(self._sessions[path])
                except (NotServed, Refused) as error:
                    failures[path] = str(error)
                    pending.remove(path)
                except (NotExecuted, OutcomeUnknown) as error:
                    failures[path] = str(error)
                else:
                    pending.remove(path)
                    new = [tool for tool in listed if tool["name"] not in owners]
                    tools += [openai_tool(tool) for tool in new]
                    owners |= {tool["name"]: path for tool in new}
            if tools and not pending:
                return ToolList(tuple(tools), owners)
            if tools and wait >= 0.8:
                logger.warning("tools listed without %s: %s", pending, failures)
                return ToolList(tuple(tools), owners, complete=False)
            if not pending:
                raise ToolsUnavailable(f"the instance lists no tools: {failures or 'both listings are empty'}")
            if loop.time() + wait >= deadline:
                raise ToolsUnavailable(f"the instance's tools cannot be listed: {failures}")
            await asyncio.sleep(wait)
            wait = min(2 * wait, MAX_BACKOFF_S)

    async def _list_one(self, session: McpSession) -> list[dict[str, Any]]:
        if not session.started:
            await session.start()
        tools = await session.list_tools()
        if not tools:
            # An image that is still starting may answer before its tools are registered.
            raise NotExecuted("it lists no tools yet")
        return tools

    async def _call(self, session: McpSession, params: dict[str, Any]) -> ToolResult:
        """Send the call; only where it was certainly not carried out is it sent again, at most three times in all."""
        for wait in (0.2, 1.0):
            try:
                return await self._call_once(session, params)
            except NotExecuted as error:
                logger.debug("%s: %s", session.url, error)
                await asyncio.sleep(wait)
        return await self._call_once(session, params)

    async def _call_once(self, session: McpSession, params: dict[str, Any]) -> ToolResult:
        if not session.started:
            try:
                await session.start()
            except OutcomeUnknown as error:
                raise NotExecuted(f"no session: {error}") from error
        return tool_result(await session.request("tools/call", params))


def tool_result(result: dict[str, Any]) -> ToolResult:
    """An MCP ``CallToolResult`` as content or error."""
    blocks = [_openai_block(block) for block in result.get("content") or []]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    if result.get("isError"):
        return ToolResult(error="\n".join(texts) or "the tool failed without saying why")
    if len(texts) < len(blocks):
        return ToolResult(content=blocks)
    if not texts and result.get("structuredContent") is not None:
        return ToolResult(content=result["structuredContent"])
    if len(texts) == 1:
        return ToolResult(content=_parsed(texts[0]))
    return ToolResult(content=texts if texts else "")


def _openai_block(block: dict[str, Any]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": f"data:{block['mimeType']};base64,{block['data']}"}}
    if kind == "text":
        return {"type": "text", "text": block.get("text", "")}
    text = (block.get("resource") or {}).get("text") if kind == "resource" else None
    return {"type": "text", "text": text or f"[{kind} content left out]"}


def _parsed(text: str) -> Any:
    """A JSON object or list as such; anything else stays the text it is."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def openai_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """An MCP tool in OpenAI's function format."""
    return {
        "type": "function",
        "function": {
            "name": tool["name"],
            "description": tool.get("description") or "",
            "parameters": normalise_schema(tool.get("inputSchema") or {"type": "object", "properties": {}}),
        },
    }


def normalise_schema(schema: Any) -> Any:
    """A JSON schema without what only costs tokens: titles, defaults, and "or null" alternatives."""
    if isinstance(schema, list):
        return [normalise_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain: dict[str, Any] = {}
    for key, value in schema.items():
        if key in ("properties", "$defs", "definitions") and isinstance(value, dict):
            # The keys here are names the author chose: a property may well be called "title".
            plain[key] = {name: normalise_schema(item) for name, item in value.items()}
        elif key == "anyOf" and isinstance(value, list):
            kept = [normalise_schema(item) for item in value if item != {"type": "null"}]
            plain = (kept[0] if len(kept) == 1 else {"anyOf": kept}) | plain
        elif key == "type" and isinstance(value, list):
            kept = [item for item in value if item != "null"]
            plain["type"] = kept[0] if len(kept) == 1 else kept
        elif key in ("enum", "const", "required", "examples"):
            plain[key] = value
        elif key not in ("title", "default"):
            plain[key] = normalise_schema(value)
    return plain
