"""The loss against values worked out by hand, and against TRL's on the same tensors (vectors made once with it)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from refimpl.grpo.loss import (
    METRICS,
    BatchTotals,
    KlEstimator,
    LossConfig,
    LossResult,
    Normaliser,
    grpo_loss,
    metric_means,
)

ORIGINAL = LossConfig(clip_low=0.2, clip_high=0.2, delta=4.0, mismatch_cap=None)


def one_token(ratio: float, advantage: float, config: LossConfig = ORIGINAL) -> tuple[float, float]:
    """(ℓ, ∂ℓ/∂log π) of a single token."""
    logprob = torch.tensor([np.log(ratio) - 1.0], dtype=torch.float64, requires_grad=True)
    behaviour, adv = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    result = grpo_loss(logprob, behaviour, adv, torch.tensor([True]), 1.0, config)
    result.loss.backward()
    assert logprob.grad is not None
    return result.loss.item(), logprob.grad.item()


@pytest.mark.parametrize("size", [0.25, 1.0, 3.75])
@pytest.mark.parametrize(
    ("sign", "ratio", "loss", "gradient"),
    [
        (+1, 2.0, -1.2, 0.0),  # a good token already twice as likely: held at 1 + ε
        (-1, 2.0, +2.0, +2.0),  # a bad token twice as likely: full push
        (-1, 10.0, +4.0, 0.0),  # ten times as likely: held at δ, no spike
        (-1, 0.5, +0.8, 0.0),  # a bad token already half as likely: held at 1 - ε
        (+1, 0.5, -0.5, -0.5),  # a good token half as likely: full push
    ],
)
def test_token_loss_oracles(size: float, sign: int, ratio: float, loss: float, gradient: float) -> None:
    assert one_token(ratio, sign * size) == pytest.approx((loss * size, gradient * size), abs=1e-12)


def test_without_delta_a_stale_negative_is_unbounded() -> None:
    """What δ is for: plain PPO's clip leaves A < 0, ρ = 10 with ten times the push."""
    config = LossConfig(delta=None, mismatch_cap=None)
    assert one_token(10.0, -1.0, config) == pytest.approx((10.0, 10.0))


def test_asymmetric_clip() -> None:
    config = LossConfig(clip_low=0.2, clip_high=0.28)
    assert one_token(1.25, 1.0, config) == pytest.approx((-1.25, -1.25))
    assert one_token(1.3, 1.0, config) == pytest.approx((-1.28, 0.0))
    assert one_token(0.79, -1.0, config) == pytest.approx((0.8, 0.0))


@pytest.mark.parametrize("advantage", [-2.0, 2.0])
@pytest.mark.parametrize("log_ratio", [-1e5, 1e5])
def test_absurd_ratios_stay_finite(advantage: float, log_ratio: float) -> None:
    """exp(1e5) is infinite and its clamp has the gradient 0·inf = NaN, unless the logarithm is held first."""
    logprob = torch.tensor([log_ratio], requires_grad=True)
    zero, adv = torch.zeros(1), torch.tensor([advantage])
    result = grpo_loss(logprob, zero, adv, torch.tensor([True]), 1.0, ORIGINAL, reference_S=zero)
    result.loss.backward()
    assert torch.isfinite(result.loss) and torch.isfinite(result.sums_K).all() and logprob.grad is not None
    assert torch.isfinite(logprob.grad).all()


# --- shapes and masks -------------------------------------------------------------------------------------------------


