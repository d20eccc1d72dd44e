"""A task file as ``fleet-rl prepare`` reads it: every malformed task is found, and named with line and field.

A file of half a gigabyte is read in seconds and costs little more memory than its size: it is cut into tasks without
being decoded, and each task is decoded when it is looked at. Lines are counted only once something is wrong.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from pydantic import ValidationError

from actors.task import Task, TaskFileError
from train.data.split import TaskFacts, unit_hash

LISTED = 20  # malformed tasks that are described; of the others, the number is told
UNKNOWN_ENVIRONMENT = "unknown"  # SkyRL-Fleet's name for the environment of a task that names none

_ALIASES = {"task_key": "key", "env_key": "env_id", "env_version": "version", "verifier_code": "verifier_func"}
_MAY_BE_ABSENT = ("task_key", "prompt")  # for a lenient reader
_ABSENT = "absent"
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_BETWEEN = re.compile(rb"[\s,]*")
_KEY = re.compile(rb'[\s,{]*("(?:[^"\\]|\\.)*")\s*:\s*', re.DOTALL)


class _Wrapped(msgspec.Struct):
    tasks: list[msgspec.Raw]


class MalformedTasks(TaskFileError):
    """Tasks that break the schema: one line for each of the first, and how many there are."""

    def __init__(self, path: Path, count: int, total: int, lines: list[str]) -> None:
        super().__init__(f"{path}: {count} of {total} tasks are malformed")
        self.lines = lines
        self.cut = count > len(lines)


class TaskFile:
    """A JSON task file: a list of tasks, or an object with the list under ``tasks``.

    Args:
        path: a local file.
        lenient: take tasks without key, prompt or environment, as SkyRL-Fleet does; and where a task has both names of
            its key, let ``key`` win.

    Raises:
        TaskFileError: the file cannot be read or is not such JSON.
    """

    def __init__(self, path: Path, lenient: bool = False) -> None:
        self.path = path
        self._lenient = lenient
        try:
            self._data = path.read_bytes()
        except FileNotFoundError:
            raise TaskFileError(f"task file {path} does not exist") from None
        except OSError as error:
            raise TaskFileError(f"task file {path} cannot be read: {error.strerror}") from None
        self._raw = self._cut()
        self._decode = msgspec.json.Decoder().decode

    def __len__(self) -> int:
        return len(self._raw)

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self._data)

    def sha256(self) -> str:
        return hashlib.sha256(self._data).hexdigest()

    def facts(self) -> list[TaskFacts]:
        """Check every task and return what a split needs to know of it.

        Raises:
            MalformedTasks: all that are wrong with the tasks.
        """
        facts: list[TaskFacts] = []
        malformed: dict[int, list[tuple[str, str]]] = {}  # by position: field and what is wrong with it
        for index, raw in enumerate(self._raw):
            try:
                facts.append(self._facts(index, self._decode(raw)))
            except _Malformed as error:
                malformed[index] = error.problems
            except _UNREADABLE as error:
                malformed[index] = [("", f"not valid JSON: {_json_problem(error)[0]}")]
        if malformed:
            lines = list(self._describe(malformed))
            raise MalformedTasks(self.path, len(malformed), len(self), lines)
        return facts

    def tasks(self, indices: Iterable[int]) -> Iterator[Task]:
        """The tasks at these positions, which :meth:`facts` found to be well-formed, one after another."""
        for index in indices:
            yield Task.model_validate(self._present(self._decode(self._raw[index])))

    def _cut(self) -> list[msgspec.Raw]:
        try:
            found = msgspec.json.decode(self._data, type=list[msgspec.Raw] | _Wrapped)
        except msgspec.ValidationError:
            raise TaskFileError(f'task file {self.path}: expected a list of tasks, or {{"tasks": [...]}}') from None
        except _UNREADABLE as error:
            raise TaskFileError(self._where_broken(error)) from None
        return found.tasks if isinstance(found, _Wrapped) else found

    def _where_broken(self, error: Exception) -> str:
        problem, offset = _json_problem(error)
        line = self._line(len(self._data) if offset is None else offset)
        return f"task file {self.path}, line {line}: not valid JSON: {problem}"

    def _facts(self, index: int, raw: Any) -> TaskFacts:
        if not isinstance(raw, dict):
            raise _Malformed([("", f"a task must be a JSON object, not {_json_type(raw)}")])
        present = self._present(raw)
        task = self._checked(present)
        key = present.get("task_key") or ""
        return TaskFacts(
            index=index,
            task_key=key,
            env_key=task.env_key,
            task_modality=present.get("task_modality"),
            difficulty=task.difficulty,
            env_key_named=bool(raw.get("env_key")),
            has_prompt=bool(present.get("prompt")),
            hash=unit_hash(key),
        )

    def _present(self, raw: dict[str, Any]) -> dict[str, Any]:
        """The task without absent fields, which Fleet's exports write as null, and under the names that count."""
        present = {key: value for key, value in raw.items() if value is not None}
        for name, alias in _ALIASES.items():
            if alias in present and (not present.get(name) or (self._lenient and alias == "key" and present[alias])):
                present[name] = present.pop(alias)
        if self._lenient and not present.get("env_key"):
            present["env_key"] = UNKNOWN_ENVIRONMENT
        return present

    def _checked(self, present: dict[str, Any]) -> Task:
        """The task; with ``_ABSENT`` for what a lenient reader lets be absent."""
        if self._lenient:
            absent = (name for name in _MAY_BE_ABSENT if present.get(name) in (None, ""))
            present = present | dict.fromkeys(absent, _ABSENT)
        try:
            task = Task.model_validate(present)
        except ValidationError as error:
            raise _Malformed([(_field(found["loc"]), found["msg"].lower()) for found in error.errors()]) from None
        if task.difficulty is not None and not -(2**63) <= task.difficulty < 2**63:
            raise _Malformed([("difficulty", "input should be a 64-bit integer")])
        return task

    # -- where something stands in the file

    def _describe(self, malformed: dict[int, list[tuple[str, str]]]) -> Iterator[str]:
        for index, offset in self._offsets(list(malformed)[:LISTED]).items():
            task, line = self._object(index), self._line(offset)
            fields = self._fields(self._raw[index], offset) if task else {}
            lines = {name: self._line(place, line, offset) for name, (place, _) in fields.items()}
            problems = [_problem(name, what, lines) for name, what in malformed[index]]
            key = next((task[name] for name in ("task_key", "key") if isinstance(task.get(name), str)), None)
            where = f"{self.path}, line {line}, task {index}" + (f" ({_plain(key)})" if key else "")
            yield _plain(f"{where}: {'; '.join(problems)}", limit=1000)

    def _offsets(self, indices: list[int]) -> dict[int, int]:
        """Where these tasks begin, in bytes; ascending positions."""
        offsets: dict[int, int] = {}
        end = self._start_of_list() + 1
        for index, raw in enumerate(self._raw[: indices[-1] + 1]):
            start = _BETWEEN.match(self._data, end).end()
            end = start + len(memoryview(raw))
            if index in indices:
                offsets[index] = start
        return offsets

    def _start_of_list(self) -> int:
        start = _BETWEEN.match(self._data).end()
        if self._data.startswith(b"[", start):
            return start
        try:
            return self._fields(self._data, start)["tasks"][1]
        except KeyError:  # a name before it stands there twice: the first that looks like it
            return self._data.find(b"[", self._data.find(b'"tasks"'))

    def _fields(self, raw: bytes | msgspec.Raw, offset: int) -> dict[str, tuple[int, int]]:
        """Where names and values of the object at ``offset`` stand; up to a name that stands there twice."""
        places: dict[str, tuple[int, int]] = {}
        for name, value in msgspec.json.decode(raw, type=dict[str, msgspec.Raw]).items():
            match = _KEY.match(self._data, offset)
            if match is None or self._decode(match[1]) != name:
                break
            places[name] = match.start(1), match.end()
            offset = match.end() + len(memoryview(value))
        return places

    def _line(self, offset: int, line: int = 1, since: int = 0) -> int:
        """The line of ``offset``, counted on from a place in ``line``."""
        return line + self._data.count(b"\n", since, offset)

    def _object(self, index: int) -> dict[str, Any]:
        """The task, or nothing where it cannot be read or is no object."""
        try:
            raw = self._decode(self._raw[index])
        except _UNREADABLE:
            return {}
        return raw if isinstance(raw, dict) else {}


