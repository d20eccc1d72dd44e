"""Reading what the policy wrote: one tool call, a done signal, both malformed, or neither.

The parser decodes JSON from the tag onwards, so ``</tool_call>`` inside a string is not an end. Thinking is not read,
and a ``<done>`` inside thinking or inside a call's arguments is not a done signal.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

CALL_TAGS = ("tool_call", "function_call")
DONE = "<done>"
MAX_REPAIRED_BRACES = 3

_THINK = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_OPEN = re.compile("|".join(f"<{tag}>" for tag in CALL_TAGS))


def _refuse_constant(name: str) -> Any:
    # Python's decoder takes NaN and Infinity, which no tool server does.
    raise ValueError(f"{name} is not JSON")


def _finite(digits: str) -> float:
    # 1e999 is JSON, but the infinity it is read as could not be sent on.
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"{digits} is too large")
    return number


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, parse_float=_finite)


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


Parser = Callable[[str], Turn]
# A model family's own format: text in; the calls as (name, arguments as JSON text) and the text around them out.
Extract = Callable[[str], tuple[list[tuple[str, str]], str]]


def parse_turn(text: str) -> Turn:
    """Read one sampled turn. Never raises: whatever is malformed becomes ``Turn.error``."""
    visible = _without_thinking(text)
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
    return _turn(calls, "".join(outside), error)


def native_parser(extract: Extract) -> Parser:
    """A parser for calls in a model family's own format; thinking and the done signal are read as ever."""

    def parse(text: str) -> Turn:
        try:
            found, outside = extract(_without_thinking(text))
        except Exception as failure:
            # The families' parsers are not ours: what one of them cannot read is the policy's to mend.
            return Turn(error=f"the tool call cannot be read ({type(failure).__name__})")
        calls: list[ToolCall] = []
        error: str | None = None
        for name, arguments in found:
            call, error = _checked({"name": name, "arguments": _native_arguments(arguments)})
            if error is not None:
                break
            calls.append(call)
        return _turn(calls, outside, error)

    return parse


def _native_arguments(text: str) -> Any:
    try:
        return _DECODER.decode(text.strip() or "{}")
    except (ValueError, RecursionError):
        return text  # refused as "not an object"


def _without_thinking(text: str) -> str:
    visible = _THINK.sub("", text)
    # A template may open the thinking block in the prompt, so only its end is sampled.
    return visible.rsplit("</think>", 1)[1] if "</think>" in visible else visible


def _turn(calls: list[ToolCall], outside: str, error: str | None) -> Turn:
    done = DONE in outside.lower()
    answer = re.sub(re.escape(DONE), "", outside, flags=re.IGNORECASE).strip()
    return Turn(calls=tuple(calls), done=done and error is None, answer=answer, error=error)


def _read_call(text: str, start: int, tag: str) -> tuple[ToolCall | None, int, str | None]:
    """Decode one call whose JSON begins at ``start``. Returns the call, where reading goes on, and an error."""
    body = text[start:]
    stripped = body.lstrip()
    offset = start + len(body) - len(stripped)
    try:
        value, end = _DECODER.raw_decode(stripped)
    except (ValueError, RecursionError):
        value, end = _decode_repaired(stripped, tag)
        if value is None:
            return None, offset, f"the text after <{tag}> is not a complete JSON object"
    call, error = _checked(value)
    if error is not None:
        return None, offset, error
    position = offset + end
    closing = re.match(rf"\s*\}}{{0,{MAX_REPAIRED_BRACES}}}\s*</{tag}>", text[position:])
    if closing is not None:
        position += closing.end()
    return call, position, None


def _checked(value: Any) -> tuple[ToolCall | None, str | None]:
    """A decoded call as such, or what is wrong with it."""
    if not isinstance(value, dict):
        return None, f"a tool call must be a JSON object, not {_kind(value)}"
    name = value.get("name", value.get("tool"))
    if not isinstance(name, str) or not name:
        return None, "a tool call needs a string 'name'"
    arguments = value.get("arguments", value.get("params", {}))
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        return None, f"'arguments' must be a JSON object, not {_kind(arguments)}"
    return ToolCall(name, arguments), None


def _decode_repaired(text: str, tag: str) -> tuple[Any, int]:
    """The one repair: up to three closing braces missing before the closing tag (or the end) are added."""
    close = text.rfind(f"</{tag}>")
    body = (text if close < 0 else text[:close]).rstrip()
    for missing in range(1, MAX_REPAIRED_BRACES + 1):
        try:
            value = _DECODER.decode(body + "}" * missing)
        except (ValueError, RecursionError):
            continue
        return value, len(body)
    return None, 0


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")
