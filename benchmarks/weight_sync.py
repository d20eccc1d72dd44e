"""How long new weights take from the learner to every engine, and how long the engines stand still for them.

    python -m benchmarks.weight_sync [--model demo|0.6b|1.7b|FOLDER] [--replicas N] [--route R] [--gpus] ...

The real learner (Ray Train, DeepSpeed) trains on made-up trajectories and publishes after each step to the real policy
(Ray Serve, vLLM), which is sampling all the while; the first publications, which also meet and import, are left out.
``0.6b`` and ``1.7b`` are Qwen3 shapes with random weights. With ``--check all`` the checksum of every tensor is
compared at both ends of every update. Prints the median publication as one JSON line: ``{"bytes", "replicas",
"total_s", "pause_s", "gb_s", ...}``. ``total_s`` runs from the end of the optimiser step until the last replica has
confirmed, ``pause_s`` is how long the slowest replica sampled nothing, ``gb_s`` is bytes over ``total_s``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray

from actors.lineage import Lineage
from actors.trajectory import Graded, Group, Span, StopReason, Trajectory
from actors.weight_store import WeightStore
from serve.config import PolicyConfig
from serve.policy import PolicyClient, deploy_policy
from serve.sampling import Completion, Sampling
from serve.weight_transfer import checkpoint_shapes
from tests.models import byte_tokenizer
from train.learner import LearnerHandle, LearnerSettings
from train.publisher import WeightPublisher

DEMO = Path("configs/models/tiny-tracker")
QWEN3 = {
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
}
WARM_UP = 3  # publications
APP = "fleet-rl-weight-sync"


def make_qwen3(shape: dict[str, int], folder: Path) -> Path:
    """A random bf16 model of this shape, tied as the originals are, with a tokenizer that vLLM can load."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        **shape,
        vocab_size=151_936,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="bfloat16",
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@ray.remote(num_cpus=0)
class Source:
    """In place of the replay buffer: always has one more group of random tokens."""

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s

    async def get_batch(self, step: int, timeout_s: float) -> dict[str, Any]:
        await asyncio.sleep(self._pause_s)  # between publications the engines sample undisturbed
        group = _group(step)
        return {
            "refs": [ray.put(group)],
            "headers": [_Header(sum(len(t.ids) for t in group.trajectories))],
            "lineage": Lineage(),
        }

    async def ack(self, step: int, version: int) -> None:
        pass


class _Header:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


def _group(number: int) -> Group:
    rng = np.random.default_rng(number)
    mask = np.repeat([0, 1], [16, 48]).astype(np.uint8)
    trajectories = [
        Trajectory(
            trajectory_id=f"{number}-{sample}",
            task_key=f"task-{number}",
            env_key="none",
            group_id=number,
            sample_index=sample,
            ids=rng.integers(0, 256, 64).astype(np.int32),
            starts=[0],
            mask=mask,
            logprobs=np.where(mask, -5.0, 0.0).astype(np.float32),
            prompt_length=16,
            spans=[Span(0, 0, 48)],
            stop_reason=StopReason.DONE,
            outcome=Graded(float(sample % 2)),
        )
        for sample in range(4)
    ]
    return Group(number, f"task-{number}", "none", trajectories)


@ray.remote(num_cpus=0)
class Steps:
    def __init__(self) -> None:
        self._metrics: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float]) -> None:
        self._metrics.append(metrics)

    def all(self) -> list[dict[str, float]]:
        return self._metrics


@ray.remote(num_cpus=0)
class Placeholder:
    """Takes up a part of the first GPU, so that replicas come to lie on others."""


class Reporter:
    """Pickled to the learner's rank 0."""

    def __init__(self, steps: Any) -> None:
        self._steps = steps

    def __call__(self, metrics: dict[str, float]) -> None:
        ray.get(self._steps.add.remote(metrics))


async def keep_sampling(
    policy: PolicyClient, learner: LearnerHandle, sessions: int, max_tokens: int
) -> list[Completion]:
    """Turns of concurrent sessions for as long as the learner runs."""
    turns: list[Completion] = []

    async def session(number: int) -> None:
        rng = np.random.default_rng(number)
        while not learner.done:
            prompt = rng.integers(0, 256, 32).tolist()
            sampling = Sampling(max_tokens=max_tokens)
            turns.append(await policy.generate(prompt, sampling, request_id="load", session_id=f"s{number}"))

    await asyncio.gather(*(session(number) for number in range(sessions)))
    return turns


def check_spans(turns: list[Completion]) -> int:
    """Every token of every turn has one version, and versions only grow. Returns turns that saw an update."""
    for turn in turns:
        ends = [0, *(end for _, _, end in turn.spans)]
        assert [start for _, start, _ in turn.spans] == ends[:-1] and ends[-1] == len(turn.token_ids), turn.spans
        versions = [version for version, _, _ in turn.spans]
        assert versions == sorted(set(versions)), turn.spans
    return sum(len(turn.spans) > 1 for turn in turns)


