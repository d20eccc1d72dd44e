"""What an application must bring to be hosted by the local Fleet: a seed, tools, and nothing else."""

from __future__ import annotations

import importlib
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


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


@runtime_checkable
class Versioned(Protocol):
    """An application whose versions differ. Its own ``tools`` and ``seed`` are those of its last version."""

    def at(self, version: str) -> Application:
        """The application as it was in ``version``, one of its ``versions``."""


def at_version(application: Application, version: str) -> Application:
    """What an instance of ``version`` runs. An application without ``at`` is the same in all its versions."""
    return application.at(version) if isinstance(application, Versioned) else application


class ApplicationError(ValueError):
    """An application that cannot be hosted. The message is one line."""


def load_application(name: str) -> Application:
    """Import an application.

    Args:
        name: ``module:attribute``; an application, or a class that is called without arguments.

    Raises:
        ApplicationError: it cannot be imported, or is no application.
    """
    module_name, colon, attribute = name.partition(":")
    if not (module_name and colon and attribute):
        raise ApplicationError(f"application {name}: expected MODULE:ATTRIBUTE, for example my_apps.notes:Notes")
    try:
        found = getattr(importlib.import_module(module_name), attribute)
        application = found() if isinstance(found, type) else found
    except Exception as error:  # the module is the user's: anything may come out of it
        reason = " ".join(str(error).split())
        raise ApplicationError(f"application {name}: {type(error).__name__}: {reason}") from None
    _check(name, application)
    return application


def _check(name: str, application: Application) -> None:
    for field_name in ("env_key", "name", "description", "versions", "tools", "seed"):
        if not hasattr(application, field_name):
            raise ApplicationError(f"application {name}: it has no '{field_name}'")
    if not isinstance(application.env_key, str) or not application.env_key:
        raise ApplicationError(f"application {name}: 'env_key' must be a text that is not empty")
    if isinstance(application.versions, str) or not application.versions:
        raise ApplicationError(f"application {name}: 'versions' must be a tuple with one version or more")
    if not callable(application.seed):
        raise ApplicationError(f"application {name}: 'seed' must be a method")
    for version in application.versions:
        tools = at_version(application, version).tools
        if not tools or not all(isinstance(tool, Tool) for tool in tools):
            raise ApplicationError(f"application {name}: 'tools' must be a tuple of Tool, of one or more")
        names = [tool.name for tool in tools]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice is not None:
            raise ApplicationError(f"application {name}: two tools are called '{twice}'")
