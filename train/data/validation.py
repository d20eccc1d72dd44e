"""``fleet-rl validate``: which tasks of a file can be trained on, found out on instances, before any training.

A task goes through its checks one after another, the cheapest first, so that the pool can lend one instance for all of
them; as many tasks at once as are asked for. Every result is kept as soon as it is there.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import tempfile
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from actors.config import DeadlinesConfig, Section
from actors.env_pool_core import CloseReport, EnvPoolCore, PoolSettings
from actors.envs.fleet import FleetControl, close_clients
from train.data.candidate import Candidate, Candidates, read_candidates, with_record
from train.data.estimate import Estimate, Prices, estimate, left_to_do
from train.data.instance_checks import InstanceChecks
from train.data.journal import JOURNAL, Journal, JournalError, latest, read_journal
from train.data.verdict import TAKEN, Checks, Judgement, Verdict, judge
from train.s3 import fetch, is_s3

if TYPE_CHECKING:
    from train.chat.endpoint import ChatEndpoint

TASKS, REPORT = "tasks.json", "report.json"
CLOSE_S = 60.0  # for deleting the instances at the end


@dataclass(frozen=True)
class ValidateOptions:
    """What ``fleet-rl validate`` was asked for.

    Attributes:
        tasks: a local path, or ``s3://BUCKET/KEY``.
        concurrency: tasks at once, and so instances.
        max_tasks: the first so many of the file.
        verify_backoff_s: pauses before further attempts at grading.
    """

    tasks: str
    out: Path
    checks: Checks = field(default_factory=Checks)
    concurrency: int = 8
    max_tasks: int | None = None
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    prices: Prices | None = None
    verify_backoff_s: tuple[float, ...] = (3.0, 6.0, 12.0)

    @property
    def run_name(self) -> str:
        """Of the pool, by which an earlier validation into the same folder is known."""
        return f"validate-{hashlib.sha256(str(self.out.absolute()).encode()).hexdigest()[:8]}"


@dataclass
class Progress:
    """How far a validation is. ``episodes``: of this process; ``failures``: of them, those that decided nothing."""

    total: int
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    episodes: int = 0
    failures: int = 0
    leased: int = 0

    @property
    def tasks(self) -> int:
        return self.verdicts.total()


OnProgress = Callable[[Progress], None]


class InputFile(Section):
    """The task file. ``duplicates``: tasks left out because another before them has the same key."""

    location: str
    tasks: int
    duplicates: int
    bytes: int
    sha256: str


class Tally(Section):
    """Tasks by verdict, and how often each reason was given."""

    total: int
    verdicts: dict[Verdict, int]
    reasons: dict[str, int]
    replays: dict[str, int]
    pass_at_1: float | None
    pass_at_k: float | None


class Spent(Section):
    """What all results took, those included that decided nothing. ``cost``: ``None`` where no prices are given."""

    episodes: int
    episode_hours: float
    calls: int
    prompt_tokens: int
    completion_tokens: int
    cost: float | None


class ValidationReport(Section):
    """``report.json``."""

    format: int = 1
    input: InputFile
    checks: dict
    total: Tally
    per_env: dict[str, Tally]
    spent: Spent
    tasks: list[Judgement]


class Validation:
    """A task file and what is known of its tasks so far.

    Raises:
        TaskFileError, StorageError: the task file cannot be used.
        JournalError: ``options.out`` cannot be gone on from.
    """

    def __init__(self, options: ValidateOptions) -> None:
        self.options = options
        self.found: Candidates = _read(options)
        if options.out.exists() and not options.out.is_dir():
            raise JournalError(f"--out {options.out} is a file: give a folder")
        self._every = read_journal(options.out / JOURNAL)
        self._results = latest(self._every)

    def estimate(self) -> Estimate:
        options = self.options
        return estimate(self.found.tasks, options.checks, self._results, options.deadlines, options.prices)

    async def run(
        self, api_key: str | None, base_url: str | None, teacher: ChatEndpoint | None, on_progress: OnProgress
    ) -> CloseReport:
        """Make the checks that are left. However it ends, instances are given back and results are kept.

        Raises:
            FleetFailure: the control plane cannot be used.
            EndpointRefused, EndpointFailed, EndpointGone: the teacher cannot be had.
            JournalError, OSError: results cannot be kept.
        """
        with Journal(self.options.out) as journal:
            self._every, self._results = journal.every, journal.results
            try:
                if teacher is not None and self.estimate().teacher:
                    await teacher.check()
                return await self._run_on_pool(api_key, base_url, teacher, journal, on_progress)
            finally:
                if teacher is not None:
                    await teacher.close()
                await close_clients()

    async def _run_on_pool(
        self,
        api_key: str | None,
        base_url: str | None,
        teacher: ChatEndpoint | None,
        journal: Journal,
        on_progress: OnProgress,
    ) -> CloseReport:
        options = self.options
        settings = PoolSettings(
            options.run_name, uuid.uuid4().hex[:8], budget_s=options.deadlines.budget, max_idle=options.concurrency
        )
        control = FleetControl(api_key, base_url)
        await control.account()  # a wrong key or address shows at once; the pool would insist
        pool = EnvPoolCore(control, settings)
        await pool.start()
        try:
            checks = InstanceChecks(
                pool,
                api_key,
                base_url,
                deadlines=options.deadlines,
                verify=options.checks.verifier,
                teacher=teacher,
                verify_backoff_s=options.verify_backoff_s,
            )
            work = _Work(self.found.tasks, options.checks, checks, journal, pool, on_progress)
            await work.run(options.concurrency)
        finally:
            report = await pool.close_all(CLOSE_S)
        return report

    def judgements(self) -> list[Judgement]:
        return [judge(candidate, self.options.checks, self._results) for candidate in self.found.tasks]

    def write(self) -> ValidationReport:
        """``tasks.json`` and ``report.json``, by the results there are.

        Raises:
            OSError: they cannot be written; what was there is as it was.
        """
        options, judgements = self.options, self.judgements()
        taken = [
            with_record(candidate.raw, judgement.record())
            for candidate, judgement in zip(self.found.tasks, judgements, strict=True)
            if judgement.verdict in TAKEN
        ]
        report = ValidationReport(
            input=InputFile(
                location=options.tasks,
                tasks=len(self.found.tasks),
                duplicates=self.found.duplicates,
                bytes=self.found.bytes,
                sha256=self.found.sha256,
            ),
            checks=_checks_of(options.checks),
            total=_tally(judgements),
            per_env={
                env_key: _tally([one for one in judgements if one.env_key == env_key])
                for env_key in sorted({one.env_key for one in judgements})
            },
            spent=self._spent(),
            tasks=judgements,
        )
        options.out.mkdir(parents=True, exist_ok=True)
        _write(options.out / TASKS, json.dumps(self.found.wrapped(taken), indent=1))
        _write(options.out / REPORT, json.dumps(report.model_dump(), indent=1))
        return report

    def _spent(self) -> Spent:
        mine = {unit for candidate in self.found.tasks for unit in self.options.checks.units(candidate)}
        results = [result for result in self._every if result.unit in mine]
        read, written = sum(r.prompt_tokens for r in results), sum(r.completion_tokens for r in results)
        prices = self.options.prices
        return Spent(
            episodes=len(results),
            episode_hours=round(sum(r.seconds for r in results) / 3600, 3),
            calls=sum(r.requests for r in results),
            prompt_tokens=read,
            completion_tokens=written,
            cost=None if prices is None else round(prices.of(read, written), 4),
        )


class _Work:
    """Tasks taken from one list by workers, each with its checks in order."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        checks: Checks,
        instances: InstanceChecks,
        journal: Journal,
        pool: EnvPoolCore,
        on_progress: OnProgress,
    ) -> None:
        self._candidates = iter(candidates)
        self._checks = checks
        self._instances = instances
        self._journal = journal
        self._pool = pool
        self._on_progress = on_progress
        self._progress = Progress(len(candidates))

    async def run(self, workers: int) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(workers):
                    group.create_task(self._work())
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _work(self) -> None:
        for candidate in self._candidates:
            await self._check(candidate)
            self._progress.verdicts[judge(candidate, self._checks, self._journal.results).verdict] += 1
            self._report()

    async def _check(self, candidate: Candidate) -> None:
        results = self._journal.results
        for unit in left_to_do(candidate, self._checks, results):
            # Attempts cost money: none is made at a task that is rejected, or that stays open whatever comes of them.
            if unit.check == "teacher" and judge(candidate, self._checks, results).verdict == "rejected":
                return
            result = await self._instances.settle(candidate, unit)
            self._journal.add(result)
            self._progress.episodes += 1
            self._progress.failures += not result.decided
            self._report()
            if not result.decided and unit.check != "teacher":
                return

    def _report(self) -> None:
        self._progress.leased = self._pool.stats()["leased"]
        self._on_progress(self._progress)


