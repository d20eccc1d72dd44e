"""Types of command-line arguments: each takes the text as it was typed and says in one line what is wrong with it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def number(text: str, kind: type[Number], expected: str) -> Number:
    """``text`` as an ``int`` or a ``float``; ``expected``: what it must be."""
    try:
        return kind(text)
    except ValueError:
        raise _wrong(text, expected) from None


def natural(text: str) -> int:
    """A whole number from 0."""
    return _whole(text, 0, "a whole number that is not negative")


def positive(text: str) -> int:
    """A whole number from 1."""
    return _whole(text, 1, "a whole number of at least 1")


def within(low: float, high: float) -> Callable[[str], float]:
    """A number from ``low`` to ``high``, both included."""
    expected = f"a number from {low:g} to {high:g}"

    def from_low_to_high(text: str) -> float:
        value = number(text, float, expected)
        if not low <= value <= high:
            raise _wrong(text, expected)
        return value

    return from_low_to_high


def endpoint_url(text: str) -> str:
    """The address of an OpenAI-compatible endpoint."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", text):
        raise argparse.ArgumentTypeError(f"'{text}' is no http or https URL")
    if "@" in text.split("/")[2]:
        raise argparse.ArgumentTypeError("a URL with a password would be written into results; leave it out")
    # What is added to it is asked for often enough to be given with it.
    return text.rstrip("/").removesuffix("/chat/completions")


def _whole(text: str, low: int, expected: str) -> int:
    value = number(text, int, expected)
    if value < low:
        raise _wrong(text, expected)
    return value


def _wrong(text: str, expected: str) -> argparse.ArgumentTypeError:
    return argparse.ArgumentTypeError(f"'{text}' is not {expected}")
