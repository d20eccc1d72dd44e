"""One token-exact episode: prompt, turns, tool calls, grading, and exactly one outcome whatever happens.

The trajectory's ids are the very ids the engine was given and sampled. Each turn's prompt is the previous prompt plus
what was sampled plus the observation: a strict prefix extension, never a re-tokenised history.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from actors.config import DeadlinesConfig
from actors.prompt import Prompter, tool_message
from actors.task import Task
from actors.tool_calls import Turn, parse_turn
from actors.trajectory import (
    Graded,
    InfraFailed,
    Outcome,
    Span,
    StopReason,
    Trajectory,
    Ungraded,
    merge_spans,
)
from serve.sampling import Completion, Sampling

NO_CALL = "no tool call and no <done> found; end every turn with exactly one tool call, or with <done>"


class Environment(Protocol):
    """What an episode needs of an environment: OpenEnv's verbs, plus grading on its own."""

    async def reset_async(self) -> Any: ...

    async def step_async(self, action: Any) -> Any: ...

    async def verify_async(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Outcome: ...

    async def close_async(self) -> None: ...


class Generate(Protocol):
    """One turn of the policy: prompt token ids in, sampled ids with logprobs and version spans out."""

    def __call__(
        self, prompt_ids: list[int], sampling: Sampling, *, request_id: str, session_id: str, cache_salt: str | None
    ) -> Awaitable[Completion]: ...


@dataclass(frozen=True)
class EpisodeLimits:
    """What ends an episode early."""

    max_turns: int
    max_input_length: int  # token ids; no further turn beyond
    max_model_len: int  # token ids the engine can hold
    deadlines: DeadlinesConfig


class PhaseFailed(Exception):
    """A phase of our side failed or ran out of time; the episode ends as infra-failed with this reason."""


@dataclass
class _Tokens:
    """The growing token record of an episode."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    sampled: int = 0

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)

    def sample(self, completion: Completion) -> None:
        self.ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logprobs += completion.logprobs
        self.spans += [Span(v, self.sampled + a, self.sampled + b) for v, a, b in completion.spans]
        self.sampled += len(completion.token_ids)


def turn_seed(run_seed: int, episode_id: str, turn: int) -> int:
    """A seed per turn that depends on nothing but the run's seed and which turn it is (63 bits)."""
    digest = hashlib.blake2b(f"{run_seed}/{episode_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Episode:
    """One attempt at one task.

    Args:
        open_env: provisions the environment; its failure ends the episode as infra-failed.
        sampling: as for every turn; ``max_tokens`` is lowered to what the context still holds, and a ``seed`` is
            turned into one seed per turn.
        cache_salt: salt of every request of this episode; ``None`` lets the replica salt with its version at the
            first turn.
    """

    def __init__(
        self,
        task: Task,
        episode_id: str,
        *,
        group_id: int,
        sample_index: int,
        open_env: Callable[[], Awaitable[Environment]],
        generate: Generate,
        prompter: Prompter,
        limits: EpisodeLimits,
        sampling: Sampling,
    ) -> None:
        self.task = task
        self.episode_id = episode_id
        self.group_id = group_id
        self.sample_index = sample_index
        self._open_env = open_env
        self._generate = generate
        self._prompter = prompter
        self._limits = limits
        self._sampling = sampling
        self._tokens = _Tokens()
        self._messages: list[dict[str, Any]] = []
        self._prompt_length = 0
        self._cache_salt: str | None = None
        self._env: Environment | None = None
        self._ready = False  # the environment was reset, so a verifier can say something
        self._final_answer: str | None = None
        self._env_reward: float | None = None
        self._stop: StopReason | None = None
        self._turns = self._tool_calls = self._tool_errors = 0
        self._phase_s: dict[str, float] = {}
        self._started = time.time()
        self.phase = "queued"

    async def run(self) -> Trajectory:
        """Run to the end. Raises only ``CancelledError``; the environment is closed in that case as well."""
        begun = time.monotonic()
        try:
            outcome = await self._attempt()
        finally:
            await self._close()
        return self._trajectory(outcome, time.monotonic() - begun)

    async def _attempt(self) -> Outcome:
        failure: str | None = None
        try:
            await self._provision()
            try:
                async with asyncio.timeout(self._limits.deadlines.episode):
                    await self._dialogue()
            except TimeoutError:
                self._stop = StopReason.TIMEOUT
        except PhaseFailed as error:
            self._stop, failure = StopReason.ERROR, str(error)
        if failure is not None:
            return InfraFailed(failure)
        return await self._grade()

    async def _provision(self) -> None:
        deadlines = self._limits.deadlines
        async with self._timed("provision", deadlines.provision):
            self._env = await self._open_env()

    async def _dialogue(self) -> None:
        async with self._timed("reset", self._limits.deadlines.reset):
            observation = await self._env.reset_async()
        self._ready = True
        self._messages, ids = self._prompter.first(self.task, observation.tools)
        self._prompt_length = len(ids)
        self._tokens.observe(ids)
        if len(ids) > self._limits.max_input_length:
            raise PhaseFailed(f"prompt of {len(ids)} tokens exceeds max_input_length {self._limits.max_input_length}")
        while self._stop is None:
            await self._turn()

    async def _turn(self) -> None:
        room = self._limits.max_model_len - len(self._tokens.ids)
        if len(self._tokens.ids) > self._limits.max_input_length or room < 1:
            self._stop = StopReason.LENGTH
            return
        completion = await self._sample(room)
        text = self._prompter.decode(completion.token_ids)
        self._messages.append({"role": "assistant", "content": text})
        self._turns += 1
        if completion.stop_reason == "length":
            self._stop = StopReason.LENGTH
            return
        if completion.stop_reason != "stop":
            raise PhaseFailed(f"generate: the engine ended the request with '{completion.stop_reason}'")
        self._end_turn(completion)
        observed = await self._act(parse_turn(text))
        if self._stop is None and self._turns >= self._limits.max_turns:
            self._stop = StopReason.MAX_TURNS
        if self._stop is None:
            self._messages.append(observed)
            self._tokens.observe(self._prompter.observation([observed]))

    async def _sample(self, room: int) -> Completion:
        sampling = self._sampling
        seed = None if sampling.seed is None else turn_seed(sampling.seed, self.episode_id, self._turns)
        async with self._timed("generate", self._limits.deadlines.generate):
            completion = await self._generate(
                list(self._tokens.ids),
                Sampling(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_tokens=min(sampling.max_tokens, room),
                    stop=sampling.stop,
                    seed=seed,
                ),
                request_id=f"{self.episode_id}-{self._turns}",
                session_id=self.episode_id,
                cache_salt=self._cache_salt,
            )
        self._cache_salt = completion.cache_salt
        self._tokens.sample(completion)
        return completion

    def _end_turn(self, completion: Completion) -> None:
        """A turn that ended in a stop string gets the end-of-sequence token the template expects; it is not sampled."""
        eos = self._prompter.tokenizer.eos_token_id
        if not completion.token_ids or completion.token_ids[-1] != eos:
            self._tokens.observe([eos])

    async def _act(self, turn: Turn) -> dict[str, Any] | None:
        """Carry out what the turn says; returns the message the policy reads next."""
        if turn.error is not None:
            self._tool_errors += 1
            return tool_message(None, error=turn.error)
        if turn.calls:
            call = turn.calls[0]
            return await self._call(call.name, call.arguments)
        if turn.done:
            self._stop, self._final_answer = StopReason.DONE, turn.answer
            return None
        return tool_message(None, error=NO_CALL)

    async def _call(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        self._tool_calls += 1
        # The environment turns a slow tool into an error the policy reads; the margin lets it do so.
        async with self._timed("step", self._limits.deadlines.step + self._limits.deadlines.close):
            observation = await self._env.step_async({"tool": name, "params": arguments})
        if observation.error is not None:
            self._tool_errors += 1
        if observation.done:
            self._stop, self._env_reward = StopReason.ENV_DONE, observation.reward
        return tool_message(observation.result, observation.error)

    async def _grade(self) -> Outcome:
        """The verifier runs on every exit from an episode that began."""
        if not self._ready:
            return InfraFailed("reset: the episode's deadline passed before the environment was ready")
        if self._env_reward is not None:
            return Graded(float(self._env_reward))
        try:
            async with self._timed("verify", self._limits.deadlines.verify):
                return await self._env.verify_async(self._final_answer, self._messages)
        except PhaseFailed as error:
            return Ungraded(str(error))

    async def _close(self) -> None:
        if self._env is None:
            return
        env, self._env = self._env, None
        try:
            async with self._timed("close", self._limits.deadlines.close):
                await env.close_async()
        except PhaseFailed as error:
            # The lease's own owner ends it; the episode's result stands.
            self._phase_s["close_failed"] = 1.0
            self._messages.append({"role": "note", "content": str(error)})

    @asynccontextmanager
    async def _timed(self, phase: str, seconds: float):
        """Bound a phase, record its time, and turn whatever goes wrong into a reason that names the phase."""
        self.phase = phase
        begun = time.monotonic()
        scope = asyncio.timeout(seconds)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if scope.expired():
                raise PhaseFailed(f"{phase}: no answer in {seconds:.0f} s") from None
            raise PhaseFailed(f"{phase}: {error or 'timed out'}") from error
        except PhaseFailed:
            raise
        except Exception as error:
            raise PhaseFailed(f"{phase}: {type(error).__name__}: {error}".splitlines()[0][:300]) from error
        finally:
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + time.monotonic() - begun

    def _trajectory(self, outcome: Outcome, duration: float) -> Trajectory:
        tokens = self._tokens
        trajectory = Trajectory(
            trajectory_id=self.episode_id,
            task_key=self.task.task_key,
            env_key=self.task.env_key,
            group_id=self.group_id,
            sample_index=self.sample_index,
            ids=np.asarray(tokens.ids, dtype=np.int32),
            mask=np.asarray(tokens.mask, dtype=np.uint8),
            logprobs=np.asarray(tokens.logprobs, dtype=np.float32),
            prompt_length=self._prompt_length,
            spans=merge_spans(tokens.spans),
            stop_reason=self._stop or StopReason.ERROR,
            outcome=outcome,
            turns=self._turns,
            tool_calls=self._tool_calls,
            tool_errors=self._tool_errors,
            started_at=self._started,
            duration_s=duration,
            phase_s=self._phase_s,
            messages=self._messages,
        )
        trajectory.validate()
        return trajectory
