"""Looking at the replicas of a policy from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil

from benchmarks.processes import command_line


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.2)


def engines_of(app: str) -> list[psutil.Process]:
    """Engine processes of an application's replicas."""
    return [p for p in psutil.process_iter() if "EngineCore" in command_line(p) and replica_of(p, app) is not None]


def replica_of(engine: psutil.Process, app: str = "") -> psutil.Process | None:
    """The process of the replica that an engine's process belongs to."""
    try:
        return next((p for p in engine.parents() if f"ServeReplica:{app}" in command_line(p)), None)
    except psutil.Error:
        return None
