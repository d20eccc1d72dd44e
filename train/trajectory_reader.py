"""Reading trajectories back: from a run, a folder, one file or S3, a file at a time and a row group at a time."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import orjson
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, ValidationError

from train import s3
from train.trajectory_table import DAMAGED, SCHEMA, TOKEN_COLUMNS, rows

FOLDER = "trajectories"  # of a run
RUNS = Path("runs")
# Everything but the tokens: what can be read without decoding most of a file.
TEXT_COLUMNS = tuple(name for name in SCHEMA.names if name not in TOKEN_COLUMNS)
_SELECTED = ("kind", "step", "env_key", "task_key", "outcome", "reward")  # what a Selection looks at
_ROWS_AT_ONCE = 256
_SUFFIXES = (".parquet", ".jsonl")
_NAME = re.compile(r"(?P<kind>step|eval)_(?P<step>\d+)(_(?P<label>.+))?")


class TrajectoryFileError(Exception):
    """Trajectories that cannot be read: one line that says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, both included."""

    low: float
    high: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """``5``, ``2:8``, ``2:`` or ``:8``.

        Raises:
            ValueError: it is none of these.
        """
        low, colon, high = text.partition(":")
        try:
            numbers = (float(low or "-inf"), float(high or "inf")) if colon else (float(text), float(text))
        except ValueError:
            numbers = (math.nan, math.nan)
        if not numbers[0] <= numbers[1]:
            raise ValueError(f"'{text}' is no range: write NUMBER, LOW:HIGH, LOW: or :HIGH")
        return cls(*numbers)

    def __contains__(self, number: float | None) -> bool:
        return number is not None and self.low <= number <= self.high


@dataclass(frozen=True)
class Selection:
    """Which trajectories are meant; ``None`` is any. One that was not graded is in no range of rewards."""

    kind: str | None = None
    env: str | None = None
    task: str | None = None
    step: Range | None = None
    outcome: str | None = None
    reward: Range | None = None

    def takes(self, row: dict[str, Any]) -> bool:
        """Whether a row is meant."""
        wanted = (("kind", self.kind), ("env_key", self.env), ("task_key", self.task), ("outcome", self.outcome))
        if any(value is not None and row[name] != value for name, value in wanted):
            return False
        ranges = (("step", self.step), ("reward", self.reward))
        return all(limits is None or row[name] in limits for name, limits in ranges)

    def takes_file(self, stem: str) -> bool:
        """Whether a file of this name can hold a row that is meant."""
        match = _NAME.fullmatch(stem)
        return match is None or self.step is None or int(match["step"]) in self.step


EVERYTHING = Selection()


def read(
    location: str, selection: Selection = EVERYTHING, columns: Sequence[str] | None = None
) -> Iterator[dict[str, Any]]:
    """The rows at ``location`` (see :func:`train.trajectory_table.rows`), file by file in the order of their names.

    Args:
        location: a run's folder or its name under ``runs/``, a folder of files, one file, or one of these in S3. Where
            a name has a Parquet file and lines, the Parquet file is read.
        columns: which are wanted; those that a selection looks at are read in any case. ``None``: all.

    Raises:
        TrajectoryFileError: there is nothing there, or it is not what it should be.
    """
    for file in list(_files(location)):
        if selection.takes_file(Path(file).stem):
            with _local(file) as path:
                for row in _rows(path, file, columns):
                    if selection.takes(row):
                        yield row


def _files(location: str) -> Iterator[str]:
    names = list(_names_in_s3(location) if s3.is_s3(location) else _names_on_disk(location))
    parquet = {name.removesuffix(".parquet") for name in names if name.endswith(".parquet")}
    found = [name for name in names if not (name.endswith(".jsonl") and name.removesuffix(".jsonl") in parquet)]
    if not found:
        raise TrajectoryFileError(
            f"{location}: there are no trajectories (*.parquet, *.jsonl); a run writes them if "
            "trainer.dump_trajectories is set"
        )
    return iter(sorted(found))


def local_path(location: str) -> Path:
    """A file, or the folder that holds the files.

    Raises:
        TrajectoryFileError: there is no such file, folder or run.
    """
    path = Path(location)
    if not path.exists() and (RUNS / location).is_dir():
        path = RUNS / location
    if not path.exists():
        raise TrajectoryFileError(f"{location}: there is no such file, folder or run")
    return path / FOLDER if (path / FOLDER).is_dir() else path


def _names_on_disk(location: str) -> Iterator[str]:
    folder = local_path(location)
    if folder.is_file():
        if folder.suffix not in _SUFFIXES:
            raise TrajectoryFileError(f"{location}: not a .parquet or .jsonl file")
        return iter([str(folder)])
    return (str(file) for suffix in _SUFFIXES for file in folder.glob(f"[!.]*{suffix}"))


def _names_in_s3(location: str) -> Iterator[str]:
    if location.endswith(_SUFFIXES):
        return iter([location])
    prefix = location.rstrip("/") + "/"
    try:
        return iter(_children(f"{prefix}{FOLDER}/") or _children(prefix))
    except s3.StorageError as error:
        raise TrajectoryFileError(str(error)) from None


def _children(prefix: str) -> list[str]:
    found = (item.location for item in s3.objects(prefix))
    return [name for name in found if name.endswith(_SUFFIXES) and "/" not in name.removeprefix(prefix)]


@contextmanager
def _local(file: str) -> Iterator[Path]:
    """The file on this machine, for as long as it is read."""
    if not s3.is_s3(file):
        yield Path(file)
        return
    with tempfile.TemporaryDirectory(prefix="fleet-rl-") as folder:
        try:
            path = s3.fetch(file, Path(folder))
        except s3.StorageError as error:
            raise TrajectoryFileError(str(error)) from None
        yield path


def _rows(path: Path, name: str, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    try:
        yield from _parquet_rows(path, name, columns) if path.suffix == ".parquet" else _json_rows(path, name)
    except DAMAGED as error:
        problem = "".join(c if c.isprintable() else " " for c in str(error))  # Arrow quotes the bytes that it met
        raise TrajectoryFileError(f"{name}: cannot be read: {' '.join(problem.split())[:200]}") from None


def _parquet_rows(path: Path, name: str, columns: Sequence[str] | None) -> Iterator[dict[str, Any]]:
    with pq.ParquetFile(path) as file:
        there = file.schema_arrow
        odd = [f.name for f in SCHEMA if f.name not in there.names or there.field(f.name).type != f.type]
        if odd:
            raise TrajectoryFileError(
                f"{name}: not a file of trajectories; missing or of another type: {', '.join(odd)}"
            )
        wanted = None if columns is None else [n for n in SCHEMA.names if n in {*columns, *_SELECTED}]
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=wanted):
            yield from rows(batch)


class _JsonMessage(BaseModel):
    model_config = ConfigDict(extra="allow")

    role: str


class _JsonRow(BaseModel):
    """What a line must hold at least; columns it lacks are those of a file by its name, or empty."""

    model_config = ConfigDict(extra="allow")

    kind: str | None = None
    step: int | None = None
    label: str | None = None
    policy_version: int | None = None
    trajectory_id: str
    task_key: str
    env_key: str
    ids: list[int]
    mask: list[int]
    logprobs: list[float | None]
    prompt_length: int = 0
    starts: list[int] = [0]
    spans: list[tuple[int, int, int]] = []
    stop_reason: str
    outcome: str
    reward: float | None
    reason: str | None = None
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    started_at: float = 0.0
    duration_s: float = 0.0
    phase_s: dict[str, float] = {}
    messages: list[_JsonMessage]


def _json_rows(path: Path, name: str) -> Iterator[dict[str, Any]]:
    match = _NAME.fullmatch(path.stem)
    by_name = (
        {} if match is None else {"kind": "train" if match["kind"] == "step" else "eval", "step": int(match["step"])}
    )
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = _JsonRow.model_validate(by_name | orjson.loads(line))
            except (ValidationError, orjson.JSONDecodeError, TypeError) as error:
                raise TrajectoryFileError(f"{name}: line {number} is no trajectory: {_first(error)}") from None
            yield row.model_dump()


def _first(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_input=False)[0]
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    return " ".join(str(error).split())[:200]
