"""A local Fleet in a process of its own, started and ended by this one."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO

_PACKAGE_ROOT = Path(__file__).resolve().parents[3]
_STOP_TIMEOUT_S = 10.0


class LocalFleetError(RuntimeError):
    """The local Fleet did not start. The message says what it said last."""


class LocalFleetProcess:
    """Context manager around ``python -m actors.envs.local_fleet``. ``url`` and ``pid`` are set while it runs.

    The server ends with this process, however this process ends. It does not get this terminal's Ctrl-C: whoever
    started it may still have instances to delete.
    """

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        faults: str | Path | None = None,
        instance_limit: int | None = None,
        arguments: Sequence[str] = (),
        log_path: str | Path | None = None,
        start_timeout_s: float = 30.0,
        ignore_sigterm: bool = False,
    ) -> None:
        """``log_path``: where the server's stderr goes. Without it, it serves only the message of a failed start.

        ``ignore_sigterm``: only this process, or its death, ends the server. For an owner that is itself ended by a
        SIGTERM to all its children, and has instances to delete first.
        """
        self._arguments = ["--host", host, "--port", str(port), *arguments]
        if faults is not None:
            self._arguments += ["--faults", str(faults)]
        if instance_limit is not None:
            self._arguments += ["--instance-limit", str(instance_limit)]
        if ignore_sigterm:
            self._arguments += ["--ignore-sigterm"]
        self._log_path = log_path
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.url = ""
        self.pid = 0

    def start(self) -> LocalFleetProcess:
        """Start the server and wait until it listens.

        Raises:
            LocalFleetError: it ended, or said nothing in time.
        """
        self._log = open(self._log_path, "a+b") if self._log_path else tempfile.TemporaryFile()
        command = [sys.executable, "-m", "actors.envs.local_fleet", "--parent-pid", str(os.getpid()), *self._arguments]
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

    def __enter__(self) -> LocalFleetProcess:
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

    def _failure(self, what: str) -> LocalFleetError:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return LocalFleetError(f"the local Fleet {what}{f': {lines[-1]}' if lines else ''}")
