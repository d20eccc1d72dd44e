"""Tasks for bookings, in Fleet's task-file format: find, change and report, in 1 to 5 tool calls.

``python -m actors.envs.local_fleet.apps.booking_tasks --train 64 --heldout 32 --seed 1 --out-dir configs/tasks``

Held-out tasks are about another house (``annex``): its spaces, titles and dates occur in no training task.
"""

from __future__ import annotations

from datetime import date, timedelta

from actors.envs.local_fleet.apps.booking import CLOSES, DAYS, FIRST_ID, OPENS, PEOPLE, TABLES, Booking, titles
from actors.envs.local_fleet.apps.booking import first_day as first_day_of
from actors.envs.local_fleet.apps.problems import Call, Draft, Family, Solution

COUNTS = tuple(str(number) for number in range(11))
HOURS = tuple(str(hour) for hour in range(OPENS, CLOSES + 1))
LIVE = "SELECT id, space, day, start, end, owner, title FROM bookings WHERE status = 'booked'"


def tomorrow(today: str) -> str:
    return str(date.fromisoformat(today) + timedelta(1))


def free_spaces(d: Draft, day: str, start: int, end: int, kind: str, seats: int) -> list[tuple]:
    """Free spaces as ``(id, seats)``, smallest first."""
    return d.rows(
        "SELECT id, seats FROM spaces WHERE kind = ? AND seats >= ? AND id NOT IN (SELECT space FROM bookings"
        " WHERE day = ? AND status = 'booked' AND start < ? AND end > ?) ORDER BY seats, id",
        kind, seats, day, end, start,
    )  # fmt: skip


def new_title(d: Draft, house: str) -> str:
    used = {title for (title,) in d.rows("SELECT title FROM bookings")}
    return d.rng.choice([title for title in titles(house) if title not in used])


def _mine(d: Draft) -> tuple | None:
    return d.row(f"{LIVE} AND owner = ? AND day >= ?", d.me, d.today)


def _find(title: str) -> Call:
    return Call("list_bookings", {"title": title})


def _owner(d: Draft) -> Solution | None:
    row = d.row(LIVE)
    return Solution(f'Who owns the booking "{row[6]}"? Give the user id.', [_find(row[6])], row[5], PEOPLE)


def _start(d: Draft) -> Solution | None:
    row = d.row(LIVE)
    return Solution(f'At which hour does "{row[6]}" start? Answer with the hour only.', [_find(row[6])],
                    str(row[3]), HOURS)  # fmt: skip


def _count_mine(d: Draft) -> Solution | None:
    number = len(d.rows(f"{LIVE} AND owner = ?", d.me))
    call = Call("list_bookings", {"owner": d.me})
    return Solution("How many bookings do I have?", [call], str(number), COUNTS)


def _seats(d: Draft) -> Solution | None:
    row = d.row(LIVE)
    ((seats,),) = d.rows("SELECT seats FROM spaces WHERE id = ?", row[1])
    calls = [_find(row[6]), Call("list_spaces", {})]
    choices = tuple(map(str, (1, 2, 4, 6, 8, 10, 12, 16)))
    return Solution(f'How many seats has the space of "{row[6]}"?', calls, str(seats), choices)


def _book_named(d: Draft) -> Solution | None:
    space, name = d.row("SELECT id, name FROM spaces")
    day, start, title = tomorrow(d.today), d.rng.randrange(OPENS, CLOSES), new_title(d, d.data_key)
    clause = "start < ? AND end > ?"
    if d.rows(f"{LIVE} AND space = ? AND day = ? AND {clause}", space, day, start + 1, start):
        return None
    time = {"day": day, "start": start, "end": start + 1}
    calls = [Call("list_spaces", {}), Call("book_space", {"space": space, **time, "title": title})]
    return Solution(f'Book {name} for tomorrow from {start} to {start + 1} with the title "{title}".', calls)


def _book_smallest(d: Draft) -> Solution | None:
    seats, start, title = d.rng.choice((3, 5, 7, 9)), d.rng.randrange(OPENS, CLOSES), new_title(d, d.data_key)
    day = tomorrow(d.today)
    free = free_spaces(d, day, start, start + 1, "room", seats)
    if not free:
        return None
    time = {"day": day, "start": start, "end": start + 1}
    prompt = (
        f"Book the smallest free room with at least {seats} seats for tomorrow from {start} to {start + 1}"
        f' with the title "{title}". Answer with the booking id.'
    )
    number = FIRST_ID + len(d.rows("SELECT id FROM bookings"))
    calls = [
        Call("search_availability", {**time, "kind": "room", "seats": seats}),
        Call("book_space", {"space": free[0][0], **time, "title": title}),
    ]
    return Solution(prompt, calls, f"B{number}", tuple(f"B{n}" for n in range(FIRST_ID, number + 1)))


