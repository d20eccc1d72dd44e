"""One synchronous run that is killed at random moments, again and again, against the same run undisturbed.

    python -m benchmarks.resume [--points 20] [--steps 60] [--seed 0] [--keep]

The demo's configuration, small and with ``buffer.max_staleness 0``, is trained once undisturbed. The same run is then
killed, all its processes at one moment, started again with ``--resume true``, killed again, and so on; the last life
finishes. Afterwards nothing may tell the two apart: steps, metrics of batches and optimiser, every trajectory token for
token, tickets, and bit by bit the weights and the optimiser's state of the last checkpoint.

The moments are drawn before anything starts, spread evenly over the run. Of every five, in an order by chance, one lies
in the start of a run, one in the next training of a batch after some step, one in the next checkpoint being written,
one in the fifth of a second after a checkpoint, and one anywhere in a step. ``kills`` counts what the run's files show
it was at: starting (no rollout yet), checkpoint (half a one is there), rollout (leases are out, or the weights for it
are published), or else training. In a synchronous run the next rollouts begin beside a checkpoint; that counts as
checkpoint.

``resume_s``: from a kill until the run said that it had trained a further step, in all lives that came so far. One JSON
line last; exit code 1 if anything differs, and then the runs stay where the last line but one says.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import psutil

from actors.lease_table import SlotState
from actors.weight_store import STATE_FILE
from benchmarks.chaos import Life, RunLost
from benchmarks.processes import children, runs, strike
from benchmarks.run_difference import differences, training_rows
from train import checkpoint
from train.resume import CHECKPOINTS, SUMMARY

Aim = Literal["starting", "training", "checkpoint", "after_checkpoint", "step"]

AIMS: tuple[Aim, ...] = get_args(Aim)
TIMES = {  # the parts of a step that is followed by a checkpoint, by what they are here
    "training": ("forward_backward", "optimizer", "publish"),
    "checkpoint": ("checkpoint",),
    "step": ("step",),
}
PHASES = ("starting", "rollout", "training", "checkpoint")
STEPS_A_POINT = 2  # at least: a life is a step or two further when it is killed than was drawn
LAST_STEPS = 6  # no kill is drawn so close to the end
AFTER_CHECKPOINT_S = 0.2
PATIENCE_S = 900.0  # for whatever comes next in a run
END_TIMEOUT_S = 30.0  # for processes that were killed
POLL_S = 0.003
LEASES = "leases.db"
SHOWN = 10  # differences of one aspect
KEYS = {
    "buffer.max_staleness": 0,
    "trainer.train_batch_size": 4,
    "trainer.ckpt_interval": 2,
    "trainer.eval_before_train": "false",
    "trainer.eval_after_train": "false",
    "trainer.dump_trajectories": "true",
    "generator.n_samples_per_prompt": 4,
    "generator.max_inflight_episodes": 64,
    "tracking.wandb": "false",
    "tracking.tensorboard": "false",
}


@dataclass(frozen=True)
class Point:
    """When a run is killed.

    Attributes:
        step: once the run has trained it, and one that is new in this life. Unused for ``starting``.
        fraction: of the time that what is aimed at takes, and within which the kill comes.
    """

    aim: Aim
    step: int
    fraction: float


@dataclass(frozen=True)
class Pace:
    """How long things take in an undisturbed run, in seconds."""

    starting: float
    training: float
    checkpoint: float
    step: float
    after_checkpoint: float = AFTER_CHECKPOINT_S

    @classmethod
    def of(cls, run: LivesOfARun) -> Pace:
        """That of a run that has ended, medians of its steps."""
        rows = [row for row in training_rows(run.folder) if "timing/checkpoint" in row]
        seconds = {
            name: [sum(row[f"timing/{part}"] for part in parts) for row in rows] for name, parts in TIMES.items()
        }
        return cls(starting=run.start_s or 0.0, **{name: statistics.median(found) for name, found in seconds.items()})


@dataclass(frozen=True)
class Kill:
    """What a run was at. ``step``: the last that it had said was trained; ``checkpoint``: that it goes on from."""

    phase: str
    step: int
    checkpoint: int


def draw(count: int, steps: int, rng: random.Random) -> list[Point]:
    """``count`` points in a run of ``steps`` steps, in order, one in each of as many equal stretches of it."""
    aims = [aim for _ in range(-(-count // len(AIMS))) for aim in rng.sample(AIMS, len(AIMS))][:count]
    width = (steps - LAST_STEPS) / count
    return [Point(aim, 1 + int(width * (index + rng.random())), rng.random()) for index, aim in enumerate(aims)]


class LivesOfARun:
    """A run, one process tree after the other. A context manager: leaving it ends the run, however far it is."""

    def __init__(self, name: str, out: Path, keys: Mapping[str, Any]) -> None:
        self.folder = out / name
        self._keys = keys | {"resume": "true"}
        self._begin()

    def __enter__(self) -> LivesOfARun:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._life.process.poll() is None:
            kill_tree(psutil.Process(self._life.process.pid))
            self._life.process.wait(END_TIMEOUT_S)

    def _begin(self) -> None:
        found = checkpoint.latest_complete(self.folder / CHECKPOINTS)
        self._checkpoint = 0 if found is None else checkpoint.step_of(found)
        self._began, self._began_at = time.monotonic(), time.time()
        self._life = Life.begin(self.folder.name, self.folder.parent, self._keys)

    @property
    def start_s(self) -> float | None:
        """Seconds of this life until its rollouts had begun; ``None``: they have not."""
        began = min(list(self._life.steps.values()), default=None)  # another thread adds to them
        return None if began is None else began - self._began

    @property
    def first_step_s(self) -> float | None:
        """Seconds of this life until it had trained a step; ``None``: it has not."""
        said = [at for step, at in list(self._life.steps.items()) if step > self._checkpoint]
        return min(said) - self._began if said else None

    def wait_for(self, point: Point, pace: Pace) -> None:
        """Until the moment has come.

        Raises:
            RunLost: the run ended before, or it has come to a halt.
        """
        if point.aim != "starting":
            step = max(point.step, self._checkpoint + 1)
            self._wait(lambda: self._life.newest >= step, f"step {step}")
        if point.aim == "training":
            self._wait(lambda: phase_of(self.folder, self._began_at) == "rollout", "a rollout")
            self._wait(lambda: phase_of(self.folder, self._began_at) == "training", "the training of a batch")
        elif point.aim == "checkpoint":
            self._wait(lambda: writes_checkpoint(self.folder, self._began_at), "a checkpoint")
        elif point.aim == "after_checkpoint":
            done = checkpoint.latest_complete(self.folder / CHECKPOINTS)
            self._wait(lambda: checkpoint.latest_complete(self.folder / CHECKPOINTS) != done, "the next checkpoint")
        time.sleep(point.fraction * getattr(pace, point.aim))

    def kill(self) -> Kill:
        """SIGKILL for all of this life; then the next one begins.

        Raises:
            RunLost: the run has ended by itself.
        """
        if self._life.process.poll() is not None:
            raise self._lost("its kill")
        kill_tree(psutil.Process(self._life.process.pid))
        self._life.process.wait(END_TIMEOUT_S)
        phase = "starting" if self.start_s is None else phase_of(self.folder, self._began_at)
        step = max(self._life.newest, self._checkpoint)
        self._life.note(f"=== killed: {phase}\n")
        self._begin()
        return Kill(phase, step, self._checkpoint)

    def finish(self) -> None:
        """Raises :class:`RunLost` unless the run ends well."""
        self._wait(lambda: self._life.process.poll() is not None, "its end")
        if self._life.process.returncode != 0:
            raise self._lost("its last step")

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self._life.process.poll() is not None or time.monotonic() > deadline:
                raise self._lost(what)
            time.sleep(POLL_S)

    def _lost(self, what: str) -> RunLost:
        code = self._life.process.poll()
        how = "did not come in time" if code is None else f"was to come, but the run ended with {code}"
        return RunLost(f"{self.folder.name}: {what} {how}:\n{''.join(self._life.lines[-30:])}")


def kill_tree(root: psutil.Process) -> None:
    """SIGKILL for a process and all it has started, as when a machine fails: all are stopped before the first one dies,
    so that none sees another die."""
    everyone: dict[psutil.Process, None] = {}
    while new := [process for process in [root, *children(root.pid)] if process not in everyone]:
        for process in new:
            strike(process, signal.SIGSTOP)
            everyone[process] = None
    for process in everyone:
        strike(process, signal.SIGKILL)
    deadline = time.monotonic() + END_TIMEOUT_S
    while any(map(runs, everyone)) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def phase_of(folder: Path, began_at: float) -> str:
    """What a run was at whose rollouts had begun, from what it left in its folder.

    Args:
        began_at: epoch seconds; what is older was left by an earlier life.
    """
    if writes_checkpoint(folder, began_at):
        return "checkpoint"
    published_after_leases = _changed_at(folder / STATE_FILE) > _changed_at(folder / LEASES)
    return "rollout" if published_after_leases or leases_out(folder) else "training"


def writes_checkpoint(folder: Path, began_at: float) -> bool:
    """Whether there is half a checkpoint of the life that began then."""
    partial = (folder / CHECKPOINTS).glob(f"*{checkpoint.STAGING_SUFFIX}")
    return any(_changed_at(path) >= began_at for path in partial)


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        return 0.0


def leases_out(folder: Path) -> int:
    """Instances that are in use, says the run's table of leases."""
    return sum(slot["state"] == SlotState.LEASED for slot in _slots(folder))


