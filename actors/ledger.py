"""The account of every episode.

At every moment: dispatched = graded + ungraded + infra-failed + cancelled + in flight.
"""

from __future__ import annotations

from collections import Counter

from actors.trajectory import OUTCOME_NAMES, Outcome


class LedgerError(AssertionError):
    """An episode was ended twice, or was never dispatched."""


class Ledger:
    """Counts episodes. Ids are kept while in flight, so an episode can end only once."""

    def __init__(self) -> None:
        self.dispatched = 0
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._in_flight: set[str] = set()

    def dispatch(self, episode_ids: list[str]) -> None:
        for episode_id in episode_ids:
            if episode_id in self._in_flight:
                raise LedgerError(f"episode {episode_id} is dispatched twice")
            self._in_flight.add(episode_id)
        self.dispatched += len(episode_ids)

    def end(self, episode_id: str, outcome: Outcome) -> None:
        if episode_id not in self._in_flight:
            raise LedgerError(f"episode {episode_id} ended but is not in flight")
        self._in_flight.remove(episode_id)
        name = OUTCOME_NAMES[type(outcome)]
        self.ended[name] += 1
        reason = getattr(outcome, "reason", None)
        if reason is not None:
            self.reasons[f"{name}: {reason}"[:200]] += 1

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def balanced(self) -> bool:
        return self.dispatched == sum(self.ended.values()) + self.in_flight

    def snapshot(self) -> dict:
        """Counts by outcome, as a metric and for the summary."""
        return {
            "dispatched": self.dispatched,
            **{name: self.ended[name] for name in OUTCOME_NAMES.values()},
            "in_flight": self.in_flight,
            "balanced": self.balanced,
            "reasons": dict(self.reasons.most_common(20)),
        }
