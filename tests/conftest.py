"""Settings of all tests."""

import os

from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

# Ray reads these when it is first used and keeps them for as long as the process lives: they must be the same for all.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
# Two workers whose torch has a thread on every core wait for each other: one test took 70 s instead of 5.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fleet-rl", deadline=None)
settings.load_profile("fleet-rl")

WHOLE = ("tests/chaos/", "tests/e2e/test_ray_job.py", "tests/e2e/test_run.py")
PARTS = ("tests/e2e/",)


def pytest_collection_modifyitems(config, items):
    """With two workers (``pytest -n 2 --no-loadscope-reorder``) runs of whole systems go first, for they take longest;
    then what needs no more than a moment and a core; last what starts several processes."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: 0 if item.nodeid.startswith(WHOLE) else 2 if item.nodeid.startswith(PARTS) else 1)


class _Scheduling(LoadScopeScheduling):
    """Whole systems run one after the other in one worker, for on two cores they starve each other; they wait much of
    their time, in which the other worker has the rest, file by file."""

    def _split_scope(self, nodeid):
        return "whole" if nodeid.startswith(WHOLE) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config, log):
    return _Scheduling(config, log)
