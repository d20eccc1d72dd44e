"""One run whose parts are killed one after the other; ``python -m benchmarks.chaos`` goes on for longer."""

from __future__ import annotations

import random
import time

import pytest

from benchmarks import chaos

STEPS = 7
WITHOUT_EVALUATION = {"trainer.eval_before_train": "false", "trainer.eval_after_train": "false"}


@pytest.mark.timeout(300)
def test_a_run_outlives_the_death_of_parts_and_goes_back_only_where_one_cannot_be_replaced_alone(tmp_path):
    rng = random.Random()
    with chaos.Run("blows", tmp_path, STEPS, WITHOUT_EVALUATION) as run:
        for step, kind in enumerate(("weight_store", "engine", "rollout_worker", "replay_buffer"), start=1):
            run.wait_until_trained(step)
            time.sleep(rng.uniform(0, 0.5))
            run.strike(kind, rng)
        run.finish()
    said = "".join(run.life.lines)
    assert said.count("goes on from its last checkpoint") == 1 and "replay buffer: ReplayBuffer has died" in said, said
    assert chaos.losses(run.folder, STEPS) == {}
