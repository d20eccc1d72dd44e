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
from actors.envs.local_fleet.apps.toolkit import NOBODY, TEXT, make_tool, next_id, object_schema, word_pairs

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
    return word_pairs(QUALITIES, THINGS, heldout=data_key == "annex")


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
    ticket_id = f"T{next_id(connection, 'tickets', FIRST_ID)}"
    connection.execute(
        "INSERT INTO tickets VALUES (?, ?, 'open', ?, ?)",
        (ticket_id, arguments["title"], arguments["priority"], arguments["assignee"]),
    )
    return {"id": ticket_id}


def _list_users(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    return {"users": [list(row) for row in connection.execute("SELECT id, name FROM users ORDER BY id")]}


_TOOLS = (
    make_tool(
        "search_tickets",
        "rows of id, title, status, priority, assignee, most urgent first",
        object_schema({}, {"query": TEXT, "status": _STATUS, "assignee": _USER}),
        _search_tickets,
    ),
    make_tool("get_ticket", "one ticket and its comments, newest first", object_schema({"id": _ID}), _get_ticket),
    make_tool(
        "set_status", "open, pending or closed", object_schema({"id": _ID, "status": _STATUS}), _set_field("status")
    ),
    make_tool("set_priority", "1 to 5", object_schema({"id": _ID, "priority": _PRIORITY}), _set_field("priority")),
    make_tool(
        "assign_ticket", "give it to a user", object_schema({"id": _ID, "assignee": _USER}), _set_field("assignee")
    ),
    make_tool("add_comment", "comment on a ticket", object_schema({"id": _ID, "text": TEXT}), _add_comment),
    make_tool(
        "create_ticket",
        "a new open ticket",
        object_schema({"title": TEXT, "priority": _PRIORITY, "assignee": _USER}),
        _create_ticket,
    ),
    make_tool("list_users", "all user ids and names", object_schema({}), _list_users),
)
