"""However often the history is rewritten, every sampled token is kept once, in the very context it was sampled in."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.token_record import TokenRecord
from actors.trajectory import Graded, Group, Span, StopReason, Trajectory
from serve.sampling import Completion
from train.evaluate import dump_eval

IDS = st.lists(st.integers(0, 99), min_size=1, max_size=4)
TURNS = st.lists(st.tuples(IDS, IDS, st.none() | st.integers(0, 5)), min_size=1, max_size=12)


def completion(ids):
    return Completion(ids, [-1.0] * len(ids), "stop", None, [(1, 0, len(ids))], "salt")


@given(opening=IDS, turns=TURNS)
def test_every_sampled_token_is_in_one_sequence_only_and_in_its_context(opening, turns):
    record, prompts = TokenRecord(), []
    record.open(opening)
    history = []  # the turns of the current sequence, by an independent account
    for sampled, observed, keep in turns:
        prompts.append(list(record.ids))
        assert prompts[-1] == opening + [i for turn in history for i in turn]
        record.sample(completion(sampled))
        history.append(list(sampled))
        if keep is not None:
            left_out = record.keep_recent(keep)
            kept = history[-max(1, keep) :]
            assert left_out == len(history) - len(kept)
            history = kept
        record.observe(observed)
        history[-1] += observed
        assert record.turns == len(history)
    flat, starts = record.flat()
    ends = [*starts[1:], len(flat.ids)]
    seen = []
    for begin, end in zip(starts, ends, strict=True):
        ids, mask, logprobs = flat.ids[begin:end], flat.mask[begin:end], flat.logprobs[begin:end]
        assert ids[: len(opening)] == opening and not any(mask[: len(opening)])
        assert [p != 0 for p in logprobs] == [m == 1 for m in mask]
        assert any(mask)
        at = [i for i in range(len(ids)) if mask[i]]
        seen += [(ids[:i], ids[i]) for i in at]
    expected = []
    for prompt, (sampled, _, _) in zip(prompts, turns, strict=True):
        expected += [(prompt + list(sampled[:i]), token) for i, token in enumerate(sampled)]
    assert seen == expected
    assert record.sampled == record.spans[-1].end == sum(len(sampled) for sampled, _, _ in turns)


def test_keeping_more_turns_than_there_are_changes_nothing():
    record = TokenRecord()
    record.open([1])
    record.sample(completion([2]))
    assert record.keep_recent(5) == 0 and record.ids == [1, 2]
    assert record.flat()[1] == [0]


def test_an_episode_that_never_sampled_keeps_its_prompt():
    record = TokenRecord()
    record.open([1, 2])
    flat, starts = record.flat()
    assert (flat.ids, flat.mask, starts) == ([1, 2], [0, 0], [0])


def rewritten():
    """A trajectory of two sequences: [1 | 2 3] and, with its second turn alone, [1 | 3 4], sampled 2 and 4."""
    return Trajectory(
        "t", "task", "env", 0, 0,
        np.array([1, 2, 3, 1, 3, 4], np.int32), np.array([0, 1, 0, 0, 0, 1], np.uint8),
        np.array([0, -1, 0, 0, 0, -1], np.float32), 1, [Span(0, 0, 2)], StopReason.DONE, Graded(1.0), starts=[0, 3],
    )  # fmt: skip


def test_a_trajectory_knows_its_sequences_and_refuses_starts_that_cannot_be():
    trajectory = rewritten()
    trajectory.validate()
    assert [trajectory.ids[part].tolist() for part in trajectory.sequences()] == [[1, 2, 3], [1, 3, 4]]
    for starts, part in [([1, 3], "sequences cannot begin"), ([0, 0, 3], "sequences cannot begin"),
                         ([0, 6, 5], "sequences cannot begin"), ([0, 5], "begins with a sampled token")]:  # fmt: skip
        with pytest.raises(ValueError, match=part):
            replace(trajectory, starts=starts).validate()


class Words:
    """A tokenizer that writes ids as they are."""

    def decode(self, ids):
        return " ".join(map(str, ids))


def test_an_evaluation_dump_holds_every_new_token_of_every_sequence_once(tmp_path):
    group = Group(0, "task", "env", [rewritten()])
    dump_eval(tmp_path, [group], Words())
    (line,) = (tmp_path / "env.jsonl").read_text().splitlines()
    dumped = json.loads(line)
    assert (dumped["input_prompt"], dumped["output_response"]) == ("1", "2 3 4")
    assert dumped["score"] == [0.0, 0.0, 1.0]
