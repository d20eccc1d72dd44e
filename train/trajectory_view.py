"""Trajectories for people: one in full, a table of several, and the places where a pattern occurs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from train.dialogue import DialogueTurn, content_text, split_dialogue

SHOWN_CHARS = 1_500  # of a message, unless it is asked for in full
CONTEXT_CHARS = 60  # on either side of a match
_CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(0x80, 0xA0)) if chr(code) not in "\n\t"}

Row = dict[str, Any]


@dataclass(frozen=True)
class Hit:
    """A match in a message. ``turn`` is the policy's turn it belongs to; 0 is what stood before the first."""

    row: Row
    turn: int
    role: str
    before: str
    match: str
    after: str


def search(row: Row, pattern: re.Pattern[str], role: str | None = None) -> Iterator[Hit]:
    """Every match in the row's messages, in order."""
    turn = 0
    for message in row["messages"]:
        turn += message["role"] == "assistant"
        if role is not None and message["role"] != role:
            continue
        text = content_text(message)
        for match in pattern.finditer(text):
            start, end = match.span()
            before, after = text[max(0, start - CONTEXT_CHARS) : start], text[end : end + CONTEXT_CHARS]
            yield Hit(row, turn, message["role"], *map(one_line, (before, match[0][:SHOWN_CHARS], after)))


def hit_text(hit: Hit) -> Text:
    """A hit in one line."""
    row = hit.row
    where = f"{row['kind']} {row['step']}  {row['env_key']}  {row['trajectory_id']}  {grade(row)}"
    text = Text(printable(where), style="cyan").append(f"  turn {hit.turn} {hit.role}: ", style="dim")
    return text.append(hit.before, style="").append(hit.match, style="bold red").append(hit.after, style="")


def summary_table() -> Table:
    """An empty table for :func:`summary_cells`."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("trajectory", "kind", "step", "environment", "grade", "stop", "turns", "errors"):
        table.add_column(name, justify="right" if name in ("step", "turns", "errors") else "left", overflow="fold")
    return table


def summary_cells(row: Row) -> list[str]:
    """A trajectory as a line of :func:`summary_table`."""
    cells = (row["trajectory_id"], _kind(row), row["step"], row["env_key"], grade(row), row["stop_reason"])
    return [escape(printable(str(cell))) for cell in (*cells, row["turns"], row["tool_errors"])]


def _kind(row: Row) -> str:
    return row["kind"] if row["label"] is None else f"{row['kind']} ({row['label']})"


def grade(row: Row) -> str:
    """The reward, or why there is none."""
    return f"reward {row['reward']:g}" if row["reward"] is not None else row["outcome"]


def full_view(row: Row, full: bool = False) -> RenderableType:
    """One trajectory to read: facts, then turn by turn thinking, answer, calls and results.

    Args:
        row: all columns, tokens included.
        full: do not shorten long messages.
    """
    limit = None if full else SHOWN_CHARS
    opening, turns = split_dialogue(row["messages"])
    parts: list[RenderableType] = [_facts(row)]
    for message in opening:
        parts += [Rule(message["role"], style="dim", align="left"), _block(content_text(message), "dim", limit)]
    numbers = _turn_tokens(row)
    for index, turn in enumerate(turns):
        told = f" · {numbers[index]}" if len(numbers) == len(turns) else ""
        parts += [Rule(f"turn {index + 1}{told}", align="left"), *_turn(turn, limit)]
    for message in row["messages"]:
        if message["role"] == "note":
            parts.append(_block(f"note: {content_text(message)}", "yellow", limit))
    return Group(*parts)


def _facts(row: Row) -> Table:
    sampled = int(np.asarray(row["mask"]).sum())
    spans = ", ".join(f"v{version} [{start}, {end})" for version, start, end in row["spans"]) or "none"
    phases = ", ".join(f"{phase} {seconds:.1f} s" for phase, seconds in row["phase_s"].items())
    facts = {
        "trajectory": row["trajectory_id"],
        "task": row["task_key"],
        "environment": row["env_key"],
        "from": f"{_kind(row)} at step {row['step']}, policy version {row['policy_version']}",
        "outcome": row["outcome"] + (f": {row['reason']}" if row["reason"] else ""),
        "reward": "none" if row["reward"] is None else f"{row['reward']:g}",
        "stopped": row["stop_reason"],
        "turns": f"{row['turns']}, {row['tool_calls']} tool calls, {row['tool_errors']} errors",
        "tokens": f"{len(row['ids']):,} in {len(row['starts'])} sequence(s), {sampled:,} sampled",
        "versions": f"{spans} of the sampled tokens",
        "time": f"{row['duration_s']:.1f} s" + (f": {phases}" if phases else ""),
    }
    table = Table.grid(padding=(0, 2))
    for name, value in facts.items():
        table.add_row(Text(name, style="bold"), Text(printable(str(value))))
    return table


def _turn_tokens(row: Row) -> list[str]:
    """Of every run of sampled tokens: how many, drawn under which versions, and their mean logprob. A turn is a run."""
    mask = np.asarray(row["mask"], dtype=np.int8)
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask, [0]])))
    logprobs, told, seen = np.asarray(row["logprobs"], dtype=np.float32), [], 0
    for start, end in edges.reshape(-1, 2):
        count = int(end - start)
        versions = [f"v{v}" for v, first, last in row["spans"] if first < seen + count and last > seen]
        told.append(f"{count} tokens, {' '.join(versions)}, mean logprob {logprobs[start:end].mean():.2f}")
        seen += count
    return told


def _turn(turn: DialogueTurn, limit: int | None) -> Iterator[RenderableType]:
    if turn.thinking:
        yield _block(turn.thinking, "dim italic", limit)
    if turn.answer:
        yield _block(turn.answer, "", limit)
    for call in turn.calls:
        arguments = ", ".join(f"{name}={value!r}" for name, value in call.arguments.items())
        yield _block(f"→ {call.name}({arguments})", "bold cyan", limit)
    if turn.error is not None:
        yield _block(f"✗ {turn.error}", "red", limit)
    if turn.done:
        yield Text("done", style="bold")
    for text in turn.observations:
        yield _block(f"← {text}", "red" if text.startswith("Error:") else "green", limit)


def _block(text: str, style: str, limit: int | None) -> Text:
    shown = printable(text if limit is None else text[:limit])
    block = Text(shown, style=style)
    if limit is not None and len(text) > limit:
        block.append(f"\n[{len(text) - limit:,} more characters: --full]", style="dim")
    return block


def printable(text: str) -> str:
    """Without control characters, which could drive the terminal, and halves of surrogate pairs, which none takes."""
    return text.encode("utf-8", "replace").decode().translate(_CONTROL)


def one_line(text: str) -> str:
    return printable(re.sub(r"\s*\n\s*", " ⏎ ", text).replace("\t", " "))
