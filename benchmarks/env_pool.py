"""What our side adds to a step, and what an episode costs, with thousands of episodes at once.

    python -m benchmarks.env_pool [--episodes 4096] [--turns 10]

The pool's core and EpisodeRunner of a rollout worker, in one process, on the tracker's tasks and the demo's tokenizer.
Simulated are the instances (make, reset, tool call, verify, delete: a lognormal time each, p50 200 ms, p99 2 s) and
the generation (p50 4 s, p99 20 s). Runs 64 episodes at once first, then all of them at once.

``overhead``: time from one turn's request to the next one's, less the times drawn for that turn's generation and tool
call. ``cost_ratio_vs_64``: CPU seconds an episode, against those with 64 at once. ``kib_per_idle_episode``: growth of
the resident memory up to its peak, by episode; nearly all of them are waiting at any moment. One JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

from actors.config import DeadlinesConfig, GeneratorConfig
from actors.env_pool_core import EnvPoolCore, Lease, PoolSettings
from actors.envs.fleet import Account
from actors.envs.local_fleet.apps.tracker import Tracker
from actors.envs.mcp_tools import openai_tool
from actors.garbage import search_seldom
from actors.lease_table import EnvSpec
from actors.rollout_worker import EpisodeRunner, GroupOrder, WorkerSettings
from actors.task import Task, load_tasks
from actors.trajectory import Graded
from benchmarks.fault_soak import MODEL
from serve.sampling import Completion, Sampling

TASKS = MODEL.parents[1] / "tasks/tracker_train.json"
GROUP_SIZE = 8
FEW = 64
MAKES_AT_ONCE = 256  # their starts are as far apart as a run's: a hundred a second
SIGMAS_TO_P99 = 2.326
INSTANCE_S = (0.2, 2.0)  # p50, p99
GENERATE_S = (4.0, 20.0)
DEADLINES = DeadlinesConfig(provision=600, reset=120, generate=600, step=120, verify=120, close=120, episode=3600)
TOOLS = [
    openai_tool({"name": t.name, "description": t.description, "inputSchema": t.input_schema}) for t in Tracker().tools
]
FOUND = {"tickets": [[f"T{n}", f"noisy printer {n}", "open", 3, "dan"] for n in range(10, 14)]}
TURN = '<tool_call>{"name":"search_tickets","arguments":{"query":"noisy printer"}}</tool_call>'
LAST_TURN = "ok<done>"


@dataclass
class Steps:
    """Latencies as they are drawn, and what each step took beyond them. An episode is one asyncio task."""

    rng: random.Random
    scale: float  # of every latency; 1 except for warming up
    drawn: defaultdict[asyncio.Task, float] = field(default_factory=lambda: defaultdict(float))
    begun: dict[asyncio.Task, float] = field(default_factory=dict)
    overhead_s: list[float] = field(default_factory=list)

    async def wait(self, p50_p99: tuple[float, float]) -> None:
        p50, p99 = p50_p99
        seconds = self.scale * self.rng.lognormvariate(math.log(p50), math.log(p99 / p50) / SIGMAS_TO_P99)
        self.drawn[asyncio.current_task()] += seconds
        await asyncio.sleep(seconds)

    def step_ends(self) -> None:
        """The next step's request, or the verifier's, is about to be sent."""
        task, now = asyncio.current_task(), time.monotonic()
        if task in self.begun:
            self.overhead_s.append(now - self.begun.pop(task) - self.drawn[task])

    def step_begins(self) -> None:
        task = asyncio.current_task()
        self.drawn[task] = 0.0
        self.begun[task] = time.monotonic()

    def forget(self) -> None:
        self.drawn.pop(asyncio.current_task(), None)


class SimulatedControl:
    """A control plane without a network: it answers after the times drawn."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self._running: dict[str, dict[str, Any]] = {}
        self.made = 0

    async def make(self, env_key: str, *, run_id: str, **_: Any) -> dict[str, Any]:
        await self._answer()
        self.made += 1
        instance = {"instance_id": f"i{self.made}", "env_key": env_key, "run_id": run_id, "status": "running"}
        self._running[instance["instance_id"]] = instance
        return instance

    async def list(self, run_id: str | None = None, status: str | None = "running") -> list[dict[str, Any]]:
        await self._answer()
        return [i for i in self._running.values() if run_id in (None, i["run_id"])]

    async def delete(self, instance_id: str) -> bool:
        await self._answer()
        return self._running.pop(instance_id, None) is not None

    async def delete_run(self, run_id: str) -> int:
        ended = await self.list(run_id)
        for instance in ended:
            self._running.pop(instance["instance_id"], None)
        return len(ended)

    async def heartbeat(self, instance_id: str) -> float | None:
        await self._answer()
        return None

    async def account(self) -> Account:
        await self._answer()
        return Account(100_000, len(self._running))

    def busy_s(self) -> float:
        return 0.0

    async def _answer(self) -> None:
        await self._steps.wait(INSTANCE_S)
        self._steps.forget()


