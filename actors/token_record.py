"""The growing token record of an episode: one sequence, or several where the policy rewrote its history."""

from __future__ import annotations

from dataclasses import dataclass, field

from actors.trajectory import Span
from serve.sampling import Completion


@dataclass
class TokenSequence:
    """Token ids as the engine saw them. ``mask`` is 1 and ``logprobs`` is set where a token was sampled *here*."""

    ids: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def observe(self, ids: list[int]) -> None:
        self.ids += ids
        self.mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)


class TokenRecord:
    """What an episode adds token by token. Every sampled token is in exactly one sequence, in the context it had.

    A sequence is an opening and then turns; a turn is what was sampled and what was observed on it. A turn that was
    kept when the history was rewritten is context in the new sequence: its ids are copied, its mask is 0.
    """

    def __init__(self) -> None:
        self._ended: list[TokenSequence] = []
        self._current = TokenSequence()
        self._turns: list[int] = []  # where each turn of the current sequence begins
        self._opening = 0
        self.spans: list[Span] = []
        self.sampled = 0

    @property
    def ids(self) -> list[int]:
        """The current sequence: the next prompt."""
        return self._current.ids

    @property
    def turns(self) -> int:
        """Turns in the current sequence, the one under way included."""
        return len(self._turns)

    def open(self, ids: list[int]) -> None:
        """The prompt before the first turn."""
        self._current.observe(ids)
        self._opening = len(ids)

    def observe(self, ids: list[int]) -> None:
        self._current.observe(ids)

    def sample(self, completion: Completion) -> None:
        """A turn begins."""
        self._turns.append(len(self._current.ids))
        current, count = self._current, len(completion.token_ids)
        current.ids += completion.token_ids
        current.mask += [1] * count
        current.logprobs += completion.logprobs
        self.spans += [Span(v, self.sampled + a, self.sampled + b) for v, a, b in completion.spans]
        self.sampled += count

    def keep_recent(self, turns: int) -> int:
        """Go on in a new sequence: the opening and the last ``turns`` turns (at least the one under way).

        Returns:
            How many turns were left out; with 0 nothing changed.
        """
        first = max(0, len(self._turns) - max(1, turns))
        if first == 0:
            return 0
        ended = self._current
        self._ended.append(ended)
        begin = self._turns[first]
        self._current = TokenSequence()
        self._current.observe(ended.ids[: self._opening] + ended.ids[begin:])
        self._turns = [start - begin + self._opening for start in self._turns[first:]]
        return first

    def flat(self) -> tuple[TokenSequence, list[int]]:
        """All sequences one after the other, and where each begins. One that sampled nothing yet is left out, unless it
        is the only one."""
        sequences = [s for s in (*self._ended, self._current) if any(s.mask)] or [self._current]
        joined, starts = TokenSequence(), []
        for sequence in sequences:
            starts.append(len(joined.ids))
            joined.ids += sequence.ids
            joined.mask += sequence.mask
            joined.logprobs += sequence.logprobs
        return joined, starts
