"""Looking at the replicas of a policy from outside."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def until(condition: Callable[[], object], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.2)


def engines_of(app: str) -> list[psutil.Process]:
    """Engine processes of an application's replicas."""
    return [p for p in psutil.process_iter() if "EngineCore" in _name(p) and f"ServeReplica:{app}" in _parent(p)]


def _name(process: psutil.Process | None) -> str:
    try:
        return " ".join([process.name(), *process.cmdline()]) if process else ""
    except psutil.Error:
        return ""


def _parent(process: psutil.Process) -> str:
    try:
        return _name(process.parent())
    except psutil.Error:
        return ""
