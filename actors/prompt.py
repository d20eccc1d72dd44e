"""The dialogue: what the policy reads before its first turn and after each tool call, as text and as token ids.

Ids are never obtained by re-tokenising sampled text: the first prompt is rendered once, and each observation is
rendered on its own and appended (architecture, "token exact").
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from functools import lru_cache
from typing import Any, Literal

from actors.task import Task

ToolsChannel = Literal["text", "template"]

ROLE = "You are an agent that completes tasks by calling tools."
CALL_FORMAT = '## Tool Call Format\n<tool_call>{"name": "tool_name", "arguments": {"param": "value"}}</tool_call>'
ERROR_HANDLING = (
    "## Error Handling\nAfter an error, read it and change your approach. Never repeat a call with the same arguments."
)
RESPONSE_FORMAT = (
    "## Response Format\n"
    "End every turn with exactly one tool call, or with <done>. "
    "When the task is complete, write the final answer first, then <done>."
)
NO_IMAGE = "[an image, which this policy cannot see]"
OPENINGS_KEPT = 256
NO_DATE = "2024-07-26"  # what templates that write today's date are told where a task has none
_NAMED_VARIABLES = {"LOGGED_IN_USER": "Logged in user ID", "LOGGED_IN_NAME": "Logged in as"}
# A finished exchange that observations are rendered behind. What the template writes before the end of this turn is cut
# off again, whatever it is: Qwen3's template adds an empty thinking block there or not, depending on what follows.
_TURN = "a-finished-turn"
_EXCHANGE = [{"role": "user", "content": "task"}, {"role": "assistant", "content": _TURN}]


class PromptError(ValueError):
    """The tokenizer's chat template cannot carry the dialogue. The message says what is missing."""


def system_text(task: Task, tools: list[dict[str, Any]], tools_channel: ToolsChannel) -> str:
    """The system message. Only the task and its tools decide it, never the clock.

    Args:
        tools: OpenAI function format, as :meth:`FleetTaskEnv.reset` returns them.
        tools_channel: ``text`` writes the schemas here; ``template`` leaves them to the chat template's ``tools=``.
    """
    sections = [ROLE]
    variables = dict(task.env_variables)
    date = variables.pop("CURRENT_DATE", None)
    if date:
        sections.append(f"## Current Date\n{date}")
    if variables:
        lines = [f"{_NAMED_VARIABLES.get(name, name)}: {value}" for name, value in sorted(variables.items())]
        sections.append("## Environment Context\n" + "\n".join(lines))
    if tools_channel == "text":
        sections.append("## Available Tools\n" + json.dumps(tools, indent=2))
    sections += [CALL_FORMAT, ERROR_HANDLING, RESPONSE_FORMAT]
    return "\n\n".join(sections)


def tool_text(content: Any, error: str | None = None) -> str:
    """A tool's result, or its error, as the text the policy reads."""
    if error is not None:
        return f"Error: {error}"
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(_is_block(item) for item in content):
        return "\n".join(block["text"] if block["type"] == "text" else NO_IMAGE for block in content)
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False)


def _is_block(item: Any) -> bool:
    if not isinstance(item, dict):
        return False
    return item.get("type") == "image_url" or (item.get("type") == "text" and isinstance(item.get("text"), str))


def bounded(text: str, limit: int, hint: str = "") -> str:
    """At most ``limit`` characters of a tool's output, with a note of what was cut."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[the last {len(text) - limit:,} of {len(text):,} characters are cut{hint}]"


def tool_message(content: Any, error: str | None = None) -> dict[str, Any]:
    """A tool's result, or its error, as the message the policy reads next."""
    return {"role": "tool", "content": tool_text(content, error)}


