"""When Python looks for cyclic garbage in an actor that holds thousands of conversations."""

from __future__ import annotations

import gc

# Counted in container objects made and not yet freed. By default Python searches after 700 of them, all objects every
# 70,000 or so: with 4,096 episodes waiting a search of all takes a second, in which none of them goes on. Nearly all of
# our objects are freed by their reference counts; what is cyclic, such as a traceback, dies in the first search.
_YOUNG = 50_000
_MIDDLE_EVERY = 20
_ALL_EVERY = 50


def search_seldom() -> None:
    """Leave what is there now out of every search, and search after every 50,000 new objects, all every 50 million.

    Call it once, when the process has loaded what it needs.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE_EVERY, _ALL_EVERY)
