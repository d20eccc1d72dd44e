"""Tasks for the ticket tracker, in Fleet's task-file format: find, change and report, in 1 to 5 tool calls.

``python -m actors.envs.local_fleet.apps.tracker_tasks --train 512 --heldout 160 --seed 1 --out-dir configs/tasks``

Held-out tasks live on another desk (``annex``), whose ticket titles occur on no training desk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from actors.envs.local_fleet.apps.problems import recorded, write_task_files
from actors.envs.local_fleet.apps.tracker import REMARKS, STATUSES, USERS, Desk, Ticket, Tracker, draw_desk, titles

DATES = ("2026-01-12", "2026-03-09", "2026-06-15", "2026-09-21")
DATA_KEYS = {"train": "desk", "heldout": "annex"}


@dataclass(frozen=True)
class Call:
    """One tool call of the solution."""

    tool: str
    arguments: dict[str, Any]

    @property
    def changes(self) -> bool:
        return self.tool not in ("search_tickets", "get_ticket", "list_users")


@dataclass(frozen=True)
class Problem:
    """A task together with what its maker knows: the calls that solve it and the answer that is right."""

    kind: str
    prompt: str
    calls: tuple[Call, ...]
    answer: str | None  # None: the task asks for nothing back
    choices: tuple[str, ...]  # every answer of this kind, the right one included
    desk: Desk
    data_key: str
    data_version: str
    env_variables: dict[str, str]

    @property
    def needs_context(self) -> bool:
        """Whether it can only be solved by one who knows who is logged in."""
        return self.kind in ("count_mine", "assign_me")

    def task(self, task_key: str) -> dict[str, Any]:
        """The task as Fleet's task files hold it, with ``kind`` as an extra field, and its recorded solution."""
        return {
            "task_key": task_key,
            "prompt": self.prompt,
            "env_key": Tracker.env_key,
            "env_version": Tracker.versions[-1],
            "data_key": self.data_key,
            "data_version": self.data_version,
            "env_variables": self.env_variables,
            "verifier_code": verifier_code(self),
            "task_modality": "tool_use",
            "difficulty": len(self.calls),
            "kind": self.kind,
            **recorded(self.calls, self.answer),
        }


# ------------------------------------------------------------------------------------------------- the verifier

_VERIFIER = '''\
def verify(env, final_answer=None):
    """{title}"""
    seed, current = env.db("seed"), env.db("current")
    tickets = {{row["id"]: row for row in seed.table("tickets").all()}}
    comments = [(row["ticket_id"], row["body"]) for row in seed.table("comments").all()]
    now = {{row["id"]: row for row in current.table("tickets").all()}}
{changes}\
    if now != tickets:
        return 0.0
    if sorted((row["ticket_id"], row["body"]) for row in current.table("comments").all()) != sorted(comments):
        return 0.0
    if current.table("users").all() != seed.table("users").all():
        return 0.0
{answer}\
    return 1.0
'''
_NEW_TICKET = """\
    new = [now.pop(key) for key in sorted(now) if key not in tickets]
    wanted = {wanted!r}
    if [{{name: row[name] for name in wanted}} for row in new] != [wanted]:
        return 0.0
"""
# Whoever lists every possible answer must not pass: of all words that could be an answer, only the right one may stand.
_ANSWER = """\
    words = "".join(c if c.isalnum() else " " for c in str(final_answer or "").lower()).split()
    if {{word for word in words if {candidate}}} != {{{answer!r}}}:
        return 0.0
"""


def verifier_code(problem: Problem) -> str:
    """Source of a Fleet verifier: the wanted change happened, nothing else did, and the answer is the right one."""
    changes = "".join(_expected_change(call) for call in problem.calls if call.changes)
    answer = ""
    if problem.answer is not None:
        numeric = problem.answer.isdigit()
        candidate = "word.isdigit()" if numeric else f"word in {sorted(c.lower() for c in problem.choices)!r}"
        answer = _ANSWER.format(candidate=candidate, answer=problem.answer.lower())
    title = problem.prompt.replace("\\", "").replace('"', "'")
    return _VERIFIER.format(title=title, changes=changes, answer=answer)


