"""Looking at the processes that something has started, any of which may end while one looks."""

from __future__ import annotations

import re
import signal
from collections import Counter

import psutil


def children(pid: int | None = None) -> list[psutil.Process]:
    """All that a process, by default this one, has started, and they in turn; none where it is gone."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def command_line(process: psutil.Process) -> str:
    """Ray names its processes after their actors; empty where it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def runs(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def strike(process: psutil.Process, blow: signal.Signals) -> None:
    """Send a signal, if there is still somebody to send it to."""
    try:
        process.send_signal(blow)
    except psutil.NoSuchProcess:
        return


def cpu_seconds() -> Counter[str]:
    """CPU time so far of this process and all it has started, by name: an actor's, a module's or a program's."""
    seconds: Counter[str] = Counter()
    for process in (psutil.Process(), *children()):
        try:
            times = process.cpu_times()
            seconds[_name(process)] += times.user + times.system
        except psutil.Error:
            continue
    return seconds


def _name(process: psutil.Process) -> str:
    line = command_line(process)
    actor = re.match(r"ray::(\w+)", line)
    module = re.search(r"-m ([\w.]+)|/(\w+)\.py", line)
    if actor:
        return actor.group(1)
    if module:
        return module.group(1) or module.group(2)
    return process.name()
