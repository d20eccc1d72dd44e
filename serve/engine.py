"""One vLLM engine, and the only file that knows vLLM.

``Engine`` is what a replica holds: token ids in, token ids with logprobs and version spans out, and new weights while
requests are in flight. The classes at the end run in vLLM's own processes, which import this file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Container, Coroutine, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from serve.config import PolicyConfig
from serve.engine_errors import EngineDead, GenerateTimeout, ModelRefused, RequestRefused
from serve.fork_server import ForkContext, start_fork_server
from serve.sampling import Completion, Sampling
from serve.shared_folder import SharedFolder
from serve.snapshot_header import check_shapes
from serve.state_clock import StateClock
from serve.weight_group import CHUNK_BYTES, WeightGroup, join_group
from serve.weight_layout import Checksums, WeightLayout, checksums
from serve.weight_routes import Invitation, WeightUpdate
from serve.weight_transfer import check_received, checkpoint_shapes, read_snapshot

SUPPORTED_VLLM = ((0, 26), (0, 30))  # from, up to but not including
BACKEND = "fleet-rl"
CPU_PREFILL_TOKENS = 2048  # of one engine step
CPU_BLOCK_TOKENS = 32  # of the cache of keys and values; the least its kernels take
HEALTH_POLL_S = 1.0
GIVE_UP_S = 60.0  # for vLLM to notice that the process it is starting was killed
GRACE_S = 5.0  # for vLLM to let go of a process that was killed
# vLLM 0.26 raises plain ValueError where 0.29 has a class for it.
REFUSALS = (VLLMValidationError, ValueError)

logger = logging.getLogger(__name__)


def _check_vllm_version(version: str) -> None:
    found = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
    low, high = SUPPORTED_VLLM
    if not low <= found < high:
        raise ImportError(
            f"vLLM {version} is not supported: install {low[0]}.{low[1]} or later, before {high[0]}.{high[1]}"
        )


_check_vllm_version(vllm.__version__)


@dataclass
class _Request:
    """A request in the engine: vLLM's id of it, and ``(version, first token)`` for each version it ran under."""

    internal_id: str
    marks: list[tuple[int, int]]

    def spans(self, length: int) -> list[tuple[int, int, int]]:
        ends = [start for _, start in self.marks[1:]] + [length]
        return [(version, start, end) for (version, start), end in zip(self.marks, ends, strict=True) if end > start]


@dataclass
class UpdateReport:
    """A finished update.

    Attributes:
        seconds: by phase; together the time in which nothing was sampled.
        checksums: of the tensors that were compared, as they arrived in the engine's processes.
    """

    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


