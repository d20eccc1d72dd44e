"""Whole runs whose parts are killed, or stopped, at moments nobody chose; and what of the work was lost.

    python -m benchmarks.chaos [--minutes 10] [--only KIND ...] [--seed 0] [--undisturbed] [--out DIR]

One run of the demo after the other, shortened, until the time is over. In each, victims of all kinds are struck in
turn, in an order and at moments drawn by chance: the next one once the run has recovered from the last, that is, has
trained a further step, has got rid of the victim (which may hang), and has another process in its place. Then the run
must end well by itself. Where the driver is struck, all of the run is, and it is started again with ``--resume true``.
What the runs leave is checked: every step trained once, no group in two batches, no token of a version that was never
published, versions that only grow, ledger and leases balanced.

``recoveries``: median seconds from the blow to the recovery, by kind. ``pass_at_1``: held out, at the end of each run;
with ``--undisturbed`` also of a run that nobody strikes. One JSON line last; exit code 1 if anything was lost.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import children, command_line, runs, strike

BLOWS = 12  # in one run, at most
STEPS_A_BLOW = 5  # of a run, so that it is not over before all blows are struck
BLOWS_A_MINUTE = 3  # in a run that is shorter than all blows need
MOMENT_S = 2.0  # the blow comes within so many seconds of the last recovery
READY_S = 15.0  # only what is older is stopped: a worker has two minutes to get ready, longer than such a run takes
RECOVERY_TIMEOUT_S = 300.0
RUN_TIMEOUT_S = 1800.0
KEYS = {
    "trainer.train_batch_size": 4,
    "trainer.ckpt_interval": 1,
    "trainer.dump_trajectories": "true",
    "generator.n_samples_per_prompt": 4,
    "generator.eval_n_samples_per_prompt": 1,
    "generator.eval_greedy": "false",
    "generator.max_inflight_episodes": 64,
    "generator.num_workers": 2,
    "generator.worker_num_cpus": 0.1,
    "generator.worker_timeout": 10,
    "data.max_eval_tasks": 64,
    "tracking.wandb": "false",
    "tracking.tensorboard": "false",
    "policy.health_timeout_s": 10,
    "policy.update_timeout_s": 20,
}


class RunLost(RuntimeError):
    """A run did not outlive a blow. The message says what it said last."""


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
    log: Path
    steps: dict[int, float] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)

    @classmethod
    def begin(cls, name: str, out: Path, keys: Mapping[str, Any]) -> Life:
        """Start it, and read what it says."""
        words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "train.run", "configs/demo.yaml", "--name", name, "--output_dir", str(out)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "bufsize": 1}
        life = cls(subprocess.Popen([*command, *words], **pipes), out / f"{name}.log")
        threading.Thread(target=life._read, daemon=True).start()
        return life

    def _read(self) -> None:
        for line in self.process.stdout:
            self.note(line)
            _, found, rest = line.partition("training  step ")
            if found:
                self.steps.setdefault(int(rest.partition("/")[0]), time.monotonic())

    def note(self, line: str) -> None:
        """Keep a line, with the time of day."""
        self.lines.append(line)
        with self.log.open("a") as log:
            log.write(f"{time.strftime('%H:%M:%S')} {line}")

    @property
    def newest(self) -> int:
        """The last step that was trained; 0: none."""
        return max(list(self.steps), default=0)

    def kill(self) -> None:
        """SIGKILL for it and all it has started, as a machine that fails would."""
        for process in [*children(self.process.pid), psutil.Process(self.process.pid)]:
            strike(process, signal.SIGKILL)
        self.process.wait(30)


class Run:
    """A run that is struck. A context manager: leaving it ends the run, however far it is."""

    def __init__(self, name: str, out: Path, steps: int, keys: Mapping[str, Any] | None = None) -> None:
        """``keys``: on top of :data:`KEYS`."""
        self.folder = out / name
        self.steps = steps
        self._keys = KEYS | {"trainer.max_steps": steps} | (keys or {})
        self._deadline = time.monotonic() + RUN_TIMEOUT_S
        self.life = Life.begin(name, out, self._keys)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.life.process.poll() is None:
            self.life.kill()

    def wait_until_trained(self, step: int) -> None:
        """Raises :class:`RunLost` if the run ends before."""
        self._wait(lambda: self.life.newest >= step, f"step {step}")

    def has_room(self) -> bool:
        """Whether enough steps are left for a further blow and the recovery from it."""
        return self.life.newest + STEPS_A_BLOW // 2 < self.steps

    def strike(self, kind: str, rng: random.Random) -> float:
        """One blow, at one of its kind. Returns the seconds until the run has recovered.

        Raises:
            RunLost: it has not.
        """
        before = self.find(kind)
        victims: list[psutil.Process] = []
        self._wait(lambda: bool(victims.extend(self._victims(kind)) or victims), f"a process of kind {kind}")
        victim = rng.choice(victims)
        self.life.note(f"=== {kind} is struck: process {victim.pid}\n")
        struck, trained = time.monotonic(), self.life.newest
        if kind == "driver":
            self.life.kill()
            self.life = Life.begin(self.folder.name, self.folder.parent, self._keys | {"resume": "true"})
        else:
            strike(victim, VICTIMS[kind].blow)

        def recovered() -> bool:
            return self.life.newest > trained and not runs(victim) and len(self.find(kind)) >= len(before)

        self._wait(recovered, f"the recovery from {kind}", RECOVERY_TIMEOUT_S)
        return time.monotonic() - struck

    def finish(self) -> None:
        """Raises :class:`RunLost` unless the run ends well."""
        self._wait(lambda: self.life.process.poll() is not None, "its end")
        if self.life.process.returncode != 0:
            raise self._lost(f"it ended with {self.life.process.returncode}")

    def _wait(self, condition: Callable[[], bool], what: str, timeout_s: float = RUN_TIMEOUT_S) -> None:
        deadline = min(self._deadline, time.monotonic() + timeout_s)
        while not condition():
            if time.monotonic() > deadline:
                raise self._lost(f"{what} did not come in time")
            if self.life.process.poll() is not None and not condition():
                raise self._lost(f"it ended with {self.life.process.returncode} before {what}")
            time.sleep(0.05)

    def _lost(self, reason: str) -> RunLost:
        return RunLost(f"{reason}:\n{''.join(self.life.lines[-30:])}")

    def _victims(self, kind: str) -> list[psutil.Process]:
        hangs = VICTIMS[kind].blow is signal.SIGSTOP
        return [process for process in self.find(kind) if not hangs or _age_s(process) > READY_S]

    def find(self, kind: str) -> list[psutil.Process]:
        """The run's processes of a kind."""
        if kind == "driver":
            return [psutil.Process(self.life.process.pid)]
        return [process for process in children(self.life.process.pid) if _is_of_kind(process, kind)]


