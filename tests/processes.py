"""Looking for processes, any of which may end while one looks."""

from __future__ import annotations

import psutil


def name_of(process: psutil.Process) -> str:
    """Its name and its command line, which differ where it has given itself a title; nothing if it is gone."""
    try:
        return " ".join([process.name(), *process.cmdline()])
    except psutil.Error:
        return ""


def started_by(pid: int | None = None) -> list[psutil.Process]:
    """What a process, by default this one, has started, and what that has started in turn; none if it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
