"""The verbs of a cluster's users, against `ray start --head` on this machine: submit, watch, stop."""

import json
import math
import os
import re
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.e2e.runs import SMALL
from train.cluster_room import TURN

BIN = Path(sys.executable).parent
START_TIMEOUT_S = 90
JOB_TIMEOUT_S = 280


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Address of the dashboard of a one-node cluster; a run's actors must fit into its four logical CPUs."""
    port, dashboard, metrics, client, agent = free_ports(5)
    environment = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"} | {
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",  # as in an activated environment: jobs run `python`
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # Ray's own 3 s are too short for an orderly end
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",  # Serve's controller, which stays, would be waited for
    }
    head = subprocess.Popen(
        [BIN / "ray", "start", "--head", "--block", "--node-ip-address=127.0.0.1", "--num-cpus=4"]
        + [f"--port={port}", f"--dashboard-port={dashboard}", f"--metrics-export-port={metrics}"]
        + [f"--ray-client-server-port={client}", f"--dashboard-agent-listen-port={agent}"]
        + ["--object-store-memory=600000000"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        wait_for(
            lambda: reachable(f"{address}/api/version") and (head.poll() is None), START_TIMEOUT_S, "the dashboard"
        )
        yield {"address": address, "metrics": f"http://127.0.0.1:{metrics}/metrics", "environment": environment}
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(timeout=60)


def wait_for(condition, timeout_s: float, what: str):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if answer := condition():
            return answer
        time.sleep(0.5)
    raise AssertionError(f"{what} did not come within {timeout_s} s")


def reachable(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2):
            return True
    except OSError:
        return False


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read().decode()


def first_step(metrics_url: str) -> str | None:
    """The metrics endpoint's text once a training step is on it."""
    text = get(metrics_url)
    return text if "fleet_rl_policy_grad_norm" in text else None


def job(cluster, *words: str, timeout_s: float = JOB_TIMEOUT_S) -> subprocess.CompletedProcess:
    return subprocess.run(
        [BIN / "ray", "job", words[0], "--address", cluster["address"], *words[1:]],
        env=cluster["environment"],
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def alive(cluster, name: str) -> bool:
    """True; a job that failed ends the test with what it said."""
    if status(cluster, name) == "FAILED":
        raise AssertionError(job(cluster, "logs", name).stdout[-3000:])
    return True


def status(cluster, name: str) -> str:
    return json.loads(get(f"{cluster['address']}/api/jobs/{name}"))["status"]


def command(out: Path, name: str, **keys: str) -> list[str]:
    arguments = [word for key, value in (SMALL | keys).items() for word in (f"--{key}", str(value))]
    return ["python", "-m", "train.run", "configs/demo.yaml", "--name", name, "--output_dir", str(out), *arguments]


def living_actors(cluster) -> set[str]:
    """Their names."""
    actors = json.loads(get(f"{cluster['address']}/api/v0/actors?detail=1&limit=1000"))["data"]["result"]["result"]
    return {actor["name"] for actor in actors if actor["state"] == "ALIVE"}


def applications(cluster) -> dict[str, dict]:
    return json.loads(get(f"{cluster['address']}/api/serve/applications/"))["applications"]


@pytest.mark.timeout(600)
def test_at_learning_rate_zero_the_policy_and_its_held_out_pass_rate_stay(cluster, tmp_path):
    keys = {"trainer.policy.optimizer_config.lr": 0, "trainer.max_steps": 5}
    keys |= {"data.max_eval_tasks": 64, "generator.eval_greedy": "true"}
    words = ["submit", "--submission-id", "frozen", "--working-dir", ".", "--"]
    try:
        done = job(cluster, *words, *command(tmp_path, "frozen", **keys), timeout_s=450)
    except subprocess.TimeoutExpired:
        job(cluster, "stop", "frozen")  # or it would take the next test's place
        raise
    assert done.returncode == 0, done.stderr + done.stdout[-3000:]
    shipped = AutoModelForCausalLM.from_pretrained("configs/models/tiny-tracker")
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "frozen" / "checkpoints" / "global_step_5" / "policy")
    for (name, before), after in zip(shipped.named_parameters(), trained.parameters(), strict=True):
        assert torch.equal(before, after), name
    summary = json.loads((tmp_path / "frozen" / "summary.json").read_text())
    assert summary["steps"] == 5
    noise = math.hypot(summary["stderr_before"], summary["stderr_after"])
    assert abs(summary["pass_at_1_after"] - summary["pass_at_1_before"]) < 4 * noise
    # Greedily nothing is drawn; only a tie of two tokens may fall the other way in a batch of another size.
    assert abs(summary["greedy_after"] - summary["greedy_before"]) <= 2 / 64


@pytest.mark.timeout(120)
def test_the_exit_code_follows_the_run(cluster, tmp_path):
    done = job(cluster, "submit", "--working-dir", ".", "--", *command(tmp_path, "wrong"), "--trainer.max_step", "3")
    assert done.returncode != 0
    assert "unknown key 'trainer.max_step'; the nearest known key is 'trainer.max_steps'" in done.stdout + done.stderr


@pytest.mark.timeout(500)
def test_a_jobs_parts_and_metrics_can_be_watched_and_stopping_it_ends_it_cleanly(cluster, tmp_path):
    words = ["submit", "--no-wait", "--submission-id", "stopped", "--working-dir", ".", "--"]
    assert job(cluster, *words, *command(tmp_path, "stopped", **{"trainer.max_steps": "500"})).returncode == 0
    training = lambda: alive(cluster, "stopped") and "training" in job(cluster, "logs", "stopped").stdout  # noqa: E731
    wait_for(training, JOB_TIMEOUT_S, "the training")
    assert {"replay_buffer", "weight_store", "env_pool", "conductor", "rollout_worker_0"} <= living_actors(cluster)
    assert applications(cluster)["fleet-rl-stopped"]["status"] == "RUNNING"
    what = "the first step on the metrics endpoint"
    exported = wait_for(lambda: alive(cluster, "stopped") and first_step(cluster["metrics"]), JOB_TIMEOUT_S, what)
    assert re.search(r'ray_fleet_rl_reward_avg_raw_reward\{[^}]*run="stopped"', exported)
    assert TURN not in living_actors(cluster), "no other run could start"

    job(cluster, "stop", "stopped")
    wait_for(lambda: status(cluster, "stopped") == "STOPPED", 90, "the end of the job")
    assert "fleet-rl: stopped" in job(cluster, "logs", "stopped").stdout
    assert "fleet-rl-stopped" not in applications(cluster)
    with closing(sqlite3.connect(tmp_path / "stopped" / "leases.db")) as leases:
        assert leases.execute("SELECT count(*) FROM slot").fetchone() == (0,)
    assert not list(Path("/dev/shm").glob("fleet-rl-*stopped*"))
