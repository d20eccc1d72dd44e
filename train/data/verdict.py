"""What the results of a task's checks say of the task."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from actors.config import Section
from train.data.candidate import Candidate, Reason
from train.data.journal import Result, Unit
from train.data.teacher import TeacherSettings
from train.statistics import pass_at_k

Verdict = Literal["accepted", "hard", "rejected", "undecided", "unsupported"]
TAKEN: tuple[Verdict, ...] = ("accepted", "hard")
MODALITY = "tool_use"  # the only one whose instances can be used yet


@dataclass(frozen=True)
class Checks:
    """Which checks are made.

    Attributes:
        replay: of the recorded calls.
        verifier: on an untouched instance, and after the replay.
        teacher: ``None``: no teacher.
        attempts: of the teacher at each task.
        unsolved: what becomes of a task that the teacher never solves.
    """

    replay: bool = True
    verifier: bool = True
    teacher: TeacherSettings | None = None
    attempts: int = 4
    unsolved: Literal["reject", "hard"] = "reject"

    def first(self, candidate: Candidate) -> Iterator[Unit]:
        """What is done before a teacher is asked."""
        if candidate.task.task_modality != MODALITY:
            return
        if self.verifier and candidate.verifier is not None:
            yield Unit(_of(candidate, ""), "untouched")
        if self.replay and candidate.calls is not None:
            yield Unit(_of(candidate, f"verified {self.verifier}"), "replay")

    def taught(self, candidate: Candidate) -> Iterator[Unit]:
        """The teacher's attempts."""
        if self.teacher is None or candidate.task.task_modality != MODALITY or candidate.verifier is None:
            return
        of = _of(candidate, self.teacher.model_dump_json())
        yield from (Unit(of, "teacher", attempt) for attempt in range(self.attempts))

    def units(self, candidate: Candidate) -> list[Unit]:
        """All of it."""
        return [*self.first(candidate), *self.taught(candidate)]


def _of(candidate: Candidate, settings: str) -> str:
    return hashlib.sha256(f"{candidate.digest} {settings}".encode()).hexdigest()[:24]


class Taught(Section):
    """How a teacher did. ``pass_at_k``: of as many attempts as were asked for; ``None`` where fewer were graded."""

    model: str
    attempts: int
    graded: int
    solved: int
    pass_at_1: float | None
    pass_at_k: float | None


class Judgement(Section):
    """What is to become of a task, and why.

    Attributes:
        replay: ``passed`` is said of calls that all executed and, where the verifier is checked, of a verifier that
            then succeeded. ``executed``: the verifier was not run, or failed while it lacks an answer that the task
            does not record.
        untouched, replayed: the verifier's rewards.
    """

    task_key: str
    env_key: str
    verdict: Verdict
    reasons: tuple[Reason, ...] = ()
    replay: Literal["passed", "executed", "failed", "not checked"] = "not checked"
    untouched: float | None = None
    replayed: float | None = None
    teacher: Taught | None = None

    def record(self) -> dict[str, Any]:
        """What is kept with the task itself."""
        return self.model_dump(exclude={"task_key", "env_key", "reasons"}, exclude_none=True)


def judge(candidate: Candidate, checks: Checks, results: Mapping[Unit, Result]) -> Judgement:
    """The verdict on a task, by the results there are of it."""
    first, taught = list(checks.first(candidate)), list(checks.taught(candidate))
    have = {unit: results[unit] for unit in (*first, *taught) if unit in results}
    by_check = {unit.check: result for unit, result in have.items() if unit.check != "teacher"}
    attempts = [result for unit, result in have.items() if unit.check == "teacher" and result.decided]
    untouched, replay = by_check.get("untouched"), by_check.get("replay")
    faults = [*_faults_as_it_stands(candidate, checks), *_faults(candidate, have.values())]
    teacher = _taught(checks, attempts) if taught else None
    verdict, reasons = _verdict(candidate, checks, faults, _open(first, taught, have, teacher), teacher)
    return Judgement(
        task_key=candidate.task.task_key,
        env_key=candidate.task.env_key,
        verdict=verdict,
        reasons=tuple(reasons),
        replay="not checked" if replay is None else _replayed(candidate, replay),
        untouched=None if untouched is None else untouched.reward,
        replayed=None if replay is None else replay.reward,
        teacher=teacher,
    )


