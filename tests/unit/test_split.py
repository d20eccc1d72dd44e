"""Splits: the published presets by their rules, SkyRL-Fleet's to the bit, and the one that never moves a task."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from train.data.skyrl_split import MISSING_CURRENT_DATE, split_skyrl
from train.data.split import (
    PRESETS,
    EnvironmentRule,
    Filters,
    Preset,
    SplitError,
    TaskFacts,
    split_by_threshold,
    unit_hash,
)
from train.data.stable_split import split_stable
from train.data.task_file import TaskFile

EVERYTHING = Filters()
SIGMAS = 5


def facts(raw):
    """As the reader of task files makes them, without a file."""
    return [
        TaskFacts(
            index=index,
            task_key=task["task_key"],
            env_key=task["env_key"],
            task_modality=task["task_modality"],
            difficulty=task.get("difficulty"),
            env_key_named=True,
            has_prompt=True,
            hash=unit_hash(task["task_key"]),
        )
        for index, task in enumerate(raw)
    ]


def environment(env_key, count, modality="tool_use", start=0):
    return [
        {"task_key": f"{env_key}-{i}", "env_key": env_key, "prompt": "p", "task_modality": modality}
        for i in range(start, start + count)
    ]


def tasks_of(sizes, modality="tool_use"):
    return facts([task for env_key, count in sizes.items() for task in environment(env_key, count, modality)])


def counts(tasks, split):
    """(train, eval) of each environment."""
    env_of = {task.index: task.env_key for task in tasks}
    found = defaultdict(lambda: [0, 0])
    for side, indices in enumerate((split.train, split.eval)):
        for index in indices:
            found[env_of[index]][side] += 1
    return {env_key: tuple(both) for env_key, both in found.items()}


def within_binomial_bounds(count, n, ratio):
    return abs(count - n * ratio) <= SIGMAS * math.sqrt(n * ratio * (1 - ratio))


# -- the published presets


def test_v0_2_holds_out_two_percent_of_large_environments_and_two_environments_whole():
    tasks = tasks_of({"booking": 1089, "github": 1865, "reddit": 249, "outlook": 19, "zillow": 33})
    split = split_by_threshold(tasks, PRESETS["v0.2"], EVERYTHING)
    found = counts(tasks, split)
    assert found["outlook"] == (0, 19) and found["zillow"] == (33, 0)
    assert found["reddit"] == (249, 0)  # 4.98 expected is less than 5
    for env_key, n in (("booking", 1089), ("github", 1865)):
        assert sum(found[env_key]) == n and within_binomial_bounds(found[env_key][1], n, 0.02)
    assert all(unit_hash(t.task_key) < 0.02 for t in tasks if t.index in set(split.eval) and t.env_key != "outlook")
    tasks = tasks_of({"grid": 250})
    assert split_by_threshold(tasks, PRESETS["v0.2"], EVERYTHING).environments["grid"].threshold == 0.02


def test_v0_2_holds_out_whole_environments_of_one_modality_only():
    raw = environment("outlook", 30, "computer_use") + environment("instacart", 32, "computer_use")
    raw += environment("outlook", 19, "tool_use", start=100)
    tasks = facts(raw)
    found = counts(tasks, split_by_threshold(tasks, PRESETS["v0.2"], EVERYTHING))
    assert found == {"outlook": (30, 19), "instacart": (0, 32)}


def test_v0_2_3_gives_the_published_table():
    sizes = {"booking": 1089, "fira": 51, "github": 1865, "hubspot": 10, "outlook": 19, "reddit": 188}
    sizes |= {"ticketmaster": 222, "zillow": 33, "dropbox": 2, "google-maps": 6}
    tasks = tasks_of(sizes)
    split = split_by_threshold(tasks, PRESETS["v0.2.3"], EVERYTHING)
    assert counts(tasks, split) == {
        "booking": (1059, 30), "fira": (46, 5), "github": (1835, 30), "hubspot": (9, 1), "outlook": (17, 2),
        "reddit": (169, 19), "ticketmaster": (200, 22), "zillow": (30, 3),
    }  # fmt: skip
    assert (len(split.train), len(split.eval)) == (3365, 112)
    assert set(split.dropped.values()) == {"excluded"} and len(split.dropped) == 8
    held = {task.task_key for task in tasks if task.index in set(split.eval)}
    github = sorted((f"github-{i}" for i in range(1865)), key=unit_hash)
    assert {key for key in held if key.startswith("github-")} == set(github[:30])


def test_v0_3_holds_out_ten_percent_or_about_thirty():
    sizes = {"google-maps": 4727, "github": 2081, "fira": 66, "dropbox": 3}
    tasks = tasks_of(sizes)
    split = split_by_threshold(tasks, PRESETS["v0.3"], EVERYTHING)
    held = set(split.eval)
    for env_key, n in sizes.items():
        limit = min(0.1, 30 / n)
        for task in tasks:
            if task.env_key == env_key:
                assert (task.index in held) == (unit_hash(task.task_key) < limit)
    assert within_binomial_bounds(counts(tasks, split)["google-maps"][1], 4727, 30 / 4727)


def test_custom_follows_its_numbers_and_holds_out_named_environments():
    tasks = tasks_of({"big": 1000, "small": 9, "own": 7})
    preset = Preset("custom", ratio=0.5, minimum=5, cap=100)
    split = split_by_threshold(tasks, preset, EVERYTHING, frozenset({"own"}))
    found = counts(tasks, split)
    assert found["small"] == (9, 0) and found["own"] == (0, 7) and within_binomial_bounds(found["big"][1], 1000, 0.1)
    assert {name: rule.status for name, rule in split.environments.items()} == {
        "big": "split", "small": "train_only", "own": "held_out",
    }  # fmt: skip


def test_a_cap_below_the_minimum_holds_out_nothing():
    split = split_by_threshold(tasks_of({"big": 1000}), Preset("custom", ratio=0.5, minimum=5, cap=3), EVERYTHING)
    assert split.eval == [] and split.environments["big"].status == "train_only"


def test_filters_come_before_duplicates_and_max_tasks_after():
    raw = environment("a", 3) + environment("a", 3, "computer_use") + environment("b", 4)
    raw[9]["difficulty"] = 2
    tasks = facts(raw)
    preset = Preset("custom", ratio=0.5)

    def kept(filters):
        split = split_by_threshold(tasks, preset, filters)
        assert sorted([*split.train, *split.eval, *split.dropped]) == list(range(10))
        return sorted([*split.train, *split.eval]), split.dropped

    assert kept(EVERYTHING) == ([0, 1, 2, 6, 7, 8, 9], dict.fromkeys((3, 4, 5), "duplicate"))
    # The tool_use copies are filtered away first, so these are no duplicates.
    assert kept(Filters(modality="computer_use"))[0] == [3, 4, 5]
    assert kept(Filters(max_tasks=5))[0] == [0, 1, 2, 6, 7]
    assert kept(Filters(env_keys=frozenset({"b"}), max_tasks=2)) == (
        [6, 7], dict.fromkeys(range(6), "env_key") | dict.fromkeys((8, 9), "max_tasks"),
    )  # fmt: skip
    assert kept(Filters(difficulties=frozenset({2})))[0] == [9]


# -- skyrl: the published algorithm once more, on the raw tasks, step by step


def restated_skyrl(tasks, modality=None, envs=None, difficulties=None, max_tasks=None):
    """Keys of both sides, in order."""

    def h(key):
        return int(hashlib.md5(key.encode()).hexdigest()[:16], 16) / 18446744073709551616

    def name(task):
        return task.get("key") or task.get("task_key")

    if modality:
        tasks = [t for t in tasks if t.get("task_modality") == modality]
    if envs:
        tasks = [t for t in tasks if t.get("env_key") in envs or t.get("env_id") in envs]
    if difficulties:
        tasks = [t for t in tasks if t.get("difficulty") in difficulties]
    if max_tasks:
        tasks = tasks[:max_tasks]
    unique = {}
    for task in tasks:
        if name(task):
            unique.setdefault(name(task), task)
    tasks = list(unique.values())
    if modality in ("tool_use", "computer_use"):
        tasks = [t for t in tasks if t.get("env_key") != "dropbox"]
    tasks = [t for t in tasks if name(t) not in MISSING_CURRENT_DATE]
    envs = defaultdict(list)
    for task in tasks:
        envs[task.get("env_key") or task.get("env_id") or "unknown"].append(task)
    train, held = defaultdict(list), defaultdict(list)
    for env in sorted(envs):
        target = min(int(len(envs[env]) * 0.20), 20)
        for task in envs[env]:
            if not task.get("prompt"):
                continue
            below = target >= 5 and h(name(task)) < target / len(envs[env])
            (held if below else train)[env].append(name(task))
    eval_keys = [key for env in held for key in held[env]]
    if len(eval_keys) > 60:
        queues = {env: sorted(keys, key=h) for env, keys in held.items()}
        eval_keys = [key for env in queues for key in queues[env][:4]]
        queues = {env: keys[4:] for env, keys in queues.items()}
        budget = 60 - len(eval_keys)
        while budget > 0 and any(queues.values()):
            for env in sorted(queues):
                if queues[env] and budget > 0:
                    eval_keys.append(queues[env].pop(0))
                    budget -= 1
    limit = int(sum(map(len, train.values())) * 0.20)
    train_keys = []
    for keys in train.values():
        train_keys += keys if len(keys) <= limit else sorted(keys, key=h)[:limit]
    return train_keys, eval_keys


def random_fleet_tasks(rng):
    names = ["github", "booking", "zillow", "dropbox", "fira", "reddit", "maps", *(f"env{i}" for i in range(18))]
    envs = rng.sample(names, rng.randint(1, len(names)))
    weights = [rng.paretovariate(0.8) for _ in envs]
    tasks = []
    for _ in range(rng.choice([3, 60, 400, 1500])):
        task = {rng.choice(["key", "task_key"]): f"task_{rng.randrange(1400):05d}", "prompt": f"do {rng.random()}"}
        task[rng.choice(["env_key", "env_key", "env_id"])] = rng.choices(envs, weights)[0]
        task["task_modality"] = rng.choice(["tool_use", "tool_use", "computer_use"])
        task["difficulty"] = rng.choice([1, 2, 3, None])
        for _ in range(rng.random() < 0.1):
            task.pop(rng.choice(list(task)))
        if rng.random() < 0.05:
            task["prompt"] = rng.choice(["", None])
        if rng.random() < 0.05:
            task["key"] = rng.choice(["", None, f"task_{rng.randrange(1400):05d}"])
        if rng.random() < 0.02:
            task |= {"key": rng.choice(sorted(MISSING_CURRENT_DATE)), "env_key": "zillow"}
        tasks.append(task)
    return tasks


@pytest.mark.parametrize("seed", range(50))
def test_skyrl_equals_an_independent_restatement(seed, tmp_path):
    rng = random.Random(seed)
    raw = random_fleet_tasks(rng)
    modality = rng.choice([None, "tool_use", "tool_use", "computer_use"])
    envs = rng.choice([None, None, None, {"github", "booking", "zillow", "dropbox", "env1"}])
    difficulties = rng.choice([None, None, {1, 2}])
    max_tasks = rng.choice([None, None, 300])
    filters = Filters(modality, frozenset(envs or ()), frozenset(difficulties or ()), max_tasks)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(rng.choice([raw, {"tasks": raw}])))
    tasks = TaskFile(path, lenient=True).facts()
    split = split_skyrl(tasks, PRESETS["skyrl"], filters)
    keys = [task.task_key for task in tasks]
    found = [keys[i] for i in split.train], [keys[i] for i in split.eval]
    assert found == restated_skyrl(raw, modality, envs, difficulties, max_tasks)
    assert sorted([*split.train, *split.eval, *split.dropped]) == list(range(len(raw)))


def test_skyrl_shows_the_known_figures_of_its_caps():
    tasks = tasks_of({"solo": 1000})
    split = split_skyrl(tasks, PRESETS["skyrl"], EVERYTHING)
    # About 980 of 1,000 are below no threshold; a fifth of them is kept, all others are dropped.
    before = 1000 - len(split.eval)
    assert len(split.train) == int(before * 0.2)
    assert list(split.dropped.values()) == ["train_cap"] * (before - len(split.train))
    tasks = tasks_of({f"env{i:02d}": 200 for i in range(20)})
    split = split_skyrl(tasks, PRESETS["skyrl"], EVERYTHING)
    assert len(split.eval) == 80 and set(counts(tasks, split).values()) >= {
        (e, 4) for e, _ in counts(tasks, split).values()
    }


# -- stable


def keys_of(tasks, indices):
    keys = {task.index: task.task_key for task in tasks}
    return {keys[index] for index in indices}


ENVIRONMENTS = ("large", "middle", "small", "late")
SIZES = dict(zip(ENVIRONMENTS, (400, 120, 40, 60), strict=True))
VERSION = st.tuples(*(st.tuples(st.integers(0, n), st.integers(0, n)) for n in SIZES.values()), st.randoms())


@settings(max_examples=150, deadline=None)
@given(
    versions=st.lists(VERSION, min_size=2, max_size=6),
    ratio=st.sampled_from([0.02, 0.2, 0.5]),
    minimum=st.integers(0, 8),
    cap=st.sampled_from([None, 1, 3, 20]),
    held_out=st.sets(st.sampled_from(ENVIRONMENTS), max_size=1),
)
def test_stable_moves_no_task_when_tasks_come_go_and_change_places(versions, ratio, minimum, cap, held_out):
    preset = Preset("stable", ratio=ratio, minimum=minimum, cap=cap)
    rules: dict[str, EnvironmentRule] = {}
    side_of: dict[str, str] = {}
    for *windows, rng in versions:
        raw = []
        for env_key, (start, stop) in zip(ENVIRONMENTS, windows, strict=True):
            raw += environment(env_key, max(0, stop - start), start=start)
        rng.shuffle(raw)
        tasks = facts(raw)
        chosen = frozenset(env for env in held_out if env not in rules or rules[env].status == "held_out")
        split = split_stable(tasks, preset, EVERYTHING, chosen, rules)
        for side, indices in (("train", split.train), ("eval", split.eval)):
            for key in keys_of(tasks, indices):
                assert side_of.setdefault(key, side) == side
        assert len(split.train) + len(split.eval) == len(raw)
        rules = json.loads(json.dumps({env: rule.model_dump() for env, rule in split.environments.items()}))
        rules = {env: EnvironmentRule(**rule) for env, rule in rules.items()}


def test_stable_does_not_depend_on_the_order_of_the_file():
    raw = [task for env_key, n in SIZES.items() for task in environment(env_key, n)]
    first = split_stable(facts(raw), PRESETS["stable"], EVERYTHING)
    shuffled = random.Random(0).sample(raw, len(raw))
    second = split_stable(facts(shuffled), PRESETS["stable"], EVERYTHING)
    assert keys_of(facts(raw), first.eval) == keys_of(facts(shuffled), second.eval) and first.eval
    assert first.environments == second.environments


@pytest.mark.parametrize("n", [25, 100, 1000, 5000])
def test_stable_holds_its_ratio_within_binomial_bounds(n):
    tasks = tasks_of({"a": n, "b": n})
    uncapped = Preset("stable", ratio=0.2, minimum=5)
    for count in (len(side) for side in _eval_by_env(tasks, split_stable(tasks, uncapped, EVERYTHING))):
        assert within_binomial_bounds(count, n, 0.2)
    capped = split_stable(tasks, PRESETS["stable"], EVERYTHING)
    for env_key, side in zip("ab", _eval_by_env(tasks, capped), strict=True):
        below = sum(task.hash < 0.2 for task in tasks if task.env_key == env_key)
        assert len(side) == min(20, below)


def _eval_by_env(tasks, split):
    held = set(split.eval)
    return [[t for t in tasks if t.env_key == env_key and t.index in held] for env_key in "ab"]


def test_the_first_stable_split_is_its_threshold_and_nothing_else():
    tasks = tasks_of({"large": 3000, "small": 24})
    split = split_stable(tasks, PRESETS["stable"], EVERYTHING)
    limit = split.environments["large"].threshold
    assert {t.index for t in tasks if t.env_key == "large" and t.hash < limit} == set(split.eval)
    assert len(split.eval) == 20 and split.environments["large"].train_keys == ()
    assert split.environments["small"].status == "train_only"


def test_a_grown_environment_keeps_its_cap_and_a_small_one_is_split_once_enough_new_tasks_came():
    first = split_stable(tasks_of({"large": 200, "small": 20}), PRESETS["stable"], EVERYTHING)
    tasks = tasks_of({"large": 2000, "small": 400})
    second = split_stable(tasks, PRESETS["stable"], EVERYTHING, stored=first.environments)
    found = counts(tasks, second)
    assert found["large"][1] == 20 and found["small"] == (380, 20)
    old = {f"small-{i}" for i in range(20)}
    assert not old & keys_of(tasks, second.eval)


def test_stable_refuses_to_hold_out_what_it_split_before_and_keeps_held_out_what_was():
    tasks = tasks_of({"a": 100, "b": 100})
    first = split_stable(tasks, PRESETS["stable"], EVERYTHING, frozenset({"b"}))
    assert counts(tasks, first)["b"] == (0, 100)
    again = split_stable(tasks, PRESETS["stable"], EVERYTHING, stored=first.environments)
    assert again.eval == first.eval
    with pytest.raises(SplitError, match="environment 'a' was split before"):
        split_stable(tasks, PRESETS["stable"], EVERYTHING, frozenset({"a"}), first.environments)
