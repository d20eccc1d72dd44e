"""``fleet-rl validate``: which tasks of a file can be trained on, and why the others cannot.

Exit codes: 0 every task has its verdict, 1 the control plane or the teacher's endpoint failed, or the output could not
be written, 2 wrong input, 3 some tasks are undecided, 130 and 143 ended by SIGINT and SIGTERM. After 1, 3, 130 and 143
the same command goes on where it stopped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.argument_types import endpoint_url, number, positive, within

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from actors.env_pool_core import CloseReport
    from train.data.estimate import Estimate, Tokens
    from train.data.validation import Progress, Tally, ValidateOptions, Validation, ValidationReport

UNDECIDED, TERMINATED = 3, 143
LINE_EVERY_S = 10.0  # without a terminal
NEEDS = (
    "Needs FLEET_API_KEY (FLEET_BASE_URL names another control plane than the Fleet service), or --fleet local; the "
    "teacher's key is read from OPENAI_API_KEY. docs/data.md describes the checks and the fields they read."
)


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if options.fleet == "hosted" and not options.dry_run and not os.environ.get("FLEET_API_KEY"):
        return _complain([f"FLEET_API_KEY is not set. {NEEDS}"], 2)
    from actors.task import TaskFileError
    from train.data.journal import JournalError
    from train.data.task_file import MalformedTasks
    from train.data.validation import Validation
    from train.s3 import StorageError

    try:
        validation = Validation(_validate_options(options))
    except MalformedTasks as error:
        return _complain([*error.lines, *([f"{error}; the first {len(error.lines)} are listed"] * error.cut)], 2)
    except (TaskFileError, StorageError, JournalError) as error:
        return _complain([str(error)], 2)
    from rich.console import Console

    console = Console(stderr=options.json, highlight=False)
    estimate = validation.estimate()
    for line in _estimate_lines(estimate, validation.options):
        console.print(line, markup=False, soft_wrap=True)
    if not options.dry_run:
        return _carry_out(validation, options, console)
    if options.json:
        print(json.dumps(estimate.model_dump()))
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fleet-rl validate",
        description="Check every task of a file on instances: are its recorded calls carried out, does its verifier "
        "tell an untouched instance from a solved one, can a teacher solve it? Leaves tasks.json, with the tasks that "
        "passed, and report.json. Run again after an interruption, it goes on where it stopped.",
        epilog=NEEDS,
    )
    yes_no = argparse.BooleanOptionalAction
    add = parser.add_argument
    add("--tasks", required=True, metavar="FILE", help="JSON in Fleet's format: a path, or s3://BUCKET/KEY")
    add("--out", required=True, metavar="DIR", type=Path, help="where results go; an earlier run there is gone on from")
    add("--replay", action=yes_no, default=True, help="carry out recorded calls (reference_tool_calls); default: yes")
    add("--verifier", action=yes_no, default=True, help="try the verifier untouched and after a replay; default: yes")
    add("--max-tasks", metavar="N", type=positive, help="only the first N tasks")
    add("--concurrency", metavar="N", type=positive, default=8, help="tasks, and instances, at once; default: 8")
    add("--fleet", choices=("hosted", "local"), default="hosted", help="local: the embedded one; default: %(default)s")
    add("--dry-run", action="store_true", help="say what would be done, and what it may take; nothing is started")
    add("--json", action="store_true", help="one JSON line on standard output; all else goes to standard error")
    teacher = parser.add_argument_group("a teacher that attempts each task")
    add = teacher.add_argument
    add("--teacher-url", metavar="URL", type=endpoint_url, help="an OpenAI-compatible endpoint, mostly ending in /v1")
    add("--teacher-model", metavar="NAME", help="the model to ask for there")
    add("--attempts", metavar="K", type=positive, default=4, help="at each task; default: 4")
    add("--unsolved", choices=("reject", "hard"), default="reject", help="tasks never solved: reject, or mark as hard")
    add("--teacher-tools", choices=("native", "text"), default="native",
        help="text: calls in <tool_call> tags, where the endpoint has no tool calling")  # fmt: skip
    add("--temperature", metavar="T", type=within(0, 2), help="default: the endpoint's own")
    add("--max-turns", metavar="N", type=positive, default=50, help="of an attempt; default: 50")
    add("--max-tokens", metavar="N", type=positive, default=8192, help="of a turn; default: 8192")
    add("--max-input-tokens", metavar="N", type=positive, default=48_000,
        help="a longer dialogue takes no further turn; default: 48000")  # fmt: skip
    add("--price-in", metavar="P", type=_price, help="money for a million tokens read")
    add("--price-out", metavar="P", type=_price, help="money for a million tokens written")
    options = parser.parse_args(arguments)
    if (options.teacher_url is None) != (options.teacher_model is None):
        parser.error("--teacher-url and --teacher-model belong together")
    if (options.price_in is None) != (options.price_out is None):
        parser.error("--price-in and --price-out belong together")
    if not (options.replay or options.verifier or options.teacher_url):
        parser.error("no check is left to make")
    return options


# -- argument types


def _price(text: str) -> float:
    value = number(text, float, "an amount of money")
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"must not be {text}")
    return value


def _validate_options(options: argparse.Namespace) -> ValidateOptions:
    from train.data.estimate import Prices
    from train.data.teacher import TeacherSettings
    from train.data.validation import ValidateOptions
    from train.data.verdict import Checks

    teacher = None
    if options.teacher_url is not None:
        teacher = TeacherSettings(
            url=options.teacher_url,
            model=options.teacher_model,
            temperature=options.temperature,
            tools=options.teacher_tools,
            max_turns=options.max_turns,
            max_tokens=options.max_tokens,
            max_input_tokens=options.max_input_tokens,
        )
    return ValidateOptions(
        tasks=options.tasks,
        out=options.out,
        checks=Checks(options.replay, options.verifier, teacher, options.attempts, options.unsolved),
        concurrency=options.concurrency,
        max_tasks=options.max_tasks,
        prices=None if options.price_in is None else Prices(read=options.price_in, written=options.price_out),
    )


# -- the run


def _carry_out(validation: Validation, options: argparse.Namespace, console: Console) -> int:
    from actors.envs.fleet import FleetFailure
    from actors.envs.local_fleet.process import LocalFleetError
    from train.chat.protocol import EndpointFailed, EndpointGone, EndpointRefused
    from train.data.journal import JournalError
    from train.failures import Stopped

    out = validation.options.out
    try:
        closed = asyncio.run(_run(validation, options.fleet, console))
        report = validation.write()
    except (JournalError, EndpointRefused) as error:
        return _complain([str(error)], 2)
    except FleetFailure as failure:
        return _complain([str(failure)], 2 if failure.status == 401 else 1)
    except (EndpointFailed, EndpointGone, LocalFleetError) as error:
        return _complain([f"{error}; results so far are kept in {out}"], 1)
    except OSError as error:
        return _complain([f"--out {out} cannot be written: {error.strerror or error}"], 1)
    except (KeyboardInterrupt, Stopped) as end:
        code = TERMINATED if str(end) == "SIGTERM" else 130
        return _complain([f"interrupted: results so far are kept in {out}; the same command goes on from there"], code)
    _show(report, out, console)
    if options.json:
        print(json.dumps(_summary(report, out)))
    return _exit_code(validation, report, closed)


async def _run(validation: Validation, fleet: str, console: Console) -> CloseReport:
    from train.failures import stopped_by_signals

    settings = validation.options.checks.teacher
    teacher = None
    if settings is not None:
        from train.chat.endpoint import ChatEndpoint
        from train.chat.protocol import KEY_VARIABLE, TEACHER

        timeout_s = validation.options.deadlines.generate
        teacher = ChatEndpoint(settings, os.environ.get(KEY_VARIABLE), timeout_s, TEACHER)
    with _fleet(fleet) as (api_key, base_url), _shown(len(validation.found.tasks), console) as on_progress:
        async with stopped_by_signals():
            return await validation.run(api_key, base_url, teacher, on_progress)


@contextlib.contextmanager
def _fleet(which: str) -> Iterator[tuple[str, str | None]]:
    """API key and address of the control plane."""
    if which == "hosted":
        yield os.environ["FLEET_API_KEY"], os.environ.get("FLEET_BASE_URL")
        return
    from actors.envs.local_fleet.process import LocalFleetProcess

    with LocalFleetProcess() as process:
        yield "sk-local", process.url


def _exit_code(validation: Validation, report: ValidationReport, closed: CloseReport) -> int:
    if closed.left:
        name = validation.options.run_name
        left = f"{len(closed.left)} instances still run: fleet-rl leases clean --run {name}"
        return _complain([left], 1)
    undecided = report.total.verdicts.get("undecided", 0)
    if undecided:
        reason = next(r for one in report.tasks if one.verdict == "undecided" for r in one.reasons)
        said = f"{undecided} tasks are undecided, the first because: {reason.detail or reason.kind}; run it again"
        return _complain([said], UNDECIDED)
    return 0


# -- what is shown


@contextlib.contextmanager
def _shown(total: int, console: Console) -> Iterator[Any]:
    """Yields what takes the progress: a live bar on a terminal, a line now and then elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        shown = bar.add_task("", total=total)
        last = [time.monotonic()]

        def on_progress(progress: Progress) -> None:
            words = _words(progress)
            bar.update(shown, completed=progress.tasks, description=words)
            if not console.is_terminal and time.monotonic() - last[0] >= LINE_EVERY_S:
                last[0] = time.monotonic()
                console.print(f"{progress.tasks:,}/{total:,} tasks, {words}", markup=False, soft_wrap=True)

        yield on_progress


