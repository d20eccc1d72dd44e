"""The sizes of a simulated run, from what a real one left: ``metrics.jsonl`` and its trajectories.

What a run measured, it measured under load. Where policy and environments are machines of their own, that is what the
simulation needs. Where all share one host (a run with a local Fleet), an episode is slow because its neighbours are at
work: there its time on the idle machine is estimated by the fastest episodes, and its need of CPU and the learner's
time alone such that the simulation of the run itself takes the times that were measured.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from train.config import ConfigError
from train.metrics_file import MetricsError, read_metrics
from train.simulation.config import SimulationConfig
from train.simulation.simulator import Simulation
from train.simulation.sources import READY, TOKENS, TOOLS, Measured

SKIPPED = 5  # steps at a run's start: the buffer is empty, the staleness below its usual
MIN_STEPS = 5  # beyond them
MOST_SHARE = 0.999  # that a simulation is given; with all episodes failing there would be no step
LEAST_S = 1e-3  # of a learner's step; differences of rounded times may be less than nothing
FASTEST = 1.0  # percentile of a phase's times that stands for the idle machine
ROUNDS = 12  # of the calibration
STEPS = 200  # of a simulation: a run's few would leave their mean unsure
CLOSE = 0.01  # relative difference at which it ends
READY_PHASES, TOOLS_PHASES, TURN_PHASES = ("provision", "reset"), ("step", "verify", "close"), ("generate", "step")
PHASES = (*READY_PHASES, "generate", *TOOLS_PHASES)
GENERATE = PHASES.index("generate")
COLUMNS = ["group_id", "mask", "turns", "duration_s", "phase_s"]


@dataclass(frozen=True)
class Fit:
    """``config``: values of :class:`SimulationConfig`; ``observed``: the run's own figures, by Prediction's names."""

    config: dict[str, Any]
    measured: Measured
    observed: dict[str, float]


_Facts = tuple[float, float, float, list[float]]  # tokens, turns, seconds, seconds by phase


@dataclass(frozen=True)
class _Episodes:
    """Per episode, the groups one after the other. ``phases`` [episodes, len(PHASES)], seconds."""

    group_size: int
    tokens: np.ndarray
    turns: np.ndarray
    seconds: np.ndarray
    phases: np.ndarray


def fit(run: Path) -> Fit:
    """Read the run in folder ``run``.

    Raises:
        ConfigError: something the fit needs is not there.
    """
    rows = _metrics(run / "metrics.jsonl")
    batch, episodes = _trajectories(run / "trajectories")
    kept = rows[SKIPPED:]
    elapsed = kept[-1]["time"] - rows[SKIPPED - 1]["time"]
    size = episodes.group_size
    config: dict[str, Any] = {
        "trainer": {"train_batch_size": batch},
        "generator": {"n_samples_per_prompt": size, "max_inflight_episodes": _most(rows, "buffer/running") * size},
        "buffer": {"max_staleness": _max_staleness(rows, batch), "zero_variance_groups": _zero_variance_mode(rows)},
        "episode": _shares(rows[-1]) | _distributions(episodes),
        "warmup_steps": SKIPPED,
        "steps": STEPS,
    }
    step_s = np.asarray([row["timing/step"] - row["timing/wait_for_batch"] - row["timing/publish"] for row in kept])
    step_s = np.maximum(step_s, LEAST_S)
    sync_s = np.asarray([row["timing/publish"] for row in kept])
    measured = Measured(_stages(episodes), step_s, sync_s)
    observed = _observed(kept, elapsed, episodes, batch * size)
    if (run / "local_fleet.log").exists():
        return _on_one_host(config, measured, observed, episodes)
    config["policy"] = {"throughput": _curve(config, episodes, float(episodes.phases[:, GENERATE].mean()))}
    config["learner"] = {"step_s": _two_points(step_s), "sync_s": _two_points(sync_s)}
    return Fit(config, measured, observed)


# What the run left


def _metrics(path: Path) -> list[dict[str, Any]]:
    """The training steps."""
    try:
        rows = [_numbers(row) for row in read_metrics(path)]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; name the folder of a run") from None
    except MetricsError as error:
        raise ConfigError(f"{path.parent}/{error}") from None
    rows = [row for row in rows if "timing/step" in row]
    if len(rows) < SKIPPED + MIN_STEPS:
        raise ConfigError(
            f"{path} holds {len(rows)} training steps; a fit needs at least {SKIPPED + MIN_STEPS}, as the first "
            f"{SKIPPED} are left out"
        )
    needed = ("time", "timing/wait_for_batch", "timing/publish")
    missing = sorted({key for row in rows for key in needed if key not in row})
    if missing:
        raise ConfigError(f"{path}: a step has no {missing[0]}")
    return rows


def _numbers(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if isinstance(value, int | float)}


def _trajectories(folder: Path) -> tuple[int, _Episodes]:
    """Groups of a batch, and the episodes of all groups that have the usual size, without the first steps'."""
    by_stem = {path.stem: path for path in sorted(folder.glob("step_*")) if path.suffix in (".jsonl", ".parquet")}
    files = [path for stem, path in sorted(by_stem.items()) if int(re.sub(r"\D", "", stem) or 0) > SKIPPED]
    if not files:
        raise ConfigError(
            f"{folder} holds no trajectories of steps beyond {SKIPPED}: run with --trainer.dump_trajectories true"
        )
    groups: list[list[_Facts]] = []
    batches = []
    for path in files:
        of_step: dict[int, list[_Facts]] = defaultdict(list)
        try:
            for row in _rows(path):
                of_step[row["group_id"]].append(_facts(row))
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from None
        except KeyError as error:
            raise ConfigError(f"{path}: a trajectory has no {error}") from None
        if of_step:
            batches.append(len(of_step))
            groups += of_step.values()
    if not groups:
        raise ConfigError(f"{folder}: the files of steps beyond {SKIPPED} are empty, so there is nothing to fit")
    size = int(np.bincount([len(group) for group in groups]).argmax())
    tokens, turns, seconds, phases = zip(
        *(facts for group in groups if len(group) == size for facts in group), strict=True
    )
    episodes = _Episodes(size, np.asarray(tokens), np.asarray(turns), np.asarray(seconds), np.asarray(phases))
    if episodes.tokens.mean() <= 0 or episodes.phases[:, GENERATE].mean() <= 0:
        raise ConfigError(f"{folder}: no episode sampled a token, so there is nothing to fit")
    return int(np.median(batches)), episodes


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            yield from map(json.loads, lines)
        return
    import pyarrow.parquet as pq

    from train.trajectory_table import rows

    with pq.ParquetFile(path) as file:
        for batch in file.iter_batches(columns=COLUMNS):
            yield from rows(batch)


