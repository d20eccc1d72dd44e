"""Whole episodes: Episode over FleetTaskEnv, the pool and the real SDK, over HTTP, against the local Fleet."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from actors.config import DeadlinesConfig
from actors.env_pool import LocalPoolClient
from actors.env_pool_core import EnvPoolCore, PoolSettings
from actors.envs.fleet import FleetControl, FleetTaskEnv
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.episode import DialogueRules, Episode, EpisodeLimits
from actors.lease_table import EnvSpec
from actors.prompt import Prompter
from actors.replay_buffer_core import GroupHeader
from actors.task import parse_task
from actors.trajectory import Graded, Group, InfraFailed, StopReason, Ungraded
from serve.sampling import Completion, Sampling
from tests.fleet_faults import KEY, LocalFleet, leaving_nothing
from tests.models import byte_tokenizer
from tests.suspensions import runs_to_its_end
from train.advantages import advantages

TOKENIZER = byte_tokenizer()
PROMPTER = Prompter(TOKENIZER)
QUICK = DeadlinesConfig(provision=10, reset=5, list=5, generate=5, step=5, verify=10, close=5, episode=30)
ANSWERED = "def verify(env, final_answer=None):\n    return float(final_answer == 'fine')"
COMMENTED = """
def verify(env):
    return float(env.db("current").table("comments").eq("body", "done by test").count())
"""
LIST = '<tool_call>{"name": "list_users", "arguments": {}}</tool_call>'
COMMENT = '<tool_call>{"name": "add_comment", "arguments": {"id": "T12", "text": "done by test"}}</tool_call>'


def task(**overrides):
    raw = {
        "task_key": "t1",
        "prompt": "Comment on T12.",
        "env_key": "tracker",
        "data_key": "desk",
        "data_version": "s7",
    }
    raw |= {"env_variables": {"CURRENT_DATE": "2025-01-30", "LOGGED_IN_USER": "dan"}, "verifier_code": ANSWERED}
    return parse_task(raw | overrides, "test")


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess(instance_limit=8) as process:
        yield LocalFleet(process)


@pytest.fixture(autouse=True)
async def clean(local_fleet):
    async with leaving_nothing(local_fleet):
        yield


@asynccontextmanager
async def pooled(local_fleet, **settings):
    settings = {"heartbeat_s": None, "idle_s": 60.0, "tick_s": 0.05} | settings
    pool = EnvPoolCore(FleetControl(KEY, local_fleet.url), PoolSettings("whole", "n", **settings))
    await pool.start()
    try:
        yield pool
    finally:
        assert (await pool.close_all()).left == ()


class OneAttempt(LocalPoolClient):
    """A pool's client whose environments ask a verifier once."""

    async def open(self, task, deadlines):
        lease = await self.acquire(EnvSpec.of(task), deadlines.provision)
        return FleetTaskEnv(
            task,
            KEY,
            lease=lease,
            give_back=self.release,
            base_url=self._base_url,
            max_steps=None,
            grade_on_done=False,
            deadlines=deadlines,
            verify_backoff_s=(),
        )


def client_of(pool, local_fleet, kind=LocalPoolClient):
    return kind(pool, api_key=KEY, base_url=local_fleet.url)


def policy(*texts):
    """Says the texts, one a turn. ``prompts`` remembers what it read."""
    prompts = []

    async def generate(prompt_ids, sampling, *, request_id, session_id, cache_salt):
        await asyncio.sleep(0)
        ids = [*TOKENIZER.encode(texts[len(prompts)], add_special_tokens=False), TOKENIZER.eos_token_id]
        prompts.append(prompt_ids)
        return Completion(ids, [-0.1] * len(ids), "stop", None, [(0, 0, len(ids))], "v0")

    generate.prompts = prompts
    return generate


def episode(open_env, generate, *, of=None, index=0, max_turns=9, deadlines=QUICK):
    of = of or task()
    return Episode(
        of,
        f"{of.task_key}/{index}",
        group_id=0,
        sample_index=index,
        open_env=lambda: open_env(of, deadlines),
        generate=generate,
        prompter=PROMPTER,
        limits=EpisodeLimits(max_turns, 20_000, 30_000, deadlines),
        sampling=Sampling(),
        rules=DialogueRules(),
    )


