"""``fleet-rl prepare``: from a task file to the two sides of a split, with a manifest and a report.

The task file is read once for the facts a split needs and once more, task by task, while the sides are written, so
that memory stays near the size of the file.
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import os
import platform
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import pyarrow.compute as pc
import pyarrow.parquet as pq

from actors.config import Section
from actors.task import Modality
from actors.task_table import SCHEMA, task_table
from train.data.contamination import Comparison, PreparedTasks, compare
from train.data.manifest import (
    MANIFEST,
    TRAIN,
    VALIDATION,
    Choices,
    Counts,
    InputFile,
    Manifest,
    ManifestError,
    OutputFile,
    read_manifest,
)
from train.data.skyrl_split import split_skyrl
from train.data.split import PRESETS, EnvironmentRule, Filters, Preset, Split, SplitError, TaskFacts, split_by_threshold
from train.data.stable_split import split_stable
from train.data.task_file import TaskFile
from train.s3 import fetch, is_s3

COMPARISON = "contamination.json"
ROWS_PER_GROUP = 1000
LIBRARIES = ("fleet-rl", "msgspec", "pyarrow", "rensa")


@dataclass(frozen=True)
class PrepareOptions:
    """What ``fleet-rl prepare`` was asked for.

    Attributes:
        tasks: a local path, or ``s3://BUCKET/KEY``.
        modality: ``None``: as the preset says; ``all``: no limit.
        ratio, minimum, cap: in place of the preset's, where it is adjustable.
        against: a folder this command wrote before, local or in S3.
        similarity: Jaccard similarity from which two prompts count as near-duplicates.
    """

    tasks: str
    out: Path
    preset: str = "stable"
    modality: Modality | Literal["all"] | None = None
    env_keys: frozenset[str] = frozenset()
    difficulties: frozenset[int] = frozenset()
    max_tasks: int | None = None
    held_out: frozenset[str] = frozenset()
    ratio: float | None = None
    minimum: int | None = None
    cap: int | None = None
    against: str | None = None
    similarity: float = 0.8


@dataclass(frozen=True)
class Prepared:
    """What became of the tasks. ``dropped``: how many for each reason."""

    out: Path
    preset: str
    train: int
    eval: int
    dropped: dict[str, int]
    per_env: dict[str, Counts]
    rules_from: str | None
    comparison: Comparison | None


def prepare(options: PrepareOptions) -> Prepared:
    """Split the tasks and write ``train.parquet``, ``validation.parquet`` and ``manifest.json`` to ``options.out``.

    Raises:
        TaskFileError: the task file cannot be used.
        SplitError, ManifestError: the split asked for cannot be made.
        StorageError: something in S3 cannot be had.
        OSError: the output cannot be written.
        Whichever it is, what was in ``options.out`` is as it was.
    """
    filters = _filters(options, _adjusted(options))
    last = _check_out(options.out, options.preset)
    with tempfile.TemporaryDirectory(prefix="fleet-rl-prepare-") as scratch:
        old = None if options.against is None else _earlier(options.against, Path(scratch) / "against")
        earlier, rules_from = _goes_on_from(options, last, old)
        preset = _adjusted(options, earlier)
        source = fetch(options.tasks, Path(scratch)) if is_s3(options.tasks) else Path(options.tasks)
        file = TaskFile(source, lenient=preset.name == "skyrl")
        facts = file.facts()
        _check_environments(options, facts)
        split = _split(facts, preset, filters, options.held_out, {} if earlier is None else earlier.rules)
        _check_sides(split, preset)
        comparison = None if old is None else compare(old.tasks, _sides(file, split, old.tasks), options.similarity)
        counts = _counts(facts, split)
        with _replaced_when_done(options.out) as folder:
            if comparison is not None:
                _write_json(folder / COMPARISON, comparison)
            manifest = Manifest(
                preset=preset.name,
                input=InputFile(location=options.tasks, tasks=len(file), bytes=file.size, sha256=file.sha256()),
                choices=_choices(options, preset, filters),
                rules_from=rules_from,
                counts=counts,
                rules=split.environments,
                files={
                    TRAIN: _write_tasks(folder / TRAIN, file, split.train),
                    VALIDATION: _write_tasks(folder / VALIDATION, file, split.eval),
                },
                versions={"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
            )
            _write_json(folder / MANIFEST, manifest)
    return Prepared(
        out=options.out,
        preset=preset.name,
        train=len(split.train),
        eval=len(split.eval),
        dropped=dict(sorted(Counter(split.dropped.values()).items())),
        per_env=counts,
        rules_from=rules_from,
        comparison=comparison,
    )


# -- what was asked for


def _adjusted(options: PrepareOptions, earlier: Manifest | None = None) -> Preset:
    """The preset with the numbers that were chosen, now or in the split it goes on from."""
    preset = PRESETS[options.preset]
    chosen = {"ratio": options.ratio, "minimum": options.minimum, "cap": options.cap}
    chosen = {name: value for name, value in chosen.items() if value is not None}
    if chosen and not preset.adjustable:
        free = " or ".join(f"--preset {name}" for name, one in PRESETS.items() if one.adjustable)
        raise SplitError(f"preset {preset.name} fixes ratio, minimum and cap; to choose them, use {free}")
    if earlier is not None:
        before = earlier.choices
        chosen = {"ratio": before.ratio, "minimum": before.minimum, "cap": before.cap} | chosen
    return replace(preset, **chosen)


def _filters(options: PrepareOptions, preset: Preset) -> Filters:
    modality = options.modality or preset.modality
    return Filters(None if modality == "all" else modality, options.env_keys, options.difficulties, options.max_tasks)


def _choices(options: PrepareOptions, preset: Preset, filters: Filters) -> Choices:
    return Choices(
        ratio=preset.ratio,
        minimum=preset.minimum,
        cap=preset.cap,
        held_out=tuple(sorted(options.held_out)),
        modality=filters.modality,
        env_keys=tuple(sorted(filters.env_keys)),
        difficulties=tuple(sorted(filters.difficulties)),
        max_tasks=filters.max_tasks,
    )


def _check_environments(options: PrepareOptions, facts: Sequence[TaskFacts]) -> None:
    known = sorted({task.env_key for task in facts})
    for option, wanted in (("--env-key", options.env_keys), ("--held-out", options.held_out)):
        for env_key in sorted(wanted.difference(known) if known else ()):
            nearest = difflib.get_close_matches(env_key, known, n=1, cutoff=0.0)[0]
            raise SplitError(f"{option}: no task has env_key '{env_key}'; the nearest that one has is '{nearest}'")


# -- the folder


def _check_out(out: Path, preset: str) -> Manifest | None:
    """The manifest in ``out``, if any; refuses to replace what is not a split of the same preset."""
    if is_s3(out):
        raise SplitError(f"--out {out}: give a local folder")
    if out.exists() and not out.is_dir():
        raise SplitError(f"--out {out} is a file: give a folder")
    if not (out / MANIFEST).exists():
        for name in (TRAIN, VALIDATION):
            if (out / name).exists():
                raise SplitError(f"--out {out} holds {name} but no {MANIFEST}: choose another folder")
        return None
    manifest = read_manifest(out)
    if manifest.preset != preset:
        raise SplitError(
            f"--out {out} holds a split of preset {manifest.preset}: choose another folder for preset {preset}, "
            "or delete it"
        )
    return manifest


@contextmanager
def _replaced_when_done(out: Path) -> Iterator[Path]:
    """A folder beside ``out`` to write in; its files go to ``out``, the manifest last, unless something fails."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
        out.mkdir(exist_ok=True)
        if not (folder / COMPARISON).exists():
            (out / COMPARISON).unlink(missing_ok=True)  # of an earlier split
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            os.replace(path, out / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _write_tasks(path: Path, file: TaskFile, side: Sequence[int]) -> OutputFile:
    tasks = file.tasks(side)
    # Compressing releases the interpreter, so the next tasks are decoded meanwhile; one part waits at most.
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer, ThreadPoolExecutor(1) as compressor:
        written = compressor.submit(lambda: None)
        while batch := list(itertools.islice(tasks, ROWS_PER_GROUP)):
            table = task_table(batch)
            written.result()
            written = compressor.submit(writer.write_table, table)
        written.result()
    with path.open("rb") as result:
        digest = hashlib.file_digest(result, "sha256").hexdigest()
    return OutputFile(tasks=len(side), bytes=path.stat().st_size, sha256=digest)


def _write_json(path: Path, content: Section) -> None:
    path.write_text(content.model_dump_json(indent=2) + "\n", encoding="utf-8")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # a checkout that was not installed
        return "unknown"


# -- the split


def _goes_on_from(
    options: PrepareOptions, last: Manifest | None, old: _Earlier | None
) -> tuple[Manifest | None, str | None]:
    """The manifest the ``stable`` preset goes on from, and where it stands: the one in ``out`` comes first."""
    if options.preset != "stable":
        return None, None
    if last is not None:
        return last, str(options.out / MANIFEST)
    if old is not None and old.manifest.preset == options.preset:
        return old.manifest, f"{options.against.rstrip('/')}/{MANIFEST}"
    return None, None


def _split(
    facts: Sequence[TaskFacts],
    preset: Preset,
    filters: Filters,
    held_out: frozenset[str],
    rules: dict[str, EnvironmentRule],
) -> Split:
    if preset.name == "stable":
        return split_stable(facts, preset, filters, held_out, rules)
    if preset.name == "skyrl":
        return split_skyrl(facts, preset, filters, held_out)
    return split_by_threshold(facts, preset, filters, held_out)


def _check_sides(split: Split, preset: Preset) -> None:
    if split.train and split.eval:
        return
    if not split.train and not split.eval:
        reasons = ", ".join(f"{count} {reason}" for reason, count in Counter(split.dropped.values()).most_common())
        raise SplitError(f"no task is left: {reasons or 'the file holds none'}")
    if not split.train:
        raise SplitError(f"no task is left to train on: preset {preset.name} holds out all {len(split.eval)}")
    raise SplitError(
        f"no task is held out: preset {preset.name} gives all {len(split.train)} to training; add tasks, hold out an "
        "environment (--held-out), or choose a share yourself (--preset custom --eval-ratio R --min-eval 1)"
    )


def _counts(facts: Sequence[TaskFacts], split: Split) -> dict[str, Counts]:
    env_of = {task.index: task.env_key for task in facts}
    total, train, held_out = (Counter(env_of[i] for i in side) for side in (env_of, split.train, split.eval))
    dropped: dict[str, Counter[str]] = {}
    for index, reason in split.dropped.items():
        dropped.setdefault(env_of[index], Counter())[reason] += 1
    return {
        env_key: Counts(
            train=train[env_key],
            eval=held_out[env_key],
            total=total[env_key],
            dropped=dict(sorted(dropped.get(env_key, {}).items())),
        )
        for env_key in sorted(total)
    }


# -- the comparison


@dataclass(frozen=True)
class _Earlier:
    manifest: Manifest
    tasks: PreparedTasks


def _earlier(location: str, scratch: Path) -> _Earlier:
    folder = Path(location)
    if is_s3(location):
        for name in (MANIFEST, TRAIN, VALIDATION):
            fetch(f"{location.rstrip('/')}/{name}", scratch)
        folder = scratch
    manifest = read_manifest(folder)
    return _Earlier(manifest, PreparedTasks(_prompts(folder / TRAIN), _prompts(folder / VALIDATION)))


def _prompts(path: Path) -> dict[str, str]:
    """Prompts by task key. Read part by part: the table as a whole would take three times their memory."""
    prompts: dict[str, str] = {}
    try:
        with pq.ParquetFile(path) as file:
            for rows in file.iter_batches(ROWS_PER_GROUP, columns=["task_key", "prompt"]):
                texts = pc.struct_field(pc.list_flatten(rows["prompt"]), "content")
                prompts |= zip(rows["task_key"].to_pylist(), texts.to_pylist(), strict=True)
        return prompts
    except (OSError, ValueError, LookupError, NotImplementedError) as error:
        problem = " ".join(str(error).split())
        raise ManifestError(f"{path} is not a file that fleet-rl prepare wrote: {problem}") from None


def _sides(file: TaskFile, split: Split, old: PreparedTasks) -> PreparedTasks:
    """Prompts by task key. One that the earlier version has is not kept in memory twice."""
    known = {prompt: prompt for side in (old.train, old.eval) for prompt in side.values()}
    train, held_out = (
        {task.task_key: known.get(task.prompt, task.prompt) for task in file.tasks(side)}
        for side in (split.train, split.eval)
    )
    return PreparedTasks(train, held_out)
