"""From trajectories to micro-batches in which no token is encoded twice, and the forward pass over them.

The samples of a group begin with the same prompt, and the groups of one environment with the same system prompt. A
micro-batch is therefore a *token tree*: sequences sorted by their ids, each contributing only the tokens after its
longest common prefix with the one before it. Such a contribution is a *segment*: a run of new tokens that attends,
causally, to its own path from the root. All segments lie in one row, so linear layers see every distinct token once
and no padding; attention runs segment by segment. Log-probabilities and gradients equal those of one plain forward
pass per sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

ATTENTION_NAME = "fleet_tree"
# Logits of one chunk of the head, in elements: 1 GiB in fp32. Larger heads are recomputed in the backward pass.
LOGITS_CHUNK = 1 << 28
# Bytes of copied keys and values of a layer that are kept for the backward pass; where there are more, it copies again.
KEPT_COPIES = 1 << 25
MASK_ALIGNMENT = 8  # of a mask's rows, in elements, for the GPU's memory-efficient attention


@dataclass(frozen=True)
class Sample:
    """One trajectory with what the loss needs of it."""

    ids: np.ndarray  # int32 [tokens], prompt and response
    mask: np.ndarray  # uint8 [tokens], 1 on sampled tokens
    logprobs: np.ndarray  # float32 [tokens], of the behaviour policy
    lags: np.ndarray  # int64 [sampled tokens], updates since the oldest policy version each depends on
    advantage: float
    weight: float  # of each sampled token in the loss, before the division by the batch's total

    @property
    def sampled(self) -> int:
        return int(np.count_nonzero(self.mask))


@dataclass(frozen=True)
class Segments:
    """Attention structure of a row of nodes: segment ``s`` is the next ``sizes[s]`` nodes of the row.

    Its keys are the nodes ``paths`` lists for it (the next ``path_sizes[s]`` entries): its ancestors, then itself.
    Query ``i`` of a segment sees all of its path but the last ``size - 1 - i`` nodes.
    """

    sizes: tuple[int, ...]
    path_sizes: tuple[int, ...]
    paths: torch.Tensor  # int64 [sum(path_sizes)]
    masks: tuple[torch.Tensor, ...]  # additive, [size, path_size]


@dataclass(frozen=True)
class MicroBatch:
    """Tensors of one forward and backward pass.

    A *target* is a distinct (node, next token) pair that was sampled; samples with a common beginning share targets.
    """

    ids: torch.Tensor  # int64 [1, nodes]
    positions: torch.Tensor  # int64 [1, nodes]
    segments: Segments
    sources: torch.Tensor  # int64 [targets], the node that predicts
    targets: torch.Tensor  # int64 [targets], the token id predicted
    # One entry per sampled token of every sample:
    target_of: torch.Tensor  # int64, index into targets
    sequence: torch.Tensor  # int64, number of the sample within the micro-batch
    behaviour: torch.Tensor  # float32, logprob under the behaviour policy
    advantages: torch.Tensor  # float32
    weights: torch.Tensor  # float32
    lags: torch.Tensor  # int64

    @property
    def nodes(self) -> int:
        return self.ids.shape[1]

    def to(self, device: torch.device | str, dtype: torch.dtype) -> MicroBatch:
        """Move to ``device``; attention masks take the model's ``dtype``, as SDPA requires."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, torch.Tensor)}
        segments = replace(
            self.segments,
            paths=self.segments.paths.to(device),
            masks=tuple(_aligned(mask, device, dtype) for mask in self.segments.masks),
        )
        return replace(self, segments=segments, **tensors)


