"""Whole runs on real parts: local Fleet over HTTP, SDK, vLLM behind Serve, DeepSpeed under Ray Train."""

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import defaultdict

import pytest
import torch
from torch.nn.utils import parameters_to_vector
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.runs import batches, start, steps
from tests.reference_grpo import ReferenceGrpo
from train.metrics import find_spec

STALENESS = 2
WITHOUT_EVALUATION = {"trainer.eval_before_train": "false", "trainer.eval_after_train": "false"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One asynchronous run with two learner ranks, and its last line."""
    out = tmp_path_factory.mktemp("runs")
    keys = {
        "buffer.max_staleness": STALENESS,
        "trainer.max_steps": 5,
        "trainer.learner.num_workers": 2,
        "trainer.eval_interval": 2,
        "generator.eval_max_inflight_episodes": 2,
        "policy.eval_replicas": 1,
    }
    # A shell that is set up for a cluster must not matter to a run on this machine.
    run = start("configs/demo.yaml", "asynchronous", out, keys=keys, environment={"RAY_AUTH_MODE": "token"})
    text = run.output()
    assert run.process.returncode == 0, text
    return run, json.loads(text.strip().splitlines()[-1])


@pytest.mark.timeout(400)
def test_a_run_ends_with_its_summary(finished):
    run, summary = finished
    asked = {"pass_at_1_before", "pass_at_1_after", "eval_tasks", "steps", "wall_s", "peak_rss_gb", "ledger"}
    assert asked <= set(summary)
    assert summary == json.loads((run.folder / "summary.json").read_text())
    assert (summary["steps"], summary["eval_tasks"]) == (5, 8)
    assert (run.folder / "reward_curve.png").stat().st_size > 10_000


def test_the_ledger_balances_and_every_instance_is_gone(finished):
    _, summary = finished
    for ledger in (summary["ledger"]["train"], summary["ledger"]["eval"]):
        ended = sum(ledger[name] for name in ("graded", "ungraded", "infra_failed", "cancelled"))
        assert ledger["dispatched"] == ended and ledger["in_flight"] == 0 and ledger["infra_failed"] == 0
    instances = summary["ledger"]["instances"]
    assert instances["left"] == 0 and instances["made"] == instances["deleted"] + instances["expired"] > 0


def test_nothing_of_a_finished_run_is_left_on_the_machine(finished):
    run, _ = finished
    assert run.leftovers() == []


def test_an_evaluation_beside_training_holds_one_version_while_training_goes_on(finished):
    run, summary = finished
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    beside = [row for row in rows if "eval/all/pass_at_1" in row and 0 < row["step"] < 5]
    assert beside
    for row in beside:
        assert row["eval/policy_version"] == row["eval/oldest_version"] == row["eval/newest_version"] == row["step"]
        assert row["eval/all/num_samples"] == 8
        lines = (run.folder / f"trajectories/eval_{row['step']:06d}_sampled.jsonl").read_text().splitlines()
        assert {span[0] for line in lines for span in json.loads(line)["spans"]} == {row["step"]}
        assert (run.folder / f"evals/global_step_{row['step']}/aggregated_results.jsonl").is_file()
    assert summary["ledger"]["eval"]["dispatched"] == 8 * (2 + len(beside))


@pytest.mark.timeout(400)
def test_a_checkpoint_is_evaluated_by_one_command(finished, tmp_path):
    run, _ = finished
    asked = ["--samples", "3", "--temperature", "0.8", "--tasks", "6", "--out", tmp_path / "evals", "--json"]
    command = [sys.executable, "-m", "deploy.cli", "eval", run.folder, *asked]
    answer = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    said = json.loads(answer.stdout.splitlines()[-1])
    assert (said["step"], said["tasks"], said["samples"], said["sampling"]["temperature"]) == (5, 6, 3, 0.8)
    assert said["ledger"]["eval"]["dispatched"] == said["graded"] == 18 and said["ledger"]["instances"]["left"] == 0
    folder = tmp_path / "evals" / "global_step_5"
    assert sorted(path.name for path in folder.iterdir()) == [
        "aggregated_results.jsonl",
        "evaluation.json",
        "tracker.jsonl",
    ]
    lines = [json.loads(line) for line in (folder / "tracker.jsonl").read_text().splitlines()]
    solved = defaultdict(int)
    for line in lines:
        solved[line["env_extras"]["task_key"]] += line["score"][-1] > 0
    assert len(lines) == 18 and len(solved) == 6
    (aggregated,) = map(json.loads, (folder / "aggregated_results.jsonl").read_text().splitlines())
    assert said["results"] == aggregated and said["pass_at_1"] == aggregated["eval/tracker/pass_at_1"]
    assert aggregated["eval/all/pass_at_1"] == pytest.approx(sum(solved.values()) / 18)
    assert aggregated["eval/all/pass_at_3"] == pytest.approx(sum(n > 0 for n in solved.values()) / 6)
    assert aggregated["eval/all/pass_hat_3"] == pytest.approx(sum(n == 3 for n in solved.values()) / 6)


def test_no_batch_lags_more_than_allowed_and_the_spans_prove_it(finished):
    run, _ = finished
    for version, batch in enumerate(batches(run.folder)):
        for trajectory in batch:
            lags = [version - span[0] for span in trajectory["spans"]]
            assert all(0 <= lag <= STALENESS for lag in lags)
    assert len(batches(run.folder)) == 5
    assert any(step["staleness/max"] > 0 for step in steps(run.folder)), "nothing overlapped: the run was synchronous"


def test_trajectories_are_token_exact_over_many_turns(finished):
    run, _ = finished
    tokenizer = AutoTokenizer.from_pretrained("configs/models/tiny-tracker")
    trajectories = [t for batch in batches(run.folder) for t in batch if t["outcome"] == "graded"]
    assert any(t["turns"] > 2 for t in trajectories)
    for t in trajectories:
        assert len(t["ids"]) == len(t["mask"]) == len(t["logprobs"]) and not any(t["mask"][: t["prompt_length"]])
        assert sum(t["mask"]) == t["spans"][-1][2]
        turns = [m["content"] for m in t["messages"] if m["role"] == "assistant"]
        sampled = [i for i, kept in zip(t["ids"], t["mask"], strict=True) if kept]
        assert tokenizer.decode(sampled, skip_special_tokens=True) == "".join(turns)


def test_the_learner_agrees_with_the_engine_before_and_after_every_update(finished):
    """Tokens sampled under the very version that is trained: any difference is a bug of engine, packing or update."""
    run, _ = finished
    same_version = [s["mismatch/logp_abs_diff_mean"] for s in steps(run.folder) if "mismatch/logp_abs_diff_mean" in s]
    assert same_version and max(same_version) < 1e-3


def test_the_engines_logprobs_are_those_of_transformers_over_whole_trajectories(finished):
    run, _ = finished
    model = AutoModelForCausalLM.from_pretrained("configs/models/tiny-tracker", dtype=torch.float32).eval()
    first = [t for t in batches(run.folder)[0] if {span[0] for span in t["spans"]} == {0}]
    assert len(first) >= 8
    for t in first:
        ids = torch.tensor([t["ids"]])
        with torch.no_grad():
            logprobs = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        mask = torch.tensor(t["mask"][1:], dtype=torch.bool)
        assert (logprobs[mask] - torch.tensor(t["logprobs"][1:])[mask]).abs().mean() < 1e-3


def test_every_metric_is_in_the_table_and_the_main_ones_are_there(finished):
    run, _ = finished
    names = {name for step in steps(run.folder) for name in step} - {"step", "time"}
    assert [name for name in names if find_spec(name) is None] == []
    assert {"reward/avg_pass_at_4", "reward/tracker/signal_ratio", "environment/tracker/avg_tool_calls"} <= names
    assert {"policy/ppo_clip_ratio", "policy/policy_kl", "trainer/global_step", "leases/leased"} <= names


def test_every_role_says_where_its_time_went_and_how_late_its_loop_was(finished):
    run, _ = finished
    for role in ("learner", "rollout", "policy"):
        prefix = f"time_share/{role}/"
        shares = [[value for name, value in step.items() if name.startswith(prefix)] for step in steps(run.folder)]
        assert any(shares) and all(sum(one) == pytest.approx(1.0) and min(one) >= 0 for one in shares if one)
    late = {name.split("/")[1]: value for step in steps(run.folder) for name, value in step.items() if "/max_s" in name}
    assert late.keys() == {"rollout_worker", "conductor", "env_pool", "replay_buffer", "replica"}
    assert all(0 <= seconds < 5 for seconds in late.values())


def test_the_last_checkpoint_loads_in_transformers_and_holds_the_published_weights(finished):
    run, _ = finished
    folder = run.folder / "checkpoints" / "global_step_5" / "policy"
    model = AutoModelForCausalLM.from_pretrained(folder)
    before = AutoModelForCausalLM.from_pretrained("configs/models/tiny-tracker")
    moved = [not torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True)]
    assert any(moved)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == AutoTokenizer.from_pretrained("configs/models/tiny-tracker").chat_template


ALGORITHM = {
    "trainer.algorithm.advantage_estimator": "grpo",
    # Below the gradient norm of every step, 0.29 to 0.47 at this seed.
    "trainer.policy.optimizer_config.max_grad_norm": 0.25,
    "trainer.policy.optimizer_config.weight_decay": 0.1,
}


SYNCHRONOUS_STEPS = 7
TRAINING_PARTS = ("ray::RayTrainWorker", "ray::ReplayBuffer", "ray::Conductor")


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory):
    """An undisturbed run, and another of which a part was killed, and then all of it, and that was resumed.

    Beside each other: whatever order and batches the load brings about must not matter.
    """
    out = tmp_path_factory.mktemp("synchronous")
    keys = {"trainer.max_steps": SYNCHRONOUS_STEPS, "trainer.ckpt_interval": 1, "buffer.max_staleness": 0}
    keys |= ALGORITHM | WITHOUT_EVALUATION
    undisturbed, killed = (start("configs/demo.yaml", name, out, keys=keys) for name in ("undisturbed", "killed"))
    killed.read_until("training  step [2-9]")  # the first checkpoint is whole
    killed.kill_one(random.choice(TRAINING_PARTS))
    killed.read_until("going back  step [1-9]")
    killed.read_until("training  step [2-9]")
    time.sleep(random.uniform(0, 1.5))
    killed.kill()
    resumed = start("configs/demo.yaml", "killed", out, keys=keys | {"resume": "true"})
    for run in (undisturbed, resumed):
        text = run.output()
        assert run.process.returncode == 0, text
    return undisturbed, resumed


def policy_of(run, step=SYNCHRONOUS_STEPS):
    return AutoModelForCausalLM.from_pretrained(run.folder / "checkpoints" / f"global_step_{step}" / "policy")


@pytest.mark.timeout(900)
def test_a_synchronous_run_that_is_killed_and_resumed_is_the_undisturbed_run(synchronous):
    seen, weights = [], []
    for run in synchronous:
        summary = json.loads((run.folder / "summary.json").read_text())
        assert summary["ledger"]["train"]["balanced"]
        assert {step["staleness/max"] for step in steps(run.folder)} == {0}, "a batch was not on-policy"
        exact = ("trajectory_id", "task_key", "ids", "mask", "reward", "stop_reason", "messages")
        seen.append([[[t[key] for key in exact] for t in batch] for batch in batches(run.folder)])
        weights.append(list(policy_of(run).parameters()))
    assert summary["resumed_from_step"] >= 1
    assert seen[0] == seen[1] and len(seen[0]) == SYNCHRONOUS_STEPS
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True)), "the optimiser began afresh"


@pytest.mark.timeout(900)
def test_a_synchronous_run_is_grpo_in_one_process(synchronous):
    """The reference does what the learner did, on the tokens and rewards of the run, and its weights give those tokens
    the probabilities they were drawn with: so they came from the policy of that very step.

    Tolerances: both compute in fp32, the learner over a token tree, the reference one trajectory at a time. Their
    losses differ by 2e-7, gradient norms by 6e-6 of themselves. Adam divides a gradient by its size, so where one
    is nearly zero rounding decides its sign: three weights in 100,000 end more than 1e-5 apart (a step is 3e-4), all
    together 2e-4 of the way they went, and logprobs of later steps up to 2e-4.
    """
    run, _ = synchronous
    settings = {"lr": 3e-4, "betas": (0.9, 0.95), "weight_decay": 0.1, "max_grad_norm": 0.25}
    reference = ReferenceGrpo("configs/models/tiny-tracker", **settings)
    start = parameters_to_vector(reference.lm.parameters()).detach()
    for found, batch in zip(steps(run.folder), batches(run.folder), strict=True):
        step = reference.step(batch)
        assert found["loss/trained_tokens"] == step.tokens > 0
        assert found["policy/final_loss"] == pytest.approx(step.loss, abs=1e-5)
        assert found["policy/grad_norm"] == pytest.approx(step.grad_norm, rel=1e-4)
        assert step.grad_norm > settings["max_grad_norm"], "nothing was clipped"
        assert step.mismatch < 2e-3
    ours, theirs = (parameters_to_vector(lm.parameters()).detach() for lm in (policy_of(run), reference.lm))
    assert (ours - theirs).norm() < 2e-3 * (theirs - start).norm()


@pytest.mark.timeout(900)
def test_training_alone_on_the_batches_of_a_run_repeats_its_steps(synchronous, tmp_path):
    run, _ = synchronous
    last = SYNCHRONOUS_STEPS - 1
    keys = ALGORITHM | {"debug.train_only": run.folder, "trainer.max_steps": last}
    alone = start("configs/demo.yaml", "alone", tmp_path, keys=keys)
    text = alone.output()
    assert alone.process.returncode == 0, text
    assert json.loads(text.strip().splitlines()[-1])["steps"] == last
    names = ("policy/final_loss", "policy/grad_norm", "policy/policy_entropy", "reward/avg_raw_reward", "staleness/max")
    ours, theirs = ([[step[name] for name in names] for step in steps(folder)] for folder in (alone.folder, run.folder))
    assert ours == theirs[:last]
    weights = [list(policy_of(one, step=last).parameters()) for one in (alone, run)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    assert len(batches(alone.folder)) == last and not (alone.folder / "leases.db").exists()
    assert alone.leftovers() == []


@pytest.mark.timeout(400)
def test_rollouts_alone_keep_their_batches_and_the_policy(tmp_path):
    keys = {"debug.rollout_only": "true", "buffer.max_staleness": 1, "trainer.max_steps": 4} | WITHOUT_EVALUATION
    run = start("configs/demo.yaml", "rollouts", tmp_path, keys=keys)
    text = run.output()
    assert run.process.returncode == 0, text
    summary = json.loads(text.strip().splitlines()[-1])
    assert summary["steps"] == 4 and summary["ledger"]["train"]["balanced"]
    assert [len({t["group_id"] for t in batch}) for batch in batches(run.folder)] == [4] * 4
    assert {span[0] for batch in batches(run.folder) for t in batch for span in t["spans"]} == {0}
    lines = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4] and "policy/grad_norm" not in lines[0]
    assert [name for line in lines for name in line.keys() - {"step", "time"} if find_spec(name) is None] == []
    assert not (run.folder / "checkpoints").exists() and run.leftovers() == []


@pytest.mark.timeout(400)
@pytest.mark.parametrize("phase", ["starting", "starting the policy", "evaluating"])
def test_ctrl_c_ends_a_run_in_any_phase_and_leaves_nothing(tmp_path, phase):
    run = start("configs/demo.yaml", "stopped", tmp_path, keys={"trainer.max_steps": 500})
    run.read_until(phase)
    run.process.send_signal(signal.SIGINT)
    text = run.output(timeout_s=90)
    assert run.process.returncode == 130, text
    assert text.strip().splitlines()[-1] == "fleet-rl: stopped" and "Traceback" not in text
    assert run.leftovers() == []


def test_a_policy_that_cannot_start_ends_the_run_in_one_line_and_leaves_nothing(tmp_path):
    model = shutil.copytree("configs/models/tiny-tracker", tmp_path / "model")
    other = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(other | {"architectures": ["OfNobody"]}))
    run = start("configs/demo.yaml", "broken", tmp_path, keys={"trainer.policy.model.path": model})
    text = run.output()
    assert run.process.returncode == 1 and "Traceback" not in text, text
    assert "fleet-rl: the run failed: the policy did not start" in text
    assert run.leftovers() == []