def _facts(row: dict[str, Any]) -> _Facts:
    """What is kept of a trajectory: a large run's tokens would not fit into memory."""
    phases = [row["phase_s"].get(phase, 0.0) for phase in PHASES]
    return float(np.sum(row["mask"])), max(1.0, float(row["turns"])), float(row["duration_s"]), phases


def _most(rows: list[dict[str, Any]], key: str) -> int:
    return max(1, int(max((row[key] for row in rows if key in row), default=1)))


def _max_staleness(rows: list[dict[str, Any]], batch: int) -> int:
    """The run's bound, by the most tickets that it ever had out and by the largest lag that it trained on."""
    known = [row for row in rows if "buffer/trained" in row]
    ahead = [
        (row.get("buffer/running", 0) + row.get("buffer/buffered", 0) + row["buffer/trained"]) / batch
        - row["buffer/trained"] // batch
        for row in known
    ]
    lags = [row.get("staleness/max", 0.0) for row in rows]
    return max(0, int(max(lags)), *(math.ceil(batches) - 1 for batches in ahead))


def _zero_variance_mode(rows: list[dict[str, Any]]) -> str:
    return "resample" if any("buffer/dropped_zero_variance" in row for row in rows) else "count"


def _shares(last: dict[str, Any]) -> dict[str, float]:
    """How episodes and groups end, as shares."""
    ended = sum(last.get(f"ledger/{name}", 0.0) for name in ("graded", "ungraded", "infra_failed"))
    groups = last.get("buffer/trained", 0.0) + last.get("buffer/buffered", 0.0) + _groups(last, "dropped")
    shares = {
        "infra_failed": last.get("ledger/infra_failed", 0.0) / max(ended, 1.0),
        "ungraded": last.get("ledger/ungraded", 0.0) / max(ended, 1.0),
        "zero_variance": _groups(last, "zero_variance") / max(groups, 1.0),
    }
    return {name: min(MOST_SHARE, share) for name, share in shares.items()}


def _groups(row: dict[str, Any], family: str) -> float:
    """Sum of the buffer's counts of one family, whatever their reasons."""
    names = {key: key.partition("/") for key in row}
    return sum(row[key] for key, (kind, _, name) in names.items() if kind == "buffer" and name.startswith(f"{family}_"))


