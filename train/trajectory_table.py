"""Trajectories as Arrow tables, exact to the token, and back; and the line of JSON that shows one to people."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import orjson
import pyarrow as pa

from actors.trajectory import (
    OUTCOME_NAMES,
    Cancelled,
    Graded,
    Group,
    InfraFailed,
    Outcome,
    Span,
    StopReason,
    Trajectory,
    Ungraded,
)

# A record batch, and with it a Parquet row group, ends after this many bytes of tokens and text.
BATCH_BYTES = 16 * 2**20

_MESSAGE = pa.struct([("role", pa.string()), ("content", pa.string()), ("extra", pa.string())])
_SPAN = pa.struct([("version", pa.int64()), ("start", pa.int32()), ("end", pa.int32())])
_PHASE = pa.struct([("phase", pa.string()), ("seconds", pa.float64())])

SCHEMA = pa.schema(
    [
        ("kind", pa.string()),  # train or eval
        ("step", pa.int64()),  # optimiser step; of an evaluation, the one it follows
        ("label", pa.string()),  # of an evaluation: sampled or greedy
        ("policy_version", pa.int64()),  # that was trained from, or evaluated
        ("trajectory_id", pa.string()),
        ("task_key", pa.string()),
        ("env_key", pa.string()),
        ("group_id", pa.int64()),
        ("sample_index", pa.int32()),
        ("ids", pa.list_(pa.int32())),
        ("mask", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("prompt_length", pa.int32()),
        ("starts", pa.list_(pa.int32())),
        ("spans", pa.list_(_SPAN)),
        ("stop_reason", pa.string()),
        ("outcome", pa.string()),
        ("reward", pa.float64()),
        ("reason", pa.string()),
        ("turns", pa.int32()),
        ("tool_calls", pa.int32()),
        ("tool_errors", pa.int32()),
        ("started_at", pa.float64()),
        ("duration_s", pa.float64()),
        ("phase_s", pa.list_(_PHASE)),
        # Fields beside role and content, and content that is no text, are JSON in ``extra``.
        ("messages", pa.list_(_MESSAGE)),
    ]
)
TOKEN_COLUMNS = ("ids", "mask", "logprobs")
# What a damaged file makes its reading raise, in Arrow and in :func:`rows`: names and texts that are no UTF-8, values
# that are missing or of another kind.
DAMAGED = (OSError, pa.ArrowException, ValueError, LookupError, TypeError)
_OUTCOMES = {name: kind for kind, name in OUTCOME_NAMES.items()}
_JSON_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


@dataclass(frozen=True)
class Origin:
    """Where a batch of groups comes from: the same for all its trajectories."""

    kind: Literal["train", "eval"]
    step: int
    policy_version: int
    label: str | None = None

    @property
    def name(self) -> str:
        """``step_000012``, or ``eval_000012_sampled``: the stem of the files that hold it."""
        if self.kind == "train":
            return f"step_{self.step:06d}"
        return "_".join(["eval", f"{self.step:06d}", *([self.label] if self.label else [])])


def record_batches(groups: Iterable[Group], origin: Origin, limit: int = BATCH_BYTES) -> Iterator[pa.RecordBatch]:
    """The trajectories of ``groups`` in order, in record batches of about ``limit`` bytes, at least one row each."""
    rows: list[Trajectory] = []
    size = 0
    for group in groups:
        for trajectory in group.trajectories:
            rows.append(trajectory)
            size += trajectory.nbytes + sum(len(str(m.get("content", ""))) for m in trajectory.messages)
            if size >= limit:
                yield _record_batch(rows, origin)
                rows, size = [], 0
    if rows:
        yield _record_batch(rows, origin)


def _record_batch(rows: list[Trajectory], origin: Origin) -> pa.RecordBatch:
    n = len(rows)
    columns: dict[str, Any] = {
        "kind": [origin.kind] * n,
        "step": [origin.step] * n,
        "label": [origin.label] * n,
        "policy_version": [origin.policy_version] * n,
        "ids": _lists([t.ids for t in rows], pa.int32()),
        "mask": _lists([t.mask for t in rows], pa.uint8()),
        "logprobs": _lists([t.logprobs for t in rows], pa.float32()),
        "spans": [[{"version": s.version, "start": s.start, "end": s.end} for s in t.spans] for t in rows],
        "stop_reason": [t.stop_reason.value for t in rows],
        "outcome": [OUTCOME_NAMES[type(t.outcome)] for t in rows],
        "reason": [_text(getattr(t.outcome, "reason", None)) for t in rows],
        "phase_s": [[{"phase": phase, "seconds": s} for phase, s in t.phase_s.items()] for t in rows],
        "messages": [[_message_row(message) for message in t.messages] for t in rows],
    }
    for name in SCHEMA.names:
        if name not in columns:
            columns[name] = [getattr(t, name) for t in rows]
    arrays = [
        pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list) else columns[f.name] for f in SCHEMA
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _lists(arrays: list[np.ndarray], kind: pa.DataType) -> pa.ListArray:
    offsets = np.zeros(len(arrays) + 1, dtype=np.int32)
    np.cumsum([len(array) for array in arrays], out=offsets[1:])
    values = np.concatenate(arrays).astype(kind.to_pandas_dtype(), copy=False)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values, kind))


def _message_row(message: dict[str, Any]) -> dict[str, str | None]:
    content = message.get("content")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if not isinstance(content, str):
        rest["content"], content = content, None
    elif not rest:
        return {"role": message["role"], "content": _text(content), "extra": None}
    extra = _text(json.dumps(rest, ensure_ascii=False, default=str))
    return {"role": message["role"], "content": _text(content), "extra": extra}


def _message(row: dict[str, Any]) -> dict[str, Any]:
    extra = json.loads(row["extra"]) if row["extra"] else {}
    content = extra.pop("content") if "content" in extra else row["content"]
    return {"role": row["role"], "content": content} | extra


def _text(text: str | None) -> str | None:
    """JSON can smuggle in halves of surrogate pairs, which are no text; the policy reads them as ``?`` as well."""
    return None if text is None else text.encode("utf-8", "replace").decode()


def rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Each trajectory as a dict of the columns that are there.

    Token columns are arrays, ``spans`` are ``[version, start, end]``, ``phase_s`` maps phase to seconds, ``messages``
    are as the episode had them.
    """
    tokens = [name for name in TOKEN_COLUMNS if name in batch.schema.names]
    others = batch.select([name for name in batch.schema.names if name not in tokens]).to_pylist()
    for index in range(batch.num_rows):
        found = others[index] if others else {}
        row = {name: found[name] if name in found else _values(batch, name, index) for name in batch.schema.names}
        if "spans" in row:
            row["spans"] = [[span["version"], span["start"], span["end"]] for span in row["spans"]]
        if "phase_s" in row:
            row["phase_s"] = {item["phase"]: item["seconds"] for item in row["phase_s"]}
        if "messages" in row:
            row["messages"] = [_message(message) for message in row["messages"]]
        yield row


