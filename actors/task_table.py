"""Tasks as a parquet table: what ``fleet-rl prepare`` writes and a run reads.

The first four columns are those of SkyRL-Fleet's data sets: ``prompt`` as one message of the user, ``env_class``,
``task_key``, ``data_source`` (the task's ``env_key``). The other fields of a task follow, so that a run needs nothing
else; fields this project does not know stand together, as JSON, in ``other_fields``. Objects are JSON text: their keys
differ from task to task.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from actors.task import Task, TaskFileError

ENV_CLASS = "fleet_task"
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string())])
TEXT = ("env_version", "data_key", "data_version", "verifier_code", "task_modality", "openenv_answer_tool")
OBJECTS = ("env_variables", "openenv_reset", "openenv_answer_arguments")
OTHER_FIELDS = "other_fields"
SCHEMA = pa.schema(
    [
        ("prompt", pa.list_(MESSAGE)),
        ("env_class", pa.string()),
        ("task_key", pa.string()),
        ("data_source", pa.string()),
        *((name, pa.string()) for name in TEXT),
        ("difficulty", pa.int64()),
        *((name, pa.string()) for name in (*OBJECTS, OTHER_FIELDS)),
    ]
)


def task_table(tasks: Sequence[Task]) -> pa.Table:
    """Tasks as a table of ``SCHEMA``, one row a task.

    Raises:
        pyarrow.ArrowInvalid: a difficulty beyond 64 bits.
    """
    count = len(tasks)
    messages = pa.StructArray.from_arrays(
        [pa.array(["user"] * count, pa.string()), pa.array([task.prompt for task in tasks], pa.string())],
        fields=list(MESSAGE),
    )
    columns: dict[str, Any] = {
        "prompt": pa.ListArray.from_arrays(pa.array(range(count + 1), pa.int32()), messages),
        "env_class": [ENV_CLASS] * count,
        "task_key": [task.task_key for task in tasks],
        "data_source": [task.env_key for task in tasks],
        "difficulty": [task.difficulty for task in tasks],
        OTHER_FIELDS: [_object(task.model_extra or None) for task in tasks],
    }
    columns |= {name: [getattr(task, name) for task in tasks] for name in TEXT}
    columns |= {name: [_object(getattr(task, name)) for task in tasks] for name in OBJECTS}
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in SCHEMA}, SCHEMA)


def _object(value: dict[str, Any] | None) -> str | None:
    return None if value is None else msgspec.json.encode(value).decode()


def read_raw_tasks(path: Path) -> list[Any]:
    """The rows of a parquet file as raw tasks in the format of a JSON task file, not yet checked.

    Raises:
        TaskFileError: the file is missing or is not such a table; the message names it.
    """
    try:
        rows = pq.read_table(path).to_pylist()
    except FileNotFoundError:
        raise TaskFileError(f"task file {path} does not exist") from None
    except (OSError, pa.ArrowException, ValueError) as error:  # ValueError: names or texts that are no UTF-8
        # Arrow quotes the bytes that it met, and a terminal would obey some of them.
        problem = " ".join("".join(c if c.isprintable() else " " for c in str(error)).split())
        raise TaskFileError(f"task file {path} cannot be read as parquet: {problem}") from None
    return [_raw_task(row, f"{path}, task {index}") for index, row in enumerate(rows)]


def _raw_task(row: dict[str, Any], where: str) -> dict[str, Any]:
    others = _read_object(row.pop(OTHER_FIELDS, None), OTHER_FIELDS, where) or {}
    if not isinstance(others, dict):
        raise TaskFileError(f"{where}: field '{OTHER_FIELDS}' must be JSON text")
    row.pop("env_class", None)
    env_key = row.pop("data_source", None)
    if env_key is not None:
        row["env_key"] = env_key
    for name in OBJECTS:
        row[name] = _read_object(row.get(name), name, where)
    row["prompt"] = _text_of(row.get("prompt"), where)
    return others | {name: value for name, value in row.items() if value is not None}


def _read_object(text: Any, name: str, where: str) -> Any:
    """What a column of JSON text says; what is no text is left to the check of the task."""
    if not isinstance(text, str):
        return text
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TaskFileError(f"{where}: field '{name}' is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise TaskFileError(f"{where}: field '{name}' must be a JSON object")
    return value


def _text_of(prompt: Any, where: str) -> Any:
    """The text of the one message; what is no list of messages is left to the check of the task."""
    if not isinstance(prompt, list):
        return prompt
    match prompt:
        case [{"role": "user", "content": content}]:
            return content
    raise TaskFileError(f"{where}: field 'prompt' must be a text, or one message of the user")