def _expected_change(call: Call) -> str:
    arguments = call.arguments
    if call.tool == "create_ticket":
        return _NEW_TICKET.format(wanted={**arguments, "status": "open"})
    if call.tool == "add_comment":
        return f"    comments.append(({arguments['id']!r}, {arguments['text']!r}))\n"
    column = {"set_status": "status", "set_priority": "priority", "assign_ticket": "assignee"}[call.tool]
    return f"    tickets[{arguments['id']!r}][{column!r}] = {arguments[column]!r}\n"


# ------------------------------------------------------------------------------------------------- kinds of task


@dataclass
class _Draft:
    """What a kind needs to write a problem: a random desk and a user who is logged in."""

    rng: random.Random
    desk: Desk
    me: str
    data_key: str

    def ticket(self) -> Ticket:
        return self.rng.choice(self.desk.tickets)

    def other(self, values: tuple, *taken: Any) -> Any:
        return self.rng.choice([value for value in values if value not in taken])

    def phrase(self, *phrases: str) -> str:
        return self.rng.choice(phrases)


@dataclass(frozen=True)
class _Solution:
    prompt: str
    calls: list[Call]
    answer: str | None = None
    choices: tuple[str, ...] = field(default=())


def _find(ticket: Ticket) -> Call:
    return Call("search_tickets", {"query": ticket.title})


def _status(ticket: Ticket, status: str) -> Call:
    return Call("set_status", {"id": ticket.id, "status": status})


def _priority(ticket: Ticket, priority: int) -> Call:
    return Call("set_priority", {"id": ticket.id, "priority": priority})


def _assign(ticket: Ticket, user: str) -> Call:
    return Call("assign_ticket", {"id": ticket.id, "assignee": user})


def _comment(ticket: Ticket, text: str) -> Call:
    return Call("add_comment", {"id": ticket.id, "text": text})


_LEVELS = (1, 2, 3, 4, 5)
_LEVEL_NAMES = tuple(str(level) for level in _LEVELS)
_COUNTS = tuple(str(count) for count in range(5))


def _owner(d: _Draft) -> _Solution:
    t = d.ticket()
    prompt = d.phrase('Who is assigned to the ticket "{}"?', 'Who works on "{}"?').format(t.title)
    return _Solution(prompt, [_find(t)], t.assignee, USERS)


def _report_status(d: _Draft) -> _Solution:
    t = d.ticket()
    prompt = d.phrase('What is the status of the ticket "{}"?', 'Which status does "{}" have?').format(t.title)
    return _Solution(prompt, [_find(t)], t.status, STATUSES)


def _report_priority(d: _Draft) -> _Solution:
    t = d.ticket()
    prompt = d.phrase('What is the priority of the ticket "{}"?', 'Which priority does "{}" have?').format(t.title)
    return _Solution(prompt, [_find(t)], str(t.priority), _LEVEL_NAMES)


def _with_status(d: _Draft, user: str, status: str) -> list[Ticket]:
    return [t for t in d.desk.tickets if t.assignee == user and t.status == status]


def _count(d: _Draft) -> _Solution | None:
    user, status = d.ticket().assignee, d.rng.choice(STATUSES)
    number = len(_with_status(d, user, status))
    if number >= len(_COUNTS):
        return None
    prompt = d.phrase("How many {} tickets does {} have?", "Count the {} tickets of {}.").format(status, user)
    return _Solution(prompt, [Call("search_tickets", {"status": status, "assignee": user})], str(number), _COUNTS)


def _count_mine(d: _Draft) -> _Solution | None:
    status = d.rng.choice(STATUSES)
    number = len(_with_status(d, d.me, status))
    if number >= len(_COUNTS):
        return None
    prompt = d.phrase("How many {} tickets do I have?", "Count my {} tickets.").format(status)
    return _Solution(prompt, [Call("search_tickets", {"status": status, "assignee": d.me})], str(number), _COUNTS)


