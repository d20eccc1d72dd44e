"""Mail of one company: search, read, reply, send, label and archive, contacts, and, from 1.1, forward.

Everybody's mail lies in one database; tools show and change only that of LOGGED_IN_USER. The rows are drawn from
``(data_key, data_version)`` alone. No subject of the company ``lab`` occurs in any other company.
"""

from __future__ import annotations

import random
import sqlite3
from typing import Any

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps.toolkit import NOBODY, TEXT, make_tool, next_id, object_schema, word_pairs

VERSIONS = ("v1.0.0", "v1.1.0")
HELDOUT_KEY = "lab"
PEOPLE = ("ana", "ben", "cleo", "dan", "eva", "hana", "ivo", "mia")
LABELS = ("none", "urgent", "later", "private", "team")
FOLDERS = ("inbox", "archive", "sent")
ABOUT = ("contract", "invoice", "shipment", "survey", "visit", "server", "price", "garden")
MATTERS = ("question", "update", "draft", "problem", "offer", "reminder", "summary", "request")
CITIES = ("Lima", "Oslo", "Riga", "Cairo", "Quito", "Seoul", "Turin", "Accra")
DATES = ("2026-01-12", "2026-03-09", "2026-06-15", "2026-09-21")
FIRST_ID, THREADS, MAX_ROWS = 10, 12, 20
TABLES = ("contacts", "messages")

SCHEMA = """
CREATE TABLE contacts (id TEXT PRIMARY KEY, name TEXT NOT NULL, address TEXT NOT NULL, city TEXT NOT NULL);
CREATE TABLE messages (
    id TEXT PRIMARY KEY,
    thread TEXT NOT NULL,
    sender TEXT NOT NULL REFERENCES contacts (id),
    recipient TEXT NOT NULL REFERENCES contacts (id),
    subject TEXT NOT NULL,
    body TEXT NOT NULL,
    sent_on TEXT,
    label TEXT NOT NULL DEFAULT 'none',
    archived INTEGER NOT NULL DEFAULT 0,
    unread INTEGER NOT NULL DEFAULT 1
);
"""


def subjects(data_key: str | None) -> list[str]:
    """The subjects that the mail of this company draws from."""
    return word_pairs(ABOUT, MATTERS, data_key == HELDOUT_KEY)