def batch(rows: int = 5, tokens: int = 7, seed: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {
        name: torch.randn(rows, tokens, generator=generator, dtype=torch.float64) * scale - shift
        for name, scale, shift in [
            ("logprob_S", 0.6, 2.0),
            ("behaviour_S", 0.6, 2.0),
            ("proximal_S", 0.6, 2.0),
            ("reference_S", 0.6, 2.0),
            ("entropy_S", 0.1, -1.0),
        ]
    }
    made["advantage_S"] = torch.randn(rows, 1, generator=generator, dtype=torch.float64).repeat(1, tokens)
    lengths = torch.randint(1, tokens + 1, (rows, 1), generator=generator)
    made["mask_S"] = torch.arange(tokens) < lengths
    return made


FULL = LossConfig(kl_coef=0.04, entropy_coef=0.01, clip_high=0.28)


def loss_and_gradient(tensors: dict[str, Tensor], denominator: float, config: LossConfig) -> tuple[LossResult, Tensor]:
    logprob = tensors["logprob_S"].clone().requires_grad_()
    result = grpo_loss(**(tensors | {"logprob_S": logprob}), denominator=denominator, config=config)
    result.loss.backward()
    assert logprob.grad is not None
    return result, logprob.grad


def test_nan_outside_the_mask_reaches_nothing() -> None:
    """Select, don't multiply: NaN·0 is NaN."""
    clean = batch()
    dirty = {k: v if v.dtype == torch.bool else v.masked_fill(~clean["mask_S"], torch.nan) for k, v in clean.items()}
    (expected, expected_grad), (result, grad) = (loss_and_gradient(t, 11.0, FULL) for t in (clean, dirty))
    assert result.loss.item() == expected.loss.item() and torch.equal(result.sums_K, expected.sums_K)
    assert torch.equal(grad, expected_grad)
    assert not grad[~clean["mask_S"]].any()


def test_a_micro_batch_of_padding_only_is_zero() -> None:
    tensors = batch() | {"mask_S": torch.zeros(5, 7, dtype=torch.bool)}
    denominator = BatchTotals(tokens=0, sequences=0, cells=0).denominator(Normaliser.TOKENS, 7)
    result, grad = loss_and_gradient(tensors, denominator, FULL)
    assert result.loss.item() == 0.0 and not grad.any()
    assert set(metric_means(result.sums_K).values()) == {0.0}


@pytest.mark.parametrize("name", ["behaviour_S", "advantage_S", "mask_S", "proximal_S", "reference_S", "entropy_S"])
def test_nothing_is_broadcast(name: str) -> None:
    """A per-row (B,) or (B, 1) tensor beside (B, T) tokens is refused, also where B equals T."""
    for rows, tokens in ((5, 7), (5, 5)):
        tensors = batch(rows, tokens)
        with pytest.raises(ValueError, match="one shape"):
            grpo_loss(**(tensors | {name: tensors[name][:, :1]}), denominator=1.0, config=FULL)
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        grpo_loss(**(tensors | {"mask_S": tensors["mask_S"].double()}), denominator=1.0, config=FULL)


def test_a_term_without_its_tensor_is_refused() -> None:
    for config, name in ((LossConfig(kl_coef=0.1), "reference_S"), (LossConfig(entropy_coef=0.1), "entropy_S")):
        tensors = batch()
        del tensors[name]
        with pytest.raises(ValueError, match=r"no (reference|entropy)"):
            grpo_loss(**tensors, denominator=1.0, config=config)


@pytest.mark.parametrize(
    ("setting", "match"),
    [
        ({"delta": 1.2}, "more than 1"),
        ({"clip_low": 1.0}, "clip_low"),
        ({"clip_high": 0.0}, "clip_high"),
        ({"mismatch_cap": 0.0}, "mismatch_cap"),
        ({"normaliser": "tokens"}, "normaliser"),
        ({"kl_estimator": True}, "kl_estimator"),
    ],
)
def test_bad_settings_are_refused(setting: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        LossConfig(**setting)


# --- normalisers: one number for the whole step -----------------------------------------------------------------------


def test_denominators() -> None:
    totals = BatchTotals(tokens=19, sequences=5, cells=35) + BatchTotals(tokens=4, sequences=2, cells=35)
    assert totals.denominator(Normaliser.TOKENS, 11) == 23
    assert totals.denominator(Normaliser.CELLS, 11) == 70
    assert totals.denominator(Normaliser.SEQUENCES, 11) == 77


@pytest.mark.parametrize("normaliser", list(Normaliser))
@pytest.mark.parametrize("kl_coef", [0.0, 0.04])
@pytest.mark.parametrize("splits", [(6,), (1, 5), (2, 3, 1), (1,) * 6])
def test_gradient_accumulation_is_equal_over_splits(
    normaliser: Normaliser, kl_coef: float, splits: tuple[int, ...]
) -> None:
    """1 x 6 = 6 x 1, with answers of 1 and of 7 tokens in one batch: the token count is that of the global batch."""
    tensors = batch(6, 7)
    tensors["mask_S"][0], tensors["mask_S"][1] = torch.arange(7) < 1, torch.arange(7) < 7
    config = LossConfig(normaliser=normaliser, kl_coef=kl_coef, entropy_coef=0.01)
    totals = BatchTotals(tokens=int(tensors["mask_S"].sum()), sequences=6, cells=42)
    denominator = totals.denominator(normaliser, 7)
    whole, whole_grad = loss_and_gradient(tensors, denominator, config)
    parts = [torch.split(tensor, list(splits)) for tensor in tensors.values()]
    results = [
        loss_and_gradient(dict(zip(tensors, part, strict=True)), denominator, config)
        for part in zip(*parts, strict=True)
    ]
    assert sum(result.loss.item() for result, _ in results) == pytest.approx(whole.loss.item(), abs=1e-14)
    assert torch.allclose(torch.cat([grad for _, grad in results]), whole_grad, rtol=0, atol=1e-15)
    sums_K = torch.stack([result.sums_K for result, _ in results]).sum(0)
    assert metric_means(sums_K) == pytest.approx(metric_means(whole.sums_K))


def test_metrics_weigh_tokens_not_ranks() -> None:
    """A rank of 10 tokens and one of 1000: the mean is over 1010 tokens, not over 2 ranks."""
    sums = []
    for tokens, entropy in ((10, 5.0), (1000, 1.0)):
        ones = torch.ones(tokens)
        mask = torch.ones(tokens, dtype=torch.bool)
        sums.append(grpo_loss(-ones, -ones, ones, mask, 1.0, ORIGINAL, entropy_S=ones * entropy).sums_K)
    means = metric_means(sums[0] + sums[1])
    assert means["tokens"] == 1010
    assert means["entropy"] == pytest.approx((10 * 5.0 + 1000 * 1.0) / 1010)


def test_metrics_by_hand() -> None:
    """Four tokens, one held by each bound and one by none; and what was masked is not counted."""
    ratio = torch.tensor([2.0, 0.5, 10.0, 1.0, 99.0], dtype=torch.float64)
    advantage = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False])
    result = grpo_loss(ratio.log(), torch.zeros_like(ratio), advantage, mask, 1.0, ORIGINAL)
    means = metric_means(result.sums_K)
    assert list(means) == list(METRICS)
    assert (means["tokens"], means["clipped_low"], means["clipped_high"], means["clipped_delta"]) == (
        4,
        0.25,
        0.25,
        0.25,
    )
    assert means["ratio"] == pytest.approx(13.5 / 4) and result.ratio_max.item() == pytest.approx(10.0)
    assert means["policy_loss"] == pytest.approx((-1.2 + 0.8 + 4.0 - 1.0) / 4)
    assert means["behaviour_kl"] == pytest.approx(sum(r - 1 - np.log(r) for r in (2.0, 0.5, 10.0, 1.0)) / 4)


