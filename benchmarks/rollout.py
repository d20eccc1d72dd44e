"""How much of the engine's speed reaches the trajectories: the whole rollout pipeline against the engine alone.

    python -m benchmarks.rollout [--groups 64] [--config configs/demo.yaml]

First the pipeline: groups of the demo's training tasks through RolloutWorker, Serve, engine, EnvPool, SDK and local
Fleet, no learner. Then the same engine alone, offline, on the very prompts the pipeline sent, told to sample as many
tokens for each as the pipeline did, with as many requests at once. Prints one JSON line last:
``{"raw_tok_s", "pipeline_tok_s", "ratio", ...}``, tokens being sampled ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

from actors.trajectory import Trajectory
from serve.sampling import Sampling
from train.config import RunConfig, load_config
from train.preflight import check_inputs

WARM_UP_GROUPS = 8
RAW_TIMEOUT_S = 1800


def run_pipeline(config: RunConfig, groups: int) -> tuple[float, list[Trajectory]]:
    """Seconds and trajectories of ``groups`` training groups, all dispatched at once behind the usual limits."""
    from train.system import System

    with System(config, check_inputs(config), steps=1) as system:
        system.start(lambda status: print(status.get("phase", ""), flush=True))
        system.roll_out(WARM_UP_GROUPS, "warm-up")
        begun = time.monotonic()
        done = system.roll_out(groups, "measured")
        seconds = time.monotonic() - begun
    return seconds, [trajectory for group in done for trajectory in group.trajectories]


def requests_of(trajectory: Trajectory) -> list[tuple[list[int], int]]:
    """The requests of an episode: each turn's prompt ids, and how many tokens were sampled for it."""
    mask = trajectory.mask.astype(np.int8)
    starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
    ends = np.flatnonzero(np.diff(mask, append=0) == -1) + 1
    ids = trajectory.ids.tolist()
    return [(ids[:start], int(end - start)) for start, end in zip(starts, ends, strict=True)]


def run_raw(config: RunConfig, trajectories: list[Trajectory]) -> float:
    """Seconds the engine alone takes for the same requests in one offline batch, turns in their order."""
    from serve.engine import generate_offline

    requests = [request for trajectory in trajectories for request in requests_of(trajectory)]
    samplings = [Sampling(max_tokens=length) for _, length in requests]
    prompts = [prompt for prompt, _ in requests]
    seconds, sampled = generate_offline(
        config.policy, config.trainer.policy.model.path, prompts, samplings, ignore_eos=True
    )
    assert sampled == sum(length for _, length in requests)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--config", type=Path, default=Path("configs/demo.yaml"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(args.config, ["--output_dir", folder, "--name", "benchmark", "--tracking.wandb", "false"])
        pipeline_s, trajectories = run_pipeline(config, args.groups)
    # In a process of its own: vLLM in this one would write to the terminal after the last line.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        raw_s = alone.submit(run_raw, config, trajectories).result(timeout=RAW_TIMEOUT_S)
    tokens = sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    line = {
        "raw_tok_s": round(tokens / raw_s, 1),
        "pipeline_tok_s": round(tokens / pipeline_s, 1),
        "ratio": round(raw_s / pipeline_s, 3),
        "episodes": len(trajectories),
        "tokens": tokens,
        "concurrent": config.generator.max_inflight_episodes,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
