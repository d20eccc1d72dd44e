"""One rank of the learner: DeepSpeed does the optimiser's work, and every step ends in published weights.

Per step, rank 0 asks the replay buffer for a batch and shows it to the others; each rank fetches its share by
reference, all do one optimiser step, rank 0 publishes the weights, acknowledges the batch and reports metrics. A batch
is trained at most once: what was acknowledged after the last checkpoint is lost with a learner that dies.

The only file that imports DeepSpeed.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed.ops
import numpy as np
import ray
import ray.train
import ray.train.torch
import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from actors.lineage import Lineage
from actors.trajectory import Group, Trajectory
from serve.shared_folder import remove_abandoned
from train import buffer_state, checkpoint
from train.advantages import advantages
from train.learner import CALL_TIMEOUT_S, Batch, Job, LearnerError, LearnerSettings, Metrics, one_line
from train.learner_control import Decision
from train.losses import LossTerms, mismatch_metrics, policy_loss, token_weight
from train.metrics import batch_metrics
from train.packing import MicroBatch, PackedPolicy, Sample, dummy_micro_batch, pack, shard, split_by_tokens
from train.step_timer import StepTimer
from train.trajectory_store import TrajectoryStore
from train.trajectory_table import Origin

LATE_STEPS = 100  # whose accounts are in more than one checkpoint
GATHER_BYTES = 1 << 29  # of weights that are whole at a time under ZeRO-3
_TAG = "deepspeed"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class _Work:
    """One rank's part of a step."""

    micro_batches: list[MicroBatch]
    passes: int  # forward and backward passes of every rank
    total_weight: float  # over all ranks
    metrics: Metrics  # of the whole batch


class _Tally:
    """Collects per-token figures of one rank's micro-batches."""

    def __init__(self) -> None:
        self.sums: Metrics = dict.fromkeys(("loss", "policy", "entropy", "kl", "clipped", "tokens", "prob_diff"), 0.0)
        self.log_ratio: list[np.ndarray] = []
        self.vetoed: list[np.ndarray] = []
        self.lag: list[np.ndarray] = []

    def add(self, batch: MicroBatch, logprobs: torch.Tensor, entropies: torch.Tensor, terms: LossTerms) -> None:
        known = torch.isfinite(terms.log_ratio)
        gap = logprobs.exp() - torch.where(known, batch.behaviour, logprobs).exp()
        values = {
            "loss": terms.loss,
            "policy": terms.policy,
            "entropy": entropies.sum(),
            "kl": terms.kl.sum(),
            "clipped": terms.clipped.sum(),
            "prob_diff": gap.abs().sum(),
        }
        for name, value in values.items():
            self.sums[name] += value.item()
        self.sums["tokens"] += len(logprobs)
        self.log_ratio.append(terms.log_ratio.cpu().numpy())
        self.vetoed.append(terms.vetoed.cpu().numpy())
        self.lag.append(batch.lags.cpu().numpy())

    def merged(self) -> tuple[Metrics, np.ndarray, np.ndarray, np.ndarray]:
        return self.sums, _join(self.log_ratio), _join(self.vetoed), _join(self.lag)


class _NamedWeights:
    """The policy's tensors, whole, in the same order on every rank.

    Under ZeRO-3 each rank holds a piece of each, and a bucket of them at a time is gathered, on all ranks at once.
    """

    def __init__(self, lm: torch.nn.Module, sharded: bool) -> None:
        self._named = list(lm.named_parameters())
        self._sharded = sharded

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        return [(name, p.dtype, tuple(p.ds_shape if self._sharded else p.shape)) for name, p in self._named]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        if not self._sharded:
            yield from ((name, parameter.detach()) for name, parameter in self._named)
            return
        for bucket in self._buckets():
            with deepspeed.zero.GatheredParameters([parameter for _, parameter in bucket]):
                yield from ((name, parameter.detach()) for name, parameter in bucket)

    def _buckets(self) -> Iterator[list[tuple[str, torch.nn.Parameter]]]:
        bucket: list[tuple[str, torch.nn.Parameter]] = []
        size = 0
        for name, parameter in self._named:
            bucket.append((name, parameter))
            size += parameter.ds_numel * parameter.element_size()
            if size >= GATHER_BYTES:
                yield bucket
                bucket, size = [], 0
        if bucket:
            yield bucket


