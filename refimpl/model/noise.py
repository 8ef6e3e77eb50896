"""Noise that anyone can make again: the same bits for equal (seed, position, token), on any device, in any order.

A verifier can only check how a token was sampled if it can regenerate the prover's noise. A generator with a state
(the original's) forces whole-vocabulary draws in one order; a counter-based one gives any single value by itself, so a
slice, a gather of the few tokens that survive top-k, or another batch order all see equal noise.

All but the last step is integer arithmetic, so no compiler, fused multiply-add or vendor's `log` can change it:

    bits      b = word (token mod 4) of Philox4x32-10(counter = (token div 4, position, stream), key = seed)
    uniform   w = (2b + 1) / 2^33, the mid-point of one of 2^32 cells, never 0 or 1
    noise     g = Q(w), Q = -ln(-ln(1 - w)) for Gumbel noise: a table of parabolas with integer coefficients, made in
              decimal arithmetic; bins are equal parts of octaves of w and of 1 - w, so both tails are as fine as the
              middle. Error of the parabolas < 1e-7; largest value 22.87, smallest -3.13.
    float32   round(g · 2^26) · 2^-26: one conversion that IEEE 754 defines

What 2^32 cells cost: replacing one token's ideal noise by this changes any outcome's probability by at most 2^-33 (the
distance of the two distribution functions), so sampling among N tokens is within N · 2^-33 of ideal in total variation:
1.8e-5 for 152 064 tokens unfiltered, 6e-9 for 50.

Shape legend: B rows (one seed and position each), N consecutive tokens, K chosen tokens, C chunks of the vocabulary.

Reference: "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), for Philox.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import cache
from statistics import NormalDist

import numpy as np
import numpy.typing as npt
import torch
from numba import njit
from torch import Tensor

GUMBEL_STREAM = 0  # the fourth counter word keeps uses of one seed apart
NORMAL_STREAM = 1
DERIVE_STREAM = 2

MASK32 = 0xFFFFFFFF
PHILOX_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
PHILOX_WEYL = (0x9E3779B9, 0xBB67AE85)
PHILOX_ROUNDS = 10

OCTAVES, PARTS = 32, 64  # bins per side: w (or 1 - w) in [2^(e-33), 2^(e-32)), cut into 64 equal parts
FRACTION_BITS = 25  # what is left of a 32-bit normalised number under 1 leading and 6 part bits
OUT_BITS, GUARD_BITS = 26, 8  # noise in units of 2^-26; coefficients in units of 2^-34

TWO_PI = Decimal("6.283185307179586476925286766559")

IntArray = npt.NDArray[np.int64]


# --- bits ------------------------------------------------------------------------------------------------------------


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 on int64 tensors that hold 32-bit words (broadcast together): four words for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        (high0, low0), (high1, low1) = _product(c0, PHILOX_MULTIPLIERS[0]), _product(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + PHILOX_WEYL[0]) & MASK32, (k1 + PHILOX_WEYL[1]) & MASK32
    return c0, c1, c2, c3


def _product(word: Tensor, multiplier: int) -> tuple[Tensor, Tensor]:
    """The high and low 32 bits of a product of 32-bit numbers, by halves of the multiplier.

    No step reaches 2^63: an overflow of signed numbers is undefined in C++, and a compiler was seen to exploit that.
    """
    upper = word * (multiplier >> 16)  # < 2^48
    total = word * (multiplier & 0xFFFF) + ((upper & 0xFFFF) << 16)  # < 2^49
    return (upper >> 16) + (total >> 32), total & MASK32


def random_words_at(seeds_B: Tensor, positions_B: Tensor, tokens_BK: Tensor, stream: int) -> Tensor:
    """The 32-bit words (as int64, [B, K]) of chosen tokens; `tokens_BK` may be [1, K] to serve all rows."""
    c1, c2 = (positions_B & MASK32)[:, None], ((positions_B >> 32) & MASK32)[:, None]
    key = (seeds_B & MASK32)[:, None], ((seeds_B >> 32) & MASK32)[:, None]
    words = philox((tokens_BK >> 2, c1, c2, torch.full_like(c1, stream)), key)
    lane_BK = tokens_BK & 3
    return torch.where(
        lane_BK < 2, torch.where(lane_BK == 0, words[0], words[1]), torch.where(lane_BK == 2, *words[2:])
    )


def random_words(seeds_B: Tensor, positions_B: Tensor, first_token: int, count: int, stream: int) -> Tensor:
    """The 32-bit words (as int64, [B, N]) of `count` consecutive tokens: one Philox block serves four of them."""
    first_block, last_block = first_token // 4, -(-(first_token + count) // 4)
    blocks_1N = torch.arange(first_block, last_block, device=seeds_B.device)[None]
    c1, c2 = (positions_B & MASK32)[:, None], ((positions_B >> 32) & MASK32)[:, None]
    key = (seeds_B & MASK32)[:, None], ((seeds_B >> 32) & MASK32)[:, None]
    words_BN = torch.stack(philox((blocks_1N, c1, c2, torch.full_like(c1, stream)), key), dim=-1).flatten(1)
    skipped = first_token - 4 * first_block
    return words_BN[:, skipped : skipped + count]


# --- bits to noise ---------------------------------------------------------------------------------------------------


def quantile_table(quantile: Callable[[Decimal, Decimal], Decimal]) -> IntArray:
    """Parabola coefficients [2 sides, OCTAVES, PARTS, 3] of `quantile(w, 1 - w)` in units of 2^-34.

    Decimal arithmetic rounds correctly by specification, so the table is the same on every machine.
    """
    scale = 1 << (OUT_BITS + GUARD_BITS)

    def value(side: int, octave: int, half_parts: int) -> int:
        near = Decimal(half_parts + 2 * PARTS) * Decimal(2) ** (octave - 7 - 33)  # w on side 0, 1 - w on side 1
        return int((quantile(*((near, 1 - near) if side == 0 else (1 - near, near))) * scale).to_integral_value())

    table = np.empty((2, OCTAVES, PARTS, 3), dtype=np.int64)
    with localcontext() as context:
        context.prec = 24
        for side in range(2):
            for octave in range(OCTAVES):
                values = np.array([value(side, octave, i) for i in range(2 * PARTS + 1)], dtype=np.int64)
                start, middle, end = values[:-1:2], values[1::2], values[2::2]
                table[side, octave] = np.stack(
                    [start, 4 * middle - 3 * start - end, 2 * (start + end) - 4 * middle], -1
                )
    return table


def _gumbel_quantile(w: Decimal, rest: Decimal) -> Decimal:
    if w < Decimal("1e-6"):  # -ln(1 - w) by its series: exact to the digits kept, and much cheaper
        exponential = w * (1 + w / 2 + w * w / 3 + w * w * w / 4)
    else:
        exponential = -rest.ln()
    return -exponential.ln()


@cache
def gumbel_table() -> IntArray:
    """The table of -ln(-ln(1 - w)), flat: entry `bin` holds its three coefficients. Made once (about 0.3 s)."""
    return quantile_table(_gumbel_quantile).reshape(-1, 3)


def _normal_quantile(w: Decimal, rest: Decimal) -> Decimal:
    """Newton's step on a float64 quantile: x - (Φ(x) - w) / φ(x), with Φ - 1/2 = φ(x) · (x + x³/3 + x⁵/15 + …)."""
    if w > rest:
        return -_normal_quantile(rest, w)
    x = Decimal(NormalDist().inv_cdf(float(w))) if w < Decimal("0.5") else Decimal(0)
    density = (-x * x / 2).exp() / TWO_PI.sqrt()
    term = series = x
    n = 1
    while abs(term) > Decimal("1e-24") * abs(series):
        n += 2
        term *= x * x / n
        series += term
    return x - (Decimal("0.5") + density * series - w) / density


