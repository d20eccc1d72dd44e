"""Each task of booking, mail and office: its verifier tells the right work from the wrong, its two splits are apart."""

import json
import random
import re
from contextlib import closing

import pytest

from actors.envs.local_fleet.apps import APPLICATIONS, booking, booking_tasks, mail, mail_tasks, office_tasks
from actors.envs.local_fleet.apps.problems import open_database, play, slips
from actors.envs.local_fleet.verifier_worker import run_verifier
from actors.envs.partial_reward import partial_reward
from actors.task import load_tasks

MODULES = {"booking": booking_tasks, "mail": mail_tasks, "office": office_tasks}
SHIPPED = "configs/tasks/{}_{}.json"
KINDS = [(name, kind) for name, module in MODULES.items() for kind in module.FAMILY.kinds]


class Grader:
    """Grades attempts at one problem with its own verifier, as the sandbox does, in this process."""

    def __init__(self, problem, folder):
        self.problem, self.folder = problem, folder
        self.code = problem.task("t")["verifier_code"]
        self._write("seed", lambda database: None)

    def _write(self, name, change):
        problem = self.problem
        with closing(open_database(problem.application, problem.data_key, problem.data_version)) as database:
            result = change(database)
            database.commit()
            (self.folder / f"{name}.db").write_bytes(database.serialize())
        return result

    def solve(self, database):
        return play(self.problem, database)

    def grade(self, change):
        """``change(database)`` makes the attempt and returns the answer. Returns the reward and what was printed."""
        answer = self._write("current", change)
        paths = {name: str(self.folder / f"{name}.db") for name in ("seed", "current")}
        job = {"code": self.code, "function_name": "verify", "args": [], "kwargs": {"final_answer": answer},
               "databases": paths, "instance_id": "i", "env_key": "e", "env_variables": {}}  # fmt: skip
        verdict = run_verifier(job)
        assert verdict["success"], verdict["error"]
        return verdict["result"], verdict["stdout"]


@pytest.mark.parametrize(("name", "kind"), KINDS)
def test_the_verifier_accepts_the_solution_and_refuses_every_slip(name, kind, tmp_path):
    family = MODULES[name].FAMILY
    for data_key in family.data_keys.values():
        problem = family.draw(random.Random(kind), data_key, kind)
        grader = Grader(problem, tmp_path)
        assert grader.grade(grader.solve)[0] == 1.0
        untouched, stdout = grader.grade(lambda database: None)
        assert untouched == 0.0, "an untouched database must not pass"
        assert partial_reward(stdout) == 0.0
        wrong = slips(problem)
        assert wrong
        for slip in wrong:
            reward, _ = grader.grade(lambda database, slip=slip: play(slip, database, strict=False))
            assert reward == 0.0, slip.solution
        for tables in family.tables.values():

            def spoil(database, table=tables[0], solve=grader.solve):
                answer = solve(database)
                database.execute(f"UPDATE {table} SET name = 'Zoe' WHERE id = 'ana'")
                return answer

            assert grader.grade(spoil)[0] == 0.0, "a side effect must not pass"


def test_half_of_the_work_earns_half_of_the_partial_reward(tmp_path):
    problem = office_tasks.FAMILY.draw(random.Random(1), "hq", "answer_request")
    grader = Grader(problem, tmp_path)
    without_reply = next(s for s in slips(problem) if "reply_mail" not in [call.tool for call in s.solution.calls])
    reward, stdout = grader.grade(lambda database: play(without_reply, database))
    assert (reward, partial_reward(stdout)) == (0.0, 0.5)
    assert re.findall(r"^App (\S+): (\d)$", stdout, re.MULTILINE) == [("booking", "1"), ("mail", "0")]


def test_an_application_that_only_stayed_untouched_earns_nothing(tmp_path):
    problem = office_tasks.FAMILY.draw(random.Random(1), "hq", "tell_owner")
    reward, stdout = Grader(problem, tmp_path).grade(lambda database: None)
    assert "App booking: 1" in stdout and (reward, partial_reward(stdout)) == (0.0, 0.0)


