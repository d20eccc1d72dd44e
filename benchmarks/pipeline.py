"""How much the asynchronous pipeline gains over the synchronous one, and how close it comes to what is possible.

    python -m benchmarks.pipeline [--steps 24] [--train-s 1.5] [--places 128]

The real Conductor, RolloutWorker, ReplayBuffer and episodes, twice on the same work: with ``max_staleness`` 0, and with
the default of 4. Simulated, by waiting, are a turn of the policy (a constant time), the environment (reset, each tool
call and the verifier take a lognormal time each, whose 99th percentile is ten times its median) and a training step
with its publication (a constant time). So the pipeline is measured, and not what the machine's cores could compute.

``sync_s``, ``async_s``: from the first ticket to the last acknowledged batch. ``speedup``: their ratio.
``bound_ratio``: the larger of two times, neither of which any schedule can beat, divided by ``async_s``. They are the
time of all training steps one after the other (``train_s``), and the mean time of an episode times their number, with
every place for an episode always taken (``generate_s``). ``*_episode_s``: mean time of a trained episode; the
asynchronous run ends while slow groups are in flight, so that what it trained on may be a little shorter. One JSON line
last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # read when Ray is imported

import numpy as np
import ray

from actors.conductor import Conductor, ConductorSettings, worker_name
from actors.config import BufferConfig, DeadlinesConfig, GeneratorConfig
from actors.replay_buffer import ReplayBuffer
from actors.rollout_worker import Peers, RolloutWorker, WorkerSettings
from actors.task import Task, load_tasks
from actors.trajectory import Graded
from benchmarks.env_pool import FOUND, LAST_TURN, SIGMAS_TO_P99, TASKS, TOOLS, TURN, Observed
from benchmarks.fault_soak import MODEL
from serve.ray_start import start_ray
from serve.sampling import Completion, Sampling
from train.data.sampler import TaskSampler

GROUP_SIZE = 4
BATCH = 16  # groups
TURNS = 4
TURN_S = 0.1
CALLS = TURNS + 1  # of the environment in an episode: reset, a tool call after each turn but the last, verify
CALL_S = (0.15, 1.5)  # p50, p99
SIGMA = math.log(CALL_S[1] / CALL_S[0]) / SIGMAS_TO_P99
EPISODE_S = TURNS * TURN_S + CALLS * CALL_S[0] * math.exp(SIGMA**2 / 2)  # the mean
MAX_TOKENS = 4096
TIMEOUT_S = 120.0
DEADLINES = DeadlinesConfig(provision=60, reset=60, generate=60, step=60, verify=60, close=60, episode=300)


class SimulatedPolicy:
    """The same turn again and again, and the done signal in the last one, stamped with the published version."""

    def __init__(self, tokenizer: Any) -> None:
        self.version = 0
        self._turn, self._last = (
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in (TURN, LAST_TURN)
        )

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str, session_id: str, cache_salt: str | None
    ) -> Completion:
        version = self.version
        await asyncio.sleep(TURN_S)
        last = int(request_id.rpartition("-")[2]) == TURNS - 1
        ids = list(self._last if last else self._turn)
        return Completion(ids, [-0.1] * len(ids), "stop", None, [(version, 0, len(ids))], cache_salt or f"v{version}")


class SimulatedEnv:
    """Takes its time and says the same; its grade is drawn."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    async def reset_async(self) -> Observed:
        await self._wait()
        return Observed(tools=TOOLS)

    async def step_async(self, action: dict[str, Any]) -> Observed:
        await self._wait()
        return Observed(result=FOUND)

    async def verify_async(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Graded:
        await self._wait()
        return Graded(float(self._rng.random() < 0.5))

    async def close_async(self) -> None:
        pass

    async def _wait(self) -> None:
        await asyncio.sleep(self._rng.lognormvariate(math.log(CALL_S[0]), SIGMA))


class SimulatedPool:
    """Draws the same times for the same attempts at the same tasks, whenever they are made."""

    def __init__(self) -> None:
        self._attempts: Counter[str] = Counter()

    async def open(self, task: Task, deadlines: DeadlinesConfig, **_: Any) -> SimulatedEnv:
        self._attempts[task.task_key] += 1
        return SimulatedEnv(random.Random(f"{task.task_key}/{self._attempts[task.task_key]}"))


@dataclass(frozen=True)
class Measured:
    """One run. Times in seconds."""

    wall_s: float
    episode_s: float  # mean, of what was trained on
    wait_s: float  # of the learner for its batches, the first one left out
    staleness: float  # mean, in versions
    dropped: int  # groups


def measure(steps: int, train_s: float, places: int, max_staleness: int) -> Measured:
    """Train on ``steps`` batches."""
    buffer = ReplayBuffer.options(max_concurrency=1000).remote(
        {
            "batch_size": BATCH,
            "max_staleness": max_staleness,
            "max_running": places // GROUP_SIZE,
            "max_bytes": 1 << 30,
        }
    )
    worker = RolloutWorker.options(num_cpus=1, max_concurrency=1000).remote(worker_settings(places))
    peers = Peers(None, None, buffer)
    ray.get(worker.start.remote(peers), timeout=TIMEOUT_S)
    ray.get(worker.__ray_call__.remote(simulate), timeout=TIMEOUT_S)
    tasks = load_tasks(TASKS)
    conductor = Conductor.options(max_concurrency=100).remote(
        ConductorSettings(TaskSampler(tasks, seed=0), GROUP_SIZE, Sampling(), TIMEOUT_S), [worker], peers
    )
    # First uses load modules and compile templates, once in a worker's life.
    warm_up = conductor.evaluate.remote("warm-up", tasks[:BATCH], GROUP_SIZE, Sampling(), TIMEOUT_S)
    ray.get(warm_up, timeout=2 * TIMEOUT_S)
    begun = time.monotonic()
    ray.get(conductor.start_rollouts.remote(), timeout=TIMEOUT_S)
    waited, lags, episode_s = [], [], []
    for step in range(1, steps + 1):
        asked = time.monotonic()
        batch = ray.get(buffer.get_batch.remote(step, TIMEOUT_S), timeout=2 * TIMEOUT_S)
        waited.append(time.monotonic() - asked)
        time.sleep(train_s)
        ray.get(worker.__ray_call__.remote(publish, step), timeout=TIMEOUT_S)
        ray.get(buffer.ack.remote(step, step), timeout=TIMEOUT_S)
        wall_s = time.monotonic() - begun
        lags += [batch["lineage"].lag(header.oldest_version) for header in batch["headers"]]
        episode_s += [t.duration_s for group in ray.get(batch["refs"]) for t in group.trajectories]
    ray.get(conductor.stop_rollouts.remote("the work is done", TIMEOUT_S), timeout=2 * TIMEOUT_S)
    snapshot = ray.get(buffer.snapshot.remote(), timeout=TIMEOUT_S)
    if not snapshot["ledger"]["balanced"] or snapshot["ledger"]["graded"] < steps * BATCH * GROUP_SIZE:
        raise RuntimeError(f"not every episode was graded: {snapshot['ledger']}")
    for actor in (conductor, worker, buffer):
        ray.kill(actor)
    stale = snapshot["dropped"].get("stale", 0)
    return Measured(wall_s, float(np.mean(episode_s)), sum(waited[1:]), float(np.mean(lags)), stale)


def simulate(worker: Any) -> None:
    """Runs in the worker: its episodes get the simulated policy and environments."""
    from transformers import AutoTokenizer

    worker._runner._policy = SimulatedPolicy(AutoTokenizer.from_pretrained(MODEL))
    worker._runner._pool = SimulatedPool()


def publish(worker: Any, version: int) -> None:
    """Runs in the worker."""
    worker._runner._policy.version = version


def worker_settings(places: int) -> WorkerSettings:
    return WorkerSettings(
        name=worker_name(0),
        model_path=str(MODEL),
        max_model_len=MAX_TOKENS,
        max_episodes=places,
        generator=GeneratorConfig(
            max_turns=TURNS, max_input_length=MAX_TOKENS - 1, tools_channel="template", deadlines=DEADLINES
        ),
        api_key=None,
        base_url=None,
        overlong_filtering=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="default: %(default)s")
    parser.add_argument("--train-s", type=float, default=1.5, help="seconds of a training step; default: %(default)s")
    parser.add_argument(
        "--places", type=int, default=2 * BATCH * GROUP_SIZE, help="episodes at once; default: two batches"
    )
    args = parser.parse_args()
    if args.steps < 2 or args.train_s <= 0 or args.places < GROUP_SIZE:
        parser.error(f"--steps must be at least 2, --train-s above 0, and --places at least {GROUP_SIZE}")
    start_ray("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200 << 20)
    synchronous = measure(args.steps, args.train_s, args.places, 0)
    asynchronous = measure(args.steps, args.train_s, args.places, BufferConfig().max_staleness)
    ray.shutdown()
    generate_s = args.steps * BATCH * GROUP_SIZE * EPISODE_S / args.places
    train_s = args.steps * args.train_s
    line = {
        "sync_s": synchronous.wall_s,
        "async_s": asynchronous.wall_s,
        "speedup": synchronous.wall_s / asynchronous.wall_s,
        "bound_ratio": max(generate_s, train_s) / asynchronous.wall_s,
        "generate_s": generate_s,
        "train_s": train_s,
        "sync_wait_s": synchronous.wait_s,
        "async_wait_s": asynchronous.wait_s,
        "sync_episode_s": synchronous.episode_s,
        "async_episode_s": asynchronous.episode_s,
        "staleness_mean": asynchronous.staleness,
        "dropped_stale": asynchronous.dropped,
        "steps": args.steps,
        "places": args.places,
    }
    print(json.dumps({name: round(value, 3) for name, value in line.items()}))


if __name__ == "__main__":
    main()
