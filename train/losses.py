"""Policy losses per sampled token, corrections for off-policy data, and the metrics that watch both.

Notation: ``mu`` is the behaviour policy (the engine at sampling time, possibly several versions in one trajectory),
``prox`` the learner at the start of the update, ``pi`` the learner now. Formulas and constants follow PPO
(arXiv:1707.06347), DAPO (2503.14476), GSPO (2507.18071), MiniMax-M1 for CISPO (2506.13585), AReaL for the decoupled
loss (2505.24298) and Yao et al. (2025) for truncated importance sampling.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

LossName = Literal["ppo_clip", "cispo", "gspo", "decoupled"]
KlEstimator = Literal["k1", "k2", "k3"]
Reduction = Literal["token_mean", "sequence_mean"]

# exp(20) is finite in fp32; beyond it nothing but the veto matters.
LOG_RATIO_LIMIT = 20.0
K3_LIMIT = 10.0


@dataclass(frozen=True)
class LossSettings:
    """What is minimised.

    - ``ppo_clip``: clipped surrogate on pi/mu, bounds 1 - eps_clip_low and 1 + eps_clip_high; ``dual_clip`` c > 1
      bounds the loss of negative advantages at -c * A.
    - ``cispo``: REINFORCE weighted by pi/mu clipped into [cispo_low, cispo_high] without gradient.
    - ``gspo``: as ``ppo_clip`` with the sequence's geometric mean ratio (usual bounds: 3e-4 and 4e-4).
    - ``decoupled``: clipped surrogate on pi/prox times prox/mu, the latter truncated at ``tis_cap``.

    A sequence with any token whose pi/mu lies outside [veto_low, veto_high], or whose behaviour logprob is not finite,
    carries no loss; ``veto_low`` 0 and ``veto_high`` inf leave only the second rule.
    """

    name: LossName = "ppo_clip"
    eps_clip_low: float = 0.2
    eps_clip_high: float = 0.28
    dual_clip: float | None = None
    cispo_low: float = 0.0
    cispo_high: float = 5.0
    tis_cap: float | None = 2.0
    veto_low: float = 1e-4
    veto_high: float = 100.0
    reduction: Reduction = "token_mean"
    use_kl_loss: bool = False
    kl_coef: float = 1e-3
    kl_estimator: KlEstimator = "k3"
    entropy_coef: float = 0.0

    def __post_init__(self) -> None:
        if self.name not in ("ppo_clip", "cispo", "gspo", "decoupled"):
            raise ValueError(f"unknown loss '{self.name}'; use ppo_clip, cispo, gspo or decoupled")
        if self.reduction not in ("token_mean", "sequence_mean"):
            raise ValueError(f"unknown loss reduction '{self.reduction}'; use token_mean or sequence_mean")
        if self.kl_estimator not in ("k1", "k2", "k3"):
            raise ValueError(f"unknown KL estimator '{self.kl_estimator}'; use k1, k2 or k3")
        if not 0 <= self.eps_clip_low <= 1 or self.eps_clip_high < 0:
            raise ValueError(
                f"clip bounds {self.eps_clip_low}, {self.eps_clip_high}: the lower lies in [0, 1], the upper is >= 0"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip} must be above 1 (3 is usual)")
        if self.tis_cap is not None and self.tis_cap <= 0:
            raise ValueError(f"tis_cap {self.tis_cap} must be above 0 (2 is usual)")
        if not 0 <= self.veto_low < 1 < self.veto_high:
            raise ValueError(f"veto bounds {self.veto_low}, {self.veto_high} must enclose 1")


@dataclass(frozen=True)
class LossTerms:
    """``loss`` is differentiable; the rest is detached, one entry per sampled token."""

    loss: Tensor  # scalar, the weighted sum (not mean) over tokens
    policy: Tensor  # scalar, its policy-gradient part: without KL and entropy terms
    log_ratio: Tensor  # log pi/mu; NaN where the behaviour logprob is not finite
    clipped: Tensor  # bool
    vetoed: Tensor  # bool
    kl: Tensor  # to the reference policy, or to mu without one


def token_weight(sampled: int, reduction: Reduction) -> float:
    """Weight of each of a trajectory's ``sampled`` tokens; the batch's loss is sum(weight * loss) / sum(weight)."""
    return 1.0 if reduction == "token_mean" else 1.0 / sampled


def policy_loss(
    logprobs: Tensor,
    entropies: Tensor,
    *,
    behaviour: Tensor,
    advantages: Tensor,
    weights: Tensor,
    sequence: Tensor,
    settings: LossSettings,
    prox: Tensor | None = None,
    reference: Tensor | None = None,
) -> LossTerms:
    """Loss of a micro-batch, *not* divided by the batch's total weight: the caller knows it, over all ranks.

    Args:
        logprobs, entropies: of pi, differentiable, float32 [tokens].
        behaviour: log mu [tokens].
        advantages, weights: [tokens]; weight 0 silences a token.
        sequence: int64 [tokens], number of the sequence a token belongs to, from 0.
        prox: log prox [tokens], ``decoupled`` only. Default: pi itself, which is right for one step per batch.
        reference: log-probabilities of the reference policy [tokens]; required with ``use_kl_loss``.
    """
    if settings.use_kl_loss and reference is None:
        raise ValueError("use_kl_loss needs the reference policy's log-probabilities")
    finite = torch.isfinite(behaviour)
    log_mu = torch.where(finite, behaviour, logprobs.detach())
    log_ratio = logprobs - log_mu
    vetoed = _vetoed(log_ratio.detach(), finite, sequence, settings)
    surrogate, clipped = _surrogate(logprobs, log_mu, advantages, sequence, settings, prox)
    per_token = -surrogate
    policy = (weights * torch.where(vetoed, 0.0, per_token)).sum().detach()
    kl = kl_penalty(logprobs, log_mu if reference is None else reference, settings.kl_estimator)
    if settings.use_kl_loss:
        per_token = per_token + settings.kl_coef * kl
    if settings.entropy_coef:
        per_token = per_token - settings.entropy_coef * entropies
    loss = (weights * torch.where(vetoed, 0.0, per_token)).sum()
    shown_ratio = torch.where(finite, log_ratio.detach(), torch.nan)
    return LossTerms(loss, policy, shown_ratio, clipped.detach() & ~vetoed, vetoed, kl.detach())


def kl_penalty(logprobs: Tensor, reference: Tensor, estimator: KlEstimator) -> Tensor:
    """Per-token estimate of KL(pi || reference) with a gradient (Schulman, 2020): k1, k2 or k3."""
    difference = (logprobs - reference).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return 0.5 * difference.square()
    return (torch.expm1(-difference) + difference).clamp(max=K3_LIMIT)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """Sum of ``values`` over each sequence, given back at every one of its tokens."""
    sums = torch.zeros(int(sequence.max()) + 1, dtype=values.dtype, device=values.device)
    return sums.index_add(0, sequence, values).index_select(0, sequence)


def _vetoed(log_ratio: Tensor, finite: Tensor, sequence: Tensor, settings: LossSettings) -> Tensor:
    ratio = _exp(log_ratio)
    broken = ~finite | (ratio < settings.veto_low) | (ratio > settings.veto_high)
    return _sequence_sum(broken.float(), sequence) > 0


def _surrogate(
    logprobs: Tensor,
    log_mu: Tensor,
    advantages: Tensor,
    sequence: Tensor,
    settings: LossSettings,
    prox: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The objective to maximise per token, and where clipping took its gradient or changed its weight."""
    if settings.name == "cispo":
        ratio = _exp(logprobs - log_mu).detach()
        weight = ratio.clamp(settings.cispo_low, settings.cispo_high)
        return weight * advantages * logprobs, weight != ratio
    if settings.name == "gspo":
        detached = logprobs.detach()
        mean = _sequence_sum(detached - log_mu, sequence) / _sequence_sum(torch.ones_like(detached), sequence)
        # Value of the sequence ratio, gradient of the token: equal to the sequence form under a mean over tokens.
        return _clip(_exp(mean + logprobs - detached), advantages, settings)
    if settings.name == "decoupled":
        log_prox = logprobs.detach() if prox is None else prox
        correction = _exp(log_prox - log_mu)
        if settings.tis_cap is not None:
            correction = correction.clamp(max=settings.tis_cap)
        surrogate, clipped = _clip(_exp(logprobs - log_prox), advantages, settings)
        return correction * surrogate, clipped
    return _clip(_exp(logprobs - log_mu), advantages, settings)