@cache
def normal_table() -> IntArray:
    """The table of the normal distribution's quantiles. Made once (about a second)."""
    return quantile_table(_normal_quantile).reshape(-1, 3)


@cache
def _table_on(table: Callable[[], IntArray], device: str) -> Tensor:
    return torch.from_numpy(table()).to(device)


def noise_from_words(words: Tensor, table: Callable[[], IntArray]) -> Tensor:
    """float32 noise of 32-bit words (int64): `table` is `gumbel_table` or `normal_table`."""
    return apply_table(words, _table_on(table, str(words.device)))


def apply_table(words: Tensor, table_X3: Tensor) -> Tensor:
    """Q((2b + 1) / 2^33) by the table's parabolas, all in int64 until the last line."""
    odd = 2 * words + 1
    side = odd >> 32  # 0: w < 1/2; 1: w > 1/2, binned by 1 - w
    near = torch.where(side == 1, (1 << 33) - odd, odd)  # odd, in [1, 2^32)
    # The leading bit's place, from a float32's exponent; clearing the bit under it keeps the number from rounding up.
    octave = ((near & ~(near >> 1)).to(torch.float32).view(torch.int32) >> 23).to(torch.int64) - 127
    normal = near << (31 - octave)  # in [2^31, 2^32)
    fraction = normal & ((1 << FRACTION_BITS) - 1)
    bins = (side * OCTAVES + octave) * PARTS + ((normal >> FRACTION_BITS) & (PARTS - 1))
    c0, c1, c2 = table_X3[bins].unbind(-1)
    value = c0 + ((c1 + (c2 * fraction >> FRACTION_BITS)) * fraction >> FRACTION_BITS)
    return (value + (1 << (GUARD_BITS - 1)) >> GUARD_BITS).to(torch.int32).to(torch.float32) * 2.0**-OUT_BITS


