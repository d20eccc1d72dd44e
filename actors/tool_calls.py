"""Reading what the policy wrote: one tool call, a done signal, both malformed, or neither.

The parser decodes JSON from the tag onwards, so ``</tool_call>`` inside a string is not an end. Thinking is not read,
and a ``<done>`` inside thinking or inside a call's arguments is not a done signal.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

CALL_TAGS = ("tool_call", "function_call")
DONE = "<done>"
MAX_REPAIRED_BRACES = 3

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_OPEN = re.compile("|".join(f"<{tag}>" for tag in CALL_TAGS))


@dataclass(frozen=True)
class ToolCall:
    """A call the policy made: ``arguments`` is always a JSON object."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Turn:
    """What one sampled turn means.

    Attributes:
        calls: the well-formed calls, in order.
        done: a done signal stands outside thinking and outside any call.
        answer: the text around calls and done signal, stripped: the final answer where ``done`` is set.
        error: what is wrong with a malformed call, in words the policy can act on; ``None`` when nothing is.
    """

    calls: tuple[ToolCall, ...] = ()
    done: bool = False
    answer: str = ""
    error: str | None = None


def parse_turn(text: str) -> Turn:
    """Read one sampled turn. Never raises: whatever is malformed becomes ``Turn.error``."""
    visible = _THINK.sub("", text)
    # A template may open the thinking block in the prompt, so only its end is sampled.
    if "</think>" in visible:
        visible = visible.rsplit("</think>", 1)[1]
    calls: list[ToolCall] = []
    outside: list[str] = []
    position = 0
    error: str | None = None
    while (opened := _OPEN.search(visible, position)) is not None:
        outside.append(visible[position : opened.start()])
        call, position, error = _read_call(visible, opened.end(), opened.group()[1:-1])
        if error is not None:
            # What follows a call that cannot be read may still be inside its arguments.
            position = len(visible)
            break
        calls.append(call)
    outside.append(visible[position:])
    rest = "".join(outside)
    done = DONE in rest.lower()
    answer = re.sub(re.escape(DONE), "", rest, flags=re.IGNORECASE).strip()
    return Turn(calls=tuple(calls), done=done and error is None, answer=answer, error=error)


def _read_call(text: str, start: int, tag: str) -> tuple[ToolCall | None, int, str | None]:
    """Decode one call whose JSON begins at ``start``. Returns the call, where reading goes on, and an error."""
    body = text[start:]
    stripped = body.lstrip()
    offset = start + len(body) - len(stripped)
    try:
        value, end = json.JSONDecoder().raw_decode(stripped)
    except (ValueError, RecursionError):
        value, end = _decode_repaired(stripped, tag)
        if value is None:
            return None, offset, f"the text after <{tag}> is not a complete JSON object"
    if not isinstance(value, dict):
        return None, offset, f"a tool call must be a JSON object, not {_kind(value)}"
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not name:
        return None, offset, "a tool call needs a string 'name'"
    arguments = value.get("arguments", value.get("params", {}))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None, offset, f"'arguments' must be a JSON object, not {_kind(arguments)}"
    position = offset + end
    closing = re.match(rf"\s*\}}{{0,{MAX_REPAIRED_BRACES}}}\s*</{tag}>", text[position:])
    if closing is not None:
        position += closing.end()
    return ToolCall(name, arguments), position, None


def _decode_repaired(text: str, tag: str) -> tuple[Any, int]:
    """The one repair: up to three closing braces missing before the closing tag (or the end) are added."""
    close = text.rfind(f"</{tag}>")
    body = (text if close < 0 else text[:close]).rstrip()
    for missing in range(1, MAX_REPAIRED_BRACES + 1):
        try:
            value = json.loads(body + "}" * missing)
        except (ValueError, RecursionError):
            continue
        return value, len(body)
    return None, 0


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
