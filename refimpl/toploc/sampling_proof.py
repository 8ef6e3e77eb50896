"""Was each token the one that the seed demands? One prefill answers for a whole sequence.

A commitment to activations proves that a forward pass was done, not that its logits chose the tokens: text of a cheap
model, prefilled by the right one, passes. With reproducible sampling the seed admits one token at each position, so
the verifier prefills prompt and answer, makes the same noise again and asks how far the claimed token is from winning:

    margin_t = max_{v ∈ S} (ℓ_v + T·g_v) - (ℓ_y + T·g_y)    ≥ 0, and 0 exactly when the claimed token y wins
             = +inf                                          when y is outside S, the tokens kept by top-k, top-p, min-p

with the verifier's logits ℓ, the temperature T and Gumbel noise g. Honest provers lose near ties only, by as much as
their logits differ from the verifier's.

Unit: logits. The noise is scaled by T, not the logits by 1/T, so that the same numerical noise gives the same margin at
every temperature; divide by T for units of the noise. At T = 0 it is the distance from the largest logit.

For small honest noise the mean margin can be said beforehand: with logits that differ by independent noise of standard
deviation σ, and p the distribution the token was drawn from, it is h · σ² / (2T) with h = 1 - Σ p², the *exposure*.

A margin is clipped before it is averaged: otherwise one token that falls outside S, as happens to honest provers at the
edge of the nucleus, would decide alone. The mean over the sequence is the score; larger is worse.

At the edge of S honest provers are punished hard by the infinite margin, for the cut moves with the logits. With
`outside="distance"` a token outside S has the margin T·(cut-off - z_y) + max(0, the margin above) instead: how much the
logits would have to move to let it in and let it win. A token far outside is clipped as before.

Differs from the source: 1) noise from `refimpl.model.noise`; 2) a token that is no token at all (negative, past the
vocabulary) has an infinite margin too; 3) `outside="distance"` is ours, and not the default.

Shape legend: N positions, of one or many sequences, one after another; V vocabulary.

Reference: DiFR (arXiv 2511.20621), for the margin, its clipping at 0.5 and the mean over tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from refimpl.model.sampler import Sampling, cutoffs, gumbel_noise_at, impurity, race, scale

CLIP = 0.5  # logits
ROWS_AT_ONCE, ROWS_AT_ONCE_CPU = 512, 32  # bounds the float32 copies of the logits; on a CPU, to what its caches hold

Outside = Literal["infinite", "distance"]


@dataclass(frozen=True, kw_only=True)
class SequenceScore:
    """What one sequence's margins say. A sequence without tokens has score 0 and match rate 1, and proves nothing."""

    tokens: int
    score: float  # mean clipped margin, logits
    match_rate: float  # share of tokens that are exactly the one the seed demands
    outside: int  # tokens outside the kept set (infinite margins)


@dataclass(frozen=True, kw_only=True)
class SamplingLimits:
    """When a sequence's sampling is rejected. Calibrate `score_max` on honest noise: it depends on the model."""

    score_max: float = 0.02  # mean clipped margin, logits
    match_rate_min: float = 0.0  # 0: not looked at; honest implementations reach about 0.98
    tokens_min: int = 16  # fewer give no verdict

    def __post_init__(self) -> None:
        if not self.score_max >= 0:
            raise ValueError(f"score_max is {self.score_max}; expected 0 or more logits")
        if not 0 <= self.match_rate_min <= 1:
            raise ValueError(f"match_rate_min is {self.match_rate_min}; expected a number in [0, 1]")
        if self.tokens_min < 1:
            raise ValueError(f"tokens_min is {self.tokens_min}; expected 1 or more")


def margins(
    logits_NV: Tensor,
    tokens_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sampling: Sampling,
    outside: Outside = "infinite",
) -> Tensor:
    """How far each claimed token is from winning its race (float32 [N], logits, +inf outside the kept set).

    `logits_NV`: the verifier's, row n from everything before token n. `seeds_N`, `positions_N`: as the prover sampled.
    Raises ValueError when the logits, which are the verifier's own, hold NaN or +inf.
    """
    return margins_and_exposures(logits_NV, tokens_N, seeds_N, positions_N, sampling, outside, exposures=False)[0]


def margins_and_exposures(
    logits_NV: Tensor,
    tokens_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sampling: Sampling,
    outside: Outside = "infinite",
    *,
    exposures: bool = True,
) -> tuple[Tensor, Tensor]:
    """`margins`, and each position's exposure to honest noise: h = 1 - Σ p² (1 when greedy or not asked for).

    A position whose token is nearly certain has no near ties to lose; for small noise the expected honest margin is
    proportional to h. Known before the noise is drawn, so a test may allow each token the mean μ0 · h.
    """
    if outside not in ("infinite", "distance"):
        raise ValueError(f"outside is {outside!r}; expected 'infinite' or 'distance'")
    step = ROWS_AT_ONCE_CPU if logits_NV.device.type == "cpu" else ROWS_AT_ONCE
    margin_N = torch.empty(len(tokens_N), dtype=torch.float32, device=logits_NV.device)
    exposure_N = torch.ones_like(margin_N)
    for start in range(0, len(tokens_N), step):
        rows = slice(start, start + step)
        scaled_NV = scale(logits_NV[rows], sampling)
        cut_N = cutoffs(scaled_NV, sampling)
        margin_N[rows] = _margins_of_rows(
            scaled_NV, cut_N, tokens_N[rows], seeds_N[rows], positions_N[rows], sampling, outside
        )
        if exposures and not sampling.greedy:
            exposure_N[rows] = impurity(scaled_NV, cut_N)
    return margin_N, exposure_N


