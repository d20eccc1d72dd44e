"""Where a run's episodes lie, and how they are read: our runs and SkyRL's dumps, in a folder or in S3.

Read are evaluation dumps (``[evals/]global_step_N[_evals]/[LABEL/]ENV.jsonl``, ``eval_only/ENV.jsonl``), the
trajectory store and training batches (``trajectories/{step_N|eval_N_LABEL}.{parquet,jsonl}``), ``metrics.jsonl`` and
``aggregated_results.jsonl``. A file is read in parts, line by line or a row group at a time, so memory does not grow
with the run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from train.analysis.episode import Episode, messages_of_prompt, split_messages, turns_of_text

PART_BYTES = 16 * 2**20
AGGREGATED = "aggregated_results.jsonl"
METRICS = "metrics.jsonl"
RUNS = Path("runs")  # where a run that is named without a folder is looked for

_EVAL = re.compile(r"(?:.*/)?(?:global_step_(\d+)|eval_only)(?:_evals)?/(?:(\w[\w.-]*)/)?([^/]+)\.jsonl")
_STORED = re.compile(
    r"(?:.*/)?trajectories/(?:step_(?P<train>\d+)|eval_(?P<eval>\d+)(?:_(?P<label>\w[\w.-]*))?)\.(?:jsonl|parquet)"
)
_LAYOUT = "evals/global_step_N/ENV.jsonl or trajectories/step_N.parquet"


class DumpError(Exception):
    """What cannot be read, in one line: where, what, and what to do."""


@dataclass(frozen=True)
class DumpFile:
    """Episodes of one step. ``name`` is the path as the user sees it; ``label`` as in :class:`Episode`."""

    path: Path
    name: str
    step: int
    label: str
    stored: bool  # written by the trajectory store, not in SkyRL's format

    @property
    def env(self) -> str:
        return self.path.stem

    @property
    def columnar(self) -> bool:
        return self.path.suffix == ".parquet"


@dataclass(frozen=True)
class RunFiles:
    """What of a run is worth reading. ``aggregated``: the path for each (step, label)."""

    name: str
    location: str
    episodes: tuple[DumpFile, ...]
    metrics: Path | None = None
    aggregated: dict[tuple[int, str], Path] = field(default_factory=dict)
    tokenizer: Path | None = None

    @property
    def nbytes(self) -> int:
        return sum(file.path.stat().st_size for file in self.episodes)


@dataclass(frozen=True)
class Part:
    """Bytes ``start <= i < stop`` of a file of lines (those lines that begin there), or its row groups."""

    file: int
    start: int
    stop: int


def find_run(location: str, scratch: Path) -> RunFiles:
    """The files of a run: a folder, the name of one under ``runs/``, or a prefix in S3, which is copied to ``scratch``.

    Raises:
        DumpError: there is no such run, or no episodes in it.
        train.s3.StorageError: S3 did not answer as it should.
    """
    from train.s3 import is_s3

    root = _fetched(location, scratch) if is_s3(location) else _local(location)
    found = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
    # The last parts of the folder's own path may say which step it is.
    prefix = "/".join(root.absolute().parts[-2:])
    episodes = _episode_files({f"{prefix}/{name}": path for name, path in found.items()}, prefix)
    if not episodes:
        raise DumpError(f"{location} holds no episodes: there is no {_LAYOUT} in it")
    aggregated = {
        _step_and_label(match): path
        for name, path in found.items()
        if path.name == AGGREGATED and (match := _EVAL.fullmatch(f"{prefix}/{name}"))
    }
    tokenizers = [p for name, p in found.items() if re.fullmatch(r"checkpoints/.*tokenizer\.json", name)]
    return RunFiles(
        name=location.rstrip("/").rsplit("/", 1)[-1] if is_s3(location) else root.absolute().name,
        location=location,
        episodes=tuple(episodes),
        metrics=found.get(METRICS),
        aggregated=aggregated,
        tokenizer=tokenizers[-1] if tokenizers else None,
    )


def _local(location: str) -> Path:
    for folder in (Path(location), RUNS / location):
        if folder.is_dir():
            return folder
    if Path(location).exists():
        raise DumpError(f"{location} is a file: name the folder of the run that it belongs to")
    raise DumpError(f"there is no folder {location}: name a run's folder, a run under {RUNS}/, or s3://BUCKET/PREFIX")


def _fetched(location: str, scratch: Path) -> Path:
    from train import s3

    prefix = location.rstrip("/") + "/"
    root = scratch / prefix.rstrip("/").rsplit("/", 1)[-1]
    root.mkdir(parents=True, exist_ok=True)
    for stored in s3.objects(prefix):
        name = stored.location.removeprefix(prefix)
        below = f"{root.name}/{name}"
        if name == METRICS or _EVAL.fullmatch(below) or _STORED.fullmatch(below):
            if ".." in Path(name).parts:
                raise DumpError(f"{stored.location}: a name with '..' is not fetched: rename the object")
            s3.fetch(stored.location, (root / name).parent)
    return root


def _episode_files(found: dict[str, Path], prefix: str) -> list[DumpFile]:
    stored: dict[tuple[str, int, str], DumpFile] = {}
    dumped: list[DumpFile] = []
    for name, path in found.items():
        shown = name.removeprefix(f"{prefix}/")
        if shown.startswith("checkpoints/"):  # global_step_N/ too, but no episodes
            continue
        if match := _STORED.fullmatch(name):
            step, label = _stored_step_and_label(match)
            key = (str(path.parent), step, label)
            # Parquet and JSON lines of one name hold the same; of the first the columns that are needed can be read.
            if key not in stored or path.suffix == ".parquet":
                stored[key] = DumpFile(path, shown, step, label, stored=True)
        elif path.name not in (AGGREGATED, METRICS) and (match := _EVAL.fullmatch(name)):
            dumped.append(DumpFile(path, shown, *_step_and_label(match), stored=False))
    # The store holds an evaluation in full; its dump is then the same episodes again.
    known = {(file.step, file.label) for file in stored.values()}
    files = [*stored.values(), *(file for file in dumped if (file.step, file.label) not in known)]
    return sorted(files, key=lambda file: (file.step, file.label, file.name))


def _step_and_label(match: re.Match[str]) -> tuple[int, str]:
    return int(match[1] or 0), match[2] or "sampled"


def _stored_step_and_label(match: re.Match[str]) -> tuple[int, str]:
    if match["train"] is not None:
        return int(match["train"]), "train"
    return int(match["eval"]), match["label"] or "sampled"


def parts_of(files: Iterable[DumpFile], part_bytes: int = PART_BYTES) -> list[Part]:
    """Pieces of work, none of which needs much more than ``part_bytes`` of memory."""
    parts: list[Part] = []
    for index, file in enumerate(files):
        if file.columnar:
            parts += [Part(index, group, group + 1) for group in range(_parquet(file).num_row_groups)]
            continue
        size = file.path.stat().st_size
        parts += [Part(index, start, min(size, start + part_bytes)) for start in range(0, size, part_bytes)]
    return parts


def read_part(files: tuple[DumpFile, ...], part: Part) -> Iterator[Episode]:
    """The episodes of a part, without their tokens.

    Raises:
        DumpError: something in it is no episode; the message names file and line.
    """
    file = files[part.file]
    if file.columnar:
        for group in range(part.start, part.stop):
            for index, row in enumerate(_row_group(file, group, tokens=False)):
                yield _stored_episode(file, row, (part.file, _row_position(group, index)))
        return
    with file.path.open("rb") as lines:
        lines.seek(max(0, part.start - 1))
        if part.start:
            lines.readline()  # the end of a line that began in the part before
        while (offset := lines.tell()) < part.stop and (line := lines.readline()):
            if line.strip():
                yield episode_of_line(file, line, (part.file, offset))


def read_episode(files: tuple[DumpFile, ...], source: tuple[int, int]) -> Episode:
    """One episode again, with its tokens where they were recorded. ``source`` is :attr:`Episode.source`."""
    file, position = files[source[0]], source[1]
    if file.columnar:
        group, index = divmod(position, _ROWS)
        row = next(row for i, row in enumerate(_row_group(file, group, tokens=True)) if i == index)
        return _stored_episode(file, row, source)
    with file.path.open("rb") as lines:
        lines.seek(position)
        return episode_of_line(file, lines.readline(), source)


def where_in(file: DumpFile, position: int) -> str:
    """A position in words: which byte of a file of lines, or which row of which row group, both from 0."""
    if not file.columnar:
        return f"byte {position}"
    group, row = divmod(position, _ROWS)
    return f"row {row} of row group {group}"


_ROWS = 2**24  # more than a row group holds


def _row_position(group: int, index: int) -> int:
    return group * _ROWS + index


# -- lines of JSON


class _EvalLine(msgspec.Struct):
    """A line of SkyRL's evaluation dump."""

    input_prompt: str
    output_response: str
    score: list[float | None] | float | None
    stop_reason: str | None = None
    env_extras: dict[str, Any] | None = None
    data_source: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: Any = None


