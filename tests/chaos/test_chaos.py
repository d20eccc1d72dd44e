"""One run whose parts are killed one after the other; ``python -m benchmarks.chaos`` goes on for longer."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks import chaos

SECONDS = 280


@pytest.mark.timeout(SECONDS + 20)
def test_a_run_outlives_the_death_of_parts_that_are_replaced_without_ending_it(tmp_path):
    rng, deadline = random.Random(), time.monotonic() + SECONDS
    life = chaos.Life.begin("blows", tmp_path, resume=False)
    try:
        for step, kind in enumerate(("engine", "rollout_worker", "env_pool"), start=1):
            life.wait_for(lambda least=step: life.newest >= least, deadline)
            time.sleep(rng.uniform(0, 0.5))
            chaos.strike_one(life, kind, rng)
        life.wait_for(lambda: False, deadline)
    finally:
        if life.process.poll() is None:
            life.kill()
    said = "".join(life.lines)
    assert life.process.returncode == 0, said
    assert "goes on from" not in said, "it went back to a checkpoint"
    assert chaos.losses(tmp_path / "blows") == {}
