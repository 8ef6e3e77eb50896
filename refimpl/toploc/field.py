"""Arithmetic of the proof polynomial: points and coefficients over GF(65497), for all chunks in one compiled call.

A proof is the polynomial of degree < K through K points (index mod m, bf16 bit pattern). Everything costly about it is
O(K^2) arithmetic modulo a 16-bit prime, the same for every chunk, so it is compiled once (numba) and loops over chunks
inside. All functions are pure, single-threaded and release the interpreter lock.

Shape legend: G chunks, K points (and coefficients) per chunk.

Differs from the original (toploc 0.1.6): 1) inverses come from a table, not from Euclid's algorithm per division;
2) the modulus search marks a bitmap instead of searching a list. Results are the same, number for number.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numba import njit

PRIME = 65497  # 0xFFD9: every finite bf16 bit pattern is smaller; the patterns from here on are NaNs
MODULUS_MAX = PRIME


@cache
def inverses() -> np.ndarray:
    """Table of a^-1 mod p for every a in [0, p); entry 0 is 0. By Fermat: a^-1 = a^(p-2)."""
    base = np.arange(PRIME, dtype=np.int64)
    result = np.ones(PRIME, dtype=np.int64)
    exponent = PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * base % PRIME
        base = base * base % PRIME
        exponent >>= 1
    result[0] = 0
    return result


@njit(cache=True, nogil=True)
def _injective_modulus(index_K: np.ndarray, last_seen: np.ndarray) -> int:
    """The largest m <= 65497 for which all indices differ modulo m; 0 when there is none. `last_seen`: 65497 zeros."""
    for m in range(MODULUS_MAX, 0, -1):
        injective = True
        for index in index_K:
            residue = index % m
            if last_seen[residue] == m:
                injective = False
                break
            last_seen[residue] = m
        if injective:
            return m
    return 0


@njit(cache=True, nogil=True)
def _interpolate(x: np.ndarray, y: np.ndarray, inverse: np.ndarray, coefficients: np.ndarray) -> None:
    """Monomial coefficients, ascending, of the polynomial through (x_j, y_j); the x_j differ. Writes `coefficients`."""
    n = x.size
    f = np.empty(n, np.int64)  # divided differences f[x_0..x_i], in place
    for i in range(n):
        f[i] = y[i] % PRIME
    for k in range(1, n):
        for i in range(n - 1, k - 1, -1):
            rise = f[i] - f[i - 1]
            run = x[i] - x[i - k]
            rise += PRIME if rise < 0 else 0
            run += PRIME if run < 0 else 0
            f[i] = rise * inverse[run] % PRIME  # f[x_(i-k)..x_i] = (f[i] - f[i-1]) / (x_i - x_(i-k))
    # N(X) = f_0 + (X - x_0)(f_1 + (X - x_1)(f_2 + ...)), multiplied out from the inside
    c = np.zeros(n, np.int64)
    c[0] = f[n - 1]
    for i in range(n - 2, -1, -1):
        minus_x = PRIME - x[i] % PRIME
        for j in range(n - 1 - i, 0, -1):
            c[j] = (c[j - 1] + minus_x * c[j]) % PRIME
        c[0] = (f[i] + minus_x * c[0]) % PRIME
    for i in range(n):
        coefficients[i] = c[i]


@njit(cache=True, nogil=True)
def interpolate_all(
    index_GK: np.ndarray, pattern_GK: np.ndarray, points_G: np.ndarray, inverse: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Per chunk: the injective modulus (uint16 [G]; 0 when none exists) and the coefficients (uint16 [G, K]).

    Chunk g has `points_G[g]` <= K points; coefficients from there on are zero: the degree is below the points.
    """
    chunks, top_k = index_GK.shape
    modulus_G = np.zeros(chunks, np.uint16)
    coefficient_GK = np.zeros((chunks, top_k), np.uint16)
    last_seen = np.zeros(MODULUS_MAX, np.uint16)
    for g in range(chunks):
        n = points_G[g]
        last_seen[:] = 0
        m = _injective_modulus(index_GK[g, :n], last_seen)
        modulus_G[g] = m
        if m > 0:
            _interpolate(index_GK[g, :n] % m, pattern_GK[g, :n], inverse, coefficient_GK[g, :n])
    return modulus_G, coefficient_GK


@njit(cache=True, nogil=True)
def evaluate(coefficient_K: np.ndarray, x_N: np.ndarray) -> np.ndarray:
    """The polynomial at each x, modulo p (uint32 [N]). Coefficients and x may be any 16-bit numbers.

    Horner over all points at once, so that the inner loop has no chain and the compiler vectorises it. It stays within
    32 bits, since 65496 * 65535 + 65535 < 2^32, and reduces without division: 2^16 = 39 (mod p), so hi * 2^16 + lo
    becomes 39 hi + lo, twice, then one conditional subtraction.
    """
    value_N = np.zeros(x_N.size, np.uint32)
    low, fold, half, prime = np.uint32(0xFFFF), np.uint32(39), np.uint32(16), np.uint32(PRIME)
    for i in range(coefficient_K.size - 1, -1, -1):
        c = np.uint32(coefficient_K[i])
        for j in range(x_N.size):
            v = np.uint32(value_N[j] * x_N[j] + c)
            v = np.uint32((v & low) + fold * (v >> half))
            v = np.uint32((v & low) + fold * (v >> half))
            value_N[j] = v - prime if v >= prime else v
    return value_N
