"""WeightStore: the policy's version counter, and the weights of the newest version for whoever asks."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import ray

from serve.snapshot_header import Header, check_shapes, read_header

Shapes = dict[str, tuple[int, ...]]

Snapshot = TypeVar("Snapshot")
STATE_FILE = "weights.json"
ACTOR_NAME = "weight_store"
MAX_RESTARTS = 3  # of one that dies


class WeightLedger(Generic[Snapshot]):
    """Counts versions; plain Python, no Ray.

    The counter only grows, across restarts of the run too, so that a version never names two sets of weights: the model
    folder a run is started from is version 0, and the one it is continued from is the version after the last published
    one. It is not the learner's step counter, which rewinds when a learner does.
    """

    def __init__(self, state_file: Path, life: str = "") -> None:
        """Continue from ``state_file`` if it is there.

        Args:
            life: tells one start of the run from the next. A ledger that is made again in the life that wrote the file
                takes the place of one that has died: versions are those they were, and the snapshot is lost.

        Raises:
            ValueError: the file holds no version.
        """
        self._state_file = state_file
        self._life = life
        self._snapshot: Snapshot | None = None
        self._shapes: Shapes | None = None
        last = self._read()
        if last is not None and last.get("life") == life:
            self.version, self._folder = last["version"], last["folder"]
        else:
            self.version = self._folder = 0 if last is None else last["version"] + 1
        self._snapshot_version = self._folder
        self._write(self.version)

    def _read(self) -> dict[str, Any] | None:
        try:
            state = json.loads(self._state_file.read_text(encoding="utf-8"))
            version = state["version"]
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self._state_file} holds no version ({error!r}); restore or remove it") from None
        if not isinstance(version, int) or version < 0:
            raise ValueError(f"{self._state_file} holds the version {version!r}; restore or remove it")
        return state

    def reserve(self, shapes: Shapes) -> int:
        """The next version, for weights whose snapshot follows. It is on disk before anyone can see it.

        Raises:
            SnapshotError: these are other tensors than those before; nothing is reserved.
        """
        if self._shapes is not None:
            check_shapes(shapes, self._shapes)
        self._write(self.version + 1)
        self.version += 1
        self._shapes = shapes
        return self.version

    def deliver(self, version: int, header: Header, snapshot: Snapshot) -> None:
        """Make ``snapshot`` the one that is handed out, as the reserved ``version``.

        Raises:
            SnapshotError: it has other tensors than were announced.
            ValueError: the version was not reserved.
        """
        if not self._snapshot_version <= version <= self.version:
            raise ValueError(f"version {version} is not one whose snapshot is awaited (up to {self.version})")
        if self._shapes is not None:  # else whoever was told of them has died
            check_shapes(header.shapes, self._shapes)
        self._snapshot, self._snapshot_version, self._shapes = snapshot, version, header.shapes

    def publish(self, header: Header, snapshot: Snapshot) -> int:
        """Make ``snapshot`` the newest one. Returns its version; see :meth:`reserve`."""
        version = self.reserve(header.shapes)
        self.deliver(version, header, snapshot)
        return version

    @property
    def delivered(self) -> bool:
        """Whether the newest version's snapshot is here."""
        return self._snapshot_version == self.version

    def _write(self, version: int) -> None:
        self._state_file.parent.mkdir(parents=True, exist_ok=True)
        partial = self._state_file.with_suffix(".partial")
        with partial.open("w", encoding="utf-8") as file:
            json.dump({"version": version, "folder": self._folder, "life": self._life}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, self._state_file)

    def latest(self) -> tuple[int, Snapshot | None]:
        """The newest snapshot that is here and its version; ``None`` where that is the model folder's."""
        return self._snapshot_version, self._snapshot


