"""Evaluation of a model behind a chat endpoint: a run's episodes on its environments, without engine, GPU and Ray."""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from actors.env_pool import LocalPoolClient
from actors.env_pool_core import EnvPoolCore, PoolSettings
from actors.envs.fleet import FleetControl, FleetFailure, close_clients
from actors.envs.openenv import OpenEnvServers
from actors.episode import DialogueRules, Environment, EpisodeLimits
from actors.ledger import Ledger
from actors.task import Task
from actors.trajectory import Group, InfraFailed, Trajectory
from serve.sampling import Sampling
from train.chat.endpoint import GIVE_UP_AFTER, ChatEndpoint
from train.chat.episode import ChatEpisode
from train.chat.protocol import EVALUATED, EndpointFailed, EndpointRefused, EndpointSettings
from train.checkpoint_eval import Evaluated, Report, beside_run
from train.config import ConfigError, RunConfig
from train.environment_servers import EnvironmentServers
from train.evaluator import Attempts
from train.failures import RunFailed, stopped_by_signals
from train.preflight import check_environments

PROGRESS_S = 0.5
CLOSE_S = 60.0  # for deleting the instances at the end
COUNTED = ("made", "reused", "deleted", "expired", "lost", "failed")  # of the instances, in a ledger


@dataclass(frozen=True)
class Asked:
    """Whom an evaluation asks. ``concurrency``: episodes at once, and so requests."""

    url: str
    model: str
    tools: Literal["native", "text"]
    api_key: str | None
    concurrency: int


def sampling_of(sampling: Sampling) -> Sampling:
    """What of a run's sampling an endpoint can be told: no seed and no ``top_k``, which not all of them know, and no
    stop strings, which they would cut off, done signals included."""
    return replace(sampling, seed=None, top_k=-1, stop=())


def check(config: RunConfig, tasks: Sequence[Task]) -> RunConfig:
    """The configuration of the evaluation.

    Raises:
        ConfigError: something is wrong, and what to do.
    """
    for key in ("context_tools", "inject_context_status"):
        if getattr(config.generator, key):
            raise ConfigError(f"generator.{key} needs token ids, which an endpoint does not tell: set it to false")
    config = beside_run(config, tasks)
    check_environments(config, tasks)
    return config


def evaluate(config: RunConfig, tasks: Sequence[Task], attempts: Attempts, asked: Asked, report: Report) -> Evaluated:
    """Attempt every task. However it ends, instances and servers are gone afterwards.

    Args:
        config: of :func:`check`.
        attempts: with a sampling of :func:`sampling_of`.

    Raises:
        ConfigError: the endpoint or the control plane refuses; nothing was attempted.
        RunFailed: the control plane, or a server that was started here, failed.
        Stopped: a signal came.
    """
    return asyncio.run(_evaluate(config, tasks, attempts, asked, report))


async def _evaluate(
    config: RunConfig, tasks: Sequence[Task], attempts: Attempts, asked: Asked, report: Report
) -> Evaluated:
    async with stopped_by_signals():
        endpoint = _endpoint(attempts.sampling, asked, config.generator.deadlines.generate)
        try:
            await _answers(endpoint)
            with (
                tempfile.TemporaryDirectory(prefix="fleet-rl-eval-") as scratch,
                EnvironmentServers(config.environment, tasks, Path(scratch), asked.concurrency) as servers,
            ):
                async with _Environments(config, servers, asked.concurrency) as environments:
                    work = _Work(config, tasks, attempts, endpoint, environments)
                    groups = await work.run(asked.concurrency, servers, report)
        finally:
            await endpoint.close()
            await close_clients()
    ledger = {"eval": work.ledger.snapshot(), "instances": environments.account}
    spent = endpoint.spent
    return Evaluated.of(groups, ledger, spent["completion_tokens"], problem=endpoint.gone, spent=dict(spent))


def _endpoint(sampling: Sampling, asked: Asked, timeout_s: float) -> ChatEndpoint:
    settings = EndpointSettings(
        url=asked.url,
        model=asked.model,
        temperature=sampling.temperature,
        top_p=sampling.top_p if sampling.top_p < 1 else None,  # some models refuse even what changes nothing
        tools=asked.tools,
        max_tokens=sampling.max_tokens,
    )
    # All requests that are under way fail when the endpoint pauses for a moment; that alone must not end it.
    give_up_after = GIVE_UP_AFTER + asked.concurrency
    return ChatEndpoint(settings, asked.api_key, timeout_s, EVALUATED, give_up_after=give_up_after)


async def _answers(endpoint: ChatEndpoint) -> None:
    try:
        await endpoint.check()
    except (EndpointRefused, EndpointFailed) as error:
        raise ConfigError(str(error)) from None


