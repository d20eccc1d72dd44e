"""A real vLLM engine: what it samples, what it refuses, and how its versions change under requests in flight."""

import asyncio
import math
import os
import signal
import time
from statistics import fmean

import pytest
import pytest_asyncio
from vllm.model_executor.models import ModelRegistry

from benchmarks.processes import children, command_line
from serve.config import PolicyConfig
from serve.engine import Engine, _check_vllm_version, _is_refusal
from serve.engine_errors import EngineDead, GenerateTimeout, ModelRefused, RequestRefused
from serve.sampling import Sampling
from serve.shared_folder import SharedFolder
from serve.weight_transfer import pack_weights
from tests.models import byte_tokenizer, perturbed_weights, reference_logprobs, tiny_qwen3

pytestmark = pytest.mark.asyncio(loop_scope="module")

CONFIG = PolicyConfig(dtype="float32", max_model_len=1024, max_num_seqs=8, enforce_eager=True, kv_cache_gib=0.1)
EOS = byte_tokenizer().eos_token_id
PROMPT = list(b"Move all open tickets of Ada to the next release.")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model):
    engine = await Engine.start(CONFIG, model)
    yield engine
    await engine.shutdown()


async def sample(engine, prompt=PROMPT, salt=None, **sampling):
    return await engine.generate(prompt, Sampling(**sampling), request_id="test", cache_salt=salt)


async def update(engine, weights, version):
    folder = SharedFolder("test")
    with folder.snapshot_file(pack_weights(weights), version) as path:
        report = await engine.update(path, version)
    folder.close()
    return report


def error(completion, reference):
    """Largest difference between the engine's logprobs and the reference's."""
    return max(abs(a - b) for a, b in zip(completion.logprobs, reference.tolist(), strict=True))


async def test_logprobs_are_those_of_the_distribution_that_was_sampled(engine, model):
    for temperature, prompt in ((1.0, PROMPT), (0.6, PROMPT[:3]), (1.5, PROMPT * 5)):
        turn = await sample(engine, prompt, temperature=temperature, max_tokens=24, seed=1)
        assert error(turn, reference_logprobs(model, prompt, turn.token_ids, temperature)) < 1e-3


async def test_the_same_seed_gives_the_same_turn_whatever_runs_beside_it(engine):
    alone = await sample(engine, max_tokens=16, seed=7)
    beside = await asyncio.gather(*(sample(engine, PROMPT * (1 + i), max_tokens=16, seed=7 + i) for i in range(6)))
    assert beside[0].token_ids == alone.token_ids
    assert len({tuple(turn.token_ids) for turn in beside}) == 6


async def test_without_a_seed_turns_differ(engine):
    turns = await asyncio.gather(*(sample(engine, max_tokens=16) for _ in range(6)))
    assert len({tuple(turn.token_ids) for turn in turns}) == 6


async def test_a_turn_ends_with_the_end_of_sequence_token_or_at_the_limit(engine):
    turns = await asyncio.gather(*(sample(engine, max_tokens=64, seed=i, temperature=1.5) for i in range(32)))
    ended = [turn for turn in turns if turn.stop_reason == "stop"]
    cut = [turn for turn in turns if turn.stop_reason == "length"]
    assert ended and cut and len(ended) + len(cut) == len(turns)
    assert all(turn.token_ids.index(EOS) == len(turn.token_ids) - 1 for turn in ended)
    assert all(len(turn.token_ids) == 64 and EOS not in turn.token_ids for turn in cut)
    assert all(len(turn.logprobs) == len(turn.token_ids) for turn in turns)


async def test_a_stop_string_ends_the_turn_after_the_token_that_completes_it(engine):
    decode = byte_tokenizer().decode
    whole = await sample(engine, max_tokens=40, seed=3)
    at = next(i for i in range(8, 40) if decode(whole.token_ids[i : i + 1]).isascii())
    stop = decode(whole.token_ids[at : at + 1])
    first = next(i for i, token in enumerate(whole.token_ids) if decode([token]) == stop)
    turn = await sample(engine, max_tokens=40, seed=3, stop=("never said", stop))
    assert (turn.stop_reason, turn.stop_string) == ("stop", stop)
    assert turn.token_ids == whole.token_ids[: first + 1]
    assert len(turn.logprobs) == first + 1


@pytest.mark.parametrize(
    ("prompt", "sampling", "reason"),
    [
        ([], {}, "no tokens"),
        ([1] * 1024, {}, "1024 tokens leaves no room"),
        ([1, 320], {}, "outside the model's 320"),
        ([-1], {}, "outside the model's 320"),
        (PROMPT, {"temperature": -1.0}, "temperature"),
        (PROMPT, {"max_tokens": 0}, "max_tokens"),
    ],
)
async def test_a_request_that_cannot_run_is_refused_and_the_next_is_answered(engine, prompt, sampling, reason):
    with pytest.raises(RequestRefused, match=reason):
        await sample(engine, prompt, **sampling)
    assert len((await sample(engine, max_tokens=2)).token_ids) <= 2


