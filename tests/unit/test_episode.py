"""An episode is token exact, is graded on every exit, and turns whatever goes wrong into one outcome."""

import asyncio
import json
import time
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.config import DeadlinesConfig
from actors.context_tools import CONTEXT_TOOL_NAMES
from actors.episode import DialogueRules, Episode, EpisodeLimits, turn_seed
from actors.prompt import Prompter
from actors.task import Task
from actors.tool_calls import parse_turn
from actors.trajectory import Graded, InfraFailed, Span, StopReason, Ungraded
from serve.sampling import Completion, Sampling
from tests.models import byte_tokenizer

CALL = '<tool_call>{"name":"look","arguments":{"at":"x"}}</tool_call>'
SLOW_S = 2.2
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
    ends: bool = False
    close: object = None
    tools: list = field(default_factory=list)
    begun: object = None
    result: object = None
    calls: list = field(default_factory=list)
    graded_with: list = field(default_factory=list)
    closed: int = 0

    async def reset_async(self):
        await misbehave(self.reset)
        return SimpleNamespace(tools=self.tools, result=self.begun)

    async def step_async(self, action):
        await misbehave(self.step)
        self.calls.append(action)
        done = self.ends or self.env_reward is not None
        result = {"seen": len(self.calls)} if self.result is None else self.result
        return SimpleNamespace(result=result, error=None, done=done, reward=self.env_reward)

    async def verify_async(self, final_answer, conversation):
        self.graded_with.append((final_answer, [m["role"] for m in conversation]))
        if not isinstance(self.verdict, (Graded, Ungraded)):
            await misbehave(self.verdict)
        return self.verdict

    async def close_async(self):
        await misbehave(self.close)
        self.closed += 1


async def misbehave(how):
    if how == "hang":
        await asyncio.sleep(3600)
    if how == "slow":
        await asyncio.sleep(SLOW_S)
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


def episode(policy, room, *, provision=None, rules=None, **limits):
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
        rules=rules or DialogueRules(),
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


def test_an_environment_that_ends_without_a_reward_is_asked_for_its_grade():
    room = Room(ends=True, verdict=Graded(0.5))
    got = run(Script(CALL), room)
    assert (got.stop_reason, got.outcome, len(room.graded_with)) == (StopReason.ENV_DONE, Graded(0.5), 1)


def test_a_turn_with_a_call_and_a_done_signal_is_a_call():
    room = Room()
    got = run(Script(CALL + "all done<done>", "7<done>"), room)
    assert (len(room.calls), got.turns, room.graded_with[0][0]) == (1, 2, "7")


def test_a_verifier_that_fails_leaves_the_episode_ungraded_not_zero():
    assert run(Script("<done>"), Room(verdict=Ungraded("judge down"))).outcome == Ungraded("judge down")
    hung = run(Script("<done>"), Room(verdict="hang"), deadlines={"verify": 0.2})
    assert hung.outcome == Ungraded("verify: no answer in 1 s")


@pytest.mark.parametrize(
    ("policy", "room", "limits", "part"),
    [
        (Script(), Room(), {"provision": "hang", "deadlines": {"provision": 0.2}}, "provision: no answer"),
        (Script(), Room(), {"provision": ValueError("quota")}, "provision: ValueError: quota"),
        (Script(), Room(reset="hang"), {"deadlines": {"reset": 0.1, "list": 0.1}}, "reset: no answer"),
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


def test_whoever_cancels_waits_two_seconds_at_most_and_the_environment_goes_on_closing():
    room, slow = Room(close="slow"), Script("hang")
    one = episode(slow, room)

    async def scenario():
        running = asyncio.create_task(one.run())
        while one.phase != "generate":
            await asyncio.sleep(0.01)
        begun = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert time.monotonic() - begun < 2.0 and room.closed == 0
        await asyncio.sleep(SLOW_S - 1.0)
        assert room.closed == 1

    asyncio.run(scenario())


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def said_to(policy, turn):
    """What the policy read before its turn number ``turn`` (0 is the first)."""
    return TOKENIZER.decode(policy.prompts[turn])


LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string"}, "times": {"type": "integer", "minimum": 1}},
            "required": ["at"],
        },
    },
}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"at": 3}, "arguments['at']: 3 is not of type 'string'"),
        ({}, "'at' is a required property"),
        ({"at": "x", "times": "2"}, "arguments['times']: '2' is not of type 'integer'"),
        ({"at": "x", "times": 0}, "arguments['times']: 0 is less than the minimum of 1"),
    ],
)
def test_arguments_that_do_not_fit_the_schema_are_answered_and_not_sent(arguments, said):
    policy, room = Script(call("look", **arguments), "<done>"), Room(tools=[LOOK])
    got = run(policy, room)
    assert said in said_to(policy, 1) and room.calls == [] and got.tool_errors == 1