def _slots(folder: Path) -> list[dict[str, Any]]:
    with closing(sqlite3.connect(folder / LEASES)) as file:
        return [json.loads(slot) for (slot,) in file.execute("SELECT slot FROM slot")]


def instances_left(folder: Path) -> int:
    """Of a run that has ended: what its summary says, or its table of leases, whichever is more."""
    said = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["ledger"]["instances"]["left"]
    return max(len(_slots(folder)), 0 if said is None else said)


def ledger_balances(folder: Path) -> bool:
    """Whether every episode of a run that has ended has one end."""
    ledger = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["ledger"]
    settled = all(part["balanced"] and not part["in_flight"] for part in (ledger["train"], ledger["eval"]))
    return settled and ledger["instances"]["left"] is not None


def undisturbed(out: Path, keys: Mapping[str, Any]) -> tuple[Path, Pace]:
    """The run that the other one is compared with, and its pace."""
    with LivesOfARun("undisturbed", out, keys) as run:
        run.finish()
    return run.folder, Pace.of(run)


def killed(out: Path, keys: Mapping[str, Any], points: list[Point], pace: Pace) -> tuple[Path, list[Kill], list[float]]:
    """The run that is killed at ``points``: its folder, its kills, and after how many seconds it trained again."""
    kills: list[Kill] = []
    resumed_s: list[float] = []

    def tell() -> None:
        if not kills:
            return
        kill, seconds = kills[-1], run.first_step_s
        origin = f"goes on from step {kill.checkpoint}" if kill.checkpoint else "begins anew"
        after = "is killed before its next step" if seconds is None else f"next step after {seconds:.1f} s"
        print(f"point {len(kills)}/{len(points)}: {kill.phase}, step {kill.step}; {origin}, {after}", flush=True)
        if seconds is not None:
            resumed_s.append(seconds)

    with LivesOfARun("killed", out, keys) as run:
        for point in points:
            run.wait_for(point, pace)
            tell()
            kills.append(run.kill())
        run.finish()
        tell()
    return run.folder, kills, resumed_s


