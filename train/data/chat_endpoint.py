"""The teacher's model, behind any OpenAI-compatible chat endpoint. The only file that calls the ``openai`` package.

The package repeats a request that met 408, 409, 429, a 5xx or a broken connection, ``retries`` times at most, with
growing pauses or the one that ``Retry-After`` names.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import openai
from openai.types.chat import ChatCompletion

from train.data.teacher import (
    KEY_VARIABLE,
    Call,
    Overlong,
    Reply,
    TeacherFailed,
    TeacherGone,
    TeacherRefused,
    TeacherSettings,
)

# After so many requests in a row that failed in spite of their retries, the endpoint counts as gone.
GIVE_UP_AFTER = 8
RETRIES, CHECK_RETRIES = 5, 2
_PING_TOOL = {
    "type": "function",
    "function": {"name": "ping", "description": "does nothing", "parameters": {"type": "object", "properties": {}}},
}
_OVERLONG = re.compile(r"context_length|context length|maximum context|too many tokens|prompt is too long", re.I)


class ChatEndpoint:
    """Dialogues with one model.

    Args:
        api_key: ``None`` for an endpoint that asks for none.
        timeout_s: of one turn, its retries included.
        retries: of one request.
    """

    def __init__(
        self, settings: TeacherSettings, api_key: str | None, timeout_s: float, retries: int = RETRIES
    ) -> None:
        self.settings = settings
        self._client = openai.AsyncOpenAI(
            base_url=settings.url, api_key=api_key or "none", timeout=timeout_s, max_retries=retries
        )
        self._timeout_s = timeout_s
        self._limit_name = "max_completion_tokens"
        self._failures = 0

    async def check(self) -> None:
        """One request of one token: address, key, model and tool calling must be right before anything else starts.

        Raises:
            TeacherRefused: they are not.
            TeacherFailed: the endpoint cannot answer at present.
        """
        try:
            try:
                await self._ping()
            except openai.BadRequestError as error:
                if self._limit_name not in str(error):
                    raise
                self._limit_name = "max_tokens"  # what servers called it before
                await self._ping()
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            hint = "; without tool calling it needs --teacher-tools text" * (self.settings.tools == "native")
            raise TeacherRefused(f"{self._said(error)}{hint}") from None
        except (openai.AuthenticationError, openai.PermissionDeniedError) as error:
            raise TeacherRefused(f"{self._said(error)}; the key is read from {KEY_VARIABLE}") from None
        except openai.NotFoundError as error:
            hint = "check --teacher-model and --teacher-url (it mostly ends in /v1)"
            raise TeacherRefused(f"{self._said(error)}; {hint}") from None
        except openai.APITimeoutError as error:
            raise TeacherFailed(self._said(error)) from None
        except openai.APIConnectionError as error:
            raise TeacherRefused(f"{self._said(error)}: {error.__cause__}; check --teacher-url") from None
        except openai.OpenAIError as error:
            raise TeacherFailed(self._said(error)) from None

    async def _ping(self) -> None:
        client = self._client.with_options(max_retries=CHECK_RETRIES)
        answer = await self._ask(client, [{"role": "user", "content": "ping"}], [_PING_TOOL], 1)
        if not getattr(answer, "choices", None):
            raise TeacherRefused(f"{self._name}: what answers is no chat endpoint; check --teacher-url")

    async def turn(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
        """The next turn of a dialogue.

        Raises:
            TeacherFailed, TeacherGone, Overlong: see there.
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
        return Reply(
            text=choice.message.content or "",
            calls=tuple(Call(call.id, call.function.name, call.function.arguments or "") for call in calls),
            finish_reason=choice.finish_reason or "stop",
            prompt_tokens=usage.prompt_tokens if usage else 0,
            completion_tokens=usage.completion_tokens if usage else 0,
        )

    async def close(self) -> None:
        await self._client.close()

    async def _ask(
        self, client: openai.AsyncOpenAI, messages: list[dict[str, Any]], tools: list[dict[str, Any]], max_tokens: int
    ) -> ChatCompletion:
        settings = self.settings
        optional: dict[str, Any] = {}
        if tools and settings.tools == "native":
            optional["tools"] = tools
        if settings.temperature is not None:
            optional["temperature"] = settings.temperature
        return await client.chat.completions.create(
            model=settings.model, messages=messages, **{self._limit_name: max_tokens}, **optional
        )

    def _failed(self, why: str) -> TeacherFailed | TeacherGone:
        self._failures += 1
        if self._failures < GIVE_UP_AFTER:
            return TeacherFailed(why)
        return TeacherGone(f"{self._failures} requests in a row failed; the last: {why}")

    def _said(self, error: openai.OpenAIError) -> str:
        return f"{self._name}: {' '.join(str(error).split())[:300]}"

    @property
    def _name(self) -> str:
        return f"the teacher's endpoint {self.settings.url}, model {self.settings.model}"
