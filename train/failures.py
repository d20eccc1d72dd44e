"""How a run ends when it cannot go on. In a file of its own, so that the entry point need not load Ray to name it."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """A run that cannot go on; the message is the reason, in one line."""
