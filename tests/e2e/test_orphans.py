"""SIGKILL of the pool, of workers and of a whole job at moments nobody chose: no instance stays behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import ray

from actors.conductor import worker_name
from actors.env_pool_core import run_prefix
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.lease_table import SlotState, load_slots
from actors.trajectory import Group
from serve.ray_start import start_ray
from tests.e2e.orphan_job import Job
from tests.e2e.runs import kill_tree
from tests.fleet_faults import KEY, LocalFleet

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess(instance_limit=64) as process:
        yield LocalFleet(process)


@pytest.fixture
def job(local_fleet, tmp_path, request):
    name = f"orphans-{request.node.name[:24]}"
    start_ray("local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace=f"fleet-rl-{name}")
    try:
        job = Job(local_fleet.url, name, tmp_path)
        job.folder = tmp_path
        yield job
        assert ray.get(job.pool.close_all.remote(), timeout=60).left == ()
    finally:
        ray.shutdown()
    assert local_fleet.running(run_prefix(name)) == []


def eventually(condition, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.1)


def stats(job):
    return ray.get(job.pool.stats.remote(), timeout=60)


def holders(job):
    """Who holds leases, by the pool's table on disk."""
    slots = load_slots(job.folder / "leases.db", stats(job)["run_id"])
    return {slot.owner for slot in slots if slot.state is SlotState.LEASED}


def status(job):
    return ray.get(job.conductor.status.remote(), timeout=60)


@pytest.mark.timeout(240)
def test_a_killed_worker_loses_its_leases_and_works_again_while_the_others_go_on(job):
    both = {worker_name(0), worker_name(1)}
    eventually(lambda: holders(job) == both)
    killed = job.pids()[worker_name(0)]
    os.kill(killed, signal.SIGKILL)
    eventually(lambda: holders(job) == {worker_name(1)}, 30)
    before = status(job)
    assert before["error"] is None
    eventually(lambda: status(job)["episodes"] >= before["episodes"] + 8)
    eventually(lambda: holders(job) == both)
    pids = job.pids()
    assert pids[worker_name(0)] != killed

    for name in both:
        os.kill(pids[name], signal.SIGKILL)
    eventually(lambda: pid_of(job, worker_name(1)) not in (None, pids[worker_name(1)]))
    done = status(job)["episodes"]
    eventually(lambda: status(job)["episodes"] > done)  # leases alone could be those of the one before
    eventually(lambda: holders(job) == {worker_name(1)})  # the other one had been started again before, and is gone
    os.kill(job.pid(worker_name(1)), signal.SIGKILL)
    eventually(lambda: stats(job)["leased"] == stats(job)["waiting"] == 0, 30)
    eventually(lambda: "every rollout worker has died" in (status(job)["error"] or ""), 30)
    assert status(job)["episodes"] >= before["episodes"] + 8, "what the dead had counted stays counted"
    ledger = ray.get(job.buffer.snapshot.remote(), timeout=30)["ledger"]
    assert ledger["balanced"] and ledger["infra_failed"] > 0
    _, groups = ray.get(job.buffer.state.remote(), timeout=30)
    kept = ray.get(list(groups.values()), timeout=30)
    assert len(kept) > 2 and all(isinstance(group, Group) for group in kept), "committed groups outlive their workers"


@pytest.mark.timeout(240)
def test_a_killed_pool_comes_back_and_no_instance_is_forgotten(job, local_fleet):
    rng = random.Random()
    for _ in range(2):
        eventually(lambda: holders(job))
        time.sleep(rng.uniform(0, 1.5))
        killed = job.pids()["env_pool"]
        os.kill(killed, signal.SIGKILL)
        eventually(lambda old=killed: answers(job) and job.pids()["env_pool"] != old)
        graded = status(job)["episodes"]
        eventually(lambda before=graded: status(job)["episodes"] >= before + 8)
    ray.get(job.conductor.stop_rollouts.remote("the test is over", 30.0), timeout=90)
    # What the last pool does not know of is nobody's: it must be found and deleted; what it lends must come back.
    run_id = stats(job)["run_id"]
    eventually(lambda: stats(job)["leased"] == stats(job)["waiting"] == 0)
    eventually(lambda: set(local_fleet.running(run_id)) == {s.instance_id for s in load_slots(table(job), run_id)})


def pid_of(job, name):
    try:
        return job.pid(name)
    except ray.exceptions.RayActorError:
        return None


def answers(job):
    try:
        return stats(job) is not None
    except ray.exceptions.RayActorError:
        return False


def table(job):
    return job.folder / "leases.db"


@pytest.mark.timeout(280)
def test_the_next_start_of_a_killed_jobs_name_leaves_none_of_its_instances(local_fleet, tmp_path):
    name, rng = "orphans-whole-job", random.Random()
    moments = [("while it works", rng.uniform(0.5, 3.0)), ("while it starts", rng.uniform(3.0, 9.0)), ("again", 1.0)]
    earlier: set[str] = set()
    for moment, seconds in moments:
        process = start_job(local_fleet, name, tmp_path)
        try:
            if moment != "while it starts":
                process.stdout.readline()  # it works
                assert not earlier & set(local_fleet.running(run_prefix(name))), f"leftovers, killed {moment}"
            time.sleep(seconds)
        finally:
            kill_tree(process)
        earlier |= {i["instance_id"] for i in local_fleet.instances(run_prefix(name))}
    assert earlier and local_fleet.running(run_prefix(name)), "the last one was killed with instances"
    environment = os.environ | {"FLEET_API_KEY": KEY, "FLEET_BASE_URL": local_fleet.url}
    command = [sys.executable, "-m", "deploy.cli", "leases", "clean", "--run", name]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert local_fleet.running(run_prefix(name)) == []


def start_job(local_fleet, name, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.orphan_job", local_fleet.url, name, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"},
    )