def test_the_wording_of_a_reply_is_free_but_the_booking_id_is_not(tmp_path):
    problem = office_tasks.FAMILY.draw(random.Random(2), "hq", "answer_request")
    grader = Grader(problem, tmp_path)

    def reply(text):
        def change(database):
            play(problem, database)
            database.execute("UPDATE messages SET body = ? WHERE rowid = (SELECT max(rowid) FROM messages)", (text,))

        return grader.grade(change)[0]

    made = problem.solution.calls[-1].mentions[0]
    assert reply(f"Done: it is {made}, see you.") == 1.0
    assert reply("Done: it is B99, see you.") == 0.0


@pytest.mark.parametrize("name", MODULES)
def test_the_expert_solves_every_shipped_task_and_none_is_solved_already(name, tmp_path):
    for split, count in (("train", 64), ("heldout", 32)):
        for key, problem in MODULES[name].FAMILY.problems(split, count, seed=1):
            grader = Grader(problem, tmp_path)
            assert (grader.grade(grader.solve)[0], grader.grade(lambda database: None)[0]) == (1.0, 0.0), key


@pytest.mark.parametrize("name", MODULES)
def test_shipped_task_files_are_what_the_generator_writes(name, tmp_path):
    MODULES[name].main(["--out-dir", str(tmp_path)])
    for split in ("train", "heldout"):
        with open(SHIPPED.format(name, split), encoding="utf-8") as shipped:
            assert (tmp_path / f"{name}_{split}.json").read_text(encoding="utf-8") == shipped.read()


@pytest.mark.parametrize("name", MODULES)
def test_shipped_tasks_cover_all_kinds_and_the_splits_are_apart(name):
    family = MODULES[name].FAMILY
    train, heldout = (load_tasks(SHIPPED.format(name, split)) for split in ("train", "heldout"))
    assert (len(train), len(heldout)) == (64, 32)
    for tasks in (train, heldout):
        assert {task.kind for task in tasks} == set(family.kinds)
        assert all(1 <= task.difficulty <= 6 for task in tasks)
        assert len({(task.prompt, task.data_version) for task in tasks}) == len(tasks)
        assert all({"CURRENT_DATE", "LOGGED_IN_USER", "LOGGED_IN_NAME"} <= set(task.env_variables) for task in tasks)
    assert not {task.data_key for task in train} & {task.data_key for task in heldout}
    unseen = {*booking.titles("annex"), *mail.subjects("lab"), *booking.NAMES[True]}
    text = json.dumps([task.prompt for task in train])
    assert not [word for word in unseen if word in text], "a held-out title, subject or space occurs in training"


@pytest.mark.parametrize("name", MODULES)
def test_some_tasks_need_the_date_or_the_user(name):
    tasks = load_tasks(SHIPPED.format(name, "train"))
    needing = [task for task in tasks if re.search(r"\b(tomorrow|my|me|I|today's)\b", task.prompt)]
    assert len(needing) >= 8


@pytest.mark.parametrize(
    ("name", "data_key", "extra"),
    [("booking", "tower", {"invite_guest"}), ("mail", "firm", {"forward_mail"}),
     ("office", "hq", {"invite_guest", "forward_mail"})],
)  # fmt: skip
def test_seeds_are_deterministic_and_the_newer_version_has_more_tools(name, data_key, extra):
    application = APPLICATIONS[name]

    def dump(key, version):
        with closing(open_database(application, key, version)) as database:
            return list(database.iterdump())

    assert dump(data_key, "s1") == dump(data_key, "s1")
    assert len({str(dump(key, version)) for key in (data_key, "other") for version in ("s1", "s2")}) == 4
    old, new = ({tool.name for tool in application.at(version).tools} for version in application.versions)
    assert new - old == extra and old < new and len(old) >= 6
    for tool in application.tools:
        assert tool.input_schema["additionalProperties"] is False
        assert set(tool.input_schema["required"]) <= set(tool.input_schema["properties"])
    names = [tool.name for tool in application.tools]
    assert len(set(names)) == len(names), "two tools of one name"
