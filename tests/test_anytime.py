"""The anytime-valid test: its false-positive rate holds wherever one stops, and it still finds cheats soon."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from refimpl.toploc.anytime import (
    AnytimePlan,
    AnytimeTest,
    count_needed,
    count_needed_for_power,
    growth_rate,
    log_e_values,
    mean_upper_bound,
    stopping_counts,
)

MEAN = 0.003  # an honest clipped margin, as measured on a small model: mostly 0, seldom up to 0.5


def sparse_margins(rng: np.random.Generator, shape: tuple[int, ...], mean: float) -> np.ndarray:
    """Mostly 0; where not, Beta(1, 5) / 2, whose mean is 1/12."""
    return np.where(rng.random(shape) < 12 * mean, rng.beta(1, 5, shape) / 2, 0.0)


def crossing_is_at_most(crossed: int, streams: int, rate: float) -> bool:
    """Not refuted by an exact binomial test at 1e-4: crossings this many are likely enough at `rate`."""
    return stats.binomtest(crossed, streams, rate, alternative="greater").pvalue > 1e-4


@pytest.mark.parametrize("late_share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("kind", ["sparse", "two points", "uniform", "constant", "feedback"])
def test_the_false_positive_rate_holds_at_any_sample_size(kind: str, late_share: float) -> None:
    """P(E_t ever reaches 1/α) ≤ α under H0, with the honest mean exactly at its limit, for any shape of the values."""
    rng = np.random.default_rng([1, len(kind), int(10 * late_share)])
    shape, alpha = (3000, 1500), 0.05
    plan = AnytimePlan(null_mean=MEAN, false_positive_rate=alpha, late_share=late_share)
    if kind == "sparse":
        values_ST = sparse_margins(rng, shape, MEAN)
    elif kind == "two points":  # the hardest null: everything clipped or nothing
        values_ST = np.where(rng.random(shape) < MEAN / 0.5, 0.5, 0.0)
    elif kind == "uniform":
        values_ST = rng.uniform(0, 2 * MEAN, shape)
    elif kind == "constant":
        values_ST = np.full(shape, MEAN)
    else:  # a value that depends on the past: the larger the last one, the wilder the next, at one conditional mean
        values_ST = np.zeros(shape)
        for t in range(1, shape[1]):
            size = np.where(values_ST[:, t - 1] > 0, 0.5, 0.02)
            values_ST[:, t] = np.where(rng.random(shape[0]) < MEAN / size, size, 0.0)
    crossed = int((stopping_counts(values_ST, plan) > 0).sum())
    assert crossing_is_at_most(crossed, shape[0], alpha)


def test_the_check_of_the_rate_can_fail() -> None:
    """The same count, with a null mean a third too small, refutes the rate: the test above has teeth."""
    rng = np.random.default_rng(2)
    plan = AnytimePlan(null_mean=MEAN * 2 / 3, false_positive_rate=0.05, late_share=0.0)
    values_ST = np.where(rng.random((1000, 6000)) < MEAN / 0.5, 0.5, 0.0)
    assert not crossing_is_at_most(int((stopping_counts(values_ST, plan) > 0).sum()), 1000, 0.05)


def test_a_fixed_threshold_looked_at_often_does_not_hold_its_rate() -> None:
    """Why the test is needed: a z-test at 5 %, looked at after every value, rejects far more honest streams."""
    rng = np.random.default_rng(3)
    values_ST = sparse_margins(rng, (500, 3000), MEAN)
    counts_T = np.arange(1, 3001)
    z_ST = (values_ST.cumsum(axis=1) / counts_T - MEAN) / (values_ST.std() / np.sqrt(counts_T))
    naive = int((z_ST[:, 100:] > stats.norm.ppf(0.95)).any(axis=1).sum())
    assert not crossing_is_at_most(naive, 500, 0.05) and naive > 150
    assert crossing_is_at_most(
        int((stopping_counts(values_ST, AnytimePlan(null_mean=MEAN, false_positive_rate=0.05)) > 0).sum()), 500, 0.05
    )


def test_exposures_keep_the_rate_where_contexts_differ() -> None:
    """Long runs of hard contexts break a mean that holds on average only; with exposures the rate holds."""
    rng = np.random.default_rng(4)
    exposures_ST = np.where((np.arange(3000) // 500) % 2 == 0, 1.0, 0.02)[None].repeat(1500, 0)  # hard runs first
    values_ST = np.where(rng.random(exposures_ST.shape) < MEAN * exposures_ST / 0.1, 0.1, 0.0)
    average = AnytimePlan(null_mean=float(MEAN * exposures_ST.mean()), false_positive_rate=0.05)
    assert not crossing_is_at_most(int((stopping_counts(values_ST, average) > 0).sum()), 1500, 0.05)
    fitted = AnytimePlan(null_mean=MEAN, false_positive_rate=0.05)
    assert crossing_is_at_most(int((stopping_counts(values_ST, fitted, exposures_ST) > 0).sum()), 1500, 0.05)


@pytest.mark.parametrize(("times", "tokens"), [(100, 12), (30, 60), (10, 220), (4, 1300)])
def test_cheats_are_found_within_the_number_of_tokens_it_says(times: int, tokens: int) -> None:
    """At α = 1 % and a cheat whose margins are `times` the honest mean: 99 % power within `tokens`."""
    rng = np.random.default_rng(5)
    plan = AnytimePlan(null_mean=MEAN, false_positive_rate=0.01)
    mean = min(times * MEAN, 0.3)
    values = rng.uniform(0, 2 * mean, 20_000).clip(max=0.5) if mean > 0.08 else sparse_margins(rng, (20_000,), mean)
    needed = count_needed_for_power(values, plan, rng)
    assert needed <= tokens
    fresh_ST = rng.choice(values, size=(1000, int(needed)))
    assert (stopping_counts(fresh_ST, plan) > 0).mean() > 0.97
    typical = np.median(stopping_counts(rng.choice(values, size=(1000, 4 * int(needed))), plan))
    assert 0.3 * typical <= count_needed(values, plan) <= 3 * typical


def test_it_says_when_a_cheat_can_not_be_told_from_honesty() -> None:
    rng = np.random.default_rng(6)
    plan = AnytimePlan(null_mean=MEAN)
    values = sparse_margins(rng, (20_000,), MEAN / 2)
    assert growth_rate(values, plan) == 0.0 and count_needed(values, plan) == math.inf
    assert count_needed_for_power(values, plan, rng) == math.inf


def test_a_cheat_who_begins_late_is_found_as_if_the_test_had() -> None:
    """A share of the money waits, at a cost of 2 ln k nats; without it the honest past must be won back first."""
    rng = np.random.default_rng(7)
    values_ST = sparse_margins(rng, (200, 6000), MEAN / 2)
    values_ST[:, 4000:] = sparse_margins(rng, (200, 2000), 0.06)
    delays = {}
    for share in (0.0, 0.5):
        counts_S = stopping_counts(values_ST, AnytimePlan(null_mean=MEAN, late_share=share))
        assert (counts_S > 4000).all()
        delays[share] = float(np.median(counts_S - 4000))
    assert delays[0.5] < 130 and delays[0.5] < 0.7 * delays[0.0]


def test_feeding_in_pieces_is_the_same_as_all_at_once() -> None:
    rng = np.random.default_rng(8)
    plan = AnytimePlan(null_mean=MEAN, false_positive_rate=1e-3)
    values_T, exposures_T = sparse_margins(rng, (700,), 0.03), rng.random(700)
    test = AnytimeTest(plan=plan)
    for start, end in [(0, 1), (1, 1), (1, 40), (40, 41), (41, 700)]:
        test.observe(values_T[start:end], exposures_T[start:end])
    log_e_T = log_e_values(values_T, plan, exposures_T)[0]
    assert test.count == 700 and test.log_e_value == pytest.approx(log_e_T[-1])
    assert test.log_e_value_max == pytest.approx(log_e_T.max()) and test.p_value == pytest.approx(
        math.exp(-log_e_T.max())
    )
    assert test.rejected and test.count_at_rejection == int(stopping_counts(values_T, plan, exposures_T)[0])
    assert test.observe([0.0] * 5000) and test.log_e_value < test.log_e_value_max  # a rejection stands


def test_the_e_value_is_the_portfolio_of_the_formula() -> None:
    """By hand: two bets, three values, money entering at 1/2, 1/6, 1/12."""
    plan = AnytimePlan(null_mean=0.1, value_max=0.5, bets=(0.5, 0.2), late_share=0.25)
    x, h = [0.0, 0.5, 0.2], [1.0, 0.4, 0.0]
    f = [[1 + bet / 0.1 * (v - 0.1 * e) for v, e in zip(x, h, strict=True)] for bet in (0.5, 0.2)]
    early = sum(f1 * f2 * f3 for f1, f2, f3 in f) / 2
    late = sum(f1 * f2 * f3 / 2 + f2 * f3 / 6 + f3 / 12 for f1, f2, f3 in f) / 2 + 1 / 4
    assert log_e_values(x, plan, h)[0, 2] == pytest.approx(math.log(0.75 * early + 0.25 * late))


@pytest.mark.parametrize("count", [50, 400, 3000])
def test_the_bound_on_a_mean_holds_and_tightens(count: int) -> None:
    """Exceeded by the true mean in at most 5 % of samples, and of the order of the textbook's error."""
    rng = np.random.default_rng([9, count])
    misses, bounds = 0, []
    for _ in range(200):
        bound = mean_upper_bound(sparse_margins(rng, (count,), 0.02), 0.5, confidence=0.95)
        misses += bound < 0.02
        bounds.append(bound)
    assert crossing_is_at_most(misses, 200, 0.05)
    spread = float(sparse_margins(rng, (100_000,), 0.02).std())
    assert 0.02 < np.median(bounds) < 0.02 + 4 * spread / math.sqrt(count) + 8 * 0.5 / count


@pytest.mark.parametrize(
    "wrong",
    [
        {"null_mean": 0.0}, {"null_mean": 0.5}, {"null_mean": math.nan}, {"value_max": math.inf},
        {"false_positive_rate": 0.0}, {"false_positive_rate": 1.0}, {"bets": ()}, {"bets": (0.5, 1.0)},
        {"bets": (0.0,)}, {"late_share": 1.0}, {"late_share": -0.1},
    ],
    ids=str,
)  # fmt: skip
def test_plans_that_would_void_the_guarantee_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        AnytimePlan(**({"null_mean": MEAN} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [[0.1, 0.6], [-0.01], [math.nan], [math.inf]])
def test_values_out_of_range_are_refused_and_change_nothing(values: list[float]) -> None:
    test = AnytimeTest(plan=AnytimePlan(null_mean=MEAN))
    with pytest.raises(ValueError, match="clip"):
        test.observe(values)
    with pytest.raises(ValueError, match="exposures"):
        test.observe([0.1], [1.5])
    assert test.count == 0 and test.log_e_value == 0.0
