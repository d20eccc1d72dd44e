"""The last stage of a training step: new weights become a version, and reach every replica.

Whatever the route, the weights are copied first (:class:`serve.weight_layout.WeightImage`), before any engine stands
still: the ranks of the learner gather them under ZeRO-3, their checksums are taken, and the learner may change the
originals again while a copy is still on its way to the store.
"""

from __future__ import annotations

import logging
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import ray
import torch
import torch.distributed as dist

from serve.policy import Member, PolicyClient, PolicyUpdateError
from serve.shared_folder import SHARED_MEMORY, SharedFolder
from serve.side_thread import in_thread
from serve.weight_group import CHUNK_BYTES, WeightGroup, join_group, listener, load_communicator
from serve.weight_layout import WeightImage, WeightLayout
from serve.weight_routes import (
    LEARNER_RANK,
    Invitation,
    Route,
    WeightUpdate,
    choose_route,
    depends_on_members,
    group_ranks,
)
from serve.weight_transfer import pack_named, snapshot_of
from train.learner import NamedWeights
from train.role_metrics import ReplicaLoad

JOIN_TIMEOUT_S = 30.0
HELD_POLL_S = 0.2
T = TypeVar("T")
logger = logging.getLogger(__name__)


class WeightPublisher:
    """Called after the optimiser step, in every rank: rank 0 publishes, the others assist.

    Routes: see :mod:`serve.weight_routes`. With ``snapshot`` the weights go through the object store, which is shared
    memory on one host, and replicas pull them from there. With the others the engines get them from the learner, and
    the snapshot, which a replica that joins later loads, follows in the background.
    """

    def __init__(self, store: Any, policy: PolicyClient, timeout_s: float) -> None:
        self._store = store
        self._policy = policy
        self._timeout_s = timeout_s
        self._sending: _Sending | None = None
        self._replica_load = ReplicaLoad()
        self.last: dict[str, float] = {}  # of the last publication, and what replicas did since the one before

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to one process: it is pickled to the ranks."""
        return self.__dict__ | {"_sending": None}

    def __call__(self, weights: NamedWeights, step: int) -> int:
        """Publish, in rank 0, and wait until every replica confirms. Returns the new policy version.

        A replica that fails answers nothing any more; it is being replaced and loads the snapshot before it serves.
        The publication succeeds as long as one holds it.

        Raises:
            PolicyUpdateError: no replica held the weights in time.
            SnapshotError: they are not those of the model that was published before.
            RouteError: the configured route is not possible here.
        """
        begun = time.monotonic()
        sending = self._sending = self._sending or _Sending(self._policy, self._store, self._timeout_s)
        members = self._policy.roll_call() if depends_on_members(self._policy.route, sending.gpus) else []
        route = sending.agree(choose_route(self._policy.route, sending.gpus, members))
        if route == "snapshot":
            version = self._publish_snapshot(weights, begun)
        else:
            version = self._publish_directly(sending, route, weights, members, begun)
        self.last["sync/total_s"] = time.monotonic() - begun
        return version

    def assist(self, weights: NamedWeights) -> None:
        """The other ranks' part in a publication: they gather what is in pieces, and show the copy on their GPU."""
        sending = self._sending = self._sending or _Sending(self._policy, self._store, self._timeout_s)
        if sending.agree(None) == "ipc":
            sending.stage(weights)
            sending.handles()
        else:
            for _ in weights:
                pass

    def settle(self) -> None:
        """Wait until the last snapshot is in the weight store, where replicas that start later, and evaluations with
        replicas of their own, find it.

        Raises:
            TimeoutError: it did not get there in time.
        """
        if self._sending is not None:
            self._sending.settle(self._timeout_s)

    def close(self) -> None:
        """As :meth:`settle`, but never raises; then leave the broadcast group."""
        if self._sending is not None:
            self._sending.close(self._timeout_s)

    def _publish_snapshot(self, weights: NamedWeights, begun: float) -> int:
        snapshot = ray.put(pack_named(WeightLayout(weights.metadata()), weights, self._policy.check_weights))
        held = False
        while not held:
            version = ray.get(self._store.publish.remote([snapshot]), timeout=self._timeout_s)
            packed = time.monotonic()
            held = self._update_from_store(version)
        self.last |= {"sync/pack_s": packed - begun, "sync/update_s": time.monotonic() - packed}
        return version

    def _publish_directly(
        self, sending: _Sending, route: Route, weights: NamedWeights, members: Sequence[Member], begun: float
    ) -> int:
        sums = sending.stage(weights)
        handles = sending.handles() if route == "ipc" else {}
        version = ray.get(self._store.reserve.remote(sending.layout.shapes), timeout=self._timeout_s)
        packed = time.monotonic()
        if route == "nccl" and not sending.meet(members, version):
            held = False
            while not held:
                sending.deliver(version, sums).result(self._timeout_s)
                held = self._update_from_store(version)
            self.last["sync/no_group"] = 1.0
        else:
            update = sending.update(route, version, members, sums, handles)
            done = self._perform(lambda: self._policy.transfer(update, self._timeout_s, sending.collective(route)))
            if not done:
                sending.abort()  # nobody knows where in the broadcast the others are
            # Whatever became of the engines: those that join, and those that replace the failed, wait for it.
            delivery = sending.deliver(version, sums)
            while not done:
                delivery.result(self._timeout_s)
                if not (done := self._wait_until_held(version)):
                    delivery = sending.deliver(version, sums)
        self.last |= {"sync/pack_s": packed - begun, "sync/update_s": time.monotonic() - packed}
        return version

    def _update_from_store(self, version: int) -> bool:
        """Returns once a replica holds ``version``; false: the store has died before, and the snapshot with it."""
        if self._perform(lambda: self._policy.update(version, self._timeout_s)):
            return True
        return self._wait_until_held(version)

    def _wait_until_held(self, version: int) -> bool:
        """After a failed update: until a replica that was replaced holds ``version``, which it gets from the store.
        False: the store has died, and the snapshot with it.

        Raises:
            PolicyUpdateError: no replica did in time.
        """
        deadline = time.monotonic() + self._timeout_s
        while not self._policy.holds(version):
            stored, _ = ray.get(self._store.latest.remote(), timeout=self._timeout_s)
            if stored < version:
                return False
            if time.monotonic() > deadline:
                raise PolicyUpdateError(f"no replica held version {version} within {self._timeout_s:g} s")
            time.sleep(HELD_POLL_S)
        return True

    def _perform(self, update: Callable[[], list[dict[str, Any]]]) -> bool:
        """Whether every replica took the weights."""
        self.last = {"sync/pause_s": 0.0, "sync/failed": 0.0}
        try:
            results = update()
        except PolicyUpdateError as error:
            logger.warning("%s", error)
            self.last["sync/failed"] = 1.0
            return False
        self.last["sync/pause_s"] = max(_pause_s(result["seconds"]) for result in results)
        self.last |= _slowest_phases(results) | self._replica_load.metrics(results)
        return True