def _verdict(
    candidate: Candidate, checks: Checks, faults: list[Reason], still_open: list[Reason], teacher: Taught | None
) -> tuple[Verdict, list[Reason]]:
    modality = candidate.task.task_modality
    if modality != MODALITY:
        return "unsupported", [Reason(check="modality", kind=modality, detail=f"only {MODALITY} can be checked yet")]
    if faults:
        return "rejected", faults
    if still_open:
        return "undecided", still_open
    if teacher is not None and teacher.solved == 0:
        detail = f"solved in none of {teacher.graded} attempts of {teacher.model}"
        never = [Reason(check="teacher", kind="never_solved", detail=detail)]
        return ("hard" if checks.unsolved == "hard" else "rejected"), never
    return "accepted", []


def _faults_as_it_stands(candidate: Candidate, checks: Checks) -> Iterator[Reason]:
    if checks.replay and candidate.calls_fault is not None:
        yield candidate.calls_fault
    if (checks.verifier or checks.teacher) and candidate.verifier_fault is not None:
        yield candidate.verifier_fault


def _faults(candidate: Candidate, results: Sequence[Result]) -> Iterator[Reason]:
    errors: set[str] = set()  # a verifier that raises does so in every attempt
    for result in results:
        if result.outcome == "verifier_error":
            if result.detail not in errors:
                yield Reason(check=result.check, kind="verifier_error", detail=result.detail)
            errors.add(result.detail)
        elif result.outcome == "call_failed":
            yield Reason(check="replay", kind="call_failed", detail=result.detail)
        elif result.check == "untouched" and result.solved:
            detail = f"the verifier gives {result.reward:g} on an untouched instance"
            yield Reason(check="untouched", kind="passes_untouched", detail=detail)
        elif result.check == "replay" and _replayed(candidate, result) == "failed":
            detail = f"the verifier gives {result.reward:g} after the recorded calls"
            yield Reason(check="replay", kind="fails_after_replay", detail=detail)


def _open(first: list[Unit], taught: list[Unit], have: Mapping[Unit, Result], teacher: Taught | None) -> list[Reason]:
    """What keeps a task from a verdict. A teacher that solved it need not have ended every attempt."""
    waited_for = first if teacher is not None and teacher.solved else first + taught
    failed = [have[unit] for unit in waited_for if unit in have and not have[unit].decided]
    reasons = {Reason(check=result.check, kind="failed", detail=result.detail): None for result in failed}
    if not reasons and not all(unit in have for unit in waited_for):
        return [Reason(check=next(u.check for u in waited_for if u not in have), kind="not_done")]
    return list(reasons)


def _replayed(candidate: Candidate, result: Result) -> Literal["passed", "executed", "failed", "not checked"]:
    if result.outcome == "failed":
        return "not checked"
    if result.outcome == "executed" or (
        result.outcome == "graded" and not result.solved and not candidate.answer_known
    ):
        return "executed"
    return "passed" if result.solved else "failed"


def _taught(checks: Checks, attempts: list[Result]) -> Taught:
    graded = [result for result in attempts if result.outcome == "graded"]
    solved = sum(result.solved for result in graded)
    return Taught(
        model=checks.teacher.model,
        attempts=checks.attempts,
        graded=len(graded),
        solved=solved,
        pass_at_1=solved / len(graded) if graded else None,
        pass_at_k=pass_at_k(len(graded), solved, checks.attempts) if len(graded) >= checks.attempts else None,
    )
