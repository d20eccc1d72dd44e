"""GRPO in one process, from its formulas: plain torch and transformers, no Ray, nothing of train/ or actors/.

Advantages are (R - mean) / (std + 1e-6) of a group (Shao et al. 2024, arXiv:2402.03300), the loss is PPO's clipped
surrogate with a higher upper bound, averaged over all sampled tokens that carry an advantage (Yu et al. 2025,
arXiv:2503.14476), the optimiser AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) after clipping by global norm.

Sampling is not done again: the rows a run has kept hold its tokens and rewards, and ``mismatch`` says whether the
weights of this loop would have given those tokens the probabilities they were drawn with.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Step:
    """What one update was made of."""

    loss: float
    grad_norm: float  # before clipping
    tokens: int  # that carry an advantage
    mismatch: float  # largest difference between a token's logprob here and when it was drawn


class ReferenceGrpo:
    """fp32, one ordinary forward pass per trajectory."""

    def __init__(
        self, model: str, lr: float, betas: tuple[float, float], weight_decay: float, max_grad_norm: float
    ) -> None:
        self.lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._lr, self._betas, self._weight_decay, self._max_norm = lr, betas, weight_decay, max_grad_norm
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self.lm.parameters()]
        self._steps = 0

    def step(self, rows: list[dict[str, Any]], eps_low: float = 0.2, eps_high: float = 0.28) -> Step:
        """One update on a batch. A row holds ``ids``, ``mask``, ``logprobs``, ``reward``, ``group_id``, ``outcome`` and
        ``stop_reason``; what was not graded, or was cut at a token limit, is neither trained on nor in the baseline."""
        groups = defaultdict(list)
        for row in rows:
            if row["outcome"] == "graded" and row["stop_reason"] != "length":
                groups[row["group_id"]].append(row)
        trained = []
        for group in groups.values():
            rewards = [row["reward"] for row in group]
            if len(set(rewards)) > 1:
                trained += [(row, (row["reward"] - mean(rewards)) / (stdev(rewards) + 1e-6)) for row in group]
        tokens = sum(sum(row["mask"]) for row, _ in trained)
        loss, mismatch = 0.0, 0.0
        self.lm.zero_grad()
        for row, advantage in trained:
            sampled = torch.tensor(row["mask"][1:], dtype=torch.bool)
            ids = torch.tensor(row["ids"])
            logprobs = self.lm(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[sampled, 0]
            log_ratio = logprobs - torch.tensor(row["logprobs"][1:])[sampled]
            ratio = log_ratio.exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - eps_low, 1 + eps_high) * advantage)
            part = -surrogate.sum() / tokens
            part.backward()
            loss, mismatch = loss + part.item(), max(mismatch, log_ratio.abs().max().item())
        return Step(loss, self._update(), tokens, mismatch)

    @torch.no_grad()
    def _update(self) -> float:
        self._steps += 1
        norm = torch.sqrt(sum(p.grad.square().sum() for p in self.lm.parameters()))
        scale = min(1.0, self._max_norm / norm)
        (beta1, beta2), t = self._betas, self._steps
        for p, (m, v) in zip(self.lm.parameters(), self._moments, strict=True):
            m += (1 - beta1) * (scale * p.grad - m)
            v += (1 - beta2) * ((scale * p.grad).square() - v)
            p *= 1 - self._lr * (self._weight_decay if p.dim() >= 2 else 0.0)
            p -= self._lr * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + 1e-8)
        return norm.item()
