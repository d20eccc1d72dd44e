"""Make ``.venv`` with the exact versions of requirements/cpu.txt: ``make setup``. Only the standard library is used.

python deploy/setup_env.py              set up, or answer at once when nothing changed
python deploy/setup_env.py --gpu        the same with requirements/gpu.txt, for a host with NVIDIA GPUs
python deploy/setup_env.py lock cpu     resolve requirements/cpu.in again and rewrite requirements/cpu.txt
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / ".fleet-rl-lock"
LOG = VENV / "setup.log"
PACKAGES = ("actors", "serve", "train", "deploy", "benchmarks")
# On all cores, where pip compiles one file after the other, for most of a set-up's time. Our own as well: where Python
# is told to write no byte code, each of a run's processes would compile them again. What does not compile is nobody's.
COMPILE = (
    "import compileall, sys, sysconfig\n"
    "for folder in (sysconfig.get_path('purelib'), *sys.argv[1:]):\n"
    "    compileall.compile_dir(folder, quiet=2, workers=0)"
)

PIP_VERSION = "26.3"
STEP_DEADLINE_S = 2 * 3600.0  # 3 GB of CUDA libraries over a slow line
IMPORT_DEADLINE_S = 300.0
NEEDED_BYTES = {"cpu": 6 * 10**9, "gpu": 25 * 10**9}

# vLLM asks for these, text models do not need them, and beside a CPU build of torch their usual builds break the import
# of transformers ("operator torchvision::nms does not exist").
UNWANTED_ON_CPU = ("torchvision", "torchaudio", "torchcodec")
# xgrammar asks for Triton, 1 GB that nothing can use without a GPU. A CUDA build of torch brings the version it needs.
NOT_IN_CPU_LOCK = (*UNWANTED_ON_CPU, "triton")

CHECKS = {
    "cpu": "import torch, transformers, ray, deepspeed, vllm._C; from vllm import AsyncLLMEngine; "
    "from vllm.platforms import current_platform as p; assert p.is_cpu(), p; print(torch.__version__)",
    "gpu": "import torch, transformers, ray, deepspeed; from vllm import AsyncLLMEngine; print(torch.__version__)",
}
CPU_TORCH_HINT = (
    "set FLEET_RL_TORCH_INDEX to a package index with CPU builds of torch "
    "(for example https://download.pytorch.org/whl/cpu) and run `make setup` again"
)


class SetupError(Exception):
    """Why there is no working set-up, in one line that says what to do."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Make .venv with the exact versions of the lock.")
    parser.add_argument("--gpu", action="store_true", help="requirements/gpu.txt instead of requirements/cpu.txt")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("lock", help="rewrite a lock from its .in file").add_argument("variant", choices=["cpu", "gpu"])
    args = parser.parse_args(argv)
    try:
        if args.command == "lock":
            write_lock(args.variant)
        else:
            set_up("gpu" if args.gpu else "cpu")
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nsetup: interrupted; run it again to go on", file=sys.stderr)
        return 130
    return 0


def set_up(variant: str) -> None:
    """Bring ``.venv`` to the state the lock describes; does nothing when its stamp says that it is there."""
    if stamp_is_current(variant):
        return
    check_machine(variant)
    VENV.mkdir(exist_ok=True)
    with exclusive():
        if stamp_is_current(variant):  # somebody else's set-up ended while this one waited
            return
        started = time.monotonic()
        STAMP.unlink(missing_ok=True)
        LOG.unlink(missing_ok=True)
        install(variant)
        partial = STAMP.with_suffix(".partial")
        partial.write_text(digest(variant) + "\n", encoding="ascii")
        partial.replace(STAMP)
        print(f"setup: .venv is ready after {time.monotonic() - started:.0f} s", flush=True)


