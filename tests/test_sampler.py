"""The sampler's promises: equal bits anywhere, the right distribution, the filters of the original in their order."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from refimpl.model.filters import _nucleus_of_sorted
from refimpl.model.noise import (
    GUMBEL_STREAM,
    apply_table,
    derive_seed,
    fill_words_kernel,
    gumbel_noise,
    gumbel_noise_at,
    gumbel_table,
    noise_from_words,
    noise_kernel,
    normal_noise,
    normal_table,
    philox,
    random_words,
)
from refimpl.model.sampler import Sampling, cutoffs, impurity, race_cpu, race_torch, sample, scale

DRAWS = 1_000_000


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def edge_words() -> Tensor:
    """Words at both ends, around the middle, around every power of two, and random ones."""
    powers = torch.tensor([2**e + d for e in range(32) for d in range(-3, 4)]).clamp(0, 2**32 - 1)
    ends = torch.arange(1000)
    some = torch.randint(0, 2**32, (20_000,), generator=torch.Generator().manual_seed(0))
    return torch.cat([ends, 2**32 - 1 - ends, powers, some])


# --- bits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, int, int, int], key: tuple[int, int], expected: tuple[int, ...]
) -> None:
    """Known answers of Random123 (philox4x32, 10 rounds)."""
    c0, c1, c2, c3 = map(ids, counter)
    words = philox((c0, c1, c2, c3), (ids(key[0]), ids(key[1])))
    assert tuple(int(w) for w in words) == expected


def test_noise_is_the_same_on_every_machine() -> None:
    """The tables and a stretch of noise, by hash: a change here breaks every proof made before."""

    def digest(array: np.ndarray, kind: str) -> str:
        return hashlib.sha256(array.astype(kind).tobytes()).hexdigest()[:16]

    assert digest(gumbel_table(), "<i8") == "a2a44c7d7febd78b"
    assert digest(normal_table(), "<i8") == "d378c5a0f8bab6d6"
    assert gumbel_noise(ids(1), ids(2), 0, 4)[0].tolist() == [
        -0.8308224678039551, 2.4061636924743652, 6.821337699890137, 0.8394031524658203,
    ]  # fmt: skip
    noise = gumbel_noise(ids(0, -1, 2**63 - 1), ids(0, 7, 2**40), 0, 10_007)
    assert digest(noise.numpy(), "<f4") == "8d263d2e6a43a9f5"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_noise_has_the_same_bits_on_a_gpu() -> None:
    seeds, positions = torch.arange(-3, 4) * 2**45, torch.arange(7) * 3
    for make in (gumbel_noise, normal_noise):
        assert torch.equal(make(seeds.cuda(), positions.cuda(), 5, 49_152).cpu(), make(seeds, positions, 5, 49_152))


@pytest.mark.slow
def test_a_fusing_compiler_makes_the_same_bits() -> None:
    """All but one conversion is integer arithmetic, so code fused by torch.compile has nothing to round otherwise."""
    words = edge_words()
    table = torch.from_numpy(gumbel_table())
    fused = torch.compile(apply_table, fullgraph=True)
    assert torch.equal(fused(words, table), noise_from_words(words, gumbel_table))

    def draw(seeds_B: Tensor, positions_B: Tensor, table: Tensor) -> Tensor:
        return apply_table(random_words(seeds_B, positions_B, 0, 1001, GUMBEL_STREAM), table)

    seeds_B, positions_B = ids(0, -5, 2**60), ids(1, 2**33, 3)
    fused_draw = torch.compile(draw, fullgraph=True)
    assert torch.equal(fused_draw(seeds_B, positions_B, table), gumbel_noise(seeds_B, positions_B, 0, 1001))


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 2**63 - 1),
    first=st.integers(0, 200_000),
    count=st.integers(1, 70),
)
@settings(max_examples=60, deadline=None)
def test_any_slice_gather_batch_or_kernel_sees_the_same_noise(seed: int, position: int, first: int, count: int) -> None:
    """Any slice, in any order and batch: row and column alone decide."""
    whole = gumbel_noise(ids(5, seed, -9), ids(11, position, 3), first - first % 7, count + 7)
    alone = gumbel_noise(ids(seed), ids(position), first, count)
    assert torch.equal(alone[0], whole[1, first % 7 :][:count])
    tokens = torch.arange(first, first + count).flip(0)
    assert torch.equal(gumbel_noise_at(ids(seed), ids(position), tokens[None])[0], alone[0].flip(0))
    words = np.empty(4 * (count // 4 + 2), dtype=np.uint32)
    fill_words_kernel(words, first // 4, seed, position, GUMBEL_STREAM)
    compiled = [noise_kernel(int(word), gumbel_table()) for word in words[first % 4 :][:count]]
    assert compiled == alone[0].tolist()


def test_the_compiled_noise_equals_the_torch_noise_at_every_edge() -> None:
    words = edge_words()
    for table in (gumbel_table, normal_table):
        expected = noise_from_words(words, table).numpy()
        assert np.array_equal(np.array([noise_kernel(int(w), table()) for w in words], dtype=np.float32), expected)


def test_the_table_is_the_quantile_function() -> None:
    """The parabolas are within 1e-7, and float32 rounds once more."""
    words = edge_words()
    w = (2 * words.double().numpy() + 1) / 2**33
    rest = (2**33 - 2 * words.double().numpy() - 1) / 2**33
    for table, quantile in (
        (gumbel_table, np.where(w < 0.5, -np.log(-np.log1p(-w)), -np.log(-np.log(rest)))),
        (normal_table, np.where(w < 0.5, stats.norm.ppf(w), -stats.norm.ppf(rest))),
    ):
        noise = noise_from_words(words, table).double().numpy()
        assert np.all(np.abs(noise - quantile) <= 1e-7 + np.abs(quantile) * 2**-24)
        assert np.all(np.diff(noise[np.argsort(w)]) * (-1 if table is gumbel_table else 1) >= 0)  # no step back


def test_the_tails_reach_beyond_24_bits() -> None:
    """With 24 bits the largest noise would be 17.3, and a token of probability 1e-8 could never be drawn."""
    largest, smallest = noise_from_words(ids(0, 2**32 - 1), gumbel_table).tolist()
    assert largest == pytest.approx(33 * math.log(2), abs=1e-6)
    assert smallest == pytest.approx(-math.log(33 * math.log(2)), abs=1e-6)
    tail = noise_from_words(torch.arange(1000), gumbel_table)
    assert (tail.diff() < 0).all()  # a thousand words of the last 2^-22 are a thousand values


# --- quality --------------------------------------------------------------------------------------------------------

ALONG = {
    "seeds": lambda n: (torch.arange(n), torch.zeros(n, dtype=torch.int64), 0),
    "positions": lambda n: (torch.zeros(n, dtype=torch.int64), torch.arange(n), 0),
    "seeds far apart": lambda n: (torch.arange(n) << 32, torch.full((n,), 3, dtype=torch.int64), 12_345),
}


@pytest.mark.parametrize("along", ALONG)
def test_noise_has_its_distribution(along: str) -> None:
    seeds, positions, first = ALONG[along](200_000)
    gumbel = gumbel_noise(seeds, positions, first, 3).double().numpy()
    normal = normal_noise(seeds, positions, first, 3).double().numpy()
    for column in range(3):
        assert stats.kstest(gumbel[:, column], "gumbel_r").pvalue > 1e-4
        assert stats.kstest(normal[:, column], "norm").pvalue > 1e-4
    assert stats.kstest(gumbel_noise(ids(9), ids(9), 0, 200_000)[0].double().numpy(), "gumbel_r").pvalue > 1e-4


def test_neighbours_are_not_correlated() -> None:
    """Next token, next position, next seed: each correlation is within five standard errors of 0, 1/√n."""
    uniform = random_words(torch.arange(100), ids(0).repeat(100), 0, 10_000, GUMBEL_STREAM).double().numpy()
    by_position = random_words(ids(4).repeat(100), torch.arange(100), 0, 10_000, GUMBEL_STREAM).double().numpy()
    for grid in (uniform, by_position):
        limit = 5 / math.sqrt(grid[:, 1:].size)
        for lag in (1, 2, 3, 4, 8):
            assert abs(np.corrcoef(grid[:, lag:].ravel(), grid[:, :-lag].ravel())[0, 1]) < limit
        for lag in (1, 2, 64):
            assert abs(np.corrcoef(grid[lag:].ravel(), grid[:-lag].ravel())[0, 1]) < limit


def test_every_bit_of_the_words_is_fair() -> None:
    words = random_words(torch.arange(50), ids(1).repeat(50), 0, 10_000, GUMBEL_STREAM).reshape(-1)
    ones = ((words[:, None] >> torch.arange(32)) & 1).double().mean(dim=0)
    assert ((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(len(words))).all()


def test_derived_seeds_differ_by_path_and_stay_the_same() -> None:
    seeds = {derive_seed(base, *path) for base in (0, 1, -1) for path in [(), (0,), (1,), (0, 0), (0, 1), (1, 0)]}
    assert len(seeds) == 18
    assert derive_seed(5, 1, 2) == 6365530544514438571
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)


# --- distribution ---------------------------------------------------------------------------------------------------


def expected_probabilities(logits_V: Tensor, sampling: Sampling) -> np.ndarray:
    """Textbook filters on one row, in float64: sort, cut, renormalise, in the order of the original."""
    z = logits_V.double().numpy() / sampling.temperature
    keep = np.ones(len(z), dtype=bool)
    if sampling.top_k:
        keep &= z >= np.sort(z)[::-1][min(sampling.top_k, len(z)) - 1]
    p = np.where(keep, np.exp(z - z.max()), 0)
    p /= p.sum()
    if sampling.top_p < 1:
        order = np.argsort(-p, kind="stable")
        before = np.cumsum(p[order]) - p[order]
        keep[order[before >= sampling.top_p]] = False
    keep &= p >= sampling.min_p * p.max()
    p = np.where(keep, p, 0)
    return p / p.sum()


@pytest.mark.parametrize("along", ["seeds", "positions"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(top_p=0.9),
        Sampling(temperature=0.8, top_k=7, top_p=0.95, min_p=0.02),
    ],
    ids=str,
)
def test_it_samples_the_right_distribution(sampling: Sampling, along: str) -> None:
    """Chi-square over 10^6 draws from a small vocabulary, across seeds and across positions."""
    logits_V = torch.tensor([2.0, -1.0, 0.5, 0.0, 1.25, -3.0, 1.0, -0.5, 0.25, -2.0, 1.75])
    counts = np.zeros(11)
    for start in range(0, DRAWS, 250_000):
        moving = torch.arange(start, start + 250_000)
        still = torch.full_like(moving, 17)
        seeds_B, positions_B = (moving, still) if along == "seeds" else (still, moving)
        tokens_B, _ = sample(logits_V.expand(len(moving), -1), seeds_B, positions_B, sampling)
        counts += np.bincount(tokens_B.numpy(), minlength=11)
    p = expected_probabilities(logits_V, sampling)
    assert counts[p == 0].sum() == 0
    assert stats.chisquare(counts[p > 0], DRAWS * p[p > 0]).pvalue > 1e-4


def test_rare_tokens_are_drawn_as_often_as_they_should() -> None:
    """A thousand rare tokens beside one nearly certain one: how often any is drawn is a Poisson count."""
    logits_V = torch.zeros(1024)
    logits_V[7] = 9 + math.log(1023)
    n = 200_000
    tokens = torch.cat(
        [
            sample(logits_V.expand(4000, -1), torch.arange(s, s + 4000), ids(0).repeat(4000), Sampling())[0]
            for s in range(0, n, 4000)
        ]
    )
    rare = tokens[tokens != 7]
    expected = n / (1 + math.e**9)
    assert stats.poisson.cdf(len(rare), expected) > 1e-4 and stats.poisson.sf(len(rare) - 1, expected) > 1e-4
    assert len(rare.unique()) > 0.9 * len(rare)


# --- filters, the race, the reports ---------------------------------------------------------------------------------

samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 50, 10_000]),
    top_p=st.sampled_from([1.0, 0.999, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 1e-4, 0.05, 1.0]),
)


@given(
    sampling=samplings,
    vocabulary=st.sampled_from([1, 2, 3, 255, 256, 257, 600, 5003]),
    kind=st.sampled_from(["normal", "flat", "ties", "sharp", "masked", "huge"]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_the_compiled_race_equals_the_torch_race(sampling: Sampling, vocabulary: int, kind: str, seed: int) -> None:
    """Bit for bit, winner and score, whatever the row looks like."""
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(3, vocabulary, generator=generator) * {"flat": 0.01, "sharp": 30, "huge": 1e6}.get(kind, 3)
    if kind == "ties":
        logits_BV = logits_BV.round()
    if kind == "masked":
        logits_BV[:, 1::2] = -math.inf
    seeds_B, positions_B = ids(seed, seed + 1, -seed), ids(0, 1, 2**33)
    scaled_BV = scale(logits_BV, sampling)
    cut_B = cutoffs(scaled_BV, sampling)
    for result, twin in zip(
        race_cpu(scaled_BV, cut_B, seeds_B, positions_B),
        race_torch(scaled_BV, cut_B, seeds_B, positions_B),
        strict=True,
    ):
        assert torch.equal(result, twin)


def test_ties_in_the_race_go_to_the_lowest_token() -> None:
    """At 2^30 float32 swallows the noise: every score ties."""
    logits_BV = torch.full((2, 700), 2.0**30)
    for race in (race_cpu, race_torch):
        winner_B, _ = race(logits_BV, torch.full((2,), -math.inf), ids(1, 2), ids(0, 0))
        assert winner_B.tolist() == [0, 0]


@given(
    sampling=samplings.filter(lambda s: not s.greedy), seed=st.integers(0, 2**32), spread=st.sampled_from([0.5, 3.0])
)
@settings(max_examples=80, deadline=None)
def test_filters_keep_what_transformers_keeps(sampling: Sampling, seed: int, spread: float) -> None:
    """The dull twin: the library's own top-k, top-p and min-p, in the order of the original."""
    logits_BV = torch.randn(3, 1009, generator=torch.Generator().manual_seed(seed)) * spread
    scaled_BV = scale(logits_BV, sampling)
    twin_BV, none = scaled_BV, torch.LongTensor()
    if sampling.top_k:
        twin_BV = TopKLogitsWarper(sampling.top_k)(none, twin_BV)
    if sampling.top_p < 1:
        twin_BV = TopPLogitsWarper(sampling.top_p)(none, twin_BV)
    if sampling.min_p > 0:
        twin_BV = MinPLogitsWarper(sampling.min_p)(none, twin_BV)
    kept_BV = scaled_BV >= cutoffs(scaled_BV, sampling)[:, None]
    differing = (kept_BV != twin_BV.isfinite()).sum(dim=-1)
    assert (differing <= (1 if sampling.top_p < 1 or sampling.min_p == 1 else 0)).all()  # sums in another order


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("top_p", [1e-3, 0.3, 0.9, 0.999, 1 - 1e-7])
def test_the_nucleus_found_by_bins_is_the_one_found_by_sorting(spread: float, top_p: float) -> None:
    """Its dull twin, in float64; what they may differ by has a probability within rounding of the limit."""
    scaled_BV = torch.randn(5, 5003, generator=torch.Generator().manual_seed(6)) * spread
    cut_B = cutoffs(scaled_BV, Sampling(top_p=top_p))
    sorted_BV = scaled_BV.double().sort(dim=-1, descending=True).values
    for cut, low, high in zip(
        cut_B,
        _nucleus_of_sorted(sorted_BV, min(1 - 1e-15, top_p + 2e-6)),
        _nucleus_of_sorted(sorted_BV, top_p - 2e-6),
        strict=True,
    ):
        assert low <= cut <= high or (cut == -math.inf and top_p > 1 - 1e-6)


