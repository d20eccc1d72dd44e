"""Advantages relative to the group: pure functions over numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

Estimator = Literal["grpo", "dr_grpo", "rloo", "reinforce++"]

# SkyRL's constants, kept so that moved runs see the same numbers.
GROUP_EPSILON = 1e-6
WHITENING_EPSILON = 1e-8


class SmallGroupError(ValueError):
    """A group with fewer than two members has nothing to compare; whoever took the batch drops such groups."""


def advantages(
    rewards: Sequence[Sequence[float]],
    estimator: Estimator = "dr_grpo",
    *,
    norm_by_std: bool = True,
    lengths: Sequence[Sequence[int]] | None = None,
) -> list[np.ndarray]:
    """Advantage of every trajectory of a batch.

    Args:
        rewards: one sequence of rewards per group, graded members only.
        estimator: with R a reward, and n, mean and std (unbiased) those of its group:

            - ``grpo``: (R - mean) / (std + 1e-6), or R - mean without ``norm_by_std``;
            - ``dr_grpo``: R - mean (Liu et al. 2025, arXiv:2503.20783);
            - ``rloo``: R minus the mean of the others, n / (n - 1) * (R - mean) (Ahmadian et al. 2024);
            - ``reinforce++``: R whitened over all sampled tokens of the batch (Hu 2025, arXiv:2501.03262).
        norm_by_std: ``grpo`` only.
        lengths: sampled tokens of every trajectory; ``reinforce++`` only, which weights trajectories by them.

    Returns:
        float64 arrays in the shape of ``rewards``.

    Raises:
        SmallGroupError: a group has fewer than two members.
        ValueError: a reward is not finite, or the arguments do not fit together.
    """
    groups = [np.asarray(group, np.float64) for group in rewards]
    for index, group in enumerate(groups):
        if len(group) < 2:
            raise SmallGroupError(f"group {index} has {len(group)} graded member(s); an advantage needs at least 2")
        if not np.isfinite(group).all():
            raise ValueError(f"group {index} has a reward that is not a finite number: {group.tolist()}")
    if estimator == "reinforce++":
        return _whitened(groups, lengths)
    # Equal rewards must give exactly zero: the mean of three rewards of 0.1 is not 0.1 in floating point.
    centred = [group - group.mean() if np.ptp(group) else np.zeros_like(group) for group in groups]
    if estimator == "dr_grpo" or (estimator == "grpo" and not norm_by_std):
        return centred
    if estimator == "grpo":
        return [c / (group.std(ddof=1) + GROUP_EPSILON) for c, group in zip(centred, groups, strict=True)]
    if estimator == "rloo":
        return [c * len(c) / (len(c) - 1) for c in centred]
    raise ValueError(f"unknown advantage estimator '{estimator}'; use grpo, dr_grpo, rloo or reinforce++")


def _whitened(groups: list[np.ndarray], lengths: Sequence[Sequence[int]] | None) -> list[np.ndarray]:
    if lengths is None or [len(group) for group in lengths] != [len(group) for group in groups]:
        raise ValueError("reinforce++ needs the number of sampled tokens of every trajectory")
    if not groups:
        return []
    flat = np.concatenate(groups)
    tokens = np.concatenate([np.asarray(group, np.float64) for group in lengths])
    total = tokens.sum()
    mean = (flat * tokens).sum() / total
    variance = ((flat - mean) ** 2 * tokens).sum() / max(total - 1, 1)
    white = (flat - mean) / np.sqrt(variance + WHITENING_EPSILON)
    return np.split(white, np.cumsum([len(group) for group in groups])[:-1])
