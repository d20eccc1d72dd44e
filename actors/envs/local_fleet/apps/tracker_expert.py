"""A scripted expert for the ticket tracker: it knows a problem's solution, plays it against a real tracker, and can be
told to slip. A slip spoils the state or the answer, never the format of a turn.
"""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import replace
from typing import Any

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps.tracker import REMARKS, STATUSES, USERS, Tracker
from actors.envs.local_fleet.apps.tracker_tasks import Call, Problem
from actors.prompt import tool_message
from actors.tool_calls import parse_turn

NOTHING_ASKED = "ok"
_TRACKER = Tracker()
_TOOLS = {tool.name: tool for tool in _TRACKER.tools}
_CHOICES = {"status": STATUSES, "priority": (1, 2, 3, 4, 5), "assignee": USERS, "text": REMARKS}


def open_desk(data_key: str, data_version: str) -> sqlite3.Connection:
    """A desk in memory. The caller closes the connection."""
    connection = sqlite3.connect(":memory:")
    _TRACKER.seed(connection, data_key, data_version)
    return connection


def call_tool(
    connection: sqlite3.Connection, name: str, arguments: dict[str, Any], env_variables: dict[str, Any]
) -> dict[str, Any]:
    """The tool message that a call gives, without any server in between."""
    if name not in _TOOLS:
        return tool_message(None, error=f"unknown tool {name}")
    try:
        return tool_message(_TOOLS[name].call(connection, arguments, env_variables))
    except ToolError as refusal:
        return tool_message(None, error=str(refusal))


def call_text(call: Call) -> str:
    body = json.dumps({"name": call.tool, "arguments": call.arguments}, separators=(",", ":"))
    return f"<tool_call>{body}</tool_call>"


def episode(problem: Problem, slip: random.Random | None = None) -> list[dict[str, Any]]:
    """The messages of one attempt, from the first assistant turn to the last.

    Args:
        slip: makes exactly one mistake, drawn from it; ``None``: none.
    """
    attempt = problem if slip is None else _spoil(problem, slip)
    messages: list[dict[str, Any]] = []
    connection = open_desk(problem.data_key, problem.data_version)
    try:
        for call in attempt.calls:
            messages.append({"role": "assistant", "content": call_text(call)})
            messages.append(call_tool(connection, call.tool, call.arguments, problem.env_variables))
    finally:
        connection.close()
    messages.append({"role": "assistant", "content": f"{attempt.answer or NOTHING_ASKED}<done>"})
    return messages


class Attempt:
    """An attempt at a problem against a tracker in this process, judged without the task's verifier."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self.answer: str | None = None
        self.desk = open_desk(problem.data_key, problem.data_version)

    def turn(self, text: str) -> dict[str, Any] | None:
        """Carry out one assistant turn. Returns the message that answers it, ``None`` at the end of the attempt."""
        turn = parse_turn(text)
        if turn.error is not None:
            return tool_message(None, error=turn.error)
        result = None
        if turn.calls:
            call = turn.calls[0]
            result = call_tool(self.desk, call.name, call.arguments, self.problem.env_variables)
        if turn.done:
            self.answer = turn.answer
            return None
        return result

    def solved(self) -> bool:
        """The desk is as the solution would leave it and the answer is the right one."""
        ideal = open_desk(self.problem.data_key, self.problem.data_version)
        try:
            for call in self.problem.calls:
                call_tool(ideal, call.tool, call.arguments, self.problem.env_variables)
            same = _contents(self.desk) == _contents(ideal)
        finally:
            ideal.close()
        return same and (self.problem.answer is None or self.answer == self.problem.answer)

    def close(self) -> None:
        self.desk.close()


def _contents(connection: sqlite3.Connection) -> list[list[tuple]]:
    tables = {"tickets": "*", "comments": "ticket_id, author, body, created_on", "users": "*"}
    rows = {table: connection.execute(f"SELECT {columns} FROM {table}") for table, columns in tables.items()}
    return [sorted(map(tuple, found), key=repr) for found in rows.values()]


def _spoil(problem: Problem, rng: random.Random) -> Problem:
    """The problem's solution with one mistake that makes it fail."""
    if problem.answer is not None:
        return _spoil_report(problem, rng)
    changes = [index for index, call in enumerate(problem.calls) if call.changes]
    index = rng.choice(changes)
    call = problem.calls[index]
    if rng.random() < 0.4:
        return replace(problem, calls=problem.calls[:index] + problem.calls[index + 1 :])
    spoilt = replace(call, arguments=_spoil_arguments(problem, call, rng))
    return replace(problem, calls=problem.calls[:index] + (spoilt,) + problem.calls[index + 1 :])


def _spoil_report(problem: Problem, rng: random.Random) -> Problem:
    wrong = rng.choice([choice for choice in problem.choices if choice != problem.answer])
    # Without the last look the answer is a guess; that the guess is wrong is what makes it a mistake.
    calls = problem.calls[:-1] if rng.random() < 0.4 else problem.calls
    return replace(problem, calls=calls, answer=wrong)


def _spoil_arguments(problem: Problem, call: Call, rng: random.Random) -> dict[str, Any]:
    name = rng.choice([name for name in call.arguments if name != "title"])
    wanted = call.arguments[name]
    if name == "id":
        # A ticket that the solution touches elsewhere could make two mistakes cancel out.
        touched = {c.arguments.get("id") for c in problem.calls}
        choices = [ticket.id for ticket in problem.desk.tickets if ticket.id not in touched]
    else:
        choices = [value for value in _CHOICES[name] if value != wanted]
    return {**call.arguments, name: rng.choice(choices)}
