"""The account of every episode.

At every moment: dispatched = graded + ungraded + infra-failed + cancelled + in flight.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from actors.trajectory import OUTCOME_NAMES, Outcome

MAX_REASONS = 1000  # distinct ones; reasons may hold ids, and a run may last for weeks
OTHER_REASONS = "other reasons"


class LedgerError(AssertionError):
    """An episode was dispatched twice, was ended twice, or was never dispatched."""


class Ledger:
    """Counts episodes. Ids are kept while in flight, so an episode can end only once.

    A call that raises has changed nothing.
    """

    def __init__(self) -> None:
        self.dispatched = 0
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self._in_flight: set[str] = set()

    def dispatch(self, episode_ids: Sequence[str]) -> None:
        for episode_id, times in Counter(episode_ids).items():
            if times > 1 or episode_id in self._in_flight:
                raise LedgerError(f"episode {episode_id} is dispatched twice")
        self._in_flight.update(episode_ids)
        self.dispatched += len(episode_ids)

    def end(self, episode_id: str, outcome: Outcome) -> None:
        self.end_all({episode_id: outcome})

    def end_all(self, outcomes: Mapping[str, Outcome]) -> None:
        """End episodes, by id."""
        for episode_id in outcomes:
            if episode_id not in self._in_flight:
                raise LedgerError(f"episode {episode_id} ended but is not in flight")
        for episode_id, outcome in outcomes.items():
            self._in_flight.remove(episode_id)
            name = OUTCOME_NAMES[type(outcome)]
            self.ended[name] += 1
            reason = getattr(outcome, "reason", None)
            if reason is not None:
                self._count_reason(f"{name}: {reason}"[:200])

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def balanced(self) -> bool:
        return self.dispatched == sum(self.ended.values()) + self.in_flight

    def snapshot(self) -> dict[str, Any]:
        """Counts by outcome, as a metric and for the summary."""
        return {
            "dispatched": self.dispatched,
            **{name: self.ended[name] for name in OUTCOME_NAMES.values()},
            "in_flight": self.in_flight,
            "balanced": self.balanced,
            "reasons": dict(self.reasons.most_common(20)),
        }

    def state(self) -> dict[str, Any]:
        """All there is to it, as plain JSON values; see :meth:`restored`."""
        return {
            "dispatched": self.dispatched,
            "ended": dict(self.ended),
            "reasons": dict(self.reasons),
            "in_flight": sorted(self._in_flight),
        }

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Ledger:
        """A ledger that goes on where the one that said ``state`` was.

        Raises:
            LedgerError: the account does not balance.
        """
        ledger = cls()
        ledger.dispatched = state["dispatched"]
        ledger.ended, ledger.reasons = Counter(state["ended"]), Counter(state["reasons"])
        ledger._in_flight = set(state["in_flight"])
        if not ledger.balanced:
            raise LedgerError(f"the saved ledger does not balance: {ledger.snapshot()}")
        return ledger

    def _count_reason(self, reason: str) -> None:
        known = reason in self.reasons or len(self.reasons) < MAX_REASONS
        self.reasons[reason if known else OTHER_REASONS] += 1