def _margins_of_rows(
    scaled_NV: Tensor,
    cut_N: Tensor,
    tokens_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sampling: Sampling,
    outside: Outside,
) -> Tensor:
    _, best_N = race(scaled_NV, cut_N, seeds_N, positions_N, sampling)
    if not bool(best_N.isfinite().all()):
        raise ValueError("the verifier's logits hold NaN or +inf, or a row of -inf; expected finite numbers")
    known_N = (tokens_N >= 0) & (tokens_N < scaled_NV.shape[1])
    ids_N1 = torch.where(known_N, tokens_N, 0)[:, None]
    claimed_N = scaled_NV.gather(1, ids_N1)[:, 0]
    beyond_N = cut_N - claimed_N  # > 0: outside the kept set
    if not sampling.greedy:
        claimed_N = claimed_N + gumbel_noise_at(seeds_N, positions_N, ids_N1)[:, 0]  # z_y + g_y
    unit = 1.0 if sampling.greedy else sampling.temperature  # ℓ + T·g = T·(z + g)
    margin_N = unit * (best_N - claimed_N)
    if outside == "distance":
        outer_N = unit * beyond_N + margin_N.clamp(min=0)
    else:
        outer_N = torch.full_like(margin_N, math.inf)
    margin_N = torch.where(beyond_N > 0, outer_N, margin_N)
    return torch.where(known_N, margin_N, math.inf)


def honest_mean(sigma: float, temperature: float) -> float:
    """σ² / (2T): the mean margin, in logits, of honest tokens at exposure 1, when prover's and verifier's logits differ
    by independent noise of standard deviation σ.

    The winner leads by less than d logits with probability h·d/T for small d; it is overtaken when the noise of two
    logits, D ~ N(0, 2σ²), exceeds its lead: ∫ d · P(D > d) · h/T dd = h/T · E[max(D, 0)²] / 2 = h · σ² / (2T).
    """
    return sigma * sigma / (2 * temperature)


def clipped(margins_N: Tensor, clip: float = CLIP) -> Tensor:
    """min(margin, clip), infinite ones included: numbers in [0, clip]."""
    if not 0 < clip < math.inf:
        raise ValueError(f"clip is {clip}; expected a positive, finite number of logits")
    return margins_N.clamp(max=clip)


def score_sequences(margins_N: Tensor, lengths: Sequence[int], clip: float = CLIP) -> list[SequenceScore]:
    """One score for each of the sequences that lie one after another in `margins_N`."""
    if sum(lengths) != len(margins_N) or min(lengths, default=0) < 0:
        raise ValueError(f"lengths {list(lengths)[:8]} do not add up to the {len(margins_N)} margins given")
    scores = []
    for part in margins_N.split(list(lengths)):
        count = len(part)
        scores.append(
            SequenceScore(
                tokens=count,
                score=float(clipped(part, clip).double().mean()) if count else 0.0,
                match_rate=float((part == 0).double().mean()) if count else 1.0,
                outside=int(part.isinf().sum()),
            )
        )
    return scores


def verify_sampling(
    logits_TV: Tensor,
    tokens_T: Tensor,
    seed: int,
    sampling: Sampling,
    *,
    first_position: int = 0,
    clip: float = CLIP,
    outside: Outside = "infinite",
) -> SequenceScore:
    """Score one answer: row t of the verifier's logits chose token t of the answer under `seed`."""
    count, device = len(tokens_T), logits_TV.device
    seeds_T = torch.full((count,), seed, dtype=torch.int64, device=device)
    positions_T = torch.arange(first_position, first_position + count, device=device)
    margins_T = margins(logits_TV, tokens_T, seeds_T, positions_T, sampling, outside)
    return score_sequences(margins_T, [count], clip)[0]


def judge(score: SequenceScore, limits: SamplingLimits) -> tuple[bool | None, str]:
    """(True: accepted, False: rejected, None: too few tokens to say), with the reason."""
    if score.tokens < limits.tokens_min:
        return None, f"{score.tokens} tokens; a verdict needs {limits.tokens_min}"
    if score.score > limits.score_max:
        return False, f"mean clipped margin {score.score:.4f} logits; at most {limits.score_max:.4f} is allowed"
    if score.match_rate < limits.match_rate_min:
        return False, f"{score.match_rate:.1%} of tokens match the seed; at least {limits.match_rate_min:.1%} must"
    return True, f"mean clipped margin {score.score:.4f} logits"