class _StoredLine(msgspec.Struct):
    """A line of the trajectory store or of a training batch."""

    task_key: str
    env_key: str
    stop_reason: str
    outcome: str
    messages: list[_Message]
    reward: float | None = None
    reason: str | None = None
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float | None] = []
    spans: list[tuple[int, int, int]] = []
    starts: list[int] = msgspec.field(default_factory=lambda: [0])


_EVAL_DECODER = msgspec.json.Decoder(_EvalLine)
_STORED_DECODER = msgspec.json.Decoder(_StoredLine)


def episode_of_line(file: DumpFile, line: bytes, source: tuple[int, int]) -> Episode:
    """The episode of one line of ``file``; ``source`` is its place.

    Raises:
        DumpError: the line is no episode; the message names file and line.
    """
    try:
        if file.stored:
            return _stored_episode(file, msgspec.to_builtins(_STORED_DECODER.decode(line)), source)
        return _dumped_episode(file, _EVAL_DECODER.decode(line), source)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise DumpError(f"{file.name}, line {_line_number(file.path, source[1])}: {_reason(line, error)}") from None


def _reason(line: bytes, error: Exception) -> str:
    if not line.endswith(b"\n") and not line.rstrip().endswith(b"}"):
        return "the file ends in the middle of this line: delete the line, or copy the file again"
    if isinstance(error, RecursionError):
        return "the JSON is nested too deeply"
    return f"no episode: {' '.join(str(error).split())}"


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        return 1 + sum(file.read(min(2**20, offset - at)).count(b"\n") for at in range(0, offset, 2**20))


