"""Weights broadcast from a learner to two replicas: without GPUs over gloo, the rest as with NCCL."""

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
from ray.exceptions import RayError

from actors.weight_store import WeightStore
from serve.config import PolicyConfig
from serve.engine_errors import EngineDead
from serve.policy import PolicyUpdateError, deploy_policy
from serve.ray_start import start_ray
from serve.sampling import Sampling
from tests.e2e.policies import engines_of, replica_of, until
from tests.models import perturbed_weights, reference_logprobs, tiny_qwen3
from train.publisher import WeightPublisher

APP = f"fleet-rl-broadcast-{os.getpid()}"
CONFIG = PolicyConfig(
    num_replicas=2,
    dtype="float32",
    max_model_len=512,
    max_num_seqs=16,
    enforce_eager=True,
    kv_cache_gib=0.1,
    weight_transfer="nccl",
    check_weights="all",
    update_timeout_s=240,
)
PROMPT = list(b"Close ticket 12.")
REPLACED_S = 200


class Weights:
    """What the learner hands to its publisher."""

    def __init__(self, tensors):
        self.tensors = tensors

    def metadata(self):
        return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self):
        return iter(self.tensors.items())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    start_ray("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield WeightStore.remote(str(tmp_path_factory.mktemp("run")))
    ray.shutdown()


@pytest.fixture(scope="module")
def policy(store, model):
    policy = deploy_policy(CONFIG, str(model), store, APP)
    policy.wait_until_healthy(CONFIG.startup_timeout_s)
    yield policy
    policy.shutdown()


@pytest.fixture(scope="module")
def publisher(store, policy):
    publisher = WeightPublisher(store, policy, timeout_s=REPLACED_S)
    yield publisher
    publisher.close()


def turns(policy, n=4):
    async def all_of_them():
        sampling = Sampling(max_tokens=16)
        calls = (policy.generate(PROMPT, sampling, request_id=f"r{i}", session_id=f"s{i}") for i in range(n))
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def check_turns(policy, model, weights, version):
    for turn in turns(policy):
        assert turn.spans == [(version, 0, len(turn.token_ids))]
        reference = reference_logprobs(model, PROMPT, turn.token_ids, weights=weights)
        assert max(abs(a - b) for a, b in zip(turn.logprobs, reference.tolist(), strict=True)) < 1e-3


def versions(policy):
    return sorted(member.version for member in policy.roll_call())


def test_every_publication_reaches_both_replicas_under_requests_in_flight(policy, publisher, store, model):
    async def sample_while(publishing):
        seen = []
        while not publishing.done():
            sampling = Sampling(max_tokens=300)
            calls = (policy.generate(PROMPT, sampling, request_id="r", session_id=f"s{i}") for i in range(8))
            seen += await asyncio.gather(*calls)
        return seen

    published, epochs = [perturbed_weights(model, seed=seed) for seed in (1, 2, 3)], []
    with ThreadPoolExecutor(1) as thread:

        def publish_all():
            for number, weights in enumerate(published, 1):
                assert publisher(Weights(weights), number) == number
                assert publisher.last["sync/failed"] == 0 and publisher.last["sync/pause_s"] > 0
                epochs.append(publisher._sending._group.epoch)
                assert versions(policy) == [number, number]

        publishing = thread.submit(publish_all)
        seen = asyncio.run(sample_while(publishing))
        publishing.result()
    assert epochs == [1, 1, 1]  # the group is made once
    spans = [[version for version, _, _ in turn.spans] for turn in seen]
    assert any(len(of_turn) > 1 for of_turn in spans)
    assert all(of_turn == list(range(of_turn[0], of_turn[-1] + 1)) for of_turn in spans)
    check_turns(policy, model, published[-1], 3)
    # Every tensor was compared at both ends, and the snapshot for those who join has arrived behind the broadcast.
    assert all(len(result["checksums"]) == len(published[-1]) for result in policy.update(3, 60))
    assert ray.get(store.latest.remote(True), timeout=60)[0] == 3


def test_a_member_that_dies_in_a_broadcast_takes_no_half_loaded_replica_along(policy, publisher, model, monkeypatch):
    """The other one, waiting for weights that cannot come, is ended at once; both come back with what was published."""
    weights = perturbed_weights(model, seed=4)
    released = threading.Event()
    monkeypatch.setattr(publisher._sending, "run", lambda: released.wait(REPLACED_S))  # rank 0 sends nothing
    victim, other = engines_of(APP)
    with ThreadPoolExecutor(1) as thread:
        publishing = thread.submit(publisher, Weights(weights), 4)
        time.sleep(2.0)
        assert not publishing.done() and other.is_running()
        killed = time.monotonic()
        replica_of(victim).kill()
        other.wait(60)
        assert time.monotonic() - killed < 30, "it waited for its deadline"
        released.set()
        version = publishing.result(REPLACED_S)
    monkeypatch.undo()
    assert publisher.last["sync/failed"] == 1
    until(lambda: versions(policy) == [version, version], REPLACED_S, "both replicas are replaced")
    check_turns(policy, model, weights, version)
    # The next publication meets the new members.
    weights = perturbed_weights(model, seed=5)
    assert publisher(Weights(weights), 5) == version + 1
    assert publisher.last["sync/failed"] == 0 and publisher._sending._group.epoch == version + 1
    check_turns(policy, model, weights, version + 1)


def test_where_no_group_comes_about_the_snapshot_is_loaded(policy, publisher, model, monkeypatch):
    weights = perturbed_weights(model, seed=6)
    monkeypatch.setattr("train.publisher.JOIN_TIMEOUT_S", 2.0)
    publisher._sending.abort()
    hung = engines_of(APP)[0]
    hung.suspend()  # its replica answers the roll, but the engine joins nothing
    version = publisher(Weights(weights), 6)
    hung.wait(30)
    assert publisher.last["sync/no_group"] == 1 and version in versions(policy)
    until(lambda: versions(policy) == [version, version], REPLACED_S, "the failed engine is replaced")
    check_turns(policy, model, weights, version)


def test_weights_that_changed_on_the_way_are_answered_by_nobody(policy, publisher, model, monkeypatch):
    monkeypatch.setattr(publisher, "_timeout_s", 5.0)
    stage = publisher._sending.stage
    monkeypatch.setattr(publisher._sending, "stage", lambda weights: dict.fromkeys(stage(weights), "0" * 16))
    with pytest.raises(PolicyUpdateError, match="no replica held version"):
        publisher(Weights(perturbed_weights(model, seed=7)), 7)
    assert versions(policy) == []
    with pytest.raises((EngineDead, RayError)):
        turns(policy)
