"""What the task generators of booking, mail and office share: problems, their verifiers, and an expert for them.

The solution is played on a fresh database; the rows that it changes and adds are what the verifier asks for, and any
other difference from the seed is a failure. A verifier prints what was right and wrong in SUCCESS_ACCUMULATOR and
ERROR_ACCUMULATOR blocks, and, where a task spans several applications, one line ``App NAME: 1`` or ``0`` for each.
"""

from __future__ import annotations

import argparse
import json
import random
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from actors.envs.local_fleet.application import Application, ToolError

READING = (
    "list_spaces", "search_availability", "list_bookings", "get_booking",
    "search_mail", "read_mail", "read_thread", "find_contact",
)  # fmt: skip
# Reading a mail changes this column, and nobody is asked to leave it alone.
IGNORED_COLUMNS = ("unread",)
MAX_DRAWS = 10_000


@dataclass(frozen=True)
class Call:
    """One tool call of the solution. ``mentions``: for a text that the agent words itself, what must stand in it."""

    tool: str
    arguments: dict[str, Any]
    mentions: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        return self.tool not in READING


@dataclass(frozen=True)
class Draft:
    """What a kind of task needs to write a problem: a seeded database, and who asks on which day."""

    rng: random.Random
    database: sqlite3.Connection
    me: str
    today: str
    data_key: str

    def rows(self, query: str, *values: Any) -> list[tuple]:
        return self.database.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> tuple | None:
        """One of the rows found, or ``None``."""
        found = self.rows(query, *values)
        return self.rng.choice(found) if found else None


@dataclass(frozen=True)
class Solution:
    """``answer``: ``None`` where the task asks for nothing back. ``choices``: all answers of its kind."""

    prompt: str
    calls: list[Call]
    answer: str | None = None
    choices: tuple[str, ...] = ()


Kind = Callable[[Draft], Solution | None]  # None: this database cannot carry such a task


@dataclass(frozen=True)
class Problem:
    """A task together with what its maker knows: the calls that solve it and the answer that is right."""

    application: Application
    tables: Mapping[str, tuple[str, ...]]  # part of the application, to its tables
    kind: str
    solution: Solution
    data_key: str
    data_version: str
    env_variables: dict[str, str]

    def task(self, task_key: str) -> dict[str, Any]:
        """The task as Fleet's task files hold it, with ``kind`` as an extra field, and its recorded solution."""
        return {
            "task_key": task_key,
            "prompt": self.solution.prompt,
            "env_key": self.application.env_key,
            "env_version": self.application.versions[-1],
            "data_key": self.data_key,
            "data_version": self.data_version,
            "env_variables": self.env_variables,
            "verifier_code": verifier_code(self),
            "task_modality": "tool_use",
            "difficulty": len(self.solution.calls),
            "kind": self.kind,
            **recorded(self.solution.calls, self.solution.answer),
        }


@dataclass(frozen=True)
class Family:
    """All tasks of one application. ``data_keys``: of the splits. ``people``: query for the users who may ask, as one
    column; ``days``: the dates on which they may, for ``(data_key, data_version)``."""

    application: Application
    tables: Mapping[str, tuple[str, ...]]
    kinds: Mapping[str, Kind]
    data_keys: Mapping[str, str]
    people: str
    days: Callable[[str, str], list[str]]

    def draw(self, rng: random.Random, data_key: str, kind: str | None = None) -> Problem:
        """One problem on a fresh database. ``rng`` decides everything, the kind included unless it is given.

        Raises:
            RuntimeError: no database could carry such a task.
        """
        kind = kind or rng.choice(list(self.kinds))
        for _ in range(MAX_DRAWS):
            data_version = f"s{rng.randrange(10**6)}"
            with closing(open_database(self.application, data_key, data_version)) as database:
                me = rng.choice(database.execute(self.people).fetchall())[0]
                today = rng.choice(self.days(data_key, data_version))
                solution = self.kinds[kind](Draft(rng, database, me, today, data_key))
            if solution is not None:
                variables = {"CURRENT_DATE": today, "LOGGED_IN_USER": me, "LOGGED_IN_NAME": me.title()}
                return Problem(self.application, self.tables, kind, solution, data_key, data_version, variables)
        raise RuntimeError(f"no {kind} task in {MAX_DRAWS} draws from {data_key}")

    def problems(self, split: str, count: int, seed: int) -> list[tuple[str, Problem]]:
        """``count`` problems of a split with their task keys: all kinds in turn, no two alike."""
        name = self.application.env_key
        rng = random.Random(f"{name}-tasks/{split}/{seed}")
        kinds = list(self.kinds)
        found: dict[tuple[str, str], Problem] = {}
        while len(found) < count:
            problem = self.draw(rng, self.data_keys[split], kinds[len(found) % len(kinds)])
            found.setdefault((problem.solution.prompt, problem.data_version), problem)
        return [(f"{name}_{split}_{index:04d}_{p.kind}", p) for index, p in enumerate(found.values())]

    def main(self, argv: list[str] | None, description: str | None) -> None:
        """The command line of a generator; see :func:`write_task_files`."""
        write_task_files(self.application.env_key, self.problems, argv, description, train=64, heldout=32)


