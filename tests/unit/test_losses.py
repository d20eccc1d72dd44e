"""Losses: values against scalar formulas written out per token, gradients against float64 finite differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from train.losses import LossSettings, kl_penalty, mismatch_metrics, policy_loss, token_weight

SEQUENCE = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2, 2])
WIDE = {"veto_low": 0.0, "veto_high": math.inf}


def _inputs(seed: int = 0, spread: float = 0.5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(scale: float) -> torch.Tensor:
        return scale * torch.randn(len(SEQUENCE), generator=generator, dtype=torch.float64)

    logprobs = -1.5 + draw(0.3)
    return {
        "logprobs": logprobs,
        "behaviour": logprobs + draw(spread),
        "prox": logprobs + draw(spread / 2),
        "reference": logprobs + draw(0.4),
        "advantages": draw(1.0)[SEQUENCE],
        "weights": torch.rand(len(SEQUENCE), generator=generator, dtype=torch.float64) + 0.1,
        "entropies": draw(0.1) + 2.0,
    }


def _loss(values: dict[str, torch.Tensor], settings: LossSettings, **changed: torch.Tensor):
    values = values | changed
    return policy_loss(
        values["logprobs"], values["entropies"], behaviour=values["behaviour"], advantages=values["advantages"],
        weights=values["weights"], sequence=SEQUENCE, settings=settings,
        prox=values["prox"] if settings.name == "decoupled" else None,
        reference=values["reference"] if settings.use_kl_loss else None,
    )  # fmt: skip


def _gradient(values: dict[str, torch.Tensor], settings: LossSettings) -> torch.Tensor:
    logprobs = values["logprobs"].clone().requires_grad_()
    _loss(values, settings, logprobs=logprobs).loss.backward()
    return logprobs.grad


def _finite_difference(values: dict[str, torch.Tensor], function) -> torch.Tensor:
    gradient, step = torch.zeros_like(values["logprobs"]), 1e-6
    for i in range(len(gradient)):
        shift = torch.zeros_like(gradient)
        shift[i] = step
        gradient[i] = (function(values["logprobs"] + shift) - function(values["logprobs"] - shift)) / (2 * step)
    return gradient


def _clip_scalar(ratio: float, advantage: float, low: float, high: float, dual: float | None = None) -> float:
    surrogate = min(ratio * advantage, min(max(ratio, 1 - low), 1 + high) * advantage)
    if dual is not None and advantage < 0:
        surrogate = max(surrogate, dual * advantage)
    return surrogate


def _ppo_reference(values, logprobs, low, high, dual=None) -> float:
    total = 0.0
    for lp, mu, a, w in zip(logprobs, values["behaviour"], values["advantages"], values["weights"], strict=True):
        total -= float(w) * _clip_scalar(math.exp(lp - mu), float(a), low, high, dual)
    return total


@pytest.mark.parametrize("dual", [None, 1.1])
@pytest.mark.parametrize("seed", range(4))
def test_ppo_clip_equals_the_scalar_formula_in_value_and_gradient(seed, dual):
    values = _inputs(seed)
    settings = LossSettings("ppo_clip", eps_clip_low=0.2, eps_clip_high=0.28, dual_clip=dual, **WIDE)
    reference = lambda lp: _ppo_reference(values, lp, 0.2, 0.28, dual)  # noqa: E731
    assert _loss(values, settings).loss.item() == pytest.approx(reference(values["logprobs"]), rel=1e-9)
    torch.testing.assert_close(_gradient(values, settings), _finite_difference(values, reference), atol=1e-6, rtol=1e-6)


def test_ppo_clip_takes_the_gradient_from_exactly_the_tokens_outside_the_trust_region():
    low, high = 0.2, 0.28
    values = _inputs()
    values["logprobs"] = torch.zeros(9, dtype=torch.float64)
    ratios = torch.tensor([0.5, 1.0, 1.27, 1.29, 0.79, 0.81, 1.5, 0.5, 1.0], dtype=torch.float64)
    values["behaviour"] = -ratios.log()
    values["advantages"] = torch.tensor([1, 1, 1, 1, -1, -1, -1, -1, -1], dtype=torch.float64)
    settings = LossSettings("ppo_clip", eps_clip_low=low, eps_clip_high=high)
    expected_clipped = [False, False, False, True, True, False, False, True, False]
    assert _loss(values, settings).clipped.tolist() == expected_clipped
    gradient = _gradient(values, settings)
    expected = -values["weights"] * values["advantages"] * ratios
    expected[torch.tensor(expected_clipped)] = 0.0
    torch.testing.assert_close(gradient, expected)


def test_on_policy_gradient_is_that_of_reinforce():
    values = _inputs()
    values["behaviour"] = values["prox"] = values["logprobs"].clone()
    expected = -values["weights"] * values["advantages"]
    for name in ("ppo_clip", "cispo", "gspo", "decoupled"):
        torch.testing.assert_close(_gradient(values, LossSettings(name)), expected)


def test_cispo_keeps_the_gradient_of_every_token_and_caps_its_weight():
    values = _inputs(1, spread=1.0)
    settings = LossSettings("cispo", cispo_low=0.5, cispo_high=1.5, **WIDE)
    ratio = (values["logprobs"] - values["behaviour"]).exp()
    expected = -values["weights"] * values["advantages"] * ratio.clamp(0.5, 1.5)
    torch.testing.assert_close(_gradient(values, settings), expected)
    terms = _loss(values, settings)
    assert terms.loss.item() == pytest.approx((expected * values["logprobs"]).sum().item())
    assert terms.clipped.tolist() == ((ratio < 0.5) | (ratio > 1.5)).tolist()
    assert terms.clipped.any() and not terms.clipped.all()


@pytest.mark.parametrize("seed", range(4))
def test_gspo_gradient_is_that_of_the_clipped_sequence_ratio(seed):
    values = _inputs(seed, spread=0.2)
    values["weights"] = torch.ones(9, dtype=torch.float64)  # equal weights within a sequence, as GSPO defines it

    def reference(logprobs: torch.Tensor) -> float:
        total = 0.0
        for s in range(3):
            chosen = SEQUENCE == s
            ratio = math.exp((logprobs[chosen] - values["behaviour"][chosen]).mean())
            advantage = float(values["advantages"][chosen][0])
            total -= int(chosen.sum()) * _clip_scalar(ratio, advantage, 0.03, 0.04)
        return total

    settings = LossSettings("gspo", eps_clip_low=0.03, eps_clip_high=0.04)
    assert _loss(values, settings).loss.item() == pytest.approx(reference(values["logprobs"]), rel=1e-9)
    torch.testing.assert_close(_gradient(values, settings), _finite_difference(values, reference), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("cap", [None, 1.2])
def test_decoupled_clips_around_prox_and_truncates_the_correction_to_mu(cap):
    values = _inputs(2, spread=0.8)
    settings = LossSettings("decoupled", tis_cap=cap, eps_clip_low=0.1, eps_clip_high=0.1, **WIDE)

    def reference(logprobs: torch.Tensor) -> float:
        total = 0.0
        for i in range(len(logprobs)):
            correction = math.exp(values["prox"][i] - values["behaviour"][i])
            correction = correction if cap is None else min(correction, cap)
            ratio = math.exp(logprobs[i] - values["prox"][i])
            advantage, weight = float(values["advantages"][i]), float(values["weights"][i])
            total -= weight * correction * _clip_scalar(ratio, advantage, 0.1, 0.1)
        return total

    assert _loss(values, settings).loss.item() == pytest.approx(reference(values["logprobs"]), rel=1e-9)
    torch.testing.assert_close(_gradient(values, settings), _finite_difference(values, reference), atol=1e-6, rtol=1e-6)


def test_decoupled_without_prox_weighs_the_on_policy_gradient_by_the_truncated_ratio():
    values = _inputs(2, spread=0.8)
    logprobs = values["logprobs"].clone().requires_grad_()
    policy_loss(
        logprobs, values["entropies"], behaviour=values["behaviour"], advantages=values["advantages"],
        weights=values["weights"], sequence=SEQUENCE, settings=LossSettings("decoupled", tis_cap=1.3, **WIDE),
    ).loss.backward()  # fmt: skip
    ratio = (values["logprobs"] - values["behaviour"]).exp()
    assert (ratio > 1.3).any()
    torch.testing.assert_close(logprobs.grad, -values["weights"] * values["advantages"] * ratio.clamp(max=1.3))


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_loss_has_the_value_and_the_gradient_of_its_estimator(estimator):
    values = _inputs(3)
    difference = values["logprobs"] - values["reference"]
    value = {"k1": difference, "k2": difference**2 / 2, "k3": (-difference).exp() - 1 + difference}[estimator]
    slope = {"k1": torch.ones(9), "k2": difference, "k3": 1 - (-difference).exp()}[estimator].double()
    torch.testing.assert_close(kl_penalty(values["logprobs"], values["reference"], estimator), value)
    with_kl = LossSettings(use_kl_loss=True, kl_coef=0.7, kl_estimator=estimator)
    without = LossSettings()
    added = _gradient(values, with_kl) - _gradient(values, without)
    torch.testing.assert_close(added, 0.7 * values["weights"] * slope)
    grown = _loss(values, with_kl).loss - _loss(values, without).loss
    assert grown.item() == pytest.approx((0.7 * values["weights"] * value).sum().item())


def test_kl_without_a_reference_policy_is_refused():
    values = _inputs()
    with pytest.raises(ValueError, match="reference policy"):
        policy_loss(
            values["logprobs"], values["entropies"], behaviour=values["behaviour"], advantages=values["advantages"],
            weights=values["weights"], sequence=SEQUENCE, settings=LossSettings(use_kl_loss=True),
        )  # fmt: skip


def test_entropy_bonus_lowers_the_loss_and_has_a_gradient():
    values = _inputs()
    entropies = values["entropies"].clone().requires_grad_()
    _loss(values, LossSettings(entropy_coef=0.3), entropies=entropies).loss.backward()
    torch.testing.assert_close(entropies.grad, -0.3 * values["weights"])


def test_veto_silences_the_whole_sequence_and_no_other():
    values = _inputs()
    values["behaviour"][4] = values["logprobs"][4] + math.log(2e4)  # ratio 5e-5, in sequence 1
    terms, gradient = _loss(values, LossSettings()), _gradient(values, LossSettings())
    assert terms.vetoed.tolist() == (SEQUENCE == 1).tolist()
    assert (gradient[SEQUENCE == 1] == 0).all()
    assert (gradient[SEQUENCE != 1] != 0).any()
    rest = values | {"weights": torch.where(SEQUENCE == 1, 0.0, values["weights"])}
    assert terms.loss.item() == pytest.approx(_loss(rest, LossSettings(**WIDE)).loss.item())


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf])
@pytest.mark.parametrize("name", ["ppo_clip", "cispo", "gspo", "decoupled"])
def test_a_behaviour_logprob_that_is_not_finite_costs_its_sequence_only(name, bad):
    values = _inputs()
    values["behaviour"][0] = bad
    settings = LossSettings(name, **WIDE)
    terms, gradient = _loss(values, settings), _gradient(values, settings)
    assert terms.vetoed.tolist() == (SEQUENCE == 0).tolist()
    assert math.isfinite(terms.loss.item()) and torch.isfinite(gradient).all()
    assert math.isnan(terms.log_ratio[0].item())


def test_weight_zero_gives_no_loss_and_no_gradient():
    values = _inputs()
    values["weights"] = torch.zeros(9, dtype=torch.float64)
    assert _loss(values, LossSettings()).loss.item() == 0.0
    assert (_gradient(values, LossSettings()) == 0).all()


def test_sequence_mean_gives_each_trajectory_the_same_say():
    assert token_weight(7, "token_mean") == 1.0
    assert 7 * token_weight(7, "sequence_mean") == pytest.approx(3 * token_weight(3, "sequence_mean"))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"name": "ppo"}, "unknown loss 'ppo'"),
        ({"reduction": "mean"}, "unknown loss reduction 'mean'"),
        ({"kl_estimator": "k4"}, "unknown KL estimator 'k4'"),
        ({"eps_clip_low": 1.5}, "clip bounds"),
        ({"dual_clip": 0.5}, "dual_clip 0.5 must be above 1"),
        ({"tis_cap": 0.0}, "tis_cap 0.0 must be above 0"),
        ({"veto_low": 2.0}, "must enclose 1"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        LossSettings(**wrong)


@pytest.mark.parametrize("kind", [np.int64, np.float64])  # joined with a rank that has no token, lags are floats
def test_mismatch_metrics_by_hand(kind):
    log_ratio = np.array([0.1, -0.2, np.nan, 0.4, 0.0, 0.5])
    vetoed = np.array([0, 0, 1, 1, 0, 0], bool)
    metrics = mismatch_metrics(log_ratio, vetoed, lag=np.array([0, 0, 0, 1, 2, 2], kind))
    ratio = np.exp([0.1, -0.2, 0.4, 0.0, 0.5])
    k3 = ratio - 1 - np.log(ratio)
    expected = {
        "mismatch/logp_abs_diff_mean": 0.15,
        "mismatch/logp_abs_diff_p99": np.percentile([0.1, 0.2], 99),
        "mismatch/logp_abs_diff_max": 0.2,
        "mismatch/k3_kl": k3[:2].mean(),
        "mismatch/ratio_max": math.exp(0.5),
        "mismatch/ess": ratio.sum() ** 2 / (5 * (ratio**2).sum()),
        "mismatch/frac_vetoed": 2 / 6,
    }
    by_lag = {
        "token_share": (3 / 6, 1 / 6, 2 / 6),
        "logp_abs_diff_mean": (0.15, 0.4, 0.25),
        "logp_abs_diff_p99": (np.percentile([0.1, 0.2], 99), 0.4, np.percentile([0.0, 0.5], 99)),
        "logp_abs_diff_max": (0.2, 0.4, 0.5),
        "k3_kl": (k3[:2].mean(), k3[2], k3[3:].mean()),
        "ratio_max": (math.exp(0.1), math.exp(0.4), math.exp(0.5)),
        "ess": tuple(r.sum() ** 2 / (len(r) * (r**2).sum()) for r in (ratio[:2], ratio[2:3], ratio[3:])),
        "frac_vetoed": (1 / 3, 1.0, 0.0),
    }
    for name, values in by_lag.items():
        expected |= {f"mismatch/lag_{lag}/{name}": value for lag, value in enumerate(values)}
    assert metrics == pytest.approx(expected)


def test_equal_policies_show_no_mismatch():
    metrics = mismatch_metrics(np.zeros(10), np.zeros(10, bool), np.zeros(10, int))
    assert metrics["mismatch/k3_kl"] == 0.0
    assert metrics["mismatch/ess"] == 1.0


def test_mismatch_of_nothing_known_is_no_number():
    assert mismatch_metrics(np.empty(0), np.empty(0, bool), np.empty(0, int)) == {}
    assert mismatch_metrics(np.array([np.nan]), np.array([True]), np.array([0])) == {
        "mismatch/frac_vetoed": 1.0,
        "mismatch/lag_0/token_share": 1.0,
        "mismatch/lag_0/frac_vetoed": 1.0,
    }
