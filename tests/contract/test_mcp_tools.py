"""Tools over MCP against servers that behave differently: the reference implementation, and ones that break off."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest
from mcp.server.fastmcp import FastMCP
from mcp.server.fastmcp.exceptions import ToolError
from mcp.types import ImageContent, TextContent
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from actors.envs.http_session import close_http_session
from actors.envs.mcp_tools import McpTools, ToolsUnavailable, normalise_schema, tool_result
from tests import servers


@pytest.fixture(autouse=True)
async def closed_connections():
    yield
    await close_http_session()


@contextlib.asynccontextmanager
async def served(app):
    """The app on a free port of this machine; yields the root URL."""
    async with servers.served(app) as url:
        try:
            yield f"{url}/"
        finally:
            await close_http_session()


def reference_server(path="/mcp", *, json_response=False, stateless=False):
    """The MCP library's own server, with sessions and event streams unless told otherwise."""
    mcp = FastMCP("reference", streamable_http_path=path, json_response=json_response, stateless_http=stateless)
    mcp.calls = []

    @mcp.tool()
    def add(a: int, b: int = 2) -> dict:
        """Adds."""
        mcp.calls.append((a, b))
        return {"sum": a + b}

    @mcp.tool()
    def shout(text: str) -> list[TextContent]:
        return [TextContent(type="text", text=text.upper()), TextContent(type="text", text="!")]

    @mcp.tool()
    def draw() -> list[TextContent | ImageContent]:
        return [TextContent(type="text", text="see"), ImageContent(type="image", data="aGk=", mimeType="image/png")]

    @mcp.tool()
    def large() -> str:
        return "x" * 300_000

    @mcp.tool()
    def fail() -> str:
        raise ToolError("out of paper")

    return mcp


@pytest.mark.parametrize("json_response", [False, True])
@pytest.mark.parametrize("stateless", [False, True])
@pytest.mark.parametrize("path", ["/mcp", "/api/v1/mcp"])
async def test_the_reference_server_is_understood_in_all_its_modes(path, json_response, stateless):
    server = reference_server(path, json_response=json_response, stateless=stateless)
    async with served(server.streamable_http_app()) as root:
        tools = McpTools(root)
        listing = await tools.open(None, 10)
        assert [t["function"]["name"] for t in listing.tools] == ["add", "shout", "draw", "large", "fail"]
        assert set(listing.owners.values()) == {path.removeprefix("/")} and listing.complete
        assert (await tools.call("add", {"a": 1}, 5)).content == {"sum": 3}
        assert (await tools.call("shout", {"text": "hi"}, 5)).content == ["HI", "!"]
        assert len((await tools.call("large", {}, 5)).content) == 300_000
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
        assert (await tools.call("draw", {}, 5)).content == [{"type": "text", "text": "see"}, image]
        failed = await tools.call("fail", {}, 5)
        assert failed.content is None and "out of paper" in failed.error
        assert not tools.suspect
        await tools.close()


async def test_a_known_listing_is_not_asked_for_again_but_the_handshake_is_made():
    server = reference_server()
    async with served(server.streamable_http_app()) as root:
        known = await McpTools(root).open(None, 10)
        tools = McpTools(root)
        assert await tools.open(known, 10) is known
        assert (await tools.call("add", {"a": 5, "b": 5}, 5)).content == {"sum": 10}
    with pytest.raises(ToolsUnavailable, match="did not answer within 0"):
        await McpTools(root).open(known, 0.4)


async def test_a_session_that_the_server_forgot_is_opened_again_and_the_call_is_made_once():
    server = reference_server()
    async with served(server.streamable_http_app()) as root:
        tools = McpTools(root)
        await tools.open(None, 10)
        tools._sessions["mcp"]._headers["mcp-session-id"] = "0" * 32
        tools._sessions["mcp"].session_id = "0" * 32
        assert (await tools.call("add", {"a": 1}, 5)).content == {"sum": 3}
        assert server.calls == [(1, 2)]


