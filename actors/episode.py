"""One token-exact episode: prompt, turns, tool calls, grading, and exactly one outcome whatever happens.

The trajectory's ids are the very ids the engine was given and sampled. Each turn's prompt is the previous prompt plus
what was sampled plus the observation: a strict prefix extension, never a re-tokenised history.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from actors.config import DeadlinesConfig
from actors.context_tools import CONTEXT_TOOL_NAMES, CONTEXT_TOOLS, ContextToolError, ContextTools
from actors.prompt import Prompter, bounded, tool_message, tool_text
from actors.task import Task
from actors.token_record import TokenRecord
from actors.tool_calls import Parser, ToolCall, Turn, parse_turn
from actors.tool_schema import ToolSchemas, schemas_of
from actors.trajectory import (
    Graded,
    InfraFailed,
    Outcome,
    StopReason,
    Trajectory,
    Ungraded,
    merge_spans,
)
from serve.sampling import Completion, Sampling
from serve.state_clock import StateClock

logger = logging.getLogger(__name__)

NO_CALL = "no tool call and no <done> found; end every turn with exactly one tool call, or with <done>"
MANY_CALLS = "{n} tool calls in one turn, and none was carried out; end every turn with exactly one"
ONLY_FIRST = "[only the first of the {n} tool calls of this turn was carried out]"
VIEW_HINT = "; view_tool_output shows them"

QUEUED = "queued"  # state of an episode that waits for its place among those that run at once
OWN_WORK = "own_work"  # state of an episode that waits for nobody: between two phases

ANSWER_MARGIN_S = 1.0  # an environment keeps its deadlines itself; the margin lets its own reason be heard
CANCEL_GRACE_S = 1.2  # whoever cancels an episode waits this long for its environment to close, which goes on after it

_closing: set[asyncio.Future[None]] = set()  # environments of cancelled episodes; the loop alone holds tasks weakly


class Environment(Protocol):
    """What an episode needs of an environment: OpenEnv's verbs, plus grading on its own."""

    async def reset_async(self) -> Any: ...

    async def step_async(self, action: Any) -> Any: ...

    async def verify_async(self, final_answer: str | None, conversation: list[dict[str, Any]]) -> Outcome: ...

    async def close_async(self) -> None:
        """Bounded, whatever fails."""


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


@dataclass(frozen=True)
class DialogueRules:
    """How turns are read and answered; see the keys of the same names in :class:`actors.config.GeneratorConfig`.

    ``parser_of`` makes the parser for a list of tools; ``None`` is the tags of :func:`parse_turn`. Families' own
    formats use special tokens.
    """

    parser_of: Callable[[list[dict[str, Any]]], Parser] | None = None
    keep_special_tokens: bool = False
    multiple_tool_calls: Literal["first", "all", "error"] = "first"
    max_output_chars: int = 20_000
    context_tools: bool = False
    inject_context_status: bool = False


class PhaseFailed(Exception):
    """A phase of our side failed or ran out of time; the episode ends as infra-failed with this reason."""