def gumbel_noise(seeds_B: Tensor, positions_B: Tensor, first_token: int, count: int) -> Tensor:
    """Gumbel noise (float32, [B, N]) of `count` tokens from `first_token` on, row b at (seed b, position b)."""
    return noise_from_words(random_words(seeds_B, positions_B, first_token, count, GUMBEL_STREAM), gumbel_table)


def gumbel_noise_at(seeds_B: Tensor, positions_B: Tensor, tokens_BK: Tensor) -> Tensor:
    """Gumbel noise (float32, [B, K]) of chosen tokens: equal to `gumbel_noise` at those places."""
    if tokens_BK.device.type == "cpu":
        tokens_BK = tokens_BK.expand(len(seeds_B), -1)
        noise_BK = np.empty(tokens_BK.shape, dtype=np.float32)
        seeds, positions, tokens = (ids.contiguous().numpy() for ids in (seeds_B, positions_B, tokens_BK))
        _gumbel_at_kernel(seeds, positions, tokens, gumbel_table(), noise_BK)
        return torch.from_numpy(noise_BK)
    return noise_from_words(random_words_at(seeds_B, positions_B, tokens_BK, GUMBEL_STREAM), gumbel_table)


def normal_noise(seeds_B: Tensor, positions_B: Tensor, first_token: int, count: int) -> Tensor:
    """Standard normal numbers (float32, [B, N]), made like Gumbel noise but on a stream of their own."""
    return noise_from_words(random_words(seeds_B, positions_B, first_token, count, NORMAL_STREAM), normal_table)


def derive_seed(base: int, *path: int) -> int:
    """A seed of its own for one use of `base` (which prompt, which completion): 63 bits, by Philox along `path`."""
    seed = (base + 2**63) % 2**64 - 2**63  # as int64 would wrap it
    for depth, step in enumerate(path):
        ids = torch.tensor([seed]), torch.tensor([step])
        low, high = random_words(*ids, 4 * depth, 2, DERIVE_STREAM)[0].tolist()
        seed = low | (high & 0x7FFFFFFF) << 32
    return seed


# --- CPU kernels: the same arithmetic, compiled -----------------------------------------------------------------------


@njit(cache=True)
def fill_words_kernel(out: npt.NDArray[np.uint32], first_block: int, seed: int, position: int, stream: int) -> None:
    """Philox words of consecutive blocks into `out` (its size a multiple of 4); block i fills out[4i : 4i + 4]."""
    mask = np.uint64(0xFFFFFFFF)
    low = np.uint64(32)
    for block in range(out.size // 4):
        c0, c1 = np.uint64(first_block + block) & mask, np.uint64(position) & mask
        c2, c3 = np.uint64(position) >> low, np.uint64(stream)
        k0, k1 = np.uint64(seed) & mask, np.uint64(seed) >> low
        for _ in range(10):
            p0, p1 = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
            c0, c1, c2, c3 = (p1 >> low) ^ c1 ^ k0, p1 & mask, (p0 >> low) ^ c3 ^ k1, p0 & mask
            k0, k1 = (k0 + np.uint64(0x9E3779B9)) & mask, (k1 + np.uint64(0xBB67AE85)) & mask
        out[4 * block], out[4 * block + 1] = np.uint32(c0), np.uint32(c1)
        out[4 * block + 2], out[4 * block + 3] = np.uint32(c2), np.uint32(c3)


@njit(cache=True)
def noise_kernel(word: int, table: IntArray) -> np.float32:
    """One value of `noise_from_words`."""
    odd = 2 * np.int64(word) + 1
    side = odd >> 32
    near = (np.int64(1) << 33) - odd if side == 1 else odd
    octave = 0
    for shift in (16, 8, 4, 2, 1):
        if near >> (octave + shift):
            octave += shift
    normal = near << (31 - octave)
    fraction = normal & ((np.int64(1) << FRACTION_BITS) - 1)
    entry = (side * OCTAVES + octave) * PARTS + ((normal >> FRACTION_BITS) & (PARTS - 1))
    slope = table[entry, 1] + ((table[entry, 2] * fraction) >> FRACTION_BITS)
    value = table[entry, 0] + ((slope * fraction) >> FRACTION_BITS)
    return np.float32(np.int32((value + (1 << (GUARD_BITS - 1))) >> GUARD_BITS)) * np.float32(2.0**-OUT_BITS)


@njit(cache=True)
def _gumbel_at_kernel(
    seeds_B: IntArray, positions_B: IntArray, tokens_BK: IntArray, table: IntArray, noise_BK: npt.NDArray[np.float32]
) -> None:
    words = np.empty(4, dtype=np.uint32)
    for b in range(tokens_BK.shape[0]):
        for k in range(tokens_BK.shape[1]):
            fill_words_kernel(words, tokens_BK[b, k] >> 2, seeds_B[b], positions_B[b], GUMBEL_STREAM)
            noise_BK[b, k] = noise_kernel(words[tokens_BK[b, k] & 3], table)
