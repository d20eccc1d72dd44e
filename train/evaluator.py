"""The evaluations of a run: held-out tasks attempted before, beside and after training, recorded and dumped."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.trajectory import Group
from serve.sampling import Sampling
from train.actor_calls import answer_if_any, answer_of, has_answer
from train.config import RunConfig
from train.eval_upload import EvalUpload
from train.evaluate import GREEDY, SAMPLED, EvalResult, dump_eval, eval_folder, evaluate_groups
from train.failures import RunFailed
from train.metrics import eval_group_metrics
from train.preflight import Inputs
from train.trajectory_store import TrajectoryStore
from train.trajectory_table import Origin

CANCEL_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Attempts:
    """One way to attempt every task: ``n`` times, with one sampling. ``label`` as in :class:`EvalResult`."""

    label: str
    n: int
    sampling: Sampling


@dataclass
class _Evaluation:
    """What runs now, and what is still to come. ``version`` was asked for, of ``attempts`` the first is under way."""

    step: int
    version: int
    attempts: deque[Attempts]
    beside: bool
    call: Future[list[Group]] | None = None
    began: float = 0.0
    deadline: float = 0.0  # monotonic


class Evaluator:
    """Has the Conductor attempt the held-out tasks; one evaluation at a time.

    Beside training only so many of its episodes run at once as ``generator.eval_max_inflight_episodes`` says; rollouts
    keep the rest. Without ``policy.eval_replicas`` updates reach the policy meanwhile, and several versions sample the
    tokens: results say which.

    Args:
        store: keeps the trajectories, token by token; ``upload``: copies the dumps. Either may be ``None``.
        root: folder of the dumps.
    """

    def __init__(
        self,
        config: RunConfig,
        inputs: Inputs,
        conductor: Any,
        root: Path,
        store: TrajectoryStore | None = None,
        upload: EvalUpload | None = None,
    ) -> None:
        self._config = config
        self._inputs = inputs
        self._conductor = conductor
        self._root = root
        self._store = store
        self._upload = upload
        self._running: _Evaluation | None = None
        self._considered = 0  # the last step at which one was due, begun or not

    @property
    def running(self) -> str | None:
        """What is being evaluated, in words; ``None``: nothing."""
        now = self._running
        return None if now is None else f"{now.attempts[0].label}, step {now.step}"

    def begin(self, step: int, version: int, *, beside: bool = False) -> None:
        """Start the evaluation of ``step``; :meth:`results` tells what comes of it.

        Args:
            version: the newest one of the policy.
            beside: training goes on.
        """
        assert self._running is None
        self._running = _Evaluation(step, version, deque(attempts_of_run(self._config, beside)), beside)
        self._attempt()

    def is_due(self, step: int) -> bool:
        """Whether an evaluation beside training should begin now that ``step`` is over.

        One that falls due while another is running is left out, with a warning.
        """
        interval = self._config.trainer.eval_interval
        due = step // interval * interval if interval else 0
        if due <= self._considered:
            return False
        self._considered = due
        if self._running is None:
            return True
        logger.warning(
            "step %d is not evaluated: the evaluation of step %d is still running; raise trainer.eval_interval or "
            "generator.eval_max_inflight_episodes",
            *(step, self._running.step),
        )
        return False

    def resume_at(self, step: int) -> None:
        """Only evaluations of ``step`` and later are due: that of the very step is done again."""
        self._considered = max(0, step - 1)

    def results(self, wait_s: float = 0.0) -> list[EvalResult]:
        """What has come to its end since the last call.

        Args:
            wait_s: how long to wait for that, at most.

        Raises:
            RunFailed: it broke, or, unless training went on beside it, took too long.
        """
        now = self._running
        if now is None:
            return []
        left = now.deadline - time.monotonic()
        if not has_answer(now.call, max(0.0, min(wait_s, left))):
            if left > 0:
                return []
            if not now.beside:
                raise RunFailed(f"evaluation: no end in {now.deadline - now.began:.0f} s")
            logger.warning("the evaluation (%s) took too long and is cancelled", self.running)
            self.cancel("it took too long")
            return []
        result = self._record(now, answer_of(now.call, "evaluation"))
        now.attempts.popleft()
        if now.attempts:
            self._attempt()
        else:
            self._running = None
        return [result]

    def cancel(self, reason: str) -> None:
        """End what is running; its episodes are counted as cancelled, and it has no result."""
        if self._running is None:
            return
        self._running = None
        call = self._conductor.stop_evaluations.remote(reason, CANCEL_TIMEOUT_S)
        answer_if_any(call, CANCEL_TIMEOUT_S + 5)

    def _attempt(self) -> None:
        now, generator = self._running, self._config.generator
        attempts = now.attempts[0]
        room = generator.eval_episodes_beside_training if now.beside else generator.max_inflight_episodes
        tasks = self._inputs.eval_tasks
        # Episodes may have to wait for places that rollouts have.
        one_s = generator.deadlines.group * (2 if now.beside else waves(len(tasks) * attempts.n, room))
        now.began = time.monotonic()
        now.deadline = now.began + generator.deadlines.group * 2 * waves(len(tasks) * attempts.n, room)
        at_once = max(1, room // attempts.n) if now.beside else None
        name = f"eval-{now.step}-{attempts.label}"
        call = self._conductor.evaluate.remote(name, tasks, attempts.n, attempts.sampling, one_s, at_once)
        now.call = call.future()

    def _record(self, now: _Evaluation, groups: list[Group]) -> EvalResult:
        attempts = now.attempts[0]
        result = evaluate_groups(attempts.label, now.step, now.version, groups)
        more = eval_group_metrics(groups, attempts.n) if attempts.label == SAMPLED else {}
        folder = eval_folder(self._root, now.step, attempts.label)
        try:
            files = dump_eval(folder, groups, self._inputs.tokenizer)
        except OSError as error:
            raise RunFailed(f"evaluation: {folder} cannot be written: {error}") from None
        if self._upload is not None:
            self._upload.add(files)
        if self._store is not None:
            self._store.put(groups, Origin("eval", now.step, now.version, attempts.label))
        return replace(result, metrics=more | {"timing/eval": time.monotonic() - now.began})


def waves(episodes: int, room: int) -> int:
    """How often a place may have to be used if ``room`` episodes run at once."""
    return 1 + episodes // room


def attempts_of_run(config: RunConfig, beside: bool = False) -> Sequence[Attempts]:
    """How a run evaluates: at the training temperature and, if asked for, greedily."""
    generator = config.generator
    sampled = eval_sampling(config)
    if beside and config.buffer.max_staleness > 0:
        # Nothing can be repeated here, and seeds would slow the rollouts' batches down.
        sampled = replace(sampled, seed=None)
    kinds = [Attempts(SAMPLED, generator.eval_n_samples_per_prompt, sampled)]
    if generator.eval_greedy:
        kinds.append(Attempts(GREEDY, 1, replace(sampled, temperature=0.0)))
    return kinds


def eval_sampling(config: RunConfig) -> Sampling:
    """``generator.sampling_params``, with the run's seed."""
    params = config.generator.sampling_params
    return Sampling(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        max_tokens=params.max_generate_length,
        stop=params.stop,
        seed=config.seed,
    )
