"""Evaluation dumps in SkyRL's format, for tests: one line an episode, the dialogue as two texts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

Turns = Sequence[tuple[str, str | None]]  # what the policy wrote, what it read next (None: nothing)
SYSTEM = "You are an agent that completes tasks by calling tools."


def call(name: str, /, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def think(thought: str, rest: str = "") -> str:
    return f"<think>\n{thought}\n</think>\n\n{rest}"


def episode(
    turns: Turns,
    reward: float | None = 1.0,
    *,
    task: str = "task-0",
    env: str = "github",
    stop: str = "stop",
    prompt: str = "Close the issue.",
    **extras: Any,
) -> dict[str, Any]:
    """One line of a dump, as Qwen's chat template has it."""
    response = ""
    for index, (text, observation) in enumerate(turns):
        response += f"{text}<|im_end|>"
        if observation is not None:
            response += f"\n<|im_start|>user\n{observation}<|im_end|>"
        if observation is not None or index + 1 < len(turns):
            response += "\n<|im_start|>assistant\n"
    return {
        "input_prompt": f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n{prompt}<|im_end|>\n"
        "<|im_start|>assistant\n",
        "output_response": response,
        "score": [0.0, 0.0, reward],
        "stop_reason": stop,
        "env_class": "fleet_task",
        "env_extras": {"task_key": task, "data_source": env, **extras},
        "data_source": env,
    }


def result(value: Any) -> str:
    """A tool's result as SkyRL shows it."""
    return f"Tool result:\n{json.dumps(value)}"


def solved(task: str, env: str = "github") -> dict[str, Any]:
    """An episode without a fault."""
    turns = [(call("search_issues", query="login"), result([{"number": 482}])), ("The issue is 482.<done>", None)]
    return episode(turns, task=task, env=env)


def write_dump(run: Path, step: int, lines: Iterable[dict[str, Any]], label: str | None = None) -> None:
    """Write ``evals/global_step_N/[label/]ENV.jsonl`` for each environment among the lines."""
    folder = run / "evals" / f"global_step_{step}" / (label or "")
    folder.mkdir(parents=True, exist_ok=True)
    for line in lines:
        with (folder / f"{line['data_source'].replace('/', '_')}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