def turn_seed(run_seed: int, episode_id: str, turn: int) -> int:
    """A seed per turn that depends on nothing but the run's seed and which turn it is (63 bits)."""
    digest = hashlib.blake2b(f"{run_seed}/{episode_id}/{turn}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class Episode:
    """One attempt at one task.

    Args:
        open_env: provisions the environment; its failure ends the episode as infra-failed.
        generate, prompter, sampling: needed, but by a kind of episode that takes its turns elsewhere (``_open``,
            ``_turn``).
        sampling: as for every turn; ``max_tokens`` is lowered to what the context still holds, and a ``seed`` is
            turned into one seed per turn.
        cache_salt: salt of every request of this episode; ``None`` lets the replica salt with its version at the
            first turn.
        time_spent: adds up the seconds that this episode, among others, spends in each phase, and in ``OWN_WORK``.
    """

    def __init__(
        self,
        task: Task,
        episode_id: str,
        *,
        group_id: int,
        sample_index: int,
        open_env: Callable[[], Awaitable[Environment]],
        generate: Generate | None = None,
        prompter: Prompter | None = None,
        limits: EpisodeLimits,
        sampling: Sampling | None = None,
        rules: DialogueRules = DialogueRules(),  # noqa: B008 (frozen)
        time_spent: StateClock | None = None,
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
        self._rules = rules
        self._tokens = TokenRecord()
        self._messages: list[dict[str, Any]] = []
        self._schemas = ToolSchemas([])
        self._parse: Parser = parse_turn
        self._context = self._context_tools()
        self._answered_here = frozenset[str]()  # context tools the environment has no tool of the same name for
        self._prompt_length = 0
        self._cache_salt: str | None = None
        self._env: Environment | None = None
        self._ready = False  # the environment was reset, so a verifier can say something
        self._final_answer: str | None = None
        self._env_reward: float | None = None
        self._stop: StopReason | None = None
        self._turns = self._tool_calls = self._tool_errors = 0
        self._phase_s: dict[str, float] = {}
        self._time_spent = time_spent or StateClock()
        self._started = time.time()
        self.phase = "queued"

    async def run(self) -> Trajectory:
        """Run to the end. Raises only ``CancelledError``; the environment is closed in that case as well."""
        begun = time.monotonic()
        with self._time_spent.inside(OWN_WORK):
            try:
                outcome = await self._attempt()
            except asyncio.CancelledError:
                await self._leave()
                raise
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
        except Exception as error:
            # A fault of ours must cost this episode and no other, and must not look like the policy's.
            logger.exception("episode %s", self.episode_id)
            self._stop, failure = StopReason.ERROR, f"{self.phase}: {type(error).__name__}: {error}".splitlines()[0]
        if failure is not None:
            return InfraFailed(failure)
        return await self._grade()

    async def _provision(self) -> None:
        deadlines = self._limits.deadlines
        async with self._timed("provision", deadlines.provision):
            self._env = await self._open_env()

    async def _dialogue(self) -> None:
        async with self._timed("reset", self._limits.deadlines.begin + ANSWER_MARGIN_S):
            observation = await self._env.reset_async()
        self._ready = True
        tools = self._offered(list(observation.tools))
        self._schemas = schemas_of(tools)
        if self._rules.parser_of is not None:
            self._parse = self._rules.parser_of(tools)
        self._open(tools, self._begun(observation.result))
        while self._stop is None:
            await self._turn()

    def _open(self, tools: list[dict[str, Any]], begun: str | None) -> None:
        """What stands before the first turn."""
        self._messages, ids = self._prompter.first(self.task, tools, begun)
        self._context = self._context_tools()
        self._prompt_length = len(ids)
        self._tokens.open(ids)
        if len(ids) > self._limits.max_input_length:
            raise PhaseFailed(f"prompt of {len(ids)} tokens exceeds max_input_length {self._limits.max_input_length}")

    def _begun(self, result: Any) -> str | None:
        return None if result is None else bounded(tool_text(result), self._rules.max_output_chars)

    def _context_tools(self) -> ContextTools:
        limits = self._limits
        return ContextTools(
            self._tokens, self._messages, max_tokens=limits.max_input_length, max_turns=limits.max_turns
        )

    def _offered(self, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The environment's tools and ours. Where both have a name, it means the environment's."""
        if not self._rules.context_tools:
            return tools
        names = {tool["function"]["name"] for tool in tools}
        self._answered_here = CONTEXT_TOOL_NAMES - names
        return tools + [tool for tool in CONTEXT_TOOLS if tool["function"]["name"] in self._answered_here]

    async def _turn(self) -> None:
        room = self._limits.max_model_len - len(self._tokens.ids)
        if len(self._tokens.ids) > self._limits.max_input_length or room < 1:
            self._stop = StopReason.LENGTH
            return
        completion = await self._sample(room)
        text = self._prompter.decode(completion.token_ids, self._rules.keep_special_tokens)
        self._messages.append({"role": "assistant", "content": text})
        self._turns += 1
        if completion.stop_reason == "length":
            self._stop = StopReason.LENGTH
            return
        if completion.stop_reason != "stop":
            raise PhaseFailed(f"generate: the engine ended the request with '{completion.stop_reason}'")
        self._end_turn(completion)
        observed = [tool_message(text) for text in await self._act(self._parse(text))]
        if self._stop is None and self._turns >= self._limits.max_turns:
            self._stop = StopReason.MAX_TURNS
        if self._stop is None:
            if self._rules.inject_context_status:
                observed[-1]["content"] += f"\n{self._context.status(self._turns)}"
            self._messages += observed
            self._tokens.observe(self._prompter.observation(observed))

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

    async def _act(self, turn: Turn) -> list[str]:
        """Carry out what the turn says; returns what the policy reads next, a text for each message."""
        if turn.error is not None:
            self._tool_errors += 1
            return [tool_text(None, turn.error)]
        if len(turn.calls) > 1:
            return await self._act_on_many(turn.calls)
        if turn.calls:
            return [await self._call(turn.calls[0])]
        if turn.done:
            self._stop, self._final_answer = StopReason.DONE, turn.answer
            return []
        return [tool_text(None, NO_CALL)]

    async def _act_on_many(self, calls: tuple[ToolCall, ...]) -> list[str]:
        if self._rules.multiple_tool_calls == "error":
            self._tool_errors += 1
            return [tool_text(None, MANY_CALLS.format(n=len(calls)))]
        if self._rules.multiple_tool_calls == "first":
            return [f"{await self._call(calls[0])}\n{ONLY_FIRST.format(n=len(calls))}"]
        texts = []
        for call in calls:
            texts.append(await self._call(call))
            if self._stop is not None:
                break
        return texts

    async def _call(self, call: ToolCall) -> str:
        """Carry out one call; returns what the policy reads of it."""
        self._tool_calls += 1
        problem = self._schemas.problem(call.name, call.arguments)
        if problem is not None:
            self._tool_errors += 1
            return tool_text(None, problem)
        if call.name in self._answered_here:
            return self._answer_here(call)
        # The environment turns a slow tool into an error the policy reads; the margin lets it do so.
        async with self._timed("step", self._limits.deadlines.step + self._limits.deadlines.close):
            observation = await self._env.step_async({"tool": call.name, "params": call.arguments})
        if observation.error is not None:
            self._tool_errors += 1
        if observation.done:
            self._stop, self._env_reward = StopReason.ENV_DONE, observation.reward
        text = tool_text(observation.result, observation.error)
        self._context.remember(call.name, text)
        return bounded(text, self._rules.max_output_chars, VIEW_HINT if self._rules.context_tools else "")

    def _answer_here(self, call: ToolCall) -> str:
        try:
            return tool_text(self._context.call(call.name, call.arguments, self._turns))
        except ContextToolError as error:
            self._tool_errors += 1
            return tool_text(None, str(error))

    async def _grade(self) -> Outcome:
        """The verifier runs on every exit from an episode that began."""
        if not self._ready:
            return InfraFailed("reset: the episode's deadline passed before the environment was ready")
        if self._env_reward is not None:
            return Graded(float(self._env_reward))
        try:
            async with self._timed("verify", self._limits.deadlines.verify + ANSWER_MARGIN_S):
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

    async def _leave(self) -> None:
        """Close without keeping whoever cancelled the episode."""
        if self._env is None:
            return
        env, self._env = self._env, None
        self.phase = "close"
        closing = asyncio.ensure_future(env.close_async())
        _closing.add(closing)
        closing.add_done_callback(_closing.discard)
        with self._time_spent.inside("close", OWN_WORK):
            await asyncio.wait([closing], timeout=CANCEL_GRACE_S)

    @asynccontextmanager
    async def _timed(self, phase: str, seconds: float):
        """Bound a phase, record its time, and turn whatever goes wrong into a reason that names the phase."""
        self.phase = phase
        self._time_spent.move(OWN_WORK, phase)
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
            self._time_spent.move(phase, OWN_WORK)
            self._phase_s[phase] = self._phase_s.get(phase, 0.0) + time.monotonic() - begun

    def _trajectory(self, outcome: Outcome, duration: float) -> Trajectory:
        tokens, starts = self._tokens.flat()
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
            spans=merge_spans(self._tokens.spans),
            stop_reason=self._stop or StopReason.ERROR,
            outcome=outcome,
            turns=self._turns,
            tool_calls=self._tool_calls,
            tool_errors=self._tool_errors,
            started_at=self._started,
            duration_s=duration,
            phase_s=self._phase_s,
            messages=self._messages,
            starts=starts,
        )
        trajectory.validate()
        return trajectory
