"""Spool files: batches of trajectories as they were put down in a hurry, safe from the death of their writer.

A spool file is an Arrow IPC stream: record batches one after the other, each whole or recognisably not. What makes one
into its final form is in :mod:`train.trajectory_files`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from actors.trajectory import Group
from train.trajectory_table import BATCH_BYTES, SCHEMA, Origin, record_batches

SPOOL = ".spool"
PARTIAL = ".partial"
_SUFFIX = ".arrows"
_OWNER = "owner"


class Spool:
    """The spool files of one store: a folder that is locked for as long as its owner lives.

    A context manager; leaving it is :meth:`close`.

    Args:
        folder: of the finished files; the spool is a folder in it.
        jsonl: whether the batches get lines of JSON as well, whoever finishes them.
    """

    def __init__(self, folder: Path, jsonl: bool = True) -> None:
        self._jsonl = jsonl
        name = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.path = folder / SPOOL / name
        # Locked before it has its name: whoever sees it and can lock it knows that the owner is dead.
        hidden = self.path.with_name(f".{name}")
        hidden.mkdir(parents=True)
        self._lock = (hidden / _OWNER).open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        hidden.rename(self.path)
        self._count = 0

    @classmethod
    def adopt(cls, path: Path) -> Spool | None:
        """The spool of a dead owner; ``None`` if the owner lives, here or on another host, or somebody else has it.

        Raises:
            OSError: it is not to be opened, by this user for example.
        """
        spool = cls.__new__(cls)
        spool.path = path
        try:
            spool._lock = (path / _OWNER).open("r+")
        except FileNotFoundError:
            return None
        try:
            fcntl.flock(spool._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            spool._lock.close()
            return None
        # Else somebody else adopted it, and was done with it before this one had the lock.
        return spool if (path / _OWNER).exists() else None

    def write(self, groups: Sequence[Group], origin: Origin, limit: int = BATCH_BYTES) -> Path:
        """Write a batch, whole or not at all; while it is being written it has another name.

        Raises:
            OSError: it cannot be written.
        """
        self._count += 1
        path = self.path / f"{self._count:06d}{_SUFFIX}"
        partial = path.with_name(path.name + PARTIAL)
        header = {
            "name": origin.name,
            "batch": secrets.token_hex(8),
            "written": str(time.time_ns()),
            "jsonl": str(int(self._jsonl)),
            "trajectories": str(sum(len(group.trajectories) for group in groups)),
        }
        try:
            with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, SCHEMA.with_metadata(header)) as stream:
                for batch in record_batches(groups, origin, limit):
                    stream.write_batch(batch)
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        return path

    def files(self) -> list[Path]:
        """In the order they were written."""
        return files_in(self.path)

    def close(self) -> None:
        """Give the lock back; the folder goes if nothing is left in it."""
        if not self.files():
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def files_in(spool: Path) -> list[Path]:
    """The files of one spool, in the order they were written."""
    return sorted(path for path in spool.iterdir() if path.name != _OWNER)


def spooled_files(folder: Path) -> list[Path]:
    """All spool files in ``folder``, of living and dead stores."""
    return [path for path in (folder / SPOOL).glob("*/*") if path.name != _OWNER]


def spools(folder: Path) -> list[Path]:
    """The spools in ``folder``, of living and dead stores."""
    return sorted(path for path in (folder / SPOOL).glob("*/") if not path.name.startswith("."))
