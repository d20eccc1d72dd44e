"""What two versions of a data set share: tasks that changed sides, and prompts that say nearly the same."""

from __future__ import annotations

import json
import random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.prepare import main
from train.data.contamination import PreparedTasks, Text, compare, jaccard, near_duplicates, shingles

WORDS = [f"word{i}" for i in range(400)]


def prompt(rng, count=60):
    return " ".join(rng.choices(WORDS, k=count))


def changed(rng, text, edits):
    words = text.split()
    for _ in range(edits):
        words[rng.randrange(len(words))] = rng.choice(WORDS)
    return " ".join(words)


def texts(prompts, version="new"):
    return [Text(key, version, prompt) for key, prompt in prompts.items()]


def brute_force(train, held_out, similarity):
    """Jaccard similarity of three-word runs of every pair, from the definition."""

    def runs(text):
        words = text.lower().split()
        return {tuple(words[i : i + 3]) for i in range(len(words) - 2)}

    found = {}
    others = {key: runs(text) for key, text in held_out.items()}
    for train_key, text in train.items():
        one = runs(text)
        for eval_key, other in others.items():
            value = len(one & other) / len(one | other)
            if value >= similarity:
                found[train_key, eval_key] = value
    return found


@pytest.mark.parametrize("similarity", [0.5, 0.8, 0.95])
def test_near_duplicates_are_those_of_all_pairs_compared_in_full(similarity):
    rng = random.Random(1)
    held_out = {f"e{i}": prompt(rng) for i in range(80)}
    train = {f"t{i}": prompt(rng) for i in range(150)}
    train |= {f"n{i}": changed(rng, held_out[f"e{i % 80}"], rng.randint(0, 8)) for i in range(250)}
    wanted = brute_force(train, held_out, similarity)
    found = near_duplicates(texts(train), texts(held_out), similarity)
    assert len(wanted) > 30
    for value, trained, held in found:  # none is reported wrongly
        assert wanted[trained.task_key, held.task_key] == pytest.approx(value)
    assert len(found) >= 0.95 * len(wanted)
    assert [pair[0] for pair in found] == sorted((pair[0] for pair in found), reverse=True)


def test_equal_prompts_are_found_whatever_their_case_and_punctuation_and_however_short():
    for text in ("Cancel it.", "go", "Book the room for Monday, at noon, please."):
        ((value, trained, held),) = near_duplicates(
            texts({"a": text}), texts({"b": text.upper().replace(".", "!")}), 1.0
        )
        assert (trained.task_key, held.task_key, value) == ("a", "b", 1.0)
    assert near_duplicates(texts({"a": "Cancel it."}), texts({"b": "Cancel them."}), 0.5) == []


@given(one=st.text(max_size=30), other=st.text(max_size=30))
def test_any_two_texts_have_a_similarity_between_0_and_1(one, other):
    value = jaccard(shingles(one), shingles(other))
    assert 0 <= value <= 1 and jaccard(shingles(one), shingles(one)) == 1
    near_duplicates(texts({"a": one}), texts({"b": other}), 0.5)


def test_nothing_is_compared_with_itself_and_sides_may_be_empty():
    same = texts({"a": "one two three four"})
    assert near_duplicates(same, same, 0.5) == []
    assert near_duplicates([], same, 0.5) == near_duplicates(same, [], 0.5) == []


def test_versions_are_compared_by_side():
    rng = random.Random(2)
    a, b, c, d, e = (prompt(rng) for _ in range(5))
    old = PreparedTasks(train={"a": a, "b": b, "gone": e}, eval={"c": c})
    new = PreparedTasks(train={"a": a, "c": c, "copy": d + " now"}, eval={"b": b, "d": d, "again": e})
    found = compare(old, new, 0.8)
    assert (found.train_to_eval, found.eval_to_train) == (("b",), ("c",))
    assert (found.added, found.removed) == (3, 1)
    pairs = {(p.train_key, p.train_version, p.eval_key, p.eval_version) for p in found.near_duplicates}
    # What only the old version trained on counts as well: the policy may have seen it.
    assert pairs == {("copy", "new", "d", "new"), ("gone", "old", "again", "new")}


def test_a_task_whose_prompt_was_rewritten_is_compared_in_both_wordings():
    rng = random.Random(3)
    first, second, third = (prompt(rng) for _ in range(3))
    old = PreparedTasks(train={"a": first}, eval={"x": third})
    new = PreparedTasks(train={"a": second}, eval={"x": third, "y": first})
    (pair,) = compare(old, new, 0.9).near_duplicates
    assert (pair.train_key, pair.train_version, pair.eval_key) == ("a", "old", "y")


def test_the_command_reports_moved_tasks_and_near_duplicates_and_writes_them_all(tmp_path, capsys):
    rng = random.Random(4)

    def prepared(tasks, name, *arguments):
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps(tasks))
        assert main(["--tasks", str(path), "--out", str(tmp_path / name), "--preset", "v0.3", *arguments]) == 0
        return capsys.readouterr().out

    tasks = [{"task_key": f"t{i}", "env_key": "github", "prompt": prompt(rng)} for i in range(300)]
    prepared(tasks, "old")
    # Ten times the data: the threshold falls, and most of the held-out tasks change sides.
    more = [{"task_key": f"u{i}", "env_key": "github", "prompt": prompt(rng)} for i in range(2600)]
    more += [{"task_key": f"copy{i}", "env_key": "github", "prompt": t["prompt"]} for i, t in enumerate(tasks[:100])]
    out = prepared(tasks + more, "new", "--against", str(tmp_path / "old"))
    written = json.loads((tmp_path / "new/contamination.json").read_text())
    assert len(written["eval_to_train"]) > 10 and written["train_to_eval"] == []
    assert f"{len(written['eval_to_train'])} tasks changed sides" in out
    assert written["pairs"] == len(written["near_duplicates"])
    assert f"{written['pairs']} near-duplicate prompts across the sides, of {written['eval_tasks']} eval tasks" in out
    assert "more in contamination.json" in out and written["added"] == 2700
    assert written["eval_tasks"] == len({pair["eval_key"] for pair in written["near_duplicates"]})
    copied = {pair["eval_key"] for pair in written["near_duplicates"]}
    assert copied <= {f"t{i}" for i in range(100)} | {f"copy{i}" for i in range(100)} and copied
    pq.write_table(pa.table({"task_key": [1], "prompt": ["x"]}), tmp_path / "old/validation.parquet")
    options = ["--tasks", str(tmp_path / "new.json"), "--out", str(tmp_path / "third")]
    assert main([*options, "--against", str(tmp_path / "old")]) == 2
    err = capsys.readouterr().err
    assert "old/validation.parquet is not a file that fleet-rl prepare wrote" in err and len(err.splitlines()) == 1
    # Without the comparison no file of an earlier one is left to be taken for this split's.
    prepared(tasks, "new")
    assert not (tmp_path / "new/contamination.json").exists()