def _is_of_kind(process: psutil.Process, kind: str) -> bool:
    line = command_line(process)
    return line.startswith(VICTIMS[kind].begins) or (kind == "local_fleet" and "actors.envs.local_fleet " in line)


def _age_s(process: psutil.Process) -> float:
    try:
        return time.time() - process.create_time()
    except psutil.NoSuchProcess:
        return 0.0


def losses(folder: Path, steps: int) -> Counter[str]:
    """What is wrong with what a run of ``steps`` steps left."""
    found: Counter[str] = Counter()
    summary = json.loads((folder / "summary.json").read_text())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "policy/grad_norm" in row]
    batches = [_lines(path) for path in sorted((folder / "trajectories").glob("step_*.jsonl"))]
    trained = [{line["group_id"] for line in batch} for batch in batches]
    found["double_trained"] = sum(map(len, trained)) - len(set().union(*trained))
    found["lost_groups"] = steps * KEYS["trainer.train_batch_size"] - sum(map(len, trained))
    versions = [int(row["sync/version"]) for row in rows]
    published = {*range(versions[-1] + 1)} if versions else set()
    spans = [span[0] for batch in batches for line in batch for span in line["spans"]]
    found["unpublished_tokens"] = sum(version not in published for version in spans)
    found["version_went_back"] = sum(b <= a for a, b in zip(versions, versions[1:], strict=False))
    found["steps_missing"] = steps - len({row["step"] for row in rows})
    found["steps_twice"] = len(rows) - len({row["step"] for row in rows})
    ledgers = [summary["ledger"]["train"], summary["ledger"]["eval"]]
    found["ledger_unbalanced"] = sum(not ledger["balanced"] for ledger in ledgers)
    found["instances_left"] = summary["ledger"]["instances"]["left"] or 0
    return +found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Soak:
    """What has happened so far."""

    kills: Counter[str] = field(default_factory=Counter)
    recoveries: dict[str, list[float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    pass_at_1: dict[str, list[float]] = field(default_factory=dict)
    runs: int = 0
    finished: int = 0

    def live(self, run: Run, kinds: Iterator[str], blows: int, end: float, rng: random.Random) -> None:
        """One run to its end, with so many blows; none after ``end`` but the first."""
        self.runs += 1
        try:
            with run:
                for number in range(blows):
                    run.wait_until_trained(1)
                    if number and (time.monotonic() > end or not run.has_room()):
                        break
                    time.sleep(rng.uniform(0, MOMENT_S))
                    self._strike(run, next(kinds), rng)
                run.finish()
            self._check(run, "struck" if blows else "undisturbed")
        except RunLost as error:
            self.lost["failed_runs"] += 1
            print(f"{run.folder.name}: {error}", flush=True)

    def _strike(self, run: Run, kind: str, rng: random.Random) -> None:
        self.kills[kind] += 1
        seconds = run.strike(kind, rng)
        self.recoveries.setdefault(kind, []).append(seconds)
        print(
            f"{run.folder.name}: {kind} struck, recovered at step {run.life.newest} after {seconds:.1f} s", flush=True
        )

    def _check(self, run: Run, how: str) -> None:
        self.finished += 1
        wrong = losses(run.folder, run.steps)
        self.lost += wrong
        pass_at_1 = json.loads((run.folder / "summary.json").read_text())["pass_at_1_after"]
        self.pass_at_1.setdefault(how, []).append(pass_at_1)
        print(f"{run.folder.name}: ended, pass@1 {pass_at_1}{f'; {dict(wrong)}' if wrong else ''}", flush=True)

    def line(self) -> dict[str, Any]:
        return {
            "kills": dict(self.kills),
            "recoveries": {kind: round(statistics.median(values), 1) for kind, values in self.recoveries.items()},
            "runs_finished": self.finished,
            "runs": self.runs,
            "lost_groups": self.lost["lost_groups"],
            "double_trained": self.lost["double_trained"],
            "unpublished_tokens": self.lost["unpublished_tokens"],
            "ledger_balanced": not self.lost["ledger_unbalanced"],
            "other": {name: count for name, count in self.lost.items() if count},
            "pass_at_1": self.pass_at_1,
            "cores": os.cpu_count(),
        }


def in_turn(kinds: list[str], rng: random.Random) -> Iterator[str]:
    """All kinds, again and again, each time in another order."""
    while True:
        yield from rng.sample(kinds, len(kinds))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", nargs="+", choices=VICTIMS, default=list(VICTIMS), metavar="KIND")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--undisturbed", action="store_true", help="first a run that nobody strikes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or Path(tempfile.mkdtemp(prefix="chaos-"))
    rng = random.Random(args.seed)
    kinds, soak = in_turn(args.only, rng), Soak()
    blows = max(1, min(BLOWS, round(args.minutes * BLOWS_A_MINUTE)))
    steps = STEPS_A_BLOW * (blows + 1)
    end = time.monotonic() + 60 * args.minutes
    if args.undisturbed:
        soak.live(Run("undisturbed", out, steps), kinds, 0, end, rng)
    while time.monotonic() < end:
        soak.live(Run(f"run-{soak.runs + 1}", out, steps), kinds, blows, end, rng)
    print(json.dumps(soak.line()))
    return 1 if +soak.lost else 0


if __name__ == "__main__":
    sys.exit(main())