class IsCall(Protocol):
    """A call of any application's solution."""

    tool: str
    arguments: dict[str, Any]


def recorded(calls: Sequence[IsCall], answer: str | None) -> dict[str, Any]:
    """The fields of a task file that tell how the task is solved, as ``fleet-rl validate`` reads them: no answer is an
    empty one, so that it is known that none is asked for."""
    return {
        "reference_tool_calls": [{"name": call.tool, "arguments": call.arguments} for call in calls],
        "reference_answer": answer or "",
    }


class HasTask(Protocol):
    """A problem of any application."""

    def task(self, task_key: str) -> dict[str, Any]: ...


def write_task_files(
    env_key: str,
    problems: Callable[[str, int, int], Sequence[tuple[str, HasTask]]],
    argv: list[str] | None,
    description: str | None,
    *,
    train: int,
    heldout: int,
) -> None:
    """The command line of a generator: write one task file for each split.

    Args:
        problems: of (split, count, seed), each with its task key.
        train, heldout: how many tasks, unless ``argv`` says otherwise.
    """
    program = f"python -m actors.envs.local_fleet.apps.{env_key}_tasks"
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--train", type=int, default=train, help="training tasks (default %(default)s)")
    parser.add_argument("--heldout", type=int, default=heldout, help="held-out tasks (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out-dir", type=Path, default=Path("configs/tasks"))
    options = parser.parse_args(argv)
    options.out_dir.mkdir(parents=True, exist_ok=True)
    for split, count in (("train", options.train), ("heldout", options.heldout)):
        path = options.out_dir / f"{env_key}_{split}.json"
        tasks = [problem.task(key) for key, problem in problems(split, count, options.seed)]
        path.write_text(json.dumps(tasks, indent=1) + "\n", encoding="utf-8")
        print(f"{path}: {count} tasks")


# ---------------------------------------------------------------------------------------------------- the expert


def open_database(application: Application, data_key: str, data_version: str) -> sqlite3.Connection:
    """A seeded database in memory. The caller closes the connection."""
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA foreign_keys = ON")
    application.seed(connection, data_key, data_version)
    return connection


def play(problem: Problem, database: sqlite3.Connection, strict: bool = True) -> str | None:
    """Carry out the solution. Returns the answer.

    Args:
        strict: ``False``: a refused call is passed over, as an agent with a mistake in its plan would.

    Raises:
        ToolError: a call was refused, and ``strict``.
    """
    tools = {tool.name: tool for tool in problem.application.tools}
    for call in problem.solution.calls:
        try:
            tools[call.tool].call(database, call.arguments, problem.env_variables)
        except ToolError:
            if strict:
                raise
    return problem.solution.answer


def slips(problem: Problem) -> list[Problem]:
    """The solution with one mistake: each change left out or spoilt, and the answer wrong or missing."""
    solution, spoilt = problem.solution, []
    for index, call in enumerate(solution.calls):
        if not call.changes:
            continue
        others = solution.calls[:index], solution.calls[index + 1 :]
        spoilt.append([*others[0], *others[1]])
        spoilt += [[*others[0], replace(call, arguments=a), *others[1]] for a in _wrong_arguments(call.arguments)]
    attempts = [replace(solution, calls=calls) for calls in spoilt]
    if solution.answer is not None:
        wrong = [choice for choice in solution.choices if choice != solution.answer]
        attempts += [replace(solution, answer=answer) for answer in (wrong[0], "", ", ".join(solution.choices))]
    return [replace(problem, solution=attempt) for attempt in attempts]


def _wrong_arguments(arguments: dict[str, Any]) -> list[dict[str, Any]]:
    wrong = [{**arguments, name: "something else"} for name in ("title", "subject", "text") if name in arguments]
    if "start" in arguments:
        early = max(arguments["start"] - 1, 8)
        wrong.append({**arguments, "start": early if early < arguments["start"] else arguments["end"] - 2})
    if "id" in arguments:
        wrong.append({**arguments, "id": arguments["id"][0] + "999"})
    return wrong


# ------------------------------------------------------------------------------------------------- the verifier

