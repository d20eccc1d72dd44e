"""Importing what is large, such as vLLM or torch, in less time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quick_loading() -> Iterator[None]:
    """Python does not look for cyclic garbage. Imports make hundreds of thousands of objects that stay, and searching
    them again and again is a fifth of the time that they take."""
    searching = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if searching:
            gc.enable()
