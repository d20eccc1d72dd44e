"""Tasks for mail, in Fleet's task-file format: find, change and report, in 1 to 5 tool calls.

``python -m actors.envs.local_fleet.apps.mail_tasks --train 64 --heldout 32 --seed 1 --out-dir configs/tasks``

Held-out tasks are about another company (``lab``), none of whose subjects occurs in a training task.
"""

from __future__ import annotations

from actors.envs.local_fleet.apps.mail import CITIES, DATES, LABELS, PEOPLE, TABLES, Mail
from actors.envs.local_fleet.apps.problems import Call, Draft, Family, Solution

TEXTS = ("on my way", "sounds good", "not this week", "call me", "thank you", "please wait", "all done", "more soon")
NUMBERS = tuple(str(number) for number in range(100, 1000))
# First messages of threads to the one who asks: only these have a subject without "Re:".
OPENING = (
    "SELECT id, thread, sender, subject, body FROM messages"
    " WHERE recipient = ? AND archived = 0 AND subject NOT LIKE 'Re:%'"
)


def _find(subject: str) -> Call:
    return Call("search_mail", {"query": subject})


def _opening(d: Draft) -> tuple:
    return d.row(OPENING, d.me)


def _label_for(d: Draft) -> str:
    return d.rng.choice(LABELS[1:])


def _sender(d: Draft) -> Solution:
    row = _opening(d)
    return Solution(f'Who first wrote to me about "{row[3]}"? Give the user id.', [_find(row[3])], row[2], PEOPLE)


def _count_from(d: Draft) -> Solution | None:
    sender = _opening(d)[2]
    number = len(d.rows("SELECT id FROM messages WHERE recipient = ? AND sender = ? AND archived = 0", d.me, sender))
    call = Call("search_mail", {"sender": sender})
    return Solution(f"How many mails from {sender} are in my inbox?", [call], str(number), tuple(map(str, range(20))))


def _number(d: Draft) -> Solution:
    row = _opening(d)
    number = row[4].split()[-1].rstrip(".")
    calls = [_find(row[3]), Call("read_mail", {"id": row[0]})]
    return Solution(f'Which number stands in the first mail about "{row[3]}"?', calls, number, NUMBERS)


def _last_number(d: Draft) -> Solution | None:
    row = _opening(d)
    turns = d.rows("SELECT id, body FROM messages WHERE thread = ? ORDER BY rowid", row[1])
    if len(turns) < 2:
        return None
    number = turns[-1][1].split()[-1].rstrip(".")
    calls = [_find(row[3]), Call("read_thread", {"thread": row[1]})]
    return Solution(f'Which number stands in the last mail of the thread "{row[3]}"?', calls, number, NUMBERS)


def _city(d: Draft) -> Solution:
    row = _opening(d)
    ((city,),) = d.rows("SELECT city FROM contacts WHERE id = ?", row[2])
    calls = [_find(row[3]), Call("find_contact", {"query": row[2]})]
    return Solution(f'In which city is the sender of "{row[3]}"?', calls, city, CITIES)


def _reply(d: Draft) -> Solution:
    row, text = _opening(d), d.rng.choice(TEXTS)
    calls = [_find(row[3]), Call("reply_mail", {"id": row[0], "text": text})]
    return Solution(f'Reply "{text}" to the first mail about "{row[3]}".', calls)


def _send(d: Draft) -> Solution:
    to, text, subject = d.rng.choice([p for p in PEOPLE if p != d.me]), d.rng.choice(TEXTS), d.rng.choice(TEXTS)
    call = Call("send_mail", {"to": to, "subject": subject, "text": text})
    return Solution(f'Send {to} a mail with the subject "{subject}" and the text "{text}".', [call])


def _label(d: Draft) -> Solution:
    row, label = _opening(d), _label_for(d)
    calls = [_find(row[3]), Call("label_mail", {"id": row[0], "label": label})]
    return Solution(f'Give the first mail about "{row[3]}" the label {label}.', calls)


def _archive(d: Draft) -> Solution:
    row = _opening(d)
    return Solution(f'Archive the first mail about "{row[3]}".', [_find(row[3]), Call("archive_mail", {"id": row[0]})])


def _reply_label_archive(d: Draft) -> Solution:
    row, text, label = _opening(d), d.rng.choice(TEXTS), _label_for(d)
    calls = [
        _find(row[3]),
        Call("reply_mail", {"id": row[0], "text": text}),
        Call("label_mail", {"id": row[0], "label": label}),
        Call("archive_mail", {"id": row[0]}),
    ]
    return Solution(f'Reply "{text}" to the first mail about "{row[3]}", label it {label} and archive it.', calls)


def _write_to_city(d: Draft) -> Solution:
    person, city = d.row("SELECT id, city FROM contacts WHERE id != ?", d.me)
    text, subject = d.rng.choice(TEXTS), d.rng.choice(TEXTS)
    calls = [
        Call("find_contact", {"query": city}),
        Call("send_mail", {"to": person, "subject": subject, "text": text}),
    ]
    return Solution(f'Send my contact in {city} a mail with the subject "{subject}" and the text "{text}".', calls)


def _forward_two(d: Draft) -> Solution:
    first, second = d.rng.sample(d.rows(OPENING, d.me), 2)
    to = d.rng.choice([p for p in PEOPLE if p != d.me])
    calls = [call for row in (first, second)
             for call in (_find(row[3]), Call("forward_mail", {"id": row[0], "to": to}))]  # fmt: skip
    return Solution(f'Forward the first mails about "{first[3]}" and "{second[3]}" to {to}.', calls)


def _send_date(d: Draft) -> Solution:
    to = d.rng.choice([p for p in PEOPLE if p != d.me])
    call = Call("send_mail", {"to": to, "subject": "date", "text": d.today})
    return Solution(f'Send {to} a mail with the subject "date" whose text is today\'s date as YYYY-MM-DD.', [call])


FAMILY = Family(
    application=Mail(),
    tables={"mail": TABLES},
    kinds={
        "sender": _sender,
        "count_from": _count_from,
        "number": _number,
        "last_number": _last_number,
        "city": _city,
        "reply": _reply,
        "send": _send,
        "send_date": _send_date,
        "label": _label,
        "archive": _archive,
        "reply_label_archive": _reply_label_archive,
        "write_to_city": _write_to_city,
        "forward_two": _forward_two,
    },
    data_keys={"train": "firm", "heldout": "lab"},
    people="SELECT recipient FROM messages WHERE id = 'M10'",
    days=lambda data_key, data_version: list(DATES),
)


def main(argv: list[str] | None = None) -> None:
    FAMILY.main(argv, __doc__)


if __name__ == "__main__":
    main()