# -- what an episode comes to


async def test_an_answer_before_done_reaches_the_verifier_and_nothing_is_left(local_fleet):
    async with pooled(local_fleet) as pool:
        got = await episode(client_of(pool, local_fleet).open, policy(LIST, "fine\n<done>")).run()
        assert (got.outcome, got.stop_reason, got.turns, got.tool_errors) == (Graded(1.0), StopReason.DONE, 2, 0)
        assert pool.stats()["leased"] == 0


async def test_the_date_and_the_user_of_the_task_are_in_the_prompt(local_fleet):
    async with pooled(local_fleet) as pool:
        generate = policy("<done>")
        await episode(client_of(pool, local_fleet).open, generate).run()
    prompt = TOKENIZER.decode(generate.prompts[0])
    assert "## Current Date\n2025-01-30" in prompt and "Logged in user ID: dan" in prompt
    assert time.strftime("%Y-%m-%d") not in prompt


async def test_a_last_turn_without_a_call_is_graded_on_the_state_it_left(local_fleet):
    async with pooled(local_fleet) as pool:
        talk = policy(COMMENT, "I am not sure whether that was all.")
        got = await episode(
            client_of(pool, local_fleet).open, talk, of=task(verifier_code=COMMENTED), max_turns=2
        ).run()
        assert (got.outcome, got.stop_reason) == (Graded(1.0), StopReason.MAX_TURNS)


async def test_a_submitted_answer_ends_and_grades_the_episode(local_fleet):
    submit = '<tool_call>{"name": "submit_final_answer", "arguments": {"answer": "fine"}}</tool_call>'
    of = task(prompt="How is it? Use submit_final_answer.")
    async with pooled(local_fleet) as pool:
        got = await episode(client_of(pool, local_fleet).open, policy(LIST, submit), of=of).run()
        assert (got.outcome, got.stop_reason, got.turns) == (Graded(1.0), StopReason.ENV_DONE, 2)


async def test_an_instance_whose_runner_has_no_reset_serves_one_episode_and_the_next_gets_a_fresh_one(local_fleet):
    comment = policy(COMMENT, "<done>")
    async with pooled(local_fleet) as pool:
        open_env = client_of(pool, local_fleet).open
        first = await episode(open_env, policy(COMMENT, "<done>"), of=task(verifier_code=COMMENTED)).run()
        assert pool.stats()["idle"] == 1, "reset works: the next episode gets the same instance"
        local_fleet.arm({"route": "reset", "kind": "status", "status": 501})
        used = await episode(open_env, comment, of=task(verifier_code=COMMENTED)).run()
        assert isinstance(used.outcome, InfraFailed) and "501" in used.outcome.reason and comment.prompts == []
        fresh = [
            await episode(open_env, policy(COMMENT, "<done>"), of=task(verifier_code=COMMENTED)).run() for _ in range(2)
        ]
        assert [first.outcome, *(one.outcome for one in fresh)] == [Graded(1.0)] * 3, "one comment each, never two"
        assert (pool.stats()["made"], pool.stats()["reused"], pool.stats()["idle"]) == (3, 1, 0)


# -- cancelling


async def test_cancelling_a_whole_episode_at_any_await_returns_and_frees_its_lease_within_two_seconds(local_fleet):
    async with pooled(local_fleet, idle_s=0.2) as pool:
        open_env = client_of(pool, local_fleet).open
        suspension, ended = 0, False
        while not ended:
            suspension += 1
            work = episode(open_env, policy(LIST, COMMENT, "fine<done>")).run()
            ended = await runs_to_its_end(work, suspension, within_s=2.0)
            begun = time.monotonic()
            while pool.stats()["leased"] or pool.stats()["waiting"]:
                assert time.monotonic() - begun < 2, f"suspension {suspension}: {pool.stats()}"
                await asyncio.sleep(0.01)
        assert suspension > 10, "an episode suspends at least once per request"


