"""Bookings keep their rules: no two at once in one space, none in the past, and only the owner changes one."""

import re

import pytest

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps import APPLICATIONS
from actors.envs.local_fleet.apps.problems import open_database

BOOKING = APPLICATIONS["booking"]
TOOLS = {tool.name: tool for tool in BOOKING.tools}
DAY = "2027-01-04"  # long after every booking of the seed


@pytest.fixture
def house():
    connection = open_database(BOOKING, "tower", "s1")
    yield connection
    connection.close()


def call(house, name, user="mia", **arguments):
    return TOOLS[name].call(house, arguments, {"LOGGED_IN_USER": user, "CURRENT_DATE": "2026-01-12"})


def book(house, start=9, end=10, space="S1", **more):
    return call(house, "book_space", space=space, day=DAY, start=start, end=end, title="board talk", **more)["id"]


def refused(house, name, message, **arguments):
    before = list(house.iterdump())
    with pytest.raises(ToolError, match=re.escape(message)):
        call(house, name, **arguments)
    assert list(house.iterdump()) == before


def test_a_booking_is_found_moved_and_cancelled(house):
    made = book(house)
    assert call(house, "list_bookings", title="BOARD")["bookings"] == [
        [made, "S1", DAY, 9, 10, "mia", "board talk", "booked"]
    ]
    call(house, "move_booking", id=made, day=DAY, start=14, end=16, space="S2")
    assert call(house, "get_booking", id=made)["booking"][1:5] == ["S2", DAY, 14, 16]
    call(house, "cancel_booking", id=made)
    assert call(house, "list_bookings", owner="mia", day=DAY) == {"n": 0, "bookings": []}
    refused(house, "cancel_booking", "is cancelled", id=made)


def test_a_taken_space_is_not_free_and_cannot_be_booked_until_it_is_cancelled(house):
    made = book(house, 9, 11)
    assert "S1" not in [row[0] for row in call(house, "search_availability", day=DAY, start=10, end=12)["free"]]
    assert "S1" in [row[0] for row in call(house, "search_availability", day=DAY, start=11, end=12)["free"]]
    refused(
        house, "book_space", f"S1 is taken on {DAY} from 9 to 11 by {made}",
        space="S1", day=DAY, start=10, end=12, title="x",
    )  # fmt: skip
    later = book(house, 11, 12)
    refused(house, "move_booking", "S1 is taken", id=later, day=DAY, start=10, end=11)
    call(house, "move_booking", id=made, day=DAY, start=8, end=10)  # its own hours are no conflict
    call(house, "cancel_booking", id=made)
    call(house, "move_booking", id=later, day=DAY, start=9, end=10)


def test_only_the_owner_changes_a_booking_and_guests_need_a_seat(house):
    (space,) = [row[0] for row in call(house, "list_spaces", kind="appointment")["spaces"]]
    made = book(house, space=space)
    for name, more in (("cancel_booking", {}), ("invite_guest", {"person": "ana"})):
        refused(house, name, "belongs to mia: only its owner may change it", user="ben", id=made, **more)
    call(house, "invite_guest", id=made, person="ana")
    refused(house, "invite_guest", "ana is already invited", id=made, person="ana")
    refused(house, "invite_guest", "has 2 seats, all taken", id=made, person="ben")
    assert call(house, "get_booking", id=made)["guests"] == ["ana"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("book_space", {"space": "S9", "day": DAY, "start": 9, "end": 10, "title": "x"}, "no space S9"),
        ("book_space", {"space": "S1", "day": "2026-01-11", "start": 9, "end": 10, "title": "x"}, "is in the past"),
        ("book_space", {"space": "S1", "day": "tomorrow", "start": 9, "end": 10, "title": "x"}, "as YYYY-MM-DD"),
        ("book_space", {"space": "S1", "day": "20270104", "start": 9, "end": 10, "title": "x"}, "as YYYY-MM-DD"),
        ("book_space", {"space": "S1", "day": DAY, "start": 10, "end": 10, "title": "x"}, "end must be after start"),
        ("book_space", {"space": "S1", "day": DAY, "start": 7, "end": 10, "title": "x"}, "start must be from 8 to 17"),
        ("book_space", {"space": "S1", "day": DAY, "start": 9, "end": 10}, "missing argument title"),
        ("get_booking", {"id": "B99"}, "no booking B99"),
        ("list_bookings", {"owner": "zoe"}, "no user zoe"),
        ("list_bookings", {"space": "S9"}, "no space S9"),
        ("list_spaces", {"kind": "hall"}, "kind must be one of room, desk, appointment"),
    ],
)
def test_a_wrong_call_is_refused_with_a_reason_and_changes_nothing(house, name, arguments, message):
    refused(house, name, message, **arguments)


def test_the_older_version_shows_no_floor(house):
    (old,) = [tool for tool in BOOKING.at("v1.0.0").tools if tool.name == "list_spaces"]
    older, newer = old.call(house, {}, {})["spaces"], call(house, "list_spaces")["spaces"]
    assert [row[:4] for row in newer] == older and all(len(row) == 5 for row in newer)
