"""Which tasks are trained on and which are held out: presets, filters, and the rule of a task's side.

A task's side depends on the MD5 hash of its key, so it is the same in every run and on every machine. Each preset only
says below which hash the tasks of an environment are held out. Two of them need more than that and have files of their
own: :mod:`train.data.skyrl_split` and :mod:`train.data.stable_split`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from actors.config import Section
from actors.task import Modality

DEFAULT_MODALITY: Modality = "tool_use"  # of a task that names none


class SplitError(ValueError):
    """A split that cannot be made, in one line that says what to do."""


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """What a split needs to know of a task.

    Attributes:
        index: its position in the task file.
        task_key: empty where the file has none; only the ``skyrl`` preset meets such tasks, and drops them.
        task_modality: as the file says, ``None`` where it says nothing.
        env_key_named: the environment stands under ``env_key``, not under its alias.
        hash: see :func:`unit_hash`.
    """

    index: int
    task_key: str
    env_key: str
    task_modality: str | None
    difficulty: int | None
    env_key_named: bool
    has_prompt: bool
    hash: float


@dataclass(frozen=True)
class Preset:
    """How tasks are split. The numbers of the published ones are theirs.

    Attributes:
        ratio: share of an environment's tasks that is held out.
        minimum: an environment that would hold out fewer goes to training whole.
        cap: no environment is meant to hold out more; exact only where ``exact`` says so, and for ``stable``.
        exact: hold out ``min(cap, round(ratio * n))`` tasks, those with the smallest hashes.
        held_out: environments, by modality, that are held out whole.
        excluded: environments that are left out.
        modality: the tasks that are taken where nothing else is asked for; ``None``: all.
        adjustable: ratio, minimum and cap may be chosen.
    """

    name: str
    ratio: float
    minimum: int = 0
    cap: int | None = None
    exact: bool = False
    held_out: frozenset[tuple[str, str]] = frozenset()
    excluded: frozenset[str] = frozenset()
    modality: Modality | None = None
    adjustable: bool = False


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("stable", ratio=0.2, minimum=5, cap=20, adjustable=True),
        Preset("custom", ratio=0.2, minimum=5, cap=20, adjustable=True),
        Preset(
            "v0.2",
            ratio=0.02,
            minimum=5,
            held_out=frozenset({("tool_use", "outlook"), ("computer_use", "instacart")}),
        ),
        Preset("v0.2.3", ratio=0.1, cap=30, exact=True, excluded=frozenset({"dropbox", "google-maps"})),
        Preset("v0.3", ratio=0.1, cap=30),
        Preset("skyrl", ratio=0.2, minimum=5, cap=20, modality="tool_use"),
    )
}


@dataclass(frozen=True)
class Filters:
    """Which tasks are taken at all; empty or ``None``: no limit."""

    modality: Modality | None = None
    env_keys: frozenset[str] = frozenset()
    difficulties: frozenset[int] = frozenset()
    max_tasks: int | None = None


class EnvironmentRule(Section):
    """How an environment was split; the ``stable`` preset goes on from it.

    ``split``: a task is held out if its hash is below the threshold. ``train_only``: too few tasks so far; for the
    ``stable`` preset the threshold is the highest it may get. ``held_out``: every task is held out.
    The keys are exceptions and memory of the ``stable`` preset alone: all tasks below the threshold it ever dealt.
    """

    status: Literal["split", "train_only", "held_out"]
    threshold: float = Field(ge=0.0, le=1.0)
    eval_keys: tuple[str, ...] = ()
    train_keys: tuple[str, ...] = ()


@dataclass
class Split:
    """Positions in the task file, in the order in which they are written, and why the others are on neither side."""

    train: list[int] = field(default_factory=list)
    eval: list[int] = field(default_factory=list)
    dropped: dict[int, str] = field(default_factory=dict)
    environments: dict[str, EnvironmentRule] = field(default_factory=dict)


def unit_hash(task_key: str) -> float:
    """MD5 of the task key as a number in [0, 1): the same task falls on the same side in every run."""
    return int.from_bytes(hashlib.md5(task_key.encode()).digest()[:8], "big") / 2**64


def select(tasks: Iterable[TaskFacts], filters: Filters, dropped: dict[int, str]) -> list[TaskFacts]:
    """Apply the filters, then drop duplicates (the first is kept), then take the first ``max_tasks``.

    Args:
        dropped: gets position and reason of every task that is not returned.
    """
    kept: list[TaskFacts] = []
    seen: set[str] = set()
    for task in tasks:
        if filters.modality is not None and (task.task_modality or DEFAULT_MODALITY) != filters.modality:
            dropped[task.index] = "modality"
        elif filters.env_keys and task.env_key not in filters.env_keys:
            dropped[task.index] = "env_key"
        elif filters.difficulties and task.difficulty not in filters.difficulties:
            dropped[task.index] = "difficulty"
        elif task.task_key in seen:
            dropped[task.index] = "duplicate"
        elif filters.max_tasks is not None and len(kept) == filters.max_tasks:
            dropped[task.index] = "max_tasks"
        else:
            seen.add(task.task_key)
            kept.append(task)
    return kept


def by_environment(tasks: Iterable[TaskFacts]) -> dict[str, list[TaskFacts]]:
    """Tasks of each environment in the file's order; environments in alphabetical order."""
    groups: dict[str, list[TaskFacts]] = {}
    for task in tasks:
        groups.setdefault(task.env_key, []).append(task)
    return dict(sorted(groups.items()))


def split_by_threshold(
    tasks: Iterable[TaskFacts], preset: Preset, filters: Filters, held_out: frozenset[str] = frozenset()
) -> Split:
    """Presets ``v0.2``, ``v0.2.3``, ``v0.3`` and ``custom``: one threshold per environment.

    Args:
        held_out: environments that are held out whole, besides the preset's own.
    """
    split = Split()
    taken = select(tasks, filters, split.dropped)
    split.dropped |= {task.index: "excluded" for task in taken if task.env_key in preset.excluded}
    for env_key, group in by_environment(t for t in taken if t.env_key not in preset.excluded).items():
        whole = [t for t in group if env_key in held_out or _modality_and_env(t) in preset.held_out]
        chosen = {t.index for t in whole}
        rest = [t for t in group if t.index not in chosen]
        limit = threshold([t.hash for t in rest], preset) if rest else 1.0
        chosen |= {t.index for t in rest if t.hash < limit}
        split.eval += [t.index for t in group if t.index in chosen]
        split.train += [t.index for t in group if t.index not in chosen]
        status = "held_out" if not rest else "split" if limit > 0 else "train_only"
        split.environments[env_key] = EnvironmentRule(status=status, threshold=limit)
    return split


def threshold(hashes: Sequence[float], preset: Preset) -> float:
    """Below which hash the tasks of one environment are held out; 0 where it goes to training whole."""
    count = len(hashes)
    if preset.exact:
        wanted = min(round(preset.ratio * count), count if preset.cap is None else preset.cap)
        if wanted == 0:
            return 0.0
        return sorted(hashes)[wanted] if wanted < count else 1.0
    expected = preset.ratio * count if preset.cap is None else min(preset.ratio * count, preset.cap)
    if expected < preset.minimum:
        return 0.0
    return preset.ratio if preset.cap is None else min(preset.ratio, preset.cap / count)


def _modality_and_env(task: TaskFacts) -> tuple[str, str]:
    return task.task_modality or DEFAULT_MODALITY, task.env_key
