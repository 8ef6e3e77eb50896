"""A commitment to the last hidden state that keeps distances: a few random projections of every token.

TOPLOC keeps the largest values of 32 tokens together. Activation-DiFR instead multiplies each token's hidden state x
(the input of the output head) by a public random matrix and sends the k products. Lengths survive on average,

    y = P x,   P_{ij} ~ N(0, 1/k),   E ‖P d‖² = ‖d‖²,   relative standard deviation √(2/k),

so ‖y - y'‖ is the distance between the prover's hidden state and the verifier's, however small and wherever it lies:
also outside the top values, and for each token alone. The price is k numbers a token.

Bytes: a header and k float16 a token, all scaled by one power of two so that no value overflows and the rounding
(relative 2^-11) stays below honest bfloat16 noise. Decoding accepts exactly what encoding makes.

    offset  0  1        2  3         4                8
            R  version  k  exponent  tokens (u32 LE)  tokens · k float16 LE

Differs from the published DiFR code: 1) the matrix comes from the counter-based `normal_noise`, equal on every device;
2) a wire format with bounds. As there, the matrix is known in advance (seed 42): it tells honest states from
those of another model, and is no lock against a prover who computes the right states, or searches for others that agree
in k numbers.

Shape legend: T tokens, H hidden width, k projections.

Reference: Activation-DiFR (arXiv 2511.20621), k from 2 to 128.
"""

from __future__ import annotations

import math
import struct
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from refimpl.model.noise import normal_noise

SEED = 42
PROJECTIONS_MIN, PROJECTIONS_MAX = 2, 128
TOKENS_MAX = 1 << 20

HEADER = struct.Struct("<BBBbI")
MAGIC, VERSION = ord("R"), 1
EXPONENT_MIN, EXPONENT_MAX = -60, 100


class ProjectionError(ValueError):
    """A commitment that is malformed, or does not fit what it is compared with. One sentence says how."""


@lru_cache(maxsize=8)
def projection_matrix(hidden: int, projections: int, seed: int = SEED, device: str = "cpu") -> Tensor:
    """P^T, float32 [H, k]. Column j is a stream of its own, so a larger k keeps a smaller one's columns, up to 1/√k."""
    if hidden < 1:
        raise ValueError(f"hidden is {hidden}; expected 1 or more")
    if not PROJECTIONS_MIN <= projections <= PROJECTIONS_MAX:
        raise ValueError(f"projections is {projections}; expected {PROJECTIONS_MIN} to {PROJECTIONS_MAX}")
    seeds_k = torch.full((projections,), seed, dtype=torch.int64, device=device)
    columns_kH = normal_noise(seeds_k, torch.arange(projections, device=device), 0, hidden)
    return columns_kH.T.contiguous() / math.sqrt(projections)


def project(hidden_TH: Tensor, projections: int, seed: int = SEED) -> Tensor:
    """y = P x for every token, float32 [T, k]."""
    matrix_Hk = projection_matrix(hidden_TH.shape[1], projections, seed, str(hidden_TH.device))
    return hidden_TH.float() @ matrix_Hk


def encode(projected_Tk: Tensor) -> bytes:
    """The commitment's bytes: 8 + 2·T·k. Raises ProjectionError on values that are not finite or out of bounds."""
    tokens, projections = projected_Tk.shape
    _check_size(tokens, projections)
    values = projected_Tk.detach().to("cpu", torch.float32).numpy()
    if not np.isfinite(values).all():
        raise ProjectionError("the hidden states hold NaN or infinite values; expected finite numbers")
    largest = float(np.abs(values).max(initial=0.0))
    # 2^exponent > largest, so scaled values lie in (-1, 1); float16 is exact to 2^-11 of the value there, or to 2^-25.
    exponent = max(EXPONENT_MIN, math.frexp(largest)[1]) if largest else 0
    if exponent > EXPONENT_MAX:
        raise ProjectionError(f"the largest projection is {largest:.3g}; expected below 2^{EXPONENT_MAX}")
    payload = np.ldexp(values, -exponent).astype("<f2")
    exponent = exponent if payload.any() else 0
    return HEADER.pack(MAGIC, VERSION, projections, exponent, tokens) + payload.tobytes()


def decode(raw: bytes, tokens_max: int = TOKENS_MAX) -> Tensor:
    """The projections, float32 [T, k]. Raises ProjectionError on anything that `encode` would not have made."""
    if len(raw) < HEADER.size:
        raise ProjectionError(f"a projection commitment of {len(raw)} bytes; expected at least {HEADER.size}")
    magic, version, projections, exponent, tokens = HEADER.unpack_from(raw)
    if (magic, version) != (MAGIC, VERSION):
        raise ProjectionError(f"a projection commitment begins with {raw[:2]!r}; expected {bytes((MAGIC, VERSION))!r}")
    _check_size(tokens, projections, tokens_max)
    if len(raw) != HEADER.size + 2 * tokens * projections:
        raise ProjectionError(
            f"{len(raw)} bytes for {tokens} tokens of {projections} projections; expected "
            f"{HEADER.size + 2 * tokens * projections}"
        )
    scaled = np.frombuffer(raw, dtype="<f2", offset=HEADER.size).reshape(tokens, projections).astype(np.float32)
    largest = float(np.abs(scaled).max(initial=0.0))  # NaN stays NaN and fails the comparison
    if not largest <= 1 or not EXPONENT_MIN <= exponent <= EXPONENT_MAX:
        raise ProjectionError(f"scaled values up to {largest} with exponent {exponent}; expected at most 1, in bounds")
    if (largest == 0 and exponent != 0) or (0 < largest < 0.5 and exponent > EXPONENT_MIN):
        raise ProjectionError(f"exponent {exponent} for scaled values up to {largest}; expected the smallest that fits")
    return torch.from_numpy(np.ldexp(scaled, exponent))


def _check_size(tokens: int, projections: int, tokens_max: int = TOKENS_MAX) -> None:
    if not PROJECTIONS_MIN <= projections <= PROJECTIONS_MAX:
        raise ProjectionError(f"{projections} projections; expected {PROJECTIONS_MIN} to {PROJECTIONS_MAX}")
    if tokens > tokens_max:
        raise ProjectionError(f"a commitment to {tokens} tokens; expected at most {tokens_max}")


def distances(committed_Tk: Tensor, own_Tk: Tensor) -> Tensor:
    """‖y - y'‖ of every token (float32 [T]), an estimate of the hidden states' distance.

    Raises ProjectionError when the prover committed to another number of tokens or projections.
    """
    if committed_Tk.shape != own_Tk.shape:
        raise ProjectionError(
            f"a commitment to {committed_Tk.shape[0]} tokens of {committed_Tk.shape[1]} projections; expected "
            f"{own_Tk.shape[0]} of {own_Tk.shape[1]}"
        )
    return (committed_Tk.to(own_Tk.device) - own_Tk).norm(dim=-1)


def relative_distances(committed_Tk: Tensor, own_Tk: Tensor) -> Tensor:
    """‖y - y'‖ / ‖y'‖ of every token, y' the verifier's: comparable between models and layers; inf where y' = 0 ≠ y."""
    distance_T, length_T = distances(committed_Tk, own_Tk), own_Tk.norm(dim=-1)
    return torch.where(distance_T == 0, 0.0, distance_T / length_T)
