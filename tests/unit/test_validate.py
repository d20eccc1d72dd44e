"""``fleet-rl validate`` over HTTP: a real local Fleet, and an OpenAI-compatible endpoint that answers as the expert."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import DeadlinesConfig
from actors.envs.local_fleet.apps.tracker_tasks import problems
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.task import TaskFileError
from actors.tool_calls import ToolCall
from deploy.validate import main
from tests import teacher_server
from tests.fleet_faults import KEY, LocalFleet
from tests.s3_server import ENVIRONMENT, serving_s3
from tests.teacher_server import COMPLETION_TOKENS, MODEL, PROMPT_TOKENS, serving_teacher
from train.chat.endpoint import GIVE_UP_AFTER, RETRIES, ChatEndpoint
from train.chat.protocol import TEACHER, EndpointFailed, EndpointGone
from train.data.candidate import read_candidate
from train.data.estimate import Prices
from train.data.journal import JOURNAL, Journal, JournalError, Result, read_journal
from train.data.teacher import TeacherSettings
from train.data.validation import REPORT, TASKS, ValidateOptions, Validation
from train.data.verdict import Checks
from train.s3 import _client, upload
from train.statistics import pass_at_k

ROOT = Path(__file__).resolve().parents[2]
PROBLEMS = [problem for _, problem in problems("train", 40, 3)]
CHANGING = [p for p in PROBLEMS if p.answer is None and len(p.calls) >= 2]
ASKING = [p for p in PROBLEMS if p.answer is not None]
PASSES = "def verify(env, final_answer=None):\n    return 1.0\n"
RAISES = "def verify(env, final_answer=None):\n    return 1 / 0\n"
STATE_ONLY = """def verify(env):
    before, after = ({t: env.db(d).table(t).all() for t in ("tickets", "comments")} for d in ("seed", "current"))
    return float(before != after)
"""


@pytest.fixture(scope="module")
def fleet():
    with LocalFleetProcess() as process:
        yield LocalFleet(process)


@pytest.fixture
def teacher(fleet, monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.setenv("FLEET_BASE_URL", fleet.url)
    monkeypatch.setenv("OPENAI_API_KEY", teacher_server.KEY)
    fleet.arm()
    with serving_teacher() as server:
        server.problems = {problem.prompt: problem for problem in PROBLEMS}
        yield server
    fleet.arm()
    assert fleet.running() == []


def recorded(problem, key="t", **fields):
    """The problem's task with its solution."""
    calls = [{"name": call.tool, "arguments": call.arguments} for call in problem.calls]
    return problem.task(key) | {"reference_tool_calls": calls, "reference_answer": problem.answer or "ok"} | fields


def write(folder, tasks):
    path = folder / "in.json"
    path.write_text(json.dumps(tasks))
    return path


def taught(teacher, **fields):
    return TeacherSettings(**({"url": teacher.url, "model": MODEL, "max_turns": 8} | fields))


def options_of(folder, tasks, checks, **fields):
    fields = {"concurrency": 4, "verify_backoff_s": (0.01,)} | fields
    return ValidateOptions(str(write(folder, tasks)), folder / "out", checks, **fields)


async def validate(options):
    """The report, by the very calls that the command makes."""
    validation, settings = Validation(options), options.checks.teacher
    teacher = None if settings is None else ChatEndpoint(settings, teacher_server.KEY, 30.0, TEACHER)
    closed = await validation.run(KEY, os.environ["FLEET_BASE_URL"], teacher, lambda progress: None)
    assert closed.left == ()
    return validation.write()


def command(folder, tasks, *arguments, teacher=None):
    given = ["--tasks", str(tasks if isinstance(tasks, Path) else write(folder, tasks)), "--out", str(folder / "out")]
    if teacher is not None:
        given += ["--teacher-url", teacher.url, "--teacher-model", MODEL]
    return [*given, *arguments]


def by_key(report):
    return {one.task_key: one for one in report.tasks}


def kinds(judgement):
    return [(reason.check, reason.kind) for reason in judgement.reasons]


# -- what is found


