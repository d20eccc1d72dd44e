"""A run under a virtual clock: the real ledger, tickets, admission and batches; only episodes and learner are made up.

A discrete-event simulation. An episode passes three stages: its environment is made ready (a delay), its tokens are
sampled (a share of the policy's throughput, which depends on the load), its tools and its verifier take their time (a
delay). That turns alternate between policy and tools is left out: in a closed network of delays and shared servers, how
many episodes are where depends only on the total demand of an episode at each of them (Baskett, Chandy, Muntz and
Palacios, 1975). The policy version at an episode's first token is that of its second stage's begin.
"""

from __future__ import annotations

import gc
import heapq
import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from actors.replay_buffer_core import GroupHeader, ReplayBufferCore, Ticket
from actors.trajectory import Graded, InfraFailed, Outcome, Ungraded
from train.simulation.config import FaultsSection, HostSection, SimulationConfig
from train.simulation.sources import Measured, chances, drawn_groups, drawn_values, measured_values
from train.simulation.station import Station

WON, LOST = Graded(1.0), Graded(0.0)
VERIFIER_FAILED, BROKE = Ungraded("simulated verifier failure"), InfraFailed("simulated failure")
REPLICA_DIED, WORKER_DIED = InfraFailed("simulated death of a replica"), InfraFailed("simulated death of a worker")
TIMED_OUT = InfraFailed("simulated group deadline")
HOPELESS_GROUPS, HOPELESS_ROUNDS = 1000, 10  # late ones in a row, and times all that may be in flight


class Deadlock(RuntimeError):
    """Nothing can happen any more, or no group ends in time, and the run is not over."""


class _Group:
    """One group in flight."""

    __slots__ = ("ticket", "worker", "episodes", "left", "outcomes", "tokens", "zero_variance")

    def __init__(self, ticket: Ticket, worker: int, zero_variance: bool) -> None:
        self.ticket = ticket
        self.worker = worker
        self.episodes: list[_Episode] = []
        self.left = 0
        self.outcomes: dict[str, Outcome] = {}
        self.tokens = 0.0
        self.zero_variance = zero_variance


class _Episode:
    __slots__ = (
        "group",
        "name",
        "tokens",
        "ready_s",
        "tools_s",
        "sampled",
        "version",
        "replica",
        "station",
        "leased",
        "gone",
    )

    def __init__(self, group: _Group, name: str, ready_s: float, tokens: float, tools_s: float) -> None:
        self.group = group
        self.name = name
        self.ready_s, self.tokens, self.tools_s = ready_s, tokens, tools_s
        self.sampled = False
        self.version = -1  # policy version at its first token
        self.replica = -1
        self.station: Station | None = None
        self.leased = False  # it has an instance
        self.gone = False


class _Batch:
    """What the learner works on."""

    __slots__ = ("begun", "trained", "lags", "tokens", "gone")

    def __init__(self, begun: float, lags: list[int], tokens: float) -> None:
        self.begun = begun
        self.trained: float | None = None  # when; its weights are being published since
        self.lags = lags
        self.tokens = tokens
        self.gone = False


@dataclass(frozen=True)
class Step:
    """One trained batch. Times in seconds."""

    ended: float
    step_s: float  # since the end of the one before
    wait_s: float  # for the batch
    train_s: float
    sync_s: float
    lags: list[int]
    tokens: float


@dataclass
class Averages:
    """Integrals over virtual time since it was begun."""

    begun: float = 0.0
    policy: float = 0.0  # share of its highest throughput; on a shared host, of the host's cores
    buffered: float = 0.0
    buffered_bytes: float = 0.0
    generating: float = 0.0
    episodes: float = 0.0  # with an instance
    waiting: float = 0.0  # episodes without one
    in_flight: float = 0.0  # groups
    sampled_tokens: float = 0.0  # of episodes that ended
    ended: int = 0
    most_buffered: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # before it was begun


