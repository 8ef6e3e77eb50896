"""Building and reading TOPLOC proofs: what a worker commits to while it decodes.

A proof is 258 bytes for 32 tokens (K = 128), about a thousandth of the activations it stands for: the modulus (16 bits,
big-endian) and K coefficients (16 bits each, big-endian, ascending powers) of the polynomial over GF(65497) through the
points (index mod m, bf16 bit pattern) of the K largest activations of the chunk. `check.py` holds such proofs against a
verifier's own activations.

Two modes, one code path. *published*: byte for byte the proofs of the package toploc 0.1.6. *strict* (the default)
differs from it:

1. equal magnitudes in the last place: the lower index is bound, on every machine (`top.py`, `top_published.py`);
2. activations that are not finite are refused;
3. a chunk with n < K numbers binds all n, and the coefficients from n on are zero.

In both modes, other than the package:

4. no null proofs: what cannot be proven is a `CannotProve` with a sentence;
5. bf16 only: the package builds fp16 proofs that nobody can verify, and fp32 does not fit the prime;
6. tensors may live on any device.

Gaps that stay, by design of the scheme. A proof binds only the K largest numbers: *everything outside the top K of a
chunk can be replaced unseen*. It binds a forward pass, not the sampling of the tokens. And it is malleable, as what
tolerates noise must be: 1 added to the first coefficient moves every value by one unit in the last place, and in chunks
of more than 65497 numbers a smaller injective modulus carries the same points, so different bytes do not show that two
proofs were made independently.

Shape legend: T tokens, D hidden size, G chunks, K numbers per proof.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from refimpl.toploc.field import MODULUS_MAX, PRIME, interpolate_all, inverses
from refimpl.toploc.top import top_k_all
from refimpl.toploc.top_published import TooFewNumbers, top_k_published

Mode = Literal["strict", "published"]
CHUNK_TOKENS = 32
TOP_K = 128

Selection = Callable[[np.ndarray, np.ndarray, int], tuple[np.ndarray, np.ndarray, np.ndarray]]
SELECTIONS: dict[Mode, Selection] = {"strict": top_k_all, "published": top_k_published}


class BadProof(Exception):
    """Bytes that are no proof; the one argument says why."""


class CannotProve(ValueError):
    """Activations for which no proof exists; the one argument says why."""


@dataclass(frozen=True, eq=False)
class Proof:
    """One chunk's commitment. Equal when the bytes are equal."""

    modulus: int
    coefficients: np.ndarray  # uint16, ascending powers

    def encode(self) -> bytes:
        """2 + 2K bytes: modulus, then coefficients, each big-endian."""
        return self.modulus.to_bytes(2, "big") + self.coefficients.astype(">u2").tobytes()

    def to_base64(self) -> str:
        return base64.b64encode(self.encode()).decode("ascii")

    @staticmethod
    def decode(raw: bytes, *, top_k: int = TOP_K) -> Proof:
        """The proof that `encode` wrote. Raises `BadProof` for everything that `encode` cannot have written."""
        modulus_G, coefficient_GK = decode_all([raw], top_k=top_k, mode="strict")
        return Proof(int(modulus_G[0]), coefficient_GK[0])

    @staticmethod
    def from_base64(text: str, *, top_k: int = TOP_K) -> Proof:
        """The proof that `to_base64` wrote; `BadProof` for anything else."""
        try:
            raw = base64.b64decode(text, validate=True)
        except ValueError as error:
            raise BadProof(f"not base64: {error}") from None
        if base64.b64encode(raw).decode("ascii") != text:
            raise BadProof("not canonical base64: unused bits are set")
        return Proof.decode(raw, top_k=top_k)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Proof) and self.encode() == other.encode()

    def __hash__(self) -> int:
        return hash(self.encode())