@pytest.mark.parametrize("channel", ["native", "text"])
async def test_tasks_that_hold_are_accepted_as_they_were_with_their_pass_rates(tmp_path, fleet, teacher, channel):
    tasks = [recorded(p, f"t{n}", mine={"kept": n}) for n, p in enumerate([*CHANGING[:2], *ASKING[:2]])]
    made = len(fleet.instances())
    report = await validate(options_of(tmp_path, tasks, Checks(teacher=taught(teacher, tools=channel), attempts=2)))
    assert len(fleet.instances()) == made + len(tasks)  # one instance goes through all checks of a task
    assert report.total.verdicts == {"accepted": 4} and report.total.replays == {"passed": 4}
    written = json.loads((tmp_path / "out" / TASKS).read_text())
    found = {"verdict": "accepted", "replay": "passed", "untouched": 0.0, "replayed": 1.0}
    rates = {"model": MODEL, "attempts": 2, "graded": 2, "solved": 2, "pass_at_1": 1.0, "pass_at_k": 1.0}
    assert written == [task | {"metadata": {"validation": found | {"teacher": rates}}} for task in tasks]
    turns = 2 * sum(len(problem.calls) + 1 for problem in [*CHANGING[:2], *ASKING[:2]])
    spent = report.spent
    assert (spent.calls, spent.prompt_tokens, spent.completion_tokens) == (
        turns,
        turns * PROMPT_TOKENS,
        turns * COMPLETION_TOKENS,
    )
    assert spent.episodes == 4 * (1 + 1 + 2)
    system = teacher.bodies[0]["messages"][0]["content"]
    assert ("<tool_call>" in system) == ("## Available Tools" in system) == (channel == "text")
    assert ("tools" in teacher.bodies[0]) == (channel == "native")


async def test_every_planted_fault_is_found_and_named(tmp_path, teacher):
    good, asking = CHANGING[0], ASKING[0]
    wrong = recorded(good)["reference_tool_calls"][:-1]
    planted = {
        "fine": recorded(good),
        "passes_untouched": recorded(good, verifier_code=PASSES),
        "raises": recorded(good, verifier_code=RAISES),
        "no_syntax": recorded(good, verifier_code="def verify(env:\n"),
        "no_number": recorded(good, verifier_code="def verify(env):\n    return 'yes'\n"),
        "no_verifier": recorded(good, verifier_code=None),
        "unknown_tool": recorded(good, reference_tool_calls=[{"name": "set_statuz", "arguments": {}}]),
        "refused_call": recorded(good, reference_tool_calls=[{"name": "get_ticket", "arguments": {"id": 999_999}}]),
        "malformed_calls": recorded(good, reference_tool_calls=[{"arguments": {}}]),
        "wrong_calls": recorded(good, reference_tool_calls=wrong),
        "wrong_answer": recorded(asking, reference_answer="nobody"),
        "unsolvable": recorded(ASKING[1]),
        "two": recorded(good, verifier_code=PASSES, reference_tool_calls=[{"name": "nothing", "arguments": {}}]),
    }
    teacher.unsolved = {ASKING[1].prompt}
    tasks = [task | {"task_key": key} for key, task in planted.items()]
    report = await validate(options_of(tmp_path, tasks, Checks(teacher=taught(teacher), attempts=2)))
    found = by_key(report)
    assert {key: kinds(one) for key, one in found.items()} == {
        "fine": [],
        "passes_untouched": [("untouched", "passes_untouched")],
        "raises": [("untouched", "verifier_error")],
        "no_syntax": [("verifier", "verifier_error")],
        "no_number": [("untouched", "verifier_error")],
        "no_verifier": [("verifier", "no_verifier")],
        "unknown_tool": [("replay", "call_failed")],
        "refused_call": [("replay", "call_failed")],
        "malformed_calls": [("replay", "malformed_calls")],
        "wrong_calls": [("replay", "fails_after_replay")],
        "wrong_answer": [("replay", "fails_after_replay")],
        "unsolvable": [("teacher", "never_solved")],
        "two": [("untouched", "passes_untouched"), ("replay", "call_failed")],
    }
    assert {one.verdict for key, one in found.items() if key != "fine"} == {"rejected"}
    assert "ZeroDivisionError" in found["raises"].reasons[0].detail
    assert found["raises"].untouched is None
    unknown = found["unknown_tool"].reasons[0].detail
    assert unknown.startswith("call 1 of 1, set_statuz({}): there is no tool 'set_statuz'; did you mean set_status")
    assert [task["task_key"] for task in json.loads((tmp_path / "out" / TASKS).read_text())] == ["fine"]
    # The teacher is asked about nothing that is rejected already.
    assert teacher.openings(good.prompt) == 2 and teacher.openings(ASKING[1].prompt) == 2
    assert teacher.openings(asking.prompt) == 0


