"""The learner, seen from outside: its settings, and a handle that starts its ranks under Ray Train and ends them.

What a rank does is in ``train/learner_rank.py``, which only the ranks' own processes import.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from actors.lineage import Lineage
from serve.quick_loading import quick_loading
from serve.weight_routes import RouteError
from train.advantages import Estimator
from train.beside import Beside
from train.failures import RunFailed, Unmendable
from train.learner_control import LearnerControl
from train.losses import LossSettings
from train.shared_run_dir import has_mark, mark_folder
from train.trajectory_store import StoreSettings

if TYPE_CHECKING:
    import torch

Metrics = dict[str, float]

# Calls to our own small actors answer at once unless something is broken.
CALL_TIMEOUT_S = 60.0
# Ray Train looks after its workers this often; it bounds how long the end of a run goes unnoticed.
WATCH_INTERVAL_S = 0.5
ABORT_TIMEOUT_S = 30.0
MAX_REASON = 500  # characters of an error that are shown
_DIED = "worker process has died"  # what Ray says, with half a page around it


class LearnerError(RuntimeError):
    """The learner cannot go on; the message is the reason, in one line.

    Attributes:
        unmendable: another one would fail for the same reason.
    """

    def __init__(self, reason: str, unmendable: bool = False) -> None:
        super().__init__(reason, unmendable)
        self.unmendable = unmendable

    def __str__(self) -> str:
        return self.args[0]

    def of_run(self) -> RunFailed:
        """What it means for the run."""
        return (Unmendable if self.unmendable else RunFailed)(f"learner: {self}")


@dataclass(frozen=True)
class LearnerSettings:
    """What the learner needs to know. Relative paths are taken from the working directory of whoever starts it."""

    model_path: str  # a Hugging Face folder or name
    run_dir: str  # Ray Train's own files go to a folder in it
    run_name: str
    total_steps: int
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    weight_decay: float = 0.0  # of matrices; norms and biases have none
    max_grad_norm: float = 1.0
    warmup_steps: int = 0  # linear, then constant
    estimator: Estimator = "dr_grpo"
    norm_by_std: bool = True
    overlong_filtering: bool = True
    trajectories: StoreSettings | None = None  # none: batches are not written
    samples_per_task: int = 4  # only named in metrics, as in reward/avg_pass_at_4
    shuffle_rewards: bool = False  # a control: nothing to learn
    loss: LossSettings = field(default_factory=LossSettings)
    reference_path: str | None = None  # of the KL loss; default: model_path
    temperature: float = 1.0  # that the rollouts are sampled at
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    gradient_checkpointing: bool = False
    tokens_per_microbatch: int = 16_384  # distinct tokens; a longer trajectory is a micro-batch of its own
    zero_stage: Literal[1, 2, 3] = 2
    num_workers: int = 1
    threads: int = 1
    use_gpu: bool = False
    resources_per_worker: dict[str, float] = field(default_factory=lambda: {"CPU": 1.0})
    seed: int = 0
    checkpoint_dir: str | None = None  # none: no checkpoints
    checkpoint_interval: int = 10  # steps; the last step always writes one
    checkpoints_kept: int = 2
    save_optimizer: bool = True
    resume_from: str | None = None  # a checkpoint folder (global_step_N) to go on from
    publish_first: bool = False  # replicas hold other weights than those that are resumed
    batch_timeout_s: float = 1800.0
    start_timeout_s: float = 600.0
    collective_timeout_s: float = 600.0  # of one collective between ranks
    # Network file systems remember for up to a minute that a file was not there.
    run_dir_timeout_s: float = 60.0  # until a rank sees what the driver has written to run_dir

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "bfloat16"):
            raise LearnerError(f"dtype '{self.dtype}' is not supported; use float32 or bfloat16")
        if self.zero_stage not in (1, 2, 3):
            raise LearnerError(f"ZeRO stage {self.zero_stage} is not supported; use 1, 2 or 3")
        if self.temperature <= 0:
            raise LearnerError(f"temperature {self.temperature} must be above 0")


class Batch(TypedDict):
    """What the buffer answers. ``refs[i]`` is the object reference of a ``Group``, ``headers[i].nbytes`` its size."""

    refs: list[Any]
    headers: list[Any]
    lineage: Lineage  # its newest version is the one this batch is trained from


class BatchSource(Protocol):
    """The replay buffer, as an actor handle: the methods are called through ``.remote``."""

    def get_batch(self, step: int, timeout_s: float) -> Batch | None:
        """The batch of a step; ``None``: no more will come."""

    def state(self) -> tuple[dict[str, Any], dict[int, Any]]:
        """What a checkpoint keeps: plain JSON, and by number the object reference of a ``Group``."""

    def ack(self, step: int, version: int) -> None:
        """The batch of ``step`` has been trained on and its weights are policy ``version``."""


class NamedWeights(Protocol):
    """The learner's weights under the names of the checkpoint format, on every rank in the same order."""

    def metadata(self) -> list[tuple[str, torch.dtype, tuple[int, ...]]]:
        """Name, dtype and shape of each whole tensor."""

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor whole, good until the next one is asked for. All ranks iterate, or none."""


class Publisher(Protocol):
    """Brings weights to the policy's replicas. Pickled to every rank and called there after every step."""

    last: Metrics  # of the last publication: seconds by phase, and what replicas did since the one before

    def __call__(self, weights: NamedWeights, step: int) -> int:
        """In rank 0: publish, wait for the replicas, return the new policy version."""

    def assist(self, weights: NamedWeights) -> None:
        """In every other rank, at the same time: iterate over ``weights`` where rank 0 does."""

    def settle(self) -> None:
        """In rank 0: return once whoever asks the weight store gets the last version."""

    def close(self) -> None:
        """In rank 0, after the last step."""


