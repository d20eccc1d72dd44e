"""RolloutWorker: an async actor that drives many episodes at once."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import ray

from actors.coalescer import Coalescer
from actors.config import GeneratorConfig
from actors.env_pool import EnvPoolClient
from actors.envs.openenv import OpenEnvServers
from actors.episode import QUEUED, DialogueRules, Environment, Episode, EpisodeLimits, Generate
from actors.garbage import search_seldom
from actors.prompt import Prompter
from actors.replay_buffer_core import GroupHeader
from actors.task import Task
from actors.tool_calls import native_parser
from actors.trajectory import Group, Trajectory
from serve.loop_lag import LoopLag
from serve.policy import PolicyClient
from serve.quick_loading import quick_loading
from serve.sampling import Completion, Sampling
from serve.state_clock import StateClock

MAX_RESTARTS = 3  # of one that dies
CANCEL_TIMEOUT_S = 30.0  # for episodes to close their environments

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSettings:
    """What a RolloutWorker is given."""

    name: str
    model_path: str
    max_model_len: int
    max_episodes: int  # running at once on this worker
    generator: GeneratorConfig
    api_key: str | None
    base_url: str | None
    overlong_filtering: bool
    openenv: dict[str, str] = field(default_factory=dict)  # URL of the OpenEnv server of an env_key
    openenv_max_sessions: int = 32  # at once with each of them
    openenv_headers: dict[str, dict[str, str]] = field(default_factory=dict, repr=False)  # may hold secrets
    partial_reward: bool = False


@dataclass(frozen=True)
class Peers:
    """Whom a RolloutWorker works with.

    Attributes:
        pool: handle of :class:`actors.env_pool.EnvPool`, ``None`` where no task is Fleet's.
        buffer: handle of :class:`actors.replay_buffer.ReplayBuffer`.
        eval_policy: for evaluations beside training; ``None``: ``policy``.
    """

    policy: PolicyClient
    pool: Any
    buffer: Any
    eval_policy: PolicyClient | None = None


@dataclass(frozen=True)
class GroupOrder:
    """One group to roll out. Episode ids are made by the conductor, so that both sides account for the same ones."""

    task: Task
    group_id: int
    episode_ids: tuple[str, ...]
    sampling: Sampling


def dialogue_rules(generator: GeneratorConfig, tokenizer: Any) -> DialogueRules:
    """The rules that a configuration asks for.

    Raises:
        ValueError: vLLM has no tool parser of that name, or it does not work with this tokenizer.
    """
    common = generator.model_dump(
        include={"multiple_tool_calls", "max_output_chars", "context_tools", "inject_context_status"}
    )
    if generator.tool_call_format == "tags":
        return DialogueRules(**common)
    from serve.engine import native_tool_calls  # vLLM takes seconds to import

    extract_with = native_tool_calls(generator.tool_call_format, tokenizer)
    return DialogueRules(
        parser_of=lambda tools: native_parser(extract_with(json.dumps(tools))), keep_special_tokens=True, **common
    )


def announced_once(generate: Generate, on_first: Callable[[], object]) -> Generate:
    """``generate`` that calls ``on_first`` before its first turn."""
    announced = False

    async def announcing(prompt_ids: list[int], sampling: Sampling, **ids: Any) -> Completion:
        nonlocal announced
        if not announced:
            announced = True
            on_first()
        return await generate(prompt_ids, sampling, **ids)

    return announcing


class EpisodeRunner:
    """Builds and runs episodes against one policy and one pool; plain asyncio, no Ray."""

    def __init__(self, settings: WorkerSettings, tokenizer: Any, policy: PolicyClient, pool: EnvPoolClient) -> None:
        self._settings = settings
        self._policy = policy
        self._pool = pool
        self._openenv = OpenEnvServers(settings.openenv, settings.openenv_max_sessions, settings.openenv_headers)
        generator = settings.generator
        self._prompter = Prompter(tokenizer, generator.tools_channel, generator.chat_template_kwargs)
        self._limits = EpisodeLimits(
            max_turns=generator.max_turns,
            max_input_length=generator.max_input_length,
            max_model_len=settings.max_model_len,
            deadlines=generator.deadlines,
        )
        self._rules = dialogue_rules(generator, tokenizer)
        self._slots = asyncio.Semaphore(settings.max_episodes)
        self._running: dict[str, Episode] = {}
        self._groups: set[asyncio.Task[Any]] = set()
        self._time_spent = StateClock()
        self.sampled_tokens = 0
        self.episodes = 0

    async def run_group(
        self,
        order: GroupOrder,
        on_first_turn: Callable[[], object] | None = None,
        policy: PolicyClient | None = None,
    ) -> Group:
        """All episodes of a group. If one is cancelled or breaks, its siblings are cancelled and closed first.

        Args:
            on_first_turn: is called once, when the first of the episodes asks for its first turn.
            policy: another one than the runner's own.
        """
        generate: Generate = (policy or self._policy).generate
        if on_first_turn is not None:
            generate = announced_once(generate, on_first_turn)
        this = asyncio.current_task()
        self._groups.add(this)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._run_episode(order, index, episode_id, generate))
                    for index, episode_id in enumerate(order.episode_ids)
                ]
        finally:
            self._groups.discard(this)
        return Group(order.group_id, order.task.task_key, order.task.env_key, [task.result() for task in running])

    async def cancel_all(self, timeout_s: float) -> None:
        """Cancel every group, and wait until their environments are closed."""
        groups = list(self._groups)
        for group in groups:
            group.cancel()
        if groups:
            await asyncio.wait(groups, timeout=timeout_s)

    async def _run_episode(self, order: GroupOrder, index: int, episode_id: str, generate: Generate) -> Trajectory:
        with self._time_spent.inside(QUEUED):
            await self._slots.acquire()
        try:
            episode = Episode(
                order.task,
                episode_id,
                group_id=order.group_id,
                sample_index=index,
                open_env=lambda: self._open_env(order.task),
                generate=generate,
                prompter=self._prompter,
                limits=self._limits,
                sampling=order.sampling,
                rules=self._rules,
                time_spent=self._time_spent,
            )
            self._running[episode_id] = episode
            trajectory = await episode.run()
        finally:
            self._running.pop(episode_id, None)
            self._slots.release()
        self.episodes += 1
        self.sampled_tokens += int(trajectory.mask.sum())
        return trajectory

    async def _open_env(self, task: Task) -> Environment:
        if task.env_key in self._openenv:
            return await self._openenv.open(task, self._settings.generator.deadlines)
        settings = self._settings
        return await self._pool.open(task, settings.generator.deadlines, partial_reward=settings.partial_reward)

    def phases(self) -> dict[str, int]:
        """How many episodes are in which phase now."""
        counts: dict[str, int] = {}
        for episode in self._running.values():
            counts[episode.phase] = counts.get(episode.phase, 0) + 1
        return counts

    def episode_s(self) -> dict[str, float]:
        """Seconds that all episodes so far, and those that run, have spent in each phase."""
        return self._time_spent.seconds()


@ray.remote(max_restarts=MAX_RESTARTS)
class RolloutWorker:
    """The actor shell: settings in, groups out. One that was restarted must be given ``start`` again."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._buffer: Any = None
        self._eval_policy: PolicyClient | None = None
        self._runner: EpisodeRunner | None = None
        self._generating = Coalescer(self._send_notes)
        self._loop_lag = LoopLag()
        self._starting = asyncio.Lock()

    async def start(self, peers: Peers) -> str:
        """Load the tokenizer. Apart from construction, so that its failure reaches the caller as an error, and because
        Ray warns of handles among the arguments of an actor that it may start again (ray-project/ray#53727).

        A worker that has been started already gets other peers; what it does for the old ones is cancelled."""
        async with self._starting:
            if self._runner is None:
                await self._make_runner(peers)
            else:
                await self._runner.cancel_all(CANCEL_TIMEOUT_S)
            self._buffer, self._eval_policy = peers.buffer, peers.eval_policy
        return self._settings.name

    async def _make_runner(self, peers: Peers) -> None:
        with quick_loading():
            from transformers import AutoTokenizer

        settings = self._settings
        tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, settings.model_path)
        pool = EnvPoolClient(peers.pool, api_key=settings.api_key, base_url=settings.base_url, owner=settings.name)
        self._runner = EpisodeRunner(settings, tokenizer, peers.policy, pool)
        search_seldom()

    @ray.method(num_returns=2)
    async def run_group(self, order: GroupOrder) -> tuple[GroupHeader, Group]:
        """Roll a group out. The two are objects of their own, so that the caller need not fetch the group; and they are
        the caller's: what a worker puts into the object store is lost with it."""
        group = await self._runner.run_group(order, lambda: asyncio.ensure_future(self._generating(order.group_id)))
        return GroupHeader.of(group, self._settings.overlong_filtering), group

    async def _send_notes(self, ticket_ids: list[int]) -> list[None]:
        try:
            await self._buffer.generating.remote(ticket_ids, self._settings.name)
        except ray.exceptions.RayError as error:
            # It serves only to say where a group is that does not come. If the buffer is gone, commits will fail.
            logger.debug("a note to the replay buffer was lost: %s", error)
        return [None] * len(ticket_ids)

    async def evaluate_group(self, order: GroupOrder) -> Group:
        """Roll a group out for evaluation: it goes back to the caller, not to the buffer."""
        return await self._runner.run_group(order)

    async def evaluate_group_beside(self, order: GroupOrder) -> Group:
        """As :meth:`evaluate_group`, while training goes on: by the replicas that are there for that, if any are."""
        return await self._runner.run_group(order, policy=self._eval_policy)

    async def stats(self) -> dict[str, Any] | None:
        """What it has done and is doing, and how late its loop was since the last call. ``None``: it was restarted, and
        waits for ``start``."""
        runner = self._runner
        if runner is None:
            return None
        return {
            "sampled_tokens": runner.sampled_tokens,
            "episodes": runner.episodes,
            "phases": runner.phases(),
            "episode_s": runner.episode_s(),
            "loop_lag": self._loop_lag.take(),
        }
