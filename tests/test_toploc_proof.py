"""TOPLOC proofs: the bytes are those of the published package, and strict proofs bind what they say they bind."""

from __future__ import annotations

import base64
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from refimpl.toploc.field import PRIME, evaluate, interpolate_all, inverses
from refimpl.toploc.proof import BadProof, CannotProve, Mode, Proof, build_proofs, chunk_count, split_prefill
from refimpl.toploc.top import top_k_all
from refimpl.toploc.top_published import top_k_published

DATA = Path(__file__).parent / "data" / "toploc"
REFERENCES = ["a_h64_bf16", "b_h576_bf16", "c_h4096_modne"]


def bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(bits, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def gaussian(tokens: int, hidden: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed)).bfloat16()


def interpolate(index: list[int], pattern: list[int]) -> tuple[int, list[int]]:
    points = np.array([len(index)])
    modulus, coefficients = interpolate_all(np.array([index]), np.array([pattern], np.uint16), points, inverses())
    return int(modulus[0]), coefficients[0].tolist()


# -- arithmetic ------------------------------------------------------------------------------------------------------


def test_published_polynomial_vectors() -> None:
    """toploc 0.1.6, its own tests: (1,4), (2,5), (3,6) give 3 + x; 1 + 2x + 3x^2 + 4x^3 at 42 is 39741."""
    assert interpolate([1, 2, 3], [4, 5, 6]) == (65497, [3, 1, 0])
    assert evaluate(np.array([1, 2, 3, 4], np.uint16), np.array([42], np.uint32)).tolist() == [39741]


def test_modulus_is_the_largest_that_keeps_indices_apart() -> None:
    """5 and 65502 collide modulo 65497; bytes and base64 of the resulting proof."""
    modulus, coefficients = interpolate([5, 65502, 131000, 7], [0x4170, 0xC2A0, 0x3F80, 0x4049])
    assert (modulus, coefficients) == (65496, [18919, 35207, 28199, 27517])
    proof = Proof(modulus, np.array(coefficients, np.uint16))
    assert proof.encode().hex() == "ffd849e789876e276b7d"
    assert proof.to_base64() == "/9hJ54mHbidrfQ=="


def textbook_lagrange(x: list[int], y: list[int]) -> list[int]:
    """sum_j y_j prod_(i != j) (X - x_i) / (x_j - x_i), coefficient by coefficient."""
    total = [0] * len(x)
    for j, x_j in enumerate(x):
        basis, denominator = [1], 1
        for x_i in x[:j] + x[j + 1 :]:
            basis = [(low - x_i * high) % PRIME for low, high in zip([0, *basis], [*basis, 0], strict=True)]
            denominator = denominator * (x_j - x_i) % PRIME
        scale = y[j] * pow(denominator, -1, PRIME)
        total = [(t + scale * b) % PRIME for t, b in zip(total, basis, strict=True)]
    return total


