"""Checking TOPLOC proofs: the published scores, and the holes that strict mode closes."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.toploc.check import (
    NOTHING_MATCHES,
    PRESETS,
    REASONS,
    RULES,
    ChunkScore,
    Thresholds,
    Verification,
    _claims_outside,
    _distance,
    judge,
    verify_answers,
    verify_proofs,
)
from refimpl.toploc.proof import BadProof, Mode, Proof, build_proofs, decode_all
from refimpl.toploc.top import top_k_all

DATA = Path(__file__).parent / "data" / "toploc"
PAPER, DEPLOYED = PRESETS["paper"], PRESETS["deployed"]

# as in tests/data/toploc/make_noise_scores.py
DISTURBANCES = {
    "same": lambda x: x,
    "times_1.01": lambda x: (x.float() * 1.01).bfloat16(),
    "times_1.10": lambda x: (x.float() * 1.10).bfloat16(),
    "times_4": lambda x: (x.float() * 4).bfloat16(),
    "negated": lambda x: -x,
    "rolled": lambda x: x.roll(1, 0),
}


def bf16(bits: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint16).view(np.int16).copy()).view(torch.bfloat16)


def gaussian(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def bits_of(states: torch.Tensor) -> np.ndarray:
    return states.view(torch.int16).numpy().view(np.uint16).ravel()


def encoded(states: torch.Tensor, **options: object) -> list[bytes]:
    return [proof.encode() for proof in build_proofs(states, **options)]  # type: ignore[arg-type]


def triples(verification: Verification) -> list[tuple[float, float, float]]:
    return [(c.exponent_mismatches, c.mantissa_mean, c.mantissa_median) for c in verification.chunks]


# -- published scores ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a_h64_bf16", "b_h576_bf16", "c_h4096_modne"])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
def test_published_mode_scores_as_the_published_tensor_path(name: str, disturbance: str) -> None:
    data, expected = np.load(DATA / f"{name}.npz"), np.load(DATA / "noise_scores.npz")[f"{name}/{disturbance}"]
    verification = verify_proofs(
        DISTURBANCES[disturbance](bf16(data["decode_bits"])),
        [bytes(proof) for proof in data["proofs"][0 if data["skip_prefill"] else 1 :]],
        mode="published",
        chunk_tokens=int(data["decode_batching_size"]),
        top_k=int(data["topk"]),
    )
    assert triples(verification) == [tuple(row) for row in expected.tolist()]


def test_published_prefill_chunk_is_compared_first() -> None:
    data = np.load(DATA / "b_h576_bf16.npz")
    states, prefill = bf16(data["decode_bits"]), bf16(data["prefill_bits"])
    proofs = [bytes(proof) for proof in data["proofs"]]
    verification = verify_proofs(states, proofs, mode="published", prefill=prefill)
    assert verification.accepted and triples(verification) == [tuple(row) for row in data["py_verify"].tolist()]
    wrong = verify_proofs(states, proofs, mode="published", prefill=gaussian(12, 576))
    assert not wrong.accepted and wrong.reason.startswith("mismatch: chunk 0")
    assert triples(wrong)[1:] == triples(verification)[1:]


def test_published_comparison_rule() -> None:
    """(120,10), (121,0), (120,14) against (120,13), (99,0), (120,14): 1 mismatch, mean 1.5, upper median 3."""
    proven = bf16([[120 << 7 | 10, 121 << 7, 120 << 7 | 14, 0, 0]])
    replayed = bf16([[120 << 7 | 13, 99 << 7, 120 << 7 | 14, 0, 0]])
    for mode in RULES:
        verification = verify_proofs(replayed, encoded(proven, top_k=3, mode=mode), top_k=3, mode=mode)
        assert triples(verification) == [(1, 1.5, 3.0)]


def test_published_unit_tests_hold_in_both_modes() -> None:
    """x1.01: (nearly) no mismatch, mean in (0, 2]; x1.10: mean and median above 10; x4: all mismatch."""
    for mode in RULES:
        states = gaussian(64, 576)
        states[states.abs() > 3.5] = 3.0  # keep x1.01 and x1.10 below the next power of two
        proofs = encoded(states, mode=mode)
        scores = {name: verify_proofs(f(states), proofs, mode=mode).chunks for name, f in DISTURBANCES.items()}
        assert all(c.exponent_mismatches <= 3 and 0 < c.mantissa_mean <= 2 for c in scores["times_1.01"])
        assert all(c.mantissa_mean > 10 and c.mantissa_median > 10 for c in scores["times_1.10"])
        assert all(c.exponent_mismatches == 128 for c in scores["times_4"])
        assert all(c.mantissa_mean == c.mantissa_median == NOTHING_MATCHES for c in scores["times_4"])


# -- verdicts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "sizes"),
    [(mode, sizes) for mode in RULES for sizes in [(1, 211), (32, 576), (33, 576), (70, 307)]]
    + [("strict", (5, 3)), ("strict", (1, 1)), ("strict", (33, 64))],  # chunks with fewer than K numbers
)
def test_honest_proofs_are_accepted_without_error(mode: Mode, sizes: tuple[int, int]) -> None:
    """Short last chunks and one-token answers too."""
    states = gaussian(*sizes)
    verification = verify_proofs(states, encoded(states, mode=mode), mode=mode)
    assert verification.accepted and verification.code == "accepted"
    assert all(score == (0, 0.0, 0.0) for score in triples(verification))
    assert len(verification.chunks) == -(-sizes[0] // 32)


@pytest.mark.parametrize("mode", ["strict", "published"])
def test_many_answers_at_once_get_the_verdicts_of_each_alone(mode: Mode) -> None:
    answers = [gaussian(tokens, 67, seed=tokens) for tokens in (3, 1, 32, 33, 71, 2)]
    honest = [encoded(states, mode="strict") for states in answers]
    other = encoded(gaussian(33, 67, seed=5), mode="strict")
    for proofs in (
        honest,
        [*honest[:3], other, *honest[4:]],  # another answer's
        [honest[0], [], *honest[2:]],
        [[*honest[0], *honest[1]], [], *honest[2:]],  # as many as there are chunks, but not each its own
        [honest[0], [b"no proof"], *honest[2:]],
    ):
        alone = [verify_proofs(states, mine, mode=mode) for states, mine in zip(answers, proofs, strict=True)]
        assert verify_answers(answers, proofs, mode=mode) == alone
    assert all(verdict.accepted for verdict in verify_answers(answers, honest))
    assert [verdict.accepted for verdict in verify_answers(answers, [*honest[:3], other, *honest[4:]])] == [
        True, True, True, False, True, True,
    ]  # fmt: skip


def test_a_share_of_failures_is_allowed_per_answer_and_not_over_many() -> None:
    """Three in ten chunks may fail. One foreign chunk among seven is less than that, and all of its own answer."""
    lenient = Thresholds(
        exponent_mismatches=38, ratio_allowed_failures=0.3, mantissa_mean=math.inf, mantissa_median=math.inf
    )
    answers = [gaussian(tokens, 67, seed=tokens) for tokens in (3, 1, 32, 5, 31, 2, 7)]
    proofs = [encoded(states) for states in answers]
    proofs[3] = encoded(gaussian(5, 67, seed=99))
    joint = verify_proofs(
        torch.cat(answers), [one for (one,) in proofs], lengths=[len(one) for one in answers], thresholds=lenient
    )
    assert joint.accepted and joint.chunks[3].exponent_mismatches > 38, "or this would not be the case that is meant"
    verdicts = verify_answers(answers, proofs, thresholds=lenient)
    assert [verdict.accepted for verdict in verdicts] == [True, True, True, False, True, True, True]
    assert verdicts[3].code == "mismatch" and verdicts[3].reason.startswith("mismatch: chunk 0")
    alone = [verify_proofs(one, mine, thresholds=lenient) for one, mine in zip(answers, proofs, strict=True)]
    assert verdicts == alone


def test_an_empty_answer_has_no_proofs_and_nothing_to_check() -> None:
    empty = gaussian(0, 64)
    assert verify_proofs(empty, []) == Verification(accepted=True, reason="nothing_to_check: 0 proofs, 0 tokens")
    assert verify_proofs(empty, [bytes(258)]).code == "wrong_count"


@pytest.mark.parametrize("sizes", [{}, {"top_k": 16}, {"chunk_tokens": 8}])
def test_other_activations_are_rejected_whatever_k(sizes: dict[str, int]) -> None:
    """With K = 16 no chunk can have 38 mismatches: strict bounds are out of 128 values."""
    states, other = gaussian(64, 137), gaussian(64, 137, seed=1)
    verification = verify_proofs(other, encoded(states, **sizes), **sizes)  # type: ignore[arg-type]
    assert verification.code == "mismatch" and verification.chunks


def test_published_bounds_do_not_scale() -> None:
    states, other = gaussian(64, 137), gaussian(64, 137, seed=1)
    lenient = Thresholds(exponent_mismatches=38, mantissa_mean=NOTHING_MATCHES, mantissa_median=NOTHING_MATCHES)
    proofs = encoded(states, top_k=16, mode="published")
    assert verify_proofs(other, proofs, top_k=16, mode="published", thresholds=lenient).accepted


def score(mismatches: int = 0, mean: float = 0, median: float = 0, values: int = 128) -> ChunkScore:
    return ChunkScore(exponent_mismatches=mismatches, mantissa_mean=mean, mantissa_median=median, values=values)


@pytest.mark.parametrize(
    ("thresholds", "at_the_bound"),
    [(PAPER, score(38, 10, 8)), (DEPLOYED, score(60, 40, 40))],
    ids=["paper", "deployed"],
)
def test_presets_equality_passes(thresholds: Thresholds, at_the_bound: ChunkScore) -> None:
    m, mean, median = at_the_bound.exponent_mismatches, at_the_bound.mantissa_mean, at_the_bound.mantissa_median
    assert judge([score(), at_the_bound], thresholds).accepted
    assert judge([score(), score(m + 1, mean, median)], thresholds).reason.startswith("mismatch: chunk 1")
    assert judge([score(), score(m, mean + 0.01, median)], thresholds).reason.startswith("drift: chunk 1")
    assert judge([score(), score(m, mean, median + 1)], thresholds).reason.startswith("drift: chunk 1")


def test_strict_bounds_are_out_of_128_values() -> None:
    assert judge([score(19, values=64)], PAPER).accepted
    assert judge([score(20, values=64)], PAPER).code == "mismatch"
    assert judge([score(20, values=64)], PAPER, scale_bounds=False).accepted


def test_published_forgiveness() -> None:
    """max(min_allowed, ratio x chunks) chunks may mismatch, if what matches in them meets the mantissa bounds."""
    bad, worse, good = score(61, 3, 3), score(61, 41, 3), score()

    def verdict(chunks: list[ChunkScore], count: int = 0, ratio: float = 0.0) -> str:
        thresholds = Thresholds(
            exponent_mismatches=60,
            mantissa_mean=40,
            mantissa_median=40,
            min_allowed_failures=count,
            ratio_allowed_failures=ratio,
        )
        return judge(chunks, thresholds).code

    assert verdict([bad, good]) == "mismatch"
    assert verdict([bad, good], count=1) == "accepted"
    assert verdict([bad, bad], count=1) == "mismatch"
    assert verdict([bad, good, bad, good], ratio=0.5) == "accepted"
    assert verdict([bad, bad, bad, good], ratio=0.5) == "mismatch"
    assert verdict([bad, good], ratio=0.49) == "mismatch"
    assert verdict([worse, good], count=1) == "drift"
    assert verdict([score(128, NOTHING_MATCHES, NOTHING_MATCHES)], count=1) == "drift"


def test_t18_scores_are_errors_and_grow_with_the_disturbance() -> None:
    states = gaussian(32, 576)
    proofs = encoded(states)
    scores = [verify_proofs((states.float() * f).bfloat16(), proofs).chunks[0] for f in (1, 1.01, 1.03, 1.1, 1.3, 2.1)]
    means = [s.mantissa_mean for s in scores[:-1]]
    assert means == sorted(means) and means[0] == 0 and len(set(means)) == len(means)
    assert scores[0].exponent_mismatches == 0 and scores[-1].exponent_mismatches == 128


# -- the holes -------------------------------------------------------------------------------------------------------


def test_t01_sign_flipped_activations_are_rejected() -> None:
    """The package verifies -x against the proof of x with no error at all."""
    states = gaussian(64, 576)
    assert verify_proofs(-states, encoded(states, mode="published"), mode="published").accepted
    verification = verify_proofs(-states, encoded(states))
    assert verification.code == "mismatch"
    assert all(chunk.exponent_mismatches == 128 for chunk in verification.chunks)


def test_t02_a_proof_list_that_is_too_short_or_too_long_is_rejected() -> None:
    """The package never looks at tokens without a proof: here tokens 5 to 9 are replaced."""
    states = gaussian(9, 64)
    options = {"chunk_tokens": 4, "top_k": 8}
    replaced = torch.cat([states[:4], gaussian(5, 64, seed=1)])
    published = encoded(states, mode="published", **options)
    assert verify_proofs(replaced, published[:1], mode="published", **options).accepted  # type: ignore[arg-type]
    proofs = encoded(states, **options)
    for claimed in ([], proofs[:1], proofs[:2], [*proofs, proofs[0]]):
        verification = verify_proofs(replaced, claimed, **options)  # type: ignore[arg-type]
        assert verification.reason == f"wrong_count: {len(claimed)} proofs for 3 chunks of up to 4 tokens"
    assert verify_proofs(states, proofs, **options).accepted  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", list(RULES))
@pytest.mark.parametrize("raw", [bytes(258), b"\xff\xd9", b"", b"\xff", None, "text", 7, bytes(10**7)])
def test_t03_t04_proofs_that_kill_the_package_are_rejected(mode: Mode, raw: bytes) -> None:
    """Modulus zero: SIGFPE. No coefficients: SIGSEGV. Here, in both modes: a verdict."""
    verification = verify_proofs(gaussian(32, 64), [raw], mode=mode)
    assert verification.code == "malformed" and not verification.accepted and not verification.undecided


def test_t06_a_trailing_byte_is_rejected() -> None:
    states = gaussian(32, 64)
    assert verify_proofs(states, [encoded(states, mode="published")[0] + b"\1"], mode="published").accepted
    assert verify_proofs(states, [encoded(states)[0] + b"\1"]).code == "malformed"


def test_t06_another_modulus_for_the_same_points_is_rejected() -> None:
    """All 2048 indices lie below any of these moduli, so the polynomial means the same under each."""
    states = gaussian(32, 64)
    proof = build_proofs(states)[0]
    for modulus in (2048, 65_000, 65_496):
        raw = Proof(modulus, proof.coefficients).encode()
        assert verify_proofs(states, [raw], mode="published").accepted
        assert verify_proofs(states, [raw]).reason.startswith(f"malformed: proof 0 has modulus {modulus}")


def test_t07_indices_are_reduced_by_the_proofs_modulus() -> None:
    """Flat length 70 000, largest values at 3 and 65 500: the modulus becomes 65 496, and no error appears."""
    states = torch.zeros(10, 7000, dtype=torch.bfloat16)
    states.view(-1)[[3, 65_500]] = torch.tensor([2.0, 3.0], dtype=torch.bfloat16)
    for mode in RULES:
        (proof,) = build_proofs(states, top_k=2, mode=mode)
        assert proof.modulus == 65_496
        assert triples(verify_proofs(states, [proof.encode()], top_k=2, mode=mode)) == [(0, 0.0, 0.0)]


def test_t08_one_ulp_across_a_power_of_two_is_a_small_error() -> None:
    """1.9921875 and 2.0 are neighbours in bf16."""
    proven = torch.full((4, 64), 1.9921875, dtype=torch.bfloat16)
    replayed = torch.full((4, 64), 2.0, dtype=torch.bfloat16)
    published = verify_proofs(replayed, encoded(proven, mode="published"), mode="published")
    assert triples(published) == [(128, NOTHING_MATCHES, NOTHING_MATCHES)]
    strict = verify_proofs(replayed, encoded(proven))
    assert strict.accepted and triples(strict) == [(0, 1.0, 1.0)]


def test_t08_neighbours_on_the_line_of_floats_are_one_apart_and_doubles_mismatch() -> None:
    magnitude = np.arange(0x7F80)
    line = np.concatenate([(magnitude | 0x8000)[:0:-1], magnitude])  # all finite numbers, ascending, one zero
    steps = {_distance(np.int64(u), np.int64(v), True) for u, v in pairwise(line)}
    assert steps == {1}
    assert _distance(np.int64(0x8000), np.int64(0), True) == 0  # -0 is 0
    for pattern in (0x0080, 0x3F80, 0x4049, 0xC2A0, 0x7EFF):  # x, 2x, and the last number before it
        assert _distance(np.int64(pattern), np.int64(pattern + 128), True) == 128
        assert _distance(np.int64(pattern), np.int64(pattern + 127), True) == 127


@given(st.integers(1, 0x7F7F), st.integers(0, 0x7F7F))
@settings(max_examples=200, deadline=None)
def test_strict_distance(u: int, v: int) -> None:
    """Symmetric; zero only for equal numbers; another sign always mismatches; inside a power of two as published."""
    a, b = np.int64(u), np.int64(v)
    assert _distance(a, b, True) == _distance(b, a, True) == _distance(a | 0x8000, b | 0x8000, True)
    assert (_distance(a, b, True) == 0) == (u == v)
    assert v == 0 or _distance(a | 0x8000, b, True) == 128
    if u >> 7 == v >> 7:
        assert _distance(a, b, True) == _distance(a, b, False) == abs(u - v)


def test_claims_that_are_no_number_mismatch() -> None:
    """A proof of infinities, made by hand, against the largest finite number, which is one step away on the line."""
    largest = torch.full((1, 8), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    coefficients = np.zeros(8, np.uint16)
    coefficients[0] = 0x7F80
    verification = verify_proofs(largest, [Proof(65497, coefficients).encode()], top_k=8)
    assert triples(verification) == [(8, NOTHING_MATCHES, NOTHING_MATCHES)]


def test_t10_what_lies_outside_the_top_k_can_be_replaced_unseen() -> None:
    """The stated gap of the scheme: 8 of 256 numbers are bound, and the other 248 mean nothing to the verifier."""
    states = gaussian(4, 64)
    proofs = encoded(states, top_k=8)
    bound = states.abs().view(-1).topk(8).indices
    other = (gaussian(4, 64, seed=1).float() * 0.1).bfloat16()
    other.view(-1)[bound] = states.view(-1)[bound]
    assert (other != states).sum() == 248
    verification = verify_proofs(other, proofs, top_k=8)
    assert verification.accepted and triples(verification) == [(0, 0.0, 0.0)]


@pytest.mark.parametrize("states", [gaussian(64, 576), gaussian(64, 576).abs(), gaussian(512, 64).abs()])
def test_a_constant_proof_passes_the_package_and_not_strict_mode(states: torch.Tensor) -> None:
    """Made without any activations: the largest numbers of a chunk lie within one or two powers of two."""
    constant = np.zeros(128, np.uint16)
    constant[0] = 0x4030  # 2.75
    proofs = [Proof(65497, constant).encode()] * (len(states) // 32)
    assert verify_proofs(states, proofs, mode="published", thresholds=DEPLOYED).accepted
    for thresholds in (DEPLOYED, PAPER):
        verification = verify_proofs(states, proofs, thresholds=thresholds)
        assert re.match(r"not_binding: proof 0 claims large values at (\d+) of \1 places", verification.reason)


def test_honest_proofs_claim_next_to_nothing_outside_the_top_k() -> None:
    """About 2 of 100 where the top K spans two powers of two; far from the half that rejects, over 1280 proofs."""
    states = torch.cat([gaussian(20_480, 64), (gaussian(20_480, 64, seed=1).float() ** 5).bfloat16()])
    bits, start = bits_of(states), np.arange(1281) * 32 * 64
    index, points, _ = top_k_all(bits, start, 128)
    modulus, coefficients = decode_all(encoded(states), top_k=128, mode="strict")
    large, probed = _claims_outside(bits, start, index, points, modulus, coefficients)
    assert probed.min() >= 24 and (large / probed).max() < 0.25
    assert 0.005 < large.sum() / probed.sum() < 0.05


@pytest.mark.parametrize("value", [0.0, -3.5])
def test_activations_that_are_all_equal_are_honestly_a_constant(value: float) -> None:
    states = torch.full((32, 64), value, dtype=torch.bfloat16)
    (proof,) = build_proofs(states)
    assert not proof.coefficients[1:].any()
    assert verify_proofs(states, [proof.encode()]).accepted


def test_t12_replays_of_another_dtype_are_the_callers_error() -> None:
    states = gaussian(32, 64)
    for dtype in (torch.float16, torch.float32):
        with pytest.raises(ValueError, match="bfloat16 only"):
            verify_proofs(states.to(dtype), encoded(states))


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_t14_a_replay_that_is_not_finite_is_its_own_verdict(value: float) -> None:
    states = gaussian(64, 64)
    proofs = encoded(states)
    states[40, 5] = value
    verification = verify_proofs(states, proofs)
    assert verification.reason == "nonfinite_replay: the verifier's activations of chunk 1 are inf or NaN"
    assert not verification.accepted and verification.undecided


def test_short_chunks_of_published_proofs_are_undecided() -> None:
    """A chunk with fewer than K numbers aborts the package's verifier."""
    verification = verify_proofs(gaussian(1, 64), [bytes([255, 217]) * 129], mode="published")
    assert verification.code == "short_chunk" and verification.undecided