StepReport = Callable[[Metrics], None]


@dataclass(frozen=True)
class Job:
    """All that travels to the ranks."""

    settings: LearnerSettings
    source: Any  # actor handle of a BatchSource
    publisher: Publisher
    on_step: StepReport
    control: Any  # actor handle of LearnerControl
    run_dir_mark: str  # what the run's folder holds where the driver is


class LearnerHandle(Beside):
    """A learner that runs beside its caller: ``start``, then ``done`` or ``join``; ``stop`` ends it early.

    ``join`` raises :class:`LearnerError`; the message is the first failure of any rank.

    Attributes:
        begun: an object reference that is there once all ranks are up, and fails with the learner.

    Args:
        source: actor handle of a :class:`BatchSource`.
        publisher: see :class:`Publisher`.
        on_step: called in rank 0 with the metrics of every step; must be picklable.

    Raises:
        RunFailed: the run's folder cannot be written.
    """

    def __init__(self, settings: LearnerSettings, source: Any, publisher: Publisher, on_step: StepReport) -> None:
        super().__init__("learner")
        self._control = LearnerControl.options(name=f"{settings.run_name}:learner-control").remote()
        settings = _absolute(settings)
        self._job = Job(settings, source, publisher, on_step, self._control, _mark_run_dir(settings.run_dir))
        self._lock = threading.Lock()  # of the two that follow
        self._controller: Any = None  # of Ray Train; the ranks die with it
        self._killed = False
        self._lost_controller = False
        self.begun: ray.ObjectRef = self._control.begun.remote()
        # Asked for now: the control actor ends with the learner, its answer does not.
        self._first_version = self._control.first_version.remote() if settings.publish_first else None

    def first_version(self, timeout_s: float) -> int:
        """With ``settings.publish_first``: the version of the weights that it resumes from, once replicas have them.

        Raises:
            LearnerError: it ended before, or took longer.
        """
        try:
            return ray.get(self._first_version, timeout=timeout_s)
        except GetTimeoutError:
            raise LearnerError(f"it had published nothing after {timeout_s:.0f} s") from None
        except RayActorError:  # the control actor ends with the learner
            self._thread.join(CALL_TIMEOUT_S)
            raise self._error or LearnerError("it ended before it had published anything") from None

    def stop(self, timeout_s: float = 30.0) -> None:
        """End after the step in progress, without a checkpoint. It is killed if it still runs after ``timeout_s``; at
        once if it has not begun to train. Its place in the cluster may stay taken until ``ray.shutdown``.

        Does not raise for a learner that failed: ``join`` does.
        """
        if self.done:
            return
        reason = "it was stopped before it had begun"
        try:
            if ray.get(self._control.stop.remote(), timeout=CALL_TIMEOUT_S):
                self._thread.join(timeout_s)
                self.kill(f"it was killed: it had not stopped after {timeout_s:.0f} s", timeout_s)
        except (RayActorError, GetTimeoutError):
            # The control actor ends with the learner, which ended meanwhile, or it has failed.
            pass
        self._kill(reason, timeout_s)

    def kill(self, reason: str, timeout_s: float = 30.0) -> bool:
        """End at once, whatever it is at; ``join`` raises ``reason``.

        Returns:
            Whether its place is free for another one. Else it stays taken until ``ray.shutdown``.
        """
        if self.done:
            return not self._lost_controller
        with self._lock:
            controller = self._controller
        self._fail(reason)
        left = controller is None or _has_aborted(controller)
        self._end_controller()
        self._thread.join(timeout_s)
        return left and self.done

    def _kill(self, reason: str, timeout_s: float) -> None:
        if self.done:
            return
        self._fail(reason)
        self._end_controller()
        # What is left of this thread when Ray is shut down takes the whole process along, with exit code 1.
        self._thread.join(timeout_s)

    def _fail(self, reason: str) -> None:
        try:
            ray.get(self._control.fail.remote(reason), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError):
            pass  # as in stop

    def _end_controller(self) -> None:
        with self._lock:
            self._killed = True
            if self._controller is not None:
                ray.kill(self._controller)

    def _keep(self, controller: Any) -> None:
        with self._lock:
            self._controller = controller
            if self._killed:
                ray.kill(controller)

    def _run(self) -> None:
        try:
            _fit(self._job, self._keep)
        except Exception as error:  # raised again by join, in the caller's thread
            self._lost_controller = isinstance(error, RayActorError)
            self._error = LearnerError(*(self._first_failure() or (one_line(error), False)))
        finally:
            with self._lock:
                self._controller = None  # it ends with its last handle
            if ray.is_initialized():
                ray.kill(self._control)

    def _first_failure(self) -> tuple[str, bool] | None:
        if not ray.is_initialized():
            return "Ray was shut down", False
        try:
            return ray.get(self._control.failure.remote(), timeout=CALL_TIMEOUT_S)
        except (RayActorError, GetTimeoutError):
            return None


