"""A ticket tracker: a help desk with tickets, comments and users, and the tools to work it.

A desk is drawn from ``(data_key, data_version)`` alone. The desks ``desk`` and ``annex`` never share a ticket title, so
that what was learnt on one can be tested on the other.
"""

from __future__ import annotations

import random
import sqlite3
from dataclasses import dataclass
from typing import Any

from actors.envs.local_fleet.application import Tool, ToolError

STATUSES = ("open", "pending", "closed")
USERS = ("ana", "ben", "cleo", "dan", "eva", "hana", "ivo", "mia")
QUALITIES = (
    "noisy", "slow", "broken", "lost", "new", "old", "frozen", "missing",
    "loose", "wrong", "blank", "locked", "empty", "late", "faulty", "hot",
)  # fmt: skip
THINGS = (
    "printer", "laptop", "badge", "router", "screen", "invoice", "backup", "keyboard",
    "phone", "server", "email", "report", "cable", "login", "scanner", "desk",
)  # fmt: skip
REMARKS = (
    "called back", "parts ordered", "reply sent", "needs review", "on hold", "fixed today",
    "ask again", "not urgent", "waiting long", "see manual", "check twice", "good progress",
)  # fmt: skip

FIRST_ID, LAST_ID = 10, 32
TICKETS_PER_DESK = 10
ASSIGNEES_PER_DESK = 4
MAX_COMMENTS_PER_TICKET = 2
MAX_ROWS = 20
NOBODY = "agent"  # the author where the instance has no LOGGED_IN_USER

SCHEMA = """
CREATE TABLE users (id TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE tickets (
    id TEXT PRIMARY KEY,
    title TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('open', 'pending', 'closed')),
    priority INTEGER NOT NULL CHECK (priority BETWEEN 1 AND 5),
    assignee TEXT REFERENCES users (id)
);
CREATE TABLE comments (
    id INTEGER PRIMARY KEY,
    ticket_id TEXT NOT NULL REFERENCES tickets (id),
    author TEXT NOT NULL,
    body TEXT NOT NULL,
    created_on TEXT
);
"""


@dataclass(frozen=True)
class Ticket:
    id: str
    title: str
    status: str
    priority: int
    assignee: str


@dataclass(frozen=True)
class Comment:
    ticket_id: str
    author: str
    body: str


@dataclass(frozen=True)
class Desk:
    """The rows a desk starts with."""

    tickets: tuple[Ticket, ...]
    comments: tuple[Comment, ...]  # oldest first


def titles(data_key: str | None) -> list[str]:
    """The titles a desk draws from. A fifth of all pairs of words belongs to ``annex``, the rest to all others."""
    annex = data_key == "annex"
    return [
        f"{quality} {thing}"
        for i, quality in enumerate(QUALITIES)
        for j, thing in enumerate(THINGS)
        if ((3 * i + j) % 5 == 0) == annex
    ]


def draw_desk(data_key: str | None, data_version: str | None) -> Desk:
    """The desk of these keys: the same on any day and machine."""
    rng = random.Random(f"tracker/{data_key}/{data_version}")
    numbers = sorted(rng.sample(range(FIRST_ID, LAST_ID + 1), TICKETS_PER_DESK))
    names = rng.sample(titles(data_key), TICKETS_PER_DESK)
    staff = rng.sample(USERS, ASSIGNEES_PER_DESK)
    tickets = tuple(
        Ticket(f"T{number}", title, rng.choice(STATUSES), rng.randint(1, 5), rng.choice(staff))
        for number, title in zip(numbers, names, strict=True)
    )
    comments = tuple(
        Comment(ticket.id, rng.choice(USERS), rng.choice(REMARKS))
        for ticket in tickets
        for _ in range(rng.randint(0, MAX_COMMENTS_PER_TICKET))
    )
    return Desk(tickets, comments)


class Tracker:
    """The application. See :class:`actors.envs.local_fleet.application.Application`."""

    env_key = "tracker"
    name = "Ticket tracker"
    description = "A help desk: find, change and report on tickets."
    versions = ("v1.0.0",)

    def __init__(self) -> None:
        self.tools: tuple[Tool, ...] = _TOOLS

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        desk = draw_desk(data_key, data_version)
        connection.executescript(SCHEMA)
        connection.executemany("INSERT INTO users VALUES (?, ?)", [(user, user.title()) for user in USERS])
        connection.executemany(
            "INSERT INTO tickets VALUES (?, ?, ?, ?, ?)",
            [(t.id, t.title, t.status, t.priority, t.assignee) for t in desk.tickets],
        )
        connection.executemany(
            "INSERT INTO comments (ticket_id, author, body) VALUES (?, ?, ?)",
            [(c.ticket_id, c.author, c.body) for c in desk.comments],
        )
        connection.commit()


# ------------------------------------------------------------------------------------------------- arguments

_ID = {"type": "string", "description": "ticket id, for example T12"}
_STATUS = {"type": "string", "enum": list(STATUSES)}
_PRIORITY = {"type": "integer", "minimum": 1, "maximum": 5, "description": "1 to 5, 5 is the most urgent"}
_USER = {"type": "string", "description": "user id"}
_TEXT = {"type": "string", "minLength": 1}