class _Environments:
    """Opens environments: Fleet's on instances of a pool in this process, the others on OpenEnv servers.

    Attributes:
        account: once it is left, of the pool's instances; ``None``: no task is Fleet's.
    """

    def __init__(self, config: RunConfig, servers: EnvironmentServers, concurrency: int) -> None:
        self._config = config
        self._servers = servers
        self._concurrency = concurrency
        environment = config.environment
        headers = environment.secret_headers(os.environ)
        self._openenv = OpenEnvServers(servers.openenv, environment.openenv_max_sessions, headers)
        self._pool: EnvPoolCore | None = None
        self.account: dict[str, int] | None = None

    async def __aenter__(self) -> _Environments:
        """Start the pool.

        Raises:
            ConfigError, RunFailed: the control plane refuses, or fails.
        """
        if not self._servers.uses_fleet:
            return self
        environment, deadlines = self._config.environment, self._config.generator.deadlines
        settings = PoolSettings(
            run_name=self._config.name,
            nonce=secrets.token_hex(4),
            budget_s=deadlines.budget,
            margin_s=environment.ttl_margin,
            heartbeat_s=environment.heartbeat_interval,
            max_instances=environment.max_instances,
            max_idle=self._concurrency,
            create_timeout_s=deadlines.provision,
        )
        try:
            control = FleetControl(self._servers.api_key, self._servers.base_url)
            await control.account()  # a wrong key or address shows at once; the pool would insist
            pool = EnvPoolCore(control, settings)
            await pool.start()
        except FleetFailure as failure:
            raise (ConfigError if failure.status == 401 else RunFailed)(str(failure)) from None
        self._pool = pool
        self._client = LocalPoolClient(pool, api_key=self._servers.api_key, base_url=self._servers.base_url)
        return self

    async def __aexit__(self, *exc: object) -> None:
        if self._pool is not None:
            closed = await self._pool.close_all(CLOSE_S)
            stats = self._pool.stats()
            self.account = {name: stats[name] for name in COUNTED} | {"left": len(closed.left)}

    async def open(self, task: Task) -> Environment:
        deadlines = self._config.generator.deadlines
        if task.env_key in self._openenv:
            return await self._openenv.open(task, deadlines)
        return await self._client.open(task, deadlines, partial_reward=self._config.environment.partial_reward)


class _Work:
    """Every attempt at every task, taken from one list by so many at once; those at one task follow each other."""

    def __init__(
        self,
        config: RunConfig,
        tasks: Sequence[Task],
        attempts: Attempts,
        endpoint: ChatEndpoint,
        environments: _Environments,
    ) -> None:
        generator = config.generator
        self._limits = EpisodeLimits(
            max_turns=generator.max_turns,
            max_input_length=generator.max_input_length,
            max_model_len=config.policy.max_model_len,
            deadlines=generator.deadlines,
        )
        self._rules = DialogueRules(
            multiple_tool_calls=generator.multiple_tool_calls, max_output_chars=generator.max_output_chars
        )
        self._tasks = tasks
        self._attempts = attempts
        self._endpoint = endpoint
        self._environments = environments
        self._left = iter([(group_id, index) for group_id in range(len(tasks)) for index in range(attempts.n)])
        self._ended: dict[str, Trajectory] = {}
        self.ledger = Ledger()

    async def run(self, at_once: int, servers: EnvironmentServers, report: Report) -> list[Group]:
        """Make all attempts; one group a task, in their order.

        Raises:
            RunFailed: a server ends again and again.
        """
        self.ledger.dispatch([self._id(task, i) for task in self._tasks for i in range(self._attempts.n)])
        working = asyncio.create_task(self._work(at_once))
        try:
            while not working.done():
                report({"phase": "evaluating", "ended": len(self._ended)})
                servers.check()
                await asyncio.wait([working], timeout=PROGRESS_S)
            working.result()
        finally:
            working.cancel()
            await asyncio.wait([working])
        return [self._group(group_id, task) for group_id, task in enumerate(self._tasks)]

    async def _work(self, at_once: int) -> None:
        async with asyncio.TaskGroup() as workers:
            for _ in range(at_once):
                workers.create_task(self._take())

    async def _take(self) -> None:
        for group_id, index in self._left:
            episode, gone = self._episode(group_id, index), self._endpoint.gone
            trajectory = await episode.run() if gone is None else episode.not_begun(InfraFailed(gone))
            self._ended[episode.episode_id] = trajectory
            self.ledger.end(episode.episode_id, trajectory.outcome)

    def _episode(self, group_id: int, index: int) -> ChatEpisode:
        task = self._tasks[group_id]
        return ChatEpisode(
            task,
            self._id(task, index),
            group_id=group_id,
            sample_index=index,
            open_env=lambda: self._environments.open(task),
            endpoint=self._endpoint,
            limits=self._limits,
            rules=self._rules,
        )

    def _group(self, group_id: int, task: Task) -> Group:
        trajectories = [self._ended[self._id(task, index)] for index in range(self._attempts.n)]
        return Group(group_id, task.task_key, task.env_key, trajectories)

    def _id(self, task: Task, index: int) -> str:
        return f"{self._attempts.label}/{task.task_key}/{index}"
