"""Which tokens may be drawn at all: temperature, top-k, top-p and min-p, as one cut-off a row.

Each filter keeps the tokens whose scaled logit z = ℓ / T reaches some value, so all together are one number a row: what
lies at or above the cut-off is kept. That makes a filter cheap to apply (one comparison), and cheap to skip: a chunk of
the vocabulary whose largest z lies below the cut-off need not be looked at.

Order: top-k, then top-p among what that left, then min-p. Tokens that tie with the last one kept are kept too.

Shape legend: B rows, V vocabulary, C chunks of CHUNK tokens, K tokens in order of z.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

CHUNK = 256  # tokens that are skipped together on the CPU
TAIL = 16.0  # nats below the likeliest token where the impurity's sum ends
BINS_PER_NAT = 32  # by which the nucleus is found, from the likeliest token down to
SHALLOW, DEEP = 8, 24  # nats below it

FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. The values that switch a filter off are the defaults."""

    temperature: float = 1.0  # 0: always the likeliest token, no filter and no noise
    top_k: int = 0  # keep this many tokens; 0: all
    top_p: float = 1.0  # (0, 1]; keep the fewest tokens that hold this much probability; 1: all
    min_p: float = 0.0  # [0, 1]; keep tokens at least this likely, as a share of the likeliest; 0: all

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; expected a finite number, 0 or more")
        if isinstance(self.top_k, bool) or not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k!r}; expected a whole number, 0 (off) or more")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; expected a number in (0, 1]")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}; expected a number in [0, 1]")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filtered(self) -> bool:
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)


