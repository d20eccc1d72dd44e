"""The checks of a task that need an instance: its verifier on an untouched one, its recorded calls, a teacher."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from actors.config import DeadlinesConfig
from actors.env_pool_core import EnvPoolCore, NoInstance
from actors.envs.fleet import JUDGE_ERROR, FleetFailure, FleetTaskEnv, read_grade
from actors.envs.mcp_tools import ToolsUnavailable
from actors.lease_table import EnvSpec
from actors.prompt import tool_text
from actors.task import Task
from actors.tool_calls import ToolCall
from actors.trajectory import Graded, Ungraded
from train.chat.protocol import EndpointFailed, EndpointGone
from train.data.candidate import Candidate
from train.data.journal import Result, Unit
from train.data.teacher_attempt import TeacherAttempt, Usage

if TYPE_CHECKING:
    from train.chat.endpoint import ChatEndpoint

logger = logging.getLogger(__name__)

REPEATS = 2  # of a unit that failed through no fault of the task's, unless the teacher was asked for something
MAX_DETAIL_CHARS = 500


class NotCarriedOut(Exception):
    """A recorded call could not be made, or it is not known whether it took effect."""


class CallFailed(Exception):
    """A recorded call does not execute."""


class InstanceChecks:
    """Carries units out, each on an instance leased for it, and gives the instance back whatever happens.

    Args:
        pool: started.
        verify: grade after a replay.
        teacher: for units that ask for one.
        verify_backoff_s: pauses before further attempts at grading.
    """

    def __init__(
        self,
        pool: EnvPoolCore,
        api_key: str | None,
        base_url: str | None,
        *,
        deadlines: DeadlinesConfig,
        verify: bool,
        teacher: ChatEndpoint | None,
        verify_backoff_s: tuple[float, ...],
    ) -> None:
        self._pool = pool
        self._api_key = api_key
        self._base_url = base_url
        self._deadlines = deadlines
        self._verify = verify
        self._teacher = teacher
        self._verify_backoff_s = verify_backoff_s

    async def settle(self, candidate: Candidate, unit: Unit) -> Result:
        """Carry a unit out; what fails through no fault of the task's is repeated up to ``REPEATS`` times.

        A recorded call that fails is tried on a second instance: what a tool says does not tell a wrong call from a
        backend that was down.

        Raises:
            EndpointGone: no further attempt of the teacher's can be made.
        """
        suspected = False
        for _ in range(REPEATS + 1):
            result, again = await self._settle_once(candidate, unit)
            again = again or (result.outcome == "call_failed" and not suspected)
            suspected = suspected or result.outcome == "call_failed"
            if not again:
                break
        return result

    async def _settle_once(self, candidate: Candidate, unit: Unit) -> tuple[Result, bool]:
        """The result, and whether another try makes sense."""
        begun = time.monotonic()
        check = {"untouched": self._untouched, "replay": self._replay, "teacher": self._attempt}[unit.check]
        usage, waited = Usage(), False
        try:
            found = await check(candidate, usage)
        except CallFailed as error:
            found = {"outcome": "call_failed", "detail": error}
        except NoInstance as error:
            found, waited = {"outcome": "failed", "detail": error}, True
        except (FleetFailure, ToolsUnavailable, NotCarriedOut, EndpointFailed) as error:
            found = {"outcome": "failed", "detail": error}
        except TimeoutError:
            found = {"outcome": "failed", "detail": f"no end within {self._deadlines.episode:.0f} s"}
        except EndpointGone:
            raise
        except Exception as error:
            # A fault of ours must cost this task and no other, and must not look like the task's.
            logger.exception("%s of task %s", unit.check, candidate.task.task_key)
            found = {"outcome": "failed", "detail": f"{type(error).__name__}: {error}"}
        found["detail"] = _one_line(found.get("detail", ""))
        seconds = round(time.monotonic() - begun, 3)
        result = Result(task_key=candidate.task.task_key, **unit._asdict(), seconds=seconds, **vars(usage), **found)
        return result, not (result.decided or result.requests or waited)

    # -- the checks: each returns fields of the result

    async def _untouched(self, candidate: Candidate, usage: Usage) -> dict[str, Any]:
        async with self._fresh(candidate.task) as (env, _):
            return await self._graded(env, None, [{"role": "user", "content": candidate.task.prompt}])

    async def _replay(self, candidate: Candidate, usage: Usage) -> dict[str, Any]:
        async with self._fresh(candidate.task) as (env, _), asyncio.timeout(self._deadlines.episode):
            conversation = [{"role": "user", "content": candidate.task.prompt}]
            for number, call in enumerate(candidate.calls, 1):
                usage.tool_calls += 1
                text = await _recorded_call(env, call, f"call {number} of {len(candidate.calls)}, {_shown(call)}")
                conversation += [{"role": "assistant", "content": _as_turn(call)}, {"role": "tool", "content": text}]
            if not self._verify or candidate.verifier is None:
                return {"outcome": "executed"}
            conversation.append({"role": "assistant", "content": f"{candidate.answer or ''}<done>"})
            return await self._graded(env, candidate.answer, conversation)

    async def _attempt(self, candidate: Candidate, usage: Usage) -> dict[str, Any]:
        deadlines = self._deadlines
        async with self._fresh(candidate.task) as (env, tools):
            attempt = TeacherAttempt(candidate.task, env, tools, self._teacher, usage)
            # An endpoint or an instance that is slow says nothing of the task: no end is no zero.
            async with asyncio.timeout(deadlines.episode):
                await attempt.run()
            graded = await self._graded(env, attempt.answer, attempt.conversation)
        return graded | {"stop_reason": attempt.stop.value}

    async def _graded(
        self, env: FleetTaskEnv, answer: str | None, conversation: list[dict[str, Any]]
    ) -> dict[str, Any]:
        outcome = await env.verify_async(answer, conversation)
        if isinstance(outcome, Graded):
            return {"outcome": "graded", "reward": outcome.reward}
        return {"outcome": "verifier_error" if _verifier_failed(env, outcome) else "failed", "detail": outcome.reason}

    @asynccontextmanager
    async def _fresh(self, task: Task) -> AsyncIterator[tuple[FleetTaskEnv, list[dict[str, Any]]]]:
        """An instance in its seed state, and its tools."""
        lease = await self._pool.acquire(EnvSpec.of(task), self._deadlines.provision)
        env = FleetTaskEnv(
            task,
            self._api_key,
            lease=lease,
            give_back=self._pool.release,
            base_url=self._base_url,
            max_steps=None,
            grade_on_done=False,
            deadlines=self._deadlines,
            verify_backoff_s=self._verify_backoff_s,
        )
        try:
            observation = await env.reset_async()
            yield env, list(observation.tools)
        finally:
            await env.close_async()


async def _recorded_call(env: FleetTaskEnv, call: ToolCall, what: str) -> str:
    """The text that the tool answered."""
    if env.state.done:
        raise CallFailed(f"{what}: the task had ended before it")
    observation = await env.step_async({"tool": call.name, "params": call.arguments})
    if observation.error is None:
        return tool_text(observation.result)
    # The environment gives an instance up where a call was not answered, or could not be made.
    raise (CallFailed if env.reusable else NotCarriedOut)(f"{what}: {observation.error}")


def _verifier_failed(env: FleetTaskEnv, outcome: Ungraded) -> bool:
    """Whether the last attempt at grading failed in the verifier itself, not in a judge or on the way to it."""
    if env.verification is None or JUDGE_ERROR in env.verification.stdout:
        return False
    last = read_grade(env.verification)
    return isinstance(last, Ungraded) and last.reason in outcome.reason


def _as_turn(call: ToolCall) -> str:
    return f"<tool_call>{json.dumps({'name': call.name, 'arguments': call.arguments})}</tool_call>"


def _shown(call: ToolCall) -> str:
    arguments = json.dumps(call.arguments)
    return f"{call.name}({arguments if len(arguments) <= 150 else arguments[:150] + '...'})"


def _one_line(text: object) -> str:
    line = " ".join(str(text).split()).encode("utf-8", "replace").decode()
    return line if len(line) <= MAX_DETAIL_CHARS else f"{line[:MAX_DETAIL_CHARS]}..."
