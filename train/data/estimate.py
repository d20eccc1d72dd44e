"""What a validation will take, before it starts: bounds by deadlines and limits, and what earlier attempts took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actors.config import DeadlinesConfig, Section
from train.data.candidate import Candidate
from train.data.journal import Result, Unit
from train.data.teacher import TeacherSettings
from train.data.verdict import Checks, judge


class Prices(Section):
    """Money for a million tokens that the teacher reads, and writes."""

    read: float
    written: float

    def of(self, prompt_tokens: float, completion_tokens: float) -> float:
        return (prompt_tokens * self.read + completion_tokens * self.written) / 1e6


class Tokens(Section):
    """Calls of the endpoint and tokens. ``cost``: ``None`` where no prices are given."""

    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None = None


class Estimate(Section):
    """What is left to do.

    Attributes:
        tasks: in the file; ``open``: of them, with something left to do.
        done: episodes that an earlier run has results of.
        untouched, replay, teacher: episodes left, by check. What fails through no fault of the task's is repeated.
        instances_least: instances made where each can be reset for the next check of its task.
        instance_hours_at_most: all episodes as long as their deadlines allow.
        at_most: endpoint calls and tokens, every attempt as long as its limits allow; the repetition of a call after
            429, 5xx or a broken connection comes on top.
        likely: the same where every attempt takes what those already made took on average; ``None``: none was made.
    """

    tasks: int
    open: int
    done: int
    untouched: int
    replay: int
    teacher: int
    instances_least: int
    instance_hours_at_most: float
    at_most: Tokens
    likely: Tokens | None

    @property
    def episodes(self) -> int:
        return self.untouched + self.replay + self.teacher


def left_to_do(candidate: Candidate, checks: Checks, results: Mapping[Unit, Result]) -> list[Unit]:
    """The units of a task without a deciding result; none of the teacher's where the task is rejected already."""
    units = list(checks.first(candidate))
    if judge(candidate, checks, results).verdict != "rejected":
        units += checks.taught(candidate)
    return [unit for unit in units if unit not in results or not results[unit].decided]


def estimate(
    candidates: Sequence[Candidate],
    checks: Checks,
    results: Mapping[Unit, Result],
    deadlines: DeadlinesConfig,
    prices: Prices | None,
) -> Estimate:
    left = [(candidate, left_to_do(candidate, checks, results)) for candidate in candidates]
    units = [unit for _, mine in left for unit in mine]
    counts = {check: sum(unit.check == check for unit in units) for check in ("untouched", "replay", "teacher")}
    done = [results[unit] for candidate in candidates for unit in checks.units(candidate) if unit in results]
    seconds = sum(_longest(unit, candidate, deadlines) for candidate, mine in left for unit in mine)
    return Estimate(
        tasks=len(candidates),
        open=sum(bool(mine) for _, mine in left),
        done=sum(result.decided for result in done),
        **counts,
        instances_least=sum(bool(mine) for _, mine in left),
        instance_hours_at_most=round(seconds / 3600, 2),
        at_most=_at_most(checks.teacher, counts["teacher"], prices),
        likely=_likely([result for result in done if result.requests], counts["teacher"], prices),
    )


def _longest(unit: Unit, candidate: Candidate, deadlines: DeadlinesConfig) -> float:
    """Seconds for which a unit can hold an instance."""
    if unit.check == "teacher":
        return deadlines.budget
    calls = len(candidate.calls) if unit.check == "replay" else 0
    return deadlines.begin + min(calls * deadlines.step, deadlines.episode) + deadlines.verify + deadlines.close


def _at_most(teacher: TeacherSettings | None, attempts: int, prices: Prices | None) -> Tokens:
    if teacher is None:
        return Tokens(calls=0, prompt_tokens=0, completion_tokens=0, cost=prices and 0.0)
    calls = attempts * teacher.max_turns
    # The last turn's prompt may hold one more observation than the limit; a token is a character at least.
    read = attempts * (teacher.max_turns * teacher.max_input_tokens + teacher.max_output_chars)
    return _tokens(calls, read, calls * teacher.max_tokens, prices)


def _likely(made: Sequence[Result], attempts: int, prices: Prices | None) -> Tokens | None:
    if not made:
        return None
    per_attempt = attempts / len(made)
    calls, read, written = (
        round(per_attempt * sum(getattr(result, name) for result in made))
        for name in ("requests", "prompt_tokens", "completion_tokens")
    )
    return _tokens(calls, read, written, prices)


def _tokens(calls: int, read: int, written: int, prices: Prices | None) -> Tokens:
    cost = None if prices is None else round(prices.of(read, written), 4)
    return Tokens(calls=calls, prompt_tokens=read, completion_tokens=written, cost=cost)
