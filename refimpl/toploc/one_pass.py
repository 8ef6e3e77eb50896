"""All that a verifier reads from its logits, in one pass over them: they are the large thing about verifying.

Margin and exposure (`sampling_proof`), the probability of each claimed token and the probability that the text ends
there (`likelihood`) want few numbers of a row: its largest logit, its sum of exponentials, its nucleus. Logits in bf16
have 65 536 values at most, so their exponentials are looked up, not computed; no float32 copy of the vocabulary is
made; only tokens near the top are looked at one by one, and noise is drawn for those of the nucleus alone.

Whatever is not bf16 on a CPU, and rules with top-k, go the long way round, by the definitions; tests hold the two
equal.

Shape legend: N positions, of one or many answers; V vocabulary; C chunks of it; D hidden.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

from refimpl.model.filters import CHUNK, DEEP, SHALLOW, TAIL, FloatArray, Sampling, impurity_kernel
from refimpl.model.noise import (
    GUMBEL_STREAM,
    IntArray,
    fill_words_kernel,
    gumbel_noise_at,
    gumbel_table,
    noise_kernel,
)
from refimpl.model.sampler import race_kernel
from refimpl.toploc.sampling_proof import margins_and_exposures

ROWS = 256  # of logits made at a time: enough that the head's weights are not read too often
DEEP_ENOUGH = 600.0  # nats below the block's largest logit where a float64 exponential is still a number

DoubleArray = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What the logits say, a number a position."""

    margins: DoubleArray  # logits; "distance" outside the kept set
    exposures: DoubleArray  # in [0, 1]
    probabilities: DoubleArray  # of the claimed token, at the rule's temperature (1 for a greedy one), unfiltered
    end_probabilities: DoubleArray  # that an end token comes here, likewise

    def part(self, start: int, stop: int) -> Reading:
        """The same of positions `start` to `stop` - 1."""
        rows = slice(start, stop)
        return Reading(
            margins=self.margins[rows],
            exposures=self.exposures[rows],
            probabilities=self.probabilities[rows],
            end_probabilities=self.end_probabilities[rows],
        )


NOTHING = Reading(margins=np.zeros(0), exposures=np.zeros(0), probabilities=np.zeros(0), end_probabilities=np.zeros(0))


def read(
    logits_of: Callable[[int, int], Tensor],
    tokens_N: Tensor,
    seeds_N: Tensor,
    positions_N: Tensor,
    sampling: Sampling,
    ends: Sequence[int],
) -> Reading:
    """`logits_of(start, stop)`: those rows in the model's dtype. Raises ValueError when they are not finite."""
    columns: list[DoubleArray] = []
    for start in range(0, len(tokens_N), ROWS):
        rows = slice(start, start + ROWS)
        logits_NV = logits_of(start, min(start + ROWS, len(tokens_N)))
        fits = logits_NV.dtype == torch.bfloat16 and logits_NV.device.type == "cpu" and sampling.top_k == 0
        found = None
        if fits and not sampling.greedy:
            found = _quick(logits_NV, tokens_N[rows], seeds_N[rows], positions_N[rows], sampling, ends)
        if found is None:
            found = _plain(logits_NV, tokens_N[rows], seeds_N[rows], positions_N[rows], sampling, ends)
        columns.append(found)
    if not columns:
        return NOTHING
    whole = np.concatenate(columns, axis=1)
    return Reading(
        margins=whole[0],
        exposures=whole[1],
        probabilities=np.clip(whole[2], 0.0, 1.0),
        end_probabilities=np.clip(whole[3], 0.0, 1.0),
    )


class Replayed(Protocol):
    """What `TorchEngine.replay` gives of one answer."""

    @property
    def hidden(self) -> Tensor:
        """[n, D], in the model's dtype."""
        ...

    @property
    def tokens(self) -> Tensor:
        """int64 [n]."""
        ...

    @property
    def model(self) -> Any:
        """Has `logits` and `config.eos_ids`."""
        ...


