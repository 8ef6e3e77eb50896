"""Checking TOPLOC proofs: does what the worker committed to agree with the verifier's own replay?

The verifier's activations come from one prefill over prompt and answer, which costs a fraction of generating it. Per
chunk it takes its own K largest numbers, evaluates the proof's polynomial at their places and compares. Honest noise
(another kernel, batch shape, device) moves a few numbers by a few units in the last place; another model, prompt or
precision moves most of them far. A place that the prover did not bind evaluates to garbage and counts as a mismatch.

Two modes, one code path; `RULES` lists every difference. *published*: the scores of toploc 0.1.6 on its tensor path.
*strict* (the default) closes its holes:

1. the number of proofs must be the number of chunks;
2. the encoding must be the canonical one: exact length, coefficients below the prime, a degree below the number of
   points, and the largest modulus in a chunk of up to 65497 numbers (nearly so in others);
3. signs count;
4. the distance of two numbers is the number of steps between them along the ordered line of bf16 values. A mismatch is
   128 steps or more (a factor of two), or another sign, or no finite number. Within one power of two the distance is
   the published mantissa difference, so the presets keep their meaning; across a power of two, one unit in the last
   place is an error of 1 where the package sees a mismatch;
5. an own replay that is not finite is its own verdict, about nobody's honesty;
6. a proof must bind: an honest polynomial evaluates to garbage wherever it binds nothing, so one that claims large
   values at places where the replay has small ones was made without activations. (The simplest is a constant: the K
   largest numbers are much alike, and the package takes it for a proof of many a chunk under its deployed bounds.)
7. a bound on mismatches is out of 128 values and scales with the values compared, so that a short chunk or a smaller K
   does not pass by having fewer values than the bound.

In both modes a bad proof is a rejection with a reason: nothing that a worker sends raises. The package's list path
forgets the proof's modulus; its tensor path, followed here, does not. Departures from it in published mode: what would
crash the package (modulus zero, no coefficients, a chunk with fewer than K numbers) and polynomials of more than K
coefficients are rejected.

What stays unseen: everything outside the top K, and how tokens were chosen (`proof.py`). Nor does a proof show that its
maker ran anything, if the places of the K largest numbers and their values can be guessed.

Shape legend: T tokens, D hidden size, G chunks, K numbers per proof.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import njit

from refimpl.toploc.field import MODULUS_MAX, evaluate
from refimpl.toploc.proof import (
    CHUNK_TOKENS,
    TOP_K,
    BadProof,
    CannotProve,
    Mode,
    chunk_bits,
    chunk_count,
    decode_all,
    select,
)
from refimpl.toploc.top import INFINITY

MODULI_TRIED_MAX = 4096  # strict: no honest prover has to go further down for its modulus
NOTHING_MATCHES = 2.0**64  # mean and median where no value matches, as in the published package
VALUES_OF_BOUND = 128  # the number of values that the bounds on mismatches were set for
PROBES, PROBES_MIN = 64, 24  # places outside the top K that are looked at, and the fewest that tell anything

REASONS = {
    "accepted": "all chunks are within the thresholds",
    "nothing_to_check": "an empty answer with no proofs",
    "wrong_count": "not one proof per chunk",
    "malformed": "a proof that no builder can have written",
    "not_binding": "a proof that claims large values everywhere: made without activations",
    "mismatch": "too many values differ in sign or by a factor of two",
    "drift": "the values that match are too far away on average",
    "short_chunk": "a chunk has fewer numbers than top_k, which published proofs cannot bind",
    "nonfinite_replay": "the verifier's own activations are not finite: no verdict on the worker",
}


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What the two modes do differently."""

    one_proof_per_chunk: bool
    whole_numbers: bool  # compare sign, exponent and mantissa as one ordered number; else exponent and mantissa apart
    canonical: bool  # modulus and degree must be those that the size of the chunk gives
    must_bind: bool
    replay_finite: bool
    scale_bounds: bool