def compare(args: argparse.Namespace, out: Path) -> bool:
    """Both runs, and what became of them as the last line. Returns whether they are the same.

    Raises:
        RunLost: one of them did not come to its end.
    """
    begun = time.monotonic()
    keys = KEYS | {"trainer.max_steps": args.steps}
    reference, pace = undisturbed(out, keys)
    times = {name: round(seconds, 2) for name, seconds in vars(pace).items()}
    print(f"undisturbed: {args.steps} steps; seconds: {times}", flush=True)
    points = draw(args.points, args.steps, random.Random(args.seed))
    folder, kills, resumed_s = killed(out, keys, points, pace)
    found = differences(reference, folder, args.steps)
    for aspect, lines in found.items():
        for line in lines[:SHOWN]:
            print(f"{aspect}: {line}")
        if len(lines) > SHOWN:
            print(f"{aspect}: and {len(lines) - SHOWN} more")
    counts = Counter(kill.phase for kill in kills)
    line = {
        "points": len(kills),
        "kills": {phase: counts[phase] for phase in PHASES},
        "steps": args.steps,
        "equal": {aspect: not lines for aspect, lines in found.items()},
        "ledger_balanced": all(map(ledger_balances, (reference, folder))),
        "leases_left": sum(map(instances_left, (reference, folder))),
        "resume_s": {"median": round(statistics.median(resumed_s), 1), "max": round(max(resumed_s), 1)},
        "wall_s": round(time.monotonic() - begun, 1),
    }
    same = all(line["equal"].values()) and line["ledger_balanced"] and not line["leases_left"]
    if args.keep or not same:
        print(f"both runs are in {out}")
    print(json.dumps(line))
    return same


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=20)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="of the moments; the runs have the demo's own")
    parser.add_argument("--keep", action="store_true", help="leave both runs there to look at")
    args = parser.parse_args()
    if args.points < 1 or args.steps < STEPS_A_POINT * args.points + LAST_STEPS:
        least = STEPS_A_POINT * max(1, args.points) + LAST_STEPS
        parser.error(f"--points must be at least 1, and --steps at least {least} for that many, not {args.steps}")
    out = Path(tempfile.mkdtemp(prefix="resume-"))
    # A Ray of the runs' own, whose files go with everything else.
    os.environ.pop("RAY_ADDRESS", None)
    os.environ["RAY_TMPDIR"] = str(out)
    try:
        same = compare(args, out)
    except RunLost as error:
        print(f"{error}\nboth runs are in {out}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        shutil.rmtree(out, ignore_errors=True)
        return 130
    if same and not args.keep:
        shutil.rmtree(out)
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
