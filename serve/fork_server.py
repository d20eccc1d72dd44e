"""A process from which engines without a GPU are forked.

Importing vLLM takes a core five to eight seconds. Here it happens once: while the replica itself is still importing,
and not again when an engine is replaced. Free of vLLM itself, so that it can be started before that is imported.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import shutil
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.forkserver import ensure_running
from typing import Any

from serve.config import PolicyConfig
from serve.shared_folder import SharedFolder

MODULES = ["serve.fork_server", "serve.fork_preload"]
FOLDER = "FLEET_RL_FORK_SERVER"  # variable by which the server learns where its socket is

# Of the one server that a process has.
_environment: dict[str, str] | None = None
_folder: SharedFolder | None = None


def start_fork_server(config: PolicyConfig, label: str = "engine") -> bool:
    """Begin to import the engine over there, unless that was begun already. Returns at once.

    Args:
        label: makes the name of its folder readable.

    Returns:
        Whether engines of this configuration can be forked there. What is read at import cannot be changed afterwards.
    """
    global _environment, _folder
    if config.num_gpus or config.tensor_parallel_size > 1:
        return False
    environment = config.environment()
    if _environment is None:
        multiprocessing.set_forkserver_preload(MODULES)
        os.environ.update(environment)
        # Its socket would lie in a folder in /tmp that stays there when this process is killed.
        _folder = SharedFolder(f"fork-{label}")
        multiprocessing.current_process()._config["tempdir"] = os.environ[FOLDER] = str(_folder.path)
        try:
            ensure_running()
        finally:
            del os.environ[FOLDER]
        _environment = environment
    return _environment == environment


def close_fork_server() -> None:
    """No more engines from here. The server ends with its owner, after all that were forked from it."""
    if _folder is not None:
        _folder.close()


class _Process(ForkServerProcess):
    """It has the environment of the process that asks for it, as a spawned one would."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._environment = dict(os.environ)

    def run(self) -> None:
        # Not all of them anew: by the place of those it began with the process finds its title, which vLLM sets.
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(set(self._environment.items()) - set(os.environ.items()))
        super().run()


class ForkContext(ForkServerContext):
    """As :func:`multiprocessing.get_context`."""

    Process = _Process


if FOLDER in os.environ:  # this is the server, which ends after its owner, and after all that was forked from it
    atexit.register(shutil.rmtree, os.environ.pop(FOLDER), ignore_errors=True)
