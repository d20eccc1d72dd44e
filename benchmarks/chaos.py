"""Whole runs whose parts are killed, or stopped, at moments nobody chose; and what of the work was lost.

    python -m benchmarks.chaos [--minutes 10] [--only KIND ...] [--seed 0] [--out DIR]

One run of the demo after the other, shortened, until the time is over. In each, one victim of the next kind is struck
at a random moment of the training; then the run must end well by itself, or, where the driver was struck, when it is
started again with ``--resume true``. What the runs leave is checked: every step trained once, no group in two batches,
no token of a version that was never published, versions that only grow, ledger and leases balanced.

``recoveries``: median seconds from the blow to the next trained step, by kind. One JSON line last; exit code 1 if
anything was lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

STEPS = 6
RUN_TIMEOUT_S = 900.0
KEYS = {
    "trainer.max_steps": STEPS,
    "trainer.train_batch_size": 4,
    "trainer.ckpt_interval": 1,
    "trainer.dump_trajectories": "true",
    "generator.n_samples_per_prompt": 4,
    "generator.eval_n_samples_per_prompt": 1,
    "generator.eval_greedy": "false",
    "generator.max_inflight_episodes": 64,
    "generator.num_workers": 2,
    "generator.worker_num_cpus": 0.1,
    "data.max_eval_tasks": 16,
    "tracking.wandb": "false",
    "tracking.tensorboard": "false",
    "policy.health_timeout_s": 20,
}


@dataclass(frozen=True)
class Victim:
    """Which process is struck. ``begins``: of its command line; Ray names its processes after their actors."""

    begins: str
    blow: signal.Signals = signal.SIGKILL


VICTIMS = {
    "engine": Victim("VLLM::EngineCore"),
    "replica": Victim("ray::ServeReplica"),
    "rollout_worker": Victim("ray::RolloutWorker"),
    "env_pool": Victim("ray::EnvPool"),
    "replay_buffer": Victim("ray::ReplayBuffer"),
    "weight_store": Victim("ray::WeightStore"),
    "learner_rank": Victim("ray::RayTrainWorker"),
    "conductor": Victim("ray::Conductor"),
    "driver": Victim("driver"),
    "local_fleet": Victim("local_fleet"),
    "engine_hangs": Victim("VLLM::EngineCore", signal.SIGSTOP),
    "rollout_worker_hangs": Victim("ray::RolloutWorker", signal.SIGSTOP),
}


@dataclass
class Life:
    """One process of a run, and when it said that a step was trained."""

    process: subprocess.Popen[str]
    steps: dict[int, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, name: str, out: Path, resume: bool) -> Life:
        keys = KEYS | {"resume": str(resume).lower()}
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "train.run", "configs/demo.yaml", "--name", name, "--output_dir", str(out)]
        life = cls(
            subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1)
        )
        threading.Thread(target=life._read, daemon=True).start()
        return life

    def _read(self) -> None:
        for line in self.process.stdout:
            self.lines.append(line)
            _, found, rest = line.partition("training  step ")
            if found:
                self.steps.setdefault(int(rest.partition("/")[0]), time.monotonic())

    @property
    def newest(self) -> int:
        """The last step that was trained; 0: none."""
        return max(list(self.steps), default=0)

    def next_after(self, struck: float, trained: int) -> float | None:
        """When the first step beyond ``trained`` was, after the blow."""
        later = [when for step, when in list(self.steps.items()) if step > trained and when > struck]
        return min(later, default=None)

    def wait_for(self, condition: Callable[[], bool], deadline: float) -> None:
        while not condition() and self.process.poll() is None:
            if time.monotonic() > deadline:
                self.kill()
                raise RuntimeError(f"the run took too long:\n{''.join(self.lines[-20:])}")
            time.sleep(0.05)

    def kill(self) -> None:
        for process in [*_children(self.process.pid), psutil.Process(self.process.pid)]:
            _strike(process, signal.SIGKILL)
        self.process.wait(30)


def _children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def _strike(process: psutil.Process, blow: signal.Signals) -> None:
    try:
        process.send_signal(blow)
    except psutil.NoSuchProcess:
        return


def _find(life: Life, kind: str, rng: random.Random) -> psutil.Process | None:
    if kind == "driver":
        return psutil.Process(life.process.pid)
    mark = VICTIMS[kind].begins
    found = []
    for process in _children(life.process.pid):
        try:
            line = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if line.startswith(mark) or (kind == "local_fleet" and "actors.envs.local_fleet " in line):
            found.append(process)
    return rng.choice(found) if found else None


def strike_one(life: Life, kind: str, rng: random.Random) -> psutil.Process:
    """One blow. Returns the victim: one of its kind, chosen at random.

    Raises:
        RuntimeError: there is none.
    """
    victim = _find(life, kind, rng)
    if victim is None:
        raise RuntimeError(f"no process of kind {kind} to strike:\n{''.join(life.lines[-20:])}")
    if kind == "driver":
        life.kill()
    else:
        _strike(victim, VICTIMS[kind].blow)
    return victim


def strike(kind: str, name: str, out: Path, rng: random.Random) -> float:
    """One run with one blow. Returns the seconds until the next trained step.

    Raises:
        RuntimeError: the run did not end well.
    """
    deadline = time.monotonic() + RUN_TIMEOUT_S
    life = Life.begin(name, out, resume=False)
    after = rng.randrange(1, STEPS - 1)
    life.wait_for(lambda: life.newest >= after, deadline)
    time.sleep(rng.uniform(0, 0.5))
    struck, trained = time.monotonic(), life.newest
    victim = strike_one(life, kind, rng)
    if kind == "driver":
        life = Life.begin(name, out, resume=True)
    life.wait_for(lambda: life.next_after(struck, trained) is not None, deadline)
    recovered = life.next_after(struck, trained)
    life.wait_for(lambda: False, deadline)
    _strike_stopped(victim, kind)
    if life.process.returncode != 0:
        raise RuntimeError(f"it ended with {life.process.returncode}:\n{''.join(life.lines[-20:])}")
    return (recovered or time.monotonic()) - struck


def _strike_stopped(victim: psutil.Process, kind: str) -> None:
    if kind.endswith("_hangs") and victim.is_running():
        _strike(victim, signal.SIGKILL)


def losses(folder: Path) -> Counter[str]:
    """What is wrong with what a run left."""
    found: Counter[str] = Counter()
    summary = json.loads((folder / "summary.json").read_text())
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [step for step in steps if "policy/grad_norm" in step]
    batches = [_lines(path) for path in sorted((folder / "trajectories").glob("step_*.jsonl"))]
    trained = [{line["group_id"] for line in batch} for batch in batches]
    found["double_trained"] = sum(map(len, trained)) - len(set().union(*trained))
    found["lost_groups"] = STEPS * KEYS["trainer.train_batch_size"] - sum(map(len, trained))
    versions = [int(step["sync/version"]) for step in steps]
    published = {*range(versions[-1] + 1)} if versions else set()
    spans = [span[0] for batch in batches for line in batch for span in line["spans"]]
    found["unpublished_tokens"] = sum(version not in published for version in spans)
    found["version_went_back"] = sum(b <= a for a, b in zip(versions, versions[1:], strict=False))
    found["steps_missing"] = STEPS - len({step["step"] for step in steps})
    ledgers = [summary["ledger"]["train"], summary["ledger"]["eval"]]
    found["ledger_unbalanced"] = sum(not ledger["balanced"] for ledger in ledgers)
    found["instances_left"] = summary["ledger"]["instances"]["left"] or 0
    return +found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=list(VICTIMS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    rng = random.Random(args.seed)
    kills: Counter[str] = Counter()
    lost: Counter[str] = Counter()
    recoveries: dict[str, list[float]] = {}
    finished = runs = 0
    end = time.monotonic() + 60 * args.minutes
    while time.monotonic() < end:
        kind = args.only[runs % len(args.only)]
        runs += 1
        kills[kind] += 1
        name = f"{kind}-{runs}"
        try:
            seconds = strike(kind, name, out, rng)
            recoveries.setdefault(kind, []).append(seconds)
            finished += 1
            wrong = losses(out / name)
            lost += wrong
            print(f"{name}: the next step after {seconds:.1f} s{f'; {dict(wrong)}' if wrong else ''}", flush=True)
        except RuntimeError as error:
            lost["failed_runs"] += 1
            print(f"{name}: {error}", flush=True)
    line = {
        "kills": dict(kills),
        "recoveries": {kind: round(statistics.median(values), 1) for kind, values in recoveries.items()},
        "runs_finished": finished,
        "runs": runs,
        "lost_groups": lost["lost_groups"],
        "double_trained": lost["double_trained"],
        "unpublished_tokens": lost["unpublished_tokens"],
        "ledger_balanced": not lost["ledger_unbalanced"],
        "other": {name: count for name, count in lost.items() if count},
        "cores": os.cpu_count(),
    }
    print(json.dumps(line))
    return 1 if +lost else 0


if __name__ == "__main__":
    sys.exit(main())
