"""One pass over a run's episodes: a table with a row for each, and examples of what the error patterns found.

Parts of files go to as many processes as there are cores; a row is some hundred bytes, so the table of a million
episodes fits in memory and the episodes themselves need not.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import polars as pl

from train.analysis.dumps import DumpError, DumpFile, Part, parts_of, read_part
from train.analysis.episode import Episode
from train.analysis.error_patterns import PATTERNS, Finding, failed_calls, policy_chars, thinking_chars

EXAMPLES = 3  # of a pattern in an environment
IN_ONE_PROCESS_BYTES = 32 * 2**20

SCHEMA: dict[str, Any] = {
    "step": pl.Int64,
    "label": pl.String,
    "env": pl.String,
    "task": pl.String,
    "reward": pl.Float64,  # null: not graded
    "not_graded": pl.String,
    "stop_reason": pl.String,
    "turns": pl.Int32,
    "calls": pl.Int32,
    "failed_calls": pl.Int32,
    "tokens": pl.Int64,
    "chars": pl.Int64,  # of all text
    "policy_chars": pl.Int64,
    "thinking_chars": pl.Int64,
    "file": pl.Int32,
    "position": pl.Int64,
    **{pattern.key: pl.Int32 for pattern in PATTERNS},  # findings
}


@dataclass(frozen=True)
class Example:
    """One finding, and where its episode is. Turns count from 1, as people do."""

    pattern: str
    env: str
    task: str
    step: int
    label: str
    turn: int
    quote: str
    source: tuple[int, int]


def scan(files: tuple[DumpFile, ...]) -> tuple[pl.DataFrame, list[Example]]:
    """The table of all episodes, and up to ``EXAMPLES`` examples for each pattern, environment and step.

    Raises:
        DumpError: a file holds something that is no episode, or there is not the memory to read it.
    """
    parts = parts_of(files)
    tables: list[pl.DataFrame] = [pl.DataFrame(schema=SCHEMA)]
    examples: list[Example] = []
    with workers(sum(file.path.stat().st_size for file in files)) as map_parts:
        for columns, found in map_parts(partial(_scan_part, files), parts):
            tables.append(pl.DataFrame(columns, schema=SCHEMA))
            examples += found
    return pl.concat(tables, rechunk=True), _few(examples)


@contextmanager
def workers(nbytes: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """A ``map`` that keeps the order: in this process for little work, else over all cores.

    Processes are spawned: Polars has threads, which a fork would leave with locks that nobody opens.

    Raises:
        DumpError: one of the processes was killed.
    """
    if nbytes <= IN_ONE_PROCESS_BYTES:
        yield map
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(_cores(), mp_context=context, initializer=_end_with_parent) as pool:
        try:
            yield pool.map
        except BrokenProcessPool:
            raise DumpError("a process that read the run was killed, most likely for want of memory") from None
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for work for ever: its siblings hold the pipe open."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _scan_part(files: tuple[DumpFile, ...], part: Part) -> tuple[dict[str, list[Any]], list[Example]]:
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA}
    examples: list[Example] = []
    for episode in read_part(files, part):
        findings = {pattern.key: pattern.find(episode) for pattern in PATTERNS}
        for name, value in _row(episode, findings).items():
            columns[name].append(value)
        examples += [_example(episode, key, found[0]) for key, found in findings.items() if found]
        if len(examples) > 10_000:
            examples = _few(examples)
    return columns, _few(examples)


def _row(episode: Episode, findings: dict[str, list[Finding]]) -> dict[str, Any]:
    return {
        "step": episode.step,
        "label": episode.label,
        "env": episode.env,
        "task": episode.task,
        "reward": episode.reward,
        "not_graded": episode.not_graded,
        "stop_reason": episode.stop_reason,
        "turns": len(episode.turns),
        "calls": episode.calls,
        "failed_calls": sum(1 for _ in failed_calls(episode)),
        "tokens": episode.tokens,
        "chars": _chars(episode),
        "policy_chars": policy_chars(episode),
        "thinking_chars": thinking_chars(episode),
        "file": episode.source[0],
        "position": episode.source[1],
        **{key: len(found) for key, found in findings.items()},
    }


def _chars(episode: Episode) -> int:
    read = [text for _, text in episode.prompt] + [turn.observation or "" for turn in episode.turns]
    return policy_chars(episode) + sum(map(len, read))


def _example(episode: Episode, key: str, finding: Finding) -> Example:
    where = (key, episode.env, episode.task, episode.step, episode.label)
    return Example(*where, finding.turn + 1, finding.quote, episode.source)


def _few(examples: list[Example]) -> list[Example]:
    """The first ``EXAMPLES`` of each pattern, environment, step and label, of different tasks where there are any."""
    kept: dict[tuple[Any, ...], list[Example]] = defaultdict(list)
    for example in examples:
        group = kept[example.pattern, example.env, example.step, example.label]
        if len(group) < EXAMPLES and all(example.task != other.task for other in group):
            group.append(example)
    return [example for group in kept.values() for example in group]
