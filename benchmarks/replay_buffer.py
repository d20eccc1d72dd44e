"""How many groups a second the replay buffer takes and gives, and how fast their payloads pass by reference.

    python -m benchmarks.replay_buffer [--seconds 10]

The real ReplayBuffer actor, with a process that stands for conductor and workers (issue, start, note, commit, many
groups at once) and one that stands for the learner (get_batch, ack). First with payloads of nothing: ``groups_per_s``.
Then with groups of ``--group-mb``, which the worker copies into the object store, and which the learner maps batch by
batch and sums the masks of: ``payload_gb_s``. ``buffer_growth_mb`` is what the actor's resident memory gained after the
first second, ``store_peak_gb`` the most that the object store held. One JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from typing import Any

os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}  # read when Ray is imported

import numpy as np
import psutil
import ray

from actors.coalescer import Coalescer
from actors.replay_buffer import ReplayBuffer
from actors.replay_buffer_core import GroupHeader
from actors.trajectory import Graded, Group, Span, StopReason, Trajectory

GROUP_SIZE = 8
BATCH = 64
MAX_STALENESS = 2
AT_ONCE = 64  # groups in flight
STORE_BYTES = 2 << 30
TIMEOUT_S = 60.0


def group_of(nbytes: int) -> Group:
    """A group of trajectories of together ``nbytes``."""
    tokens = max(2, nbytes // GROUP_SIZE // 9)  # 4 bytes for an id, 1 for the mask, 4 for a logprob
    trajectories = [
        Trajectory(
            trajectory_id=str(index),
            task_key="task",
            env_key="env",
            group_id=0,
            sample_index=index,
            ids=np.zeros(tokens, np.int32),
            mask=np.ones(tokens, np.uint8),
            logprobs=np.zeros(tokens, np.float32),
            prompt_length=0,
            spans=[Span(0, 0, tokens)],
            stop_reason=StopReason.DONE,
            outcome=Graded(float(index % 2)),
        )
        for index in range(GROUP_SIZE)
    ]
    return Group(0, "task", "env", trajectories)


@ray.remote(num_cpus=0)
class Rollouts:
    """Conductor and workers. Groups are of one mould, since making them is not what is measured."""

    async def run(self, buffer: Any, nbytes: int) -> None:
        """Until it is killed, or a group fails."""
        group = group_of(nbytes)
        header = GroupHeader.of(group, overlong_filtering=False)
        nothing = ray.put(None) if nbytes == 0 else None
        commit, note = Coalescer(buffer.commit.remote), Coalescer(lambda ids: _noted(buffer, ids))

        async def roll_out(ticket: int, version: int, ids: list[str]) -> None:
            outcomes = dict(zip(ids, header.outcomes.values(), strict=True))
            own = GroupHeader(**vars(header) | {"outcomes": outcomes, "oldest_version": version})
            committed = commit((ticket, own, ray.put(group) if nothing is None else nothing))
            await asyncio.gather(note(ticket), committed)

        async with asyncio.TaskGroup() as groups:
            while True:
                tickets = await buffer.issue.remote(TIMEOUT_S, AT_ONCE)
                started = [(ticket, "task", [f"{ticket}/task/{i}" for i in range(GROUP_SIZE)]) for ticket, _ in tickets]
                await buffer.start.remote(started)
                for (ticket, version), (_, _, ids) in zip(tickets, started, strict=True):
                    groups.create_task(roll_out(ticket, version, ids))


async def _noted(buffer: Any, ticket_ids: list[int]) -> list[None]:
    await buffer.generating.remote(ticket_ids, "rollout_worker_0")
    return [None] * len(ticket_ids)


def measure(seconds: float, nbytes: int) -> dict[str, float]:
    """Batches for ``seconds``. Returns rates, and the memory of the buffer's process and of the store."""
    settings = {
        "batch_size": BATCH,
        "max_staleness": MAX_STALENESS,
        "max_running": AT_ONCE,
        "max_bytes": STORE_BYTES // 4,
    }
    buffer = ReplayBuffer.options(max_concurrency=1000).remote(settings)
    rollouts = Rollouts.remote()
    running = rollouts.run.remote(buffer, nbytes)
    process = psutil.Process(ray.get(buffer.__ray_call__.remote(lambda self: os.getpid()), timeout=TIMEOUT_S))
    groups = read = step = 0
    rss = store = 0.0
    begun = time.monotonic()
    while (elapsed := time.monotonic() - begun) < seconds:
        step += 1
        batch = _batch(buffer, step, running)
        fetched = ray.get(batch["refs"], timeout=TIMEOUT_S)
        read += sum(int(t.mask.sum(dtype=np.int64)) * 9 for group in fetched if group for t in group.trajectories)
        groups += len(fetched)
        del fetched
        store = max(store, _store_used())
        ray.get(buffer.ack.remote(step, step), timeout=TIMEOUT_S)
        rss = rss or (process.memory_info().rss if elapsed > 1.0 else 0.0)
    growth = process.memory_info().rss - rss
    ledger = ray.get(buffer.snapshot.remote(), timeout=TIMEOUT_S)["ledger"]
    if not ledger["balanced"]:
        raise RuntimeError(f"the ledger does not balance: {ledger}")
    _raise_if_ended(running, ray.wait([running], timeout=0)[0])
    ray.kill(rollouts)
    ray.kill(buffer)
    rates = {"groups_per_s": groups / elapsed, "payload_gb_s": read / elapsed / 1e9}
    return rates | {"buffer_growth_mb": growth / 1e6, "store_peak_gb": store}


def _batch(buffer: Any, step: int, running: Any) -> dict[str, Any]:
    """The next batch, unless the rollouts that should fill it have failed."""
    batch = buffer.get_batch.remote(step, TIMEOUT_S)
    ready, _ = ray.wait([running, batch], num_returns=1, timeout=2 * TIMEOUT_S)
    _raise_if_ended(running, ready)
    return ray.get(batch, timeout=TIMEOUT_S)


def _raise_if_ended(running: Any, ready: list[Any]) -> None:
    """Raise what the rollouts failed of: they end by no other way."""
    if running in ready:
        ray.get(running, timeout=TIMEOUT_S)


def _store_used() -> float:
    """GB of the object store in use."""
    kind = "object_store_memory"
    return (ray.cluster_resources()[kind] - ray.available_resources()[kind]) / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="of each of the two parts; default: %(default)s")
    parser.add_argument("--group-mb", type=float, default=2.0, help="size of a group's payload; default: %(default)s")
    args = parser.parse_args()
    if args.seconds < 2 or not 0 < args.group_mb * 1e6 * BATCH * (MAX_STALENESS + 2) < STORE_BYTES:
        parser.error(f"--seconds must be at least 2, and {BATCH * (MAX_STALENESS + 2)} groups must fit into the store")
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=STORE_BYTES)
    headers = measure(args.seconds, 0)
    payloads = measure(args.seconds, int(args.group_mb * 1e6))
    ray.shutdown()
    line = {
        "groups_per_s": round(headers["groups_per_s"]),
        "payload_gb_s": round(payloads["payload_gb_s"], 2),
        "payload_groups_per_s": round(payloads["groups_per_s"]),
        "group_mb": args.group_mb,
        "buffer_growth_mb": round(headers["buffer_growth_mb"], 1),
        "buffer_growth_with_payload_mb": round(payloads["buffer_growth_mb"], 1),
        "store_peak_gb": round(payloads["store_peak_gb"], 2),
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