# --- staleness and mismatch -------------------------------------------------------------------------------------------


def test_behaviour_logprobs_make_staleness_visible() -> None:
    """Against log-probabilities recomputed with the current policy the ratio is 1 whatever the age of the data."""
    tensors = batch()
    del tensors["proximal_S"]
    seen = grpo_loss(**tensors, denominator=1.0, config=LossConfig())
    hidden = grpo_loss(**tensors, proximal_S=tensors["logprob_S"], denominator=1.0, config=LossConfig())
    assert metric_means(hidden.sums_K)["ratio"] == 1.0
    assert metric_means(seen.sums_K)["ratio"] != pytest.approx(1.0, abs=0.01)
    assert metric_means(hidden.sums_K)["behaviour_kl"] == metric_means(seen.sums_K)["behaviour_kl"] > 0.1


def test_truncated_importance_correction() -> None:
    """w = min(π_p/μ, C) multiplies the clipped token loss, and is constant in the gradient."""
    logprob = torch.log(torch.tensor([0.5, 0.5, 0.5])).requires_grad_()
    proximal = torch.log(torch.tensor([0.5, 0.5, 0.5]))
    behaviour = torch.log(torch.tensor([0.4, 0.05, 1.0]))  # π_p/μ = 1.25, 10 -> 2, 0.5
    ones, mask = torch.ones(3), torch.ones(3, dtype=torch.bool)
    result = grpo_loss(logprob, behaviour, ones, mask, 1.0, LossConfig(mismatch_cap=2.0), proximal_S=proximal)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(-(1.25 + 2.0 + 0.5))
    assert logprob.grad is not None and logprob.grad.tolist() == pytest.approx([-1.25, -2.0, -0.5])
    means = metric_means(result.sums_K)
    assert means["mismatch_capped"] == pytest.approx(1 / 3) and means["mismatch_weight"] == pytest.approx(3.75 / 3)


