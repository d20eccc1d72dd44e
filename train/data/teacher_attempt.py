"""One attempt of a teacher at a task: the rules of :mod:`actors.episode`, over messages in place of token ids.

The teacher reads the policy's system message and the same observations, and ends in the same ways: a done signal, the
environment's own end, too many turns, too many tokens. It may make several calls in a turn, which are carried out in
order. Where the endpoint has tool calling of its own, calls go through it; calls in tags are read as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.envs.fleet import FleetTaskEnv
from actors.episode import NO_CALL
from actors.prompt import bounded, tool_text
from actors.task import Task
from actors.tool_calls import ToolCall
from actors.tool_schema import schemas_of
from actors.trajectory import StopReason
from train.chat.dialogue import ChatDialogue
from train.chat.protocol import Overlong, Reply

if TYPE_CHECKING:
    from train.chat.endpoint import ChatEndpoint


@dataclass
class Usage:
    """What an attempt took. Tokens are those that the endpoint counted; 0 where it counts none."""

    requests: int = 0
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0


class TeacherAttempt:
    """A dialogue between teacher and environment.

    Args:
        env: reset, with ``tools``.
        usage: is added to, so that it is known of a dialogue that is cut off as well.
    """

    def __init__(
        self,
        task: Task,
        env: FleetTaskEnv,
        tools: list[dict[str, Any]],
        teacher: ChatEndpoint,
        usage: Usage,
    ) -> None:
        self._env = env
        self._settings = teacher.settings
        self._schemas = schemas_of(tools)
        self._dialogue = ChatDialogue(teacher, task, tools)
        self.answer: str | None = None
        self.stop: StopReason | None = None
        self.usage = usage

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """In the form in which verifiers know a policy's dialogue."""
        return self._dialogue.record

    async def run(self) -> None:
        """The dialogue, to its end. What it came to is in ``stop``, ``answer`` and ``conversation``.

        Raises:
            EndpointFailed, EndpointGone: the endpoint did not answer.
        """
        while self.stop is None:
            try:
                reply = await self._reply()
            except Overlong:
                self.stop = StopReason.LENGTH
                return
            await self._act(reply)
            if self.stop is None and self.usage.turns >= self._settings.max_turns:
                self.stop = StopReason.MAX_TURNS
            if self.stop is None and reply.prompt_tokens + reply.completion_tokens > self._settings.max_input_tokens:
                self.stop = StopReason.LENGTH

    async def _reply(self) -> Reply:
        usage = self.usage
        usage.requests += 1
        reply = await self._dialogue.ask()
        usage.turns += 1
        usage.prompt_tokens += reply.prompt_tokens
        usage.completion_tokens += reply.completion_tokens
        return reply

    async def _act(self, reply: Reply) -> None:
        turn = self._dialogue.take(reply)
        if reply.finish_reason in ("length", "content_filter"):
            self.stop = StopReason.LENGTH
        elif turn.calls and turn.error is None:
            self._dialogue.answer(await self._call_all(turn.calls))
        elif turn.done:
            self.stop, self.answer = StopReason.DONE, turn.answer
        else:
            self.usage.tool_errors += turn.error is not None
            self._dialogue.answer([tool_text(None, turn.error or NO_CALL)])

    async def _call_all(self, calls: Sequence[ToolCall]) -> list[str]:
        limit = max(1, self._settings.max_output_chars // len(calls))
        return [bounded(await self._call(call), limit) for call in calls]

    async def _call(self, call: ToolCall) -> str:
        """The text that answers a call."""
        if self.stop is not None:
            return tool_text(None, "the task had ended before this call")
        self.usage.tool_calls += 1
        problem = self._schemas.problem(call.name, call.arguments)
        if problem is not None:
            self.usage.tool_errors += 1
            return tool_text(None, problem)
        observation = await self._env.step_async({"tool": call.name, "params": call.arguments})
        self.usage.tool_errors += observation.error is not None
        if observation.done:
            self.stop = StopReason.ENV_DONE
        return tool_text(observation.result, observation.error)
