"""The tasks of a run: those it trains on and those it is evaluated on."""

from __future__ import annotations

from pathlib import Path

from actors.task import Task, TaskFileError, load_tasks
from train.config import DataConfig
from train.data.manifest import TRAIN, VALIDATION, ManifestError, prepared_file
from train.data.split import unit_hash


def load_split(config: DataConfig) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks, each from a task file or from its side of a prepared folder.

    Raises:
        TaskFileError: a file is unusable, a side is empty, or a held-out task is also trained on.
    """
    source = config.eval_tasks
    if source is None and config.train_tasks.is_dir():
        source = config.train_tasks
    tasks = _load(config.train_tasks, TRAIN)
    if source is not None:
        train, held_out = tasks, _load(source, VALIDATION)
    else:
        train = [task for task in tasks if unit_hash(task.task_key) >= config.eval_ratio]
        held_out = [task for task in tasks if unit_hash(task.task_key) < config.eval_ratio]
    shared = {task.task_key for task in train} & {task.task_key for task in held_out}
    if shared:
        raise TaskFileError(f"task {min(shared)} is in both {config.train_tasks} and {source}")
    train, held_out = train[: config.max_tasks], held_out[: config.max_eval_tasks]
    if not train:
        raise TaskFileError(f"no training task is left of {len(tasks)} in {config.train_tasks}")
    if not held_out:
        raise TaskFileError(
            f"no held-out task in {source or f'{config.train_tasks} at data.eval_ratio {config.eval_ratio}'}"
        )
    return train, held_out


def _load(location: Path, side: str) -> list[Task]:
    if not location.is_dir():
        return load_tasks(location)
    try:
        return load_tasks(prepared_file(location, side))
    except (ManifestError, OSError) as error:
        raise TaskFileError(str(error)) from None
