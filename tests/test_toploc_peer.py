"""Side by side with the published package, where it is installed: the same bytes and the same scores."""

from __future__ import annotations

import pytest
import torch

from refimpl.toploc.check import verify_proofs
from refimpl.toploc.proof import build_proofs, split_prefill

toploc = pytest.importorskip("toploc", reason="the package toploc is not installed", exc_type=ImportError)
pytestmark = pytest.mark.peer


@pytest.mark.parametrize(
    ("hidden", "chunk_tokens", "top_k", "tokens"),
    [
        (64, 8, 16, 40),
        (576, 32, 128, 512),
        (2048, 32, 128, 96),
        (4096, 32, 128, 160),
        (8192, 32, 128, 64),
        (577, 7, 31, 61),
    ],
)
@pytest.mark.parametrize("seed", range(5))
def test_bytes_and_scores_are_those_of_the_package(
    hidden: int, chunk_tokens: int, top_k: int, tokens: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=generator).bfloat16()
    states[:, : hidden // 16] *= 8  # outlier channels
    theirs = toploc.build_proofs_bytes(list(states), chunk_tokens, top_k, skip_prefill=True)
    ours = build_proofs(states, chunk_tokens=chunk_tokens, top_k=top_k, mode="published")
    assert [proof.encode() for proof in ours] == theirs
    assert [proof.to_base64() for proof in ours] == toploc.build_proofs_base64(
        list(states), chunk_tokens, top_k, skip_prefill=True
    )
    for scale, noise in [(1.0, 0.0), (1.0, 0.01), (1.1, 0.0), (1.0, 1.0), (-3.0, 0.0)]:
        replay = (states.float() * scale + noise * torch.randn(tokens, hidden, generator=generator)).bfloat16()
        expected = toploc.verify_proofs_bytes(replay, theirs, chunk_tokens, top_k, skip_prefill=True)
        verification = verify_proofs(replay, theirs, mode="published", chunk_tokens=chunk_tokens, top_k=top_k)
        assert [(c.exponent_mismatches, c.mantissa_mean, c.mantissa_median) for c in verification.chunks] == [
            (e.exp_mismatches, e.mant_err_mean, e.mant_err_median) for e in expected
        ]


def test_prefill_chunk_is_that_of_the_package() -> None:
    generator = torch.Generator().manual_seed(0)
    elements = [torch.randn(n, 576, generator=generator).bfloat16() for n in (29, *[1] * 40)]
    prefill, states = split_prefill(elements, skip_prefill=False)
    ours = build_proofs(states, mode="published", prefill=prefill)
    assert [proof.encode() for proof in ours] == toploc.build_proofs_bytes(elements, 32, 128)


def test_sixteen_bit_patterns_that_are_no_numbers_wrap_as_in_the_package() -> None:
    """T14: published mode takes NaNs as the package does; strict mode refuses them (test_toploc_proof.py)."""
    states = torch.randn(32, 576, generator=torch.Generator().manual_seed(0)).bfloat16()
    states.view(torch.int16)[::3, ::97] = -3  # 0xFFFD
    ours = build_proofs(states, mode="published")
    assert [proof.encode() for proof in ours] == toploc.build_proofs_bytes(list(states), 32, 128, skip_prefill=True)
