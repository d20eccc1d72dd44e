"""Controls: with learning rate 0, or with shuffled rewards, the demo must learn nothing.

    python -m benchmarks.controls [--steps 12] [--out runs]

Runs the demo short, twice, and prints one JSON line last: the change of held-out pass@1 in each run, and the noise such
a change has when nothing was learned (two standard errors of a difference of two evaluations).
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

RUN_TIMEOUT_S = 1800


def run_demo(name: str, out: Path, overrides: list[str]) -> dict[str, Any]:
    """One demo run in its own process; its summary.

    Raises:
        RuntimeError: the run failed; its own last lines say why.
    """
    command = [sys.executable, "-m", "train.run", "configs/demo.yaml", "--name", name, "--output_dir", str(out)]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, timeout=RUN_TIMEOUT_S)
    if done.returncode != 0:
        raise RuntimeError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return json.loads((out / name / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    common = ["--trainer.max_steps", str(args.steps), "--tracking.wandb", "false", "--generator.eval_greedy", "false"]
    frozen = run_demo("control-lr0", args.out, [*common, "--trainer.policy.optimizer_config.lr", "0"])
    shuffled = run_demo("control-shuffled", args.out, [*common, "--trainer.algorithm.shuffle_rewards", "true"])
    noise = 2 * math.hypot(frozen["stderr_before"], frozen["stderr_after"])
    line = {
        "lr0_delta": round(frozen["pass_at_1_after"] - frozen["pass_at_1_before"], 4),
        "shuffled_delta": round(shuffled["pass_at_1_after"] - shuffled["pass_at_1_before"], 4),
        "noise": round(noise, 4),
        "steps": args.steps,
        "eval_tasks": frozen["eval_tasks"],
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
