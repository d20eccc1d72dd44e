"""A dialogue with a chat endpoint about one task, by the words of :mod:`actors.prompt`, and its record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from actors.prompt import CALL_FORMAT, system_text, tool_message, tool_text
from actors.task import Task
from actors.tool_calls import Turn, native_parser, parse_turn
from train.chat.protocol import Call, Reply

if TYPE_CHECKING:
    from train.chat.endpoint import ChatEndpoint

NOT_CARRIED_OUT = tool_text(None, "this call was not carried out")


class ChatDialogue:
    """What was said so far, in the endpoint's form and in that of an episode's messages.

    The endpoint reads the policy's system message, without the format of calls where it has one of its own, and the
    same task and observations. It takes messages of a tool only after calls in its own format: what answers calls in
    tags is a message of the user.

    Args:
        begun: what the environment said when the episode began; it stands below the task.

    Attributes:
        record: the messages as :class:`actors.episode.Episode` has them, every call in ``<tool_call>`` tags.
    """

    def __init__(
        self, endpoint: ChatEndpoint, task: Task, tools: list[dict[str, Any]], begun: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._tools = tools
        self.record: list[dict[str, Any]] = [
            {"role": "system", "content": _clean(_system(task, tools, endpoint.settings.tools))},
            {"role": "user", "content": _clean(task.prompt if begun is None else f"{task.prompt}\n\n{begun}")},
        ]
        self._messages = [dict(message) for message in self.record]
        self._call_ids: list[str] = []  # of the last turn, in the endpoint's own format

    async def ask(self) -> Reply:
        """The model's next turn; see :meth:`take`.

        Raises:
            EndpointFailed, EndpointGone, Overlong: see there.
        """
        return await self._endpoint.turn(self._messages, self._tools)

    def take(self, reply: Reply) -> Turn:
        """Make a reply part of the dialogue; returns what it means."""
        text = _clean(reply.text)
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if reply.calls:
            made = [_made(call) for call in reply.calls]
            message = {"role": "assistant", "content": text or None, "tool_calls": made}
        self._call_ids = [call.id for call in reply.calls]
        self._messages.append(message)
        self.record.append({"role": "assistant", "content": _clean(_as_sampled(reply))})
        if not reply.calls:
            return parse_turn(reply.text)
        return native_parser(lambda text: ([(call.name, call.arguments) for call in reply.calls], text))(reply.text)

    def answer(self, texts: list[str]) -> None:
        """Let the model read what its turn came to: a text for each call that was carried out, or one for the turn."""
        texts = [_clean(text) for text in texts]
        self.record += [tool_message(text) for text in texts]
        if not self._call_ids:
            self._messages.append({"role": "user", "content": "\n\n".join(texts)})
            return
        # Every call must be answered.
        texts += [NOT_CARRIED_OUT] * (len(self._call_ids) - len(texts))
        self._messages += [
            {"role": "tool", "tool_call_id": call_id, "content": text}
            for call_id, text in zip(self._call_ids, texts, strict=True)
        ]


def _system(task: Task, tools: list[dict[str, Any]], channel: str) -> str:
    if channel == "text":
        return system_text(task, tools, "text")
    # How calls are written is the endpoint's affair.
    return system_text(task, tools, "template").replace(f"{CALL_FORMAT}\n\n", "")


def _made(call: Call) -> dict[str, Any]:
    # Servers read arguments anew, and refuse a whole request for text of a model's that is no object.
    arguments = (call.arguments or "{}") if isinstance(_arguments(call), dict) else "{}"
    return {"id": call.id, "type": "function", "function": {"name": _clean(call.name), "arguments": _clean(arguments)}}


def _as_sampled(reply: Reply) -> str:
    """The turn as a policy would have written it."""
    thinking = f"<think>\n{reply.thinking}\n</think>\n\n" if reply.thinking else ""
    bodies = [json.dumps({"name": c.name, "arguments": _arguments(c)}, ensure_ascii=False) for c in reply.calls]
    return thinking + reply.text + "".join(f"<tool_call>{body}</tool_call>" for body in bodies)


def _arguments(call: Call) -> Any:
    """What the text says; the text itself where it is no JSON."""
    try:
        return json.loads(call.arguments or "{}")
    except (ValueError, RecursionError):
        return call.arguments


def _clean(text: str) -> str:
    """JSON can smuggle in halves of surrogate pairs, which are no text and which no request takes."""
    return text.encode("utf-8", "replace").decode()