async def test_a_cancelled_request_leaves_the_engine(engine):
    # Several: one may happen to draw the end of its turn before.
    tasks = [asyncio.create_task(sample(engine, max_tokens=900)) for _ in range(8)]
    while not engine.requests_in_flight:
        await asyncio.sleep(0)
    await asyncio.sleep(0.1)
    assert any([task.cancel() for task in tasks])
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert any(isinstance(one, asyncio.CancelledError) for one in ended)
    assert engine.requests_in_flight == 0
    assert not engine._llm.output_processor.request_states


async def test_an_update_under_requests_in_flight_is_stamped_exactly(engine, model):
    """Each token's logprob is the one of the weights its span names: before the boundary the old, after it the new.

    The keys and values of the tokens before it stay the old weights', so the new ones are compared with a reference
    that mixes both: here, by weights that differ in the output head only, which no key or value depends on.
    """
    old = perturbed_weights(model, seed=0, scale=0.0)
    new = old | {"lm_head.weight": perturbed_weights(model, seed=1)["lm_head.weight"]}
    before = engine.version
    tasks = []
    async with asyncio.timeout(60):
        while sum(state.detokenizer.num_output_tokens() > 20 for state in states(engine)) < 4:
            # Some end early, by an end of sequence: others take their places.
            missing = 8 - sum(not task.done() for task in tasks)
            tasks += [asyncio.create_task(sample(engine, max_tokens=300, seed=len(tasks) + i)) for i in range(missing)]
            await asyncio.sleep(0.001)
    report = await update(engine, new, before + 1)
    late = await sample(engine, max_tokens=8)
    turns = await asyncio.gather(*tasks)
    assert report.version == engine.version == before + 1
    assert late.spans == [(before + 1, 0, len(late.token_ids))]
    straddling = [turn for turn in turns if len(turn.spans) == 2]
    assert len(straddling) >= 3
    for turn in straddling:
        (v0, start, boundary), (v1, again, end) = turn.spans
        assert (v0, v1, start, again, end) == (before, before + 1, 0, boundary, len(turn.token_ids))
        under_old = reference_logprobs(model, PROMPT, turn.token_ids)
        under_new = reference_logprobs(model, PROMPT, turn.token_ids, weights=new)
        found = turn.logprobs
        for i in range(end):
            expected = (under_old if i < boundary else under_new)[i].item()
            assert abs(found[i] - expected) < 1e-3, f"token {i} of {end}, boundary {boundary}"
    await update(engine, old, before + 2)


def states(engine):
    return engine._llm.output_processor.request_states.values()


async def test_a_cached_prefix_of_old_weights_is_off_policy_unless_the_version_salts_it(engine, model):
    """What the salt is for: without one, the version after an update attends to the prompt as the version before it
    computed it, and its tokens come from a distribution that is no version's."""
    prompt = PROMPT * 7
    assert len(prompt) >= 256
    under_way = asyncio.create_task(sample(engine, prompt, max_tokens=200, seed=1))  # fills the cache and holds it
    async with asyncio.timeout(60):
        while not under_way.done() and not any(s.detokenizer.num_output_tokens() for s in states(engine)):
            await asyncio.sleep(0.001)
    old = f"v{engine.version}"
    weights = perturbed_weights(model, seed=2)
    await update(engine, weights, engine.version + 1)
    unsalted = await asyncio.gather(*(sample(engine, prompt, max_tokens=24, seed=i, salt=old) for i in range(4)))
    salted = await asyncio.gather(*(sample(engine, prompt, max_tokens=24, seed=i) for i in range(4)))
    assert (await under_way).cache_salt == old != salted[0].cache_salt == f"v{engine.version}"
    assert {turn.spans[0][0] for turn in (*unsalted, *salted)} == {engine.version}
    assert kl(unsalted, model, prompt, weights) > 0.01
    assert kl(salted, model, prompt, weights) < 1e-6  # a difference of 1e-3 in every logprob makes half of it


def kl(turns, model, prompt, weights):
    """Of the engine to ``transformers`` with ``weights``, per sampled token: the mean of r - 1 - log r, never negative
    and unbiased over what the engine samples (Schulman, 2020)."""
    log_ratio = []
    for turn in turns:
        reference = reference_logprobs(model, prompt, turn.token_ids, weights=weights)
        log_ratio += [b - a for a, b in zip(turn.logprobs, reference.tolist(), strict=True)]
    return fmean(math.expm1(r) - r for r in log_ratio)