def _read(options: ValidateOptions) -> Candidates:
    if not is_s3(options.tasks):
        return read_candidates(Path(options.tasks), options.max_tasks)
    with tempfile.TemporaryDirectory(prefix="fleet-rl-validate-") as scratch:
        return read_candidates(fetch(options.tasks, Path(scratch)), options.max_tasks)


def _checks_of(checks: Checks) -> dict:
    teacher = None if checks.teacher is None else checks.teacher.model_dump()
    return {
        "replay": checks.replay,
        "verifier": checks.verifier,
        "teacher": teacher,
        "attempts": checks.attempts,
        "unsolved": checks.unsolved,
    }


def _tally(judgements: Sequence[Judgement]) -> Tally:
    reasons = Counter(kind for one in judgements for kind in dict.fromkeys(reason.kind for reason in one.reasons))
    taught = [one.teacher for one in judgements if one.teacher is not None]
    return Tally(
        total=len(judgements),
        verdicts=dict(sorted(Counter(one.verdict for one in judgements).items())),
        reasons=dict(sorted(reasons.items())),
        replays=dict(sorted(Counter(one.replay for one in judgements).items())),
        pass_at_1=_mean(one.pass_at_1 for one in taught),
        pass_at_k=_mean(one.pass_at_k for one in taught),
    )


def _mean(numbers: Iterator[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return round(sum(known) / len(known), 4) if known else None


def _write(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, path)
