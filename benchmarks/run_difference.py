"""In what two runs differ: their steps, what each batch was made of, and what their last checkpoints hold.

What depends on the clock is left out (seconds, times of day, rates), and what a run that goes on from a checkpoint
renames: the numbers of policy versions. All else is compared exactly, tensors bit by bit.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from actors.lineage import Lineage
from train import buffer_state, checkpoint
from train.resume import CHECKPOINTS, METRICS, STEP

Row = dict[str, Any]

# Of metrics: those that batch and optimiser step decide, and nothing else; of these, rates are left out.
METRIC_PREFIXES = ("environment/", "generate/", "loss/", "mismatch/", "policy/", "reward/", "staleness/")
RATE = "_per_s"
COLUMNS = {
    "data_order": ("task_key", "env_key", "sample_index"),
    "tickets": ("group_id", "trajectory_id"),
    "tokens": ("ids", "mask", "logprobs", "prompt_length", "starts", "span_ends", "stop_reason", "turns", "messages"),
    "rewards": ("outcome", "reward", "reason", "tool_calls", "tool_errors"),
}
ASPECTS = ("steps", "metrics", *COLUMNS, "weights", "optimizer")


def differences(one: Path, other: Path, steps: int) -> dict[str, list[str]]:
    """What differs between two runs of ``steps`` steps, by aspect: a line for each place, none where they are equal.

    Args:
        one, other: folders of runs with trajectories as lines of JSON, whose last step wrote a checkpoint.
    """
    found: dict[str, list[str]] = {aspect: [] for aspect in ASPECTS}
    for folder in (one, other):
        found["steps"] += _step_problems(folder, steps)
    for aspect, line in _batch_differences(one, other, steps):
        found[aspect].append(line)
    found["metrics"] += _metric_differences(one, other)
    ours, theirs = (folder / CHECKPOINTS / f"global_step_{steps}" for folder in (one, other))
    broken = [line for folder in (ours, theirs) for line in checkpoint.verify(folder)]
    found["tickets"] += broken or _buffer_differences(ours, theirs)
    found["weights"] += broken or _file_differences(ours / checkpoint.POLICY, theirs / checkpoint.POLICY)
    found["optimizer"] += broken or _file_differences(ours / checkpoint.OPTIMIZER, theirs / checkpoint.OPTIMIZER)
    return found


def training_rows(folder: Path) -> list[Row]:
    """The metrics of a run's training steps."""
    rows = [json.loads(line) for line in (folder / METRICS).read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if STEP in row]


def _step_problems(folder: Path, steps: int) -> list[str]:
    counts = Counter(row["step"] for row in training_rows(folder))
    wanted = {*range(1, steps + 1)}
    problems = [f"{folder.name}: {METRICS} has step {step} {counts[step]} times" for step in counts if counts[step] > 1]
    if counts.keys() != wanted:
        problems.append(f"{folder.name}: {METRICS} lacks or adds steps {sorted(counts.keys() ^ wanted)}")
    files = {path.name for path in (folder / "trajectories").glob("step_*.jsonl")}
    if files != {_batch_file(folder, step).name for step in wanted}:
        problems.append(f"{folder.name}: {len(files)} batches of trajectories instead of {steps}")
    return problems


def _batch_file(folder: Path, step: int) -> Path:
    return folder / "trajectories" / f"step_{step:06d}.jsonl"


def _batch(folder: Path, step: int) -> list[Row]:
    path = _batch_file(folder, step)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    return [row | {"span_ends": [span[1:] for span in row["spans"]]} for row in rows]


def _batch_differences(one: Path, other: Path, steps: int) -> Iterator[tuple[str, str]]:
    """Aspect and place of each."""
    for step in range(1, steps + 1):
        ours, theirs = _batch(one, step), _batch(other, step)
        if len(ours) != len(theirs):
            yield "data_order", f"step {step}: {len(ours)} and {len(theirs)} trajectories"
        for a, b in zip(ours, theirs, strict=False):
            for aspect, columns in COLUMNS.items():
                if differ := [column for column in columns if a[column] != b[column]]:
                    yield aspect, f"step {step}, trajectory {a['trajectory_id']}: {', '.join(differ)}"


def _metric_differences(one: Path, other: Path) -> list[str]:
    theirs = {row["step"]: _decided(row) for row in training_rows(other)}
    lines = []
    for row in training_rows(one):
        a, b = _decided(row), theirs.get(row["step"], {})
        if differ := [f"{name} {a.get(name)} and {b.get(name)}" for name in a | b if a.get(name) != b.get(name)]:
            lines.append(f"step {row['step']}: {', '.join(differ)}")
    return lines


