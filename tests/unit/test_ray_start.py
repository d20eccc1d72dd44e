import pytest
import ray

from serve.ray_start import start_ray

STUCK = RuntimeError("Timed out waiting for file /tmp/ray/session/gcs_server_port_1")


def failing(monkeypatch, *errors):
    """``ray.init`` raises these, one a call, and then succeeds. Returns the settings of each call."""
    left, calls = list(errors), []

    def init(*arguments, **settings):
        calls.append((arguments, settings))
        if left:
            raise left.pop(0)
        return "started"

    monkeypatch.setattr(ray, "init", init)
    return calls


def test_a_gcs_that_does_not_come_up_is_started_once_more_with_the_same_settings(monkeypatch):
    calls = failing(monkeypatch, STUCK)
    assert start_ray("local", num_cpus=1) == "started"
    assert calls == [(("local",), {"num_cpus": 1})] * 2


def test_a_gcs_that_does_not_come_up_twice_is_an_error(monkeypatch):
    calls = failing(monkeypatch, STUCK, STUCK)
    with pytest.raises(RuntimeError, match="Timed out"):
        start_ray()
    assert len(calls) == 2


def test_other_errors_are_raised_at_once(monkeypatch):
    calls = failing(monkeypatch, RuntimeError("Maybe you called ray.init twice by accident?"))
    with pytest.raises(RuntimeError, match="twice"):
        start_ray()
    assert len(calls) == 1
