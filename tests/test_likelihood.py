"""Tests on the verifier's own probabilities: shape, termination, exact matches."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from refimpl.toploc.likelihood import (
    EOS_PROBABILITY_GRAIL,
    MatchLimits,
    ShapeLimits,
    bimodality,
    match_rate,
    match_test,
    shape_of,
    shape_test,
    termination_test,
    token_probabilities,
)

EOS = {2, 7}


def test_token_probabilities_are_the_softmax_of_the_claimed_tokens() -> None:
    logits_NV = torch.randn(5, 11, generator=torch.Generator().manual_seed(0)) * 3
    tokens_N = torch.tensor([0, 10, 3, -1, 11])
    for temperature in (1.0, 0.7):
        p_N = token_probabilities(logits_NV.bfloat16(), tokens_N, temperature)
        expected_NV = torch.softmax(logits_NV.bfloat16().double() / temperature, dim=-1)
        assert p_N[:3].tolist() == pytest.approx([float(expected_NV[n, tokens_N[n]]) for n in range(3)], abs=1e-6)
        assert p_N[3:].tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match="temperature"):
        token_probabilities(logits_NV, tokens_N, 0.0)


def test_bimodality_has_its_textbook_values() -> None:
    """(skewness² + 1) / kurtosis: 1 for two points, 5/9 for a uniform, 1/3 for a normal; 1/3 for no spread at all."""
    assert bimodality([0, 0, 0, 1]) == pytest.approx(1.0)
    assert bimodality([0, 1]) == pytest.approx(1.0)
    assert bimodality(np.linspace(0, 1, 100_001)) == pytest.approx(5 / 9, abs=1e-4)
    assert bimodality(np.random.default_rng(0).normal(size=1_000_000)) == pytest.approx(1 / 3, abs=0.01)
    assert bimodality([0.25] * 9) == pytest.approx(1 / 3)


def test_shape_figures_by_hand() -> None:
    shape = shape_of([0.1, 0.2, 0.3, 0.4, 1.0])
    assert (shape.tokens, shape.median, shape.low_quantile) == (5, 0.3, pytest.approx(0.14))
    assert math.isnan(shape_of([]).median)


def test_shape_rejects_two_heaps_and_low_medians_only() -> None:
    """n < 8: no verdict; median ≤ 0.20: rejected; 10 % quantile ≤ 0.20 and bimodality ≥ 0.58: rejected."""
    rng = np.random.default_rng(1)
    own = rng.beta(5, 1.2, 200)  # mass near 1
    cheap = np.concatenate([rng.beta(8, 1, 120), rng.beta(1, 60, 80)])  # a second heap near 0
    unlikely = rng.beta(1, 12, 200)
    assert shape_test(own)[0] is True
    assert shape_test(cheap)[0] is False and "two heaps" in shape_test(cheap)[1]
    assert shape_test(unlikely)[0] is False and "median" in shape_test(unlikely)[1]
    assert shape_test(cheap[:7])[0] is None and shape_test([])[0] is None
    assert shape_test([1.0] * 8)[0] is True
    assert shape_test([0.2] * 8)[0] is False  # at the limit
    assert shape_test(cheap, ShapeLimits(bimodality_max=1.0))[0] is True
    assert shape_test(unlikely, ShapeLimits(median_min=0.0, bimodality_max=1.0))[0] is True


@pytest.mark.parametrize("bad", [[0.5] * 8 + [math.nan], [0.5] * 8 + [1.5], [-0.1] * 8])
def test_probabilities_that_are_none_are_refused(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="probabilities"):
        shape_test(bad)


@pytest.mark.parametrize(
    ("tokens", "probability", "verdict", "word"),
    [
        ([5, 6, 2], 0.9, True, "probability"),
        ([5, 6, 7], 0.11, True, "probability"),
        ([5, 6, 2], 0.1, False, "0.1000"),  # "exceeds 0.1"
        ([5, 6, 2], 0.0, False, "end token"),
        ([5, 6, 3], 0.9, False, "without an end token"),
        ([], 0.9, False, "0 of 5"),
        ([5, 6, 3, 4, 5], 0.0, True, "limit"),
        ([5, 6, 3, 4, 2], 0.0, True, "limit"),
        ([5, 6, 3, 4, 5, 2], 0.9, False, "at most 5"),
        ([5, 2, 3, 2], 0.9, False, "position 1"),
        ([5, 6, 2], math.nan, None, "not a number"),
    ],
)
def test_an_answer_ends_by_length_or_by_a_likely_end_token(
    tokens: list[int], probability: float, verdict: bool | None, word: str
) -> None:
    result, reason = termination_test(tokens, EOS, probability, tokens_max=5)
    assert result is verdict and word in reason


def test_the_end_token_limit_is_a_parameter() -> None:
    assert termination_test([5, 2], EOS, 0.05, 9)[0] is False
    assert termination_test([5, 2], EOS, 0.05, 9, EOS_PROBABILITY_GRAIL)[0] is True
    with pytest.raises(ValueError, match="tokens_max"):
        termination_test([5, 2], EOS, 0.5, 0)


def test_matches_are_counted_and_judged() -> None:
    claimed, redrawn = torch.arange(50), torch.arange(50)
    redrawn[:6] += 1
    assert match_rate(claimed, redrawn) == 44 / 50
    assert match_test(claimed, redrawn)[0] is False
    assert match_test(claimed, redrawn, MatchLimits(rate_min=0.88))[0] is True
    assert match_test(claimed[:15], redrawn[:15])[0] is None
    assert match_rate(claimed[:0], redrawn[:0]) == 1.0
    with pytest.raises(ValueError, match="50"):
        match_rate(claimed, redrawn[:49])


@pytest.mark.parametrize(
    "wrong", [{"median_min": 1.5}, {"tokens_min": 0}, {"low_quantile": -0.1}, {"bimodality_max": math.nan}]
)
def test_limits_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        ShapeLimits(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="rate_min"):
        MatchLimits(rate_min=1.1)
