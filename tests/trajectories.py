"""Trajectories for tests: plausible ones by seed, and arbitrary ones for properties."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import strategies as st

from actors.trajectory import Cancelled, Graded, Group, InfraFailed, Span, StopReason, Trajectory, Ungraded, merge_spans

ENVS = ("tracker", "booking/eu")


def call(name: str, **arguments) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def dialogue(number: int, reward: float) -> list[dict]:
    return [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": f"Close ticket {number}."},
        {"role": "assistant", "content": f"<think>which one?</think>{call('find_ticket', number=number)}"},
        {"role": "tool", "content": f'{{"id": {number}, "state": "open"}}'},
        {"role": "assistant", "content": call("close_ticket", number=number)},
        {"role": "tool", "content": "Error: no such tool"},
        {"role": "assistant", "content": f"Ticket {number} is {'closed' if reward else 'open'}.<done>"},
    ]


def make_trajectory(number: int, sample: int = 0, tokens: int = 60, version: int = 3) -> Trajectory:
    """Three turns; every fourth one was not graded."""
    random = np.random.default_rng([number, sample])
    mask = np.zeros(tokens, dtype=np.uint8)
    third = tokens // 3
    for turn in range(3):
        mask[turn * third + third // 2 : (turn + 1) * third - 1] = 1
    sampled = int(mask.sum())
    outcome = InfraFailed("reset: no answer in 60 s") if number % 4 == 3 else Graded(float((number + sample) % 2))
    trajectory = Trajectory(
        trajectory_id=f"{number}/task-{number}/{sample}",
        task_key=f"task-{number}",
        env_key=ENVS[number % 2],
        group_id=number,
        sample_index=sample,
        ids=random.integers(0, 150_000, tokens, dtype=np.int32),
        mask=mask,
        logprobs=np.where(mask == 1, -random.exponential(1.0, tokens), 0).astype(np.float32),
        prompt_length=third // 2,
        spans=[Span(version - 1, 0, sampled // 2), Span(version, sampled // 2, sampled)],
        stop_reason=StopReason.DONE,
        outcome=outcome,
        turns=3,
        tool_calls=2,
        tool_errors=1,
        started_at=1.5e9 + number,
        duration_s=1.25,
        phase_s={"reset": 0.5, "generate": 0.75},
        messages=dialogue(number, getattr(outcome, "reward", 0.0)),
    )
    trajectory.validate()
    return trajectory


def make_groups(count: int, samples: int = 2, first: int = 0, tokens: int = 60) -> list[Group]:
    return [
        Group(n, f"task-{n}", ENVS[n % 2], [make_trajectory(n, i, tokens) for i in range(samples)])
        for n in range(first, first + count)
    ]


_FLOAT32 = st.floats(width=32, allow_nan=False)
_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "note"]), "content": st.text() | _JSON},
    optional={"tool_calls": _JSON, "name": st.text()},
)
_OUTCOMES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(Graded),
    *(st.text().map(kind) for kind in (Ungraded, InfraFailed, Cancelled)),
)


@st.composite
def trajectories(draw) -> Trajectory:
    """Any that validates: no tokens at all, several sequences, every outcome, odd messages."""
    parts = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=12), max_size=3))
    mask = np.array([m and i > 0 for part in parts for i, m in enumerate(part)], dtype=np.uint8)
    tokens, sampled = len(mask), int(mask.sum())
    starts = [0, *np.cumsum([len(part) for part in parts])[:-1].tolist()] if parts else [0]
    cuts = sorted({0, sampled, *draw(st.lists(st.integers(0, sampled), max_size=3))})
    spans = [Span(v, a, b) for v, (a, b) in enumerate(zip(cuts[:-1], cuts[1:], strict=True))]
    logprobs = draw(st.lists(_FLOAT32, min_size=tokens, max_size=tokens))
    trajectory = Trajectory(
        trajectory_id=draw(st.text()),
        task_key=draw(st.text()),
        env_key=draw(st.text()),
        group_id=draw(st.integers(0, 2**50)),
        sample_index=draw(st.integers(0, 1000)),
        ids=np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=tokens, max_size=tokens)), dtype=np.int32),
        mask=mask,
        logprobs=np.array(logprobs, dtype=np.float32),
        prompt_length=int(np.flatnonzero(mask)[0]) if sampled else tokens,
        spans=merge_spans(spans),
        stop_reason=draw(st.sampled_from(StopReason)),
        outcome=draw(_OUTCOMES),
        turns=draw(st.integers(0, 50)),
        started_at=draw(st.floats(0, 4e9)),
        duration_s=draw(st.floats(0, 4e9)),
        phase_s=draw(st.dictionaries(st.text(), st.floats(0, 1e6), max_size=3)),
        messages=draw(st.lists(_MESSAGES, max_size=4)),
        starts=starts,
    )
    trajectory.validate()
    return trajectory


def facts(trajectory: Trajectory) -> dict:
    """Everything in it, in types that compare."""
    arrays = ("ids", "mask", "logprobs")
    plain = {name: value for name, value in vars(trajectory).items() if name not in arrays}
    return plain | {
        name: (str(getattr(trajectory, name).dtype), getattr(trajectory, name).tobytes()) for name in arrays
    }
