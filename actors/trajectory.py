"""What an episode leaves behind: a token-exact trajectory with exactly one outcome, and the group it belongs to."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Graded:
    """The verifier ran and answered."""

    reward: float


@dataclass(frozen=True)
class Ungraded:
    """The verifier, or the judge behind it, failed: the reward is unknown, which is not zero."""

    reason: str


@dataclass(frozen=True)
class InfraFailed:
    """Our side, the network or the instance failed before the episode could be graded."""

    reason: str


@dataclass(frozen=True)
class Cancelled:
    """We ended the episode ourselves (stale, shutdown)."""

    reason: str


Outcome = Graded | Ungraded | InfraFailed | Cancelled

OUTCOME_NAMES: dict[type, str] = {
    Graded: "graded",
    Ungraded: "ungraded",
    InfraFailed: "infra_failed",
    Cancelled: "cancelled",
}


class StopReason(enum.StrEnum):
    """Why an episode took no further turn."""

    DONE = "done"  # the policy said it was done
    ENV_DONE = "env_done"  # the environment ended the episode
    MAX_TURNS = "max_turns"
    LENGTH = "length"  # the token limit of the context or of one generation
    TIMEOUT = "timeout"  # the episode's own deadline
    ERROR = "error"  # see the outcome's reason


@dataclass(frozen=True)
class Span:
    """Sampled tokens ``start <= i < end`` were drawn under policy ``version``.

    Indices count the trajectory's *sampled* tokens only, so spans tile ``[0, sum(mask))``.
    """

    version: int
    start: int
    end: int


def merge_spans(spans: list[Span]) -> list[Span]:
    """Join neighbouring spans of one version. The input must be contiguous and in order."""
    merged: list[Span] = []
    for span in spans:
        if span.start == span.end:
            continue
        if merged and merged[-1].version == span.version and merged[-1].end == span.start:
            merged[-1] = Span(span.version, merged[-1].start, span.end)
        else:
            merged.append(span)
    return merged


@dataclass
class Trajectory:
    """One attempt at a task, as the learner sees it.

    ``ids``, ``mask`` and ``logprobs`` have one entry per token of prompt and response. ``mask`` is 1 exactly on the
    sampled tokens; ``logprobs`` is the engine's log-probability there (temperature applied) and 0 elsewhere.

    Where the policy rewrote its history (see :mod:`actors.context_tools`) the arrays hold several sequences one after
    the other, which begin at ``starts``: the learner trains each on its own, all with the trajectory's advantage. Every
    sampled token is in one of them only; what a later sequence repeats of an earlier one is context.
    """

    trajectory_id: str
    task_key: str
    env_key: str
    group_id: int
    sample_index: int
    ids: np.ndarray  # int32 [tokens]
    mask: np.ndarray  # uint8 [tokens]
    logprobs: np.ndarray  # float32 [tokens]
    prompt_length: int
    spans: list[Span]
    stop_reason: StopReason
    outcome: Outcome
    turns: int = 0
    tool_calls: int = 0
    tool_errors: int = 0
    started_at: float = 0.0  # seconds since the epoch
    duration_s: float = 0.0
    phase_s: dict[str, float] = field(default_factory=dict)  # seconds by phase: provision, reset, generate, ...
    messages: list[dict[str, Any]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])

    def sequences(self) -> list[slice]:
        """Where each sequence lies in ``ids``, ``mask`` and ``logprobs``."""
        return [slice(a, b) for a, b in zip(self.starts, [*self.starts[1:], len(self.ids)], strict=True)]

    def validate(self) -> None:
        """Raise ``ValueError`` where the arrays, the mask or the spans contradict each other."""
        tokens = len(self.ids)
        if not (len(self.mask) == len(self.logprobs) == tokens):
            raise ValueError(
                f"{self.trajectory_id}: {tokens} ids, {len(self.mask)} mask entries, {len(self.logprobs)} logprobs"
            )
        sampled = int(self.mask.sum())
        covered = 0
        for span in self.spans:
            if span.start != covered or span.end <= span.start:
                raise ValueError(f"{self.trajectory_id}: spans {self.spans} do not tile the sampled tokens")
            covered = span.end
        if covered != sampled:
            raise ValueError(f"{self.trajectory_id}: spans cover {covered} of {sampled} sampled tokens")
        if self.starts[0] != 0 or any(part.start >= part.stop for part in self.sequences()[:-1]):
            raise ValueError(f"{self.trajectory_id}: sequences cannot begin at {self.starts} in {tokens} tokens")
        if any(self.mask[start : start + 1].any() for start in self.starts):
            raise ValueError(f"{self.trajectory_id}: a sequence begins with a sampled token")
        if self.mask[: self.prompt_length].any():
            raise ValueError(f"{self.trajectory_id}: the mask covers prompt tokens")

    @property
    def reward(self) -> float | None:
        return self.outcome.reward if isinstance(self.outcome, Graded) else None

    @property
    def oldest_version(self) -> int | None:
        return min((span.version for span in self.spans), default=None)

    @property
    def nbytes(self) -> int:
        return self.ids.nbytes + self.mask.nbytes + self.logprobs.nbytes


@dataclass
class Group:
    """The trajectories of one task that are compared with each other."""

    group_id: int
    task_key: str
    env_key: str
    trajectories: list[Trajectory]

    def members(self, overlong_filtering: bool) -> list[Trajectory]:
        """The trajectories that enter the group's statistics: graded ones, and with ``overlong_filtering`` only those
        that did not run into a token limit (DAPO, decided by stop reason: an episode cut between two turns ends in a
        regular end-of-sequence token)."""
        graded = [t for t in self.trajectories if isinstance(t.outcome, Graded)]
        return [t for t in graded if not (overlong_filtering and t.stop_reason is StopReason.LENGTH)]

    @property
    def oldest_version(self) -> int | None:
        versions = [t.oldest_version for t in self.trajectories if t.oldest_version is not None]
        return min(versions, default=None)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.trajectories)
