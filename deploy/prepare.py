"""``fleet-rl prepare``: split a task file into training and evaluation tasks, with a report per environment.

Exit codes: 0 done, 1 the output could not be written, 2 wrong input (nothing was written).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.argument_types import natural, number, positive

if TYPE_CHECKING:
    from rich.table import Table

    from train.data.contamination import Comparison
    from train.data.prepare import Prepared

PRESETS = ("stable", "custom", "v0.2", "v0.2.3", "v0.3", "skyrl")
MODALITIES = ("tool_use", "computer_use", "browser_use", "all")
SHOWN = 10  # moved tasks and near-duplicates in the report; all of them are in contamination.json


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from actors.task import TaskFileError
    from train.data.manifest import ManifestError
    from train.data.prepare import PrepareOptions, prepare
    from train.data.split import SplitError
    from train.data.task_file import MalformedTasks
    from train.s3 import StorageError

    as_json = options.pop("json")
    try:
        prepared = prepare(PrepareOptions(**options))
    except MalformedTasks as error:
        return _complain([*error.lines, *([f"{error}; the first {len(error.lines)} are listed"] * error.cut)], 2)
    except (TaskFileError, SplitError, ManifestError, StorageError) as error:
        return _complain([str(error)], 2)
    except OSError as error:
        return _complain([f"--out {options['out']} cannot be written: {error.strerror or error}"], 1)
    _report(prepared, as_json)
    return 0


def _parse(arguments: Sequence[str]) -> dict[str, object]:
    parser = argparse.ArgumentParser(
        prog="fleet-rl prepare",
        description="Split a task file into training and evaluation tasks: train.parquet, validation.parquet and "
        "manifest.json, which says how. docs/data.md describes the presets.",
    )
    add = parser.add_argument
    add("--tasks", required=True, metavar="FILE", help="JSON in Fleet's format: a path, or s3://BUCKET/KEY")
    add("--out", required=True, metavar="DIR", type=Path, help="where the split goes; stable goes on from one there")
    add("--preset", choices=PRESETS, default="stable", help="how tasks are split (default: %(default)s)")
    add("--modality", choices=MODALITIES, help="only these tasks (default: all; for preset skyrl: tool_use)")
    add("--env-key", dest="env_keys", metavar="A,B", type=_names, default=frozenset(), help="only these environments")
    add("--difficulty", dest="difficulties", metavar="1,2", type=_numbers, default=frozenset(), help="only these")
    add("--max-tasks", metavar="N", type=positive, help="the first N that are left by then")
    add("--held-out", metavar="A,B", type=_names, default=frozenset(), help="environments for evaluation only")
    free = parser.add_argument_group("for presets stable and custom")
    free.add_argument("--eval-ratio", dest="ratio", metavar="R", type=_share, help="share held out (default: 0.2)")
    free.add_argument(
        "--min-eval", dest="minimum", metavar="N", type=natural,
        help="an environment that would hold out fewer goes to training whole (default: 5)",
    )  # fmt: skip
    free.add_argument(
        "--max-eval-per-env", dest="cap", metavar="N", type=positive,
        help="most tasks an environment holds out (default: 20)",
    )  # fmt: skip
    check = parser.add_argument_group("against an earlier version")
    check.add_argument("--against", metavar="OLD", help="a folder this command wrote before, or s3://BUCKET/FOLDER")
    check.add_argument(
        "--similarity", metavar="S", type=_similarity, default=0.8,
        help="Jaccard similarity from which two prompts are near-duplicates (default: %(default)s)",
    )  # fmt: skip
    add("--json", action="store_true", help="one JSON line on standard output; the table goes to standard error")
    return vars(parser.parse_args(arguments))


# -- argument types


def _names(text: str) -> frozenset[str]:
    names = frozenset(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise argparse.ArgumentTypeError("give one name or several, with commas between them")
    return names


def _numbers(text: str) -> frozenset[int]:
    return frozenset(number(name, int, "a whole number (several go with commas between them)") for name in _names(text))


def _share(text: str) -> float:
    value = number(text, float, "a number between 0 and 1")
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"must be between 0 and 1, not {text}")
    return value


def _similarity(text: str) -> float:
    value = number(text, float, "a number above 0 and at most 1")
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most 1, not {text}")
    return value


# -- report


def _report(prepared: Prepared, as_json: bool) -> None:
    from rich.console import Console

    console = Console(stderr=as_json, highlight=False)
    console.print(_table(prepared))
    if prepared.rules_from is not None:
        console.print(f"went on from {prepared.rules_from}", markup=False, soft_wrap=True)
    if prepared.comparison is not None:
        for line in _comparison_lines(prepared.comparison):
            console.print(line, markup=False, soft_wrap=True)
    console.print(f"{prepared.out}: train.parquet, validation.parquet, manifest.json", markup=False, soft_wrap=True)
    if as_json:
        print(json.dumps(_summary(prepared)))


def _table(prepared: Prepared) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Preset {prepared.preset}", title_justify="left", box=box.SIMPLE_HEAD, show_footer=True)
    total = sum(counts.total for counts in prepared.per_env.values())
    table.add_column("environment", "all", overflow="fold")
    for name, count in (("train", prepared.train), ("eval", prepared.eval), ("total", total)):
        table.add_column(name, f"{count:,}", justify="right")
    table.add_column("dropped", _reasons(prepared.dropped), overflow="fold")
    for env_key, counts in prepared.per_env.items():
        numbers = (f"{number:,}" for number in (counts.train, counts.eval, counts.total))
        table.add_row(escape(env_key), *numbers, _reasons(counts.dropped))
    return table


def _reasons(dropped: dict[str, int]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in dropped.items())


def _comparison_lines(comparison: Comparison) -> list[str]:
    moved = [f"{key}: train -> eval" for key in comparison.train_to_eval]
    moved += [f"{key}: eval -> train" for key in comparison.eval_to_train]
    pairs = [
        f"{pair.similarity:.2f}  {pair.train_key} ({pair.train_version}, train) ~ "
        f"{pair.eval_key} ({pair.eval_version}, eval)"
        for pair in comparison.near_duplicates
    ]
    return [
        f"against the earlier version: {comparison.added:,} tasks came, {comparison.removed:,} went",
        f"{len(moved):,} tasks changed sides",
        *_first(moved, len(moved)),
        f"{comparison.pairs:,} near-duplicate prompts across the sides, of {comparison.eval_tasks:,} eval tasks",
        *_first(pairs, comparison.pairs),
    ]


def _first(lines: Sequence[str], count: int) -> list[str]:
    shown = [f"  {line}" for line in lines[:SHOWN]]
    return shown if count <= SHOWN else [*shown, f"  ... and {count - SHOWN:,} more in contamination.json"]


def _summary(prepared: Prepared) -> dict[str, object]:
    summary: dict[str, object] = {
        "train": prepared.train,
        "eval": prepared.eval,
        "dropped": prepared.dropped,
        "per_env": {env_key: counts.model_dump() for env_key, counts in prepared.per_env.items()},
        "preset": prepared.preset,
        "out": str(prepared.out),
    }
    if prepared.comparison is not None:
        summary["against"] = {
            "train_to_eval": len(prepared.comparison.train_to_eval),
            "eval_to_train": len(prepared.comparison.eval_to_train),
            "added": prepared.comparison.added,
            "removed": prepared.comparison.removed,
            "near_duplicates": prepared.comparison.pairs,
            "near_duplicate_eval_tasks": prepared.comparison.eval_tasks,
        }
    return summary


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"fleet-rl: {' '.join(problem.split())}", file=sys.stderr)
    return code