class Engine:
    """An ``AsyncLLM`` whose weights carry a version. Belongs to one event loop.

    Once anything about its weights is uncertain it is dead: its processes are killed, requests in flight fail, and
    nothing is answered any more.

    Attributes:
        gpus: UUID of each worker's GPU, in rank order; ``None`` for a worker without one.
        epoch: of the broadcast group it has joined; ``None`` for none.
    """

    def __init__(
        self, llm: AsyncLLM, config: PolicyConfig, folder: SharedFolder, version: int, time_spent: StateClock
    ) -> None:
        """Use :meth:`start`."""
        self.version = version
        self.gpus: tuple[str | None, ...] = ()
        self.epoch: int | None = None
        self._llm = llm
        self._config = config
        self._folder = folder
        self._time_spent = time_spent
        self._state: str | None = None  # that its time is counted under
        self._vocab_size = llm.model_config.get_vocab_size()
        self._requests: dict[str, _Request] = {}
        self._serial = itertools.count()
        self._admitting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._update_lock = asyncio.Lock()
        self._death: str | None = None
        self._died = asyncio.Event()
        self.finished_requests = 0
        self.sampled_tokens = 0
        self._note_state()

    @classmethod
    async def start(
        cls,
        config: PolicyConfig,
        model_path: str | Path,
        folder: SharedFolder | None = None,
        version: int = 0,
        time_spent: StateClock | None = None,
    ) -> Engine:
        """Start vLLM on ``model_path`` and run it once.

        Args:
            folder: holds the engine's sockets and is closed with it.
            version: what the weights at ``model_path`` are called.
            time_spent: adds up the seconds in which the engine has requests (``generate``), stands still for new
                weights (``update``) or neither (``idle``); nothing once it is dead.

        Raises:
            EngineDead: it did not start, or not within ``startup_timeout_s``.
            ModelRefused: likewise, and another start would not either.
        """
        folder = folder or SharedFolder("engine")
        # The engine's process inherits these; here most have no effect any more.
        os.environ.update(config.environment(), VLLM_RPC_BASE_PATH=str(folder.path))
        # In a thread: vLLM waits for its process without a deadline of its own, and without yielding.
        others = set(multiprocessing.active_children())
        building = asyncio.create_task(asyncio.to_thread(_build, config, model_path))
        try:
            async with asyncio.timeout(config.startup_timeout_s) as deadline:
                engine = cls(await asyncio.shield(building), config, folder, version, time_spent or StateClock())
                await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                engine.gpus = tuple(await engine._llm.collective_rpc("fleet_rl_gpu"))
                await engine._generate_one_token()
        except BaseException as error:
            await _give_up(building, others)
            folder.close()
            if deadline.expired():
                raise EngineDead(f"the engine did not start within {config.startup_timeout_s:g} s") from None
            if isinstance(error, Exception):
                kind = ModelRefused if _is_refusal(error) else EngineDead
                raise kind(f"the engine did not start: {' '.join(str(error).split())}") from error
            raise
        return engine

    async def generate(
        self, prompt_ids: Sequence[int], sampling: Sampling, *, request_id: str, cache_salt: str | None = None
    ) -> Completion:
        """Sample one turn.

        Args:
            request_id: for vLLM's logs; need not be unique.
            cache_salt: keeps keys and values apart that other weights computed; ``None`` salts with the version now.

        Raises:
            RequestRefused: the prompt is empty, too long or not of this vocabulary, or a sampling value out of range.
            GenerateTimeout: not answered within ``generate_timeout_s``.
            EngineDead: see the class.
        """
        self._check_prompt(prompt_ids)
        params = _sampling_params(sampling)
        try:
            async with asyncio.timeout(self._config.generate_timeout_s):
                # While weights change no request is let in, so that an update knows each request it must stamp.
                while not self._open.is_set():
                    await self._open.wait()
                self.require_alive()
                return await self._run(list(prompt_ids), params, request_id, cache_salt or f"v{self.version}")
        except TimeoutError:
            seconds = self._config.generate_timeout_s
            raise GenerateTimeout(f"request {request_id} was not answered within {seconds:g} s") from None
        except EngineDeadError as error:
            await self._die(f"vLLM's engine process failed ({error})")
            raise EngineDead(self._death) from None

    async def _run(self, prompt_ids: list[int], params: SamplingParams, request_id: str, cache_salt: str) -> Completion:
        unique_id = f"{request_id}:{next(self._serial)}"
        version = self.version
        prompt = {"type": "token", "prompt_token_ids": prompt_ids, "cache_salt": cache_salt}
        try:
            self._admitting += 1
            try:
                outputs = await self._llm.add_request(unique_id, prompt, params)
                request = self._requests[unique_id] = _Request(outputs.request_id, [(version, 0)])
                self._note_state()
            finally:
                self._admitting -= 1
            output = outputs.get_nowait() or await outputs.get()
        except REFUSALS as error:
            raise RequestRefused(f"request {request_id}: {error}") from None
        except asyncio.CancelledError:
            # A deadline comes this way too. Without this the engine would go on sampling for nobody.
            await self._llm.abort(unique_id)
            raise
        finally:
            self._requests.pop(unique_id, None)
            self._note_state()
        return self._completion(output.outputs[0], request, cache_salt)

    def _completion(self, output: Any, request: _Request, cache_salt: str) -> Completion:
        token_ids = list(output.token_ids)
        self.finished_requests += 1
        self.sampled_tokens += len(token_ids)
        return Completion(
            token_ids=token_ids,
            logprobs=list(output.logprobs.logprobs),
            stop_reason=output.finish_reason if output.finish_reason in ("stop", "length") else "abort",
            stop_string=output.stop_reason if isinstance(output.stop_reason, str) else None,
            spans=request.spans(len(token_ids)),
            cache_salt=cache_salt,
        )

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        if not prompt_ids:
            raise RequestRefused("the prompt has no tokens")
        room = self._config.max_model_len
        if len(prompt_ids) >= room:
            raise RequestRefused(f"a prompt of {len(prompt_ids)} tokens leaves no room to sample in {room}")
        # An id outside the embedding would not fail this request but the engine.
        if min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
            raise RequestRefused(f"the prompt has ids outside the model's {self._vocab_size} tokens")

    async def join(self, invitation: Invitation, offset: int) -> None:
        """Take part in a broadcast group from now on, with the ranks from ``offset`` on. Sampling waits meanwhile.

        Raises:
            EngineDead: it hung, and so the engine was ended.
            RuntimeError: the group did not come about. The engine goes on without one.
        """
        async with self._update_lock:
            self.require_alive()
            self.epoch = None
            try:
                async with asyncio.timeout(invitation.timeout_s + GRACE_S):
                    joining = self._llm.collective_rpc("fleet_rl_join", args=(asdict(invitation), offset))
                    await self._unless_dead(joining)
            except TimeoutError:
                await self._die(f"joining the broadcast group took over {invitation.timeout_s + GRACE_S:g} s")
                self.require_alive()
            except EngineDeadError as error:
                await self._die(f"vLLM's engine process failed while it joined a group ({error})")
                self.require_alive()
            self.epoch = invitation.epoch

    async def update(self, path: Path, version: int) -> UpdateReport:
        """:meth:`receive` the snapshot at ``path``."""
        return await self.receive(WeightUpdate("snapshot", version, path=str(path)))

    async def receive(self, update: WeightUpdate) -> UpdateReport:
        """Load new weights while requests stand still; they go on under the new weights.

        All or nothing: whatever goes wrong, at whatever point, leaves a dead engine, because half-loaded weights
        answer like whole ones.

        Raises:
            EngineDead: the update failed, or did not finish within ``update_timeout_s``.
        """
        async with self._update_lock:
            self.require_alive()
            report = UpdateReport(update.version)
            try:
                async with asyncio.timeout(self._config.update_timeout_s) as deadline:
                    await self._unless_dead(self._transfer(update, report))
            except BaseException as error:
                reason = f"took over {self._config.update_timeout_s:g} s" if deadline.expired() else f"failed: {error}"
                await self._die(f"update to version {update.version} {reason}")
                if isinstance(error, Exception):
                    raise EngineDead(self._death) from error
                raise
        return report

    async def _unless_dead(self, work: Coroutine[Any, Any, None]) -> None:
        """Await ``work``, or raise :class:`EngineDead`: a call to a process that ends meanwhile is never answered."""
        running, died = asyncio.ensure_future(work), asyncio.ensure_future(self._died.wait())
        try:
            await asyncio.wait({running, died}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done():
                self.require_alive()
            await running
        finally:
            running.cancel()
            died.cancel()

    async def abandon(self, reason: str) -> None:
        """End an engine that waits for weights that will not come. Nothing happens to one that is not updating."""
        if self._update_lock.locked():
            await self._die(reason)

    async def _transfer(self, update: WeightUpdate, report: UpdateReport) -> None:
        if update.route == "snapshot":
            read_snapshot(update.path)  # a damaged one is better noticed before anything stands still
        message = update.to_wire()
        began = time.monotonic()

        def phase_ended(name: str) -> None:
            report.seconds[name] = time.monotonic() - began - sum(report.seconds.values())

        self._open.clear()
        self._note_state()
        while self._admitting:
            await asyncio.sleep(0)
        # Beneath AsyncLLM.pause_generation, which sleeps for 20 ms to let outputs arrive: _stamp waits for those.
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
        phase_ended("pause")
        answers = await self._llm.collective_rpc("fleet_rl_receive", args=(message,))
        report.checksums = answers[0]["checksums"]
        for phase in answers[0]["seconds"]:
            report.seconds[phase] = max(answer["seconds"][phase] for answer in answers)
        phase_ended("call")
        await self._stamp(update.version)
        await self._llm.resume_generation()
        self._open.set()
        self._note_state()
        phase_ended("resume")

    async def _stamp(self, version: int) -> None:
        """Note for each request in flight how many tokens it has: the rest is drawn from the new weights.

        The pause has ended the last step under the old weights and its tokens have reached this process, ahead of the
        answer to the pause, but perhaps not yet the requests they belong to.
        """
        arrived = self._llm.engine_core.outputs_queue
        while not (arrived.empty() and arrived._getters):  # until vLLM's handler waits for more
            self.require_alive()
            await asyncio.sleep(0)
        states = self._llm.output_processor.request_states
        for request in self._requests.values():
            # One that is not there has ended; its output waits to be fetched.
            if (state := states.get(request.internal_id)) is not None:
                request.marks.append((version, state.detokenizer.num_output_tokens()))
        self.version = version

    async def check(self) -> None:
        """Raise :class:`EngineDead` unless the engine produces tokens; not asked while its weights change."""
        self.require_alive()
        if self._llm.errored:
            await self._die("vLLM's engine process ended")
            self.require_alive()
        if self._update_lock.locked():
            return
        before = self._tokens_so_far()
        token = asyncio.create_task(self._generate_one_token())
        try:
            async with asyncio.timeout(self._config.health_timeout_s):
                # A full engine lets the request wait; it is well as long as it serves others.
                while not token.done() and self._tokens_so_far() == before:
                    await asyncio.wait({token}, timeout=HEALTH_POLL_S)
            if token.done():
                await token
        except TimeoutError:
            await self._die(f"the engine produced no token within {self._config.health_timeout_s:g} s")
            self.require_alive()
        finally:
            token.cancel()

    def _tokens_so_far(self) -> int:
        states = self._llm.output_processor.request_states.values()
        return self.sampled_tokens + sum(state.detokenizer.num_output_tokens() for state in states)

    async def _generate_one_token(self) -> None:
        await self.generate([0], Sampling(max_tokens=1), request_id="health", cache_salt="health")

    @property
    def requests_in_flight(self) -> int:
        return len(self._requests)

    def _note_state(self) -> None:
        if self._death is not None:
            state = None
        elif not self._open.is_set():
            state = "update"
        else:
            state = "generate" if self._requests else "idle"
        if state != self._state:
            self._time_spent.move(self._state, state)
            self._state = state

    @property
    def dead(self) -> bool:
        return self._death is not None

    def require_alive(self) -> None:
        """Raise :class:`EngineDead` once it is."""
        if self._death is not None:
            raise EngineDead(self._death)

    async def _die(self, reason: str) -> None:
        if self._death is not None:
            return
        logger.error("the engine is dead: %s", reason)
        await self._end(reason, kill=True)

    async def shutdown(self) -> None:
        """End the engine's processes and remove its files. Requests in flight fail. Idempotent."""
        if self._death is None:
            # One process alone has nothing to clean up; several share memory that has a name.
            await self._end("it was shut down", kill=self._config.tensor_parallel_size == 1)

    async def _end(self, reason: str, kill: bool) -> None:
        self._death = reason
        self._died.set()
        self._note_state()
        self._llm.output_handler.cancel()  # it would report the end of the process as a fault
        if kill:
            _kill(self._llm.engine_core.resources.engine_manager.processes)
        # Everyone who waits learns of it: requests in the engine, and those that wait to be let in.
        self._llm.output_processor.propagate_error(EngineDeadError())
        self._open.set()
        await asyncio.to_thread(self._llm.shutdown, timeout=GRACE_S)
        self._folder.close()


def _build(config: PolicyConfig, model_path: str | Path) -> AsyncLLM:
    arguments = _engine_args(config, model_path)
    if not start_fork_server(config):
        return AsyncLLM.from_engine_args(arguments)
    # In a Ray actor vLLM insists on a process that begins from nothing, because a forked actor hangs
    # (https://github.com/vllm-project/vllm/pull/14705). What is forked here is none. Can go once vLLM takes forkserver
    # for VLLM_WORKER_MULTIPROC_METHOD.
    own, engine_utils.get_mp_context = engine_utils.get_mp_context, ForkContext
    try:
        return AsyncLLM.from_engine_args(arguments)
    finally:
        engine_utils.get_mp_context = own


def _is_refusal(error: Exception) -> bool:
    """Whether vLLM takes no such model or settings. It checks both before it starts an engine's process, whose failures
    come otherwise; for a kind of model that it has not met on this machine it asks a process, which may have died."""
    return isinstance(error, ValueError) and "failed to be inspected" not in str(error)


def _engine_args(config: PolicyConfig, model_path: str | Path) -> AsyncEngineArgs:
    on_cpu = current_platform.is_cpu()
    options: dict[str, Any] = {}
    if on_cpu:
        # A seeded request whose prompt is split over two steps crashes vLLM's CPU engine (its generators cannot be
        # rewound), so prompts stay whole, and a step has room for the longest.
        options["enable_chunked_prefill"] = False
        options["max_num_batched_tokens"] = max(CPU_PREFILL_TOKENS, config.max_model_len)
        # Only whole blocks of a known beginning are reused. With vLLM's 128 the turns of an episode compute half of it
        # again: a third more work, measured on short episodes.
        options["block_size"] = CPU_BLOCK_TOKENS
    return AsyncEngineArgs(
        model=str(model_path),
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_num_seqs=config.max_num_seqs,
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=config.enable_prefix_caching,
        gpu_memory_utilization=config.gpu_memory_utilization,
        kv_cache_memory_bytes=config.kv_cache_bytes,
        hf_overrides=config.hf_overrides,
        # Sampling values come with each request; those of the model's generation_config.json must not slip in.
        generation_config="vllm",
        # The distribution tokens are drawn from, temperature applied: what the learner must reproduce.
        logprobs_mode="processed_logprobs",
        disable_log_stats=True,
        distributed_executor_backend=_OneProcess if config.tensor_parallel_size == 1 else _ManyProcesses,
        worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
        weight_transfer_config={"backend": BACKEND},
        **options,
    )


@lru_cache(maxsize=1024)
def _sampling_params(sampling: Sampling) -> SamplingParams:
    try:
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            seed=sampling.seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=bool(sampling.stop),
            # A stop string may be, or contain, a special token's text.
            skip_special_tokens=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
    except REFUSALS as error:
        raise RequestRefused(f"sampling: {error}") from None


async def _give_up(building: asyncio.Task, others: set[Any]) -> None:
    """vLLM's start cannot be cancelled: kill each process it starts, until it fails for want of one."""
    deadline = time.monotonic() + GIVE_UP_S
    while True:
        _kill(set(multiprocessing.active_children()) - others)
        if building.done() or time.monotonic() > deadline:
            return
        await asyncio.wait({building}, timeout=0.2)


def _kill(processes: Iterable[Any]) -> None:
    for process in processes:
        process.kill()


def native_tool_calls(name: str, tokenizer: Any) -> Callable[[str], Callable[[str], tuple[list[tuple[str, str]], str]]]:
    """vLLM's reader of a model family's own tool-call format, without an engine.

    Returns:
        A function of a list of tools (OpenAI format, as JSON text) that returns a function of a turn's text, special
        tokens included: its calls as (name, arguments as JSON text), and the text around them.

    Raises:
        ValueError: there is no such parser, or the tokenizer lacks what the format needs.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    try:
        parser_class = ToolParserManager.get_tool_parser(name)
        parser_class(tokenizer)
    except Exception as error:
        # Each of vLLM's parsers has its own way of saying that it does not fit the tokenizer.
        raise ValueError(f"tool_call_format '{name}': {str(error) or type(error).__name__}") from None

    @lru_cache(maxsize=64)
    def extract_with(tools: str) -> Callable[[str], tuple[list[tuple[str, str]], str]]:
        request = ChatCompletionRequest(messages=[], model="policy", tools=json.loads(tools) or None)
        parser = parser_class(tokenizer, request.tools)

        def extract(text: str) -> tuple[list[tuple[str, str]], str]:
            found = parser.extract_tool_calls(text, request)
            calls = [(call.function.name, call.function.arguments) for call in found.tool_calls]
            return calls, found.content or ""

        return extract

    return extract_with


def generate_offline(
    config: PolicyConfig,
    model_path: str | Path,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[Sampling],
    ignore_eos: bool = False,
) -> tuple[float, int]:
    """What the same engine does without anything around it: seconds and sampled tokens of one offline batch.

    The yardstick of throughput. Compiles and warms up on the first prompts before it measures. Runs in this process.
    With ``ignore_eos`` exactly ``max_tokens`` are sampled for each prompt.
    """
    os.environ.update(config.environment(), VLLM_ENABLE_V1_MULTIPROCESSING="0")
    _ask_for_amx()
    options = vars(_engine_args(config, model_path))
    for name in ("enable_log_requests", "worker_extension_cls", "weight_transfer_config"):
        options.pop(name)
    llm = vllm.LLM(**options | {"distributed_executor_backend": UniProcExecutor})
    params = [_sampling_params(sampling).clone() for sampling in samplings]
    for one in params:
        one.ignore_eos = ignore_eos
    batch = [{"prompt_token_ids": list(prompt), "cache_salt": "measured"} for prompt in prompts]
    llm.generate([item | {"cache_salt": "warm"} for item in batch[:8]], params[:8], use_tqdm=False)
    began = time.monotonic()
    outputs = llm.generate(batch, params, use_tqdm=False)
    return time.monotonic() - began, sum(len(output.outputs[0].token_ids) for output in outputs)


# What follows runs in vLLM's own processes.


class WorkerExtension:
    """What vLLM's workers can do besides: its methods become theirs. Naming it has them import this file."""

    def fleet_rl_gpu(self) -> str | None:
        """UUID of the worker's GPU."""
        on_gpu = self.device.type == "cuda"
        return str(torch.cuda.get_device_properties(self.device).uuid) if on_gpu else None

    def fleet_rl_join(self, invitation: dict[str, Any], offset: int) -> None:
        self.weight_transfer_engine.join(Invitation(**invitation), offset + self.rank)

    def fleet_rl_receive(self, update: dict[str, Any]) -> dict[str, Any]:
        """A whole update in one call. Returns seconds by phase, and the checksums of what arrived."""
        seconds: dict[str, float] = {}
        for phase, step in (
            ("start", self.start_weight_update),
            ("load", lambda: self.update_weights(update)),
            ("finish", self.finish_weight_update),
        ):
            began = time.monotonic()
            step()
            seconds[phase] = time.monotonic() - began
        return {"seconds": seconds, "checksums": self.weight_transfer_engine.received}


@dataclass
class _NoInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


class WeightReceiver(WeightTransferEngine):
    """The engine's end of every route: loads what arrives as if it were the checkpoint the model was loaded from."""

    init_info_cls = _NoInit
    update_info_cls = WeightUpdate
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        self.received: dict[str, str] = {}
        self._expected = checkpoint_shapes(self.model_config.model)
        self._held: dict[str, str] = {}  # what the model must hold afterwards, by checksum
        self._group: WeightGroup | None = None
        self._mapped: tuple[bytes, torch.Tensor] | None = None
        self._in_place = _loads_in_place(self.model)
        self._tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        if self._tied:
            # On every update vLLM warns that the output head got no weights: it shares those of the embedding.
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def join(self, invitation: Invitation, rank: int) -> None:
        if self._group is not None:
            self._group.abort()
        self._group = join_group(invitation, rank, self.device)

    def start_weight_update(self) -> None:
        if not self._in_place:
            with set_current_vllm_config(self.vllm_config):
                initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(WeightUpdate(**update_info))

    def receive_weights(self, update_info: WeightUpdate) -> None:
        arrived = Checksums()
        shapes, sent, tensors = self._incoming(update_info, arrived)
        check_shapes(shapes, self._expected)
        converted = Checksums()
        parameters = dict(self.model.named_parameters())

        def watched() -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in tensors:
                if name in sent and name in parameters and parameters[name].dtype != tensor.dtype:
                    converted.add(name, tensor.to(parameters[name].dtype))
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model.load_weights(watched())
        self.received = arrived.values()
        check_received(self.received, sent)
        self._held = sent | converted.values()

    def _incoming(
        self, update: WeightUpdate, arrived: Checksums
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, str], Iterator[tuple[str, torch.Tensor]]]:
        """Shapes and checksums as announced, and the tensors as they arrive, summed up in ``arrived``."""
        if update.route == "snapshot":
            header, tensors = read_snapshot(update.path)
            return header.shapes, header.checksums, _summed(tensors, header.checksums, arrived)
        layout = WeightLayout.from_wire(update.layout)
        runs = self._broadcast(update, layout) if update.route == "nccl" else self._map(update)
        return layout.shapes, update.checksums, _unpacked(layout, runs, update.checksums, arrived)

    def _broadcast(self, update: WeightUpdate, layout: WeightLayout) -> Iterator[tuple[int, torch.Tensor]]:
        """Bytes as they come, with the place of the first in the run of all."""
        if self._group is None or self._group.epoch != update.epoch:
            raise RuntimeError(f"the engine is not in the broadcast group of epoch {update.epoch}")
        for start, end in layout.chunks(CHUNK_BYTES):
            # On a GPU the broadcast is only enqueued, and so is the loading of what it brings.
            data = torch.empty(end - start, dtype=torch.uint8, device=self.device)
            self._group.broadcast(data)
            yield start, data

    def _map(self, update: WeightUpdate) -> Iterator[tuple[int, torch.Tensor]]:
        handle = update.handles[WorkerExtension.fleet_rl_gpu(self)]
        if self._mapped is None or self._mapped[0] != handle:
            self._mapped = None  # let go of the last learner's memory before its successor's is mapped
            self._mapped = handle, _open_handle(handle, self.device)
        yield 0, self._mapped[1]

    def finish_weight_update(self) -> None:
        if not self._in_place:
            with set_current_vllm_config(self.vllm_config):
                finalize_layerwise_reload(self.model, self.model_config)
                head = getattr(self.model, "lm_head", None)
                if self._tied and hasattr(head, "quant_method"):
                    # The CPU engine computes the head from a packed copy, and reloads only layers that got tensors of
                    # their own: without this a tied head stays at the weights the engine was started with.
                    head.quant_method.process_weights_after_loading(head)
        self._compare_with_model()

    def _compare_with_model(self) -> None:
        """Compare the sampled tensors with the model's, where the model holds them under the same name and whole."""
        parameters = dict(self.model.named_parameters())
        whole: dict[str, torch.Tensor] = {}
        for name in self._held:  # the sampled ones
            rows, parameter = self._expected[name], parameters.get(name)
            # Others are fused, split or packed; an embedding may have rows on top.
            if parameter is None or parameter.shape[1:] != rows[1:] or parameter.shape[:1] < rows[:1]:
                continue
            whole[name] = parameter[: rows[0]] if rows else parameter
        for name, found in checksums(whole).items():
            if found != self._held[name]:
                raise RuntimeError(f"{name} in the engine differs from what was just loaded")
        if whole and not torch.stack([tensor.isfinite().all() for tensor in whole.values()]).all():
            raise RuntimeError("the new weights are not finite")

    def shutdown(self) -> None:
        self._mapped = None
        if self._group is not None:
            self._group.abort()

    @staticmethod
    def trainer_send_weights(iterator: Iterator[Any], trainer_args: Any) -> None:
        """Abstract in vLLM 0.26, gone in 0.29: the learner sends by other means, see :mod:`train.publisher`."""
        raise NotImplementedError


