"""What a snapshot of weights says of itself. Needs no torch, whose import would cost every actor that asks a second."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

CHECKSUMS = "checksums"  # key of a snapshot's metadata


class SnapshotError(ValueError):
    """Weights are damaged on their way or do not fit the model. The message says what, where, and what to do."""


@dataclass(frozen=True)
class Header:
    """What a snapshot says of itself.

    Attributes:
        shapes: of each tensor, by the name the checkpoint format gives it.
        checksums: of a sample of the tensors, made by whoever packed the snapshot.
    """

    shapes: dict[str, tuple[int, ...]]
    checksums: dict[str, str]


def read_header(snapshot: np.ndarray) -> Header:
    """Read and check a snapshot's header.

    Raises:
        SnapshotError: it is no safetensors file, or is shorter or longer than its header says.
    """
    data = memoryview(snapshot)
    length = int.from_bytes(data[:8], "little")
    try:
        entries = json.loads(bytes(data[8 : 8 + length]))
        metadata = entries.pop("__metadata__", {})
        shapes = {name: tuple(entry["shape"]) for name, entry in entries.items()}
        size = 8 + length + max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        checksums = json.loads(metadata.get(CHECKSUMS, "{}"))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise SnapshotError(f"snapshot of {len(data)} bytes has no header ({error}); publish it anew") from None
    if size != len(data):
        raise SnapshotError(f"snapshot has {len(data)} bytes where its header says {size}: it is cut; publish it anew")
    return Header(shapes, checksums)


def check_shapes(shapes: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]]) -> None:
    """Raise :class:`SnapshotError` unless both name the same tensors with the same shapes.

    The engine itself keeps old weights for a name that is missing, and says so in a log line only.
    """
    missing, unknown = sorted(expected.keys() - shapes.keys()), sorted(shapes.keys() - expected.keys())
    if missing:
        raise SnapshotError(f"snapshot lacks {len(missing)} of the model's tensors: {', '.join(missing[:3])}")
    if unknown:
        raise SnapshotError(f"snapshot has {len(unknown)} tensors the model has not: {', '.join(unknown[:3])}")
    for name, shape in shapes.items():
        if shape != expected[name]:
            raise SnapshotError(f"snapshot tensor {name} has shape {list(shape)}, the model {list(expected[name])}")