class Rank:
    """One rank: its share of the optimiser state, and the loop over steps."""

    def __init__(self, job: Job) -> None:
        settings = job.settings
        remove_abandoned()  # what a rank that was killed has left on this host
        self._settings, self._source, self._control = settings, job.source, job.control
        self._publisher, self._on_step = job.publisher, job.on_step
        self._rank = ray.train.get_context().get_world_rank()
        self._ranks = ray.train.get_context().get_world_size()
        self._device = ray.train.torch.get_device() if settings.use_gpu else torch.device("cpu")
        torch.set_num_threads(settings.threads)
        # It compiles for each new shape of attention, a tenth of a second each, and nearly every segment has its own.
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.manual_seed(settings.seed)
        # Trained so far, checkpointed so far, and the last published version.
        self._step, self._saved_step, self._version = 0, 0, 0
        self._accounts: list[Metrics] = []  # of the steps since the last checkpoint, and of some before
        # Of tokenizer and template; never a checkpoint's, which is deleted when there are newer ones.
        self._folder = _local_folder(settings.model_path)
        policy = _load_policy(_weights_folder(settings), settings)
        if settings.gradient_checkpointing:
            policy.checkpoint_activations()
        self._lm = policy.lm
        self._engine = _start_engine(policy, settings)
        self._weights = _NamedWeights(policy.lm, sharded=settings.zero_stage == 3)
        self._reference: PackedPolicy | None = None
        if settings.loss.use_kl_loss:
            reference = _load_policy(_local_folder(settings.reference_path or settings.model_path), settings)
            self._reference = reference.to(self._device).requires_grad_(False)
        if settings.resume_from is not None:
            self._resume(Path(settings.resume_from))
        self._stop_signal = self._control.stopped.remote() if self._rank == 0 else None
        kept = settings.trajectories if self._rank == 0 else None
        self._trajectories = None if kept is None else TrajectoryStore(kept)

    def run(self) -> None:
        settings = self._settings
        stopped = False
        if settings.publish_first:
            self._publish_first()
        timer = StepTimer()
        while self._step < settings.total_steps:
            with timer("wait_for_batch"):
                decision = self._decide(self._step + 1)
            if decision.batch is None:
                stopped = decision.stopped
                break
            metrics = self._train(decision.batch, timer)
            if self._rank == 0:
                metrics |= self._describe(decision.batch)
            with timer("publish"):
                metrics |= self._publish()
            if self._rank == 0:
                self._accounts.append(metrics | timer.metrics())
            if settings.checkpoint_dir is not None and self._step % settings.checkpoint_interval == 0:
                with timer("checkpoint"):
                    self._save()
            metrics |= timer.end_step()
            if self._rank == 0:
                self._on_step(metrics)
        if settings.checkpoint_dir is not None and not stopped and self._saved_step < self._step:
            self._save()
        if self._rank == 0:
            self._publisher.close()

    @property
    def has_published(self) -> bool:
        """Whether this run has, in this learner or before the checkpoint that it goes on from."""
        return self._version > 0

    def close(self) -> None:
        """Finish the record of the batches."""
        if self._trajectories is not None:
            self._trajectories.close()

    # Batches

    def _decide(self, step: int) -> Decision:
        """Rank 0 asks the buffer, the others ask rank 0."""
        timeout_s = self._settings.batch_timeout_s + CALL_TIMEOUT_S
        if self._rank != 0:
            return ray.get(self._control.announced.remote(step), timeout=timeout_s + CALL_TIMEOUT_S)
        decision = self._ask(step, timeout_s)
        if self._ranks > 1:
            ray.get(self._control.announce.remote(step, decision), timeout=CALL_TIMEOUT_S)
        return decision

    def _ask(self, step: int, timeout_s: float) -> Decision:
        if ray.wait([self._stop_signal], timeout=0)[0]:
            return self._stopped()
        answer = self._source.get_batch.remote(step, self._settings.batch_timeout_s)
        ready, _ = ray.wait([self._stop_signal, answer], num_returns=1, timeout=timeout_s)
        if self._stop_signal in ready:
            return self._stopped()
        if not ready:
            raise LearnerError(f"the replay buffer did not answer for step {step} in {timeout_s:.0f} s")
        return Decision(ray.get(answer))

    def _stopped(self) -> Decision:
        # Raises if whoever would have said so has died instead: the run must not end as if it had been asked to.
        ray.get(self._stop_signal)
        return Decision(None, stopped=True)

    def _prepare(self, batch: Batch) -> _Work:
        """Fetch this rank's groups, and agree with the others on advantages, total weight and number of passes."""
        settings = self._settings
        mine = shard([header.nbytes for header in batch["headers"]], self._ranks)[self._rank]
        groups: list[Group] = ray.get([batch["refs"][i] for i in mine], timeout=settings.batch_timeout_s)
        members = {i: group.members(settings.overlong_filtering) for i, group in zip(mine, groups, strict=True)}
        local = {i: [(t.reward, int(t.mask.sum())) for t in group] for i, group in members.items()}
        table = {i: facts for part in self._gather(local) for i, facts in part.items()}
        rewards = [[reward for reward, _ in table[i]] for i in sorted(table)]
        lengths = [[length for _, length in table[i]] for i in sorted(table)]
        if settings.shuffle_rewards:
            rewards = _shuffled(rewards, settings.seed + self._step)
        found = advantages(rewards, settings.estimator, norm_by_std=settings.norm_by_std, lengths=lengths)
        weights = _loss_weights(found, lengths, settings)
        vocabulary = self._lm.config.vocab_size
        samples = [
            sample
            for i, group in members.items()
            for trajectory, advantage, weight in zip(group, found[i], weights[i], strict=True)
            if weight
            for sample in _samples(trajectory, advantage, weight, vocabulary, batch["lineage"])
        ]
        runs = split_by_tokens(samples, settings.tokens_per_microbatch)
        return _Work(
            micro_batches=[pack(run) for run in runs],
            passes=max(self._gather(len(runs))),
            total_weight=float(np.dot(np.concatenate(weights), np.concatenate(lengths))),
            metrics=_batch_metrics(rewards, lengths, found, weights),
        )

    def _describe(self, batch: Batch) -> Metrics:
        """What the whole batch says of policy and environments; groups that carry no loss count here as well."""
        groups: list[Group] = ray.get(batch["refs"], timeout=self._settings.batch_timeout_s)
        metrics = batch_metrics(groups, self._settings.samples_per_task, batch["lineage"])
        if self._trajectories is not None:
            self._trajectories.put(groups, Origin("train", self._step, batch["lineage"].newest))
            metrics |= self._trajectories.report().metrics()
        return metrics

    # The step

    def _train(self, batch: Batch, timer: StepTimer) -> Metrics:
        """One optimiser step. Returns the metrics, in rank 0."""
        self._step += 1
        lr = self._settings.lr * min(1.0, self._step / max(1, self._settings.warmup_steps))
        with timer("forward_backward"):
            work = self._prepare(batch)
            tally = self._forward_backward(work)
        with timer("optimizer"):
            # Nothing to learn from: the weights stay, and so does the optimiser's momentum.
            grad_norm = self._update(lr) if work.passes else 0.0
        parts = self._gather(tally.merged())
        if self._rank != 0:
            return {}
        totals = {name: sum(sums[name] for sums, *_ in parts) for name in tally.sums}
        log_ratio, vetoed, lag = (_join([part[k] for part in parts]) for k in (1, 2, 3))
        tokens = max(totals["tokens"], 1.0)
        return {
            **work.metrics,
            **mismatch_metrics(log_ratio, vetoed, lag),
            "policy/final_loss": totals["loss"] / max(work.total_weight, 1.0),
            "policy/policy_loss": totals["policy"] / max(work.total_weight, 1.0),
            "policy/policy_entropy": totals["entropy"] / tokens,
            "policy/policy_kl": totals["kl"] / tokens,
            "policy/ppo_clip_ratio": totals["clipped"] / tokens,
            "policy/rollout_train_prob_diff_mean": totals["prob_diff"] / tokens,
            "policy/grad_norm": grad_norm,
            "policy/policy_lr": lr,
            "trainer/global_step": float(self._step),
        }

    def _forward_backward(self, work: _Work) -> _Tally:
        tally, settings = _Tally(), self._settings
        for number in range(work.passes):
            real = number < len(work.micro_batches)
            batch = work.micro_batches[number] if real else dummy_micro_batch()
            batch = batch.to(self._device, _DTYPES[settings.dtype])
            self._engine.set_gradient_accumulation_boundary(number == work.passes - 1)
            logprobs, entropies = self._engine(batch)
            terms = policy_loss(
                logprobs,
                entropies,
                behaviour=batch.behaviour,
                advantages=batch.advantages,
                weights=batch.weights,
                sequence=batch.sequence,
                settings=settings.loss,
                reference=self._reference_logprobs(batch),
            )
            # DeepSpeed averages gradients over the ranks; the denominator is that of all ranks and micro-batches.
            self._engine.backward(terms.loss * (self._ranks / work.total_weight))
            if real:
                tally.add(batch, logprobs.detach(), entropies.detach(), terms)
        return tally

    def _reference_logprobs(self, batch: MicroBatch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with torch.no_grad():
            return self._reference(batch)[0]

    def _update(self, lr: float) -> float:
        for group in self._engine.optimizer.param_groups:
            group["lr"] = lr
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm())
        if not np.isfinite(norm):
            raise LearnerError(
                f"step {self._step}: the gradient is not finite; its weights were neither published nor saved. "
                "Lower the learning rate, or go on from the last checkpoint"
            )
        return norm

    def _publish(self) -> Metrics:
        """Rank 0 publishes, the others assist: under ZeRO-3 the weights are whole only while all ranks gather them."""
        if self._rank != 0:
            self._publisher.assist(self._weights)
            return {}
        self._version = self._publisher(self._weights, self._step)
        ray.get(self._source.ack.remote(self._step, self._version), timeout=CALL_TIMEOUT_S)
        return dict(self._publisher.last) | {"sync/version": float(self._version)}

    def _publish_first(self) -> None:
        """The weights that are resumed, under a version of their own, before any batch is asked for."""
        if self._rank != 0:
            self._publisher.assist(self._weights)
            return
        self._version = self._publisher(self._weights, self._step)
        self._publisher.settle()
        ray.get(self._control.published_first.remote(self._version), timeout=CALL_TIMEOUT_S)

    # Checkpoints

    def _save(self) -> None:
        """Write ``global_step_N``. All ranks take part; they must see one file system."""
        settings, root = self._settings, Path(self._settings.checkpoint_dir)
        if self._rank == 0:
            checkpoint.begin(root, self._step, self._checkpoint_bytes())
        dist.barrier()
        folder = checkpoint.staging(root, self._step)
        if settings.save_optimizer:
            with checkpoint.readable_errors(folder):
                self._engine.save_checkpoint(str(folder / checkpoint.OPTIMIZER), tag=_TAG, save_latest=False)
            dist.barrier()
        with self._gathered():
            if self._rank == 0:
                checkpoint.export_policy(folder / checkpoint.POLICY, self._lm, self._folder)
        if self._rank == 0:
            self._save_buffer(folder)
            facts = {"policy_version": self._version, "ranks": self._ranks, "zero_stage": settings.zero_stage}
            checkpoint.commit(root, self._step, facts | {"dtype": settings.dtype, "optimizer": settings.save_optimizer})
            checkpoint.prune(root, settings.checkpoints_kept)
        self._saved_step = self._step
        dist.barrier()

    def _save_buffer(self, folder: Path) -> None:
        """Between a batch's acknowledgement and the next one, when what the buffer says fits the weights."""
        state, payloads = ray.get(self._source.state.remote(), timeout=CALL_TIMEOUT_S)
        groups = ray.get(list(payloads.values()), timeout=self._settings.batch_timeout_s)
        with checkpoint.readable_errors(folder):
            origin = Origin("train", self._step, self._version)
            buffer_state.write(folder, state, dict(zip(payloads, groups, strict=True)), origin)
            # Whoever follows the run may be late, and die before it has heard of these steps.
            (folder / checkpoint.STEPS).write_text(json.dumps(self._accounts), encoding="utf-8")
        self._accounts = self._accounts[-LATE_STEPS:]

    def _gathered(self) -> Any:
        """Under ZeRO-3, the whole weights on every rank for as long as the context lasts."""
        return deepspeed.zero.GatheredParameters(list(self._lm.parameters()), enabled=self._settings.zero_stage == 3)

    def _checkpoint_bytes(self) -> int:
        sizes = [(math.prod(shape), dtype.itemsize) for _, dtype, shape in self._weights.metadata()]
        weights = sum(number * size for number, size in sizes)
        # DeepSpeed writes the weights again, and three fp32 numbers per weight: master copy and two moments.
        state = weights + 12 * sum(number for number, _ in sizes) if self._settings.save_optimizer else 0
        return int(1.1 * (weights + state))

    def _resume(self, path: Path) -> None:
        manifest = checkpoint.read_manifest(path)
        if manifest is None:
            raise LearnerError(f"{path} is not a complete checkpoint")
        if not manifest["optimizer"]:
            raise LearnerError(
                f"{path} holds no optimiser state; to start afresh from its weights, set model_path to {path}/policy"
            )
        here = {"ranks": self._ranks, "zero_stage": self._settings.zero_stage, "dtype": self._settings.dtype}
        there = {name: manifest[name] for name in here}
        if here != there:
            raise LearnerError(f"{path} was written with {there}; the learner has {here}: they must be the same")
        self._engine.load_checkpoint(str(path / checkpoint.OPTIMIZER), tag=_TAG)
        self._step = self._saved_step = manifest["step"]
        self._version = manifest["policy_version"]

    def _gather(self, item: Any) -> list[Any]:
        """``item`` of every rank, in rank order."""
        if self._ranks == 1:
            return [item]
        items: list[Any] = [None] * self._ranks
        dist.all_gather_object(items, item)
        return items


