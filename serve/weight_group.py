"""The group of a broadcast: rank 0 of the learner, and behind it every worker of every engine.

Between GPUs it is vLLM's NCCL communicator, which stands beside whatever process groups the learner and the engines
have of their own; without GPUs it is gloo. A group stands for one membership and is never repaired: whoever finds it
broken aborts it, and the next publication makes a new one.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from serve.config import QUIET_ENGINE
from serve.weight_routes import LEARNER_RANK, Invitation

# Two are in memory at most, and one is large enough to fill a link.
CHUNK_BYTES = 1 << 29


class WeightGroup(Protocol):
    """A joined group."""

    epoch: int

    def broadcast(self, data: torch.Tensor) -> None:
        """Send uint8 [bytes] from rank 0 to all, or receive into it. On a GPU it is only enqueued."""

    def abort(self) -> None:
        """Leave, whatever the others do: ends a broadcast that hangs. Idempotent."""


def listener(address: str) -> socket.socket:
    """A port of this machine where the others of a group will find rank 0."""
    opened = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    opened.bind((address, 0))
    opened.listen()
    return opened


def load_communicator(device: torch.device) -> None:
    """Import what :func:`join_group` needs, which takes seconds, before others wait for this process."""
    if device.type == "cuda":
        # vLLM would write to the terminal of a learner that only borrows its communicator.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", QUIET_ENGINE["VLLM_LOGGING_LEVEL"])
        import vllm.distributed.device_communicators.pynccl  # noqa: F401


def join_group(
    invitation: Invitation, rank: int, device: torch.device, opened: socket.socket | None = None
) -> WeightGroup:
    """Meet the others. Returns once all are there.

    Args:
        opened: in rank 0, the :func:`listener` that the invitation names.

    Raises:
        RuntimeError: not all came within ``invitation.timeout_s``.
    """
    group = _NcclGroup if device.type == "cuda" else _GlooGroup
    return group(invitation, rank, device, opened)


class _GlooGroup:
    def __init__(self, invitation: Invitation, rank: int, device: torch.device, opened: socket.socket | None) -> None:
        self.epoch = invitation.epoch
        timeout = timedelta(seconds=invitation.timeout_s)
        options: dict[str, Any] = {} if opened is None else {"master_listen_fd": opened.detach()}
        store = TCPStore(
            invitation.address,
            invitation.port,
            is_master=rank == LEARNER_RANK,
            timeout=timeout,
            wait_for_workers=False,
            **options,
        )
        self._group = ProcessGroupGloo(PrefixStore(str(self.epoch), store), rank, invitation.size, timeout)

    def broadcast(self, data: torch.Tensor) -> None:
        options = BroadcastOptions()
        options.rootRank = LEARNER_RANK
        self._group.broadcast([data], options).wait()

    def abort(self) -> None:
        # gloo has deadlines of its own, after which whoever waits gets an error.
        self._group = None


class _NcclGroup:
    def __init__(self, invitation: Invitation, rank: int, device: torch.device, opened: socket.socket | None) -> None:
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
        from vllm.distributed.utils import StatelessProcessGroup

        self.epoch = invitation.epoch
        meeting = StatelessProcessGroup.create(
            host=invitation.address,
            port=invitation.port,
            rank=rank,
            world_size=invitation.size,
            store_timeout=int(invitation.timeout_s),
            listen_socket=opened,
        )
        self._nccl = PyNcclCommunicator(meeting, device=device)
        if self._nccl.disabled:  # its broadcast would do nothing, and say nothing
            raise RuntimeError("vLLM's NCCL communicator is disabled: no NCCL library, or VLLM_DISABLE_PYNCCL is set")

    def broadcast(self, data: torch.Tensor) -> None:
        # Of itself the communicator would choose, and set, a stream of vLLM's.
        self._nccl.broadcast(data, src=LEARNER_RANK, stream=torch.cuda.current_stream())

    def abort(self) -> None:
        self._nccl.destroy()
