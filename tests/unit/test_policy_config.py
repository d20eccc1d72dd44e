"""The policy's section of the configuration: closed, and each value means what its description says."""

import pytest
from pydantic import ValidationError

from serve.config import PolicyConfig


def test_an_unknown_key_is_an_error():
    with pytest.raises(ValidationError, match="max_seqs"):
        PolicyConfig(max_seqs=3)


def test_a_replica_accepts_as_many_requests_as_its_engine_runs_unless_told_otherwise():
    assert PolicyConfig(max_num_seqs=128).request_limit == 128
    assert PolicyConfig(max_num_seqs=128, max_ongoing_requests=500).request_limit == 500


def test_without_a_gpu_the_cache_has_a_size_and_with_one_the_engine_measures():
    assert PolicyConfig(kv_cache_gib=0.25).kv_cache_bytes == 2**28
    assert PolicyConfig().kv_cache_bytes == 2**30
    assert PolicyConfig(num_gpus=1).kv_cache_bytes is None
    assert PolicyConfig(num_gpus=1, kv_cache_gib=2).kv_cache_bytes == 2**31


def test_a_split_model_needs_its_gpus():
    with pytest.raises(ValidationError, match=r"policy\.num_gpus 1 is less than policy\.tensor_parallel_size 4"):
        PolicyConfig(num_gpus=1, tensor_parallel_size=4)
    PolicyConfig(num_gpus=4, tensor_parallel_size=4)


def test_one_worker_may_share_its_gpu():
    assert PolicyConfig(num_gpus=0.5).kv_cache_bytes is None


def test_mapped_memory_needs_a_gpu_and_a_route_a_known_name():
    with pytest.raises(ValidationError, match=r"policy\.weight_transfer ipc needs policy\.num_gpus above 0"):
        PolicyConfig(weight_transfer="ipc")
    PolicyConfig(weight_transfer="ipc", num_gpus=0.5)
    with pytest.raises(ValidationError, match="weight_transfer"):
        PolicyConfig(weight_transfer="rdma")


def test_threads_and_compilation_are_told_to_the_engine_by_environment():
    environment = PolicyConfig(omp_threads=3, enforce_eager=True).environment()
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert "TORCH_COMPILE_DISABLE" not in PolicyConfig(enforce_eager=False).environment()
