"""Folders in shared memory, each with an owner that ends it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "fleet-rl-"
_LEFT = "left-behind"


class SharedFolder:
    """A folder in shared memory that belongs to this process and goes with it.

    The kernel drops the lock on it when its owner dies, however it dies, so that another process can tell an abandoned
    folder from one in use without trusting process ids.
    """

    def __init__(self, label: str, root: Path = SHARED_MEMORY) -> None:
        """``label`` makes the folder's name readable, for example a run's name."""
        # Sockets lie here too, and the kernel allows 107 characters for a socket's path.
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", label)[:24]
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{readable}-{os.getpid()}-", dir=root))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Between the first line and the last, another process's clean-up can take the folder for abandoned.
            if self.path.is_dir():
                break
            os.close(self._lock)
        self._remove = weakref.finalize(self, _remove_folder, self.path, self._lock)

    @contextmanager
    def snapshot_file(self, snapshot: np.ndarray, version: int) -> Iterator[Path]:
        """The snapshot as a file, for as long as the context lasts."""
        path = self.path / f"v{version}.safetensors"
        try:
            path.write_bytes(memoryview(snapshot))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def leave(self, names: Iterable[str]) -> None:
        """Have :func:`remove_abandoned` remove these files beside the folder, and it, once this process is dead.

        For what belongs to a library that still uses it when this process ends.
        """
        (self.path / _LEFT).write_text("\n".join(names), encoding="utf-8")
        self._remove.detach()

    def close(self) -> None:
        """Remove the folder. Idempotent; also done when the object or the interpreter goes."""
        self._remove()


def _remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove the folders of processes that died without cleaning up. Returns the names of those removed."""
    return [path.name for path in _folders(root) if _remove_if_abandoned(path)]


def _folders(root: Path) -> Iterable[Path]:
    return (path for path in root.glob(f"{FOLDER_PREFIX}*") if path.is_dir() and not path.is_symlink())


def _remove_if_abandoned(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock).st_uid == os.geteuid():  # another user's list is no order to follow
            _remove_left(path)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)


def _remove_left(path: Path) -> None:
    try:
        names = (path / _LEFT).read_text(encoding="utf-8").split()
    except OSError:
        return
    for name in names:
        (path.parent / Path(name).name).unlink(missing_ok=True)
