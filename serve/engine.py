"""One vLLM engine, and the only file that knows vLLM.

``Engine`` is what a replica holds: token ids in, token ids with logprobs and version spans out, and new weights while
requests are in flight. The classes at the end run in vLLM's own processes, which import this file.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import logging
import multiprocessing
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
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
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.exceptions import VLLMValidationError
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from serve.config import PolicyConfig
from serve.sampling import Completion, Sampling
from serve.weight_transfer import SharedFolder, check_received, check_shapes, checkpoint_shapes, read_snapshot

SUPPORTED_VLLM = ((0, 26), (0, 30))  # from, up to but not including
BACKEND = "fleet-rl-shm"
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


class EngineDead(RuntimeError):
    """The engine answers nothing any more. The message says why; the replica must be replaced."""


class RequestRefused(ValueError):
    """A request the engine cannot run; the next one may be fine. The message says what is wrong with it."""


class GenerateTimeout(TimeoutError):
    """A request was not answered in time and was aborted."""


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
        seconds: by phase.
        checksums: of a sample of the tensors, as packed and as found in the engine's processes.
    """

    version: int
    seconds: dict[str, float] = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


class Engine:
    """An ``AsyncLLM`` whose weights carry a version. Belongs to one event loop.

    Once anything about its weights is uncertain it is dead: its processes are killed, requests in flight fail, and
    nothing is answered any more.
    """

    def __init__(self, llm: AsyncLLM, config: PolicyConfig, folder: SharedFolder, version: int) -> None:
        """Use :meth:`start`."""
        self.version = version
        self._llm = llm
        self._config = config
        self._folder = folder
        self._vocab_size = llm.model_config.get_vocab_size()
        self._requests: dict[str, _Request] = {}
        self._serial = itertools.count()
        self._admitting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._update_lock = asyncio.Lock()
        self._death: str | None = None
        self.finished_requests = 0
        self.sampled_tokens = 0

    @classmethod
    async def start(
        cls, config: PolicyConfig, model_path: str | Path, folder: SharedFolder | None = None, version: int = 0
    ) -> Engine:
        """Start vLLM on ``model_path`` and run it once.

        Args:
            folder: holds the engine's sockets and is closed with it.
            version: what the weights at ``model_path`` are called.

        Raises:
            EngineDead: it did not start, or not within ``startup_timeout_s``.
        """
        folder = folder or SharedFolder("engine")
        # The engine's process inherits these; here most have no effect any more.
        os.environ.update(config.environment(), VLLM_RPC_BASE_PATH=str(folder.path))
        # In a thread: vLLM waits for its process without a deadline of its own, and without yielding.
        others = set(multiprocessing.active_children())
        building = asyncio.create_task(asyncio.to_thread(_build, config, model_path))
        try:
            async with asyncio.timeout(config.startup_timeout_s) as deadline:
                engine = cls(await asyncio.shield(building), config, folder, version)
                await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))
                await engine._generate_one_token()
        except BaseException as error:
            await _give_up(building, others)
            folder.close()
            if deadline.expired():
                raise EngineDead(f"the engine did not start within {config.startup_timeout_s:g} s") from None
            if isinstance(error, Exception):
                raise EngineDead(f"the engine did not start: {' '.join(str(error).split())}") from error
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
                self._require_alive()
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

    async def update(self, path: Path, version: int) -> UpdateReport:
        """Load the snapshot at ``path`` while requests stand still; they go on under the new weights.

        All or nothing: whatever goes wrong, at whatever point, leaves a dead engine, because half-loaded weights
        answer like whole ones.

        Raises:
            EngineDead: the update failed, or did not finish within ``update_timeout_s``.
        """
        async with self._update_lock:
            self._require_alive()
            report = UpdateReport(version)
            try:
                async with asyncio.timeout(self._config.update_timeout_s) as deadline:
                    await self._transfer(path, version, report)
            except BaseException as error:
                reason = f"took over {self._config.update_timeout_s:g} s" if deadline.expired() else f"failed: {error}"
                await self._die(f"update to version {version} {reason}")
                if isinstance(error, Exception):
                    raise EngineDead(self._death) from error
                raise
        return report

    async def _transfer(self, path: Path, version: int, report: UpdateReport) -> None:
        began = time.monotonic()

        def phase_ended(name: str) -> None:
            report.seconds[name] = time.monotonic() - began - sum(report.seconds.values())

        header, _ = read_snapshot(path)
        self._open.clear()
        while self._admitting:
            await asyncio.sleep(0)
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        phase_ended("pause")
        await self._llm.start_weight_update()
        phase_ended("start")
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info={"path": str(path)}))
        phase_ended("load")
        await self._finish_weight_update(str(version))
        phase_ended("finish")
        await self._stamp(version)
        await self._llm.resume_generation()
        self._open.set()
        phase_ended("resume")
        report.checksums = header.checksums

    async def _finish_weight_update(self, version: str) -> None:
        # vLLM 0.29 keeps a version of its own, for its logs and its HTTP interface.
        keeps_version = "weight_version" in inspect.signature(self._llm.finish_weight_update).parameters
        await self._llm.finish_weight_update(**({"weight_version": version} if keeps_version else {}))

    async def _stamp(self, version: int) -> None:
        """Note for each request in flight how many tokens it has: the rest is drawn from the new weights.

        The pause has ended the last step under the old weights and its tokens have reached this process, ahead of the
        answer to the pause, but perhaps not yet the requests they belong to.
        """
        arrived = self._llm.engine_core.outputs_queue
        while not (arrived.empty() and arrived._getters):  # until vLLM's handler waits for more
            self._require_alive()
            await asyncio.sleep(0)
        states = self._llm.output_processor.request_states
        for request in self._requests.values():
            # One that is not there has ended; its output waits to be fetched.
            if (state := states.get(request.internal_id)) is not None:
                request.marks.append((version, state.detokenizer.num_output_tokens()))
        self.version = version

    async def check(self) -> None:
        """Raise :class:`EngineDead` unless the engine produces tokens; not asked while its weights change."""
        self._require_alive()
        if self._llm.errored:
            await self._die("vLLM's engine process ended")
            self._require_alive()
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
            self._require_alive()
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

    def _require_alive(self) -> None:
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
        self._llm.output_handler.cancel()  # it would report the end of the process as a fault
        if kill:
            _kill(self._llm.engine_core.resources.engine_manager.processes)
        # Everyone who waits learns of it: requests in the engine, and those that wait to be let in.
        self._llm.output_processor.propagate_error(EngineDeadError())
        self._open.set()
        await asyncio.to_thread(self._llm.shutdown, timeout=GRACE_S)
        self._folder.close()


