"""Two replicas behind Ray Serve: updates reach both, no replica answers with weights that were not published."""

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import torch
from ray import serve
from ray.serve.schema import ApplicationStatus

from actors.weight_store import WeightStore
from serve.config import PolicyConfig
from serve.engine_errors import EngineDead, RequestRefused
from serve.policy import PolicyStartError, PolicyUpdateError, deploy_policy
from serve.ray_start import start_ray
from serve.sampling import Completion, Sampling
from serve.shared_folder import SHARED_MEMORY
from serve.snapshot_header import read_header
from serve.weight_transfer import pack_weights
from tests.e2e.policies import engines_of, replica_of, until
from tests.models import perturbed_weights, reference_logprobs, tiny_qwen3

APP = f"fleet-rl-test-{os.getpid()}"
CONFIG = PolicyConfig(
    num_replicas=2, dtype="float32", max_model_len=512, max_num_seqs=16, enforce_eager=True, kv_cache_gib=0.1
)
PROMPT = list(b"Close ticket 12.")
RESTART_S = 120


@pytest.fixture(scope="module")
def cluster():
    start_ray("local", num_cpus=8, include_dashboard=False, log_to_driver=False, object_store_memory=100 * 2**20)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def store(cluster, tmp_path_factory):
    return WeightStore.options(name="test_weight_store").remote(str(tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def client(cluster, store, model):
    client = deploy_policy(CONFIG, str(model), store, APP)
    client.wait_until_healthy(CONFIG.startup_timeout_s)
    yield client
    client.shutdown()


def turns(client, n=1, prompt=PROMPT, **sampling):
    """n turns at once, each of a session of its own."""

    async def all_of_them():
        sampled = Sampling(**{"max_tokens": 16} | sampling)
        calls = (client.generate(prompt, sampled, request_id=f"r{i}", session_id=f"s{i}") for i in range(n))
        return await asyncio.gather(*calls)

    return asyncio.run(all_of_them())


def publish(store, weights):
    return ray.get(store.publish.remote([ray.put(pack_weights(weights))]), timeout=60)


def error(turn, model, weights=None):
    reference = reference_logprobs(model, PROMPT, turn.token_ids, weights=weights)
    return max(abs(a - b) for a, b in zip(turn.logprobs, reference.tolist(), strict=True))


def folders():
    return list(SHARED_MEMORY.glob(f"fleet-rl-{APP}*"))


def test_replicas_sample_and_keep_a_session_together(client, model):
    sampled = turns(client, n=24)
    assert all(error(turn, model) < 1e-3 for turn in sampled[:4])
    assert all(turn.spans == [(0, 0, len(turn.token_ids))] and turn.cache_salt == "v0" for turn in sampled)
    before = {s["replica"]: s["finished_requests"] for s in client.stats()}
    assert min(before.values()) >= 3, f"24 sessions went to one replica of {before}"

    async def one_session():
        for i in range(6):
            await client.generate(PROMPT, Sampling(max_tokens=1), request_id=f"turn{i}", session_id="one")

    asyncio.run(one_session())
    more = sorted(s["finished_requests"] - before[s["replica"]] for s in client.stats())
    # The health check of an idle replica samples a token too.
    assert more[1] >= 6 > more[0] + 3


def test_a_refused_request_says_why_to_its_caller(client):
    with pytest.raises(RequestRefused, match="600 tokens leaves no room"):
        turns(client, prompt=[1] * 600)


def test_a_cancelled_request_leaves_its_replica(client):
    async def cancel_one():
        # Several: one may happen to draw the end of its turn before.
        calls = [client.generate(PROMPT, Sampling(max_tokens=490), request_id=f"cancelled-{i}") for i in range(8)]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls), 0.3)

    asyncio.run(cancel_one())
    until(lambda: sum(s["requests_in_flight"] for s in client.stats()) == 0, 10, "the request ends in its engine")


def test_an_update_reaches_all_replicas_under_requests_in_flight(client, store, model):
    weights = perturbed_weights(model, seed=1)

    async def straddling():
        ended, in_flight = asyncio.Event(), []

        async def session(name):
            while not ended.is_set():
                sampling = Sampling(max_tokens=300)
                in_flight.append(await client.generate(PROMPT, sampling, request_id="r", session_id=name))

        sessions = [asyncio.create_task(session(f"s{i}")) for i in range(16)]
        await asyncio.sleep(0.2)
        version = await asyncio.to_thread(publish, store, weights)
        results = await asyncio.to_thread(client.update, version, 60)
        ended.set()
        await asyncio.gather(*sessions)
        return version, results, in_flight

    version, results, in_flight = asyncio.run(straddling())
    assert version == 1 and client.versions() == [1, 1]
    assert len({result["replica"] for result in results}) == 2
    assert all(result["checksums"] == read_header(pack_weights(weights)).checksums for result in results)
    assert any([span[0] for span in turn.spans] == [0, 1] for turn in in_flight)
    for turn in turns(client, n=8):
        assert turn.spans == [(1, 0, len(turn.token_ids))] and turn.cache_salt == "v1"
        assert error(turn, model, weights) < 1e-3