def test_short_chunk_with_a_higher_degree_than_its_numbers_allow_is_rejected() -> None:
    """Adding a multiple of prod (X - i) changes the bytes and no value at the 15 places."""
    states = gaussian(3, 5)
    proof = build_proofs(states)[0]
    vanishing = np.array([1], np.int64)
    for i in range(15):
        vanishing = (np.append(0, vanishing) - i * np.append(vanishing, 0)) % 65497
    other = proof.coefficients.astype(np.int64)
    other[:16] = (other[:16] + vanishing) % 65497
    raw = Proof(65497, other.astype(np.uint16)).encode()
    assert verify_proofs(states, [proof.encode()]).accepted
    assert verify_proofs(states, [raw]).reason == "malformed: proof 0 has a degree of 15 or more for 15 numbers"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_t17_replays_on_any_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    states = gaussian(33, 141)
    assert verify_proofs(states.to(device), encoded(states)).accepted


def test_a_proof_copied_from_another_answer_is_rejected() -> None:
    assert verify_proofs(gaussian(32, 576, seed=1), encoded(gaussian(32, 576))).code == "mismatch"


# -- hostile bytes ---------------------------------------------------------------------------------------------------

TOP_K, CHUNK_TOKENS = 8, 4
STATES = gaussian(4, 31)
HONEST = encoded(STATES, top_k=TOP_K)[0]


