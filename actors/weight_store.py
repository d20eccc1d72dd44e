"""WeightStore: the policy's version counter, and the weights of the newest version for whoever asks."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import ray

from serve.weight_transfer import Header, check_shapes, read_header

Snapshot = TypeVar("Snapshot")
STATE_FILE = "weights.json"


class WeightLedger(Generic[Snapshot]):
    """Counts versions; plain Python, no Ray.

    The counter only grows, across restarts of the run too, so that a version never names two sets of weights: the model
    folder a run is started from is version 0, and the one it is continued from is the version after the last published
    one. It is not the learner's step counter, which rewinds when a learner does.
    """

    def __init__(self, state_file: Path) -> None:
        """Continue from ``state_file`` if it is there.

        Raises:
            ValueError: the file holds no version.
        """
        self._state_file = state_file
        self._snapshot: Snapshot | None = None
        self._header: Header | None = None
        last = self._read()
        self.version = 0 if last is None else last + 1
        self._write(self.version)

    def _read(self) -> int | None:
        try:
            version = json.loads(self._state_file.read_text(encoding="utf-8"))["version"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._state_file} holds no version ({error!r}); restore or remove it") from None
        if not isinstance(version, int) or version < 0:
            raise ValueError(f"{self._state_file} holds the version {version!r}; restore or remove it")
        return version

    def publish(self, header: Header, snapshot: Snapshot) -> int:
        """Make ``snapshot`` the newest one. Returns its version, which is on disk before anyone can see it.

        Raises:
            SnapshotError: it has other tensors than the one before; the newest one stays what it was.
        """
        if self._header is not None:
            check_shapes(header.shapes, self._header.shapes)
        self._write(self.version + 1)
        self.version += 1
        self._snapshot, self._header = snapshot, header
        return self.version

    def _write(self, version: int) -> None:
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._state_file.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"version": version}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._state_file)

    def latest(self) -> tuple[int, Snapshot | None]:
        """The newest version and its snapshot; ``None`` until the first publication: the model folder holds it."""
        return self.version, self._snapshot


@ray.remote(num_cpus=0)
class WeightStore:
    """The actor shell. Replicas read it when they start and when they are told of a new version.

    It must not be restarted by Ray, for it would have lost the weights: the policy, and with it the run, ends when this
    actor does.
    """

    def __init__(self, run_dir: str) -> None:
        self._ledger: WeightLedger[ray.ObjectRef] = WeightLedger(Path(run_dir) / STATE_FILE)

    async def publish(self, snapshot: list[ray.ObjectRef] | np.ndarray | bytes) -> int:
        """Publish a snapshot as :func:`serve.weight_transfer.pack_weights` makes it. Returns its version.

        Args:
            snapshot: in a list, so that Ray passes the reference and not the bytes; or the bytes.

        Raises:
            SnapshotError: it is damaged, or is not of the same model as the one before.
        """
        data: Any = await snapshot[0] if isinstance(snapshot, list) else snapshot
        array = np.frombuffer(data, dtype=np.uint8)
        # An object dies with the process that put it. Put again, it lives as long as this actor, not the learner.
        return self._ledger.publish(read_header(array), ray.put(array))

    async def latest(self) -> tuple[int, ray.ObjectRef | None]:
        """The newest version and a reference to its snapshot; see :meth:`WeightLedger.latest`."""
        return self._ledger.latest()

    def __repr__(self) -> str:
        return "WeightStore"