def install(variant: str) -> None:
    lock = str(lock_path(variant))
    # An interrupted creation leaves a Python without pip, and so do other tools; making it again adds pip.
    if not (PYTHON.exists() and (VENV / "bin" / "pip").exists()):
        step("making .venv", [sys.executable, "-m", "venv", str(VENV)])
    step(f"pip {PIP_VERSION}", pip("install", f"pip=={PIP_VERSION}"))
    if variant == "cpu":
        # First and with its dependencies: where the index has only a CUDA build, that build needs its own libraries,
        # which no lock for CPUs can name.
        index = os.environ.get("FLEET_RL_TORCH_INDEX")
        extra = ["--extra-index-url", index] if index else []
        torch = f"torch=={pinned(variant, 'torch')}"
        step("torch", pip("install", "--no-compile", "--upgrade", torch, "--constraint", lock, *extra))
    # Without dependencies: the lock is complete, and the resolver would insist on NOT_IN_CPU_LOCK and on a torch
    # labelled "+cpu". The constraint keeps what builds source packages (deepspeed) at the lock's versions, too.
    step(
        "everything else, some minutes",
        pip("install", "--no-compile", "--no-deps", "--build-constraint", lock, "--requirement", lock),
    )
    step("fleet-rl itself", pip("install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT)))
    if variant == "cpu":
        step("leftovers", pip("uninstall", "--yes", *UNWANTED_ON_CPU))
    step("byte code", [str(PYTHON), "-c", COMPILE, *PACKAGES])
    check_imports(variant)


def check_imports(variant: str) -> None:
    """Start a Python that imports what the set-up is for, so that a broken combination shows here and not in a run."""
    environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    advice = f"if torch is a CUDA build, {CPU_TORCH_HINT}" if variant == "cpu" else ""
    command = [str(PYTHON), "-c", CHECKS[variant]]
    torch_version = step("checking imports", command, IMPORT_DEADLINE_S, environment, advice)[-1]
    if variant == "cpu" and "+cu" in torch_version:
        print(f"setup: torch {torch_version} is a CUDA build. It works, but takes 4 GB more disk; to save them,")
        print(f"setup: remove .venv, {CPU_TORCH_HINT}", flush=True)


def check_machine(variant: str) -> None:
    """Say in one line what this machine lacks, before anything is downloaded."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise SetupError(f"the locks are for Linux on x86_64, this is {sys.platform} on {platform.machine()}")
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise SetupError(
            f"Python 3.11 or 3.12 is needed, {sys.executable} is {platform.python_version()}; "
            "run `make setup PYTHON=python3.12` with the path of one"
        )
    made_with = re.search(r"^version\s*=\s*(\d+)\.(\d+)", _text(VENV / "pyvenv.cfg"), re.MULTILINE)
    if made_with and not (3, 11) <= (int(made_with[1]), int(made_with[2])) <= (3, 12):
        raise SetupError(f"{VENV} was made with Python {made_with[1]}.{made_with[2]}; remove it and run this again")
    if variant == "gpu" and sys.version_info[:2] != (3, 12):
        raise SetupError("requirements/gpu.txt is for Python 3.12; run this file with a python3.12")
    if importlib.util.find_spec("ensurepip") is None:
        raise SetupError("this Python has no ensurepip; install its venv package (on Debian: apt install python3-venv)")
    if not any(shutil.which(name) for name in (os.environ.get("CXX", ""), "c++", "g++", "clang++") if name):
        raise SetupError("no C++ compiler (c++, g++ or clang++) on PATH; install one (on Debian: apt install g++)")
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES[variant] and not PYTHON.exists():
        raise SetupError(f"{ROOT} has {free / 1e9:.1f} GB free, the set-up needs {NEEDED_BYTES[variant] / 1e9:.0f} GB")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def lock_path(variant: str) -> Path:
    return ROOT / "requirements" / f"{variant}.txt"


def pinned(variant: str, name: str) -> str:
    match = re.search(rf"^{name}==(\S+)", lock_path(variant).read_text(encoding="utf-8"), re.MULTILINE)
    if match is None:
        raise SetupError(f"{lock_path(variant)} does not pin {name}")
    return match[1]


def digest(variant: str) -> str:
    """Of everything the content of ``.venv`` depends on. It is kept with the Python that made it."""
    parts = [lock_path(variant), ROOT / "pyproject.toml", Path(__file__), VENV / "pyvenv.cfg"]
    content = "\0".join([str(ROOT), *map(_text, parts)])
    return hashlib.sha256(content.encode()).hexdigest()


def stamp_is_current(variant: str) -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text(encoding="ascii").strip() == digest(variant)


@contextlib.contextmanager
def exclusive() -> Iterator[None]:
    """One set-up at a time; a second one waits for the first. The kernel drops the lock when its holder dies."""
    with (VENV / ".setup-in-progress").open("w") as file:
        deadline = time.monotonic() + STEP_DEADLINE_S
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not waiting:
                    print("setup: waiting for another set-up of this folder", flush=True)
                waiting = True
            if time.monotonic() > deadline:
                raise SetupError("another set-up of this folder has not ended for two hours; end it and try again")
            time.sleep(0.5)
        yield


def pip(*arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]


def step(
    title: str,
    command: list[str],
    deadline_s: float = STEP_DEADLINE_S,
    environment: dict[str, str] | None = None,
    advice: str = "",
) -> list[str]:
    """Run one command with its output in the log; on a terminal its latest line is shown. Returns the last lines."""
    started = time.monotonic()
    live = sys.stdout.isatty()
    print(f"setup: {title} ...", end="" if live else "\n", flush=True)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "errors": "replace"}
    process = subprocess.Popen(command, env=environment, cwd=ROOT, **pipes)
    watchdog = threading.Timer(deadline_s, process.kill)
    watchdog.start()
    tail: deque[str] = deque(maxlen=15)
    try:
        with LOG.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            for line in process.stdout:
                log.write(line)
                if line.strip():
                    tail.append(line.strip())
                    if live:
                        print(f"\r\033[Ksetup: {title} ... {line.strip()[:80]}", end="", flush=True)
        code = process.wait()
    finally:
        watchdog.cancel()
        if process.poll() is None:
            process.kill()
            process.wait()
    seconds = time.monotonic() - started
    if live:
        print(f"\r\033[Ksetup: {title} ({seconds:.0f} s)", flush=True)
    if code != 0:
        reason = f"had no end in {deadline_s:.0f} s" if seconds >= deadline_s else f"failed with exit code {code}"
        print("\n".join(tail), file=sys.stderr)
        raise SetupError(f"'{title}' {reason}, {LOG} holds its output" + (f"; {advice}" if advice else ""))
    return list(tail) or [""]


def write_lock(variant: str) -> None:
    """Resolve ``requirements/<variant>.in`` with the running Python's pip (nothing is installed) and write the pins."""
    source = ROOT / "requirements" / f"{variant}.in"
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    result = subprocess.run(
        [*command, "--requirement", str(source)], cwd=ROOT, capture_output=True, text=True, timeout=STEP_DEADLINE_S
    )
    if result.returncode != 0:
        raise SetupError(f"{source} does not resolve: {result.stderr.strip().splitlines()[-1]}")
    packages = [item["metadata"] for item in json.loads(result.stdout)["install"]]
    pins = {normal(p["name"]): p["version"].partition("+")[0] for p in packages if normal(p["name"]) != "fleet-rl"}
    for name in NOT_IN_CPU_LOCK if variant == "cpu" else ():
        pins.pop(name, None)
    python = ".".join(platform.python_version_tuple()[:2])
    lines = [HEADERS[variant].format(python=python), *(f"{name}=={pins[name]}" for name in sorted(pins))]
    lock_path(variant).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{lock_path(variant)}: {len(pins)} packages")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


HEADERS = {
    "cpu": """\
# Every package of a CPU set-up, exact, for Python 3.11 and 3.12 on Linux x86_64. Do not edit.
# Regenerate with a Python {python} whose index has a CPU build of torch: python deploy/setup_env.py lock cpu
# Install with `make setup`: torch first (a CPU build where the index has one), then these with --no-deps, because
# torchvision, torchaudio, torchcodec and triton are left out on purpose (deploy/setup_env.py says why).""",
    "gpu": """\
# Every package of a set-up on an NVIDIA host, exact, for Python {python} on Linux x86_64. Do not edit.
# Regenerate with a Python {python}: python deploy/setup_env.py lock gpu
# Install: python{python} deploy/setup_env.py --gpu, or pip install --no-deps -r requirements/gpu.txt""",
}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that pip is ended as after Ctrl-C
    sys.exit(main())
