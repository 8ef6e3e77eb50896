"""What the verifier's own probabilities say about an answer, without any commitment or seed.

Three cheap tests on one prefill. They need no cooperation and prove little alone; each closes a hole that commitments
to activations leave open.

- *Shape*: tokens that the model sampled have, under it, mostly high probabilities. Tokens that a smaller model wrote
  and the right one merely prefilled show a second heap near 0.
- *Termination*: a prover who stops early saves compute. So an answer ends at its length limit, or with an end token
  that the model itself would have been likely enough to choose.
- *Exact matches*: under seeded sampling, the share of tokens that equal the verifier's own draw.

Each gives True (passed), False (rejected) or None (no verdict), and a reason.

References: the INTELLECT-2 validator (token sampling and termination checks; end token above 0.1); GRAIL, a subnet that
uses the same tests in public, for the figures of the shape test and a later end-token limit of 0.02.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

FloatArray = npt.NDArray[np.float64]

EOS_PROBABILITY_INTELLECT_2 = 0.1
EOS_PROBABILITY_GRAIL = 0.02


def token_probabilities(logits_NV: Tensor, tokens_N: Tensor, temperature: float = 1.0) -> Tensor:
    """softmax(ℓ / T)[y] of each claimed token (float32 [N]); 0 for an id outside the vocabulary."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature is {temperature}; expected a positive number (1 for a greedy answer)")
    known_N = (tokens_N >= 0) & (tokens_N < logits_NV.shape[1])
    chosen_N = logits_NV.gather(1, torch.where(known_N, tokens_N, 0)[:, None])[:, 0].float()
    scaled_NV = logits_NV.float() / temperature if temperature != 1 else logits_NV.float()
    log_probability_N = chosen_N / temperature - torch.logsumexp(scaled_NV, dim=-1)
    return torch.where(known_N, log_probability_N.exp(), 0.0)


