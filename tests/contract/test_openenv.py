"""Episodes on OpenEnv servers over real WebSockets: the browsing environment, and servers that misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import textwrap
import threading
from pathlib import Path
from typing import Any, Literal

import pytest
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute

from actors.config import DeadlinesConfig
from actors.envs.browse.corpus import draw_corpus
from actors.envs.browse.questions import all_questions
from actors.envs.browse.server import make_app
from actors.envs.http_session import close_http_session
from actors.envs.local_server import LocalServerProcess
from actors.envs.openenv import EpisodeLost, OpenEnvFailure, OpenEnvServers, OpenEnvTaskEnv, answer_arguments
from actors.episode import DialogueRules, Episode, EpisodeLimits
from actors.prompt import Prompter
from actors.task import Task, parse_task
from actors.trajectory import Graded, InfraFailed, StopReason, Ungraded
from serve.sampling import Completion, Sampling
from tests.models import byte_tokenizer
from tests.servers import served

QUESTION = next(question for question in all_questions(draw_corpus(1)) if len(question.path) == 4)
TASK = parse_task(QUESTION.task("hard", 1), "test")
QUICK = DeadlinesConfig(provision=5, reset=5, step=0.4, verify=2, close=3)
TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
async def closed_connections():
    yield
    await close_http_session()


@pytest.fixture(scope="module")
def browse():
    with browse_server() as process:
        yield process.url


def browse_server():
    return LocalServerProcess("actors.envs.browse", "browse", start_timeout_s=120)  # OpenEnv's server imports for long


def call(tool, **arguments):
    return f"<tool_call>{json.dumps({'name': tool, 'arguments': arguments})}</tool_call>"


def solution(answer):
    """What a policy says that follows the question's pages to the end."""
    for page in QUESTION.path:
        yield call("search", query=page.title)
        yield call("open", page_id=page.id)
    yield answer


async def episode(open_env, texts, before_turn=None):
    """A whole episode of a policy that says these texts."""
    texts = list(texts)
    said = iter(range(len(texts)))

    async def generate(prompt_ids, sampling, *, request_id, session_id, cache_salt):
        turn = next(said)
        if before_turn is not None:
            await before_turn(turn)
        ids = TOKENIZER.encode(texts[turn], add_special_tokens=False) + [TOKENIZER.eos_token_id]
        spans = [(0, 0, len(ids))]
        return Completion(ids, [-1.0] * len(ids), "stop", None, spans, cache_salt)

    return await Episode(
        TASK,
        "e",
        group_id=0,
        sample_index=0,
        open_env=open_env,
        generate=generate,
        prompter=Prompter(TOKENIZER),
        limits=EpisodeLimits(max_turns=12, max_input_length=20_000, max_model_len=30_000, deadlines=QUICK),
        sampling=Sampling(max_tokens=1000),
        rules=DialogueRules(),
    ).run()


# ------------------------------------------------------------------------------------------- the browsing environment


@pytest.mark.parametrize(("answer", "reward"), [(QUESTION.answer, 1.0), (f"not {QUESTION.answer}", 0.0)])
async def test_an_answer_given_by_the_tool_ends_the_episode_with_the_servers_reward(browse, answer, reward):
    servers = OpenEnvServers({"browse": browse}, 4)
    trajectory = await episode(lambda: servers.open(TASK, QUICK), solution(call("answer", text=answer)))
    assert trajectory.outcome == Graded(reward) and trajectory.stop_reason is StopReason.ENV_DONE
    assert trajectory.tool_errors == 0 and trajectory.tool_calls == 9
    read = [message["content"] for message in trajectory.messages if message["role"] == "tool"]
    assert QUESTION.answer in read[-1], "the last page holds the answer"


@pytest.mark.parametrize(
    ("last", "reward"), [(f"{QUESTION.answer} <done>", 1.0), ("no idea <done>", 0.0), ("<done>", 0.0)]
)
async def test_a_final_answer_is_submitted_by_the_tool_the_task_names(browse, last, reward):
    servers = OpenEnvServers({"browse": browse}, 4)
    trajectory = await episode(lambda: servers.open(TASK, QUICK), solution(last))
    assert trajectory.outcome == Graded(reward) and trajectory.stop_reason is StopReason.DONE


