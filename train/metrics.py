"""What is measured: the table of every metric, and how each is computed from groups, counts and evaluations.

Names follow SkyRL-Fleet trainings, so that old and new runs can be laid over each other. ``docs/metrics.md`` shows the
same table; a test compares the two.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from actors.lineage import Lineage
from actors.trajectory import Cancelled, Graded, Group, InfraFailed, StopReason, Trajectory
from train.evaluate import GREEDY, EvalResult, PassRate, env_name

Metrics = dict[str, float]


@dataclass(frozen=True)
class MetricSpec:
    """One metric, or one family of them.

    ``name`` may hold ``{env}`` (an environment key, ``/`` written as ``_``), ``{n}`` (samples of a task), ``{lag}``
    (policy versions), ``{reason}`` (a stop reason or the cause of a drop), ``{phase}`` (of an update in a replica) and
    ``{role}`` (a kind of actor).
    """

    name: str
    unit: str
    source: str
    meaning: str
    healthy: str


_WORD = r"[a-z_]+"
_PLACEHOLDERS = {"env": r"(?P<env>[^/]+)", "n": r"\d+", "lag": r"\d+", "reason": _WORD, "phase": _WORD, "role": _WORD}
_SHARE = "share"

METRICS: tuple[MetricSpec, ...] = (
    # reward: the groups of one training batch
    MetricSpec(
        "reward/avg_pass_at_{n}",
        _SHARE,
        "batch",
        "tasks with at least one reward above 0; with n = 1, mean over tasks of the share of such attempts",
        "rising",
    ),
    MetricSpec("reward/avg_raw_reward", "reward", "batch", "mean reward of graded attempts", "rising"),
    MetricSpec(
        "reward/mean_positive_reward",
        "reward",
        "batch",
        "mean of max(reward, 0) over graded attempts (the older trainings' definition under this name)",
        "rising",
    ),
    MetricSpec("reward/{env}/pass_at_{n}", _SHARE, "batch", "reward/avg_pass_at_{n} of one environment", "rising"),
    MetricSpec(
        "reward/{env}/variance_per_prompt",
        "reward²",
        "batch",
        "mean over tasks with two or more graded attempts of the variance of their rewards",
        "0.05 to 0.25, the maximum of binary rewards; 0 teaches nothing",
    ),
    MetricSpec(
        "reward/{env}/signal_ratio",
        _SHARE,
        "batch",
        "tasks with two or more graded attempts whose rewards differ",
        "above 0.25; below, the environment is too hard or too easy",
    ),
    MetricSpec("reward/{env}/mean_positive_reward", "reward", "batch", "mean of the rewards above 0", "flat"),
    # eval: held-out tasks, under the run's sampling parameters; greedy_ at temperature 0
    MetricSpec(
        "eval/{env}/pass_at_1",
        _SHARE,
        "evaluation",
        "mean over tasks of the share of graded attempts with reward above 0; {env} is `all` for all together",
        "rising",
    ),
    MetricSpec("eval/{env}/pass_at_1_stderr", _SHARE, "evaluation", "its standard error over tasks", "below 0.05"),
    MetricSpec("eval/{env}/pass_at_{n}", _SHARE, "evaluation", "tasks with any reward above 0 in n attempts", "rising"),
    MetricSpec("eval/{env}/variance_per_prompt", "reward²", "evaluation", "as in reward/", "falling"),
    MetricSpec("eval/{env}/mean_positive_reward", "reward", "evaluation", "mean of the rewards above 0", "flat"),
    MetricSpec("eval/{env}/num_tasks", "tasks", "evaluation", "tasks with at least one graded attempt", "constant"),
    MetricSpec("eval/{env}/num_samples", "attempts", "evaluation", "graded attempts", "constant"),
    MetricSpec("eval/{env}/not_graded", "attempts", "evaluation", "attempts left out: the reward is unknown", "0"),
    MetricSpec("eval/{env}/greedy_pass_at_1", _SHARE, "evaluation", "pass_at_1 at temperature 0", "rising"),
    MetricSpec("eval/{env}/greedy_pass_at_1_stderr", _SHARE, "evaluation", "its standard error", "below 0.05"),
    MetricSpec("eval/{env}/greedy_num_tasks", "tasks", "evaluation", "tasks attempted greedily and graded", "constant"),
    MetricSpec("eval/{env}/greedy_num_samples", "attempts", "evaluation", "greedy graded attempts", "constant"),
    MetricSpec("eval/{env}/greedy_not_graded", "attempts", "evaluation", "greedy attempts left out", "0"),
    MetricSpec("eval/policy_version", "version", "evaluation", "the newest one when it began", "growing"),
    MetricSpec("eval/oldest_version", "version", "evaluation", "of the weights that sampled its tokens", "the same"),
    MetricSpec(
        "eval/newest_version",
        "version",
        "evaluation",
        "likewise; later if training went on beside it",
        "close to it",
    ),
    MetricSpec("eval/greedy_policy_version", "version", "evaluation", "as above, of the greedy one", "growing"),
    MetricSpec("eval/greedy_oldest_version", "version", "evaluation", "likewise", "the same"),
    MetricSpec("eval/greedy_newest_version", "version", "evaluation", "likewise", "close to it"),
    # environment: episodes of one training batch that began, whatever their outcome
    MetricSpec("environment/{env}/avg_turns", "turns", "batch", "mean turns of an episode", "below max_turns"),
    MetricSpec("environment/{env}/min_turns", "turns", "batch", "fewest", "above 0"),
    MetricSpec("environment/{env}/max_turns", "turns", "batch", "most", "below max_turns"),
    MetricSpec("environment/{env}/avg_tool_calls", "calls", "batch", "mean tool calls of an episode", "above 0"),
    MetricSpec("environment/{env}/tool_calls_per_turn", "calls", "batch", "tool calls by turns", "near 1"),
    MetricSpec("environment/{env}/avg_tool_errors", "calls", "batch", "mean failed calls of an episode", "falling"),
    MetricSpec("environment/{env}/total_tool_errors", "calls", "batch", "failed tool calls", "falling"),
    MetricSpec("environment/{env}/tool_error_rate", _SHARE, "batch", "tool calls that failed", "below 0.5"),
    MetricSpec("environment/{env}/num_episodes", "episodes", "batch", "episodes that began", "constant"),
    MetricSpec("environment/{env}/env_init_failed", "episodes", "batch", "failed before their first turn", "0"),
    MetricSpec("environment/avg_turns", "turns", "batch", "of all environments together", "below max_turns"),
    MetricSpec("environment/avg_tool_calls", "calls", "batch", "likewise", "above 0"),
    MetricSpec("environment/tool_calls_per_turn", "calls", "batch", "likewise", "near 1"),
    MetricSpec("environment/avg_tool_errors", "calls", "batch", "likewise", "falling"),
    MetricSpec("environment/total_tool_errors", "calls", "batch", "likewise", "falling"),
    MetricSpec("environment/tool_error_rate", _SHARE, "batch", "likewise", "below 0.5"),
    MetricSpec("environment/total_episodes", "episodes", "batch", "likewise", "constant"),
    MetricSpec("environment/total_env_init_failed", "episodes", "batch", "likewise", "0"),
    # generate: what the policy sampled for one training batch
    MetricSpec("generate/avg_num_tokens", "tokens", "batch", "mean sampled tokens of an episode that began", "stable"),
    MetricSpec("generate/min_num_tokens", "tokens", "batch", "fewest", "above 0"),
    MetricSpec("generate/max_num_tokens", "tokens", "batch", "most", "below the context"),
    MetricSpec("generate/std_num_tokens", "tokens", "batch", "standard deviation", "stable"),
    MetricSpec("generate/avg_tokens_non_zero_rewards", "tokens", "batch", "mean where the reward is not 0", "stable"),
    MetricSpec("generate/avg_tokens_zero_rewards", "tokens", "batch", "mean where the reward is 0", "stable"),
    MetricSpec("generate/env_init_failures", "episodes", "batch", "failed before their first turn", "0"),
    MetricSpec("generate/trajectory_timeouts", "episodes", "batch", "ended by the episode's deadline", "0"),
    MetricSpec(
        "generate/stop_{reason}",
        _SHARE,
        "batch",
        "episodes that ended this way: done, env_done, max_turns, length, timeout, error",
        "done or env_done near 1",
    ),
    MetricSpec("generate/tokens_per_s", "tokens/s", "driver", "sampled by all workers since the last step", "stable"),
    # staleness: trained version minus sampled version, over one training batch
    MetricSpec("staleness/mean", "versions", "batch", "mean over groups of the lag of their oldest token", "below max"),
    MetricSpec("staleness/max", "versions", "batch", "largest", "at most buffer.max_staleness"),
    MetricSpec("staleness/token_mean", "versions", "batch", "mean over sampled tokens", "below staleness/mean"),
    MetricSpec("staleness/mixed_share", _SHARE, "batch", "trajectories sampled under more than one version", "any"),
    MetricSpec("staleness/share_lag_{lag}", _SHARE, "batch", "groups with exactly this lag", "any"),
    MetricSpec("staleness/groups", "groups", "batch", "groups in which something was sampled, all lags", "constant"),
    # length: whether long groups are left out, over the last 16 steps
    MetricSpec("length/trained", "tokens", "buffer", "mean sampled tokens of a group that was trained on", "stable"),
    MetricSpec("length/ended", "tokens", "buffer", "the same of all that came back, trained on or dropped", "stable"),
    MetricSpec("length/bias", "1", "buffer", "the first by the second", "near 1; below, long groups are dropped"),
    MetricSpec("length/yield", _SHARE, "buffer", "sampled tokens that were trained on", "near 1"),
    # the learner
    MetricSpec("policy/final_loss", "nats", "learner", "the loss that was minimised, penalties included", "small"),
    MetricSpec("policy/policy_loss", "nats", "learner", "its policy-gradient part", "small"),
    MetricSpec("policy/ppo_clip_ratio", _SHARE, "learner", "trained tokens whose ratio was clipped", "0.001 to 0.2"),
    MetricSpec("policy/policy_entropy", "nats", "learner", "mean entropy where tokens were sampled", "falling slowly"),
    MetricSpec("policy/policy_kl", "nats", "learner", "estimated divergence from the policy that sampled", "below 0.1"),
    MetricSpec(
        "policy/rollout_train_prob_diff_mean",
        "probability",
        "learner",
        "mean difference between engine's and learner's probability of a sampled token, all tokens",
        "below 0.01",
    ),
    MetricSpec("policy/grad_norm", "norm", "learner", "of the gradient before clipping", "stable"),
    MetricSpec("policy/policy_lr", "1", "learner", "learning rate of the step", "as configured"),
    MetricSpec("policy/response_length", "tokens", "learner", "mean sampled tokens of a trained trajectory", "stable"),
    MetricSpec("loss/avg_final_rewards", "reward", "learner", "mean reward of the trained trajectories", "rising"),
    MetricSpec("loss/avg_raw_advantages", "reward", "learner", "mean advantage of the trained trajectories", "near 0"),
    MetricSpec("loss/avg_raw_advantages_abs", "reward", "learner", "mean size of an advantage", "above 0"),
    MetricSpec("loss/trained_tokens", "tokens", "learner", "sampled tokens with a non-zero advantage", "above 0"),
    MetricSpec("loss/trained_groups", "groups", "learner", "groups with a non-zero advantage", "above 0"),
    # mismatch: the learner's logprobs of sampled tokens against the engine's
    MetricSpec(
        "mismatch/logp_abs_diff_mean",
        "nats",
        "learner",
        "mean difference in trajectories sampled under the trained version alone: engine against learner",
        "below 0.05 in bf16, 0.001 in fp32",
    ),
    MetricSpec("mismatch/logp_abs_diff_p99", "nats", "learner", "its 99th percentile", "below 0.3 in bf16"),
    MetricSpec("mismatch/logp_abs_diff_max", "nats", "learner", "its maximum", "below 1 in bf16"),
    MetricSpec("mismatch/k3_kl", "nats", "learner", "k3 estimate of the divergence, the same tokens", "below 0.001"),
    MetricSpec("mismatch/ratio_max", "1", "learner", "largest ratio of probabilities, all tokens", "below 10"),
    MetricSpec("mismatch/ess", _SHARE, "learner", "effective sample size of the ratios, all tokens", "above 0.9"),
    MetricSpec("mismatch/frac_vetoed", _SHARE, "learner", "tokens of sequences that carry no loss", "0; below 0.01"),
    MetricSpec(
        "mismatch/lag_{lag}/token_share",
        _SHARE,
        "learner",
        "tokens in trajectories of this lag; lag 0 is the engine's error alone, the others add staleness",
        "any",
    ),
    MetricSpec("mismatch/lag_{lag}/logp_abs_diff_mean", "nats", "learner", "of those tokens", "grows with the lag"),
    MetricSpec("mismatch/lag_{lag}/logp_abs_diff_p99", "nats", "learner", "likewise", "grows with the lag"),
    MetricSpec("mismatch/lag_{lag}/logp_abs_diff_max", "nats", "learner", "likewise", "grows with the lag"),
    MetricSpec("mismatch/lag_{lag}/k3_kl", "nats", "learner", "likewise", "grows with the lag"),
    MetricSpec("mismatch/lag_{lag}/ratio_max", "1", "learner", "likewise", "below 10"),
    MetricSpec("mismatch/lag_{lag}/ess", _SHARE, "learner", "likewise", "above 0.9"),
    MetricSpec("mismatch/lag_{lag}/frac_vetoed", _SHARE, "learner", "likewise", "0; below 0.01"),
    # where the time of a step goes
    MetricSpec("timing/step", "s", "learner", "from one step's end to the next", "stable"),
    MetricSpec("timing/wait_for_batch", "s", "learner", "waiting for a batch: rollouts are the bottleneck", "near 0"),
    MetricSpec("timing/forward_backward", "s", "learner", "fetching the groups, forward and backward", "stable"),
    MetricSpec("timing/optimizer", "s", "learner", "the optimiser's step", "small"),
    MetricSpec("timing/publish", "s", "learner", "until every replica has the new weights", "small"),
    MetricSpec("timing/checkpoint", "s", "learner", "writing a checkpoint", "small"),
    MetricSpec("timing/eval", "s", "driver", "one evaluation", "stable"),
    # what each role does with its time; the shares of a role add up to 1
    MetricSpec("time_share/learner/wait_for_batch", _SHARE, "learner", "idle: rollouts are the bottleneck", "near 0"),
    MetricSpec("time_share/learner/train", _SHARE, "learner", "forward, backward and optimiser", "near 1"),
    MetricSpec("time_share/learner/publish", _SHARE, "learner", "weights on their way to the replicas", "small"),
    MetricSpec("time_share/learner/checkpoint", _SHARE, "learner", "writing a checkpoint", "small"),
    MetricSpec("time_share/learner/other", _SHARE, "learner", "figures, records and reports of the step", "small"),
    MetricSpec(
        "time_share/rollout/queued",
        _SHARE,
        "driver",
        "of the seconds of all episodes on all workers: waiting for a place among those that run at once",
        "near 0",
    ),
    MetricSpec("time_share/rollout/provision", _SHARE, "driver", "waiting for an instance", "near 0"),
    MetricSpec("time_share/rollout/generate", _SHARE, "driver", "waiting for the policy", "near 1"),
    MetricSpec("time_share/rollout/env", _SHARE, "driver", "reset, tool calls and close", "as slow as the tools are"),
    MetricSpec("time_share/rollout/verify", _SHARE, "driver", "being graded", "small"),
    MetricSpec(
        "time_share/rollout/own_work",
        _SHARE,
        "driver",
        "between those: prompts and parsing, one episode at a time on each worker",
        "below 0.01",
    ),
    MetricSpec("time_share/policy/generate", _SHARE, "learner", "replicas with requests in their engines", "near 1"),
    MetricSpec("time_share/policy/update", _SHARE, "learner", "sampling stands still for new weights", "small"),
    MetricSpec("time_share/policy/idle", _SHARE, "learner", "no request: rollouts do not keep up", "near 0"),
    MetricSpec("time_share/policy/down", _SHARE, "learner", "an engine has died, and the next is starting", "0"),
    # how late event loops wake those who wait, over one step, measured every 0.25 s
    MetricSpec(
        "loop_lag/{role}/max_s",
        "s",
        "driver, learner",
        "largest of all actors of a role: rollout_worker, conductor, env_pool, replay_buffer, replica",
        "below 1; more means that something blocks the loop, or that the machine is out of cores",
    ),
    MetricSpec("loop_lag/{role}/p99_s", "s", "driver, learner", "99th percentile", "below 0.1"),
    MetricSpec("sync/total_s", "s", "learner", "a whole publication", "small"),
    MetricSpec("sync/pack_s", "s", "learner", "gathering and copying the weights, and their checksums", "small"),
    MetricSpec("sync/update_s", "s", "learner", "until the last replica confirmed", "small"),
    MetricSpec("sync/pause_s", "s", "learner", "how long the slowest replica sampled nothing", "small"),
    MetricSpec(
        "sync/replica_{phase}_s",
        "s",
        "learner",
        "of the slowest replica: fetch (of a snapshot, still sampling), pause, start, load, finish, call, resume",
        "small",
    ),
    MetricSpec("sync/failed", "0 or 1", "learner", "whether a replica failed to take the weights", "0"),
    MetricSpec("sync/no_group", "1", "learner", "no broadcast group came about; the snapshot was used", "absent"),
    MetricSpec("sync/version", "version", "learner", "the published policy version", "grows by 1"),
    MetricSpec("trajectories/stored", "batches", "learner", "kept so far, if trainer.dump_trajectories", "grows by 1"),
    MetricSpec("trajectories/lost", "batches", "learner", "could not be kept", "0"),
    MetricSpec("trajectories/waiting", "batches", "learner", "in the spool, not in a Parquet file yet", "few"),
    MetricSpec("trajectories/not_uploaded", "files", "learner", "not in S3 yet", "few"),
    MetricSpec("trainer/global_step", "steps", "learner", "optimiser steps so far", "grows by 1"),
    MetricSpec("trainer/epoch", "epochs", "learner", "passes over the training tasks so far", "growing"),
    # counts at the end of a step
    MetricSpec("buffer/running", "groups", "buffer", "groups in flight", "above 0"),
    MetricSpec("buffer/issued", "groups", "buffer", "of these: ticket given, task being chosen", "near 0"),
    MetricSpec("buffer/dispatched", "groups", "buffer", "of these: no episode asked for its first turn yet", "few"),
    MetricSpec("buffer/generating", "groups", "buffer", "of these: under way", "near running"),
    MetricSpec("buffer/buffered", "groups", "buffer", "groups waiting to be trained", "0 to max_staleness batches"),
    MetricSpec("buffer/training", "groups", "buffer", "in the batch the learner has", "0 or a batch"),
    MetricSpec("buffer/bytes", "bytes", "buffer", "their size", "below buffer.max_bytes"),
    MetricSpec("buffer/capacity", "groups", "buffer", "tickets that could be given now", "near 0"),
    MetricSpec("buffer/trained", "groups", "buffer", "trained so far", "growing"),
    MetricSpec(
        "buffer/dropped_{reason}",
        "groups",
        "buffer",
        "dropped so far: stale, too_few_graded, zero_variance, cancelled, failed, draining",
        "few",
    ),
    MetricSpec("buffer/zero_variance_all_solved", "groups", "buffer", "groups in which every attempt won", "rising"),
    MetricSpec("buffer/zero_variance_none_solved", "groups", "buffer", "groups in which none did", "falling"),
    MetricSpec("ledger/dispatched", "episodes", "buffer", "given to workers: the sum of the next five", "growing"),
    MetricSpec("ledger/graded", "episodes", "buffer", "the verifier answered", "near dispatched"),
    MetricSpec("ledger/ungraded", "episodes", "buffer", "the verifier failed", "0"),
    MetricSpec("ledger/infra_failed", "episodes", "buffer", "our side, the network or the instance failed", "few"),
    MetricSpec("ledger/cancelled", "episodes", "buffer", "ended by us", "few"),
    MetricSpec("ledger/in_flight", "episodes", "buffer", "running now", "above 0"),
    MetricSpec("leases/leased", "instances", "pool", "in use", "above 0"),
    MetricSpec("leases/idle", "instances", "pool", "warm, waiting to be used again", "few"),
    MetricSpec("leases/making", "instances", "pool", "being made", "few"),
    MetricSpec("leases/deleting", "instances", "pool", "being deleted", "few"),
    MetricSpec("leases/waiting", "episodes", "pool", "waiting for an instance", "0; else the quota is the bottleneck"),
    MetricSpec("leases/capacity", "instances", "pool", "how many may exist at once", "constant"),
    MetricSpec("leases/made", "instances", "pool", "made so far", "far below the episodes"),
    MetricSpec("leases/reused", "leases", "pool", "given out warm so far", "near the episodes"),
    MetricSpec("leases/deleted", "instances", "pool", "deleted so far, acknowledged", "made, at the end"),
    MetricSpec("leases/expired", "instances", "pool", "gone by the end of their TTL", "0"),
    MetricSpec("leases/overdue", "leases", "pool", "not given back by their deadline", "0"),
    MetricSpec("leases/failed", "instances", "pool", "could not be made", "0"),
    MetricSpec("leases/refused", "instances", "pool", "refused by the control plane for lack of quota", "few"),
    MetricSpec("leases/breakers_open", "environments", "pool", "rest after failed makes (docs/leases.md)", "0"),
    MetricSpec("leases/lost", "instances", "pool", "vanished while in use", "0"),
    MetricSpec("leases/heartbeats", "calls", "pool", "sent so far", "growing"),
)


@cache
def _patterns() -> list[tuple[re.Pattern[str], MetricSpec]]:
    """Exact names before families: ``eval/{env}/pass_at_1`` is not ``eval/{env}/pass_at_{n}``."""
    ordered = sorted(METRICS, key=lambda spec: "{n}" in spec.name)
    return [(re.compile(_pattern(spec.name)), spec) for spec in ordered]


def _pattern(name: str) -> str:
    parts = re.split(r"\{(\w+)\}", name)
    return "".join(_PLACEHOLDERS[part] if index % 2 else re.escape(part) for index, part in enumerate(parts))


@cache
def find_spec(name: str) -> tuple[MetricSpec, str | None] | None:
    """The table's entry for a metric's name, and the environment in it; ``None`` for a name the table does not hold."""
    for pattern, spec in _patterns():
        match = pattern.fullmatch(name)
        if match is not None:
            return spec, match.groupdict().get("env")
    return None


def _graded_rewards(group: Group) -> list[float]:
    return [t.outcome.reward for t in group.trajectories if isinstance(t.outcome, Graded)]


def _by_env(groups: Iterable[Group]) -> dict[str, list[Group]]:
    grouped: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        grouped[env_name(group.env_key)].append(group)
    return grouped


def _any_solved(rewards: list[list[float]]) -> float:
    return float(np.mean([max(task) > 0 for task in rewards]))


def _solved_share(rewards: list[list[float]]) -> float:
    return float(np.mean([np.mean([r > 0 for r in task]) for task in rewards]))


def _variances(rewards: list[list[float]]) -> list[float]:
    return [float(np.var(task)) for task in rewards if len(task) >= 2]


def _mean_positive(rewards: list[list[float]]) -> Metrics:
    positive = [r for task in rewards for r in task if r > 0]
    return {"mean_positive_reward": float(np.mean(positive))} if positive else {}


def reward_metrics(groups: list[Group], n: int) -> Metrics:
    """``reward/*`` of a training batch with ``n`` samples a task. Ungraded attempts count nowhere, not as zeros."""
    rewards = [r for r in map(_graded_rewards, groups) if r]
    if not rewards:
        return {}
    flat = np.concatenate([np.asarray(task) for task in rewards])
    metrics = {
        "reward/avg_pass_at_1": _solved_share(rewards),
        "reward/avg_raw_reward": float(flat.mean()),
        "reward/mean_positive_reward": float(np.maximum(flat, 0).mean()),
    }
    if n > 1:
        metrics[f"reward/avg_pass_at_{n}"] = _any_solved(rewards)
    for env, members in _by_env(groups).items():
        metrics |= {f"reward/{env}/{name}": value for name, value in _env_reward_metrics(members, n).items()}
    return metrics


def _env_reward_metrics(groups: list[Group], n: int) -> Metrics:
    rewards = [r for r in map(_graded_rewards, groups) if r]
    if not rewards:
        return {}
    metrics = {"pass_at_1": _solved_share(rewards), **_mean_positive(rewards)}
    if n > 1:
        metrics[f"pass_at_{n}"] = _any_solved(rewards)
    variances = _variances(rewards)
    if variances:
        metrics["variance_per_prompt"] = float(np.mean(variances))
        metrics["signal_ratio"] = float(np.mean([v > 0 for v in variances]))
    return metrics


def eval_group_metrics(groups: list[Group], n: int) -> Metrics:
    """What an evaluation with ``n`` samples a task tells beyond its pass rates (see :func:`eval_metrics`)."""
    metrics: Metrics = {}
    for env, members in {"all": groups, **_by_env(groups)}.items():
        rewards = [r for r in map(_graded_rewards, members) if r]
        if not rewards:
            continue
        values = _mean_positive(rewards)
        if n > 1:
            values[f"pass_at_{n}"] = _any_solved(rewards)
        if variances := _variances(rewards):
            values["variance_per_prompt"] = float(np.mean(variances))
        metrics |= {f"eval/{env}/{name}": value for name, value in values.items()}
    return metrics


def eval_metrics(result: EvalResult) -> Metrics:
    """Pass rates and versions of one evaluation under their names; those of a greedy one begin with ``greedy_``."""
    prefix = "greedy_" if result.label == GREEDY else ""
    versions = {"policy": result.version, "oldest": result.oldest_version, "newest": result.newest_version}
    metrics: Metrics = {f"eval/{prefix}{name}_version": v for name, v in versions.items() if v is not None}
    for env, rate in {"all": result.overall, **result.per_env}.items():
        for name, value in _rate_values(rate).items():
            metrics[f"eval/{env_name(env)}/{prefix}{name}"] = value
    return metrics


def _rate_values(rate: PassRate) -> Metrics:
    return {
        "pass_at_1": rate.pass_at_1,
        "pass_at_1_stderr": rate.stderr,
        "num_tasks": rate.tasks,
        "num_samples": rate.attempts,
        "not_graded": rate.not_graded,
    }


def _init_failed(trajectory: Trajectory) -> bool:
    return isinstance(trajectory.outcome, InfraFailed) and trajectory.turns == 0


def _began(trajectory: Trajectory) -> bool:
    """Episodes that never had an environment would pull every average towards zero."""
    return trajectory.turns > 0 and not isinstance(trajectory.outcome, Cancelled)


def environment_metrics(groups: list[Group]) -> Metrics:
    """``environment/*`` of a training batch, per environment and over all."""
    metrics: Metrics = {}
    for env, members in _by_env(groups).items():
        values = _episode_metrics([t for group in members for t in group.trajectories])
        metrics |= {f"environment/{env}/{name}": value for name, value in values.items()}
    values = _episode_metrics([t for group in groups for t in group.trajectories])
    for name, value in values.items():
        if name in ("num_episodes", "env_init_failed"):
            metrics[f"environment/total_{name.removeprefix('num_')}"] = value
        elif name not in ("min_turns", "max_turns"):
            metrics[f"environment/{name}"] = value
    return metrics


def _episode_metrics(trajectories: list[Trajectory]) -> Metrics:
    began = [t for t in trajectories if _began(t)]
    counts = {"num_episodes": len(began), "env_init_failed": sum(map(_init_failed, trajectories))}
    if not began:
        return counts
    turns = [t.turns for t in began]
    calls = sum(t.tool_calls for t in began)
    errors = sum(t.tool_errors for t in began)
    return {
        **counts,
        "avg_turns": float(np.mean(turns)),
        "min_turns": min(turns),
        "max_turns": max(turns),
        "avg_tool_calls": calls / len(began),
        "tool_calls_per_turn": calls / sum(turns),
        "avg_tool_errors": errors / len(began),
        "total_tool_errors": errors,
        "tool_error_rate": errors / calls if calls else 0.0,
    }


def generate_metrics(groups: list[Group]) -> Metrics:
    """``generate/*`` of a training batch: lengths in sampled tokens, and how episodes ended."""
    trajectories = [t for group in groups for t in group.trajectories]
    metrics: Metrics = {
        "generate/env_init_failures": sum(map(_init_failed, trajectories)),
        "generate/trajectory_timeouts": sum(t.stop_reason is StopReason.TIMEOUT for t in trajectories),
    }
    began = [t for t in trajectories if _began(t)]
    if not began:
        return metrics
    tokens = np.array([int(t.mask.sum()) for t in began])
    metrics |= {f"generate/{name}_num_tokens": float(getattr(np, name)(tokens)) for name in ("min", "max", "std")}
    metrics["generate/avg_num_tokens"] = float(tokens.mean())
    graded = np.array([isinstance(t.outcome, Graded) for t in began])
    non_zero = np.array([bool(t.reward) for t in began])
    for name, chosen in (("non_zero", graded & non_zero), ("zero", graded & ~non_zero)):
        if chosen.any():
            metrics[f"generate/avg_tokens_{name}_rewards"] = float(tokens[chosen].mean())
    stops = Counter(t.stop_reason.value for t in began)
    return metrics | {f"generate/stop_{r.value}": stops[r.value] / len(began) for r in StopReason}


def staleness_metrics(groups: list[Group], lineage: Lineage) -> Metrics:
    """``staleness/*`` of a batch that is trained from the newest version of ``lineage``."""
    lags = [lineage.lag(group.oldest_version) for group in groups if group.oldest_version is not None]
    if not lags:
        return {}
    trajectories = [t for group in groups for t in group.trajectories if t.spans]
    spans = [span for t in trajectories for span in t.spans]
    lengths = [span.end - span.start for span in spans]
    metrics = {
        "staleness/mean": float(np.mean(lags)),
        "staleness/max": max(lags),
        "staleness/token_mean": float(np.average([lineage.lag(span.version) for span in spans], weights=lengths)),
        "staleness/mixed_share": float(np.mean([len({s.version for s in t.spans}) > 1 for t in trajectories])),
        "staleness/groups": len(lags),
    }
    return metrics | {f"staleness/share_lag_{lag}": count / len(lags) for lag, count in Counter(lags).items()}


def batch_metrics(groups: list[Group], n: int, lineage: Lineage) -> Metrics:
    """Everything a training batch says of itself; it is trained from the newest version of ``lineage``."""
    return {
        **reward_metrics(groups, n),
        **environment_metrics(groups),
        **generate_metrics(groups),
        **staleness_metrics(groups, lineage),
    }


def buffer_metrics(snapshot: Mapping[str, Any]) -> Metrics:
    """``buffer/*``, ``length/*`` and ``ledger/*`` from the ReplayBuffer's snapshot."""
    states = ("running", "issued", "dispatched", "generating", "buffered", "training", "trained")
    metrics = {f"buffer/{name}": snapshot[name] for name in (*states, "bytes", "capacity")}
    metrics |= {f"length/{name}": value for name, value in snapshot["lengths"].items()}
    metrics |= {f"buffer/dropped_{reason}": count for reason, count in snapshot["dropped"].items()}
    metrics |= {f"buffer/zero_variance_{kind}": count for kind, count in snapshot["zero_variance"].items()}
    names = ("dispatched", "graded", "ungraded", "infra_failed", "cancelled", "in_flight")
    return metrics | {f"ledger/{name}": snapshot["ledger"][name] for name in names}


def lease_metrics(stats: Mapping[str, Any]) -> Metrics:
    """``leases/*`` from the EnvPool's stats. What it does not know, such as a capacity without bound, is left out."""
    names = [spec.name.removeprefix("leases/") for spec in METRICS if spec.name.startswith("leases/")]
    return {f"leases/{name}": stats[name] for name in names if stats.get(name) is not None}


def markdown_table() -> str:
    """The table of docs/metrics.md."""
    rows = [f"| `{m.name}` | {m.unit} | {m.source} | {m.meaning} | {m.healthy} |" for m in METRICS]
    return "\n".join(["| Name | Unit | From | Meaning | Healthy |", "|---|---|---|---|---|", *rows])