def test_filters_by_hand() -> None:
    """Probabilities .4 .3 .2 .1: what each setting keeps."""
    logits_1V = torch.tensor([[0.2, 0.4, 0.1, 0.3]]).log()

    def kept(**settings: float) -> list[int]:
        sampling = Sampling(**settings)  # type: ignore[arg-type]
        return (logits_1V >= cutoffs(logits_1V, sampling)[:, None])[0].nonzero()[:, 0].tolist()

    assert kept() == [0, 1, 2, 3]
    assert kept(top_k=2) == [1, 3]
    assert kept(top_p=0.69) == [1, 3] and kept(top_p=0.71) == [0, 1, 3] and kept(top_p=1e-6) == [1]
    assert kept(min_p=0.6) == [1, 3] and kept(min_p=0.2) == [0, 1, 2, 3] and kept(min_p=0.3) == [0, 1, 3]
    assert kept(top_k=3, top_p=0.7) == [
        1,
        3,
    ]  # of .9 kept by top-k: .444, .333 reach .7; unfiltered, .4 and .3 reach it not
    assert kept(top_k=2, top_p=0.55) == [1]  # .571 of what top-k left


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.6, top_k=20, top_p=0.9), Sampling(min_p=0.1)])
def test_the_reported_logprob_is_the_masked_scaled_log_softmax(sampling: Sampling) -> None:
    logits_BV = torch.randn(5, 1231, generator=torch.Generator().manual_seed(1)) * 3
    tokens_B, logprobs_B = sample(logits_BV, torch.arange(5), torch.arange(5), sampling)
    assert tokens_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    for row, token, logprob in zip(logits_BV, tokens_B.tolist(), logprobs_B.tolist(), strict=True):
        assert logprob == pytest.approx(math.log(expected_probabilities(row, sampling)[token]), abs=2e-6)