def _join(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays) if arrays else np.empty(0)


def _loss_weights(found: list[np.ndarray], lengths: list[list[int]], settings: LearnerSettings) -> list[list[float]]:
    """Weight of every token of every trajectory; 0 leaves the trajectory out.

    Without a penalty, a trajectory of advantage zero has neither loss nor gradient: it need not be encoded.
    """
    penalised = settings.loss.use_kl_loss or settings.loss.entropy_coef != 0
    return [
        [
            token_weight(n, settings.loss.reduction) if n and (penalised or a) else 0.0
            for a, n in zip(*pair, strict=True)
        ]
        for pair in zip(found, lengths, strict=True)
    ]


def _samples(
    trajectory: Trajectory, advantage: float, weight: float, vocabulary: int, lineage: Lineage
) -> list[Sample]:
    """One for each of the trajectory's sequences in which something was sampled."""
    trajectory.validate()
    if int(trajectory.ids.max()) >= vocabulary or int(trajectory.ids.min()) < 0:
        raise LearnerError(f"{trajectory.trajectory_id}: an id is not in the vocabulary of {vocabulary}")
    samples = []
    for part in trajectory.sequences():
        mask = trajectory.mask[part]
        # A token drawn after an update attends to keys and values that older weights computed: its logprob is that of
        # no single version. What it can be compared with is decided by the oldest version before it, the trajectory's
        # first.
        if mask.any():
            lags = np.full(int(mask.sum()), lineage.lag(trajectory.oldest_version), dtype=np.int64)
            ids, logprobs = trajectory.ids[part], trajectory.logprobs[part]
            samples.append(Sample(ids, mask, logprobs, lags, float(advantage), weight))
    return samples


