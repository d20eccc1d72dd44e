"""What can be known to be wrong before any actor starts: each problem is one line."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.config import GeneratorConfig
from actors.envs.local_fleet.application import ApplicationError, load_application
from actors.envs.local_fleet.apps import APPLICATIONS
from actors.envs.local_fleet.faults import FaultFileError, load_fault_plan
from actors.prompt import Prompter, PromptError
from actors.task import Task, TaskFileError
from serve.config import QUIET_ENGINE
from serve.quick_loading import quick_loading
from train.config import ConfigError, RunConfig
from train.data.run_tasks import load_split
from train.demand import Demand
from train.resume import SUMMARY, can_resume, task_sampler
from train.s3 import StorageError, objects

if TYPE_CHECKING:
    from train.kept_batches import KeptBatches

DEVICES = Path("/dev")
LOCK_NAME = "run.lock"


@dataclass
class Inputs:
    """Everything a run has read and checked before it starts actors."""

    train_tasks: list[Task]
    eval_tasks: list[Task]
    tokenizer: Any
    prompter: Prompter
    kept: KeptBatches | None = None  # to be trained on; nothing of the above is needed then


def check_inputs(config: RunConfig) -> Inputs:
    """Load tasks and tokenizer and check that they fit together, and that the run can be trained here.

    Raises:
        ConfigError: one line that says what is wrong, where, and what to do.
    """
    if config.debug.train_only is not None:
        return check_train_only(config, config.debug.train_only)
    try:
        train_tasks, eval_tasks = load_split(config.data)
    except TaskFileError as error:
        raise ConfigError(str(error)) from None
    try:
        task_sampler(config, train_tasks)
    except ValueError as error:
        raise ConfigError(f"data.mix: {error}") from None
    tokenizer, prompter = check_episodes(config, (*train_tasks, *eval_tasks))
    check_disk(config)
    check_gpus(config)
    if config.trajectories.upload_to is not None:
        check_store(config.trajectories.upload_to)
    return Inputs(train_tasks, eval_tasks, tokenizer, prompter)


def check_train_only(config: RunConfig, location: str) -> Inputs:
    """The kept batches can be read and are not in the folder that the run is going to replace, and the learner fits."""
    from train.kept_batches import KeptBatches
    from train.trajectory_reader import TrajectoryFileError

    check_model_folder(config.trainer.policy.model.path)
    check_disk(config)
    check_gpus(config)
    if config.trajectories.upload_to is not None:
        check_store(config.trajectories.upload_to)
    try:
        kept = KeptBatches(location, config.trainer.algorithm.overlong_filtering)
        kept.read(1)
    except TrajectoryFileError as error:
        raise ConfigError(f"debug.train_only: {error}") from None
    if kept.lies_in(config.run_dir):
        raise ConfigError(f"debug.train_only: {location} is this run's own folder: pass another --name")
    return Inputs([], [], None, None, kept)


def check_episodes(config: RunConfig, tasks: Sequence[Task]) -> tuple[Any, Prompter]:
    """What every episode of ``tasks`` needs is there and fits: environment, model, prompt.

    Returns:
        The policy's tokenizer, and the prompter with it.

    Raises:
        ConfigError: as :func:`check_inputs`.
    """
    check_environments(config, tasks)
    check_model_folder(config.trainer.policy.model.path)
    tokenizer = load_tokenizer(config.trainer.policy.model.path)
    generator = config.generator
    try:
        prompter = Prompter(tokenizer, generator.tools_channel, generator.chat_template_kwargs)
    except PromptError as error:
        raise ConfigError(f"model {config.trainer.policy.model.path}: {error}") from None
    if generator.tool_call_format != "tags":
        check_tool_call_format(generator, tokenizer)
    for task in tasks:
        # The tools come on top and are known only once an instance lists them; the episode checks again with them.
        length = len(prompter.first(task, [])[1])
        if length > generator.max_input_length:
            raise ConfigError(
                f"task {task.task_key}: its prompt of {length} tokens exceeds generator.max_input_length "
                f"{generator.max_input_length}"
            )
    return tokenizer, prompter


def check_environments(config: RunConfig, tasks: Sequence[Task]) -> None:
    """What ``tasks`` need besides a policy.

    Raises:
        ConfigError: as :func:`check_inputs`.
    """
    for task in tasks:
        if task.task_modality != "tool_use":
            raise ConfigError(f"task {task.task_key}: modality {task.task_modality} is not supported yet")
    check_env_keys(config, {task.env_key: task for task in reversed(tasks)})
    if config.environment.local_faults is not None:
        try:
            load_fault_plan(config.environment.local_faults)
        except FaultFileError as error:
            raise ConfigError(str(error)) from None


def check_store(location: str, key: str = "trajectories.upload_to") -> None:
    """A run should not find out at its end that it cannot reach its store. ``key``: where the location was said."""
    try:
        next(objects(location.rstrip("/") + "/"), None)
    except StorageError as error:
        raise ConfigError(f"{key}: {error}") from None


def check_env_keys(config: RunConfig, tasks: dict[str, Task]) -> None:
    """Every environment the tasks name can be had: from an OpenEnv server, or from Fleet.

    Args:
        tasks: one task of each ``env_key``.
    """
    environment = config.environment
    for env_key in environment.openenv:
        if env_key not in tasks:
            raise ConfigError(f"environment.openenv names '{env_key}', but no task has that env_key")
    for env_key in environment.openenv_headers:
        if env_key not in environment.openenv:
            raise ConfigError(f"environment.openenv_headers names '{env_key}', which environment.openenv does not")
    try:
        environment.secret_headers(os.environ)
    except ValueError as error:
        raise ConfigError(f"environment.openenv_headers: {error}") from None
    of_fleet = [task for env_key, task in tasks.items() if env_key not in environment.openenv]
    if environment.local_applications and environment.fleet != "local":
        raise ConfigError("environment.local_applications is for environment.fleet 'local' only")
    if not of_fleet:
        return
    if environment.fleet == "hosted":
        if not os.environ.get("FLEET_API_KEY"):
            raise ConfigError("environment.fleet is 'hosted' but FLEET_API_KEY is not set; set it, or use 'local'")
        return
    try:
        own = [load_application(name).env_key for name in environment.local_applications]
    except ApplicationError as error:
        raise ConfigError(f"environment.local_applications: {error}") from None
    for task in of_fleet:
        if task.env_key not in (*APPLICATIONS, *own):
            raise ConfigError(
                f"task {task.task_key}: env_key '{task.env_key}' is neither in environment.openenv nor an application "
                f"of the local Fleet ({', '.join((*APPLICATIONS, *own))})"
            )


def check_tool_call_format(generator: GeneratorConfig, tokenizer: Any) -> None:
    """vLLM has a parser of this name, and it fits the tokenizer. Takes vLLM's import, some seconds."""
    for name, value in QUIET_ENGINE.items():
        os.environ.setdefault(name, value)
    from actors.rollout_worker import dialogue_rules

    try:
        dialogue_rules(generator, tokenizer)
    except ValueError as error:
        raise ConfigError(f"generator.{' '.join(str(error).split())}") from None


