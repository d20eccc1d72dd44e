"""FleetTaskEnv through the real SDK, over HTTP, against the local Fleet: episodes, faults, and what is left behind."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import time
import types
from contextlib import asynccontextmanager

import jsonschema
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from actors.config import DeadlinesConfig
from actors.env_pool_core import EnvPoolCore, PoolSettings
from actors.envs import fleet
from actors.envs.fleet import (
    FleetAction,
    FleetControl,
    FleetFailure,
    FleetTaskEnv,
    Verification,
    VerifierError,
    close_clients,
    from_json_file,
    make_fleet_task_env,
    read_grade,
    read_verifier,
)
from actors.envs.local_fleet.process import LocalFleetProcess
from actors.envs.mcp_tools import ToolsUnavailable
from actors.lease_table import EnvSpec
from actors.task import TaskFileError, parse_task
from actors.trajectory import Graded, Ungraded
from tests.fleet_faults import KEY, LocalFleet, leaving_nothing
from tests.servers import served
from tests.suspensions import runs_to_its_end

QUICK = DeadlinesConfig(provision=10, reset=5, list=5, step=5, verify=10, close=5)
VERIFIER = """
def helper(x):
    return x

def verify(env, final_answer=None):
    rows = env.db("current").table("comments").eq("body", "done by test").all()
    return 1.0 if len(rows) == 1 and final_answer == "fine" else 0.0