def _clip(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> tuple[Tensor, Tensor]:
    free = ratio * advantages
    bounded = ratio.clamp(1 - settings.eps_clip_low, 1 + settings.eps_clip_high) * advantages
    surrogate = torch.minimum(free, bounded)
    if settings.dual_clip is not None:
        surrogate = torch.where(advantages < 0, torch.maximum(surrogate, settings.dual_clip * advantages), surrogate)
    return surrogate, bounded < free


def mismatch_metrics(log_ratio: np.ndarray, vetoed: np.ndarray, lag: np.ndarray) -> dict[str, float]:
    """How far pi is from the policy that sampled.

    Args:
        log_ratio: float [tokens], log pi/mu, NaN where unknown.
        vetoed: bool [tokens].
        lag: int [tokens], trained version minus the version a token was drawn under.

    Returns:
        - for every lag, ``mismatch/lag_{lag}/*``: ``token_share``, its tokens' share of all; ``logp_abs_diff_mean``,
          ``_p99`` and ``_max``; ``k3_kl``, the k3 estimate of KL(mu || pi); ``ratio_max``; ``ess``, the effective
          sample size as a share, 1 when pi = mu; ``frac_vetoed``. Lag 0 is the engine's error, others add staleness;
        - of lag 0 once more, the error as ``mismatch/logp_abs_diff_{mean,p99,max}`` and ``mismatch/k3_kl``;
        - over all tokens: ``mismatch/ratio_max``, ``mismatch/ess`` and ``mismatch/frac_vetoed``.

        What no token is known of is left out.
    """
    if not len(lag):
        return {}
    known = np.isfinite(log_ratio)
    log_ratio = np.where(known, log_ratio, 0.0).astype(np.float64).clip(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = {f"mismatch/{name}": value for name, value in _ratio_metrics(log_ratio[known], vetoed).items()}
    for value in np.unique(lag):
        chosen = lag == value
        there = log_ratio[chosen & known]
        error = _error_metrics(there)
        if value == 0:
            metrics |= {f"mismatch/{name}": figure for name, figure in error.items()}
        family = {"token_share": float(chosen.mean()), **error, **_ratio_metrics(there, vetoed[chosen])}
        metrics |= {f"mismatch/lag_{int(value)}/{name}": figure for name, figure in family.items()}
    return metrics


def _error_metrics(log_ratio: np.ndarray) -> dict[str, float]:
    if not len(log_ratio):
        return {}
    difference = np.abs(log_ratio)
    return {
        "logp_abs_diff_mean": float(difference.mean()),
        "logp_abs_diff_p99": float(np.percentile(difference, 99)),
        "logp_abs_diff_max": float(difference.max()),
        "k3_kl": float((np.expm1(log_ratio) - log_ratio).mean()),
    }


def _ratio_metrics(log_ratio: np.ndarray, vetoed: np.ndarray) -> dict[str, float]:
    metrics = {"frac_vetoed": float(vetoed.mean())}
    if not len(log_ratio):
        return metrics
    ratio = np.exp(log_ratio)
    ess = float(ratio.sum() ** 2 / (len(ratio) * np.square(ratio).sum()))
    return metrics | {"ratio_max": float(ratio.max()), "ess": ess}
