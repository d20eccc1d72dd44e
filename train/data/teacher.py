"""What a teacher is, what it says, and the ways in which it fails; :mod:`train.data.chat_endpoint` talks to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from actors.config import Section

KEY_VARIABLE = "OPENAI_API_KEY"


class TeacherSettings(Section):
    """What decides how a teacher does.

    Attributes:
        temperature: ``None``: the endpoint's own.
        tools: ``native``: through the endpoint's ``tools`` parameter; ``text``: in the system message, with calls in
            ``<tool_call>`` tags, as the policy writes them, for endpoints and models without tool calling.
        max_tokens: of one turn.
        max_input_tokens: an attempt with a longer dialogue takes no further turn; needs an endpoint that counts.
        max_output_chars: of the tool results that follow one turn.
    """

    url: str
    model: str
    temperature: float | None = None
    tools: Literal["native", "text"] = "native"
    max_turns: int = 50
    max_tokens: int = 8192
    max_input_tokens: int = 48_000
    max_output_chars: int = 20_000


class TeacherRefused(Exception):
    """The endpoint does not do what is asked of it, and will not: wrong address, key or model. Says what to change."""


class TeacherGone(Exception):
    """So many requests failed one after another that nothing more can be expected of the endpoint."""


class TeacherFailed(Exception):
    """One request failed in spite of its retries."""


class Overlong(Exception):
    """The dialogue does not fit the model's context."""


@dataclass(frozen=True)
class Call:
    """A call in the endpoint's own format. ``arguments``: JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Reply:
    """One turn of the teacher."""

    text: str
    calls: tuple[Call, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
