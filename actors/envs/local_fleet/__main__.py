"""``python -m actors.envs.local_fleet``: run a local Fleet until it is told to end, or its parent dies.

Prints one JSON line, ``{"url": …, "pid": …}``, once it listens. Exit codes: 0 ended when told to, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from typing import Any

GRACE_S = 1  # for requests in progress, when told to end
KEEP_ALIVE_S = 75  # longer than any client keeps an idle connection: the server must not be the one to close it
PARENT_POLL_S = 0.5


class UsageError(Exception):
    """Arguments that cannot work. The message is one line."""


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m actors.envs.local_fleet", description="Run a local Fleet.")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="0 means any free port (default: %(default)s)")
    parser.add_argument("--faults", metavar="FILE", help="YAML or JSON file of faults to inject")
    parser.add_argument("--instance-limit", type=int, default=256, help="running at once (default: %(default)s)")
    parser.add_argument("--verifier-workers", type=int, default=2, help="sandbox processes (default: %(default)s)")
    parser.add_argument(
        "--verifier-timeout", type=float, default=10.0, metavar="S", help="limit of one run (default: %(default)s)"
    )
    parser.add_argument("--parent-pid", type=int, metavar="PID", help="end when this process has died")
    parser.add_argument("--ignore-sigterm", action="store_true", help="only the owner ends it (see the two above)")
    parser.add_argument("--until-stdin-closes", action="store_true", help="end when standard input ends")
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port must be from 0 to 65535, not {options.port}")
    if options.instance_limit < 1 or options.verifier_workers < 1 or options.verifier_timeout <= 0:
        parser.error("--instance-limit, --verifier-workers and --verifier-timeout must be positive")
    return options


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


async def serve(options: argparse.Namespace, listener: socket.socket) -> None:
    import uvicorn

    from actors.envs.local_fleet.apps import APPLICATIONS
    from actors.envs.local_fleet.faults import FaultFileError, FaultPlan, load_fault_plan
    from actors.envs.local_fleet.server import Settings, create_app

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            print(json.dumps({"url": url_of(listener), "pid": os.getpid()}), flush=True)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield  # ours are set below: uvicorn would raise the signal again when done, and end with it, not with 0

    try:
        plan = load_fault_plan(options.faults) if options.faults else FaultPlan()
    except FaultFileError as error:
        raise UsageError(str(error)) from None
    settings = Settings(options.instance_limit, options.verifier_workers, options.verifier_timeout, plan)
    config = uvicorn.Config(
        create_app(APPLICATIONS, settings),
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


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        listener = bind(options.host, options.port)
        _raise_file_limit()
        _run(serve(options, listener))
    except UsageError as error:
        print(f"local Fleet: {error}", file=sys.stderr)
        return 2
    return 0


def _raise_file_limit() -> None:
    # Every instance keeps its database open, and every client a connection.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 65_536) if hard != resource.RLIM_INFINITY else 65_536
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _run(program: Any) -> None:
    try:
        from uvloop import new_event_loop
    except ImportError:
        from asyncio import new_event_loop
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(program)


if __name__ == "__main__":
    sys.exit(main())
