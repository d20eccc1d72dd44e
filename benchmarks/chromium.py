"""A headless Chromium that is installed on this machine, driven over its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import itertools
import re
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0
POLL_S = 0.02


class NoBrowser(Exception):
    """There is no Chromium, or it did not start; in one line."""


class Page:
    """One tab. ``errors`` collects what scripts threw and what the console was told as an error."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.errors: list[str] = []

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        number = next(self._ids)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(CALL_TIMEOUT_S):
            while True:
                message = await self._socket.receive_json()
                self._note(message)
                if message.get("id") == number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']['message']}")
                    return message["result"]

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        if message.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])

    async def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript, awaited if it is a promise."""
        found = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    async def wait_for(self, expression: str, timeout_s: float = 60.0) -> None:
        """Until an expression is true."""
        async with asyncio.timeout(timeout_s):
            while not await self.evaluate(expression):
                await asyncio.sleep(0.02)

    async def screenshot(self, path: Path, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        await self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        picture = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(picture["data"]))


@asynccontextmanager
async def open_page(executable: str | None = None) -> AsyncIterator[Page]:
    """A tab of a Chromium with a profile of its own, which ends with the context.

    Raises:
        NoBrowser: none is installed, or it did not start.
    """
    found = executable or next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        raise NoBrowser(f"none of {', '.join(NAMES)} is installed")
    with tempfile.TemporaryDirectory(prefix="fleet-rl-chromium-", ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "about:blank"]
        log = Path(profile) / "log"
        # Into a file, as nobody reads a pipe once the page is open.
        with log.open("wb") as file:
            process = await asyncio.create_subprocess_exec(found, f"--user-data-dir={profile}", *options, stderr=file)
        try:
            address = await _address(process, log)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://{address}/json") as answer:
                    target = next(tab for tab in await answer.json() if tab["type"] == "page")
                async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await page.call(f"{domain}.enable")
                    yield page
        finally:
            await _end(process)


async def _address(process: asyncio.subprocess.Process, log: Path) -> str:
    deadline = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while process.returncode is None and asyncio.get_running_loop().time() < deadline:
        if match := re.search(r"DevTools listening on ws://([^/]+)/", log.read_text(errors="replace")):
            return match[1]
        await asyncio.sleep(POLL_S)
    raise NoBrowser(f"Chromium did not start: {' '.join(log.read_text(errors='replace').split())[-500:]}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is not None:
        return
    process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await asyncio.wait_for(process.wait(), END_TIMEOUT_S)
