"""Finished files of trajectories: ``NAME.parquet``, exact to the token, and ``NAME.jsonl``, the same to look at."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from train.trajectory_spool import PARTIAL
from train.trajectory_table import SCHEMA, TOKEN_COLUMNS, json_line, rows

logger = logging.getLogger(__name__)

SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Finished:
    """What became of a spool file. ``missing``: trajectories that its writer died before it had written."""

    name: str
    files: list[Path]
    missing: int


def finish(spooled: Path, folder: Path, jsonl: bool) -> Finished:
    """Turn a spool file into ``NAME.parquet`` (and ``NAME.jsonl``) in ``folder``, and remove it.

    A file of the same name that holds another batch, of a run that began again before this step, moves to
    ``superseded/``.

    Raises:
        OSError, pyarrow.ArrowException: it cannot be read or written; everything is as it was.
    """
    with pa.OSFile(str(spooled), "rb") as source:
        try:
            stream = pa.ipc.open_stream(source)
        except pa.ArrowInvalid:
            if not spooled.name.endswith(PARTIAL):
                raise
            spooled.unlink()
            logger.warning("%s: its writer died before it had written which batch it is", spooled)
            return Finished(spooled.name, [], 0)
        header = {key.decode(): value.decode() for key, value in stream.schema.metadata.items()}
        name, batch_id, expected = header["name"], header["batch"], int(header["trajectories"])
        target = folder / f"{name}.parquet"
        files = [target, *([target.with_suffix(".jsonl")] if jsonl else [])]
        if _batch_id(target) == batch_id:  # all was done but to remove the spool file
            spooled.unlink()
            return Finished(name, files, 0)
        partials = [folder / f".{file.name}{PARTIAL}" for file in files]
        try:
            found = _write(_whole_batches(stream), header, *partials)
        except BaseException:
            for partial in partials:
                partial.unlink(missing_ok=True)
            raise
    _supersede(target)
    for partial, file in reversed(list(zip(partials, files, strict=True))):  # the Parquet file last: it says "done"
        partial.replace(file)
    spooled.unlink()
    return Finished(name, files, expected - found)


def _whole_batches(stream: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Record batches up to the end, or to where the writer died."""
    while True:
        try:
            yield stream.read_next_batch()
        except StopIteration:
            return
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None):  # the disk's fault
                raise
            return


def _write(batches: Iterator[pa.RecordBatch], header: dict[str, str], parquet: Path, jsonl: Path | None = None) -> int:
    """Write both files; returns the number of trajectories."""
    found = 0
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(jsonl.open("wb")) if jsonl else None
        file = stack.enter_context(parquet.open("wb"))
        writer = stack.enter_context(parquet_writer(file, SCHEMA.with_metadata(header)))
        for batch in batches:
            writer.write_batch(batch)
            if lines is not None:
                lines.writelines(map(json_line, rows(batch)))
            found += batch.num_rows
        writer.close()
        file.flush()
        os.fsync(file.fileno())
    return found


def parquet_writer(file: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Compressed as suits the columns: a dictionary pays where values repeat, which logprobs do not."""
    names = [name for name in schema.names if name not in TOKEN_COLUMNS]
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=names)


def _batch_id(path: Path) -> str | None:
    if not path.exists():
        return None
    return pq.read_schema(path).metadata.get(b"batch", b"").decode()


def _supersede(target: Path) -> None:
    if not target.exists():
        return
    kept = target.parent / SUPERSEDED / f"{target.stem}.{_batch_id(target)}.parquet"
    kept.parent.mkdir(exist_ok=True)
    target.replace(kept)
    target.with_suffix(".jsonl").unlink(missing_ok=True)
    logger.warning("%s existed, from before this run began again: it is %s now", target, kept)


def finished_files(folder: Path) -> list[Path]:
    """The files of a folder that are complete, in the order of their steps; superseded ones are not among them."""
    return sorted(path for path in folder.glob("[!.]*") if path.suffix in (".parquet", ".jsonl"))
