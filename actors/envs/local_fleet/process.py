"""A local Fleet in a process of its own, started and ended by this one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from actors.envs.local_server import LocalServerError, LocalServerProcess

LocalFleetError = LocalServerError


class LocalFleetProcess(LocalServerProcess):
    """Context manager around ``python -m actors.envs.local_fleet``; see :class:`LocalServerProcess`."""

    def __init__(
        self,
        *,
        faults: str | Path | None = None,
        instance_limit: int | None = None,
        arguments: Sequence[str] = (),
        **process: Any,
    ) -> None:
        """``process``: keyword arguments of :class:`LocalServerProcess`."""
        own = list(arguments)
        if faults is not None:
            own += ["--faults", str(faults)]
        if instance_limit is not None:
            own += ["--instance-limit", str(instance_limit)]
        super().__init__("actors.envs.local_fleet", "the local Fleet", arguments=own, **process)
