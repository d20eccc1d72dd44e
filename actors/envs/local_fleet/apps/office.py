"""Bookings and mail in one instance: one database, the tools of both, and mail that asks for rooms.

The offices ``branch`` and ``hq`` share no space, no title and no subject.
"""

from __future__ import annotations

import random
import sqlite3
from datetime import timedelta

from actors.envs.local_fleet.apps import booking, mail
from actors.envs.local_fleet.apps.toolkit import next_id

VERSIONS = ("v1.0.0", "v1.1.0")
HELDOUT_KEY = "branch"
REQUESTS = 3  # mails that ask for a room, each to the person with the mailbox


def booking_key(data_key: str | None) -> str:
    """The key of the house that an office works in."""
    return booking.HELDOUT_KEY if data_key == HELDOUT_KEY else f"office-{data_key}"


def request_body(day: str, start: int, seats: int) -> str:
    return f"Please book the smallest free room with at least {seats} seats on {day} from {start} to {start + 1}."


class Office:
    """The application. See :class:`actors.envs.local_fleet.application.Application`."""

    env_key = "office"
    name = "Office"
    description = "Bookings and mail of one office."
    versions = VERSIONS

    def __init__(self, version: str = VERSIONS[-1]) -> None:
        self.tools = booking.TOOLS[version] + mail.TOOLS[version]

    def at(self, version: str) -> Office:
        return Office(version)

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        house, heldout = booking_key(data_key), data_key == HELDOUT_KEY
        booking.seed_booking(connection, house, data_version)
        mail.seed_mail(connection, f"office-{data_key}", data_version, heldout)
        rng = random.Random(f"office/{data_key}/{data_version}")
        (owner,) = connection.execute("SELECT recipient FROM messages WHERE id = 'M10'").fetchone()
        used = {row[0] for row in connection.execute("SELECT title FROM bookings")}
        # A title that no booking has yet, so that a booking for it stands out.
        subjects = rng.sample([title for title in booking.titles(house) if title not in used], REQUESTS)
        monday = booking.first_day(house, data_version)
        for n, subject in enumerate(subjects):
            day = str(monday + timedelta(rng.randint(1, booking.DAYS - 1)))
            body = request_body(day, rng.randrange(booking.OPENS, booking.CLOSES - 1), rng.choice((3, 5, 7, 9)))
            sender = rng.choice([person for person in mail.PEOPLE if person != owner])
            number = next_id(connection, "messages", mail.FIRST_ID)
            connection.execute(
                "INSERT INTO messages (id, thread, sender, recipient, subject, body, sent_on)"
                " VALUES (?, ?, ?, ?, ?, ?, '2026-01-06')",
                (f"M{number}", f"H{mail.THREADS + n + 1}", sender, owner, f"{subject} room", body),
            )
