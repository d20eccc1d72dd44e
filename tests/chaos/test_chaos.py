"""One run whose parts are killed one after the other; ``python -m benchmarks.chaos`` goes on for longer."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks import chaos

STEPS = 12  # more than the blows take, however fast they are trained
WITHOUT_EVALUATION = {"trainer.eval_before_train": "false", "trainer.eval_after_train": "false"}


@pytest.mark.timeout(300)
def test_a_run_outlives_the_death_of_parts_without_going_back_to_a_checkpoint(tmp_path):
    rng = random.Random()
    with chaos.Run("blows", tmp_path, STEPS, WITHOUT_EVALUATION) as run:
        for step, kind in enumerate(("weight_store", "engine", "rollout_worker", "env_pool"), start=1):
            run.wait_until_trained(step)
            time.sleep(rng.uniform(0, 0.5))
            run.strike(kind, rng)
        run.finish()
    said = "".join(run.life.lines)
    assert "goes on from" not in said, said
    assert chaos.losses(run.folder, STEPS) == {}
