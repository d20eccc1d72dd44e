"""Snapshots of weights: how they travel from the learner to the engines of a host, and how damage is noticed.

A snapshot is a safetensors file as one array of bytes, so that the object store shares it without a copy. Its metadata
holds checksums of a sample of its tensors. A replica writes it into its own folder in shared memory, where the engine's
worker processes read it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from serve.snapshot_header import Header, SnapshotError, read_header
from serve.weight_layout import CheckWeights, WeightImage, WeightLayout, checksum


def pack_weights(tensors: Mapping[str, torch.Tensor], check: CheckWeights = "sample") -> np.ndarray:
    """Serialise named tensors as a snapshot: uint8 [bytes].

    Names and shapes must be those of the model folder that the policy was started from; a tied output head is not
    among them.
    """
    layout = WeightLayout((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items())
    return pack_named(layout, tensors.items(), check)


def pack_named(
    layout: WeightLayout, named: Iterable[tuple[str, torch.Tensor]], check: CheckWeights = "sample"
) -> np.ndarray:
    """As :func:`pack_weights`, of tensors that are there one at a time only."""
    snapshot, body = _empty_snapshot(layout, dict.fromkeys(layout.sampled(check), checksum(torch.empty(0))))
    image = WeightImage(layout, body.device, body)
    image.fill(named)
    header = layout.header(image.checksums(check))
    snapshot[: len(header)] = np.frombuffer(header, dtype=np.uint8)  # as long as the one before
    return snapshot


def snapshot_of(image: WeightImage, sums: Mapping[str, str]) -> np.ndarray:
    """A snapshot of what is in ``image``, with the checksums that were made of it. Waits for the device."""
    snapshot, body = _empty_snapshot(image.layout, sums)
    body.copy_(image.data)
    return snapshot


def _empty_snapshot(layout: WeightLayout, sums: Mapping[str, str]) -> tuple[np.ndarray, torch.Tensor]:
    """The array with its header written, and the part of it that the tensors go to."""
    header = layout.header(sums)
    snapshot = np.empty(len(header) + layout.nbytes, dtype=np.uint8)
    snapshot[: len(header)] = np.frombuffer(header, dtype=np.uint8)
    return snapshot, torch.from_numpy(snapshot[len(header) :])


def read_snapshot(path: Path | str) -> tuple[Header, Iterator[tuple[str, torch.Tensor]]]:
    """The header of a snapshot file and its tensors, mapped from the file as they are asked for.

    Raises:
        SnapshotError: as :func:`read_header`; a file that is missing is damaged too.
    """
    try:
        header = read_header(np.memmap(path, dtype=np.uint8, mode="r"))
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path}: {error}") from None
    return header, _tensors(path)


def _tensors(path: Path | str) -> Iterator[tuple[str, torch.Tensor]]:
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except SafetensorError as error:
        raise SnapshotError(f"{path}: {error}; publish it anew") from None


def checkpoint_shapes(model_path: Path | str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a model folder, read from the headers of its safetensors files."""
    files = sorted(Path(model_path).glob("*.safetensors"))
    if not files:
        raise SnapshotError(f"{model_path}: no *.safetensors; save the model in safetensors format")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            shapes |= {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    return shapes


def check_received(received: Mapping[str, str], sent: Mapping[str, str]) -> None:
    """Raise :class:`SnapshotError` where the checksum of a tensor that arrived is not the one that was sent."""
    for name, expected in sent.items():
        if received.get(name) != expected:
            raise SnapshotError(f"tensor {name} changed on the way: its checksum differs; publish the weights anew")
