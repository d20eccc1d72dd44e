"""The ticket tracker keeps its rules, and each task's verifier tells the right work from the wrong."""

import json
import random
import re
import sqlite3

import pytest
from fleet.verifiers.local_executor import execute_verifier_local

from actors.envs.local_fleet.application import ToolError
from actors.envs.local_fleet.apps import APPLICATIONS
from actors.envs.local_fleet.apps.tracker import STATUSES, draw_desk, titles
from actors.envs.local_fleet.apps.tracker_expert import Attempt, episode, open_desk
from actors.envs.local_fleet.apps.tracker_tasks import KINDS, draw_problem, main
from actors.task import load_tasks

TRACKER = APPLICATIONS["tracker"]
TOOLS = {tool.name: tool for tool in TRACKER.tools}
SHIPPED = "configs/tasks/tracker_{}.json"


@pytest.fixture
def desk():
    connection = open_desk("desk", "s1")
    yield connection
    connection.close()


def call(desk, name, **arguments):
    variables = {"LOGGED_IN_USER": "mia", "CURRENT_DATE": "2026-01-12"}
    return TOOLS[name].call(desk, arguments, variables)


def contents(connection):
    return list(connection.iterdump())


# ------------------------------------------------------------------------------------------------------- the desk


def test_the_same_keys_give_the_same_desk_and_other_keys_another():
    first, again, other = open_desk("desk", "s1"), open_desk("desk", "s1"), open_desk("desk", "s2")
    assert contents(first) == contents(again) != contents(other)
    # Written down once: a changed generator would silently change every shipped task.
    assert first.execute("SELECT * FROM tickets ORDER BY id LIMIT 1").fetchone() == (
        "T14", "new scanner", "closed", 5, "dan",
    )  # fmt: skip


def test_the_desks_for_training_and_testing_share_words_but_no_title():
    train, annex = set(titles("desk")), set(titles("annex"))
    assert not train & annex
    assert {w for t in annex for w in t.split()} <= {w for t in train for w in t.split()}
    for version in range(50):
        assert {t.title for t in draw_desk("annex", f"s{version}").tickets} <= annex


def test_every_tool_states_a_closed_object_schema():
    assert len(TOOLS) >= 6
    for tool in TOOLS.values():
        schema = tool.input_schema
        assert schema["type"] == "object" and schema["additionalProperties"] is False
        assert set(schema["required"]) <= set(schema["properties"])
        assert all(p["type"] in ("string", "integer") for p in schema["properties"].values())


# ------------------------------------------------------------------------------------------------------ the tools


def test_search_filters_counts_and_puts_the_most_urgent_first(desk):
    everything = call(desk, "search_tickets")
    assert everything["n"] == len(everything["tickets"]) == 10
    priorities = [row[3] for row in everything["tickets"]]
    assert priorities == sorted(priorities, reverse=True)
    pending = call(desk, "search_tickets", status="pending", assignee="ivo")
    assert pending["tickets"] == [r for r in everything["tickets"] if r[2] == "pending" and r[4] == "ivo"] != []
    assert call(desk, "search_tickets", query="NEW SCAN")["tickets"] == [["T14", "new scanner", "closed", 5, "dan"]]
    assert call(desk, "search_tickets", query="%") == {"n": 0, "tickets": []}


def test_changes_are_what_a_later_look_shows(desk):
    call(desk, "set_status", id="T14", status="open")
    call(desk, "set_priority", id="T14", priority=1)
    call(desk, "assign_ticket", id="T14", assignee="eva")
    call(desk, "add_comment", id="T14", text="parts ordered")
    seen = call(desk, "get_ticket", id="T14")
    assert seen["ticket"] == ["T14", "new scanner", "open", 1, "eva"]
    assert seen["comments"][0] == ["mia", "parts ordered"]
    created = call(desk, "create_ticket", title="hot cable", priority=2, assignee="ben")["id"]
    assert call(desk, "get_ticket", id=created) == {"ticket": [created, "hot cable", "open", 2, "ben"], "comments": []}
    assert ["ana", "Ana"] in call(desk, "list_users")["users"]


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("get_ticket", {"id": "T99"}, "no ticket T99"),
        ("get_ticket", {}, "missing argument id"),
        ("get_ticket", {"id": 14}, "id must be a string"),
        ("set_status", {"id": "T14", "status": "done"}, "status must be one of open, pending, closed"),
        ("set_status", {"id": "T14", "status": ["open"]}, "status must be one of open, pending, closed"),
        ("set_priority", {"id": "T14", "priority": 9}, "priority must be from 1 to 5"),
        ("set_priority", {"id": "T14", "priority": "3"}, "priority must be an integer"),
        ("set_priority", {"id": "T14", "priority": True}, "priority must be an integer"),
        ("assign_ticket", {"id": "T14", "assignee": "zoe"}, "no user zoe"),
        ("assign_ticket", {"id": "T14", "user": "ana"}, "unknown argument user, expected id, assignee"),
        ("add_comment", {"id": "T14", "text": "  "}, "text must not be empty"),
        ("search_tickets", {"assignee": "zoe"}, "no user zoe"),
        ("list_users", {"page": 2}, "unknown argument page, expected none"),
    ],
)
def test_a_wrong_call_is_refused_with_a_reason_and_changes_nothing(desk, name, arguments, message):
    before = contents(desk)
    with pytest.raises(ToolError, match=re.escape(message)):
        call(desk, name, **arguments)
    assert contents(desk) == before