def read_replays(replays: Sequence[Replayed], seeds: Sequence[int], sampling: Sampling) -> list[Reading]:
    """`read` over all answers of a batch together, since the head's weights are read once a block of rows."""
    counts = [len(replay.tokens) for replay in replays]
    if not sum(counts):
        return [NOTHING] * len(replays)
    model = replays[0].model
    hidden_ND = torch.cat([replay.hidden for replay in replays])
    tokens_N = torch.cat([replay.tokens for replay in replays])
    seeds_N = torch.cat([torch.full_like(one.tokens, seed) for one, seed in zip(replays, seeds, strict=True)])
    places_N = torch.cat([torch.arange(count, device=tokens_N.device) for count in counts])

    def logits_of(start: int, stop: int) -> Tensor:
        with torch.no_grad():
            logits_NV: Tensor = model.logits(hidden_ND[start:stop])
        return logits_NV

    whole = read(logits_of, tokens_N, seeds_N, places_N, sampling, sorted(model.config.eos_ids))
    stops = np.cumsum(counts).tolist()
    return [whole.part(stop - count, stop) for count, stop in zip(counts, stops, strict=True)]


def _plain(
    logits_NV: Tensor, tokens_N: Tensor, seeds_N: Tensor, positions_N: Tensor, sampling: Sampling, ends: Sequence[int]
) -> DoubleArray:
    """[4, N], by the definitions."""
    logits_NV = logits_NV.float()
    margin_N, exposure_N = margins_and_exposures(logits_NV, tokens_N, seeds_N, positions_N, sampling, "distance")
    scaled_NV = logits_NV / (sampling.temperature or 1.0)
    log_norm_N = scaled_NV.logsumexp(-1)
    known_N = (tokens_N >= 0) & (tokens_N < logits_NV.shape[1])
    chosen_N = (scaled_NV.gather(1, torch.where(known_N, tokens_N, 0)[:, None])[:, 0] - log_norm_N).exp()
    end_N = (scaled_NV[:, list(ends)] - log_norm_N[:, None]).exp().sum(-1)
    columns = (margin_N, exposure_N, torch.where(known_N, chosen_N, 0.0), end_N)
    return np.stack([column.double().cpu().numpy() for column in columns])


