"""The running actors of one run: started in one place, followed from one place, ended in one place."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from actors.conductor import Conductor, ConductorSettings, worker_name
from actors.env_pool import EnvPool
from actors.env_pool_core import PoolSettings
from actors.replay_buffer import ReplayBuffer
from actors.rollout_worker import GroupOrder, Peers, RolloutWorker, WorkerSettings
from actors.task import Task
from actors.trajectory import Group
from actors.weight_store import ACTOR_NAME as WEIGHT_STORE
from actors.weight_store import PinnedWeights, WeightStore
from serve.policy import CALLER_ENVIRONMENT, PolicyClient, PolicyStartError, PolicyUpdateError, deploy_policy
from serve.sampling import Sampling
from serve.shared_folder import remove_abandoned
from train.actor_calls import CALL_TIMEOUT_S, answer, answer_if_any, answer_of, has_answer
from train.batch_keeper import BatchKeeper
from train.cluster_room import Report
from train.config import RunConfig
from train.environment_servers import EnvironmentServers
from train.eval_upload import EvalUpload, eval_prefix
from train.evaluate import EvalResult
from train.evaluator import Attempts, Evaluator, eval_sampling, waves
from train.failures import RunFailed
from train.learner import LearnerError, LearnerHandle, LearnerSettings
from train.losses import LossSettings
from train.memory import PeakMemory
from train.metrics import buffer_metrics, lease_metrics
from train.preflight import Inputs
from train.publisher import WeightPublisher
from train.resume import CHECKPOINTS, ResumePoint, task_sampler
from train.role_metrics import RolloutLoad
from train.run_ray import LOOPBACK, start_run_ray, wait_for_names
from train.trajectory_store import StoreSettings, TrajectoryStore

RATE_WINDOW_S = 30.0
POOL_RESTART_S = 60.0
END_TIMEOUT_S = 30.0
PROGRESS_S = 0.5
EVALS = "evals"  # folder of the run's evaluations
BUFFER, CONDUCTOR = "replay_buffer", "conductor"  # names of actors

logger = logging.getLogger(__name__)


class System:
    """Everything a run starts. A context manager: leaving it ends every actor, lease, process and file of the run.

    Attributes:
        steps: of the optimiser, in the whole run.
    """

    def __init__(self, config: RunConfig, inputs: Inputs, steps: int, resume: ResumePoint | None = None) -> None:
        self._config = config
        self._resume = resume
        self._inputs = inputs
        self.steps = steps
        self._run_dir = config.run_dir.absolute()
        path = Path(config.trainer.policy.model.path)
        # Actors have working directories of their own; a hub name stays a name.
        self._model_path = str(path.absolute()) if path.is_dir() else str(path)
        self._policy_path = str(resume.policy) if resume else self._model_path  # weights that rollouts begin with
        self._cleanup = ExitStack()
        self._memory = PeakMemory()
        self._seen_steps = 0
        self._learner: LearnerHandle | BatchKeeper | None = None
        self._trajectories: TrajectoryStore | None = None  # of evaluations; the learner has one of its own
        self._eval_upload: EvalUpload | None = None
        self._orders: list[GroupOrder] = []  # that rollouts begin with
        self._turn: Any = None  # of starting in a cluster; ends with its last handle
        self._pool: Any = None  # none where no task is Fleet's
        self._pool_report: dict[str, Any] | None = None
        self._leases: dict[str, Any] = {}
        self._pool_answered = 0.0
        self._started = time.monotonic()
        self._first_rollout_s: float | None = None
        self._sampled: deque[tuple[float, int]] = deque()  # when, and how many tokens by then
        self._load = RolloutLoad()

    def __enter__(self) -> System:
        self._run_dir.mkdir(parents=True, exist_ok=True)
        self._cleanup.enter_context(self._memory)
        if (kept := store_settings(self._config)) is not None:
            self._trajectories = TrajectoryStore(kept)
            # After all that is started later has ended: what the learner left, if it was killed, is finished too.
            self._cleanup.callback(self._trajectories.close)
        if upload_to := self._config.trajectories.upload_to:
            upload = EvalUpload(self._run_dir / EVALS, eval_prefix(upload_to, self._config.name))
            self._eval_upload = self._cleanup.enter_context(upload)
            self._eval_upload.add_missing()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cleanup.close()

    # -- start

    def start(self, report: Report, *, with_learner: bool = True, run_until: float = math.inf) -> None:
        """Start everything but the rollouts. The order is that of who needs whom.

        Args:
            with_learner: its ranks then come up too, and wait for their first batch.
            run_until: when the run's time is over, on the clock of ``time.monotonic``; heeded where it may have to wait
                for long.

        Raises:
            RunFailed: something did not start; what did start ends when the context is left.
        """
        report({"phase": "starting", "step": self._resume.step if self._resume else 0})
        self._start_servers()
        self._turn = self._start_ray(report, run_until)
        self._start_data_plane()
        report({"phase": "starting the policy"})
        # Most of what comes now is imports, a core each: replicas, workers and learner come up side by side.
        self._deploy_policy()
        self._create_workers()
        self._create_conductor()
        self._cleanup.callback(self._cancel_evaluation)
        if self._resume is not None:
            version, _ = answer(self._store.latest.remote(), CALL_TIMEOUT_S, "weight store")
            self._fill_buffer(version)
        if with_learner:
            self._cleanup.callback(self._end_rollouts, "the run is ending")
            self._start_learner()
        self._start_workers()
        try:
            for policy in (self._policy, self._eval_policy):
                if policy is not None:
                    policy.wait_until_healthy(self._config.policy.startup_timeout_s)
        except PolicyStartError as error:
            raise RunFailed(str(error)) from None
        if self._turn is not None:
            begun = [self._learner.begun] if isinstance(self._learner, LearnerHandle) else []
            self._turn.end.remote(begun, self._config.trainer.learner.start_timeout)

    def _start_servers(self) -> None:
        config, inputs = self._config, self._inputs
        self._servers = self._cleanup.enter_context(
            EnvironmentServers(
                config.environment,
                (*inputs.train_tasks, *inputs.eval_tasks),
                self._run_dir,
                config.generator.max_inflight_episodes,
                _node_address(),
            )
        )

    def _start_ray(self, report: Report, run_until: float) -> Any | None:
        self._cleanup.callback(remove_abandoned)  # what only its processes' end makes free
        self._cleanup.callback(ray.shutdown)
        return start_run_ray(self._config, report, run_until)

    def _start_data_plane(self) -> None:
        """Buffer, weight store and instances: light actors that the heavy ones are given."""
        self._start_buffer()
        self._store = WeightStore.options(name=WEIGHT_STORE).remote(str(self._run_dir), secrets.token_hex(4))
        if self._servers.uses_fleet:
            self._start_pool()

    def _start_buffer(self) -> None:
        config = self._config
        generator = config.generator
        self._buffer = ReplayBuffer.options(name=BUFFER, max_concurrency=1000).remote(
            {
                "batch_size": config.trainer.train_batch_size,
                "max_staleness": config.buffer.max_staleness,
                "max_running": generator.max_inflight_episodes // generator.n_samples_per_prompt,
                "max_bytes": config.buffer.max_bytes,
                "resample_zero_variance": config.buffer.zero_variance_groups == "resample",
                "window": config.buffer.window,
            }
        )

    def _start_pool(self) -> None:
        config = self._config
        environment, deadlines = config.environment, config.generator.deadlines
        self._pool = EnvPool.options(name="env_pool").remote(
            PoolSettings(
                run_name=config.name,
                nonce=secrets.token_hex(4),
                table_path=self._run_dir / "leases.db",
                budget_s=deadlines.budget,
                margin_s=environment.ttl_margin,
                heartbeat_s=environment.heartbeat_interval,
                max_instances=environment.max_instances,
                create_timeout_s=deadlines.provision,
            ),
            self._servers.api_key,
            self._servers.base_url,
        )
        self._cleanup.callback(self._close_pool)
        answer(self._pool.start.remote(), CALL_TIMEOUT_S, "instance pool")
        self._pool_answered = time.monotonic()

    def _deploy_policy(self) -> None:
        name = f"fleet-rl-{self._config.name}"
        self._policy = deploy_policy(self._config.policy, self._policy_path, self._store, app_name=name)
        self._cleanup.callback(self._policy.shutdown)
        self._eval_policy: PolicyClient | None = None
        if replicas := self._config.policy.eval_replicas:
            self._pinned = PinnedWeights.options(name="pinned_weights").remote()
            settings = self._config.policy.model_copy(update={"num_replicas": replicas})
            self._eval_policy = deploy_policy(settings, self._policy_path, self._pinned, app_name=f"{name}-eval")
            self._cleanup.callback(self._eval_policy.shutdown)

    def _create_workers(self) -> None:
        config = self._config
        generator = config.generator
        per_worker = -(-generator.max_inflight_episodes // generator.num_workers)
        self._workers = [
            RolloutWorker.options(
                name=worker_name(index),
                num_cpus=generator.worker_num_cpus,
                max_concurrency=1000,
                runtime_env={"env_vars": CALLER_ENVIRONMENT},
            ).remote(
                WorkerSettings(
                    name=worker_name(index),
                    model_path=self._policy_path,
                    max_model_len=config.policy.max_model_len,
                    max_episodes=per_worker,
                    generator=generator,
                    api_key=self._servers.api_key,
                    base_url=self._servers.base_url,
                    overlong_filtering=config.trainer.algorithm.overlong_filtering,
                    openenv=self._servers.openenv,
                    openenv_max_sessions=config.environment.openenv_max_sessions,
                    openenv_headers=config.environment.secret_headers(os.environ),
                    partial_reward=config.environment.partial_reward,
                ),
            )
            for index in range(generator.num_workers)
        ]

    def _create_conductor(self) -> None:
        """And what it is given: the tasks in their order, and evaluations."""
        config = self._config
        generator = config.generator
        self._peers = Peers(self._policy, self._pool, self._buffer, self._eval_policy)
        self._sampler = task_sampler(config, self._inputs.train_tasks)
        if self._resume is not None and (stands := self._resume.buffer["sampler"]) is not None:
            self._sampler.load_state_dict(stands)
        self._conductor = Conductor.options(name=CONDUCTOR, max_concurrency=100).remote(
            ConductorSettings(
                order=self._sampler,
                n_samples=generator.n_samples_per_prompt,
                sampling=self._training_sampling(),
                # Its episodes may have to wait for places that an evaluation has.
                group_timeout_s=generator.deadlines.group * (2 if config.trainer.eval_interval else 1),
                worker_timeout_s=generator.worker_timeout,
            ),
            self._workers,
            self._peers,
        )
        self._evaluator = Evaluator(
            config, self._inputs, self._conductor, self._run_dir / EVALS, self._trajectories, self._eval_upload
        )
        if self._resume is not None:
            self._evaluator.resume_at(self._resume.step)

    def _cancel_evaluation(self) -> None:
        self._evaluator.cancel("the run is ending")

    def _fill_buffer(self, version: int) -> None:
        """With what the checkpoint has of it, whose weights are now called ``version``. The groups that were in flight
        are begun anew with the rollouts."""
        state = self._resume.buffer
        payloads = {ticket: ray.put(group) for ticket, group in self._resume.groups.items()}
        in_flight = answer(self._buffer.resume.remote(state, payloads, version), CALL_TIMEOUT_S, "replay buffer")
        tasks = {task.task_key: task for task in self._inputs.train_tasks}
        sampling = self._training_sampling()
        self._orders = [GroupOrder(tasks[key], ticket, tuple(ids), sampling) for ticket, key, ids in in_flight]

    def _start_workers(self) -> None:
        answer([worker.start.remote(self._peers) for worker in self._workers], CALL_TIMEOUT_S * 2, "rollout workers")

    def _redirect_workers(self) -> None:
        """To the present buffer. One that is dead, or being started again, is the Conductor's to look after."""
        calls = [worker.start.remote(self._peers) for worker in self._workers]
        if not any([answer_if_any(call, CALL_TIMEOUT_S) for call in calls]):
            raise RunFailed("rollout workers: none answers")

    def _start_learner(self, *, publish_first: bool = False) -> None:
        settings = learner_settings(self._config, self._model_path, self.steps)
        reporter = StepReporter(self._conductor)
        if self._config.debug.rollout_only:
            self._learner = BatchKeeper(settings, self._buffer, self._trajectories, reporter)
        else:
            publisher = WeightPublisher(self._store, self._policy, self._config.trainer.learner.publish_timeout)
            if self._resume is not None:
                resumed = {"resume_from": str(self._resume.checkpoint), "publish_first": publish_first}
                settings = replace(settings, **resumed)
            self._learner = LearnerHandle(settings, self._buffer, publisher, reporter)
        self._learner.start()

    # -- go back

    @property
    def can_go_back(self) -> bool:
        """Whether :meth:`go_back` is possible: it is up, has a learner, and is not ending."""
        return isinstance(self._learner, LearnerHandle) and self._pool_report is None

    def end_training_parts(self) -> None:
        """Buffer, Conductor and learner, all at once. Then the run's folder may be taken back to a checkpoint.

        Raises:
            RunFailed: there would be no room for the next ones.
        """
        if not self._learner.kill("a part of the run has failed"):
            raise RunFailed("learner: what it had of the cluster is not free")
        for actor in (self._conductor, self._buffer):
            ray.kill(actor)
        wait_for_names(CONDUCTOR, BUFFER, f"{self._config.name}:learner-control")

    def go_back(self, resume: ResumePoint, report: Report, deadline: float) -> None:
        """Start Buffer, Conductor and learner from a checkpoint: what they hold, it holds. All others stay, above all
        the engines, which get the checkpoint's weights as a version of their own.

        Args:
            deadline: of the learner's start, monotonic.

        Raises:
            RunFailed: one of those that stay has ended, or does not answer; or the learner does not come.
        """
        report({"phase": "going back", "step": resume.step})
        self._servers.check()
        self._policy_version()
        version = answer(self._store.version.remote(), CALL_TIMEOUT_S, "weight store")
        self._policy.abandon(version, "the learner is gone")
        self._resume, self._seen_steps = resume, 0
        self._load = RolloutLoad()
        self._sampled.clear()
        self._start_buffer()
        self._create_conductor()
        self._start_learner(publish_first=True)
        self._redirect_workers()
        if self._pool is not None:
            owners = [self._pool.release_owner.remote(worker_name(index)) for index in range(len(self._workers))]
            answer(owners, CALL_TIMEOUT_S, "instance pool")
        learner = self._config.trainer.learner
        try:
            longest_s = learner.start_timeout + learner.publish_timeout
            version = self._learner.first_version(min(longest_s, max(0.0, deadline - time.monotonic())))
        except LearnerError as error:
            raise error.of_run() from None
        self._fill_buffer(version)

    # -- evaluate

    def evaluate(self, step: int, report: Report) -> list[EvalResult]:
        """Held-out pass rates of the policy as it is now: at the training temperature and, if asked for, greedily."""
        if self._first_rollout_s is None:
            self._first_rollout_s = time.monotonic() - self._started
        self._evaluator.begin(step, self._policy_version())
        results: list[EvalResult] = []
        while (what := self._evaluator.running) is not None:
            report({"phase": f"evaluating ({what.partition(',')[0]})"})
            results += self._evaluator.results(PROGRESS_S)
            self._servers.check()
        report({"pass_at_1": results[0].overall.pass_at_1})
        return results

    def evaluate_beside(self) -> list[EvalResult]:
        """Begin an evaluation beside training if one is due; what has finished since the last call.

        Does not wait for evaluations, only for engines of their own to load the weights of this step.
        """
        if self._config.trainer.eval_interval is None:
            return []
        results = self._evaluator.results()
        snapshot = self._snapshot()
        step = snapshot["trained_steps"]
        last = step >= self.steps and self._config.trainer.eval_after_train  # which has an evaluation of its own
        if not last and self._evaluator.is_due(step):
            self._begin_beside(step, snapshot["version"])
        return results

    def _begin_beside(self, step: int, version: int) -> None:
        """``step`` steps led to ``version``."""
        if self._eval_policy is not None:
            timeout_s = self._config.trainer.learner.publish_timeout
            try:
                pinned = answer(self._pinned.pin.remote(), CALL_TIMEOUT_S, "pinned weights")
                self._eval_policy.update(pinned, timeout_s)
            except (RunFailed, PolicyUpdateError) as error:
                logger.warning("step %d is not evaluated: %s", step, error)
                return
            # The next step may have been published since; or, by a broadcast, its snapshot may still be on the way.
            step, version = step + pinned - version, pinned
        self._evaluator.begin(step, version, beside=True)

    def finish_evaluation(self, report: Report, deadline: float) -> list[EvalResult]:
        """Wait for the evaluation that training has left running, if any, but not beyond ``deadline`` (monotonic)."""
        results: list[EvalResult] = []
        while (what := self._evaluator.running) is not None:
            report({"phase": f"finishing an evaluation ({what})"})
            if time.monotonic() > deadline:
                logger.warning("the evaluation (%s) is cancelled: run_timeout passed", what)
                self._evaluator.cancel("run_timeout passed")
            results += self._evaluator.results(1.0)
            self._servers.check()
        return results

    def roll_out(self, count: int, label: str) -> list[Group]:
        """The next ``count`` training tasks as groups, sampled as for training but handed to the caller."""
        tasks = [next(self._sampler) for _ in range(count)]
        attempts = Attempts(label, self._config.generator.n_samples_per_prompt, self._training_sampling())
        call, timeout_s = self._start_groups(tasks, attempts)
        return answer(call, timeout_s, "rollouts")

    def attempt(self, tasks: list[Task], attempts: Attempts, report: Report) -> list[Group]:
        """Every task attempted, one group a task. Reports how many episodes have ``ended``.

        Raises:
            RunFailed: a part that this cannot go on without has ended, or does not answer.
        """
        call, timeout_s = self._start_groups(tasks, attempts)
        deadline = time.monotonic() + timeout_s
        done = call.future()
        while not has_answer(done, PROGRESS_S):
            if time.monotonic() > deadline:
                raise RunFailed(f"evaluation: no end in {timeout_s:.0f} s")
            self._servers.check()
            ledger = answer(self._conductor.status.remote(), CALL_TIMEOUT_S, "conductor")["eval_ledger"]
            report({"phase": "evaluating", "ended": ledger["dispatched"] - ledger["in_flight"]})
        return answer_of(done, "evaluation")

    def _policy_version(self) -> int:
        try:
            versions = self._policy.versions()
        except PolicyUpdateError as error:
            raise RunFailed(f"policy: {error}") from None
        if not versions:
            raise RunFailed("policy: no replica answers")
        return max(versions)

    def _start_groups(self, tasks: list[Task], attempts: Attempts) -> tuple[Any, float]:
        """The call that returns the groups, and the seconds within which it must."""
        generator = self._config.generator
        timeout_s = generator.deadlines.group * waves(len(tasks) * attempts.n, generator.max_inflight_episodes)
        call = self._conductor.evaluate.remote(attempts.label, tasks, attempts.n, attempts.sampling, timeout_s)
        return call, timeout_s + CALL_TIMEOUT_S

    def _training_sampling(self) -> Sampling:
        """Seeded only where a run can be repeated: a seed per request costs the engine a tenth of its speed."""
        sampling = eval_sampling(self._config)
        return sampling if self._config.buffer.max_staleness == 0 else replace(sampling, seed=None)

    # -- train

    def start_rollouts(self) -> None:
        """Let the Conductor turn tickets into groups, until :meth:`end_training`."""
        answer(self._conductor.start_rollouts.remote(self._orders), CALL_TIMEOUT_S, "conductor")

    def learner_done(self) -> bool:
        """Whether the last step is over.

        Raises:
            RunFailed: the learner or the assignment of work ended with an error.
        """
        if not self._learner.done:
            return False
        try:
            self._learner.join(0)
        except LearnerError as error:
            raise error.of_run() from None
        return True

    def new_steps(self) -> list[dict[str, float]]:
        """The learner's accounts of the steps since the last call, with what buffer, pool and workers say now."""
        steps = answer(self._conductor.steps_since.remote(self._seen_steps), CALL_TIMEOUT_S, "conductor")
        self._seen_steps += len(steps)
        if steps:
            counts = buffer_metrics(self._snapshot()) | lease_metrics(self._lease_counts())
            steps[-1] = steps[-1] | counts | self._load.end_step()
        return steps

    def status(self) -> dict[str, Any]:
        """What the progress display shows; and ``metrics``, those that say where a run stands between two steps.

        Raises:
            RunFailed: a part that the run cannot go on without has ended, or does not answer.
        """
        self._servers.check()
        snapshot, leases = self._snapshot(), self._lease_counts()
        work = answer(self._conductor.status.remote(), CALL_TIMEOUT_S, "conductor")
        if work["error"] is not None:
            raise RunFailed(f"conductor: {work['error']}")
        self._load.add_work(work)
        now = time.monotonic()
        self._sampled.append((now, work["sampled_tokens"]))
        while len(self._sampled) > 2 and now - self._sampled[1][0] > RATE_WINDOW_S:
            self._sampled.popleft()
        since, tokens = self._sampled[0]
        rate = (work["sampled_tokens"] - tokens) / (now - since) if now - since >= 2.0 else None
        return {
            "phase": "training",
            "step": snapshot["trained_steps"],
            "version": snapshot["version"],
            "tokens_per_s": rate,
            "buffered": snapshot["buffered"],
            "running": snapshot["running"],
            "leases": leases.get("leased"),
            "waiting": leases.get("waiting"),
            "episodes": work["episodes"],
            "metrics": buffer_metrics(snapshot) | lease_metrics(leases) | self._load.lag_metrics(),
        }

    def end_training(self) -> None:
        """Stop the rollouts; groups in flight are cancelled and their leases given back."""
        self._end_rollouts("the last step is trained")

    # -- end

    def summary(self, before: list[EvalResult], after: list[EvalResult]) -> dict[str, Any]:
        """The figures of the run, as its last line prints them."""
        self._close_pool()
        work = answer(self._conductor.status.remote(), CALL_TIMEOUT_S, "conductor")
        snapshot = self._snapshot()
        ledger = {"train": snapshot["ledger"], "eval": work["eval_ledger"], "instances": self._pool_report}
        return {
            "pass_at_1_before": before[0].overall.pass_at_1 if before else None,
            "pass_at_1_after": after[0].overall.pass_at_1 if after else None,
            "stderr_before": before[0].overall.stderr if before else None,
            "stderr_after": after[0].overall.stderr if after else None,
            "greedy_before": before[1].overall.pass_at_1 if len(before) > 1 else None,
            "greedy_after": after[1].overall.pass_at_1 if len(after) > 1 else None,
            "eval_tasks": len(self._inputs.eval_tasks),
            "steps": snapshot["trained_steps"],
            "resumed_from_step": self._resume.step if self._resume else None,
            "sampled_tokens": work["sampled_tokens"],
            "first_rollout_s": round(self._first_rollout_s, 1) if self._first_rollout_s else None,
            "peak_rss_gb": round(self._memory.peak_gb, 2),
            "ledger": ledger,
        }

    def _end_rollouts(self, reason: str) -> None:
        if self._learner is not None:
            self._learner.stop()
        answer_if_any(self._conductor.stop_rollouts.remote(reason, END_TIMEOUT_S), END_TIMEOUT_S + 5)

    def _close_pool(self) -> None:
        if self._pool is not None and self._pool_report is None:
            report = answer_if_any(self._pool.close_all.remote(), CALL_TIMEOUT_S)
            stats = answer_if_any(self._pool.stats.remote(), CALL_TIMEOUT_S) or {}
            counters = {name: stats.get(name) for name in ("made", "reused", "deleted", "expired", "lost", "failed")}
            self._pool_report = counters | {"left": None if report is None else len(report.left)}

    def _snapshot(self) -> dict[str, Any]:
        snapshot = answer(self._buffer.snapshot.remote(), CALL_TIMEOUT_S, "replay buffer")
        self._load.add_lag("replay_buffer", snapshot["loop_lag"])
        return snapshot

    def _lease_counts(self) -> dict[str, Any]:
        """What the pool says; what it said last while Ray starts it again."""
        if self._pool is None:
            return {}
        try:
            self._leases = ray.get(self._pool.stats.remote(), timeout=CALL_TIMEOUT_S)
            self._load.add_lag("env_pool", self._leases["loop_lag"])
            self._pool_answered = time.monotonic()
        except ray.exceptions.RayActorError as error:
            for_good = isinstance(error, ray.exceptions.ActorDiedError)
            if for_good or time.monotonic() - self._pool_answered > POOL_RESTART_S:
                raise RunFailed(f"instance pool: {str(error).splitlines()[0]}"[:500]) from None
        except ray.exceptions.RayError as error:
            raise RunFailed(f"instance pool: {str(error).splitlines()[-1]}"[:500]) from None
        return self._leases


