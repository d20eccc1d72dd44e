"""Bookings of rooms, desks and appointments: search what is free, book, move, cancel, list, and, from 1.1, invite.

The rows are drawn from ``(data_key, data_version)`` alone. The house ``annex`` shares no space and no title with any
other, so that what was learnt in one can be tested in the other. Bookings are for whole hours on one of five days, the
first of which is :func:`first_day`.
"""

from __future__ import annotations

import random
import sqlite3
from datetime import date, timedelta
from typing import Any

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps.toolkit import NOBODY, TEXT, make_tool, next_id, object_schema, word_pairs

VERSIONS = ("v1.0.0", "v1.1.0")
HELDOUT_KEY = "annex"
PEOPLE = ("ana", "ben", "cleo", "dan", "eva", "hana", "ivo", "mia")
KINDS = ("room", "desk", "appointment")
# Names of spaces and words of titles: one half for the annex, one for all other houses.
NAMES = {
    False: ("Oak", "Elm", "Birch", "Cedar", "Maple", "Pine", "Willow", "Ash", "Beech"),
    True: ("Amber", "Coral", "Jade", "Onyx", "Opal", "Pearl", "Ruby", "Topaz", "Agate"),
}
PURPOSES = ("budget", "design", "sales", "hiring", "release", "safety", "travel", "staff")
MEETINGS = ("review", "talk", "workshop", "briefing", "interview", "call", "planning", "lunch")
FIRST_DAYS = {False: ("2026-01-12", "2026-03-09", "2026-06-15"), True: ("2026-02-16", "2026-05-04", "2026-09-21")}
DAYS = 5
OPENS, CLOSES = 8, 18
FIRST_ID, BOOKINGS = 10, 10
TABLES = ("people", "spaces", "bookings", "guests")

SCHEMA = """
CREATE TABLE people (id TEXT PRIMARY KEY, name TEXT NOT NULL);
CREATE TABLE spaces (
    id TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    kind TEXT NOT NULL CHECK (kind IN ('room', 'desk', 'appointment')),
    seats INTEGER NOT NULL,
    floor INTEGER NOT NULL
);
CREATE TABLE bookings (
    id TEXT PRIMARY KEY,
    space TEXT NOT NULL REFERENCES spaces (id),
    day TEXT NOT NULL,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL CHECK (end > start),
    owner TEXT NOT NULL,
    title TEXT NOT NULL,
    status TEXT NOT NULL CHECK (status IN ('booked', 'cancelled'))
);
CREATE TABLE guests (
    id INTEGER PRIMARY KEY,
    booking TEXT NOT NULL REFERENCES bookings (id),
    person TEXT NOT NULL REFERENCES people (id),
    UNIQUE (booking, person)
);
"""


def is_heldout(data_key: str | None) -> bool:
    return data_key == HELDOUT_KEY


def titles(data_key: str | None) -> list[str]:
    """The titles that bookings of this house draw from."""
    return word_pairs(PURPOSES, MEETINGS, is_heldout(data_key))


def first_day(data_key: str | None, data_version: str | None) -> date:
    """The first of the five days with bookings, a Monday."""
    rng = random.Random(f"booking-day/{data_key}/{data_version}")
    return date.fromisoformat(rng.choice(FIRST_DAYS[is_heldout(data_key)]))


