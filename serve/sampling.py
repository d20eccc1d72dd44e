"""What a request to the policy says and what comes back; plain values, no engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Sampling:
    """How one turn is drawn.

    Attributes:
        temperature: 0 is greedy.
        top_k: -1 for no limit.
        max_tokens: tokens of this turn at most.
        stop: strings that end the turn; the text up to and including the string is kept.
        seed: of this request; ``None`` draws from the engine's own stream.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    seed: int | None = None


@dataclass(frozen=True)
class Completion:
    """One sampled turn.

    Attributes:
        token_ids: the sampled ids; the end-of-sequence token is among them when it was sampled.
        logprobs: of each sampled id under the distribution it was drawn from (temperature applied).
        stop_reason: ``stop`` (end of sequence or stop string), ``length`` (``max_tokens``), or ``abort``.
        stop_string: the stop string that ended the turn, if one did.
        spans: ``(version, start, end)`` over ``token_ids``: which weights drew which tokens.
        cache_salt: the salt the request ran under; the caller passes it with the trajectory's later turns.
    """

    token_ids: list[int]
    logprobs: list[float]
    stop_reason: Literal["stop", "length", "abort"]
    stop_string: str | None
    spans: list[tuple[int, int, int]]
    cache_salt: str
