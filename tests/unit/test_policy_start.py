"""When a policy counts as started: not by Serve's word alone."""

import pytest

from serve import policy
from serve.policy import PolicyClient, PolicyStartError, PolicyUpdateError


class Handle:
    """What a caller's handle knows of two replicas: first nothing, then one, then both; or the first for ever."""

    def __init__(self, learns: bool) -> None:
        self.asked, self._learns = 0, learns

    def ask(self, method, *, timeout_s):
        self.asked += 1
        if self.asked < 3 or not self._learns:
            raise PolicyUpdateError(f"{method}: no replica answers: none is running")
        return [{"version": 0}] * (self.asked - 2)


def client_with(handle, monkeypatch):
    client = object.__new__(PolicyClient)
    client._app_name, client._num_replicas, client._replicas = "app", 2, handle
    monkeypatch.setattr(policy, "_wait_until_running", lambda *_: None)
    monkeypatch.setattr(policy, "STATUS_POLL_S", 0.01)
    return client


def test_it_has_started_once_the_caller_reaches_every_replica(monkeypatch):
    handle = Handle(learns=True)
    client_with(handle, monkeypatch).wait_until_healthy(10)
    assert handle.asked == 4


def test_replicas_that_are_never_reached_are_a_failed_start(monkeypatch):
    with pytest.raises(PolicyStartError, match="are running, but not all answer within 0.1 s"):
        client_with(Handle(learns=False), monkeypatch).wait_until_healthy(0.1)