def _observed(rows: list[dict[str, Any]], elapsed: float, episodes: _Episodes, per_step: int) -> dict[str, float]:
    step_s = elapsed / len(rows)
    wait_s = float(np.mean([row["timing/wait_for_batch"] for row in rows]))
    dropped = [_groups(row, "dropped") for row in rows]
    return {
        "steps": len(rows),
        "step_s": step_s,
        "wait_for_batch_s": wait_s,
        "learner_utilisation": 1.0 - wait_s / step_s,
        "trained_tokens_per_s": float(episodes.tokens.mean()) * per_step / step_s,
        "staleness_mean": float(np.mean([row.get("staleness/mean", 0.0) for row in rows])),
        "episode_s": float(episodes.seconds.mean()),
        "dropped_groups_per_step": (max(dropped) - dropped[0]) / max(1, len(rows) - 1),
    }


# Sizes


def _stages(episodes: _Episodes) -> np.ndarray:
    """float64 [groups, episodes, 3], as a Measured has them."""
    of = {phase: episodes.phases[:, index] for index, phase in enumerate(PHASES)}
    # Time that no phase claims is the worker's own; it passes with the environment's.
    rest = np.maximum(0.0, episodes.seconds - episodes.phases.sum(axis=1))
    ready, tools = sum(of[p] for p in READY_PHASES), sum(of[p] for p in TOOLS_PHASES) + rest
    return np.stack([ready, episodes.tokens, tools], axis=1).reshape(-1, episodes.group_size, 3)


def _distributions(episodes: _Episodes) -> dict[str, Any]:
    stages = _stages(episodes).reshape(-1, 3)
    names = ("ready_s", "tokens", "tools_s")
    return {name: _two_points(stages[:, index]) for index, name in enumerate(names)}


def _two_points(values: np.ndarray) -> dict[str, float]:
    p50, p99 = np.quantile(values, [0.5, 0.99])
    return {"p50": float(p50), "p99": float(p99)} if p50 > 0 else {"p50": 0.0, "p99": 0.0}


def _curve(config: dict[str, Any], episodes: _Episodes, generate_s: float) -> dict[int, float]:
    """Every request as fast as the run's were, up to as many as the run ever had; it has seen no other load."""
    tokens_s, most = float(episodes.tokens.mean()) / generate_s, config["generator"]["max_inflight_episodes"]
    return {1: tokens_s, most: tokens_s * most}


# One host


def _on_one_host(config: dict[str, Any], measured: Measured, observed: dict[str, float], episodes: _Episodes) -> Fit:
    """Divide the load out of the measured times; see the module."""
    idle_s = _idle_seconds(episodes)
    scale = min(1.0, idle_s / float(episodes.seconds.mean()))
    config["policy"] = {"throughput": _curve(config, episodes, scale * float(episodes.phases[:, GENERATE].mean()))}
    groups = measured.groups * scale
    groups[:, :, TOKENS] = measured.groups[:, :, TOKENS]
    config["host"] = {"cores": float(os.cpu_count() or 1), "episode_cpu": 0.1}
    learner_scale = 1.0
    for _ in range(ROUNDS):
        idle = Measured(groups, measured.step_s * learner_scale, measured.sync_s * learner_scale)
        done = Simulation(SimulationConfig.model_validate(config), idle).run()
        learner_s = float(np.mean([step.train_s + step.sync_s for step in done.steps[SKIPPED:]]))
        slower = observed["episode_s"] / (done.averages.episodes / done.averages.ended)
        slower_learner = float(measured.step_s.mean() + measured.sync_s.mean()) / learner_s
        if max(abs(math.log(slower)), abs(math.log(slower_learner))) < CLOSE:
            break
        config["host"]["episode_cpu"] = min(1.0, config["host"]["episode_cpu"] * slower)
        learner_scale *= slower_learner
    config["episode"] |= {"ready_s": _two_points(groups[:, :, READY]), "tools_s": _two_points(groups[:, :, TOOLS])}
    config["learner"] = {"step_s": _two_points(idle.step_s), "sync_s": _two_points(idle.sync_s)}
    return Fit(config, idle, observed)


def _idle_seconds(episodes: _Episodes) -> float:
    """Time of a mean episode on the idle machine: the fastest of each phase, by turn where it comes every turn."""
    total = 0.0
    for index, phase in enumerate(PHASES):
        seconds = episodes.phases[:, index]
        if phase in TURN_PHASES:
            total += float(np.percentile(seconds / episodes.turns, FASTEST) * episodes.turns.mean())
        else:
            total += float(np.percentile(seconds, FASTEST))
    return total