def _dumped_episode(file: DumpFile, line: _EvalLine, source: tuple[int, int]) -> Episode:
    extras = line.env_extras or {}
    max_turns = extras.get("max_turns")
    # A dump may say so and hold no score at all, which adds up to zero.
    reward = None if "not_graded" in extras else _reward(line.score)
    return Episode(
        env=str(line.data_source or extras.get("data_source") or file.env),
        task=str(extras.get("task_key") or f"prompt:{hash_of(line.input_prompt)}"),
        step=file.step,
        label=file.label,
        reward=reward,
        stop_reason=line.stop_reason or "unknown",
        prompt=messages_of_prompt(line.input_prompt),
        turns=turns_of_text(line.input_prompt, line.output_response),
        max_turns=max_turns if isinstance(max_turns, int) else None,
        tokens=len(line.score) if isinstance(line.score, list) else 0,
        not_graded=None if reward is not None else str(extras.get("not_graded") or "unknown"),
        source=source,
    )


def hash_of(text: str) -> str:
    """Eight hex digits that stand for a text."""
    import hashlib

    return hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=4).hexdigest()


def _reward(score: list[float | None] | float | None) -> float | None:
    """The sum over tokens, as SkyRL's trainer takes it; unknown if the verifier did not answer."""
    if not isinstance(score, list):
        return score
    # One of null is enough, and it is the last where there is one.
    return None if None in score[-1:] else math.fsum(value for value in score if value)


# -- Parquet


def _parquet(file: DumpFile) -> Any:
    import pyarrow.parquet as pq

    from train.trajectory_table import DAMAGED

    try:
        return pq.ParquetFile(file.path)
    except DAMAGED as error:
        raise DumpError(f"{file.name} is no Parquet file of a trajectory store: {_one_line(error)}") from None


_COLUMNS = ("task_key", "env_key", "stop_reason", "outcome", "reward", "reason", "messages")
_TOKEN_COLUMNS = ("ids", "mask", "logprobs", "spans", "starts")


def _row_group(file: DumpFile, group: int, tokens: bool) -> Iterator[dict[str, Any]]:
    from train.trajectory_table import DAMAGED, rows

    wanted = [*_COLUMNS, *_TOKEN_COLUMNS] if tokens else list(_COLUMNS)
    try:
        parquet = _parquet(file)
        missing = [name for name in wanted if name not in parquet.schema_arrow.names]
        if missing:
            raise DumpError(f"{file.name} is no file of a trajectory store: it has no column {missing[0]}")
        for batch in parquet.iter_batches(row_groups=[group], columns=wanted):
            yield from rows(batch)
    except DAMAGED as error:
        raise DumpError(f"{file.name}, row group {group}: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    """Without what a terminal would obey: libraries quote the bytes that they met."""
    return " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())


def _stored_episode(file: DumpFile, row: dict[str, Any], source: tuple[int, int]) -> Episode:
    prompt, turns = split_messages(row["messages"])
    graded = row["outcome"] == "graded"
    tokens = {name: row[name] for name in _TOKEN_COLUMNS if name in row}
    return Episode(
        env=row["env_key"],
        task=row["task_key"],
        step=file.step,
        label=file.label,
        reward=row["reward"] if graded else None,
        stop_reason=row["stop_reason"],
        prompt=prompt,
        turns=turns,
        tokens=len(row.get("ids", ())),
        not_graded=None if graded else row["reason"] or row["outcome"],
        source=source,
        recorded_tokens=tokens if len(tokens.get("ids", ())) else {},
    )


# -- results beside an evaluation


def read_aggregated(path: Path) -> dict[str, float]:
    """The numbers of ``aggregated_results.jsonl``, several lines as one. Python's NaN is read as such."""
    import json

    values: dict[str, float] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            raise DumpError(f"{path.parent.name}/{path.name}, line {number}: no JSON: {_one_line(error)}") from None
        if not isinstance(row, dict):
            raise DumpError(f"{path.parent.name}/{path.name}, line {number}: no JSON object")
        values |= {k: float(v) for k, v in row.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    return values
