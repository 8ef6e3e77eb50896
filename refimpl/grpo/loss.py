"""The GRPO loss with a two-sided clip: what one token of one answer pulls at the weights.

Notation, as in the papers: π the policy being trained, μ the policy that sampled (the *behaviour*, older, run by an
engine with other kernels), π_p the *proximal* policy (the trainer's weights when the step began), A the advantage.

    r  = π/π_p, or π/μ where no π_p is given
    ℓ  = -w · min( min(r, δ)·A, clip(r, 1-ε_low, 1+ε_high)·A )
    w  = min(π_p/μ, C), constant: truncated importance correction for what lies between engine and trainer
    L  = Σ over tokens of ( ℓ + β·KL - c·H ) / D

For A > 0 the inner clip bounds ℓ already; δ acts only where A < 0, where plain PPO has no bound and one stale token
that the policy meanwhile likes ten times as much makes a spike in the gradient.

D is one number for the whole optimizer step, over all micro-batches and ranks, so splitting a batch changes nothing.
Masked tokens are *selected* away before any arithmetic: multiplying by a mask of 0 would let a NaN through.

Differs from the original (prime-rl, April 2025):
1) the ratio may be taken against the engine's own log-probabilities, kept with the sample: recomputed ones make data of
   any age look fresh (its behaviour is had by passing them as `proximal` with `mismatch_cap=None`);
2) the KL term carries a gradient (there it was taken from log-probabilities without one) and is not cut at ±10;
3) the normaliser is a named choice; metrics are sums and counts, to be added over ranks before any division.

Shapes: S, any one shape shared by all token tensors: (B, T), or (N,) for tokens picked out of packed rows.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

LOG_RATIO_MAX = 20.0
"""Log-ratios are held within ±20 before exp(), so that no ratio, and no gradient of one, is infinite."""


class Normaliser(enum.Enum):
    """What D is: by how much the summed loss of a step is divided."""

    TOKENS = "tokens"  # all answer tokens of the global batch: each token weighs the same (DAPO)
    CELLS = "cells"  # all cells of the batch tensors, padding and prompts too: the original's constant
    SEQUENCES = "sequences"  # answers times the longest allowed answer: Dr. GRPO's constant


class KlEstimator(enum.Enum):
    """Of KL(π ‖ reference) from tokens sampled by π, with x = log reference - log π (J. Schulman's names).

    As a *loss*, which is how they are used here, they differ more than their values do: the gradient of k1 has mean
    zero, that of k2 is the gradient of KL(π ‖ reference), that of k3 is the gradient of KL(reference ‖ π).
    """

    K1 = "k1"  # -x: unbiased value, may be negative
    K2 = "k2"  # x²/2: biased value, never negative
    K3 = "k3"  # exp(x) - x - 1: unbiased value, never negative


@dataclass(frozen=True, kw_only=True)
class LossConfig:
    clip_low: float = 0.2  # ε_low: no further push once r < 1 - ε_low; (0, 1)
    clip_high: float = 0.2  # ε_high: no further push once r > 1 + ε_high; above ε_low lets rare tokens rise (0.28)
    delta: float | None = 4.0  # δ: bound of r where A < 0; must exceed 1 + ε_high; None: no bound, as in PPO
    mismatch_cap: float | None = 2.0  # C: largest w; None: w = 1. Acts only where `proximal` is given
    kl_coef: float = 0.0  # β
    kl_estimator: KlEstimator = KlEstimator.K3
    entropy_coef: float = 0.0  # c: positive rewards entropy
    normaliser: Normaliser = Normaliser.TOKENS

    def __post_init__(self) -> None:
        if not 0 < self.clip_low < 1:
            raise ValueError(f"clip_low is {self.clip_low}, expected between 0 and 1")
        if not self.clip_high > 0:
            raise ValueError(f"clip_high is {self.clip_high}, expected more than 0")
        if self.delta is not None and not self.delta > 1 + self.clip_high:
            raise ValueError(f"delta is {self.delta}, expected more than 1 + clip_high = {1 + self.clip_high}")
        if self.mismatch_cap is not None and not self.mismatch_cap > 0:
            raise ValueError(f"mismatch_cap is {self.mismatch_cap}, expected more than 0 or None")
        if not self.kl_coef >= 0:
            raise ValueError(f"kl_coef is {self.kl_coef}, expected 0 or more")
        if not isinstance(self.normaliser, Normaliser):
            raise ValueError(f"normaliser is {self.normaliser!r}, expected a member of Normaliser")
        if not isinstance(self.kl_estimator, KlEstimator):
            raise ValueError(f"kl_estimator is {self.kl_estimator!r}, expected a member of KlEstimator")


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """How much one optimizer step trains on; add up over micro-batches and ranks, then ask for D."""

    tokens: int  # answer tokens, the mask's sum
    sequences: int  # answers
    cells: int  # cells of the batch tensors

    def __add__(self, other: BatchTotals) -> BatchTotals:
        return BatchTotals(
            tokens=self.tokens + other.tokens,
            sequences=self.sequences + other.sequences,
            cells=self.cells + other.cells,
        )

    def denominator(self, normaliser: Normaliser, new_tokens_max: int) -> float:
        """D, at least 1. `new_tokens_max` is the longest answer allowed (it counts for SEQUENCES only).

        Where ranks *average* their gradients (DDP, FSDP), divide D by the number of ranks.
        """
        match normaliser:
            case Normaliser.TOKENS:
                total = self.tokens
            case Normaliser.CELLS:
                total = self.cells
            case Normaliser.SEQUENCES:
                total = self.sequences * new_tokens_max
        return float(max(total, 1))


METRICS = (
    "tokens",  # the count that the others are divided by
    "policy_loss",  # ℓ
    "ratio",  # r
    "clipped_low",  # tokens held by 1 - ε_low
    "clipped_high",  # tokens held by 1 + ε_high
    "clipped_delta",  # tokens held by δ
    "behaviour_kl",  # k3 of KL(μ ‖ π): how far the policy has moved from the one that sampled
    "mismatch_weight",  # w
    "mismatch_capped",  # tokens whose w was cut to C
    "kl",  # KL to the reference, by the estimator chosen
    "entropy",  # H
)


@dataclass(frozen=True)
class LossResult:
    loss: Tensor  # scalar with gradient: this micro-batch's share of the step's loss
    sums_K: Tensor  # one sum per name in METRICS, float64, no gradient
    ratio_max: Tensor  # largest r, no gradient: take the maximum over ranks


def metric_means(sums_K: Tensor) -> dict[str, float]:
    """Means per token from sums that were added up over micro-batches and ranks; all 0 where there was no token."""
    tokens, *others = sums_K.tolist()
    return {"tokens": tokens} | {
        name: total / tokens if tokens else 0.0 for name, total in zip(METRICS[1:], others, strict=True)
    }


def grpo_loss(
    logprob_S: Tensor,
    behaviour_S: Tensor,
    advantage_S: Tensor,
    mask_S: Tensor,
    denominator: float,
    config: LossConfig,
    *,
    proximal_S: Tensor | None = None,
    reference_S: Tensor | None = None,
    entropy_S: Tensor | None = None,
) -> LossResult:
    """This micro-batch's share of the loss of one optimizer step.

    `logprob_S`: log π of the sampled tokens, with gradient. `behaviour_S`: log μ as the engine reported it.
    `advantage_S`: A, repeated over the tokens of its answer. `mask_S`: bool, True on answer tokens.
    `denominator`: D of `BatchTotals.denominator`. `proximal_S`: log π_p, for several steps on one batch.
    `reference_S`: needed when kl_coef > 0. `entropy_S`: H with gradient, needed when entropy_coef > 0.
    """
    _check_shapes(logprob_S, mask_S, behaviour_S, advantage_S, proximal_S, reference_S, entropy_S)
    if config.kl_coef and reference_S is None:
        raise ValueError(f"kl_coef is {config.kl_coef} but no reference log-probabilities were given")
    if config.entropy_coef and entropy_S is None:
        raise ValueError(f"entropy_coef is {config.entropy_coef} but no entropy was given")

    # Only tokens inside the mask exist from here on (shape N): what lies outside cannot reach a sum or a gradient.
    logprob_N, advantage_N = logprob_S[mask_S], advantage_S[mask_S].detach()
    behaviour_N = behaviour_S[mask_S].detach()
    proximal_N = behaviour_N if proximal_S is None else proximal_S[mask_S].detach()

    ratio_N = _exp(logprob_N - proximal_N)  # r = π/π_p
    weight_N, capped_N = _mismatch_weight(proximal_N - behaviour_N, config.mismatch_cap)
    loss_N = weight_N * _clipped(ratio_N, advantage_N, config)
    total = loss_N.sum()

    kl_N = torch.zeros_like(logprob_N)
    if reference_S is not None:
        kl_N = _kl(reference_S[mask_S].detach() - logprob_N, config.kl_estimator)
        if config.kl_coef:
            total = total + config.kl_coef * kl_N.sum()
    entropy_N = torch.zeros_like(logprob_N) if entropy_S is None else entropy_S[mask_S]
    if config.entropy_coef:
        total = total - config.entropy_coef * entropy_N.sum()

    with torch.no_grad():
        below_N, above_N = advantage_N < 0, advantage_N > 0
        delta_N = below_N & (ratio_N > config.delta) if config.delta is not None else torch.zeros_like(below_N)
        columns = (
            torch.ones_like(loss_N),
            loss_N,
            ratio_N,
            below_N & (ratio_N < 1 - config.clip_low),
            above_N & (ratio_N > 1 + config.clip_high),
            delta_N,
            _kl(logprob_N - behaviour_N, KlEstimator.K3),
            weight_N,
            capped_N,
            kl_N,
            entropy_N,
        )
        sums_K = torch.stack([column.sum(dtype=torch.float64) for column in columns])
        ratio_max = ratio_N.max() if ratio_N.numel() else ratio_N.new_zeros(())
    return LossResult(loss=total / denominator, sums_K=sums_K, ratio_max=ratio_max)


def _clipped(ratio_N: Tensor, advantage_N: Tensor, config: LossConfig) -> Tensor:
    bounded_N = ratio_N if config.delta is None else ratio_N.clamp(max=config.delta)  # min(r, δ)
    inner_N = ratio_N.clamp(1 - config.clip_low, 1 + config.clip_high)  # clip(r, 1-ε_low, 1+ε_high)
    return -torch.minimum(bounded_N * advantage_N, inner_N * advantage_N)


def _mismatch_weight(log_weight_N: Tensor, cap: float | None) -> tuple[Tensor, Tensor]:
    """(w, whether it was cut), both without gradient."""
    if cap is None:
        return torch.ones_like(log_weight_N), torch.zeros_like(log_weight_N, dtype=torch.bool)
    weight_N = _exp(log_weight_N)
    return weight_N.clamp(max=cap), weight_N > cap  # w = min(π_p/μ, C)


def _kl(x_N: Tensor, estimator: KlEstimator) -> Tensor:
    match estimator:
        case KlEstimator.K1:
            return -x_N
        case KlEstimator.K2:
            return x_N.square() / 2
        case KlEstimator.K3:
            return _exp(x_N) - x_N - 1


def _exp(x_N: Tensor) -> Tensor:
    return torch.exp(x_N.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX))


def _check_shapes(logprob_S: Tensor, mask_S: Tensor, *others: Tensor | None) -> None:
    if mask_S.dtype != torch.bool:
        raise ValueError(f"the mask has dtype {mask_S.dtype}, expected torch.bool")
    for tensor in (mask_S, *others):
        if tensor is not None and tensor.shape != logprob_S.shape:
            raise ValueError(
                f"a tensor of shape {tuple(tensor.shape)} beside log-probabilities of shape "
                f"{tuple(logprob_S.shape)}: all token tensors must have one shape, none is broadcast"
            )
