"""An episode with a chat endpoint is the very episode a policy has, word for word, as far as messages tell."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.config import DeadlinesConfig
from actors.episode import DialogueRules, Episode, EpisodeLimits
from actors.prompt import Prompter, system_text
from actors.task import Task
from actors.trajectory import Graded, InfraFailed, StopReason, Ungraded
from serve.sampling import Completion, Sampling
from tests import teacher_server
from tests.models import byte_tokenizer
from tests.teacher_server import COMPLETION_TOKENS, MODEL, PROMPT_TOKENS, native_calls, serving_teacher
from train.chat.dialogue import NOT_CARRIED_OUT, ChatDialogue
from train.chat.endpoint import ChatEndpoint
from train.chat.episode import ChatEpisode
from train.chat.protocol import EVALUATED, Call, EndpointSettings, Reply

TASK = Task(
    task_key="t", prompt="Look.", env_key="e", env_variables={"CURRENT_DATE": "2026-01-02", "LOGGED_IN_USER": "u"}
)
PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "see", "parameters": PARAMETERS}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "x"}}</tool_call>'
TOKENIZER = byte_tokenizer()


class Room:
    """An environment in memory that says how often it was looked at, and ends after ``ends_after`` looks."""

    def __init__(self, verdict=Graded(1.0), ends_after=99, long=1):  # noqa: B008 (frozen)
        self.verdict, self.ends_after, self.long = verdict, ends_after, long
        self.calls, self.graded_with, self.closed = [], None, 0

    async def reset_async(self):
        return SimpleNamespace(tools=TOOLS, result="You are in a room.")

    async def step_async(self, action):
        self.calls.append(action)
        done = len(self.calls) >= self.ends_after
        error = "it is dark" if action["params"]["at"] == "dark" else None
        result = None if error else {"seen": len(self.calls), "text": "x" * self.long}
        return SimpleNamespace(result=result, error=error, done=done, reward=0.5 if done else None)

    async def verify_async(self, final_answer, conversation):
        self.graded_with = final_answer, [dict(message) for message in conversation]
        return self.verdict

    async def close_async(self):
        self.closed += 1


def common(room, rules, max_turns=4, max_input_length=100_000):
    async def open_env():
        return room

    limits = EpisodeLimits(max_turns, max_input_length, 200_000, DeadlinesConfig())
    return {"group_id": 3, "sample_index": 1, "open_env": open_env, "limits": limits, "rules": rules}


async def by_tokens(texts, room, rules):
    """The episode of a policy that says ``texts``."""
    said = iter(texts)

    async def generate(prompt_ids, sampling, *, request_id, session_id, cache_salt):
        ids = [*TOKENIZER.encode(next(said), add_special_tokens=False), TOKENIZER.eos_token_id]
        return Completion(ids, [-0.1] * len(ids), "stop", None, [(0, 0, len(ids))], cache_salt or "s")

    prompter, sampling = Prompter(TOKENIZER), Sampling(max_tokens=500)
    return await Episode(
        TASK, "id", generate=generate, prompter=prompter, sampling=sampling, **common(room, rules)
    ).run()


@pytest.fixture(scope="module")
def server():
    with serving_teacher() as teacher:
        yield teacher


@pytest.fixture
def teacher(server):
    server.replies, server.faults, server.bodies, server.pause_s = [], [], [], 0.0
    return server


async def by_messages(teacher, room, rules=DialogueRules(), tools="text", deadline_s=30.0, **limits):  # noqa: B008 (frozen)
    """The episode of an endpoint that says ``teacher.replies``."""
    settings = EndpointSettings(url=teacher.url, model=MODEL, tools=tools, temperature=0.5, max_tokens=70)
    endpoint = ChatEndpoint(settings, teacher_server.KEY, deadline_s, EVALUATED)
    try:
        return await ChatEpisode(TASK, "id", endpoint=endpoint, **common(room, rules, **limits)).run()
    finally:
        await endpoint.close()


def said(*texts):
    return [({"role": "assistant", "content": text}, "stop") for text in texts]


ELSEWHERE = '<tool_call>{"name": "look", "arguments": {"at": "dark"}}</tool_call>'
SCRIPTS = {
    "solved": [CALL, ELSEWHERE, "It is 42.<done>"],
    "too many turns": [CALL, CALL, CALL, CALL],
    "half a call": ['<tool_call>{"name": "look", "arg', "<done>"],
    "wrong arguments": ['<tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>', "<done>"],
    "neither call nor done": ["Let me think.", "I do not know.<done>"],
    "several calls": [f"{CALL} and {ELSEWHERE}", f"{CALL}{CALL}{CALL}", "ok<done>"],
    "thinking": [f"<think>is it <done>?</think>{CALL}", "<think>yes</think>7<done>"],
    "nothing": ["", "<done>"],
}
RULES = {
    "first": DialogueRules(),
    "all": DialogueRules(multiple_tool_calls="all", max_output_chars=30),
    "error": DialogueRules(multiple_tool_calls="error"),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("texts", SCRIPTS.values(), ids=SCRIPTS)
async def test_the_same_words_make_the_same_episode_as_those_of_a_policy(teacher, texts, rules):
    teacher.replies = said(*texts)
    rooms = Room(long=40), Room(long=40)
    ours, policys = await by_messages(teacher, rooms[0], rules), await by_tokens(texts, rooms[1], rules)
    assert ours.messages == policys.messages and len(ours.messages) > 2
    for name in ("stop_reason", "outcome", "turns", "tool_calls", "tool_errors", "task_key", "env_key", "group_id"):
        assert getattr(ours, name) == getattr(policys, name), name
    assert (rooms[0].calls, rooms[0].graded_with, rooms[0].closed) == (rooms[1].calls, rooms[1].graded_with, 1)
    assert ours.phase_s.keys() == policys.phase_s.keys() and len(ours.ids) == 0
    # What the endpoint was given last is the dialogue up to its last turn; it has no messages of a tool of its own.
    given = teacher.bodies[-1]["messages"]
    assert [m["content"] for m in given if m["role"] != "user"] == [
        m["content"] for m in ours.messages[: len(given)] if m["role"] in ("system", "assistant")
    ]


async def test_the_environments_own_end_and_reward_stand(teacher):
    teacher.replies = said(CALL, CALL)
    got = await by_messages(teacher, room := Room(ends_after=2))
    assert (got.stop_reason, got.outcome, room.graded_with) == (StopReason.ENV_DONE, Graded(0.5), None)


async def test_calls_in_the_endpoints_own_format_follow_the_same_rules(teacher):
    look, dark = ("look", '{"at": "x"}'), ("look", '{"at": "dark"}')
    for rules, carried_out in (("first", 1), ("all", 2), ("error", 0)):
        teacher.replies = [(native_calls(look, dark, content="So."), "tool_calls"), *said("42<done>")]
        got = await by_messages(teacher, room := Room(), DialogueRules(multiple_tool_calls=rules), "native")
        expected = await by_tokens(
            [f"So.{CALL}{ELSEWHERE}", "42<done>"], Room(), DialogueRules(multiple_tool_calls=rules)
        )
        assert got.messages[1:] == expected.messages[1:] and len(room.calls) == carried_out == got.tool_calls
        # Every call is answered, whatever came of it.
        *_, assistant, first, second = teacher.bodies[-1]["messages"]
        assert [c["id"] for c in assistant["tool_calls"]] == [first["tool_call_id"], second["tool_call_id"]]
        assert first["content"] == got.messages[3]["content"]
        assert second["content"] == (got.messages[4]["content"] if rules == "all" else NOT_CARRIED_OUT)


async def test_tools_are_told_through_the_channel_that_is_asked_for(teacher):
    for channel in ("text", "native"):
        teacher.replies = said("<done>")
        await by_messages(teacher, Room(), tools=channel)
    in_text, native = teacher.bodies
    assert in_text["messages"][0]["content"] == system_text(TASK, TOOLS, "text") and "tools" not in in_text
    assert native["tools"] == TOOLS and "<tool_call>" not in native["messages"][0]["content"]
    assert "2026-01-02" in native["messages"][0]["content"]
    assert in_text["messages"][1]["content"] == "Look.\n\nYou are in a room."
    assert (in_text["temperature"], in_text["max_completion_tokens"]) == (0.5, 70) and "top_p" not in in_text


@pytest.mark.parametrize(
    ("arguments", "words"), [('{"at": ', "must be a JSON object"), ("[1]", "must be a JSON object"), ("NaN", "object")]
)
async def test_arguments_that_are_no_object_are_the_models_to_mend_and_do_not_break_the_next_request(
    teacher, arguments, words
):
    teacher.replies = [(native_calls(("look", arguments)), "tool_calls"), *said("<done>")]
    got = await by_messages(teacher, Room(), tools="native")
    assert isinstance(got.outcome, Graded) and got.tool_errors == 1 and words in got.messages[3]["content"]
    assert json.loads(sent_arguments(teacher)) == {}


def sent_arguments(teacher):
    return teacher.bodies[-1]["messages"][2]["tool_calls"][0]["function"]["arguments"]


async def test_no_arguments_at_all_are_none(teacher):
    teacher.replies = [(native_calls(("look", "")), "tool_calls"), *said("<done>")]
    got = await by_messages(teacher, Room(), tools="native")
    assert sent_arguments(teacher) == "{}" and "'at' is a required property" in got.messages[3]["content"]


async def test_thinking_that_an_endpoint_tells_apart_is_recorded_and_not_sent_back(teacher):
    for name in ("reasoning_content", "reasoning"):
        teacher.replies = [({"role": "assistant", "content": CALL, name: "dark?"}, "stop"), *said("<done>")]
        got = await by_messages(teacher, Room())
        assert got.messages[2]["content"] == f"<think>\ndark?\n</think>\n\n{CALL}"
        assert teacher.bodies[-1]["messages"][2]["content"] == CALL


async def test_an_episode_ends_at_its_limits_and_is_graded(teacher):
    teacher.replies = [({"role": "assistant", "content": CALL}, "length")]
    cut = await by_messages(teacher, room := Room())
    assert (cut.stop_reason, cut.outcome, room.calls) == (StopReason.LENGTH, Graded(1.0), [])
    counted = PROMPT_TOKENS + COMPLETION_TOKENS
    for limit, turns in ((counted, 2), (counted - 1, 1)):
        teacher.replies = said(CALL, "<done>")
        got = await by_messages(teacher, Room(), max_input_length=limit)
        assert (got.turns, got.stop_reason is StopReason.LENGTH) == (turns, turns == 1)
    teacher.replies, teacher.faults = [], [(400, "This model's maximum context length is 4096 tokens")]
    got = await by_messages(teacher, Room(Graded(0.0)))
    assert (got.stop_reason, got.outcome) == (StopReason.LENGTH, Graded(0.0))


async def test_what_the_endpoint_fails_at_is_a_reason_and_never_a_grade(teacher):
    teacher.replies = said(CALL)
    teacher.faults = []
    teacher.replies += [({"role": "assistant", "content": "I must not"}, "content_filter")]
    got = await by_messages(teacher, room := Room())
    assert got.outcome == InfraFailed("generate: the endpoint ended the turn with 'content_filter'")
    assert room.graded_with is None and room.closed == 1
    teacher.faults = [(403, "this prompt is not allowed")]
    got = await by_messages(teacher, Room())
    assert got.outcome.reason.startswith("generate: EndpointFailed: the endpoint http://") and got.reward is None
    with serving_teacher() as slow:  # of its own, for it answers on when nobody listens any more
        slow.pause_s, slow.replies = 0.5, said("<done>")
        got = await by_messages(slow, Room(), deadline_s=0.01)
    assert "no answer within" in got.outcome.reason and got.stop_reason is StopReason.ERROR
    teacher.replies = said("<done>")
    got = await by_messages(teacher, Room(Ungraded("the judge failed")))
    assert got.outcome == Ungraded("the judge failed") and got.stop_reason is StopReason.DONE


HALVES = st.sampled_from("\ud800\udfff")  # of surrogate pairs
TEXTS = st.lists(st.characters() | HALVES, max_size=12).map("".join)


@given(
    TEXTS,
    st.lists(st.tuples(TEXTS, TEXTS | st.just('{"at": "x"}')), max_size=3),
    st.lists(TEXTS, min_size=1, max_size=3),
)
def test_whatever_a_model_and_a_tool_say_can_be_sent_and_kept(text, calls, answers):
    endpoint = SimpleNamespace(settings=EndpointSettings(url="u", model="m"))
    dialogue = ChatDialogue(endpoint, TASK.model_copy(update={"prompt": "\ud800"}), TOOLS)
    made = tuple(Call(str(number), name, arguments) for number, (name, arguments) in enumerate(calls))
    turn = dialogue.take(Reply(text, made, "stop", 0, 0))
    dialogue.answer(answers[: max(1, len(turn.calls))])
    json.dumps([dialogue._messages, dialogue.record], ensure_ascii=False).encode()
    assert turn.error is None or turn.error.isprintable()
