"""Log-probabilities made in slices equal those made from the whole table, in value and in gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from refimpl.grpo.logprob import head_logprobs, logits_logprobs

N, D, V = 11, 7, 13


def case(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (N,), generator=generator)


def top_5(z_NV: Tensor) -> Tensor:
    return z_NV >= z_NV.topk(5, dim=-1).values[:, -1:]


def test_plain_by_hand() -> None:
    """Temperature 0.6: logits 0 and 0.6·ln 3 are odds of 1 to 3."""
    logits = torch.tensor([[0.0, 0.6 * 1.0986122886681098]], dtype=torch.float64)
    logprob, entropy = logits_logprobs(logits, torch.tensor([1]), temperature=0.6)
    assert logprob.exp().item() == pytest.approx(0.75)
    assert entropy.item() == pytest.approx(0.5623351446188083)  # -(¾ ln ¾ + ¼ ln ¼)


@pytest.mark.parametrize("keep", [None, top_5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("rows", [1, 3, 11, 100])
def test_slices_equal_the_whole_table(rows: int, temperature: float, keep: None) -> None:
    hidden, weight, token = case()
    pull = torch.randn(2, N, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    results = []
    for sliced in (True, False):
        hidden.grad = weight.grad = None
        if sliced:
            logprob, entropy = head_logprobs(hidden, weight, token, temperature, keep, slice_cells=rows * V)
        else:
            logprob, entropy = logits_logprobs(hidden @ weight.T, token, temperature, keep)
        (pull[0] @ logprob + pull[1] @ entropy).backward()
        results.append((logprob.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, plain in zip(*results, strict=True):
        assert ours is not None and torch.allclose(ours, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("keep", [None, top_5])
@pytest.mark.parametrize("output", [0, 1])
def test_gradient_against_finite_differences(output: int, keep: None) -> None:
    """Each output on its own, so that the path without an entropy gradient is taken too."""
    hidden, weight, token = case()

    def one(h: Tensor, w: Tensor) -> Tensor:
        return head_logprobs(h, w, token, 0.7, keep, slice_cells=4 * V)[output]

    assert torch.autograd.gradcheck(one, (hidden, weight))


def test_a_sampled_token_outside_the_filter_stays_finite() -> None:
    """The engine's filter ran on other weights: what it sampled is in our distribution whatever our filter says."""
    hidden, weight, _ = case()
    least = (hidden @ weight.T).argmin(-1)
    logprob, entropy = head_logprobs(hidden, weight, least, keep=top_5)
    assert torch.isfinite(logprob).all() and torch.isfinite(entropy).all()
    (logprob.sum() + entropy.sum()).backward()
    assert hidden.grad is not None and torch.isfinite(hidden.grad).all()


def test_bf16_is_reduced_in_float32() -> None:
    hidden, weight, token = case(torch.bfloat16)
    logprob, entropy = head_logprobs(hidden, weight, token)
    exact, _ = logits_logprobs((hidden @ weight.T).double(), token)
    assert logprob.dtype == entropy.dtype == torch.float32
    assert torch.allclose(logprob.double(), exact, atol=1e-5)
    logprob.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def test_no_token_at_all() -> None:
    hidden, weight, token = case()
    logprob, entropy = head_logprobs(hidden[:0], weight, token[:0])
    assert logprob.shape == entropy.shape == (0,)
    logprob.sum().backward()
    assert weight.grad is not None and not weight.grad.any()


def test_bad_arguments() -> None:
    hidden, weight, token = case()
    with pytest.raises(ValueError, match="temperature is 0"):
        head_logprobs(hidden, weight, token, temperature=0.0)
    with pytest.raises(ValueError, match="expected int64"):
        head_logprobs(hidden, weight, token.float())
    with pytest.raises(ValueError, match=r"of shape \(11,\)"):
        head_logprobs(hidden, weight, token[:-1])
