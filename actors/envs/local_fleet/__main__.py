"""``python -m actors.envs.local_fleet``: run a local Fleet until it is told to end, or its parent dies.

Prints one JSON line, ``{"url": …, "pid": …}``, once it listens. Exit codes: 0 ended when told to, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import socket
import sys

from actors.envs.local_server import UsageError, add_arguments, bind, check_arguments, run, serve


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m actors.envs.local_fleet", description="Run a local Fleet.")
    add_arguments(parser)
    parser.add_argument(
        "--applications",
        metavar="MODULE:ATTRIBUTE",
        action="append",
        default=[],
        help="an application to host beside the sample ones; may be repeated",
    )
    parser.add_argument("--faults", metavar="FILE", help="YAML or JSON scenario file: faults to inject, limits")
    parser.add_argument("--instance-limit", type=int, default=256, help="running at once (default: %(default)s)")
    parser.add_argument("--verifier-workers", type=int, default=2, help="sandbox processes (default: %(default)s)")
    parser.add_argument(
        "--verifier-timeout", type=float, default=10.0, metavar="S", help="limit of one run (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    check_arguments(parser, options)
    if options.instance_limit < 1 or options.verifier_workers < 1 or options.verifier_timeout <= 0:
        parser.error("--instance-limit, --verifier-workers and --verifier-timeout must be positive")
    return options


async def _serve_fleet(options: argparse.Namespace, listener: socket.socket) -> None:
    from actors.envs.local_fleet.application import ApplicationError, load_application
    from actors.envs.local_fleet.apps import APPLICATIONS
    from actors.envs.local_fleet.faults import FaultFileError, FaultPlan, load_fault_plan
    from actors.envs.local_fleet.server import Settings, create_app

    try:
        plan = load_fault_plan(options.faults) if options.faults else FaultPlan()
        applications = dict(APPLICATIONS)
        for name in options.applications:
            application = load_application(name)
            if application.env_key in applications:
                raise UsageError(f"--applications {name}: an application '{application.env_key}' is hosted already")
            applications[application.env_key] = application
    except (ApplicationError, FaultFileError) as error:
        raise UsageError(str(error)) from None
    settings = Settings(options.instance_limit, options.verifier_workers, options.verifier_timeout, plan)
    await serve(create_app(applications, settings), listener, options)


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        run(_serve_fleet(options, bind(options.host, options.port)))
    except UsageError as error:
        print(f"local Fleet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