# ----------------------------------------------------------------------------------------------------- the tasks


class Grader:
    """Grades attempts at one problem with its own verifier, on database files, as Fleet's runner does."""

    def __init__(self, problem, folder):
        self.problem = problem
        self.code = problem.task("t")["verifier_code"]
        self.seed, self.current = str(folder / "seed.db"), str(folder / "current.db")
        self._write(open_desk(problem.data_key, problem.data_version), self.seed)

    def _write(self, connection, path):
        connection.commit()  # a backup waits for ever on an open transaction
        with sqlite3.connect(path) as target:
            connection.backup(target)
        target.close()

    def grade(self, turns, answer=None):
        attempt = Attempt(self.problem)
        for message in turns:
            if message["role"] == "assistant":
                attempt.turn(message["content"])
        if answer is not None:
            attempt.answer = answer
        self._write(attempt.desk, self.current)
        result = execute_verifier_local(self.code, self.seed, self.current, attempt.answer)
        assert result["success"], result["error"]
        if answer is None:
            assert attempt.solved() == (result["result"] == 1.0)
        attempt.close()
        return result["result"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_verifier_accepts_the_solution_and_refuses_every_slip(kind, tmp_path):
    rng = random.Random(kind)
    for data_key in ("desk", "annex"):
        problem = draw_problem(rng, data_key, kind)
        grader = Grader(problem, tmp_path)
        clean = episode(problem)
        assert grader.grade(clean) == 1.0
        assert grader.grade([]) == 0.0, "an untouched desk must not pass"
        for _ in range(5):
            slipped = episode(problem, slip=rng)
            assert grader.grade(slipped) == 0.0, slipped
        extra = {"role": "assistant", "content": '<tool_call>{"name":"add_comment","arguments":{"id":"%s","text":"x"}}'}
        extra["content"] %= problem.desk.tickets[0].id
        assert grader.grade([extra, *clean]) == 0.0, "a side effect must not pass"


def test_an_answer_may_be_a_sentence_but_not_a_list_of_guesses(tmp_path):
    problem = draw_problem(random.Random(3), "desk", "owner")
    grader = Grader(problem, tmp_path)
    look = episode(problem)[:-1]
    assert grader.grade(look, answer=f"It is assigned to {problem.answer.title()}.") == 1.0
    assert grader.grade(look, answer="It is one of " + ", ".join(problem.choices)) == 0.0
    assert grader.grade(look, answer="") == 0.0


def test_shipped_task_files_are_what_the_generator_writes(tmp_path):
    main(["--train", "512", "--heldout", "160", "--seed", "1", "--out-dir", str(tmp_path)])
    for split in ("train", "heldout"):
        with open(SHIPPED.format(split), encoding="utf-8") as shipped:
            assert (tmp_path / f"tracker_{split}.json").read_text(encoding="utf-8") == shipped.read()


def test_shipped_tasks_load_and_cover_all_kinds_from_one_to_five_calls():
    train, heldout = load_tasks(SHIPPED.format("train")), load_tasks(SHIPPED.format("heldout"))
    assert len(train) >= 480 and len(heldout) >= 128
    for tasks in (train, heldout):
        assert {task.difficulty for task in tasks} == {1, 2, 3, 4, 5}
        assert {task.kind for task in tasks} == set(KINDS)
        assert len({(task.prompt, task.data_version) for task in tasks}) == len(tasks)
        assert all({"CURRENT_DATE", "LOGGED_IN_USER", "LOGGED_IN_NAME"} <= set(task.env_variables) for task in tasks)
    quoted = [{q for task in tasks for q in re.findall(r'"(\w+ \w+)"', task.prompt)} for tasks in (train, heldout)]
    assert not quoted[0] & quoted[1] & set(titles("annex")), "a held-out title occurs in training"


def test_results_are_plain_json(desk):
    for name, arguments in (("search_tickets", {}), ("get_ticket", {"id": "T14"}), ("list_users", {})):
        result = call(desk, name, **arguments)
        assert json.loads(json.dumps(result)) == result
    assert set(STATUSES) == {"open", "pending", "closed"}
