"""``fleet-rl leases`` against a real local Fleet, and its mistakes."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from actors.envs.fleet import FleetControl, close_clients
from actors.envs.local_fleet.process import LocalFleetProcess
from deploy import leases
from tests.fleet_faults import KEY, LocalFleet

ROOT = Path(__file__).resolve().parents[2]
HELP_LIMIT_S = 0.5


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess() as process:
        yield LocalFleet(process)


@pytest.fixture(autouse=True)
def environment(monkeypatch, local_fleet):
    monkeypatch.setenv("FLEET_API_KEY", KEY)
    monkeypatch.setenv("FLEET_BASE_URL", local_fleet.url)
    local_fleet.arm()


async def made(local_fleet, *run_ids):
    control = FleetControl(KEY, local_fleet.url)
    instances = [await control.make("tracker", run_id=run_id, timeout_s=5) for run_id in run_ids]
    await control.close()
    await close_clients()
    return [instance["instance_id"] for instance in instances]


@pytest.fixture
async def three(local_fleet):
    """Instances of the runs red and red-2 and of somebody else's."""
    yield await made(local_fleet, "fleet-rl:red:n1", "fleet-rl:red-2:n1", "elsewhere")
    local_fleet.arm()
    control = FleetControl(KEY, local_fleet.url)
    for instance in await control.list():
        await control.delete(instance["instance_id"])
    await control.close()
    await close_clients()


def fleet_rl(*arguments, **environment):
    command = [sys.executable, "-m", "deploy.cli", "leases", *arguments]
    env = {key: value for key, value in (os.environ | environment).items() if value is not None}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=env)


def test_list_shows_what_has_not_ended_and_run_narrows_it(three, local_fleet):
    red, red2, other = three
    answer = fleet_rl("list")
    assert answer.returncode == 0, answer.stderr
    header, *rows, count = answer.stdout.splitlines()
    assert header.split() == ["instance", "env", "run", "age", "status"] and count == "3 instances"
    assert [row.split()[0] for row in rows] == [red, red2, other]
    assert rows[0].split()[1:3] == ["tracker", "fleet-rl:red:n1"] and rows[0].split()[-1] == "running"
    only = fleet_rl("list", "--run", "red").stdout
    assert red in only and red2 not in only and other not in only


def test_clean_ends_the_runs_of_that_name_and_no_other(three, local_fleet):
    red, red2, other = three
    answer = fleet_rl("clean", "--run", "red")
    assert (answer.returncode, answer.stdout) == (0, "1 instances of fleet-rl:red:* ended, 0 left\n")
    assert sorted(local_fleet.running()) == sorted([red2, other])
    again = fleet_rl("clean", "--run", "red")
    assert (again.returncode, again.stdout) == (0, "0 instances of fleet-rl:red:* ended, 0 left\n")
    everything = fleet_rl("clean", "--all-of-prefix")
    assert everything.returncode == 0 and local_fleet.running() == [other]


def test_what_cannot_be_ended_is_said_in_one_line_with_exit_code_1(three, local_fleet):
    local_fleet.arm({"route": "delete", "kind": "status", "status": 409})
    answer = fleet_rl("clean", "--run", "red")
    assert answer.returncode == 1 and len(answer.stderr.splitlines()) == 1
    assert "deleting the instances of fleet-rl:red:n1" in answer.stderr and three[0] in local_fleet.running()


@pytest.mark.parametrize(
    ("arguments", "changed", "code", "words"),
    [
        (["list"], {"FLEET_API_KEY": None}, 2, "FLEET_API_KEY is not set"),
        (["list"], {"FLEET_API_KEY": "wrong"}, 2, "the API key was refused"),
        (["clean", "--run", "red"], {"FLEET_BASE_URL": "http://127.0.0.1:9"}, 1, "listing instances"),
        (["clean"], {}, 2, "--run --all-of-prefix is required"),
        (["clean", "--run", " "], {}, 2, "a run's name is not empty"),
        (["cleanse"], {}, 2, "'cleanse'"),
    ],
)
def test_errors_are_one_line_without_a_traceback(arguments, changed, code, words):
    answer = fleet_rl(*arguments, **changed)
    assert answer.returncode == code and answer.stdout == ""
    assert words in answer.stderr.strip().splitlines()[-1] and "Traceback" not in answer.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["list", "--help"], ["clean", "--help"]], ids=" ".join)
def test_help_answers_at_once(arguments):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    answer = fleet_rl(*arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert answer.returncode == 0 and "FLEET_API_KEY" in answer.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < HELP_LIMIT_S


@pytest.mark.parametrize(
    ("created", "shown"),
    [
        ("2026-01-01T11:59:18+00:00", "42s"),
        ("2026-01-01T11:43:00", "17m"),
        ("2026-01-01T08:55:00Z", "3h05m"),
        ("2026-01-01T13:00:00+02:00", "1h00m"),
        ("yesterday", "?"),
    ],
)
def test_age_of_an_instance(created, shown):
    assert leases.age(created, datetime(2026, 1, 1, 12, tzinfo=UTC)) == shown
