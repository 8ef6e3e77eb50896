"""The sampling proof: an honest token has margin 0, any other the distance it lost by, in logits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from refimpl.model.sampler import Sampling, gumbel_noise, sample
from refimpl.toploc.sampling_proof import (
    SamplingLimits,
    SequenceScore,
    clipped,
    honest_mean,
    judge,
    margins,
    margins_and_exposures,
    score_sequences,
    verify_sampling,
)

N, V = 101, 1231
SAMPLINGS = [
    Sampling(),
    Sampling(temperature=0.6, top_p=0.95),
    Sampling(temperature=1.4, top_k=20),
    Sampling(temperature=0.8, top_k=50, top_p=0.9, min_p=0.02),
    Sampling(temperature=0),
]


def rows(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    logits_NV = torch.randn(N, V, generator=torch.Generator().manual_seed(seed)) * 3
    return logits_NV, torch.arange(N) * 7919 - 50, torch.arange(N) % 13


def noisy(logits_NV: Tensor, sigma: float) -> Tensor:
    return logits_NV + sigma * torch.randn(logits_NV.shape, generator=torch.Generator().manual_seed(99))


def textbook_margin(logits_V: Tensor, token: int, seed: int, position: int, sampling: Sampling) -> float:
    """The definition, one row, in float64: sort for the filters, whole noise, max over the kept set."""
    raw = logits_V.double()
    if sampling.greedy:
        return float(raw.max() - raw[token])
    z = raw / sampling.temperature
    order = z.argsort(descending=True)
    kept = order[: sampling.top_k or len(z)]
    p = torch.softmax(z[kept], dim=0)
    kept = kept[(p.cumsum(0) - p < sampling.top_p) | (torch.arange(len(p)) == 0)]
    kept = kept[z[kept] >= z.max() + math.log(max(sampling.min_p, 1e-300))]
    if token not in kept:
        return math.inf
    noise = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), 0, len(z))[0].double()
    scores = raw + sampling.temperature * noise
    return float(scores[kept].max() - scores[token])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_an_honest_prover_with_the_same_logits_has_margin_zero(sampling: Sampling) -> None:
    logits_NV, seeds_N, positions_N = rows()
    tokens_N, _ = sample(logits_NV, seeds_N, positions_N, sampling)
    assert margins(logits_NV, tokens_N, seeds_N, positions_N, sampling).tolist() == [0.0] * N


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_margin_is_the_definition(sampling: Sampling) -> None:
    """margin = max over S of (ℓ + T·g) minus that of the claimed token; +inf outside S."""
    logits_NV, seeds_N, positions_N = rows()
    claimed_N = logits_NV.topk(40).indices[torch.arange(N), torch.arange(N) % 40]
    margin_N = margins(logits_NV, claimed_N, seeds_N, positions_N, sampling)
    for n in range(N):
        expected = textbook_margin(logits_NV[n], int(claimed_N[n]), int(seeds_N[n]), int(positions_N[n]), sampling)
        assert float(margin_N[n]) == pytest.approx(expected, abs=2e-5)
    assert bool(margin_N.isinf().any()) == sampling.filtered and not bool((margin_N < 0).any())


def test_the_unit_is_the_logit_at_every_temperature() -> None:
    """The noise is scaled by T, not the logits, so the same disturbance costs about the same at every temperature."""
    logits_NV, seeds_N, positions_N = rows()
    means = []
    for temperature in (0.5, 1.0, 2.0):
        sampling = Sampling(temperature=temperature)
        sums = 0.0
        for step in range(8):
            tokens_N, _ = sample(noisy(logits_NV, 0.3), seeds_N + step, positions_N, sampling)
            sums += float(clipped(margins(logits_NV, tokens_N, seeds_N + step, positions_N, sampling), 5.0).max())
        means.append(sums / 8)
    assert max(means) < 2 * min(means)  # in units of the noise they would differ by 4


def test_honest_noise_is_small_and_cheats_are_not() -> None:
    """Near ties are lost by less than the logits differ; a wrong seed, greedy choice, other temperature or tokens from
    elsewhere lose by far more."""
    logits_NV, seeds_N, positions_N = rows()
    sampling = Sampling()

    def score(tokens_N: Tensor, seeds: Tensor = seeds_N) -> float:
        return float(clipped(margins(logits_NV, tokens_N, seeds, positions_N, sampling)).mean())

    honest_N, _ = sample(noisy(logits_NV, 0.02), seeds_N, positions_N, sampling)
    honest = score(honest_N)
    assert honest < 0.002
    assert float(margins(logits_NV, honest_N, seeds_N, positions_N, sampling).max()) < 0.02 * 10
    assert score(honest_N, seeds_N + 1) > 100 * max(honest, 0.001)
    assert score(logits_NV.argmax(dim=-1)) > 0.1
    assert score(sample(logits_NV, seeds_N, positions_N, Sampling(temperature=2.0))[0]) > 0.1
    assert score(torch.arange(N)) > 0.4


def test_an_infinite_margin_is_clipped_and_counted() -> None:
    """One token outside the kept set does not decide alone."""
    sampling = Sampling(top_k=5)
    logits_NV, seeds_N, positions_N = rows()
    tokens_N, _ = sample(logits_NV, seeds_N, positions_N, sampling)
    tokens_N[3] = logits_NV[3].argmin()
    margin_N = margins(logits_NV, tokens_N, seeds_N, positions_N, sampling)
    assert math.isinf(margin_N[3])
    (score,) = score_sequences(margin_N, [N], clip=0.5)
    assert (score.tokens, score.match_rate, score.outside) == (N, 100 / 101, 1)
    assert score.score == pytest.approx(0.5 / N)


def test_a_token_just_outside_costs_its_distance_when_asked() -> None:
    """outside="distance": T·(cut-off - z) + max(0, margin), small at the edge, still clipped far away."""
    sampling = Sampling(temperature=2.0, top_k=2)
    logits_NV = torch.tensor([[3.0, 2.0, 1.9, -9.0]] * 3)
    seeds_N, positions_N, tokens_N = torch.arange(3), torch.arange(3), torch.tensor([2, 3, 99])
    noise = gumbel_noise(seeds_N, positions_N, 0, 4)
    hard = margins(logits_NV, tokens_N, seeds_N, positions_N, sampling)
    soft = margins(logits_NV, tokens_N, seeds_N, positions_N, sampling, outside="distance")
    assert hard.isinf().all() and math.isinf(soft[2])
    for n, (token, beyond) in enumerate([(2, 0.1), (3, 11.0)]):
        scores = logits_NV[n] + 2.0 * noise[n]
        expected = beyond + max(0.0, float(scores[:2].max() - scores[token]))
        assert float(soft[n]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="outside"):
        margins(logits_NV, tokens_N, seeds_N, positions_N, sampling, outside="near")  # type: ignore[arg-type]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_a_token_that_is_none_has_an_infinite_margin(sampling: Sampling) -> None:
    logits_NV, seeds_N, positions_N = rows()
    tokens_N, _ = sample(logits_NV, seeds_N, positions_N, sampling)
    tokens_N[:4] = torch.tensor([-1, V, 2**62, -(2**63)])
    margin_N = margins(logits_NV, tokens_N, seeds_N, positions_N, sampling)
    assert margin_N[:4].isinf().all() and (margin_N[4:] == 0).all()


def test_many_sequences_are_scored_as_each_alone() -> None:
    """Batched: sequences one after another, rows of any number at once."""
    sampling = Sampling(temperature=0.9, top_p=0.9)
    logits_NV, _, _ = rows()
    lengths, seeds = [31, 0, 1, 64, 5], [4, 5, 6, -7, 2**62]
    seeds_N = torch.cat([torch.full((n,), s) for n, s in zip(lengths, seeds, strict=True)])
    positions_N = torch.cat([torch.arange(n) for n in lengths])
    tokens_N, _ = sample(noisy(logits_NV, 0.5), seeds_N, positions_N, sampling)
    together = score_sequences(margins(logits_NV, tokens_N, seeds_N, positions_N, sampling), lengths)
    start = 0
    for score, length, seed in zip(together, lengths, seeds, strict=True):
        part = slice(start, start + length)
        assert verify_sampling(logits_NV[part], tokens_N[part], seed, sampling) == score
        start += length
    assert together[1] == SequenceScore(tokens=0, score=0.0, match_rate=1.0, outside=0)
    tail = verify_sampling(logits_NV[10:31], tokens_N[10:31], 4, sampling, first_position=10)
    assert tail.tokens == 21 and tail.score * 21 <= together[0].score * 31 + 1e-9


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.5])
def test_exposure_says_how_much_an_honest_prover_errs(temperature: float) -> None:
    """For small logit noise σ the mean margin is h · σ² / (2T), whatever the context: sharp or flat, hot or cold."""
    sampling = Sampling(temperature=temperature)
    generator = torch.Generator().manual_seed(5)
    ratios = []
    for spread in (1.0, 2.0, 4.0):
        logits_NV = torch.randn(4000, 97, generator=generator) * spread
        seeds_N, positions_N = torch.arange(4000), torch.zeros(4000, dtype=torch.int64)
        total, exposure = 0.0, 0.0
        for step in range(4):
            disturbed_NV = logits_NV + 0.2 * torch.randn(logits_NV.shape, generator=generator)
            tokens_N, _ = sample(disturbed_NV, seeds_N + 10_000 * step, positions_N, sampling)
            margin_N, exposure_N = margins_and_exposures(
                logits_NV, tokens_N, seeds_N + 10_000 * step, positions_N, sampling
            )
            total, exposure = total + float(margin_N.sum()), exposure + float(exposure_N.sum())
        ratios.append(total / exposure)
    assert max(ratios) < 1.35 * min(ratios)
    assert np.mean(ratios) == pytest.approx(honest_mean(0.2, sampling.temperature), rel=0.15)


def test_exposures_are_one_when_greedy_or_not_asked_for() -> None:
    logits_NV, seeds_N, positions_N = rows()
    tokens_N = torch.zeros(N, dtype=torch.int64)
    for sampling, asked in ((Sampling(temperature=0), True), (Sampling(), False)):
        _, exposure_N = margins_and_exposures(logits_NV, tokens_N, seeds_N, positions_N, sampling, exposures=asked)
        assert exposure_N.tolist() == [1.0] * N


def test_the_verdict_has_a_reason_and_needs_enough_tokens() -> None:
    limits = SamplingLimits(score_max=0.01, match_rate_min=0.9, tokens_min=16)

    def verdict(tokens: int, score: float, match_rate: float) -> tuple[bool | None, str]:
        return judge(SequenceScore(tokens=tokens, score=score, match_rate=match_rate, outside=0), limits)

    assert verdict(15, 0.5, 0.0)[0] is None and "15 tokens" in verdict(15, 0.5, 0.0)[1]
    assert verdict(16, 0.011, 0.95)[0] is False and "0.0110" in verdict(16, 0.011, 0.95)[1]
    assert verdict(16, 0.01, 0.89)[0] is False and "89.0%" in verdict(16, 0.01, 0.89)[1]
    assert verdict(16, 0.01, 0.90)[0] is True


def test_what_can_not_be_is_refused_by_name() -> None:
    logits_NV, seeds_N, positions_N = rows()
    tokens_N = torch.zeros(N, dtype=torch.int64)
    for value in (math.nan, math.inf):
        broken_NV = logits_NV.clone()
        broken_NV[50, 3] = value
        with pytest.raises(ValueError, match="verifier's logits"):
            margins(broken_NV, tokens_N, seeds_N, positions_N, Sampling())
    with pytest.raises(ValueError, match="clip"):
        clipped(torch.zeros(3), math.inf)
    with pytest.raises(ValueError, match="lengths"):
        score_sequences(torch.zeros(3), [2])
    for wrong in ({"score_max": math.nan}, {"match_rate_min": 1.5}, {"tokens_min": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            SamplingLimits(**wrong)
    assert margins(torch.zeros(0, V), tokens_N[:0], seeds_N[:0], positions_N[:0], Sampling()).shape == (0,)