def test_null_stands_for_an_argument_that_is_not_given():
    policy, room = Script(call("look", at="x", times=None), "<done>"), Room(tools=[LOOK])
    run(policy, room)
    assert room.calls == [{"tool": "look", "params": {"at": "x", "times": None}}]


@pytest.mark.parametrize(
    ("rule", "carried_out", "said"),
    [
        ("first", ["a"], "only the first of the 2 tool calls"),
        ("all", ["a", "b"], '{"seen":2}'),
        ("error", [], "2 tool calls in one turn, and none was carried out"),
    ],
)
def test_several_calls_in_a_turn_follow_the_rule(rule, carried_out, said):
    policy, room = Script(call("look", at="a") + call("look", at="b"), "<done>"), Room(tools=[LOOK])
    got = run(policy, room, rules=DialogueRules(multiple_tool_calls=rule))
    assert [c["params"]["at"] for c in room.calls] == carried_out
    assert said in said_to(policy, 1) and got.tool_calls == len(carried_out)


def test_an_environment_that_ends_at_the_first_of_several_calls_gets_no_second():
    policy, room = Script(call("look", at="a") + call("look", at="b")), Room(env_reward=1.0)
    got = run(policy, room, rules=DialogueRules(multiple_tool_calls="all"))
    assert len(room.calls) == 1 and got.stop_reason is StopReason.ENV_DONE


def test_a_long_tool_output_is_cut_with_a_note_of_what_is_missing():
    policy, room = Script(CALL, "<done>"), Room(result="x" * 5000)
    run(policy, room, rules=DialogueRules(max_output_chars=1000))
    assert "[the last 4,000 of 5,000 characters are cut]" in said_to(policy, 1)
    assert "x" * 1000 in said_to(policy, 1) and "x" * 1001 not in said_to(policy, 1)


def test_half_of_a_surrogate_pair_in_a_tools_output_costs_nothing():
    policy = Script(CALL, "<done>")
    got = run(policy, Room(result="a \ud800 b"))
    assert got.outcome == Graded(1.0) and "a ? b" in said_to(policy, 1)


def test_what_the_environment_says_at_reset_stands_below_the_task_within_bounds():
    policy = Script("<done>")
    run(policy, Room(begun={"board": "x" * 5000}), rules=DialogueRules(max_output_chars=1000))
    assert 'Look.\n\n{"board":"xxx' in said_to(policy, 0) and "of 5,012 characters are cut" in said_to(policy, 0)


def test_an_image_is_named_and_not_written_out():
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 9999}}
    policy, room = Script(CALL, "<done>"), Room(result=[{"type": "text", "text": "a door"}, image])
    run(policy, room)
    assert "a door\n[an image" in said_to(policy, 1) and "AAAA" not in said_to(policy, 1)


CONTEXT = DialogueRules(context_tools=True, max_output_chars=100)


def test_manage_context_really_shortens_the_next_prompt_and_keeps_system_and_task():
    texts = [call("look", at=str(n)) for n in range(4)] + [call("manage_context", keep_recent_turns=1), "7<done>"]
    policy, room = Script(*texts), Room(tools=[LOOK])
    got = run(policy, room, max_turns=10, rules=CONTEXT)
    before, after = policy.prompts[4], policy.prompts[5]
    assert after[: got.prompt_length] == before[: got.prompt_length] == policy.prompts[0]
    text = TOKENIZER.decode(after)
    assert '"at": "3"' in text and "keep_recent_turns" in text and '"forgotten_turns":3' in text
    assert all(f'"at": "{n}"' not in text for n in range(3))
    assert len(room.calls) == 4 and got.outcome == Graded(1.0) and room.graded_with[0][0] == "7"


def test_a_rewritten_history_is_a_new_sequence_and_every_sampled_token_is_trained_in_the_context_it_had():
    texts = [call("look", at=str(n)) for n in range(4)] + [call("manage_context", keep_recent_turns=1), CALL, "7<done>"]
    policy = Script(*texts)
    got = run(policy, Room(tools=[LOOK]), max_turns=10, rules=CONTEXT)
    first, second = got.sequences()
    trained = []
    for part in (first, second):
        ids, mask = got.ids[part].tolist(), got.mask[part]
        begins = [i for i in range(len(ids)) if mask[i] and not mask[i - 1]]
        trained += [ids[:begin] for begin in begins]
    assert trained == policy.prompts
    sampled = [i for text in texts for i in [*TOKENIZER.encode(text), EOS]]
    assert got.ids[got.mask == 1].tolist() == sampled and got.spans[-1].end == len(sampled)