def _has_aborted(controller: Any) -> bool:
    """Whether Ray Train's controller ended in order. Its placement group outlives one that is killed."""
    try:
        ray.get(controller.abort.remote(), timeout=ABORT_TIMEOUT_S)
    except RayActorError:  # it has exited
        return True
    except GetTimeoutError:  # it is busy bringing the ranks up, or hangs
        return False
    return True


def run_learner(settings: LearnerSettings, source: Any, publisher: Publisher, on_step: StepReport) -> None:
    """Run a learner to its end. Arguments and errors: :class:`LearnerHandle`."""
    handle = LearnerHandle(settings, source, publisher, on_step)
    handle.start()
    handle.join()


def one_line(error: BaseException) -> str:
    """The reason in one line, without the layers that Ray and Ray Train put around it."""
    failures = getattr(error, "worker_failures", None)  # of Ray Train's WorkerGroupError
    if failures:
        rank, failure = min(failures.items())
        return f"rank {rank}: {one_line(getattr(failure, 'health_check_failure', failure))}"
    if isinstance(error, RayActorError) and _DIED in str(error):
        who = re.search(r"class_name: (\w+)", str(error))
        return f"{who[1] if who else 'an actor'} has died: it was killed, ran out of memory, or crashed"
    if isinstance(error, RayTaskError) and error.cause is not None:
        return one_line(error.cause)
    text = " ".join(str(error).split())[:MAX_REASON] or "no message"
    # Messages of our own errors are sentences; of others the type is part of the meaning.
    own = isinstance(error, TimeoutError) or type(error).__module__.split(".")[0] in ("train", "actors", "serve")
    return text if own else f"{type(error).__name__}: {text}"