@pytest.mark.parametrize(("phase", "route"), [("provision", "make"), ("verify", "verify")])
async def test_cancelling_what_hangs_returns_within_two_seconds_although_the_delete_is_slow_too(
    local_fleet, phase, route
):
    async def open_env(of, deadlines):
        env = FleetTaskEnv(of, KEY, base_url=local_fleet.url, deadlines=deadlines, grade_on_done=False)
        if phase == "provision":
            env._instance = await env._provision()
        return env

    # Where an instance is made, its making goes on: it has to end before it can be deleted.
    hang = {"route": route, "kind": "slow", "seconds": 0.5, "stage": "after"} if phase == "provision" else {
        "route": route, "kind": "hang", "seconds": 4.0}  # fmt: skip
    local_fleet.arm(hang, {"route": "delete", "kind": "slow", "seconds": 2.2})
    one = episode(open_env, policy(LIST, "<done>"))
    running = asyncio.create_task(one.run())
    while one.phase != phase or not local_fleet.running():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)
    begun = time.monotonic()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - begun < 2.0
    while local_fleet.running():
        assert time.monotonic() - begun < 5.0
        await asyncio.sleep(0.02)


async def test_a_tool_server_that_hangs_costs_its_episode_only(local_fleet):
    deadlines = QUICK.model_copy(update={"list": 3.0})
    async with pooled(local_fleet) as pool:
        open_env = client_of(pool, local_fleet).open
        await episode(open_env, policy("<done>")).run()  # from here on only the handshake is made
        local_fleet.arm({"route": "mcp", "kind": "hang", "count": 1})

        async def timed(index):
            begun = time.monotonic()
            one = episode(open_env, policy(LIST, "fine<done>"), index=index, deadlines=deadlines)
            return (await one.run()).outcome, time.monotonic() - begun

        outcomes = await asyncio.gather(*map(timed, range(4)))
    hung = [outcome for outcome, _ in outcomes if isinstance(outcome, InfraFailed)]
    assert len(hung) == 1 and "did not answer within 3 s" in hung[0].reason
    assert [outcome for outcome, seconds in outcomes if seconds < 3.0] == [Graded(1.0)] * 3


# -- verifiers that fail


async def test_with_a_quarter_of_verifier_calls_failing_groups_are_those_of_the_fault_free_run_without_the_ungraded(
    local_fleet,
):
    tasks = [task(task_key=f"t{number}") for number in range(12)]

    async def roll_out(pool, of):
        # Which members solve the task depends on the task and the member alone.
        right = [(int(of.task_key[1:]) * 7 + index * 5) % 3 == 0 for index in range(4)]
        open_env = client_of(pool, local_fleet, OneAttempt).open
        episodes = [
            episode(open_env, policy("fine<done>" if right[index] else "no<done>"), of=of, index=index)
            for index in range(4)
        ]
        return Group(0, of.task_key, of.env_key, await asyncio.gather(*(one.run() for one in episodes)))

    async with pooled(local_fleet) as pool:
        fault_free = [await roll_out(pool, of) for of in tasks]
        local_fleet.arm({"route": "verify", "kind": "verifier_failure", "probability": 0.25}, seed=3)
        faulty = [await roll_out(pool, of) for of in tasks]
    ungraded = 0
    for clean_group, group in zip(fault_free, faulty, strict=True):
        kept = [t.sample_index for t in group.trajectories if isinstance(t.outcome, Graded)]
        lost = [t.outcome for t in group.trajectories if not isinstance(t.outcome, Graded)]
        assert all(isinstance(outcome, Ungraded) for outcome in lost)
        ungraded += len(lost)
        header = GroupHeader.of(group, overlong_filtering=False)
        expected = [clean_group.trajectories[index].reward for index in kept]
        assert list(header.rewards) == expected, "no member's reward has become another's, or a zero"
        if len(kept) >= 2:
            assert advantages([header.rewards], "grpo")[0].tolist() == advantages([expected], "grpo")[0].tolist()
    assert all(isinstance(t.outcome, Graded) for group in fault_free for t in group.trajectories)
    assert 4 <= ungraded <= 24, "about a quarter of 48"


async def test_grading_that_runs_out_of_time_says_what_failed_last(local_fleet):
    local_fleet.arm({"route": "verify", "kind": "judge_error"})
    async with pooled(local_fleet) as pool:
        deadlines = QUICK.model_copy(update={"verify": 1.0})
        got = await episode(client_of(pool, local_fleet).open, policy("fine<done>"), deadlines=deadlines).run()
    assert isinstance(got.outcome, Ungraded) and "not graded within 1 s; last: the judge failed" in got.outcome.reason
