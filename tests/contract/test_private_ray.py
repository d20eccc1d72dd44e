"""A run's own Ray, as it is started."""

from __future__ import annotations

import ipaddress
import json
import os
import subprocess
import sys

PROGRAM = """
import json, sys
from pathlib import Path
from train.run import keep_ray_private
keep_ray_private()
import psutil
from train.config import load_config
from train.run_ray import start_run_ray
import os, subprocess
import ray
start_run_ray(load_config(Path("configs/demo.yaml"), ["--output_dir", sys.argv[1]]), print)
assert ray.get(ray.remote(lambda: 5).remote(), timeout=60) == 5
listeners = set()
for process in (psutil.Process(), *psutil.Process().children(recursive=True)):
    try:
        name, connections = process.name(), process.net_connections()
    except psutil.NoSuchProcess:
        continue  # a worker that has ended meanwhile
    listeners |= {(name, one.laddr.ip) for one in connections if one.status == psutil.CONN_LISTEN}
print(json.dumps(sorted(listeners)))

def nodes_as_told(**changes):
    program = f"from ray._raylet import GcsClient; "
    program += f"print(len(GcsClient({ray.get_runtime_context().gcs_address!r}).get_all_node_info(timeout=20)))"
    return subprocess.run([sys.executable, "-c", program], env=os.environ | changes, capture_output=True, timeout=90)

assert nodes_as_told().stdout.split()[-1:] == [b"1"], "not even its own token lets anybody in"
without = nodes_as_told(RAY_AUTH_MODE="disabled")
assert without.returncode != 0 and b"nauthenticated" in without.stdout + without.stderr, without
"""


def test_it_listens_on_this_machine_alone_and_answers_only_those_that_have_its_token(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)], env=environment, capture_output=True, text=True, timeout=180
    )
    assert done.returncode == 0, done.stderr
    listeners = json.loads(done.stdout.splitlines()[-1])
    assert {"gcs_server", "raylet"} <= {name for name, _ in listeners}
    for name, address in listeners:
        ip = ipaddress.ip_address(address)
        assert (getattr(ip, "ipv4_mapped", None) or ip).is_loopback, f"{name} listens on {address}"