def _pause_s(seconds: dict[str, float]) -> float:
    """How long a replica sampled nothing: all phases of its update but the fetching of a snapshot before."""
    return sum(seconds.values()) - seconds.get("fetch", 0.0)


def _slowest_phases(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The phases of an update, each of the replica that it took longest."""
    phases = {phase for result in results for phase in result["seconds"]}
    return {f"sync/replica_{phase}_s": max(result["seconds"].get(phase, 0.0) for result in results) for phase in phases}


class _Sending:
    """One rank's end of the direct routes: its copy of the weights, and the group that rank 0 sends them to."""

    def __init__(self, policy: PolicyClient, store: Any, timeout_s: float) -> None:
        self._policy, self._store, self._timeout_s = policy, store, timeout_s
        self._several = dist.is_initialized() and dist.get_world_size() > 1
        on_gpu = torch.cuda.is_initialized()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._gpu = str(torch.cuda.get_device_properties(self._device).uuid) if on_gpu else None
        self.gpus: list[str | None] = self._gather(self._gpu)
        self._image: WeightImage | None = None
        self._handles: dict[str, bytes] = {}
        self._group: WeightGroup | None = None
        self._group_members: frozenset[str] = frozenset()
        self._copied = threading.Event()  # the image is free for the next version
        self._copied.set()
        self._delivery: Future[None] | None = None

    @property
    def layout(self) -> WeightLayout:
        return self._image.layout

    def agree(self, route: Route | None) -> Route:
        """The route that rank 0 chose, on every rank."""
        return self._gather(route)[0]

    def stage(self, weights: NamedWeights) -> dict[str, str]:
        """Copy the weights, once the last copy is no longer needed. Returns checksums.

        Raises:
            PolicyUpdateError: the last copy did not reach the weight store.
        """
        if not self._copied.wait(self._timeout_s):
            raise PolicyUpdateError(f"the last snapshot was not copied within {self._timeout_s:g} s")
        if self._delivery is not None and self._delivery.done() and (error := self._delivery.exception()):
            raise PolicyUpdateError(f"the last snapshot did not reach the weight store: {error}")
        if self._image is None:
            self._image = WeightImage(WeightLayout(weights.metadata()), self._device)
        self._image.fill(weights)
        sums = self._image.checksums(self._policy.check_weights)
        if self._device.type == "cuda":
            # Other processes and streams read it next. Not the whole device: a broadcast that failed may hang on it.
            torch.cuda.current_stream(self._device).synchronize()
        return sums

    def handles(self) -> dict[str, bytes]:
        """How to map each rank's copy on its GPU, by GPU UUID. Returns once every rank has staged."""
        if not self._handles:
            mine = {self._gpu: export_handle(self._image.data)}
            if files := ipc_files(os.getpid()):
                SharedFolder("cuda-ipc").leave(files)
            self._handles = {gpu: handle for part in self._gather(mine) for gpu, handle in part.items()}
        elif self._several:
            dist.barrier()
        return self._handles

    def meet(self, members: Sequence[Member], epoch: int) -> bool:
        """Make a group of these members, unless they are those of the last one. Returns whether there is one."""
        names = frozenset(member.replica for member in members)
        # An engine that took the place of a dead one has its replica's name, and is in no group.
        joined = self._group is not None and {member.epoch for member in members} == {self._group.epoch}
        if joined and names == self._group_members:
            return True
        self.abort()
        load_communicator(self._device)
        address = ray.util.get_node_ip_address()
        opened = listener(address)
        offsets, size = group_ranks(members)
        invitation = Invitation(epoch, address, opened.getsockname()[1], offsets, size, JOIN_TIMEOUT_S)
        # In a thread also because the communicator chooses a stream of its own for the thread it is made in.
        joining = in_thread(join_group, invitation, LEARNER_RANK, self._device, opened)
        failures: list[str] = []
        try:
            failures += self._policy.join_group(invitation)
            group = joining.result(JOIN_TIMEOUT_S)
        except (RuntimeError, TimeoutError) as error:
            failures.append(str(error) or f"the learner did not meet the others within {JOIN_TIMEOUT_S:g} s")
        if failures:
            logger.warning("broadcast group %d did not come about: %s", epoch, "; ".join(failures))
            joining.add_done_callback(_leave)  # also one that comes about later
            return False
        self._group, self._group_members = group, names
        return True

    def update(
        self,
        route: Route,
        version: int,
        members: Sequence[Member],
        sums: dict[str, str],
        handles: dict[str, bytes],
    ) -> WeightUpdate:
        return WeightUpdate(
            route,
            version,
            members=tuple(member.replica for member in members),
            epoch=self._group.epoch if self._group is not None else version,
            layout=self.layout.to_wire(),
            checksums=sums,
            handles=handles,
        )

    def collective(self, route: Route) -> _Sending | None:
        """This process's part in the update, where it has one."""
        return self if route == "nccl" else None

    def run(self) -> None:
        """The learner's part in a broadcast."""
        if self._group is None:
            raise RuntimeError("there is no broadcast group")
        stream = self._stream()
        with torch.cuda.stream(stream):
            for start, end in self.layout.chunks(CHUNK_BYTES):
                self._group.broadcast(self._image.data[start:end])
            if stream is not None:
                stream.synchronize()

    def abort(self) -> None:
        """Leave the group: the next publication makes a new one."""
        if self._group is not None:
            self._group.abort()
        self._group, self._group_members = None, frozenset()

    def deliver(self, version: int, sums: dict[str, str]) -> Future[None]:
        """Bring the copy to the weight store, in the background."""
        self._copied.clear()
        self._delivery = in_thread(self._deliver, version, sums)
        return self._delivery

    def _deliver(self, version: int, sums: dict[str, str]) -> None:
        try:
            with torch.cuda.stream(self._stream()):
                snapshot = snapshot_of(self._image, sums)
        finally:
            self._copied.set()
        ray.get(self._store.deliver.remote(version, [ray.put(snapshot)]), timeout=self._timeout_s)

    def settle(self, timeout_s: float) -> None:
        if self._delivery is not None:
            self._delivery.result(timeout_s)

    def close(self, timeout_s: float) -> None:
        try:
            self.settle(timeout_s)
        except Exception as error:  # the engines have the weights, and no training depends on it any more
            logger.warning("the last snapshot did not reach the weight store: %s", error)
        self.abort()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    def _gather(self, item: T) -> list[T]:
        if not self._several:
            return [item]
        items: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(items, item)
        return items


def _leave(joining: Future[WeightGroup]) -> None:
    if joining.exception() is None:
        joining.result().abort()


def export_handle(data: torch.Tensor) -> bytes:
    """How another process on the same GPU can map ``data``, for as long as it lives here."""
    from torch.multiprocessing.reductions import reduce_tensor

    return pickle.dumps(reduce_tensor(data)[1])


def ipc_files(pid: int, root: Path = SHARED_MEMORY) -> list[str]:
    """What a process that has exported memory holds in shared memory: CUDA's file, and torch's count of users.

    CUDA never removes its own, and torch none where the process does not end in order. Neither may go before the
    process: torch ends it hard where its file is missing.
    """
    own = re.compile(rf"torch_{pid}_.+|cuda\.shm\.\w+\.{pid:x}\..+")
    return [path.name for path in root.iterdir() if own.fullmatch(path.name)]
