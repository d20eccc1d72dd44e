"""The task sampler: shares and minimums of a mix, epochs that no small environment ends, and exact resumption."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from actors.task import Task
from train.data.sampler import TaskMix, TaskSampler

# The first Fleet data set: one environment is half of everything, and one has two tasks.
SIZES = {"github": 1865, "booking": 1089, "reddit": 246, "ticketmaster": 222, "fira": 54, "hubspot": 12, "dropbox": 2}


def environment(env_key, count, modality="tool_use"):
    return [
        Task(task_key=f"{modality}/{env_key}/{i}", prompt="p", env_key=env_key, task_modality=modality)
        for i in range(count)
    ]


def tasks_of(sizes, modality="tool_use"):
    return [task for env_key, count in sizes.items() for task in environment(env_key, count, modality)]


def draw(sampler, count):
    return [next(sampler) for _ in range(count)]


def batches(drawn, size):
    return [drawn[i : i + size] for i in range(0, len(drawn), size)]


def test_every_batch_holds_the_minimum_of_every_environment():
    sampler = TaskSampler(tasks_of(SIZES), 1, TaskMix(min_per_env=2), batch_size=32)
    for batch in batches(draw(sampler, 32 * 300), 32):
        found = Counter(task.env_key for task in batch)
        assert min(found[env_key] for env_key in SIZES) >= 2 and len(batch) == 32


@given(
    sizes=st.lists(st.integers(1, 60), min_size=2, max_size=5),
    minimum=st.integers(1, 2),
    extra=st.integers(0, 7),
    seed=st.integers(0, 9),
)
def test_whatever_the_sizes_no_batch_lacks_the_minimum(sizes, minimum, extra, seed):
    tasks = tasks_of({f"env{i}": n for i, n in enumerate(sizes)})
    batch_size = minimum * len(sizes) + extra
    sampler = TaskSampler(tasks, seed, TaskMix(min_per_env=minimum), batch_size)
    for batch in batches(draw(sampler, batch_size * 12), batch_size):
        found = Counter(task.env_key for task in batch)
        assert len(found) == len(sizes) and min(found.values()) >= minimum


def test_shares_follow_the_sizes_above_the_minimum():
    size, count = 32, 500
    sampler = TaskSampler(tasks_of(SIZES), 1, TaskMix(min_per_env=1), size)
    found = Counter(task.env_key for task in draw(sampler, size * count))
    # ticketmaster's 222 of 3,490 tasks are 2.04 of 32, the four smaller environments get their one.
    small = [env_key for env_key, n in SIZES.items() if n / 3490 * size < 1]
    assert small == ["fira", "hubspot", "dropbox"]
    assert all(found[env_key] == count for env_key in small)
    rest = {env_key: n for env_key, n in SIZES.items() if env_key not in small}
    left = size * count - count * len(small)
    for env_key, n in rest.items():
        assert abs(found[env_key] - left * n / sum(rest.values())) <= 1


def test_no_environment_ends_the_epoch_of_another():
    tasks = tasks_of({"large": 1000, "tiny": 2})
    sampler = TaskSampler(tasks, 1, TaskMix(min_per_env=1), batch_size=8)
    drawn = draw(sampler, 8 * 143)  # seven of eight are large's: 1,001 draws
    large = [task.task_key for task in drawn if task.env_key == "large"]
    assert len(set(large[:1000])) == 1000  # every task once before any comes again
    assert sampler.epoch == pytest.approx(8 * 143 / 1002)
    tiny = [task.task_key for task in drawn if task.env_key == "tiny"]
    assert all(set(pair) == {"tool_use/tiny/0", "tool_use/tiny/1"} for pair in batches(tiny[:142], 2))


def test_without_a_minimum_a_mix_of_the_default_shares_still_draws_every_task_once_an_epoch():
    tasks = tasks_of({"a": 30, "b": 20, "c": 10})
    sampler = TaskSampler(tasks, 3, TaskMix(env_weights={"a": 1.0}), batch_size=6)
    for _ in range(3):
        assert sorted(t.task_key for t in draw(sampler, 60)) == sorted(t.task_key for t in tasks)


def test_modalities_are_mixed_by_weight_and_within_them_by_size():
    tasks = tasks_of({"github": 300, "maps": 13}) + tasks_of({"maps": 739, "amazon": 145}, "computer_use")
    mix = TaskMix(modality_weights={"tool_use": 3, "computer_use": 1}, min_per_env=1)
    drawn = draw(TaskSampler(tasks, 1, mix, batch_size=16), 16 * 400)
    assert Counter(task.task_modality for task in drawn) == {"tool_use": 4800, "computer_use": 1600}
    for batch in batches(drawn, 16):
        assert Counter(task.task_modality for task in batch) == {"tool_use": 12, "computer_use": 4}
        assert len({(task.task_modality, task.env_key) for task in batch}) == 4
    computer = Counter(task.env_key for task in drawn if task.task_modality == "computer_use")
    assert abs(computer["maps"] - min(1200, 1600 * 739 / 884)) <= 1


def test_weights_scale_an_environments_share_and_the_exponent_levels_sizes():
    tasks = tasks_of({"a": 100, "b": 100, "c": 400})
    doubled = Counter(t.env_key for t in draw(TaskSampler(tasks, 1, TaskMix(env_weights={"a": 2}), 10), 7000))
    assert doubled == {"a": 2000, "b": 1000, "c": 4000}
    level = Counter(t.env_key for t in draw(TaskSampler(tasks, 1, TaskMix(size_exponent=0), 10), 3000))
    assert level == {"a": 1000, "b": 1000, "c": 1000}
    left_out = Counter(t.env_key for t in draw(TaskSampler(tasks, 1, TaskMix(env_weights={"c": 0}), 10), 1000))
    assert left_out == {"a": 500, "b": 500}


MIXES = st.builds(
    TaskMix,
    min_per_env=st.integers(0, 2),
    env_weights=st.dictionaries(st.sampled_from("abc"), st.floats(0.1, 5), max_size=2),
    size_exponent=st.sampled_from([0.0, 0.5, 1.0]),
)


@given(mix=MIXES, seed=st.integers(0, 99), batch=st.integers(6, 13), stop=st.integers(0, 90))
def test_a_sampler_that_is_taken_up_again_draws_on_as_if_it_had_never_stopped(mix, seed, batch, stop):
    tasks = tasks_of({"a": 3, "b": 17, "c": 8})
    whole = [task.task_key for task in draw(TaskSampler(tasks, seed, mix, batch), 150)]
    first = TaskSampler(tasks, seed, mix, batch)
    draw(first, stop)
    state = json.loads(json.dumps(first.state_dict()))
    second = TaskSampler(tasks, seed, mix, batch)
    draw(second, 5)  # what it did before does not count
    second.load_state_dict(state)
    assert second.drawn == stop and second.epoch == first.epoch
    assert [task.task_key for task in draw(second, 150 - stop)] == whole[stop:]


def test_a_seed_decides_the_order_and_another_gives_another():
    tasks = tasks_of({"a": 50, "b": 50})
    one, again, other = (draw(TaskSampler(tasks, seed, TaskMix(min_per_env=1), 4), 100) for seed in (1, 1, 2))
    assert one == again
    orders = {tuple(task.task_key for task in drawn if task.env_key == "a") for drawn in (one, other)}
    assert len(orders) == 2


def test_the_order_within_a_batch_is_not_that_of_the_environments():
    sampler = TaskSampler(tasks_of({"a": 50, "b": 50}), 1, TaskMix(min_per_env=1), 8)
    orders = {tuple(task.env_key for task in batch) for batch in batches(draw(sampler, 80), 8)}
    assert len(orders) > 3


@pytest.mark.parametrize(
    ("mix", "words"),
    [
        ({"min_per_env": 3}, ["min_per_env 3", "9 tasks a batch", "8"]),
        ({"env_weights": {"githb": 1}}, ["'githb'", "'github'"]),
        ({"env_weights": {"github": 0, "a": 0, "b": 0}}, ["leave out every task"]),
        ({"modality_weights": {"computer_use": 1}}, ["'computer_use'", "'tool_use'"]),
        (
            {"modality_weights": {"tool_use": 1, "browser_use": 9}, "min_per_env": 1},
            ["min_per_env 1", "3 tasks a batch", "tool_use/github", "0.8"],
        ),
    ],
)
def test_a_mix_that_cannot_be_had_is_refused_with_the_arithmetic(mix, words):
    tasks = tasks_of({"github": 9, "a": 5, "b": 1})
    if "browser_use" in mix.get("modality_weights", {}):
        tasks += environment("web", 3, "browser_use")
    with pytest.raises(ValueError) as error:
        TaskSampler(tasks, 1, TaskMix(**mix), batch_size=8)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


def test_a_modality_without_a_weight_is_named():
    tasks = environment("a", 3) + environment("a", 3, "computer_use")
    with pytest.raises(ValueError, match="no weight of computer_use"):
        TaskSampler(tasks, 1, TaskMix(modality_weights={"tool_use": 1}))


@pytest.mark.parametrize("wrong", [{"env_weights": {"a": -1}}, {"size_exponent": 2}, {"min_per_task": 1}])
def test_a_mix_of_wrong_values_or_keys_is_refused(wrong):
    with pytest.raises(ValidationError):
        TaskMix(**wrong)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"fingerprint": "0"},
        lambda state: {},
        lambda state: state | {"drawn": {}},
        lambda state: state | {"drawn": dict.fromkeys(state["drawn"], "1")},
        lambda state: state | {"batch": ["nobody"]},
        lambda state: state | {"batch": 3},
    ],
)
def test_a_state_that_does_not_fit_is_refused(change):
    sampler = TaskSampler(tasks_of({"a": 5, "b": 5}), 1, TaskMix(min_per_env=1), 4)
    draw(sampler, 3)
    with pytest.raises(ValueError, match="the sampler's state is"):
        sampler.load_state_dict(change(sampler.state_dict()))


@pytest.mark.parametrize("other", ["seed", "tasks", "mix", "batch"])
def test_a_state_of_other_tasks_seed_mix_or_batch_is_refused(other):
    tasks, mix = tasks_of({"a": 5, "b": 5}), TaskMix(min_per_env=1)
    state = TaskSampler(tasks, 1, mix, 4).state_dict()
    changed = {
        "seed": lambda: TaskSampler(tasks, 2, mix, 4),
        "tasks": lambda: TaskSampler(tasks[1:], 1, mix, 4),
        "mix": lambda: TaskSampler(tasks, 1, TaskMix(min_per_env=2), 4),
        "batch": lambda: TaskSampler(tasks, 1, mix, 5),
    }[other]()
    with pytest.raises(ValueError, match="of other tasks"):
        changed.load_state_dict(state)
