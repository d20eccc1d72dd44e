"""``python -m actors.envs.browse``: run the browsing environment's server until it is told to end, or its parent dies.

Prints one JSON line, ``{"url": …, "pid": …}``, once it listens. Exit codes: 0 ended when told to, 2 bad arguments.
"""

from __future__ import annotations

import argparse
import sys

from actors.envs.local_server import UsageError, add_arguments, bind, check_arguments, run, serve


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m actors.envs.browse", description="Run the browsing environment.")
    add_arguments(parser)
    parser.add_argument("--max-sessions", type=int, default=256, help="at once (default: %(default)s)")
    options = parser.parse_args(arguments)
    check_arguments(parser, options)
    if options.max_sessions < 1:
        parser.error("--max-sessions must be positive")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        listener = bind(options.host, options.port)
    except UsageError as error:
        print(f"browse: {error}", file=sys.stderr)
        return 2
    from actors.envs.browse.server import make_app

    run(serve(make_app(options.max_sessions), listener, options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