async def test_the_time_of_an_engine_is_that_of_rest_of_requests_and_of_updates(engine, model):
    """Each within the hundredths of a second that lie between two looks at the clock; on a full machine these can be
    longer, so the best of a few counts."""
    points = [(time.monotonic(), engine._time_spent.seconds())]

    async def spent_by(work):
        """Seconds that passed, and those in each state."""
        result = await work
        points.append((time.monotonic(), engine._time_spent.seconds()))
        (begun, before), (ended, after) = points[-2:]
        return result, ended - begun, {state: after[state] - before.get(state, 0.0) for state in after}

    async def gaps(state, work, seconds_of=None):
        """The least of those between the seconds that were counted in a state and those that passed, or that a result
        tells; and of those between all that were counted and those that passed."""
        found = []
        for _ in range(3):
            result, passed, spent = await spent_by(work())
            told = seconds_of(result) if seconds_of else passed
            found.append((abs(spent[state] - told), abs(sum(spent.values()) - passed)))
        return [min(column) for column in zip(*found, strict=True)]

    def requests():
        return asyncio.gather(*(sample(engine, max_tokens=100) for _ in range(4)))

    def new_weights():
        return update(engine, perturbed_weights(model, seed=9), engine.version + 1)

    def of_report(report):
        return sum(report.seconds.values())

    in_state, in_all = await gaps("idle", lambda: asyncio.sleep(0.2))
    assert in_state < 0.02 and in_all < 0.01
    in_state, in_all = await gaps("generate", requests)
    assert in_state < 0.05 and in_all < 0.01
    in_state, in_all = await gaps("update", new_weights, of_report)
    assert in_state < 0.02 and in_all < 0.01


async def test_a_model_that_does_not_load_ends_the_start_with_a_reason(tmp_path):
    with pytest.raises(ModelRefused, match="did not start"):
        await Engine.start(CONFIG, tmp_path)


@pytest.mark.parametrize(("architecture", "refusal"), [("OfNobody", True), ("Qwen3ForCausalLM", False)])
async def test_a_model_that_vllm_refuses_is_told_from_one_that_it_could_not_look_at(architecture, refusal):
    with pytest.raises(ValueError) as raised:  # of a kind that it knows it says so where looking at it failed
        ModelRegistry._raise_for_unsupported([architecture])
    assert _is_refusal(raised.value) is refusal
    assert not _is_refusal(RuntimeError("Engine core initialization failed"))


async def test_a_start_that_takes_too_long_leaves_no_process(model):
    before = set(children())
    with pytest.raises(EngineDead, match="did not start within 0.1 s"):
        await Engine.start(CONFIG.model_copy(update={"startup_timeout_s": 0.1}), model)
    assert not [child for child in set(children()) - before if "Engine" in command_line(child)]


async def test_an_engine_is_forked_from_a_process_that_has_imported_vllm(engine):
    """vLLM has no setting for it: a version that makes its processes elsewhere would spawn them, slowly, unnoticed."""
    (core,) = (child for child in children() if "EngineCore" in command_line(child))
    assert "multiprocessing.forkserver" in " ".join(core.parent().cmdline())
    assert any("/vllm/" in mapped.path for mapped in core.parent().memory_maps())
    assert core.parent().ppid() == os.getpid()


async def test_another_vllm_is_named_with_the_ones_that_fit():
    with pytest.raises(ImportError, match=r"0\.30\.1 is not supported: install 0\.26 or later, before 0\.30"):
        _check_vllm_version("0.30.1")
    _check_vllm_version("0.26.0")
    _check_vllm_version("0.29.1+cpu")


async def test_an_engine_that_hangs_is_found_dead_and_its_process_is_gone(engine):
    """The last test: the engine they share does not survive it."""
    engine._config = CONFIG.model_copy(update={"generate_timeout_s": 1.0, "health_timeout_s": 1.0})
    (core,) = (child for child in children() if "EngineCore" in command_line(child))
    folder = engine._folder.path
    assert folder.is_dir()
    await engine.check()
    core.send_signal(signal.SIGSTOP)
    with pytest.raises(GenerateTimeout, match="not answered within 1 s"):
        await sample(engine)
    waiting = asyncio.create_task(sample(engine))
    with pytest.raises(EngineDead, match="no token within 1 s"):
        await engine.check()
    with pytest.raises((EngineDead, GenerateTimeout)):
        await waiting
    for answer in (sample(engine), engine.check()):
        with pytest.raises(EngineDead, match="no token within 1 s"):
            await answer
    core.wait(5)
    assert not folder.exists()


async def test_an_update_ends_when_its_engine_does(model):
    """vLLM answers no call to a process that ends meanwhile, and its replica starts another only after the update."""
    engine = await Engine.start(CONFIG, model)
    (core,) = (child for child in children() if "EngineCore" in command_line(child))
    core.send_signal(signal.SIGSTOP)
    updating = asyncio.create_task(update(engine, perturbed_weights(model, seed=1), 1))
    await asyncio.sleep(0.3)
    assert not updating.done()
    core.kill()
    with pytest.raises(EngineDead, match="vLLM's engine process ended"):
        async with asyncio.timeout(20):
            while True:
                await engine.check()
                await asyncio.sleep(0.1)
    with pytest.raises(EngineDead):
        await asyncio.wait_for(updating, 5)
