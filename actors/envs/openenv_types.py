"""OpenEnv's base types without OpenEnv's web server.

``import openenv.core`` runs the package's ``__init__``, which imports its HTTP server, FastMCP and Gradio: 4.8 s of CPU
and over 100 MB in every process, for three pydantic models and one abstract class. Here only the two modules that
define them are imported, under their own names, so a later ordinary import of ``openenv.core`` finds the same classes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_PACKAGES = ("openenv.core", "openenv.core.env_server")


def _import_without_server() -> tuple[Any, Any]:
    """The modules ``interfaces`` and ``types`` of ``openenv.core.env_server``."""
    root = importlib.util.find_spec("openenv").submodule_search_locations[0]
    stand_ins = [name for name in _PACKAGES if name not in sys.modules]
    for name in stand_ins:
        package = ModuleType(name)
        package.__path__ = ["/".join([root, *name.split(".")[1:]])]
        sys.modules[name] = package
    try:
        return (
            importlib.import_module("openenv.core.env_server.interfaces"),
            importlib.import_module("openenv.core.env_server.types"),
        )
    finally:
        # The next import of these packages must run their real __init__.
        for name in stand_ins:
            del sys.modules[name]


_interfaces, _types = _import_without_server()

Environment = _interfaces.Environment
Action = _types.Action
Observation = _types.Observation
State = _types.State
EnvironmentMetadata = _types.EnvironmentMetadata