async def test_tools_of_both_paths_are_joined_and_the_first_owner_answers():
    first, second = FastMCP("a", streamable_http_path="/"), FastMCP("b", streamable_http_path="/")
    first.add_tool(lambda: "first", "both", description="")
    second.add_tool(lambda: "second", "both", description="")
    second.add_tool(lambda: "second", "only", description="")
    apps = {"/mcp": first.streamable_http_app(), "/api/v1/mcp": second.streamable_http_app()}

    @contextlib.asynccontextmanager
    async def lifespan(_):
        async with first.session_manager.run(), second.session_manager.run():
            yield

    app = Starlette(routes=[Mount(path, inner) for path, inner in apps.items()], lifespan=lifespan)
    async with served(app) as root:
        tools = McpTools(root)
        listing = await tools.open(None, 10)
        assert listing.owners == {"both": "mcp", "only": "api/v1/mcp"}
        assert (await tools.call("both", {}, 5)).content == "first"
        assert (await tools.call("only", {}, 5)).content == "second"


class Scripted:
    """A minimal MCP server whose answers to one method follow a script of (status, body) or a callable."""

    def __init__(self, method, script):
        self.method, self.script, self.seen = method, list(script), []
        self.app = Starlette(routes=[Route("/mcp", self.answer, methods=["POST"])])

    async def answer(self, request: Request):
        message = json.loads(await request.body())
        self.seen.append(message["method"])
        if message["method"] == self.method and self.script:
            step = self.script.pop(0)
            if callable(step):
                return await step(request)
            return Response(step[1], step[0], media_type="application/json")
        if "id" not in message:
            return Response(status_code=202)
        results = {
            "initialize": {"protocolVersion": "2025-06-18", "capabilities": {}, "serverInfo": {"name": "s"}},
            "tools/list": {"tools": [{"name": "t"}]},
            "tools/call": {"content": [{"type": "text", "text": "ok"}]},
        }
        reply = {"jsonrpc": "2.0", "id": message["id"], "result": results[message["method"]]}
        return Response(json.dumps(reply), media_type="application/json")


async def test_listing_outlasts_a_server_that_is_still_starting():
    empty = json.dumps({"jsonrpc": "2.0", "id": 3, "result": {"tools": []}})
    server = Scripted("tools/list", [(502, ""), (503, ""), (200, empty), (500, "")])
    async with served(server.app) as root:
        listing = await McpTools(root).open(None, 10)
    assert listing.owners == {"t": "mcp"}
    assert server.seen.count("tools/list") == 5


async def test_an_address_without_mcp_is_said_so_at_once():
    async with served(Starlette()) as root:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(ToolsUnavailable, match="404.*api/v1/mcp.*404"):
            await McpTools(root).open(None, 30)
        assert asyncio.get_running_loop().time() - begun < 5


async def test_listing_that_only_fails_ends_at_its_deadline_and_can_be_cancelled():
    server = Scripted("initialize", [(502, "")] * 100)
    async with served(server.app) as root:
        begun = asyncio.get_running_loop().time()
        with pytest.raises(ToolsUnavailable, match="502"):
            await McpTools(root).open(None, 0.5)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await McpTools(root).open(None, 30)
        assert asyncio.get_running_loop().time() - begun < 6


async def _hang(_):
    await asyncio.sleep(30)


@pytest.mark.parametrize(
    ("step", "word"),
    [((500, "boom"), "500 boom"), ((502, ""), "502"), ((200, "not json"), "not JSON"), (_hang, "0 s")],
)
async def test_a_call_that_may_have_been_carried_out_is_not_repeated(step, word):
    server = Scripted("tools/call", [step])
    async with served(server.app) as root:
        tools = McpTools(root)
        await tools.open(None, 5)
        result = await tools.call("t", {}, 0.3)
        assert word in result.error and "not known whether" in result.error
        assert server.seen.count("tools/call") == 1
        assert tools.suspect
        assert (await tools.call("t", {}, 5)).content == "ok", "the next call works again"