async def test_what_a_tool_refuses_is_an_error_the_policy_reads(browse):
    env = OpenEnvTaskEnv(TASK, browse, deadlines=QUICK)
    await env.reset_async()
    assert "there is no page 'P1'" in (await env.step_async({"tool": "open", "params": {"page_id": "P1"}})).error
    assert "did you mean open" in (await env.step_async({"tool": "opens", "params": {}})).error
    assert (await env.step_async({"tool": "search", "params": {"query": '" OR *'}})).error is None
    await env.close_async()


async def test_the_same_session_gives_the_same_outcome_twice_and_refuses_steps_after_the_end(browse):
    env = OpenEnvTaskEnv(TASK, browse, deadlines=QUICK)
    await env.reset_async()
    last = await env.step_async({"tool": "answer", "params": {"text": QUESTION.answer}})
    assert (last.done, last.reward) == (True, 1.0)
    assert await env.verify_async("something else") == await env.verify_async() == Graded(1.0)
    with pytest.raises(RuntimeError, match="is done"):
        await env.step_async({"tool": "answer", "params": {"text": "x"}})
    await env.close_async()


async def test_a_reset_the_server_refuses_ends_the_episode_with_its_reason(browse):
    env = OpenEnvTaskEnv(TASK.model_copy(update={"openenv_reset": {"corpus": 1}}), browse, deadlines=QUICK)
    with pytest.raises(OpenEnvFailure, match="reset: .*answer"):
        await env.reset_async()
    await env.close_async()


@pytest.mark.parametrize(
    ("task", "why"),
    [
        ({"openenv_answer_tool": None}, "names no openenv_answer_tool"),
        ({"openenv_answer_tool": "submit"}, "'submit' is not a tool of the server"),
        ({"openenv_answer_tool": "search"}, "'search' took the answer without a reward"),
        ({"openenv_answer_arguments": {"words": "{answer}"}}, "submitting the answer by 'answer'"),
    ],
)
async def test_an_episode_nobody_grades_is_ungraded_and_not_zero(browse, task, why):
    env = OpenEnvTaskEnv(TASK.model_copy(update=task), browse, deadlines=QUICK)
    await env.reset_async()
    outcome = await env.verify_async("anything")
    assert isinstance(outcome, Ungraded) and why in outcome.reason
    await env.close_async()


async def test_sessions_beyond_the_workers_limit_wait_and_then_say_so(browse):
    servers = OpenEnvServers({"browse": browse}, 1)
    first = await servers.open(TASK, QUICK)
    second = asyncio.create_task(servers.open(TASK, QUICK))
    with pytest.raises(OpenEnvFailure, match="all 1 sessions .*openenv_max_sessions"):
        await servers.open(TASK, DeadlinesConfig(provision=0.3))
    assert not second.done()
    await first.close_async()
    await (await second).close_async()


async def test_a_full_server_is_asked_again_until_the_deadline():
    async with served(make_app(max_sessions=1)) as url:
        servers = OpenEnvServers({"browse": url}, 4)
        first = await servers.open(TASK, QUICK)
        with pytest.raises(OpenEnvFailure, match="CAPACITY_REACHED"):
            await servers.open(TASK, DeadlinesConfig(provision=0.5))
        second = asyncio.create_task(servers.open(TASK, QUICK))
        await asyncio.sleep(0.2)
        await first.close_async()
        await (await second).close_async()


# ------------------------------------------------------------------------------------------------- losing the session


async def test_a_server_killed_in_an_episode_is_a_failure_of_ours_and_not_a_zero():
    with browse_server() as process:
        servers = OpenEnvServers({"browse": process.url}, 4)

        async def kill(turn):
            if turn == 3:
                os.kill(process.pid, signal.SIGKILL)

        trajectory = await episode(lambda: servers.open(TASK, QUICK), solution("x <done>"), before_turn=kill)
    assert isinstance(trajectory.outcome, InfraFailed) and trajectory.outcome.reason.startswith("step: EpisodeLost")
    assert trajectory.turns < 9, "it did not go on elsewhere"