def _decided(row: Row) -> Row:
    return {name: value for name, value in row.items() if name.startswith(METRIC_PREFIXES) and not name.endswith(RATE)}


def _buffer_differences(one: Path, other: Path) -> list[str]:
    ours, theirs = (json.loads((folder / buffer_state.STATE).read_text(encoding="utf-8")) for folder in (one, other))
    a, b = settled(ours), settled(theirs)
    lines = [f"{buffer_state.STATE}: {name} {a[name]} and {b[name]}" for name in a if a[name] != b[name]]
    a, b = _started(ours), _started(theirs)
    lines += [f"{buffer_state.STATE}: ticket {i} {a[i]} and {b[i]}" for i in a.keys() & b.keys() if a[i] != b[i]]
    return lines


def settled(state: Mapping[str, Any]) -> dict[str, Any]:
    """A synchronous buffer's state (:meth:`actors.replay_buffer_core.ReplayBufferCore.state`) as it was when the last
    batch had been trained and nothing for the next one begun: how far that is at a checkpoint is a matter of chance.
    """
    started = [ticket for ticket in state["tickets"] if ticket["state"] != "issued"]
    headers = [ticket["header"] for ticket in started if ticket["header"] is not None]
    ended = Counter(outcome[0] for header in headers for outcome in header["outcomes"].values())
    alike = Counter(
        "all_solved" if header["rewards"][0] > 0 else "none_solved"
        for header in headers
        if len(header["rewards"]) > 1 and len(set(header["rewards"])) == 1
    )
    lineage, ledger, sampler = Lineage(state["lineage"]), state["ledger"], state["sampler"]
    return {
        **{name: state[name] for name in ("trained_steps", "trained_groups", "draining", "dropped", "lengths")},
        "updates": lineage.lag(0),
        "next_id": min((ticket["ticket_id"] for ticket in state["tickets"]), default=state["next_id"]),
        "committed": state["committed"] - len(headers),
        "committed_bytes": state["committed_bytes"] - sum(header["nbytes"] for header in headers),
        "zero_variance": dict(Counter(state["zero_variance"]) - alike),
        "dispatched": ledger["dispatched"] - sum(len(ticket["episode_ids"]) for ticket in started),
        "ended": dict(Counter(ledger["ended"]) - ended),
        "drawn": sum(sampler["drawn"].values()) - len(started),
        "tasks": sampler["fingerprint"],
    }


def _started(state: Mapping[str, Any]) -> dict[int, tuple[str, list[str]]]:
    """Task and episodes of each ticket that has one."""
    return {t["ticket_id"]: (t["task_key"], t["episode_ids"]) for t in state["tickets"] if t["state"] != "issued"}


def _file_differences(one: Path, other: Path) -> list[str]:
    """Of the tensors that lie in two folders."""
    ours, theirs = ({str(path.relative_to(folder)): path for path in _tensor_files(folder)} for folder in (one, other))
    if ours.keys() != theirs.keys() or not ours:
        return [f"files {sorted(ours)} and {sorted(theirs)}"]
    return [
        f"{name}{place}" for name in sorted(ours) for place in unequal_leaves(_load(ours[name]), _load(theirs[name]))
    ]


def _tensor_files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".pt")]


def _load(path: Path) -> Any:
    if path.suffix == ".safetensors":
        return load_file(path)
    # DeepSpeed's checkpoints hold objects of its own; these were written by the run that is compared.
    return torch.load(path, map_location="cpu", weights_only=False)


def unequal_leaves(one: Any, other: Any, place: str = "") -> Iterator[str]:
    """Where two nests of dicts, lists and tuples differ: tensors in their bits, other leaves in their text."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if (one.dtype, one.shape) != (other.dtype, other.shape) or not torch.equal(_bits(one), _bits(other)):
            yield f"{place}: tensors differ"
    elif isinstance(one, dict) and isinstance(other, dict):
        for key in [*one, *(key for key in other if key not in one)]:
            if key in one and key in other:
                yield from unequal_leaves(one[key], other[key], f"{place}/{key}")
            else:
                yield f"{place}/{key}: in one of them only"
    elif isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            yield from unequal_leaves(a, b, f"{place}/{index}")
    elif str(one) != str(other):
        yield f"{place}: {str(one)[:100]} and {str(other)[:100]}"


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