def _words(progress: Progress) -> str:
    verdicts = [f"{count:,} {verdict}" for verdict, count in sorted(progress.verdicts.items())]
    failures = [f"{progress.failures:,} of them failed"] * bool(progress.failures)
    episodes = [f"{progress.episodes:,} episodes", *failures]
    return ", ".join([*verdicts, *episodes, f"{progress.leased} instances in use"])


def _estimate_lines(estimate: Estimate, options: ValidateOptions) -> Iterator[str]:
    checks = options.checks
    yield (
        f"{options.tasks}: {estimate.tasks:,} tasks, {estimate.open:,} with something to do; "
        f"{estimate.done:,} episodes already done"
    )
    parts = [("verifier on an untouched instance", estimate.untouched), ("replay", estimate.replay)]
    parts.append((f"teacher, {checks.attempts} a task", estimate.teacher))
    shown = ", ".join(f"{name} {count:,}" for name, count in parts if count)
    yield f"to do: {estimate.episodes:,} episodes{f' ({shown})' if shown else ''}"
    yield (
        f"instances: {estimate.instances_least:,} to {estimate.episodes:,}, at most {options.concurrency} at once, "
        f"at most {estimate.instance_hours_at_most:,.1f} instance-hours"
    )
    if checks.teacher is not None:
        yield f"teacher {checks.teacher.model}, at most: {_tokens(estimate.at_most)}"
        if estimate.likely is not None:
            yield f"teacher, if attempts go on as those so far: {_tokens(estimate.likely)}"


