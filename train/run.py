"""Train a policy: ``python -m train.run CONFIG --dotted.key value ...``. This is what ``ray job submit`` calls.

Exit codes: 0 the run finished, 1 it failed, 2 the input was wrong (nothing was started), 130 it was stopped.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serve.quick_loading import quick_loading
from train.config import ConfigError, RunConfig, load_config, print_help
from train.failures import OutOfTime, ResumeError, RunFailed, Unmendable, stoppable

if TYPE_CHECKING:
    from train.evaluate import EvalResult
    from train.preflight import Inputs, RunFolder
    from train.progress import ProgressDisplay
    from train.restarts import Restarts
    from train.resume import ResumePoint
    from train.system import System
    from train.tracking import Tracker

CONFIG_FILE = "config.yaml"  # what the run was told
BEFORE = "before.json"  # the evaluation before training, for a run that is resumed
POLL_S = 0.5
RAY_TOKEN = secrets.token_hex(32)  # of the Ray that this process starts, in all of a run's lives
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
    except KeyboardInterrupt:
        print("fleet-rl: stopped", file=sys.stderr)
        return 130


def run(config: RunConfig, started: float) -> int:
    """One run from its configuration to its summary.

    Raises:
        ConfigError: the input is wrong; no actor was started.
        RunFailed: the run could not go on; everything it started is ended.
        KeyboardInterrupt: a signal came; likewise.
    """
    keep_ray_private()
    with quick_loading():
        from train.preflight import RunFolder, check_inputs
        from train.resume import prepare

    inputs = check_inputs(config)
    folder = RunFolder(config)
    try:
        try:
            resume = prepare(config, inputs.train_tasks) if folder.resumed else None
        except ResumeError as error:
            raise ConfigError(str(error)) from None
        return _run_and_restart(config, inputs, folder, started, resume)
    finally:
        folder.close()


def _save_config(config: RunConfig) -> None:
    """For whoever looks at the run later: what it was told, every default included, without secrets."""
    import yaml

    from train.tracking import redact

    text = yaml.safe_dump(redact(config.model_dump(mode="json")), sort_keys=False)
    partial = config.run_dir / f".{CONFIG_FILE}.partial"
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(config.run_dir / CONFIG_FILE)
    except OSError as error:
        raise ConfigError(f"run folder {config.run_dir} cannot be written: {error.strerror}") from None


def _run_and_restart(
    config: RunConfig, inputs: Inputs, folder: RunFolder, started: float, resume: ResumePoint | None
) -> int:
    """What cannot be mended while the rest of the run lives takes all of it along: it is ended, and started from the
    last checkpoint in this process."""
    from train.restarts import Restarts

    restarts = Restarts(config.max_restarts)
    while True:
        _save_config(config)
        try:
            return _run(config, inputs, folder, started, resume, restarts)
        except Unmendable:
            raise
        except RunFailed as error:
            if not restarts.take():
                raise
            reason = str(error)
        resume = _take_back(config, inputs, folder, reason)


def _take_back(config: RunConfig, inputs: Inputs, folder: RunFolder, reason: str) -> ResumePoint | None:
    """The run's folder as it was at its last checkpoint, or empty where there is none yet."""
    from train.resume import can_resume, prepare

    resumable = can_resume(config.run_dir)
    goes_on = "goes on from its last checkpoint" if resumable else "begins anew, for it has no checkpoint yet"
    print(f"fleet-rl: the run failed: {reason}; it {goes_on}", file=sys.stderr, flush=True)
    if resumable:
        return prepare(config, inputs.train_tasks)
    folder.clear()
    return None


