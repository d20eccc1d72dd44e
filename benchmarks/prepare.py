"""How long `fleet-rl prepare` takes for a large task file, and how much memory.

    python -m benchmarks.prepare [--tasks 100000] [--preset stable] [--against]

Writes tasks in Fleet's format, with prompts of 150 words and verifiers of 50 lines (5.3 KB a task, the environments in
the proportions of Fleet's v0.3), and prepares them in a process of its own: ``wall_s`` is its whole life, the
start of Python included, ``peak_gb`` its largest resident set. ``--against`` prepares a second version, with a tenth
more tasks, against the first, and times that. One JSON line last.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from train.data.split import PRESETS

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENTS = {
    "google-maps": 4727, "github": 2081, "booking": 1336, "fostgres": 949, "reddit": 455, "ticketmaster": 257,
    "zillow": 118, "wallst": 69, "fira": 66, "outlook": 39, "carlisle": 38, "hubspot": 19, "amazon": 18, "dropbox": 3,
}  # fmt: skip
WORDS = [f"{start}{end}" for start in ("ta", "re", "mi", "so", "lu") for end in range(800)]
PROMPT_WORDS = 150
VERIFIER_LINES = 50
GROWTH = 1.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--preset", choices=sorted(PRESETS), default="stable")
    parser.add_argument("--against", action="store_true", help="time the comparison with an earlier version as well")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-rl-benchmark-") as scratch:
        folder = Path(scratch)
        write_tasks(folder / "tasks.json", options.tasks)
        arguments = ["--tasks", str(folder / "tasks.json"), "--preset", options.preset]
        if options.against:
            prepare([*arguments, "--out", str(folder / "old")])
            write_tasks(folder / "tasks.json", int(options.tasks * GROWTH))
            arguments += ["--against", str(folder / "old")]
        wall_s, cpu_s, peak_bytes = prepare([*arguments, "--out", str(folder / "new")])
        tasks = json.loads((folder / "new/manifest.json").read_text())["input"]["tasks"]
        figures = {
            "tasks": tasks,
            "wall_s": round(wall_s, 2),
            "peak_gb": round(peak_bytes / 1e9, 3),
            "cpu_s": round(cpu_s, 2),
            "input_gb": round((folder / "tasks.json").stat().st_size / 1e9, 3),
            "preset": options.preset,
            "against": options.against,
        }
    print(json.dumps(figures))


def prepare(arguments: list[str]) -> tuple[float, float, int]:
    """Wall and CPU seconds, and the largest resident set in bytes, of one preparation.

    Raises:
        RuntimeError: it failed.
    """
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "deploy.cli", "prepare", *arguments], cwd=ROOT, stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode != 0:
        raise RuntimeError(f"fleet-rl prepare ended with exit code {process.returncode}")
    return time.monotonic() - started, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024


def write_tasks(path: Path, count: int) -> None:
    """The same first tasks whatever the count, one a line."""
    rng = random.Random(1)
    with path.open("w", encoding="utf-8") as file:
        file.write('{"tasks": [\n')
        for index in range(count):
            file.write((",\n" if index else "") + json.dumps(task(rng, index)))
        file.write("\n]}\n")


def task(rng: random.Random, index: int) -> dict[str, object]:
    lines = (f"    assert {' '.join(rng.choices(WORDS, k=10))!r} in rows" for _ in range(VERIFIER_LINES))
    return {
        "task_key": f"task_{index:06d}_{rng.getrandbits(48):012x}",
        "prompt": " ".join(rng.choices(WORDS, k=PROMPT_WORDS)),
        "env_key": rng.choices(list(ENVIRONMENTS), list(ENVIRONMENTS.values()))[0],
        "env_version": "v1.2.3",
        "data_key": "seed",
        "data_version": "v0.3",
        "env_variables": {"CURRENT_DATE": "2026-01-30", "LOGGED_IN_USER": "u1", "LOGGED_IN_NAME": "Ann"},
        "verifier_code": "\n".join(["def verify(env, final_answer=None):", *lines, "    return 1.0"]),
        "task_modality": "tool_use",
        "difficulty": rng.randint(1, 3),
    }


if __name__ == "__main__":
    main()
