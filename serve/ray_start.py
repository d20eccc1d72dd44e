"""Starting or joining Ray, with a second try where Ray's own start is known to fail now and then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import ray
from ray._private import services

TRIES = 2
# On a busy machine Ray's GCS process now and then does not come up, and `ray.init` raises after 30 s; a fresh one does.
# Can go once Ray starts it again itself: https://github.com/vllm-project/vllm/pull/47208.
_GCS_DID_NOT_START = "Timed out waiting for file"

logger = logging.getLogger(__name__)


def start_ray(*arguments: Any, **settings: Any) -> Any:
    """``ray.init``, tried again once if the GCS did not come up. Raises what ``ray.init`` raises.

    ``_node_ip_address`` is heeded, also where it is the loopback's.
    """
    for number in range(1, TRIES + 1):
        try:
            with _address_as_given() if "_node_ip_address" in settings else nullcontext():
                return ray.init(*arguments, **settings)
        except RuntimeError as error:
            if number == TRIES or _GCS_DID_NOT_START not in str(error):
                raise
            logger.warning("Ray did not start (%s); trying again", error)


@contextmanager
def _address_as_given() -> Iterator[None]:
    """Ray puts the machine's own address in place of the loopback's, and its processes then listen on every interface:
    whoever reaches one of them can run what he likes. Can go with https://github.com/ray-project/ray/issues/59110."""
    own, services.resolve_ip_for_localhost = services.resolve_ip_for_localhost, lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = own