class Simulation:
    """One run. ``measured`` replaces the distributions of episodes and learner steps."""

    def __init__(self, config: SimulationConfig, measured: Measured | None = None) -> None:
        self.config = config
        self.now = 0.0
        self.steps: list[Step] = []
        self.averages = Averages()
        self.deaths: Counter[str] = Counter()
        samples = config.generator.n_samples_per_prompt
        self.core = ReplayBufferCore(
            batch_size=config.trainer.train_batch_size,
            max_staleness=config.buffer.max_staleness,
            max_running=config.generator.max_inflight_episodes // samples,
            max_bytes=config.buffer.max_bytes,
            resample_zero_variance=config.buffer.zero_variance_groups == "resample",
            window=config.buffer.window,
            clock=lambda: self.now,
        )
        streams = [np.random.default_rng(s) for s in np.random.SeedSequence(config.seed).spawn(5)]
        self._chance, self._rng = chances(streams[2]), streams[3]
        if measured is None:
            self._sizes = drawn_groups(config.episode, samples, streams[0])
            self._step_s = drawn_values(config.learner.step_s, streams[1])
            self._sync_s = drawn_values(config.learner.sync_s, streams[4])
        else:
            self._sizes = measured.drawn_groups(samples, streams[0])
            self._step_s = measured_values(measured.step_s, streams[1])
            self._sync_s = measured_values(measured.sync_s, streams[4])
        self._curve = ThroughputCurve(config.policy.throughput)
        self._environments, self._policy, self._learner = Station(), Station(), Station()
        self._stations = (
            (self._environments, self._environment_done),
            (self._policy, self._sampled),
            (self._learner, self._learner_done),
        )
        self._timers: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._deaths_to_come: list[tuple[float, int, Callable[[], None]]] = []
        self._set_timers = 0
        self._groups: list[set[_Group]] = [set() for _ in range(config.generator.num_workers)]
        self._started_groups = 0
        self._late_groups = 0  # since one was committed
        self._instances = config.environment.max_instances or math.inf
        self._waiting: deque[_Episode] = deque()  # for an instance
        self._replicas: dict[int, set[_Episode]] = {r: set() for r in range(config.policy.num_replicas)}
        self._living = list(self._replicas)
        self._turn = 0  # replicas get episodes in turn
        self._homeless: list[_Episode] = []  # no replica lives
        self._published = 0  # the policy's version
        self._paused = False
        self._batch: _Batch | None = None
        self._learner_up = True
        self._free_since = 0.0  # the learner

    # The loop

    def run(self) -> Simulation:
        """Until the last step is trained, or the time is over.

        Raises:
            Deadlock: with the tickets that are out, or the deadline that no group meets.
        """
        config = self.config
        self._schedule_deaths(config.faults)
        last, end = config.warmup_steps + config.steps, config.max_hours * 3600
        with _no_garbage_collection():
            self._admit()
            self._set_speeds()
            while len(self.steps) < last and self._happen(end):
                pass
        return self

    def _happen(self, end: float) -> bool:
        """The next event; ``False`` where it is beyond ``end``."""
        when, station, done = self._timers[0][0] if self._timers else math.inf, None, None
        for candidate, handler in self._stations:
            due = candidate.due()
            if due < when:
                when, station, done = due, candidate, handler
        if when == math.inf:
            raise Deadlock(f"nothing happens after {self.now:.0f} s: {self.core.outstanding()}")
        death = self._deaths_to_come[0][0] if self._deaths_to_come else math.inf
        if min(when, death) > end:
            return False
        if death < when:
            self._pass_time(death)
            heapq.heappop(self._deaths_to_come)[2]()
        else:
            self._pass_time(when)
            if station is None:
                _, _, handler, argument = heapq.heappop(self._timers)
                handler(argument)
            else:
                done(station.pop())
        self._set_speeds()
        return True

    def _pass_time(self, now: float) -> None:
        elapsed = now - self.now
        self.now = now
        if elapsed <= 0:
            return
        for station, _ in self._stations:
            station.advance(now)
        averages, core = self.averages, self.core
        averages.policy += elapsed * self._policy_share
        averages.buffered += elapsed * core.buffered
        averages.buffered_bytes += elapsed * core.buffered_bytes
        averages.generating += elapsed * self._policy.jobs
        averages.episodes += elapsed * (self._policy.jobs + self._environments.jobs)
        averages.in_flight += elapsed * core.running
        averages.waiting += elapsed * len(self._waiting)

    def _set_speeds(self) -> None:
        """Speeds of what goes on now, by the throughput curve and the host's cores."""
        requests, replicas = self._policy.jobs, len(self._living)
        tokens_s = self._curve(requests / replicas) * replicas if replicas and not self._paused else 0.0
        rollouts = 1.0
        if self.config.host is None:
            self._policy_share = tokens_s / (self._curve.highest * len(self._replicas))
        else:
            rollouts = self._share_host(self.config.host)
        self._environments.speed = rollouts
        self._policy.speed = rollouts * tokens_s / requests if requests else 0.0

    def _share_host(self, host: HostSection) -> float:
        """Cores for episodes and learner. Returns the speed of an episode, against one alone on the idle machine."""
        wanted = host.episode_cpu * (self._policy.jobs + self._environments.jobs)
        rollouts = min(wanted, host.rollout_threads)
        learner = host.learner_threads if self._learner.jobs else 0.0
        share = min(1.0, host.cores / max(rollouts + learner, 1e-9))
        self._learner.speed = share
        self._policy_share = share * rollouts / host.cores
        return share * rollouts / wanted if wanted else 1.0

    def _after(self, seconds: float, handler: Callable[[Any], None], argument: Any = None) -> None:
        self._set_timers += 1
        heapq.heappush(self._timers, (self.now + seconds, self._set_timers, handler, argument))

    # Rollouts

    def _admit(self) -> None:
        """Start a group for every ticket there is."""
        while (ticket := self.core.issue()) is not None:
            self._start_group(ticket)

    def _start_group(self, ticket: Ticket) -> None:
        config = self.config.episode
        worker = self._started_groups % len(self._groups)
        self._started_groups += 1
        group = _Group(ticket, worker, self._chance(config.zero_variance))
        for index, sizes in enumerate(next(self._sizes)):
            group.episodes.append(_Episode(group, f"{ticket.ticket_id}/{index}", *sizes))
        group.left = len(group.episodes)
        self._groups[worker].add(group)
        self.core.start(ticket.ticket_id, "simulated", [episode.name for episode in group.episodes])
        for episode in group.episodes:
            self._provision(episode)
        self._after(config.group_timeout_s, self._group_is_late, group)

    def _provision(self, episode: _Episode) -> None:
        if self._instances < 1:
            self._waiting.append(episode)
            return
        self._instances -= 1
        episode.leased = True
        self._serve(episode, self._environments, episode.ready_s)

    def _serve(self, episode: _Episode, station: Station, demand: float) -> None:
        episode.station = station
        station.add(episode, demand)

    def _environment_done(self, episode: _Episode) -> None:
        if episode.sampled:
            self._end(episode, self._outcome(episode))
        else:
            self._generate(episode)

    def _generate(self, episode: _Episode) -> None:
        if not self._living:
            episode.station = None
            self._homeless.append(episode)
            return
        episode.version = self._published
        self.core.generating(episode.group.ticket.ticket_id, f"rollout_worker_{episode.group.worker}")
        self._turn += 1
        episode.replica = self._living[self._turn % len(self._living)]
        self._replicas[episode.replica].add(episode)
        self._serve(episode, self._policy, episode.tokens)

    def _sampled(self, episode: _Episode) -> None:
        self._replicas[episode.replica].discard(episode)
        episode.sampled = True
        if self._chance(self.config.episode.hang):
            episode.station = None  # it waits for its group's deadline
            return
        self._serve(episode, self._environments, episode.tools_s)

    def _outcome(self, episode: _Episode) -> Outcome:
        config = self.config.episode
        if self._chance(config.infra_failed):
            return BROKE
        if self._chance(config.ungraded):
            return VERIFIER_FAILED
        return WON if episode.group.zero_variance or len(episode.group.outcomes) % 2 else LOST

    def _end(self, episode: _Episode, outcome: Outcome) -> None:
        group = episode.group
        group.outcomes[episode.name] = outcome
        group.tokens += episode.tokens
        self.averages.sampled_tokens += episode.tokens
        self.averages.ended += 1
        self._free_instance()
        group.left -= 1
        if not group.left:
            self._commit(group)

    def _free_instance(self) -> None:
        self._instances += 1
        while self._waiting:
            episode = self._waiting.popleft()
            if not episode.gone:
                self._provision(episode)
                return

    def _commit(self, group: _Group) -> None:
        self._groups[group.worker].discard(group)
        self._late_groups = 0
        members = [e for e in group.episodes if isinstance(group.outcomes[e.name], Graded)]
        versions = [e.version for e in members]
        header = GroupHeader(
            task_key="simulated",
            env_key="simulated",
            outcomes=group.outcomes,
            rewards=tuple(group.outcomes[e.name].reward for e in members),
            oldest_version=min(versions, default=None),
            newest_version=max(versions, default=None),
            nbytes=self.config.episode.nbytes * len(group.episodes),
            sampled_tokens=round(group.tokens),
        )
        group.episodes = []
        self.core.commit(group.ticket.ticket_id, header, None)
        self.averages.most_buffered = max(self.averages.most_buffered, self.core.buffered)
        self._take()
        self._admit()

    def _group_is_late(self, group: _Group) -> None:
        if group not in self._groups[group.worker]:
            return
        self._late_groups += 1
        if self._late_groups > max(HOPELESS_GROUPS, HOPELESS_ROUNDS * self.core.max_running):
            late, deadline = self._late_groups, self.config.episode.group_timeout_s
            raise Deadlock(f"{late:,} groups in a row took longer than episode.group_timeout_s, {deadline:g} s")
        self._abandon(group, TIMED_OUT)
        self._take()
        self._admit()

    def _abandon(self, group: _Group, outcome: Outcome) -> None:
        """Leaves a place in ``buffer.window``, so that there may be a batch now."""
        self._groups[group.worker].discard(group)
        self.core.abandon(group.ticket.ticket_id, outcome)
        for episode in group.episodes:
            if episode.name not in group.outcomes:
                self._cancel(episode)
        group.episodes = []

    def _cancel(self, episode: _Episode) -> None:
        if episode.station is not None:
            episode.station.remove(episode)
        if episode.station is self._policy:
            self._replicas[episode.replica].discard(episode)
        episode.gone = True
        if episode.leased:
            self._free_instance()

    # The learner

    def _take(self) -> None:
        """The next batch, if there is one and the learner is free for it."""
        if self._batch is not None or not self._learner_up:
            return
        tickets = self.core.take()
        if tickets is None:
            return
        lags = [self.core.lag(ticket.header) for ticket in tickets]
        self._batch = _Batch(self.now, lags, sum(ticket.header.sampled_tokens for ticket in tickets))
        self._learner.add(self._batch, next(self._step_s))

    def _learner_done(self, batch: _Batch) -> None:
        """With training, or with the publication that follows."""
        if batch.trained is None:
            batch.trained = self.now
            self._paused = True
            self._learner.add(batch, next(self._sync_s))
            return
        self._paused = False
        self._published += 1
        self.core.acknowledge(self._published)
        last = self.steps[-1].ended if self.steps else 0.0
        self.steps.append(
            Step(
                ended=self.now,
                step_s=self.now - last,
                wait_s=batch.begun - self._free_since,
                train_s=batch.trained - batch.begun,
                sync_s=self.now - batch.trained,
                lags=batch.lags,
                tokens=batch.tokens,
            )
        )
        if len(self.steps) == self.config.warmup_steps:
            self.averages = Averages(begun=self.now, dropped=self.core.dropped.copy())
        self._batch, self._free_since = None, self.now
        self._take()
        self._admit()

    # Deaths

    def _schedule_deaths(self, faults: FaultsSection) -> None:
        replicas, workers = self.config.policy.num_replicas, len(self._groups)
        for mtbf_h, count, kill in (
            (faults.replica_mtbf_h, replicas, self._kill_replica),
            (faults.worker_mtbf_h, workers, self._kill_worker),
            (faults.learner_mtbf_h, 1, self._kill_learner),
        ):
            if mtbf_h is not None:
                self._schedule_death(mtbf_h * 3600 / count, kill)

    def _schedule_death(self, mean_s: float, kill: Callable[[], None]) -> None:
        def die() -> None:
            kill()
            self._schedule_death(mean_s, kill)

        self._set_timers += 1
        heapq.heappush(self._deaths_to_come, (self.now + self._rng.exponential(mean_s), self._set_timers, die))

    def _kill_replica(self) -> None:
        if not self._living:
            return
        self.deaths["replica"] += 1
        replica = self._living.pop(int(self._rng.integers(len(self._living))))
        for episode in sorted(self._replicas[replica], key=lambda e: e.name):
            self._policy.remove(episode)
            self._end(episode, REPLICA_DIED)
        self._replicas[replica].clear()
        self._after(self.config.faults.replica_restart_s, self._replica_is_back, replica)

    def _replica_is_back(self, replica: int) -> None:
        self._living.append(replica)
        homeless, self._homeless = self._homeless, []
        for episode in homeless:
            if not episode.gone:
                self._generate(episode)

    def _kill_worker(self) -> None:
        self.deaths["worker"] += 1
        groups = self._groups[int(self._rng.integers(len(self._groups)))]
        for group in sorted(groups, key=lambda g: g.ticket.ticket_id):
            self._abandon(group, WORKER_DIED)
        self._take()
        self._admit()

    def _kill_learner(self) -> None:
        """What it trained on goes back to the buffer; as it starts again, it publishes its weights anew."""
        if not self._learner_up:
            return
        self.deaths["learner"] += 1
        self._learner_up = False
        if self._batch is not None:
            self._learner.remove(self._batch)
            self._batch, self._paused = None, False
            self.core.give_back()
        self._after(self.config.faults.learner_restart_s, self._learner_is_back)

    def _learner_is_back(self, _: None) -> None:
        self._learner_up = True
        self._published += 1
        self.core.advance(self._published)
        self._take()
        self._admit()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Reference counts free all there is; a collection would walk through a million living episodes."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class ThroughputCurve:
    """Tokens/s of one replica by the requests it has: straight between the points and to the origin, level beyond."""

    def __init__(self, points: dict[int, float]) -> None:
        self._requests = [0.0, *sorted(points)]
        self._rates = [0.0, *(points[n] for n in sorted(points))]
        self.highest = max(self._rates)

    def __call__(self, requests: float) -> float:
        index = bisect_right(self._requests, requests)
        if index == len(self._requests):
            return self._rates[-1]
        x0, x1 = self._requests[index - 1], self._requests[index]
        y0, y1 = self._rates[index - 1], self._rates[index]
        return y0 + (y1 - y0) * (requests - x0) / (x1 - x0)