RULES: dict[Mode, Rules] = {
    "strict": Rules(
        one_proof_per_chunk=True,
        whole_numbers=True,
        canonical=True,
        must_bind=True,
        replay_finite=True,
        scale_bounds=True,
    ),
    "published": Rules(
        one_proof_per_chunk=False,
        whole_numbers=False,
        canonical=False,
        must_bind=False,
        replay_finite=False,
        scale_bounds=False,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """Largest errors that still pass (equality passes), and the published validator's forgiveness.

    `exponent_mismatches` is out of 128 values. Forgiveness: max(min_allowed_failures, ratio_allowed_failures * chunks)
    chunks may exceed it, if what matches in them still meets the bounds on the mantissa.
    """

    exponent_mismatches: float
    mantissa_mean: float
    mantissa_median: float
    min_allowed_failures: int = 0
    ratio_allowed_failures: float = 0.0


PRESETS: dict[str, Thresholds] = {
    "paper": Thresholds(exponent_mismatches=38, mantissa_mean=10, mantissa_median=8),
    "deployed": Thresholds(exponent_mismatches=60, mantissa_mean=40, mantissa_median=40),
}


@dataclass(frozen=True, kw_only=True)
class ChunkScore:
    """How far one chunk's proof is from the replay. All are errors: larger is worse."""

    exponent_mismatches: int
    mantissa_mean: float  # over the values that match, in units in the last place, 0 to 127
    mantissa_median: float  # the upper median
    values: int  # compared


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A verdict. `reason`: a code of `REASONS`, a colon, a sentence. `chunks` is empty if nothing was compared."""

    accepted: bool
    reason: str
    chunks: tuple[ChunkScore, ...] = ()

    @property
    def code(self) -> str:
        return self.reason.partition(":")[0]

    @property
    def undecided(self) -> bool:
        """The verifier could not compare; the verdict says nothing about the worker."""
        return self.code in ("nonfinite_replay", "short_chunk")


def verify_proofs(
    states: torch.Tensor,
    proofs: Sequence[bytes],
    *,
    mode: Mode = "strict",
    thresholds: Thresholds = PRESETS["paper"],
    chunk_tokens: int = CHUNK_TOKENS,
    top_k: int = TOP_K,
    prefill: torch.Tensor | None = None,
    lengths: Sequence[int] | None = None,
) -> Verification:
    """Holds `proofs` against the verifier's own `states` (bf16 [T, D], any device) for the same tokens.

    Never raises for what stands in `proofs`; raises `ValueError` if the caller's own `states` have another dtype or
    shape.
    `prefill`: the prompt's own states, where the first proof binds the prompt (see `build_proofs`).
    `lengths`: the states are of several answers, one after another, of so many tokens each (see `verify_answers`).
    """
    bits, start_G = chunk_bits(states, chunk_tokens=chunk_tokens, top_k=top_k, prefill=prefill, lengths=lengths)
    rules = RULES[mode]
    chunks = start_G.size - 1
    if rules.one_proof_per_chunk and len(proofs) != chunks:
        return _rejected("wrong_count", f"{len(proofs)} proofs for {chunks} chunks of up to {chunk_tokens} tokens")
    compared = min(chunks, len(proofs))  # published: what has no partner is not looked at
    if compared == 0:
        return Verification(accepted=True, reason=f"nothing_to_check: {len(proofs)} proofs, {states.shape[0]} tokens")
    try:
        modulus_G, coefficient_GK = decode_all(list(proofs[:compared]), top_k=top_k, mode=mode)
    except BadProof as error:
        return _rejected("malformed", str(error))
    start_G = start_G[: compared + 1]
    try:
        index_GK, points_G, finite_G = select(bits, start_G, top_k, mode=mode)
    except CannotProve as error:
        return _rejected("short_chunk", str(error))
    if rules.replay_finite and not finite_G.all():
        chunk = int(np.flatnonzero(~finite_G)[0])
        return _rejected("nonfinite_replay", f"the verifier's activations of chunk {chunk} are inf or NaN")
    if rules.canonical and (sentence := _not_canonical(np.diff(start_G), modulus_G, coefficient_GK)):
        return _rejected("malformed", sentence)
    scores = _scores(bits, start_G, index_GK, points_G, modulus_G, coefficient_GK, rules.whole_numbers)
    chunk_scores = tuple(
        ChunkScore(exponent_mismatches=mismatches, mantissa_mean=mean, mantissa_median=median, values=values)
        for mismatches, mean, median, values in zip(*(column.tolist() for column in (*scores, points_G)), strict=True)
    )
    if rules.must_bind:
        large_G, probed_G = _claims_outside(bits, start_G, index_GK, points_G, modulus_G, coefficient_GK)
        for g in map(int, np.flatnonzero((2 * large_G > probed_G) & (probed_G >= PROBES_MIN))):
            sentence = (
                f"proof {g} claims large values at {large_G[g]} of {probed_G[g]} places where there are small ones"
            )
            return _rejected("not_binding", sentence, chunk_scores)
    return judge(chunk_scores, thresholds, scale_bounds=rules.scale_bounds)


def verify_answers(
    states: Sequence[torch.Tensor],
    proofs: Sequence[Sequence[bytes]],
    *,
    mode: Mode = "strict",
    thresholds: Thresholds = PRESETS["paper"],
    chunk_tokens: int = CHUNK_TOKENS,
    top_k: int = TOP_K,
) -> list[Verification]:
    """The verdict of `verify_proofs` on each answer, the arithmetic of all of them in one go: for many answers of a few
    tokens, where a call costs more than what it computes."""
    options: dict[str, Any] = {"mode": mode, "thresholds": thresholds, "chunk_tokens": chunk_tokens, "top_k": top_k}
    lengths = [len(one) for one in states]
    chunks = [chunk_count(length, chunk_tokens=chunk_tokens) for length in lengths]
    if len(states) > 1 and all(chunks) and chunks == [len(one) for one in proofs]:
        whole = [proof for one in proofs for proof in one]
        joint = verify_proofs(torch.cat(list(states)), whole, lengths=lengths, **options)
        if joint.accepted:  # whatever else it is, is found answer by answer
            stops = np.cumsum(chunks).tolist()
            parts = [joint.chunks[stop - count : stop] for count, stop in zip(chunks, stops, strict=True)]
            return [judge(part, thresholds, scale_bounds=RULES[mode].scale_bounds) for part in parts]
    return [verify_proofs(one, mine, **options) for one, mine in zip(states, proofs, strict=True)]


def judge(chunks: Sequence[ChunkScore], thresholds: Thresholds, *, scale_bounds: bool = True) -> Verification:
    """The verdict over a sequence's chunks; the first chunk that fails names the reason."""
    allowance = max(thresholds.min_allowed_failures, thresholds.ratio_allowed_failures * len(chunks))
    for g, score in enumerate(chunks):
        scale = score.values / VALUES_OF_BOUND if scale_bounds else 1.0
        bound = thresholds.exponent_mismatches * scale
        if score.exponent_mismatches > bound:
            allowance -= 1
            if allowance < 0:
                sentence = (
                    f"chunk {g}: {score.exponent_mismatches} of {score.values} values differ, at most {bound:g} may"
                )
                return _rejected("mismatch", sentence, chunks)
        mean, median = score.mantissa_mean, score.mantissa_median
        if mean > thresholds.mantissa_mean or median > thresholds.mantissa_median:
            sentence = (
                f"chunk {g}: mean error {mean:.4g} and median {median:g}, "
                f"at most {thresholds.mantissa_mean:g} and {thresholds.mantissa_median:g} may be"
            )
            return _rejected("drift", sentence, chunks)
    return Verification(accepted=True, reason=f"accepted: {len(chunks)} chunks within bounds", chunks=tuple(chunks))


def _not_canonical(length_G: np.ndarray, modulus_G: np.ndarray, coefficient_GK: np.ndarray) -> str:
    """Why no builder can have written these proofs for chunks of so many numbers; empty if one can."""
    # indices below m differ modulo m: a chunk of up to 65497 numbers has the largest modulus
    # in a longer one a modulus fails with a chance of about K²/2m, one in eight: thousands in a row do not happen, and
    # a much smaller modulus (the hidden size, say, where places become channels) could be met without the model
    low = np.flatnonzero(modulus_G < MODULUS_MAX - MODULI_TRIED_MAX)
    if low.size:
        g = low[0]
        return f"proof {g} has modulus {modulus_G[g]}, expected at least {MODULUS_MAX - MODULI_TRIED_MAX}"
    small = np.flatnonzero((length_G <= MODULUS_MAX) & (modulus_G != MODULUS_MAX))
    if small.size:
        g = int(small[0])
        return f"proof {g} has modulus {modulus_G[g]}, and {length_G[g]} numbers need none below {MODULUS_MAX}"
    # n points give a degree below n
    for g in map(int, np.flatnonzero(length_G < coefficient_GK.shape[1])):
        if coefficient_GK[g, length_G[g] :].any():
            return f"proof {g} has a degree of {length_G[g]} or more for {length_G[g]} numbers"
    return ""


def _rejected(code: str, sentence: str, chunks: Sequence[ChunkScore] = ()) -> Verification:
    assert code in REASONS
    return Verification(accepted=False, reason=f"{code}: {sentence}", chunks=tuple(chunks))


@njit(cache=True, nogil=True)
def _distance(u: np.int64, v: np.int64, whole_numbers: bool) -> np.int64:
    """How far two bf16 patterns are apart, in units in the last place; 128 stands for a mismatch."""
    magnitude_u, magnitude_v = u & 0x7FFF, v & 0x7FFF
    if whole_numbers:
        if magnitude_u >= INFINITY or ((u ^ v) & 0x8000 and magnitude_u > 0 and magnitude_v > 0):
            return np.int64(128)  # not a number, or another sign
        # patterns of one sign are ordered as their numbers
        return np.minimum(np.abs(magnitude_u - magnitude_v), np.int64(128))
    if magnitude_u >> 7 != magnitude_v >> 7:
        return np.int64(128)  # another exponent
    return np.abs((u & 0x7F) - (v & 0x7F))


@njit(cache=True, nogil=True)
def _scores(
    bits: np.ndarray,
    start_G: np.ndarray,
    index_GK: np.ndarray,
    points_G: np.ndarray,
    modulus_G: np.ndarray,
    coefficient_GK: np.ndarray,
    whole_numbers: bool,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(mismatches int64 [G], mean float64 [G], upper median float64 [G])."""
    chunks = modulus_G.size
    mismatches_G = np.zeros(chunks, np.int64)
    mean_G = np.full(chunks, NOTHING_MATCHES)
    median_G = np.full(chunks, NOTHING_MATCHES)
    for g in range(chunks):
        index_K = index_GK[g, : points_G[g]]
        claimed_K = evaluate(coefficient_GK[g], (index_K % modulus_G[g]).astype(np.uint32))
        count = np.zeros(129, np.int64)  # by distance
        for j in range(index_K.size):
            count[_distance(np.int64(claimed_K[j]), np.int64(bits[start_G[g] + index_K[j]]), whole_numbers)] += 1
        mismatches_G[g] = count[128]
        matches = index_K.size - count[128]
        if matches == 0:
            continue
        total, seen, median = 0, 0, -1
        for distance in range(128):
            total += distance * count[distance]
            seen += count[distance]
            if median < 0 and seen > matches // 2:  # sorted[matches // 2]
                median = distance
        mean_G[g] = total / matches
        median_G[g] = median
    return mismatches_G, mean_G, median_G


@njit(cache=True, nogil=True)
def _claims_outside(
    bits: np.ndarray,
    start_G: np.ndarray,
    index_GK: np.ndarray,
    points_G: np.ndarray,
    modulus_G: np.ndarray,
    coefficient_GK: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """(claims as large as the top K, places probed), per chunk, at places whose own number is less than half of them.

    Up to 64 places, evenly spaced. An honest polynomial is as good as random there: with a top K that spans o powers
    of two, (o + 2) / 255 of its claims are large. Twenty would make a tenth; a proof is rejected at more than a half.
    """
    chunks = modulus_G.size
    large_G = np.zeros(chunks, np.int64)
    probed_G = np.zeros(chunks, np.int64)
    for g in range(chunks):
        bits_N = bits[start_G[g] : start_G[g + 1]]
        lowest, highest = np.int64(INFINITY), np.int64(0)
        for j in range(points_G[g]):
            magnitude = np.int64(bits_N[index_GK[g, j]]) & 0x7FFF
            lowest, highest = min(lowest, magnitude), max(highest, magnitude)
        x = np.zeros(PROBES, np.uint32)
        probed = 0
        for p in range(min(PROBES, bits_N.size)):
            i = p * bits_N.size // PROBES if bits_N.size > PROBES else p
            if (np.int64(bits_N[i]) & 0x7FFF) + 128 <= lowest:
                x[probed] = i % modulus_G[g]
                probed += 1
        for claimed in evaluate(coefficient_GK[g], x[:probed]):
            large_G[g] += lowest - 128 < (np.int64(claimed) & 0x7FFF) < highest + 128
        probed_G[g] = probed
    return large_G, probed_G
