"""An episode is token exact, is graded on every exit, and turns whatever goes wrong into one outcome."""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from actors.config import DeadlinesConfig
from actors.episode import Episode, EpisodeLimits, turn_seed
from actors.prompt import Prompter
from actors.task import Task
from actors.trajectory import Graded, InfraFailed, Span, StopReason, Ungraded
from serve.sampling import Completion, Sampling
from tests.models import byte_tokenizer

CALL = '<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>'
TOKENIZER = byte_tokenizer()
EOS = TOKENIZER.eos_token_id
FIRST_PROMPT = len(Prompter(TOKENIZER).first(Task(task_key="t", prompt="Look.", env_key="e"), [])[1])


@dataclass
class Room:
    """An environment in memory: counts what happens to it; each verb can be told to hang or to raise."""

    reset: object = None
    step: object = None
    verdict: object = Graded(1.0)
    env_reward: float | None = None
    calls: list = field(default_factory=list)
    graded_with: list = field(default_factory=list)
    closed: int = 0

    async def reset_async(self):
        await misbehave(self.reset)
        return SimpleNamespace(tools=[])

    async def step_async(self, action):
        await misbehave(self.step)
        self.calls.append(action)
        done = self.env_reward is not None
        return SimpleNamespace(result={"seen": len(self.calls)}, error=None, done=done, reward=self.env_reward)

    async def verify_async(self, final_answer, conversation):
        self.graded_with.append((final_answer, [m["role"] for m in conversation]))
        if not isinstance(self.verdict, (Graded, Ungraded)):
            await misbehave(self.verdict)
        return self.verdict

    async def close_async(self):
        self.closed += 1


async def misbehave(how):
    if how == "hang":
        await asyncio.sleep(3600)
    if isinstance(how, Exception):
        raise how


class Script:
    """A policy that says the given texts, one a turn, and remembers what it was given."""

    def __init__(self, *texts, version=3, stop_reason="stop", append_eos=True):
        self.texts, self.version, self.stop_reason, self.append_eos = list(texts), version, stop_reason, append_eos
        self.prompts, self.requests = [], []

    async def __call__(self, prompt_ids, sampling, *, request_id, session_id, cache_salt):
        self.prompts.append(prompt_ids)
        self.requests.append((sampling, request_id, session_id, cache_salt))
        text = self.texts.pop(0)
        await misbehave(text)
        ids = TOKENIZER.encode(text, add_special_tokens=False) + [EOS] * self.append_eos
        version = self.version + len(self.prompts) - 1
        return Completion(
            token_ids=ids,
            logprobs=[-0.5] * len(ids),
            stop_reason=self.stop_reason,
            stop_string=None,
            spans=[(version, 0, len(ids))],
            cache_salt=cache_salt or "v3",
        )


def episode(policy, room, *, provision=None, **limits):
    deadlines = DeadlinesConfig(**limits.pop("deadlines", {}))
    settings = {"max_turns": 5, "max_input_length": 4000, "max_model_len": 6000} | limits

    async def open_env():
        await misbehave(provision)
        return room

    return Episode(
        Task(task_key="t", prompt="Look.", env_key="e"),
        "7/t/0",
        group_id=7,
        sample_index=0,
        open_env=open_env,
        generate=policy,
        prompter=Prompter(TOKENIZER),
        limits=EpisodeLimits(deadlines=deadlines, **settings),
        sampling=Sampling(max_tokens=500, seed=11),
    )


def run(policy, room, **limits):
    return asyncio.run(episode(policy, room, **limits).run())


def test_ids_are_what_the_policy_was_given_and_sampled_and_nothing_else():
    policy, room = Script(CALL, "42<done>"), Room()
    got = run(policy, room)
    first, second = policy.prompts
    assert second[: len(first)] == first and len(second) > len(first)
    sampled = TOKENIZER.encode(CALL) + [EOS], TOKENIZER.encode("42<done>") + [EOS]
    assert second[len(first) :][: len(sampled[0])] == sampled[0]
    assert list(got.ids) == second + sampled[1]
    assert [int(i) for i in got.ids[got.mask == 1]] == sampled[0] + sampled[1]
    assert got.mask.sum() == len(sampled[0]) + len(sampled[1])
    assert (got.logprobs[got.mask == 1] == np.float32(-0.5)).all() and (got.logprobs[got.mask == 0] == 0).all()
    assert got.spans == [Span(3, 0, len(sampled[0])), Span(4, len(sampled[0]), int(got.mask.sum()))]
    assert got.prompt_length == len(first)


def test_the_final_answer_and_the_conversation_reach_the_verifier():
    room = Room()
    got = run(Script(CALL, "it is 42\n<done>"), room)
    assert room.graded_with == [("it is 42", ["system", "user", "assistant", "tool", "assistant"])]
    assert (got.outcome, got.stop_reason, got.turns, got.tool_calls) == (Graded(1.0), StopReason.DONE, 2, 1)
    assert room.calls == [{"tool": "look", "params": {"at": "x"}}] and room.closed == 1


