"""The tools of an instance, over MCP: streamable HTTP with plain JSON replies and no session state."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from actors.envs.local_fleet.application import Application, Tool, ToolError
from actors.envs.local_fleet.faults import FaultInjector
from actors.envs.local_fleet.instances import Instance, InstanceTable
from actors.envs.local_fleet.wire import JsonReply

logger = logging.getLogger(__name__)

PROTOCOL_VERSIONS = ("2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05")  # newest first
PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602


class RpcError(Exception):
    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


class _Toolbox:
    """An application's tools: by name, and as the ready-made answer to ``tools/list``."""

    def __init__(self, application: Application) -> None:
        self.by_name: dict[str, Tool] = {tool.name: tool for tool in application.tools}
        tools = [
            {"name": tool.name, "description": tool.description, "inputSchema": tool.input_schema}
            for tool in application.tools
        ]
        self.listing = orjson.Fragment(orjson.dumps({"tools": tools}))


class McpEndpoint:
    """``POST`` only: there is no server-sent stream to ``GET`` and no session to ``DELETE``."""

    def __init__(self, table: InstanceTable, faults: FaultInjector, stats: Counter[str]) -> None:
        self._table = table
        self._faults = faults
        self._stats = stats
        self._toolboxes: dict[tuple[str, str], _Toolbox] = {}  # by env_key and version

    async def post(self, request: Request) -> Response:
        instance = self._table.get_running(request.path_params["instance_id"])
        self._stats["mcp_requests"] += 1
        try:
            message = orjson.loads(await request.body())
        except orjson.JSONDecodeError as error:
            return _error_reply(None, PARSE_ERROR, f"the body is not JSON: {error}", 400)
        if not isinstance(message, dict) or not isinstance(message.get("method"), str):
            return _error_reply(None, INVALID_REQUEST, "expected one JSON-RPC request with a 'method'", 400)
        if "id" not in message:
            return Response(status_code=202)  # a notification
        params = message.get("params") or {}
        try:
            if not isinstance(params, dict):
                raise RpcError(INVALID_PARAMS, "'params' must be an object")
            if message["method"] == "tools/call":
                return await self._call(request, instance, message["id"], params)
            return _reply(message["id"], self._answer(instance, message["method"], params))
        except RpcError as error:
            return _error_reply(message["id"], error.code, str(error), 200)

    def _answer(self, instance: Instance, method: str, params: dict[str, Any]) -> Any:
        if method == "initialize":
            wanted = params.get("protocolVersion")
            return {
                "protocolVersion": wanted if wanted in PROTOCOL_VERSIONS else PROTOCOL_VERSIONS[0],
                "capabilities": {"tools": {"listChanged": False}},
                "serverInfo": {"name": instance.application.env_key, "version": instance.version},
            }
        if method == "tools/list":
            return self._toolbox(instance).listing
        if method == "ping":
            return {}
        raise RpcError(METHOD_NOT_FOUND, f"method '{method}' is not offered")

    async def _call(self, request: Request, instance: Instance, message_id: Any, params: dict[str, Any]) -> Response:
        name, arguments = params.get("name"), params.get("arguments")
        if not isinstance(name, str):
            raise RpcError(INVALID_PARAMS, "'name' must be the name of a tool")
        if arguments is not None and not isinstance(arguments, dict):
            raise RpcError(INVALID_PARAMS, "'arguments' must be an object")

        async def run(_: Request) -> Response:
            return _reply(message_id, self._run(instance, name, arguments or {}))

        return await self._faults.guard("tool", request, run, tool=name)

    def _run(self, instance: Instance, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the tool. What goes wrong is told to the agent as a tool result, never as a broken request."""
        self._stats["tool_calls"] += 1
        tool = self._toolbox(instance).by_name.get(name)
        try:
            if tool is None:
                raise ToolError(f"unknown tool {name}")
            value = instance.call(tool, arguments)
            text = value if isinstance(value, str) else orjson.dumps(value).decode()
        except ToolError as error:
            return self._tool_error(str(error))
        except Exception as error:
            # A bug of the application: the agent gets an answer, its state is rolled back, and the log gets the trace.
            logger.exception("tool %s of %s failed", name, instance.application.env_key)
            return self._tool_error(f"internal error in {name}: {type(error).__name__}: {error}")
        return {"content": [{"type": "text", "text": text}], "isError": False}

    def _tool_error(self, text: str) -> dict[str, Any]:
        self._stats["tool_errors"] += 1
        return {"content": [{"type": "text", "text": text}], "isError": True}

    def _toolbox(self, instance: Instance) -> _Toolbox:
        key = (instance.application.env_key, instance.version)
        toolbox = self._toolboxes.get(key)
        if toolbox is None:
            toolbox = self._toolboxes[key] = _Toolbox(instance.application)
        return toolbox


def _reply(message_id: Any, result: Any) -> Response:
    return JsonReply({"jsonrpc": "2.0", "id": message_id, "result": result})


def _error_reply(message_id: Any, code: int, text: str, status: int) -> Response:
    return JsonReply({"jsonrpc": "2.0", "id": message_id, "error": {"code": code, "message": text}}, status)