class _Malformed(Exception):
    def __init__(self, problems: list[tuple[str, str]]) -> None:
        super().__init__()
        self.problems = problems


def _json_problem(error: Exception) -> tuple[str, int | None]:
    """What the decoder met, and after how many bytes if it says so."""
    place = re.search(r" ?\(byte (\d+)\)", str(error))
    problem = str(error).removeprefix("JSON is malformed: ")
    return (problem.replace(place[0], ""), int(place[1])) if place else (_plain(problem), None)


def _problem(name: str, what: str, lines: dict[str, int]) -> str:
    """``lines``: where the task's fields stand, by the names they have there."""
    if not name:
        return what
    top = name.split(".")[0]
    line = lines.get(top) or lines.get(_ALIASES.get(top, ""))
    return f"field '{name}'" + (f" (line {line})" if line else "") + f": {what}"


def _field(location: tuple[Any, ...]) -> str:
    return ".".join(str(part) for part in location) or "task"


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a text", bool: "a truth value", int: "a number", float: "a number"}
    return "null" if value is None else names[type(value)]


def _plain(text: object, limit: int = 300) -> str:
    """In one line, without what a terminal would obey."""
    shown = "".join(character if character.isprintable() else " " for character in str(text))
    shown = " ".join(shown.split())
    return shown if len(shown) <= limit else f"{shown[:limit]}..."
