"""What goes wrong in episodes: one table of patterns, each with its rule in words and as a function.

A rule reads one episode and returns its findings, so a count is always a count of things that can be shown. How often
a rule is right is measured on the labelled episodes of ``tests/data/error_patterns.jsonl``; ``docs/analysis.md`` has
the figures.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from train.analysis.episode import Episode, Turn

QUOTE_CHARS = 160
THINKING_SHARE = 0.5
MIN_POLICY_CHARS = 200  # of which a share of thinking says something
MIN_THOUGHT_CHARS = 40
MAX_SAME_CALLS = 2

_OVERLONG = ("length", "max_length", "context_overflow")
_GAVE_UP = ("timeout", "batch_timeout", "env_step_timeout", "error")
# What SkyRL shows for an empty result, and what an empty one looks like as JSON.
_NO_CONTENT = ("", "{}", "null", "none", "action executed.")

_NO_ANSWER = re.compile(
    r"tim(?:ed?|ing)[ -]?out|(?:no|not) (?:an )?(?:answer|response|respond)|did not (?:answer|respond)"
    r"|\b50[234]\b|bad gateway|gateway time|service unavailable|unreachable|still busy"
    r"|connection (?:was |is )?(?:reset|refused|closed|lost|aborted|error)|disconnected|connecterror|server error",
    re.IGNORECASE,
)
_UNAUTHORISED = re.compile(
    r"unauthori[sz]ed|unauthenticated|forbidden|permission|access (?:is )?denied|authenticat"
    r"|not logged in|log ?in (?:first|required)|not allowed to|not authori[sz]ed"
    r"|invalid (?:token|credential|api key)|(?:token|session) (?:has )?expired"
    r"|only (?:its|the) owner|belongs to (?:another|someone)"
    r"|(?:status|code|http|error)\W{0,3}40[13]\b|^\W*40[13]\b",
    re.IGNORECASE,
)
_NOT_FOUND = re.compile(
    r"not (?:be )?found|no such|(?:does|do|did) ?(?:n[o']t) exist|(?:could|can) ?not find|couldn't find|can't find"
    r"|^(?:Error: )?(?:there is )?no (?!tool\b)[\w ]{2,20} (?:'.*'|\S*\d\S*|with|named|called)"
    r"|unknown (?:id|user|ticket|record|resource)"
    r"|(?:status|code|http|error)\W{0,3}404\b|^\W*404\b",
    re.IGNORECASE | re.MULTILINE,
)
_BAD_ARGUMENT = re.compile(
    r"\b(?:missing|required|invalid|unexpected|unknown|unrecogni[sz]ed|malformed|wrong|unsupported)\b[^.\n]{0,60}"
    r"\b(?:argument|parameter|param|field|property|properties|input|type|format|value|key|schema|enum|date)s?\b"
    r"|\b(?:argument|parameter|param|field|property|input|value)s?\b[^.\n]{0,60}"
    r"\b(?:missing|required|invalid|unexpected|unknown|not allowed|must|malformed)\b"
    r"|\bmust (?:be|have|not be|match|contain)\b|is not (?:one of|of type|valid)|validation ?error"
    r"|is a required property|additional properties|needs '"
    r"|not a (?:valid|number|integer|date|string)|\bexpected\b.{0,40}\bgot\b"
    r"|does not match|bad request|unprocessable|there is no tool '|unknown tool|no tool named"
    r"|(?:status|code|http|error)\W{0,3}4(?:00|22)\b",
    re.IGNORECASE,
)
# The first class that matches counts, so that an error is in one of them only.
_ERROR_CLASSES = (
    ("no_env_response", _NO_ANSWER),
    ("authorisation", _UNAUTHORISED),
    ("tool_argument_error", _BAD_ARGUMENT),
    ("not_found", _NOT_FOUND),
)
_ID_KEY = re.compile(r"(?:^|_)(?:id|ids|uuid|guid|key|number|ref|sku)$|(?:[a-z]Ids?|Uuid|Number|Key)$")
_NOT_AN_ID = re.compile(r"page|phone|account_name", re.IGNORECASE)
_MAKES = re.compile(r"(?:^|_)(?:create|insert|register|upsert)(?:_|$)", re.IGNORECASE)
_SENTENCE = re.compile(r"[.!?\n]\s+")
_SPACE = re.compile(r"\s+")


@dataclass(frozen=True)
class Finding:
    """Where a rule matched: the index of the turn, and what shows it in at most ``QUOTE_CHARS`` characters."""

    turn: int
    quote: str


@dataclass(frozen=True)
class Pattern:
    """One way in which episodes go wrong.

    ``unit`` is what the findings of an episode are: ``call`` and ``turn`` may be several, ``episode`` is at most one.
    """

    key: str
    title: str
    unit: str
    rule: str
    find: Callable[[Episode], list[Finding]]


def failed_calls(episode: Episode) -> Iterator[tuple[int, str]]:
    """Turns whose call got an error, and its text. Texts that are no call's result are not read."""
    for index, turn in enumerate(episode.turns):
        if turn.parsed.calls and turn.error is not None:
            yield index, turn.error