def _build(config: PolicyConfig, model_path: str | Path) -> AsyncLLM:
    return AsyncLLM.from_engine_args(_engine_args(config, model_path))


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
    """Names this file to vLLM's workers, which import it and with that know the transfer below."""


@dataclass
class _NoInit(WeightTransferInitInfo):
    """Nothing to agree on beforehand."""


@dataclass
class _SnapshotPath(WeightTransferUpdateInfo):
    path: str


class SharedMemoryTransfer(WeightTransferEngine):
    """Loads a snapshot file of this host's shared memory, as if it were the checkpoint the model was loaded from."""

    init_info_cls = _NoInit
    update_info_cls = _SnapshotPath
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: _NoInit) -> None:
        self._expected = checkpoint_shapes(self.model_config.model)
        self._loaded: dict[str, torch.Tensor] = {}
        self._tied = bool(getattr(self.model_config.hf_text_config, "tie_word_embeddings", False))
        if self._tied:
            # On every update vLLM warns that the output head got no weights: it shares those of the embedding.
            logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def start_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: _SnapshotPath) -> None:
        header, tensors = read_snapshot(update_info.path)
        check_shapes(header.shapes, self._expected)

        def checked():
            for name, tensor in tensors:
                check_received(name, tensor, header.checksums)
                if name in header.checksums:
                    self._loaded[name] = tensor
                yield name, tensor

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model.load_weights(checked())

    def finish_weight_update(self) -> None:
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model, self.model_config)
            head = getattr(self.model, "lm_head", None)
            if self._tied and hasattr(head, "quant_method"):
                # The CPU engine computes the head from a packed copy, and reloads only layers that got tensors of their
                # own: without this a tied head stays at the weights the engine was started with.
                head.quant_method.process_weights_after_loading(head)
        self._compare_with_model()
        self._loaded.clear()

    def _compare_with_model(self) -> None:
        """Compare the sampled tensors with the model's, where the model holds them under the same name."""
        parameters = dict(self.model.named_parameters())
        for name, tensor in self._loaded.items():
            held = parameters.get(name)
            # Others are fused, split or packed.
            if held is None or held.shape[1:] != tensor.shape[1:] or held.shape[0] < tensor.shape[0]:
                continue
            if not torch.equal(held[: tensor.shape[0]].cpu(), tensor.to(held.dtype)):
                raise RuntimeError(f"{name} in the engine differs from the snapshot that was just loaded")

    def shutdown(self) -> None:
        pass


WeightTransferEngineFactory.register_engine(BACKEND, SharedMemoryTransfer)


class _EndsWithParent:
    """An executor whose process ends, and removes its files, when the process that started it is gone.

    vLLM's engine process waits for requests for ever if its parent is killed.
    """

    _grace_s = 0.0  # to clean up, between noticing and ending

    def _init_executor(self) -> None:
        tempfile.tempdir = os.environ["VLLM_RPC_BASE_PATH"]  # vLLM leaves its rendezvous file behind
        # Semaphores of the spawn context have names in /dev/shm, which stay when this process is killed.
        multiprocessing.set_start_method("fork", force=True)
        threading.Thread(target=_end_with_parent, args=[self._grace_s], name="end-with-parent", daemon=True).start()
        super()._init_executor()


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