def check_model_folder(path: str) -> None:
    """A local model folder must be complete; hub names are left to transformers."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.is_absolute() or path.startswith(".") or path.count("/") != 1:
            raise ConfigError(f"model folder {path} does not exist")
        return
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {path} has no config.json")
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model folder {path} has no *.safetensors weights")
    for file in weights:
        _check_weights(file)
    if not any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        raise ConfigError(f"model folder {path} has no tokenizer (tokenizer.json)")
    if not _has_chat_template(folder):
        raise ConfigError(f"model folder {path} has no chat template (chat_template.jinja or tokenizer_config.json)")


def _check_weights(file: Path) -> None:
    """Its header can be read, and the file is as long as the header says: a download that broke off is not."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="np"):
            return
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"weights {file} are damaged ({error}): fetch or write them again") from None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8")).get("chat_template"))
    except (OSError, ValueError):
        return False


def load_tokenizer(path: str) -> Any:
    with quick_loading():
        from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model {path}: the tokenizer cannot be loaded: {str(error).splitlines()[0]}") from None


def check_disk(config: RunConfig) -> None:
    """Room for the checkpoints that are kept, plus the one being written."""
    folder = Path(config.trainer.policy.model.path)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    kept = config.trainer.max_ckpts_to_keep + 1
    needed = kept * weights + 64 * 2**20
    existing = next(p for p in (config.run_dir.absolute(), *config.run_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise ConfigError(
            f"not enough disk under {existing}: {free / 1e9:.2f} GB free, {needed / 1e9:.2f} GB needed "
            f"({kept} checkpoints x {weights / 1e9:.2f} GB of weights + 0.07 GB)"
        )


def check_gpus(config: RunConfig) -> None:
    """Where the run starts Ray itself, its actors must fit on this machine's GPUs: they would wait for ever."""
    if os.environ.get("RAY_ADDRESS"):
        return
    demand = Demand.of(config)
    needed = demand.gpus
    here = len(list(DEVICES.glob("nvidia[0-9]*")))
    if needed > here:
        apart = ", of which two above 0.5 do not share one" if needed > demand.total("GPU") else ""
        raise ConfigError(
            f"the run needs {needed:g} GPUs ({demand.gpu_words}{apart}), but this machine has {here}; set RAY_ADDRESS "
            "for a cluster that has them"
        )


class RunFolder:
    """The run's folder, held by one process: the lock ends with the process, however it ends."""

    def __init__(self, config: RunConfig) -> None:
        self.path = config.run_dir
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / LOCK_NAME, "a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"run folder {self.path} cannot be written: {error.strerror}") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.seek(0)
            owner = self._lock.read().strip() or "?"
            self._lock.close()
            raise ConfigError(
                f"run '{config.name}' is already running (process {owner}); pass another --name"
            ) from None
        self.resumed = config.resume and can_resume(self.path)
        others = [entry for entry in self.path.iterdir() if entry.name != LOCK_NAME]
        # What was interrupted before its first checkpoint holds nothing to go on from, and nothing to keep.
        interrupted = not (self.path / SUMMARY).exists()
        if others and not (config.overwrite or self.resumed or (config.resume and interrupted)):
            self._lock.close()
            raise ConfigError(
                f"run folder {self.path} holds an earlier run; choose another --name, or pass --resume true to go on "
                "from its last checkpoint, or --overwrite true"
            )
        if not self.resumed:
            self.clear()
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()))
        self._lock.flush()

    def clear(self) -> None:
        """Remove everything but the lock."""
        for entry in self.path.iterdir():
            if entry.name == LOCK_NAME:
                continue
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()

    def close(self) -> None:
        self._lock.close()
