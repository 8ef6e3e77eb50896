"""Random projection of the hidden state: distances survive, bytes are bounded, garbage is refused."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.toploc.projection import (
    HEADER,
    ProjectionError,
    decode,
    distances,
    encode,
    project,
    projection_matrix,
    relative_distances,
)

T, H = 13, 577


def hidden(seed: int = 0, tokens: int = T) -> torch.Tensor:
    return torch.randn(tokens, H, generator=torch.Generator().manual_seed(seed)) * 5


def test_the_matrix_is_gaussian_scaled_and_the_same_for_all() -> None:
    """N(0, 1)/√k from a public seed; a larger k keeps the columns of a smaller one."""
    matrix_Hk = projection_matrix(8192, 16)
    assert matrix_Hk.shape == (8192, 16)
    assert float(matrix_Hk.mean()) == pytest.approx(0, abs=5 / math.sqrt(16 * 8192 * 16))
    assert float(matrix_Hk.var()) == pytest.approx(1 / 16, rel=0.02)
    assert torch.allclose(matrix_Hk * 4, projection_matrix(8192, 64)[:, :16] * 8, rtol=1e-6)
    assert not torch.allclose(matrix_Hk, projection_matrix(8192, 16, seed=43))
    assert projection_matrix(3, 2).flatten().tolist() == pytest.approx(
        [-0.8098865, -0.4287875, 0.1679463, -0.4203159, -0.3139552, 0.2406811], abs=1e-6
    )


def test_lengths_survive_on_average() -> None:
    """E ‖P d‖² = ‖d‖², relative standard deviation √(2/k)."""
    difference_TH = hidden(1, tokens=4000)
    for projections in (8, 128):
        ratio_T = project(difference_TH, projections).square().sum(-1) / difference_TH.square().sum(-1)
        assert float(ratio_T.std()) == pytest.approx(math.sqrt(2 / projections), rel=0.15)
        assert float(ratio_T.mean()) == pytest.approx(1.0, abs=0.1)
    total = [float(project(hidden(2), 128, seed).square().sum()) for seed in range(40)]
    assert np.mean(total) == pytest.approx(float(hidden(2).square().sum()), rel=0.03)


def test_a_change_anywhere_is_seen() -> None:
    """Also where no top-k commitment looks: all of the difference in the smallest values."""
    honest_TH = hidden()
    changed_TH = honest_TH.clone()
    smallest_TK = honest_TH.abs().topk(300, largest=False).indices
    changed_TH.scatter_(1, smallest_TK, -honest_TH.gather(1, smallest_TK))
    noise_T = distances(project(honest_TH.bfloat16(), 8), project(honest_TH, 8))
    change_T = distances(project(changed_TH, 8), project(honest_TH, 8))
    assert float(change_T.min()) > 3 * float(noise_T.max())


@given(
    st.integers(0, 20), st.integers(2, 128), st.sampled_from([0.0, 1e-20, 1e-6, 1.0, 3e4, 1e12]), st.integers(0, 2**31)
)
@settings(max_examples=60, deadline=None)
def test_bytes_come_back_within_half_precision(tokens: int, projections: int, size: float, seed: int) -> None:
    """8 + 2·T·k bytes, each value to 2^-11 of itself or 2^-25 of the largest; what was decoded encodes the same."""
    values_Tk = torch.randn(tokens, projections, generator=torch.Generator().manual_seed(seed)) * size
    raw = encode(values_Tk)
    assert len(raw) == 8 + 2 * tokens * projections
    back_Tk = decode(raw)
    assert back_Tk.shape == values_Tk.shape and back_Tk.dtype == torch.float32
    largest = float(values_Tk.abs().max()) if tokens else 0.0
    assert ((back_Tk - values_Tk).abs() <= values_Tk.abs() * 2**-11 + max(largest, 2.0**-60) * 2**-24).all()
    assert encode(back_Tk) == raw or float(back_Tk.abs().max()) == 2.0 ** (struct.unpack_from("b", raw, 3)[0])


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 2.0**101])
def test_hidden_states_that_are_no_numbers_are_refused(value: float) -> None:
    projected_Tk = project(hidden(), 4)
    projected_Tk[7, 3] = value
    with pytest.raises(ProjectionError, match="expected"):
        encode(projected_Tk)


@given(st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_garbage_is_refused_with_a_reason(raw: bytes) -> None:
    for candidate in (raw, b"R\x01" + raw):
        try:
            assert torch.isfinite(decode(candidate)).all()
        except ProjectionError as error:
            assert "expected" in str(error)


@given(st.integers(0, 8 + 2 * T * 4 - 1), st.integers(1, 255))
@settings(max_examples=300, deadline=None)
def test_a_changed_byte_is_refused_or_still_a_canonical_commitment(place: int, change: int) -> None:
    raw = bytearray(encode(project(hidden(), 4)))
    raw[place] ^= change
    try:
        back_Tk = decode(bytes(raw))
    except ProjectionError:
        return
    assert place >= HEADER.size or place == 3
    assert torch.isfinite(back_Tk).all() and back_Tk.shape == (T, 4)


def test_each_bound_of_the_format_is_checked() -> None:
    raw = encode(project(hidden(), 4))

    def with_header(
        magic: int = ord("R"), version: int = 1, k: int = 4, exponent: int = raw[3], tokens: int = T
    ) -> bytes:
        return HEADER.pack(magic, version, k, exponent, tokens) + raw[8:]

    assert with_header() == raw
    for broken, word in [
        (raw[:-1], "bytes"), (raw + b"\0", "bytes"), (raw[:7], "at least"), (with_header(magic=0), "begins"),
        (with_header(version=2), "begins"), (with_header(k=1), "projections"), (with_header(k=129), "projections"),
        (with_header(tokens=T + 1), "bytes"), (with_header(tokens=2**32 - 1), "at most"),
        (with_header(exponent=101), "bounds"), (with_header(exponent=-61), "bounds"),
        (raw[:8] + b"\x00\x7e" + raw[10:], "at most 1"), (raw[:8] + b"\x00\x7c" + raw[10:], "at most 1"),
        (raw[:8] + b"\x00\x40" + raw[10:], "at most 1"), (raw[:8] + bytes(len(raw) - 8), "smallest"),
        (raw[:8] + b"\x00\x30" * (T * 4), "smallest"),
    ]:  # fmt: skip
        with pytest.raises(ProjectionError, match=word):
            decode(broken)
    with pytest.raises(ProjectionError, match="at most 12"):
        decode(raw, tokens_max=12)


def test_distances_are_per_token_and_refuse_other_shapes() -> None:
    own_Tk = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    committed_Tk = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    assert distances(committed_Tk, own_Tk).tolist() == [5.0, 0.0, 1.0, 1.0]
    assert relative_distances(committed_Tk, own_Tk).tolist() == [1.0, 0.0, math.inf, 1.0]
    for other_Tk in (own_Tk[:3], torch.zeros(4, 3)):
        with pytest.raises(ProjectionError, match="expected 4 of 2"):
            distances(other_Tk, own_Tk)


def test_sizes_out_of_range_are_refused() -> None:
    for projections in (1, 129):
        with pytest.raises(ValueError, match="projections"):
            project(hidden(), projections)
    with pytest.raises(ValueError, match="hidden"):
        projection_matrix(0, 8)