def test_every_request_has_its_own_seed_and_the_salt_of_the_first_turn():
    policy = Script(CALL, "<done>")
    run(policy, Room())
    (one, id1, session1, salt1), (two, id2, session2, salt2) = policy.requests
    assert (salt1, salt2) == (None, "v3") and id1 != id2 and session1 == session2 == "7/t/0"
    assert (one.seed, two.seed) == (turn_seed(11, "7/t/0", 0), turn_seed(11, "7/t/0", 1)) and one.seed != two.seed


def test_a_stop_string_gets_an_end_of_turn_that_is_not_trained_on():
    got = run(Script(CALL, "<done>", append_eos=False), Room())
    after_call = len(got.ids[: got.prompt_length]) + len(TOKENIZER.encode(CALL))
    assert got.ids[after_call] == EOS and got.mask[after_call] == 0


@pytest.mark.parametrize(
    ("policy", "limits", "reason"),
    [
        (Script(*[CALL] * 3), {"max_turns": 3}, StopReason.MAX_TURNS),
        (Script(CALL, CALL), {"max_input_length": FIRST_PROMPT + 20}, StopReason.LENGTH),
        (Script("x", stop_reason="length"), {}, StopReason.LENGTH),
        (Script(CALL, "hang"), {"deadlines": {"episode": 0.3}}, StopReason.TIMEOUT),
    ],
)
def test_the_verifier_runs_on_every_exit(policy, limits, reason):
    room = Room(verdict=Graded(0.0))
    got = run(policy, room, **limits)
    assert (got.stop_reason, got.outcome, room.closed) == (reason, Graded(0.0), 1)
    assert len(room.graded_with) == 1


def test_the_environments_own_end_and_reward_are_honoured():
    room = Room(env_reward=1.0, verdict=Graded(0.0))
    got = run(Script(CALL), room)
    assert (got.stop_reason, got.outcome, room.graded_with) == (StopReason.ENV_DONE, Graded(1.0), [])


def test_a_verifier_that_fails_leaves_the_episode_ungraded_not_zero():
    assert run(Script("<done>"), Room(verdict=Ungraded("judge down"))).outcome == Ungraded("judge down")
    hung = run(Script("<done>"), Room(verdict="hang"), deadlines={"verify": 0.2})
    assert hung.outcome == Ungraded("verify: no answer in 0 s")


@pytest.mark.parametrize(
    ("policy", "room", "limits", "part"),
    [
        (Script(), Room(), {"provision": "hang", "deadlines": {"provision": 0.2}}, "provision: no answer"),
        (Script(), Room(), {"provision": ValueError("quota")}, "provision: ValueError: quota"),
        (Script(), Room(reset="hang"), {"deadlines": {"reset": 0.2}}, "reset: no answer"),
        (Script("hang"), Room(), {"deadlines": {"generate": 0.2}}, "generate: no answer"),
        (Script(RuntimeError("engine dead")), Room(), {}, "generate: RuntimeError: engine dead"),
        (Script(CALL), Room(step=ConnectionError("gone")), {}, "step: ConnectionError: gone"),
        (Script("x", stop_reason="abort"), Room(), {}, "'abort'"),
        (Script(), Room(), {"max_input_length": 10}, "exceeds max_input_length 10"),
    ],
)
def test_a_failure_of_our_side_is_a_reason_not_a_reward(policy, room, limits, part):
    got = run(policy, room, **limits)
    assert isinstance(got.outcome, InfraFailed) and part in got.outcome.reason
    assert got.stop_reason is StopReason.ERROR and room.graded_with == []
    assert room.closed == ("provision" not in limits)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("I will look into it.", "no tool call and no <done>"),
        ("<tool_call>{oops}</tool_call>", "not a complete JSON object"),
    ],
)
def test_a_malformed_turn_is_answered_with_what_to_change(text, part):
    policy = Script(text, "<done>")
    got = run(policy, Room())
    answer = [m["content"] for m in got.messages if m["role"] == "tool"]
    assert len(answer) == 1 and answer[0].startswith("Error: ") and part in answer[0]


@pytest.mark.parametrize("where", ["provision", "reset", "generate", "step", "verify"])
def test_cancelling_at_any_await_closes_the_environment(where):
    room = Room(
        **{k: "hang" for k in ("reset", "step") if k == where}, verdict="hang" if where == "verify" else Graded(1.0)
    )
    policy = Script("hang" if where == "generate" else CALL, "<done>")
    one = episode(policy, room, provision="hang" if where == "provision" else None)

    async def scenario():
        running = asyncio.create_task(one.run())
        while one.phase != where:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(running, 2.0)

    asyncio.run(scenario())
    assert room.closed == (where != "provision")
