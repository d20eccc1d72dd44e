"""A model behind any OpenAI-compatible chat endpoint. The only file that calls the ``openai`` package.

The package repeats a request that met 408, 409, 429, a 5xx or a broken connection, ``retries`` times at most, with
growing pauses or the one that ``Retry-After`` names.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
from openai.types.chat import ChatCompletion, ChatCompletionMessage

from train.chat.protocol import (
    KEY_VARIABLE,
    Call,
    EndpointFailed,
    EndpointGone,
    EndpointRefused,
    EndpointSettings,
    Overlong,
    Reply,
    Role,
)

GIVE_UP_AFTER = 8  # requests in a row that failed in spite of their retries
RETRIES, CHECK_RETRIES = 5, 2
_PING_TOOL = {
    "type": "function",
    "function": {"name": "ping", "description": "does nothing", "parameters": {"type": "object", "properties": {}}},
}
_OVERLONG = re.compile(r"context_length|context length|maximum context|too many tokens|prompt is too long", re.I)
_THINKING = ("reasoning_content", "reasoning")  # names that servers use; OpenAI itself tells none


class ChatEndpoint:
    """Dialogues with one model.

    Args:
        api_key: ``None`` for an endpoint that asks for none.
        timeout_s: of one turn, its retries included.
        role: for messages.
        retries: of one request.
        give_up_after: see :class:`EndpointGone`.

    Attributes:
        spent: ``requests`` for turns that were answered, and the tokens that the endpoint counted for them.
        gone: why it is not worth asking any more; ``None``: it is.
    """

    def __init__(
        self,
        settings: EndpointSettings,
        api_key: str | None,
        timeout_s: float,
        role: Role,
        *,
        retries: int = RETRIES,
        give_up_after: int = GIVE_UP_AFTER,
    ) -> None:
        self.settings = settings
        self._client = openai.AsyncOpenAI(
            base_url=settings.url, api_key=api_key or "none", timeout=timeout_s, max_retries=retries
        )
        self._timeout_s = timeout_s
        self._role = role
        self._give_up_after = give_up_after
        self._limit_name = "max_completion_tokens"
        self._failures = 0
        self.spent = dict.fromkeys(("requests", "prompt_tokens", "completion_tokens"), 0)
        self.gone: str | None = None

    async def check(self) -> None:
        """One request of one token: address, key, model and tool calling must be right before anything else starts.

        Raises:
            EndpointRefused: they are not.
            EndpointFailed: the endpoint cannot answer at present.
        """
        role = self._role
        try:
            try:
                await self._ping()
            except openai.BadRequestError as error:
                if self._limit_name not in str(error):
                    raise
                self._limit_name = "max_tokens"  # what servers called it before
                await self._ping()
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            hint = f"; without tool calling it needs {role.tools} text" * (self.settings.tools == "native")
            raise EndpointRefused(f"{self._said(error)}{hint}") from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise EndpointRefused(f"{self._said(error)}; the key is read from {KEY_VARIABLE}") from None
        except openai.NotFoundError as error:
            hint = f"check {role.model} and {role.url} (it mostly ends in /v1)"
            raise EndpointRefused(f"{self._said(error)}; {hint}") from None
        except openai.APITimeoutError as error:
            raise EndpointFailed(self._said(error)) from None
        except openai.APIConnectionError as error:
            raise EndpointRefused(f"{self._said(error)}: {error.__cause__}; check {role.url}") from None
        except openai.OpenAIError as error:
            raise EndpointFailed(self._said(error)) from None

    async def _ping(self) -> None:
        client = self._client.with_options(max_retries=CHECK_RETRIES)
        answer = await self._ask(client, [{"role": "user", "content": "ping"}], [_PING_TOOL], 1)
        if not getattr(answer, "choices", None):
            raise EndpointRefused(f"{self._name}: what answers is no chat endpoint; check {self._role.url}")

    async def turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
        """The next turn of a dialogue.

        Raises:
            EndpointFailed, EndpointGone, Overlong: see there.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                completion = await self._ask(self._client, messages, tools, self.settings.max_tokens)
        except TimeoutError:
            raise self._failed(f"{self._name}: no answer within {self._timeout_s:.0f} s") from None
        except openai.OpenAIError as error:
            if isinstance(error, openai.BadRequestError) and _OVERLONG.search(str(error)):
                raise Overlong from None
            raise self._failed(self._said(error)) from None
        if not getattr(completion, "choices", None):
            raise self._failed(f"{self._name}: the answer holds no message")
        self._failures = 0
        choice, usage = completion.choices[0], completion.usage
        calls = (call for call in choice.message.tool_calls or () if call.type == "function")
        reply = Reply(
            text=choice.message.content or "",
            calls=tuple(Call(call.id, call.function.name, call.function.arguments or "") for call in calls),
            finish_reason=choice.finish_reason or "stop",
            prompt_tokens=(usage.prompt_tokens or 0) if usage else 0,
            completion_tokens=(usage.completion_tokens or 0) if usage else 0,
            thinking=_thinking_of(choice.message),
        )
        self.spent["requests"] += 1
        self.spent["prompt_tokens"] += reply.prompt_tokens
        self.spent["completion_tokens"] += reply.completion_tokens
        return reply

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self, client: openai.AsyncOpenAI, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> ChatCompletion:
        settings = self.settings
        optional = {"temperature": settings.temperature, "top_p": settings.top_p}
        optional["tools"] = tools if tools and settings.tools == "native" else None
        said = {name: value for name, value in optional.items() if value is not None}
        return await client.chat.completions.create(
            model=settings.model, messages=messages, **{self._limit_name: max_tokens}, **said
        )

    def _failed(self, why: str) -> EndpointFailed | EndpointGone:
        self._failures += 1
        if self._failures < self._give_up_after:
            return EndpointFailed(why)
        self.gone = self.gone or f"{self._failures} requests in a row failed; the last: {why}"
        return EndpointGone(self.gone)

    def _said(self, error: openai.OpenAIError) -> str:
        return f"{self._name}: {' '.join(str(error).split())[:300]}"

    @property
    def _name(self) -> str:
        return f"{self._role.name} {self.settings.url}, model {self.settings.model}"


def _thinking_of(message: ChatCompletionMessage) -> str:
    return next((text for name in _THINKING if isinstance(text := getattr(message, name, None), str)), "")
