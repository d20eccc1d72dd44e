"""How new weights may reach the engines, and who takes part: plain Python, shared by learner and replicas.

* ``snapshot``: through the object store and a file in shared memory. Works everywhere, and is what late joiners load.
* ``nccl``: one collective broadcast from learner rank 0 to all workers of all engines. NCCL between GPUs; engines
  without a GPU do the same over gloo, which is how it is tested.
* ``ipc``: engines map the memory of the learner's rank on the same GPU, and nothing crosses a wire.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Route = Literal["snapshot", "nccl", "ipc"]
RouteSetting = Literal["auto", "snapshot", "nccl", "ipc"]
LEARNER_RANK = 0  # in the group of a broadcast


class RouteError(ValueError):
    """The configured route is not possible where learner and policy run. The message says why and what to do."""


@dataclass(frozen=True)
class Member:
    """What a replica says of itself when the roll is called.

    Attributes:
        replica: Serve's id of it.
        gpus: UUID of the GPU of each of its engine's workers, in rank order; ``None`` for one without a GPU.
        version: of the weights it holds.
        epoch: of the broadcast group its engine has joined; ``None`` for none.
    """

    replica: str
    gpus: tuple[str | None, ...]
    version: int
    epoch: int | None = None


@dataclass(frozen=True)
class Invitation:
    """To the group of a broadcast.

    Attributes:
        epoch: names this membership. Grows with every new group, also across restarts of the learner.
        offsets: rank of the first worker of each replica that is invited.
        size: ranks of the group, the learner's among them.
    """

    epoch: int
    address: str
    port: int
    offsets: dict[str, int]
    size: int
    timeout_s: float


@dataclass(frozen=True)
class WeightUpdate:
    """One update, as the learner announces it to every replica; plain values that any message can carry.

    Attributes:
        members: replicas it is meant for; others load the snapshot that follows.
        epoch: of the membership it stands on.
        layout: :meth:`serve.weight_layout.WeightLayout.to_wire` of the weights; in a snapshot's own header otherwise.
        checksums: of the tensors that are compared at both ends.
        path: of the snapshot's file.
        handles: by GPU UUID, how to map the learner's memory there.
    """

    route: Route
    version: int
    members: tuple[str, ...] = ()
    epoch: int = 0
    layout: list[list[Any]] = field(default_factory=list)
    checksums: dict[str, str] = field(default_factory=dict)
    path: str = ""
    handles: dict[str, bytes] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        return asdict(self) | {"members": list(self.members)}


def depends_on_members(setting: RouteSetting, learner_gpus: Sequence[str | None]) -> bool:
    """Whether :func:`choose_route` needs to know them: else it is the snapshot, and the roll need not be called."""
    return setting in ("nccl", "ipc") or (setting == "auto" and learner_gpus[0] is not None)


def choose_route(setting: RouteSetting, learner_gpus: Sequence[str | None], members: Sequence[Member]) -> Route:
    """The route for these members; ``auto`` takes the fastest one that the placement allows.

    Where no replica is running, the snapshot waits for those that will.

    Args:
        learner_gpus: UUID of each rank's GPU, rank 0 first.

    Raises:
        RouteError: the setting names a route that the placement rules out.
    """
    if setting == "snapshot" or not members:
        return "snapshot"
    engine_gpus = [gpu for member in members for gpu in member.gpus]
    against_ipc = _against_ipc(learner_gpus, engine_gpus)
    against_nccl = _against_nccl(learner_gpus[0], engine_gpus)
    if setting == "auto":
        if against_ipc is None:
            return "ipc"
        return "nccl" if against_nccl is None and None not in engine_gpus else "snapshot"
    reason = against_ipc if setting == "ipc" else against_nccl
    if reason is not None:
        raise RouteError(f"policy.weight_transfer {setting} is not possible: {reason}; set it to auto")
    return setting


def _against_ipc(learner_gpus: Sequence[str | None], engine_gpus: Sequence[str | None]) -> str | None:
    apart = [gpu for gpu in engine_gpus if gpu is None or gpu not in learner_gpus]
    return (
        f"{len(apart)} of {len(engine_gpus)} engine workers share no GPU with a rank of the learner" if apart else None
    )


def _against_nccl(sender: str | None, engine_gpus: Sequence[str | None]) -> str | None:
    gpus = [sender, *engine_gpus]
    on_gpu = [gpu for gpu in gpus if gpu is not None]
    if on_gpu and len(on_gpu) < len(gpus):
        return "learner and engines must all have a GPU, or none of them"
    if len(set(on_gpu)) < len(on_gpu):
        return "rank 0 of the learner and the engine workers need a GPU each"
    return None


def group_ranks(members: Iterable[Member]) -> tuple[dict[str, int], int]:
    """Rank of each replica's first worker behind the learner's rank, in a fixed order, and the size of the group."""
    offsets: dict[str, int] = {}
    size = LEARNER_RANK + 1
    for member in sorted(members, key=lambda member: member.replica):
        offsets[member.replica] = size
        size += len(member.gpus)
    return offsets, size