def seed_mail(
    connection: sqlite3.Connection, data_key: str | None, data_version: str | None, heldout: bool | None = None
) -> None:
    """Create the tables and rows of a company.

    Args:
        heldout: which subjects; ``None``: as ``data_key`` says.
    """
    rng = random.Random(f"mail/{data_key}/{data_version}")
    connection.executescript(SCHEMA)
    people = [(p, p.title(), f"{p}@example.com", city) for p, city in zip(PEOPLE, rng.sample(CITIES, 8), strict=True)]
    connection.executemany("INSERT INTO contacts VALUES (?, ?, ?, ?)", people)
    heldout = data_key == HELDOUT_KEY if heldout is None else heldout
    owner = rng.choice(PEOPLE)
    number = FIRST_ID
    for thread, subject in enumerate(rng.sample(word_pairs(ABOUT, MATTERS, heldout), THREADS), 1):
        # Most mail is for one person: a mailbox with next to nothing in it would make no tasks.
        to = owner if thread <= 9 else rng.choice([p for p in PEOPLE if p != owner])
        sender = rng.choice([p for p in PEOPLE if p != to])
        for turn in range(rng.choice((1, 1, 2, 3))):
            a, b = (sender, to) if turn % 2 == 0 else (to, sender)
            text = subject if turn == 0 else f"Re: {subject}"
            body = f"The number is {rng.randint(100, 999)}."
            row = (f"M{number}", f"H{thread}", a, b, text, body, "2026-01-05", "none", 0, int(rng.random() < 0.5))
            connection.execute("INSERT INTO messages VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            number += 1


class Mail:
    """The application. See :class:`actors.envs.local_fleet.application.Application`."""

    env_key = "mail"
    name = "Mail"
    description = "A mailbox with threads, labels and contacts."
    versions = VERSIONS

    def __init__(self, version: str = VERSIONS[-1]) -> None:
        self.tools = TOOLS[version]

    def at(self, version: str) -> Mail:
        return Mail(version)

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        seed_mail(connection, data_key, data_version)


# ----------------------------------------------------------------------------------------------------- tools

_ID = {"type": "string", "description": "message id, for example M12"}
_THREAD = {"type": "string", "description": "thread id, for example H3"}
_TO = {"type": "string", "description": "user id of a contact"}
_LABEL = {"type": "string", "enum": list(LABELS)}
_FOLDER = {"type": "string", "enum": list(FOLDERS), "description": "inbox if not given"}
_FOLDER_CLAUSES = {
    "inbox": "recipient = :me AND archived = 0",
    "archive": "recipient = :me AND archived = 1",
    "sent": "sender = :me",
}


def _me(env_variables: dict) -> str:
    return env_variables.get("LOGGED_IN_USER") or NOBODY


def _message(connection: sqlite3.Connection, message_id: str, me: str, received: bool = False) -> dict[str, Any]:
    cursor = connection.execute("SELECT * FROM messages WHERE id = ?", (message_id,))
    row = cursor.fetchone()
    message = dict(zip([column[0] for column in cursor.description], row, strict=True)) if row else {}
    if not row or me not in (message["sender"], message["recipient"]):
        raise ToolError(f"no message {message_id}")  # somebody else's mail is not even said to exist
    if received and message["recipient"] != me:
        raise ToolError(f"message {message_id} was sent by you: only received mail can be labelled or archived")
    return message


def _require_contact(connection: sqlite3.Connection, person: str) -> None:
    if connection.execute("SELECT 1 FROM contacts WHERE id = ?", (person,)).fetchone() is None:
        raise ToolError(f"no contact {person}: find_contact lists user ids")


def _search(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    clauses = [_FOLDER_CLAUSES[arguments.get("folder", "inbox")]]
    if "query" in arguments:
        # instr, not LIKE: a % in the query must mean a percent sign.
        clauses.append("(instr(lower(subject), lower(:query)) > 0 OR instr(lower(body), lower(:query)) > 0)")
    if "sender" in arguments:
        _require_contact(connection, arguments["sender"])
    clauses += [f"{name} = :{name}" for name in ("sender", "label") if name in arguments]
    rows = connection.execute(
        "SELECT id, thread, sender, subject, label, unread FROM messages"
        f" WHERE {' AND '.join(clauses)} ORDER BY CAST(substr(id, 2) AS INTEGER) DESC",
        {**arguments, "me": _me(env_variables)},
    ).fetchall()
    return {"n": len(rows), "messages": [list(row) for row in rows[:MAX_ROWS]]}


def _read(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    me = _me(env_variables)
    message = _message(connection, arguments["id"], me)
    if message["recipient"] == me:
        connection.execute("UPDATE messages SET unread = 0 WHERE id = ?", (arguments["id"],))
    return {name: message[name] for name in ("id", "thread", "sender", "recipient", "subject", "body", "sent_on")}


def _read_thread(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    rows = connection.execute(
        "SELECT id, sender, recipient, subject, body FROM messages WHERE thread = :thread"
        " AND :me IN (sender, recipient) ORDER BY CAST(substr(id, 2) AS INTEGER)",
        {"thread": arguments["thread"], "me": _me(env_variables)},
    ).fetchall()
    if not rows:
        raise ToolError(f"no thread {arguments['thread']}")
    return {"messages": [list(row) for row in rows]}


def _post(
    connection: sqlite3.Connection, env_variables: dict, to: str, subject: str, body: str, thread: str | None = None
) -> dict[str, Any]:
    _require_contact(connection, to)
    if thread is None:
        (last,) = connection.execute("SELECT max(CAST(substr(thread, 2) AS INTEGER)) FROM messages").fetchone()
        thread = f"H{(last or 0) + 1}"
    message_id = f"M{next_id(connection, 'messages', FIRST_ID)}"
    me, today = _me(env_variables), env_variables.get("CURRENT_DATE")
    _require_contact(connection, me)
    connection.execute(
        "INSERT INTO messages (id, thread, sender, recipient, subject, body, sent_on) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (message_id, thread, me, to, subject, body, today),
    )
    return {"id": message_id}


def _reply(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    message = _message(connection, arguments["id"], _me(env_variables))
    to = message["recipient"] if message["sender"] == _me(env_variables) else message["sender"]
    subject = "Re: " + message["subject"].removeprefix("Re: ")
    return _post(connection, env_variables, to, subject, arguments["text"], message["thread"])


def _send(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    return _post(connection, env_variables, arguments["to"], arguments["subject"], arguments["text"])


def _forward(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    message = _message(connection, arguments["id"], _me(env_variables))
    return _post(connection, env_variables, arguments["to"], f"Fwd: {message['subject']}", message["body"])


def _label(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _message(connection, arguments["id"], _me(env_variables), received=True)
    connection.execute("UPDATE messages SET label = ? WHERE id = ?", (arguments["label"], arguments["id"]))
    return {"ok": True}


def _archive(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    if _message(connection, arguments["id"], _me(env_variables), received=True)["archived"]:
        raise ToolError(f"message {arguments['id']} is archived already")
    connection.execute("UPDATE messages SET archived = 1 WHERE id = ?", (arguments["id"],))
    return {"ok": True}


def _find_contact(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    rows = connection.execute(
        "SELECT id, name, address, city FROM contacts"
        " WHERE instr(lower(name || ' ' || city), lower(?)) > 0 ORDER BY id",
        (arguments.get("query", ""),),
    )
    return {"contacts": [list(row) for row in rows]}


def _tools(version: str) -> tuple:
    search = {"query": TEXT, "sender": _TO, "label": _LABEL, "folder": _FOLDER}
    tools = (
        make_tool("search_mail", "your mail, newest first: rows of id, thread, sender, subject, label, unread",
                  object_schema({}, search), _search),
        make_tool("read_mail", "one message with its text; it is no longer unread then", object_schema({"id": _ID}),
                  _read),
        make_tool("read_thread", "all messages of a thread, oldest first: rows of id, sender, recipient, subject, text",
                  object_schema({"thread": _THREAD}), _read_thread),
        make_tool("reply_mail", "answer a message", object_schema({"id": _ID, "text": TEXT}), _reply),
        make_tool("send_mail", "a new message", object_schema({"to": _TO, "subject": TEXT, "text": TEXT}), _send),
        make_tool("label_mail", "give a received message a label", object_schema({"id": _ID, "label": _LABEL}), _label),
        make_tool("archive_mail", "move a received message to the archive", object_schema({"id": _ID}), _archive),
        make_tool("find_contact", "contacts by name or city: rows of id, name, address, city",
                  object_schema({}, {"query": TEXT}), _find_contact),
    )  # fmt: skip
    forward = make_tool("forward_mail", "send a message on", object_schema({"id": _ID, "to": _TO}), _forward)
    return (*tools, forward) if version == VERSIONS[-1] else tools


TOOLS = {version: _tools(version) for version in VERSIONS}