def _cancel(d: Draft) -> Solution | None:
    row = _mine(d)
    if row is None:
        return None
    return Solution(f'Cancel my booking "{row[6]}".', [_find(row[6]), Call("cancel_booking", {"id": row[0]})])


def _move(d: Draft) -> Solution | None:
    row, day = _mine(d), tomorrow(d.today)
    if row is None or row[2] == day:
        return None
    start = d.rng.randrange(OPENS, CLOSES)
    if d.rows(f"{LIVE} AND space = ? AND day = ? AND start <= ? AND end > ?", row[1], day, start, start):
        return None
    move = Call("move_booking", {"id": row[0], "day": day, "start": start, "end": start + 1})
    prompt = f'Move my booking "{row[6]}" to tomorrow from {start} to {start + 1}, in the same space.'
    return Solution(prompt, [_find(row[6]), move])


def _move_from_conflict(d: Draft) -> Solution | None:
    """The space is taken at that hour: another room must be found."""
    row, day = _mine(d), tomorrow(d.today)
    if row is None:
        return None
    taken = d.row(f"{LIVE} AND space = ? AND day = ? AND id != ?", row[1], day, row[0])
    if taken is None:
        return None
    free = free_spaces(d, day, taken[3], taken[3] + 1, "room", 1)
    if not free:
        return None
    time = {"day": day, "start": taken[3], "end": taken[3] + 1}
    prompt = (
        f'Move my booking "{row[6]}" to tomorrow from {taken[3]} to {taken[3] + 1}. Its space is taken then:'
        " use the smallest free room."
    )
    calls = [
        _find(row[6]),
        Call("search_availability", {**time, "kind": "room"}),
        Call("move_booking", {"id": row[0], **time, "space": free[0][0]}),
    ]
    return Solution(prompt, calls)


def _invite_two(d: Draft) -> Solution | None:
    row = _mine(d)
    if row is None or d.rows("SELECT seats FROM spaces WHERE id = ?", row[1])[0][0] < 3:
        return None
    first, second = d.rng.sample([person for person in PEOPLE if person != d.me], 2)
    calls = [_find(row[6]), *(Call("invite_guest", {"id": row[0], "person": person}) for person in (first, second))]
    return Solution(f'Invite {first} and {second} to my booking "{row[6]}".', calls)


def _book_and_invite(d: Draft) -> Solution | None:
    made = _book_smallest(d)
    if made is None:
        return None
    guests = d.rng.sample([person for person in PEOPLE if person != d.me], 2)
    invitations = [Call("invite_guest", {"id": made.answer, "person": person}) for person in guests]
    prompt = f"{made.prompt.removesuffix(' Answer with the booking id.')} Invite {guests[0]} and {guests[1]} to it."
    return Solution(prompt, [*made.calls, *invitations])


def _swap(d: Draft) -> Solution | None:
    row, made = _mine(d), _book_smallest(d)
    if row is None or made is None:
        return None
    calls = [_find(row[6]), Call("cancel_booking", {"id": row[0]}), *made.calls]
    # The cancelled hour must not have made a smaller room free.
    if row[2] == tomorrow(d.today):
        return None
    return Solution(f'Cancel my booking "{row[6]}". {made.prompt}', calls, made.answer, made.choices)


def _days(data_key: str, data_version: str) -> list[str]:
    monday = first_day_of(data_key, data_version)
    return [str(monday + timedelta(n)) for n in range(DAYS - 1)]


FAMILY = Family(
    application=Booking(),
    tables={"booking": TABLES},
    kinds={
        "owner": _owner,
        "start": _start,
        "count_mine": _count_mine,
        "seats": _seats,
        "book_named": _book_named,
        "book_smallest": _book_smallest,
        "cancel": _cancel,
        "move": _move,
        "move_from_conflict": _move_from_conflict,
        "invite_two": _invite_two,
        "book_and_invite": _book_and_invite,
        "swap": _swap,
    },
    data_keys={"train": "tower", "heldout": "annex"},
    people="SELECT id FROM people ORDER BY id",
    days=_days,
)


def main(argv: list[str] | None = None) -> None:
    FAMILY.main(argv, __doc__)


if __name__ == "__main__":
    main()