def test_forgotten_turns_and_cut_outputs_can_be_found_again():
    found = Room(tools=[LOOK], result="a" * 6000 + "needle")
    texts = [
        CALL,
        call("manage_context", keep_recent_turns=0),
        call("search_history", pattern='"at":"x"'),
        call("search_tool_output", pattern="n(e+)dle"),
        call("view_tool_output", page=2),
        call("check_context"),
        "<done>",
    ]
    policy = Script(*texts)
    got = run(policy, found, max_turns=9, rules=CONTEXT, max_input_length=9000, max_model_len=9999)
    assert "[the last 5,906 of 6,006 characters are cut; view_tool_output shows them]" in said_to(policy, 1)
    assert '"matches":1' in said_to(policy, 3) and "message 1 (assistant)" in said_to(policy, 3)
    assert "output 1 (look)" in said_to(policy, 4) and "aneedle" in said_to(policy, 4)
    assert '"pages":2,"text":"' + "a" * 1000 + "needle" in said_to(policy, 5)
    assert '"max_turns":9' in said_to(policy, 6) and '"turn":6' in said_to(policy, 6)
    assert len(found.calls) == 1 and got.tool_errors == 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("view_tool_output"), "there is no tool output yet"),
        (call("search_history", pattern="("), "not a regular expression"),
        (call("search_history", pattern=""), "arguments['pattern']"),
        (call("manage_context"), "'keep_recent_turns' is a required property"),
        (call("manage_context", keep_recent_turns=-1), "less than the minimum"),
    ],
)
def test_a_context_tool_that_cannot_do_it_says_why(text, said):
    policy = Script(text, "<done>")
    got = run(policy, Room(), rules=CONTEXT)
    assert said in said_to(policy, 1) and got.tool_errors == 1


def test_a_pattern_that_backtracks_for_ever_is_given_up():
    policy = Script(call("look", at="a" * 3000 + "!"), call("search_history", pattern="(a|a|aa)+$"), "<done>")
    run(policy, Room(), rules=CONTEXT, max_input_length=20_000, max_model_len=30_000)
    assert "make it simpler" in said_to(policy, 2)


def test_an_environments_own_tool_is_not_hidden_by_a_context_tool():
    own = {"type": "function", "function": {"name": "check_context", "description": "", "parameters": {}}}
    policy, room = Script(call("check_context"), "<done>"), Room(tools=[own])
    run(policy, room, rules=CONTEXT)
    assert [c["tool"] for c in room.calls] == ["check_context"]


def test_without_the_option_no_context_tool_is_offered():
    policy, room = Script("<done>"), Room(tools=[LOOK])
    run(policy, room)
    assert not any(name in said_to(policy, 0) for name in CONTEXT_TOOL_NAMES)


def test_the_context_status_ends_every_observation():
    policy = Script(CALL, CALL, "<done>")
    run(policy, Room(), rules=DialogueRules(inject_context_status=True))
    assert (
        "turn 1/5]" in said_to(policy, 1)
        and "turn 2/5]" in said_to(policy, 2)
        and "/4,000 tokens" in said_to(policy, 2)
    )


def test_a_fault_of_ours_ends_the_episode_as_infra_failed_and_closes_the_environment():
    room = Room(tools=[{"type": "function", "function": {}}])
    got = run(Script("<done>"), room)
    assert isinstance(got.outcome, InfraFailed) and "KeyError" in got.outcome.reason and room.closed == 1


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>", "<think>", "</think>", "<done>", "[done]"]
    + ['{"name": "look", "arguments": {"at": "x"}}', '{"name"', "{", "}}", "[", "]", '"', "\\", ":", ",", "\n", "null"]
    + ["9" * 5000, "-1e999", "NaN", '"\\ud800"', '{"name": "look", "arguments": {"at": "\\udc00"}}', "\u0000", "漢"]
)


@settings(max_examples=1000, deadline=None)
@given(st.lists(PIECES | st.text(max_size=20), max_size=12).map("".join))
def test_whatever_the_policy_writes_the_episode_ends_with_one_outcome(text):
    room = Room(tools=[LOOK])
    got = run(Script(text, "<done>"), room, max_input_length=40_000, max_model_len=50_000)
    assert got.outcome == Graded(1.0) and got.stop_reason is StopReason.DONE and room.closed == 1
    answers = [message["content"] for message in got.messages if message["role"] == "tool"]
    assert len(answers) == got.turns - 1 and all(answer.startswith(("Error: ", '{"seen":')) for answer in answers)
    assert len(room.calls) == sum(answer.startswith("{") for answer in answers)


def test_a_megabyte_of_text_is_read_in_a_second():
    for text in ("<tool_call>" * 90_000, "{" * 1_000_000, "<tool_call>{" + '"a":{' * 200_000, "<think>" * 140_000):
        begun = time.monotonic()
        parse_turn(text)
        assert time.monotonic() - begun < 1.0