@lru_cache(maxsize=4096)
def error_class(error: str) -> str | None:
    """The pattern an error belongs to; ``None`` for one of its own kind, such as a rule of the application."""
    return next((key for key, expression in _ERROR_CLASSES if expression.search(error)), None)


def _errors_of(key: str) -> Callable[[Episode], list[Finding]]:
    def find(episode: Episode) -> list[Finding]:
        return [Finding(i, _quote(error)) for i, error in failed_calls(episode) if error_class(error) == key]

    return find


def _no_env_response(episode: Episode) -> list[Finding]:
    findings = _errors_of("no_env_response")(episode)
    for index, turn in enumerate(episode.turns):
        if turn.parsed.calls and _unanswered(episode, index, turn):
            findings.append(Finding(index, f"{_call_text(turn)} → {turn.observation or 'nothing'}"[:QUOTE_CHARS]))
    return sorted(findings, key=lambda finding: finding.turn)


def _unanswered(episode: Episode, index: int, turn: Turn) -> bool:
    if turn.observation is not None:
        return turn.observation.strip().lower() in _NO_CONTENT
    # The last call's result is not shown where the episode ended for another reason.
    return index + 1 < len(episode.turns) or episode.stop_reason in _GAVE_UP


def _false_completion(episode: Episode) -> list[Finding]:
    if episode.reward is None or episode.reward > 0 or not episode.turns:
        return []
    last = episode.turns[-1]
    if not (last.says_done or episode.stop_reason == "done"):
        return []
    return [Finding(len(episode.turns) - 1, _quote(last.parsed.answer or last.text))]


def _context_overflow(episode: Episode) -> list[Finding]:
    if episode.stop_reason not in _OVERLONG:
        return []
    tokens = f" after {episode.tokens:,} tokens" if episode.tokens else ""
    return [Finding(max(0, len(episode.turns) - 1), f"stop reason {episode.stop_reason}{tokens}")]


def thinking_chars(episode: Episode) -> int:
    return sum(len(turn.thinking) for turn in episode.turns)


def policy_chars(episode: Episode) -> int:
    return sum(len(turn.text) for turn in episode.turns)


def _excessive_thinking(episode: Episode) -> list[Finding]:
    written = policy_chars(episode)
    if written < MIN_POLICY_CHARS or thinking_chars(episode) <= THINKING_SHARE * written:
        return []
    longest = max(range(len(episode.turns)), key=lambda index: len(episode.turns[index].thinking))
    share = thinking_chars(episode) / written
    return [Finding(longest, f"{share:.0%} of {written:,} characters are thinking")]


def _repeated_calls(episode: Episode) -> list[Finding]:
    findings: list[Finding] = []
    seen: Counter[str] = Counter()
    previous = None
    for index, turn in enumerate(episode.turns):
        for call in turn.parsed.calls:
            text = json.dumps([call.name, call.arguments], sort_keys=True, ensure_ascii=False)
            seen[text] += 1
            if text == previous or seen[text] > MAX_SAME_CALLS:
                findings.append(Finding(index, _quote(f"{call.name} {json.dumps(call.arguments)}")))
            previous = text
    return findings


def _max_turns(episode: Episode) -> list[Finding]:
    if not episode.turns:
        return []
    at_limit = episode.max_turns is None or len(episode.turns) >= episode.max_turns
    # SkyRL's dumps say "stop" of an episode that said it was done and of one that used up its turns.
    silent = episode.stop_reason == "stop" and not re.search(r"<done>|\[done\]", episode.turns[-1].text, re.IGNORECASE)
    if episode.stop_reason != "max_turns" and not (silent and at_limit):
        return []
    return [Finding(len(episode.turns) - 1, f"no done signal in {len(episode.turns)} turns")]


def _repeated_thoughts(episode: Episode) -> list[Finding]:
    findings: list[Finding] = []
    seen: set[str] = set()
    for index, turn in enumerate(episode.turns):
        if not turn.thinking:
            continue
        thought = _SPACE.sub(" ", turn.thinking).strip().lower()
        if len(thought) < MIN_THOUGHT_CHARS:
            continue
        sentences = Counter(s for s in _SENTENCE.split(turn.thinking.strip()) if len(s) >= MIN_THOUGHT_CHARS)
        if thought in seen:
            findings.append(Finding(index, _quote(turn.thinking)))
        elif sentences and (most := sentences.most_common(1)[0])[1] > MAX_SAME_CALLS:
            findings.append(Finding(index, _quote(f"{most[1]} times: {most[0]}")))
        seen.add(thought)
    return findings


