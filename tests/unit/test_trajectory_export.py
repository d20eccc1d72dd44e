"""``fleet-rl trajectories``: reading, searching and exporting what a store wrote."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import orjson
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter
from rich.console import Console

from actors.episode import MANY_CALLS
from actors.prompt import tool_text
from actors.trajectory import OUTCOME_NAMES, Graded, Group
from deploy import trajectories as command
from tests.s3_server import ENVIRONMENT, Fault, serving_s3
from tests.trajectories import call, facts, make_groups, make_trajectory
from train import s3, trajectory_reader, trajectory_store
from train.dialogue import split_dialogue
from train.trajectory_export import export, openai_row, trl_row, verl_row
from train.trajectory_files import finish, finished_files
from train.trajectory_reader import Range, Selection, TrajectoryFileError, read
from train.trajectory_spool import Spool
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin, record_batches, rows, trajectory
from train.trajectory_view import full_view, search

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of three steps and two evaluations: 48 trajectories."""
    folder = tmp_path_factory.mktemp("runs") / "demo"
    store = TrajectoryStore(StoreSettings(str(folder / "trajectories")))
    for step in (1, 2, 3):
        store.put(make_groups(6, first=6 * step), Origin("train", step, step - 1))
    for label in ("sampled", "greedy"):
        groups = [
            Group(
                g.group_id,
                g.task_key,
                g.env_key,
                [replace(t, trajectory_id=f"eval-3-{label}/{t.trajectory_id}") for t in g.trajectories],
            )
            for g in make_groups(3, first=100)
        ]
        store.put(groups, Origin("eval", 3, 3, label))
    assert store.close().waiting == 0
    return folder


def row_of(found) -> dict:
    (row,) = rows(next(record_batches([Group(1, "t", "e", [found])], Origin("train", 1, 0))))
    return row


def invoke(capsys, *arguments) -> tuple[int, str, str]:
    code = command.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


# Reading


def test_a_run_its_folder_and_its_files_are_read_alike(run, monkeypatch):
    expected = [facts(trajectory(row)) for row in read(str(run))]
    assert len(expected) == 48
    assert [facts(trajectory(row)) for row in read(str(run / "trajectories"))] == expected
    files = sorted((run / "trajectories").glob("*.parquet"))
    assert [facts(trajectory(row)) for file in files for row in read(str(file))] == expected
    lines = sorted((run / "trajectories").glob("*.jsonl"))
    assert [facts(trajectory(row)) for file in lines for row in read(str(file))] == expected
    monkeypatch.setattr(trajectory_reader, "RUNS", run.parent)
    assert [facts(trajectory(row)) for row in read("demo")] == expected


def test_the_columns_asked_for_are_read_and_no_others(run):
    row = next(read(str(run), columns=["trajectory_id"]))
    assert set(row) == {"trajectory_id", "kind", "step", "env_key", "task_key", "outcome", "reward"}


@pytest.mark.parametrize(
    ("selection", "holds"),
    [
        (Selection(kind="eval"), lambda row: row["kind"] == "eval"),
        (Selection(env="booking/eu"), lambda row: row["env_key"] == "booking/eu"),
        (Selection(task="task-7"), lambda row: row["task_key"] == "task-7"),
        (Selection(step=Range(2, 3)), lambda row: 2 <= row["step"] <= 3),
        (Selection(outcome="infra_failed"), lambda row: row["outcome"] == "infra_failed"),
        (Selection(reward=Range.parse("0")), lambda row: row["reward"] == 0),
        (Selection(reward=Range.parse("0.5:"), step=Range.parse(":1")), lambda r: r["reward"] == 1 and r["step"] == 1),
    ],
)
def test_a_selection_takes_what_it_says(run, selection, holds):
    everything = [row["trajectory_id"] for row in read(str(run)) if holds(row)]
    assert [row["trajectory_id"] for row in read(str(run), selection, ["trajectory_id"])] == everything
    assert 0 < len(everything) < 48


def test_files_of_other_steps_are_not_opened(run, monkeypatch):
    opened = []
    real = trajectory_reader._rows
    monkeypatch.setattr(
        trajectory_reader, "_rows", lambda path, *rest: (opened.append(path.stem), real(path, *rest))[1]
    )
    assert len(list(read(str(run), Selection(step=Range(2, 2))))) == 12
    assert opened == ["step_000002"]


@pytest.mark.parametrize(
    ("text", "low", "high"), [("5", 5, 5), ("2:8", 2, 8), ("2:", 2, float("inf")), (":8", -float("inf"), 8)]
)
def test_ranges(text, low, high):
    assert Range.parse(text) == Range(low, high)
    assert low in Range.parse(text) and None not in Range.parse(text)


