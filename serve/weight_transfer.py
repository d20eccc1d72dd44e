"""Snapshots of weights: how they travel from the learner to the engines of a host, and how damage is noticed.

A snapshot is a safetensors file as one array of bytes, so that the object store shares it without a copy. Its metadata
holds checksums of a sample of its tensors. A replica writes it into its own folder in shared memory, where the engine's
worker processes read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from serve.weight_layout import CHECKSUMS, CheckWeights, SnapshotError, WeightImage, WeightLayout, checksum

SHARED_MEMORY = Path("/dev/shm")
FOLDER_PREFIX = "fleet-rl-"


@dataclass(frozen=True)
class Header:
    """What a snapshot says of itself.

    Attributes:
        shapes: of each tensor, by the name the checkpoint format gives it.
        checksums: of a sample of the tensors, made by whoever packed the snapshot.
    """

    shapes: dict[str, tuple[int, ...]]
    checksums: dict[str, str]


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


def check_received(received: Mapping[str, str], sent: Mapping[str, str]) -> None:
    """Raise :class:`SnapshotError` where the checksum of a tensor that arrived is not the one that was sent."""
    for name, expected in sent.items():
        if received.get(name) != expected:
            raise SnapshotError(f"tensor {name} changed on the way: its checksum differs; publish the weights anew")


class SharedFolder:
    """A folder in shared memory that belongs to this process and goes with it.

    The kernel drops the lock on it when its owner dies, however it dies, so that another process can tell an abandoned
    folder from one in use without trusting process ids.
    """

    def __init__(self, label: str, root: Path = SHARED_MEMORY) -> None:
        """``label`` makes the folder's name readable, for example a run's name."""
        # Sockets lie here too, and the kernel allows 107 characters for a socket's path.
        readable = re.sub(r"[^A-Za-z0-9_.-]+", "-", label)[:24]
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=f"{FOLDER_PREFIX}{readable}-{os.getpid()}-", dir=root))
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Between the first line and the last, another process's clean-up can take the folder for abandoned.
            if self.path.is_dir():
                break
            os.close(self._lock)
        self._remove = weakref.finalize(self, _remove_folder, self.path, self._lock)

    @contextmanager
    def snapshot_file(self, snapshot: np.ndarray, version: int) -> Iterator[Path]:
        """The snapshot as a file, for as long as the context lasts."""
        path = self.path / f"v{version}.safetensors"
        try:
            path.write_bytes(memoryview(snapshot))
            yield path
        finally:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder. Idempotent; also done when the object or the interpreter goes."""
        self._remove()


def _remove_folder(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)


def remove_abandoned(root: Path = SHARED_MEMORY) -> list[str]:
    """Remove the folders of processes that died without cleaning up. Returns the names of those removed."""
    return [path.name for path in _folders(root) if _remove_if_abandoned(path)]


def _folders(root: Path) -> Iterable[Path]:
    return (path for path in root.glob(f"{FOLDER_PREFIX}*") if path.is_dir() and not path.is_symlink())


def _remove_if_abandoned(path: Path) -> bool:
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:  # gone meanwhile, or another user's
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
        return not path.exists()
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
