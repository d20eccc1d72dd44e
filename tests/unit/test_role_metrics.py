"""Time shares add up to 1 and are those of the intervals they are made of; lags and rates, between two steps."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import DeadlinesConfig, GeneratorConfig
from actors.rollout_worker import EpisodeRunner, GroupOrder, WorkerSettings
from actors.task import Task
from actors.trajectory import Graded
from serve.sampling import Completion, Sampling
from serve.state_clock import StateClock
from tests.models import byte_tokenizer
from train.metrics import METRICS, find_spec
from train.role_metrics import LEARNER, POLICY, ROLLOUT, ReplicaLoad, RolloutLoad, TimeShares, loop_lag_metrics
from train.step_timer import StepTimer

SECONDS = st.floats(0, 1e5)


class Hands:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds: float) -> None:
        self.now += seconds


def shares(metrics: dict[str, float], role: str) -> dict[str, float]:
    prefix = f"time_share/{role}/"
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize(("role", "shown"), [("learner", LEARNER), ("rollout", ROLLOUT), ("policy", POLICY)])
def test_the_table_holds_the_shares_of_each_role(role, shown):
    described = [spec.name for spec in METRICS if spec.name.startswith(f"time_share/{role}/")]
    assert described == [f"time_share/{role}/{name}" for name in shown]


# -- the learner


@given(st.lists(st.tuples(SECONDS, *[st.none() | SECONDS] * 4), min_size=1, max_size=4))
def test_a_learners_shares_add_up_to_1_in_every_step(steps):
    hands = Hands()
    timer = StepTimer(hands)
    for between, *seconds in steps:
        begun = hands.now
        for phase, passed in zip(("wait_for_batch", "forward_backward", "publish", "checkpoint"), seconds, strict=True):
            if passed is not None:
                with timer(phase):
                    hands.pass_by(passed)
        hands.pass_by(between)
        metrics = timer.end_step()
        assert metrics["timing/step"] == pytest.approx(hands.now - begun, abs=1e-6)
        found = shares(metrics, "learner")
        assert all(value >= 0 for value in found.values())
        if hands.now > begun + 1e-3:
            assert sum(found.values()) == pytest.approx(1.0)
            assert found.keys() == LEARNER.keys()


def test_a_learners_step_reaches_from_report_to_report():
    hands = Hands()
    timer = StepTimer(hands)
    with timer("wait_for_batch"):
        hands.pass_by(3)
    with timer("forward_backward"):
        hands.pass_by(4)
    with timer("optimizer"):
        hands.pass_by(1)
    assert timer.metrics()["timing/step"] == 8  # so far, as a checkpoint has it
    with timer("checkpoint"):
        hands.pass_by(2)
    first = timer.end_step()
    assert shares(first, "learner") == {
        "wait_for_batch": 0.3,
        "train": 0.5,
        "publish": 0,
        "checkpoint": 0.2,
        "other": 0,
    }
    hands.pass_by(1)  # the report
    with timer("publish"):
        hands.pass_by(3)
    second = timer.end_step()
    assert second["timing/step"] == 4 and "timing/checkpoint" not in second
    assert shares(second, "learner") | {"publish": 0.75, "other": 0.25} == shares(second, "learner")


# -- rollouts


class Policy:
    """A policy that takes its time over each turn, and ends the episode with its second."""

    async def generate(self, prompt_ids, sampling, *, request_id, session_id, cache_salt):
        await asyncio.sleep(0.06)
        text = "<done>" if request_id.endswith("-1") else '<tool_call>{"name":"look","arguments":{}}</tool_call>'
        ids = byte_tokenizer().encode(text, add_special_tokens=False)
        return Completion(ids, [-0.5] * len(ids), "stop", None, [(0, 0, len(ids))], "v0")


class Room:
    async def reset_async(self):
        await asyncio.sleep(0.02)
        tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
        return SimpleNamespace(tools=[tool], result=None)

    async def step_async(self, action):
        await asyncio.sleep(0.02)
        return SimpleNamespace(result="seen", error=None, done=False, reward=None)

    async def verify_async(self, final_answer, conversation):
        await asyncio.sleep(0.02)
        return Graded(1.0)

    async def close_async(self):
        await asyncio.sleep(0.02)


class Pool:
    async def open(self, task, deadlines, *, partial_reward):
        await asyncio.sleep(0.04)
        return Room()


async def test_the_seconds_of_a_worker_are_those_of_its_episodes_also_while_they_run():
    generator = GeneratorConfig(max_turns=3, deadlines=DeadlinesConfig())
    settings = WorkerSettings("w", "m", 4096, 2, generator, None, None, True)
    runner = EpisodeRunner(settings, byte_tokenizer(), Policy(), Pool())
    order = GroupOrder(Task(task_key="t", prompt="Look.", env_key="e"), 1, tuple("abcd"), Sampling(max_tokens=99))
    load = TimeShares("rollout", ROLLOUT)
    assert load.since_last({"w": runner.episode_s()}) == {}
    running = asyncio.create_task(runner.run_group(order))
    await asyncio.sleep(0.05)
    assert sum(runner.episode_s().values()) > 4 * 0.04 and runner.episodes == 0  # nothing has ended yet
    group = await running
    seconds = runner.episode_s()
    await asyncio.sleep(0.05)
    assert runner.episode_s() == seconds  # whoever has ended counts no longer
    for phase in ("provision", "reset", "generate", "step", "verify", "close"):
        assert seconds[phase] == pytest.approx(sum(t.phase_s[phase] for t in group.trajectories), abs=0.05)
    durations = sum(t.duration_s for t in group.trajectories)
    assert sum(seconds.values()) == pytest.approx(durations + seconds["queued"], abs=0.05)
    assert seconds["queued"] > 0.2  # two of four at a time
    found = shares(load.since_last({"w": seconds}), "rollout")
    assert sum(found.values()) == pytest.approx(1.0) and found.keys() == ROLLOUT.keys()
    assert found["generate"] > found["env"] > found["verify"] > 0


async def test_a_cancelled_group_leaves_nothing_that_counts_on():
    generator = GeneratorConfig(max_turns=3, deadlines=DeadlinesConfig())
    settings = WorkerSettings("w", "m", 4096, 2, generator, None, None, True)
    runner = EpisodeRunner(settings, byte_tokenizer(), Policy(), Pool())
    order = GroupOrder(Task(task_key="t", prompt="Look.", env_key="e"), 1, tuple("abcd"), Sampling(max_tokens=99))
    for wait_s in (0.01, 0.06, 0.12):
        running = asyncio.create_task(runner.run_group(order))
        await asyncio.sleep(wait_s)
        running.cancel()
        await asyncio.wait([running])
        seconds = runner.episode_s()
        await asyncio.sleep(0.02)
        assert runner.episode_s() == seconds
        assert runner.phases() == {} and runner._slots._value == 2
    assert seconds["close"] > 0.02


async def test_a_worker_that_gets_other_peers_cancels_every_group_and_waits_for_its_environments():
    generator = GeneratorConfig(max_turns=3, deadlines=DeadlinesConfig())
    settings = WorkerSettings("w", "m", 4096, 4, generator, None, None, True)
    runner = EpisodeRunner(settings, byte_tokenizer(), Policy(), Pool())
    task = Task(task_key="t", prompt="Look.", env_key="e")
    orders = [GroupOrder(task, i, (f"{i}/a", f"{i}/b"), Sampling(max_tokens=99)) for i in range(3)]
    groups = [asyncio.create_task(runner.run_group(order)) for order in orders]
    await asyncio.sleep(0.06)
    await runner.cancel_all(10.0)
    assert all(group.cancelled() for group in groups)
    assert runner.phases() == {} and runner._slots._value == 4 and runner.episode_s()["close"] > 0.02
    assert len((await runner.run_group(orders[0])).trajectories) == 2


# -- replicas, and everybody between two steps


def answer(replica: str, late: list[float], **spent: float) -> dict:
    return {"replica": replica, "loop_lag": late, "time_spent": spent}


def test_replicas_count_from_their_first_answer_on_and_together():
    load = ReplicaLoad()
    assert load.metrics([answer("a", [0.1], generate=100, idle=20, down=0)]) == {
        "loop_lag/replica/max_s": 0.1,
        "loop_lag/replica/p99_s": 0.1,
    }
    second = load.metrics([answer("a", [], generate=106, idle=20, update=2), answer("b", [], generate=7)])
    assert shares(second, "policy") == {"generate": 0.75, "update": 0.25, "idle": 0, "down": 0}
    third = load.metrics([answer("b", [0.2], generate=8), answer("a", [0.1], generate=106, idle=20, update=2, down=3)])
    assert shares(third, "policy") == {"generate": 0.25, "update": 0, "idle": 0, "down": 0.75}
    assert third["loop_lag/replica/max_s"] == 0.2
    assert all(find_spec(name) for name in third)


def test_between_two_steps_all_lags_count_and_the_rate_is_that_of_the_time_between():
    hands = Hands()
    load = RolloutLoad(hands)

    def work(tokens: int, late: list[float], **seconds: float) -> None:
        lags = {"rollout_worker": late, "conductor": [0.0]}
        load.add_work({"sampled_tokens": tokens, "loop_lag": lags, "episode_s": seconds})

    work(1000, [9.0], generate=500.0)  # before rollouts begin
    for tokens, late in ((1100, 0.5), (1300, 0.2)):
        hands.pass_by(2)
        load.add_lag("env_pool", [late / 10])
        work(tokens, [late], generate=500.0 + tokens - 1000, step=100.0)
    assert load.lag_metrics()["loop_lag/rollout_worker/max_s"] == 0.5
    step = load.end_step()
    assert step["generate/tokens_per_s"] == 75.0
    assert step["loop_lag/rollout_worker/max_s"] == 0.5 and step["loop_lag/env_pool/max_s"] == 0.05
    assert shares(step, "rollout")["generate"] == 0.75 and shares(step, "rollout")["env"] == 0.25
    assert all(find_spec(name) for name in step)
    assert load.end_step() == {}  # nothing was heard since
    assert load.lag_metrics() == {}


def test_a_percentile_of_few_lags_is_one_that_was_measured():
    late = [0.001] * 15 + [2.0]
    assert loop_lag_metrics("conductor", late) == {"loop_lag/conductor/max_s": 2.0, "loop_lag/conductor/p99_s": 2.0}
    assert loop_lag_metrics("conductor", [0.001] * 300 + [2.0])["loop_lag/conductor/p99_s"] == 0.001


@given(st.lists(st.tuples(st.sampled_from([s for states in ROLLOUT.values() for s in states]), st.floats(0, 99))))
def test_whatever_states_a_worker_counts_all_of_them_are_shown(stays):
    hands = Hands()
    clock = StateClock(hands)
    load = TimeShares("rollout", ROLLOUT)
    load.since_last({"w": clock.seconds()})
    for state, seconds in stays:
        with clock.inside(state):
            hands.pass_by(seconds)
    found = load.since_last({"w": clock.seconds()})
    if sum(seconds for _, seconds in stays) > 1e-6:
        assert sum(found.values()) == pytest.approx(1.0)
