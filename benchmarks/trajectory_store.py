"""What keeping trajectories costs: ``python -m benchmarks.trajectory_store``.

Batches of random trajectories, whose text is as long as their tokens decode to, go through the real store; then the
files are searched. The last line of the output is JSON:

- ``put_ms``, ``put_max_ms``: median and longest time that the learner is held up for a batch, one right after the other
- ``put_idle_ms``: the median where each batch comes after the thread is done with the last
- ``batch_mb``: tokens (ids, mask, logprobs) and text of a batch
- ``finish_mb_s``, ``finish_no_jsonl_mb_s``: what the thread turns into finished files, with and without lines
- ``parquet_bytes_per_token``, ``jsonl_bytes_per_token``: size on disk, text included
- ``grep_mb_s``, ``grep_peak_mb``: a search that finds nothing, by size of the Parquet files, and the most
  memory its process took
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from actors.trajectory import Graded, Group, Span, StopReason, Trajectory
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin

CHARS_PER_TOKEN = 3
TURN_TOKENS = 256  # sampled; as many are observed
FINISH_TIMEOUT_S = 3600.0
_SEARCH = "from deploy.trajectories import main; import resource, sys; main(['grep', sys.argv[1], 'no such words']); "
_SEARCH += "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"


def make_batch(groups: int, samples: int, tokens: int, seed: int) -> list[Group]:
    return [
        Group(g, f"task-{g}", "bench", [_trajectory(g, s, tokens, [seed, g, s]) for s in range(samples)])
        for g in range(groups)
    ]


def _trajectory(group: int, sample: int, tokens: int, seed: list[int]) -> Trajectory:
    random = np.random.default_rng(seed)
    mask = (np.arange(tokens) // TURN_TOKENS % 2).astype(np.uint8)
    sampled = int(mask.sum())
    words = np.array(
        ["ticket", "status", "open", "assign", '{"id":', "closed", "the", "user-17", "error", "2026-11-28"]
    )
    text = " ".join(random.choice(words, tokens * CHARS_PER_TOKEN // 7))
    size = TURN_TOKENS * CHARS_PER_TOKEN
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    return Trajectory(
        trajectory_id=f"{group}/{sample}",
        task_key=f"task-{group}",
        env_key="bench",
        group_id=group,
        sample_index=sample,
        ids=(random.zipf(1.3, tokens) % 150_000).astype(np.int32),
        mask=mask,
        logprobs=np.where(mask, -random.exponential(0.5, tokens), 0).astype(np.float32),
        prompt_length=TURN_TOKENS,
        spans=[Span(1, 0, sampled)],
        stop_reason=StopReason.DONE,
        outcome=Graded(float(sample % 2)),
        messages=[{"role": ("tool", "assistant")[i % 2], "content": part} for i, part in enumerate(parts)],
    )


def store(
    folder: Path, batch: list[Group], steps: int, jsonl: bool, one_by_one: bool = False
) -> tuple[list[float], float]:
    """Seconds of each put, and from the first put to the last finished file."""
    kept = TrajectoryStore(StoreSettings(str(folder), jsonl=jsonl))
    puts = []
    begun = time.perf_counter()
    for step in range(steps):
        before = time.perf_counter()
        kept.put(batch, Origin("train", step, step))
        puts.append(time.perf_counter() - before)
        while one_by_one and kept.report().waiting:
            time.sleep(0.01)
    report = kept.close(FINISH_TIMEOUT_S)
    if report.problem or report.waiting:
        raise SystemExit(f"not everything was stored: {report}")
    return puts, time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of a trajectory")
    options = parser.parse_args()
    batch = make_batch(options.groups, options.samples, options.tokens, seed=1)
    text = sum(len(m["content"]) for group in batch for t in group.trajectories for m in t.messages)
    batch_mb = (sum(group.nbytes for group in batch) + text) / 1e6
    tokens = options.steps * options.groups * options.samples * options.tokens
    with tempfile.TemporaryDirectory() as scratch:
        folder, lean = Path(scratch) / "all", Path(scratch) / "lean"
        puts, seconds = store(folder, batch, options.steps, jsonl=True)
        _, lean_seconds = store(lean, batch, options.steps, jsonl=False)
        idle_puts, _ = store(Path(scratch) / "idle", batch, 8, jsonl=True, one_by_one=True)
        sizes = {kind: sum(file.stat().st_size for file in folder.glob(f"*.{kind}")) for kind in ("parquet", "jsonl")}
        before = time.perf_counter()
        search = subprocess.run([sys.executable, "-c", _SEARCH, str(lean)], capture_output=True, text=True, check=True)
        grep_s = time.perf_counter() - before
    result = {
        "steps": options.steps,
        "trajectories_per_step": options.groups * options.samples,
        "tokens_per_trajectory": options.tokens,
        "batch_mb": round(batch_mb, 1),
        "put_ms": round(1e3 * statistics.median(puts), 1),
        "put_max_ms": round(1e3 * max(puts), 1),
        "put_idle_ms": round(1e3 * statistics.median(idle_puts), 1),
        "finish_mb_s": round(options.steps * batch_mb / seconds, 1),
        "finish_no_jsonl_mb_s": round(options.steps * batch_mb / lean_seconds, 1),
        "parquet_bytes_per_token": round(sizes["parquet"] / tokens, 2),
        "jsonl_bytes_per_token": round(sizes["jsonl"] / tokens, 2),
        "grep_mb_s": round(sizes["parquet"] / 1e6 / grep_s, 1),
        "grep_peak_mb": round(int(search.stdout.split()[-1]) / 1e3, 1),
        "peak_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3, 1),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
