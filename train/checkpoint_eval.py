"""Evaluation of one policy without training: the episodes of a run, against a checkpoint or a model folder."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.task import Task, TaskFileError, load_tasks
from actors.trajectory import OUTCOME_NAMES, Graded, Group
from serve.quick_loading import quick_loading
from serve.sampling import Sampling
from train import checkpoint
from train.config import ConfigError, DebugConfig, ModelConfig, RunConfig, TrajectoriesConfig, load_config
from train.data.run_tasks import load_split
from train.data.sampler import TaskMix
from train.data.split import unit_hash
from train.evaluate import AGGREGATED, GREEDY, SAMPLED, eval_folder
from train.evaluator import Attempts, eval_sampling
from train.preflight import Inputs, check_episodes, check_gpus
from train.resume import CHECKPOINTS
from train.run import CONFIG_FILE

RUNS = Path("runs")  # where a run that is named without a folder is looked for
BASE, LATEST = "base", "latest"
Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Evaluated:
    """What became of it.

    Attributes:
        outcomes: attempts by outcome; ``reasons``: of those that were not graded.
        ledger: of the attempts (``eval``) and of the instances.
        problem: what kept some tasks from being attempted.
        spent: what a chat endpoint was asked for; ``None``: there was none.
    """

    groups: list[Group]
    outcomes: dict[str, int]
    reasons: dict[str, int]
    ledger: dict[str, Any]
    sampled_tokens: int
    problem: str | None = None
    spent: dict[str, int] | None = None

    @classmethod
    def of(cls, groups: list[Group], ledger: dict[str, Any], sampled_tokens: int, **more: Any) -> Evaluated:
        """With the outcomes of ``groups`` counted."""
        ended = [t.outcome for group in groups for t in group.trajectories]
        names = Counter(OUTCOME_NAMES[type(outcome)] for outcome in ended)
        reasons = Counter(outcome.reason for outcome in ended if not isinstance(outcome, Graded))
        outcomes = {name: names[name] for name in OUTCOME_NAMES.values()}
        return cls(groups, outcomes, dict(reasons), ledger, sampled_tokens, **more)


@dataclass(frozen=True)
class Policy:
    """A model folder (or a name in the local Hugging Face cache). ``step``: of the checkpoint; ``None``: no step's."""

    path: str
    step: int | None


def find_config(target: str, overrides: list[str]) -> tuple[RunConfig, bool]:
    """The configuration in a file, or of a run by its folder or its name under ``runs/``; and whether it is a run's.

    Raises:
        ConfigError: there is none, or it cannot be used.
    """
    folder = next((path for path in (Path(target), RUNS / target) if path.is_dir()), None)
    if folder is None:
        if not Path(target).is_file() and not target.endswith((".yaml", ".yml")):
            raise ConfigError(f"there is no {target}: name a configuration file, a run's folder or a run under {RUNS}/")
        return load_config(Path(target), overrides), False
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{folder} holds no {CONFIG_FILE}: name the configuration file that the run was started with, and "
            f"--checkpoint {folder / CHECKPOINTS}/global_step_N"
        )
    config = load_config(folder / CONFIG_FILE, overrides)
    # The folder may have been moved since.
    place = folder.absolute()
    return config.model_copy(update={"name": place.name, "output_dir": place.parent}), True


def find_policy(config: RunConfig, which: str) -> Policy:
    """``latest`` complete checkpoint of the run, its ``base`` model, or the folder of a checkpoint or a model.

    Raises:
        ConfigError: there is none.
    """
    if which == BASE:
        return Policy(config.trainer.policy.model.path, None)
    if which == LATEST:
        found = checkpoint.latest_complete(config.run_dir / CHECKPOINTS)
        if found is None:
            raise ConfigError(f"{config.run_dir} holds no complete checkpoint: pass --checkpoint base, or a folder")
        return Policy(str(found / checkpoint.POLICY), checkpoint.step_of(found))
    folder = Path(which)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {which}: --checkpoint takes a folder, {LATEST} or {BASE}")
    if folder.name == checkpoint.POLICY and checkpoint.is_checkpoint_name(folder.parent.name):
        folder = folder.parent
    if not checkpoint.is_checkpoint_name(folder.name):
        return Policy(str(folder), None)
    if checkpoint.read_manifest(folder) is None:
        raise ConfigError(f"checkpoint {folder} is not complete: files are missing or cut short")
    return Policy(str(folder / checkpoint.POLICY), checkpoint.step_of(folder))


def endpoint_name(config: RunConfig, model: str) -> str:
    """Of an evaluation of a model behind an endpoint, by the run's tasks: beside those of the run's own policies."""
    return f"{config.name}-{re.sub(r'[^A-Za-z0-9._-]+', '-', model).strip('-')}"