def _tokens(tokens: Tokens) -> str:
    money = "" if tokens.cost is None else f", cost {tokens.cost:,.2f}"
    return f"{tokens.calls:,} calls, {tokens.prompt_tokens:,} tokens in, {tokens.completion_tokens:,} out{money}"


def _show(report: ValidationReport, out: Path, console: Console) -> None:
    console.print(_table(report))
    not_checked = report.total.replays.get("not checked", 0)
    lines = [f"replay: {', '.join(f'{count:,} {what}' for what, count in report.total.replays.items())}"]
    if report.checks["replay"] and not_checked == report.total.total:
        lines = ["replay: no task records its calls (reference_tool_calls)"]
    spent = report.spent
    lines.append(f"{spent.episodes:,} episodes, {spent.episode_hours:,.2f} hours on instances")
    if spent.calls:
        money = "" if spent.cost is None else f", cost {spent.cost:,.2f}"
        tokens = f"{spent.prompt_tokens:,} tokens in, {spent.completion_tokens:,} out"
        lines.append(f"teacher: {spent.calls:,} calls, {tokens}{money}")
    lines += _examples(report)
    lines.append(f"{out}: tasks.json, report.json")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(report: ValidationReport) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    verdicts = [name for name in ("accepted", "hard", "rejected", "undecided", "unsupported") if name in _seen(report)]
    taught = report.checks["teacher"] is not None
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("environment", overflow="fold")
    for name in (*verdicts, "total", *(("pass@1", f"pass@{report.checks['attempts']}") if taught else ())):
        table.add_column(name, justify="right")
    table.add_column("reasons", no_wrap=True)
    for env_key, tally in (*report.per_env.items(), ("all", report.total)):
        if tally is report.total:
            table.add_section()
        counts = [f"{tally.verdicts.get(name, 0):,}" for name in verdicts]
        rates = [_rate(tally.pass_at_1), _rate(tally.pass_at_k)] if taught else []
        table.add_row(escape(env_key), *counts, f"{tally.total:,}", *rates, _reasons(tally))
    return table


def _seen(report: ValidationReport) -> set[str]:
    return {"accepted", "rejected", *report.total.verdicts}


def _rate(rate: float | None) -> str:
    return "" if rate is None else f"{rate:.3f}"


def _reasons(tally: Tally) -> str:
    return "\n".join(f"{reason} {count:,}" for reason, count in tally.reasons.items())


def _examples(report: ValidationReport) -> Iterator[str]:
    """A task for each reason."""
    examples = {reason.kind: (one.task_key, reason) for one in reversed(report.tasks) for reason in one.reasons}
    for kind, (task_key, reason) in sorted(examples.items()):
        yield f"{kind}, for example {task_key}: {reason.detail}"


def _summary(report: ValidationReport, out: Path) -> dict[str, Any]:
    return {**report.model_dump(include={"input", "checks", "total", "per_env", "spent"}), "out": str(out)}


def _complain(problems: Sequence[str], code: int) -> int:
    for problem in problems:
        print(f"fleet-rl: {' '.join(problem.split())}", file=sys.stderr)
    return code
