"""The learner under Ray Train and DeepSpeed, against a plain single-process torch loop over the same batches."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.replay_buffer import ReplayBuffer
from actors.replay_buffer_core import GroupHeader
from actors.trajectory import Graded, Group, Span, StopReason, Trajectory
from benchmarks.processes import children, command_line
from serve.ray_start import start_ray
from serve.weight_routes import RouteError
from tests.models import tiny_qwen3
from train import checkpoint, learner
from train.batch_keeper import BatchKeeper
from train.failures import RunFailed, Unmendable
from train.kept_batches import KeptBatches
from train.learner import LearnerError, LearnerHandle, LearnerSettings
from train.losses import LossSettings
from train.shared_run_dir import NAME, has_mark, mark_folder
from train.trajectory_store import StoreSettings, TrajectoryStore

VOCAB = 320
GROUPS = 3  # over two ranks: 2 and 1
SETTINGS = {
    "lr": 1e-3,
    # Large enough that an update depends smoothly on the gradient, so that rounding does not decide its sign.
    "adam_eps": 1e-5,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "warmup_steps": 2,
    "temperature": 0.9,
    "dtype": "float32",
    "tokens_per_microbatch": 120,
    "total_steps": 3,
    "checkpoint_interval": 1,
    "batch_timeout_s": 100.0,
}
DEADLINE_S = 120.0


@pytest.fixture(scope="module", autouse=True)
def _ray():
    start_ray("local", num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    torch.set_num_threads(1)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory) -> Path:
    return tiny_qwen3(tmp_path_factory.mktemp("model"), vocab_size=VOCAB)


def _logprobs(lm, ids: np.ndarray, temperature: float) -> torch.Tensor:
    """Log-probability of every token but the first, from an ordinary forward pass."""
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = lm(input_ids=tokens[None]).logits[0, :-1].float() / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[1:, None]).squeeze(1)


def _group(number: int, lm, samples: int = 4, equal_rewards: bool = False) -> Group:
    """A group of two-turn trajectories; behaviour logprobs are the model's, disturbed so that some ratios clip.

    The second one rewrote its history: a second sequence repeats part of the first as context and adds a turn.
    """
    rng = np.random.default_rng(number)
    prompt = np.concatenate([np.arange(30), rng.integers(0, VOCAB, 5 + 3 * (number % 4))])
    trajectories = []
    for s in range(samples):
        turns = [rng.integers(0, VOCAB, n) for n in rng.integers(2, 12, 3)]
        sequences = [([prompt, *turns], [0, 1, 0, 1])]
        if s == 1:
            sequences.append(([prompt, turns[2], rng.integers(0, VOCAB, 4), rng.integers(0, VOCAB, 5)], [0, 0, 0, 1]))
        ids = [np.concatenate(parts).astype(np.int32) for parts, _ in sequences]
        mask = np.concatenate([np.repeat(kept, list(map(len, parts))) for parts, kept in sequences]).astype(np.uint8)
        with torch.no_grad():
            scored = [_logprobs(lm, one, SETTINGS["temperature"]).numpy() for one in ids]
        exact = np.concatenate([part for one in scored for part in ([0.0], one)])
        logprobs = np.where(mask, exact + rng.normal(0, 0.2, len(mask)), 0).astype(np.float32)
        reward = 1.0 if equal_rewards else float(s % 2 or number % 2 and s == 0)
        trajectories.append(
            Trajectory(
                trajectory_id=f"{number}-{s}",
                task_key=f"task-{number}",
                env_key="env",
                group_id=number,
                sample_index=s,
                ids=np.concatenate(ids),
                starts=[0, len(ids[0])][: len(ids)],
                mask=mask,
                logprobs=logprobs,
                prompt_length=len(prompt),
                spans=[Span(0, 0, int(mask.sum()))],
                stop_reason=StopReason.DONE,
                outcome=Graded(reward),
            )  # fmt: skip
        )
    return Group(number, f"task-{number}", "env", trajectories)


@pytest.fixture(scope="module")
def groups(model_path) -> list[Group]:
    """Two batches of three groups; the last group of each has equal rewards and is not trained on."""
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    return [_group(n, lm, samples=4 + n % 2, equal_rewards=n % GROUPS == GROUPS - 1) for n in range(2 * GROUPS)]


def _buffer(groups: list[Group], batch_size: int = GROUPS):
    buffer = ReplayBuffer.remote(
        {"batch_size": batch_size, "max_staleness": 8, "max_running": 100, "max_bytes": 1 << 30}
    )
    _commit(buffer, groups)
    return buffer


def _commit(buffer, groups: list[Group]) -> None:
    for group in groups:
        ((ticket, _),) = ray.get(buffer.issue.remote(10))
        ray.get(buffer.start.remote([(ticket, group.task_key, [t.trajectory_id for t in group.trajectories])]))
        commit = buffer.commit.remote([(ticket, GroupHeader.of(group, True), ray.put(group))])
        assert ray.get(commit) == ["buffered"]


class FilePublisher:
    """Publishes to files: ``step-N.safetensors``. ``delay_s`` makes it a slow one."""

    def __init__(self, folder: Path, delay_s: float = 0.0) -> None:
        self.folder, self.delay_s = folder, delay_s
        self.last = {"sync/update_s": delay_s}

    def __call__(self, weights, step: int) -> int:
        # Cloned: under ZeRO-3 a tensor is whole only in its turn.
        save_file({name: tensor.clone() for name, tensor in weights}, self.folder / f"step-{step}.safetensors")
        time.sleep(self.delay_s)
        return step

    def assist(self, weights) -> None:
        for _ in weights:
            pass

    def close(self) -> None:
        pass


@ray.remote(num_cpus=0)
class Steps:
    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def add(self, metrics: dict[str, float]) -> None:
        self.metrics.append(metrics)

    def all(self) -> list[dict[str, float]]:
        return self.metrics


class Reporter:
    def __init__(self, steps) -> None:
        self.steps = steps

    def __call__(self, metrics: dict[str, float]) -> None:
        ray.get(self.steps.add.remote(metrics))


class Run:
    """One learner run in its own folder."""

    def __init__(self, folder: Path, model_path: Path, buffer, publish_s: float = 0.0, **settings) -> None:
        self.folder, self.buffer, self.steps = folder, buffer, Steps.remote()
        folder.mkdir(parents=True, exist_ok=True)
        defaults = {"model_path": str(model_path), "run_dir": str(folder), "run_name": folder.name, **SETTINGS}
        publisher, reporter = FilePublisher(folder, publish_s), Reporter(self.steps)
        self.handle = LearnerHandle(LearnerSettings(**(defaults | settings)), buffer, publisher, reporter)
        self.handle.start()

    def wait(self, condition) -> None:
        """Until ``condition()`` holds, while the learner runs."""
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert not self.handle.join(0.1), "the learner ended"
            assert time.monotonic() < deadline

    def end(self) -> None:
        assert self.handle.join(DEADLINE_S), "the learner did not end"

    def fails(self) -> str:
        with pytest.raises(LearnerError) as failure:
            self.handle.join(DEADLINE_S)
        assert self.handle.done
        return str(failure.value)

    def weights(self, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / f"step-{step}.safetensors")

    @property
    def metrics(self) -> list[dict[str, float]]:
        return ray.get(self.steps.all.remote())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, model_path, groups) -> Run:
    """Two steps, after which the buffer drains."""
    folder = tmp_path_factory.mktemp("two_ranks")
    run = Run(folder, model_path, _buffer(groups), num_workers=2, checkpoint_dir=str(folder / "ckpt"))
    run.wait(lambda: len(run.metrics) == 2)
    ray.get(run.buffer.drain.remote("the run ends"))
    run.end()
    return run


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory, model_path, groups) -> Run:
    """The same two steps, after which a third batch is asked for in vain."""
    folder = tmp_path_factory.mktemp("one_rank")
    run = Run(folder, model_path, _buffer(groups), checkpoint_dir=str(folder / "ckpt"), batch_timeout_s=4.0)
    run.wait(lambda: len(run.metrics) == 2)
    return run


def _clipped(ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    return torch.minimum(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.28) * advantage)


def _reference_weights(model_path: Path, batches: list[list[Group]]) -> list[dict[str, torch.Tensor]]:
    """Weights after each step of an ordinary training loop: one forward pass per trajectory, torch's AdamW."""
    lm = AutoModelForCausalLM.from_pretrained(model_path)
    decayed = [p for p in lm.parameters() if p.dim() >= 2]
    plain = [p for p in lm.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": SETTINGS["weight_decay"]}, {"params": plain, "weight_decay": 0.0}],
        betas=(0.9, 0.95), eps=SETTINGS["adam_eps"],
    )  # fmt: skip
    history = []
    for step, batch in enumerate(batches, start=1):
        trained = []
        for group in batch:
            mean = np.mean([t.reward for t in group.trajectories])
            trained += [(t, t.reward - mean) for t in group.trajectories if abs(t.reward - mean) > 1e-9]
        tokens = sum(int(t.mask.sum()) for t, _ in trained)
        loss = 0.0
        for trajectory, advantage in trained:
            ends = [*trajectory.starts[1:], len(trajectory.ids)]
            for begin, end in zip(trajectory.starts, ends, strict=True):
                chosen = torch.from_numpy(trajectory.mask[begin + 1 : end] == 1)
                logprobs = _logprobs(lm, trajectory.ids[begin:end], SETTINGS["temperature"])[chosen]
                ratio = (logprobs - torch.from_numpy(trajectory.logprobs[begin + 1 : end])[chosen]).exp()
                loss = loss - _clipped(ratio, float(advantage)).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), SETTINGS["max_grad_norm"])
        for parameters in optimizer.param_groups:
            parameters["lr"] = SETTINGS["lr"] * min(1, step / SETTINGS["warmup_steps"])
        optimizer.step()
        history.append({name: p.detach().clone() for name, p in lm.named_parameters()})
    return history


