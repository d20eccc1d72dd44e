"""Is a run's folder the same one on another host? Its ranks write checkpoints and trajectories there, and its driver
reads them."""

from __future__ import annotations

import secrets
import time
from pathlib import Path

NAME = ".driver"
POLL_S = 0.5


def mark_folder(folder: Path) -> str:
    """Write something into it that no other folder holds, and return that."""
    mark = secrets.token_hex(8)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / NAME).write_text(mark, encoding="utf-8")
    return mark


def has_mark(folder: Path, mark: str, timeout_s: float) -> bool:
    """Whether ``folder``, here, is the one that was marked, elsewhere. Takes ``timeout_s`` to say no."""
    deadline = time.monotonic() + timeout_s
    while _read(folder / NAME) != mark:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None
