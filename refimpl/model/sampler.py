"""The next token, drawn so that a verifier can draw it again.

Gumbel-max: the argmax over the kept tokens of z + g, where z are the logits divided by the temperature and g is Gumbel
noise, is a draw from softmax(z). The noise is a pure function of (seed, position, token) (`refimpl.model.noise`), so
whoever has the logits can repeat the draw, and can say by how much any other token lost.

Order: float32, divide by the temperature, top-k mask, top-p mask, min-p mask, noise, argmax; the reported
log-probability is the log-softmax of the masked, scaled logits. Each filter keeps the tokens whose scaled logit reaches
a value, so all three together are one number a row: the cut-off.

Differs from the original (prime-rl 757b76862, patching vLLM): 1) the noise comes from a counter, not from a generator
with a state, so no draw depends on the draws before it; 2) tokens that tie with the last one kept are kept too, where a
sort decided; 3) min-token and repetition penalties are left to the caller, who has the history.

Shape legend: B sequences, V vocabulary, C chunks of CHUNK tokens, K candidates. `seeds_B`: one seed a sequence;
`positions_B`: how many tokens of the answer come before the one drawn here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from refimpl.model.noise import (
    GUMBEL_STREAM,
    IntArray,
    fill_words_kernel,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_table,
    noise_kernel,
)

__all__ = ["Sampling", "cutoffs", "gumbel_noise", "gumbel_noise_at", "race", "sample", "scale"]

CHUNK = 256  # tokens that are skipped or drawn together on the CPU
NOISE_MAX = 22.875  # no value of the noise is larger
NUCLEUS_GUESSES = (256, 4096)  # tokens sorted when looking for top-p, before a whole row is
TAIL = 16.0  # nats below the likeliest token where the impurity's sum ends
FEW = 8  # noise only for the kept tokens when these are fewer than 1/FEW of the vocabulary

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
    """The smallest scaled logit that is kept, by row (float32, [B]); -inf where nothing is filtered."""
    cut_B = torch.full_like(scaled_BV[:, 0], -math.inf)
    if not sampling.filtered:
        return cut_B
    vocabulary = scaled_BV.shape[1]
    if 0 < sampling.top_k < vocabulary:
        sorted_BK = scaled_BV.topk(sampling.top_k).values
        cut_B = sorted_BK[:, -1]
    if sampling.top_p < 1:
        if sampling.top_k == 0 or sampling.top_k >= vocabulary:
            cut_B = _nucleus(scaled_BV, torch.logsumexp(scaled_BV, dim=-1), sampling.top_p)
        else:
            cut_B = _nucleus_of_sorted(sorted_BK, torch.logsumexp(sorted_BK, dim=-1), sampling.top_p)[0]
    if sampling.min_p > 0:  # p ≥ min_p · p_max  ⇔  z ≥ z_max + ln min_p, whatever was masked before
        cut_B = torch.maximum(cut_B, scaled_BV.amax(dim=-1) + math.log(sampling.min_p))
    return cut_B


def _nucleus(scaled_BV: Tensor, logsumexp_B: Tensor, top_p: float) -> Tensor:
    """Top-p over all tokens. A sharp row's nucleus lies in its first few tokens: sort more of a row only if they do not
    suffice."""
    cut_B, open_B = torch.empty_like(logsumexp_B), torch.arange(len(logsumexp_B), device=logsumexp_B.device)
    for guess in (*NUCLEUS_GUESSES, scaled_BV.shape[1]):
        rows_BV = scaled_BV if len(open_B) == len(cut_B) else scaled_BV[open_B]
        sorted_BK = rows_BV.topk(min(guess, rows_BV.shape[1])).values
        cut_B[open_B], complete_B = _nucleus_of_sorted(sorted_BK, logsumexp_B[open_B], top_p)
        open_B = open_B[~complete_B]
        if len(open_B) == 0:
            break
    return cut_B


def _nucleus_of_sorted(sorted_BK: Tensor, logsumexp_B: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The last kept value of rows that fall, and whether `top_p` was reached: a token is kept while the probability of
    the tokens before it is below `top_p`, so the first always is."""
    mass_BK = (sorted_BK - logsumexp_B[:, None]).exp().cumsum(dim=-1)
    before_B = (mass_BK < top_p).sum(dim=-1, keepdim=True)
    last_B = before_B.clamp(max=sorted_BK.shape[1] - 1)
    return sorted_BK.gather(1, last_B)[:, 0], before_B[:, 0] < sorted_BK.shape[1]


