"""A small pool of worker processes that run verifiers, which are other people's code, away from this server.

What a verifier cannot do there is written in :mod:`.verifier_worker`: no network, no other processes, no writing of
files, no reading but of Python itself and its own databases, bounded CPU, memory and wall time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_PROGRAM = Path(__file__).with_name("verifier_worker.py")
_START_TIMEOUT_S = 30.0
# The worker itself ends a verifier in time; one that does not is ended after this. On a machine that is full a process
# may get no CPU for seconds, and another worker would get none either. With the 30 s that clients ask for it is less
# than the 45 s that they wait.
_ANSWER_MARGIN_S = 12.0
_QUEUE_LIMIT_S = 60.0
_RESTART_PAUSE_S = 0.5


@dataclass(frozen=True)
class Verification:
    """One verifier to run. ``databases``: name to path; nobody may write to these files until the verdict is there."""

    code: str
    function_name: str
    args: list[Any]
    kwargs: dict[str, Any]
    databases: dict[str, str]
    instance_id: str
    env_key: str
    env_variables: dict[str, Any]
    timeout_s: float


@dataclass(frozen=True)
class Verdict:
    """What came of it. ``error`` has ``type``, ``message`` and ``traceback`` where ``success`` is false."""

    success: bool
    result: Any
    error: dict[str, str] | None
    stdout: str
    seconds: float = 0.0
    cpu_s: float = 0.0


class _WorkerLost(Exception):
    """The worker process ended, or did not answer in time."""


class VerifierSandbox:
    """``start``, any number of ``run`` at once (they queue for a worker), ``close``."""

    def __init__(self, folder: Path, workers: int = 2, timeout_s: float = 10.0, memory_bytes: int = 512 << 20) -> None:
        """``folder``: the server's temporary folder; workers that outlive a killed server remove it. ``timeout_s``: the
        longest any verification asks for; it bounds the CPU time of a worker's child."""
        self._workers = workers
        self._command = (sys.executable, "-I", "-B", str(_PROGRAM), str(folder), str(timeout_s), str(memory_bytes))
        self._jobs: asyncio.Queue[tuple[Verification, bool, asyncio.Future[Verdict]]] = asyncio.Queue()
        self._slots: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the workers, without waiting for them: they are warm some 50 ms later."""
        self._slots = [asyncio.create_task(self._keep_slot()) for _ in range(self._workers)]

    async def run(self, verification: Verification, crash: bool = False) -> Verdict:
        """Run one verifier. It always ends, with a verdict, within its time-out plus the wait for a worker.

        Args:
            crash: kill the worker once it has the verifier, which is a fault that users can order.
        """
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._jobs.put_nowait((verification, crash, future))
        limit_s = verification.timeout_s + _ANSWER_MARGIN_S + _QUEUE_LIMIT_S
        try:
            return await asyncio.wait_for(future, limit_s)
        except TimeoutError:
            return _failed("TimeoutError", f"no verdict within {limit_s:g} s: every verifier worker is busy or lost")

    async def close(self) -> None:
        for slot in self._slots:
            slot.cancel()
        await asyncio.gather(*self._slots, return_exceptions=True)
        while not self._jobs.empty():
            self._jobs.get_nowait()[2].cancel()

    async def _keep_slot(self) -> None:
        """Keep one worker alive for as long as the pool is."""
        while True:
            try:
                await self._serve_with_one_worker()
            except (_WorkerLost, OSError) as lost:
                logger.warning("a verifier worker was lost (%s); starting another", lost)
            except Exception:
                # A slot that ended here would be missed only when the last one has: then nothing is verified any more.
                logger.exception("a verifier worker was lost; starting another")
            await asyncio.sleep(_RESTART_PAUSE_S)

    async def _serve_with_one_worker(self) -> None:
        process = await _spawn(self._command)
        try:
            hello = await _receive(process, _START_TIMEOUT_S)
            if not hello["confined"]:
                logger.warning("no system-call filter on this platform: verifiers can reach the network and files")
            if not hello["reading_limited"]:
                logger.warning("no Landlock on this kernel: verifiers can read whatever this user can read")
            while True:
                await self._serve_one(process)
        finally:
            await _end(process)

    async def _serve_one(self, process: asyncio.subprocess.Process) -> None:
        job = await self._jobs.get()
        verification, crash, future = job
        if future.cancelled():
            return
        if process.returncode is not None or process.stdin.is_closing():
            # It died while it had nothing to do: the job has not been begun, and is for the next worker.
            self._jobs.put_nowait(job)
            raise _WorkerLost("it ended between two verifications")
        try:
            verdict = await self._ask(process, verification, crash)
        except BaseException as error:
            if not future.done():
                future.set_result(_failed("RuntimeError", f"the verifier's worker was lost: {error}"))
            raise
        if not future.done():
            future.set_result(verdict)

    async def _ask(self, process: asyncio.subprocess.Process, verification: Verification, crash: bool) -> Verdict:
        frame = json.dumps(vars(verification)).encode()
        try:
            process.stdin.write(struct.pack(">I", len(frame)) + frame)
        except RuntimeError as closed:  # uvloop's word for a pipe that has just been closed
            raise _WorkerLost(str(closed)) from None
        if crash:
            process.kill()
            raise _WorkerLost("it was killed, as the scenario asks")  # its verdict may be on the way already
        return Verdict(**await _receive(process, verification.timeout_s + _ANSWER_MARGIN_S))


def _failed(kind: str, message: str) -> Verdict:
    return Verdict(False, None, {"type": kind, "message": message, "traceback": ""}, "")


async def _spawn(command: tuple[str, ...]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd="/",
        env={"PATH": os.defpath, "LANG": "C.UTF-8", "TZ": "UTC"},  # none of the server's secrets
        start_new_session=True,  # Ctrl-C is for the server, which then ends its workers in order
    )


async def _receive(process: asyncio.subprocess.Process, timeout_s: float) -> dict[str, Any]:
    try:
        async with asyncio.timeout(timeout_s):
            (length,) = struct.unpack(">I", await process.stdout.readexactly(4))
            return json.loads(await process.stdout.readexactly(length))
    except TimeoutError:
        raise _WorkerLost(f"no answer within {timeout_s:g} s") from None
    except asyncio.IncompleteReadError:
        raise _WorkerLost("it ended") from None
    except ValueError as error:
        raise _WorkerLost(f"it sent something unreadable: {error}") from error


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the worker and, if it is running one, its verifier
    await process.wait()
