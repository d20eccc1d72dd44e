"""A job to be killed: ``python tests/e2e/orphan_job.py URL RUN_NAME FOLDER``.

Ray, EnvPool, Conductor and RolloutWorkers as a run has them, with the tracker's scripted expert in place of the engine.
Prints the process ids of pool and workers in one JSON line, then goes on until it is ended.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
import time
from pathlib import Path
from typing import Any

import ray

from actors.conductor import Conductor, ConductorSettings, worker_name
from actors.config import DeadlinesConfig, GeneratorConfig
from actors.env_pool import EnvPool
from actors.env_pool_core import PoolSettings
from actors.envs.local_fleet.apps.tracker_tasks import problems
from actors.replay_buffer import ReplayBuffer
from actors.rollout_worker import Peers, RolloutWorker, WorkerSettings
from actors.task import parse_task
from benchmarks.fault_soak import MODEL, ScriptedPolicy, expert_turns
from serve.ray_start import start_ray
from serve.sampling import Sampling
from tests.fleet_faults import KEY
from train.data.sampler import TaskSampler

N_SAMPLES = 4
WORKERS = 2
WORKER_RESTARTS = 1
TURN_S = 0.4
DEADLINES = DeadlinesConfig(provision=30, reset=10, generate=10, step=10, verify=20, close=10, episode=60)


class Scripts(dict):
    """The expert's turns by episode id, as the Conductor makes them: ``ticket/task key/sample``."""

    def __missing__(self, episode_id: str) -> list[str]:
        return self[episode_id.split("/")[-2]]


class Job:
    """The actors. ``ray`` must be initialised; the actors end with it."""

    def __init__(self, url: str, run_name: str, folder: Path) -> None:
        from transformers import AutoTokenizer

        found = problems("train", 24, 1)
        scripts = Scripts({key: expert_turns(problem, None) for key, problem in found})
        tasks = [parse_task(problem.task(key), key) for key, problem in found]
        policy = ScriptedPolicy(AutoTokenizer.from_pretrained(MODEL), scripts, TURN_S)
        settings = {"batch_size": 1000, "max_staleness": 0, "max_running": 6, "max_bytes": 2**30}
        self.buffer = ReplayBuffer.options(max_concurrency=100).remote(settings)
        pool_settings = PoolSettings(
            run_name,
            secrets.token_hex(4),
            folder / "leases.db",
            budget_s=DEADLINES.budget,
            max_idle=4,
            reconcile_s=60.0,
        )
        self.pool = EnvPool.options(name="env_pool").remote(pool_settings, KEY, url)
        self.cleaned = ray.get(self.pool.start.remote(), timeout=60)
        self.workers = [
            RolloutWorker.options(
                name=worker_name(index), num_cpus=0.1, max_concurrency=100, max_restarts=WORKER_RESTARTS
            ).remote(_worker(worker_name(index), url))
            for index in range(WORKERS)
        ]
        peers = Peers(policy, self.pool, self.buffer)
        ray.get([worker.start.remote(peers) for worker in self.workers], timeout=120)
        order = TaskSampler(tasks, seed=0)
        self.conductor = Conductor.options(max_concurrency=100).remote(
            ConductorSettings(order, N_SAMPLES, Sampling(), 120.0, WORKER_RESTARTS), self.workers, peers
        )
        ray.get(self.conductor.start_rollouts.remote(), timeout=30)

    def pids(self) -> dict[str, int]:
        """Of the pool and of each worker."""
        return {name: self.pid(name) for name in self._actors()}

    def pid(self, name: str) -> int:
        return ray.get(self._actors()[name].__ray_call__.remote(_pid), timeout=30)

    def _actors(self) -> dict[str, Any]:
        workers = {worker_name(index): worker for index, worker in enumerate(self.workers)}
        return {**workers, "env_pool": self.pool}


def _pid(actor: Any) -> int:
    return os.getpid()


def _worker(name: str, url: str) -> WorkerSettings:
    return WorkerSettings(
        name=name,
        model_path=str(MODEL),
        max_model_len=1024,
        max_episodes=64,
        generator=GeneratorConfig(max_turns=8, max_input_length=1024, tools_channel="template", deadlines=DEADLINES),
        api_key=KEY,
        base_url=url,
        overlong_filtering=False,
    )


def main() -> None:
    url, run_name, folder = sys.argv[1:]
    start_ray("local", num_cpus=2, include_dashboard=False, log_to_driver=False, namespace=f"fleet-rl-{run_name}")
    job = Job(url, run_name, Path(folder))
    print(json.dumps(job.pids()), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