def choose_tasks(config: RunConfig, split: str, per_env: int | None = None) -> list[Task]:
    """The tasks of a side of the run (``eval`` or ``train``) or of a file, in their order.

    Args:
        per_env: at most so many of each environment, those with the smallest hashes of their keys: always the same
            ones, whatever else is in the file.

    Raises:
        ConfigError: there are none.
    """
    try:
        if split in ("eval", "train"):
            train, held_out = load_split(config.data)
            tasks = held_out if split == "eval" else train
        else:
            tasks = load_tasks(split)
    except TaskFileError as error:
        raise ConfigError(str(error)) from None
    if not tasks:
        raise ConfigError(f"{split} holds no task")
    if per_env is None:
        return tasks
    by_env: dict[str, list[str]] = defaultdict(list)
    for task in tasks:
        by_env[task.env_key].append(task.task_key)
    kept = {key for keys in by_env.values() for key in sorted(keys, key=unit_hash)[:per_env]}
    return [task for task in tasks if task.task_key in kept]


def choose_sampling(
    config: RunConfig,
    samples: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    max_tokens: int | None = None,
) -> Attempts:
    """How often and how each task is attempted; what is not said is as in the run.

    Raises:
        ConfigError: several attempts at temperature 0, which would be one attempt several times.
    """
    sampling: Sampling = eval_sampling(config)
    given = {"temperature": temperature, "top_p": top_p, "max_tokens": max_tokens}
    sampling = replace(sampling, **{name: value for name, value in given.items() if value is not None})
    if sampling.temperature == 0:
        if (samples or 1) > 1:
            raise ConfigError(f"{samples} samples at temperature 0 are one sample {samples} times: take --samples 1")
        return Attempts(GREEDY, 1, sampling)
    return Attempts(SAMPLED, samples or config.generator.eval_n_samples_per_prompt, sampling)


def result_folder(out: Path, policy: Policy, attempts: Attempts, overwrite: bool) -> Path:
    """Where the dump goes; see :func:`train.evaluate.eval_folder`.

    Raises:
        ConfigError: it cannot be written, or there is one and it is not to be overwritten.
    """
    folder = eval_folder(out, policy.step, attempts.label)
    if (folder / AGGREGATED).exists() and not overwrite:
        raise ConfigError(f"{folder} holds an evaluation: choose another --out, or pass --overwrite")
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise ConfigError(f"{folder} cannot be written: {existing} is no folder that you may write to")
    return folder


def check(config: RunConfig, policy: Policy, tasks: list[Task]) -> tuple[RunConfig, Inputs]:
    """The configuration of the evaluation, and what it needs, loaded and checked.

    Raises:
        ConfigError: something is wrong, and what to do.
    """
    config = beside_run(config, tasks)
    trainer = config.trainer
    config = config.model_copy(
        update={
            "trainer": trainer.model_copy(
                update={
                    "policy": trainer.policy.model_copy(update={"model": ModelConfig(path=policy.path)}),
                    "learner": trainer.learner.model_copy(update={"use_gpu": False, "num_cpus": 0.0}),
                    "dump_trajectories": False,
                    "eval_interval": None,
                }
            ),
            "policy": config.policy.model_copy(update={"eval_replicas": 0}),
            "debug": DebugConfig(),
            "data": config.data.model_copy(update={"mix": TaskMix()}),
            "trajectories": TrajectoriesConfig(),
        }
    )
    check_gpus(config)
    tokenizer, prompter = check_episodes(config, tasks)
    return config, Inputs(tasks, tasks, tokenizer, prompter)


def beside_run(config: RunConfig, tasks: Sequence[Task]) -> RunConfig:
    """The configuration with a name of its own, for instances of the name's earlier pools are deleted, and the run may
    be going on; and without the OpenEnv servers of which there is no task."""
    envs = {task.env_key for task in tasks}
    name = re.sub(r"[^A-Za-z0-9._-]", "-", config.name)  # of a folder that was renamed
    environment = config.environment
    used = {
        key: {env: value for env, value in getattr(environment, key).items() if env in envs}
        for key in ("openenv", "openenv_headers")
    }
    return config.model_copy(
        update={
            "name": f"{name[:48]}-eval-{secrets.token_hex(4)}",
            "environment": environment.model_copy(update=used),
        }
    )


def evaluate(config: RunConfig, inputs: Inputs, attempts: Attempts, report: Report) -> Evaluated:
    """Attempt every task by the parts of a run, which are all ended afterwards.

    Args:
        config, inputs: of :func:`check`.

    Raises:
        RunFailed: a part did not start, or broke.
    """
    with quick_loading():
        from train.system import System

    with contextlib.ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fleet-rl-eval-"))
        config = config.model_copy(update={"output_dir": Path(scratch)})
        system = stack.enter_context(System(config, inputs, steps=1))
        system.start(report, with_learner=False)
        groups = system.attempt(inputs.eval_tasks, attempts, report)
        summary = system.summary([], [])
    ledger = {name: summary["ledger"][name] for name in ("eval", "instances")}
    return Evaluated.of(groups, ledger, summary["sampled_tokens"])


def sampling_facts(sampling: Sampling) -> dict[str, Any]:
    """A sampling as JSON, under the names of :class:`serve.sampling.Sampling`."""
    return {**vars(sampling), "stop": list(sampling.stop)}


def upload_dump(files: Sequence[Path], folder: Path, location: str) -> None:
    """Copy the files of a dump to ``location`` (ends with ``/``) in S3, under their paths below ``folder``.

    Raises:
        train.s3.StorageError: one of them is not stored; the message names it.
    """
    from train.s3 import upload

    for file in files:
        upload(file, location + file.relative_to(folder).as_posix())