def test_greedy_takes_the_largest_and_reports_the_raw_logprob() -> None:
    logits_BV = torch.randn(3, 517, generator=torch.Generator().manual_seed(1))
    tokens_B, logprobs_B = sample(logits_BV, ids(1, 2, 3), ids(0, 0, 0), Sampling(temperature=0, top_k=1))
    assert torch.equal(tokens_B, logits_BV.argmax(dim=-1))
    expected_B = torch.log_softmax(logits_BV, dim=-1).gather(1, tokens_B[:, None])[:, 0]
    assert torch.allclose(logprobs_B, expected_B, atol=1e-6)


def test_rows_do_not_see_each_other() -> None:
    logits_BV = torch.randn(7, 1231, generator=torch.Generator().manual_seed(2), dtype=torch.float32) * 2
    seeds_B, positions_B = torch.arange(7) * 1000, torch.arange(7) + 5
    sampling = Sampling(temperature=0.9, top_p=0.9)
    together = sample(logits_BV, seeds_B, positions_B, sampling)
    order = torch.tensor([3, 1, 6, 0])
    apart = sample(logits_BV[order], seeds_B[order], positions_B[order], sampling)
    assert torch.equal(together[0][order], apart[0]) and torch.allclose(together[1][order], apart[1])


def test_it_takes_bf16_gradients_strides_and_empty_batches() -> None:
    logits_BV = (torch.randn(300, 2, generator=torch.Generator().manual_seed(3)) * 2).T
    expected = sample(logits_BV.bfloat16().float().contiguous(), ids(1, 1), ids(0, 1), Sampling())
    given_ = sample(logits_BV.bfloat16().requires_grad_(), ids(1).expand(2), ids(0, 1), Sampling())
    assert torch.equal(expected[0], given_[0])
    tokens_B, logprobs_B = sample(torch.zeros(0, 9), ids(), ids(), Sampling(top_p=0.5))
    assert tokens_B.shape == logprobs_B.shape == (0,)


