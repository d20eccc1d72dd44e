"""The order in which training tasks are used: every task in turn, or a mix of environments and modalities.

A mix is kept batch by batch. Each environment has its own endless stream, epoch after epoch over its tasks in a seeded
order, so a small environment begins again while a large one goes on, and no environment ends the others' epoch. How
many tasks of a batch each stream gives follows its share as closely as whole numbers allow, and never less than the
minimum.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from actors.config import Section
from actors.task import Modality, Task

Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class TaskMix(Section):
    """How often tasks of which environment and modality are drawn. The default draws every task once an epoch."""

    min_per_env: int = Field(0, ge=0, description="tasks of every environment in each batch")
    env_weights: dict[str, Weight] = Field(
        {}, description="factor on an environment's share; 0 leaves it out; 1 where nothing is said"
    )
    modality_weights: dict[Modality, Weight] = Field(
        {}, description="shares of the modalities, relative to each other; empty: as the tasks are"
    )
    size_exponent: float = Field(
        1.0, ge=0, le=1, description="an environment's share goes with its number of tasks to this power; 0: all alike"
    )


class TaskSampler:
    """An endless iterator over tasks that can be stopped and taken up again at the exact task.

    Args:
        tasks: at least one. Their order counts: the same tasks in another order are drawn in another order.
        seed: decides every order.
        mix: shares of environments and modalities.
        batch_size: tasks over which the shares and the minimum of ``mix`` hold; the groups of a training step.

    Raises:
        ValueError: the mix cannot be had of these tasks, in one line.
    """

    def __init__(self, tasks: Sequence[Task], seed: int, mix: TaskMix | None = None, batch_size: int = 1) -> None:
        if not tasks:
            raise ValueError("a sampler needs at least one task")
        mix = mix or TaskMix()
        self._seed = seed
        self._batch_size = batch_size
        self._minimum = mix.min_per_env
        self._streams = _streams(tasks, seed, mix)
        self._shares = _shares(self._streams, mix, batch_size)
        self._size = sum(len(stream) for stream in self._streams.values())
        self._planned = 0  # tasks of all batches so far, the running one included
        self._batch: list[str] = []  # streams that give the rest of the running batch
        description = [seed, mix.model_dump(), batch_size, [task.task_key for task in tasks]]
        self._fingerprint = hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def drawn(self) -> int:
        """Tasks drawn so far."""
        return self._planned - len(self._batch)

    @property
    def epoch(self) -> float:
        """Tasks drawn, in units of the data's size: passes over the data, where every task is drawn alike."""
        return self.drawn / self._size

    def __iter__(self) -> TaskSampler:
        return self

    def __next__(self) -> Task:
        if not self._batch:
            self._batch = self._next_batch()
        return next(self._streams[self._batch.pop(0)])

    def state_dict(self) -> dict[str, Any]:
        """Where the sampler stands, as plain JSON."""
        drawn = {name: stream.drawn for name, stream in self._streams.items()}
        return {"fingerprint": self._fingerprint, "batch": list(self._batch), "drawn": drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the task after the last one that was drawn when ``state`` was taken.

        Raises:
            ValueError: the state is of other tasks, another seed, mix or batch size, or is damaged.
        """
        if state.get("fingerprint") != self._fingerprint:
            raise ValueError("the sampler's state is of other tasks, or another seed, mix or batch size")
        drawn, batch = state.get("drawn"), state.get("batch")
        if not isinstance(drawn, Mapping) or drawn.keys() != self._streams.keys():
            raise ValueError("the sampler's state is damaged: 'drawn' does not name its streams")
        if not all(isinstance(count, int) and count >= 0 for count in drawn.values()):
            raise ValueError("the sampler's state is damaged: 'drawn' holds something other than counts")
        if not isinstance(batch, list) or any(name not in drawn for name in batch):
            raise ValueError("the sampler's state is damaged: 'batch' does not name its streams")
        for name, stream in self._streams.items():
            stream.drawn = drawn[name]
        self._batch = list(batch)
        self._planned = sum(stream.drawn for stream in self._streams.values()) + len(batch)

    def _next_batch(self) -> list[str]:
        """The streams of the next batch, in seeded order; to be called when the last batch is used up."""
        chosen = [name for name in self._streams for _ in range(self._minimum)]
        counts = {name: stream.drawn + self._minimum for name, stream in self._streams.items()}
        total = self._planned + self._batch_size
        while len(chosen) < self._batch_size:
            # Whoever is furthest behind its share; the first of equals.
            name = max(counts, key=lambda name: self._shares[name] * total - counts[name])
            counts[name] += 1
            chosen.append(name)
        random.Random(f"{self._seed}/batch/{self._planned}").shuffle(chosen)
        self._planned = total
        return chosen


class _Stream:
    """Epoch after epoch over some tasks, each epoch in its own seeded order."""

    def __init__(self, tasks: list[Task], seed: str) -> None:
        self._tasks = tasks
        self._seed = seed
        self._epoch = -1
        self._order: list[int] = []
        self.drawn = 0

    @property
    def modality(self) -> Modality:
        return self._tasks[0].task_modality

    @property
    def env_key(self) -> str:
        return self._tasks[0].env_key

    def __len__(self) -> int:
        return len(self._tasks)

    def __next__(self) -> Task:
        epoch, position = divmod(self.drawn, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._tasks)))
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
        self.drawn += 1
        return self._tasks[self._order[position]]


def _streams(tasks: Sequence[Task], seed: int, mix: TaskMix) -> dict[str, _Stream]:
    """One stream of each environment in each modality; one of everything where no mix is asked for."""
    if mix == TaskMix():
        return {"all": _Stream(list(tasks), str(seed))}
    _check_names(tasks, mix)
    groups: dict[str, list[Task]] = {}
    for task in tasks:
        if mix.env_weights.get(task.env_key, 1.0) > 0 and mix.modality_weights.get(task.task_modality, 1.0) > 0:
            groups.setdefault(f"{task.task_modality}/{task.env_key}", []).append(task)
    if not groups:
        raise ValueError("the weights of the mix leave out every task")
    return {name: _Stream(group, f"{seed}/{name}") for name, group in sorted(groups.items())}


def _check_names(tasks: Sequence[Task], mix: TaskMix) -> None:
    for name, weights, known in (
        ("env_weights", mix.env_weights, {task.env_key for task in tasks}),
        ("modality_weights", mix.modality_weights, {task.task_modality for task in tasks}),
    ):
        for key in weights:
            if key not in known:
                nearest = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.0)[0]
                raise ValueError(f"{name} names '{key}', which no task has; the nearest that one has is '{nearest}'")
    missing = {task.task_modality for task in tasks} - mix.modality_weights.keys()
    if mix.modality_weights and missing:
        raise ValueError(f"modality_weights names no weight of {', '.join(sorted(missing))}; 0 leaves it out")


def _shares(streams: Mapping[str, _Stream], mix: TaskMix, batch_size: int) -> dict[str, float]:
    """The share of all draws of each stream; they add up to 1."""
    if not mix.modality_weights:
        return _shares_within(streams, 1.0, mix, batch_size)
    weights = {stream.modality: mix.modality_weights[stream.modality] for stream in streams.values()}
    shares: dict[str, float] = {}
    for modality, weight in weights.items():
        own = {name: stream for name, stream in streams.items() if stream.modality == modality}
        shares |= _shares_within(own, weight / sum(weights.values()), mix, batch_size)
    return shares


def _shares_within(streams: Mapping[str, _Stream], pool: float, mix: TaskMix, batch_size: int) -> dict[str, float]:
    """Divide ``pool`` by weight and size; who would get less than the minimum gets that, at the others' expense."""
    least = mix.min_per_env / batch_size
    if least * len(streams) > pool + 1e-9:
        raise ValueError(
            f"min_per_env {mix.min_per_env} asks for {mix.min_per_env * len(streams)} tasks a batch for "
            f"{', '.join(streams)}, but their part of {batch_size} is {pool * batch_size:.3g}"
        )
    wanted = {
        name: mix.env_weights.get(stream.env_key, 1.0) * len(stream) ** mix.size_exponent
        for name, stream in streams.items()
    }
    raised: set[str] = set()
    while True:
        free = pool - least * len(raised)
        whole = sum(weight for name, weight in wanted.items() if name not in raised)
        shares = {name: least if name in raised else weight / whole * free for name, weight in wanted.items()}
        short = {name for name, share in shares.items() if share < least - 1e-12}
        if not short:
            return shares
        raised |= short
