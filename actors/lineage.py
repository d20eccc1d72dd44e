"""Which policy versions follow one another on the way to the present weights, across restarts of a run."""

from __future__ import annotations

from collections.abc import Sequence


class Lineage:
    """How many updates lie between two versions.

    Version numbers only grow, and a number never names two sets of weights. A run that is continued from a checkpoint
    gives the checkpoint's weights a new number: what was published after the checkpoint is not on the line any more,
    and the two numbers of the checkpoint's weights stand at one place of it.

    Args:
        stretches: ``(first, last, updates)`` of each stretch of consecutive versions; ``updates`` led to its first.
    """

    def __init__(self, stretches: Sequence[Sequence[int]] = ((0, 0, 0),)) -> None:
        self._stretches = [(first, last, updates) for first, last, updates in stretches]

    @property
    def newest(self) -> int:
        return self._stretches[-1][1]

    @property
    def stretches(self) -> list[list[int]]:
        """As plain JSON, for the constructor."""
        return [list(stretch) for stretch in self._stretches]

    def advance(self, version: int) -> None:
        """New weights were published, as ``version``; a number that was left out counts as an update.

        Raises:
            ValueError: it is not newer than the newest.
        """
        self._check_newer(version)
        first, _, updates = self._stretches[-1]
        self._stretches[-1] = (first, version, updates)

    def rename(self, version: int) -> None:
        """The newest weights are called ``version`` from now on.

        Raises:
            ValueError: it is not newer than the newest.
        """
        self._check_newer(version)
        first, last, updates = self._stretches[-1]
        self._stretches.append((version, version, updates + last - first))

    def lag(self, version: int) -> int:
        """Updates from ``version`` to the newest weights.

        Raises:
            ValueError: the version is not on the line.
        """
        first, last, updates = self._stretches[-1]
        newest = updates + last - first
        for first, last, updates in reversed(self._stretches):
            if first <= version <= last:
                return newest - (updates + version - first)
        raise ValueError(f"version {version} is not among those that lead to {self.newest}")

    def _check_newer(self, version: int) -> None:
        if version <= self.newest:
            raise ValueError(f"published version {version} is not newer than {self.newest}")
