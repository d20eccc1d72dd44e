"""A server of ours in a process of its own: what starts and ends it, and how it runs.

The process prints one JSON line, ``{"url": …, "pid": …}``, once it listens.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_STOP_TIMEOUT_S = 10.0
GRACE_S = 1  # for requests in progress, when told to end
KEEP_ALIVE_S = 75  # longer than any client keeps an idle connection: the server must not be the one to close it
PARENT_POLL_S = 0.5


# ---------------------------------------------------------------------------------------------------------------
# The owner's side


class LocalServerError(RuntimeError):
    """The server did not start. The message says what it said last."""


class LocalServerProcess:
    """Context manager around ``python -m MODULE``. ``url`` and ``pid`` are set while it runs.

    The server ends with this process, however this process ends. It does not get this terminal's Ctrl-C: whoever
    started it may still have things to end there.

    Args:
        module: a program that takes :func:`add_arguments` and runs :func:`serve`.
        what: its name in messages.
        arguments: more of them, for the module.
        log_path: where the server's stderr goes. Without it, it serves only the message of a failed start.
        ignore_sigterm: only this process, or its death, ends the server. For an owner that is itself ended by a
            SIGTERM to all its children, and has things to end there first.
    """

    def __init__(
        self,
        module: str,
        what: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        arguments: Sequence[str] = (),
        log_path: str | Path | None = None,
        start_timeout_s: float = 30.0,
        ignore_sigterm: bool = False,
    ) -> None:
        self._module = module
        self._what = what
        self._arguments = ["--host", host, "--port", str(port), *arguments]
        if ignore_sigterm:
            self._arguments += ["--ignore-sigterm"]
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = ""
        self.pid = 0

    def start(self) -> LocalServerProcess:
        """Start the server and wait until it listens.

        Raises:
            LocalServerError: it ended, or said nothing in time.
        """
        self._log = open(self._log_path, "a+b") if self._log_path else tempfile.TemporaryFile()
        command = [sys.executable, "-m", self._module, "--parent-pid", str(os.getpid()), *self._arguments]
        path = os.pathsep.join(filter(None, (str(_PACKAGE_ROOT), os.environ.get("PYTHONPATH"))))
        try:
            self._process = subprocess.Popen(
                [*command, "--until-stdin-closes"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
            hello = json.loads(self._first_line())
        except BaseException:
            self.stop()
            raise
        self.url, self.pid = hello["url"], hello["pid"]
        return self

    def restart(self) -> None:
        """Start a server that has ended once more, where its clients look for it. It has forgotten all they did there.

        Raises:
            LocalServerError: as :meth:`start`.
        """
        self.stop()
        self._arguments[self._arguments.index("--port") + 1] = str(urlsplit(self.url).port)
        self.start()

    def check(self) -> None:
        """Raise :class:`LocalServerError` if the server ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise self._failure(f"ended with exit code {self._process.returncode}")

    def stop(self) -> int | None:
        """End the server and wait for it. Its exit code, or None if it never ran. Harmless when repeated."""
        process, self._process = self._process, None
        code = None
        if process is not None:
            process.stdin.close()
            try:
                code = process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            process.stdout.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        return code

    def __enter__(self) -> LocalServerProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _first_line(self) -> bytes:
        # The server writes this one line, in one piece, and nothing else: reading it all at once is safe.
        ready, _, _ = select.select([self._process.stdout], [], [], self._start_timeout_s)
        if not ready:
            raise self._failure(f"did not listen within {self._start_timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failure(f"ended with exit code {self._process.wait(_STOP_TIMEOUT_S)} before it listened")
        return line

    def _failure(self, what: str) -> LocalServerError:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return LocalServerError(f"{self._what} {what}{f': {lines[-1]}' if lines else ''}")


# ---------------------------------------------------------------------------------------------------------------
# The server's side


class UsageError(Exception):
    """Arguments that cannot work. The message is one line."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that :class:`LocalServerProcess` passes."""
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 means any free port (default: %(default)s)")
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this process has died")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when standard input ends")
    parser.add_argument("--ignore-sigterm", action="store_true", help="only the owner ends it (see the two above)")


def check_arguments(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Exit with the parser's own message where the arguments of :func:`add_arguments` cannot work."""
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be from 0 to 65535, not {options.port}")


def bind(host: str, port: int) -> socket.socket:
    """A listening-ready socket.

    Raises:
        UsageError: the address is taken, not ours, or not permitted.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        return listener
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno == errno.EADDRINUSE:
            reason = "port in use; choose another with --port, or --port 0 for any free one"
        raise UsageError(f"cannot listen on {host}:{port}: {reason}") from None


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def serve(app: Any, listener: socket.socket, options: argparse.Namespace) -> None:
    """Serve an ASGI application until told to end as ``options`` say."""
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(json.dumps({"url": url_of(listener), "pid": os.getpid()}), flush=True)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are set below: uvicorn would raise the signal again when done, and end with it, not with 0

    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        date_header=False,
        lifespan="on",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = Server(config)

    def stop() -> None:
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _ignore if options.ignore_sigterm and number == signal.SIGTERM else stop)
    if options.parent_pid is not None:
        _watch_parent(options.parent_pid, stop)
    if options.until_stdin_closes:
        _watch_stdin(stop)
    await server.serve(sockets=[listener])


def run(program: Coroutine[Any, Any, None]) -> None:
    """Run a server's program to its end, on the faster loop where there is one."""
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    _raise_file_limit()
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(program)


def _raise_file_limit() -> None:
    # Every instance keeps its database open, and every client a connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _watch_parent(pid: int, stop: Any) -> None:
    """Call ``stop`` once the process has died, or now if it is dead already."""
    loop = asyncio.get_running_loop()
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        stop()
    except (AttributeError, OSError):  # no such call on this platform: look now and then
        threading.Thread(target=_poll_parent, args=(pid, loop, stop), daemon=True).start()
    else:
        loop.add_reader(descriptor, stop)


def _poll_parent(pid: int, loop: asyncio.AbstractEventLoop, stop: Any) -> None:
    while os.getppid() == pid:
        threading.Event().wait(PARENT_POLL_S)
    loop.call_soon_threadsafe(stop)


def _ignore() -> None:
    """Ray ends a job by a SIGTERM to the driver and all its children; the driver still has to end its leases."""


def _watch_stdin(stop: Any) -> None:
    loop = asyncio.get_running_loop()

    def read() -> None:
        # os.read and no file object: a thread that waits inside one would hold its lock at interpreter exit.
        while os.read(0, 4096):
            pass
        loop.call_soon_threadsafe(stop)

    threading.Thread(target=read, daemon=True).start()