async def test_without_a_recorded_answer_a_verifier_that_asks_for_one_decides_nothing(tmp_path, teacher):
    tasks = [
        recorded(ASKING[0], "unanswered", reference_answer=None),
        recorded(CHANGING[0], "needs_none", reference_answer=None, verifier_code=STATE_ONLY),
        recorded(CHANGING[0], "no_calls", reference_tool_calls=None),
    ]
    found = by_key(await validate(options_of(tmp_path, tasks, Checks())))
    assert {key: (one.verdict, one.replay) for key, one in found.items()} == {
        "unanswered": ("accepted", "executed"),
        "needs_none": ("accepted", "passed"),
        "no_calls": ("accepted", "not checked"),
    }


async def test_each_check_can_be_left_out(tmp_path, teacher):
    task = recorded(CHANGING[0], verifier_code=PASSES)
    assert (await validate(options_of(tmp_path, [task], Checks(verifier=False)))).total.verdicts == {"accepted": 1}
    task = recorded(CHANGING[0], reference_tool_calls=[{"name": "nothing"}])
    assert (await validate(options_of(tmp_path, [task], Checks(replay=False)))).total.verdicts == {"accepted": 1}


async def test_tasks_that_are_never_solved_can_be_kept_as_hard(tmp_path, teacher):
    teacher.unsolved = {CHANGING[0].prompt}
    checks = Checks(teacher=taught(teacher), attempts=3, unsolved="hard")
    report = await validate(options_of(tmp_path, [recorded(CHANGING[0], "h"), recorded(CHANGING[1], "e")], checks))
    assert {key: one.verdict for key, one in by_key(report).items()} == {"h": "hard", "e": "accepted"}
    hard = json.loads((tmp_path / "out" / TASKS).read_text())[0]["metadata"]["validation"]
    assert (hard["verdict"], hard["teacher"]["pass_at_1"], hard["teacher"]["pass_at_k"]) == ("hard", 0.0, 0.0)
    assert report.total.pass_at_1 == 0.5 and report.total.pass_at_k == 0.5


async def test_the_file_keeps_its_form_and_of_duplicates_the_first_stays(tmp_path, teacher):
    tasks = {"version": "v9", "tasks": [recorded(CHANGING[0], "a"), recorded(CHANGING[1], "a")]}
    report = await validate(options_of(tmp_path, tasks, Checks()))
    written = json.loads((tmp_path / "out" / TASKS).read_text())
    assert written["version"] == "v9" and [t["prompt"] for t in written["tasks"]] == [CHANGING[0].prompt]
    assert (report.input.tasks, report.input.duplicates) == (1, 1)


async def test_a_quota_below_the_concurrency_only_makes_tasks_wait(tmp_path, fleet, teacher):
    httpx.post(f"{fleet.url}/_local/faults", json={"instance_limit": 1, "faults": []}).raise_for_status()
    tasks = [recorded(problem, f"t{n}") for n, problem in enumerate(PROBLEMS[:3])]
    report = await validate(options_of(tmp_path, tasks, Checks(), concurrency=3))
    assert report.total.verdicts == {"accepted": 3}


async def test_a_screen_is_not_supported_and_says_so(tmp_path, teacher):
    report = await validate(options_of(tmp_path, [recorded(CHANGING[0], task_modality="computer_use")], Checks()))
    assert report.total.verdicts == {"unsupported": 1} and kinds(report.tasks[0]) == [("modality", "computer_use")]


# -- what fails on the way is no verdict


async def test_an_endpoint_that_is_busy_is_asked_again_and_no_attempt_is_lost(tmp_path, teacher):
    teacher.faults = [(429, "slow down"), (500, "oops"), (429, "slow down")]
    checks = Checks(teacher=taught(teacher), attempts=2)
    report = await validate(options_of(tmp_path, [recorded(CHANGING[0])], checks, concurrency=1))
    assert teacher.faults == [] and report.tasks[0].teacher.pass_at_k == 1.0
    assert report.spent.calls == len(teacher.seen) == 2 * (len(CHANGING[0].calls) + 1)