_VERIFIER = '''\
def verify(env, final_answer=None):
    """{title}"""
    seed, current = env.db("seed"), env.db("current")
    parts = {parts!r}
    changed = {changed!r}
    added = {added!r}
    failed = False
    for part, tables in parts.items():
        right, wrong = [], []
        for table in tables:
            def rows(database):
                every = database.table(table).all()
                return {{r["id"]: {{k: v for k, v in r.items() if k not in {ignored!r}}} for r in every}}

            before, now = rows(seed), rows(current)
            for key, columns in changed.get(table, {{}}).items():
                before[key].update(columns)
                (right if now.get(key) == before[key] else wrong).append(table + " " + key + ": " + str(columns))
                now.pop(key, None)
                before.pop(key)
            new = [now.pop(key) for key in sorted(now) if key not in before]
            for columns, mentions in added.get(table, []):
                fitting = [
                    row
                    for row in new
                    if all(row[k] == v for k, v in columns.items())
                    and all(m.lower() in str(row.get("body")).lower() for m in mentions)
                ]
                (right if fitting else wrong).append("new in " + table + ": " + str(columns))
                if fitting:
                    new.remove(fitting[0])
            if new or now != before:
                wrong.append("unexpected changes in " + table)
{answer}\
{report}\
        failed = failed or bool(wrong)
    return 0.0 if failed else 1.0
'''
# Whoever lists every possible answer must not pass: of all words that could be an answer, only the right one may stand.
_ANSWER = """\
        if part == {part!r}:
            words = "".join(c if c.isalnum() else " " for c in str(final_answer or "").lower()).split()
            good = {{word for word in words if {candidate}}} == {{{answer!r}}}
            (right if good else wrong).append("the answer")
"""
_REPORT = """\
        print(">>> SUCCESS_ACCUMULATOR >>>\\n%r\\n<<< SUCCESS_ACCUMULATOR <<<" % (right,))
        print(">>> ERROR_ACCUMULATOR >>>\\n%r\\n<<< ERROR_ACCUMULATOR <<<" % (wrong,))
"""
# A part in which nothing was to be done passes by being left alone, and says so: no merit of the agent's.
_REPORT_PARTS = """\
        if not any(line.startswith("unexpected") for line in wrong):
            right.append("no unexpected changes")
""" + _REPORT + """\
        print("App %s: %d" % (part, 0 if wrong else 1))
"""  # fmt: skip


def verifier_code(problem: Problem) -> str:
    """Source of a Fleet verifier: the wanted changes happened, nothing else did, and the answer is the right one."""
    changed, added = _wanted(problem)
    solution, answer = problem.solution, ""
    if solution.answer is not None:
        choices = sorted(choice.lower() for choice in solution.choices)
        candidate = "word.isdigit()" if solution.answer.isdigit() else f"word in {choices!r}"
        part = next(iter(problem.tables))
        answer = _ANSWER.format(part=part, candidate=candidate, answer=solution.answer.lower())
    return _VERIFIER.format(
        title=solution.prompt.replace("\\", "").replace('"', "'"),
        parts={part: list(tables) for part, tables in problem.tables.items()},
        changed=changed,
        added=added,
        ignored=IGNORED_COLUMNS,
        answer=answer,
        report=_REPORT_PARTS if len(problem.tables) > 1 else _REPORT,
    )


def _wanted(problem: Problem) -> tuple[dict[str, dict], dict[str, list]]:
    """The columns that the solution changes, by table and id, and the rows that it adds, by table."""
    with closing(open_database(problem.application, problem.data_key, problem.data_version)) as database:
        before = {table: _rows(database, table) for tables in problem.tables.values() for table in tables}
        play(problem, database)
        after = {table: _rows(database, table) for table in before}
    mentions = {c.arguments["text"]: c.mentions for c in problem.solution.calls if c.mentions}
    threads = {row["thread"] for row in before.get("messages", {}).values()}
    changed: dict[str, dict] = {}
    added: dict[str, list] = {}
    for table, rows in after.items():
        for key, row in rows.items():
            if key not in before[table]:
                added.setdefault(table, []).append(_new_row(row, mentions, threads))
            elif row != before[table][key]:
                columns = {name: value for name, value in row.items() if value != before[table][key][name]}
                changed.setdefault(table, {})[key] = columns
    return changed, added


def _new_row(
    row: dict[str, Any], mentions: Mapping[str, tuple[str, ...]], threads: set[str]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The columns asked for, and what its text must mention. Ids of new rows and threads depend on the order of the
    calls, which is free, as is the wording of a text that must only mention something."""
    words = mentions.get(row.get("body"), ())
    free = {"id", "body" if words else "", "thread" if row.get("thread") not in threads else ""}
    return {name: value for name, value in row.items() if name not in free}, words


def _rows(database: sqlite3.Connection, table: str) -> dict[Any, dict[str, Any]]:
    cursor = database.execute(f"SELECT * FROM {table} ORDER BY rowid")
    names = [column[0] for column in cursor.description]
    rows = [dict(zip(names, row, strict=True)) for row in cursor]
    return {row["id"]: {k: v for k, v in row.items() if k not in IGNORED_COLUMNS} for row in rows}
