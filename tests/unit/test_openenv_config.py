"""OpenEnv servers in a run's configuration: what is wrong with them is one line, before anything starts."""

import json
from pathlib import Path

import pytest

from train.config import ConfigError, load_config
from train.preflight import check_inputs

DEMO = Path("configs/demo.yaml")
BROWSE = Path("configs/browse.yaml")
TINY = ["--trainer.policy.model.path", "configs/models/tiny-tracker"]


def complaint(path, *overrides) -> str:
    with pytest.raises(ConfigError) as error:
        check_inputs(load_config(path, [*TINY, *overrides]))
    assert "\n" not in str(error.value)
    return str(error.value)


def tasks(tmp_path, *env_keys) -> list[str]:
    overrides = []
    for split in ("train", "eval"):
        path = tmp_path / f"{split}.json"
        path.write_text(json.dumps([{"task_key": f"{split}-{k}", "prompt": "p", "env_key": k} for k in env_keys]))
        overrides += [f"--data.{split}_tasks", str(path)]
    return overrides


def test_a_run_whose_tasks_are_all_of_openenv_needs_no_fleet(monkeypatch):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    config = load_config(BROWSE, TINY)
    assert config.environment.fleet == "hosted"
    assert {task.env_key for task in check_inputs(config).train_tasks} == {"browse"}


def test_a_run_with_one_task_of_fleet_needs_fleet(monkeypatch, tmp_path):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    assert "FLEET_API_KEY is not set" in complaint(BROWSE, *tasks(tmp_path, "browse", "tracker"))
    both = load_config(BROWSE, [*TINY, *tasks(tmp_path, "browse", "tracker"), "--environment.fleet", "local"])
    assert len(check_inputs(both).train_tasks) == 2


def test_an_environment_nobody_serves_is_named_with_its_task(tmp_path):
    said = complaint(DEMO, *tasks(tmp_path, "tracker", "wordle"))
    assert said.startswith("task train-wordle: env_key 'wordle' is neither in environment.openenv nor an application")


def test_a_server_no_task_uses_is_an_error(tmp_path):
    said = complaint(DEMO, "--environment.openenv", '{"wordle": "http://localhost:8000"}')
    assert said == "environment.openenv names 'wordle', but no task has that env_key"


@pytest.mark.parametrize("url", ["localhost:8000", "local:tracker", "ftp://x", "http://", ""])
def test_what_is_no_address_of_a_server_is_refused(url):
    with pytest.raises(ConfigError, match="'environment.openenv'.*'wordle' must be an http, https, ws or wss URL"):
        load_config(DEMO, ["--environment.openenv", json.dumps({"wordle": url})])


def headers(**values) -> list[str]:
    return ["--environment.openenv_headers", json.dumps(values)]


def test_a_header_takes_its_secret_from_the_environment_and_the_configuration_keeps_the_name():
    config = load_config(BROWSE, [*TINY, *headers(browse={"Authorization": "Bearer ${KEY} ${KEY2}", "X-Team": "a"})])
    sent = config.environment.secret_headers({"KEY": "s3cret", "KEY2": "${KEY}"})
    assert sent == {"browse": {"Authorization": "Bearer s3cret ${KEY}", "X-Team": "a"}}
    assert "s3cret" not in config.model_dump_json()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"browse": {"Authorization": "Bearer ${NOT_SET_1}"}}, "the environment variable NOT_SET_1 is not set"),
        ({"wordle": {"Authorization": "x"}}, "names 'wordle', which environment.openenv does not"),
        ({"browse": {"Authorization": "two\nlines"}}, "its name or value holds what no HTTP header may"),
        ({"browse": {"": "x"}}, "its name or value holds what no HTTP header may"),
    ],
)
def test_headers_that_cannot_be_sent_are_one_line_before_anything_starts(given, said):
    complained = complaint(BROWSE, *headers(**given))
    assert complained.startswith("environment.openenv_headers") and said in complained
