"""A circuit breaker: after so many failures in a row nothing more is begun for a while, and then one thing on trial.

Plain data and decisions; the caller says what time it is.
"""

from __future__ import annotations

import enum
import logging
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

logger = logging.getLogger(__name__)

KEPT_TRANSITIONS = 20


class BreakerState(enum.StrEnum):
    CLOSED = "closed"  # everything may begin
    OPEN = "open"  # nothing may begin until the pause is over
    HALF_OPEN = "half_open"  # the pause is over, and one trial is under way


class BreakerEvent(enum.StrEnum):
    TRIPPED = "tripped"  # the last of so many failures in a row
    TRIAL_BEGUN = "trial_begun"
    TRIAL_FAILED = "trial_failed"
    TRIAL_ABANDONED = "trial_abandoned"  # it ended without saying anything about what the breaker watches
    WORKED = "worked"  # the trial, or something that began before the breaker opened


TRANSITIONS: dict[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.TRIAL_BEGUN): BreakerState.HALF_OPEN,
    (BreakerState.OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_FAILED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.TRIAL_ABANDONED): BreakerState.OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.WORKED): BreakerState.CLOSED,
}


@dataclass(frozen=True)
class Transition:
    """One change of state: when (the caller's clock), by what, and the id of the attempt that caused it."""

    at: float
    before: BreakerState
    event: BreakerEvent
    after: BreakerState
    attempt_id: str


class CircuitBreaker:
    """The breaker of one environment. Each attempt is told to it when it begins and once when it ends.

    Args:
        name: for the log.
        failures: so many in a row open it.
        pause_s: the first pause; each trial that fails doubles it, up to ``max_pause_s``. Times in seconds.
    """

    def __init__(self, name: str, failures: int, pause_s: float, max_pause_s: float) -> None:
        self.name = name
        self.state = BreakerState.CLOSED
        self.retry_at = 0.0  # when the pause ends; meaningful while open
        self.trial_id: str | None = None  # set exactly while half-open
        self.in_a_row = 0
        self.transitions: deque[Transition] = deque(maxlen=KEPT_TRANSITIONS)
        self.times_opened = 0
        self._failures = failures
        self._first_pause_s = pause_s
        self._max_pause_s = max(pause_s, max_pause_s)
        self.pause_s = pause_s  # of the present or the next opening

    def may_begin(self, now: float) -> bool:
        """Whether an attempt may begin now."""
        if self.state is BreakerState.OPEN:
            return now >= self.retry_at
        return self.state is BreakerState.CLOSED

    def begin(self, attempt_id: str, now: float) -> bool:
        """An attempt begins, which :meth:`may_begin` allows. True: it is the trial."""
        if self.state is not BreakerState.OPEN:
            return False
        self.trial_id = attempt_id
        self._go(BreakerEvent.TRIAL_BEGUN, attempt_id, now)
        return True

    def worked(self, attempt_id: str, now: float) -> None:
        """An attempt succeeded, whenever it began."""
        self.in_a_row = 0
        self.pause_s = self._first_pause_s
        if self.state is not BreakerState.CLOSED:
            self.trial_id = None
            self._go(BreakerEvent.WORKED, attempt_id, now)

    def failed(self, attempt_id: str, now: float) -> None:
        """An attempt failed. One that began before the breaker opened changes nothing more."""
        self.in_a_row += 1
        if self.state is BreakerState.CLOSED and self.in_a_row >= self._failures:
            self._open(BreakerEvent.TRIPPED, attempt_id, now)
        elif attempt_id == self.trial_id:
            self.pause_s = min(2 * self.pause_s, self._max_pause_s)
            self._open(BreakerEvent.TRIAL_FAILED, attempt_id, now)

    def abandoned(self, attempt_id: str, now: float) -> None:
        """An attempt ended for a reason that is not the environment's: the quota, a rate limit, the pool's end."""
        if attempt_id == self.trial_id:
            self.trial_id = None
            self._go(BreakerEvent.TRIAL_ABANDONED, attempt_id, now)  # the pause is over already: the next one tries

    def snapshot(self, now: float) -> dict[str, Any]:
        """State, failures in a row, seconds until the next trial, and the last changes of state."""
        waits = self.retry_at - now if self.state is BreakerState.OPEN else 0.0
        return {
            "state": self.state.value,
            "failures_in_a_row": self.in_a_row,
            "times_opened": self.times_opened,
            "retry_in_s": round(max(0.0, waits), 1),
            "trial_id": self.trial_id,
            "transitions": [asdict(transition) for transition in self.transitions],
        }

    def _open(self, event: BreakerEvent, attempt_id: str, now: float) -> None:
        self.trial_id = None
        self.retry_at = now + self.pause_s
        self.times_opened += 1
        self._go(event, attempt_id, now)

    def _go(self, event: BreakerEvent, attempt_id: str, now: float) -> None:
        before, self.state = self.state, TRANSITIONS[self.state, event]
        self.transitions.append(Transition(now, before, event, self.state, attempt_id))
        log = logger.warning if self.state is BreakerState.OPEN else logger.info
        log(
            "%s: %s -> %s (%s, make %s, %d failures in a row%s)",
            self.name,
            before,
            self.state,
            event,
            attempt_id,
            self.in_a_row,
            f", next trial in {max(0.0, self.retry_at - now):.0f} s" if self.state is BreakerState.OPEN else "",
        )
