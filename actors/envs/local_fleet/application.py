"""What an application must bring to be hosted by the local Fleet: a seed, tools, and nothing else."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol


class ToolError(Exception):
    """A tool refused the call. The message is what the agent reads."""


@dataclass(frozen=True)
class Tool:
    """One tool as MCP lists it.

    ``call(connection, arguments, env_variables)`` runs inside a transaction on the instance's *current* database and
    returns a JSON value; a :class:`ToolError` rolls the transaction back.
    """

    name: str
    description: str
    input_schema: dict[str, Any]
    call: Callable[[sqlite3.Connection, dict[str, Any], dict[str, Any]], Any] = field(repr=False)


class Application(Protocol):
    """A sample application: real SQLite state per instance, reached through tools only."""

    env_key: str
    name: str
    description: str
    versions: tuple[str, ...]  # the last one is the default
    tools: tuple[Tool, ...]

    def seed(self, connection: sqlite3.Connection, data_key: str | None, data_version: str | None) -> None:
        """Create schema and rows. The same keys give the same rows, on any day and machine."""
