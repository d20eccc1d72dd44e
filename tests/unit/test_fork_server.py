"""The process that engines are forked from, with something lighter than vLLM in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil

from serve.config import PolicyConfig
from serve.fork_server import start_fork_server
from tests.e2e.policies import until

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, multiprocessing, os, sys, time
from serve import fork_server
from serve.config import PolicyConfig
from serve.shared_folder import SHARED_MEMORY
import psutil

def look(answers, name):
    names = ("ADDED", "CHANGED", "REMOVED", "OMP_NUM_THREADS")
    facts = {n: os.environ.get(n) for n in names} | {"imported": "wave" in sys.modules, "parent": os.getppid()}
    owner = psutil.Process(os.getppid()).ppid()
    facts["folders"] = [str(path) for path in SHARED_MEMORY.glob(f"fleet-rl-fork-engine-{owner}-*")]
    answers.send(facts)
    time.sleep(60 if name == "stays" else 0)

def ask(name=""):
    mine, theirs = multiprocessing.Pipe()
    process = fork_server.ForkContext().Process(target=look, args=(theirs, name))
    process.start()
    return mine.recv() | {"pid": process.pid}

if __name__ == "__main__":
    fork_server.MODULES[-1] = "wave"
    os.environ |= {"CHANGED": "before", "REMOVED": "before"}
    config = PolicyConfig(omp_threads=3)
    started = [fork_server.start_fork_server(config), fork_server.start_fork_server(config)]
    started.append(fork_server.start_fork_server(PolicyConfig(omp_threads=2)))
    os.environ |= {"CHANGED": "after", "ADDED": "after"}
    del os.environ["REMOVED"]
    print(json.dumps({"started": started, "answers": [ask(), ask(sys.argv[1])]}), flush=True)
    time.sleep(float(sys.argv[2]))
"""


def start(tmp_path, *arguments):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, str(program), *arguments]
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def test_processes_are_forked_from_one_that_imported_before_and_have_todays_environment(tmp_path):
    with start(tmp_path, "ends", "0") as process:
        found = json.loads(process.stdout.readline())
        assert process.wait(20) == 0
    assert found["started"] == [True, True, False], "what was read at import would be wrong in the third"
    first, second = found["answers"]
    assert first["parent"] == second["parent"] != process.pid
    for answer in (first, second):
        assert answer["imported"]
        assert (answer["ADDED"], answer["CHANGED"], answer["REMOVED"]) == ("after", "after", None)
        assert answer["OMP_NUM_THREADS"] == "3"
        assert len(answer["folders"]) == 1 and not Path(answer["folders"][0]).exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_the_server_ends_with_those_who_need_it_however_its_owner_ends(tmp_path):
    with start(tmp_path, "stays", "60") as process:
        answer = json.loads(process.stdout.readline())["answers"][1]
        (folder,) = map(Path, answer["folders"])
        server, forked = psutil.Process(answer["parent"]), psutil.Process(answer["pid"])
        assert server.is_running() and forked.is_running()
        assert folder.exists()
        process.send_signal(signal.SIGKILL)
    forked.kill()
    until(lambda: not psutil.pid_exists(server.pid), 10, "the server ends")
    assert not folder.exists()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_engines_with_gpus_or_workers_of_their_own_are_not_forked():
    assert not start_fork_server(PolicyConfig(num_gpus=1))
    assert not start_fork_server(PolicyConfig(tensor_parallel_size=2))
