"""Uploads beside other work: one thread, which tries again until they succeed or the owner ends. No file is removed."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from train.s3 import StorageError, objects, upload

logger = logging.getLogger(__name__)

# Wait after the 1st, 2nd, ... failure in a row; the last one from then on. Each upload has retries of its own
# (train/s3.py), so this is about outages of minutes.
RETRY_S = (1.0, 5.0, 15.0, 60.0)


@dataclass(frozen=True)
class Upload:
    """A file and the ``s3://`` location it goes to."""

    path: Path
    location: str


class BackgroundUpload:
    """Uploads files in the order they are added; one that fails does not hold up the others.

    Attributes:
        error: why the last upload failed, in one line; ``None`` if it did not.
    """

    def __init__(self, retry_s: tuple[float, ...] = RETRY_S) -> None:
        self.error: str | None = None
        self._retry_s = retry_s
        self._waiting: deque[Upload] = deque()
        self._busy: Upload | None = None
        self._deadline: float | None = None  # monotonic; set by close
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="background-upload", daemon=True)
        self._thread.start()

    def add(self, path: Path, location: str) -> None:
        """Upload ``path`` when its turn comes. Returns at once."""
        with self._changed:
            self._waiting.append(Upload(path, location))
            self._changed.notify_all()

    def waiting(self) -> list[Upload]:
        """What is not in the store yet, the one under way included."""
        with self._changed:
            return ([self._busy] if self._busy else []) + list(self._waiting)

    def close(self, timeout_s: float) -> list[Upload]:
        """Try what is left, each once more, for at most about ``timeout_s`` seconds.

        Returns:
            What is still not in the store; the files are where they were.
        """
        with self._changed:
            self._deadline = time.monotonic() + timeout_s
            self._changed.notify_all()
        self._thread.join(timeout_s)
        return self.waiting()

    def _run(self) -> None:
        failures = 0
        while self._await_work(failures):
            failures = 0 if self._upload_next() else failures + 1
        for _ in range(len(self._waiting)):
            if time.monotonic() < self._deadline:
                self._upload_next()

    def _await_work(self, failures: int) -> bool:
        """Wait for something to upload, and after failures a pause. False once :meth:`close` was called."""
        pause = self._retry_s[min(failures, len(self._retry_s)) - 1] if failures else 0.0
        with self._changed:
            self._changed.wait_for(lambda: self._deadline is not None, pause)
            self._changed.wait_for(lambda: self._waiting or self._deadline is not None)
            return self._deadline is None

    def _upload_next(self) -> bool:
        """Try the first that waits; if it fails it is the last from now on, so that it holds up no other."""
        with self._changed:
            item = self._busy = self._waiting.popleft()
        error = _try_upload(item)
        if error is not None and error != self.error:
            logger.warning("%s is not uploaded yet and will be tried again: %s", item.path, error)
        with self._changed:
            self._busy = None
            if error is not None:
                self._waiting.append(item)
            self.error = error
        return error is None


def _try_upload(item: Upload) -> str | None:
    """Why it failed; ``None`` when it is stored. Never raises: the others must have their turn."""
    try:
        upload(item.path, item.location)
    except StorageError as error:
        return str(error)
    except Exception as error:
        return f"{item.location}: {type(error).__name__}: {error}"
    return None


def missing(files: Iterable[Path], prefix: str) -> list[Upload]:
    """Which of ``files`` are not stored under ``prefix`` (a folder in S3, ends with ``/``) with their name and size.

    A file that is gone is not among them.

    Raises:
        StorageError: the store cannot be listed.
    """
    stored = {item.location: item.size for item in objects(prefix)}
    found = []
    for path in files:
        item = Upload(path, prefix + path.name)
        with suppress(FileNotFoundError):
            if stored.get(item.location) != path.stat().st_size:
                found.append(item)
    return found