"""
NO_SCORE = 'the verifier returned "{}", which is not a number'
COMMENT = {"tool": "add_comment", "params": {"id": "", "text": "done by test"}}


def task(**overrides):
    raw = {
        "task_key": "t1",
        "prompt": "Comment on a ticket.",
        "env_key": "tracker",
        "env_version": "v1.0.0",
        "data_key": "desk",
        "data_version": "s7",
        "env_variables": {"CURRENT_DATE": "2026-06-15", "LOGGED_IN_USER": "dan"},
        "verifier_code": VERIFIER,
    }
    return raw | overrides


@pytest.fixture(scope="module")
def local_fleet():
    with LocalFleetProcess(instance_limit=8) as process:
        yield LocalFleet(process)


@pytest.fixture(autouse=True)
async def clean(local_fleet):
    async with leaving_nothing(local_fleet):
        yield


@asynccontextmanager
async def opened(local_fleet, raw=None, **kwargs):
    env = FleetTaskEnv(
        raw or task(),
        KEY,
        base_url=local_fleet.url,
        **({"deadlines": QUICK, "verify_backoff_s": (0.05, 0.05, 0.05)} | kwargs),
    )
    try:
        yield env
    finally:
        await env.close_async()
        assert env.close_error is None


async def some_ticket(env):
    found = await env.step_async({"tool": "search_tickets", "params": {}})
    return found.result["tickets"][0][0]


async def comment(env, **kwargs):
    action = {"tool": "add_comment", "params": {"id": await some_ticket(env), "text": "done by test"}}
    return await env.step_async(action, **kwargs)


def comments(local_fleet, env):
    return local_fleet.rows(env._instance, "SELECT count(*) FROM comments WHERE body = 'done by test'")[0][0]


# -- an episode


async def test_an_episode_from_reset_to_a_graded_end_and_an_acknowledged_delete(local_fleet):
    async with opened(local_fleet) as env:
        first = await env.reset_async(episode_id="e1")
        assert (first.prompt, first.task_key, first.modality) == ("Comment on a ticket.", "t1", "tool_use")
        assert (first.step, first.done, first.reward, first.error) == (0, False, None, None)
        names = {tool["function"]["name"] for tool in first.tools}
        assert {"search_tickets", "add_comment"} <= names
        for tool in first.tools:
            assert tool["type"] == "function"
            jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
        observed = await comment(env)
        assert (observed.result, observed.error, observed.step) == ({"ok": True}, None, 2)
        assert env.state.episode_id == "e1" and env.state.step_count == 2 and not env.state.done
        last = await env.step_async(FleetAction(done=True, final_answer="fine"))
        assert (last.done, last.reward, last.metadata) == (
            True,
            1.0,
            {"done_reason": "agent_done", "outcome": "graded"},
        )
        assert env.state.done
        instance_id = env._instance["instance_id"]
    (ended,) = [i for i in local_fleet.instances() if i["instance_id"] == instance_id]
    assert ended["status"] == "stopped" and ended["run_id"].startswith("fleet-rl:")
    await env.close_async()


async def test_a_wrong_end_is_graded_zero_and_a_second_episode_starts_from_the_seed(local_fleet):
    async with opened(local_fleet) as env:
        await env.reset_async()
        await comment(env)
        assert (await env.step_async({"done": True, "final_answer": "wrong"})).reward == 0.0
        await env.reset_async()
        assert comments(local_fleet, env) == 0 and not env.state.done
        assert await env.verify_async("fine", []) == Graded(0.0)
        assert len(local_fleet.running()) == 1, "the instance is the same"


async def test_what_the_policy_does_wrong_is_an_error_it_can_read(local_fleet):
    async with opened(local_fleet) as env:
        await env.reset_async()
        assert (await env.step_async({"tool": "get_ticket", "params": {"id": "T999"}})).error == "no ticket T999"
        unknown = await env.step_async({"tool": "get_tickets", "params": {}})
        assert "get_ticket" in unknown.error and "search_tickets" in unknown.error
        far = await env.step_async({"tool": "zzz", "params": {}})
        assert "add_comment" in far.error
        assert "names no tool" in (await env.step_async({})).error
        assert not env.state.done and env.reusable


async def test_steps_out_of_turn_are_refused(local_fleet):
    async with opened(local_fleet) as env:
        with pytest.raises(RuntimeError, match="step before reset"):
            await env.step_async({"tool": "list_users"})
        await env.reset_async()
        await env.step_async({"done": True})
        with pytest.raises(RuntimeError, match="is done"):
            await env.step_async({"tool": "list_users"})
    with pytest.raises(RuntimeError, match="reset after close"):
        await env.reset_async()
    with pytest.raises(RuntimeError, match="before reset"):
        await env.step_async({"tool": "list_users"})


async def test_the_step_limit_ends_and_grades_the_episode(local_fleet):
    code = "def verify(env):\n    return 0.25"
    async with opened(local_fleet, task(verifier_code=code), max_steps=2) as env:
        await env.reset_async()
        assert not (await env.step_async({"tool": "list_users"})).done
        last = await env.step_async({"tool": "list_users"})
        assert last.result["users"] and last.done and last.reward == 0.25
        assert last.metadata["done_reason"] == "max_steps"


async def test_a_caller_that_grades_by_itself_gets_no_reward_from_the_step(local_fleet):
    async with opened(local_fleet, grade_on_done=False, max_steps=None) as env:
        await env.reset_async()
        last = await env.step_async({"done": True})
        assert last.done and last.reward is None and env.verification is None
        assert await env.verify_async("fine", []) == Graded(0.0)


async def test_submit_final_answer_is_offered_where_the_prompt_names_it(local_fleet):
    raw = task(
        prompt="How many? Use submit_final_answer.",
        verifier_code="def verify(env, final_answer):\n    return float(final_answer == '42')",
    )
    async with opened(local_fleet, raw) as env:
        first = await env.reset_async()
        assert [t["function"]["name"] for t in first.tools].count("submit_final_answer") == 1
        assert "needs 'answer'" in (await env.step_async({"tool": "submit_final_answer", "params": {}})).error
        last = await env.step_async({"tool": "submit_final_answer", "params": {"answer": 42}})
        assert (last.done, last.reward) == (True, 1.0)
    async with opened(local_fleet) as env:
        assert "submit_final_answer" not in {t["function"]["name"] for t in (await env.reset_async()).tools}


async def test_screens_are_refused_with_a_clear_word(local_fleet):
    for modality in ("computer_use", "browser_use"):
        async with opened(local_fleet, task(task_modality=modality)) as env:
            with pytest.raises(NotImplementedError, match=f"t1: modality {modality} is not supported yet"):
                await env.reset_async()


async def test_blocking_twins_work_with_and_without_a_loop_around_them(local_fleet):
    def episode():
        env = make_fleet_task_env(task(), api_key=KEY, base_url=local_fleet.url, deadlines=QUICK)
        assert env.reset(seed=3).tools
        assert env.step({"tool": "list_users"}).result["users"]
        assert env.step({"done": True}).reward == 0.0
        env.close()
        env.close()
        assert env.close_error is None

    await asyncio.to_thread(episode)
    episode()


def test_environments_come_from_task_files(tmp_path):
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([task(), task(task_key="other")]))
    assert from_json_file(path, "other", api_key=KEY).task.task_key == "other"
    with pytest.raises(TaskFileError, match="no task 'othr'; near: other"):
        from_json_file(path, "othr")
    with pytest.raises(TaskFileError, match="field 'prompt'"):
        make_fleet_task_env({"task_key": "x", "env_key": "y"})


# -- faults of tools and resets


async def test_a_tool_that_hangs_is_an_error_within_its_deadline_and_is_not_called_again(local_fleet):
    async with opened(local_fleet) as env:
        await env.reset_async()
        local_fleet.arm({"route": "tool", "kind": "hang", "tool": "add_comment"})
        begun = time.monotonic()
        observed = await comment(env, timeout_s=0.4)
        assert time.monotonic() - begun < 4
        assert "did not answer" in observed.error and "not known whether" in observed.error and not observed.done
        assert local_fleet.struck() == 1
        assert not env.reusable, "the call may still be at work there"
        local_fleet.arm()
        assert (await env.step_async({"tool": "list_users"})).error is None


async def test_a_reply_lost_after_the_effect_is_said_to_be_unknown_and_the_effect_happens_once(local_fleet):
    async with opened(local_fleet) as env:
        await env.reset_async()
        local_fleet.arm({"route": "tool", "kind": "status", "status": 502, "stage": "after", "tool": "add_comment"})
        observed = await comment(env)
        assert "502" in observed.error and "not known whether" in observed.error
        assert comments(local_fleet, env) == 1


async def test_a_reset_that_fails_for_a_while_is_repeated_and_one_that_never_works_says_so(local_fleet):
    async with opened(local_fleet, deadlines=QUICK.model_copy(update={"reset": 3})) as env:
        local_fleet.arm({"route": "reset", "kind": "status", "status": 500, "count": 2})
        await env.reset_async()
        local_fleet.arm({"route": "reset", "kind": "status", "status": 500})
        with pytest.raises(FleetFailure, match="answered reset with 500"):
            await env.reset_async()
        assert not env.reusable
        local_fleet.arm({"route": "mcp", "kind": "status", "status": 502})
    async with opened(local_fleet, deadlines=QUICK.model_copy(update={"list": 1})) as env:
        fleet._tool_lists.clear()
        with pytest.raises(ToolsUnavailable, match="502"):
            await env.reset_async()


@pytest.mark.parametrize("status", [404, 405, 501])
async def test_a_runner_without_reset_serves_one_episode_on_the_instance_as_it_was_made(local_fleet, status):
    why = f"answered reset with {status}|no answer"  # within what is left for the last attempt
    local_fleet.arm({"route": "reset", "kind": "status", "status": status})
    async with opened(local_fleet, deadlines=QUICK.model_copy(update={"reset": 1})) as env:
        with pytest.raises(FleetFailure, match=why):
            await env.reset_async(seed=7)
        await env.reset_async()
        assert (await comment(env)).error is None and not env.reusable
        with pytest.raises(FleetFailure, match=why):
            await env.reset_async()


@pytest.mark.parametrize("status", [404, 502])
async def test_an_instance_that_is_still_starting_is_waited_for(local_fleet, status):
    local_fleet.arm({"route": "make", "kind": "slow_start", "status": status, "seconds": 2, "count": 1})
    async with opened(local_fleet) as env:
        assert (await env.reset_async()).tools
        assert env.reusable, "it has a reset"


async def test_a_gated_runner_is_shown_the_token_and_a_stale_one_is_replaced():
    tokens, shown = iter(["stale", "good"]), []

    async def token(_):
        return JSONResponse({"token": next(tokens)})

    async def reset(request):
        shown.append(request.headers.get("x-runner-token"))
        return JSONResponse({"success": True}) if shown[-1] == "good" else Response(status_code=404)

    routes = [Route("/v1/runner-auth/token", token), Route("/env/reset", reset, methods=["POST"])]
    async with served(Starlette(routes=routes)) as url:
        env = FleetTaskEnv(task(), KEY, base_url=url, deadlines=QUICK)
        env._instance = {"instance_id": "i", "urls": {"manager": {"api": f"{url}/env"}}}
        await env._reset_instance(None)
        await close_clients()
    assert shown == ["stale", "good"]


def test_what_users_count_on_is_the_default():
    deadlines, retries = DeadlinesConfig(), inspect.signature(FleetTaskEnv).parameters["verify_backoff_s"].default
    assert (deadlines.step, retries) == (90.0, (3.0, 6.0, 12.0))
    assert {"provision", "reset", "list", "step", "verify", "close"} <= set(DeadlinesConfig.model_fields)


async def test_a_make_that_fails_says_why(local_fleet):
    local_fleet.arm({"route": "make", "kind": "status", "status": 500, "message": "no nodes"})
    async with opened(local_fleet) as env:
        with pytest.raises(FleetFailure, match="no nodes") as error:
            await env.reset_async()
        assert error.value.transient
    local_fleet.arm()
    async with opened(local_fleet, task(env_key="nosuch")) as env:
        with pytest.raises(FleetFailure, match="nosuch") as error:
            await env.reset_async()
        assert not error.value.transient
    for value in (float("nan"), "\ud800"):
        with pytest.raises(FleetFailure, match="cannot be written as JSON") as error:
            await FleetControl(KEY, local_fleet.url).make("tracker", env_variables={"A": value}, timeout_s=5)
        assert not (error.value.transient or error.value.unknown)


async def test_tools_of_an_image_are_listed_once_per_process(local_fleet):
    fleet._tool_lists.clear()
    requests = []
    tools = []
    for _ in range(2):
        before = local_fleet.stats()["mcp_requests"]
        async with opened(local_fleet) as env:
            tools.append((await env.reset_async()).tools)
        requests.append(local_fleet.stats()["mcp_requests"] - before)
    assert tools[0] == tools[1]
    # Both paths: handshake (two messages) and listing; then the owner's handshake alone.
    assert requests == [6, 2]


# -- grading


async def test_verifier_source_is_never_executed_here(local_fleet):
    code = "import sys\nsys.fleet_rl_leak = True\ndef verify(env):\n    return 1.0"
    async with opened(local_fleet, task(verifier_code=code)) as env:
        await env.reset_async()
        assert await env.verify_async() == Graded(1.0)
    assert not hasattr(sys, "fleet_rl_leak")


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("def verify(env):\n    return None", Graded(1.0)),
        ("def verify(env):\n    return {'score': 0.5}", Graded(0.5)),
        ("def verify(env, **kwargs):\n    return float(kwargs['final_answer'] == 'a')", Graded(1.0)),
        ("def verify(env, conversation):\n    import json\n    return len(json.loads(conversation))", Graded(2.0)),
        (None, Ungraded("task has no verifier")),
        ("x = 1", Ungraded("the verifier's source defines no function")),
    ],
)
async def test_grades_by_what_the_verifier_is(local_fleet, code, outcome):
    async with opened(local_fleet, task(verifier_code=code)) as env:
        await env.reset_async()
        messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
        assert await env.verify_async("a", messages) == outcome


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("def verify(env):\n    raise ValueError('no such table')", "no such table.*4 attempts"),
        ("def verify(env):\n    print('JUDGE ERROR: brownout')\n    return 0.0", "judge failed: brownout.*4 attempts"),
        ("def verify(env):\n    return 'good'", "'good', which is not a number"),
        ("def verify(env:", "does not parse"),
    ],
)
async def test_a_verifier_that_fails_leaves_the_episode_ungraded(local_fleet, code, word):
    async with opened(local_fleet, task(verifier_code=code)) as env:
        await env.reset_async()
        last = await env.step_async({"done": True})
        assert last.done and last.reward is None and last.metadata["outcome"] == "ungraded"
        outcome = await env.verify_async()
        assert isinstance(outcome, Ungraded)
        with pytest.raises(AssertionError, match=word):
            raise AssertionError(outcome.reason)


@pytest.mark.parametrize(
    "fault", [{"kind": "judge_error"}, {"kind": "verifier_failure"}, {"kind": "status", "status": 500}]
)
async def test_a_brownout_shorter_than_the_retries_does_not_cost_the_grade(local_fleet, fault):
    async with opened(local_fleet) as env:
        await env.reset_async()
        await comment(env)
        local_fleet.arm({"route": "verify", "count": 3} | fault)
        assert await env.verify_async("fine") == Graded(1.0)
        assert local_fleet.struck() == 3


async def test_a_verifier_that_hangs_ends_at_the_deadline(local_fleet):
    async with opened(local_fleet, deadlines=QUICK.model_copy(update={"verify": 0.5})) as env:
        await env.reset_async()
        local_fleet.arm({"route": "verify", "kind": "hang"})
        outcome = await env.verify_async("fine")
        assert isinstance(outcome, Ungraded) and "not graded within" in outcome.reason
        assert not env.reusable
        assert await env.verify_async("fine") == outcome, "the answer does not change when asked again"


async def test_a_bundle_is_uploaded_once_and_again_when_the_control_plane_forgot_it(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    instance = await control.make("tracker", timeout_s=5)
    verifier = read_verifier("def verify(env):\n    return 1.0  # uploaded once")
    assert verifier == read_verifier("def verify(env):\n    return 1.0  # uploaded once")
    local_fleet.arm({"route": "check", "kind": "status", "status": 500, "skip": 1})
    for _ in range(3):
        assert (await control.verify(instance, "t", verifier, {})).result == 1.0
    assert local_fleet.struck() == 0, "known bundles are not asked about again"
    forgotten = read_verifier("def verify(env):\n    return 0.5  # never uploaded")
    control._uploaded.add(forgotten.sha256)
    assert (await control.verify(instance, "t", forgotten, {})).result == 0.5
    await control.delete(instance["instance_id"])


@pytest.mark.parametrize(
    ("verification", "outcome"),
    [
        (Verification(True, True, "", None, None), Graded(1.0)),
        (Verification(True, "0.5", "", None, None), Graded(0.5)),
        (Verification(True, float("nan"), "", None, None), Ungraded("the verifier returned nan")),
        (Verification(True, {"score": None}, "", None, None), Ungraded(NO_SCORE.format("{'score': None}"))),
        (Verification(True, {"points": 3}, "", None, None), Ungraded(NO_SCORE.format("{'points': 3}"))),
        (Verification(True, 1.0, "a\nJUDGE ERROR: x\n", None, None), Ungraded("the judge failed: x")),
        (Verification(True, 1.0, "no JUDGE ERROR: here", None, None), Graded(1.0)),
        (Verification(False, 1.0, "", None, None), Ungraded("the verifier failed: no reason given")),
        (Verification(False, None, "", "line 1\n\n  line 2", None), Ungraded("the verifier failed: line 1 / line 2")),
    ],
)
def test_only_a_run_that_worked_grades(verification, outcome):
    assert read_grade(verification) == outcome


@pytest.mark.parametrize(
    ("source", "name", "answer", "conversation"),
    [
        ("def a(x): pass\ndef b(env, final_answer): pass", "b", True, False),
        ("def a(x): pass\ndef b(y): pass", "a", False, False),
        ("@verifier(key='k')\nasync def c(env, *, conversation=None): pass", "c", False, True),
        ("class D:\n    def m(env): pass\ndef e(env, **kw): pass", "e", True, False),
    ],
)
def test_the_verifying_function_is_found_by_reading(source, name, answer, conversation):
    verifier = read_verifier(source)
    assert (verifier.function_name, verifier.answer, verifier.conversation) == (name, answer, conversation)


def test_source_that_cannot_be_read_is_refused():
    for source in ("def f(", "\0", "(" * 10_000, "-" * 100_000 + "1", "\ud800"):
        with pytest.raises(VerifierError, match="does not parse"):
            read_verifier(source)


# -- what is left behind


async def test_close_insists_on_its_delete_and_a_dead_control_plane_does_not_raise(local_fleet):
    env = FleetTaskEnv(task(), KEY, base_url=local_fleet.url, deadlines=QUICK)
    await env.reset_async()
    local_fleet.arm({"route": "delete", "kind": "status", "status": 500, "count": 2})
    await env.close_async()
    assert env.close_error is None and local_fleet.struck() == 2

    with LocalFleetProcess() as process:
        env = FleetTaskEnv(task(), KEY, base_url=process.url, deadlines=QUICK.model_copy(update={"close": 0.5}))
        await env.reset_async()
        process.stop()
        await env.close_async()
        assert "not acknowledged" in env.close_error


async def test_a_cancelled_close_still_deletes(local_fleet):
    env = FleetTaskEnv(task(), KEY, base_url=local_fleet.url, deadlines=QUICK)
    await env.reset_async()
    local_fleet.arm({"route": "delete", "kind": "slow", "seconds": 0.3})
    closing = asyncio.create_task(env.close_async())
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert local_fleet.running() == []


async def test_cancelling_anywhere_in_an_episode_gives_its_lease_back_within_two_seconds(local_fleet):
    settings = PoolSettings("cancel", "n", heartbeat_s=None, idle_s=0.2, tick_s=0.05)
    pool = EnvPoolCore(FleetControl(KEY, local_fleet.url), settings)
    await pool.start()
    parsed = parse_task(task(), "test")

    async def episode():
        lease = await pool.acquire(EnvSpec.of(parsed), 5)
        env = FleetTaskEnv(parsed, KEY, lease=lease, give_back=pool.release, base_url=local_fleet.url, deadlines=QUICK)
        try:
            await env.reset_async()
            await comment(env)
            await env.verify_async("fine", [])
        finally:
            await env.close_async()

    suspension, ended = 0, False
    while not ended:
        suspension += 1
        ended = await runs_to_its_end(episode(), suspension, within_s=2.0)
        begun = time.monotonic()
        while pool.stats()["leased"] or pool.stats()["waiting"]:
            assert time.monotonic() - begun < 2, f"suspension {suspension}: {pool.stats()}"
            await asyncio.sleep(0.01)
    assert suspension > 10, "an episode suspends at least once per request"
    assert (await pool.close_all()).left == ()
    stats = pool.stats()
    assert stats["made"] == stats["deleted"] + stats["expired"]


async def test_cancelling_anywhere_in_an_episode_without_a_pool_leaves_no_instance(local_fleet):
    async def episode():
        env = FleetTaskEnv(task(), KEY, base_url=local_fleet.url, deadlines=QUICK)
        try:
            await env.reset_async()
        finally:
            await env.close_async()

    suspension, ended = 0, False
    while not ended:
        suspension += 1
        ended = await runs_to_its_end(episode(), suspension, within_s=2.0)
        begun = time.monotonic()
        while local_fleet.running():
            assert time.monotonic() - begun < 2, f"suspension {suspension}"
            await asyncio.sleep(0.01)
    assert suspension > 5


async def test_cancelling_a_reset_deletes_the_instance_that_is_being_made(local_fleet):
    env = FleetTaskEnv(task(), KEY, base_url=local_fleet.url, deadlines=QUICK)
    local_fleet.arm({"route": "make", "kind": "slow", "stage": "after", "seconds": 0.4})
    resetting = asyncio.create_task(env.reset_async())
    while not local_fleet.running():
        await asyncio.sleep(0.01)
    resetting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await resetting
    assert local_fleet.running() == []
    await env.close_async()


async def test_a_lease_is_given_back_once_and_says_whether_it_may_be_used_again(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    given = []

    async def give_back(lease_id, reusable):
        given.append((lease_id, reusable))
        if lease_id == "broken":
            raise ConnectionError("the pool died")

    for name in ("good", "broken"):
        made = await control.make("tracker", timeout_s=5)
        lease = types.SimpleNamespace(lease_id=name, instance=made, reused=False)
        env = FleetTaskEnv(task(), KEY, lease=lease, give_back=give_back, base_url=local_fleet.url, deadlines=QUICK)
        if name == "good":
            await env.reset_async()
        await env.close_async()
        await env.close_async()
        assert (env.close_error is None) == (name == "good")
        await control.delete(lease.instance["instance_id"])
    assert given == [("good", True), ("broken", False)]


# -- the control plane


async def test_the_control_plane_says_what_failed_and_whether_to_try_again(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    assert (await control.account()).instance_limit == 8
    instance = await control.make("tracker", run_id="r", heartbeat_interval=60, timeout_s=5)
    instance_id = instance["instance_id"]
    assert (await control.get(instance_id))["status"] == "running"
    assert await control.heartbeat(instance_id) == pytest.approx(time.time() + 60, abs=5)
    assert [i["instance_id"] for i in await control.list(run_id="r")] == [instance_id]
    assert await control.delete_run("r") == 1
    assert await control.list(run_id="r") == []
    assert not await control.delete("00000000"), "what never was is gone"
    with pytest.raises(FleetFailure, match="stopped") as stopped:
        await control.heartbeat(instance_id)
    assert not stopped.value.transient
    local_fleet.arm({"route": "account", "kind": "hang"})
    with pytest.raises(FleetFailure, match="no answer within 0 s") as hung:
        await control.account(timeout_s=0.3)
    assert hung.value.transient and hung.value.unknown


async def test_a_make_whose_reply_was_lost_is_recognised_when_the_transport_repeats_it(local_fleet):
    control = FleetControl(KEY, local_fleet.url)
    local_fleet.arm({"route": "make", "kind": "status", "status": 503, "stage": "after", "count": 1})
    instance = await control.make("tracker", timeout_s=10)
    assert local_fleet.running() == [instance["instance_id"]]
    await control.delete(instance["instance_id"])


def test_no_key_is_said_in_one_line(monkeypatch, tmp_path):
    monkeypatch.delenv("FLEET_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))

    async def make():
        FleetControl(None, "http://127.0.0.1:1")

    with pytest.raises(FleetFailure, match="FLEET_API_KEY"):
        asyncio.run(make())


def test_openenv_is_imported_without_its_web_server_and_its_types_stay_its_own():
    script = """
import sys, actors.envs.fleet as ours
assert "gradio" not in sys.modules and "fastapi" not in sys.modules
import openenv.core.env_server as theirs
assert issubclass(ours.FleetTaskEnv, theirs.Environment) and issubclass(ours.FleetObservation, theirs.Observation)
assert issubclass(ours.FleetAction, theirs.Action) and issubclass(ours.FleetState, theirs.State)
make = lambda: ours.FleetTaskEnv({"task_key": "t", "prompt": "p", "env_key": "e"}, "sk")
app = theirs.create_app(make, ours.FleetAction, ours.FleetObservation, env_name="fleet")
assert {"/ws", "/reset", "/step"} <= {route.path for route in app.routes}
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
