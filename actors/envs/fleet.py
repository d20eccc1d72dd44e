"""Fleet: the control plane behind its SDK, and one task on one instance in OpenEnv's shape.

The only file that names the SDK. Payloads that leave it are plain dicts: an instance is the control plane's own
``InstanceResponse`` as a dict, from which any process can reach the instance without asking the control plane again.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import difflib
import hashlib
import io
import itertools
import json
import logging
import math
import threading
import time
import uuid
import weakref
import zipfile
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

import httpx
import httpx_retries
import pydantic
from fleet import AsyncEnv, AsyncFleet
from fleet._async.exceptions import (
    FleetAPIError,
    FleetAuthenticationError,
    FleetError,
    FleetInstanceLimitError,
    FleetTimeoutError,
)
from fleet._async.instance import AsyncInstanceClient
from fleet.runner_auth import RunnerTokenProvider
from pydantic import Field

from actors.config import DeadlinesConfig
from actors.envs.http_session import SessionTransport, close_http_session
from actors.envs.mcp_tools import McpTools, ToolList, ToolResult, ToolsUnavailable
from actors.envs.openenv_types import Action, Environment, EnvironmentMetadata, Observation, State
from actors.envs.partial_reward import partial_reward
from actors.task import Task, TaskFileError, load_tasks, parse_task
from actors.trajectory import Graded, Outcome, Ungraded

logger = logging.getLogger(__name__)

SUBMIT = "submit_final_answer"
JUDGE_ERROR = "JUDGE ERROR:"
VERIFIER_TIMEOUT_S = 30  # for the verifier's own run; the SDK's default
REQUEST_TIMEOUT_S = 30.0
MAX_RETRY_AFTER_S = 60.0  # a Retry-After is obeyed up to this
RELEASE_GRACE_S = 1.2  # a cancelled caller waits this long for what gives its instance back
SESSION_END_S = 1.0  # for MCP servers to be told that the episode is over
NO_RESET = frozenset({404, 405, 501})  # how a runner answers reset that does not have it
PROBE_S = 5.0  # for the tools of an instance whose runner answers 404
DEFAULT_TTL_S = {"tool_use": 900, "computer_use": 1800, "browser_use": 1800}
# What the SDK raises on an answer that is not what it expects; it reads an error's body without checking its type.
UNREADABLE = (
    pydantic.ValidationError,
    json.JSONDecodeError,
    UnicodeDecodeError,
    AttributeError,
    TypeError,
    RecursionError,
)
# What the control plane says when trying again makes sense.
TRANSIENT_MARKERS = (
    "health check",
    "timeout",
    "timed out",
    "connection",
    "temporarily",
    '"retryable": true',
    "rate limit",
    "too many in-flight",
)


# ---------------------------------------------------------------------------------------------------------------
# Control plane


class FleetFailure(Exception):
    """The control plane or an instance's runner refused, failed or did not answer.

    Attributes:
        transient: trying again makes sense.
        unknown: the request may have been carried out.
        status: the HTTP status, where there was one.
    """

    def __init__(self, message: str, *, transient: bool = False, unknown: bool = False, status: int | None = None):
        super().__init__(message)
        self.transient = transient
        self.unknown = unknown
        self.status = status


class QuotaReached(FleetFailure):
    """The account runs as many instances as it may. ``running`` and ``limit`` are None where it did not say."""

    def __init__(self, message: str, running: int | None, limit: int | None):
        super().__init__(message, status=403)
        self.running = running
        self.limit = limit


@dataclass(frozen=True)
class Account:
    """How many instances the team may run, and runs now (ours and everybody else's)."""

    instance_limit: int
    instance_count: int


@dataclass(frozen=True)
class Verification:
    """What a verifier's run came to, as the control plane reports it."""

    success: bool
    result: Any
    stdout: str
    error: str | None
    execution_id: str | None


class _HeedingTransport(SessionTransport):
    """Remembers until when the other side asked for silence. The SDK drops that header on its way up."""

    def __init__(self) -> None:
        self.busy_until = 0.0  # monotonic seconds

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        after = response.headers.get("retry-after")
        of_control_plane = request.url.path.startswith("/v1/")  # an instance's own runner speaks for itself only
        if of_control_plane and response.status_code in (429, 503) and after is not None:
            with suppress(ValueError):
                seconds = min(httpx_retries.Retry().parse_retry_after(after), MAX_RETRY_AFTER_S)
                self.busy_until = max(self.busy_until, time.monotonic() + seconds)
        return response


class FleetControl:
    """The SDK's asynchronous client with deadlines, pooled connections and failures that say whether to try again.

    Every call raises :class:`FleetFailure` and nothing else of its own.
    Transport retries repeat a request under the same ``X-Request-ID``, so the control plane can recognise a repeated
    make; they are few, because callers retry as well.

    Args:
        api_key: default ``FLEET_API_KEY``.
        base_url: default ``FLEET_BASE_URL``, else the SDK's own.
    """

    def __init__(self, api_key: str | None = None, base_url: str | None = None) -> None:
        self._transport = _HeedingTransport()
        transport = httpx_retries.RetryTransport(
            transport=self._transport,
            retry=httpx_retries.Retry(
                total=2,
                status_forcelist=[429, 502, 503, 504],
                allowed_methods=["GET", "POST", "DELETE"],
                backoff_factor=0.3,
                max_backoff_wait=MAX_RETRY_AFTER_S,
            ),
        )
        self._http = httpx.AsyncClient(transport=transport, timeout=REQUEST_TIMEOUT_S)
        try:
            self._sdk = AsyncFleet(api_key, base_url.rstrip("/") if base_url else None, httpx_client=self._http)
        except ValueError:
            raise FleetFailure("no Fleet API key: set FLEET_API_KEY or pass api_key") from None
        self._runner_tokens = RunnerTokenProvider(self._sdk.client)
        self._token_lock = asyncio.Lock()
        self._uploaded: set[str] = set()  # digests of verifier bundles the control plane is known to hold

    async def make(
        self,
        env_key: str,
        *,
        env_version: str | None = None,
        data_key: str | None = None,
        data_version: str | None = None,
        env_variables: dict[str, Any] | None = None,
        ttl_seconds: int | None = None,
        run_id: str | None = None,
        heartbeat_interval: int | None = None,
        image_type: str | None = None,
        region: str | None = None,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Make an instance and wait until it runs. A failure with ``unknown`` may have left one behind."""
        async with self._guard(f"making an instance of {env_key}", timeout_s):
            env = await self._sdk.make(
                _joined(env_key, env_version),
                data_key=_joined(data_key, data_version) if data_key else None,
                region=region,
                env_variables=env_variables or None,
                image_type=image_type,
                ttl_seconds=ttl_seconds,
                run_id=run_id,
                heartbeat_interval=heartbeat_interval,
                timeout=timeout_s,
            )
            while env.status == "pending":
                await asyncio.sleep(1.0)
                env = await self._sdk.instance(env.instance_id)
        instance = _payload(env)
        if instance["status"] != "running" or instance["urls"] is None:
            raise FleetFailure(f"instance {env.instance_id} of {env_key} is {env.status}", transient=True, unknown=True)
        return instance

    async def get(self, instance_id: str, timeout_s: float = REQUEST_TIMEOUT_S) -> dict[str, Any]:
        async with self._guard(f"instance {instance_id}", timeout_s):
            response = await self._sdk.client.request("GET", f"/v1/env/instances/{instance_id}")
            return response.json()

    async def list(
        self, run_id: str | None = None, status: str | None = "running", timeout_s: float = REQUEST_TIMEOUT_S
    ) -> list[dict[str, Any]]:
        """Instances of one run, or all of the team's."""
        async with self._guard("listing instances", timeout_s):
            return [_payload(env) for env in await self._sdk.instances(status=status, run_id=run_id)]

    async def delete(self, instance_id: str, timeout_s: float = REQUEST_TIMEOUT_S) -> bool:
        """Delete an instance; returns once the control plane has acknowledged it. False: it was gone already."""
        try:
            async with self._guard(f"deleting instance {instance_id}", timeout_s):
                await self._sdk.delete(instance_id)
        except FleetFailure as failure:
            if failure.status == 404:
                return False
            raise
        return True

    async def delete_run(self, run_id: str, timeout_s: float = REQUEST_TIMEOUT_S) -> int:
        """Delete every instance of a run; returns how many the control plane ended."""
        async with self._guard(f"deleting the instances of {run_id}", timeout_s):
            return len(await self._sdk.close_all(run_id=run_id))

    async def heartbeat(self, instance_id: str, timeout_s: float = REQUEST_TIMEOUT_S) -> float | None:
        """Keep an instance alive; returns the epoch second by which the next heartbeat must arrive, if there is one."""
        async with self._guard(f"heartbeat of {instance_id}", timeout_s):
            return (await self._sdk.heartbeat(instance_id)).deadline_timestamp

    def busy_s(self) -> float:
        """Seconds for which the control plane asked, by ``Retry-After``, to be left alone; 0 if it did not."""
        return max(0.0, self._transport.busy_until - time.monotonic())

    async def account(self, timeout_s: float = REQUEST_TIMEOUT_S) -> Account:
        async with self._guard("reading the account", timeout_s):
            account = await self._sdk.account()
            return Account(account.instance_limit, account.instance_count)

    async def reset(self, instance: dict[str, Any], seed: int | None, timeout_s: float) -> None:
        """Put an instance back into its seed state through its runner."""
        async with self._guard(f"resetting instance {instance['instance_id']}", timeout_s):
            async with self._token_lock:
                await self._runner_tokens.token_async()
            runner = AsyncInstanceClient(
                instance["urls"]["manager"]["api"], self._http, runner_token_provider=self._runner_tokens
            )
            response = await runner.client.request("POST", "/reset", json={"timestamp": None, "seed": seed})
            if response.status_code == 404:
                # A cluster that gates its runners answers calls without a valid token like this.
                self._runner_tokens = RunnerTokenProvider(self._sdk.client)
            if response.status_code >= 400:
                raise FleetFailure(
                    f"the runner of instance {instance['instance_id']} answered reset with {response.status_code} "
                    f"{response.text[:200]}".strip(),
                    transient=response.status_code in (404, 429)
                    or (response.status_code >= 500 and response.status_code != 501),
                    status=response.status_code,
                )
            body = response.json()
            if not body.get("success", False):
                raise FleetFailure(f"reset of instance {instance['instance_id']} failed: {body.get('message')}")

    async def verify(
        self,
        instance: dict[str, Any],
        key: str,
        verifier: Verifier,
        kwargs: dict[str, Any],
        timeout_s: float = VERIFIER_TIMEOUT_S + 15.0,
    ) -> Verification:
        """Run a verifier where the control plane runs them. Its source is uploaded once per digest."""
        env = AsyncEnv(self._sdk.client, **instance)
        async with self._guard(f"verifying {key}", timeout_s):
            known = verifier.sha256 in self._uploaded or (await env.check_bundle_exists(verifier.sha256)).success
            try:
                response = await self._execute(env, key, verifier, kwargs, upload=not known)
            except FleetAPIError as error:
                if not known or not _lacks_bundle(error):
                    raise
                response = await self._execute(env, key, verifier, kwargs, upload=True)
        self._uploaded.add(verifier.sha256)
        error = response.error
        return Verification(
            success=response.success,
            result=response.result,
            stdout=response.stdout or "",
            error=None if error is None else str(error.get("message", error)),
            execution_id=response.execution_id,
        )

    async def close(self) -> None:
        """Close the client; connections are the loop's, see :func:`close_clients`. Instances are not touched."""
        await self._http.aclose()

    @staticmethod
    async def _execute(env: AsyncEnv, key: str, verifier: Verifier, kwargs: dict[str, Any], upload: bool) -> Any:
        # The control plane puts the environment where {"env": id} stands.
        args = ({"env": env.instance_id},)
        return await env.execute_verifier_remote(
            bundle_data=verifier.bundle if upload else b"",
            bundle_sha=verifier.sha256,
            key=key,
            function_name=verifier.function_name,
            args=args,
            args_array=list(args),
            kwargs=kwargs,
            timeout=VERIFIER_TIMEOUT_S,
            needs_upload=upload,
        )

    @asynccontextmanager
    async def _guard(self, what: str, timeout_s: float):
        """Bound a call, and turn everything the SDK raises into a :class:`FleetFailure`."""
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            raise FleetFailure(f"{what}: no answer within {timeout_s:.0f} s", transient=True, unknown=True) from None
        except FleetInstanceLimitError as error:
            raise QuotaReached(f"{what}: {error}", error.running_instances, error.instance_limit) from error
        except FleetAuthenticationError as error:
            raise FleetFailure(f"{what}: the API key was refused: {error}", status=401) from error
        except FleetAPIError as error:
            raise _api_failure(what, error) from error
        except (FleetTimeoutError, httpx.RequestError) as error:
            raise FleetFailure(f"{what}: {error or type(error).__name__}", transient=True, unknown=True) from error
        except FleetError as error:
            raise FleetFailure(f"{what}: {error}") from error
        except UNREADABLE as error:
            first = (str(error) or type(error).__name__).splitlines()[0]
            raise FleetFailure(f"{what}: the answer cannot be read: {first}", unknown=True) from error
        except ValueError as error:
            raise FleetFailure(f"{what}: the request cannot be written as JSON: {error}") from error


def _api_failure(what: str, error: FleetAPIError) -> FleetFailure:
    status = error.status_code
    # The SDK keeps only the message of a structured error, so its "retryable" flag is looked up in the body.
    said = f"{error} {json.dumps(error.response_data)}".lower()
    server_failed = status is None or status >= 500
    transient = server_failed or status == 429 or any(marker in said for marker in TRANSIENT_MARKERS)
    return FleetFailure(f"{what}: {error}", transient=transient, unknown=server_failed, status=status)


def _lacks_bundle(error: FleetAPIError) -> bool:
    """Whether a control plane that held this verifier's bundle once does so no more."""
    said = str(error).lower()
    return error.status_code == 404 or ("not found" in said and ("bundle" in said or "verifier" in said))


def _payload(env: AsyncEnv) -> dict[str, Any]:
    return env.model_dump(mode="json")


def _joined(key: str, version: str | None) -> str:
    return f"{key}:{version}" if version and ":" not in key else key


_controls: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple, FleetControl]] = weakref.WeakKeyDictionary()


