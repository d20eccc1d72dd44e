"""The ``skyrl`` preset: the split that SkyRL-Fleet's data preparation of February 2026 makes, task for task.

Its order of steps matters: ``max_tasks`` is the head of the file *before* duplicates go, tasks without a prompt count
towards their environment's size, an environment is excluded by ``env_key`` alone and only where one modality is asked
for, and the cap of training tasks is a share of what there was before any was taken away.
"""

from __future__ import annotations

from collections.abc import Iterable

from train.data.split import EnvironmentRule, Filters, Preset, Split, TaskFacts, by_environment

EXCLUDED_ENVIRONMENTS = {"tool_use": frozenset({"dropbox"}), "computer_use": frozenset({"dropbox"})}
MAX_EVAL_TASKS = 60
FEWEST_KEPT = 4  # of each environment, before MAX_EVAL_TASKS counts
MAX_TRAIN_SHARE = 0.2

# Tasks of zillow whose dates lack a year and whose env_variables lack CURRENT_DATE, so nobody can solve them.
MISSING_CURRENT_DATE = frozenset(
    f"task_{rest}"
    for rest in (
        "a44hx6crecg4_1769052238469_i7dxxtjvq",
        "a7rlslof7gdy_1768337837679_8be6pguu3",
        "axtmgwocana_1768544478249_k2ozcylyf",
        "b1fxgn0k3yms_1768542773490_ddbhj5bai",
        "b4v77hb3owof_1768546181946_efsedxv9g",
        "b5zt6ipf0nbl_1768346335430_i23gknp4t",
        "bafrpi5qgyzh_1768546181946_2cebmq91r",
        "bdmnfipwxlqv_1769052238469_4nglwjqfm",
        "bxqzfjc2dbte_1768337837679_2qvnm9rq7",
        "c3jwlxmfvbop_1768544478249_efo6hxylr",
        "c7o0c7ehhv9t_1768542773490_2t9w2l1z5",
        "ceqj4h9t0ygi_1768346335430_8j1w8w5xp",
        "cgpxfxp78bvp_1768346335430_6v4n8wlt8",
        "cgsz56tqjlv6_1768346335430_hqgsjy4wt",
        "dpv4bpdpz6db_1768542773490_f3g6w8e8g",
        "f7lgb6fxfwln_1768337837679_d1dxk6ahv",
        "fl1rq3d2wbj9_1768337837679_d2x4k8p93",
        "fn1k5mvjx6r1_1768544478249_1nfmnp6r2",
        "fnh5f0x7hv6w_1768544478249_8wptm6zqp",
        "g2dwb1rfx69c_1769052238469_bc1y9h9d7",
        "g3wpj1mcl0lf_1768546181946_59vtqn9fw",
    )
)

Group = dict[str, list[TaskFacts]]  # tasks by environment


def split_skyrl(
    tasks: Iterable[TaskFacts], preset: Preset, filters: Filters, held_out: frozenset[str] = frozenset()
) -> Split:
    """Split as SkyRL-Fleet does; the sides come in its order, too."""
    split = Split()
    train: Group = {}
    evaluated: Group = {}
    for env_key, group in by_environment(_select(tasks, filters, split.dropped)).items():
        rule = split.environments[env_key] = _rule(len(group), preset, env_key in held_out)
        for task in group:
            if not task.has_prompt:
                split.dropped[task.index] = "no_prompt"
            elif task.hash < rule.threshold:
                evaluated.setdefault(env_key, []).append(task)
            else:
                train.setdefault(env_key, []).append(task)
    split.eval = _cap_eval(evaluated, split.dropped)
    split.train = _cap_train(train, split.dropped)
    return split


def _rule(count: int, preset: Preset, held_out: bool) -> EnvironmentRule:
    if held_out:
        return EnvironmentRule(status="held_out", threshold=1.0)
    target = min(int(count * preset.ratio), preset.cap)
    if target < preset.minimum:
        return EnvironmentRule(status="train_only", threshold=0.0)
    return EnvironmentRule(status="split", threshold=target / count)


def _select(tasks: Iterable[TaskFacts], filters: Filters, dropped: dict[int, str]) -> list[TaskFacts]:
    excluded = EXCLUDED_ENVIRONMENTS.get(filters.modality or "all", frozenset())
    kept: list[TaskFacts] = []
    seen: set[str] = set()
    passed = 0
    for task in tasks:
        reason = _filtered(task, filters)
        if reason is None:
            passed += 1
            reason = _refused(task, passed, filters, seen, excluded)
        if reason is None:
            kept.append(task)
        else:
            dropped[task.index] = reason
    return kept


def _filtered(task: TaskFacts, filters: Filters) -> str | None:
    if filters.modality is not None and task.task_modality != filters.modality:
        return "modality"
    if filters.env_keys and task.env_key not in filters.env_keys:
        return "env_key"
    if filters.difficulties and task.difficulty not in filters.difficulties:
        return "difficulty"
    return None


def _refused(task: TaskFacts, passed: int, filters: Filters, seen: set[str], excluded: frozenset[str]) -> str | None:
    """``passed``: how many tasks went through the filters so far, this one included."""
    if filters.max_tasks is not None and passed > filters.max_tasks:
        return "max_tasks"
    if not task.task_key:
        return "no_task_key"
    if task.task_key in seen:
        return "duplicate"
    seen.add(task.task_key)
    if task.env_key_named and task.env_key in excluded:
        return "excluded"
    if task.task_key in MISSING_CURRENT_DATE:
        return "missing_current_date"
    return None


def _cap_eval(groups: Group, dropped: dict[int, str]) -> list[int]:
    """At most MAX_EVAL_TASKS: a few of each environment, then one at a time from environment to environment."""
    if sum(map(len, groups.values())) <= MAX_EVAL_TASKS:
        return [task.index for group in groups.values() for task in group]
    ranked = {env_key: sorted(group, key=lambda task: task.hash) for env_key, group in groups.items()}
    taken = [task.index for group in ranked.values() for task in group[:FEWEST_KEPT]]
    for place in range(FEWEST_KEPT, max(map(len, ranked.values()))):
        taken += [group[place].index for group in ranked.values() if place < len(group)]
    # The few of each environment are kept even where they alone are more.
    size = max(MAX_EVAL_TASKS, sum(min(FEWEST_KEPT, len(group)) for group in ranked.values()))
    dropped |= dict.fromkeys(taken[size:], "eval_cap")
    return taken[:size]


def _cap_train(groups: Group, dropped: dict[int, str]) -> list[int]:
    """No environment has more than a share of the training tasks, counted before any is taken away."""
    limit = int(sum(map(len, groups.values())) * MAX_TRAIN_SHARE)
    taken: list[int] = []
    for group in groups.values():
        kept = group if len(group) <= limit else sorted(group, key=lambda task: task.hash)[:limit]
        taken += [task.index for task in kept]
        if kept is not group:
            chosen = {task.index for task in kept}
            dropped |= {task.index: "train_cap" for task in group if task.index not in chosen}
    return taken
