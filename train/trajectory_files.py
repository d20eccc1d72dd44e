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


def finish(spooled: Path, folder: Path) -> Finished:
    """Turn a spool file into ``NAME.parquet`` (and ``NAME.jsonl``, if its header says so) in ``folder``, and remove it.

    Where a run began again before this step there are two batches of one name. The one that was put down later gets
    it, in whatever order they are finished; the other goes to ``superseded/``.

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
        header = _decoded(stream.schema.metadata)
        name, batch_id, expected = header["name"], header["batch"], int(header["trajectories"])
        target = folder / f"{name}.parquet"
        files = [target, *([target.with_suffix(".jsonl")] if header.get("jsonl") != "0" else [])]
        if _metadata(target).get("batch") == batch_id:  # all was done but to remove the spool file
            spooled.unlink()
            return Finished(name, files, 0)
        # Another store may be finishing another batch of this name.
        partials = [folder / f".{file.name}.{batch_id}{PARTIAL}" for file in files]
        try:
            found = _write(_whole_batches(stream), header, *partials)
            files = _give_names(partials, files, header)
        except BaseException:
            for partial in partials:
                partial.unlink(missing_ok=True)
            raise
    spooled.unlink()
    return Finished(name, files, expected - found)


def _give_names(partials: list[Path], files: list[Path], header: dict[str, str]) -> list[Path]:
    """Returns those of ``files`` that hold the batch now: none where a later batch has the name already."""
    target = files[0]
    stands = _metadata(target)
    if int(stands.get("written", 0)) > int(header.get("written", 0)):
        kept = _keep(partials[0], target, header["batch"])
        for partial in partials[1:]:
            partial.unlink()
        logger.warning("%s holds a later batch, from after its run began again: the earlier one is %s", target, kept)
        return []
    if target.exists():
        kept = _keep(target, target, stands.get("batch", ""))
        target.with_suffix(".jsonl").unlink(missing_ok=True)
        logger.warning("%s existed, from before this run began again: it is %s now", target, kept)
    for partial, file in reversed(list(zip(partials, files, strict=True))):  # the Parquet file last: it says "done"
        partial.replace(file)
    return files


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
        for written in (file, lines) if lines is not None else (file,):
            written.flush()
            os.fsync(written.fileno())
    return found


def parquet_writer(file: Any, schema: pa.Schema) -> pq.ParquetWriter:
    """Compressed as suits the columns: a dictionary pays where values repeat, which logprobs do not."""
    names = [name for name in schema.names if name not in TOKEN_COLUMNS]
    return pq.ParquetWriter(file, schema, compression="zstd", use_dictionary=names)


def _metadata(path: Path) -> dict[str, str]:
    """What the header of its spool file said of the batch in a finished file; nothing if there is no such file."""
    return _decoded(pq.read_schema(path).metadata) if path.exists() else {}


def _decoded(metadata: dict[bytes, bytes] | None) -> dict[str, str]:
    return {key.decode(): value.decode() for key, value in (metadata or {}).items()}


def _keep(file: Path, target: Path, batch_id: str) -> Path:
    """Move a batch that is superseded out of the way."""
    kept = target.parent / SUPERSEDED / f"{target.stem}.{batch_id}.parquet"
    kept.parent.mkdir(exist_ok=True)
    return file.replace(kept)


def finished_files(folder: Path) -> list[Path]:
    """The files of a folder that are complete, in the order of their steps; superseded ones are not among them."""
    return sorted(path for path in folder.glob("[!.]*") if path.suffix in (".parquet", ".jsonl"))
