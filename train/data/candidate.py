"""Tasks as ``fleet-rl validate`` takes them up: as they stand in the file, and what is wrong before anything runs.

Two optional fields tell how a task is solved. ``reference_tool_calls``: the calls, in order, each an object with
``name`` (or ``tool``) and ``arguments`` (or ``params``), or OpenAI's ``{"function": {"name": …, "arguments": "…"}}``.
``reference_answer``: the final answer, a text, empty where the task asks for none.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from actors.config import Section
from actors.envs.fleet import SUBMIT, Verifier, VerifierError, read_verifier
from actors.task import Task, TaskFileError, parse_task
from actors.tool_calls import ToolCall
from train.data.task_file import TaskFile

CALLS = "reference_tool_calls"
ANSWER = "reference_answer"
METADATA = "metadata"
RECORD = "validation"  # under metadata: what a validation found

CheckName = Literal["untouched", "replay", "teacher"]


class Reason(Section):
    """Why a task is not accepted: which check says so, a word for it, and what exactly happened."""

    check: Literal["untouched", "replay", "teacher", "verifier", "modality"]
    kind: str
    detail: str = ""


@dataclass(frozen=True)
class Candidate:
    """A task to be checked.

    Attributes:
        raw: as it stands in the file.
        digest: of its content, what an earlier validation wrote into it aside.
        calls: the recorded calls; ``None`` where none are recorded, or none that can be read.
        answer: the recorded final answer.
        verifier: ``None`` where there is none, or none that can be run.
        calls_fault, verifier_fault: what is wrong with them as they stand.
    """

    raw: dict[str, Any]
    task: Task
    digest: str
    calls: tuple[ToolCall, ...] | None = None
    answer: str | None = None
    verifier: Verifier | None = None
    calls_fault: Reason | None = None
    verifier_fault: Reason | None = None

    @property
    def answer_known(self) -> bool:
        """Whether a verifier that is run after the recorded calls is given all it asks for."""
        submitted = any(call.name == SUBMIT for call in self.calls or ())
        return self.answer is not None or submitted or not (self.verifier and self.verifier.answer)


@dataclass(frozen=True)
class Candidates:
    """The tasks of a file. ``rest``: other fields of the object they stand in; ``None`` where the file is a list."""

    tasks: list[Candidate]
    rest: dict[str, Any] | None
    duplicates: int
    bytes: int = 0
    sha256: str = field(default="", repr=False)

    def wrapped(self, tasks: list[dict[str, Any]]) -> list[dict[str, Any]] | dict[str, Any]:
        """Other tasks in the same form."""
        return tasks if self.rest is None else self.rest | {"tasks": tasks}


def read_candidates(path: Path, max_tasks: int | None = None) -> Candidates:
    """Read a JSON task file. Of two tasks with one key the first is kept.

    Raises:
        MalformedTasks: tasks break the schema; a line for each.
        TaskFileError: the file cannot be used for another reason.
    """
    if path.suffix == ".parquet":
        raise TaskFileError(
            f"task file {path}: give the JSON file; fleet-rl prepare makes a parquet file of the result"
        )
    file = TaskFile(path)
    file.facts()
    content = json.loads(path.read_text(encoding="utf-8"))
    if not len(file):
        raise TaskFileError(f"task file {path}: no task is left to check: the file holds none")
    tasks: dict[str, Candidate] = {}
    found = content["tasks"] if isinstance(content, dict) else content
    for index, raw in enumerate(found):
        candidate = read_candidate(raw, f"task file {path}, task {index}")
        tasks.setdefault(candidate.task.task_key, candidate)
    rest = {key: value for key, value in content.items() if key != "tasks"} if isinstance(content, dict) else None
    return Candidates(list(tasks.values())[:max_tasks], rest, len(found) - len(tasks), file.size, file.sha256())


def read_candidate(raw: Any, where: str) -> Candidate:
    """One raw task. ``where`` is put in front of the error.

    Raises:
        TaskFileError: it is no task.
    """
    task = parse_task(raw, where)
    metadata = raw.get(METADATA)
    if metadata is not None and not isinstance(metadata, dict):
        raise TaskFileError(f"{where} ({task.task_key}): field '{METADATA}': must be an object")
    calls, answer, calls_fault = _recorded(raw)
    verifier, verifier_fault = _verifier(task)
    return Candidate(raw, task, _digest(raw), calls, answer, verifier, calls_fault, verifier_fault)


def with_record(raw: dict[str, Any], record: dict[str, Any]) -> dict[str, Any]:
    """The task with what a validation found under ``metadata.validation``."""
    return raw | {METADATA: (raw.get(METADATA) or {}) | {RECORD: record}}


def _digest(raw: dict[str, Any]) -> str:
    metadata = raw.get(METADATA) or {}
    before = {key: value for key, value in metadata.items() if key != RECORD}
    content = {key: value for key, value in raw.items() if key != METADATA} | ({METADATA: before} if before else {})
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _verifier(task: Task) -> tuple[Verifier | None, Reason | None]:
    if not task.verifier_code:
        return None, Reason(check="verifier", kind="no_verifier", detail="the task has no verifier")
    try:
        return read_verifier(task.verifier_code), None
    except VerifierError as error:
        return None, Reason(check="verifier", kind="verifier_error", detail=str(error))


def _recorded(raw: dict[str, Any]) -> tuple[tuple[ToolCall, ...] | None, str | None, Reason | None]:
    try:
        calls, answer = raw.get(CALLS), raw.get(ANSWER)
        if answer is not None and not isinstance(answer, str):
            raise ValueError(f"{ANSWER} must be a text")
        if calls is not None and not isinstance(calls, list):
            raise ValueError(f"{CALLS} must be a list")
        read = None if calls is None else tuple(_call(call, f"{CALLS}[{n}]") for n, call in enumerate(calls))
    except ValueError as error:
        return None, None, Reason(check="replay", kind="malformed_calls", detail=str(error))
    return read, answer, None


def _call(raw: Any, where: str) -> ToolCall:
    if not isinstance(raw, dict):
        raise ValueError(f"{where} must be an object with name and arguments")
    if isinstance(raw.get("function"), dict):
        raw = raw["function"]
    name = raw.get("name") or raw.get("tool")
    if not isinstance(name, str):
        raise ValueError(f"{where} needs a text 'name'")
    arguments = raw["arguments"] if raw.get("arguments") is not None else raw.get("params")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            raise ValueError(f"{where} ({name}): the text in 'arguments' is not JSON") from None
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError(f"{where} ({name}): 'arguments' must be an object")
    return ToolCall(name, arguments)
