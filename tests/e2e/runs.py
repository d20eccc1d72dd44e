"""Starting a whole run as its users do, and looking at what it leaves."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.processes import children, command_line

MARK = "FLEET_RL_TEST_MARK"
RUN_TIMEOUT_S = 280
# Small enough for seconds, large enough for several batches of several groups in several turns.
SMALL = {
    "trainer.train_batch_size": 4,
    "trainer.max_steps": 3,
    "generator.n_samples_per_prompt": 4,
    "generator.eval_n_samples_per_prompt": 1,
    "generator.eval_greedy": "false",
    "generator.max_inflight_episodes": 64,
    "data.max_eval_tasks": 8,
    "tracking.wandb": "false",
    "trainer.dump_trajectories": "true",
}


@dataclass
class Run:
    """A run in its own process, marked so that everything it starts can be found again."""

    process: subprocess.Popen
    folder: Path
    mark: str

    def output(self, timeout_s: float = RUN_TIMEOUT_S) -> str:
        return self.process.communicate(timeout=timeout_s)[0]

    def read_until(self, pattern: str) -> str:
        """Read the run's output up to a line in which the regular expression is found."""
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            if re.search(pattern, line):
                return "".join(seen)
        raise AssertionError(f"the run ended before it said {pattern!r}:\n{''.join(seen)}")

    def kill(self) -> None:
        """SIGKILL for it and all it has started, as a machine that fails would."""
        kill_tree(self.process)

    def processes(self, name: str) -> list[psutil.Process]:
        """Those it started whose command line begins with ``name``."""
        return [process for process in children(self.process.pid) if command_line(process).startswith(name)]

    def kill_one(self, name: str) -> None:
        """SIGKILL for the only one of :meth:`processes`."""
        (one,) = self.processes(name)
        one.kill()

    def leftovers(self, patience_s: float = 15.0) -> list[str]:
        """Processes the run started that are still there, and its files in shared memory; polled until gone."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.5)
        return left

    def _left(self) -> list[str]:
        left = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            try:
                marked = process.environ().get(MARK) == self.mark
            except psutil.Error:
                continue
            if marked and process.info["status"] != psutil.STATUS_ZOMBIE:
                left.append(f"{process.pid} {' '.join(process.info['cmdline'])[:120]}")
        return left + [str(path) for path in Path("/dev/shm").glob(f"fleet-rl-*{self.folder.name}*")]


def kill_tree(process: subprocess.Popen) -> None:
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in everyone:
        try:
            one.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(everyone, timeout=10)
    process.stdout.close()
    process.wait(10)


def start(config: str, name: str, out: Path, **overrides: Any) -> Run:
    """``python -m train.run`` with the dotted overrides of ``keys`` on top of ``SMALL``."""
    keys = SMALL | overrides.pop("keys", {})
    arguments = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    mark = uuid.uuid4().hex
    environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"} | {MARK: mark}
    process = subprocess.Popen(
        [sys.executable, "-m", "train.run", config, "--name", name, "--output_dir", str(out), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | overrides.pop("environment", {}),
    )
    return Run(process, out / name, mark)


def batches(folder: Path) -> list[list[dict[str, Any]]]:
    """The dumped training batches, in step order."""
    files = sorted((folder / "trajectories").glob("step_*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def steps(folder: Path) -> list[dict[str, float]]:
    """The metrics of the training steps."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "policy/grad_norm" in line]