def _summed(
    tensors: Iterator[tuple[str, torch.Tensor]], names: Container[str], sums: Checksums
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        if name in names:
            sums.add(name, tensor)
        yield name, tensor


def _unpacked(
    layout: WeightLayout, runs: Iterator[tuple[int, torch.Tensor]], names: Iterable[str], sums: Checksums
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors in runs of bytes; the checksums of those named go to ``sums``."""
    for first, data in runs:
        sums.add_run(layout, data, names, first)
        yield from layout.views(data, first)


def _loads_in_place(model: torch.nn.Module) -> bool:
    """Whether the model holds its weights as the checkpoint does, so that loading can write straight into them.

    vLLM's own way (its layer-wise reload) loads each layer aside, processes it and copies it into place: needed for
    anything packed, quantised or derived from the weights, and several times slower.
    """
    as_loaded = {type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod}
    layers = list(model.modules())
    methods = {type(getattr(layer, "quant_method", None)) for layer in layers}
    derived = any(isinstance(layer, MLAAttention) for layer in layers)
    return current_platform.is_cuda() and methods <= as_loaded and not derived


def _open_handle(handle: bytes, device: torch.device) -> torch.Tensor:
    """Map memory of another process on the same GPU, as :func:`train.publisher.export_handle` described it."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor

    # From this run's own learner, through Ray, which would unpickle whatever came that way as well.
    arguments = list(pickle.loads(handle))
    arguments[6] = device.index  # of the device in this process; the other one may count differently
    return rebuild_cuda_tensor(*arguments)


WeightTransferEngineFactory.register_engine(BACKEND, WeightReceiver)


class _EndsWithParent:
    """An executor whose process ends, and removes its files, when the process that started it is gone.

    vLLM's engine process waits for requests for ever if its parent is killed.
    """

    _grace_s = 0.0  # to clean up, between noticing and ending

    def _init_executor(self) -> None:
        tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"]  # vLLM leaves its rendezvous file behind
        # Semaphores of the spawn context have names in /dev/shm, which stay when this process is killed.
        multiprocessing.set_start_method("fork", force=True)
        _ask_for_amx()
        threading.Thread(target=_end_with_parent, args=[self._grace_s], name="end-with-parent", daemon=True).start()
        super()._init_executor()


def _ask_for_amx() -> None:
    """Linux kills a process that uses the tiles of an Intel CPU without having asked for them. vLLM uses them for bf16
    and leaves it to oneDNN to ask, which does not always come first."""
    if torch.cpu._is_amx_tile_supported() and not torch.cpu._init_amx():
        logger.warning("this CPU has AMX, but the kernel does not grant it: an engine in bfloat16 may die")


def _end_with_parent(grace_s: float) -> None:
    wait([multiprocessing.parent_process().sentinel])
    shutil.rmtree(os.environ["VLLM_RPC_BASE_PATH"], ignore_errors=True)
    if grace_s:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_s)
    os._exit(1)


class _OneProcess(_EndsWithParent, UniProcExecutor):
    """The worker in the engine's own process.

    For its CPU engine vLLM would start a worker process besides, and the engine's process would then spin on a core
    while it waits for each step.
    """


class _ManyProcesses(_EndsWithParent, MultiprocExecutor):
    """A worker process for each part of the model; they end when the engine's process does."""

    _grace_s = GRACE_S  # workers and engine share memory that has a name
