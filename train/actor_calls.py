"""Answers of actors, and what a run makes of it if there is none."""

from __future__ import annotations

from concurrent.futures import Future, wait
from typing import Any

import ray

from train.failures import RunFailed
from train.learner import one_line

CALL_TIMEOUT_S = 60.0


def answer(call: Any, timeout_s: float, who: str) -> Any:
    """The answer of an actor, or the one-line reason why there is none.

    Raises:
        RunFailed: it failed, or did not come in time.
    """
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        raise RunFailed(f"{who}: no answer in {timeout_s:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise _failure(error, who) from None


def has_answer(call: Future[Any], timeout_s: float) -> bool:
    """Whether the answer comes within ``timeout_s``. ``call`` is ``ObjectRef.future()``."""
    return bool(wait([call], timeout_s).done)


def answer_of(call: Future[Any], who: str) -> Any:
    """As :func:`answer`, of a call that :func:`has_answer`."""
    try:
        return call.result()
    except ray.exceptions.RayError as error:
        raise _failure(error, who) from None


def _failure(error: ray.exceptions.RayError, who: str) -> RunFailed:
    return RunFailed(f"{who}: {one_line(error)}")


def answer_if_any(call: Any, timeout_s: float) -> Any:
    """The answer of an actor that may be gone; ``None`` then. For clean-up only: the next step must still happen."""
    try:
        return ray.get(call, timeout=timeout_s)
    except ray.exceptions.RayError:
        return None
