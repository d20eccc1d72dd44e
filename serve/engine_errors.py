"""What an engine's callers may get instead of an answer. Apart from the engine: vLLM takes seconds to import."""

from __future__ import annotations


class EngineDead(RuntimeError):
    """The engine answers nothing any more. The message says why; another one must take its place."""


class ModelRefused(EngineDead):
    """vLLM takes no such model, or not with these settings: every start would end the same way."""


class RequestRefused(ValueError):
    """A request the engine cannot run; the next one may be fine. The message says what is wrong with it."""


class GenerateTimeout(TimeoutError):
    """A request was not answered in time and was aborted."""
