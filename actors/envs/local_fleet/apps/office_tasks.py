"""Tasks that need bookings and mail together, in Fleet's task-file format: 2 to 6 tool calls.

``python -m actors.envs.local_fleet.apps.office_tasks --train 64 --heldout 32 --seed 1 --out-dir configs/tasks``

Held-out tasks are about another office (``branch``): its spaces, titles, subjects and dates occur in no training task.
"""

from __future__ import annotations

import re
from datetime import timedelta

from actors.envs.local_fleet.apps import booking, mail
from actors.envs.local_fleet.apps.booking_tasks import LIVE, free_spaces
from actors.envs.local_fleet.apps.office import Office, booking_key
from actors.envs.local_fleet.apps.problems import Call, Draft, Family, Solution

_REQUEST = re.compile(r"at least (\d+) seats on (\S+) from (\d+) to")


def _request(d: Draft) -> tuple[str, str, str, Call, list[Call]] | None:
    """A mail that asks for a room: its id, subject and sender, the booking call, and the calls that lead to it."""
    message, subject, sender, body = d.row(
        "SELECT id, subject, sender, body FROM messages WHERE body LIKE 'Please book%'"
    )
    seats, day, start = _REQUEST.search(body).groups()
    time = {"day": day, "start": int(start), "end": int(start) + 1}
    free = free_spaces(d, day, time["start"], time["end"], "room", int(seats))
    if not free:
        return None
    title = subject.removesuffix(" room")
    book = Call("book_space", {"space": free[0][0], **time, "title": title})
    look = [
        Call("search_mail", {"query": subject}),
        Call("read_mail", {"id": message}),
        Call("search_availability", {**time, "kind": "room", "seats": int(seats)}),
    ]
    return message, subject, sender, book, look


def _next_booking(d: Draft) -> str:
    return f"B{booking.FIRST_ID + len(d.rows('SELECT id FROM bookings'))}"


def _answer_request(d: Draft) -> Solution | None:
    request = _request(d)
    if request is None:
        return None
    message, subject, _, book, look = request
    made = _next_booking(d)
    prompt = (
        f'Do what the mail "{subject}" asks for, with the title "{book.arguments["title"]}",'
        " and reply to it with the booking id."
    )
    reply = Call("reply_mail", {"id": message, "text": f"Booked as {made}."}, mentions=(made,))
    return Solution(prompt, [*look, book, reply])


def _answer_and_archive(d: Draft) -> Solution | None:
    made = _answer_request(d)
    if made is None:
        return None
    archive = Call("archive_mail", {"id": made.calls[-1].arguments["id"]})
    return Solution(f"{made.prompt} Then archive the mail.", [*made.calls, archive])


def _book_request(d: Draft) -> Solution | None:
    request = _request(d)
    if request is None:
        return None
    _, subject, sender, book, look = request
    invite = Call("invite_guest", {"id": _next_booking(d), "person": sender})
    prompt = (
        f'Do what the mail "{subject}" asks for, with the title "{book.arguments["title"]}",'
        " and invite its sender to the booking."
    )
    return Solution(prompt, [*look, book, invite])


def _cancel_and_tell(d: Draft) -> Solution | None:
    row = d.row(f"{LIVE} AND owner = ?", d.me)
    if row is None:
        return None
    to = d.rng.choice([person for person in mail.PEOPLE if person != d.me])
    calls = [
        Call("list_bookings", {"title": row[6]}),
        Call("cancel_booking", {"id": row[0]}),
        Call("send_mail", {"to": to, "subject": row[6], "text": "cancelled"}),
    ]
    prompt = f'Cancel my booking "{row[6]}" and send {to} a mail with the subject "{row[6]}" and the text "cancelled".'
    return Solution(prompt, calls)


def _tell_owner(d: Draft) -> Solution | None:
    row = d.row(f"{LIVE} AND owner != ?", d.me)
    send = Call("send_mail", {"to": row[5], "subject": row[6], "text": "may I join"})
    prompt = f'Send the owner of the booking "{row[6]}" a mail with the subject "{row[6]}" and the text "may I join".'
    return Solution(prompt, [Call("list_bookings", {"title": row[6]}), send])


def _space_of_request(d: Draft) -> Solution | None:
    request = _request(d)
    if request is None:
        return None
    _, subject, _, book, look = request
    prompt = f'Which room suits what the mail "{subject}" asks for? Answer with its id and book nothing.'
    return Solution(prompt, look, book.arguments["space"], tuple(f"S{n}" for n in range(1, 8)))


def _days(data_key: str, data_version: str) -> list[str]:
    # The weekend before: every mail asks for a later day, and "in the past" must refuse none of them.
    monday = booking.first_day(booking_key(data_key), data_version)
    return [str(monday - timedelta(n)) for n in (1, 2)]


FAMILY = Family(
    application=Office(),
    tables={"booking": booking.TABLES, "mail": mail.TABLES},
    kinds={
        "answer_request": _answer_request,
        "answer_and_archive": _answer_and_archive,
        "book_request": _book_request,
        "cancel_and_tell": _cancel_and_tell,
        "tell_owner": _tell_owner,
        "space_of_request": _space_of_request,
    },
    data_keys={"train": "hq", "heldout": "branch"},
    people="SELECT recipient FROM messages WHERE id = 'M10'",
    days=_days,
)


def main(argv: list[str] | None = None) -> None:
    FAMILY.main(argv, __doc__)


if __name__ == "__main__":
    main()
