"""One recorded episode, whatever wrote it: what the policy was told, what it wrote turn by turn, and what it read.

Dumps in SkyRL's format hold the dialogue as two texts full of role headers; they are cut here into turns. The headers
of several model families are known (``_HEADER``). Calls and done signals are read as the episodes themselves read them
(:mod:`actors.tool_calls`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from actors.tool_calls import Turn as ParsedTurn
from actors.tool_calls import parse_turn

# Qwen and most others (ChatML); Llama 3; Gemma; GLM 4 and Phi.
_HEADER = re.compile(
    r"<\|im_start\|>(\w+)\n"
    r"|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n"
    r"|<start_of_turn>(\w+)\n"
    r"|<\|(system|user|assistant|observation)\|>\n?"
)
_ENDS = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>", "<|endoftext|>", "</s>")
_POLICY_ROLES = ("assistant", "model")
_THINK = re.compile(r"<think>(.*?)(?:</think>|\Z)", re.DOTALL)
_WRAPPER = re.compile(r"\A\s*<tool_response>\n?(.*?)\n?</tool_response>\s*\Z", re.DOTALL)
_RESULT_PREFIX = "Tool result:"  # SkyRL writes it before each result


@dataclass(slots=True)
class Turn:
    """What the policy wrote, and what it read next; ``observation`` is ``None`` where the episode ended before that."""

    text: str
    observation: str | None
    parsed: ParsedTurn = field(init=False, repr=False)
    thinking: str = field(init=False, repr=False)
    error: str | None = field(init=False, repr=False)  # what the observation says went wrong

    def __post_init__(self) -> None:
        self.parsed = parse_turn(self.text)
        self.thinking = thinking_of(self.text)
        self.error = error_text(self.observation)

    @property
    def visible(self) -> str:
        """What was written outside thinking, calls included."""
        text = _THINK.sub("", self.text)
        return text.rsplit("</think>", 1)[-1].strip()

    @property
    def says_done(self) -> bool:
        # SkyRL takes "[done]" as well.
        return self.parsed.done or "[done]" in self.parsed.answer.lower()


@dataclass(frozen=True)
class Episode:
    """One attempt at one task.

    Attributes:
        step: optimiser step of the evaluation or of the training batch.
        label: of an evaluation, usually ``sampled`` or ``greedy``; ``train`` of a training batch.
        reward: ``None`` if the verifier did not answer; the reward is then unknown, not zero.
        prompt: all that the policy was told before its first turn, as ``(role, text)``.
        max_turns: the limit, where the record tells it.
        tokens: of prompt and response, or of the response alone where only that is known; 0: unknown.
        source: file and position in it, to find the episode again.
        recorded_tokens: where they were recorded: ``ids``, ``mask``, ``logprobs``, ``spans``, ``starts``.
    """

    env: str
    task: str
    step: int
    label: str
    reward: float | None
    stop_reason: str
    prompt: tuple[tuple[str, str], ...]
    turns: Sequence[Turn]
    max_turns: int | None = None
    tokens: int = 0
    not_graded: str | None = None
    source: tuple[int, int] = (0, 0)
    recorded_tokens: dict[str, Any] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        return sum(len(turn.parsed.calls) for turn in self.turns)


def thinking_of(text: str) -> str:
    """What stands inside thinking tags. A template may open the block in the prompt, so only its end is in the text."""
    if "think>" not in text:
        return ""
    head, closed, rest = text.partition("</think>")
    if closed and "<think>" not in head:
        return "\n".join([head, *_THINK.findall(rest)])
    return "\n".join(_THINK.findall(text))


def error_text(observation: str | None) -> str | None:
    """What a tool's result says went wrong, or ``None`` for a result that is no error.

    An error begins with ``Error`` or is a JSON object whose ``error`` or ``isError`` is set.
    """
    if not observation:
        return None
    text = observation.lstrip()
    if text[:6].lower() in ("error:", "error "):
        return text
    if text.startswith("{") and ('"error"' in text or '"isError"' in text):
        return _error_field(text)
    return None


def _error_field(text: str) -> str | None:
    try:
        value = json.loads(text)
        error = value.get("error") or (value.get("isError") and text)
        return error if isinstance(error, str) else json.dumps(error, ensure_ascii=False) if error else None
    except (ValueError, RecursionError):  # no JSON, or nested too deeply
        return None


def turns_of_text(prompt: str, response: str) -> list[Turn]:
    """Cut a decoded response into turns. Where it holds no role header of a known family, it is one turn."""
    segments = _segments(_generation_prefix(prompt) + response, "assistant")
    return _paired([(role in _POLICY_ROLES, text) for role, text in segments])


def messages_of_prompt(prompt: str) -> tuple[tuple[str, str], ...]:
    """A decoded prompt as ``(role, text)``; one of no known model family has the role ``prompt``."""
    return tuple((role, text.strip()) for role, text in _segments(prompt, "prompt") if text)


def _segments(text: str, first: str) -> list[tuple[str, str]]:
    """Text cut at role headers, as ``(role, text)``; what stands before any header has the role ``first``."""
    pieces = _HEADER.split(text)
    # split gives: text, then for each header one group per family (one of them set), then text again
    width = _HEADER.groups + 1
    segments = [(first, _without_end(pieces[0]))]
    for start in range(1, len(pieces), width):
        role = next(group for group in pieces[start : start + width - 1] if group)
        segments.append((role, _without_end(pieces[start + width - 1])))
    return segments


def _without_end(text: str) -> str:
    """A segment without the marks of its end, which a template may write twice."""
    text = text.rstrip()
    while text.endswith(_ENDS):
        text = text[: text.rindex("<")].rstrip()
    return text


def split_messages(messages: Sequence[dict[str, Any]]) -> tuple[tuple[tuple[str, str], ...], list[Turn]]:
    """The prompt and the turns of a dialogue in messages. Notes of our own are left out."""
    first = next((i for i, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    prompt = tuple((message["role"], _content(message)) for message in messages[:first])
    segments = [(m["role"] == "assistant", _content(m)) for m in messages[first:] if m["role"] != "note"]
    return prompt, _paired(segments)


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(block.get("text", "[image]")) for block in content if isinstance(block, dict))
    return "" if content is None else str(content)


def _generation_prefix(prompt: str) -> str:
    """What the template had the policy's first turn begin with, such as ``<think>``."""
    return _HEADER.split(prompt)[-1] if prompt.rstrip().endswith("<think>") else ""


def _paired(segments: list[tuple[bool, str]]) -> list[Turn]:
    """Turns from ``(by the policy, text)``. What the policy reads between two turns is one observation."""
    turns: list[Turn] = []
    text: str | None = None
    read: list[str] = []
    for by_policy, content in segments:
        if not by_policy:
            read.append(_result(content))
            continue
        if text is not None:
            turns.append(Turn(text, "\n".join(read) if read else None))
        text, read = content, []
    # An empty last turn is a generation prompt that nothing was sampled after.
    if text is not None and (text.strip() or read):
        turns.append(Turn(text, "\n".join(read) if read else None))
    return turns


def _result(content: str) -> str:
    unwrapped = _WRAPPER.match(content)
    text = unwrapped[1] if unwrapped else content
    return text.removeprefix(_RESULT_PREFIX).strip()