def _run(
    config: RunConfig,
    inputs: Inputs,
    folder: RunFolder,
    started: float,
    resume: ResumePoint | None,
    restarts: Restarts,
) -> int:
    """One life of the run. ``restarts`` is told how far it gets.

    Buffer, Conductor and learner hold what a checkpoint holds: the death of one takes the other two along, and they go
    back to it while all others live on. If that does not help, it is one of the others that has to go.
    """
    if inputs.kept is not None:
        from train.train_only import train_only

        return train_only(config, inputs.kept, started, resume, restarts)
    with quick_loading():
        from train.progress import ProgressDisplay
        from train.report import write_report
        from train.resume import can_resume
        from train.system import System
        from train.tracking import Tracker

    steps = total_steps(config, len(inputs.train_tasks))
    deadline = started + config.run_timeout
    with (
        ProgressDisplay(config.name, steps) as progress,
        Tracker(config) as tracker,
        System(config, inputs, steps, resume) as system,
    ):
        system.start(progress.update, run_until=deadline)
        restarts.reached(resume.step if resume else 0)
        while True:
            try:
                before, after, facts = _evaluate_and_train(
                    config, system, tracker, progress, deadline, resume, restarts
                )
                break
            except Unmendable:
                raise
            except RunFailed as error:
                if not (restarts.untouched and system.can_go_back and can_resume(config.run_dir)):
                    raise
                reason = str(error)
            system.end_training_parts()
            resume = _take_back(config, inputs, folder, reason)
            tracker.reopen()
            system.go_back(resume, progress.update, deadline)
            restarts.take()
    wall_s = time.monotonic() - started
    write_report(config.run_dir, tracker.history, before, after, facts | {"wall_s": round(wall_s, 1)})
    return 0


def _evaluate_and_train(
    config: RunConfig,
    system: System,
    tracker: Tracker,
    progress: ProgressDisplay,
    deadline: float,
    resume: ResumePoint | None,
    restarts: Restarts,
) -> tuple[list[EvalResult], list[EvalResult], dict[str, Any]]:
    """All that a running system is for. Returns the evaluations before and after, and the summary."""
    from train.evaluate import load_results, save_results

    before = load_results(config.run_dir / BEFORE) if resume else []
    if config.trainer.eval_before_train and not resume:
        before = evaluate(system, tracker, progress, 0)
        save_results(config.run_dir / BEFORE, before)
    train(system, tracker, progress, restarts, deadline)
    after = evaluate(system, tracker, progress, system.steps) if config.trainer.eval_after_train else []
    return before, after, system.summary(before, after)


def keep_ray_private() -> None:
    """A Ray that is started here serves this process and what it starts: its token is in no file.

    Serve and torch listen on every interface, and Serve unpickles what it is sent. A shell set up for a cluster may say
    otherwise. Ray reads this when it is imported, after which a change would lock this process out.
    """
    if not os.environ.get("RAY_ADDRESS") and "ray" not in sys.modules:
        os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": RAY_TOKEN, "RAY_USAGE_STATS_ENABLED": "0"}


def evaluate(system: System, tracker: Tracker, progress: ProgressDisplay, step: int) -> list[EvalResult]:
    """Held-out pass rates of the policy as it is at ``step``."""
    results = system.evaluate(step, progress.update)
    for result in results:
        tracker.log_eval(result)
    return results


def train(system: System, tracker: Tracker, progress: ProgressDisplay, restarts: Restarts, deadline: float) -> None:
    """Start the rollouts and follow them and the learner until the last step."""
    system.start_rollouts()
    while not system.learner_done():
        if time.monotonic() > deadline:
            raise OutOfTime("run_timeout passed")
        _record(system, tracker, progress)
        _record_evaluations(system.evaluate_beside(), tracker, progress)
        status = system.status()
        tracker.show(status.pop("metrics"))
        restarts.reached(status["step"])
        progress.update(status)
        time.sleep(POLL_S)
    _record(system, tracker, progress)
    system.end_training()
    _record_evaluations(system.finish_evaluation(progress.update, deadline), tracker, progress)


def _record(system: System, tracker: Tracker, progress: ProgressDisplay) -> None:
    for metrics in system.new_steps():
        tracker.log(metrics)
        progress.update(
            {
                "step": int(metrics["trainer/global_step"]),
                "reward": metrics["reward/avg_raw_reward"],
                "staleness": metrics.get("staleness/mean"),
            }
        )


def _record_evaluations(results: list[EvalResult], tracker: Tracker, progress: ProgressDisplay) -> None:
    for result in results:
        tracker.log_eval(result)
        progress.update({"pass_at_1": result.overall.pass_at_1})


def total_steps(config: RunConfig, n_tasks: int) -> int:
    """Optimiser steps of the run: the epochs', or ``max_steps`` if that is less."""
    by_epochs = max(1, config.trainer.epochs * n_tasks // config.trainer.train_batch_size)
    return min(by_epochs, config.trainer.max_steps or by_epochs)


if __name__ == "__main__":
    sys.exit(main())
