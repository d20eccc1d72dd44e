"""Advantage estimators against independent float64 torch formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from train.advantages import SmallGroupError, advantages

GROUPS = [[1.0, 0.0, 0.0, 1.0, 0.0], [0.25, 0.5], [0.1, 0.1, 0.1]]


def test_grpo_divides_by_the_unbiased_std():
    for group, actual in zip(GROUPS, advantages(GROUPS, "grpo"), strict=True):
        rewards = torch.tensor(group, dtype=torch.float64)
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        np.testing.assert_allclose(actual, expected, atol=1e-9)


def test_grpo_without_std_is_dr_grpo():
    for group, plain, dr in zip(
        GROUPS, advantages(GROUPS, "grpo", norm_by_std=False), advantages(GROUPS, "dr_grpo"), strict=True
    ):
        expected = torch.tensor(group, dtype=torch.float64)
        np.testing.assert_allclose(plain, expected - expected.mean(), atol=1e-12)
        np.testing.assert_array_equal(plain, dr)


def test_rloo_leaves_each_member_out_of_its_own_baseline():
    for group, actual in zip(GROUPS, advantages(GROUPS, "rloo"), strict=True):
        expected = [r - np.mean([other for j, other in enumerate(group) if j != i]) for i, r in enumerate(group)]
        np.testing.assert_allclose(actual, expected, atol=1e-12)


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_batch():
    rewards, lengths = [[1.0, 0.0], [0.5, 1.0, 0.0]], [[3, 10], [1, 7, 4]]
    per_token = torch.tensor(
        [r for rs, ns in zip(rewards, lengths, strict=True) for r, n in zip(rs, ns, strict=True) for _ in range(n)],
        dtype=torch.float64,
    )
    white = (per_token - per_token.mean()) / torch.sqrt(per_token.var() + 1e-8)
    flat_lengths = [n for ns in lengths for n in ns]
    expected = white[np.cumsum([0, *flat_lengths[:-1]])]
    actual = advantages(rewards, "reinforce++", lengths=lengths)
    assert [len(group) for group in actual] == [2, 3]
    np.testing.assert_allclose(np.concatenate(actual), expected, atol=1e-9)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_exactly_no_advantage(estimator):
    for rewards in ([1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1]):
        (actual,) = advantages([rewards], estimator)
        np.testing.assert_array_equal(actual, 0.0)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++"])
def test_group_of_one_is_refused(estimator):
    with pytest.raises(SmallGroupError, match="group 1 has 1 graded member"):
        advantages([[1.0, 0.0], [1.0]], estimator, lengths=[[1, 1], [1]])


def test_rewards_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not a finite number"):
        advantages([[1.0, float("nan")]], "dr_grpo")


def test_reinforce_plus_plus_without_lengths_is_refused():
    with pytest.raises(ValueError, match="sampled tokens"):
        advantages([[1.0, 0.0]], "reinforce++")


def test_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="unknown advantage estimator 'gae'"):
        advantages([[1.0, 0.0]], "gae")
