"""What the routes of the local Fleet share: JSON replies, checked bodies, and errors as the Fleet SDK reads them."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

Model = TypeVar("Model", bound=BaseModel)


class ApiError(Exception):
    """A refusal. ``detail`` is a sentence or an object; the SDK looks for it under ``detail`` in the body."""

    def __init__(self, status: int, detail: str | dict[str, Any]) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail


class JsonReply(Response):
    """A JSON reply. Bytes, which SQLite may hold and JSON may not, are sent as base64 text."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return orjson.dumps(content, default=_encode, option=orjson.OPT_NON_STR_KEYS)


def _encode(value: Any) -> str:
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def error_reply(status: int, detail: Any, headers: Mapping[str, str] | None = None) -> JsonReply:
    return JsonReply({"detail": detail}, status, headers=headers)


async def checked_body(request: Request, model: type[Model]) -> Model:
    """Read and check the body. An absent body counts as ``{}``.

    Raises:
        ApiError: 422 with the first offending field.
    """
    raw = await request.body()
    if not raw or raw == b"null":
        raw = b"{}"
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ApiError(422, f"{f'field {field!r}: ' if field else 'body: '}{first['msg']}") from None
