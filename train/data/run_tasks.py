"""The tasks of a run: those it trains on and those it is evaluated on."""

from __future__ import annotations

from actors.task import Task, TaskFileError, load_tasks
from train.config import DataConfig
from train.data.split import unit_hash


def load_split(config: DataConfig) -> tuple[list[Task], list[Task]]:
    """Training and held-out tasks.

    Raises:
        TaskFileError: a file is unusable, a side is empty, or a held-out task is also trained on.
    """
    tasks = load_tasks(config.train_tasks)
    if config.eval_tasks is not None:
        train, held_out = tasks, load_tasks(config.eval_tasks)
    else:
        train = [task for task in tasks if unit_hash(task.task_key) >= config.eval_ratio]
        held_out = [task for task in tasks if unit_hash(task.task_key) < config.eval_ratio]
    shared = {task.task_key for task in train} & {task.task_key for task in held_out}
    if shared:
        raise TaskFileError(f"task {min(shared)} is in both {config.train_tasks} and {config.eval_tasks}")
    train, held_out = train[: config.max_tasks], held_out[: config.max_eval_tasks]
    if not train:
        raise TaskFileError(f"no training task is left of {len(tasks)} in {config.train_tasks}")
    if not held_out:
        source = config.eval_tasks or f"{config.train_tasks} at data.eval_ratio {config.eval_ratio}"
        raise TaskFileError(f"no held-out task in {source}")
    return train, held_out
