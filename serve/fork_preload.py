"""What a fork server loads before it forks: engines begin with it."""

from __future__ import annotations

import gc

from serve.quick_loading import quick_loading

with quick_loading():
    import serve.engine  # noqa: F401

    gc.freeze()  # a search in an engine would write to every page that it shares with the others
