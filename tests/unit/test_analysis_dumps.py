"""Reading what runs leave: SkyRL's dumps, our trajectory store, model families' dialogues, and broken files."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.skyrl_dumps import call, episode, result, solved, write_dump
from tests.trajectories import make_groups
from train.analysis.dumps import DumpError, find_run, parts_of, read_aggregated, read_episode, read_part
from train.analysis.episode import error_text, thinking_of, turns_of_text
from train.metrics_file import MetricsError, read_metrics
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin


def read_all(run: Path, part_bytes: int = 2**20) -> list:
    files = find_run(str(run), run).episodes
    return [found for part in parts_of(files, part_bytes) for found in read_part(files, part)]


# -- one line


def test_a_line_of_a_dump_is_an_episode(tmp_path):
    turns = [(call("search", q="x"), result([1])), ("<think>done</think>1<done><|im_end|>", None)]
    write_dump(tmp_path, 40, [episode(turns, task="t-1", env="hub/eu", stop="stop", max_turns=50)], label="greedy")
    (found,) = read_all(tmp_path)
    assert (found.env, found.task, found.step, found.label) == ("hub/eu", "t-1", 40, "greedy")
    assert (found.reward, found.stop_reason, found.max_turns, found.tokens) == (1.0, "stop", 50, 3)
    assert [(turn.text, turn.observation) for turn in found.turns] == [
        (call("search", q="x"), "[1]"),
        ("<think>done</think>1<done>", None),
    ]
    assert found.turns[1].thinking == "done"
    assert found.calls == 1
    assert found.prompt[-1] == ("user", "Close the issue.")


@pytest.mark.parametrize(
    "score, reward",
    [([0.0, 0.5, 1.0], 1.5), ([0, 0, 1], 1.0), ([], 0.0), ([0.0, None], None), (None, None), (0.25, 0.25), (1, 1.0)],
)
def test_the_reward_is_the_sum_over_tokens_and_null_is_unknown(tmp_path, score, reward):
    write_dump(tmp_path, 0, [solved("a") | {"score": score}])
    assert read_all(tmp_path)[0].reward == reward


def test_an_attempt_that_says_it_was_not_graded_is_no_zero_whatever_its_score(tmp_path):
    extras = {"task_key": "a", "data_source": "github", "not_graded": "provision: no instance"}
    write_dump(tmp_path, 0, [solved("a") | {"score": [], "env_extras": extras}])
    assert [(e.reward, e.not_graded) for e in read_all(tmp_path)] == [(None, "provision: no instance")]


def test_what_older_dumps_leave_out_is_taken_from_elsewhere(tmp_path):
    bare = {"input_prompt": "Do it.", "output_response": "done", "score": 1.0}
    folder = tmp_path / "dumped_evals" / "global_step_20_evals"
    folder.mkdir(parents=True)
    (folder / "reddit.jsonl").write_text(f"{json.dumps(bare)}\n\n{json.dumps(bare)}\n", encoding="utf-8")
    first, second = read_all(tmp_path)
    assert (first.env, first.step, first.stop_reason) == ("reddit", 20, "unknown")
    assert first.task == second.task  # by the prompt


def test_dialogues_of_other_model_families_are_cut_into_the_same_turns():
    expected = [("call 1", "result 1"), ("answer", None)]
    families = {
        "llama": "call 1<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nresult 1<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nanswer<|eot_id|>",
        "gemma": "call 1<end_of_turn>\n<start_of_turn>user\nresult 1<end_of_turn>\n"
        "<start_of_turn>model\nanswer<end_of_turn>",
        "glm": "call 1<|observation|>\nresult 1<|assistant|>\nanswer",
        "qwen": "call 1<|im_end|>\n<|im_start|>user\n<tool_response>\nresult 1\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\nanswer<|im_end|>\n<|im_end|>",
    }
    for family, text in families.items():
        assert [(turn.text, turn.observation) for turn in turns_of_text("", text)] == expected, family


def test_a_generation_prompt_at_the_end_is_no_turn_and_no_response_is_none():
    tail = "call<|im_end|>\n<|im_start|>user\nresult<|im_end|>\n<|im_start|>assistant\n"
    assert [(t.text, t.observation) for t in turns_of_text("", tail)] == [("call", "result")]
    assert turns_of_text("", "") == turns_of_text("", "<|im_end|>") == []


def test_thinking_that_the_template_opened_is_thinking():
    assert thinking_of("<think>a</think>b<think>c</think>") == "a\nc"
    assert thinking_of("a</think>b") == "a"
    assert thinking_of("<think>never closed") == "never closed"
    assert thinking_of("none") == ""
    (turn,) = turns_of_text("<|im_start|>assistant\n<think>\n", "cut off in the middle")
    assert turn.thinking.strip() == "cut off in the middle"


def test_a_result_that_is_nested_too_deeply_is_no_error_and_the_episode_is_read(tmp_path):
    deep = '{"error": ' + "[" * 100_000 + "]" * 100_000 + "}"
    write_dump(tmp_path, 0, [episode([(call("x"), deep), ("<done>", None)])])
    (found,) = read_all(tmp_path)
    assert (found.turns[0].observation, found.turns[0].error) == (deep, None)
    # However deep: at some depth a text may be read and not be written again.
    for depth in range(1000):
        error_text('{"error": ' + "[" * depth + "1" + "]" * depth + "}")


@given(st.text(alphabet=st.characters(codec="utf-8")), st.text(alphabet=st.characters(codec="utf-8")))
def test_any_text_can_be_cut(prompt, response):
    turns = turns_of_text(prompt, response)
    assert all(turn.text.strip() or turn.observation is not None for turn in turns)


_PIECES = st.sampled_from(
    ["<|im_start|>assistant\n", "<|im_start|>user\n", "<|im_end|>", "<think>", "</think>", "x", "\n"]
)


@given(st.lists(_PIECES, max_size=20).map("".join))
def test_any_mixture_of_marks_can_be_cut_and_nothing_written_is_lost(response):
    turns = turns_of_text("", response)
    assert sum(turn.text.count("x") + (turn.observation or "").count("x") for turn in turns) == response.count("x")


# -- parts


def test_every_line_is_in_exactly_one_part_wherever_parts_end(tmp_path):
    lines = [solved(f"task-{i}") | {"output_response": "x" * (i * 37 % 500)} for i in range(40)]
    write_dump(tmp_path, 0, lines)
    whole = [found.task for found in read_all(tmp_path)]
    assert whole == [f"task-{i}" for i in range(40)]
    for part_bytes in (50, 511, 512, 513, 5000):
        assert [found.task for found in read_all(tmp_path, part_bytes)] == whole, part_bytes


def test_an_episode_is_found_again_by_its_place(tmp_path):
    write_dump(tmp_path, 0, [solved(f"task-{i}") for i in range(5)])
    files = find_run(str(tmp_path), tmp_path).episodes
    for found in read_all(tmp_path, 300):
        assert read_episode(files, found.source) == found


# -- layouts


def store(run: Path, jsonl: bool, origins: list[Origin]) -> None:
    settings = StoreSettings(str(run / "trajectories"), jsonl=jsonl)
    trajectories = TrajectoryStore(settings)
    for origin in origins:
        trajectories.put(make_groups(6), origin)
    assert trajectories.close().waiting == 0


@pytest.mark.parametrize("kept", ["parquet and lines", "parquet", "lines"])
def test_the_trajectory_store_is_read_once_and_with_its_tokens(tmp_path, kept):
    store(tmp_path, kept != "parquet", [Origin("train", 3, 2), Origin("eval", 4, 3, "greedy")])
    if kept == "lines":
        for path in (tmp_path / "trajectories").glob("*.parquet"):
            path.unlink()
    run = find_run(str(tmp_path), tmp_path)
    originals = [t for group in make_groups(6) for t in group.trajectories]
    found = read_all(tmp_path)
    assert [(e.label, e.step) for e in found] == [("train", 3)] * 12 + [("greedy", 4)] * 12
    for one, original in zip(found, originals * 2, strict=True):
        assert (one.env, one.task, one.reward) == (original.env_key, original.task_key, original.reward)
        assert (one.not_graded is None) == (original.reward is not None)
        assert len(one.turns) == 3
        assert one.turns[0].observation.startswith('{"id":')
        assert [role for role, _ in one.prompt] == ["system", "user"]
    again = read_episode(run.episodes, found[5].source).recorded_tokens
    assert list(again["ids"]) == originals[5].ids.tolist()
    assert list(again["mask"]) == originals[5].mask.tolist()
    assert [list(span) for span in again["spans"]] == [[s.version, s.start, s.end] for s in originals[5].spans]


def test_an_evaluation_that_is_stored_and_dumped_counts_once(tmp_path):
    store(tmp_path, True, [Origin("eval", 0, 0, "sampled")])
    write_dump(tmp_path, 0, [solved("a")], label="sampled")
    write_dump(tmp_path, 0, [solved("a")], label="greedy")
    found = read_all(tmp_path)
    assert [e.label for e in found].count("sampled") == 12
    assert [e.label for e in found].count("greedy") == 1


def test_what_is_no_episode_is_left_alone(tmp_path):
    write_dump(tmp_path, 0, [solved("a")])
    (tmp_path / "evals/global_step_0/aggregated_results.jsonl").write_text("{}\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "other.jsonl").write_text("nothing\n")
    (tmp_path / "trajectories/superseded").mkdir(parents=True)
    (tmp_path / "trajectories/superseded/step_000001.jsonl").write_text("nothing\n")
    run = find_run(str(tmp_path), tmp_path)
    assert [file.name for file in run.episodes] == ["evals/global_step_0/github.jsonl"]
    assert run.metrics == tmp_path / "metrics.jsonl"
    assert set(run.aggregated) == {(0, "sampled")}


def test_a_label_may_be_any_word_with_dots_and_dashes(tmp_path):
    write_dump(tmp_path, 5, [solved("a")], label="best-of-4")
    store(tmp_path, False, [Origin("eval", 6, 5, "t-0.7")])
    assert [(e.step, e.label) for e in read_all(tmp_path)] == [(5, "best-of-4")] + [(6, "t-0.7")] * 12


@pytest.mark.parametrize("folder", ["eval_only", "evals/global_step_3", "evals/global_step_3/greedy"])
def test_metrics_beside_evaluations_are_no_environment(tmp_path, folder):
    write_dump(tmp_path, 0, [solved("a")])
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    (tmp_path / folder / "metrics.jsonl").write_text('{"step": 1}\n')
    assert [file.env for file in find_run(str(tmp_path), tmp_path).episodes] == ["github"]


def test_the_folder_of_one_step_is_a_run_too(tmp_path):
    write_dump(tmp_path, 60, [solved("a")])
    assert find_run(str(tmp_path / "evals"), tmp_path).episodes[0].step == 60
    assert find_run(str(tmp_path / "evals/global_step_60"), tmp_path).episodes[0].step == 60


# -- broken files

WRONG_LINES = [
    b"",
    b"{",
    b"nothing",
    b"[]",
    b"null",
    b"3",
    b'"text"',
    b"{}",
    b'{"input_prompt": 1}',
    b'{"input_prompt": "a", "output_response": "b"}',
    b'{"input_prompt": ["a"], "output_response": "b", "score": []}',
    b'{"input_prompt": "a", "output_response": null, "score": []}',
    b'{"input_prompt": "a", "output_response": "b", "score": ["x"]}',
    b'{"input_prompt": "a", "output_response": "b", "score": [NaN]}',
    b'{"input_prompt": "a", "output_response": "b", "score": {}}',
    b'{"input_prompt": "a", "output_response": "b", "score": [1e999]}',
    b'{"input_prompt": "a", "output_response": "b", "score": 1, "stop_reason": 5}',
    b'{"input_prompt": "a", "output_response": "b", "score": 1, "env_extras": []}',
    b'{"input_prompt": "a", "output_response": "b", "score": 1, "data_source": 3}',
    b'{"input_prompt": "\xff", "output_response": "b", "score": 1}',
    b'{"input_prompt": "\\ud800", "output_response": "b", "score": 1}',
    b'{"input_prompt": "a", "output_response": "b", "score": 1, "env_extras": {"x": '
    + b"[" * 100_000
    + b"]" * 100_000
    + b"}}",
    b"\x00\x01\x02",
    b"PAR1",
]


def damaged(number: int) -> bytes:
    """A good line with one cut or one byte changed, by seed."""
    draw = random.Random(number)
    line = json.dumps(solved("a")).encode()
    where = draw.randrange(1, len(line) - 1)
    if number % 2:
        return line[:where]
    return line[:where] + bytes([draw.choice(b'{}[]",:\\\x00')]) + line[where + 1 :]


@pytest.mark.parametrize("lines", [WRONG_LINES[1:], [damaged(n) for n in range(200)]], ids=["chosen", "damaged"])
def test_a_broken_line_is_named_in_one_line_or_read_as_what_it_still_is(tmp_path, lines):
    refused = 0
    path = tmp_path / "evals/global_step_0/github.jsonl"
    path.parent.mkdir(parents=True)
    good = json.dumps(solved("a")).encode() + b"\n"
    for line in lines:
        path.write_bytes(good * 2 + line + b"\n" + good)
        try:
            assert len(read_all(tmp_path)) == 4
        except DumpError as error:
            refused += 1
            assert str(error).startswith("evals/global_step_0/github.jsonl, line 3: "), line
            assert "\n" not in str(error)
            assert len(str(error)) < 400
    assert refused >= len(lines) * 0.6


def test_a_file_that_ends_in_the_middle_of_a_line_says_so(tmp_path):
    write_dump(tmp_path, 0, [solved("a")])
    path = tmp_path / "evals/global_step_0/github.jsonl"
    path.write_bytes(path.read_bytes() + b'{"input_prompt": "a')
    with pytest.raises(DumpError, match="line 2: the file ends in the middle of this line"):
        read_all(tmp_path)


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100, None])
def test_a_broken_parquet_file_is_named(tmp_path, content):
    store(tmp_path, False, [Origin("train", 1, 0)])
    path = tmp_path / "trajectories/step_000001.parquet"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + whole[len(whole) // 2 + 50 :] if content is None else content)
    with pytest.raises(DumpError, match=r"^trajectories/step_000001\.parquet") as error:
        read_all(tmp_path)
    assert "\n" not in str(error.value)


def test_a_parquet_file_of_something_else_is_named(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    (tmp_path / "trajectories").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "trajectories/step_000001.parquet")
    with pytest.raises(DumpError, match="has no column task_key"):
        read_all(tmp_path)


def test_where_there_is_no_run_the_error_says_what_to_give(tmp_path):
    (tmp_path / "file.txt").write_text("x")
    for location, words in [
        ("nowhere", "there is no folder"),
        (str(tmp_path / "file.txt"), "is a file"),
        (str(tmp_path), "holds no episodes"),
    ]:
        with pytest.raises(DumpError, match=words):
            find_run(location, tmp_path)


# -- metrics


def test_metrics_of_a_run_that_goes_on_are_read_up_to_their_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 2, "b": null}\n{"step": 2, "a": nul', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1, "a": 2}]


@pytest.mark.parametrize("line", ["{", "[]", "{}", '{"step": 1.5}', '{"step": "1"}'])
def test_a_broken_line_of_metrics_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n', encoding="utf-8")
    with pytest.raises(MetricsError, match=r"^metrics\.jsonl, line 2: "):
        read_metrics(path)


def test_aggregated_results_may_hold_nan_and_text(tmp_path):
    path = tmp_path / "aggregated_results.jsonl"
    path.write_text('{"eval/all/pass_at_3": 0.5, "x": NaN, "note": "y", "flag": true}\n', encoding="utf-8")
    found = read_aggregated(path)
    assert found.keys() == {"eval/all/pass_at_3", "x"}
    path.write_text("{", encoding="utf-8")
    with pytest.raises(DumpError, match="line 1"):
        read_aggregated(path)
