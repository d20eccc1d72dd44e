"""How much of the engine's speed reaches the trajectories: the whole rollout pipeline against the engine alone.

    python -m benchmarks.rollout [CONFIG.yaml [--groups N] [--warm-up N]]

First the pipeline: groups of training tasks through RolloutWorker, Serve, engine, EnvPool, SDK and local Fleet, no
learner. Then the same engine alone, offline, on the very prompts the pipeline sent, told to sample as many tokens for
each as the pipeline did, with as many requests at once.

Without CONFIG it measures both policies of this repository, the demo's tiny one, whose engine is so fast that the
pipeline's own work decides, and then a real one, SmolLM2-135M, made first if its folder does not exist. Prints one JSON
line for each: ``{"raw_tok_s", "pipeline_tok_s", "ratio", ...}``, tokens being sampled ones; the last line is the last
policy's, with the earlier ones in it under their names.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from actors.trajectory import Trajectory
from benchmarks.processes import cpu_seconds
from serve.sampling import Sampling
from train.config import RunConfig, load_config
from train.preflight import check_inputs
from train.smollm2 import make_folder

SMOLLM2 = Path("models/smollm2-135m")
RAW_TIMEOUT_S = 1800


def run_pipeline(config: RunConfig, groups: int, warm_up: int) -> tuple[float, list[Trajectory], Counter[str]]:
    """Seconds, trajectories and CPU seconds by process of ``groups`` training groups, all dispatched at once."""
    from train.system import System

    with System(config, check_inputs(config), steps=1) as system:
        system.start(lambda status: print(status.get("phase", ""), flush=True), with_learner=False)
        system.roll_out(warm_up, "warm-up")
        begun, cpu_begun = time.monotonic(), cpu_seconds()
        done = system.roll_out(groups, "measured")
        seconds, cpu = time.monotonic() - begun, cpu_seconds() - cpu_begun
    return seconds, [trajectory for group in done for trajectory in group.trajectories], cpu


def requests_of(trajectory: Trajectory) -> list[tuple[list[int], int]]:
    """The requests of an episode: each turn's prompt ids, and how many tokens were sampled for it."""
    requests = []
    for part in trajectory.sequences():
        mask, ids = trajectory.mask[part].astype(np.int8), trajectory.ids[part].tolist()
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        ends = np.flatnonzero(np.diff(mask, append=0) == -1) + 1
        requests += [(ids[:start], int(end - start)) for start, end in zip(starts, ends, strict=True)]
    return requests


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


def measure(path: Path, groups: int, warm_up: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        config = load_config(path, ["--output_dir", folder, "--name", "benchmark", "--tracking.wandb", "false"])
        pipeline_s, trajectories, cpu = run_pipeline(config, groups, warm_up)
    # In a process of its own: vLLM in this one would write to the terminal after the last line.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
        raw_s = alone.submit(run_raw, config, trajectories).result(timeout=RAW_TIMEOUT_S)
    tokens = sum(int(trajectory.mask.sum()) for trajectory in trajectories)
    return {
        "raw_tok_s": round(tokens / raw_s, 1),
        "pipeline_tok_s": round(tokens / pipeline_s, 1),
        "ratio": round(raw_s / pipeline_s, 3),
        "episodes": len(trajectories),
        "tokens": tokens,
        "concurrent": config.generator.max_inflight_episodes,
        "cpu_ms_per_episode": {
            name: round(seconds * 1e3 / len(trajectories), 2) for name, seconds in cpu.most_common(12)
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, nargs="?", metavar="CONFIG.yaml")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--warm-up", type=int, default=8, help="groups before the measured ones")
    args = parser.parse_args()
    if args.config is not None:
        print(json.dumps(measure(args.config, args.groups, args.warm_up)))
        return
    if not SMOLLM2.exists():
        make_folder(SMOLLM2)
    tiny = measure(Path("configs/demo.yaml"), groups=128, warm_up=8)
    print(json.dumps(tiny), flush=True)
    print(json.dumps(measure(Path("configs/smollm2.yaml"), groups=6, warm_up=1) | {"demo": tiny}))


if __name__ == "__main__":
    main()
