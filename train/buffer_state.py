"""The replay buffer's part of a checkpoint: tickets and ledger as JSON, buffered groups as an Arrow file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from actors.trajectory import Group, Trajectory
from train.trajectory_table import SCHEMA, Origin, record_batches, rows, trajectory

STATE = "buffer.json"
GROUPS = "buffer.arrow"


def write(folder: Path, state: Mapping[str, Any], groups: Mapping[int, Group], origin: Origin) -> None:
    """Save :meth:`ReplayBufferCore.state` and the group of each ticket, exact to the token.

    Args:
        origin: step and version of the checkpoint.
    """
    (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
    with pa.OSFile(str(folder / GROUPS), "wb") as file, pa.ipc.new_file(file, SCHEMA) as writer:
        for batch in record_batches(groups.values(), origin):
            writer.write_batch(batch)


def read(folder: Path) -> tuple[dict[str, Any], dict[int, Group]]:
    """What :func:`write` saved."""
    state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    members: dict[int, list[Trajectory]] = {}
    with pa.memory_map(str(folder / GROUPS)) as file, pa.ipc.open_file(file) as reader:
        for index in range(reader.num_record_batches):
            for row in rows(reader.get_batch(index)):
                members.setdefault(row["group_id"], []).append(trajectory(row))
    return state, {i: Group(i, found[0].task_key, found[0].env_key, found) for i, found in members.items()}
