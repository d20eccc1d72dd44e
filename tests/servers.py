"""Serving an ASGI application to a test, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import uvicorn

START_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def served(app):
    """The app on a free port of this machine; yields its URL."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while not server.started:
                await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