def _quick(
    logits_NV: Tensor, tokens_N: Tensor, seeds_N: Tensor, positions_N: Tensor, sampling: Sampling, ends: Sequence[int]
) -> DoubleArray | None:
    """[4, N] by the compiled kernel; None when its tables do not reach so far."""
    count, vocabulary = logits_NV.shape
    known_N = (tokens_N >= 0) & (tokens_N < vocabulary)
    ids_N = torch.where(known_N, tokens_N, 0)
    noise_N = gumbel_noise_at(seeds_N, positions_N, ids_N[:, None])[:, 0].numpy()
    bits_NV = logits_NV.contiguous().view(torch.int16).numpy()  # numpy has no bf16
    values = _values(np.float32(sampling.temperature))
    tops_NC = np.empty((count, -(-vocabulary // CHUNK)), dtype=np.float32)
    if not _find_tops(bits_NV, values, tops_NC):
        raise ValueError("the verifier's logits hold NaN or +inf, or a row of -inf; expected finite numbers")
    top_N = tops_NC.max(axis=1)
    reference = float(top_N.max())
    if not reference - float(top_N.min()) < DEEP_ENOUGH:
        return None
    with np.errstate(invalid="ignore", over="ignore"):
        z = values.astype(np.float64) - reference
        exponentials = np.where(z <= 0, np.exp(z), 0.0)
    out_N4 = np.empty((count, 4))
    _read_kernel(
        bits_NV.view(np.uint16),
        tops_NC,
        values,
        exponentials,
        reference,
        ids_N.numpy(),
        seeds_N.numpy(),
        positions_N.numpy(),
        noise_N,
        np.array(sorted(ends), dtype=np.int64),
        np.float32(sampling.temperature),
        sampling.top_p,
        math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf,
        gumbel_table(),
        out_N4,
    )
    out_N4[~known_N.numpy(), 0] = math.inf
    out_N4[~known_N.numpy(), 2] = 0.0
    return out_N4.T


@lru_cache(maxsize=8)
def _values(temperature: np.float32) -> FloatArray:
    """z = ℓ / T in float32 of every bf16 number, by its bits."""
    with np.errstate(all="ignore"):
        return (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32) / temperature


@njit(cache=True)
def _find_tops(bits_NV: npt.NDArray[np.int16], values: FloatArray, tops_NC: FloatArray) -> bool:
    """The largest z of each chunk; False when a row holds NaN or +inf, or nothing but -inf.

    By whole numbers that are ordered as the bf16 numbers are: a negative one's lower bits are turned round. Compilers
    keep a maximum of floats in order, for NaN's sake, one after another; this becomes a vector instruction.
    """
    vocabulary = bits_NV.shape[1]
    infinity, below = np.int16(0x7F80), np.int16(-0x7F81)  # +inf and -inf in that order; NaN lies beyond them
    for n in range(bits_NV.shape[0]):
        highest = below
        for chunk in range(tops_NC.shape[1]):
            top, bottom = np.int16(-0x8000), np.int16(0x7FFF)
            for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, vocabulary)):
                value = bits_NV[n, i]
                ordered = np.int16(value ^ np.int16(np.int16(value >> np.int16(15)) & np.int16(0x7FFF)))
                top, bottom = max(top, ordered), min(bottom, ordered)
            if top >= infinity or bottom < below:
                return False
            highest = max(highest, top)
            bits = np.int64(top) if top >= 0 else (np.int64(top) ^ 0x7FFF) & 0xFFFF
            tops_NC[n, chunk] = values[bits]
        if highest == below:
            return False
    return True


@njit(cache=True)
def _read_kernel(
    bits_NV: npt.NDArray[np.uint16],
    tops_NC: FloatArray,
    values: FloatArray,
    exponentials: DoubleArray,
    reference: float,
    ids_N: IntArray,
    seeds_N: IntArray,
    positions_N: IntArray,
    noise_N: FloatArray,
    ends: IntArray,
    temperature: np.floating,
    top_p: float,
    log_min_p: float,
    table: IntArray,
    out_N4: DoubleArray,
) -> None:
    """Margin, exposure, probability of the claimed token, probability of an end."""
    vocabulary = bits_NV.shape[1]
    near, near_z = np.empty(vocabulary, np.int64), np.empty(vocabulary, np.float32)
    row = np.empty((1, vocabulary if top_p == 1 else 0), np.float32)
    for n in range(bits_NV.shape[0]):
        total, top = _sum_of(exponentials, bits_NV[n]), tops_NC[n].max()
        least = np.float32(top + np.float32(log_min_p))
        found, cut = 0, np.float32(-np.inf)
        for depth in (SHALLOW, DEEP):
            if top_p < 1 and found == 0:
                found = _near_top(bits_NV[n], tops_NC[n], values, top - np.float32(depth), near, near_z)
                cut = _cut_of(bits_NV[n], near, near_z, found, exponentials, top_p * total)
                found = found if cut > -np.inf else 0
        cut = max(cut, least)
        if found:
            best = _race_few(near, near_z, found, cut, seeds_N[n], positions_N[n], table)
            impure = _impurity_few(near_z, found, cut, top)
        else:
            if row.size == 0:
                row = np.empty((1, vocabulary), np.float32)
            for i in range(vocabulary):
                row[0, i] = values[bits_NV[n, i]]
            best, impure = _whole_row(row, tops_NC[n : n + 1], cut, seeds_N[n], positions_N[n], table)
        claimed = values[bits_NV[n, ids_N[n]]]
        beyond = np.float32(cut - claimed)  # > 0: outside the kept set
        margin = np.float32(temperature * np.float32(best - np.float32(claimed + noise_N[n])))
        if beyond > 0:
            margin = np.float32(np.float32(temperature * beyond) + max(margin, np.float32(0)))
        ending = 0.0
        for token in ends:
            ending += exponentials[bits_NV[n, token]]
        out_N4[n, 0], out_N4[n, 1] = margin, impure
        out_N4[n, 2], out_N4[n, 3] = exponentials[bits_NV[n, ids_N[n]]] / total, ending / total


@njit(cache=True, fastmath={"reassoc"})
def _sum_of(exponentials: DoubleArray, bits_V: npt.NDArray[np.uint16]) -> float:
    """In whatever order the compiler likes."""
    total = 0.0
    for i in range(bits_V.size):
        total += exponentials[bits_V[i]]
    return total


@njit(cache=True)
def _near_top(
    bits_V: npt.NDArray[np.uint16],
    tops_C: FloatArray,
    values: FloatArray,
    least: np.floating,
    near: IntArray,
    near_z: FloatArray,
) -> int:
    """Tokens with z ≥ `least`, in order, into `near`; how many. Looks only into chunks that hold one."""
    found = 0
    for chunk in range(tops_C.size):
        if tops_C[chunk] >= least:
            for i in range(chunk * CHUNK, min((chunk + 1) * CHUNK, bits_V.size)):
                z = values[bits_V[i]]
                if z >= least:
                    near[found], near_z[found] = i, z
                    found += 1
    return found


@njit(cache=True)
def _cut_of(
    bits_V: npt.NDArray[np.uint16],
    near: IntArray,
    near_z: FloatArray,
    found: int,
    exponentials: DoubleArray,
    wanted: float,
) -> np.floating:
    """The z at which the sum from the top reaches `wanted`; -inf when these tokens do not reach it."""
    reached = 0.0
    for place in range(found):
        reached += exponentials[bits_V[near[place]]]
    if reached < wanted:
        return np.float32(-np.inf)
    reached, cut = 0.0, near_z[0]
    for place in np.argsort(near_z[:found])[::-1]:
        cut = near_z[place]
        reached += exponentials[bits_V[near[place]]]
        if reached >= wanted:
            break
    return cut


@njit(cache=True)
def _race_few(
    near: IntArray, near_z: FloatArray, found: int, cut: np.floating, seed: int, position: int, table: IntArray
) -> np.floating:
    """The best noisy score among few tokens: noise for each of those kept, four to a block of the counter."""
    words = np.empty(4, dtype=np.uint32)
    best, drawn = np.float32(-np.inf), -1
    for place in range(found):
        if near_z[place] >= cut:
            block = near[place] // 4
            if block != drawn:
                fill_words_kernel(words, block, seed, position, GUMBEL_STREAM)
                drawn = block
            best = max(best, np.float32(near_z[place] + noise_kernel(words[near[place] % 4], table)))
    return best


@njit(cache=True)
def _impurity_few(near_z: FloatArray, found: int, cut: np.floating, top: np.floating) -> np.floating:
    """`filters.impurity` of few tokens."""
    total, squares, least = 0.0, 0.0, max(np.float64(cut), np.float64(top) - TAIL)
    for place in range(found):
        if near_z[place] >= least:
            share = np.exp(np.float64(near_z[place]) - np.float64(top))
            total += share
            squares += share * share
    return np.float32(max(0.0, 1.0 - squares / (total * total)))


@njit(cache=True)
def _whole_row(
    row: FloatArray, tops: FloatArray, cut: np.floating, seed: int, position: int, table: IntArray
) -> tuple[np.floating, np.floating]:
    """(best noisy score, impurity) where few tokens do not do: no nucleus, or a flat one."""
    cut_B, impure_B = np.full(1, cut, np.float32), np.empty(1, np.float32)
    winner_B, best_B = np.zeros(1, np.int64), np.full(1, -np.inf, np.float32)
    race_kernel(row, tops, cut_B, np.full(1, seed, np.int64), np.full(1, position, np.int64), table, winner_B, best_B)
    impurity_kernel(row, tops, cut_B, impure_B)
    return best_B[0], impure_B[0]