class SimulatedPolicy:
    """The same turn again and again, and the done signal in the last one."""

    def __init__(self, steps: Steps, tokenizer: Any, turns: int) -> None:
        self._steps = steps
        self._turns = turns
        self._turn, self._last = (
            [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in (TURN, LAST_TURN)
        )

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str, session_id: str, cache_salt: str | None
    ) -> Completion:
        self._steps.step_ends()
        self._steps.step_begins()
        await self._steps.wait(GENERATE_S)
        last = int(request_id.rpartition("-")[2]) == self._turns - 1
        ids = list(self._last if last else self._turn)
        return Completion(ids, [-0.1] * len(ids), "stop", None, [(0, 0, len(ids))], cache_salt or "simulated")


@dataclass
class Observed:
    """What an episode reads of an observation."""

    result: Any = None
    error: str | None = None
    done: bool = False
    reward: float | None = None
    tools: list[dict[str, Any]] = field(default_factory=list)


class SimulatedEnv:
    """An instance without an application: it takes its time and says the same."""

    def __init__(self, steps: Steps, core: EnvPoolCore, lease: Lease) -> None:
        self._steps = steps
        self._core = core
        self._lease = lease

    async def reset_async(self) -> Observed:
        await self._steps.wait(INSTANCE_S)
        return Observed(tools=TOOLS)

    async def step_async(self, action: dict[str, Any]) -> Observed:
        await self._steps.wait(INSTANCE_S)
        return Observed(result=FOUND)

    async def verify_async(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Graded:
        self._steps.step_ends()
        await self._steps.wait(INSTANCE_S)
        return Graded(1.0)

    async def close_async(self) -> None:
        self._steps.forget()
        await self._core.release(self._lease.lease_id, True)


class SimulatedPool:
    """Leases of the real core on simulated instances."""

    def __init__(self, steps: Steps, core: EnvPoolCore) -> None:
        self._steps = steps
        self._core = core

    async def open(self, task: Task, deadlines: DeadlinesConfig, **_: Any) -> SimulatedEnv:
        lease = await self._core.acquire(EnvSpec.of(task), deadlines.provision, owner="benchmark")
        return SimulatedEnv(self._steps, self._core, lease)


@dataclass(frozen=True)
class Measured:
    """One number of episodes at once. Times in seconds."""

    cpu_per_episode: float
    overhead_p50: float
    overhead_p99: float
    kib_per_episode: float
    leased: int  # episodes with an instance, at the peak


async def measure(tokenizer: Any, folder: Path, at_once: int, turns: int, scale: float = 1.0) -> Measured:
    """Roll out ``at_once`` episodes, all of them from the start. ``folder``: for the lease table."""
    steps = Steps(random.Random(1), scale)
    control = SimulatedControl(steps)
    settings = PoolSettings("benchmark", "n", folder / f"{at_once}.db", create_concurrency=MAKES_AT_ONCE, max_idle=0)
    core = EnvPoolCore(control, settings)
    await core.start()
    worker = WorkerSettings(
        name="benchmark",
        model_path=str(MODEL),
        max_model_len=4096,
        max_episodes=at_once,
        generator=GeneratorConfig(
            max_turns=turns, max_input_length=4096, tools_channel="template", deadlines=DEADLINES
        ),
        api_key=None,
        base_url=None,
        overlong_filtering=False,
    )
    runner = EpisodeRunner(worker, tokenizer, SimulatedPolicy(steps, tokenizer, turns), SimulatedPool(steps, core))
    orders = orders_of(at_once)
    process = psutil.Process()
    rss, cpu = process.memory_info().rss, time.process_time()
    peak = asyncio.create_task(peaks(process, core))
    outcomes = [t.outcome for group in await asyncio.gather(*map(runner.run_group, orders)) for t in group.trajectories]
    cpu = time.process_time() - cpu
    peak.cancel()
    peak_rss, leased = await peak
    report = await core.close_all()
    if outcomes != [Graded(1.0)] * at_once or report.left:
        raise RuntimeError(
            f"{len(outcomes)} of {at_once} episodes ended, not all graded; instances left: {report.left}"
        )
    overhead = np.asarray(steps.overhead_s)
    p50, p99 = np.percentile(overhead, [50, 99])
    return Measured(cpu / at_once, float(p50), float(p99), (peak_rss - rss) / 1024 / at_once, leased)


async def peaks(process: psutil.Process, core: EnvPoolCore) -> tuple[int, int]:
    """The most resident bytes, and the most leases; ends when it is cancelled."""
    rss = leased = 0
    try:
        while True:
            rss, leased = max(rss, process.memory_info().rss), max(leased, core.stats()["leased"])
            await asyncio.sleep(1.0)
    except asyncio.CancelledError:
        return rss, leased


def orders_of(episodes: int) -> list[GroupOrder]:
    tasks = load_tasks(TASKS)
    groups = -(-episodes // GROUP_SIZE)
    orders = []
    for number in range(groups):
        task = tasks[number % len(tasks)]
        size = min(GROUP_SIZE, episodes - number * GROUP_SIZE)
        ids = tuple(f"{number}/{task.task_key}/{index}" for index in range(size))
        orders.append(GroupOrder(task, number, ids, Sampling()))
    return orders


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=10)
    args = parser.parse_args()
    if args.episodes < FEW or args.turns < 1:
        parser.error(f"--episodes must be at least {FEW}, and --turns at least 1")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    search_seldom()  # as every RolloutWorker and the EnvPool do
    # The loop on which Ray runs its async actors.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, tempfile.TemporaryDirectory() as folder:
        runner.run(measure(tokenizer, Path(folder), FEW, args.turns, scale=0.01))
        few = runner.run(measure(tokenizer, Path(folder), FEW, args.turns))
        many = runner.run(measure(tokenizer, Path(folder), args.episodes, args.turns))
    line = {
        "episodes": args.episodes,
        "overhead_p50_ms": round(1e3 * many.overhead_p50, 2),
        "overhead_p99_ms": round(1e3 * many.overhead_p99, 2),
        "cost_ratio_vs_64": round(many.cpu_per_episode / few.cpu_per_episode, 3),
        "kib_per_idle_episode": round(many.kib_per_episode, 1),
        "turns": args.turns,
        "leased_at_once": many.leased,
        "cpu_ms_per_episode": round(1e3 * many.cpu_per_episode, 2),
        "cpu_ms_per_episode_at_64": round(1e3 * few.cpu_per_episode, 2),
        "overhead_p50_ms_at_64": round(1e3 * few.overhead_p50, 2),
        "overhead_p99_ms_at_64": round(1e3 * few.overhead_p99, 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
