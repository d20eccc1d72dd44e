"""Episodes on a control plane that fails all the time: are the grades right, and is every instance gone?

    python -m benchmarks.fault_soak [--episodes 2000] [--fault-rate 0.05] [--seed 1]

The pool's core, FleetTaskEnv, Episode and EpisodeRunner of a rollout worker, over HTTP, against a local Fleet in a
process of its own. The policy is the tracker's scripted expert, which slips in every second episode. Every kind of
fault strikes each request it can strike with the given probability, and one group in twenty is cancelled at a random
moment.

A grade is checked against the application's own database, read past verifier and tools, and the solution as it would
have left that database. Prints one JSON line last; exit code 1 where a grade was wrong or anything was left behind.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from actors.config import DeadlinesConfig, GeneratorConfig
from actors.env_pool import LocalPoolClient
from actors.env_pool_core import EnvPoolCore, PoolSettings
from actors.envs.fleet import FleetControl, FleetTaskEnv, close_clients
from actors.envs.http_session import http_session
from actors.envs.local_fleet.apps import tracker_expert
from actors.envs.local_fleet.apps.tracker_tasks import Problem, problems
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.ledger import Ledger
from actors.rollout_worker import EpisodeRunner, GroupOrder, WorkerSettings
from actors.task import Task, parse_task
from actors.trajectory import Cancelled, Graded, Outcome
from serve.sampling import Completion, Sampling

MODEL = Path(__file__).resolve().parents[1] / "configs/models/tiny-tracker"
API_KEY = "sk-soak"
RUN_NAME = "fault-soak"
GROUP_SIZE = 4
GROUPS_AT_ONCE = 16
INSTANCE_LIMIT = 48  # below the episodes at once: the queue at the quota is part of what is tried
CANCELLED_GROUPS = 0.05
MAX_TURNS, MAX_TOKENS = 8, 1024
DEADLINES = DeadlinesConfig(provision=60, reset=15, generate=10, step=6, verify=30, close=15, episode=90)
# What is compared: everything a tool can change, without the numbers that only say in which order it happened.
TABLES = {"tickets": "*", "comments": "ticket_id, author, body, created_on", "users": "*"}

ALL_ROUTES = ("account", "list", "make", "delete", "heartbeat", "reset", "mcp", "tool", "check", "verify")
# Waits are bounded, and "slow" is far below every deadline: a tool that works after its caller gave up would change the
# database between the verifier's look at it and ours.
FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "status": (ALL_ROUTES, {"kind": "status", "status": 503}),
    "rate_limit": (("make",), {"kind": "status", "status": 429, "retry_after_s": 1}),
    "reply_lost": (("make", "delete", "reset", "tool", "verify"), {"kind": "status", "status": 502, "stage": "after"}),
    "slow": (ALL_ROUTES, {"kind": "slow", "seconds": 0.3}),
    "hang": (("list", "make", "delete", "heartbeat", "reset", "mcp", "tool", "verify"), {"kind": "hang", "seconds": 2}),
    "partial_body": (("list", "make", "delete", "reset", "tool", "verify"), {"kind": "partial_body"}),
    "slow_start": (("make",), {"kind": "slow_start", "seconds": 1, "status": 502}),
    "verifier_failure": (("verify",), {"kind": "verifier_failure"}),
    "verifier_crash": (("verify",), {"kind": "verifier_crash"}),
    "judge_error": (("verify",), {"kind": "judge_error"}),
    "tool_error": (("tool",), {"kind": "tool_error"}),
}


class ScriptedPolicy:
    """Says what its script holds, turn by turn, whatever it reads; the last turn again where it is asked for more.

    Args:
        scripts: the turns' texts by episode id.
        pause_s: how long a turn takes.
    """

    def __init__(self, tokenizer: Any, scripts: dict[str, list[str]], pause_s: float = 0.0) -> None:
        self._tokenizer = tokenizer
        self._scripts = scripts
        self._pause_s = pause_s
        self._said: Counter[str] = Counter()

    async def generate(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str, session_id: str, cache_salt: str | None
    ) -> Completion:
        await asyncio.sleep(self._pause_s)
        script = self._scripts[session_id]
        text = script[min(self._said[session_id], len(script) - 1)]
        self._said[session_id] += 1
        ids = [*self._tokenizer.encode(text, add_special_tokens=False), self._tokenizer.eos_token_id]
        return Completion(ids, [-0.1] * len(ids), "stop", None, [(0, 0, len(ids))], cache_salt or "scripted")


def expert_turns(problem: Problem, slip: random.Random | None) -> list[str]:
    """The expert's turns, with exactly one mistake where ``slip`` is given."""
    messages = tracker_expert.episode(problem, slip)
    return [message["content"] for message in messages if message["role"] == "assistant"]


