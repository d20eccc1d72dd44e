"""Packing: shared prefixes are encoded once, and nothing changes against a plain forward pass per sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

import train.packing
from tests.models import tiny_qwen3
from train.packing import PackedPolicy, Sample, dummy_micro_batch, pack, shard, split_by_tokens

VOCAB = 320


@pytest.fixture(autouse=True)
def _one_thread():
    """Tiny tensors: a second thread costs more than it gives, above all beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _sample(ids, mask, advantage: float = 1.0, weight: float = 1.0, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, np.uint8)
    logprobs = np.where(mask, -rng.random(len(ids)), 0).astype(np.float32)
    return Sample(ids, mask, logprobs, rng.integers(0, 5, int(mask.sum())), advantage, weight)


def _batch(groups: int = 3, samples: int = 4, seed: int = 0) -> list[Sample]:
    """Multi-turn samples: system prompt common to all, task prompt common to a group, turns partly common."""
    rng = np.random.default_rng(seed)
    system, batch = rng.integers(0, VOCAB, 31), []
    for _ in range(groups):
        prompt = np.concatenate([system, rng.integers(0, VOCAB, rng.integers(3, 9))])
        first_turn = rng.integers(0, VOCAB, 6)
        for s in range(samples):
            ids, mask = [prompt], [np.zeros(len(prompt))]
            turns = int(rng.integers(1, 4))
            for turn in range(turns):
                sampled = first_turn if turn == 0 and s % 2 else rng.integers(0, VOCAB, rng.integers(1, 8))
                ids.append(sampled)
                mask.append(np.ones(len(sampled)))
                if turn + 1 < turns or s == 0:  # a trailing observation predicts nothing
                    observed = rng.integers(0, VOCAB, rng.integers(2, 6))
                    ids.append(observed)
                    mask.append(np.zeros(len(observed)))
            advantage = float(rng.normal())
            batch.append(_sample(np.concatenate(ids), np.concatenate(mask), advantage, 1.0 + s, seed=len(batch)))
    batch.append(batch[0])  # two identical samples
    return batch


@pytest.fixture(scope="module")
def qwen3_path(tmp_path_factory):
    return tiny_qwen3(tmp_path_factory.mktemp("qwen3"), vocab_size=VOCAB)


def _qwen3(path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)


def _llama(_) -> torch.nn.Module:
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, tie_word_embeddings=True, initializer_range=0.08,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _qwen2(_) -> torch.nn.Module:
    torch.manual_seed(2)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.08,
    )  # fmt: skip
    return Qwen2ForCausalLM(config)