def _absolute(settings: LearnerSettings) -> LearnerSettings:
    """Ray Train changes the working directory of its workers. Hub names, which are no folders here, stay as given."""
    ours = {name: getattr(settings, name) for name in ("run_dir", "checkpoint_dir")}
    given = {name: getattr(settings, name) for name in ("model_path", "reference_path", "resume_from")}
    found = {name: path for name, path in given.items() if path and Path(path).is_dir()}
    return replace(settings, **{name: str(Path(path).absolute()) for name, path in (ours | found).items() if path})


def _fit(job: Job, on_controller: Callable[[Any], None]) -> None:
    from ray.train import FailureConfig, LoggingConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig

    from train.ray_trainer import LeanTorchTrainer

    settings = job.settings
    # Ray Train reads these when its controller starts.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", str(WATCH_INTERVAL_S))
    # A watcher process for spot notices, which nothing here acts upon.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] = str(settings.start_timeout_s)
    LeanTorchTrainer(
        _train_loop,
        # Named only: what Ray Train's controller is given, it loads, and with it all that the ranks import.
        train_loop_config={"job": ray.put(job)},
        torch_config=TorchConfig(
            backend="nccl" if settings.use_gpu else "gloo", timeout_s=int(settings.collective_timeout_s)
        ),
        scaling_config=ScalingConfig(
            num_workers=settings.num_workers,
            use_gpu=settings.use_gpu,
            resources_per_worker=settings.resources_per_worker,
        ),
        run_config=RunConfig(
            name=settings.run_name,
            storage_path=str(Path(settings.run_dir) / "ray_train"),
            failure_config=FailureConfig(max_failures=0),
            worker_runtime_env={"env_vars": _rank_environment(settings)},
            logging_config=LoggingConfig(log_level="WARNING"),
        ),
        on_controller=on_controller,
    ).fit()


def _rank_environment(settings: LearnerSettings) -> dict[str, str]:
    environment = {
        "DS_ACCELERATOR": "cuda" if settings.use_gpu else "cpu",
        "OMP_NUM_THREADS": str(settings.threads),
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if not settings.use_gpu:
        # Otherwise glibc gives large tensors back to the kernel after every use: up to a tenth of a step in page
        # faults. 32 MiB is the most that every glibc takes.
        environment |= {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(8 << 30)}
    return environment


def _train_loop(config: dict[str, Any]) -> None:
    """Runs in every rank. Imports there what the driver and Ray Train's controller need not load."""
    with quick_loading():
        job: Job = ray.get(config["job"], timeout=CALL_TIMEOUT_S)
    rank = None
    try:
        _check_run_dir(job)
        with quick_loading():
            from train.learner_rank import Rank

        rank = Rank(job)
        rank.run()
    except Exception as error:
        # Ray Train wraps errors in pages of context; what the caller wants to read is the first one.
        # A route that was there before can be there again once its parts have found other places.
        no_route = isinstance(error, RouteError) and rank is not None and not rank.has_published
        unmendable = no_route or getattr(error, "unmendable", False)
        ray.get(job.control.fail.remote(one_line(error), unmendable), timeout=CALL_TIMEOUT_S)
        raise
    finally:
        if rank is not None:
            rank.close()


def _mark_run_dir(folder: str) -> str:
    try:
        return mark_folder(Path(folder))
    except OSError as error:
        raise RunFailed(f"run folder {folder} cannot be written: {error.strerror}") from None


def _check_run_dir(job: Job) -> None:
    """A run that cannot find its checkpoints would begin anew, whatever had been learnt, when a part of it dies."""
    folder = job.settings.run_dir
    if not has_mark(Path(folder), job.run_dir_mark, job.settings.run_dir_timeout_s):
        raise LearnerError(
            f"the run's folder {folder} is not the driver's on host {socket.gethostname()}: in a cluster output_dir "
            "must lie on storage that all hosts share",
            unmendable=True,
        )