def scale(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """z = ℓ / T in float32 (ℓ itself when greedy)."""
    logits_BV = logits_BV.detach().float()
    return logits_BV if sampling.temperature in (0, 1) else logits_BV / sampling.temperature


def cutoffs(scaled_BV: Tensor, sampling: Sampling) -> Tensor:
    """The smallest scaled logit that is kept, by row (float32, [B]); -inf where nothing is filtered.

    Equal on all devices up to the rounding of the sum that top-p takes.
    """
    cut_B = torch.full_like(scaled_BV[:, 0], -math.inf)
    if not sampling.filtered:
        return cut_B
    vocabulary = scaled_BV.shape[1]
    if 0 < sampling.top_k < vocabulary:
        sorted_BK = scaled_BV.topk(sampling.top_k).values
        cut_B = sorted_BK[:, -1]
    if sampling.top_p < 1:
        if sampling.top_k == 0 or sampling.top_k >= vocabulary:
            cut_B = _nucleus(scaled_BV, sampling.top_p)
        else:
            cut_B = _nucleus_of_sorted(sorted_BK, sampling.top_p)
    if sampling.min_p > 0:  # p ≥ min_p · p_max  ⇔  z ≥ z_max + ln min_p, whatever was masked before
        cut_B = torch.maximum(cut_B, scaled_BV.amax(dim=-1) + math.log(sampling.min_p))
    return cut_B


def _nucleus(scaled_BV: Tensor, top_p: float) -> Tensor:
    """Top-p over all tokens: on the CPU without sorting the row."""
    if scaled_BV.device.type != "cpu":
        return _nucleus_of_sorted(scaled_BV.sort(dim=-1, descending=True).values, top_p)
    cut_B = np.empty(scaled_BV.shape[0], dtype=np.float32)
    logsumexp_B = torch.logsumexp(scaled_BV, dim=-1).numpy()
    nucleus_kernel(scaled_BV.contiguous().numpy(), chunk_tops(scaled_BV).numpy(), logsumexp_B, top_p, cut_B)
    return torch.from_numpy(cut_B)


def _nucleus_of_sorted(sorted_BK: Tensor, top_p: float) -> Tensor:
    """The last kept value of falling rows: a token is kept while the probability of the tokens before it is below
    `top_p`, so the first always is."""
    mass_BK = torch.softmax(sorted_BK, dim=-1).cumsum(dim=-1)
    last_B1 = (mass_BK < top_p).sum(dim=-1, keepdim=True).clamp(max=sorted_BK.shape[1] - 1)
    return sorted_BK.gather(1, last_B1)[:, 0]


@njit(cache=True)
def nucleus_kernel(
    scaled_BV: FloatArray, tops_BC: FloatArray, logsumexp_B: FloatArray, top_p: float, cut_B: FloatArray
) -> None:
    """Sum probabilities into bins of z, find the bin in which they reach `top_p`, and sort that bin's tokens only.

    A sharp row's nucleus lies within SHALLOW nats of its likeliest token, where few tokens are. A row whose tokens
    within DEEP nats do not reach `top_p`, or that is not finite, is kept whole.
    """
    for b in range(scaled_BV.shape[0]):
        top, log_total = np.float64(tops_BC[b].max()), np.float64(logsumexp_B[b])
        cut_B[b] = -np.inf
        if not np.isfinite(log_total):
            continue
        for depth in (SHALLOW, DEEP):
            mass, count = np.zeros(depth * BINS_PER_NAT + 1), np.zeros(depth * BINS_PER_NAT + 1, dtype=np.int64)
            for chunk in range(tops_BC.shape[1]):
                if top - tops_BC[b, chunk] <= depth:
                    for z in scaled_BV[b, chunk * CHUNK : (chunk + 1) * CHUNK]:
                        if top - z <= depth:
                            place = int((top - z) * BINS_PER_NAT)
                            mass[place] += np.exp(z - log_total)
                            count[place] += 1
            if mass.sum() >= top_p:
                cut_B[b] = _cut_in_bins(scaled_BV[b], tops_BC[b], top, log_total, top_p, mass, count)
                break


@njit(cache=True)
def _cut_in_bins(
    scaled_V: FloatArray,
    tops_C: FloatArray,
    top: float,
    log_total: float,
    top_p: float,
    mass: npt.NDArray[np.float64],
    count: npt.NDArray[np.int64],
) -> np.float32:
    """The z at which the sum from the top reaches `top_p`, which the bins together do."""
    reached, place = 0.0, 0
    while place < mass.size - 1 and reached + mass[place] < top_p:
        reached += mass[place]
        place += 1
    inside, found = np.empty(count[place], dtype=np.float32), 0
    for chunk in range(tops_C.size):
        if (top - tops_C[chunk]) * BINS_PER_NAT < place + 1:
            for z in scaled_V[chunk * CHUNK : (chunk + 1) * CHUNK]:
                if place <= (top - z) * BINS_PER_NAT < place + 1:
                    inside[found] = z
                    found += 1
    cut = np.float32(top)
    for z in np.sort(inside)[::-1]:
        cut = z
        reached += np.exp(z - log_total)
        if reached >= top_p:
            break
    return cut


def logsumexp_kept(scaled_BV: Tensor, cut_B: Tensor, sampling: Sampling) -> Tensor:
    """Log-sum-exp over the kept tokens, float32 [B]."""
    if not sampling.filtered:
        return torch.logsumexp(scaled_BV, dim=-1)
    if scaled_BV.device.type == "cpu":
        total_B = np.empty(scaled_BV.shape[0], dtype=np.float32)
        _logsumexp_kernel(scaled_BV.contiguous().numpy(), chunk_tops(scaled_BV).numpy(), cut_B.numpy(), total_B)
        return torch.from_numpy(total_B)
    return torch.logsumexp(scaled_BV.masked_fill(scaled_BV < cut_B[:, None], -math.inf), dim=-1)


def chunk_tops(scaled_BV: Tensor) -> Tensor:
    """The largest scaled logit of each CHUNK consecutive tokens, [B, C]; the last chunk may be short."""
    batch, vocabulary = scaled_BV.shape
    whole = vocabulary // CHUNK
    tops_BC = scaled_BV.new_empty((batch, -(-vocabulary // CHUNK)))
    tops_BC[:, :whole] = scaled_BV[:, : whole * CHUNK].unflatten(1, (whole, CHUNK)).amax(dim=-1)
    if vocabulary % CHUNK:
        tops_BC[:, whole] = scaled_BV[:, whole * CHUNK :].amax(dim=-1)
    return tops_BC


@njit(cache=True)
def _logsumexp_kernel(scaled_BV: FloatArray, tops_BC: FloatArray, cut_B: FloatArray, total_B: FloatArray) -> None:
    """Log-sum-exp over z ≥ cut-off; looks only into chunks that hold a kept token."""
    for b in range(scaled_BV.shape[0]):
        top, total = np.float64(tops_BC[b].max()), 0.0
        for chunk in range(tops_BC.shape[1]):
            if tops_BC[b, chunk] >= cut_B[b]:
                for z in scaled_BV[b, chunk * CHUNK : (chunk + 1) * CHUNK]:
                    if z >= cut_B[b]:
                        total += np.exp(np.float64(z) - top)
        total_B[b] = top + np.log(total)


def impurity(scaled_BV: Tensor, cut_B: Tensor) -> Tensor:
    """1 - Σ p² of the kept tokens' distribution (float32, [B]): the chance that two draws differ.

    It is the density at 0 of the race's lead: with p the winner's probability, the winner leads by more than d with
    probability Σ p / (p + e^d (1 - p)), whose slope at d = 0 is -Σ p (1 - p). So it says how likely a near tie was.
    """
    if scaled_BV.device.type == "cpu":
        impurity_B = np.empty(scaled_BV.shape[0], dtype=np.float32)
        impurity_kernel(scaled_BV.contiguous().numpy(), chunk_tops(scaled_BV).numpy(), cut_B.numpy(), impurity_B)
        return torch.from_numpy(impurity_B)
    kept_BV = scaled_BV.masked_fill(scaled_BV < cut_B[:, None], -math.inf)
    return 1 - torch.softmax(kept_BV, dim=-1).square().sum(dim=-1)


@njit(cache=True)
def impurity_kernel(scaled_BV: FloatArray, tops_BC: FloatArray, cut_B: FloatArray, impurity_B: FloatArray) -> None:
    """Leaves out tokens e^-TAIL times as likely as the likeliest: together less than 0.02 of 152 064."""
    for b in range(scaled_BV.shape[0]):
        top, total, squares = np.float64(tops_BC[b].max()), 0.0, 0.0
        cut = max(np.float64(cut_B[b]), top - TAIL)
        for chunk in range(tops_BC.shape[1]):
            if tops_BC[b, chunk] >= cut:
                for z in scaled_BV[b, chunk * CHUNK : (chunk + 1) * CHUNK]:
                    if z >= cut:
                        share = np.exp(np.float64(z) - top)
                        total += share
                        squares += share * share
        impurity_B[b] = max(0.0, 1.0 - squares / (total * total))