def seed_booking(connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
    """Create the tables and rows of a house."""
    rng = random.Random(f"booking/{data_key}/{data_version}")
    connection.executescript(SCHEMA)
    connection.executemany("INSERT INTO people VALUES (?, ?)", [(p, p.title()) for p in PEOPLE])
    names = rng.sample(NAMES[is_heldout(data_key)], 7)
    kinds = ("room",) * 4 + ("desk",) * 2 + ("appointment",)
    seats = [*rng.sample((4, 6, 8, 10, 12, 16), 4), 1, 1, 2]
    spaces = [(f"S{n}", *row, rng.randint(1, 4)) for n, row in enumerate(zip(names, kinds, seats, strict=True), 1)]
    connection.executemany("INSERT INTO spaces VALUES (?, ?, ?, ?, ?)", spaces)
    monday = first_day(data_key, data_version)
    taken: set[tuple[str, int, int]] = set()
    for number, title in enumerate(rng.sample(titles(data_key), BOOKINGS), FIRST_ID):
        while True:
            space, day, start = rng.choice(spaces)[0], rng.randrange(DAYS), rng.randrange(OPENS, CLOSES - 1)
            end = start + rng.choice((1, 2))
            hours = {(space, day, hour) for hour in range(start, end)}
            if not hours & taken:
                break
        taken |= hours
        row = (f"B{number}", space, str(monday + timedelta(day)), start, end, rng.choice(PEOPLE), title, "booked")
        connection.execute("INSERT INTO bookings VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)


class Booking:
    """The application. See :class:`actors.envs.local_fleet.application.Application`."""

    env_key = "booking"
    name = "Bookings"
    description = "Rooms, desks and appointments of a house: find what is free, book, move and cancel."
    versions = VERSIONS

    def __init__(self, version: str = VERSIONS[-1]) -> None:
        self.tools = TOOLS[version]

    def at(self, version: str) -> Booking:
        return Booking(version)

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        seed_booking(connection, data_key, data_version)


# ----------------------------------------------------------------------------------------------------- tools

_ID = {"type": "string", "description": "booking id, for example B12"}
_SPACE = {"type": "string", "description": "space id, for example S3"}
_DAY = {"type": "string", "description": "a day as YYYY-MM-DD"}
_START = {"type": "integer", "minimum": OPENS, "maximum": CLOSES - 1, "description": "first hour, 8 to 17"}
_END = {"type": "integer", "minimum": OPENS + 1, "maximum": CLOSES, "description": "hour at which it ends, 9 to 18"}
_KIND = {"type": "string", "enum": list(KINDS)}
_SEATS = {"type": "integer", "minimum": 1, "maximum": 100, "description": "at least so many seats"}
_PERSON = {"type": "string", "description": "user id"}
_COLUMNS = "id, space, day, start, end, owner, title, status"


def _booking(connection: sqlite3.Connection, booking_id: str) -> tuple:
    row = connection.execute(f"SELECT {_COLUMNS} FROM bookings WHERE id = ?", (booking_id,)).fetchone()
    if row is None:
        raise ToolError(f"no booking {booking_id}")
    return tuple(row)


def _own_booking(connection: sqlite3.Connection, booking_id: str, me: str) -> tuple:
    row = _booking(connection, booking_id)
    if row[5] != me:
        raise ToolError(f"booking {booking_id} belongs to {row[5]}: only its owner may change it")
    if row[7] == "cancelled":
        raise ToolError(f"booking {booking_id} is cancelled")
    return row


def _require(connection: sqlite3.Connection, table: str, row_id: str, word: str) -> None:
    if connection.execute(f"SELECT 1 FROM {table} WHERE id = ?", (row_id,)).fetchone() is None:
        raise ToolError(f"no {word} {row_id}")


def _check_time(arguments: dict, env_variables: dict) -> None:
    day = arguments["day"]
    try:
        valid = str(date.fromisoformat(day)) == day
    except ValueError:
        valid = False
    if not valid:
        raise ToolError(f"day must be a date as YYYY-MM-DD, not {day}")
    if day < str(env_variables.get("CURRENT_DATE") or ""):
        raise ToolError(f"{day} is in the past")
    if arguments["end"] <= arguments["start"]:
        raise ToolError("end must be after start")


def _check_free(connection: sqlite3.Connection, space: str, arguments: dict, but: str = "") -> None:
    taken = connection.execute(
        "SELECT id, start, end FROM bookings WHERE space = ? AND day = ? AND status = 'booked'"
        " AND start < ? AND end > ? AND id != ? ORDER BY start",
        (space, arguments["day"], arguments["end"], arguments["start"], but),
    ).fetchone()
    if taken is not None:
        raise ToolError(f"{space} is taken on {arguments['day']} from {taken[1]} to {taken[2]} by {taken[0]}")


def _list_spaces(with_floor: bool) -> Any:
    columns = "id, name, kind, seats, floor" if with_floor else "id, name, kind, seats"

    def call(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
        clause, values = ("WHERE kind = ?", [arguments["kind"]]) if "kind" in arguments else ("", [])
        rows = connection.execute(f"SELECT {columns} FROM spaces {clause} ORDER BY id", values)
        return {"spaces": [list(row) for row in rows]}

    return call


def _search(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _check_time(arguments, env_variables)
    rows = connection.execute(
        "SELECT id, name, kind, seats FROM spaces WHERE seats >= ? AND kind = coalesce(?, kind) AND id NOT IN"
        " (SELECT space FROM bookings WHERE day = ? AND status = 'booked' AND start < ? AND end > ?)"
        " ORDER BY seats, id",
        (
            arguments.get("seats", 1),
            arguments.get("kind"),
            arguments["day"],
            arguments["end"],
            arguments["start"],
        ),
    )
    return {"free": [list(row) for row in rows]}


def _list_bookings(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    clauses, values = ["status = 'booked'"], []
    if "title" in arguments:
        clauses.append("instr(lower(title), lower(?)) > 0")  # not LIKE: a % in the title must mean a percent sign
        values.append(arguments["title"])
    for name in ("day", "owner", "space"):
        if name in arguments:
            clauses.append(f"{name} = ?")
            values.append(arguments[name])
    if "owner" in arguments:
        _require(connection, "people", arguments["owner"], "user")
    if "space" in arguments:
        _require(connection, "spaces", arguments["space"], "space")
    rows = connection.execute(
        f"SELECT {_COLUMNS} FROM bookings WHERE {' AND '.join(clauses)} ORDER BY day, start, id", values
    ).fetchall()
    return {"n": len(rows), "bookings": [list(row) for row in rows]}


def _get_booking(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    row = _booking(connection, arguments["id"])
    guests = connection.execute("SELECT person FROM guests WHERE booking = ? ORDER BY id", (arguments["id"],))
    return {"booking": list(row), "guests": [person for (person,) in guests]}


def _book(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _require(connection, "spaces", arguments["space"], "space")
    _check_time(arguments, env_variables)
    _check_free(connection, arguments["space"], arguments)
    booking_id = f"B{next_id(connection, 'bookings', FIRST_ID)}"
    owner = env_variables.get("LOGGED_IN_USER") or NOBODY
    values = [arguments[name] for name in ("space", "day", "start", "end")]
    connection.execute(
        "INSERT INTO bookings VALUES (?, ?, ?, ?, ?, ?, ?, 'booked')", (booking_id, *values, owner, arguments["title"])
    )
    return {"id": booking_id}


def _move(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    row = _own_booking(connection, arguments["id"], env_variables.get("LOGGED_IN_USER") or NOBODY)
    space = arguments.get("space", row[1])
    _require(connection, "spaces", space, "space")
    _check_time(arguments, env_variables)
    _check_free(connection, space, arguments, but=arguments["id"])
    connection.execute(
        "UPDATE bookings SET space = ?, day = ?, start = ?, end = ? WHERE id = ?",
        (space, arguments["day"], arguments["start"], arguments["end"], arguments["id"]),
    )
    return {"ok": True}


def _cancel(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    _own_booking(connection, arguments["id"], env_variables.get("LOGGED_IN_USER") or NOBODY)
    connection.execute("UPDATE bookings SET status = 'cancelled' WHERE id = ?", (arguments["id"],))
    return {"ok": True}


def _invite(connection: sqlite3.Connection, arguments: dict, env_variables: dict) -> Any:
    row = _own_booking(connection, arguments["id"], env_variables.get("LOGGED_IN_USER") or NOBODY)
    _require(connection, "people", arguments["person"], "user")
    guests = connection.execute("SELECT person FROM guests WHERE booking = ?", (arguments["id"],)).fetchall()
    if (arguments["person"],) in guests:
        raise ToolError(f"{arguments['person']} is already invited")
    (seats,) = connection.execute("SELECT seats FROM spaces WHERE id = ?", (row[1],)).fetchone()
    if len(guests) + 1 >= seats:  # the owner sits too
        raise ToolError(f"{row[1]} has {seats} seats, all taken")
    connection.execute("INSERT INTO guests (booking, person) VALUES (?, ?)", (arguments["id"], arguments["person"]))
    return {"ok": True}


_TIME = {"day": _DAY, "start": _START, "end": _END}


def _tools(version: str) -> tuple:
    newest = version == VERSIONS[-1]
    floor = ", floor" if newest else ""
    tools = (
        make_tool("list_spaces", f"rows of id, name, kind, seats{floor}", object_schema({}, {"kind": _KIND}),
                  _list_spaces(newest)),
        make_tool("search_availability", "spaces free at a time, smallest first: rows of id, name, kind, seats",
                  object_schema(_TIME, {"kind": _KIND, "seats": _SEATS}), _search),
        make_tool("list_bookings", f"bookings that are not cancelled: rows of {_COLUMNS}",
                  object_schema({}, {"title": TEXT, "day": _DAY, "owner": _PERSON, "space": _SPACE}), _list_bookings),
        make_tool("get_booking", f"one booking ({_COLUMNS}) and its guests", object_schema({"id": _ID}), _get_booking),
        make_tool("book_space", "book a space for yourself", object_schema({"space": _SPACE, **_TIME, "title": TEXT}),
                  _book),
        make_tool("move_booking", "another time, and another space if given, for a booking of yours",
                  object_schema({"id": _ID, **_TIME}, {"space": _SPACE}), _move),
        make_tool("cancel_booking", "cancel a booking of yours", object_schema({"id": _ID}), _cancel),
    )  # fmt: skip
    invite = make_tool(
        "invite_guest", "invite a user to a booking of yours", object_schema({"id": _ID, "person": _PERSON}), _invite
    )
    return (*tools, invite) if newest else tools


TOOLS = {version: _tools(version) for version in VERSIONS}
