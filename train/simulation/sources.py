"""Where simulated groups and learner steps get their sizes: from distributions, or from what a run measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from train.simulation.config import Distribution, EpisodeSection

CHUNK = 4096  # drawn at once
READY, TOKENS, TOOLS = range(3)  # columns of an episode: seconds, tokens, seconds


def drawn_groups(episode: EpisodeSection, samples: int, rng: np.random.Generator) -> Iterator[list[list[float]]]:
    """Groups of ``samples`` independent episodes ``[ready_s, tokens, tools_s]``, without end."""
    while True:
        columns = [d.draw(rng, CHUNK * samples) for d in (episode.ready_s, episode.tokens, episode.tools_s)]
        yield from np.stack(columns, axis=1).reshape(CHUNK, samples, 3).tolist()


def drawn_values(distribution: Distribution, rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from distribution.draw(rng, CHUNK).tolist()


@dataclass(frozen=True)
class Measured:
    """What a run left: ``groups`` [groups, episodes, 3] as in :func:`drawn_groups`; seconds of its steps' training and
    publication, ``step_s`` [steps] and ``sync_s`` [steps]."""

    groups: np.ndarray
    step_s: np.ndarray
    sync_s: np.ndarray

    def drawn_groups(self, samples: int, rng: np.random.Generator) -> Iterator[list[list[float]]]:
        """Measured groups at random. Episodes stay with those of their task, which are much like each other."""
        count, size, _ = self.groups.shape
        while True:
            chosen = self.groups[rng.integers(count, size=CHUNK)]
            if samples != size:
                columns = rng.integers(size, size=(CHUNK, samples, 1))
                chosen = np.take_along_axis(chosen, np.broadcast_to(columns, (CHUNK, samples, 3)), axis=1)
            yield from chosen.tolist()


def measured_values(values: np.ndarray, rng: np.random.Generator) -> Iterator[float]:
    while True:
        yield from rng.choice(values, CHUNK).tolist()


def chances(rng: np.random.Generator) -> Callable[[float], bool]:
    """A coin: ``chance(p)`` is true with probability ``p``."""

    def stream() -> Iterator[float]:
        while True:
            yield from rng.random(CHUNK).tolist()

    numbers = stream()
    return lambda p: p > 0 and next(numbers) < p