def shared_control(api_key: str | None, base_url: str | None) -> FleetControl:
    """The running loop's client for this key and address: making one costs a TLS context, some 20 ms."""
    controls = _controls.setdefault(asyncio.get_running_loop(), {})
    control = controls.get((api_key, base_url))
    if control is None:
        control = controls[api_key, base_url] = FleetControl(api_key, base_url)
    return control


async def close_clients() -> None:
    """Close the running loop's connections to control planes and instances."""
    for control in _controls.pop(asyncio.get_running_loop(), {}).values():
        await control.close()
    await close_http_session()


# ---------------------------------------------------------------------------------------------------------------
# Verifiers


class VerifierError(ValueError):
    """Verifier source that cannot be handed over; the message says why."""


@dataclass(frozen=True)
class Verifier:
    """Verifier source as the control plane takes it. It was parsed here, never executed.

    Attributes:
        answer, conversation: whether the function takes ``final_answer`` and ``conversation``.
        bundle: a zip of ``verifier.py`` and ``requirements.txt``, equal for equal source.
    """

    function_name: str
    answer: bool
    conversation: bool
    bundle: bytes
    sha256: str


@lru_cache(maxsize=4096)
def read_verifier(source: str) -> Verifier:
    """Find the verifying function: the first one whose first parameter is ``env``, else the first one.

    Raises:
        VerifierError: the source does not parse, or defines no function.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierError(f"the verifier's source does not parse: {error or 'it is nested too deeply'}") from None
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    if not functions:
        raise VerifierError("the verifier's source defines no function")
    function = next((node for node in functions if _parameters(node)[:1] == ["env"]), functions[0])
    named = _parameters(function) + [argument.arg for argument in function.args.kwonlyargs]
    bundle = _bundle(source)
    return Verifier(
        function_name=function.name,
        answer="final_answer" in named or function.args.kwarg is not None,
        conversation="conversation" in named,
        bundle=bundle,
        sha256=hashlib.sha256(bundle).hexdigest(),
    )


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in function.args.posonlyargs + function.args.args]


def _bundle(source: str) -> bytes:
    """The SDK stamps the current time into its zip, so its digests never match; a fixed date makes them comparable."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in (("requirements.txt", "fleet-python"), ("verifier.py", source)):
            archive.writestr(zipfile.ZipInfo(name, date_time=(1980, 1, 1, 0, 0, 0)), text, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


def read_grade(verification: Verification, partial: bool = False) -> Outcome:
    """A verification as an outcome: only a run that succeeded, with no judge error, grades.

    ``partial``: a grade of 0 becomes the share that :func:`partial_reward` reads from the output, if it can.
    """
    judge = next((line for line in verification.stdout.splitlines() if line.startswith(JUDGE_ERROR)), None)
    if judge is not None:
        return Ungraded(f"the judge failed: {judge.removeprefix(JUDGE_ERROR).strip()}")
    if not verification.success:
        return Ungraded(f"the verifier failed: {_one_line(verification.error or 'no reason given')}")
    result = verification.result
    if result is None:
        return Graded(1.0)
    try:
        reward = float(result.get("score") if isinstance(result, dict) else result)
    except (TypeError, ValueError):
        return Ungraded(f"the verifier returned {str(result)[:100]!r}, which is not a number")
    if not math.isfinite(reward):
        return Ungraded(f"the verifier returned {reward}")
    share = partial_reward(verification.stdout) if partial and reward == 0 else None
    return Graded(reward if share is None else share)


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    return " / ".join(lines)[:300]


# ---------------------------------------------------------------------------------------------------------------
# One task on one instance


class FleetAction(Action):
    """A tool call, the end of the episode, or both (the call is made first).

    ``final_answer`` and ``conversation`` are what the verifier is given if this action ends the episode.
    """

    tool: str | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    done: bool = False
    final_answer: str | None = None
    conversation: list[dict[str, Any]] | None = None


class FleetObservation(Observation):
    """What the policy may read.

    Attributes:
        result: of the tool: a dict, a list, text, or OpenAI content blocks; None where there is none.
        error: why there is no result.
        tools: in OpenAI's function format; filled by reset only.
        metadata: ``done_reason`` (``agent_done``, ``max_steps``), and once graded ``outcome`` and its ``reason``.
    """

    prompt: str = ""
    result: Any = None
    error: str | None = None
    tools: list[dict[str, Any]] = Field(default_factory=list)
    task_key: str = ""
    modality: str = "tool_use"
    step: int = 0


class FleetState(State):
    """Where an episode stands."""

    task_key: str = ""
    instance_id: str | None = None
    done: bool = False


class Lease(Protocol):
    """The right to use an instance, as the pool gives it."""

    lease_id: str
    instance: dict[str, Any]
    reused: bool


GiveBack = Callable[[str, bool], Awaitable[Any]]

# Tools by control plane, environment and version. They belong to an image, and the key names the image, so every
# instance of it has the same ones; a process lists them once instead of once per episode. The handshake with the
# instance is still made by every reset, so an instance that serves no tools still fails there.
_tool_lists: dict[tuple[str | None, str, str], ToolList] = {}

_background: set[asyncio.Task] = set()

SUBMIT_TOOL = {
    "type": "function",
    "function": {
        "name": SUBMIT,
        "description": "Submit the final answer. This ends the task.",
        "parameters": {
            "type": "object",
            "properties": {"answer": {"type": "string", "description": "the final answer"}},
            "required": ["answer"],
        },
    },
}


class FleetTaskEnv(Environment[FleetAction, FleetObservation, FleetState]):
    """One task on one Fleet instance: ``reset``, ``step``, ``close`` and their asynchronous twins.

    Args:
        task_config: a task, or its dict in Fleet's format.
        api_key, base_url: see :class:`FleetControl`.
        lease: use this instance. Without one, reset makes an instance, and close deletes it.
        give_back: with a lease, awaited once by close as ``give_back(lease_id, reusable)``.
        ttl_seconds: lifetime of an instance made here; default 900 s, 1800 s with a screen.
        max_steps: the environment ends the episode after this many steps; None: never.
        grade_on_done: grade in the step that ends the episode. A caller that grades in a phase of its own with
            :meth:`verify_async` says False; the reward of such a step is None.
        deadlines: seconds by phase: ``provision``, ``reset``, ``list``, ``step``, ``verify``, ``close``.
        verify_backoff_s: pauses before each further attempt at grading.
        run_id: written on an instance made here.
        partial_reward: see :func:`read_grade`.
    """

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(
        self,
        task_config: Task | dict[str, Any],
        api_key: str | None = None,
        *,
        lease: Lease | None = None,
        give_back: GiveBack | None = None,
        base_url: str | None = None,
        ttl_seconds: int | None = None,
        max_steps: int | None = 50,
        grade_on_done: bool = True,
        deadlines: DeadlinesConfig | None = None,
        verify_backoff_s: tuple[float, ...] = (3.0, 6.0, 12.0),
        run_id: str | None = None,
        partial_reward: bool = False,
    ) -> None:
        super().__init__()
        self._partial_reward = partial_reward
        self.task = task_config if isinstance(task_config, Task) else parse_task(task_config, "task_config")
        self._api_key = api_key
        self._base_url = base_url
        self._lease = lease
        self._give_back = give_back
        self._ttl_seconds = ttl_seconds or DEFAULT_TTL_S[self.task.task_modality]
        self._max_steps = max_steps
        self._grade_on_done = grade_on_done
        self._deadlines = deadlines or DeadlinesConfig()
        self._verify_backoff_s = verify_backoff_s
        self._run_id = run_id or f"fleet-rl:single:{uuid.uuid4().hex[:8]}"
        self._instance: dict[str, Any] | None = None if lease is None else lease.instance
        self._tools: McpTools | None = None
        self._names: frozenset[str] = frozenset()
        self._state = FleetState(task_key=self.task.task_key)
        self._ready = False
        self._untouched = lease is None or not lease.reused  # the instance is as it was made
        self._clean = True  # nothing happened that would make another episode on this instance unsafe
        self._answer: str | None = None
        self._outcome: Outcome | None = None
        self._last_failure = Ungraded("no attempt at grading ended")
        self._closing: asyncio.Task | None = None
        self.verification: Verification | None = None  # of the last attempt at grading
        self.close_error: str | None = None

    # -- OpenEnv's verbs, asynchronous

    async def reset_async(self, seed: int | None = None, episode_id: str | None = None, **_: Any) -> FleetObservation:
        """Start an episode: an instance (unless there is one), its seed state, its tools.

        An instance whose runner has no reset serves one episode, in the state it was made in, and no other.

        Raises:
            NotImplementedError: the task needs a screen.
            FleetFailure, ToolsUnavailable: there is no usable instance within the deadlines.
        """
        if self.task.task_modality != "tool_use":
            raise NotImplementedError(
                f"task {self.task.task_key}: modality {self.task.task_modality} is not supported yet; only tool_use is"
            )
        if self._closing is not None:
            raise RuntimeError("reset after close: make a new environment")
        self._ready = False
        if self._instance is None:
            self._instance = await self._provision()
        await self._reset_instance(seed)
        tools = await self._open_tools(self._deadlines.list)
        self._state = FleetState(
            episode_id=episode_id, task_key=self.task.task_key, instance_id=self._instance["instance_id"]
        )
        self._answer = self._outcome = self.verification = None
        self._untouched = False
        self._ready = True
        return self._observe(prompt=self.task.prompt, tools=tools)

    async def step_async(
        self, action: FleetAction | dict[str, Any], timeout_s: float | None = None, **_: Any
    ) -> FleetObservation:
        """Carry out one action. What a tool does wrong is an observation, never an exception.

        Args:
            timeout_s: for the tool call, where shorter than ``deadlines.step``.

        Raises:
            RuntimeError: before reset, or after the episode is done.
        """
        if not self._ready:
            raise RuntimeError("step before reset")
        if self._state.done:
            raise RuntimeError(f"step after the episode of task {self.task.task_key} is done; reset starts a new one")
        if isinstance(action, dict):
            action = FleetAction.model_validate(action)
        self._state.step_count += 1
        outcome = await self._act(action, min(self._deadlines.step, timeout_s or math.inf))
        done_reason = None
        if action.done or self._answer is not None:
            done_reason = "agent_done"
        elif self._max_steps is not None and self._state.step_count >= self._max_steps:
            done_reason = "max_steps"
        if done_reason is None:
            return self._observe(result=outcome.content, error=outcome.error, metadata={"done_reason": None})
        self._state.done = True
        graded = await self._grade_step(action) if self._grade_on_done else {}
        return self._observe(
            result=outcome.content,
            error=outcome.error,
            done=True,
            reward=graded.pop("reward", None),
            metadata={"done_reason": done_reason, **graded},
        )

    async def verify_async(
        self, final_answer: str | None = None, conversation: list[dict[str, Any]] | None = None
    ) -> Outcome:
        """Grade the episode on the instance's present state. Asked again, it answers the same.

        Args:
            final_answer: default: what was given to ``submit_final_answer``.
            conversation: messages with ``role`` and ``content``; handed, as JSON, to verifiers that ask for it.

        Returns:
            ``Graded``, or ``Ungraded`` where there is no verifier or every attempt failed: never a made-up zero.
        """
        if self._outcome is None:
            self._outcome = await self._verify(self._answer if final_answer is None else final_answer, conversation)
        return self._outcome

    async def close_async(self) -> None:
        """Delete the instance, or give the lease back. Never raises for what fails; ``close_error`` says what did.

        Cancelling the caller does not stop it: it goes on in the background, and the caller waits up to
        ``RELEASE_GRACE_S`` for it before the cancellation takes effect.
        """
        if self._closing is None:
            self._closing = _in_background(self._close())
        await _finish(self._closing)

    # -- the same, blocking

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> FleetObservation:
        """Blocking :meth:`reset_async`."""
        return _sync_loop().run(self.reset_async(seed, episode_id, **kwargs))

    def step(
        self, action: FleetAction | dict[str, Any], timeout_s: float | None = None, **kwargs: Any
    ) -> FleetObservation:
        """Blocking :meth:`step_async`."""
        return _sync_loop().run(self.step_async(action, timeout_s, **kwargs))

    def close(self) -> None:
        """Blocking :meth:`close_async`."""
        _sync_loop().run(self.close_async())

    @property
    def state(self) -> FleetState:
        return self._state

    @property
    def reusable(self) -> bool:
        """Whether another episode may have this instance after a reset."""
        return self._ready and self._clean and not (self._tools is not None and self._tools.suspect)

    def get_metadata(self) -> EnvironmentMetadata:
        return EnvironmentMetadata(
            name="FleetTaskEnv", description=f"Fleet task {self.task.task_key} on {self.task.env_key}", version="1"
        )

    # -- parts

    def _control(self) -> FleetControl:
        return shared_control(self._api_key, self._base_url)

    async def _provision(self) -> dict[str, Any]:
        task = self.task
        making = _in_background(
            self._control().make(
                task.env_key,
                env_version=task.env_version,
                data_key=task.data_key,
                data_version=task.data_version,
                env_variables=task.env_variables,
                ttl_seconds=self._ttl_seconds,
                run_id=self._run_id,
                timeout_s=self._deadlines.provision,
            )
        )
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            # The control plane goes on making it; whoever is cancelled here must not leave it running.
            await _wait_briefly(_in_background(self._discard(making)))
            raise

    async def _discard(self, making: asyncio.Task) -> None:
        try:
            instance = await making
            await self._control().delete(instance["instance_id"])
        except FleetFailure as failure:
            logger.warning("an instance of %s may run until its time is up: %s", self._run_id, failure)

    async def _reset_instance(self, seed: int | None) -> None:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._deadlines.reset
        wait = 0.2
        for attempt in itertools.count(1):
            try:
                return await self._control().reset(self._instance, seed, max(0.1, deadline - loop.time()))
            except FleetFailure as failure:
                if self._untouched and seed is None and await self._lacks_reset(failure.status, attempt):
                    self._clean = False
                    logger.info("%s: it serves this episode only", failure)
                    return
                if not failure.transient or loop.time() + wait >= deadline:
                    raise
                logger.debug("%s", failure)
            await asyncio.sleep(wait)
            wait = min(2 * wait, 4.0)

    async def _lacks_reset(self, status: int | None, attempt: int) -> bool:
        """Whether the runner has no reset. A 404 may also come from an instance that still starts, and then its tools
        do not answer either, or from a runner with a stale token, which the next attempt replaces."""
        if status != 404:
            return status in NO_RESET
        if attempt < 3:
            return False
        try:
            await self._open_tools(min(PROBE_S, self._deadlines.list))
        except ToolsUnavailable:
            return False
        return True

    async def _open_tools(self, timeout_s: float) -> list[dict[str, Any]]:
        if self._tools is None:
            self._tools = McpTools(self._instance["urls"]["root"])
        key = (self._base_url, self._instance["env_key"], self._instance["version"])
        listing = await self._tools.open(_tool_lists.get(key), timeout_s)
        if listing.complete:
            _tool_lists[key] = listing
        # The screen's tool belongs to the other modalities.
        tools = [tool for tool in listing.tools if tool["function"]["name"] != "computer"]
        if SUBMIT in self.task.prompt and SUBMIT not in listing.owners:
            tools.append(SUBMIT_TOOL)
        self._names = frozenset(tool["function"]["name"] for tool in tools)
        return tools

    async def _act(self, action: FleetAction, timeout_s: float) -> ToolResult:
        if action.tool is None:
            return ToolResult(error=None if action.done else "the action names no tool and is not done")
        if action.tool not in self._names:
            near = difflib.get_close_matches(action.tool, self._names, n=3, cutoff=0.4) or sorted(self._names)[:10]
            return ToolResult(error=f"there is no tool '{action.tool}'; did you mean {', '.join(near)}?")
        if action.tool == SUBMIT and SUBMIT not in self._tools.names:
            return self._submit(action.params)
        return await self._tools.call(action.tool, action.params, timeout_s)

    def _submit(self, params: dict[str, Any]) -> ToolResult:
        answer = params.get("answer", params.get("final_answer"))
        if answer is None:
            return ToolResult(error=f"{SUBMIT} needs 'answer'")
        self._answer = answer if isinstance(answer, str) else json.dumps(answer)
        return ToolResult(content="submitted")

    async def _grade_step(self, action: FleetAction) -> dict[str, Any]:
        outcome = await self.verify_async(action.final_answer, action.conversation)
        if isinstance(outcome, Graded):
            return {"outcome": "graded", "reward": outcome.reward}
        return {"outcome": "ungraded", "reason": outcome.reason}

    async def _verify(self, final_answer: str | None, conversation: list[dict[str, Any]] | None) -> Outcome:
        if not self.task.verifier_code:
            return Ungraded("task has no verifier")
        if not self._ready:
            return Ungraded("the environment was not reset")
        try:
            verifier = read_verifier(self.task.verifier_code)
        except VerifierError as error:
            return Ungraded(str(error))
        kwargs: dict[str, Any] = {}
        if verifier.answer:
            kwargs["final_answer"] = final_answer
        if verifier.conversation and conversation is not None:
            kwargs["conversation"] = json.dumps(conversation)
        try:
            async with asyncio.timeout(self._deadlines.verify):
                return await self._verify_attempts(verifier, kwargs)
        except TimeoutError:
            self._clean = False
            return Ungraded(f"not graded within {self._deadlines.verify:.0f} s; last: {self._last_failure.reason}")
        except asyncio.CancelledError:
            self._clean = False
            raise

    async def _verify_attempts(self, verifier: Verifier, kwargs: dict[str, Any]) -> Outcome:
        attempts = len(self._verify_backoff_s) + 1
        for attempt in range(attempts):
            if attempt:
                await asyncio.sleep(self._verify_backoff_s[attempt - 1])
            try:
                self.verification = await self._control().verify(self._instance, self.task.task_key, verifier, kwargs)
            except FleetFailure as failure:
                outcome: Outcome = Ungraded(str(failure))
                self._clean = self._clean and not failure.unknown
            else:
                outcome = read_grade(self.verification, self._partial_reward)
            if isinstance(outcome, Graded):
                return outcome
            self._last_failure = outcome
            logger.debug("attempt %d at grading %s: %s", attempt + 1, self.task.task_key, outcome.reason)
        return Ungraded(f"{self._last_failure.reason} ({attempts} attempts)")

    async def _close(self) -> None:
        reusable = self.reusable
        self._ready = False
        if self._instance is None:
            return
        try:
            if self._tools is not None and reusable:
                await self._tools.close(SESSION_END_S)
        except Exception as error:  # noqa: BLE001 - whatever it is, the lease must go back
            logger.warning("MCP sessions of %s were not ended: %s", self._instance["instance_id"], error)
        try:
            async with asyncio.timeout(self._deadlines.close):
                if self._lease is None:
                    await self._delete()
                elif self._give_back is not None:
                    await self._give_back(self._lease.lease_id, reusable)
        except TimeoutError:
            self.close_error = f"not acknowledged within {self._deadlines.close:.0f} s"
        except Exception as error:  # noqa: BLE001 - a pool behind Ray may raise anything; the episode's result stands
            self.close_error = _one_line(f"{type(error).__name__}: {error}")
        if self.close_error is not None:
            logger.warning("instance %s was not given back: %s", self._instance["instance_id"], self.close_error)
        self._instance = None

    async def _delete(self) -> None:
        """Until the control plane acknowledges it, or the caller's deadline."""
        for wait in itertools.chain((0.5, 1.0, 2.0), itertools.repeat(5.0)):
            try:
                await self._control().delete(self._instance["instance_id"])
                return
            except FleetFailure as failure:
                if not failure.transient:
                    raise
                logger.debug("%s", failure)
            await asyncio.sleep(wait)

    def _observe(self, **fields: Any) -> FleetObservation:
        return FleetObservation(
            task_key=self.task.task_key, modality=self.task.task_modality, step=self._state.step_count, **fields
        )


def make_fleet_task_env(task_config: Task | dict[str, Any], **kwargs: Any) -> FleetTaskEnv:
    """A :class:`FleetTaskEnv`; keyword arguments as there."""
    return FleetTaskEnv(task_config, **kwargs)


def from_json_file(path: str | Path, task_key: str, **kwargs: Any) -> FleetTaskEnv:
    """The environment of one task of a task file.

    Raises:
        TaskFileError: the file cannot be used, or has no such task.
    """
    tasks = {task.task_key: task for task in load_tasks(path)}
    if task_key not in tasks:
        near = difflib.get_close_matches(task_key, tasks, n=3) or sorted(tasks)[:3]
        raise TaskFileError(f"task file {path} has no task '{task_key}'; near: {', '.join(near)}")
    return FleetTaskEnv(tasks[task_key], **kwargs)


def _in_background(work: Coroutine[Any, Any, Any]) -> asyncio.Task:
    """Start work that must outlive its caller; the loop alone holds tasks weakly."""
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)
    return task


async def _finish(task: asyncio.Task) -> None:
    """Wait for work that a cancelled caller must not stop."""
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await _wait_briefly(task)
        raise


async def _wait_briefly(task: asyncio.Task) -> None:
    if not task.done():
        await asyncio.wait({task}, timeout=RELEASE_GRACE_S)


class _LoopThread:
    """A private event loop on a daemon thread, for callers without one. It ends with the process."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="fleet-env", daemon=True).start()
        atexit.register(self._end)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        asyncio.run_coroutine_threadsafe(close_clients(), self._loop).result(timeout=5.0)
        self._loop.call_soon_threadsafe(self._loop.stop)


@lru_cache(maxsize=1)
def _sync_loop() -> _LoopThread:
    return _LoopThread()
