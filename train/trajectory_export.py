"""Trajectories in the shapes that other tools train on: chat messages in OpenAI's format, rows for TRL and for verl.

Sources: OpenAI's fine-tuning guide (chat format with tools), TRL's "Dataset formats and types" (conversational
prompt-completion and unpaired preference), verl's "Prepare data for post-training".
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from train.dialogue import UNREAD_ROLES, DialogueTurn, content_text, split_dialogue
from train.trajectory_files import parquet_writer

ABILITY = "tool_use"
_ROWS_AT_ONCE = 256

Row = dict[str, Any]

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_FACTS = [("task_key", pa.string()), ("env_key", pa.string()), ("trajectory_id", pa.string()), ("step", pa.int64())]
TRL_SCHEMA = pa.schema(
    [("prompt", _MESSAGES), ("completion", _MESSAGES), ("label", pa.bool_()), ("reward", pa.float64()), *_FACTS]
)
VERL_SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", _MESSAGES),
        ("ability", pa.string()),
        ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("reward", pa.float64()), *_FACTS]),
        ),
        ("messages", _MESSAGES),
    ]
)


class ExportError(Exception):
    """An export that cannot be made, in one line."""


def openai_row(row: Row, index: int) -> Row:
    """``messages`` in OpenAI's chat format: calls are ``tool_calls``, and each is answered by a ``tool`` message.

    What the environment said to a turn without a call that was carried out becomes a ``user`` message; of several calls
    in a turn, those that were not carried out are left out, unless none was: such a turn stays as it was written. The
    answers to the last turn are not recorded, so all its calls are kept, without answers.
    """
    opening, turns = split_dialogue(row["messages"])
    messages = [_plain(message) for message in opening]
    for number, turn in enumerate(turns, 1):
        messages += _openai_turn(turn, number, last=number == len(turns))
    return {"messages": messages}


def _openai_turn(turn: DialogueTurn, number: int, last: bool) -> list[Row]:
    unanswered = last and not turn.observations
    answered = turn.calls if unanswered else turn.calls[: len(turn.observations)]
    if not answered or turn.refused or turn.error is not None:
        said = {"role": "assistant", "content": turn.text}
        return [said, *({"role": "user", "content": text} for text in turn.observations)]
    ids = [f"call_{number}_{k}" for k in range(1, len(answered) + 1)]
    calls = [
        {"id": i, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
        for i, call in zip(ids, answered, strict=True)
    ]
    thinking = f"<think>{turn.thinking}</think>" if turn.thinking else ""
    said = {"role": "assistant", "content": "\n".join(filter(None, [thinking, turn.answer])), "tool_calls": calls}
    results = zip(ids, turn.observations, strict=False)
    return [said, *({"role": "tool", "tool_call_id": i, "content": text} for i, text in results)]


def trl_row(row: Row, index: int) -> Row:
    """A conversational prompt-completion row for TRL: what the policy wrote, calls included, verbatim.

    The completion holds the environment's answers too, as ``tool`` messages. ``label`` makes it an unpaired preference:
    whether there was a reward.
    """
    prompt, completion = _split(row)
    label = None if row["reward"] is None else row["reward"] > 0
    return {"prompt": prompt, "completion": completion, "label": label, "reward": row["reward"], **_facts(row)}


def verl_row(row: Row, index: int) -> Row:
    """A row for verl: ``prompt`` for its RL data sets, ``messages`` for its multi-turn SFT data set.

    ``reward_model.ground_truth`` is the task's key: the verifier, not a string, decides.
    """
    prompt, completion = _split(row)
    split = "test" if row["kind"] == "eval" else "train"
    return {
        "data_source": row["env_key"],
        "prompt": prompt,
        "ability": ABILITY,
        "reward_model": {"style": "rule", "ground_truth": row["task_key"]},
        "extra_info": {"split": split, "index": index, "reward": row["reward"], **_facts(row)},
        "messages": prompt + completion,
    }


def _split(row: Row) -> tuple[list[Row], list[Row]]:
    """The messages before the first turn, and from it on."""
    messages = [_plain(message) for message in row["messages"] if message["role"] not in UNREAD_ROLES]
    first = next((k for k, message in enumerate(messages) if message["role"] == "assistant"), len(messages))
    return messages[:first], messages[first:]


def _plain(message: Row) -> Row:
    return {"role": message["role"], "content": content_text(message)}


def _facts(row: Row) -> Row:
    return {name: row[name] for name, _ in _FACTS}


FORMATS: dict[str, tuple[Callable[[Row, int], Row], pa.Schema | None]] = {
    "openai": (openai_row, None),  # lines only: calls of different tools have no common type
    "trl": (trl_row, TRL_SCHEMA),
    "verl": (verl_row, VERL_SCHEMA),
}


def export(found: Iterable[Row], form: str, path: Path) -> int:
    """Write the trajectories ``found``, one row each, to ``path`` (``.jsonl`` or ``.parquet``), whole or not at all.

    Returns:
        The number of rows.

    Raises:
        ExportError: the format cannot be written to a file of this kind, or there is no row.
        OSError: the file cannot be written.
    """
    convert, schema = FORMATS[form]
    allowed = [".jsonl"] if schema is None else [".parquet", ".jsonl"]
    if path.suffix not in allowed:
        raise ExportError(f"{path}: {form} rows are written to {' or '.join(allowed)} files; change the name")
    if not path.parent.is_dir():
        raise ExportError(f"{path}: there is no folder {path.parent}")
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    converted = (convert(row, index) for index, row in enumerate(found))
    try:
        count = (
            _write_lines(converted, partial) if path.suffix == ".jsonl" else _write_table(converted, schema, partial)
        )
        if count == 0:
            raise ExportError("no trajectory is selected: nothing is written")
        partial.replace(path)
    finally:
        with suppress(FileNotFoundError):
            partial.unlink()
    return count


def _write_lines(converted: Iterator[Row], path: Path) -> int:
    count = 0
    with path.open("wb") as file:
        for row in converted:
            file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def _write_table(converted: Iterator[Row], schema: pa.Schema, path: Path) -> int:
    count = 0
    with parquet_writer(path, schema) as writer:
        while some := list(islice(converted, _ROWS_AT_ONCE)):
            writer.write_batch(pa.RecordBatch.from_pylist(some, schema=schema))
            count += len(some)
    return count