@given(st.lists(st.integers(0, PRIME - 1), min_size=1, max_size=13, unique=True), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_compiled_interpolation_is_textbook_lagrange(x: list[int], random: object) -> None:
    y = [random.randrange(1 << 16) for _ in x]  # type: ignore[attr-defined]
    modulus, coefficients = interpolate(x, y)
    assert modulus == PRIME
    assert coefficients == textbook_lagrange(x, y)


def test_every_inverse_is_one() -> None:
    a = np.arange(1, PRIME)
    assert (a * inverses()[1:] % PRIME == 1).all()


@given(hnp.arrays(np.uint16, st.integers(1, 17)), hnp.arrays(np.uint16, st.integers(1, 7)))
@settings(max_examples=100, deadline=None)
def test_evaluation_without_division_is_evaluation(coefficients: np.ndarray, x: np.ndarray) -> None:
    """Any 16-bit coefficients and places, also those that no honest proof has."""
    expected = [sum(int(c) * pow(int(v), i, PRIME) for i, c in enumerate(coefficients)) % PRIME for v in x]
    assert evaluate(coefficients, x.astype(np.uint32)).tolist() == expected


# -- which numbers ---------------------------------------------------------------------------------------------------


def chunked(generator: np.random.Generator, distinct: int, lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Bits with at most `distinct` magnitudes, so that ties abound, and the borders of chunks of these lengths."""
    palette = generator.integers(0, 1 << 16, distinct).astype(np.uint16)
    return generator.choice(palette, sum(lengths)), np.cumsum([0, *lengths])


@pytest.mark.parametrize("distinct", [1, 2, 40, 3000])
def test_the_k_largest_and_of_equals_the_first(distinct: int) -> None:
    lengths = [1, 5, 63, 64, 65, 127, 500, 2048, 8191, 8192, 9001]
    for seed, k in enumerate([1, 3, 16, 128]):
        bits, start = chunked(np.random.default_rng(seed), distinct, lengths)
        index, points, finite = top_k_all(bits, start, k)
        for g, length in enumerate(lengths):
            magnitude = bits[start[g] : start[g + 1]].astype(np.int64) & 0x7FFF
            dull = np.lexsort((np.arange(length), -magnitude))[:k]
            assert points[g] == min(k, length)
            assert index[g, : points[g]].tolist() == sorted(dull.tolist())
            assert finite[g] == (magnitude.max() < 0x7F80)


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("distinct", [1, 2, 40, 3000])
def test_published_ties_are_those_of_torch_topk(distinct: int, finite: bool) -> None:
    """Both of torch's algorithms: a heap while 64 K <= N, quickselect on shorter chunks."""
    for seed, k in enumerate([1, 2, 7, 16, 127, 128]):
        lengths = [64 * k, 64 * k + 1, 100 * k + 13, 64 * k - 1, 2 * k, k]
        bits, start = chunked(np.random.default_rng(seed), distinct, lengths)
        if finite:
            bits = bits & np.uint16(0xBFFF)
        index, _, _ = top_k_published(bits, start, k)
        for g in range(len(lengths)):
            expected = bf16(bits[start[g] : start[g + 1]]).abs().topk(k).indices
            assert sorted(index[g].tolist()) == sorted(expected.tolist()), (k, lengths[g])


def test_sorted_activations_are_the_worst_case_and_still_right() -> None:
    """Rising magnitudes replace the whole heap again and again."""
    bits = np.sort(np.random.default_rng(3).integers(0, 0x7F80, 20_000)).astype(np.uint16)
    start = np.array([0, bits.size])
    assert sorted(top_k_published(bits, start, 128)[0][0]) == sorted(bf16(bits).abs().topk(128).indices.tolist())
    assert (bits[top_k_all(bits, start, 128)[0][0]] == bits[-128:]).all()


# -- published bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", REFERENCES)
def test_published_mode_builds_the_published_bytes(name: str) -> None:
    data = np.load(DATA / f"{name}.npz")
    proofs = build_proofs(
        bf16(data["decode_bits"]),
        chunk_tokens=int(data["decode_batching_size"]),
        top_k=int(data["topk"]),
        mode="published",
        prefill=None if data["skip_prefill"] else bf16(data["prefill_bits"]),
    )
    assert [proof.encode() for proof in proofs] == [bytes(proof) for proof in data["proofs"]]
    assert [proof.modulus for proof in proofs] == data["moduli"].tolist()


def test_published_list_input_with_and_without_its_prefill() -> None:
    """T16: with prefill skipped, the first decode chunk starts at the first element."""
    elements = [gaussian(5, 17), *(gaussian(1, 17, seed)[0] for seed in range(1, 11))]
    prefill, states = split_prefill(elements, skip_prefill=False)
    assert prefill is elements[0] and states.shape == (10, 17)
    with_prefill = build_proofs(states, chunk_tokens=3, top_k=4, mode="published", prefill=prefill)
    assert len(with_prefill) == 1 + 4

    prefill, states = split_prefill(elements[1:], skip_prefill=True)
    assert prefill is None
    assert build_proofs(states, chunk_tokens=3, top_k=4, mode="published") == with_prefill[1:]


def test_published_readme_proofs_decode_to_their_bytes() -> None:
    """The package's README prints these five proofs as bytes and as base64."""
    texts = ["/9kbQitnukt1bQ==", "/9nLuJrxhiVUoA==", "/9m0aNrm5KtBtg==", "/9mAZNZYMOKvcw==", "/9nSBGTqkZH21w=="]
    first = Proof.from_base64(texts[0], top_k=4)
    assert first.encode() == b"\xff\xd9\x1bB+g\xbaKum"
    assert first.coefficients.tolist() == [0x1B42, 0x2B67, 0xBA4B, 0x756D]
    assert [Proof.from_base64(text, top_k=4).to_base64() for text in texts] == texts


# -- sizes and borders -----------------------------------------------------------------------------------------------


def test_a_proof_is_258_bytes_and_344_characters_a_thousandth_of_the_activations() -> None:
    (proof,) = build_proofs(gaussian(32, 4096))
    assert len(proof.encode()) == 258 and len(proof.to_base64()) == 344
    assert math.floor(32 * 4096 * 2 / 258) == 1016


@pytest.mark.parametrize("mode", ["strict", "published"])
@pytest.mark.parametrize("with_prefill", [False, True])
def test_chunk_borders(mode: Mode, with_prefill: bool) -> None:
    """T16: every proof is the proof of its own rows alone, the last chunk is short, and prefill shifts nothing."""
    states, prompt = gaussian(11, 13), gaussian(7, 13, seed=1)
    proofs = build_proofs(states, chunk_tokens=4, top_k=5, mode=mode, prefill=prompt if with_prefill else None)
    pieces = ([prompt] if with_prefill else []) + [states[0:4], states[4:8], states[8:11]]
    assert proofs == [build_proofs(piece, chunk_tokens=99, top_k=5, mode=mode)[0] for piece in pieces]


@pytest.mark.parametrize(("tokens", "proofs"), [(0, 0), (1, 1), (31, 1), (32, 1), (33, 2), (64, 2), (65, 3)])
def test_number_of_proofs_is_tokens_over_chunk_rounded_up(tokens: int, proofs: int) -> None:
    assert chunk_count(tokens) == len(build_proofs(gaussian(tokens, 137))) == proofs


def test_a_chunk_with_fewer_numbers_than_k_binds_all_of_them() -> None:
    states = gaussian(3, 5)
    (proof,) = build_proofs(states)
    assert len(proof.encode()) == 258 and not proof.coefficients[15:].any()
    bits = states.view(torch.int16).numpy().view(np.uint16).ravel()
    assert evaluate(proof.coefficients, np.arange(15, dtype=np.uint32)).tolist() == bits.tolist()


def test_order_of_points_does_not_change_the_bytes() -> None:
    index = np.random.default_rng(0).choice(200_000, 128, replace=False).tolist()
    pattern = np.random.default_rng(1).integers(0, PRIME, 128).tolist()
    assert interpolate(index, pattern) == interpolate(index[::-1], pattern[::-1])


# -- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int16])
@pytest.mark.parametrize("mode", ["strict", "published"])
def test_t12_other_dtypes_are_refused_at_build_time(dtype: torch.dtype, mode: Mode) -> None:
    with pytest.raises(CannotProve, match="bfloat16 only"):
        build_proofs(gaussian(4, 64).to(dtype), mode=mode)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7F81, 0x7FFF, 0xFFD8, 0xFFD9, 0xFFFF])
