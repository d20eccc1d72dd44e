"""Settings of all tests."""

import os

import pytest
from hypothesis import settings

# Ray reads these when it is first used and keeps them for as long as the process lives: they must be the same for all.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fleet-rl", deadline=None)
settings.load_profile("fleet-rl")

WHOLE = ("e2e", "chaos")


def pytest_collection_modifyitems(items):
    """Two workers share the tests: one has the runs of whole systems, one after the other, the other the rest by file.

    A whole run waits much of its time, and two at once starve each other on two cores. They take longest and go first.
    """
    items.sort(key=lambda item: item.path.parent.name not in WHOLE)
    for item in items:
        whole = item.path.parent.name in WHOLE
        item.add_marker(pytest.mark.xdist_group("whole" if whole else item.path.stem))