def chunk_count(tokens: int, *, chunk_tokens: int = CHUNK_TOKENS) -> int:
    """How many proofs so many tokens need: ceil(tokens / chunk_tokens); none for an empty answer."""
    return -(-tokens // chunk_tokens)


def build_proofs(
    states: torch.Tensor,
    *,
    chunk_tokens: int = CHUNK_TOKENS,
    top_k: int = TOP_K,
    mode: Mode = "strict",
    prefill: torch.Tensor | None = None,
) -> list[Proof]:
    """One proof per `chunk_tokens` rows of `states` (bf16 [T, D], any device); the last chunk may be short.

    With `prefill` (bf16 [prompt tokens, D]) the first proof binds the whole prompt as one chunk, as the published
    package does unless told to skip the prefill. Raises `CannotProve` for a dtype other than bf16, for activations that
    are not finite (strict), for fewer than `top_k` numbers in a chunk (published).
    """
    bits, start_G = chunk_bits(states, chunk_tokens=chunk_tokens, top_k=top_k, prefill=prefill)
    if start_G.size == 1:
        return []
    index_GK, points_G, finite_G = select(bits, start_G, top_k, mode=mode)
    if not finite_G.all():
        chunk = int(np.flatnonzero(~finite_G)[0])
        raise CannotProve(f"activations of chunk {chunk} are not finite (inf or NaN): there is nothing honest to prove")
    pattern_GK = bits[start_G[:-1, None] + index_GK]
    modulus_G, coefficient_GK = interpolate_all(index_GK, pattern_GK, points_G, inverses())
    if not modulus_G.all():
        raise CannotProve(f"no modulus up to {MODULUS_MAX} keeps the top {top_k} indices of a chunk apart")
    return [Proof(int(modulus), coefficients) for modulus, coefficients in zip(modulus_G, coefficient_GK, strict=True)]


def select(bits: np.ndarray, start_G: np.ndarray, top_k: int, *, mode: Mode) -> tuple[np.ndarray, ...]:
    """The numbers that a proof binds, chosen as `mode` chooses: indices [G, K], points [G], finite [G] (`top.py`)."""
    if mode not in SELECTIONS:
        raise ValueError(f"mode {mode!r}: expected one of {', '.join(SELECTIONS)}")
    try:
        return SELECTIONS[mode](bits, start_G, top_k)
    except TooFewNumbers as error:
        raise CannotProve(str(error)) from None


def chunk_bits(
    states: torch.Tensor,
    *,
    chunk_tokens: int,
    top_k: int,
    prefill: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """(bit patterns uint16, flat; chunk borders int64 [G + 1] in it). The one place that says where chunks begin: anew
    with each answer, where `lengths` names the tokens of several."""
    if chunk_tokens < 1 or not 1 <= top_k < PRIME:
        raise ValueError(f"chunk_tokens {chunk_tokens} and top_k {top_k}: expected at least 1, top_k below {PRIME}")
    tokens, hidden = _checked(states, "states").shape
    if lengths is not None and sum(lengths) != tokens:
        raise ValueError(f"answers of {sum(lengths)} tokens together, but states of {tokens}: expected as many")
    first, begins = 0, []
    for length in (tokens,) if lengths is None else lengths:
        begins.append(np.arange(first, first + length, chunk_tokens, dtype=np.int64))
        first += length
    start_G = np.append(np.concatenate(begins), tokens) * hidden
    bits = _bits(states)
    if prefill is None:
        return bits, start_G
    head = _bits(_checked(prefill, "prefill"))
    if head.size == 0:
        raise ValueError("prefill has no tokens: leave it out where the prompt is not proven")
    return np.concatenate([head, bits]), np.concatenate([[0], start_G + head.size])


def split_prefill(
    activations: Sequence[torch.Tensor], *, skip_prefill: bool
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """The published package's input, a list, as (prefill, states): its first element is the prompt unless skipped."""
    rows = list(activations) if skip_prefill else list(activations)[1:]
    hidden = activations[0].shape[-1]
    states = torch.cat([row.reshape(-1, hidden) for row in rows]) if rows else activations[0].new_empty((0, hidden))
    return (None if skip_prefill else activations[0]), states


def decode_all(raws: Sequence[bytes], *, top_k: int, mode: Mode) -> tuple[np.ndarray, np.ndarray]:
    """(moduli int64 [G], coefficients uint16 [G, K]) of many proofs; `BadProof` names the first bad one.

    strict: exactly 2 + 2K bytes, 1 < modulus <= 65497, coefficients below the prime. published: lenient as the package,
    without its crashes: one to K coefficients (an odd last byte is dropped), any modulus but zero.
    """
    size = 2 + 2 * top_k

    def name(g: int) -> str:
        return f"proof {g}" if len(raws) > 1 else "the proof"

    for g, raw in enumerate(raws):
        if not isinstance(raw, bytes):
            raise BadProof(f"{name(g)} is no byte string but {type(raw).__name__}")
        if len(raw) != size and (mode == "strict" or not 4 <= len(raw) <= size + 1):
            raise BadProof(f"{name(g)} has {len(raw)} bytes, expected {size} for {top_k} values")
    whole = b"".join(raw if len(raw) == size else raw[: len(raw) // 2 * 2].ljust(size, b"\0") for raw in raws)
    numbers_GW = np.frombuffer(whole, ">u2").reshape(len(raws), 1 + top_k).astype(np.uint16)
    modulus_G, coefficient_GK = numbers_GW[:, 0].astype(np.int64), np.ascontiguousarray(numbers_GW[:, 1:])
    lowest, highest = (2, MODULUS_MAX) if mode == "strict" else (1, 0xFFFF)
    outside = np.flatnonzero((modulus_G < lowest) | (modulus_G > highest))
    if outside.size:
        g = int(outside[0])
        raise BadProof(f"{name(g)} has modulus {modulus_G[g]}, expected {lowest} to {highest}")
    if mode == "strict" and (coefficient_GK >= PRIME).any():
        g = int(np.flatnonzero((coefficient_GK >= PRIME).any(axis=1))[0])
        raise BadProof(f"{name(g)} has a coefficient not below the prime {PRIME}: not the canonical encoding")
    return modulus_G, coefficient_GK


def _checked(states: torch.Tensor, what: str) -> torch.Tensor:
    if states.dtype != torch.bfloat16:
        raise CannotProve(f"{what} have dtype {states.dtype}: TOPLOC proofs exist for torch.bfloat16 only")
    if states.dim() != 2 or states.shape[1] == 0:
        raise ValueError(f"{what} have shape {tuple(states.shape)}, expected [tokens, hidden]")
    return states


def _bits(states: torch.Tensor) -> np.ndarray:
    """Flat bit patterns, uint16; no copy where the tensor is contiguous and on the CPU."""
    flat = states.detach().to("cpu").contiguous().view(-1)
    return flat.view(torch.int16).numpy().view(np.uint16)