def _aligned(mask: torch.Tensor, device: torch.device | str, dtype: torch.dtype) -> torch.Tensor:
    """The mask on ``device``, in rows of which each begins where the GPU's attention can read it. It would make such a
    copy of any other in every layer, and keep it for the backward pass."""
    size, path_size = mask.shape
    row = -(-path_size // MASK_ALIGNMENT) * MASK_ALIGNMENT
    aligned = torch.zeros(size, row, device=device, dtype=dtype)[:, :path_size]
    return aligned.copy_(mask)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Length of the longest common prefix of two id sequences."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def _context(sample: Sample) -> np.ndarray:
    # Nothing is predicted from the last sampled token or from what follows it.
    return sample.ids[: int(np.flatnonzero(sample.mask)[-1])]


def _in_id_order(samples: Sequence[Sample]) -> list[Sample]:
    # Big-endian bytes compare as the id sequences do, and much faster.
    return sorted(samples, key=lambda sample: _context(sample).astype(">u4").tobytes())


def split_by_tokens(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Split into runs whose token trees have at most ``budget`` nodes (a longer single sample stays alone).

    Samples without a sampled token are left out. Neighbours in id order share most, so runs follow that order.
    """
    runs: list[list[Sample]] = []
    nodes, previous = 0, np.empty(0, np.int32)
    for sample in _in_id_order([sample for sample in samples if sample.sampled]):
        context = _context(sample)
        new = len(context) - common_prefix(previous, context)
        if not runs or nodes + new > budget:
            runs.append([])
            nodes, new = 0, len(context)
        runs[-1].append(sample)
        nodes, previous = nodes + new, context
    return runs


def shard(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Deal items over ranks so that the ranks' summed costs are close; deterministic. Returns item indices per rank."""
    shards: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for item in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        rank = loads.index(min(loads))
        shards[rank].append(item)
        loads[rank] += costs[item]
    return [sorted(items) for items in shards]


def _causal_mask(size: int, path_size: int) -> torch.Tensor:
    mask = torch.zeros(size, path_size)
    mask[:, path_size - size :] = torch.full((size, size), float("-inf")).triu(1)
    return mask


def pack(samples: Sequence[Sample]) -> MicroBatch:
    """Build one micro-batch. Every sample must have a sampled token that is not its first token."""
    ids, positions, sizes, paths = [], [], [], []
    sources, targets = [], []
    previous, previous_path, nodes = np.empty(0, np.int32), np.empty(0, np.int64), 0
    ordered = _in_id_order(samples)
    for sample in ordered:
        context = _context(sample)
        shared = common_prefix(previous, context)
        new = len(context) - shared
        path = np.concatenate([previous_path[:shared], np.arange(nodes, nodes + new)])
        if new:
            ids.append(context[shared:])
            positions.append(np.arange(shared, len(context)))
            sizes.append(new)
            paths.append(path)
        sampled = np.flatnonzero(sample.mask)
        sources.append(path[sampled - 1])
        targets.append(sample.ids[sampled].astype(np.int64))
        previous, previous_path, nodes = context, path, nodes + new
    pairs = np.stack([np.concatenate(sources), np.concatenate(targets)], axis=1)
    distinct, target_of = np.unique(pairs, axis=0, return_inverse=True)
    counts = [sample.sampled for sample in ordered]
    segments = Segments(
        sizes=tuple(sizes),
        path_sizes=tuple(len(path) for path in paths),
        paths=torch.from_numpy(np.concatenate(paths)),
        masks=tuple(_causal_mask(size, len(path)) for size, path in zip(sizes, paths, strict=True)),
    )
    return MicroBatch(
        ids=torch.from_numpy(np.concatenate(ids).astype(np.int64))[None],
        positions=torch.from_numpy(np.concatenate(positions))[None],
        segments=segments,
        sources=torch.from_numpy(distinct[:, 0].copy()),
        targets=torch.from_numpy(distinct[:, 1].copy()),
        target_of=torch.from_numpy(target_of.reshape(-1)),
        sequence=torch.from_numpy(np.repeat(np.arange(len(ordered)), counts)),
        behaviour=torch.from_numpy(np.concatenate([s.logprobs[s.mask == 1] for s in ordered]).astype(np.float32)),
        advantages=torch.from_numpy(np.repeat([s.advantage for s in ordered], counts).astype(np.float32)),
        weights=torch.from_numpy(np.repeat([s.weight for s in ordered], counts).astype(np.float32)),
        lags=torch.from_numpy(np.concatenate([s.lags for s in ordered]).astype(np.int64)),
    )


def dummy_micro_batch() -> MicroBatch:
    """A two-token micro-batch of weight zero, for a rank that has no sample in a step."""
    one = np.array([0, 1], np.uint8)
    zeros = np.zeros(2, np.float32)
    return pack([Sample(np.zeros(2, np.int32), one, zeros, np.zeros(1, np.int64), advantage=0.0, weight=0.0)])


def tree_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    *,
    segments: Segments,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention over a packed row; registered with transformers as ``fleet_tree``.

    Args:
        query: [1, heads, nodes, head_dim]; ``key`` and ``value`` the same with their own number of heads.

    Returns:
        [1, nodes, heads, head_dim] and no weights.
    """
    copies = _copies(query, key)
    arguments = (query, key, value, segments, scaling, copies)
    copied = 2 * copies * segments.paths.numel() * key.shape[1] * key.shape[3] * key.element_size()
    if copies > 1 and copied > KEPT_COPIES:
        # Every layer's would be kept: several times what it keeps else, for a long context.
        output = checkpoint(_attend_to_paths, *arguments, use_reentrant=False, preserve_rng_state=False)
    else:
        output = _attend_to_paths(*arguments)
    return output.transpose(1, 2).contiguous(), None


def _copies(query: torch.Tensor, key: torch.Tensor) -> int:
    """How often each head of keys and values is copied first: the GPU's memory-efficient kernel, the one that takes any
    mask, knows no grouped heads."""
    return query.shape[1] // key.shape[1] if query.is_cuda else 1


def _attend_to_paths(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    scaling: float | None,
    copies: int,
) -> torch.Tensor:
    """[1, heads, nodes, head_dim]."""
    # One gather and one split for all segments: a slice per segment would allocate a full-size gradient each.
    keys = key.index_select(2, segments.paths).split(segments.path_sizes, dim=2)
    values = value.index_select(2, segments.paths).split(segments.path_sizes, dim=2)
    queries = query.split(segments.sizes, dim=2)
    outputs = [
        _attend(q, k, v, mask, scaling, copies)
        for q, k, v, mask in zip(queries, keys, values, segments.masks, strict=True)
    ]
    return torch.cat(outputs, dim=2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    scaling: float | None,
    copies: int,
) -> torch.Tensor:
    """One segment's."""
    if copies > 1:
        key, value = (tensor.repeat_interleave(copies, dim=1) for tensor in (key, value))
    grouped = query.shape[1] != key.shape[1]
    return functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, enable_gqa=grouped)


AttentionInterface.register(ATTENTION_NAME, tree_attention)


def _score(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float, entropy_gradient: bool
) -> torch.Tensor:
    """[2, targets]: log-probability of each target, and the entropy of its distribution."""
    logits = functional.linear(hidden.float(), weight) / temperature
    normaliser = torch.logsumexp(logits, dim=-1)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - normaliser
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        entropy = normaliser - (torch.softmax(logits, dim=-1) * logits).sum(dim=-1)
    return torch.stack([logprobs, entropy])


class PackedPolicy(nn.Module):
    """A Hugging Face causal LM that scores the sampled tokens of a micro-batch.

    The head runs in fp32 and only where a sampled token is predicted. Logits are divided by ``temperature``, as the
    engine does before it samples. Entropies carry a gradient only with ``entropy_gradient``: it costs memory.

    Raises:
        ValueError: the architecture does something this forward pass does not do.
    """

    def __init__(self, lm: PreTrainedModel, temperature: float, entropy_gradient: bool = False) -> None:
        super().__init__()
        config = lm.config
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise ValueError(f"{config.model_type}: sliding-window attention layers are not supported by the learner")
        if getattr(config, "final_logit_softcapping", None) or getattr(config, "logits_scaling", 1.0) != 1.0:
            raise ValueError(f"{config.model_type}: scaled or soft-capped logits are not supported by the learner")
        lm.set_attn_implementation(ATTENTION_NAME)
        self.lm = lm
        self.temperature = temperature
        self.entropy_gradient = entropy_gradient

    def checkpoint_activations(self) -> None:
        """Recompute activations in the backward pass instead of keeping them."""
        # transformers renamed the method in 5.2x; both names take the keyword arguments first.
        enable = getattr(self.lm, "activation_checkpointing_enable", None) or self.lm.gradient_checkpointing_enable
        enable({"use_reentrant": False})

    def forward(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities and entropies, float32 [sampled tokens], in the order of ``batch.target_of``."""
        hidden = self.lm.get_decoder()(
            input_ids=batch.ids, position_ids=batch.positions, use_cache=False, segments=batch.segments
        ).last_hidden_state[0]
        weight = self.lm.get_output_embeddings().weight.float()
        at_sources = hidden.index_select(0, batch.sources)
        rows = max(1, LOGITS_CHUNK // weight.shape[0])
        options = (self.temperature, self.entropy_gradient)
        if len(batch.targets) <= rows:
            scores = _score(at_sources, weight, batch.targets, *options)
        else:
            chunks = zip(at_sources.split(rows), batch.targets.split(rows), strict=True)
            scores = torch.cat(
                [checkpoint(_score, h, weight, t, *options, use_reentrant=False) for h, t in chunks], dim=1
            )
        return scores[0].index_select(0, batch.target_of), scores[1].index_select(0, batch.target_of)
