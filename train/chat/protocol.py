"""What a chat endpoint is told and answers, and how it fails; :mod:`train.chat.endpoint` talks to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from actors.config import Section

KEY_VARIABLE = "OPENAI_API_KEY"


class EndpointSettings(Section):
    """Whom a request asks, and how it is to be answered.

    Attributes:
        temperature, top_p: ``None``: the endpoint's own.
        tools: ``native``: through the endpoint's ``tools`` parameter; ``text``: in the system message, with calls in
            ``<tool_call>`` tags, as the policy writes them, for endpoints and models without tool calling.
        max_tokens: of one turn.
    """

    url: str
    model: str
    temperature: float | None = None
    top_p: float | None = None
    tools: Literal["native", "text"] = "native"
    max_tokens: int = 8192


class Role(NamedTuple):
    """What an endpoint is called in messages, and the options by which it was chosen."""

    name: str
    url: str
    model: str
    tools: str


TEACHER = Role("the teacher's endpoint", "--teacher-url", "--teacher-model", "--teacher-tools")
EVALUATED = Role("the endpoint", "--endpoint", "--model", "--endpoint-tools")


class EndpointRefused(Exception):
    """The endpoint does not do what is asked of it, and will not: wrong address, key or model. Says what to change."""


class EndpointGone(Exception):
    """So many requests failed one after another that nothing more can be expected of the endpoint."""


class EndpointFailed(Exception):
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
    """One turn of the model.

    Attributes:
        thinking: where the endpoint tells it apart from the text.
        prompt_tokens, completion_tokens: as the endpoint counted them; 0 where it counts none.
    """

    text: str
    calls: tuple[Call, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    thinking: str = ""