@dataclass
class Audit:
    """Grades against what the database says."""

    checked: int = 0
    wrong: int = 0
    false_zeros: int = 0
    solved: int = 0

    def compare(self, reward: float, solved: bool) -> None:
        self.checked += 1
        self.solved += solved
        self.wrong += reward != float(solved)
        self.false_zeros += solved and reward == 0.0


class AuditedEnv:
    """An episode's environment whose every grade is checked before the instance is given back."""

    def __init__(self, env: FleetTaskEnv, instances_url: str, problem: Problem, audit: Audit) -> None:
        self._env = env
        self._instances_url = instances_url
        self._problem = problem
        self._audit = audit

    async def reset_async(self) -> Any:
        return await self._env.reset_async()

    async def step_async(self, action: Any) -> Any:
        return await self._env.step_async(action)

    async def verify_async(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Outcome:
        outcome = await self._env.verify_async(final_answer, conversation)
        if isinstance(outcome, Graded):
            answered = self._problem.answer in (None, final_answer)
            database = await database_of(f"{self._instances_url}/{self._env.state.instance_id}")
            same = database == ideal_database(self._problem)
            self._audit.compare(outcome.reward, answered and same)
        return outcome

    async def close_async(self) -> None:
        await self._env.close_async()


async def database_of(instance_url: str) -> list[list[list[Any]]]:
    """The tables of an instance as they are now, each with its rows sorted."""
    url = f"{instance_url}/api/v1/env/resources/sqlite/current/query"
    tables = []
    for table, columns in TABLES.items():
        async with http_session().post(url, json={"query": f"SELECT {columns} FROM {table}"}) as reply:
            tables.append(sorted((await reply.json())["rows"], key=repr))
    return tables


def ideal_database(problem: Problem) -> list[list[list[Any]]]:
    """The same tables as the solution, carried out without any server, leaves them."""
    desk = tracker_expert.open_desk(problem.data_key, problem.data_version)
    try:
        for call in problem.calls:
            tracker_expert.call_tool(desk, call.tool, call.arguments, problem.env_variables)
        rows = [desk.execute(f"SELECT {columns} FROM {table}").fetchall() for table, columns in TABLES.items()]
        return [sorted(map(list, found), key=repr) for found in rows]
    finally:
        desk.close()


class AuditedPool(LocalPoolClient):
    """Opens environments whose grades are checked."""

    def __init__(self, core: EnvPoolCore, url: str, by_task: dict[str, Problem]) -> None:
        super().__init__(core, api_key=API_KEY, base_url=url)
        self._by_task = by_task
        self.audit = Audit()

    async def open(self, task: Task, deadlines: DeadlinesConfig, **options: Any) -> AuditedEnv:
        env = await super().open(task, deadlines, **options)
        return AuditedEnv(env, f"{self._base_url}/i", self._by_task[task.task_key], self.audit)


def fault_plan(rate: float, seed: int) -> dict[str, Any]:
    """What the local Fleet is armed with: every kind on every route it can strike."""
    faults = [{"route": route, "probability": rate, **fault} for routes, fault in FAULTS.values() for route in routes]
    return {"seed": seed, "faults": faults}


def struck_by_kind(report: list[dict[str, Any]]) -> dict[str, int]:
    """How often each kind struck, from the local Fleet's report on :func:`fault_plan`."""
    kinds = [kind for kind, (routes, _) in FAULTS.items() for _ in routes]
    struck: Counter[str] = Counter()
    for kind, fault in zip(kinds, report, strict=True):
        struck[kind] += fault["struck"]
    return {kind: struck[kind] for kind in FAULTS}


@dataclass
class Work:
    """The groups to roll out and what their turns are."""

    orders: list[GroupOrder] = field(default_factory=list)
    scripts: dict[str, list[str]] = field(default_factory=dict)
    by_task: dict[str, Problem] = field(default_factory=dict)


def plan_work(episodes: int, rng: random.Random, seed: int) -> Work:
    work = Work()
    groups = -(-episodes // GROUP_SIZE)
    for number, (key, problem) in enumerate(problems("train", groups, seed)):
        size = min(GROUP_SIZE, episodes - number * GROUP_SIZE)
        ids = tuple(f"{number}/{key}/{index}" for index in range(size))
        for episode_id in ids:
            work.scripts[episode_id] = expert_turns(problem, rng if rng.random() < 0.5 else None)
        work.by_task[key] = problem
        work.orders.append(GroupOrder(parse_task(problem.task(key), key), number, ids, Sampling()))
    return work


async def roll_out(runner: EpisodeRunner, orders: list[GroupOrder], ledger: Ledger, rng: random.Random) -> None:
    """All groups, so many at once; some are cancelled while they run."""
    at_once = asyncio.Semaphore(GROUPS_AT_ONCE)

    async def one(order: GroupOrder, cancel_after_s: float | None) -> None:
        async with at_once:
            ledger.dispatch(list(order.episode_ids))
            running = asyncio.create_task(runner.run_group(order))
            await asyncio.wait([running], timeout=cancel_after_s)
            if not running.done():
                running.cancel()
                await asyncio.wait([running])
            if running.cancelled():
                outcomes: dict[str, Outcome] = dict.fromkeys(order.episode_ids, Cancelled("cancelled at random"))
            else:
                outcomes = {t.trajectory_id: t.outcome for t in running.result().trajectories}
            for episode_id, outcome in outcomes.items():
                ledger.end(episode_id, outcome)

    async with asyncio.TaskGroup() as groups:
        for order in orders:
            groups.create_task(one(order, rng.uniform(0, 3) if rng.random() < CANCELLED_GROUPS else None))


async def soak(episodes: int, rate: float, seed: int) -> dict[str, Any]:
    """Roll ``episodes`` out under faults and account for all of them and for every instance."""
    from transformers import AutoTokenizer

    rng = random.Random(seed)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    work = plan_work(episodes, rng, seed)
    ledger = Ledger()
    begun = time.monotonic()
    with LocalFleetProcess(instance_limit=INSTANCE_LIMIT) as fleet, httpx.Client(base_url=fleet.url) as local:
        settings = PoolSettings(RUN_NAME, f"{seed}", budget_s=DEADLINES.budget, heartbeat_s=2.0, reconcile_s=10.0)
        core = EnvPoolCore(FleetControl(API_KEY, fleet.url), settings)
        await core.start()
        pool = AuditedPool(core, fleet.url, work.by_task)
        runner = EpisodeRunner(_worker_settings(fleet.url), tokenizer, ScriptedPolicy(tokenizer, work.scripts), pool)
        local.post("/_local/faults", json=fault_plan(rate, seed)).raise_for_status()
        await roll_out(runner, work.orders, ledger, rng)
        report = await core.close_all(timeout_s=120.0)
        await close_clients()
        struck = struck_by_kind(local.get("/_local/faults").json()["faults"])
        made = local.get("/_local/stats").json()["makes"]
        running = [i for i in local.get("/_local/instances").json() if i["status"] == "running"]
    counts, stats = ledger.snapshot(), core.stats()
    return {
        "episodes": counts["dispatched"],
        **{name: counts[name] for name in ("graded", "ungraded", "infra_failed", "cancelled")},
        "solved": pool.audit.solved,
        "faults_injected": struck,
        "instances_made": made,
        "deletes_acknowledged": stats["deleted"],
        "expired": stats["expired"],
        "instances_left": max(len(running), len(report.left)),
        "false_zeros": pool.audit.false_zeros,
        "wrong_grades": pool.audit.wrong,
        "ledger_balanced": counts["balanced"] and counts["in_flight"] == 0,
        "breaker_openings": sum(breaker["times_opened"] for breaker in stats["breakers"].values()),
        "wall_s": round(time.monotonic() - begun, 1),
    }


def _worker_settings(url: str) -> WorkerSettings:
    return WorkerSettings(
        name="soak",
        model_path=str(MODEL),
        max_model_len=MAX_TOKENS,
        max_episodes=GROUPS_AT_ONCE * GROUP_SIZE,
        generator=GeneratorConfig(
            max_turns=MAX_TURNS, max_input_length=MAX_TOKENS, tools_channel="template", deadlines=DEADLINES
        ),
        api_key=API_KEY,
        base_url=url,
        overlong_filtering=False,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--fault-rate", type=float, default=0.05, help="probability of each fault (default 0.05)")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.episodes < 1 or not 0 < args.fault_rate <= 1:
        parser.error("--episodes must be at least 1, and --fault-rate above 0 and at most 1")
    logging.disable(logging.WARNING)  # thousands of faults that were meant to happen
    line = asyncio.run(soak(args.episodes, args.fault_rate, args.seed))
    print(json.dumps(line))
    fine = line["ledger_balanced"] and not (line["instances_left"] or line["wrong_grades"] or line["false_zeros"])
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