def _shuffled(rewards: list[list[float]], seed: int) -> list[list[float]]:
    """The same rewards, dealt anew over the whole batch."""
    flat = np.random.default_rng(seed).permutation(np.concatenate(rewards))
    return [part.tolist() for part in np.split(flat, np.cumsum([len(group) for group in rewards])[:-1])]


def _batch_metrics(
    rewards: list[list[float]], lengths: list[list[int]], found: list[np.ndarray], weights: list[list[float]]
) -> Metrics:
    flat_weights, flat_lengths = np.concatenate(weights), np.concatenate(lengths)
    trained = flat_weights > 0
    every = np.concatenate(found)
    return {
        "policy/response_length": float(flat_lengths[trained].mean()) if trained.any() else 0.0,
        "loss/avg_final_rewards": float(np.concatenate(rewards).mean()),
        "loss/avg_raw_advantages": float(every.mean()),
        "loss/avg_raw_advantages_abs": float(np.abs(every).mean()),
        "loss/trained_tokens": float(flat_lengths[trained].sum()),
        "loss/trained_groups": float(sum(any(group) for group in weights)),
    }


def _local_folder(path: str) -> Path:
    """A model folder on this machine; a hub name is downloaded."""
    return Path(path) if Path(path).is_dir() else Path(snapshot_download(path))


