"""What a simulated run says of the real one, as figures and in words."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from train.config import ConfigError
from train.simulation.config import SimulationConfig
from train.simulation.simulator import Simulation

BUSY = 0.85  # a share of time above which something is taken to be the limit


@dataclass(frozen=True)
class Prediction:
    """Averages over the steps after the warm-up. Times in seconds unless the name says hours."""

    steps: int
    hours: float
    step_s: float  # from one step's end to the next
    step_s_p99: float
    wait_for_batch_s: float
    learner_utilisation: float  # share of time that it trains or publishes
    policy_utilisation: float  # share of its highest throughput; on a shared host, of the host's cores
    tokens_per_s: float  # sampled, of all episodes that ended
    trained_tokens_per_s: float
    staleness_mean: float  # versions, of trained groups
    staleness: dict[int, float]  # share of trained groups by lag
    episodes: float  # that have an instance
    generating: float  # of these
    waiting_for_instance: float
    buffered_groups: float
    buffered_groups_max: int
    buffered_gb: float
    dropped: dict[str, int]  # groups by reason
    dropped_share: float  # of all groups that came or were given up
    deaths: dict[str, int]
    limit: str  # what to change first
    ledger: dict[str, Any]  # of the whole run

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, floats to four digits."""
        return {name: _rounded(value) for name, value in asdict(self).items()}


def predict(simulation: Simulation) -> Prediction:
    """The figures of a simulation that was run.

    Raises:
        ConfigError: it trained no step beyond its warm-up.
    """
    config, core, averages = simulation.config, simulation.core, simulation.averages
    steps = simulation.steps[config.warmup_steps :]
    if not steps:
        raise ConfigError(
            f"no step beyond {config.warmup_steps} of warm-up ended in {config.max_hours:g} h: "
            f"raise max_hours or lower warmup_steps ({core.outstanding()})"
        )
    seconds = steps[-1].ended - averages.begun
    measured = simulation.now - averages.begun
    lags = Counter(lag for step in steps for lag in step.lags)
    groups = sum(lags.values())
    step_s = np.asarray([step.step_s for step in steps])
    wait_s = float(np.mean([step.wait_s for step in steps]))
    dropped = core.dropped - averages.dropped
    places = config.generator.max_inflight_episodes // config.generator.n_samples_per_prompt
    figures = {
        "learner_utilisation": 1.0 - wait_s / float(step_s.mean()),
        "policy_utilisation": averages.policy / measured,
        "episodes": averages.episodes / measured,
        "waiting_for_instance": averages.waiting / measured,
    }
    return Prediction(
        **figures,
        steps=len(steps),
        hours=simulation.now / 3600,
        step_s=float(step_s.mean()),
        step_s_p99=float(np.quantile(step_s, 0.99)),
        wait_for_batch_s=wait_s,
        tokens_per_s=averages.sampled_tokens / measured,
        trained_tokens_per_s=sum(step.tokens for step in steps) / seconds,
        staleness_mean=sum(lag * count for lag, count in lags.items()) / groups,
        staleness={lag: lags[lag] / groups for lag in sorted(lags)},
        generating=averages.generating / measured,
        buffered_groups=averages.buffered / measured,
        buffered_groups_max=averages.most_buffered,
        buffered_gb=averages.buffered_bytes / measured / 1e9,
        dropped=dict(dropped),
        dropped_share=sum(dropped.values()) / (sum(dropped.values()) + groups),
        deaths=dict(simulation.deaths),
        limit=_limit(config, **figures, places_taken=averages.in_flight / measured / places),
        ledger=core.ledger.snapshot(),
    )


def _limit(
    config: SimulationConfig,
    learner_utilisation: float,
    policy_utilisation: float,
    episodes: float,
    waiting_for_instance: float,
    places_taken: float,
) -> str:
    if learner_utilisation > BUSY:
        return "the learner: a faster one, or fewer replicas for the same step time"
    if policy_utilisation > BUSY:
        return "the host's cores" if config.host else "the policy: more replicas shorten a step"
    if waiting_for_instance > 0.1 * episodes:
        return "instances: a higher environment.max_instances shortens a step"
    if config.buffer.max_staleness == 0:
        return "the synchronous order: rollouts and learner wait for each other; raise buffer.max_staleness"
    if places_taken > BUSY:
        return "episodes in flight: raise generator.max_inflight_episodes"
    return "tickets: slow groups hold theirs; raise buffer.max_staleness"


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return value
