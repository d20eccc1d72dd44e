"""The ``stable`` preset: once a task was dealt to a side it stays there, whatever is added, removed or reordered.

The first split of an environment fixes its threshold: the ratio, or less where that would hold out more than the cap.
Later splits are given the rules of the one before and go on from them:

- A task below the threshold that was dealt before goes where it went.
- A new one is held out while there is room under the cap, the smallest hash first; else it is trained on, and its key
  is written down.
- An environment with too few tasks goes to training whole and is split once enough *new* tasks fall below the ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from train.data.split import EnvironmentRule, Filters, Preset, Split, SplitError, TaskFacts, by_environment, select


def split_stable(
    tasks: Iterable[TaskFacts],
    preset: Preset,
    filters: Filters,
    held_out: frozenset[str] = frozenset(),
    stored: Mapping[str, EnvironmentRule] | None = None,
) -> Split:
    """Split as the rules of the last split say, and return the rules for the next one.

    Args:
        held_out: environments that are held out whole from their first split on.
        stored: the rules by environment; those of environments without tasks now are kept.

    Raises:
        SplitError: an environment that was split before is to be held out now.
    """
    stored = stored or {}
    split = Split(environments=dict(stored))
    for env_key, group in by_environment(select(tasks, filters, split.dropped)).items():
        rule = stored.get(env_key)
        if env_key in held_out and rule is not None and rule.status != "held_out":
            raise SplitError(
                f"environment '{env_key}' was split before, so holding it out would move tasks: leave it out of "
                "--held-out, or write to a new --out"
            )
        rule = _next_rule(rule, group, preset, env_key in held_out)
        train_keys = set(rule.train_keys)
        held = {task.index for task in group if _is_held_out(task, rule, train_keys)}
        split.eval += [task.index for task in group if task.index in held]
        split.train += [task.index for task in group if task.index not in held]
        split.environments[env_key] = rule
    return split


def _is_held_out(task: TaskFacts, rule: EnvironmentRule, train_keys: set[str]) -> bool:
    if rule.status != "split":
        return rule.status == "held_out"
    return task.hash < rule.threshold and task.task_key not in train_keys


def _next_rule(
    rule: EnvironmentRule | None, tasks: Sequence[TaskFacts], preset: Preset, held_out: bool
) -> EnvironmentRule:
    """The rule that also covers the tasks that were not seen before."""
    if rule is None and held_out:
        return EnvironmentRule(status="held_out", threshold=1.0)
    first = rule is None
    rule = rule or EnvironmentRule(status="train_only", threshold=preset.ratio)
    if rule.status == "held_out":
        return rule
    known = {*rule.eval_keys, *rule.train_keys}
    new = sorted((t for t in tasks if t.hash < rule.threshold and t.task_key not in known), key=lambda t: t.hash)
    if rule.status == "split":
        present = {task.task_key for task in tasks}
        room = len(new) if preset.cap is None else max(0, preset.cap - len(present.intersection(rule.eval_keys)))
        return _dealt(rule, new[:room], new[room:])
    enough = preset.ratio * len(tasks) if first else len(new)
    if enough < preset.minimum:
        return _dealt(rule, [], new)
    room = len(new) if preset.cap is None else preset.cap
    limit = new[room].hash if room < len(new) else rule.threshold
    return _dealt(rule.model_copy(update={"status": "split", "threshold": limit}), new[:room], [])


def _dealt(rule: EnvironmentRule, held: Sequence[TaskFacts], trained: Sequence[TaskFacts]) -> EnvironmentRule:
    return rule.model_copy(
        update={
            "eval_keys": tuple(sorted((*rule.eval_keys, *(task.task_key for task in held)))),
            "train_keys": tuple(sorted((*rule.train_keys, *(task.task_key for task in trained)))),
        }
    )
