"""``fleet-rl analyze``: what a run did to each environment, which signal it had, and what goes wrong in its episodes.

Exit codes: 0 done, 2 wrong input (one line on standard error; nothing is written then), 143 ended by SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from deploy.argument_types import natural

FILES = ("report.html", "analysis.json", "experiments.md")


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from train.analysis.dumps import DumpError
    from train.metrics_file import MetricsError
    from train.s3 import StorageError

    try:
        with _orderly_exit():
            _analyze(options)
    except (DumpError, MetricsError, StorageError, OSError) as error:
        print(f"fleet-rl: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


@contextmanager
def _orderly_exit() -> Iterator[None]:
    """SIGTERM ends the process through its context managers, which take a copy of the run and the workers with them."""
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(number: int, _: object) -> NoReturn:
    sys.exit(128 + number)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fleet-rl analyze",
        description=f"Analyse a run's evaluations and training batches; leaves {', '.join(FILES)}.",
    )
    parser.add_argument("run", metavar="RUN", help="a run's folder, a run's name under runs/, or s3://BUCKET/PREFIX")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the results")
    parser.add_argument("--baseline", type=int, metavar="STEP", help="compare with this step; default: the first")
    parser.add_argument(
        "--min-change",
        type=_points,
        default=20.0,
        metavar="POINTS",
        help="smallest change of a success rate, in percentage points, that matters; default: %(default).0f",
    )
    parser.add_argument(
        "--max-episodes", type=natural, default=5_000, metavar="N", help="episodes in report.html; default: %(default)s"
    )
    return parser.parse_args(arguments)


def _points(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 100 points")
    return value


def _analyze(options: argparse.Namespace) -> None:
    from train.analysis.dumps import find_run
    from train.analysis.markdown import findings, markdown
    from train.analysis.report import write_report
    from train.analysis.scan import scan
    from train.analysis.summary import summarise

    with tempfile.TemporaryDirectory(prefix="fleet-rl-analyze-") as scratch:
        run = find_run(options.run, Path(scratch))
        table, examples = scan(run.episodes)
        analysis = summarise(run, table, examples, options.baseline, options.min_change / 100)
        with _folder(options.out):
            shown = write_report(options.out / FILES[0], analysis, run, table, options.max_episodes)
    _write(options.out / FILES[1], json.dumps(analysis.as_json(), indent=1, ensure_ascii=False) + "\n")
    _write(options.out / FILES[2], markdown(analysis))
    for warning in analysis.warnings:
        print(f"note: {warning}")
    for status, text in findings(analysis):
        print(f"{status}: {text}")
    print(f"{options.out / FILES[0]} shows {shown:,} of {table.height:,} episodes; beside it: {', '.join(FILES[1:])}")


@contextmanager
def _folder(path: Path) -> Iterator[None]:
    """There, with its parents; what had to be made is gone again if what is inside fails and leaves it empty."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            with suppress(OSError):
                folder.rmdir()
        raise


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8", errors="replace")
    partial.replace(path)
