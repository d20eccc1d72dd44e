"""Configuration of the policy: how many replicas, and the engine each of them runs."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from serve.weight_routes import RouteSetting

# Of a process that only imports vLLM, which would write to standard output. Replicas have their own, see below.
QUIET_ENGINE = {"VLLM_LOGGING_LEVEL": "ERROR"}


class PolicyConfig(BaseModel):
    """The policy as a Ray Serve application. An unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_replicas: int = Field(1, ge=1, description="vLLM engines; each holds the whole model")
    eval_replicas: int = Field(
        0,
        ge=0,
        description="further engines, for evaluations beside training alone (trainer.eval_interval): they stay at the "
        "version an evaluation began with; 0: such evaluations share the others, whose weights move on meanwhile",
    )
    num_cpus: float = Field(1.0, ge=0, description="logical CPUs of a replica")
    num_gpus: float = Field(0.0, ge=0, description="GPUs of a replica; 0 is the CPU build of vLLM")
    tensor_parallel_size: int = Field(1, ge=1, description="GPUs over which one replica splits the model")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field("auto", description="of weights and activations")
    max_model_len: int = Field(57_344, ge=2, description="tokens of prompt and turn together")
    max_num_seqs: int = Field(256, ge=1, description="requests an engine runs at once")
    max_ongoing_requests: int | None = Field(
        None, ge=1, description="requests a replica accepts at once; default: max_num_seqs"
    )
    enforce_eager: bool = Field(False, description="no compilation and no CUDA graphs: starts sooner, decodes slower")
    enable_prefix_caching: bool = Field(True, description="reuse keys and values of a prompt's known beginning")
    gpu_memory_utilization: float = Field(0.9, gt=0, le=1, description="share of a GPU the engine takes")
    kv_cache_gib: float | None = Field(
        None, gt=0, description="GiB of keys and values; default: what gpu_memory_utilization leaves, 1 without a GPU"
    )
    omp_threads: int = Field(1, ge=1, description="OpenMP threads of an engine; more than free cores is far slower")
    hf_overrides: dict[str, Any] = Field({}, description="fields to override in the model's config.json")
    weight_transfer: RouteSetting = Field(
        "auto",
        description="how new weights reach the engines: ipc where they share the learner's GPUs, nccl (a broadcast) "
        "where they have GPUs of their own, else snapshot (object store); auto chooses by placement",
    )
    check_weights: Literal["sample", "all"] = Field(
        "sample", description="tensors whose checksums are compared at both ends of every update"
    )
    startup_timeout_s: float = Field(600.0, gt=0, description="seconds until a replica must be ready")
    generate_timeout_s: float = Field(600.0, gt=0, description="seconds until a request must be answered")
    update_timeout_s: float = Field(300.0, gt=0, description="seconds until new weights must be in place")
    health_timeout_s: float = Field(30.0, gt=0, description="seconds until an idle engine must produce one token")

    @model_validator(mode="after")
    def _one_process_reaches_its_devices(self) -> PolicyConfig:
        # A single worker may share its GPU with the learner.
        if self.tensor_parallel_size > 1 and 0 < self.num_gpus < self.tensor_parallel_size:
            raise ValueError(
                f"policy.num_gpus {self.num_gpus:g} is less than policy.tensor_parallel_size "
                f"{self.tensor_parallel_size}: a replica needs one GPU for each part of the model"
            )
        if self.weight_transfer == "ipc" and not self.num_gpus:
            raise ValueError(
                "policy.weight_transfer ipc needs policy.num_gpus above 0: engines share the learner's GPU"
            )
        return self

    @property
    def request_limit(self) -> int:
        """Requests a replica accepts at once."""
        return self.max_ongoing_requests or self.max_num_seqs

    @property
    def kv_cache_bytes(self) -> int | None:
        """Bytes of keys and values, or ``None`` to let the engine measure what is free on its GPU."""
        gib = self.kv_cache_gib if self.kv_cache_gib is not None or self.num_gpus else 1.0
        return None if gib is None else math.floor(gib * 2**30)

    def environment(self) -> dict[str, str]:
        """Variables that a replica's processes need from their start: vLLM and OpenMP read them at import."""
        variables = {
            "OMP_NUM_THREADS": str(self.omp_threads),
            # vLLM's own binding takes whole cores and fights with whatever else runs on this machine.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # FlashInfer compiles its sampler for minutes at the first top-p request.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
        }
        if self.enforce_eager:
            # Eager engines still compile two sampler helpers: seconds at the first request for nothing.
            variables["TORCH_COMPILE_DISABLE"] = "1"
        return variables
