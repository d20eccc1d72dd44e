"""``fleet-rl prepare``: what it writes, what it says, and what it does with files that are broken."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.task import Task, TaskFileError, load_tasks
from actors.task_table import read_raw_tasks, task_table
from deploy.prepare import main
from tests.broken_task_files import GOOD, broken_task_files, task
from tests.s3_server import ENVIRONMENT, serving_s3
from train.config import DataConfig
from train.data.run_tasks import load_split
from train.data.split import PRESETS, unit_hash
from train.data.task_file import LISTED, MalformedTasks, TaskFile

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "configs/tasks/tracker_train.json"
ANY_SPLIT = ("--preset", "custom", "--eval-ratio", "0.3", "--min-eval", "0")


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


@pytest.fixture
def run(tmp_path, capsys):
    """Runs the command on ``tasks`` and returns exit code, standard output and standard error."""

    def command(tasks, *arguments, out=tmp_path / "out"):
        if not isinstance(tasks, str | Path):
            tasks = write(tmp_path / "tasks.json", tasks)
        code = main(["--tasks", str(tasks), "--out", str(out), *arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return command


def keys(path):
    return pq.read_table(path, columns=["task_key"])["task_key"].to_pylist()


def manifest_of(out):
    return json.loads((out / "manifest.json").read_text())


# -- what is written


def test_both_sides_together_are_the_task_file_and_a_run_reads_them(run, tmp_path):
    code, _, _ = run(SHIPPED)
    assert code == 0
    config = DataConfig(train_tasks=tmp_path / "out/train.parquet", eval_tasks=tmp_path / "out/validation.parquet")
    train, held_out = load_split(config)
    assert len(held_out) == 20
    assert sorted(train + held_out, key=lambda t: t.task_key) == sorted(load_tasks(SHIPPED), key=lambda t: t.task_key)


@pytest.mark.parametrize("preset", PRESETS)
def test_a_run_that_is_given_the_folder_has_the_very_tasks_and_sides_that_were_prepared(run, tmp_path, preset):
    # An environment that every preset splits, with modality and date as the strictest of them asks for.
    tasks = [
        task(f"t{i:04d}", "booking", task_modality="tool_use", env_variables={"CURRENT_DATE": "2026-01-02"}, mine=[i])
        for i in range(1200)
    ]
    assert run(tasks, "--preset", preset)[0] == 0
    out = tmp_path / "out"
    by_key = {raw["task_key"]: Task(**raw) for raw in tasks}
    wanted = [[by_key[key] for key in keys(out / f"{side}.parquet")] for side in ("train", "validation")]
    assert wanted[0] and wanted[1]
    # Nothing is split again, whatever the ratio is.
    for chosen in (DataConfig(train_tasks=out, eval_ratio=0.5), DataConfig(train_tasks=out, eval_tasks=out)):
        assert list(load_split(chosen)) == wanted
    other = write(tmp_path / "held_out.json", [task("other")])
    assert load_split(DataConfig(train_tasks=out, eval_tasks=other)) == (wanted[0], [Task(**task("other"))])
    mixed = DataConfig(train_tasks=out / "train.parquet", eval_tasks=out, max_tasks=9, max_eval_tasks=2)
    assert load_split(mixed) == (wanted[0][:9], wanted[1][:2])


def test_a_folder_that_is_no_whole_split_is_refused_in_one_line(run, tmp_path):
    def complaint(folder, **keys):
        with pytest.raises(TaskFileError) as error:
            load_split(DataConfig(train_tasks=folder, **keys))
        assert "\n" not in str(error.value)
        return str(error.value)

    out = tmp_path / "out"
    assert run(SHIPPED)[0] == 0
    assert "holds no train.parquet: name a task file, or a folder that fleet-rl prepare" in complaint(tmp_path)
    manifest, content = (out / "manifest.json").read_text(), (out / "validation.parquet").read_bytes()
    (out / "validation.parquet").write_bytes((out / "train.parquet").read_bytes())
    assert "validation.parquet is not the file that manifest.json beside it describes" in complaint(out)
    (out / "validation.parquet").unlink()
    assert "holds no validation.parquet" in complaint(out)
    (out / "validation.parquet").write_bytes(content[:-100])
    assert "is not the file" in complaint(out)
    (out / "manifest.json").write_text("{}")
    assert "manifest.json is not a manifest of fleet-rl prepare" in complaint(out)
    (out / "manifest.json").unlink()  # as data sets of others have none
    assert "validation.parquet cannot be read as parquet" in complaint(out)
    (out / "validation.parquet").write_bytes(content)
    assert len(load_split(DataConfig(train_tasks=out))[1]) == 20
    (out / "manifest.json").write_text(manifest)
    assert "is in both" in complaint(out / "train.parquet", eval_tasks=out / "train.parquet")


def test_the_first_columns_are_those_of_skyrl_fleet(run, tmp_path):
    run([task(f"t{i}", env="fira", verifier_code="def verify(env): return 1.0") for i in range(40)], *ANY_SPLIT)
    table = pq.read_table(tmp_path / "out/validation.parquet")
    assert table.column_names[:4] == ["prompt", "env_class", "task_key", "data_source"]
    row = table.slice(0, 1).to_pylist()[0]
    assert row["prompt"] == [{"role": "user", "content": f"Do {row['task_key']}."}]
    assert (row["env_class"], row["data_source"]) == ("fleet_task", "fira")


NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.booleans() | NUMBERS | st.text(max_size=5)
OBJECTS = st.dictionaries(
    st.text(max_size=3), VALUES | st.lists(VALUES, max_size=2) | st.just({"a": [None]}), max_size=3
)
# Names of columns of the table among them: a task may have fields of those names, too.
OTHERS = st.sampled_from(["env_class", "data_source", "other_fields", "tools"]) | st.text(min_size=9, max_size=10)
TASKS = st.builds(
    lambda others, **fields: Task(**(others | fields)),
    others=st.dictionaries(OTHERS, VALUES, max_size=3),
    task_key=st.text(min_size=1),
    prompt=st.text(min_size=1),
    env_key=st.text(min_size=1),
    env_version=st.none() | st.text(max_size=3),
    env_variables=OBJECTS,
    verifier_code=st.none() | st.text(),
    task_modality=st.sampled_from(["tool_use", "computer_use", "browser_use"]),
    difficulty=st.none() | st.integers(-(2**63), 2**63 - 1),
    openenv_reset=OBJECTS,
    openenv_answer_tool=st.none() | st.text(min_size=1, max_size=3),
    openenv_answer_arguments=st.none() | OBJECTS,
)


@settings(max_examples=60)
@given(tasks=st.lists(TASKS, min_size=1, max_size=3, unique_by=lambda t: t.task_key))
def test_a_task_comes_out_of_a_table_as_it_went_in(tasks, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "round_trip.parquet"
    pq.write_table(task_table(tasks), path)
    assert load_tasks(path) == tasks


def test_where_a_task_has_both_names_of_a_field_the_one_that_counts_wins(run, tmp_path):
    tasks = [task(f"t{i}", env_version="v1", version=["of", "what"], env_id="other") for i in range(30)]
    assert run(tasks, *ANY_SPLIT)[0] == 0
    loaded = load_tasks(tmp_path / "out/train.parquet")[0]
    assert (loaded.env_version, loaded.env_key, loaded.version) == ("v1", "github", ["of", "what"])


def test_the_same_input_gives_the_same_bytes_and_the_manifest_says_of_what(run, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for out in (first, second):
        assert run(SHIPPED, out=out)[0] == 0
    for name in ("train.parquet", "validation.parquet", "manifest.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    manifest = manifest_of(first)
    data = SHIPPED.read_bytes()
    assert manifest["input"]["sha256"] == hashlib.sha256(data).hexdigest() and manifest["input"]["bytes"] == len(data)
    for name, file in manifest["files"].items():
        assert file["sha256"] == hashlib.sha256((first / name).read_bytes()).hexdigest()
        assert file["tasks"] == len(keys(first / name))
    assert manifest["preset"] == "stable" and {"pyarrow", "python", "fleet-rl"} <= manifest["versions"].keys()
    limit = manifest["rules"]["tracker"]["threshold"]
    assert set(keys(first / "validation.parquet")) == {
        t.task_key for t in load_tasks(SHIPPED) if unit_hash(t.task_key) < limit
    }


def test_every_task_is_accounted_for_in_the_report_and_in_one_json_line(run):
    tasks = [task(f"a{i}", "a", difficulty=i % 3) for i in range(60)] + [task(f"b{i}", "b") for i in range(20)]
    tasks += tasks[:7] + [task("c", "b", task_modality="computer_use")]
    arguments = ("--difficulty", "0,1", "--modality", "tool_use", "--json", *ANY_SPLIT)
    code, out, err = run(tasks, *arguments)
    report = json.loads(out)
    assert code == 0 and len(out.splitlines()) == 1
    assert report["dropped"] == {"difficulty": 42, "duplicate": 5, "modality": 1}
    assert report["per_env"].keys() == {"a", "b"}
    for counts in report["per_env"].values():
        assert counts["train"] + counts["eval"] + sum(counts["dropped"].values()) == counts["total"]
    assert sum(counts["train"] for counts in report["per_env"].values()) == report["train"]
    assert "difficulty 42" in err and "environment" in err  # the table went to standard error
    code, out, err = run(tasks, *arguments[:4], *ANY_SPLIT)
    assert code == 0 and "environment" in out and "train.parquet" in out and err == ""


def test_aliases_are_read_and_written_under_the_names_that_count(run, tmp_path):
    tasks = [
        {"key": f"k{i}", "env_id": "zillow", "prompt": "p", "version": "v1", "verifier_func": "def f(env): pass",
         "difficulty": None} for i in range(30)
    ]  # fmt: skip
    assert run({"tasks": tasks}, *ANY_SPLIT)[0] == 0
    loaded = load_tasks(tmp_path / "out/train.parquet")[0]
    assert (loaded.env_key, loaded.env_version, loaded.verifier_code) == ("zillow", "v1", "def f(env): pass")


def test_skyrl_writes_the_sides_in_its_order_takes_tool_use_and_drops_what_lacks_a_key_or_prompt(run, tmp_path):
    tasks = [task(f"e{e}/{i}", f"env{e}", task_modality="tool_use") for e in range(6) for i in range(100)]
    tasks += [
        task("cu", task_modality="computer_use"),
        {"prompt": "no key", "env_key": "env1"} | {"task_modality": "tool_use"},
    ]
    tasks += [task("np", "env2", prompt="", task_modality="tool_use"), task("db", "dropbox", task_modality="tool_use")]
    code, out, _ = run(tasks, "--preset", "skyrl", "--json")
    report = json.loads(out)
    assert code == 0
    wanted = {"modality": 1, "no_task_key": 1, "no_prompt": 1, "excluded": 1}
    assert wanted.items() <= report["dropped"].items() and report["eval"] == 60
    found = keys(tmp_path / "out/validation.parquet")
    assert [key[:2] for key in found[:24]] == [f"e{e}" for e in range(6) for _ in range(4)]
    assert [key[:2] for key in found[24:30]] == [f"e{e}" for e in range(6)]
    # The same tasks with every modality: nothing of dropbox is excluded.
    assert run(tasks, "--preset", "skyrl", "--modality", "all", out=tmp_path / "all")[0] == 0
    assert "db" in keys(tmp_path / "all/train.parquet")


# -- stable, from one version of the data to the next


def test_stable_goes_on_from_the_split_in_its_folder(run, tmp_path):
    data = [task(f"t{i:04d}") for i in range(1500)]
    rng = random.Random(5)
    sides: dict[str, str] = {}
    for count in (150, 1500, 40, 900):
        version = rng.sample(data[:count], count)
        assert run(version)[0] == 0
        for side in ("train", "validation"):
            for key in keys(tmp_path / f"out/{side}.parquet"):
                assert sides.setdefault(key, side) == side
    assert len(keys(tmp_path / "out/validation.parquet")) <= 20
    assert manifest_of(tmp_path / "out")["rules_from"].endswith("out/manifest.json")


def test_in_a_new_folder_stable_goes_on_from_the_version_it_is_compared_with(run, tmp_path):
    data = [task(f"t{i:04d}") for i in range(2000)]
    assert run(data[:200])[0] == 0
    code, out, _ = run(data, "--against", str(tmp_path / "out"), "--json", out=tmp_path / "new")
    against = json.loads(out)["against"]
    assert code == 0 and against["train_to_eval"] == against["eval_to_train"] == 0 and against["added"] == 1800
    # Without it the split is a first one, and most of the held-out tasks change.
    run(data, out=tmp_path / "fresh")
    old = set(keys(tmp_path / "out/validation.parquet"))
    assert old <= set(keys(tmp_path / "new/validation.parquet"))
    assert not old <= set(keys(tmp_path / "fresh/validation.parquet"))


def test_what_was_chosen_for_a_stable_split_holds_for_the_next_one_unless_chosen_anew(run, tmp_path):
    data = [task(f"t{i:04d}") for i in range(1000)]
    assert run(data[:300], "--eval-ratio", "0.5", "--max-eval-per-env", "40")[0] == 0
    assert run(data)[0] == 0
    choices = manifest_of(tmp_path / "out")["choices"]
    assert (choices["ratio"], choices["cap"], len(keys(tmp_path / "out/validation.parquet"))) == (0.5, 40, 40)
    assert run(data + [task(f"u{i}") for i in range(1000)], "--max-eval-per-env", "60")[0] == 0
    assert len(keys(tmp_path / "out/validation.parquet")) == 60


# -- wrong input


BROKEN = list(broken_task_files())


def test_there_are_two_hundred_broken_files():
    assert len(BROKEN) >= 200 and len({name for name, _, _ in BROKEN}) == len(BROKEN)


@pytest.mark.parametrize(("content", "words"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
def test_a_broken_file_is_one_line_exit_code_2_and_nothing_is_written(content, words, tmp_path, capsys):
    tasks = tmp_path / "tasks.json"
    tasks.write_bytes(content)
    assert main(["--tasks", str(tasks), "--out", str(tmp_path / "out"), "--preset", "v0.3"]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("fleet-rl: ") and len(captured.err.splitlines()) == 1
    assert all(word in captured.err for word in words), captured.err
    assert len(captured.err) < 1200 and captured.err.rstrip("\n").isprintable()
    assert os.listdir(tmp_path) == ["tasks.json"]


def test_lines_of_task_and_fields_are_those_of_the_file(run, tmp_path):
    text = '{"tasks": [\n {"task_key": "a",\n  "prompt": "p", "env_key": "e"},\n\n {\n  "key": "b",\n  "prompt": "",\n'
    text += '  "env_id": "e",\n  "env_variables": {"a": {"b": "env_id"}},\n  "difficulty": "hard"\n } ] }'
    code, _, err = run(write(tmp_path / "t.json", text))
    assert code == 2
    assert "t.json, line 5, task 1 (b): field 'prompt' (line 7): string should have" in err
    assert "; field 'difficulty' (line 10): input should be a valid integer" in err


@pytest.mark.parametrize(
    ("text", "where"),
    [
        (
            '{"about": {"tasks": [{}]},\n "x{}": [1, "]"],\n\n "tasks":\n[\n{},\n7]}',
            ["line 6, task 0", "line 7, task 1"],
        ),
        (
            '\n[\n\n[[1],\n[2]],\n {"prompt": "{\\"env_key\\": 1}", "env_key": "e", "x": "\\\\",\n"task_key": 1}]',
            ["line 4, task 0", "line 6, task 1: field 'task_key' (line 7)"],
        ),
        (
            '[{"task_key": "a",\n"task_key": "b",\n"prompt": "p"}]',
            ["line 1, task 0 (b): field 'env_key': field required"],
        ),
        ('{"a": 1, "a": 2,\n"tasks": [\n7]}', ["line 3, task 0"]),
    ],
)
def test_lines_are_right_whatever_else_the_file_holds(run, tmp_path, text, where):
    code, _, err = run(write(tmp_path / "t.json", text))
    assert code == 2 and len(err.splitlines()) == len(where)
    assert all(place in line for place, line in zip(where, err.splitlines(), strict=True)), err


def test_malformed_tasks_are_all_listed_up_to_a_limit_and_then_counted(run):
    code, _, err = run([task(str(i)) for i in range(5)] + [{"task_key": str(i), "prompt": "p"} for i in range(LISTED)])
    assert code == 2 and len(err.splitlines()) == LISTED
    code, _, err = run([{"task_key": str(i), "prompt": "p"} for i in range(LISTED + 3)])
    lines = err.splitlines()
    assert code == 2 and len(lines) == LISTED + 1
    assert lines[3] == (
        "fleet-rl: " + lines[3].split("fleet-rl: ")[1].split(", line")[0] + ", line 1, task 3 (3): field 'env_key': "
        "field required"
    )
    assert f"{LISTED + 3} of {LISTED + 3} tasks are malformed; the first {LISTED} are listed" in lines[-1]


ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(["", "3.0", "1e3", "tool_use"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["x", "key"]), inner, max_size=2),
    max_leaves=3,
)
NAMES = st.sampled_from([*Task.model_fields, "key", "env_id", "version", "verifier_func", "x"])


@settings(max_examples=300)
@given(changes=st.dictionaries(NAMES, ANYTHING, max_size=4), left_out=st.sets(NAMES, max_size=2), lenient=st.booleans())
def test_whatever_stands_in_a_task_it_is_read_or_named_in_one_line(changes, left_out, lenient, tmp_path_factory):
    raw = {name: value for name, value in (GOOD[0] | changes).items() if name not in left_out}
    path = write(tmp_path_factory.getbasetemp() / "any.json", json.dumps([raw]))
    file = TaskFile(path, lenient)
    try:
        (facts,) = file.facts()
    except MalformedTasks as error:
        (line,) = error.lines
        assert line.startswith(f"{path}, line 1, task 0") and "\n" not in line
    else:
        assert facts.env_key and (lenient or (facts.task_key and facts.has_prompt))
        if facts.task_key and facts.has_prompt:
            task_table(list(file.tasks([0])))


@given(content=st.binary(max_size=60) | st.text(alphabet='[]{}",:\\ \n1tasks', max_size=30).map(str.encode))
def test_whatever_bytes_a_file_holds_it_is_read_or_refused_in_one_line(content, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "any.json"
    path.write_bytes(content)
    try:
        TaskFile(path).facts()
    except TaskFileError as error:
        assert str(path) in str(error) and "\n" not in str(error)


ENOUGH = [task(f"t{i}") for i in range(60)]


@pytest.mark.parametrize(
    ("tasks", "arguments", "words"),
    [
        (ENOUGH, ["--preset", "v0.2"], ["no task is held out", "v0.2", "--held-out"]),
        (ENOUGH, ["--held-out", "github"], ["no task is left to train on"]),
        (ENOUGH, ["--env-key", "githb"], ["--env-key", "'githb'", "github"]),
        (ENOUGH, ["--held-out", "nobody"], ["--held-out", "'nobody'", "github"]),
        (ENOUGH, ["--difficulty", "3"], ["no task is left", "60 difficulty"]),
        (ENOUGH, ["--modality", "browser_use"], ["no task is left", "60 modality"]),
        (ENOUGH, ["--preset", "v0.3", "--eval-ratio", "0.2"], ["v0.3 fixes", "--preset custom"]),
        (ENOUGH, ["--against", "nowhere"], ["nowhere/manifest.json does not exist"]),
    ],
)
def test_a_split_that_cannot_be_made_is_one_line_and_nothing_is_written(run, tmp_path, tasks, arguments, words):
    code, out, err = run(tasks, *arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1) and all(word in err for word in words), err
    assert os.listdir(tmp_path) == ["tasks.json"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--eval-ratio", "1.5"], "between 0 and 1"),
        (["--eval-ratio", "x"], "'x'"),
        (["--max-tasks", "0"], "at least 1"),
        (["--min-eval", "-1"], "negative"),
        (["--difficulty", "1,hard"], "'hard'"),
        (["--env-key", ","], "one name or several"),
        (["--similarity", "0"], "above 0"),
        (["--preset", "v0.4"], "v0.2.3"),
    ],
)
def test_a_wrong_argument_is_named_with_exit_code_2(run, capsys, arguments, word):
    with pytest.raises(SystemExit) as stopped:
        run(ENOUGH, *arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert stopped.value.code == 2 and word in last


def test_the_command_offers_the_presets_there_are():
    from deploy.prepare import PRESETS as OFFERED

    assert set(OFFERED) == set(PRESETS)


def test_what_is_no_split_of_the_same_preset_is_not_replaced(run, tmp_path):
    out = tmp_path / "out"
    assert run(ENOUGH)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    code, _, err = run(ENOUGH, *ANY_SPLIT)
    assert code == 2 and "holds a split of preset stable" in err
    (out / "manifest.json").write_text("{}")
    code, _, err = run(ENOUGH)
    assert code == 2 and "not a manifest" in err and len(err.splitlines()) == 1
    (out / "manifest.json").unlink()
    code, _, err = run(ENOUGH)
    assert code == 2 and "holds train.parquet but no manifest.json" in err
    assert (out / "train.parquet").read_bytes() == before["train.parquet"]
    code, _, err = run(ENOUGH, out=write(tmp_path / "file", "x"))
    assert code == 2 and "is a file" in err
    code, _, err = run(ENOUGH, out="s3://bucket/out")
    assert code == 2 and "give a local folder" in err


def test_a_task_file_that_cannot_be_read_is_named(run, tmp_path):
    for path, word in ((tmp_path / "absent.json", "does not exist"), (tmp_path, "cannot be read")):
        code, _, err = run(path)
        assert code == 2 and word in err and str(path) in err and len(err.splitlines()) == 1


def test_a_disk_that_fills_up_leaves_the_last_split_as_it_was(run, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert run(ENOUGH)[0] == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    resource_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tasks = write(
        tmp_path / "many.json", [task(f"t{i}", prompt=random.Random(i).randbytes(500).hex()) for i in range(400)]
    )
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource_limit[1]))
    try:
        code, _, err = run(tasks)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, resource_limit)
    assert code == 1 and "cannot be written" in err and len(err.splitlines()) == 1
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert sorted(os.listdir(tmp_path)) == ["many.json", "out", "tasks.json"]


# -- reading a table


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("absent.parquet", None, ["does not exist"]),
        ("text.parquet", b"[]", ["cannot be read as parquet"]),
        ("cut.parquet", b"PAR1\x15\x00PAR1", ["cannot be read as parquet"]),
    ],
)
def test_a_broken_table_is_refused_in_one_line(tmp_path, name, content, words):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TaskFileError) as error:
        load_tasks(path)
    assert all(word in str(error.value) for word in [name, *words]) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}, ["task 0", "'prompt'"]),
        ({"prompt": []}, ["task 0", "'prompt'"]),
        ({"task_key": ""}, ["task 0", "'task_key'"]),
        ({"env_variables": "["}, ["task 0", "'env_variables'", "not JSON"]),
        ({"other_fields": "3"}, ["task 0", "'other_fields'", "object"]),
        ({"data_source": None}, ["task 0", "'env_key'"]),
    ],
)
def test_a_wrong_row_of_a_table_names_task_and_field(tmp_path, change, words):
    table = task_table([Task(**task("a"))])
    path = tmp_path / "t.parquet"
    pq.write_table(table.from_pylist([table.to_pylist()[0] | change], table.schema), path)
    with pytest.raises(TaskFileError) as error:
        load_tasks(path)
    assert all(word in str(error.value) for word in words)


def test_a_data_set_of_skyrl_fleet_is_read_as_far_as_it_goes(tmp_path):
    row = {"prompt": [{"role": "user", "content": "p"}], "env_class": "fleet_task", "task_key": "k", "data_source": "e"}
    path = tmp_path / "skyrl.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    assert read_raw_tasks(path) == [{"prompt": "p", "task_key": "k", "env_key": "e"}]
    assert load_tasks(path) == [Task(task_key="k", prompt="p", env_key="e")]
    pq.write_table(pa.Table.from_pylist([row | {"other_fields": 5}]), path)
    with pytest.raises(TaskFileError, match="task 0: field 'other_fields' must be JSON text"):
        load_tasks(path)


# -- S3, and the process


def test_tasks_and_the_earlier_version_come_from_s3(run, tmp_path, monkeypatch):
    with serving_s3() as server:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            monkeypatch.setenv(name, value)
        from train.s3 import _client, upload

        _client().create_bucket(
            Bucket="sets", CreateBucketConfiguration={"LocationConstraint": ENVIRONMENT["AWS_DEFAULT_REGION"]}
        )
        upload(write(tmp_path / "all_tool_use.json", {"tasks": ENOUGH}), "s3://sets/v9/openenv/all_tool_use.json")
        location = "s3://sets/v9/openenv/all_tool_use.json"
        assert run(location)[0] == 0
        assert manifest_of(tmp_path / "out")["input"]["location"] == location
        for path in (tmp_path / "out").iterdir():
            upload(path, f"s3://sets/prepared/{path.name}")
        code, out, _ = run(location, "--against", "s3://sets/prepared/", "--json", out=tmp_path / "new")
        assert code == 0 and json.loads(out)["against"]["added"] == 0
        assert manifest_of(tmp_path / "new")["rules_from"] == "s3://sets/prepared/manifest.json"
        code, _, err = run("s3://sets/absent.json", out=tmp_path / "other")
        assert code == 2 and "s3://sets/absent.json" in err and len(err.splitlines()) == 1


def test_the_help_answers_at_once():
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "deploy.cli", "prepare", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0 and "--against" in answer.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 0.5
