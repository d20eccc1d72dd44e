"""A stored dialogue, turn by turn: what was thought, said and called, and what came back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from actors.episode import MANY_CALLS
from actors.prompt import tool_text
from actors.tool_calls import ToolCall, parse_turn

# Messages that no policy read: notes of the episode to whoever reads its record.
UNREAD_ROLES = ("note",)


@dataclass(frozen=True)
class DialogueTurn:
    """One turn of the policy.

    Attributes:
        text: as it was sampled.
        thinking: the part before the end of thinking, without its tags.
        answer: the text around thinking, calls and done signal.
        calls: the well-formed calls in ``<tool_call>`` tags, in order; a family's own format stays part of ``answer``.
        done: the policy said that it was done.
        error: what was wrong with a malformed call.
        observations: the texts that answered the turn; none after the last one.
        refused: there were several calls, and the episode carried none of them out.
    """

    text: str
    thinking: str
    answer: str
    calls: tuple[ToolCall, ...]
    done: bool
    error: str | None
    observations: tuple[str, ...]
    refused: bool


def split_dialogue(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[DialogueTurn]]:
    """The opening messages, and the turns."""
    read = [message for message in messages if message["role"] not in UNREAD_ROLES]
    bounds = [index for index, message in enumerate(read) if message["role"] == "assistant"] + [len(read)]
    return read[: bounds[0]], [_turn(read[begin:end]) for begin, end in pairwise(bounds)]


def _turn(messages: Sequence[dict[str, Any]]) -> DialogueTurn:
    text = content_text(messages[0])
    turn = parse_turn(text)
    observations = tuple(content_text(message) for message in messages[1:])
    # JSON can smuggle in halves of surrogate pairs, which no file takes.
    calls = tuple(replace(call, name=call.name.encode("utf-8", "replace").decode()) for call in turn.calls)
    # The status of the context may follow the words of the refusal.
    refused = bool(observations) and observations[0].startswith(tool_text(None, MANY_CALLS.format(n=len(calls))))
    return DialogueTurn(text, _thinking(text), turn.answer, calls, turn.done, turn.error, observations, refused)


def _thinking(text: str) -> str:
    before, ended, _ = text.rpartition("</think>")
    if not ended:
        _, _, before = text.partition("<think>")
    return before.replace("<think>", "").strip()


def content_text(message: dict[str, Any]) -> str:
    """The content of a message as text: of content blocks, those that are text."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(block["text"]) for block in content if isinstance(block, dict) and "text" in block)
    return "" if content is None else str(content)
