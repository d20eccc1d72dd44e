"""One run under faults whose parts are killed in turn; ``python -m benchmarks.chaos`` goes on for longer."""

from __future__ import annotations

import json
import random
import time

import pytest

from benchmarks import chaos
from tests.e2e.runs import batches

STEPS = 20  # more than are trained while the blows fall
FAULTS = """
seed: 3
faults:
  - {route: make, kind: status, status: 500, probability: 0.05}
  - {route: tool, kind: hang, seconds: 60, tool: search_tickets, count: 3}
  - {route: verify, kind: verifier_failure, probability: 0.2}
"""
KEYS = {
    "trainer.eval_before_train": "false",
    "trainer.eval_after_train": "false",
    "generator.deadlines.step": 3,
    "generator.deadlines.verify": 5,
    "policy.health_timeout_s": 30,  # the blows here do not hang, and an engine is slow beside other tests
}


@pytest.mark.timeout(400)
def test_a_run_outlives_faults_of_its_environment_and_the_death_of_its_parts(tmp_path):
    rng = random.Random()
    faults = tmp_path / "faults.yaml"
    faults.write_text(FAULTS)
    with chaos.Run("blows", tmp_path, STEPS, KEYS | {"environment.local_faults": faults}) as run:
        for step, kind in enumerate(("weight_store", "engine", "rollout_worker", "env_pool"), start=1):
            run.wait_until_trained(step)
            time.sleep(rng.uniform(0, 0.5))
            run.strike(kind, rng)
        said = "".join(run.life.lines)
        assert "the run failed" not in said, said

        engines = run.find("engine")
        run.strike(rng.choice(["learner_rank", "replay_buffer", "conductor"]), rng)
        assert "it goes on from its last checkpoint" in "".join(run.life.lines)
        assert run.find("engine") == engines, "the engines were started anew"
        run.finish()
    assert chaos.losses(run.folder, STEPS) == {}
    ledger = json.loads((run.folder / "summary.json").read_text())["ledger"]["train"]
    assert ledger["ungraded"] > 0
    for trajectory in (t for batch in batches(run.folder) for t in batch):
        assert (trajectory["outcome"] == "graded") == (trajectory["reward"] is not None)
        assert trajectory["outcome"] == "graded" or trajectory["reason"]