def test_an_announced_version_that_was_not_published_is_an_error_that_names_the_replicas(client):
    replicas = [s["replica"] for s in client.stats()]
    with pytest.raises(PolicyUpdateError, match="it holds version 1, not 7") as raised:
        client.update(7, 60)
    assert all(replica in str(raised.value) for replica in replicas)
    assert client.versions() == [1, 1]


def test_a_killed_engine_is_replaced_within_seconds_and_its_requests_begin_again(client, store, model):
    weights = perturbed_weights(model, seed=4)
    version = publish(store, weights)
    client.update(version, 60)
    replicas, counted = {s["replica"] for s in client.stats()}, finished(client)
    victim = engines_of(APP)[0]
    ended = asyncio.run(sampled_while(client, victim.kill))
    until(lambda: len(engines_of(APP)) == 2 and len(client.roll_call()) == 2, 15, "there are two engines again")
    assert victim.pid not in {engine.pid for engine in engines_of(APP)}
    assert all(sum(end - start for _, start, end in turn.spans) == len(turn.token_ids) for turn in ended)
    assert {span[0] for turn in ended for span in turn.spans} == {version}
    assert client.versions() == [version] * 2 and {s["replica"] for s in client.stats()} == replicas
    assert finished(client) >= counted + len(ended), "what the dead engine did counts as well"
    reports = client.update(version, 60)
    rested, was_down = sorted(report["time_spent"]["down"] for report in reports)
    assert rested < 0.01 < 0.2 < was_down and all(report["time_spent"]["generate"] > 0 for report in reports)
    assert all(report["loop_lag"] for report in reports)
    for turn in turns(client, n=8):
        assert turn.spans == [(version, 0, len(turn.token_ids))]
        assert error(turn, model, weights) < 1e-3


def finished(client):
    return sum(s["finished_requests"] for s in client.stats())


async def sampled_while(client, happens):
    """Long turns of many sessions, under which something happens."""
    calls = [
        client.generate(PROMPT, Sampling(max_tokens=490, seed=i), request_id=f"r{i}", session_id=f"s{i}")
        for i in range(16)
    ]
    running = asyncio.gather(*calls)
    await asyncio.sleep(0.1)
    happens()
    return await running


def test_a_replica_that_comes_back_holds_what_was_published(client, store, model):
    """One replica is killed, the other one fails an update: both are replaced, and serve the newest weights only."""
    assert len(engines_of(APP)) == len(folders()) == 2
    victim = engines_of(APP)[0]
    replica = replica_of(victim)
    ended = asyncio.run(sampled_while(client, replica.kill))
    assert all(isinstance(one, Completion) for one in ended), "turns begin again on the other replica"
    victim.wait(10)  # vLLM's process ends with its replica
    until(lambda: not [f for f in folders() if f"-{replica.pid}-" in f.name], 10, "the killed replica's files go")

    broken = {name: torch.full_like(w, torch.nan) for name, w in perturbed_weights(model, seed=2).items()}
    (survivor,) = (p for p in engines_of(APP) if p.pid != victim.pid)
    version = publish(store, broken)
    with pytest.raises(PolicyUpdateError, match=f"update to version {version}"):
        client.update(version, 60)
    survivor.wait(10)
    with pytest.raises((EngineDead, ray.exceptions.RayError)):
        turns(client)

    weights = perturbed_weights(model, seed=3)
    version = publish(store, weights)
    until(lambda: versions_or_none(client) == [version] * 2, RESTART_S, "both replicas are replaced")
    for turn in turns(client, n=8):
        assert turn.spans == [(version, 0, len(turn.token_ids))]
        assert error(turn, model, weights) < 1e-3


def versions_or_none(client):
    try:
        return client.versions(timeout_s=10)
    except PolicyUpdateError:
        return None


def test_whoever_sees_a_new_version_first_the_others_find_it_loaded(client, store, model):
    """A health check that catches up while an update is announced must not pull the file from under it."""
    for seed in (11, 12, 13):
        version = publish(store, perturbed_weights(model, seed=seed))
        with ThreadPoolExecutor(4) as threads:
            announced = [threads.submit(client.update, version, 60) for _ in range(4)]
            assert all(result["error"] is None for call in announced for result in call.result())
        assert set(client.versions()) == {version}


def test_the_policy_ends_with_the_run_it_belongs_to(client, store):
    """The weight store dies with its driver."""
    ray.kill(store)
    until(lambda: not engines_of(APP) and not folders(), 60, "engines and their files go")
    client.shutdown()


def test_a_model_that_vllm_refuses_ends_the_start_at_once_with_its_reason(cluster, tmp_path):
    (tmp_path / "config.json").write_text("{}")
    client = deploy_policy(CONFIG.model_copy(update={"num_replicas": 1}), str(tmp_path), None, f"{APP}-broken")
    with pytest.raises(PolicyStartError, match="the policy did not start: the engine did not start: .*model"):
        client.wait_until_healthy(CONFIG.startup_timeout_s)
    assert serve.status().applications[f"{APP}-broken"].status == ApplicationStatus.DEPLOYING, "it was tried again"
    client.shutdown()
    assert not folders() and not engines_of(APP)