def _schema(required: dict[str, dict], optional: dict[str, dict] | None = None) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def check_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse arguments that the tool's own schema does not allow.

    Raises:
        ToolError: in words the agent can act on.
    """
    properties = schema["properties"]
    for name in arguments:
        if name not in properties:
            raise ToolError(f"unknown argument {name}, expected {', '.join(properties) or 'none'}")
    for name in schema["required"]:
        if name not in arguments:
            raise ToolError(f"missing argument {name}")
    for name, value in arguments.items():
        _check_value(name, value, properties[name])


def _check_value(name: str, value: Any, schema: dict[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} must be one of {', '.join(schema['enum'])}")
    if schema["type"] == "string":
        if not isinstance(value, str):
            raise ToolError(f"{name} must be a string")
        if len(value.strip()) < schema.get("minLength", 0):
            raise ToolError(f"{name} must not be empty")
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolError(f"{name} must be an integer")
    if not schema["minimum"] <= value <= schema["maximum"]:
        raise ToolError(f"{name} must be from {schema['minimum']} to {schema['maximum']}")


# ----------------------------------------------------------------------------------------------------- tools

_COLUMNS = "id, title, status, priority, assignee"


def _ticket(connection: sqlite3.Connection, ticket_id: str) -> tuple:
    row = connection.execute(f"SELECT {_COLUMNS} FROM tickets WHERE id = ?", (ticket_id,)).fetchone()
    if row is None:
        raise ToolError(f"no ticket {ticket_id}")
    return tuple(row)


def _require_user(connection: sqlite3.Connection, user: str) -> None:
    if connection.execute("SELECT 1 FROM users WHERE id = ?", (user,)).fetchone() is None:
        raise ToolError(f"no user {user}")


def _search_tickets(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    clauses, values = ["1 = 1"], []
    if "query" in arguments:
        # instr, not LIKE: a % in the query must mean a percent sign.
        clauses.append("instr(lower(title), lower(?)) > 0")
        values.append(arguments["query"])
    for name in ("status", "assignee"):
        if name in arguments:
            clauses.append(f"{name} = ?")
            values.append(arguments[name])
    if "assignee" in arguments:
        _require_user(connection, arguments["assignee"])
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM tickets WHERE {' AND '.join(clauses)} ORDER BY priority DESC, id", values
    ).fetchall()
    return {"n": len(rows), "tickets": [list(row) for row in rows[:MAX_ROWS]]}


def _get_ticket(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    ticket = _ticket(connection, arguments["id"])
    comments = connection.execute(
        "SELECT author, body FROM comments WHERE ticket_id = ? ORDER BY id DESC", (arguments["id"],)
    ).fetchall()
    return {"ticket": list(ticket), "comments": [list(row) for row in comments]}


def _set_field(field: str) -> Any:
    def call(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
        _ticket(connection, arguments["id"])
        if field == "assignee":
            _require_user(connection, arguments["assignee"])
        connection.execute(f"UPDATE tickets SET {field} = ? WHERE id = ?", (arguments[field], arguments["id"]))
        return {"ok": True}

    return call


def _add_comment(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _ticket(connection, arguments["id"])
    connection.execute(
        "INSERT INTO comments (ticket_id, author, body, created_on) VALUES (?, ?, ?, ?)",
        (
            arguments["id"],
            env_variables.get("LOGGED_IN_USER") or NOBODY,
            arguments["text"],
            env_variables.get("CURRENT_DATE"),
        ),
    )
    return {"ok": True}


def _create_ticket(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _require_user(connection, arguments["assignee"])
    last = connection.execute("SELECT max(CAST(substr(id, 2) AS INTEGER)) FROM tickets").fetchone()[0]
    ticket_id = f"T{max(last or 0, FIRST_ID - 1) + 1}"
    connection.execute(
        "INSERT INTO tickets VALUES (?, ?, 'open', ?, ?)",
        (ticket_id, arguments["title"], arguments["priority"], arguments["assignee"]),
    )
    return {"id": ticket_id}


def _list_users(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    return {"users": [list(row) for row in connection.execute("SELECT id, name FROM users ORDER BY id")]}


def _tool(name: str, description: str, schema: dict[str, Any], body: Any) -> Tool:
    def call(connection: sqlite3.Connection, arguments: dict[str, Any], env_variables: dict[str, Any]) -> Any:
        check_arguments(schema, arguments)
        return body(connection, arguments, env_variables or {})

    return Tool(name, description, schema, call)


_TOOLS = (
    _tool(
        "search_tickets",
        "rows of id, title, status, priority, assignee, most urgent first",
        _schema({}, {"query": _TEXT, "status": _STATUS, "assignee": _USER}),
        _search_tickets,
    ),
    _tool("get_ticket", "one ticket and its comments, newest first", _schema({"id": _ID}), _get_ticket),
    _tool("set_status", "open, pending or closed", _schema({"id": _ID, "status": _STATUS}), _set_field("status")),
    _tool("set_priority", "1 to 5", _schema({"id": _ID, "priority": _PRIORITY}), _set_field("priority")),
    _tool("assign_ticket", "give it to a user", _schema({"id": _ID, "assignee": _USER}), _set_field("assignee")),
    _tool("add_comment", "comment on a ticket", _schema({"id": _ID, "text": _TEXT}), _add_comment),
    _tool(
        "create_ticket",
        "a new open ticket",
        _schema({"title": _TEXT, "priority": _PRIORITY, "assignee": _USER}),
        _create_ticket,
    ),
    _tool("list_users", "all user ids and names", _schema({}), _list_users),
)