# --- KL estimators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_kl_estimators_value_and_gradient(estimator: KlEstimator) -> None:
    logprob = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)
    reference, zero = torch.tensor([-1.2], dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    config = LossConfig(kl_coef=0.5, kl_estimator=estimator, mismatch_cap=None)
    result = grpo_loss(logprob, logprob.detach(), zero, torch.tensor([True]), 1.0, config, reference_S=reference)
    result.loss.backward()
    x = 0.3  # log reference - log π
    value = {KlEstimator.K1: -x, KlEstimator.K2: x * x / 2, KlEstimator.K3: np.exp(x) - x - 1}[estimator]
    slope = {KlEstimator.K1: 1.0, KlEstimator.K2: -x, KlEstimator.K3: 1 - np.exp(x)}[estimator]
    assert logprob.grad is not None
    assert (result.loss.item(), logprob.grad.item()) == pytest.approx((0.5 * value, 0.5 * slope), abs=1e-12)


def test_kl_estimators_estimate_the_kl() -> None:
    """On a vocabulary of 5, summed over all tokens with their probabilities: k1 and k3 give KL(π ‖ ref) exactly; and as
    a loss, k1 pulls nowhere, k2 pulls along the gradient of KL(π ‖ ref), k3 along that of KL(ref ‖ π)."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(5, generator=generator, dtype=torch.float64).log_softmax(0)
    logp = logits.log_softmax(0)
    p = logp.exp().detach()
    forward = (reference.exp() * (reference - logp)).sum()
    reverse = (logp.exp() * (logp - reference)).sum()
    expected = {
        KlEstimator.K1: torch.zeros(5, dtype=torch.float64),
        KlEstimator.K2: torch.autograd.grad(reverse, logits, retain_graph=True)[0],
        KlEstimator.K3: torch.autograd.grad(forward, logits, retain_graph=True)[0],
    }
    for estimator in KlEstimator:
        x = reference - logp
        value = {KlEstimator.K1: -x, KlEstimator.K2: x.square() / 2, KlEstimator.K3: x.exp() - x - 1}[estimator]
        if estimator is not KlEstimator.K2:
            assert (p * value).sum().item() == pytest.approx(reverse.item())
        # the library's own gradient, token by token, weighted by how often a token is sampled
        total = torch.zeros(5, dtype=torch.float64)
        for token in range(5):
            config = LossConfig(kl_coef=1.0, kl_estimator=estimator, mismatch_cap=None)
            taken, zero = logp[token : token + 1], torch.zeros(1, dtype=torch.float64)
            result = grpo_loss(
                taken, taken.detach(), zero, torch.tensor([True]), 1.0, config, reference_S=reference[token : token + 1]
            )
            total += p[token] * torch.autograd.grad(result.loss, logits, retain_graph=True)[0]
        assert torch.allclose(total, expected[estimator], atol=1e-12), estimator


# --- TRL --------------------------------------------------------------------------------------------------------------

VECTORS = Path(__file__).parent / "data" / "grpo" / "trl_1_16_loss.npz"


def trl_cases() -> list[str]:
    with np.load(VECTORS) as stored:
        return sorted({key.split("/")[0] for key in stored.files})


@pytest.mark.parametrize("case", trl_cases())
def test_equal_to_trl(case: str) -> None:
    """Loss and gradient of TRL 1.16's GRPOTrainer on the same float32 tensors, to 1e-6."""
    with np.load(VECTORS) as stored:
        stored_case = {key.split("/")[1]: stored[key] for key in stored.files if key.startswith(case + "/")}
    loss, grad_logprob, grad_entropy = ours_on(stored_case)
    assert loss == pytest.approx(float(stored_case["loss"]), abs=1e-6)
    np.testing.assert_allclose(grad_logprob, stored_case["grad_logprob"], rtol=0, atol=1e-6)
    np.testing.assert_allclose(grad_entropy, stored_case["grad_entropy"], rtol=0, atol=1e-6)


def ours_on(case: dict[str, np.ndarray]) -> tuple[float, np.ndarray, np.ndarray]:
    """(loss, ∂/∂logprob, ∂/∂entropy) of this library on the tensors and settings of one stored case."""
    tensors = {k: torch.from_numpy(v) for k, v in case.items() if v.ndim == 2 and not k.startswith("grad")}
    logprob, entropy = tensors["logprob"].requires_grad_(), tensors["entropy"].requires_grad_()
    mask = tensors["mask"]
    kl_coef, with_mismatch = float(case["kl_coef"]), bool(case["with_mismatch"])
    config = LossConfig(
        clip_low=float(case["clip_low"]),
        clip_high=float(case["clip_high"]),
        delta=float(case["delta"]) if np.isfinite(case["delta"]) else None,
        kl_coef=kl_coef,
        entropy_coef=float(case["entropy_coef"]),
        mismatch_cap=float(case["mismatch_cap"]) if with_mismatch else None,
        normaliser=Normaliser(str(case["normaliser"])),
    )
    totals = BatchTotals(tokens=int(mask.sum()), sequences=mask.shape[0], cells=mask.numel())
    result = grpo_loss(
        logprob,
        tensors["behaviour"],
        tensors["advantage"],
        mask,
        totals.denominator(config.normaliser, int(case["new_tokens_max"])),
        config,
        proximal_S=tensors["proximal"],
        reference_S=tensors["reference"],
        entropy_S=entropy,
    )
    result.loss.backward()
    assert logprob.grad is not None
    no_grad = torch.zeros_like(entropy)
    return result.loss.item(), logprob.grad.numpy(), (no_grad if entropy.grad is None else entropy.grad).numpy()
