"""What a validation has found so far: a JSON line for each check of a task, from which an interrupted one goes on."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Literal, NamedTuple

from pydantic import Field, ValidationError

from actors.config import Section
from train.data.candidate import CheckName

JOURNAL = "progress.jsonl"


class JournalError(ValueError):
    """A journal that cannot be used, in one line."""


class Unit(NamedTuple):
    """One thing to be done on one instance. ``of``: digest of the task's content and of what decides the check."""

    of: str
    check: CheckName
    attempt: int = 0


class Result(Section):
    """What one unit came to.

    Attributes:
        outcome: ``graded``: the verifier answered, with ``reward``. ``executed``: calls were replayed and nothing was
            to be graded. ``call_failed``, ``verifier_error``: the task's fault, see ``detail``. ``failed``: ours, the
            network's or the judge's; it decides nothing, and is tried again.
        stop_reason, turns, tool_calls, tool_errors: of the teacher's attempt, or of the replay.
        requests, prompt_tokens, completion_tokens: what the teacher's endpoint was asked for and says it took.
    """

    task_key: str
    of: str
    check: CheckName
    attempt: int = Field(0, ge=0)
    outcome: Literal["graded", "executed", "call_failed", "verifier_error", "failed"]
    reward: float | None = None
    detail: str = ""
    stop_reason: str | None = None
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    seconds: float = 0.0

    @property
    def unit(self) -> Unit:
        return Unit(self.of, self.check, self.attempt)

    @property
    def decided(self) -> bool:
        return self.outcome != "failed"

    @property
    def solved(self) -> bool:
        return self.reward is not None and self.reward > 0


def read_journal(path: Path) -> list[Result]:
    """All results, in order; none where there is no journal. A last line that was cut off is not read.

    Raises:
        JournalError: it cannot be read, or is none.
    """
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from None
    results = []
    for number, line in enumerate(lines, 1):
        try:
            results.append(Result.model_validate_json(line))
        except ValidationError:
            raise JournalError(
                f"{path}, line {number}, is no result of fleet-rl validate: choose another --out, or move the file away"
            ) from None
    return results


def latest(results: Iterable[Result]) -> dict[Unit, Result]:
    """The last result of every unit."""
    return {result.unit: result for result in results}


class Journal:
    """The journal of a folder, open for adding; a context manager. One process at a time has it.

    Attributes:
        every, results: see :func:`read_journal` and :func:`latest`; both grow with what is added.

    Raises:
        JournalError: another process has it, or it cannot be used.
        OSError: it cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / JOURNAL
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.every = read_journal(path)
            self.results = latest(self.every)
            self._cut_off_rest(path)
        except BlockingIOError:
            self._file.close()
            raise JournalError(f"another fleet-rl validate is at work in {folder}") from None
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()

    def add(self, result: Result) -> None:
        """Keep a result. What is added outlives this process, however it ends."""
        self._file.write(json.dumps(result.model_dump(exclude_defaults=True)).encode() + b"\n")
        self._file.flush()
        self.every.append(result)
        self.results[result.unit] = result

    def _cut_off_rest(self, path: Path) -> None:
        """A process that was killed while it wrote leaves part of a line."""
        content = path.read_bytes()
        self._file.truncate(content.rfind(b"\n") + 1)
