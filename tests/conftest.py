"""Settings of all tests."""

from hypothesis import settings

# How long one example takes says how busy the machine is, and nothing of the code.
settings.register_profile("fleet-rl", deadline=None)
settings.load_profile("fleet-rl")