def _invented_ids(episode: Episode) -> list[Finding]:
    findings: list[Finding] = []
    known: set[str] = set()
    read = [text for _, text in episode.prompt]
    for index, turn in enumerate(episode.turns):
        for call in turn.parsed.calls:
            if _MAKES.search(call.name):
                continue
            for key, value in _identifiers(call.arguments):
                if value in known:
                    continue
                known.add(value)
                if not any(_mentions(text, value) for text in reversed(read)):
                    findings.append(Finding(index, _quote(f"{call.name} {key} = {value}")))
        if turn.observation:
            read.append(turn.observation)
    return findings


def _identifiers(arguments: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Arguments that name something by an identifier: the key says so, and the value holds a digit."""
    for key, value in arguments.items():
        if isinstance(value, dict):
            yield from _identifiers(value)
        elif _ID_KEY.search(key) and not _NOT_AN_ID.search(key):
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, str | int) and not isinstance(item, bool) and re.search(r"\d", str(item)):
                    yield key, str(item)


def _mentions(text: str, value: str) -> bool:
    """Whether ``value`` stands in ``text`` as a word of its own."""
    start = text.find(value)
    while start >= 0:
        end = start + len(value)
        if not (text[start - 1 : start].isalnum() or text[end : end + 1].isalnum()):
            return True
        start = text.find(value, start + 1)
    return False


def _no_action(episode: Episode) -> list[Finding]:
    return [
        Finding(index, _quote(turn.parsed.error or turn.text))
        for index, turn in enumerate(episode.turns)
        # The last turn of an overlong episode was cut before it could act.
        if not (turn.parsed.calls or turn.says_done)
        and not (index + 1 == len(episode.turns) and episode.stop_reason in _OVERLONG)
    ]


def _quote(text: str) -> str:
    text = _SPACE.sub(" ", text).strip()
    return text if len(text) <= QUOTE_CHARS else f"{text[: QUOTE_CHARS - 1]}…"


def _call_text(turn: Turn) -> str:
    call = turn.parsed.calls[0]
    return _quote(f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}")


PATTERNS: tuple[Pattern, ...] = (
    Pattern(
        "tool_argument_error",
        "Tool argument errors",
        "call",
        "a call's result is an error that speaks of a missing, unknown or invalid argument, of a value it must be, or "
        "of an unknown tool",
        _errors_of("tool_argument_error"),
    ),
    Pattern(
        "authorisation",
        "Authorisation",
        "call",
        "a call's result is an error that speaks of permission, log-in, credentials or ownership (401, 403)",
        _errors_of("authorisation"),
    ),
    Pattern(
        "not_found",
        "Not found",
        "call",
        "a call's result is an error that says that something named does not exist (404)",
        _errors_of("not_found"),
    ),
    Pattern(
        "no_env_response",
        "No environment response",
        "call",
        "a call got no result: nothing follows it, the result is empty, or it is an error of the way there (timeout, "
        "502 to 504, lost connection)",
        _no_env_response,
    ),
    Pattern(
        "false_completion",
        "False completion",
        "episode",
        "the policy signalled done and the verifier's reward is 0",
        _false_completion,
    ),
    Pattern(
        "context_overflow",
        "Context overflow",
        "episode",
        "the episode ended at a token limit, of the context or of one turn (stop reason `length`)",
        _context_overflow,
    ),
    Pattern(
        "excessive_thinking",
        "Excessive thinking",
        "episode",
        f"more than {THINKING_SHARE:.0%} of what the policy wrote, in characters, stands inside thinking tags",
        _excessive_thinking,
    ),
    Pattern(
        "repeated_call",
        "Repeated identical calls",
        "call",
        "the same tool with the same arguments as the call before, or for the third time in the episode",
        _repeated_calls,
    ),
    Pattern(
        "max_turns",
        "Hit max turns",
        "episode",
        "the episode used up its turns: stop reason `max_turns`, or, where a dump says only `stop`, no done signal in "
        "the last turn",
        _max_turns,
    ),
    Pattern(
        "repeated_thought",
        "Repeated thoughts",
        "turn",
        f"a turn's thinking is that of an earlier turn, or holds a sentence three times ({MIN_THOUGHT_CHARS} "
        "characters or more)",
        _repeated_thoughts,
    ),
    Pattern(
        "invented_id",
        "Invented identifiers",
        "call",
        "an argument whose name says identifier holds one (with a digit) that stood neither in the prompt nor in any "
        "result before; calls that create something are left out",
        _invented_ids,
    ),
    Pattern(
        "no_action",
        "No call and no done signal",
        "turn",
        "a turn holds neither a readable tool call nor a done signal, and was not cut at a token limit",
        _no_action,
    ),
)
