"""A verifier or an instance that fails takes its trajectory out of the statistics; it never changes the others'."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.prompt import tool_text
from actors.trajectory import Cancelled, Graded, Group, InfraFailed, Span, StopReason, Trajectory, Ungraded
from train.advantages import advantages

FAILURES = [Ungraded("judge"), InfraFailed("step: no answer"), Cancelled("stale")]
REWARDS = st.lists(st.sampled_from([0.0, 1.0]), min_size=4, max_size=16)


def trajectory(number, outcome, stop=StopReason.DONE):
    ids = np.array([1, 2, 3], np.int32)
    mask, logprobs = np.array([0, 1, 1], np.uint8), np.array([0, -1, -1], np.float32)
    return Trajectory(f"{number}", "task", "env", 0, number, ids, mask, logprobs, 1, [Span(0, 0, 2)], stop, outcome)


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@given(rewards=REWARDS, failing=st.data())
def test_with_failing_verifiers_advantages_equal_those_of_the_graded_ones_alone(estimator, rewards, failing):
    outcomes = [
        failing.draw(st.sampled_from(FAILURES)) if failing.draw(st.integers(0, 3)) == 0 else Graded(reward)
        for reward in rewards
    ]
    group = Group(0, "task", "env", [trajectory(n, outcome) for n, outcome in enumerate(outcomes)])
    members = group.members(overlong_filtering=False)
    fault_free = [reward for reward, outcome in zip(rewards, outcomes, strict=True) if isinstance(outcome, Graded)]
    assert [member.reward for member in members] == fault_free
    if len(fault_free) >= 2:
        (got,) = advantages([[member.reward for member in members]], estimator)
        (expected,) = advantages([fault_free], estimator)
        assert got.tolist() == expected.tolist()


def test_an_episode_cut_between_two_turns_is_overlong_although_it_ends_in_an_end_of_turn():
    cut = trajectory(0, Graded(0.0), StopReason.LENGTH)
    group = Group(0, "task", "env", [cut, trajectory(1, Graded(1.0)), trajectory(2, Graded(0.0))])
    assert [t.sample_index for t in group.members(overlong_filtering=True)] == [1, 2]
    assert len(group.members(overlong_filtering=False)) == 3


def test_a_good_result_that_has_a_key_called_error_is_not_erased():
    assert tool_text({"error": None, "rows": 3}) == '{"error":null,"rows":3}'
    assert tool_text({"error": ""}) == '{"error":""}'