def test_impurity_is_one_minus_the_sum_of_squares() -> None:
    logits_BV = torch.randn(4, 5003, generator=torch.Generator().manual_seed(4)) * torch.tensor([[0.1], [1], [4], [12]])
    cut_B = torch.tensor([-math.inf, 0.5, -math.inf, 0.0])
    masked_BV = logits_BV.masked_fill(logits_BV < cut_B[:, None], -math.inf)
    expected_B = 1 - torch.softmax(masked_BV.double(), dim=-1).square().sum(dim=-1)
    assert torch.allclose(impurity(logits_BV, cut_B).double(), expected_B, atol=1e-4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_k": -1}, {"top_k": 2.5},
        {"top_p": 0.0}, {"top_p": 1.1}, {"top_p": math.nan}, {"min_p": -0.1}, {"min_p": 1.1},
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} is .*expected"):
        Sampling(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(top_p=0.9), Sampling(top_k=3), Sampling(temperature=0)])
def test_logits_that_are_not_numbers_are_refused(value: float, sampling: Sampling) -> None:
    logits_BV = torch.zeros(2, 300)
    logits_BV[1, 280] = value
    with pytest.raises(ValueError, match="row 1"):
        sample(logits_BV, ids(1, 2), ids(0, 0), sampling)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="seeds"):
        sample(torch.zeros(2, 5), ids(1), ids(0, 0), Sampling())
    with pytest.raises(ValueError, match="positions"):
        sample(torch.zeros(2, 5), ids(1, 2), torch.zeros(2), Sampling())
    with pytest.raises(ValueError, match="logits"):
        sample(torch.zeros(5), ids(1), ids(0), Sampling())
