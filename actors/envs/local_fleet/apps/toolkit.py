"""What the sample applications share: tools with closed argument schemas, and words that divide into two halves."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Any

from actors.envs.local_fleet.application import Tool, ToolError

TEXT = {"type": "string", "minLength": 1}
NOBODY = "agent"  # who acts where the instance has no LOGGED_IN_USER


def object_schema(required: dict[str, dict], optional: dict[str, dict] | None = None) -> dict[str, Any]:
    """The JSON schema of an object that has these properties and no others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": list(required),
        "additionalProperties": False,
    }


def make_tool(
    name: str,
    description: str,
    schema: dict[str, Any],
    body: Callable[[sqlite3.Connection, dict[str, Any], dict[str, Any]], Any],
) -> Tool:
    """A tool that refuses arguments which its schema does not allow before ``body`` sees them."""

    def call(connection: sqlite3.Connection, arguments: dict[str, Any], env_variables: dict[str, Any]) -> Any:
        check_arguments(schema, arguments)
        return body(connection, arguments, env_variables or {})

    return Tool(name, description, schema, call)


def check_arguments(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    """Refuse arguments that the tool's own schema does not allow.

    Raises:
        ToolError: in words the agent can act on.
    """
    properties = schema["properties"]
    for name in arguments:
        if name not in properties:
            raise ToolError(f"unknown argument {name}, expected {', '.join(properties) or 'none'}")
    for name in schema["required"]:
        if name not in arguments:
            raise ToolError(f"missing argument {name}")
    for name, value in arguments.items():
        _check_value(name, value, properties[name])


def _check_value(name: str, value: Any, schema: dict[str, Any]) -> None:
    if "enum" in schema and value not in schema["enum"]:
        raise ToolError(f"{name} must be one of {', '.join(schema['enum'])}")
    if schema["type"] == "string":
        if not isinstance(value, str):
            raise ToolError(f"{name} must be a string")
        if len(value.strip()) < schema.get("minLength", 0):
            raise ToolError(f"{name} must not be empty")
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ToolError(f"{name} must be an integer")
    if not schema["minimum"] <= value <= schema["maximum"]:
        raise ToolError(f"{name} must be from {schema['minimum']} to {schema['maximum']}")


def next_id(connection: sqlite3.Connection, table: str, first: int) -> int:
    """One more than the largest number in the ids of ``table`` (a letter, then a number), or ``first``."""
    last = connection.execute(f"SELECT max(CAST(substr(id, 2) AS INTEGER)) FROM {table}").fetchone()[0]
    return max(last or 0, first - 1) + 1


def word_pairs(first: tuple[str, ...], second: tuple[str, ...], heldout: bool) -> list[str]:
    """Pairs of words. A fifth of all pairs is held out, the rest is not; both use every word."""
    return [f"{a} {b}" for i, a in enumerate(first) for j, b in enumerate(second) if ((3 * i + j) % 5 == 0) == heldout]