def _values(batch: pa.RecordBatch, name: str, index: int) -> np.ndarray:
    return batch.column(name)[index].values.to_numpy(zero_copy_only=False)


def json_line(row: dict[str, Any]) -> bytes:
    """A row of :func:`rows` as one line of JSON. A logprob is the shortest decimal that reads back as the same 32-bit
    number; one that is not finite becomes null."""
    return orjson.dumps(row, default=str, option=_JSON_OPTIONS)


def trajectory(row: dict[str, Any]) -> Trajectory:
    """The trajectory that a row of :func:`rows` with all columns, or a parsed :func:`json_line`, was made from."""
    same = ("trajectory_id", "task_key", "env_key", "group_id", "prompt_length", "turns", "tool_calls", "tool_errors")
    return Trajectory(
        **{name: row[name] for name in (*same, "sample_index", "started_at", "duration_s", "phase_s", "messages")},
        ids=np.asarray(row["ids"], dtype=np.int32),
        mask=np.asarray(row["mask"], dtype=np.uint8),
        logprobs=np.asarray(row["logprobs"], dtype=np.float32),
        spans=[Span(*span) for span in row["spans"]],
        stop_reason=StopReason(row["stop_reason"]),
        outcome=_outcome(row),
        starts=list(row["starts"]),
    )


def _outcome(row: dict[str, Any]) -> Outcome:
    kind: type[Graded] | type[Ungraded] | type[InfraFailed] | type[Cancelled] = _OUTCOMES[row["outcome"]]
    return Graded(row["reward"]) if kind is Graded else kind(row["reason"])
