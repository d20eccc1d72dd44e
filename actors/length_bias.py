"""Whether long groups are left out: what is trained on against everything that was rolled out.

Asynchronous runs take what is ready and drop what is too old, so a group that takes long is dropped more often, and the
policy is trained on shorter ones than it samples.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

WINDOW_STEPS = 16  # training steps, long enough for a few drops


class LengthBias:
    """Sampled tokens of the groups that were trained on, and of all that ended, over the last ``WINDOW_STEPS`` steps.

    Every group that is started ends once, trained on or dropped, so in a window the two are of the same groups but for
    the dropped ones. A group that never came back (its worker died, or it took too long) has no length and is in
    neither; ``buffer/dropped_failed`` counts it.

    Args:
        steps: see :meth:`state`.
    """

    def __init__(self, steps: Sequence[Mapping[str, int]] = ()) -> None:
        self._steps = deque((Counter(step) for step in steps), maxlen=WINDOW_STEPS)

    def end(self, tokens: int, trained: bool) -> None:
        """A group with that many sampled tokens has ended."""
        if not self._steps:
            self.begin_step()
        self._steps[-1].update(groups=1, tokens=tokens)
        if trained:
            self._steps[-1].update(trained_groups=1, trained_tokens=tokens)

    def begin_step(self) -> None:
        """What ends from now on belongs to the next training step."""
        self._steps.append(Counter())

    def snapshot(self) -> dict[str, float]:
        """Means of sampled tokens a group; empty until something was trained on.

        Returns:
            ``trained`` and ``ended``; ``bias``, the first by the second: 1 where length plays no part, less where long
            groups are dropped; and ``yield``, the share of all tokens that were trained on.
        """
        total: Counter[str] = sum(self._steps, Counter())
        if not total["trained_tokens"]:
            return {}
        trained, ended = total["trained_tokens"] / total["trained_groups"], total["tokens"] / total["groups"]
        return {
            "trained": trained,
            "ended": ended,
            "bias": trained / ended,
            "yield": total["trained_tokens"] / total["tokens"],
        }

    def state(self) -> list[dict[str, Any]]:
        """As plain JSON, for the constructor."""
        return [dict(step) for step in self._steps]
