"""A model's weights as one run of bytes: where each tensor lies, and checksums that CPU and GPU compute alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from serve.snapshot_header import CHECKSUMS, SnapshotError

CheckWeights = Literal["sample", "all"]
SAMPLED_TENSORS = 8
# What a sample costs must not grow with the vocabulary; embeddings of large models are left to the size check.
LARGEST_SAMPLED_BYTES = 64 * 2**20
CHECKSUM_BLOCK = 1 << 24  # words; bounds the temporary memory
# So many tensors are summed one by one: a GPU takes longer to be told of hundreds of them than to read them all, a CPU
# longer to keep running totals.
FEW_TENSORS = {"cuda": 16, "cpu": 1 << 30}
# Of the safetensors format. Wider types come first there, so that each tensor is aligned.
FORMAT_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
}
Metadata = Iterable[tuple[str, torch.dtype, tuple[int, ...]]]


@dataclass(frozen=True)
class Entry:
    """One tensor and its bytes, ``start`` to ``end``, in the run."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class WeightLayout:
    """Where each tensor of a model lies in a run of bytes: in the order of the safetensors format, without gaps."""

    def __init__(self, metadata: Metadata) -> None:
        """``metadata``: name, dtype and shape of each tensor, in any order.

        Raises:
            SnapshotError: a dtype that weights do not travel in.
        """
        self.entries: dict[str, Entry] = {}
        start = 0
        for name, dtype, shape in sorted(metadata, key=lambda item: (-item[1].itemsize, item[0])):
            if dtype not in FORMAT_NAMES:
                raise SnapshotError(f"tensor {name} has dtype {dtype}, which weights do not travel in")
            end = start + math.prod(shape) * dtype.itemsize
            self.entries[name] = Entry(name, dtype, tuple(shape), start, end)
            start = end
        self.nbytes = start

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {entry.name: entry.shape for entry in self.entries.values()}

    def views(self, data: torch.Tensor, first: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors of the entries that lie wholly in ``data``, uint8 [bytes], whose first byte is ``first``.

        The tensors share memory with ``data``, which begins where an entry begins.
        """
        for entry in self.inside(first, first + len(data)):
            yield entry.name, data[entry.start - first : entry.end - first].view(entry.dtype).view(entry.shape)

    def inside(self, start: int, end: int) -> Iterator[Entry]:
        """The entries that lie wholly between two bytes of the run, in order."""
        return (entry for entry in self.entries.values() if start <= entry.start and entry.end <= end)

    def chunks(self, limit: int) -> list[tuple[int, int]]:
        """Byte ranges of whole tensors that together are everything: each of at most ``limit``, or of one tensor."""
        ranges: list[tuple[int, int]] = []
        start = end = 0
        for entry in self.entries.values():
            if end > start and entry.end - start > limit:
                ranges.append((start, end))
                start = end
            end = entry.end
        return [*ranges, (start, end)] if end > start else ranges

    def header(self, checksums: Mapping[str, str]) -> bytes:
        """What a safetensors file of these tensors begins with; the run of bytes follows it."""
        fields: dict[str, Any] = {"__metadata__": {CHECKSUMS: json.dumps(dict(checksums))}}
        for entry in self.entries.values():
            fields[entry.name] = {
                "dtype": FORMAT_NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [entry.start, entry.end],
            }
        text = json.dumps(fields, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def sampled(self, check: CheckWeights) -> list[str]:
        """The tensors that are compared at both ends of a transfer."""
        if check == "all":
            return list(self.entries)
        small = sorted(e.name for e in self.entries.values() if e.end - e.start <= LARGEST_SAMPLED_BYTES)
        return small[:: max(1, math.ceil(len(small) / SAMPLED_TENSORS))]

    def to_wire(self) -> list[list[Any]]:
        """Plain values that any message can carry; :meth:`from_wire` reads them."""
        return [[e.name, str(e.dtype).removeprefix("torch."), list(e.shape)] for e in self.entries.values()]

    @classmethod
    def from_wire(cls, wire: list[list[Any]]) -> WeightLayout:
        return cls((name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in wire)


class WeightImage:
    """A copy of all weights in one buffer: what is sent while the learner goes on to change the originals."""

    def __init__(self, layout: WeightLayout, device: torch.device, data: torch.Tensor | None = None) -> None:
        """``data``: uint8 [layout.nbytes] on ``device`` to use instead of new memory."""
        self.layout = layout
        self.data = torch.empty(layout.nbytes, dtype=torch.uint8, device=device) if data is None else data
        self._views = dict(layout.views(self.data))

    def fill(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy every tensor into the buffer, each as it comes: it need not outlive its turn.

        Raises:
            SnapshotError: a tensor is missing, unknown or of another shape. The buffer is not whole then.
        """
        missing = set(self._views)
        with torch.no_grad():
            for name, tensor in named:
                view = self._views.get(name)
                if view is None or view.shape != tensor.shape:
                    raise SnapshotError(f"tensor {name} of shape {list(tensor.shape)} is not in the model's layout")
                view.copy_(tensor.detach())
                missing.discard(name)
        if missing:
            raise SnapshotError(
                f"{len(missing)} of the model's tensors were not given: {', '.join(sorted(missing)[:3])}"
            )

    def checksums(self, check: CheckWeights) -> dict[str, str]:
        """Of the tensors that are compared at both ends. Waits for the device."""
        collected = Checksums()
        collected.add_run(self.layout, self.data, self.layout.sampled(check))
        return collected.values()


class Checksums:
    """:func:`checksum` of many tensors, collected on their device and fetched with one wait for it."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._sums: list[torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor) -> None:
        self._names.append(name)
        self._sums.append(_weighted_sum(tensor)[None])

    def add_run(self, layout: WeightLayout, data: torch.Tensor, names: Iterable[str], first: int = 0) -> None:
        """Of those named that lie wholly in ``data``, whose first byte is ``first``: see :meth:`WeightLayout.views`."""
        wanted = set(names)
        inside = [entry for entry in layout.inside(first, first + len(data)) if entry.name in wanted]
        if len(inside) <= FEW_TENSORS[data.device.type] or any(
            (e.start - first) % 8 or (e.end - first) % 8 for e in inside
        ):
            for entry in inside:
                self.add(entry.name, data[entry.start - first : entry.end - first])
            return
        self._names += [entry.name for entry in inside]
        bounds = [((entry.start - first) // 8, (entry.end - first) // 8) for entry in inside]
        self._sums.append(_segment_sums(data[: bounds[-1][1] * 8].view(torch.int64), bounds))

    def values(self) -> dict[str, str]:
        if not self._sums:
            return {}
        sums = torch.cat(self._sums).tolist()
        return {name: _hexadecimal(value) for name, value in zip(self._names, sums, strict=True)}


def checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """:func:`checksum` of each."""
    collected = Checksums()
    for name, tensor in tensors.items():
        collected.add(name, tensor)
    return collected.values()


def checksum(tensor: torch.Tensor) -> str:
    """Of a tensor's bytes, the same on every device: the sum of its 8-byte words, each times its own odd number.

    Arithmetic is modulo 2^64, where an odd factor is invertible: no change of a single word goes unnoticed. Catches
    what happens on a wire or to a buffer; it is no protection against someone who means to deceive.
    """
    return _hexadecimal(int(_weighted_sum(tensor)))


def _hexadecimal(value: int) -> str:
    return f"{value & (2**64 - 1):016x}"


def _weighted_sum(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8)).clone()
    words = data.view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHECKSUM_BLOCK):
        block = words[start : start + CHECKSUM_BLOCK]
        total += (block * _factors(start, len(block), words.device)).sum()
    return total


def _factors(start: int, count: int, device: torch.device) -> torch.Tensor:
    """The odd numbers that belong to the words from ``start`` on."""
    return torch.arange(2 * start + 1, 2 * (start + count) + 1, 2, device=device)


def _segment_sums(words: torch.Tensor, bounds: list[tuple[int, int]]) -> torch.Tensor:
    """:func:`_weighted_sum` of each segment ``(start, end)`` of ``words``, int64 [segments]; in ascending order.

    With running totals P of the words and Q of the words times the factors of their places in the run, a segment that
    begins at a has Q(end) - Q(a) - 2a (P(end) - P(a)), for its own factors are less by 2a.
    """
    edges = torch.tensor(bounds, device=words.device)
    plain, weighted = torch.zeros_like(edges), torch.zeros_like(edges)
    before = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHECKSUM_BLOCK):
        block = words[start : start + CHECKSUM_BLOCK]
        here = ((edges > start) & (edges <= start + len(block))).nonzero(as_tuple=True)
        at = edges[here] - start - 1
        for totals, values, index in (
            (plain, block, 0),
            (weighted, block * _factors(start, len(block), words.device), 1),
        ):
            running = values.cumsum(0)
            totals[here] = before[index] + running[at]
            before[index] += running[-1]
    starts = edges[:, 0]
    return (weighted[:, 1] - weighted[:, 0]) - 2 * starts * (plain[:, 1] - plain[:, 0])
