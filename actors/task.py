"""A task: one problem an agent may attempt, in Fleet's task-file format.

Task files are data *and code*: ``verifier_code`` is never executed in a trainer process. It is handed to the
environment's own runner.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

Modality = Literal["tool_use", "computer_use", "browser_use"]


class TaskFileError(ValueError):
    """A task file that cannot be used. The message names the file, the task and the field."""


class Task(BaseModel):
    """One task. Field names and aliases are those of Fleet's task files; unknown fields are kept as given."""

    model_config = ConfigDict(frozen=True, extra="allow")

    task_key: str = Field(min_length=1, validation_alias=AliasChoices("task_key", "key"))
    prompt: str = Field(min_length=1)
    env_key: str = Field(min_length=1, validation_alias=AliasChoices("env_key", "env_id"))
    env_version: str | None = Field(None, validation_alias=AliasChoices("env_version", "version"))
    data_key: str | None = None
    data_version: str | None = None
    env_variables: dict[str, Any] = Field(default_factory=dict)
    verifier_code: str | None = Field(None, validation_alias=AliasChoices("verifier_code", "verifier_func"))
    task_modality: Modality = "tool_use"
    difficulty: int | None = None
    # For tasks of an OpenEnv server; see docs/openenv.md.
    openenv_reset: dict[str, Any] = Field(default_factory=dict)
    openenv_answer_tool: str | None = Field(None, min_length=1)
    openenv_answer_arguments: dict[str, Any] | None = None

    @field_validator(
        "env_version", "data_key", "data_version", "env_variables", "openenv_reset", "openenv_answer_arguments"
    )
    @classmethod
    def _can_be_sent(cls, value: Any) -> Any:
        """Python reads NaN, and halves of surrogate pairs, from JSON files; no control plane can be sent them."""
        try:
            json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise PydanticCustomError("not_json", "cannot be sent as JSON: {why}", {"why": str(error)}) from None
        return value


def parse_task(raw: Any, where: str) -> Task:
    """Check one raw task. ``where`` is put in front of the error, for example ``tasks.json, task 3``."""
    if not isinstance(raw, dict):
        raise TaskFileError(f"{where}: a task must be a JSON object, not {type(raw).__name__}")
    # Fleet's exports write absent fields as null; the defaults must apply to those as well.
    present = {key: value for key, value in raw.items() if value is not None}
    try:
        return Task.model_validate(present)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "task"
        key = raw.get("task_key") or raw.get("key")
        named = f" ({key})" if isinstance(key, str) else ""
        raise TaskFileError(f"{where}{named}: field '{field}': {first['msg'].lower()}") from None


def load_tasks(path: str | Path) -> list[Task]:
    """Read a task file: a JSON list, an object with the list under ``tasks``, or a ``.parquet`` file of
    :mod:`actors.task_table`. Duplicate keys: the first is kept.

    Raises:
        TaskFileError: the file is missing, is not of its format, or holds a malformed task.
    """
    path = Path(path)
    tasks: dict[str, Task] = {}
    for index, item in enumerate(_read_raw(path)):
        task = parse_task(item, f"{path}, task {index}")
        tasks.setdefault(task.task_key, task)
    return list(tasks.values())


def _read_raw(path: Path) -> list[Any]:
    if path.suffix == ".parquet":
        from actors.task_table import read_raw_tasks

        return read_raw_tasks(path)
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TaskFileError(f"task file {path} does not exist") from None
    except (OSError, UnicodeDecodeError) as error:
        raise TaskFileError(f"task file {path} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise TaskFileError(f"task file {path} is not valid JSON: {error}") from None
    if isinstance(raw, dict):
        raw = raw.get("tasks")
    if not isinstance(raw, list):
        raise TaskFileError(f'task file {path}: expected a list of tasks or {{"tasks": [...]}}')
    return raw