def test_an_endpoint_that_stays_away_ends_the_run_which_goes_on_later(tmp_path, teacher, capsys):
    teacher.faults = [(503, "gone")] * (GIVE_UP_AFTER * (RETRIES + 1))
    tasks = [recorded(p, f"t{n}") for n, p in enumerate(PROBLEMS[:GIVE_UP_AFTER])]
    arguments = command(tmp_path, tasks, "--attempts", "1", "--concurrency", "2", teacher=teacher)
    assert main(arguments) == 1
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "requests in a row failed" in said[0] and "503" in said[0] and "are kept" in said[0]
    assert not (tmp_path / "out" / TASKS).exists()
    assert main(arguments) == 0
    assert len(json.loads((tmp_path / "out" / TASKS).read_text())) == len(tasks)


async def test_a_dialogue_that_outgrows_the_context_is_an_attempt_that_failed(tmp_path, teacher):
    teacher.faults = [(400, "This model's maximum context length is 4096 tokens")]
    checks = Checks(teacher=taught(teacher), attempts=2)
    report = await validate(options_of(tmp_path, [recorded(CHANGING[0])], checks, concurrency=1))
    assert report.tasks[0].teacher.pass_at_1 == 0.5
    assert report.tasks[0].teacher.pass_at_k == pass_at_k(2, 1, 2) == 1.0


async def test_an_attempt_ends_at_its_limits_of_turns_and_of_tokens(tmp_path, teacher):
    longest = max(PROBLEMS, key=lambda p: len(p.calls))
    for limits in ({"max_turns": 1}, {"max_input_tokens": PROMPT_TOKENS}):
        folder = tmp_path / str(*limits)
        folder.mkdir()
        report = await validate(
            options_of(folder, [recorded(longest)], Checks(teacher=taught(teacher, **limits), attempts=1))
        )
        assert kinds(report.tasks[0]) == [("teacher", "never_solved")] and report.spent.calls == 1


def test_what_answers_with_a_page_is_no_endpoint(tmp_path, teacher, capsys):
    teacher.page = "<html>Welcome</html>"
    assert main(command(tmp_path, [recorded(CHANGING[0])], teacher=teacher)) == 2
    assert "no chat endpoint; check --teacher-url" in capsys.readouterr().err


async def test_a_request_that_is_refused_costs_its_attempt_and_not_the_run(tmp_path, teacher):
    teacher.faults = [(403, "this prompt is not allowed")]
    tasks = [recorded(CHANGING[0], "a"), recorded(CHANGING[1], "b")]
    report = await validate(options_of(tmp_path, tasks, Checks(teacher=taught(teacher), attempts=2), concurrency=1))
    a, b = report.tasks
    assert (a.verdict, a.teacher.graded, a.teacher.pass_at_1, a.teacher.pass_at_k) == ("accepted", 1, 1.0, None)
    assert (b.verdict, b.teacher.pass_at_k) == ("accepted", 1.0)


async def test_older_endpoints_are_given_the_limit_under_its_older_name(tmp_path, teacher):
    teacher.refused = "max_completion_tokens"
    await validate(options_of(tmp_path, [recorded(CHANGING[0])], Checks(teacher=taught(teacher), attempts=1)))
    assert teacher.bodies[0]["max_tokens"] == 8192


async def test_what_the_fleet_does_wrong_is_tried_again_and_is_no_reason_to_reject(tmp_path, fleet, teacher):
    task = recorded(CHANGING[0])
    fleet.arm(
        {"route": "tool", "kind": "status", "status": 502, "stage": "after", "count": 1},
        {"route": "tool", "kind": "tool_error", "message": "the backend is down", "skip": 1, "count": 1},
        {"route": "verify", "kind": "judge_error", "count": 1},
        {"route": "make", "kind": "status", "status": 503, "count": 1},
    )
    report = await validate(options_of(tmp_path, [task], Checks()))
    assert report.total.verdicts == {"accepted": 1} and fleet.struck() == 4


def test_undecided_tasks_exit_with_3_and_only_what_is_open_is_done_again(tmp_path, fleet, teacher, capsys):
    fleet.arm({"route": "make", "kind": "status", "status": 400, "message": "no such image", "skip": 1})
    tasks = [recorded(CHANGING[0], "a"), recorded(CHANGING[1], "b")]
    assert main(command(tmp_path, tasks, "--concurrency", "1", "--json")) == 3
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["total"]["verdicts"] == {"accepted": 1, "undecided": 1}
    assert found["spent"]["episodes"] == 2 + 1  # nothing else is tried at a task that stays open
    assert "no such image" in captured.err and "run it again" in captured.err
    fleet.arm()
    made = len(fleet.instances())
    assert main(command(tmp_path, tasks, "--concurrency", "1")) == 0
    assert "2 episodes already done" in capsys.readouterr().out and len(fleet.instances()) == made + 1