def _largest_gap(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


RANK, CONTROLLER = "RayTrainWorker", "TrainController"


def _learner_processes(*names: str) -> list[str]:
    """Ray Train's processes of these names below this one: the raylet is our child."""
    found = [command_line(process) for process in children()]
    return [process for process in found if any(name in process for name in names or (RANK,))]


def _learner_leaves_nothing() -> bool:
    """The death of actors that were killed is followed by that of their processes."""
    deadline = time.monotonic() + DEADLINE_S
    while _learner_processes(RANK, CONTROLLER) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not _learner_processes(RANK, CONTROLLER)


def test_two_ranks_with_uneven_shards_train_like_a_plain_torch_loop(two_ranks, model_path, groups):
    expected = _reference_weights(model_path, [groups[:GROUPS], groups[GROUPS:]])
    start = dict(AutoModelForCausalLM.from_pretrained(model_path).named_parameters())
    assert _largest_gap(expected[1], start) > 1e-4
    for step in (1, 2):
        assert _largest_gap(two_ranks.weights(step), expected[step - 1]) < 1e-5


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_zero_3_publishes_and_saves_whole_weights_that_a_plain_torch_loop_trains(tied, tmp_path, groups):
    """The output head is used outside of its module, or is the embedding: both are in pieces until gathered."""
    model = tiny_qwen3(tmp_path / "model", vocab_size=VOCAB, tied=tied)
    expected = _reference_weights(model, [groups[:GROUPS], groups[GROUPS:]])
    run = Run(
        tmp_path / "run",
        model,
        _buffer(groups),
        num_workers=2,
        zero_stage=3,
        total_steps=2,
        checkpoint_interval=2,
        checkpoint_dir=str(tmp_path / "ckpt"),
    )
    run.end()
    for step in (1, 2):
        assert _largest_gap(run.weights(step), expected[step - 1]) < 1e-5
    saved = AutoModelForCausalLM.from_pretrained(checkpoint.latest_complete(tmp_path / "ckpt") / checkpoint.POLICY)
    assert _largest_gap(dict(saved.named_parameters()), run.weights(2)) == 0.0


def test_every_step_is_acknowledged_and_reported(two_ranks, groups):
    state = ray.get(two_ranks.buffer.snapshot.remote())
    assert (state["version"], state["trained"], state["training"]) == (2, 2 * GROUPS, 0)
    first, second = two_ranks.metrics
    assert (first["trainer/global_step"], second["trainer/global_step"]) == (1.0, 2.0)
    assert (first["policy/policy_lr"], second["policy/policy_lr"]) == (pytest.approx(5e-4), pytest.approx(1e-3))
    assert first["loss/trained_groups"] == GROUPS - 1  # one group has equal rewards
    trained = [t for group in groups[: GROUPS - 1] for t in group.trajectories]
    assert first["loss/trained_tokens"] == sum(int(t.mask.sum()) for t in trained)
    rewards = [t.reward for group in groups[:GROUPS] for t in group.trajectories]
    assert first["loss/avg_final_rewards"] == pytest.approx(np.mean(rewards))
    assert 0 < first["policy/ppo_clip_ratio"] < 1
    # The behaviour logprobs are those of version 0 with noise of standard deviation 0.2: mean 0.16.
    assert first["mismatch/logp_abs_diff_mean"] == pytest.approx(0.16, abs=0.04)
    assert "mismatch/lag_1/logp_abs_diff_mean" in second and "mismatch/logp_abs_diff_mean" not in second
    for name in ("wait_for_batch", "forward_backward", "optimizer", "publish", "checkpoint", "step"):
        assert second[f"timing/{name}"] >= 0
    shares = [value for name, value in second.items() if name.startswith("time_share/learner/")]
    assert len(shares) == 5 and sum(shares) == pytest.approx(1.0)
    assert all(math.isfinite(value) for value in (first | second).values())


def test_checkpoint_is_whole_and_loads_in_transformers(two_ranks, model_path):
    folder = checkpoint.latest_complete(two_ranks.folder / "ckpt")
    assert folder.name == "global_step_2"
    assert checkpoint.verify(folder) == []
    assert checkpoint.read_manifest(folder)["policy_version"] == 2
    reloaded = AutoModelForCausalLM.from_pretrained(folder / checkpoint.POLICY)
    assert _largest_gap(dict(reloaded.named_parameters()), two_ranks.weights(2)) == 0.0
    messages = [{"role": "user", "content": "hello"}]
    before, after = (AutoTokenizer.from_pretrained(path) for path in (model_path, folder / checkpoint.POLICY))
    assert before.apply_chat_template(messages)["input_ids"] == after.apply_chat_template(messages)["input_ids"]


def test_one_rank_equals_two_and_fails_by_name_when_no_batch_comes(one_rank, two_ranks):
    (controller,) = (process for process in children() if CONTROLLER in command_line(process))
    libraries = {Path(mapped.path).name.partition(".")[0] for mapped in controller.memory_maps()}
    assert "libtorch_cpu" in libraries and "_safetensors_rust" not in libraries, "it loads what only ranks need"
    assert _learner_processes("AutoscalingCoordinator") == []

    message = "no batch for step 3 in 4 s: 0 of 3 groups are buffered; no ticket is out, 27 could be given"
    assert one_rank.fails() == message
    for step in (1, 2):
        assert _largest_gap(one_rank.weights(step), two_ranks.weights(step)) < 1e-6


def test_resumed_run_equals_the_unbroken_one_until_a_broken_trajectory_ends_it_with_its_name(
    one_rank, model_path, groups, tmp_path
):
    run = Run(
        tmp_path / "resumed", model_path, _buffer(groups[GROUPS:]), checkpoint_dir=str(tmp_path / "ckpt"),
        checkpoint_interval=10, resume_from=str(one_rank.folder / "ckpt" / "global_step_1"),
    )  # fmt: skip
    run.wait(lambda: run.metrics)
    assert _largest_gap(run.weights(2), one_rank.weights(2)) == 0.0

    broken = replace(groups[0].trajectories[0], trajectory_id="broken-one", ids=groups[0].trajectories[0].ids + VOCAB)
    _commit(run.buffer, [replace(groups[0], trajectories=[broken, *groups[0].trajectories[1:]]), *groups[1:GROUPS]])
    assert run.fails() == f"broken-one: an id is not in the vocabulary of {VOCAB}"
    assert _learner_leaves_nothing()
    assert [m["trainer/global_step"] for m in run.metrics] == [2.0]
    assert ray.get(run.buffer.snapshot.remote())["trained"] == GROUPS
    assert checkpoint.latest_complete(tmp_path / "ckpt") is None


def test_learning_rate_zero_leaves_bf16_weights_bit_identical_and_ranks_that_wait_are_stopped(
    model_path, groups, tmp_path
):
    """One of the two ranks has no group."""
    run = Run(
        tmp_path / "frozen", model_path, _buffer(groups[:1], batch_size=1), num_workers=2, dtype="bfloat16", lr=0.0,
        total_steps=2, loss=LossSettings(use_kl_loss=True, entropy_coef=0.01),
    )  # fmt: skip
    run.wait(lambda: run.metrics)
    begun = time.monotonic()
    run.handle.stop(DEADLINE_S)
    assert run.handle.join(0) and time.monotonic() - begun < 20
    assert _learner_leaves_nothing()
    (metrics,) = run.metrics
    assert metrics["policy/grad_norm"] > 0
    assert metrics["policy/policy_kl"] == pytest.approx(0.0, abs=1e-6)  # the reference is the policy itself
    start = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    trained = run.weights(1)
    for name, parameter in start.named_parameters():
        assert torch.equal(trained[name], parameter), name


def _lottery(lm, batch: int, prize: np.ndarray) -> list[Group]:
    """Four groups of 16 on-policy trajectories of one token each; who draws a token of ``prize`` is rewarded."""
    rng = np.random.default_rng(batch)
    groups = []
    for number in range(4 * batch, 4 * batch + 4):
        prompt = np.arange(10 + number % 4, dtype=np.int32)
        probabilities = _next_token(lm, prompt)
        tokens = rng.choice(VOCAB, 16, p=probabilities / probabilities.sum())
        trajectories = [
            Trajectory(
                trajectory_id=f"{number}-{sample}",
                task_key=f"task-{number}",
                env_key="env",
                group_id=number,
                sample_index=sample,
                ids=np.append(prompt, np.int32(token)),
                mask=np.append(np.zeros(len(prompt)), 1).astype(np.uint8),
                logprobs=np.append(np.zeros(len(prompt)), np.log(probabilities[token])).astype(np.float32),
                prompt_length=len(prompt),
                spans=[Span(batch, 0, 1)],
                stop_reason=StopReason.DONE,
                outcome=Graded(float(prize[token])),
            )
            for sample, token in enumerate(tokens)
        ]
        groups.append(Group(number, f"task-{number}", "env", trajectories))
    return groups


def _next_token(lm, prompt: np.ndarray) -> np.ndarray:
    with torch.no_grad():
        logits = lm(input_ids=torch.from_numpy(prompt.astype(np.int64))[None]).logits[0, -1].double()
    return torch.softmax(logits / SETTINGS["temperature"], dim=-1).numpy()


class Lottery:
    """A learner that is fed on-policy lotteries; the chance of a rewarded token is exact, from its weights."""

    STEPS = 10
    PRIZE = np.arange(VOCAB) % 2 == 0

    def __init__(self, folder: Path, model_path: Path, **settings) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(model_path)
        settings = {"total_steps": self.STEPS, "lr": 3e-3, "weight_decay": 0.0} | settings
        self.run = Run(folder, model_path, _buffer([], batch_size=4), **settings)

    @property
    def chance(self) -> float:
        return float(np.mean([_next_token(self.lm, np.arange(10 + n))[self.PRIZE].sum() for n in range(4)]))

    def draw(self, step: int) -> None:
        _commit(self.run.buffer, _lottery(self.lm, step - 1, self.PRIZE))

    def learn(self, step: int) -> None:
        if step < self.STEPS:
            self.run.wait(lambda: len(self.run.metrics) == step)
        else:
            self.run.end()
        self.lm.load_state_dict(self.run.weights(step), strict=False)


def test_rewards_are_learned_and_shuffled_rewards_are_not(model_path, tmp_path):
    rewarded = Lottery(tmp_path / "rewarded", model_path)
    shuffled = Lottery(tmp_path / "shuffled", model_path, shuffle_rewards=True)
    before = rewarded.chance
    for step in range(1, Lottery.STEPS + 1):
        for lottery in (rewarded, shuffled):
            lottery.draw(step)
        for lottery in (rewarded, shuffled):
            lottery.learn(step)
    assert before == pytest.approx(0.5, abs=0.05)
    assert rewarded.chance > 0.8
    assert abs(shuffled.chance - before) < (rewarded.chance - before) / 3


@pytest.mark.parametrize(
    ("error", "has_published", "kind"),
    [
        (RouteError("ipc is not possible here"), False, Unmendable),
        (RouteError("ipc is not possible any more"), True, RunFailed),
        (ValueError("a moment's"), False, RunFailed),
    ],
)
def test_a_failure_that_would_come_again_is_told_from_others(error, has_published, kind, tmp_path, monkeypatch):
    def run():
        raise error

    rank = SimpleNamespace(run=run, has_published=has_published, close=lambda: None)
    monkeypatch.setattr("train.learner_rank.Rank", lambda job: rank)
    monkeypatch.setattr(learner, "_fit", lambda job, on_controller: learner._train_loop({"job": ray.put(job)}))
    refused = Run(tmp_path / "refused", tmp_path, _buffer([]))
    with pytest.raises(LearnerError) as failure:
        refused.handle.join(DEADLINE_S)
    assert type(failure.value.of_run()) is kind and str(error) in str(failure.value.of_run())


def test_a_rank_that_does_not_find_the_drivers_folder_says_where_it_must_lie(tmp_path, monkeypatch):
    def elsewhere(job, on_controller):
        (Path(job.settings.run_dir) / NAME).write_text("of a run before, on another host")
        learner._train_loop({"job": ray.put(job)})

    monkeypatch.setattr(learner, "_fit", elsewhere)
    lost = Run(tmp_path / "lost", tmp_path, _buffer([]), run_dir_timeout_s=0.1)
    with pytest.raises(
        LearnerError, match="lost is not the driver's on host .* storage that all hosts share"
    ) as failure:
        lost.handle.join(DEADLINE_S)
    assert type(failure.value.of_run()) is Unmendable


def test_a_mark_that_is_seen_late_is_waited_for(tmp_path):
    mark = mark_folder(tmp_path)
    assert has_mark(tmp_path, mark, 0)
    (tmp_path / NAME).rename(tmp_path / "not yet")
    threading.Timer(0.2, (tmp_path / "not yet").rename, [tmp_path / NAME]).start()
    assert has_mark(tmp_path, mark, 30)


def test_a_learner_that_can_no_more_be_told_to_stop_fails_instead_of_ending_as_if_it_had_been(
    model_path, groups, tmp_path
):
    run = Run(tmp_path / "headless", model_path, _buffer(groups[:GROUPS]), total_steps=9)
    run.wait(lambda: run.metrics)
    ray.kill(ray.get_actor("headless:learner-control"))
    assert "headless:learner-control" in run.fails()


def test_a_rank_that_hangs_is_killed_by_stop(model_path, groups, tmp_path):
    run = Run(tmp_path / "hanging", model_path, _buffer(groups[:GROUPS]), publish_s=10 * DEADLINE_S)
    run.wait((run.folder / "step-1.safetensors").exists)
    run.handle.stop(1)
    assert run.fails() == "it was killed: it had not stopped after 1 s"
    assert _learner_leaves_nothing()


def test_a_learner_that_is_killed_leaves_its_place_to_another_one(model_path, groups, tmp_path):
    place = {"CPU": 0.75 * ray.cluster_resources()["CPU"]}
    run = Run(tmp_path / "killed", model_path, _buffer(groups[:GROUPS]), total_steps=9, resources_per_worker=place)
    run.wait(lambda: run.metrics)
    assert run.handle.kill("another one is to come")
    assert run.handle.done and run.fails() == "another one is to come"
    assert _learner_leaves_nothing()
    deadline = time.monotonic() + DEADLINE_S
    while ray.available_resources().get("CPU", 0) < place["CPU"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_a_learner_that_finds_no_room_is_ended_by_stop(model_path, groups, tmp_path):
    place = {"CPU": 1000.0}
    run = Run(tmp_path / "waiting", model_path, _buffer([]), resources_per_worker=place, publish_first=True)
    deadline = time.monotonic() + DEADLINE_S
    while not _learner_processes(CONTROLLER):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with pytest.raises(LearnerError, match="it had published nothing after 1 s"):
        run.handle.first_version(1)
    run.handle.stop(1)
    assert run.handle.done
    assert run.fails() == "it was stopped before it had begun"
    with pytest.raises(LearnerError, match="it was stopped before it had begun"):
        run.handle.first_version(1)
    assert _learner_leaves_nothing()


def test_where_nothing_is_trained_batches_are_kept_until_none_comes(groups, tmp_path):
    settings = LearnerSettings("m", "r", "keeper", total_steps=3, batch_timeout_s=2.0)
    buffer, described = _buffer(groups), []
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    keeper = BatchKeeper(settings, buffer, store, described.append)
    keeper.start()
    with pytest.raises(LearnerError, match="no batch for step 3 in 2 s: 0 of 3 groups are buffered"):
        keeper.join(DEADLINE_S)
    store.close()
    kept = [KeptBatches(str(tmp_path), overlong_filtering=True).read(number)[0] for number in (1, 2)]
    assert [t.trajectory_id for batch in kept for group in batch for t in group.trajectories] == [
        t.trajectory_id for group in groups for t in group.trajectories
    ]
    assert [metrics["trainer/global_step"] for metrics in described] == [1.0, 2.0]
    state = ray.get(buffer.snapshot.remote())
    assert (state["trained_steps"], state["trained"], state["version"]) == (2, 2 * GROUPS, 0)


def test_a_keeper_that_waits_is_stopped(groups, tmp_path):
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    settings = LearnerSettings("m", "r", "keeper", total_steps=2, batch_timeout_s=100.0)
    described = []
    keeper = BatchKeeper(settings, _buffer(groups[:GROUPS]), store, described.append)
    keeper.start()
    deadline = time.monotonic() + DEADLINE_S
    while not described:
        assert not keeper.join(0.05) and time.monotonic() < deadline
    keeper.stop(DEADLINE_S)
    assert keeper.join(0) and len(described) == 1
    store.close()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float16"}, "dtype 'float16'"),
        ({"zero_stage": 4}, "ZeRO stage 4"),
        ({"temperature": 0.0}, "temperature 0.0"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(wrong, message):
    with pytest.raises(LearnerError, match=message):
        LearnerSettings(model_path="m", run_dir="r", run_name="n", total_steps=1, **wrong)
