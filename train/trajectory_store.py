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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from actors.trajectory import Group
from train import s3
from train.background_upload import BackgroundUpload, missing
from train.trajectory_files import finish, finished_files
from train.trajectory_spool import SPOOL, Spool, files_in, spooled_files, spools
from train.trajectory_table import Origin

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class StoreSettings:
    """Where trajectories go.

    Attributes:
        folder: of the run's trajectories, on this machine or a file system that all see.
        jsonl: write ``NAME.jsonl`` beside each ``NAME.parquet`` of this store; what others left is finished as they had
            it.
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
        waiting: batches that are in the spool but not in a finished file yet; a spool that cannot be looked into counts
            as one.
        not_uploaded: finished files that are not known to be in S3.
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
        self._folder = Path(settings.folder)
        self._spool = Spool(self._folder, settings.jsonl)
        self._report = StoreReport()
        self._jobs: queue.SimpleQueue[Path | None] = queue.SimpleQueue()
        self._waiting: set[Path] = set()
        self._out_of_reach: set[Path] = set()  # of others' spools, as the last look found them
        self._known: set[Path] = set()  # files that were seen in S3 or handed to uploads
        self._unknown: set[Path] = set()  # files of which nobody could tell whether they are in S3
        self._listed = False
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
        # Others may have finished some of it.
        waiting = {path for path in [*self._waiting, *self._out_of_reach] if path.exists()}
        self._report.waiting = len(waiting)
        if self._uploads is not None:
            self._report.not_uploaded = len({item.path for item in self._uploads.waiting()} | self._unknown)
            self._report.problem = self._uploads.error or self._report.problem
        return self._report

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> StoreReport:
        """Finish what is waiting, in at most about ``timeout_s`` seconds. What is not finished then is not lost: it is
        in the spool, or in the folder but not in S3, and :func:`recover` finishes it."""
        deadline = time.monotonic() + timeout_s
        self._jobs.put(None)
        self._thread.join(timeout_s)
        late = self._thread.is_alive()
        if self._uploads is not None:
            left = self._uploads.close(max(0.0, deadline - time.monotonic()))
            late = late or bool(left and self._uploads.error is None)
        if late:
            self._note(f"not everything was finished within {timeout_s:g} s")
        if self._thread.is_alive():
            self._count_what_is_left()
        else:
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
        with self._going_on(self._spool.path):
            self._finish(self._spool.files())
        self._finish_left_overs()

    def _finish_left_overs(self) -> None:
        """Never raises: whatever is the matter with others' batches, this store's own must be finished."""
        self._out_of_reach = set()
        with self._going_on(self._folder / SPOOL):
            for path in spools(self._folder):
                with self._going_on(path):
                    self._finish_left_over(path)
            self._upload_missing()

    def _finish_left_over(self, path: Path) -> None:
        spool = Spool.adopt(path)
        if spool is not None:
            with spool:
                self._report.recovered += self._finish(spool.files())

    @contextmanager
    def _going_on(self, path: Path) -> Iterator[None]:
        """What fails at the spool ``path`` is noted, and its files count as waiting."""
        try:
            yield
        except Exception as error:
            self._note(f"{path}: {type(error).__name__}: {error}")
            try:
                self._out_of_reach.update(files_in(path))
            except OSError:
                self._out_of_reach.add(path)

    def _count_what_is_left(self) -> None:
        """From outside, when the thread has not come to its end."""
        self._out_of_reach.update(spooled_files(self._folder))
        if self._uploads is not None:
            self._unknown.update(path for path in finished_files(self._folder) if path not in self._known)

    def _finish(self, paths: Iterable[Path]) -> int:
        """How many could be finished. The others stay where they are."""
        count = 0
        for path in paths:
            try:
                finished = finish(path, self._folder)
            except Exception as error:
                self._waiting.add(path)
                self._note(f"{path} could not be finished yet: {type(error).__name__}: {error}")
                continue
            self._waiting.discard(path)
            count += 1
            if finished.missing:
                self._report.cut += 1
                self._note(f"{finished.name}: its writer died over it; {finished.missing} trajectories are lost")
            for file in finished.files if self._uploads is not None else ():
                self._upload(file)
        return count

    def _upload(self, file: Path) -> None:
        self._known.add(file)
        self._uploads.add(file, self._prefix + file.name)

    def _upload_missing(self) -> None:
        """Files that another store finished but did not upload."""
        if self._uploads is None:
            return
        waiting = {item.path for item in self._uploads.waiting()}
        files = [path for path in finished_files(self._folder) if path not in waiting]
        try:
            found = [item.path for item in missing(files, self._prefix)] if files else []
        except Exception as error:
            self._note(str(error) if isinstance(error, s3.StorageError) else f"{type(error).__name__}: {error}")
            found = [path for path in files if path not in self._known]
            if self._listed:  # most of them are there, or their own store sees to it: not all of a run once more
                self._unknown.update(found)
                return
        else:
            self._listed = True
            self._known.update(files)
        for file in found:
            self._upload(file)

    def _note(self, problem: str) -> None:
        self._report.problem = " ".join(problem.split())
        logger.warning("%s", self._report.problem)


def recover(settings: StoreSettings, timeout_s: float = CLOSE_TIMEOUT_S) -> StoreReport:
    """Finish and upload what stores left that have died."""
    return TrajectoryStore(settings).close(timeout_s)