@given(st.text(max_size=8))
def test_what_is_no_range_is_one_clear_line(text):
    try:
        found = Range.parse(text)
        assert found.low <= found.high
    except ValueError as error:
        assert "is no range" in str(error)


def test_a_run_in_s3_is_read_from_there(run, tmp_path, monkeypatch):
    with serving_s3() as server:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        server.backend.create_bucket("runs", ENVIRONMENT["AWS_DEFAULT_REGION"])
        for file in finished_files(run / "trajectories"):
            s3.upload(file, f"s3://runs/team/demo/trajectories/{file.name}")
        expected = [facts(trajectory(row)) for row in read(str(run))]
        for location in ("s3://runs/team/demo", "s3://runs/team/demo/trajectories/"):
            assert [facts(trajectory(row)) for row in read(location)] == expected
        server.arm()
        one = list(read("s3://runs/team/demo", Selection(step=Range(2, 2))))
        assert len(one) == 12 and server.count("GET /runs/team") == 1
        with pytest.raises(TrajectoryFileError, match="no trajectories"):
            list(read("s3://runs/team/other"))
        server.arm(Fault(403, "AccessDenied", count=1000))
        with pytest.raises(TrajectoryFileError, match="access denied"):
            list(read("s3://runs/team/demo"))


# Showing


