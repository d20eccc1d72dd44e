"""Train a policy: ``python -m train.run CONFIG --dotted.key value ...``. This is what ``ray job submit`` calls.

Exit codes: 0 the run finished, 1 it failed, 2 the input was wrong (nothing was started), 130 it was stopped.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from train.config import ConfigError, RunConfig, load_config, print_help
from train.failures import OutOfTime, ResumeError, RunFailed, Stopped, stoppable

if TYPE_CHECKING:
    from train.evaluate import EvalResult
    from train.preflight import Inputs
    from train.progress import ProgressDisplay
    from train.resume import ResumePoint
    from train.system import System
    from train.tracking import Tracker

BEFORE = "before.json"  # the evaluation before training, for a run that is resumed
POLL_S = 0.5
USAGE = "usage: python -m train.run CONFIG [--dotted.key value ...]   (--help lists every key)"


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE)
        if arguments:
            print_help()
        return 0 if arguments else 2
    started = time.monotonic()
    try:
        with stoppable():
            return run(load_config(Path(arguments[0]), arguments[1:]), started)
    except ConfigError as error:
        print(f"fleet-rl: {error}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"fleet-rl: the run failed: {error}", file=sys.stderr)
        return 1
    except Stopped:
        print("fleet-rl: stopped", file=sys.stderr)
        return 130


def run(config: RunConfig, started: float) -> int:
    """One run from its configuration to its summary.

    Raises:
        ConfigError: the input is wrong; no actor was started.
        RunFailed: the run could not go on; everything it started is ended.
        Stopped: a signal came; likewise.
    """
    from train.preflight import RunFolder, check_inputs
    from train.resume import prepare

    inputs = check_inputs(config)
    folder = RunFolder(config)
    try:
        try:
            resume = prepare(config, inputs.train_tasks) if folder.resumed else None
        except ResumeError as error:
            raise ConfigError(str(error)) from None
        return _run_and_restart(config, inputs, started, resume)
    finally:
        folder.close()


def _run_and_restart(config: RunConfig, inputs: Inputs, started: float, resume: ResumePoint | None) -> int:
    from train.resume import can_resume, prepare

    restarts_left = config.max_restarts
    while True:
        try:
            return _run(config, inputs, started, resume)
        except OutOfTime:
            raise
        except RunFailed as error:
            if not restarts_left or not can_resume(config.run_dir):
                raise
            print(f"fleet-rl: the run failed: {error}; it goes on from its last checkpoint", file=sys.stderr)
        restarts_left -= 1
        resume = prepare(config, inputs.train_tasks)


def _run(config: RunConfig, inputs: Inputs, started: float, resume: ResumePoint | None) -> int:
    if not os.environ.get("RAY_ADDRESS"):
        # A Ray that the run starts itself is reached by this machine only: no token, no file of one in the home folder.
        # Ray reads this when it is imported, and a shell set up for a cluster may say otherwise.
        os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    from train.evaluate import load_results, save_results
    from train.progress import ProgressDisplay
    from train.report import write_report
    from train.system import System
    from train.tracking import Tracker

    steps = total_steps(config, len(inputs.train_tasks))
    with (
        ProgressDisplay(config.name, steps) as progress,
        Tracker(config) as tracker,
        System(config, inputs, steps, resume) as system,
    ):
        system.start(progress.update)
        before = load_results(config.run_dir / BEFORE) if resume else []
        if config.trainer.eval_before_train and not resume:
            before = evaluate(system, tracker, progress, 0)
            save_results(config.run_dir / BEFORE, before)
        train(system, tracker, progress, deadline=started + config.run_timeout)
        after = evaluate(system, tracker, progress, steps) if config.trainer.eval_after_train else []
        facts = system.summary(before, after)
    wall_s = time.monotonic() - started
    write_report(config.run_dir, tracker.history, before, after, facts | {"wall_s": round(wall_s, 1)})
    return 0


def evaluate(system: System, tracker: Tracker, progress: ProgressDisplay, step: int) -> list[EvalResult]:
    """Held-out pass rates of the policy as it is at ``step``."""
    results = system.evaluate(step, progress.update)
    for result in results:
        tracker.log_eval(result)
    return results


def train(system: System, tracker: Tracker, progress: ProgressDisplay, deadline: float) -> None:
    """Start the rollouts and follow them and the learner until the last step."""
    system.start_rollouts()
    while not system.learner_done():
        if time.monotonic() > deadline:
            raise OutOfTime("run_timeout passed")
        _record(system, tracker, progress)
        progress.update(system.status())
        time.sleep(POLL_S)
    _record(system, tracker, progress)
    system.end_training()


def _record(system: System, tracker: Tracker, progress: ProgressDisplay) -> None:
    for metrics in system.new_steps():
        tracker.log(metrics)
        progress.update({"reward": metrics["reward/avg_raw_reward"], "staleness": metrics.get("staleness/mean")})


def total_steps(config: RunConfig, n_tasks: int) -> int:
    """Optimiser steps of the run: the epochs', or ``max_steps`` if that is less."""
    by_epochs = max(1, config.trainer.epochs * n_tasks // config.trainer.train_batch_size)
    return min(by_epochs, config.trainer.max_steps or by_epochs)


if __name__ == "__main__":
    sys.exit(main())
