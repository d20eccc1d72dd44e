"""Checks a call's arguments against the tool's JSON schema, and says what is wrong in words the policy can act on."""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, best_match
from referencing.exceptions import Unresolvable

MAX_MESSAGE_CHARS = 300
TOOL_LISTS_KEPT = 64


def schemas_of(tools: list[dict[str, Any]]) -> ToolSchemas:
    """The schemas of these tools; built once for all episodes whose tools are equal."""
    return _schemas_of(json.dumps(tools))


@lru_cache(TOOL_LISTS_KEPT)
def _schemas_of(tools: str) -> ToolSchemas:
    return ToolSchemas(json.loads(tools))


class ToolSchemas:
    """The schemas of a list of tools.

    Args:
        tools: OpenAI function format. A tool whose schema is not valid is not checked: that is the server's fault.
    """

    def __init__(self, tools: list[dict[str, Any]]) -> None:
        self._validators: dict[str, Draft202012Validator] = {}
        for tool in tools:
            schema = tool["function"].get("parameters") or {}
            try:
                Draft202012Validator.check_schema(schema)
            except SchemaError:
                continue
            self._validators[tool["function"]["name"]] = Draft202012Validator(schema)

    def problem(self, name: str, arguments: dict[str, Any]) -> str | None:
        """What is wrong with the arguments of a call; ``None`` where nothing is, or the tool is not known."""
        validator = self._validators.get(name)
        if validator is None:
            return None
        required = validator.schema.get("required", ())
        # Servers take null for "not given", and the schemas that reach the policy do not mention it.
        given = {key: value for key, value in arguments.items() if value is not None or key in required}
        try:
            error = best_match(validator.iter_errors(given))
        except RecursionError:
            return "the arguments are nested too deeply"
        except OverflowError:
            return "a number in the arguments is too large"
        except (Unresolvable, re.error):
            return None  # the schema refers to what is not there, or has a pattern of another dialect
        if error is None:
            return None
        where = "".join(f"['{part}']" if isinstance(part, str) else f"[{part}]" for part in error.absolute_path)
        return f"arguments{where}: {_shortened(error.message)}"


def _shortened(message: str) -> str:
    return message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}..."