@pytest.mark.parametrize(("place", "chunk"), [(0, 0), (2 * 67 - 1, 0), (2 * 67, 1), (4 * 67 - 1, 1)])
def test_t14_activations_that_are_not_finite_are_refused(pattern: int, place: int, chunk: int) -> None:
    """Patterns from 0xFFD9 on would wrap around the prime to tiny values."""
    bits = gaussian(4, 67).view(torch.int16).numpy().view(np.uint16).copy()
    bits.ravel()[place] = pattern
    with pytest.raises(CannotProve, match=f"chunk {chunk} are not finite"):
        build_proofs(bf16(bits), chunk_tokens=2, top_k=8)


def test_t13_what_cannot_be_proven_is_an_error_and_not_a_null_proof() -> None:
    with pytest.raises(CannotProve, match="a chunk of 10 numbers has no top 16"):
        build_proofs(gaussian(8, 5), chunk_tokens=2, top_k=16, mode="published")


@pytest.mark.parametrize("shape", [(7,), (2, 3, 5), (3, 0)])
def test_states_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"expected \[tokens, hidden\]"):
        build_proofs(torch.zeros(shape, dtype=torch.bfloat16))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ValueError, match="expected one of strict, published"):
        build_proofs(gaussian(2, 64), mode="lenient")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected at least 1"):
        build_proofs(gaussian(2, 64), chunk_tokens=0)
    with pytest.raises(ValueError, match="prefill has no tokens"):
        build_proofs(gaussian(2, 64), prefill=gaussian(0, 64))


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))],
)
def test_t17_states_on_any_device_in_any_layout(device: str) -> None:
    states = gaussian(64, 141)
    expected = build_proofs(states)
    assert build_proofs(states.to(device)) == expected
    assert build_proofs(states.t().contiguous().to(device).t()) == expected
    assert build_proofs(states.clone().requires_grad_().to(device)) == expected


# -- reading ---------------------------------------------------------------------------------------------------------


def honest(top_k: int = 8) -> bytes:
    return build_proofs(gaussian(4, 31), top_k=top_k)[0].encode()


def test_decode_is_the_inverse_of_encode() -> None:
    raw = honest()
    proof = Proof.decode(raw, top_k=8)
    assert proof.encode() == raw and proof.coefficients.dtype == np.uint16
    assert Proof.from_base64(base64.b64encode(raw).decode(), top_k=8) == proof
    assert len({proof, Proof.decode(raw, top_k=8)}) == 1


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        (b"", "0 bytes, expected 18"),
        (b"\xff\xd9", "2 bytes, expected 18"),  # T04: kills the package
        (honest() + b"\x01", "19 bytes, expected 18"),  # T06: one proof, two byte strings
        (honest()[:-1], "17 bytes, expected 18"),
        (honest()[:-2], "16 bytes, expected 18"),
        (bytes(18), "modulus 0, expected 2 to 65497"),  # T03: the null proof, kills the package
        (b"\x00\x01" + honest()[2:], "modulus 1, expected 2 to 65497"),
        (b"\xff\xda" + honest()[2:], "modulus 65498, expected 2 to 65497"),
        (honest()[:-2] + b"\xff\xd9", "coefficient not below the prime"),  # 65497 = 0 in the field
        ("a string", "no byte string but str"),
        (None, "no byte string but NoneType"),
    ],
)
def test_t03_t04_t06_malformed_proofs_are_refused_with_a_reason(raw: bytes, why: str) -> None:
    with pytest.raises(BadProof, match=why) as caught:
        Proof.decode(raw, top_k=8)
    assert len(caught.value.args) == 1


@pytest.mark.parametrize("text", ["", "*", "/9hJ54mHbidrfQ", "/9hJ54mHbidrfR==", "/9hJ54mHbidrfQ==\n", "é", "/9hJ"])
def test_base64_that_is_not_canonical_is_refused(text: str) -> None:
    with pytest.raises(BadProof):
        Proof.from_base64(text, top_k=4)
