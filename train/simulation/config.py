"""What a simulated run is told. Keys that a run has as well have the names they have there."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, ValidationError, model_validator

from actors.config import Section
from train.config import ConfigError, describe, known_keys, read_yaml, unknown_key

SIGMAS_TO_P99 = 2.3263478740408408  # of a normal distribution


class Distribution(Section):
    """A lognormal distribution by median and 99th percentile; equal ones are a constant."""

    p50: float = Field(ge=0, allow_inf_nan=False)
    p99: float = Field(ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _in_order(self) -> Distribution:
        if self.p99 < self.p50 or (self.p50 == 0 and self.p99 > 0):
            raise ValueError(
                f"p99 {self.p99} does not fit p50 {self.p50}: it must be at least p50, and 0 where that is 0"
            )
        return self

    def draw(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """float64 [count]"""
        if self.p50 == self.p99:
            return np.full(count, self.p50)
        return rng.lognormal(math.log(self.p50), math.log(self.p99 / self.p50) / SIGMAS_TO_P99, count)


class TrainerSection(Section):
    train_batch_size: int = Field(64, ge=1, description="groups of a step")


class GeneratorSection(Section):
    n_samples_per_prompt: int = Field(8, ge=1, description="episodes of a group")
    max_inflight_episodes: int = Field(1024, ge=1, description="episodes at once")
    num_workers: int = Field(1, ge=1, description="RolloutWorkers; one that dies takes its groups with it")


class BufferSection(Section):
    max_staleness: int = Field(4, ge=0)
    max_bytes: int = Field(4 * 2**30, ge=1)
    zero_variance_groups: Literal["count", "resample"] = "count"
    window: int | None = Field(None, ge=1)


class PolicySection(Section):
    num_replicas: int = Field(1, ge=1)
    throughput: dict[int, float] = Field(
        {1: 55.0, 64: 2650.0, 256: 5600.0},
        description="sampled tokens/s of one replica by requests at once; straight between the points, level beyond",
    )

    @model_validator(mode="after")
    def _is_a_curve(self) -> PolicySection:
        if not self.throughput or any(n < 1 or rate <= 0 for n, rate in self.throughput.items()):
            raise ValueError("throughput needs at least one point, requests from 1 and tokens/s above 0")
        return self


class EpisodeSection(Section):
    """One episode: an environment is made ready, tokens are sampled, tools and verifier take their time."""

    ready_s: Distribution = Field(Distribution(p50=2, p99=10), description="provision and reset, without the queue")
    tokens: Distribution = Field(Distribution(p50=1500, p99=8000), description="sampled, over all turns")
    tools_s: Distribution = Field(Distribution(p50=10, p99=60), description="tool calls, verifier and close together")
    nbytes: int = Field(0, ge=0, description="size of a trajectory; matters for buffer.max_bytes only")
    infra_failed: float = Field(0.0, ge=0, lt=1, description="share that fails on our side")
    ungraded: float = Field(0.0, ge=0, lt=1, description="share whose verifier fails")
    hang: float = Field(0.0, ge=0, lt=1, description="share that never ends by itself")
    zero_variance: float = Field(0.0, ge=0, lt=1, description="share of groups whose rewards are all equal")
    group_timeout_s: float = Field(2400.0, gt=0, description="a group that takes longer is abandoned")


class EnvironmentSection(Section):
    max_instances: int | None = Field(None, ge=1, description="at once; further episodes wait")


class LearnerSection(Section):
    step_s: Distribution = Field(Distribution(p50=60, p99=80), description="a step without waiting and publication")
    sync_s: Distribution = Field(
        Distribution(p50=1, p99=2), description="publication of weights; the policy pauses for it"
    )


class HostSection(Section):
    """One machine that rollouts and learner share. Threads that want to run get equal shares of its cores."""

    cores: float = Field(gt=0)
    episode_cpu: float = Field(gt=0, le=1, description="cores an episode uses, by its time on the idle machine")
    rollout_threads: float = Field(4.0, gt=0, description="threads of the rollouts that want to run at full load")
    learner_threads: float = Field(1.0, gt=0)


class FaultsSection(Section):
    """Deaths, at exponential times. ``None``: never."""

    replica_mtbf_h: float | None = Field(None, gt=0, description="hours between two deaths of one replica")
    replica_restart_s: float = Field(60.0, ge=0)
    worker_mtbf_h: float | None = Field(None, gt=0, description="hours between two deaths of one RolloutWorker")
    learner_mtbf_h: float | None = Field(None, gt=0)
    learner_restart_s: float = Field(120.0, ge=0)


class SimulationConfig(Section):
    """A whole simulated run."""

    seed: int = Field(0, ge=0)
    steps: int = Field(30, ge=1, description="training steps that are reported on")
    warmup_steps: int = Field(5, ge=0, description="steps before them: a run starts with an empty buffer")
    max_hours: float = Field(24 * 365, gt=0, description="virtual time after which it ends, whatever the steps")
    trainer: TrainerSection = TrainerSection()
    generator: GeneratorSection = GeneratorSection()
    buffer: BufferSection = BufferSection()
    policy: PolicySection = PolicySection()
    environment: EnvironmentSection = EnvironmentSection()
    episode: EpisodeSection = EpisodeSection()
    learner: LearnerSection = LearnerSection()
    host: HostSection | None = Field(None, description="only where all of a run shares one machine")
    faults: FaultsSection = FaultsSection()

    @model_validator(mode="after")
    def _sizes_fit(self) -> SimulationConfig:
        generator, batch = self.generator, self.trainer.train_batch_size
        if generator.max_inflight_episodes < generator.n_samples_per_prompt:
            raise ValueError(
                f"generator.max_inflight_episodes {generator.max_inflight_episodes} holds no group of "
                f"generator.n_samples_per_prompt {generator.n_samples_per_prompt}"
            )
        if self.buffer.window is not None and self.buffer.window < batch:
            raise ValueError(f"buffer.window {self.buffer.window} never holds a batch of {batch} groups")
        return self


def load_simulation(path: Path | None, base: dict[str, Any], overrides: dict[str, str]) -> SimulationConfig:
    """The defaults, below ``base``, the file's values and ``overrides``, which map dotted keys to YAML values.

    Raises:
        ConfigError: a file that cannot be read, an unknown key or a value that does not fit.
    """
    raw = _merged(_merged(SimulationConfig().model_dump(), base), {} if path is None else read_yaml(path))
    for key, text in overrides.items():
        raw = _merged(raw, _nested(full_key(key), _value(key, text)))
    try:
        return SimulationConfig.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(describe(error, SimulationConfig)) from None


def full_key(key: str) -> str:
    """The dotted key that ``key`` names: itself, or the only one that ends in it.

    Raises:
        ConfigError: there is none, or more than one.
    """
    keys = known_keys(SimulationConfig)
    found = [k for k in keys if k == key] or [k for k in keys if k.endswith(f".{key}")]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"'{key}' may be {' or '.join(found)}: write it in full")
    raise ConfigError(unknown_key(key, SimulationConfig))


def _value(key: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        raise ConfigError(f"'{key}': {text!r} is no value") from None


def _nested(key: str, value: Any) -> dict[str, Any]:
    first, _, rest = key.partition(".")
    return {first: _nested(rest, value) if rest else value}


def _merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Sections are joined key by key; what is no section is replaced, a throughput curve as a whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        joined = isinstance(old, dict) and isinstance(value, dict) and key != "throughput"
        merged[key] = _merged(old, value) if joined else value
    return merged
