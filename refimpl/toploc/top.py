"""Which numbers of a chunk its proof binds: the K largest in magnitude, exactly, in one pass over memory.

Of 32 x 4096 numbers only 128 matter, and sorting or heaping all of them costs more than the whole rest of a proof. The
absolute value of a bf16 orders like its bit pattern without the sign, so: take the maximum of every block of 64
(vectorised), note that the K-th largest block maximum is a lower bound for the K-th largest number, and choose exactly
among the few numbers that reach it.

Differs from the original (toploc 0.1.6, which asks torch.topk): where the last place is shared by equal magnitudes, the
lower flat index wins. torch.topk leaves that choice to the heap of the C++ library at hand (and to another algorithm on
a GPU), so two honest machines with the very same activations could bind different numbers; bf16 has so few values that
a shared last place is the rule, not the exception. The choice changes the proof's bytes; the order of the chosen does
not, since one polynomial goes through a set of points.

Shape legend: N numbers of a chunk, G chunks, K numbers chosen.
"""

from __future__ import annotations

import numpy as np
from numba import njit

MAGNITUDE = 0x7FFF  # bf16 without its sign bit
INFINITY = 0x7F80  # magnitudes from here on are infinite or NaN
BLOCK = 64


@njit(cache=True, nogil=True)
def _kth_largest(magnitude_N: np.ndarray, k: int) -> tuple[int, int]:
    """(value of the k-th largest, how many are strictly larger) by a radix histogram: high 7 bits, then low 8."""
    high = np.zeros(128, np.int64)
    for magnitude in magnitude_N:
        high[magnitude >> 8] += 1
    larger, bucket = 0, 127
    while larger + high[bucket] < k:
        larger += high[bucket]
        bucket -= 1
    low = np.zeros(256, np.int64)
    for magnitude in magnitude_N:
        if magnitude >> 8 == bucket:
            low[magnitude & 0xFF] += 1
    rest = 255
    while larger + low[rest] < k:
        larger += low[rest]
        rest -= 1
    return bucket * 256 + rest, larger


@njit(cache=True, nogil=True)
def block_maxima(bits_N: np.ndarray) -> np.ndarray:
    """Largest magnitude of each whole block of 64, and of the rest in one more (0 when there is none)."""
    blocks = bits_N.size // BLOCK
    maximum = np.zeros(blocks + 1, np.uint16)
    for b in range(blocks):
        m = np.uint16(0)
        for j in range(BLOCK):
            m = np.uint16(max(m, bits_N[b * BLOCK + j] & np.uint16(MAGNITUDE)))
        maximum[b] = m
    for i in range(blocks * BLOCK, bits_N.size):
        maximum[blocks] = max(maximum[blocks], bits_N[i] & np.uint16(MAGNITUDE))
    return maximum


@njit(cache=True, nogil=True)
def _select(bits_N: np.ndarray, k: int, index_K: np.ndarray, candidate: np.ndarray, magnitude: np.ndarray) -> bool:
    """Writes the flat indices of the k largest magnitudes, ascending; returns whether all numbers are finite."""
    maximum = block_maxima(bits_N)
    bound = 0
    if maximum.size > k:
        bound, _ = _kth_largest(maximum, k)
    count = 0
    finite = True
    for b in range(maximum.size):
        if maximum[b] < bound:
            continue
        finite &= maximum[b] < INFINITY  # the largest block is never skipped
        for i in range(b * BLOCK, min((b + 1) * BLOCK, bits_N.size)):
            m = bits_N[i] & np.uint16(MAGNITUDE)
            if m >= bound:
                candidate[count] = i
                magnitude[count] = m
                count += 1
    last, larger = _kth_largest(magnitude[:count], k)
    shared = k - larger  # places left for those equal to the last
    chosen = 0
    for c in range(count):
        if magnitude[c] > last or (magnitude[c] == last and shared > 0):
            shared -= magnitude[c] == last
            index_K[chosen] = candidate[c]
            chosen += 1
    return finite


@njit(cache=True, nogil=True)
def top_k_all(bits: np.ndarray, start_G: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per chunk bits[start_G[g]:start_G[g+1]]: flat indices int64 [G, K], points int64 [G], finite bool [G].

    A chunk with fewer than k numbers takes all of them; indices from there on are zero and mean nothing.
    """
    chunks = start_G.size - 1
    index_GK = np.zeros((chunks, k), np.int64)
    points_G = np.zeros(chunks, np.int64)
    finite_G = np.ones(chunks, np.bool_)
    longest = 0
    for g in range(chunks):
        longest = max(longest, start_G[g + 1] - start_G[g])
    candidate = np.empty(longest, np.int64)
    magnitude = np.empty(longest, np.uint16)
    for g in range(chunks):
        bits_N = bits[start_G[g] : start_G[g + 1]]
        points_G[g] = min(k, bits_N.size)
        finite_G[g] = _select(bits_N, points_G[g], index_GK[g], candidate, magnitude)
    return index_GK, points_G, finite_G
