"""The store of a run's trajectories: what the learner trained on and what evaluations saw, token by token, on disk.

``put`` writes a batch to a spool file and returns; a thread turns spool files into Parquet, with JSON lines beside it,
and hands these to uploads. The spool is the queue: however far the thread is behind, memory holds only the names of its
files, and a batch is safe from the death of the process once ``put`` has returned. The next store of the same folder,
or :func:`recover`, finishes what a dead one left.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.trajectory import Group
from train import s3
from train.background_upload import BackgroundUpload, Upload, missing
from train.trajectory_files import finish, finished_files
from train.trajectory_spool import Spool, abandoned_spools
from train.trajectory_table import Origin

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StoreSettings:
    """Where trajectories go.

    Attributes:
        folder: of the run's trajectories, on this machine or a file system that all see.
        jsonl: write ``NAME.jsonl`` beside each ``NAME.parquet``.
        upload_to: a folder in S3 that gets a copy of every finished file; ``None``: no uploads.
    """

    folder: str
    jsonl: bool = True
    upload_to: str | None = None


@dataclass
class StoreReport:
    """Counts since the store was opened.

    Attributes:
        stored: batches that ``put`` took.
        lost: batches that ``put`` could not write; their steps are in the log.
        recovered: batches of stores that had died.
        cut: of these, batches of which only the first trajectories had been written.
        waiting: batches that are in the spool but not in a finished file yet.
        not_uploaded: finished files that are not in S3 yet.
        problem: the last thing that went wrong, in one line.
    """

    stored: int = 0
    lost: int = 0
    recovered: int = 0
    cut: int = 0
    waiting: int = 0
    not_uploaded: int = 0
    problem: str | None = None

    def metrics(self) -> dict[str, float]:
        names = ("stored", "lost", "waiting", "not_uploaded")
        return {f"trajectories/{name}": float(getattr(self, name)) for name in names}


class TrajectoryStore:
    """Writes batches of one process. Several stores may write into one folder; each has a spool of its own.

    Raises:
        OSError: the folder cannot be made.
    """

    def __init__(self, settings: StoreSettings) -> None:
        self._settings = settings
        self._folder = Path(settings.folder)
        self._spool = Spool(self._folder)
        self._report = StoreReport()
        self._jobs: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._waiting: set[Path] = set()
        self._uploads = BackgroundUpload() if settings.upload_to else None
        self._prefix = f"{(settings.upload_to or '').rstrip('/')}/"
        self._thread = threading.Thread(target=self._run, name="trajectory-store", daemon=True)
        self._thread.start()

    def put(self, groups: Sequence[Group], origin: Origin) -> None:
        """Keep the trajectories of ``groups``. Returns once they are in a file, before they are in their final form.

        Never raises: a batch that cannot be kept costs its record, not the run. It is logged and counted as lost.
        """
        try:
            path = self._spool.write(groups, origin)
        except Exception as error:
            self._report.lost += 1
            self._note(f"{origin.name}: {len(groups)} groups could not be stored and are lost: {error}")
            return
        self._report.stored += 1
        self._waiting.add(path)
        self._jobs.put(path)

    def report(self) -> StoreReport:
        """The counts as they are now."""
        self._report.waiting = len(self._waiting)
        if self._uploads is not None:
            self._report.not_uploaded = len(self._uploads.waiting())
            self._report.problem = self._uploads.error or self._report.problem
        return self._report

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> StoreReport:
        """Finish what is waiting, in at most about ``timeout_s`` seconds. What is not finished then is not lost: it is
        in the spool, or in the folder but not in S3, and :func:`recover` finishes it."""
        deadline = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._thread.join(timeout_s)
        if self._uploads is not None:
            self._uploads.close(max(0.0, deadline - time.monotonic()))
        if not self._thread.is_alive():
            self._spool.close()
        report = self.report()
        if report.waiting or report.not_uploaded:
            upload_to = f" --upload-to {self._prefix}" if self._uploads is not None else ""
            logger.warning(
                "%d batches are in the spool, %d files are not uploaded (%s); this finishes them: "
                "fleet-rl trajectories recover %s%s",
                *(report.waiting, report.not_uploaded, report.problem, self._folder, upload_to),
            )
        return report

    def _run(self) -> None:
        self._finish_left_overs()
        while (path := self._jobs.get()) is not None:
            self._finish([path])
        # What failed here, for lack of space perhaps, and what others left while this one lived.
        self._finish(self._spool.files())
        self._finish_left_overs()

    def _finish_left_overs(self) -> None:
        for spool in abandoned_spools(self._folder):
            with spool:
                self._report.recovered += self._finish(spool.files())
        self._upload_missing()

    def _finish(self, paths: Iterable[Path]) -> int:
        """How many could be finished. The others stay where they are."""
        count = 0
        for path in paths:
            try:
                finished = finish(path, self._folder, self._settings.jsonl)
            except Exception as error:
                self._waiting.add(path)
                self._note(f"{path} could not be finished yet: {error}")
                continue
            self._waiting.discard(path)
            count += 1
            if finished.missing:
                self._report.cut += 1
                self._note(f"{finished.name}: its writer died over it; {finished.missing} trajectories are lost")
            for file in finished.files if self._uploads is not None else ():
                self._uploads.add(file, self._prefix + file.name)
        return count

    def _upload_missing(self) -> None:
        """Files that an earlier store finished but did not upload."""
        if self._uploads is None:
            return
        waiting = {item.path for item in self._uploads.waiting()}
        files = [path for path in finished_files(self._folder) if path not in waiting]
        try:
            found = missing(files, self._prefix)
        except s3.StorageError as error:
            self._note(str(error))
            found = [Upload(path, self._prefix + path.name) for path in files]
        for item in found:
            self._uploads.add(item.path, item.location)

    def _note(self, problem: str) -> None:
        self._report.problem = " ".join(problem.split())
        logger.warning("%s", self._report.problem)


def recover(settings: StoreSettings, timeout_s: float = CLOSE_TIMEOUT_S) -> StoreReport:
    """Finish and upload what stores left that have died."""
    return TrajectoryStore(settings).close(timeout_s)