def measure(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, Any]:
    config = PolicyConfig(
        num_replicas=args.replicas,
        num_cpus=0.5,
        num_gpus=args.replica_gpus if args.gpus else 0,
        dtype="bfloat16" if args.gpus else "float32",
        max_model_len=1024,
        max_num_seqs=64,
        enforce_eager=not args.cuda_graphs,
        kv_cache_gib=4.0 if args.gpus else 0.1,
        gpu_memory_utilization=0.4,
        weight_transfer=args.route,
        check_weights=args.check,
        update_timeout_s=60.0,
    )
    settings = LearnerSettings(
        model_path=str(model),
        run_dir=str(folder),
        run_name="weight-sync",
        total_steps=args.steps + WARM_UP,
        lr=1e-4,
        dtype=config.dtype,
        zero_stage=args.zero_stage,
        num_workers=args.ranks,
        use_gpu=args.gpus,
        resources_per_worker={"CPU": 0.5} | ({"GPU": args.rank_gpus} if args.gpus else {}),
    )
    held = Placeholder.options(num_gpus=args.hold_gpus).remote() if args.hold_gpus else None
    if held is not None:
        ray.get(held.__ray_ready__.remote())
    store = WeightStore.remote(str(folder))
    policy = deploy_policy(config, str(model), store, APP)
    try:
        policy.wait_until_healthy(config.startup_timeout_s)
        steps = Steps.remote()
        publisher = WeightPublisher(store, policy, config.update_timeout_s)
        learner = LearnerHandle(settings, Source.remote(args.between_s), publisher, Reporter(steps))
        learner.start()
        turns = asyncio.run(keep_sampling(policy, learner, args.sessions, args.max_tokens))
        learner.join()
        measured = ray.get(steps.all.remote())[WARM_UP:]
        stats = policy.stats()
        compared = policy.update(stats[0]["version"], 60.0)
    finally:
        policy.shutdown()
    shapes = checkpoint_shapes(model)
    size = sum(int(np.prod(shape)) for shape in shapes.values()) * (2 if config.dtype == "bfloat16" else 4)
    assert all(one["sync/failed"] == 0 for one in measured), "an update failed"
    assert {one["version"] for one in stats} == {len(measured) + WARM_UP}
    total_s = median(one["sync/total_s"] for one in measured)
    return {
        "bytes": size,
        "replicas": args.replicas,
        "total_s": round(total_s, 4),
        "pause_s": round(median(one["sync/pause_s"] for one in measured), 4),
        "gb_s": round(size / total_s / 1e9, 3),
        "pack_s": round(median(one["sync/pack_s"] for one in measured), 4),
        "update_s": round(median(one["sync/update_s"] for one in measured), 4),
        "worst_total_s": round(max(one["sync/total_s"] for one in measured), 4),
        "phases_s": {name: round(value, 4) for name, value in compared[0]["seconds"].items()},
        "route": args.route,
        "zero_stage": args.zero_stage,
        "ranks": args.ranks,
        "tensors": len(shapes),
        "tensors_compared": len(compared[0]["checksums"]),
        "turns": len(turns),
        "turns_that_saw_an_update": check_spans(turns),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="demo, 0.6b, 1.7b or a folder")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--route", default="auto", choices=["auto", "snapshot", "nccl", "ipc"])
    parser.add_argument("--check", default="sample", choices=["sample", "all"])
    parser.add_argument("--steps", type=int, default=12, help="measured publications")
    parser.add_argument("--ranks", type=int, default=1, help="of the learner")
    parser.add_argument("--zero-stage", type=int, default=2, choices=[1, 2, 3])
    parser.add_argument("--gpus", action="store_true", help="learner and engines on GPUs")
    parser.add_argument("--rank-gpus", type=float, default=1.0, help="GPUs of a rank; less than 1 shares one")
    parser.add_argument("--replica-gpus", type=float, default=1.0, help="GPUs of a replica")
    parser.add_argument("--hold-gpus", type=float, default=0.0, help="part of the first GPU kept from replicas")
    parser.add_argument("--cuda-graphs", action="store_true", help="engines compile and capture; default: eager")
    parser.add_argument("--sessions", type=int, default=16, help="requests in flight, on all replicas together")
    parser.add_argument("--max-tokens", type=int, default=200, help="of the turns that are sampled meanwhile")
    parser.add_argument("--between-s", type=float, default=0.5, help="seconds from a publication to the next step")
    args = parser.parse_args()
    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="warning")
    with tempfile.TemporaryDirectory() as folder:
        if args.model in QWEN3:
            model = make_qwen3(QWEN3[args.model], Path(folder) / "model")
        else:
            model = DEMO if args.model == "demo" else Path(args.model)
        begun = time.monotonic()
        result = measure(args, model.absolute(), Path(folder))
    print(json.dumps(result | {"model": args.model, "wall_s": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main()