def sample(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (tokens int64 [B], log-probabilities float32 [B]).

    The log-probability is that of the masked, scaled distribution; for greedy choice, of the raw one. Raises ValueError
    on logits that are not finite (-inf is allowed: a token that can not be chosen).
    """
    _check_rows(logits_BV, seeds_B, positions_B)
    scaled_BV = scale(logits_BV, sampling)
    cut_B = cutoffs(scaled_BV, sampling)
    tokens_B, _ = race(scaled_BV, cut_B, seeds_B, positions_B, sampling)
    logprobs_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0] - _logsumexp_kept(scaled_BV, cut_B, sampling)
    if not bool(logprobs_B.isfinite().all()):
        rows = (~logprobs_B.isfinite()).nonzero()[:, 0].tolist()
        raise ValueError(f"the logits of row {rows[0]} have no finite log-softmax; expected numbers, none NaN or +inf")
    return tokens_B, logprobs_B


def _check_rows(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor) -> None:
    if logits_BV.ndim != 2 or logits_BV.shape[1] == 0:
        raise ValueError(f"logits have the shape {tuple(logits_BV.shape)}; expected [B, V] with V ≥ 1")
    for name, ids in (("seeds", seeds_B), ("positions", positions_B)):
        if ids.dtype != torch.int64 or ids.shape != logits_BV.shape[:1]:
            raise ValueError(
                f"{name} are {ids.dtype} of shape {tuple(ids.shape)}; expected torch.int64, one for each of "
                f"{logits_BV.shape[0]} rows"
            )


def _logsumexp_kept(scaled_BV: Tensor, cut_B: Tensor, sampling: Sampling) -> Tensor:
    if not sampling.filtered:
        return torch.logsumexp(scaled_BV, dim=-1)
    if scaled_BV.device.type == "cpu":
        total_B = np.empty(scaled_BV.shape[0], dtype=np.float32)
        _logsumexp_kernel(scaled_BV.contiguous().numpy(), _chunk_tops(scaled_BV).numpy(), cut_B.numpy(), total_B)
        return torch.from_numpy(total_B)
    return torch.logsumexp(scaled_BV.masked_fill(scaled_BV < cut_B[:, None], -math.inf), dim=-1)


def _chunk_tops(scaled_BV: Tensor) -> Tensor:
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
        _impurity_kernel(scaled_BV.contiguous().numpy(), _chunk_tops(scaled_BV).numpy(), cut_B.numpy(), impurity_B)
        return torch.from_numpy(impurity_B)
    kept_BV = scaled_BV.masked_fill(scaled_BV < cut_B[:, None], -math.inf)
    return 1 - torch.softmax(kept_BV, dim=-1).square().sum(dim=-1)


@njit(cache=True)
def _impurity_kernel(scaled_BV: FloatArray, tops_BC: FloatArray, cut_B: FloatArray, impurity_B: FloatArray) -> None:
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


# --- the race: argmax of z + g over the kept tokens -------------------------------------------------------------------


def race(
    scaled_BV: Tensor, cut_B: Tensor, seeds_B: Tensor, positions_B: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor]:
    """The winner of each row and its noisy score: argmax and max of z + g over z ≥ cut-off (without g when greedy).

    A tie goes to the lowest token; a row that holds NaN or +inf has the score NaN. On the CPU a compiled kernel,
    elsewhere torch; equal results, bit for bit.
    """
    if sampling.greedy:
        best_B, winner_B = scaled_BV.max(dim=-1)
        return winner_B, best_B
    if scaled_BV.device.type == "cpu":
        return race_cpu(scaled_BV, cut_B, seeds_B, positions_B)
    return race_torch(scaled_BV, cut_B, seeds_B, positions_B)


def race_torch(scaled_BV: Tensor, cut_B: Tensor, seeds_B: Tensor, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """The race in torch operations, on any device: noise for the kept tokens only when they are few."""
    batch, vocabulary = scaled_BV.shape
    kept_BV = scaled_BV >= cut_B[:, None]
    broken_B = ~(scaled_BV.amax(dim=-1) < math.inf)
    count = int(kept_BV.sum(dim=-1).max()) if batch else 0
    if 0 < count * FEW < vocabulary:
        ids_BK = scaled_BV.topk(count).indices.sort(dim=-1).values
        noisy_BK = scaled_BV.gather(1, ids_BK) + gumbel_noise_at(seeds_B, positions_B, ids_BK)
        best_B, place_B = noisy_BK.masked_fill(~kept_BV.gather(1, ids_BK), -math.inf).max(dim=-1)
        return ids_BK.gather(1, place_B[:, None])[:, 0], best_B.masked_fill(broken_B, math.nan)
    noisy_BV = scaled_BV + gumbel_noise(seeds_B, positions_B, 0, vocabulary)
    best_B, winner_B = noisy_BV.masked_fill(~kept_BV, -math.inf).max(dim=-1)
    return winner_B, best_B.masked_fill(broken_B, math.nan)


def race_cpu(scaled_BV: Tensor, cut_B: Tensor, seeds_B: Tensor, positions_B: Tensor) -> tuple[Tensor, Tensor]:
    """The race by the compiled kernel."""
    batch = scaled_BV.shape[0]
    winner_B, best_B = np.zeros(batch, dtype=np.int64), np.full(batch, -np.inf, dtype=np.float32)
    scaled, tops, cut, seeds, positions = (
        rows.contiguous().numpy() for rows in (scaled_BV, _chunk_tops(scaled_BV), cut_B, seeds_B, positions_B)
    )
    _race_kernel(scaled, tops, cut, seeds, positions, gumbel_table(), winner_B, best_B)
    return torch.from_numpy(winner_B), torch.from_numpy(best_B)


@njit(cache=True)
def _race_kernel(
    scaled_BV: FloatArray,
    tops_BC: FloatArray,
    cut_B: FloatArray,
    seeds_B: IntArray,
    positions_B: IntArray,
    table: IntArray,
    winner_B: IntArray,
    best_B: FloatArray,
) -> None:
    """Draw bits only for chunks that can still win, and turn only bits that can still win into noise.

    With the best noisy score s so far and a chunk's largest z, a token of the chunk needs noise g ≥ s - z; g falls as
    its word w grows, so that is w ≤ 1 - exp(-exp(-(s - z))) ≤ exp(-(s - z)): one comparison of integers. The margin
    covers rounding, so no token that could win or tie is passed over.
    """
    words = np.empty(CHUNK, dtype=np.uint32)
    vocabulary = scaled_BV.shape[1]
    for b in range(scaled_BV.shape[0]):
        if not np.all(tops_BC[b] < np.inf):  # the top of a chunk that holds NaN is NaN
            best_B[b] = np.nan
            continue
        winner, best = 0, np.float32(-np.inf)
        first = int(np.argmax(tops_BC[b]))  # the likeliest chunk first: its winner rules most others out
        for turn in range(tops_BC.shape[1] + 1):
            chunk = first if turn == 0 else turn - 1
            top = tops_BC[b, chunk]
            if (turn > 0 and chunk == first) or top < cut_B[b] or top + np.float32(NOISE_MAX) < best:
                continue
            fill_words_kernel(words, chunk * CHUNK // 4, seeds_B[b], positions_B[b], GUMBEL_STREAM)
            highest = _highest_word(top, best)
            start = chunk * CHUNK
            for i in range(min(CHUNK, vocabulary - start)):
                if words[i] > highest or not scaled_BV[b, start + i] >= cut_B[b]:
                    continue
                noisy = scaled_BV[b, start + i] + noise_kernel(words[i], table)
                if noisy > best or (noisy == best and start + i < winner):
                    winner, best = start + i, noisy
                    highest = _highest_word(top, best)
        winner_B[b], best_B[b] = winner, best


@njit(cache=True)
def _highest_word(top: np.floating, best: np.floating) -> np.integer:
    """The largest 32-bit word whose noise may lift a token from `top` to `best`; a little more, never less."""
    needed = np.float64(best) - np.float64(top)
    needed -= 1e-3 + 1e-6 * (abs(np.float64(best)) + abs(np.float64(top)))
    if not needed > 0:  # also when nothing was drawn yet, or infinities met
        return np.int64(0xFFFFFFFF)
    return np.int64(np.exp(-needed) * 4294967296.0) + 1
