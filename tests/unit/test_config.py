"""The configuration is closed, and every complaint is one line that says what to change."""

from pathlib import Path

import pytest
import yaml

from train.config import ConfigError, RunConfig, known_keys, load_config

MINIMAL = {"name": "r", "data": {"train_tasks": "tasks.json"}}


def write(tmp_path: Path, tree) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(tree if isinstance(tree, str) else yaml.safe_dump(tree))
    return path


def test_the_users_keys_have_the_users_defaults(tmp_path):
    config = load_config(write(tmp_path, MINIMAL), [])
    assert config.trainer.policy.model.path == "Qwen/Qwen2.5-1.5B-Instruct"
    assert config.trainer.algorithm.advantage_estimator == "grpo"
    assert config.trainer.policy.optimizer_config.lr == 1e-6
    assert (config.trainer.train_batch_size, config.trainer.epochs, config.trainer.ckpt_interval) == (4, 20, 10)
    assert (config.generator.max_turns, config.generator.n_samples_per_prompt) == (50, 4)


def test_the_command_line_overrides_the_file(tmp_path):
    path = write(tmp_path, MINIMAL | {"trainer": {"train_batch_size": 8, "epochs": 3}})
    arguments = ["--trainer.train_batch_size", "16", "--trainer.policy.optimizer_config.lr=3e-4", "--name", "other"]
    config = load_config(path, arguments)
    assert (config.trainer.train_batch_size, config.trainer.epochs, config.name) == (16, 3, "other")
    assert config.trainer.policy.optimizer_config.lr == 3e-4


def test_environment_variables_are_no_source(tmp_path, monkeypatch):
    monkeypatch.setenv("NAME", "from-the-environment")
    monkeypatch.setenv("SEED", "99")
    config = load_config(write(tmp_path, MINIMAL), [])
    assert (config.name, config.seed) == ("r", 0)


@pytest.mark.parametrize(
    ("tree", "arguments", "parts"),
    [
        ({"trainer": {"train_batchsize": 3}}, [], ["'trainer.train_batchsize'", "'trainer.train_batch_size'"]),
        ({}, ["--trainer.train_batchsize", "3"], ["'trainer.train_batchsize'", "'trainer.train_batch_size'"]),
        ({"polcy": {}}, [], ["'polcy'", "'policy'"]),
        ({"trainer": {"train_batch_size": "many"}}, [], ["'trainer.train_batch_size'", "'many'"]),
        ({"trainer": {"train_batch_size": 0}}, [], ["'trainer.train_batch_size'", "greater than or equal to 1"]),
        ({}, ["--seed", "x"], ["'seed'", "'x'"]),
        ({}, ["--seed"], ["seed"]),
        ({}, ["seed", "3"], ["seed"]),
        ({"name": "a/b"}, [], ["'name'"]),
        ({"data": {}}, [], ["'data.train_tasks'", "required"]),
        ({"generator": {"max_inflight_episodes": 3}}, [], ["max_inflight_episodes 3", "n_samples_per_prompt 4"]),
        ({"generator": {"max_input_length": 5000}, "policy": {"max_model_len": 4096}}, [], ["5000", "4096"]),
        ({"generator": {"sampling_params": {"temperature": 0}}}, [], ["temperature 0"]),
        ({"generator": {"sampling_params": {"top_p": 0.9}}}, [], ["top_p"]),
    ],
)
def test_a_wrong_value_is_named_in_one_line(tmp_path, tree, arguments, parts):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, MINIMAL | tree), arguments)
    message = str(error.value)
    assert "\n" not in message
    for part in parts:
        assert part in message


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "a: [1\n", "1: 2\n", "\x00"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, text), [])
    assert "run.yaml" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "absent.yaml", [])


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_shipped_configurations_load(path):
    assert isinstance(load_config(path, []), RunConfig)


def test_every_key_is_read_by_something():
    """A key that no code reads would be a promise that nothing keeps."""
    sources = "\n".join(
        path.read_text()
        for package in ("serve", "actors", "train", "deploy")
        for path in Path(package).rglob("*.py")
        if path.name != "config.py"
    )
    own = "\n".join(Path(p).read_text() for p in ("serve/config.py", "actors/config.py", "train/config.py"))
    for key in known_keys():
        leaf = key.rpartition(".")[2]
        assert f".{leaf}" in sources or own.count(f".{leaf}") > 0 or f"{leaf}=" in sources, f"nothing reads {key}"
