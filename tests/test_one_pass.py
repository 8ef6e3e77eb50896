"""One pass over the logits says what the long way round says: bit for bit where a verdict hangs on it."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from refimpl.model.sampler import Sampling, sample
from refimpl.toploc import one_pass
from refimpl.toploc.likelihood import token_probabilities
from refimpl.toploc.one_pass import read
from refimpl.toploc.sampling_proof import margins_and_exposures

N, V = 13, 1031
ENDS = (7, 11)
RULES = [
    Sampling(temperature=0.8, top_p=0.95),
    Sampling(temperature=0.3, top_p=0.5, min_p=0.02),
    Sampling(temperature=2.0),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.7, top_k=5, top_p=0.9),
    Sampling(temperature=0.0),
]


def claim(rule: Sampling, spread: float = 3.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 logits, tokens that a slightly different model drew by the same seeds, seeds, positions."""
    chance = torch.Generator().manual_seed(5)
    logits_NV = (spread * torch.randn(N, V, generator=chance)).to(torch.bfloat16)
    seeds_N, places_N = torch.arange(N) * 101 - 3, torch.arange(N) * 3
    moved_NV = logits_NV.float() + 1.0 * torch.randn(N, V, generator=chance)
    return logits_NV, sample(moved_NV, seeds_N, places_N, rule)[0], seeds_N, places_N


@pytest.mark.parametrize("rule", RULES)
def test_it_equals_the_definitions(rule: Sampling) -> None:
    logits_NV, tokens_N, seeds_N, places_N = claim(rule)
    found = read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, rule, ENDS)
    margin_N, exposure_N = margins_and_exposures(logits_NV, tokens_N, seeds_N, places_N, rule, "distance")
    assert np.array_equal(found.margins, margin_N.double().numpy())
    assert np.array_equal(found.exposures, exposure_N.double().numpy())
    assert (found.margins > 0).any() and (found.margins == 0).any(), "both kinds occur"
    p_N = token_probabilities(logits_NV, tokens_N, rule.temperature or 1.0)
    assert found.probabilities == pytest.approx(p_N.double().numpy(), rel=1e-4)
    likely_NV = (logits_NV.float() / (rule.temperature or 1.0)).softmax(-1)
    assert found.end_probabilities == pytest.approx(likely_NV[:, list(ENDS)].sum(-1).double().numpy(), rel=1e-4)


def test_logits_that_are_not_bf16_go_the_long_way_to_the_same_numbers() -> None:
    logits_NV, tokens_N, seeds_N, places_N = claim(RULES[0])
    quick = read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, RULES[0], ENDS)
    plain = read(lambda a, b: logits_NV[a:b].float(), tokens_N, seeds_N, places_N, RULES[0], ENDS)
    assert np.array_equal(quick.margins, plain.margins)
    assert quick.probabilities == pytest.approx(plain.probabilities, rel=1e-5)


def test_so_do_rows_further_apart_than_a_float64_reaches() -> None:
    rule = Sampling(temperature=0.01)
    logits_NV, tokens_N, seeds_N, places_N = claim(rule)
    logits_NV[0] -= 40.0
    assert one_pass._quick(logits_NV, tokens_N, seeds_N, places_N, rule, ENDS) is None
    found = read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, rule, ENDS)
    assert np.isfinite(found.margins).all()


def test_a_token_that_is_none_has_an_infinite_margin_and_no_probability() -> None:
    logits_NV, tokens_N, seeds_N, places_N = claim(RULES[0])
    tokens_N[2], tokens_N[5] = -1, V
    found = read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, RULES[0], ENDS)
    assert found.margins[[2, 5]].tolist() == [math.inf] * 2 and found.probabilities[[2, 5]].tolist() == [0.0] * 2
    assert np.isfinite(np.delete(found.margins, [2, 5])).all()


@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("rule", [RULES[0], RULES[4]])
def test_logits_of_ones_own_that_are_no_numbers_are_an_error(value: float, rule: Sampling) -> None:
    logits_NV, tokens_N, seeds_N, places_N = claim(RULES[0])
    logits_NV[4, 900] = value
    with pytest.raises(ValueError, match="NaN or"):
        read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, rule, ENDS)


def test_a_token_that_can_not_be_chosen_is_fine() -> None:
    logits_NV, tokens_N, seeds_N, places_N = claim(RULES[0])
    logits_NV[:, 900:] = -math.inf
    tokens_N = tokens_N % 900
    found = read(lambda a, b: logits_NV[a:b], tokens_N, seeds_N, places_N, RULES[0], ENDS)
    margin_N, _ = margins_and_exposures(logits_NV, tokens_N, seeds_N, places_N, RULES[0], "distance")
    assert np.array_equal(found.margins, margin_N.double().numpy())


def test_nothing_read_is_nothing_said() -> None:
    none_N = torch.zeros(0, dtype=torch.int64)
    assert len(read(lambda a, b: torch.zeros(0, V), none_N, none_N, none_N, RULES[0], ENDS).margins) == 0