def _most_urgent(d: _Draft) -> _Solution | None:
    user = d.ticket().assignee
    tickets = sorted(_with_status(d, user, "open"), key=lambda t: -t.priority)
    if len(tickets) < 2 or tickets[0].priority == tickets[1].priority:
        return None
    prompt = d.phrase("Which open ticket of {} is the most urgent?", "Name the most urgent open ticket of {}.")
    calls = [Call("search_tickets", {"status": "open", "assignee": user})]
    return _Solution(prompt.format(user) + " Give its id.", calls, tickets[0].id, tuple(t.id for t in d.desk.tickets))


def _last_comment(d: _Draft) -> _Solution | None:
    t = d.ticket()
    authors = [c.author for c in d.desk.comments if c.ticket_id == t.id]
    if not authors:
        return None
    prompt = d.phrase('Who wrote the last comment on "{}"?', 'Who commented last on the ticket "{}"?').format(t.title)
    return _Solution(prompt, [_find(t), Call("get_ticket", {"id": t.id})], authors[-1], USERS)


def _set_status(d: _Draft) -> _Solution:
    t = d.ticket()
    status = d.other(STATUSES, t.status)
    prompt = d.phrase('Set the status of "{}" to {}.', 'Change the ticket "{}" to {}.').format(t.title, status)
    return _Solution(prompt, [_find(t), _status(t, status)])


def _set_priority(d: _Draft) -> _Solution:
    t = d.ticket()
    level = d.other(_LEVELS, t.priority)
    prompt = d.phrase('Set the priority of "{}" to {}.', 'Give the ticket "{}" priority {}.').format(t.title, level)
    return _Solution(prompt, [_find(t), _priority(t, level)])


def _assign_user(d: _Draft) -> _Solution:
    t = d.ticket()
    user = d.other(USERS, t.assignee)
    prompt = d.phrase('Assign the ticket "{}" to {}.', 'Give "{}" to {}.').format(t.title, user)
    return _Solution(prompt, [_find(t), _assign(t, user)])


def _assign_me(d: _Draft) -> _Solution | None:
    t = d.ticket()
    if t.assignee == d.me:
        return None
    prompt = d.phrase('Assign the ticket "{}" to me.', 'Give "{}" to me.').format(t.title)
    return _Solution(prompt, [_find(t), _assign(t, d.me)])


def _add_comment(d: _Draft) -> _Solution:
    t, text = d.ticket(), d.rng.choice(REMARKS)
    prompt = d.phrase('Comment "{1}" on the ticket "{0}".', 'Add the comment "{1}" to "{0}".').format(t.title, text)
    return _Solution(prompt, [_find(t), _comment(t, text)])


def _create(d: _Draft) -> _Solution:
    title = d.other(tuple(titles(d.data_key)), *(t.title for t in d.desk.tickets))
    level, user = d.rng.choice(_LEVELS), d.rng.choice(USERS)
    prompt = d.phrase(
        'Create the ticket "{}" with priority {} for {}.', 'Open a new ticket "{}" with priority {} for {}.'
    )
    call = Call("create_ticket", {"title": title, "priority": level, "assignee": user})
    return _Solution(prompt.format(title, level, user), [call])


def _status_and_comment(d: _Draft) -> _Solution:
    t, text = d.ticket(), d.rng.choice(REMARKS)
    status = d.other(STATUSES, t.status)
    prompt = f'Set the status of "{t.title}" to {status} and comment "{text}".'
    return _Solution(prompt, [_find(t), _status(t, status), _comment(t, text)])


def _priority_and_assign(d: _Draft) -> _Solution:
    t = d.ticket()
    level, user = d.other(_LEVELS, t.priority), d.other(USERS, t.assignee)
    prompt = f'Give the ticket "{t.title}" priority {level} and assign it to {user}.'
    return _Solution(prompt, [_find(t), _priority(t, level), _assign(t, user)])


