"""The cluster file: valid for Ray's own loader, on-demand, and free of secrets."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import jsonschema
import pytest
import ray.autoscaler
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "ray-cluster.yaml"


@pytest.fixture
def cluster() -> dict:
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def test_it_is_valid_against_rays_schema(cluster):
    schema = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    jsonschema.validate(cluster, schema)
    broken = copy.deepcopy(cluster)
    del broken["available_node_types"]["h100"]["resources"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema)


def test_rays_launcher_reads_it(cluster):
    prepared = prepare_config(cluster)
    validate_config(prepared)
    head, workers = prepared["available_node_types"]["head"], prepared["available_node_types"]["h100"]
    assert (head["min_workers"], head["max_workers"]) == (0, 0)
    assert prepared["max_workers"] == workers["max_workers"] == workers["min_workers"] > 0


def test_the_head_has_no_gpu_and_the_workers_are_h100_hosts(cluster):
    head, workers = cluster["available_node_types"]["head"], cluster["available_node_types"]["h100"]
    assert head["resources"]["GPU"] == 0 and workers["resources"] == {"CPU": 192, "GPU": 8}
    assert workers["node_config"]["InstanceType"] == "p5.48xlarge"


def test_no_node_is_a_spot_instance_once_rays_defaults_are_merged(cluster):
    prepared = prepare_config(cluster)
    assert "spot" not in json.dumps(prepared["available_node_types"]).lower()
    assert all("InstanceMarketOptions" not in n["node_config"] for n in prepared["available_node_types"].values())
    assert prepared["provider"]["cache_stopped_nodes"] is False


def test_head_and_workers_start_with_the_same_environment(cluster):
    def settings(commands: list[str]) -> list[str]:
        return re.findall(r"\b[A-Z_]+=\w+", commands[-1])

    head, workers = settings(cluster["head_start_ray_commands"]), settings(cluster["worker_start_ray_commands"])
    assert head == workers and "RAY_AUTH_MODE=token" in head


def test_nodes_are_set_up_from_the_lock(cluster):
    local = {Path(path) for path in cluster["file_mounts"].values() if not path.startswith("~")}
    assert all((ROOT / path).exists() for path in local)
    mounted = next(remote for remote, path in cluster["file_mounts"].items() if path == "requirements")
    install = next(command for command in cluster["setup_commands"] if "--no-deps" in command)
    assert Path(mounted).name in install and "gpu.txt" in install
    assert (ROOT / "requirements" / "gpu.txt").exists()


def test_it_holds_no_secret():
    text = FILE.read_text(encoding="utf-8")
    assert not re.search(r"(AKIA|ASIA)[0-9A-Z]{16}|sk-[A-Za-z0-9]{8,}|BEGIN [A-Z ]*PRIVATE KEY|ami-[0-9a-f]{8,}", text)
    values = yaml.safe_load(text)["file_mounts"].values()
    assert all(path.startswith("~/") or path == "requirements" for path in values)


@pytest.mark.parametrize("which", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_a_stopped_job_has_time_to_delete_its_instances(cluster, which):
    """Ray's default of 3 s kills the driver in the middle of its clean-up."""
    started = next(command for command in cluster[which] if "ray start" in command)
    before_ray, _, _ = started.partition("ray start")
    assert int(re.search(r"RAY_JOB_STOP_WAIT_TIME_S=(\d+)", before_ray)[1]) >= 60