def shown(row: dict, full: bool = False, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    console.print(full_view(row, full))
    return console.file.getvalue()


def test_a_trajectory_is_shown_turn_by_turn():
    text = shown(row_of(make_trajectory(4, sample=1)))
    for part in (
        "4/task-4/1",
        "graded",
        "v2 [0, 13), v3 [13, 27)",
        "60 in 1 sequence(s), 27 sampled",
        "→ find_ticket(number=4)",
        "which one?",
        '← {"id": 4, "state": "open"}',
        "← Error: no such tool",
        "Ticket 4 is closed.",
        "reset 0.5 s, generate 0.8 s",
    ):
        assert part in text
    assert "turn 1 · 9 tokens, v2, mean logprob" in text and "turn 2 · 9 tokens, v2 v3, mean" in text


def test_long_messages_are_shortened_unless_asked_for_in_full():
    messages = [{"role": "user", "content": "x" * 5000 + "END"}]
    row = row_of(replace(make_trajectory(4), messages=messages))
    assert "END" not in shown(row) and "3,503 more characters: --full" in shown(row)
    assert "END" in shown(row, full=True)


def test_text_cannot_drive_the_terminal_or_the_markup():
    messages = [{"role": "assistant", "content": "\x1b[31m[bold]red[/bold] \x07\x9b"}]
    row = row_of(replace(make_trajectory(4), messages=messages))
    text = shown(row)
    assert "\x1b" not in text and "\x07" not in text and "\x9b" not in text and "[bold]red[/bold]" in text
    (hit,) = search(row, re.compile("red"))
    assert "\x1b" not in hit.before


def test_a_search_finds_every_place_with_its_turn():
    row = row_of(make_trajectory(4, sample=1))
    hits = list(search(row, re.compile(r"ticket", re.IGNORECASE)))
    assert [(hit.turn, hit.role) for hit in hits] == [(0, "user"), (1, "assistant"), (2, "assistant"), (3, "assistant")]
    assert [hit.role for hit in search(row, re.compile("Error"), "tool")] == ["tool"]
    assert all("\n" not in hit.before + hit.match + hit.after for hit in search(row, re.compile(r"(?s).+")))


# Exporting

PARAM = TypeAdapter(ChatCompletionMessageParam)


def check_openai(messages: list[dict]) -> None:
    """The API's rules: the SDK's own types, and every tool message answers a call of the turn before it."""
    open_calls: list[str] = []
    for message in messages:
        PARAM.validate_python(message)
        if message["role"] == "tool":
            assert message["tool_call_id"] == open_calls.pop(0)
            continue
        assert open_calls == [], "a call was not answered before the next message"
        open_calls = [one["id"] for one in message.get("tool_calls", [])]
        for one in message.get("tool_calls", []):
            json.loads(one["function"]["arguments"])


def test_openai_messages_carry_calls_and_their_answers():
    messages = openai_row(row_of(make_trajectory(4, sample=1)), 0)["messages"]
    check_openai(messages)
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    function = {"name": "find_ticket", "arguments": '{"number": 4}'}
    assert messages[2]["tool_calls"] == [{"id": "call_1_1", "type": "function", "function": function}]
    assert messages[2]["content"] == "<think>which one?</think>"
    assert messages[-1] == {"role": "assistant", "content": "Ticket 4 is closed.<done>"}


def dialogue_of(*parts: str) -> dict:
    """``a:`` is the policy, ``t:`` a tool's answer, ``n:`` a note."""
    roles = {"a": "assistant", "t": "tool", "n": "note"}
    messages = [{"role": roles[part[0]], "content": part[2:]} for part in parts]
    return row_of(replace(make_trajectory(4), messages=[{"role": "user", "content": "task"}, *messages]))


def test_what_the_environment_said_to_no_call_is_a_users_word():
    row = dialogue_of("a:hm", "t:no tool call", "a:<tool_call>{", "t:not JSON", "n:closed late")
    messages = openai_row(row, 0)["messages"]
    check_openai(messages)
    assert [m["role"] for m in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[3]["content"] == "<tool_call>{"


def test_of_several_calls_those_that_were_carried_out_are_kept():
    two = call("one", a=1) + call("two", b=2)
    first = openai_row(dialogue_of(f"a:{two}", "t:only the first", "a:end"), 0)["messages"]
    check_openai(first)
    assert [one["function"]["name"] for one in first[1]["tool_calls"]] == ["one"]
    both = openai_row(dialogue_of(f"a:{two}", "t:1", "t:2", f"a:{call('last')}"), 0)["messages"]
    check_openai(both)
    assert [m["role"] for m in both] == ["user", "assistant", "tool", "tool", "assistant"]
    assert both[-1]["tool_calls"][0]["function"] == {"name": "last", "arguments": "{}"}


def test_calls_that_were_refused_as_a_whole_are_not_answered():
    two = call("one", a=1) + call("two", b=2)
    for refusal in (tool_text(None, MANY_CALLS.format(n=2)), f"{tool_text(None, MANY_CALLS.format(n=2))}\nturn 3 of 9"):
        messages = openai_row(dialogue_of(f"a:{two}", f"t:{refusal}", "a:end"), 0)["messages"]
        check_openai(messages)
        assert messages[1:3] == [{"role": "assistant", "content": two}, {"role": "user", "content": refusal}]


def test_halves_of_surrogate_pairs_in_a_call_stop_neither_an_export_nor_a_view(tmp_path, capsys):
    odd = '<tool_call>{"name": "\\ud800", "arguments": {"\\udfff": "\\ud800"}}</tool_call>'
    messages = [{"role": "user", "content": "task"}, {"role": "assistant", "content": odd}]
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    store.put([Group(1, "t", "e", [replace(make_trajectory(4), messages=messages)])], Origin("train", 1, 0))
    store.close()
    out = tmp_path / "rows.jsonl"
    assert invoke(capsys, "export", tmp_path / "step_000001.parquet", "--format", "openai", "--out", out)[0] == 0
    (found,) = map(json.loads, out.read_text().splitlines())
    assert found["messages"][1]["tool_calls"][0]["function"]["name"] == "?"
    answer = fleet_rl("show", tmp_path / "step_000001.parquet", "4/task-4/0")
    assert (answer.returncode, answer.stderr) == (0, "") and "→ ?(?=" in answer.stdout


PIECES = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<done>",
    call("f", x="</tool_call>"),
    call("g"),
    '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>',
    "text",
    "{",
]


@settings(max_examples=100)
@given(
    st.lists(
        st.tuples(st.sampled_from(["assistant", "tool", "note"]), st.lists(st.sampled_from(PIECES), max_size=4)),
        max_size=8,
    )
)
def test_any_dialogue_becomes_messages_that_the_api_takes(parts):
    messages = [{"role": "user", "content": "task"}]
    messages += [{"role": role, "content": "".join(pieces)} for role, pieces in parts]
    # Only a turn can be answered; and a turn is answered at most once for each call, or once.
    opening, turns = split_dialogue(messages)
    if any(m["role"] == "tool" for m in opening) or any(len(t.observations) > max(1, len(t.calls)) for t in turns):
        return
    row = row_of(replace(make_trajectory(4), messages=messages))
    found = openai_row(row, 0)["messages"]
    check_openai(found)
    orjson.dumps(found)
    if not any(turn.calls for turn in turns):
        expected = [m["content"] for m in messages if m["role"] != "note"]
        assert [m["content"] for m in found] == expected
    assert shown(row).encode()


def test_trl_rows_split_the_dialogue_where_the_policy_begins():
    row = row_of(make_trajectory(4, sample=1))
    found = trl_row(row, 0)
    plain = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
    assert found["prompt"] == plain[:2] and found["completion"] == plain[2:]
    assert found["label"] is True and found["reward"] == 1.0
    assert trl_row(row_of(make_trajectory(3)), 0)["label"] is None


def test_verl_rows_have_the_documented_fields():
    found = verl_row(row_of(make_trajectory(4, sample=1)), 17)
    assert set(found) == {"data_source", "prompt", "ability", "reward_model", "extra_info", "messages"}
    assert found["reward_model"] == {"style": "rule", "ground_truth": "task-4"} and found["data_source"] == "tracker"
    assert found["extra_info"]["index"] == 17 and found["extra_info"]["split"] == "train"
    assert [m["role"] for m in found["prompt"]] == ["system", "user"] and len(found["messages"]) == 7


@pytest.mark.parametrize("form", ["trl", "verl"])
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
def test_tables_and_lines_hold_the_same_rows(run, tmp_path, form, suffix):
    path = tmp_path / f"rows{suffix}"
    assert export(read(str(run)), form, path) == 48
    convert = {"trl": trl_row, "verl": verl_row}[form]
    expected = [convert(row, index) for index, row in enumerate(read(str(run)))]
    if suffix == ".parquet":
        assert pq.read_table(path).to_pylist() == expected
    else:
        assert [json.loads(line) for line in path.read_text().splitlines()] == expected
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_an_export_that_breaks_off_leaves_nothing_and_spares_the_old_file(run, tmp_path):
    def breaks():
        yield from list(read(str(run)))[:20]
        raise TrajectoryFileError("broken")

    for path in (tmp_path / "rows.parquet", tmp_path / "rows.jsonl"):
        path.write_text("old")
        with pytest.raises(TrajectoryFileError):
            export(breaks(), "trl", path)
        assert path.read_text() == "old"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rows.jsonl", "rows.parquet"]


# The command


def test_show_lists_and_shows(run, capsys):
    code, out, _ = invoke(capsys, "show", run, "--kind", "train", "--limit", 5)
    assert code == 0 and "5 of 36 trajectories" in out and "6/task-6/0" in out and "12/task-12/0" not in out
    code, out, _ = invoke(capsys, "show", run, "8/task-8/1")
    assert code == 0 and "→ find_ticket(number=8)" in out
    code, _, error = invoke(capsys, "show", run, "8/task-8/1", "--step", "3")
    assert code == 1 and error.count("\n") == 1 and "8/task-8/1" in error


def test_grep_prints_where_and_says_how_many(run, capsys):
    code, out, _ = invoke(capsys, "grep", run, r"close_ticket.*: (8|9)\b", "--role", "assistant")
    assert code == 0 and len(out.splitlines()) == 4 and all("turn 2 assistant" in line for line in out.splitlines())
    code, out, _ = invoke(capsys, "grep", run, "TICKET", "-i", "-c", "--env", "tracker", "--reward", "1")
    count = sum(r["env_key"] == "tracker" and r["reward"] == 1 for r in read(str(run)))
    assert code == 0 and out == f"{count} trajectories, {4 * count} matches\n"
    code, out, _ = invoke(capsys, "grep", run, "ticket", "-l", "--step", "2")
    assert len(set(out.split())) == len(out.split()) == 12
    assert invoke(capsys, "grep", run, "ticket", "--limit", "3")[1].count("\n") == 3
    assert invoke(capsys, "grep", run, "no such words")[0] == 1


def test_export_takes_graded_trajectories_unless_told_otherwise(run, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    graded = sum(isinstance(trajectory(row).outcome, Graded) for row in read(str(run)))
    code, out, _ = invoke(capsys, "export", run, "--format", "openai", "--out", path)
    assert code == 0 and out == f"{graded} rows in {path}\n" and graded < 48
    for line in path.read_text().splitlines():
        found = json.loads(line)
        assert list(found) == ["messages"]
        check_openai(found["messages"])
    assert invoke(capsys, "export", run, "--format", "trl", "--out", path, "--outcome", "any")[1].startswith("48 rows")


def test_recover_finishes_and_reports(tmp_path, capsys):
    folder = tmp_path / "run" / "trajectories"
    spool = Spool(folder)
    spool.write(make_groups(2), Origin("train", 5, 4))
    _, _, error = invoke(capsys, "show", tmp_path / "run")
    assert "1 batches" in error and "recover" in error
    spool._lock.close()
    code, out, _ = invoke(capsys, "recover", tmp_path / "run")
    assert code == 0 and out.startswith("1 batches recovered, 0 of them")
    code, out, error = invoke(capsys, "show", tmp_path / "run")
    assert (code, error) == (0, "") and "4 of 4 trajectories" in out


def test_recover_that_ran_out_of_time_says_so(tmp_path, capsys, monkeypatch):
    spool = Spool(tmp_path)
    for step in (5, 6):
        spool.write(make_groups(1), Origin("train", step, 4))
    spool._lock.close()
    release = threading.Event()
    monkeypatch.setattr(trajectory_store, "finish", lambda *a: (release.wait(30), finish(*a))[1])
    code, out, error = invoke(capsys, "recover", tmp_path, "--timeout", 1)
    release.set()
    assert code == 1 and out.startswith("0 batches recovered")
    assert "2 batches in the spool" in error and "not everything was finished within 1 s" in error


def test_the_outcomes_of_the_command_are_those_of_trajectories():
    assert set(command.OUTCOMES) == set(OUTCOME_NAMES.values())


def wrong(folder: Path) -> dict[str, list]:
    good = (folder / "good.jsonl").read_text().splitlines()[0]
    broken = {
        "half.parquet": (folder / "good.parquet").read_bytes()[:-100],
        "other.parquet": None,
        "nonsense.parquet": b"nonsense",
        "empty.parquet": b"",
        "half.jsonl": good[: len(good) // 2].encode(),
        "list.jsonl": b"[]",
        "number.jsonl": b"5",
        "binary.jsonl": bytes(range(256)),
        "reward.jsonl": good.replace('"reward":', '"reward":"high","x":').encode(),
        "messages.jsonl": good.replace('"role":"system"', '"rule":"system"').encode(),
        "ids.jsonl": good.replace('"ids":[', '"ids":["a",').encode(),
        "missing.jsonl": good.replace('"trajectory_id"', '"id"').encode(),
        "step.jsonl": good.replace('"step":', '"step":"one","x":').encode(),
    }
    for name, content in broken.items():
        if content is None:
            table = pq.read_table(folder / "good.parquet").drop_columns(["messages", "ids"])
            pq.write_table(table, folder / name)
        else:
            (folder / name).write_bytes(content)
    cases = {f"show {name}": ["show", folder / name] for name in broken}
    cases |= {
        f"export {name}": ["export", folder / name, "--format", "trl", "--out", folder / "out.parquet"]
        for name in broken
    }
    (folder / "nothing").mkdir()
    ok = folder / "good.parquet"
    return cases | {
        "absent": ["show", folder / "absent"],
        "empty folder": ["grep", folder / "nothing", "x"],
        "another kind of file": ["show", ROOT / "README.md"],
        "pattern": ["grep", ok, "("],
        "range of steps": ["grep", ok, "x", "--step", "8:2"],
        "range of rewards": ["show", ok, "--reward", "high"],
        "suffix": ["export", ok, "--format", "verl", "--out", folder / "out.csv"],
        "openai as a table": ["export", ok, "--format", "openai", "--out", folder / "out.parquet"],
        "folder of the export": ["export", ok, "--format", "trl", "--out", folder / "no" / "out.parquet"],
        "a selection of nothing": ["export", ok, "--format", "trl", "--out", folder / "out.parquet", "--env", "none"],
        "upload": ["recover", folder, "--upload-to", "elsewhere"],
    }


def test_wrong_input_is_one_clear_line_exit_code_2_and_nothing_half_written(tmp_path, capsys):
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    store.put(make_groups(2), Origin("train", 1, 0))
    store.close()
    for suffix in ("parquet", "jsonl"):
        (tmp_path / f"step_000001.{suffix}").rename(tmp_path / f"good.{suffix}")
    cases = wrong(tmp_path)
    before = sorted(tmp_path.iterdir())
    for name, arguments in cases.items():
        code, out, error = invoke(capsys, *arguments)
        assert (code, out) == (2, ""), (name, code, out, error)
        assert error.startswith("fleet-rl: ") and error.count("\n") == 1 and len(error) < 500, (name, error)
    assert sorted(tmp_path.iterdir()) == before


def fleet_rl(*arguments, **keys) -> subprocess.CompletedProcess:
    command_line = [sys.executable, "-m", "deploy.cli", "trajectories", *map(str, arguments)]
    return subprocess.run(
        command_line, cwd=ROOT, capture_output=True, text=True, timeout=120, env=dict(os.environ), **keys
    )


def test_the_console_command_answers_and_ends_quietly_when_its_reader_does(run):
    for arguments, code in ((["--help"], 0), ([], 2), (["show", "absent"], 2), (["frobnicate", "x"], 2)):
        answer = fleet_rl(*arguments)
        assert answer.returncode == code and "Traceback" not in answer.stderr
    line = f"{sys.executable} -m deploy.cli trajectories grep {run} . | head -n 1"
    piped = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert piped.stdout.count("\n") == 1 and piped.stderr == ""
