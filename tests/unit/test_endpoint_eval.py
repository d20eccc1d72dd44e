"""``fleet-rl eval`` of a model behind an endpoint, over HTTP: a real local Fleet, and an expert that answers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from actors.envs.local_fleet.apps.tracker_tasks import problems
from actors.envs.local_fleet.process import LocalFleetProcess
from deploy.evaluate import main
from tests import teacher_server
from tests.fleet_faults import KEY, LocalFleet
from tests.s3_server import ENVIRONMENT, serving_s3
from tests.teacher_server import COMPLETION_TOKENS, MODEL, PROMPT_TOKENS, serving_teacher
from train.analysis.dumps import find_run, parts_of, read_part
from train.chat.endpoint import GIVE_UP_AFTER, RETRIES
from train.config import load_config
from train.evaluate import Attempt, aggregate
from train.failures import Stopped, stopped_by_signals
from train.run import _save_config

DEMO = "configs/demo.yaml"
PROBLEMS = {problem.prompt: problem for _, problem in problems("heldout", 12, 3)}


@pytest.fixture(scope="module")
def fleet():
    with LocalFleetProcess() as process:
        yield LocalFleet(process)


@pytest.fixture
def teacher(fleet, monkeypatch):
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.setenv("OPENAI_API_KEY", teacher_server.KEY)
    fleet.arm()
    with serving_teacher() as server:
        server.problems = PROBLEMS
        yield server
    fleet.arm()
    assert fleet.running() == []


@pytest.fixture
def evaluate(fleet, teacher, tmp_path, capsys):
    """Runs the command on so many tasks; returns exit code, its result if there is one, and standard error."""

    def command(*options, target=DEMO, tasks=3, model=MODEL, url=teacher.url, out=tmp_path / "out"):
        path = tmp_path / "tasks.json"
        path.write_text(json.dumps([p.task(f"t{n}") for n, p in enumerate(list(PROBLEMS.values())[:tasks])]))
        place = ["--environment.fleet", "hosted", "--environment.base_url", fleet.url, "--split", str(path)]
        asked = [*(["--endpoint", url] if url else []), *(["--model", model] if model else []), "--json"]
        try:
            code = main([target, *asked, *place, *(["--out", str(out)] if out else []), *options])
        except SystemExit as exit:  # argparse's own
            code = exit.code
        printed = capsys.readouterr()
        lines = printed.out.splitlines()
        return code, json.loads(lines[-1]) if lines else None, printed.err

    return command


def lines_of(folder):
    return [json.loads(line) for line in (folder / "tracker.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("tools", ["native", "text"])
def test_an_endpoint_is_evaluated_as_a_checkpoint_is(evaluate, fleet, teacher, tmp_path, tools):
    unsolved = list(PROBLEMS)[1]
    teacher.unsolved = {unsolved}
    sampling = ["--samples", "2", "--temperature", "0.6", "--top-p", "0.9", "--max-tokens", "77"]
    made = len(fleet.instances("demo-eval-"))
    code, said, _ = evaluate(*sampling, "--endpoint-tools", tools, tasks=4)
    assert code == 0
    assert {name: said[name] for name in ("graded", "ungraded", "infra_failed", "cancelled")} == {
        "graded": 8, "ungraded": 0, "infra_failed": 0, "cancelled": 0,
    }  # fmt: skip
    assert (said["model"], said["step"], said["samples"], said["pass_at_1"]) == (MODEL, None, 2, 0.75)
    assert said["results"]["eval/tracker/pass_at_2"] == said["results"]["eval/tracker/pass_hat_2"] == 0.75
    assert said["results"]["eval/all/pass_at_1_low"] < 0.75 < said["results"]["eval/all/pass_at_1_high"]
    asked = {"temperature": 0.6, "top_p": 0.9, "top_k": -1, "max_tokens": 77, "stop": [], "seed": None}
    assert said["sampling"] == asked
    (body, *_) = teacher.bodies
    assert (body["temperature"], body["top_p"], body["max_completion_tokens"]) == (0.6, 0.9, 77)
    turns = len(teacher.seen)
    assert turns == 2 * sum(1 if p is unsolved else 1 + len(PROBLEMS[p].calls) for p in list(PROBLEMS)[:4])
    counted = {"prompt_tokens": turns * PROMPT_TOKENS, "completion_tokens": turns * COMPLETION_TOKENS}
    assert said["endpoint"] == {"url": teacher.url, "requests": turns, **counted}
    assert said["sampled_tokens"] == counted["completion_tokens"]
    ledger = said["ledger"]
    assert ledger["eval"]["dispatched"] == ledger["eval"]["graded"] == 8 and ledger["eval"]["balanced"]
    of_run = fleet.instances("demo-eval-")
    assert ledger["instances"]["made"] == len(of_run) - made > 0 and ledger["instances"]["left"] == 0
    assert len({instance["run_id"] for instance in of_run[made:]}) == 1
    # The files are those of a checkpoint, and give the numbers back.
    folder = tmp_path / "out/eval_only"
    names = {"tracker.jsonl", "aggregated_results.jsonl", "evaluation.json"}
    assert {path.name for path in folder.iterdir()} == names
    assert json.loads((folder / "evaluation.json").read_text()) == said
    rows = lines_of(folder)
    read = [Attempt(row["data_source"], row["env_extras"]["task_key"], row["score"][-1]) for row in rows]
    assert json.loads((folder / "aggregated_results.jsonl").read_text()) == aggregate(read) == said["results"]
    assert Counter(attempt.task for attempt in read) == dict.fromkeys(("t0", "t1", "t2", "t3"), 2)
    columns = {"input_prompt", "output_response", "score", "stop_reason", "env_class", "env_extras", "data_source"}
    assert all(row.keys() == columns for row in rows) and {row["env_class"] for row in rows} == {"fleet_task"}


def test_the_analysis_reads_the_turns_that_were_taken(evaluate, teacher, tmp_path):
    assert evaluate("--samples", "1", tasks=6)[0] == 0
    files = find_run(str(tmp_path / "out"), tmp_path / "out").episodes
    found = {e.task: e for part in parts_of(files, 2**20) for e in read_part(files, part)}
    for number, problem in enumerate(list(PROBLEMS.values())[:6]):
        episode = found[f"t{number}"]
        calls = [(call.name, call.arguments) for turn in episode.turns for call in turn.parsed.calls]
        assert calls == [(call.tool, call.arguments) for call in problem.calls]
        assert episode.prompt[-1] == ("user", problem.prompt) and episode.prompt[0][0] == "system"
        assert (episode.reward, episode.stop_reason, episode.turns[-1].says_done) == (1.0, "done", True)
        assert all(turn.observation for turn in episode.turns[:-1]) and episode.turns[-1].observation is None


def test_what_the_endpoint_fails_at_is_left_out_with_its_reason(evaluate, teacher, tmp_path):
    teacher.faults = [(429, "slow down"), (403, "this prompt is not allowed")]
    code, said, _ = evaluate("--samples", "2", "--concurrency", "1")
    assert code == 0 and teacher.faults == []
    assert (said["graded"], said["infra_failed"], said["pass_at_1"]) == (5, 1, 1.0)
    assert said["results"]["eval/all/not_graded"] == 1 and said["results"]["eval/all/num_samples"] == 5
    (left_out,) = [row for row in lines_of(tmp_path / "out/eval_only") if row["score"][-1] is None]
    assert "this prompt is not allowed" in left_out["env_extras"]["not_graded"]
    assert left_out["score"] == [None] and left_out["input_prompt"].count("<|im_start|>user") == 1


def test_what_the_fleet_fails_at_is_left_out_as_in_training(evaluate, fleet, teacher):
    fleet.arm({"route": "make", "kind": "status", "status": 400, "message": "no such image", "count": 1})
    code, said, _ = evaluate("--samples", "1", "--concurrency", "1", "--generator.deadlines.provision", "5")
    assert code == 0 and (said["graded"], said["infra_failed"]) == (2, 1)
    (reason,) = said["ledger"]["eval"]["reasons"]
    assert reason.startswith("infra_failed: provision: ") and "no such image" in reason


def test_an_endpoint_that_stays_away_ends_the_evaluation_and_no_zero_is_made_of_it(evaluate, fleet, teacher, tmp_path):
    before = len(fleet.instances())
    teacher.faults = [(503, "gone")] * (RETRIES + 1) * 60
    code, said, err = evaluate("--samples", "5", "--concurrency", "2", tasks=12)
    assert code == 1 and len(err.splitlines()) == 1
    assert f"{GIVE_UP_AFTER + 2} requests in a row failed; the last: the endpoint" in err and "503" in err
    assert (said["infra_failed"], said["pass_at_1"]) == (60, None)
    assert len(fleet.instances()) - before <= GIVE_UP_AFTER + 3  # none is made for those that are not begun
    assert {row["score"][-1] for row in lines_of(tmp_path / "out/eval_only")} == {None}


def test_a_refused_call_and_the_limit_of_turns_are_those_of_the_configuration(evaluate, teacher):
    teacher.replies = [({"role": "assistant", "content": "Hm."}, "stop")] * 3
    code, said, _ = evaluate("--samples", "1", "--generator.max_turns", "3", tasks=1)
    assert code == 0 and (said["graded"], said["pass_at_1"], said["endpoint"]["requests"]) == (1, 0.0, 3)
    assert "no tool call and no <done> found" in teacher.bodies[-1]["messages"][-1]["content"]


def test_a_copy_in_s3_lies_beside_those_of_the_runs_own_policies(evaluate, monkeypatch, tmp_path):
    with serving_s3() as server:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        server.backend.create_bucket("sets", ENVIRONMENT["AWS_DEFAULT_REGION"])
        code, said, _ = evaluate("--samples", "1", "--upload-to", "s3://sets/all")
        stored = {key: entry.value for key, entry in server.backend.buckets["sets"].keys.items()}
    assert code == 0 and said["uploaded_to"] == "s3://sets/all/evals/demo-expert/"
    folder = tmp_path / "out/eval_only"
    assert stored == {
        f"all/evals/demo-expert/eval_only/{name}": (folder / name).read_bytes()
        for name in ("tracker.jsonl", "aggregated_results.jsonl")
    }


def test_unless_it_is_said_otherwise_results_lie_under_the_name_of_run_and_model(evaluate, tmp_path, monkeypatch):
    from deploy import evaluate as command

    monkeypatch.setattr(command, "OUT", tmp_path / "evals")
    assert evaluate("--samples", "1", tasks=1, out=None)[0] == 0
    assert (tmp_path / "evals/demo-expert/eval_only/aggregated_results.jsonl").is_file()
    code, _, err = evaluate("--samples", "1", tasks=1, out=None)
    assert code == 2 and "holds an evaluation" in err


def test_a_second_signal_does_not_interrupt_the_clean_up_of_the_first_and_handlers_are_as_before():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    cleaned = []

    async def work():
        async with stopped_by_signals():
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(10)
            finally:
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
                cleaned.append(True)

    with pytest.raises(Stopped, match="SIGTERM"):
        asyncio.run(work())
    assert cleaned == [True]
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_a_run_lends_its_configuration_and_needs_no_checkpoint(evaluate, teacher, tmp_path):
    config = load_config(Path(DEMO), ["--output_dir", str(tmp_path / "runs"), "--generator.max_turns", "1"])
    config.run_dir.mkdir(parents=True)
    _save_config(config)
    teacher.replies = [({"role": "assistant", "content": "Hm."}, "stop")]
    code, said, _ = evaluate(target=str(config.run_dir), tasks=1)
    assert code == 0 and (said["run"], said["samples"], said["graded"]) == ("demo", 2, 2)
    assert said["endpoint"]["requests"] == 2  # of one turn each, as the run has it
    assert [path.name for path in config.run_dir.iterdir()] == ["config.yaml"]


def wrong_inputs():
    yield "no model", {"model": None}, [], {}, "--endpoint and --model belong together"
    yield "no endpoint", {"url": None}, [], {}, "--endpoint and --model belong together"
    yield "a checkpoint as well", {}, ["--checkpoint", "base"], {}, "two policies"
    yield "tools of no endpoint", {"url": None, "model": None}, ["--endpoint-tools", "text"], {}, "need --endpoint"
    yield "no url", {"url": "localhost:80"}, [], {}, "no http or https URL"
    yield "a password", {"url": "http://me:secret@localhost/v1"}, [], {}, "leave it out"
    yield "nobody there", {"url": "http://127.0.0.1:9/v1"}, [], {}, "check --endpoint"
    yield "no such model", {"model": "other"}, [], {}, "check --model and --endpoint"
    yield "key refused", {}, [], {"OPENAI_API_KEY": "other"}, "OPENAI_API_KEY"
    yield "fleet's key refused", {}, [], {"FLEET_API_KEY": "other"}, "API key was refused"
    yield "no key of fleet", {}, [], {"FLEET_API_KEY": ""}, "FLEET_API_KEY is not set"
    yield "context tools", {}, ["--generator.context_tools", "true"], {}, "generator.context_tools needs token ids"
    yield "context status", {}, ["--generator.inject_context_status", "true"], {}, "inject_context_status needs"
    yield "no concurrency", {}, ["--concurrency", "0"], {}, "at least 1"


@pytest.mark.parametrize(
    ("asked", "options", "environment", "words"), [c[1:] for c in wrong_inputs()], ids=[c[0] for c in wrong_inputs()]
)
def test_wrong_input_is_one_line_and_starts_nothing(
    evaluate, fleet, teacher, monkeypatch, tmp_path, asked, options, environment, words
):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = len(fleet.instances())
    code, said, err = evaluate(*options, **asked)
    lines = err.splitlines()
    assert (code, said) == (2, None) and words in lines[-1] and "Traceback" not in err
    assert len(lines) == 1 or "usage:" in err
    assert teacher.seen == [] and len(fleet.instances()) == made and not (tmp_path / "out").exists()
    assert "secret" not in lines[-1]


@pytest.mark.parametrize(
    ("fault", "words"),
    [({"page": "<html>Welcome</html>"}, "no chat endpoint; check --endpoint"),
     ({"refused": "tools"}, "it needs --endpoint-tools text"), ({"refused": "temperature"}, "Unsupported parameter")],
)  # fmt: skip
def test_an_endpoint_that_cannot_do_what_is_asked_is_one_line(evaluate, teacher, fault, words):
    for name, value in fault.items():
        setattr(teacher, name, value)
    code, _, err = evaluate()
    assert code == 2 and words in err and len(err.splitlines()) == 1 and teacher.seen == []