# --- shape ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ShapeLimits:
    """GRAIL's figures. They suit large models at T ≈ 0.6–1; small models are less sure of themselves: calibrate."""

    tokens_min: int = 8  # fewer give no verdict
    median_min: float = 0.20  # a median at or below is rejected
    low_quantile: float = 0.10
    low_quantile_min: float = 0.20  # this quantile at or below, together with two heaps, is rejected
    bimodality_max: float = 0.58  # a coefficient at or above counts as two heaps (uniform: 5/9; two points: 1)

    def __post_init__(self) -> None:
        if self.tokens_min < 1:
            raise ValueError(f"tokens_min is {self.tokens_min}; expected 1 or more")
        for name in ("median_min", "low_quantile", "low_quantile_min", "bimodality_max"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number in [0, 1]")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What the shape test looks at."""

    tokens: int
    median: float
    low_quantile: float
    bimodality: float


def bimodality(values: npt.ArrayLike) -> float:
    """Sarle's coefficient (skewness² + 1) / kurtosis, from population moments, kurtosis not in excess; in (0, 1].

    Values that are all equal have skewness 0 and kurtosis 3, hence 1/3.
    """
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    deviation = x - x.mean()
    variance = float(np.mean(deviation**2))
    if variance <= 1e-24:
        return 1 / 3
    skewness = float(np.mean(deviation**3)) / variance**1.5
    kurtosis = float(np.mean(deviation**4)) / variance**2
    return (skewness**2 + 1) / kurtosis


def shape_of(probabilities_T: npt.ArrayLike, limits: ShapeLimits | None = None) -> Shape:
    """Median, low quantile and bimodality of one answer's token probabilities; NaN when there are none."""
    limits = limits or ShapeLimits()
    p = np.asarray(probabilities_T, dtype=np.float64).reshape(-1)
    if not np.all((p >= 0) & (p <= 1 + 1e-6)):
        raise ValueError("probabilities must lie in [0, 1], with no NaN among them")
    if len(p) == 0:
        return Shape(tokens=0, median=math.nan, low_quantile=math.nan, bimodality=math.nan)
    return Shape(
        tokens=len(p),
        median=float(np.median(p)),
        low_quantile=float(np.quantile(p, limits.low_quantile)),
        bimodality=bimodality(p),
    )


def shape_test(probabilities_T: npt.ArrayLike, limits: ShapeLimits | None = None) -> tuple[bool | None, str]:
    """Does the answer look like the model's own samples? `probabilities_T`: of its tokens, under the true model."""
    limits = limits or ShapeLimits()
    shape = shape_of(probabilities_T, limits)
    if shape.tokens < limits.tokens_min:
        return None, f"{shape.tokens} tokens; a verdict needs {limits.tokens_min}"
    if shape.median <= limits.median_min:
        return False, f"median token probability {shape.median:.3f}; expected above {limits.median_min}"
    if shape.low_quantile <= limits.low_quantile_min and shape.bimodality >= limits.bimodality_max:
        return False, (
            f"two heaps of token probabilities: {limits.low_quantile:.0%} quantile {shape.low_quantile:.3f} (at most "
            f"{limits.low_quantile_min}) with bimodality {shape.bimodality:.3f} (at least {limits.bimodality_max})"
        )
    return True, f"median token probability {shape.median:.3f}, bimodality {shape.bimodality:.3f}"


# --- termination ----------------------------------------------------------------------------------------------------


def termination_test(
    tokens_T: Collection[int],
    eos_tokens: Collection[int],
    eos_probability: float,
    tokens_max: int,
    eos_probability_min: float = EOS_PROBABILITY_INTELLECT_2,
) -> tuple[bool | None, str]:
    """Did the answer end where the model ends it, or at the limit of `tokens_max`?

    `eos_probability`: what the verifier's model gave the last token, at T = 1 or as sampled. None only when it is
    not a number, which is the verifier's own failure.
    """
    if tokens_max < 1:
        raise ValueError(f"tokens_max is {tokens_max}; expected 1 or more")
    tokens = list(tokens_T)
    if len(tokens) > tokens_max:
        return False, f"{len(tokens)} tokens; at most {tokens_max} were asked for"
    early = next((t for t, token in enumerate(tokens[:-1]) if token in eos_tokens), None)
    if early is not None:
        return False, f"goes on after the end token at position {early}"
    if len(tokens) == tokens_max:
        return True, "ended at the length limit"
    if not tokens or tokens[-1] not in eos_tokens:
        return False, f"stopped after {len(tokens)} of {tokens_max} tokens without an end token"
    if math.isnan(eos_probability):
        return None, "the end token's probability is not a number"
    if eos_probability <= eos_probability_min:
        return False, f"end token of probability {eos_probability:.4f}; expected above {eos_probability_min}"
    return True, f"end token of probability {eos_probability:.3f}"


# --- exact matches --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MatchLimits:
    """Honest implementations with one seed agree on more than 98 % of tokens (DiFR); leave room below."""

    rate_min: float = 0.90
    tokens_min: int = 16

    def __post_init__(self) -> None:
        if not 0 <= self.rate_min <= 1 or self.tokens_min < 1:
            raise ValueError(f"{self}; expected rate_min in [0, 1] and tokens_min of 1 or more")


def match_rate(claimed_T: Tensor, redrawn_T: Tensor) -> float:
    """Share of claimed tokens that equal the verifier's own draws; 1 for an empty answer."""
    if claimed_T.shape != redrawn_T.shape:
        raise ValueError(
            f"{tuple(claimed_T.shape)} claimed and {tuple(redrawn_T.shape)} redrawn tokens; expected equal"
        )
    return float((claimed_T == redrawn_T).double().mean()) if claimed_T.numel() else 1.0


def match_test(claimed_T: Tensor, redrawn_T: Tensor, limits: MatchLimits | None = None) -> tuple[bool | None, str]:
    """Are enough tokens the ones that the seed demands?"""
    limits = limits or MatchLimits()
    rate, count = match_rate(claimed_T, redrawn_T), claimed_T.numel()
    if count < limits.tokens_min:
        return None, f"{count} tokens; a verdict needs {limits.tokens_min}"
    if rate < limits.rate_min:
        return False, f"{rate:.1%} of tokens match the seed; at least {limits.rate_min:.1%} must"
    return True, f"{rate:.1%} of tokens match the seed"
