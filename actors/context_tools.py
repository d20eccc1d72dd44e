"""Tools by which the policy manages its own context. They are answered here and never reach the environment.

``manage_context`` really changes what the policy reads next: system and task messages stay, older turns go. The other
tools find again what went, or what was cut from a long tool output.
"""

from __future__ import annotations

import math
from typing import Any

import regex

from actors.token_record import TokenRecord

# A pattern is the policy's own text: one that backtracks for ever must not hold up the other episodes.
SEARCH_TIMEOUT_S = 0.1
MAX_MATCHES = 10
MATCH_CONTEXT_CHARS = 100
DEFAULT_PAGE_CHARS = 5000


def _tool(name: str, description: str, properties: dict[str, Any], required: tuple[str, ...] = ()) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


_PATTERN = {"type": "string", "minLength": 1, "description": "regular expression; case does not matter"}

CONTEXT_TOOLS: tuple[dict[str, Any], ...] = (
    _tool("check_context", "Tokens and turns used so far, and their limits.", {}),
    _tool(
        "manage_context",
        "Free context: forget all turns but the most recent ones. The task itself is kept.",
        {"keep_recent_turns": {"type": "integer", "minimum": 0, "description": "finished turns to keep"}},
        ("keep_recent_turns",),
    ),
    _tool(
        "search_history",
        "Search everything said and read so far, forgotten turns included.",
        {"pattern": _PATTERN},
        ("pattern",),
    ),
    _tool(
        "search_tool_output",
        "Search the complete tool outputs, parts that were cut included.",
        {"pattern": _PATTERN},
        ("pattern",),
    ),
    _tool(
        "view_tool_output",
        "Read the complete output of a tool call page by page; by default of the last one.",
        {
            "page": {"type": "integer", "minimum": 1},
            "output": {"type": "integer", "minimum": 1, "description": "number of the tool output, 1 is the first"},
        },
    ),
)
CONTEXT_TOOL_NAMES = frozenset(tool["function"]["name"] for tool in CONTEXT_TOOLS)


class ContextToolError(ValueError):
    """The call cannot be carried out. The message is what the policy reads."""


class ContextTools:
    """The context tools of one episode.

    Args:
        tokens: the episode's record; ``manage_context`` shortens its current sequence.
        messages: all messages of the episode so far, in order; the episode goes on appending to this list.
        max_tokens, max_turns: the episode's limits, as ``check_context`` reports them.
    """

    def __init__(self, tokens: TokenRecord, messages: list[dict[str, Any]], *, max_tokens: int, max_turns: int) -> None:
        self._tokens = tokens
        self._messages = messages
        self._max_tokens = max_tokens
        self._max_turns = max_turns
        self._outputs: list[tuple[str, str]] = []  # of the environment's tools: name and whole text

    def remember(self, tool: str, output: str) -> None:
        """Keep the complete output of an environment's tool."""
        self._outputs.append((tool, output))

    def call(self, name: str, arguments: dict[str, Any], turn: int) -> Any:
        """Answer a call of one of :data:`CONTEXT_TOOLS`, made in turn number ``turn`` (1 is the first).

        Raises:
            ContextToolError: with what to change.
        """
        if name == "check_context":
            return self._check(turn)
        if name == "manage_context":
            return self._manage(arguments["keep_recent_turns"])
        if name == "view_tool_output":
            return self._view(arguments.get("page") or 1, arguments.get("output") or len(self._outputs))
        texts = self._history() if name == "search_history" else self._numbered_outputs()
        return self._search(arguments["pattern"], texts)

    def status(self, turn: int) -> str:
        """One line for the end of an observation."""
        used = len(self._tokens.ids)
        share = 100 * used / self._max_tokens
        return f"[Context: {used:,}/{self._max_tokens:,} tokens ({share:.0f}%), turn {turn}/{self._max_turns}]"

    def _check(self, turn: int) -> dict[str, Any]:
        return {
            "tokens": len(self._tokens.ids),
            "max_tokens": self._max_tokens,
            "turn": turn,
            "max_turns": self._max_turns,
            "turns_in_context": self._tokens.turns,
            "tool_outputs": len(self._outputs),
        }

    def _manage(self, keep: int) -> dict[str, Any]:
        before = len(self._tokens.ids)
        forgotten = self._tokens.keep_recent(keep + 1)  # and the turn that asks
        return {
            "forgotten_turns": forgotten,
            "turns_in_context": self._tokens.turns,
            "tokens_before": before,
            "tokens_now": len(self._tokens.ids),
        }

    def _view(self, page: int, number: int) -> dict[str, Any]:
        if not self._outputs:
            raise ContextToolError("there is no tool output yet")
        if number > len(self._outputs):
            raise ContextToolError(f"there are {len(self._outputs)} tool outputs, not {number}")
        tool, text = self._outputs[number - 1]
        pages = max(1, math.ceil(len(text) / DEFAULT_PAGE_CHARS))
        if page > pages:
            raise ContextToolError(f"output {number} of {tool} has {pages} pages, not {page}")
        part = text[(page - 1) * DEFAULT_PAGE_CHARS : page * DEFAULT_PAGE_CHARS]
        return {"output": number, "tool": tool, "page": page, "pages": pages, "text": part}

    def _history(self) -> list[tuple[str, str]]:
        # The opening is in the context for good.
        shown = [(m["role"], m["content"]) for m in self._messages if m["role"] in ("assistant", "tool")]
        return [(f"message {number} ({role})", str(text)) for number, (role, text) in enumerate(shown, start=1)]

    def _numbered_outputs(self) -> list[tuple[str, str]]:
        return [(f"output {number} ({tool})", text) for number, (tool, text) in enumerate(self._outputs, start=1)]

    def _search(self, pattern: str, texts: list[tuple[str, str]]) -> dict[str, Any]:
        try:
            compiled = regex.compile(pattern, regex.IGNORECASE)
        except regex.error as error:
            raise ContextToolError(f"'pattern' is not a regular expression: {error}") from None
        found, shown = 0, []
        try:
            for where, text in texts:
                for match in compiled.finditer(text, timeout=SEARCH_TIMEOUT_S):
                    found += 1
                    if len(shown) < MAX_MATCHES:
                        begin = max(0, match.start() - MATCH_CONTEXT_CHARS)
                        shown.append({"in": where, "text": text[begin : match.end() + MATCH_CONTEXT_CHARS][:1000]})
        except TimeoutError:
            raise ContextToolError(
                f"'pattern' takes longer than {SEARCH_TIMEOUT_S} s to search for: make it simpler"
            ) from None
        return {"matches": found, "shown": shown}