async def test_a_connection_that_breaks_after_the_request_leaves_the_outcome_unknown():
    seen = []

    async def break_off(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        seen.append(json.loads(await reader.readexactly(length))["method"])
        writer.close()

    server = Scripted("never", [])
    async with served(server.app) as root, await asyncio.start_server(break_off, "127.0.0.1", 0) as breaking:
        tools = McpTools(root)
        await tools.open(None, 5)
        tools._sessions["mcp"].url = f"http://127.0.0.1:{breaking.sockets[0].getsockname()[1]}/mcp"
        result = await tools.call("t", {}, 5)
    assert "not known whether" in result.error
    assert seen == ["tools/call"]


async def test_a_call_that_was_certainly_not_carried_out_is_repeated_or_said_not_to_be():
    server = Scripted("tools/call", [(429, "")])
    async with served(server.app) as root:
        tools = McpTools(root)
        await tools.open(None, 5)
        assert (await tools.call("t", {}, 5)).content == "ok"
        assert server.seen.count("tools/call") == 2
    result = await tools.call("t", {}, 5)
    assert "was not carried out" in result.error and tools.suspect


async def test_a_refusal_is_an_error_the_policy_reads_and_the_instance_stays_good():
    refusal = {"jsonrpc": "2.0", "id": 3, "error": {"code": -32602, "message": "no such argument"}}
    server = Scripted("tools/call", [(200, json.dumps(refusal)), (401, "who are you")])
    async with served(server.app) as root:
        tools = McpTools(root)
        await tools.open(None, 5)
        assert "no such argument" in (await tools.call("t", {}, 5)).error
        assert "who are you" in (await tools.call("t", {}, 5)).error
        assert not tools.suspect


async def test_cancelling_a_call_cancels_it_at_once():
    server = Scripted("tools/call", [_hang])
    async with served(server.app) as root:
        tools = McpTools(root)
        await tools.open(None, 5)
        calling = asyncio.create_task(tools.call("t", {}, 60))
        async with asyncio.timeout(10):
            while "tools/call" not in server.seen:
                await asyncio.sleep(0.01)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(1):
                await calling
        assert tools.suspect


@pytest.mark.parametrize(
    ("result", "content", "error"),
    [
        ({"content": [{"type": "text", "text": '{"a": 1}'}]}, {"a": 1}, None),
        ({"content": [{"type": "text", "text": "[1, 2]"}]}, [1, 2], None),
        ({"content": [{"type": "text", "text": "12"}]}, "12", None),
        ({"content": [{"type": "text", "text": "{broken"}]}, "{broken", None),
        ({"content": [{"type": "text", "text": "[" * 100_000}]}, "[" * 100_000, None),
        ({"content": []}, "", None),
        ({"content": [], "structuredContent": {"a": 1}}, {"a": 1}, None),
        ({"content": [{"type": "resource", "resource": {"text": "t"}}]}, "t", None),
        ({"content": [{"type": "audio", "data": "x", "mimeType": "m"}]}, "[audio content left out]", None),
        ({"content": [{"type": "text", "text": "bad"}], "isError": True}, None, "bad"),
        ({"content": [], "isError": True}, None, "the tool failed without saying why"),
    ],
)
def test_results_become_content_or_an_error(result, content, error):
    assert (tool_result(result).content, tool_result(result).error) == (content, error)


def test_schemas_lose_what_costs_tokens_and_keep_what_is_named_alike():
    schema = {
        "title": "Args",
        "type": "object",
        "properties": {
            "title": {"title": "Title", "type": "string", "default": "x"},
            "default": {"anyOf": [{"type": "integer", "title": "I"}, {"type": "null"}], "default": None},
            "either": {"description": "outer", "anyOf": [{"type": "integer"}, {"type": "string"}, {"type": "null"}]},
            "maybe": {"type": ["string", "null"]},
            "kind": {"enum": ["title", "default", None]},
            "deep": {"type": "array", "items": {"$ref": "#/$defs/title"}},
        },
        "required": ["title"],
        "$defs": {"title": {"title": "T", "type": "object", "properties": {}}},
    }
    assert normalise_schema(schema) == {
        "type": "object",
        "properties": {
            "title": {"type": "string"},
            "default": {"type": "integer"},
            "either": {"description": "outer", "anyOf": [{"type": "integer"}, {"type": "string"}]},
            "maybe": {"type": "string"},
            "kind": {"enum": ["title", "default", None]},
            "deep": {"type": "array", "items": {"$ref": "#/$defs/title"}},
        },
        "required": ["title"],
        "$defs": {"title": {"type": "object", "properties": {}}},
    }
    assert schema["properties"]["title"]["default"] == "x", "the input is left alone"