def _plain_logprobs(lm: torch.nn.Module, sample: Sample, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies of the sampled tokens from one ordinary forward pass over one sequence."""
    ids = torch.from_numpy(sample.ids.astype(np.int64))
    logits = lm(input_ids=ids[None]).logits[0].float() / temperature
    distribution = torch.distributions.Categorical(logits=logits[:-1])
    chosen = torch.from_numpy(sample.mask[1:] == 1)
    return distribution.log_prob(ids[1:])[chosen], distribution.entropy()[chosen]


def _in_order(samples: list[Sample]) -> list[Sample]:
    return sorted(samples, key=lambda s: s.ids[: int(np.flatnonzero(s.mask)[-1])].tolist())


def _weighted(logprobs, advantages, weights) -> torch.Tensor:
    return (logprobs * torch.as_tensor(advantages) * torch.as_tensor(weights)).sum() / 50


@pytest.mark.parametrize("build", [_qwen3, _llama, _qwen2])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_entropies_and_gradients_equal_those_of_plain_forward_passes(qwen3_path, build, temperature):
    samples = _in_order(_batch())
    plain = build(qwen3_path)
    logprobs, entropies = zip(*(_plain_logprobs(plain, s, temperature) for s in samples), strict=True)
    expected, expected_entropy = torch.cat(logprobs), torch.cat(entropies)
    counts = [s.sampled for s in samples]
    advantages = np.repeat([s.advantage for s in samples], counts).astype(np.float32)
    weights = np.repeat([s.weight for s in samples], counts).astype(np.float32)
    _weighted(expected, advantages, weights).backward()

    policy = PackedPolicy(build(qwen3_path), temperature)
    for budget in (10_000, 70):
        policy.zero_grad()
        found = []
        for run in split_by_tokens(samples, budget):
            batch = pack(run)
            packed, entropy = policy(batch)
            found.append((packed.detach(), entropy.detach()))
            _weighted(packed, batch.advantages, batch.weights).backward()
        torch.testing.assert_close(torch.cat([f[0] for f in found]), expected.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(torch.cat([f[1] for f in found]), expected_entropy.detach(), atol=1e-5, rtol=0)
        for (name, parameter), reference in zip(policy.lm.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(parameter.grad, reference.grad, atol=1e-5, rtol=0, msg=name)
    assert len(found) > 1


def test_chunked_head_changes_nothing(qwen3_path, monkeypatch):
    batch = pack(_batch())
    whole, chunked = PackedPolicy(_qwen3(qwen3_path), 1.0), PackedPolicy(_qwen3(qwen3_path), 1.0)
    expected = whole(batch)[0]
    expected.sum().backward()
    monkeypatch.setattr(train.packing, "LOGITS_CHUNK", 7 * VOCAB)
    actual = chunked(batch)[0]
    actual.sum().backward()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    for parameter, reference in zip(chunked.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad, atol=1e-5, rtol=1e-5)


def test_gradient_checkpointing_changes_nothing(qwen3_path):
    batch = pack(_batch())
    plain, checkpointed = PackedPolicy(_qwen3(qwen3_path), 1.0), PackedPolicy(_qwen3(qwen3_path), 1.0)
    checkpointed.checkpoint_activations()
    for policy in (plain, checkpointed):
        policy.train()
        policy(batch)[0].sum().backward()
    for parameter, reference in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)


def test_shared_tokens_are_encoded_once():
    prompt, turns = list(range(100, 150)), [[1, 2, 3], [1, 2, 4, 5], [1, 2, 3], [9, 9]]
    batch = pack([_sample(prompt + turn, [0] * 50 + [1] * len(turn)) for turn in turns])
    # The prompt; 1 and 2 once; then 4; 9. Last tokens are predicted, never encoded.
    assert batch.nodes == 50 + 2 + 1 + 1
    # 1 | 2 | 3, 4 | 5 | 9 | 9 as predictions, from 12 sampled tokens.
    assert len(batch.targets) == 7
    assert len(batch.target_of) == 12


def test_bf16_masks_follow_the_model_and_results_stay_close(qwen3_path):
    samples = _batch()
    exact = PackedPolicy(_qwen3(qwen3_path), 1.0)
    rough = PackedPolicy(_qwen3(qwen3_path).bfloat16(), 1.0)
    with torch.no_grad():
        expected, _ = exact(pack(samples))
        actual, _ = rough(pack(samples).to("cpu", torch.bfloat16))
    assert actual.dtype == torch.float32
    assert (actual - expected).abs().mean() < 0.1


@given(st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=2, max_size=9), st.integers(0, 2**8)), min_size=1))
@settings(max_examples=200, deadline=None)
def test_every_path_spells_its_sequence_and_every_sampled_token_has_its_target(raw):
    samples = []
    for number, (ids, bits) in enumerate(raw):
        mask = [0] + [(bits >> i) & 1 for i in range(len(ids) - 1)]
        if any(mask):
            samples.append(_sample(ids, mask, advantage=float(number)))
    if not samples:
        return
    batch, ordered = pack(samples), _in_order(samples)
    # Rebuild each node's sequence from the segments alone.
    spelled, node, offset = {}, 0, 0
    for size, path_size in zip(batch.segments.sizes, batch.segments.path_sizes, strict=True):
        path = batch.segments.paths[offset : offset + path_size]
        for i in range(size):
            visible = path[: path_size - size + i + 1]
            spelled[node] = batch.ids[0, visible].tolist()
            assert visible[-1] == node
            assert batch.positions[0, node] == len(visible) - 1
            node += 1
        offset += path_size
    assert len(set(map(tuple, spelled.values()))) == len(spelled) == batch.nodes
    token = 0
    for number, sample in enumerate(ordered):
        for position in np.flatnonzero(sample.mask):
            target = batch.target_of[token]
            assert spelled[int(batch.sources[target])] == sample.ids[:position].tolist()
            assert batch.targets[target] == sample.ids[position]
            assert batch.behaviour[token] == sample.logprobs[position]
            assert batch.sequence[token] == number
            token += 1
    assert token == len(batch.target_of) == len(batch.lags)


def _nodes(samples: list[Sample]) -> int:
    return len({tuple(s.ids[:i].tolist()) for s in samples for i in range(1, int(np.flatnonzero(s.mask)[-1]) + 1)})


@pytest.mark.parametrize("budget", [40, 90, 150, 1000])
def test_micro_batches_keep_the_token_budget_and_lose_no_sample(budget):
    samples = _batch(groups=5)
    runs = split_by_tokens(samples, budget)
    assert sorted(id(s) for run in runs for s in run) == sorted(id(s) for s in samples)
    for run in runs:
        assert pack(run).nodes == _nodes(run)
        assert len(run) == 1 or _nodes(run) <= budget


def test_samples_without_sampled_tokens_are_left_out():
    nothing, something = _sample([1, 2, 3], [0, 0, 0]), _sample([1, 2, 3], [0, 1, 1])
    assert split_by_tokens([nothing, something], 100) == [[something]]
    assert split_by_tokens([nothing], 100) == []


def test_ranks_get_close_loads_and_every_item_once():
    costs = [100, 1, 50, 49, 30, 70, 2, 98]
    shards = shard(costs, 3)
    assert sorted(i for items in shards for i in items) == list(range(len(costs)))
    loads = [sum(costs[i] for i in items) for items in shards]
    assert max(loads) - min(loads) <= 30  # no more than the last item placed
    assert shard([5], 3) == [[0], [], []]


def test_a_dummy_micro_batch_has_no_gradient_but_touches_every_parameter(qwen3_path):
    policy, batch = PackedPolicy(_qwen3(qwen3_path), 1.0), dummy_micro_batch()
    logprobs, _ = policy(batch)
    (logprobs * batch.weights).sum().backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_entropy_has_a_gradient_only_when_asked_for(qwen3_path):
    plain, asked = PackedPolicy(_qwen3(qwen3_path), 1.0), PackedPolicy(_qwen3(qwen3_path), 1.0, entropy_gradient=True)
    batch = pack(_batch(groups=1))
    assert not torch.autograd.grad(
        plain(batch)[1].sum(), list(plain.parameters()), allow_unused=True, materialize_grads=True
    )[0].any()
    reference, total = _qwen3(qwen3_path), 0.0
    for sample in _batch(groups=1):
        total = total + _plain_logprobs(reference, sample, 1.0)[1].sum()
    expected = torch.autograd.grad(total, list(reference.parameters()))
    actual = torch.autograd.grad(asked(batch)[1].sum(), list(asked.parameters()))
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, atol=1e-4, rtol=1e-4)


def test_sliding_window_models_are_refused():
    config = Qwen2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=4, max_window_layers=0,
    )  # fmt: skip
    with pytest.raises(ValueError, match="sliding-window"):
        PackedPolicy(Qwen2ForCausalLM(config), 1.0)


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_copied_heads_attend_as_grouped_ones_and_as_a_softmax_in_float64(scaling):
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, nodes, 8) for heads, nodes in ((6, 5), (2, 9), (2, 9)))
    mask = torch.full((5, 9), float("-inf")).triu(5)
    exact = [tensor.double() for tensor in (query, key.repeat_interleave(3, 1), value.repeat_interleave(3, 1))]
    scores = exact[0] @ exact[1].transpose(2, 3) * (scaling or 8**-0.5) + mask.double()
    expected = scores.softmax(-1) @ exact[2]
    gradients = []
    for copies in (1, 3):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        found = train.packing._attend(*inputs, mask, scaling, copies)
        torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=0)
        (found * expected.float()).sum().backward()
        gradients.append([tensor.grad for tensor in inputs])
    for grouped, copied in zip(*gradients, strict=True):
        torch.testing.assert_close(copied, grouped, atol=1e-5, rtol=0)


def saved_bytes(compute) -> tuple[torch.Tensor, int]:
    """What ``compute`` returns, and how much memory it keeps for the backward pass."""
    storages: dict[int, torch.UntypedStorage] = {}

    def pack_(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack_, lambda tensor: tensor):
        result = compute()
    return result, sum({s.data_ptr(): s.nbytes() for s in storages.values()}.values())


def test_large_copies_of_heads_are_made_again_in_the_backward_pass_with_the_same_gradients(monkeypatch):
    batch = pack(_batch(groups=2))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, batch.nodes, 8) for heads in (6, 2, 2))
    found = {}
    for name, copies, limit in (("grouped", 1, 0), ("kept", 3, 1 << 40), ("made again", 3, 0)):
        monkeypatch.setattr(train.packing, "KEPT_COPIES", limit)
        monkeypatch.setattr(train.packing, "_copies", lambda query, key, copies=copies: copies)
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        output, kept = saved_bytes(
            lambda inputs=inputs: train.packing.tree_attention(None, *inputs, None, segments=batch.segments)[0]
        )
        output.square().sum().backward()
        found[name] = output, kept, [tensor.grad for tensor in inputs]
    assert found["kept"][1] > 1.5 * found["grouped"][1] and found["grouped"][1] > 1.5 * found["made again"][1]
    for name in ("kept", "made again"):
        torch.testing.assert_close(found[name][0], found["grouped"][0], atol=1e-6, rtol=0)
        torch.testing.assert_close(found[name][2], found["grouped"][2], atol=1e-5, rtol=0)


def test_rows_of_masks_begin_where_the_gpus_attention_reads_without_a_copy():
    """And hold what they held; PyTorch copies a mask of whose strides one is no multiple of 8."""
    batch = pack(_batch(groups=1))
    moved = batch.to("cpu", torch.bfloat16).segments.masks
    assert any(mask.shape[1] % 8 for mask in moved)
    for before, after in zip(batch.segments.masks, moved, strict=True):
        assert after.stride(0) % 8 == 0 and after.stride(1) == 1
        assert torch.equal(after, before.to(torch.bfloat16))