def _weights_folder(settings: LearnerSettings) -> Path:
    if settings.resume_from is not None:
        return Path(settings.resume_from) / checkpoint.POLICY
    return _local_folder(settings.model_path)


def _load_policy(folder: Path, settings: LearnerSettings) -> PackedPolicy:
    transformers_logging.disable_progress_bar()
    try:
        lm = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[settings.dtype])
        return PackedPolicy(lm, settings.temperature, entropy_gradient=settings.loss.entropy_coef != 0).train()
    except (OSError, ValueError) as error:
        raise LearnerError(f"model {folder} cannot be loaded: {one_line(error)}") from error


def _start_engine(policy: PackedPolicy, settings: LearnerSettings) -> Any:
    """Give the model to DeepSpeed. Ray Train has set up the process group and the accelerator's environment."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch renames; nothing a user could act on.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    # Without this, DeepSpeed compiles a shared-memory all-reduce in C++ at every first start on a CPU: minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    matrices = [p for p in policy.parameters() if p.dim() >= 2]
    vectors = [p for p in policy.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.adam_eps,
        fused=settings.use_gpu,
    )
    config = {
        "train_micro_batch_size_per_gpu": 1,
        # The number of micro-batches changes from step to step: we set the boundary and the scale ourselves.
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1 << 60,
    }
    if settings.zero_stage == 3:
        # Used outside of its own module's forward pass, where DeepSpeed would not gather it.
        deepspeed.zero.register_external_parameter(policy, policy.lm.get_output_embeddings().weight)
    engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=config, dist_init_required=False)
    return engine