class Prompter:
    """Renders a dialogue with one tokenizer's chat template.

    Args:
        tokenizer: a Hugging Face tokenizer with a chat template.
        tools_channel: see :func:`system_text`.
        template_kwargs: passed to the chat template, for example ``{"enable_thinking": False}``.
    """

    def __init__(self, tokenizer: Any, tools_channel: ToolsChannel = "text", template_kwargs: dict | None = None):
        if not getattr(tokenizer, "chat_template", None):
            raise PromptError("the tokenizer has no chat template")
        if tokenizer.eos_token_id is None:
            raise PromptError("the tokenizer has no end-of-sequence token")
        self.tokenizer = tokenizer
        self.tools_channel: ToolsChannel = tools_channel
        self.template_kwargs = dict(template_kwargs or {})
        # All episodes of a group begin alike, and an opening takes a millisecond or more to render and encode.
        self._opening = lru_cache(OPENINGS_KEPT)(self._encode_opening)
        self.observation([])  # a template that cannot carry observations must fail before a run starts

    def first(
        self, task: Task, tools: list[dict[str, Any]], begun: str | None = None
    ) -> tuple[list[dict[str, Any]], list[int]]:
        """The opening messages and their token ids, generation prompt included.

        ``begun``: what the environment said when the episode began; it stands below the task.
        """
        messages = [
            {"role": "system", "content": system_text(task, tools, self.tools_channel)},
            {"role": "user", "content": task.prompt if begun is None else f"{task.prompt}\n\n{begun}"},
        ]
        return messages, self.opening(messages, tools, str(task.env_variables.get("CURRENT_DATE") or NO_DATE))

    def opening(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]], date: str = NO_DATE) -> list[int]:
        """Token ids of the messages before the first turn, generation prompt included.

        ``date``: in ISO format, for a chat template that writes today's.
        """
        in_template = tools if self.tools_channel == "template" and tools else None
        return list(self._opening(json.dumps([messages, in_template, date])))

    def _encode_opening(self, what: str) -> tuple[int, ...]:
        messages, tools, date = json.loads(what)
        return tuple(self.encode(self._render(messages, generation=True, tools=tools, date=date)))

    def observation(self, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of the messages that follow a turn that ended in the end-of-sequence token.

        They begin with whatever the template writes after that token (usually a newline) and end with the generation
        prompt, so that appending them to the episode's ids gives the next prompt.
        """
        text = self._render(_EXCHANGE + messages, generation=True)
        _, found, rest = text.partition(_TURN)
        _, ended, following = rest.partition(self.tokenizer.eos_token)
        if not found or not ended:
            raise PromptError(
                f"the chat template does not end an assistant turn with {self.tokenizer.eos_token!r}, "
                "the tokenizer's end-of-sequence token"
            )
        return self.encode(following)

    def encode(self, text: str) -> list[int]:
        # JSON can smuggle in halves of surrogate pairs, which are no text and which no tokenizer takes.
        return self.tokenizer.encode(text.encode("utf-8", "replace").decode(), add_special_tokens=False)

    def decode(self, ids: list[int], keep_special: bool = False) -> str:
        """Sampled ids as text, without the end-of-sequence token and, unless they are kept, other special tokens."""
        if not keep_special:
            return self.tokenizer.decode(ids, skip_special_tokens=True)
        eos = self.tokenizer.eos_token_id
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] == eos else ids, skip_special_tokens=False)

    def _render(
        self, messages: list[dict], generation: bool, tools: list[dict] | None = None, date: str = NO_DATE
    ) -> str:
        template = without_clock(self.tokenizer.get_chat_template(tools=tools), date)
        return self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=generation,
            **({"chat_template": template} | self.template_kwargs),
        )


def without_clock(template: str, date: str) -> str:
    """A chat template that writes ``date`` where it would write today's, as those of Llama 3 and others do.

    Args:
        date: in ISO format; one that is not is written as it is.

    Raises:
        PromptError: the template reads the clock in another way.
    """

    if "strftime_now" not in template:
        return template

    def written(call: re.Match[str]) -> str:
        try:
            return json.dumps(datetime.fromisoformat(date).strftime(call[2]))
        except ValueError:
            return json.dumps(date)

    still = re.sub(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""", written, template)
    if re.search(r"strftime_now\s*\(", still):
        raise PromptError("the chat template reads the clock, so that prompts would differ from day to day")
    return still
