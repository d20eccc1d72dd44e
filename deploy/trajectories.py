"""``fleet-rl trajectories``: look at what a run's policy did, search it, and hand it to other tools.

RUN is a run's folder or its name under runs/, a folder of trajectory files, one file, or one of these in S3.
Exit codes: 0 done, 1 nothing was found or something is left to do, 2 wrong input or an export of nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.argument_types import positive

if TYPE_CHECKING:
    from train.trajectory_reader import Selection

LISTED = 50
MAX_WIDTH = 1_000
RUN_HELP = "a run's folder or its name under runs/, a folder, a .parquet or .jsonl file, or s3://BUCKET/PREFIX"
OUTCOMES = ("graded", "ungraded", "infra_failed", "cancelled")


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from train.trajectory_export import ExportError
    from train.trajectory_reader import TrajectoryFileError

    try:
        _mention_spool(options)
        return options.action(options)
    except (TrajectoryFileError, ExportError, ValueError) as error:
        return _complain(error, 2)
    except BrokenPipeError:
        # Whoever read the output has seen enough. Python would complain again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        return _complain(error, 2)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="fleet-rl trajectories", description="What a run's policy did.")
    actions = parser.add_subparsers(required=True, metavar="show|grep|export|recover")
    show = _action(actions, "show", _show, "one trajectory in full, or a table of those that are selected")
    show.add_argument("trajectory", metavar="ID", nargs="?", help="the trajectory; without it, a table")
    show.add_argument("--full", action="store_true", help="do not shorten long messages")
    show.add_argument("--limit", type=positive, default=LISTED, help="lines of the table; default: %(default)s")
    _add_selection(show)
    grep = _action(actions, "grep", _grep, "where a regular expression matches in a message")
    grep.add_argument("pattern", metavar="PATTERN", help="a regular expression of Python's re")
    grep.add_argument("-i", "--ignore-case", action="store_true")
    grep.add_argument("-l", "--ids", action="store_true", help="only the ids of trajectories that match")
    grep.add_argument("-c", "--count", action="store_true", help="only how many trajectories and places match")
    grep.add_argument("--role", help="only in messages of this role: system, user, assistant, tool, note")
    grep.add_argument("--limit", type=positive, help="end after this many matches")
    _add_selection(grep)
    export = _action(actions, "export", _export, "write a data set for other tools")
    export.add_argument("--format", required=True, choices=["openai", "trl", "verl"], dest="form")
    export.add_argument("--out", required=True, type=Path, metavar="FILE", help=".jsonl or, for trl and verl, .parquet")
    _add_selection(export, default_outcome="graded")
    recover = _action(actions, "recover", _recover, "finish what a killed run left in its spool, and upload it")
    recover.add_argument("--upload-to", metavar="S3", help="upload the files that are not in this folder in S3 yet")
    recover.add_argument("--timeout", type=positive, default=600, metavar="S", help="seconds; default: %(default)s")
    return parser.parse_args(arguments)


def _action(actions: Any, name: str, run: Callable[[argparse.Namespace], int], what: str) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=what, description=what[0].upper() + what[1:] + ".")
    parser.set_defaults(action=run)
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    return parser


def _add_selection(parser: argparse.ArgumentParser, default_outcome: str | None = None) -> None:
    group = parser.add_argument_group("selection")
    group.add_argument("--kind", choices=["train", "eval"])
    group.add_argument("--env", metavar="KEY", help="environment")
    group.add_argument("--task", metavar="KEY", help="task")
    group.add_argument("--step", metavar="RANGE", help="7, 5:10, 5: or :10; of an evaluation, the step it follows")
    default = f"; default: {default_outcome}" if default_outcome else ""
    group.add_argument(
        "--outcome", choices=[*OUTCOMES, "any"], default=default_outcome or "any", help=f"how it ended{default}"
    )
    group.add_argument("--reward", metavar="RANGE", help="1, 0.5:, :0; leaves out what was not graded")


def _mention_spool(options: argparse.Namespace) -> None:
    """What is not in a finished file yet cannot be read yet."""
    from train.s3 import is_s3
    from train.trajectory_reader import local_path
    from train.trajectory_spool import spooled_files

    if options.action is _recover or is_s3(options.run):
        return
    if waiting := len(spooled_files(local_path(options.run))):
        print(
            f"fleet-rl: {waiting} batches of {options.run} are not finished: a living run does it, "
            f"of a dead one `fleet-rl trajectories recover {options.run}`",
            file=sys.stderr,
        )


def _selection(options: argparse.Namespace) -> Selection:
    from train.trajectory_reader import Range, Selection

    return Selection(
        kind=options.kind,
        env=options.env,
        task=options.task,
        step=None if options.step is None else Range.parse(options.step),
        outcome=None if options.outcome == "any" else options.outcome,
        reward=None if options.reward is None else Range.parse(options.reward),
    )


def _show(options: argparse.Namespace) -> int:
    if options.trajectory is None:
        return _show_table(options)
    from rich.console import Console

    from train.trajectory_reader import read
    from train.trajectory_view import full_view

    for row in read(options.run, _selection(options)):
        if row["trajectory_id"] == options.trajectory:
            Console(highlight=False).print(full_view(row, options.full))
            return 0
    listing = f"`fleet-rl trajectories show {options.run}` lists what is there"
    return _complain(f"{options.run}: no trajectory '{options.trajectory}' is selected; {listing}", 1)


def _show_table(options: argparse.Namespace) -> int:
    from rich.console import Console

    from train.trajectory_reader import TEXT_COLUMNS, read
    from train.trajectory_view import summary_cells, summary_table

    table, count = summary_table(), 0
    columns = [name for name in TEXT_COLUMNS if name != "messages"]
    for row in read(options.run, _selection(options), columns):
        count += 1
        if count <= options.limit:
            table.add_row(*summary_cells(row))
    # Ids stay whole, to be copied, also where the terminal is narrower.
    console = Console(highlight=False)
    console.width = max(console.width, Console(width=MAX_WIDTH).measure(table).maximum)
    console.print(table)
    console.print(f"{min(count, options.limit):,} of {count:,} trajectories")
    return 0 if count else 1


def _grep(options: argparse.Namespace) -> int:
    from rich.console import Console

    from train.trajectory_view import hit_text

    console = Console(highlight=False, soft_wrap=True)
    last: dict[str, Any] | None = None
    matches = trajectories = 0
    for hit in _hits(options):
        new, last = hit.row is not last, hit.row
        matches += 1
        trajectories += new
        if not options.count and (new or not options.ids):
            console.print(hit.row["trajectory_id"] if options.ids else hit_text(hit), markup=False)
        if matches == options.limit:
            break
    if options.count:
        console.print(f"{trajectories:,} trajectories, {matches:,} matches")
    return 0 if matches else 1


def _hits(options: argparse.Namespace) -> Iterator[Any]:
    from train.trajectory_reader import TEXT_COLUMNS, read
    from train.trajectory_view import search

    try:
        pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)
    except re.error as error:
        raise ValueError(f"PATTERN '{options.pattern}' is no regular expression: {error}") from None
    for row in read(options.run, _selection(options), TEXT_COLUMNS):
        yield from search(row, pattern, options.role)


def _export(options: argparse.Namespace) -> int:
    from train.trajectory_export import export
    from train.trajectory_reader import TEXT_COLUMNS, read

    count = export(read(options.run, _selection(options), TEXT_COLUMNS), options.form, options.out)
    print(f"{count:,} rows in {options.out}")
    return 0


def _recover(options: argparse.Namespace) -> int:
    from train.s3 import is_s3
    from train.trajectory_reader import local_path
    from train.trajectory_store import StoreSettings, recover

    folder = local_path(options.run)
    if options.upload_to is not None and not is_s3(options.upload_to):
        raise ValueError(f"--upload-to {options.upload_to}: write s3://BUCKET/PREFIX")
    report = recover(StoreSettings(str(folder), upload_to=options.upload_to), options.timeout)
    print(f"{report.recovered} batches recovered, {report.cut} of them cut off by the death of their writer")
    if not (report.waiting or report.not_uploaded):
        return 0
    left = f"{report.waiting} batches in the spool, {report.not_uploaded} files not uploaded"
    return _complain(f"{folder}: {left}: {report.problem}", 1)


def _complain(problem: object, code: int) -> int:
    print(f"fleet-rl: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