# Every call may be made twice: a publication whose answer was lost is followed by one with a version of its own.
@ray.remote(num_cpus=0, max_restarts=MAX_RESTARTS, max_task_retries=-1)
class WeightStore:
    """The actor shell. Replicas read it when they start and when they are told of a new version.

    One that Ray starts again knows the versions, but has lost the weights: an engine that starts then waits for the
    next publication, for none may serve less than what was published. The policy ends once Ray starts it no more.
    """

    def __init__(self, run_dir: str, life: str = "") -> None:
        """``life``: see :class:`WeightLedger`."""
        self._ledger: WeightLedger[ray.ObjectRef] = WeightLedger(Path(run_dir) / STATE_FILE, life)
        self._arrived = asyncio.Event()  # the newest version's snapshot
        if self._ledger.delivered:
            self._arrived.set()

    async def publish(self, snapshot: list[ray.ObjectRef] | np.ndarray | bytes) -> int:
        """Publish a snapshot as :func:`serve.weight_transfer.pack_weights` makes it. Returns its version.

        Args:
            snapshot: in a list, so that Ray passes the reference and not the bytes; or the bytes.

        Raises:
            SnapshotError: it is damaged, or is not of the same model as the one before.
        """
        array = await _array(snapshot)
        # An object dies with the process that put it. Put again, it lives as long as this actor, not the learner.
        version = self._ledger.publish(read_header(array), ray.put(array))
        self._arrived.set()
        return version

    async def reserve(self, shapes: Shapes) -> int:
        """The next version, for weights that go to the engines directly; see :meth:`WeightLedger.reserve`."""
        version = self._ledger.reserve(shapes)
        self._arrived.clear()
        return version

    async def deliver(self, version: int, snapshot: list[ray.ObjectRef]) -> None:
        """The snapshot of a reserved version, for replicas that join later; see :meth:`WeightLedger.deliver`."""
        array = await _array(snapshot)
        self._ledger.deliver(version, read_header(array), ray.put(array))
        if self._ledger.delivered:
            self._arrived.set()

    async def version(self) -> int:
        """The newest version, whether its snapshot is here or not."""
        return self._ledger.version

    async def latest(self, wait: bool = False) -> tuple[int, ray.ObjectRef | None]:
        """The newest snapshot and its version; see :meth:`WeightLedger.latest`.

        Args:
            wait: until the snapshot of the newest version is here, where it was only announced so far.
        """
        if wait:
            await self._arrived.wait()
        return self._ledger.latest()

    def __repr__(self) -> str:
        return "WeightStore"


class SnapshotLost(RuntimeError):
    """The weight store was started again, and holds no newer snapshot until the next publication."""


@ray.remote(num_cpus=0, max_restarts=MAX_RESTARTS, max_task_retries=-1)
class PinnedWeights:
    """A weight store that stays at one version until it is told to move on: for replicas that evaluate."""

    def __init__(self) -> None:
        self._store = ray.get_actor(ACTOR_NAME)
        self._pinned: tuple[int, ray.ObjectRef | None] | None = None

    async def pin(self) -> int:
        """Move on to the newest version whose snapshot is in the store. Returns it.

        Raises:
            SnapshotLost: the store has only an older one.
        """
        version, snapshot = await self._store.latest.remote()
        if self._pinned is not None and version < self._pinned[0]:
            raise SnapshotLost(f"the weight store has lost what came after version {version}")
        # Its own, for the store may die before this actor does.
        self._pinned = version, None if snapshot is None else ray.put(await snapshot)
        return version

    async def latest(self, wait: bool = False) -> tuple[int, ray.ObjectRef | None]:
        """As :meth:`WeightStore.latest`, of the version that is pinned; there is nothing to ``wait`` for."""
        if self._pinned is None:
            await self.pin()
        return self._pinned

    def __repr__(self) -> str:
        return "PinnedWeights"


async def _array(snapshot: list[ray.ObjectRef] | np.ndarray | bytes) -> np.ndarray:
    data: Any = await snapshot[0] if isinstance(snapshot, list) else snapshot
    return np.frombuffer(data, dtype=np.uint8)
