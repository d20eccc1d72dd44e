"""Task files, splits and the order of tasks."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.task import Task, TaskFileError, load_tasks, parse_task
from train.config import DataConfig
from train.data.run_tasks import load_split
from train.data.sampler import TaskSampler
from train.data.split import unit_hash

GOOD = {"task_key": "a", "prompt": "p", "env_key": "e"}


def write(tmp_path, value, name="tasks.json"):
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def make(n, prefix="t"):
    return [GOOD | {"task_key": f"{prefix}{i}"} for i in range(n)]


def test_aliases_nulls_and_both_file_shapes_are_read(tmp_path):
    raw = {"key": "k", "prompt": "p", "env_id": "github", "version": "v2", "verifier_func": "def verify(env): ...",
           "env_variables": None, "difficulty": None, "extra": {"kept": 1}}  # fmt: skip
    for value in ([raw], {"tasks": [raw]}):
        (task,) = load_tasks(write(tmp_path, value))
        assert (task.task_key, task.env_key, task.env_version) == ("k", "github", "v2")
        assert task.verifier_code.startswith("def verify") and task.env_variables == {} and task.extra == {"kept": 1}


def test_the_first_of_duplicate_keys_is_kept(tmp_path):
    tasks = load_tasks(write(tmp_path, [GOOD, GOOD | {"prompt": "second"}]))
    assert [task.prompt for task in tasks] == ["p"]


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        ("{", ["tasks.json", "not valid JSON"]),
        ("[" * 100_000, ["not valid JSON"]),
        ({"items": []}, ["expected a list"]),
        ([GOOD, 7], ["task 1", "JSON object, not int"]),
        ([GOOD | {"prompt": ""}], ["task 0 (a)", "'prompt'"]),
        ([GOOD | {"env_variables": [1]}], ["task 0 (a)", "'env_variables'"]),
        ([GOOD | {"task_modality": "telepathy"}], ["'task_modality'", "tool_use"]),
        ([{"task_key": "a", "prompt": "p"}], ["'env_key'", "required"]),
        ([GOOD | {"difficulty": "hard"}], ["'difficulty'", "integer"]),
        ('[{"task_key": "a", "prompt": "p", "env_key": "e", "env_variables": {"n": NaN}}]', ["(a)", "'env_variables'"]),
        ([GOOD | {"env_variables": {"name": "\ud800"}}], ["'env_variables'", "cannot be sent as json"]),
        ([GOOD | {"data_key": "\udc00"}], ["'data_key'", "cannot be sent as json"]),
    ],
)
def test_a_malformed_file_names_task_and_field_in_one_line(tmp_path, value, parts):
    with pytest.raises(TaskFileError) as error:
        load_tasks(write(tmp_path, value))
    assert "\n" not in str(error.value)
    for part in parts:
        assert part in str(error.value)


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from([*Task.model_fields, "key", "env_id", "version", "verifier_func", "anything"])


@settings(max_examples=200, deadline=None)
@given(changes=st.dictionaries(FIELDS, JUNK, max_size=4), left_out=st.sets(FIELDS, max_size=2))
def test_whatever_stands_in_a_task_it_is_read_or_refused_in_one_line(changes, left_out):
    raw = {key: value for key, value in (GOOD | changes).items() if key not in left_out}
    try:
        task = parse_task(raw, "tasks.json, task 0")
    except TaskFileError as error:
        assert str(error).startswith("tasks.json, task 0") and "field '" in str(error) and "\n" not in str(error)
    else:
        assert task.task_key and task.prompt and task.env_key
        assert task.task_modality in ("tool_use", "computer_use", "browser_use")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TaskFileError, match=r"absent\.json does not exist"):
        load_tasks(tmp_path / "absent.json")


def test_the_split_is_by_hash_of_the_key_and_disjoint(tmp_path):
    config = DataConfig(train_tasks=write(tmp_path, make(1000)), eval_ratio=0.2)
    train, held_out = load_split(config)
    assert len(train) + len(held_out) == 1000 and 150 < len(held_out) < 250
    assert all(unit_hash(task.task_key) < 0.2 for task in held_out)
    assert all(unit_hash(task.task_key) >= 0.2 for task in train)


def test_the_hash_is_the_published_one():
    # md5("abc") = 900150983cd24fb0...; its first eight bytes over 2**64.
    assert unit_hash("abc") == 0x900150983CD24FB0 / 2**64


@pytest.mark.parametrize(
    ("train", "held_out", "part"),
    [
        ([], make(1), "no training task"),
        (make(2), [], "no held-out task"),
        (make(2), make(1), "task t0 is in both"),
    ],
)
def test_an_empty_or_shared_side_is_refused(tmp_path, train, held_out, part):
    config = DataConfig(train_tasks=write(tmp_path, train), eval_tasks=write(tmp_path, held_out, "held_out.json"))
    with pytest.raises(TaskFileError, match=part):
        load_split(config)


@given(n=st.integers(1, 12), seed=st.integers(0, 99))
def test_every_epoch_holds_every_task_once_and_the_seed_decides_the_order(n, seed):
    tasks = [Task(**raw) for raw in make(n)]
    first, second = TaskSampler(tasks, seed), TaskSampler(tasks, seed)
    drawn = [next(first).task_key for _ in range(3 * n)]
    assert drawn == [next(second).task_key for _ in range(3 * n)]
    for epoch in range(3):
        assert sorted(drawn[epoch * n : (epoch + 1) * n]) == sorted(task.task_key for task in tasks)
    assert first.epoch == 3.0