@contextlib.asynccontextmanager
async def proxied(url):
    """A TCP proxy in front of the server; yields its URL, and what breaks every connection through it."""
    host, port = url.removeprefix("http://").split(":")
    writers: list[asyncio.StreamWriter] = []
    accepted = []

    async def pump(reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def relay(reader, writer):
        accepted.append(writer)
        upstream = await asyncio.open_connection(host, int(port))
        writers.extend((writer, upstream[1]))
        await asyncio.gather(pump(reader, upstream[1]), pump(upstream[0], writer))

    def drop():
        for writer in writers:
            writer.transport.abort()

    async with await asyncio.start_server(relay, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", drop, accepted
        drop()


@pytest.mark.parametrize(("at_turn", "phase"), [(2, "step"), (8, "verify")])
async def test_a_dropped_connection_loses_the_episode_and_is_not_opened_again(browse, at_turn, phase):
    async with proxied(browse) as (url, drop, accepted):
        servers = OpenEnvServers({"browse": url}, 4)
        before = 0

        async def dropping(turn):
            nonlocal before
            if turn == at_turn:
                before = len(accepted)
                drop()

        trajectory = await episode(
            lambda: servers.open(TASK, QUICK), solution(f"{QUESTION.answer} <done>"), before_turn=dropping
        )
        assert isinstance(trajectory.outcome, InfraFailed), trajectory.outcome
        assert trajectory.outcome.reason.startswith(phase) and "connection" in trajectory.outcome.reason
        assert len(accepted) == before, "the server would have taken a new connection"


async def test_an_address_without_a_server_fails_within_the_deadline_with_the_address():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    env = OpenEnvTaskEnv(TASK, url, deadlines=DeadlinesConfig(provision=0.5))
    with pytest.raises(OpenEnvFailure, match=url):
        await env.connect_async()
    await env.close_async()


async def test_an_address_that_is_no_openenv_server_is_said_so_at_once():
    async with served(Starlette()) as url:
        env = OpenEnvTaskEnv(TASK, url, deadlines=QUICK)
        with pytest.raises(OpenEnvFailure, match="ws answers 40[34] instead of opening a WebSocket"):
            async with asyncio.timeout(1):
                await env.connect_async()


# ------------------------------------------------------------------------------------------------- custom actions


class LampAction(Action):
    """Turn a lamp, wait, or end."""

    do: Literal["on", "off", "hang", "fail", "end", "end_late", "end_silently"]
    lamp: int = 0


class LampObservation(Observation):
    lamps: list[bool] = []
    note: str | None = None


class Lamps(Environment[LampAction, LampObservation, State]):
    """Three lamps. A hanging step waits for ``release``, in the session's own thread."""

    SUPPORTS_CONCURRENT_SESSIONS = True
    opened = closed = 0
    resets: list[dict[str, Any]] = []
    release = threading.Event()

    def __init__(self):
        super().__init__()
        type(self).opened += 1
        self.lamps, self.hung = [False] * 3, 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        type(self).resets.append({"seed": seed, **kwargs})
        if kwargs.get("hang"):
            self.release.wait(20)
        self.lamps = [False] * 3
        return LampObservation(lamps=self.lamps, note="all lamps must be on")

    def step(self, action, timeout_s=None, **kwargs):
        if action.do == "fail":
            raise ValueError("the fuse is blown")
        if action.do == "hang":
            self.hung += 1
            self.release.wait(20)
            return LampObservation(lamps=self.lamps, note=f"hung {self.hung}")
        if action.do == "end_late":
            self.release.wait(20)
        if action.do.startswith("end"):
            return LampObservation(done=True, reward=None if action.do == "end_silently" else float(all(self.lamps)))
        self.lamps[action.lamp] = action.do == "on"
        return LampObservation(lamps=self.lamps, reward=sum(self.lamps) / 3)

    @property
    def state(self):
        return State()

    def close(self):
        type(self).closed += 1


@pytest.fixture
async def lamps():
    Lamps.opened = Lamps.closed = 0
    Lamps.resets = []
    Lamps.release = threading.Event()
    async with served(create_app(Lamps, LampAction, LampObservation, max_concurrent_envs=8)) as url:
        yield url
        Lamps.release.set()


def lamp_task(**fields):
    return Task(task_key="lamps", prompt="Light all lamps.", env_key="lamps", **fields)


def act(do, lamp=0):
    return {"tool": "lamp", "params": {"do": do, "lamp": lamp}}


async def all_closed():
    """The server has ended every session it opened."""
    async with asyncio.timeout(2):
        while Lamps.closed < Lamps.opened:
            await asyncio.sleep(0.01)


async def test_a_servers_own_action_is_one_tool_with_its_schema(lamps):
    env = OpenEnvTaskEnv(lamp_task(openenv_reset={"seed": 5, "level": "hard"}), lamps, deadlines=QUICK)
    begun = await env.reset_async()
    (tool,) = begun.tools
    function = tool["function"]
    assert function["name"] == "lamp" and function["description"].startswith("Turn a lamp, wait, or end.")
    assert "all lamps must be on" in json.dumps(begun.result), "the episode puts this below the task"
    assert set(function["parameters"]["properties"]) == {"do", "lamp"}
    assert function["parameters"]["required"] == ["do"]
    assert Lamps.resets == [{"seed": 5, "level": "hard"}]
    assert (await env.step_async(act("on", 1))).result == {"lamps": [False, True, False]}
    await env.close_async()
    await all_closed()


@pytest.fixture
async def gated_lamps():
    """Behind a gate that lets nothing pass without the key: neither the WebSocket nor the schema."""
    app = create_app(Lamps, LampAction, LampObservation, max_concurrent_envs=8)

    async def gate(scope, receive, send):
        if scope["type"] == "lifespan" or (b"authorization", b"Bearer k3y") in scope["headers"]:
            return await app(scope, receive, send)
        if scope["type"] == "http":
            return await JSONResponse({}, 401)(scope, receive, send)
        await send({"type": "websocket.close"})  # before it was accepted: the server answers 403

    Lamps.opened = Lamps.closed = 0
    Lamps.release = threading.Event()
    async with served(gate) as url:
        yield url
        Lamps.release.set()


async def test_headers_open_a_server_that_asks_for_a_key(gated_lamps):
    task = lamp_task()
    servers = OpenEnvServers({"lamps": gated_lamps}, 2, {"lamps": {"Authorization": "Bearer k3y"}})
    env = await servers.open(task, QUICK)
    assert (await env.reset_async()).tools
    await env.close_async()
    await all_closed()
    with pytest.raises(OpenEnvFailure, match=r"/ws answers 403 instead of .* \(environment.openenv_headers\)"):
        await OpenEnvServers({"lamps": gated_lamps}, 2, {"other": {"Authorization": "Bearer k3y"}}).open(task, QUICK)


async def test_every_episode_of_a_task_begins_with_the_same_seed(lamps):
    for _ in range(2):
        env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
        await env.reset_async()
        await env.close_async()
    first, second = Lamps.resets
    assert first == second and isinstance(first["seed"], int)


async def test_the_servers_reward_at_its_end_and_the_last_reward_without_one(lamps):
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    await env.step_async(act("on", 0))
    await env.step_async(act("on", 1))
    assert await env.verify_async() == Graded(pytest.approx(2 / 3))
    await env.reset_async()
    for lamp in range(3):
        await env.step_async(act("on", lamp))
    last = await env.step_async(act("end"))
    assert (last.done, last.reward) == (True, 1.0)
    await env.close_async()


async def test_an_end_without_a_reward_is_ungraded(lamps):
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    last = await env.step_async(act("end_silently"))
    assert last.done and last.reward is None
    assert await env.verify_async() == Ungraded("the server ended the episode without a reward")
    await env.close_async()


async def test_an_answer_may_be_an_action_with_fixed_arguments(lamps):
    task = lamp_task(openenv_answer_tool="lamp", openenv_answer_arguments={"do": "end"})
    env = OpenEnvTaskEnv(task, lamps, deadlines=QUICK)
    await env.reset_async()
    assert await env.verify_async("they are lit") == Graded(0.0)
    await env.close_async()


async def test_an_action_that_fails_or_does_not_fit_is_an_error_and_the_episode_goes_on(lamps):
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    assert (await env.step_async(act("fail"))).error == "the fuse is blown"
    refused = await env.step_async({"tool": "lamp", "params": {"do": "dance"}})
    assert refused.error.startswith("Invalid message: do: Input should be")
    assert (await env.step_async(act("on"))).result == {"lamps": [True, False, False]}
    await env.close_async()


async def test_a_hanging_call_is_an_error_with_unknown_outcome_and_is_not_made_twice(lamps):
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    hung = await env.step_async(act("hang"))
    assert "no answer within 0.4 s. It is not known whether the call took effect" in hung.error
    busy = await env.step_async(act("on"))
    assert "lamp was not called: the environment is still busy" in busy.error
    Lamps.release.set()
    assert (await env.step_async(act("on"))).result == {"lamps": [True, False, False]}, "replies are not mixed up"
    assert (await env.step_async(act("hang"))).result["note"] == "hung 2", (
        "the first was made once, the second not sent"
    )
    await env.close_async()


@pytest.mark.parametrize("asked_by", ["verify", "step"])
async def test_an_end_that_comes_after_the_calls_deadline_still_counts(lamps, asked_by):
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    for lamp in range(3):
        await env.step_async(act("on", lamp))
    assert "not known" in (await env.step_async(act("end_late"))).error
    Lamps.release.set()
    if asked_by == "step":
        late = await env.step_async(act("off", 0))
        assert (late.done, late.reward) == (True, 1.0)
    assert await env.verify_async() == Graded(1.0)
    await env.close_async()


async def test_a_server_that_never_answers_is_left_within_bounds(lamps):
    loop = asyncio.get_running_loop()
    env = OpenEnvTaskEnv(lamp_task(), lamps, deadlines=QUICK)
    await env.reset_async()
    await env.step_async(act("hang"))
    begun = loop.time()
    assert await env.verify_async() == Ungraded("not graded within 2 s")
    assert loop.time() - begun < 3
    begun = loop.time()
    await env.close_async()
    assert loop.time() - begun < 2
    Lamps.release.set()
    await all_closed()


@pytest.mark.parametrize("phase", ["connect", "reset", "step", "verify", "close"])
async def test_cancelling_at_any_await_returns_soon_and_ends_the_session(lamps, phase):
    """Cancelled in the middle of each phase, as an episode is: then it closes the environment."""
    loop = asyncio.get_running_loop()
    reset = {"hang": True} if phase == "reset" else {}
    env = OpenEnvTaskEnv(lamp_task(openenv_reset=reset), lamps, deadlines=DeadlinesConfig())

    async def run():
        await env.connect_async()
        await env.reset_async()
        if phase in ("step", "verify"):
            step = asyncio.create_task(env.step_async(act("hang")))
            await asyncio.sleep(0.05)
            if phase == "verify":
                step.cancel()
                await env.verify_async()
            await step
        await env.close_async()

    running = asyncio.create_task(run())
    # Connecting and closing take milliseconds here: they are cancelled at their first awaits.
    await asyncio.sleep({"connect": 0, "close": 0.02}.get(phase, 0.3))
    begun = loop.time()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    await env.close_async()
    assert loop.time() - begun < 2
    Lamps.release.set()
    await all_closed()


async def test_a_cancelled_step_can_still_be_graded(lamps):
    """An episode whose time is up in the middle of a call is graded nevertheless."""
    task = lamp_task(openenv_answer_tool="lamp", openenv_answer_arguments={"do": "end"})
    env = OpenEnvTaskEnv(task, lamps, deadlines=DeadlinesConfig())
    await env.reset_async()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await env.step_async(act("hang"))
    asyncio.get_running_loop().call_later(0.1, Lamps.release.set)
    assert await env.verify_async() == Graded(0.0)
    await env.close_async()


async def test_the_server_of_the_documentation_is_trained_on_as_it_says():
    blocks = re.findall(r"```python\n(.*?)```", Path("docs/openenv.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(blocks[0]), names)
    task = Task(task_key="g", prompt="Guess.", env_key="guess", openenv_reset={"seed": 1})
    async with served(names["app"]) as url:
        env = OpenEnvTaskEnv(task, url, deadlines=QUICK)
        begun = await env.reset_async()
        (tool,) = begun.tools
        assert await env.verify_async() == Graded(0.0), "for a policy that makes no guess"
        assert (tool["function"]["name"], "three guesses" in json.dumps(begun.result)) == ("guess", True)
        hints = [await env.step_async({"tool": "guess", "params": {"number": number}}) for number in (1, 9)]
        assert [hint.result for hint in hints] == [{"hint": "higher"}, {"hint": "lower"}]
        last = await env.step_async({"tool": "guess", "params": {"number": 3}})
        assert (last.done, last.reward) == (True, 1.0)
        await env.close_async()


# ------------------------------------------------------------------------------------------------- broken servers


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        ("no json", "not a JSON object"),
        ('{"type": "state", "data": {}}', "type 'state', not an observation"),
        ('{"type": "observation", "data": {"observation": 3}}', "not an observation"),
        ('{"type": "error", "data": {"code": "SESSION_ERROR", "message": "gone"}}', r"gone \(SESSION_ERROR\)"),
        (None, "ended"),
    ],
)
async def test_a_reply_that_is_none_ends_the_episode_with_a_reason(frame, why):
    async def reset(websocket):
        if frame is not None:
            await websocket.send_text(frame)
            await asyncio.sleep(0.2)

    async with served(mcp_like(reset)) as url:
        env = OpenEnvTaskEnv(TASK, url, deadlines=QUICK)
        with pytest.raises(EpisodeLost, match=why):
            await env.reset_async()
        await env.close_async()


def mcp_like(*answers):
    """A server that opens a session, and then answers one message by each of these functions."""

    async def endpoint(websocket):
        await websocket.accept()
        await websocket.receive_text()
        await websocket.send_text('{"type": "state", "data": {}}')
        for answer in answers:
            await websocket.receive_text()
            await answer(websocket)
        await websocket.close()

    async def schema(_):
        return JSONResponse({"action": {"title": "Action", "properties": {"metadata": {"type": "object"}}}})

    return Starlette(routes=[WebSocketRoute("/ws", endpoint), Route("/schema", schema)])


def says(observation):
    async def answer(websocket):
        await websocket.send_text(json.dumps({"type": "observation", "data": {"observation": observation}}))

    return answer


async def test_tools_that_are_not_listed_end_the_episode_within_the_deadline_or_at_once_when_cancelled():
    async def hang(websocket):
        await websocket.receive_text()

    async with served(mcp_like(says({}), hang)) as url:
        env = OpenEnvTaskEnv(TASK, url, deadlines=DeadlinesConfig(provision=5, list=0.5))
        with pytest.raises(OpenEnvFailure, match="listing the tools: no answer within 0.5"):
            await env.reset_async()
        await env.close_async()
        env = OpenEnvTaskEnv(TASK, url)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await env.reset_async()
        async with asyncio.timeout(1.5):
            await env.close_async()


@pytest.mark.parametrize(
    ("observation", "why"),
    [
        ({"tools": [], "metadata": {"error": "no transport"}}, "listing the tools: no transport"),
        ({"tools": []}, "listing the tools: the server has none"),
        ({"tools": [{"title": "x"}]}, "listing the tools: the answer cannot be read"),
    ],
)
async def test_a_list_without_tools_is_a_failure_with_the_servers_reason(observation, why):
    async with served(mcp_like(says({}), says(observation))) as url:
        env = OpenEnvTaskEnv(TASK, url, deadlines=QUICK)
        with pytest.raises(OpenEnvFailure, match=why):
            await env.reset_async()
        await env.close_async()


async def test_a_session_the_server_ended_behind_an_open_connection_is_lost():
    """OpenEnv's session_timeout does that; an MCP environment then answers every call like this."""
    ended = {
        "tool_name": "t",
        "result": None,
        "error": {"message": "MCP client is not available; environment is closed"},
    }
    listed = {"tools": [{"name": "t", "description": "", "input_schema": {"type": "object", "properties": {}}}]}
    async with served(mcp_like(says({}), says(listed), says(ended))) as url:
        env = OpenEnvTaskEnv(TASK, url, deadlines=QUICK)
        await env.reset_async()
        with pytest.raises(EpisodeLost, match="session_timeout"):
            await env.step_async({"tool": "t", "params": {}})
        await env.close_async()


def test_an_answer_needs_one_argument_that_is_the_answer():
    def tool(**parameters):
        return {"function": {"name": "submit", "parameters": parameters}}

    one = tool(properties={"text": {}, "note": {}}, required=["text"])
    assert answer_arguments(one, None, "42") == {"text": "42"}
    assert answer_arguments(tool(properties={"text": {}}), None, "42") == {"text": "42"}
    assert answer_arguments(one, {"note": "{answer}", "text": "final"}, "42") == {"note": "42", "text": "final"}
    with pytest.raises(ValueError, match="takes 2 arguments; say in openenv_answer_arguments"):
        answer_arguments(tool(properties={"a": {}, "b": {}}), None, "42")
