"""The published choice of the K largest: torch.topk's own on the CPU, ties included, without its cost.

A published proof depends on which of several equal magnitudes gets the last place, and the package leaves that to
torch.topk. On the CPU, torch (2.13, as built for Linux) takes `std::partial_sort` of GNU's C++ library while 64 K <= N:
a heap of the first K numbers whose smallest is replaced by every later number that is strictly larger. So the choice
follows from how that library sifts a heap, and is repeated here step for step; blocks whose maximum does not exceed the
smallest in the heap are skipped, since they cannot change it. Shorter chunks go to torch.topk itself.

On a GPU, or with another C++ library, torch.topk chooses otherwise: proofs made there with the package differ in the
last place. Strict mode has one rule for all machines (`top.py`).

Shape legend: N numbers of a chunk, G chunks, K numbers chosen.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from refimpl.toploc.top import BLOCK, INFINITY, MAGNITUDE, block_maxima


class TooFewNumbers(ValueError):
    """A chunk with fewer numbers than a published proof binds; the one argument says which."""


@njit(cache=True, nogil=True)
def _key(pattern: np.int64) -> np.int64:
    """Orders as torch does: by magnitude, and every NaN equal and above infinity."""
    return np.minimum(pattern & MAGNITUDE, np.int64(INFINITY + 1))


@njit(cache=True, nogil=True)
def _sift(key_K: np.ndarray, index_K: np.ndarray, hole: int, key: np.int64, index: int) -> None:
    """`std::__adjust_heap` of a min-heap: moves the hole down to a leaf, then the new number up from there."""
    top, size = hole, key_K.size
    child = hole
    while child < (size - 1) // 2:
        child = 2 * (child + 1)
        if key_K[child] > key_K[child - 1]:
            child -= 1
        key_K[hole], index_K[hole] = key_K[child], index_K[child]
        hole = child
    if size % 2 == 0 and child == (size - 2) // 2:
        child = 2 * child + 1
        key_K[hole], index_K[hole] = key_K[child], index_K[child]
        hole = child
    while hole > top and key_K[(hole - 1) // 2] > key:
        parent = (hole - 1) // 2
        key_K[hole], index_K[hole] = key_K[parent], index_K[parent]
        hole = parent
    key_K[hole], index_K[hole] = key, index


@njit(cache=True, nogil=True)
def _heap_select(bits_N: np.ndarray, index_K: np.ndarray) -> None:
    """`std::__heap_select`: writes the flat indices of the K numbers that stay in the heap."""
    k = index_K.size
    key_K = np.empty(k, np.int64)
    for i in range(k):
        key_K[i], index_K[i] = _key(np.int64(bits_N[i])), i
    for parent in range((k - 2) // 2, -1, -1):
        _sift(key_K, index_K, parent, key_K[parent], index_K[parent])
    maximum = block_maxima(bits_N)
    for b in range(k // BLOCK, maximum.size):
        if maximum[b] <= key_K[0]:
            continue
        for i in range(max(k, b * BLOCK), min((b + 1) * BLOCK, bits_N.size)):
            key = _key(np.int64(bits_N[i]))
            if key > key_K[0]:
                _sift(key_K, index_K, 0, key, i)


@njit(cache=True, nogil=True)
def _heap_select_all(bits: np.ndarray, start_G: np.ndarray, index_GK: np.ndarray) -> None:
    top_k = index_GK.shape[1]
    for g in range(start_G.size - 1):
        if 64 * top_k <= start_G[g + 1] - start_G[g]:
            _heap_select(bits[start_G[g] : start_G[g + 1]], index_GK[g])


def top_k_published(bits: np.ndarray, start_G: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """As `top.top_k_all`, with torch.topk's choice. Like the package it does not ask whether numbers are finite.

    Raises `TooFewNumbers` for a chunk of fewer than k numbers, where torch.topk raises.
    """
    chunks = start_G.size - 1
    length_G = np.diff(start_G)
    if length_G.min() < k:
        raise TooFewNumbers(
            f"a chunk of {length_G.min()} numbers has no top {k}: a published proof needs top_k numbers"
        )
    index_GK = np.empty((chunks, k), np.int64)
    _heap_select_all(bits, start_G, index_GK)
    values = torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)
    for g in np.flatnonzero(64 * k > length_G):
        index_GK[g] = values[start_G[g] : start_G[g + 1]].abs().topk(k).indices.numpy()
    return index_GK, np.full(chunks, k, np.int64), np.ones(chunks, np.bool_)
