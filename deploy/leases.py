"""``fleet-rl leases``: what runs hold at the control plane, and an end to it where a run could not end it itself.

Needs ``FLEET_API_KEY``, and ``FLEET_BASE_URL`` for another control plane than the Fleet service.
Exit codes: 0 done, 1 something is left or the control plane failed, 2 wrong input.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.env_pool_core import CloseReport
    from actors.envs.fleet import FleetControl

COLUMNS = ("instance", "env", "run", "age", "status")
NEEDS = "Needs FLEET_API_KEY; FLEET_BASE_URL names another control plane than the Fleet service."


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not os.environ.get("FLEET_API_KEY"):
        return _complain(f"FLEET_API_KEY is not set. {NEEDS}", 2)
    from actors.envs.fleet import FleetFailure

    try:
        return asyncio.run(_list(options.run) if options.action == "list" else _clean(options.run))
    except FleetFailure as failure:
        return _complain(failure, 2 if failure.status == 401 else 1)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fleet-rl leases", description="Instances that runs hold at the control plane.", epilog=NEEDS
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|clean")
    shown = actions.add_parser("list", help="a table of the instances that have not ended", epilog=NEEDS)
    shown.add_argument("--run", metavar="NAME", type=_run_name, help="only those of the runs of this name")
    cleaned = actions.add_parser("clean", help="end instances, those of a run that still goes on too", epilog=NEEDS)
    which = cleaned.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", metavar="NAME", type=_run_name, help="those of the runs of this name")
    which.add_argument("--all-of-prefix", action="store_true", help="those of every run of this program")
    return parser.parse_args(arguments)


def _run_name(text: str) -> str:
    if not text.strip():
        raise argparse.ArgumentTypeError("a run's name is not empty")
    return text


async def _list(run: str | None) -> int:
    from actors.env_pool_core import run_prefix

    async with _control() as control:
        found = await _instances(control, "" if run is None else run_prefix(run))
    print(_table(found, datetime.now(UTC)))
    return 0


async def _clean(run: str | None) -> int:
    """``run`` None: every run of this program."""
    from actors.env_pool_core import RUN_PREFIX, delete_instances, run_prefix

    prefix = f"{RUN_PREFIX}:" if run is None else run_prefix(run)
    async with _control() as control:
        # First a plain look: the janitor would insist for a minute where nobody answers.
        await _instances(control, prefix)
        report: CloseReport = await delete_instances(control, prefix)
        left = [i for i in await _instances(control, prefix) if i["instance_id"] in report.left]
    print(f"{report.deleted} instances of {prefix}* ended, {len(report.left)} left")
    if not report.left:
        return 0
    print(_table(left, datetime.now(UTC)))
    return _complain(f"{len(report.left)} instances of {prefix}* are still there: {', '.join(report.left)}", 1)


@asynccontextmanager
async def _control() -> AsyncIterator[FleetControl]:
    from actors.envs.fleet import FleetControl
    from actors.envs.http_session import close_http_session

    control = FleetControl(base_url=os.environ.get("FLEET_BASE_URL"))
    try:
        yield control
    finally:
        await control.close()
        await close_http_session()


async def _instances(control: FleetControl, prefix: str) -> list[dict[str, Any]]:
    """What has not ended, the oldest first."""
    from actors.env_pool_core import ENDED

    found = [i for i in await control.list(status=None) if i["status"] not in ENDED]
    return sorted((i for i in found if (i["run_id"] or "").startswith(prefix)), key=lambda i: i["created_at"])


def _table(instances: list[dict[str, Any]], now: datetime) -> str:
    rows = [
        (i["instance_id"], i["env_key"], i["run_id"] or "-", age(i["created_at"], now), i["status"]) for i in instances
    ]
    widths = [max(map(len, column)) for column in zip(COLUMNS, *rows, strict=True)]
    lines = ["  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)) for row in (COLUMNS, *rows)]
    return "\n".join([*(line.rstrip() for line in lines), f"{len(rows)} instances"])


def age(created_at: str, now: datetime) -> str:
    """Time since an ISO 8601 moment, UTC if it names no zone: ``42s``, ``17m``, ``3h05m``; ``?`` if unreadable."""
    try:
        created = datetime.fromisoformat(created_at)
    except ValueError:
        return "?"
    if created.tzinfo is None:
        created = created.replace(tzinfo=UTC)
    seconds = max(0, int((now - created).total_seconds()))
    if seconds < 60:
        return f"{seconds}s"
    hours, minutes = divmod(seconds // 60, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m"


def _complain(problem: object, code: int) -> int:
    print(f"fleet-rl: {' '.join(str(problem).split())}", file=sys.stderr)
    return code
