"""One attempt of a teacher at a task: the rules of :mod:`actors.episode`, over messages in place of token ids.

The teacher reads the policy's system message and the same observations, and ends in the same ways: a done signal, the
environment's own end, too many turns, too many tokens. It may make several calls in a turn, which are carried out in
order. Where the endpoint has tool calling of its own, calls go through it; calls in tags are read as well.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from actors.envs.fleet import FleetTaskEnv
from actors.episode import NO_CALL
from actors.prompt import CALL_FORMAT, bounded, system_text, tool_text
from actors.task import Task
from actors.tool_calls import ToolCall, parse_turn
from actors.tool_schema import schemas_of
from actors.trajectory import StopReason
from train.data.teacher import Overlong, Reply

if TYPE_CHECKING:
    from train.data.chat_endpoint import ChatEndpoint


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
        self._tools = tools
        self._teacher = teacher
        self._settings = teacher.settings
        self._schemas = schemas_of(tools)
        self._messages = [
            {"role": "system", "content": _system(task, tools, self._settings.tools)},
            {"role": "user", "content": task.prompt},
        ]
        # The same in the form in which verifiers know a policy's dialogue.
        self.conversation = [dict(message) for message in self._messages]
        self.answer: str | None = None
        self.stop: StopReason | None = None
        self.usage = usage

    async def run(self) -> None:
        """The dialogue, to its end. What it came to is in ``stop``, ``answer`` and ``conversation``.

        Raises:
            TeacherFailed, TeacherGone: the endpoint did not answer.
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
        reply = await self._teacher.turn(self._messages, self._tools)
        usage.turns += 1
        usage.prompt_tokens += reply.prompt_tokens
        usage.completion_tokens += reply.completion_tokens
        return reply

    async def _act(self, reply: Reply) -> None:
        if reply.finish_reason in ("length", "content_filter"):
            self._said(reply.text)
            self.stop = StopReason.LENGTH
        elif reply.calls:
            await self._act_on_native(reply)
        else:
            await self._act_on_text(reply.text)

    async def _act_on_native(self, reply: Reply) -> None:
        made = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
            for c in reply.calls
        ]
        self._messages.append({"role": "assistant", "content": reply.text or None, "tool_calls": made})
        calls = [_read(call.name, call.arguments) for call in reply.calls]
        shown = "".join(
            f"<tool_call>{json.dumps({'name': c.name, 'arguments': c.arguments})}</tool_call>" for c in reply.calls
        )
        self.conversation.append({"role": "assistant", "content": f"{reply.text}{shown}"})
        for call, text in zip(reply.calls, await self._call_all(calls), strict=True):
            self._messages.append({"role": "tool", "tool_call_id": call.id, "content": text})
            self.conversation.append({"role": "tool", "content": text})

    async def _act_on_text(self, text: str) -> None:
        self._said(text)
        turn = parse_turn(text)
        if turn.calls and turn.error is None:
            self._observe(*await self._call_all(list(turn.calls)))
        elif turn.done:
            self.stop, self.answer = StopReason.DONE, turn.answer
        else:
            self.usage.tool_errors += turn.error is not None
            self._observe(tool_text(None, turn.error or NO_CALL))

    def _said(self, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text})
        self.conversation.append({"role": "assistant", "content": text})

    def _observe(self, *texts: str) -> None:
        """An endpoint takes messages of a tool only after calls in its own format."""
        self._messages.append({"role": "user", "content": "\n\n".join(texts)})
        self.conversation += [{"role": "tool", "content": text} for text in texts]

    async def _call_all(self, calls: list[ToolCall | str]) -> list[str]:
        limit = max(1, self._settings.max_output_chars // len(calls))
        return [bounded(await self._call(call), limit) for call in calls]

    async def _call(self, call: ToolCall | str) -> str:
        """The text that answers a call; a text in place of a call says why it is none."""
        if self.stop is not None:
            return tool_text(None, "the task had ended before this call")
        self.usage.tool_calls += 1
        problem = call if isinstance(call, str) else self._schemas.problem(call.name, call.arguments)
        if problem is not None:
            self.usage.tool_errors += 1
            return tool_text(None, problem)
        observation = await self._env.step_async({"tool": call.name, "params": call.arguments})
        self.usage.tool_errors += observation.error is not None
        if observation.done:
            self.stop = StopReason.ENV_DONE
        return tool_text(observation.result, observation.error)


def _system(task: Task, tools: list[dict[str, Any]], channel: str) -> str:
    if channel == "text":
        return system_text(task, tools, "text")
    # How calls are written is the endpoint's affair.
    return system_text(task, tools, "template").replace(f"{CALL_FORMAT}\n\n", "")


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")  # Python's reader takes NaN and Infinity, which no tool does


def _read(name: str, arguments: str) -> ToolCall | str:
    try:
        value = json.loads(arguments or "{}", parse_constant=_refuse)
    except (ValueError, RecursionError):
        return "the arguments are not a complete JSON object"
    return ToolCall(name, value) if isinstance(value, dict) else "the arguments must be a JSON object"