def _hand_over(d: _Draft) -> _Solution | None:
    giver = d.ticket().assignee
    tickets = sorted(_with_status(d, giver, "open"), key=lambda t: (-t.priority, t.id))
    if len(tickets) != 2:
        return None
    taker = d.other(USERS, giver)
    prompt = d.phrase("Assign both open tickets of {} to {}.", "Give both open tickets of {} to {}.")
    find = Call("search_tickets", {"status": "open", "assignee": giver})
    return _Solution(prompt.format(giver, taker), [find, *(_assign(t, taker) for t in tickets)])


def _two_tickets(d: _Draft) -> _Solution:
    first, second = d.rng.sample(d.desk.tickets, 2)
    status = d.other(STATUSES, first.status, second.status)
    prompt = f'Set the status of "{first.title}" and "{second.title}" to {status}.'
    return _Solution(prompt, [_find(first), _status(first, status), _find(second), _status(second, status)])


def _full_update(d: _Draft) -> _Solution:
    t, text = d.ticket(), d.rng.choice(REMARKS)
    status, level, user = d.other(STATUSES, t.status), d.other(_LEVELS, t.priority), d.other(USERS, t.assignee)
    prompt = f'Set "{t.title}" to {status} and priority {level}, assign it to {user} and comment "{text}".'
    calls = [_find(t), _status(t, status), _priority(t, level), _assign(t, user), _comment(t, text)]
    return _Solution(prompt, calls)


# How often each kind occurs, in parts.
KINDS: dict[str, tuple[int, Callable[[_Draft], _Solution | None]]] = {
    "owner": (8, _owner),
    "report_status": (6, _report_status),
    "report_priority": (6, _report_priority),
    "count": (7, _count),
    "count_mine": (5, _count_mine),
    "most_urgent": (5, _most_urgent),
    "last_comment": (7, _last_comment),
    "set_status": (8, _set_status),
    "set_priority": (7, _set_priority),
    "assign_user": (7, _assign_user),
    "assign_me": (6, _assign_me),
    "add_comment": (7, _add_comment),
    "create": (5, _create),
    "status_and_comment": (6, _status_and_comment),
    "priority_and_assign": (6, _priority_and_assign),
    "hand_over": (3, _hand_over),
    "two_tickets": (4, _two_tickets),
    "full_update": (4, _full_update),
}


# -------------------------------------------------------------------------------------------------- generating


def draw_problem(rng: random.Random, data_key: str, kind: str | None = None) -> Problem:
    """One problem on a fresh desk. ``rng`` decides everything, the kind included unless it is given."""
    if kind is None:
        kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    write = KINDS[kind][1]
    # Some desks cannot carry some kinds (nobody has two open tickets): draw until one can.
    while True:
        data_version = f"s{rng.randrange(10**6)}"
        desk = draw_desk(data_key, data_version)
        # The one who is logged in usually has tickets of their own.
        me = rng.choice(desk.tickets).assignee if rng.random() < 0.8 else rng.choice(USERS)
        solution = write(_Draft(rng, desk, me, data_key))
        if solution is not None:
            break
    env_variables = {"CURRENT_DATE": rng.choice(DATES), "LOGGED_IN_USER": me, "LOGGED_IN_NAME": me.title()}
    return Problem(
        kind=kind,
        prompt=solution.prompt,
        calls=tuple(solution.calls),
        answer=solution.answer,
        choices=solution.choices,
        desk=desk,
        data_key=data_key,
        data_version=data_version,
        env_variables=env_variables,
    )


def problems(split: str, count: int, seed: int) -> list[tuple[str, Problem]]:
    """``count`` problems of a split with their task keys, no two of them alike."""
    rng = random.Random(f"tracker-tasks/{split}/{seed}")
    found: dict[tuple[str, str], Problem] = {}
    while len(found) < count:
        problem = draw_problem(rng, DATA_KEYS[split])
        found.setdefault((problem.prompt, problem.data_version), problem)
    return [(f"tracker_{split}_{index:04d}_{problem.kind}", problem) for index, problem in enumerate(found.values())]


def main(argv: list[str] | None = None) -> None:
    write_task_files("tracker", problems, argv, __doc__, train=512, heldout=160)


if __name__ == "__main__":
    main()
