"""Settings of all tests."""

import os

from hypothesis import settings

# Ray reads these when it is first used and keeps them for as long as the process lives: they must be the same for all.
os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fleet-rl", deadline=None)
settings.load_profile("fleet-rl")