def mutated(generator: np.random.Generator) -> bytes:
    """Random bytes of a plausible or any length, or the honest proof with a few things done to it."""
    kind = generator.integers(6)
    if kind == 0:
        return generator.bytes(int(generator.integers(0, 300)))
    if kind == 1:
        return generator.bytes(len(HONEST))
    raw = bytearray(HONEST)
    for _ in range(generator.integers(1, 4)):
        place = int(generator.integers(len(raw)))
        if kind == 2:
            raw[place] ^= 1 << int(generator.integers(8))
        elif kind == 3:
            raw[place] = int(generator.integers(256))
        elif kind == 4:
            del raw[place:]
            raw = raw or bytearray(b"\0")
        else:
            raw[place:place] = generator.bytes(int(generator.integers(1, 5)))
    return bytes(raw)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=100, deadline=None)
def test_ten_thousand_random_and_mutated_proofs_each_get_a_reasoned_verdict(seed: int) -> None:
    """100 draws of 100: no crash, and decode reads only what encode writes.

    Strict mode accepts the honest bytes, and those that differ by a few units of the first coefficient: that moves all
    values by a few units in the last place, as honest noise does.
    """
    generator = np.random.default_rng(seed)
    for _ in range(100):
        raw = mutated(generator)
        for mode in RULES:
            verification = verify_proofs(STATES, [raw], mode=mode, top_k=TOP_K, chunk_tokens=CHUNK_TOKENS)
            assert verification.code in REASONS and ": " in verification.reason
            assert not verification.undecided
            if mode == "strict" and raw != HONEST and verification.accepted:
                assert raw[:2] + raw[4:] == HONEST[:2] + HONEST[4:]
                assert 0 < abs(int.from_bytes(raw[2:4], "big") - int.from_bytes(HONEST[2:4], "big")) <= 8
        try:
            assert Proof.decode(raw, top_k=TOP_K).encode() == raw
        except BadProof as error:
            assert len(error.args) == 1 and isinstance(error.args[0], str)


@given(st.lists(st.one_of(st.binary(max_size=40), st.none(), st.integers(), st.text(max_size=5)), max_size=4))
@settings(max_examples=200, deadline=None)
def test_any_list_of_anything_gets_a_reasoned_rejection(proofs: list[object]) -> None:
    for mode in RULES:
        verification = verify_proofs(STATES, proofs, mode=mode, top_k=TOP_K, chunk_tokens=CHUNK_TOKENS)  # type: ignore[arg-type]
        assert verification.code in REASONS
        # the published bounds do not scale: 38 mismatches of 8 values are allowed, so that mode may take anything here
        assert mode == "published" or not verification.accepted