class StepReporter:
    """Hands the learner's account of a step to the Conductor. Pickled to learner rank 0."""

    def __init__(self, conductor: Any) -> None:
        self._conductor = conductor

    def __call__(self, metrics: dict[str, float]) -> None:
        ray.get(self._conductor.report_step.remote(metrics), timeout=CALL_TIMEOUT_S)


def learner_settings(config: RunConfig, model_path: str, steps: int) -> LearnerSettings:
    """The learner's part of the configuration."""
    trainer = config.trainer
    optimizer, algorithm, learner = trainer.policy.optimizer_config, trainer.algorithm, trainer.learner
    return LearnerSettings(
        model_path=model_path,
        run_dir=str(config.run_dir),
        run_name=config.name,
        total_steps=steps,
        lr=optimizer.lr,
        betas=optimizer.betas,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        warmup_steps=optimizer.warmup_steps,
        estimator=algorithm.advantage_estimator,
        overlong_filtering=algorithm.overlong_filtering,
        samples_per_task=config.generator.n_samples_per_prompt,
        shuffle_rewards=algorithm.shuffle_rewards,
        loss=LossSettings(
            name=algorithm.loss,
            eps_clip_low=algorithm.eps_clip_low,
            eps_clip_high=algorithm.eps_clip_high,
            dual_clip=algorithm.dual_clip,
            use_kl_loss=algorithm.use_kl_loss,
            kl_coef=algorithm.kl_loss_coef,
        ),
        temperature=config.generator.sampling_params.temperature,
        dtype=trainer.policy.dtype,
        gradient_checkpointing=trainer.policy.gradient_checkpointing,
        tokens_per_microbatch=learner.tokens_per_microbatch,
        zero_stage=learner.zero_stage,
        num_workers=learner.num_workers,
        threads=learner.num_threads,
        use_gpu=learner.use_gpu,
        resources_per_worker={"CPU": learner.num_cpus} | ({"GPU": learner.num_gpus} if learner.use_gpu else {}),
        seed=config.seed,
        checkpoint_dir=str(config.run_dir / CHECKPOINTS),
        trajectories=store_settings(config),
        checkpoint_interval=trainer.ckpt_interval,
        checkpoints_kept=trainer.max_ckpts_to_keep,
        batch_timeout_s=config.buffer.batch_deadline,
        start_timeout_s=learner.start_timeout,
    )


def store_settings(config: RunConfig) -> StoreSettings | None:
    """Where trajectories go; ``None`` where they are not kept."""
    if not config.trainer.dump_trajectories:
        return None
    keep = config.trajectories
    upload_to = f"{keep.upload_to.rstrip('/')}/{config.name}/trajectories" if keep.upload_to else None
    return StoreSettings(str((config.run_dir / "trajectories").absolute()), keep.jsonl, upload_to)


def _node_address() -> str:
    """Where other nodes reach this one; loopback unless the run joins a cluster."""
    if not os.environ.get("RAY_ADDRESS"):
        return LOOPBACK
    return ray.util.get_node_ip_address()