# -- going on


def fleet_rl(*arguments):
    program = [sys.executable, "-c", "import sys; from deploy.validate import main; sys.exit(main(sys.argv[1:]))"]
    return subprocess.Popen([*program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def until(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def taught_results(out):
    return [result for result in read_journal(out / JOURNAL) if result.check == "teacher"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_goes_on_without_repeating_an_attempt(tmp_path, fleet, teacher, capsys, number, code):
    teacher.pause_s = 0.1
    tasks = [recorded(p, f"t{n}") for n, p in enumerate(PROBLEMS[:4])]
    arguments = command(tmp_path, tasks, "--attempts", "2", "--concurrency", "2", teacher=teacher)
    process = fleet_rl(*arguments)
    until(lambda: len(taught_results(tmp_path / "out")) >= 2)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert (fleet.running() == []) == (number != signal.SIGKILL)
    if number != signal.SIGKILL:
        assert said.count("\n") == 1 and "interrupted" in said and "goes on from there" in said
    kept = read_journal(tmp_path / "out" / JOURNAL)
    done = sum(result.check == "teacher" for result in kept)
    assert 2 <= done < 8
    until(lambda: teacher.busy == 0)  # with what it was asked before
    teacher.pause_s, teacher.seen = 0.0, []
    assert main(arguments) == 0
    assert f"{len(kept)} episodes already done" in capsys.readouterr().out
    openings = sum(teacher.openings(prompt) for prompt in {p.prompt for p in PROBLEMS})
    assert openings == 8 - done
    report = json.loads((tmp_path / "out" / REPORT).read_text())
    assert report["total"]["verdicts"] == {"accepted": 4} and report["total"]["pass_at_k"] == 1.0
    teacher.seen = []
    assert main(arguments) == 0 and teacher.seen == []
    assert "0 with something to do; 16 episodes already done" in capsys.readouterr().out


async def test_a_task_that_was_changed_is_checked_anew_and_the_others_are_not(tmp_path, teacher):
    tasks = [recorded(CHANGING[0], "a"), recorded(CHANGING[1], "b")]
    await validate(options_of(tmp_path, tasks, Checks()))
    assert Validation(options_of(tmp_path, tasks, Checks())).estimate().episodes == 0
    changed = [tasks[0], tasks[1] | {"verifier_code": PASSES}]
    assert Validation(options_of(tmp_path, changed, Checks())).estimate().episodes == 2
    # What a validation wrote into the tasks is no change.
    written = json.loads((tmp_path / "out" / TASKS).read_text())
    assert Validation(options_of(tmp_path, written, Checks())).estimate().episodes == 0
    # Another teacher, or other limits, begin anew.
    for teaching in (taught(teacher), taught(teacher, max_turns=9)):
        checks = Checks(teacher=teaching, attempts=1)
        assert Validation(options_of(tmp_path, tasks, checks)).estimate().teacher == 2


def test_a_line_that_was_cut_off_is_dropped_and_a_foreign_file_is_refused(tmp_path):
    result = Result(task_key="t", of="o", check="replay", outcome="executed")
    with Journal(tmp_path) as journal:
        journal.add(result)
        with pytest.raises(JournalError, match="another fleet-rl validate is at work"):
            Journal(tmp_path)
    path = tmp_path / JOURNAL
    with path.open("a") as file:
        file.write('{"task_key": "u", "of')
    with Journal(tmp_path) as journal:
        assert journal.results == {result.unit: result}
        journal.add(result.model_copy(update={"attempt": 1}))
    assert len(read_journal(path)) == 2
    path.write_text("hello\n")
    with pytest.raises(JournalError, match=f"{JOURNAL}, line 1, is no result"):
        read_journal(path)


# -- before it starts


def test_a_dry_run_counts_what_is_left_and_starts_nothing(tmp_path, fleet, teacher, capsys, monkeypatch):
    monkeypatch.delenv("FLEET_API_KEY")
    tasks = [
        recorded(CHANGING[0], "a"),
        recorded(CHANGING[1], "b", reference_tool_calls=None),
        recorded(ASKING[0], "c", verifier_code=None),
        recorded(ASKING[1], "d", reference_tool_calls="none"),
    ]
    made = len(fleet.instances())
    limits = ["--max-turns", "5", "--max-tokens", "100", "--max-input-tokens", "1000", "--attempts", "3"]
    money = ["--price-in", "2", "--price-out", "10"]
    arguments = command(tmp_path, tasks, "--dry-run", "--json", *limits, *money, teacher=teacher)
    assert main(arguments) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    # Tasks c and d are rejected as they stand: what else is wrong is looked for, but no teacher is asked.
    assert (found["untouched"], found["replay"], found["teacher"], found["instances_least"]) == (3, 2, 6, 4)
    calls, read = 6 * 5, 6 * (5 * 1000 + 20_000)
    cost = (read * 2 + calls * 100 * 10) / 1e6
    assert found["at_most"] == {"calls": calls, "prompt_tokens": read, "completion_tokens": calls * 100, "cost": cost}
    assert found["likely"] is None
    d = DeadlinesConfig()
    steps = (len(CHANGING[0].calls) + len(ASKING[0].calls)) * d.step
    seconds = 5 * (d.begin + d.verify + d.close) + steps + 6 * d.budget
    assert found["instance_hours_at_most"] == round(seconds / 3600, 2)
    assert "11 episodes" in captured.err and f"cost {cost:,.2f}" in captured.err
    assert not (tmp_path / "out").exists() and len(fleet.instances()) == made and teacher.pings == 0


async def test_after_some_attempts_a_dry_run_says_what_the_rest_will_likely_take(tmp_path, teacher):
    checks = Checks(teacher=taught(teacher), attempts=2)
    tasks = [recorded(CHANGING[0], "a"), recorded(CHANGING[1], "b")]
    await validate(options_of(tmp_path, tasks, checks, max_tasks=1))
    rest = Validation(options_of(tmp_path, tasks, checks, prices=Prices(read=1, written=1))).estimate()
    turns = 2 * (len(CHANGING[0].calls) + 1)
    tokens = turns * (PROMPT_TOKENS + COMPLETION_TOKENS)
    assert (rest.likely.calls, rest.likely.prompt_tokens) == (turns, turns * PROMPT_TOKENS)
    assert rest.likely.cost == round(tokens / 1e6, 4)


def test_the_task_file_may_stand_in_s3(tmp_path, capsys, monkeypatch):
    with serving_s3() as server:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        place = {"LocationConstraint": ENVIRONMENT["AWS_DEFAULT_REGION"]}
        _client().create_bucket(Bucket="sets", CreateBucketConfiguration=place)
        upload(write(tmp_path, [recorded(CHANGING[0])]), "s3://sets/v9/tasks.json")
        out = ["--out", str(tmp_path / "out"), "--dry-run"]
        assert main(["--tasks", "s3://sets/v9/tasks.json", *out]) == 0
        assert "2 episodes" in capsys.readouterr().out
        assert main(["--tasks", "s3://sets/v9/other.json", *out]) == 2
        assert "no such object" in capsys.readouterr().err


# -- wrong input


def wrong_inputs():
    task = recorded(CHANGING[0])
    yield "no file", Path("/nowhere/tasks.json"), [], {}, "does not exist"
    yield "no json", "{", [], {}, "not valid JSON"
    yield "parquet", Path("/nowhere/tasks.parquet"), [], {}, "give the JSON file"
    yield "malformed", [task | {"prompt": ""}], [], {}, "field 'prompt'"
    yield "metadata", [task | {"metadata": 3}], [], {}, "field 'metadata'"
    yield "no key", [task], [], {"FLEET_API_KEY": ""}, "FLEET_API_KEY is not set"
    yield "key refused", [task], [], {"FLEET_API_KEY": "other"}, "API key was refused"
    yield "no teacher key", [task], ["teacher"], {"OPENAI_API_KEY": ""}, "OPENAI_API_KEY"
    yield "teacher's key refused", [task], ["teacher"], {"OPENAI_API_KEY": "other"}, "OPENAI_API_KEY"
    yield "no such model", [task], ["teacher", "--teacher-model", "other"], {}, "check --teacher-model"
    yield "nobody there", [task], ["teacher", "--teacher-url", "http://127.0.0.1:9/v1"], {}, "check --teacher-url"
    yield "no url", [task], ["teacher", "--teacher-url", "localhost:80"], {}, "no http or https URL"
    yield "half a teacher", [task], ["--teacher-model", "m"], {}, "belong together"
    yield "half the prices", [task], ["--price-in", "1"], {}, "belong together"
    yield "a negative price", [task], ["--price-in=-1", "--price-out", "1"], {}, "must not be -1"
    yield "no attempts", [task], ["--attempts", "0"], {}, "at least 1"
    yield "no check", [task], ["--no-replay", "--no-verifier"], {}, "no check is left"


@pytest.mark.parametrize(
    ("tasks", "arguments", "environment", "said"), [c[1:] for c in wrong_inputs()], ids=[c[0] for c in wrong_inputs()]
)
def test_wrong_input_is_one_line_and_exit_code_2(
    tmp_path, teacher, capsys, monkeypatch, tasks, arguments, environment, said
):
    if isinstance(tasks, str):
        path = tmp_path / "in.json"
        path.write_text(tasks)
        tasks = path
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with_teacher = teacher if arguments[:1] == ["teacher"] else None
    arguments = command(tmp_path, tasks, *arguments[with_teacher is not None :], teacher=with_teacher)
    try:
        code = main(arguments)
    except SystemExit as error:
        code = error.code
    err = capsys.readouterr().err
    assert code == 2
    assert said in err.splitlines()[-1] and "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("fleet-rl: ")] == err.splitlines() or "usage:" in err
    assert not (tmp_path / "out" / TASKS).exists() and teacher.seen == []


def test_a_folder_that_is_a_file_or_holds_a_foreign_journal_is_refused(tmp_path, teacher, capsys):
    (tmp_path / "out").write_text("")
    assert main(command(tmp_path, [recorded(CHANGING[0])])) == 2
    assert "is a file" in capsys.readouterr().err
    (tmp_path / "out").unlink()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / JOURNAL).write_text("{}\n")
    assert main(command(tmp_path, [recorded(CHANGING[0])])) == 2
    assert "choose another --out" in capsys.readouterr().err


async def test_an_endpoint_that_never_answers_is_given_up_on_after_its_deadline(teacher):
    teacher.pause_s = 0.5
    endpoint = ChatEndpoint(taught(teacher), teacher_server.KEY, 0.01, TEACHER)
    messages = [{"role": "system", "content": ""}, {"role": "user", "content": CHANGING[0].prompt}]
    for failure in [EndpointFailed] * (GIVE_UP_AFTER - 1) + [EndpointGone]:
        with pytest.raises(failure, match="no answer within"):
            await endpoint.turn(messages, [])
    await endpoint.close()


def test_loading_the_command_loads_nothing_heavy():
    code = (
        "import sys, deploy.validate as v\ntry: v.main(['--help'])\nexcept SystemExit: pass\nprint(sorted(sys.modules))"
    )
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    assert not {"'torch'", "'ray'", "'openai'", "'pyarrow'", "'fleet'", "'rich'"} & set(re.findall(r"'\w+'", loaded))


# -- recorded calls


@pytest.mark.parametrize(
    "call",
    [
        {"name": "f", "arguments": {"a": 1}},
        {"tool": "f", "params": {"a": 1}},
        {"name": "f", "arguments": '{"a": 1}'},
        {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}},
    ],
)
def test_recorded_calls_are_read_in_every_form_that_is_in_use(call):
    candidate = read_candidate(CHANGING[0].task("t") | {"reference_tool_calls": [call]}, "here")
    assert candidate.calls == (ToolCall("f", {"a": 1}),) and candidate.calls_fault is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "tool", "arguments", "params", "function", "a"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(JSON, JSON)
def test_whatever_is_recorded_is_read_or_named_as_malformed(calls, answer):
    raw = {"task_key": "t", "prompt": "p", "env_key": "e", "reference_tool_calls": calls, "reference_answer": answer}
    candidate = read_candidate(raw, "here")
    if candidate.calls_fault is not None:
        assert candidate.calls is None and candidate.calls_fault.kind == "malformed_calls"
        assert "reference_" in candidate.calls_fault.detail
    else:
        assert (candidate.calls is None) == (calls is None)
        assert all(isinstance(call.arguments, dict) for call in candidate.calls or ())


@given(JSON)
def test_whatever_stands_in_place_of_a_task_is_refused_or_read(raw):
    try:
        read_candidate(raw, "here")
    except TaskFileError as error:
        assert str(error).startswith("here")
