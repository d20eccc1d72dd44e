"""How long ``fleet-rl analyze`` takes for a gigabyte of trajectories, and how its page behaves in a browser.

    python -m benchmarks.analyze [--gb 1] [--browser] [--screenshots DIR]

Makes evaluation dumps of eight environments at two steps and ``metrics.jsonl``, analyses them in a process of its own,
and prints one JSON line last. ``peak_gb`` is the largest resident memory of that process and its children together,
``cpu_s`` the seconds all cores worked for them: on a machine that others use as well it says more than ``wall_s``.
``--browser`` opens the page in an installed Chromium and adds ``first_paint_s``, ``ready_s`` (all charts and the list
drawn), ``open_s`` (an episode chosen and shown) and ``search_s`` (a word that is in one episode, through all of them).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.chromium import Page, open_page

TURNS = 24
ATTEMPTS = 3
POLL_S = 0.02
TIMEOUT_S = 3600.0  # of the command
END_TIMEOUT_S = 10.0
# Environment: share of the tasks, success before and after.
ENVS = {
    "github": (0.3, 0.467, 0.70),
    "booking": (0.25, 0.538, 0.577),
    "reddit": (0.15, 0.667, 0.667),
    "ticketmaster": (0.1, 0.036, 0.071),
    "zillow": (0.08, 0.5, 0.5),
    "fira": (0.06, 0.4, 0.4),
    "hubspot": (0.03, 1.0, 1.0),
    "outlook": (0.03, 1.0, 1.0),
}
WORDS = (
    "the ticket open search list of and repository issue user page state with value return number title date order "
    "room price guest review comment status filter result next first value change account label branch merge reply "
    "window seat"
).split()


def make_run(folder: Path, nbytes: int, seed: int = 1) -> int:
    """Write a run of about ``nbytes``; returns the size it has."""
    draw = random.Random(seed)
    total = 0
    for step in (0, 80):
        for env, (share, before, after) in ENVS.items():
            path = folder / "evals" / f"global_step_{step}" / f"{env}.jsonl"
            path.parent.mkdir(parents=True, exist_ok=True)
            limit, size, task = nbytes / 2 * share, 0, 0
            with path.open("w", encoding="utf-8") as file:
                while size < limit:
                    for _ in range(ATTEMPTS):
                        solved = draw.random() < (after if step else before)
                        size += file.write(_line(draw, env, f"{env}-{task:05d}", solved))
                    task += 1
            total += size
    (folder / "metrics.jsonl").write_text("".join(_metrics(draw)), encoding="utf-8")
    return total


def _text(draw: random.Random, chars: int) -> str:
    words = draw.choices(WORDS, k=chars // 6)
    return " ".join(words)


def _line(draw: random.Random, env: str, task: str, solved: bool) -> str:
    system = f"You are an agent that works on {env}.\n{_text(random.Random(env), 8000)}"
    opening = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{task}: {_text(draw, 200)}<|im_end|>\n"
    turns, seen = [], [1000]
    for _ in range(draw.randint(TURNS // 2, TURNS)):
        rows = [{"id": draw.randint(1000, 9999), "title": _text(draw, 60)} for _ in range(14)]
        call = {"name": "get_item", "arguments": {"id": draw.choice(seen), "query": _text(draw, 40)}}
        seen = [row["id"] for row in rows]
        result = draw.choice(["Error: item not found (404)"] + [json.dumps(rows)] * 9)
        turns.append(
            f"<think>\n{_text(draw, 300)}\n</think>\n\n<tool_call>{json.dumps(call)}</tool_call><|im_end|>\n"
            f"<|im_start|>user\nTool result:\n{result}<|im_end|>\n<|im_start|>assistant\n"
        )
    response = "".join(turns) + f"<think>\n{_text(draw, 120)}\n</think>\n\n{_text(draw, 100)} <done><|im_end|>"
    score = [0.0] * (len(response) // 4)
    score[-1] = float(solved)
    line = {
        "input_prompt": f"{opening}<|im_start|>assistant\n",
        "output_response": response,
        "score": score,
        "stop_reason": "stop",
        "env_class": "fleet_task",
        "env_extras": {"task_key": task, "data_source": env, "max_turns": 50},
        "data_source": env,
    }
    return json.dumps(line) + "\n"


def _metrics(draw: random.Random) -> list[str]:
    lines = []
    for step in range(1, 81):
        row: dict[str, float] = {"step": step}
        for env, (_, before, after) in ENVS.items():
            rate = min(1.0, max(0.0, before + (after - before) * step / 80 + draw.uniform(-0.1, 0.1)))
            row[f"reward/{env}/pass_at_1"] = rate
            row[f"reward/{env}/variance_per_prompt"] = rate * (1 - rate) * draw.uniform(0.4, 0.7)
            row[f"reward/{env}/signal_ratio"] = min(1.0, 3 * rate * (1 - rate) * draw.uniform(0.6, 1.0))
        lines.append(json.dumps(row) + "\n")
    return lines


def analyse(run: Path, out: Path) -> dict[str, float]:
    """What the command takes, in its own process.

    Raises:
        RuntimeError: it failed, or did not end in ``TIMEOUT_S``.
    """
    command = [sys.executable, "-m", "deploy.cli", "analyze", str(run), "--out", str(out)]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as errors:
        process = psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            peak = _peak(process, begun + TIMEOUT_S)
        finally:
            _end(process)
        wall, used = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if process.returncode != 0:
            errors.seek(0)
            raise RuntimeError(f"it ended with {process.returncode}: {errors.read().decode()[-500:]}")
    cpu = used.ru_utime + used.ru_stime
    return {"wall_s": round(wall, 1), "peak_gb": round(peak / 1e9, 2), "cpu_s": round(cpu, 1)}


def _peak(process: psutil.Popen, deadline: float) -> int:
    peak = 0
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"it did not end in {TIMEOUT_S:.0f} s")
        peak = max(peak, _resident(process))
        time.sleep(POLL_S)
    return peak


def _end(process: psutil.Popen) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except psutil.TimeoutExpired:
        process.kill()
        process.wait(END_TIMEOUT_S)


def _resident(process: psutil.Process) -> int:
    total = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            total += one.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total


async def in_browser(page_file: Path, word: str, screenshots: Path | None) -> dict[str, float]:
    """What a reader waits for. ``word`` stands in one task's episodes only.

    Raises:
        RuntimeError: a script failed, or a chart, the list or the search is not what it should be.
    """
    async with open_page() as page:
        await page.call("Page.navigate", url=page_file.resolve().as_uri())
        await page.wait_for("document.querySelectorAll('#list tbody tr').length > 0")
        timing = await page.evaluate(
            "({paint: performance.getEntriesByName('first-contentful-paint')[0]?.startTime, ready: performance.now()})"
        )
        await page.wait_for("document.readyState === 'complete'")
        paint = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        await page.wait_for(f"{paint} > 0")
        timing["paint"] = await page.evaluate(paint)
        charts = await page.evaluate("document.querySelectorAll('#charts svg path').length")
        opened = await _seconds(page, "choose(matches.at(-1))", "document.querySelectorAll('#detail .turn').length > 3")
        search = f"filters.text.value = {json.dumps(word)}; startSearch()"
        searched = await _seconds(page, search, "document.getElementById('count').textContent.startsWith('6 of')")
        if screenshots is not None:
            await _screenshots(page, screenshots)
        if page.errors or charts < len(ENVS):
            raise RuntimeError(f"{charts} curves were drawn; errors: {page.errors}")
        times = {"first_paint_s": timing["paint"] / 1e3, "ready_s": timing["ready"] / 1e3}
        return {name: round(s, 3) for name, s in {**times, "open_s": opened, "search_s": searched}.items()}


async def _seconds(page: Page, action: str, until: str) -> float:
    begun = time.monotonic()
    await page.evaluate(f"void ({action.replace('; ', ', ')})")
    await page.wait_for(until)
    return time.monotonic() - begun


async def _screenshots(page: Page, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    await page.evaluate("setFilters({}), choose(matches[0])")
    for theme in ("light", "dark"):
        await page.evaluate(f"void (document.documentElement.dataset.theme = '{theme}')")
        for section in ("status", "curves", "patterns", "compare", "reader"):
            await page.evaluate(f"document.getElementById('{section}').scrollIntoView()")
            await page.screenshot(folder / f"{theme}-{section}.png", 1400, 900)
    await page.evaluate("document.getElementById('status').scrollIntoView()")
    await page.screenshot(folder / "narrow.png", 420, 900)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=1.0, help="size of the run; default: %(default)s")
    parser.add_argument("--browser", action="store_true", help="open the page in an installed Chromium")
    parser.add_argument("--screenshots", type=Path, metavar="DIR", help="with --browser: keep pictures of the page")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="fleet-rl-benchmark-") as scratch:
        run, out = Path(scratch) / "run", Path(scratch) / "out"
        size = make_run(run, int(options.gb * 1e9))
        line: dict[str, Any] = {"gb": round(size / 1e9, 3)} | analyse(run, out)
        line["episodes"] = json.loads((out / "analysis.json").read_text(encoding="utf-8"))["episodes"]
        line["page_mb"] = round((out / "report.html").stat().st_size / 1e6, 1)
        if options.browser:
            # A task's name is in its prompt; it has three attempts at two steps.
            line |= asyncio.run(in_browser(out / "report.html", "github-00003:", options.screenshots))
    print(json.dumps(line))


if __name__ == "__main__":
    main()
