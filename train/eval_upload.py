"""Copies of evaluation dumps in S3, beside the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from train.background_upload import BackgroundUpload, missing
from train.s3 import StorageError

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 60.0


def eval_prefix(upload_to: str, run_name: str) -> str:
    """Where the evaluations of a run go: ``UPLOAD_TO/evals/RUN/``, as SkyRL has it."""
    return f"{upload_to.rstrip('/')}/evals/{run_name}/"


class EvalUpload:
    """Uploads the files below ``root`` under ``prefix`` (ends with ``/``), each under its path below ``root``.

    A context manager; leaving it waits for what is under way, for at most ``CLOSE_TIMEOUT_S``.
    """

    def __init__(self, root: Path, prefix: str) -> None:
        self._root = root
        self._prefix = prefix
        self._uploads = BackgroundUpload()

    def add(self, files: Iterable[Path]) -> None:
        """Upload ``files`` when their turn comes. Returns at once."""
        for file in files:
            self._uploads.add(file, self._prefix + file.relative_to(self._root).as_posix())

    def add_missing(self) -> None:
        """Upload what an earlier process of the run left. Where S3 cannot be listed, all of it."""
        for folder in sorted({file.parent for file in self._root.rglob("*.jsonl")}):
            files = sorted(folder.glob("*.jsonl"))
            below = folder.relative_to(self._root).as_posix()
            try:
                files = [item.path for item in missing(files, f"{self._prefix}{below}/")]
            except StorageError as error:
                logger.warning("%s: which files are in S3 is not known, all are uploaded: %s", folder, error)
            self.add(files)

    def __enter__(self) -> EvalUpload:
        return self

    def __exit__(self, *exc: object) -> None:
        left = self._uploads.close(CLOSE_TIMEOUT_S)
        if left:
            logger.warning(
                "%d files of evaluations are not uploaded (%s); this uploads them: aws s3 sync %s %s",
                *(len(left), self._uploads.error, self._root, self._prefix),
            )
