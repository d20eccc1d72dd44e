"""The servers of environments that a run or an evaluation starts: the local Fleet, and sample OpenEnv servers."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from actors.config import LOCAL_OPENENV, EnvironmentConfig
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.envs.local_server import LocalServerError, LocalServerProcess
from actors.task import Task
from train.failures import RunFailed

LOCAL_API_KEY = "sk-local"
OPENENV_START_S = 60.0  # importing OpenEnv's server takes seconds
RESTARTS = 3  # of each server that dies

logger = logging.getLogger(__name__)


class EnvironmentServers:
    """A context manager: inside it, every environment of ``tasks`` can be reached at ``host``.

    Args:
        folder: gets the servers' logs.
        sessions: episodes at once.

    Attributes:
        openenv: URLs by ``env_key``; tasks of other environments are Fleet's.
        uses_fleet: whether there are such tasks.
        api_key, base_url: of the control plane; ``None``: as the process's environment says.
    """

    def __init__(
        self,
        environment: EnvironmentConfig,
        tasks: Sequence[Task],
        folder: Path,
        sessions: int,
        host: str = "127.0.0.1",
    ) -> None:
        self._environment = environment
        self._folder = folder
        self._sessions = sessions
        self._host = host
        self._cleanup = ExitStack()
        self._restarts: Counter[LocalServerProcess] = Counter()  # of each that was started here
        self.openenv: dict[str, str] = {}
        self.uses_fleet = any(task.env_key not in environment.openenv for task in tasks)
        self.api_key: str | None = None
        self.base_url = environment.base_url

    def __enter__(self) -> EnvironmentServers:
        """Start what is missing.

        Raises:
            RunFailed: a server did not start.
        """
        try:
            for env_key, url in self._environment.openenv.items():
                self.openenv[env_key] = self._start_openenv(env_key, url)
            if self.uses_fleet and self._environment.fleet == "local":
                self.api_key, self.base_url = LOCAL_API_KEY, self._start_fleet()
        except LocalServerError as error:
            self._cleanup.close()
            raise RunFailed(str(error)) from None
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    def check(self) -> None:
        """Start those again that have ended: what they hosted is lost, and the episodes there end with that reason.

        Raises:
            RunFailed: one of them ends again and again, or does not start.
        """
        for server in self._restarts:
            try:
                server.check()
            except LocalServerError as error:
                self._restart(server, str(error))

    def _restart(self, server: LocalServerProcess, reason: str) -> None:
        self._restarts[server] += 1
        if self._restarts[server] > RESTARTS:
            raise RunFailed(reason)
        logger.warning("%s; it is started again", reason)
        try:
            server.restart()
        except LocalServerError as error:
            raise RunFailed(str(error)) from None

    def _start_openenv(self, env_key: str, url: str) -> str:
        if url not in LOCAL_OPENENV:
            return url
        server = LocalServerProcess(
            LOCAL_OPENENV[url],
            f"the OpenEnv server of '{env_key}'",
            host=self._host,
            log_path=self._folder / f"{env_key}.log",
            arguments=["--max-sessions", str(self._sessions)],
            start_timeout_s=OPENENV_START_S,
            ignore_sigterm=True,
        )
        return self._start(server)

    def _start_fleet(self) -> str:
        environment = self._environment
        server = LocalFleetProcess(
            host=self._host,
            faults=environment.local_faults,
            arguments=[word for name in environment.local_applications for word in ("--applications", name)],
            log_path=self._folder / "local_fleet.log",
            ignore_sigterm=True,
        )
        return self._start(server)

    def _start(self, server: LocalServerProcess) -> str:
        self._cleanup.enter_context(server)
        self._restarts[server] = 0
        return server.url
