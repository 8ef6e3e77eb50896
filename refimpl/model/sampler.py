"""The next token, drawn so that a verifier can draw it again.

Gumbel-max: the argmax over the kept tokens of z + g, where z are the logits divided by the temperature and g is Gumbel
noise, is a draw from softmax(z). The noise is a pure function of (seed, position, token) (`refimpl.model.noise`), so
whoever has the logits can repeat the draw, and can say by how much any other token lost.

Order: float32, divide by the temperature, top-k mask, top-p mask, min-p mask, noise, argmax; the reported
log-probability is the log-softmax of the masked, scaled logits. `refimpl.model.filters` makes the masks.

Differs from the original (prime-rl 757b76862, patching vLLM): 1) the noise comes from a counter, not from a generator
with a state, so no draw depends on the draws before it; 2) tokens that tie with the last one kept are kept too, where a
sort decided; 3) min-token and repetition penalties are left to the caller, who has the history.

Shape legend: B sequences, V vocabulary, C chunks of CHUNK tokens, K candidates. `seeds_B`: one seed a sequence;
`positions_B`: how many tokens of the answer come before the one drawn here.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

from refimpl.model.filters import CHUNK, FloatArray, Sampling, chunk_tops, cutoffs, impurity, logsumexp_kept, scale
from refimpl.model.noise import (
    GUMBEL_STREAM,
    IntArray,
    fill_words_kernel,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_table,
    noise_kernel,
)

__all__ = ["Sampling", "cutoffs", "gumbel_noise", "gumbel_noise_at", "impurity", "race", "sample", "scale"]

NOISE_MAX = 22.875  # no value of the noise is larger
FEW = 8  # noise only for the kept tokens when these are fewer than 1/FEW of the vocabulary


def sample(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Draw one token a row: (tokens int64 [B], log-probabilities float32 [B]).

    The log-probability is that of the masked, scaled distribution; for greedy choice, of the raw one. Raises ValueError
    on logits that are not finite (-inf is allowed: a token that can not be chosen).
    """
    _check_rows(logits_BV, seeds_B, positions_B)
    scaled_BV = scale(logits_BV, sampling)
    cut_B = cutoffs(scaled_BV, sampling)
    tokens_B, _ = race(scaled_BV, cut_B, seeds_B, positions_B, sampling)
    logprobs_B = scaled_BV.gather(1, tokens_B[:, None])[:, 0] - logsumexp_kept(scaled_BV, cut_B, sampling)
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
        rows.contiguous().numpy() for rows in (scaled_BV, chunk_tops(scaled_BV), cut_B, seeds_B, positions_B)
    )
    race_kernel(scaled, tops, cut, seeds, positions, gumbel_table(), winner_B, best_B)
    return torch.from_numpy(winner_B), torch.from_numpy(best_B)


@njit(cache=True)
def race_kernel(
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
