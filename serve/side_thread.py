"""Threads for calls that may hang for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def in_thread(function: Callable[..., Any], *args: Any) -> Future[Any]:
    """Run something that may hang for ever, in a thread that keeps no process from ending."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:  # handed to whoever asks for the result
            done.set_exception(error)

    threading.Thread(target=run, name=getattr(function, "__name__", "thread"), daemon=True).start()
    return done
