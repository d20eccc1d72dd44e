"""How long an engine takes to start, and another one to take its place.

    python -m benchmarks.engine_start [--model DIR] [--spawn]

``first_s`` counts from before vLLM is imported, as a replica starts; ``next_s`` from when the first one is gone.
``--spawn`` starts each engine's process from nothing, as vLLM does by itself in a Ray actor. One JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time

from serve import fork_server
from serve.config import PolicyConfig
from serve.quick_loading import quick_loading


async def start_two(config: PolicyConfig, model: str, spawn: bool) -> dict[str, float]:
    began = time.monotonic()
    with quick_loading():
        from serve import engine as engines

    if spawn:
        engines.start_fork_server = lambda config: False
    imported = time.monotonic()
    engine = await engines.Engine.start(config, model)
    first = time.monotonic()
    await engine.shutdown()
    ended = time.monotonic()
    engine = await engines.Engine.start(config, model)
    again = time.monotonic()
    await engine.shutdown()
    return {"import_s": imported - began, "first_s": first - began, "next_s": again - ended}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny-tracker")
    parser.add_argument("--spawn", action="store_true", help="no fork server")
    args = parser.parse_args()
    config = PolicyConfig(dtype="float32", max_model_len=1024, max_num_seqs=64, enforce_eager=True, kv_cache_gib=0.25)
    os.environ.update(config.environment())
    if args.spawn:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    else:
        fork_server.start_fork_server(config)
    found = asyncio.run(start_two(config, args.model, args.spawn))
    print(json.dumps({name: round(value, 2) for name, value in found.items()} | {"load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
