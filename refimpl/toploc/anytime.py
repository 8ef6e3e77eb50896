"""Reject a prover with a guaranteed false-positive rate, at whatever number of tokens the evidence suffices.

A threshold on a mean is calibrated for one number of tokens, and looking again after each submission spends its
false-positive budget many times over. This test may be looked at after every token, for ever.

It bets against honesty. The values x_1, x_2, … are clipped margins (or any scores in [0, c]), and honesty claims

    H0:  E[x_t | everything before t, and h_t] ≤ μ0 · h_t    for every t,

where h_t in [0, 1] is the exposure: how easily an honest prover errs here, 1 if unknown. A gambler with the bet λ has,
after t rounds,

    W_t(λ) = Π_{i ≤ t} (1 + λ · (x_i - μ0 · h_i)),    0 ≤ λ < 1/μ0.

Under H0 no λ wins on average (W is a non-negative supermartingale, started at 1), nor does a portfolio of many λ, E_t =
mean over λ of W_t(λ). So by Ville's inequality, P(E_t ever reaches 1/α) ≤ α: reject when it does. The portfolio spans
small and large λ since the right one depends on a cheat that nobody knows; it costs at most ln(number of λ) nats.

A cheat who was honest long enough has lost the early bets for the portfolio. So a share of the money waits: of it,
1/(k(k+1)) enters at token k, and a cheat from token k on is found as if the test began there, at a cost of 2 ln k nats.
That is still a portfolio: the guarantee stands.

Assumptions, and how to meet them. 1) Values lie in [0, c]: clip them. 2) μ0 · h_t is at least the honest conditional
mean, for the worst honest hardware and for *every* context, not on average. Exposures take out most of what contexts
differ by. For what is left take a μ0 with room, or one value for each sequence (its mean clipped margin): the choice of
prompts makes those exchangeable. `mean_upper_bound` says how far a sampled mean can be from the true one.
3) The seed is not the prover's choice: who picks the seed picks the noise. Nothing is assumed about distribution or
independence of the values.

Shape legend: S streams (provers), T values of each, L bets λ.

References: "Estimating means of bounded random variables by betting" (arXiv 2010.09686), and "E-detectors: a
nonparametric framework for sequential change detection" (arXiv 2203.03532) for bets that start at every time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from numba import njit

FloatArray = npt.NDArray[np.float64]

BETS = tuple(0.99 * 2.0**-i for i in range(10))  # λ·μ0: the share of the money that a round with x = 0, h = 1 loses
LOW_BETS = tuple(0.99 * 2.0**-i for i in range(16))  # finer stakes, for bounding a mean


@dataclass(frozen=True, kw_only=True)
class AnytimePlan:
    """What is tested, fixed before the first value is seen."""

    null_mean: float  # μ0, in the unit of the values: the largest mean that counts as honest
    value_max: float = 0.5  # c: values lie in [0, c]
    false_positive_rate: float = 0.001  # α, for one stream over its whole life
    bets: tuple[float, ...] = BETS  # λ·μ0, each in (0, 1)
    late_share: float = 0.5  # of the money, that waits for cheats who begin late; [0, 1)

    def __post_init__(self) -> None:
        if not 0 < self.null_mean < self.value_max < math.inf:
            raise ValueError(f"null_mean is {self.null_mean}; expected above 0 and below value_max {self.value_max}")
        if not 0 < self.false_positive_rate < 1:
            raise ValueError(f"false_positive_rate is {self.false_positive_rate}; expected a number in (0, 1)")
        if not self.bets or not all(0 < bet < 1 for bet in self.bets):
            raise ValueError(f"bets are {self.bets}; expected at least one, each in (0, 1)")
        if not 0 <= self.late_share < 1:
            raise ValueError(f"late_share is {self.late_share}; expected a number in [0, 1)")

    @property
    def threshold(self) -> float:
        """ln(1/α): the log e-value at which a stream is rejected."""
        return -math.log(self.false_positive_rate)

    def gains(self, values: npt.ArrayLike, exposures: npt.ArrayLike = 1.0) -> FloatArray:
        """x/μ0 - h, in the shape of `values`: what a round pays on the stake λ·μ0. Raises ValueError out of range."""
        x = np.asarray(values, dtype=np.float64)
        h = np.asarray(exposures, dtype=np.float64)
        if not np.all((x >= 0) & (x <= self.value_max)):
            raise ValueError(f"values span [{np.min(x)}, {np.max(x)}]; expected [0, {self.value_max}]: clip them first")
        if not np.all((h >= 0) & (h <= 1)):
            raise ValueError(f"exposures span [{np.min(h)}, {np.max(h)}]; expected [0, 1]")
        return np.broadcast_to(x / self.null_mean - h, x.shape)


@dataclass(kw_only=True)
class AnytimeTest:
    """The test of one stream: feed it values as they come, look whenever you like."""

    plan: AnytimePlan
    count: int = 0
    log_e_value: float = 0.0
    log_e_value_max: float = 0.0
    count_at_rejection: int | None = None
    _early_1L: FloatArray = field(init=False)  # W_t(λ)
    _late_1L: FloatArray = field(init=False)  # V_t(λ): what the money that entered late has become

    def __post_init__(self) -> None:
        self._early_1L = np.ones((1, len(self.plan.bets)))
        self._late_1L = np.zeros((1, len(self.plan.bets)))

    @property
    def rejected(self) -> bool:
        """True once the e-value has reached 1/α; it stays so."""
        return self.count_at_rejection is not None

    @property
    def p_value(self) -> float:
        """Valid at any time: 1 / the largest e-value so far."""
        return math.exp(-self.log_e_value_max)

    def observe(self, values: npt.ArrayLike, exposures: npt.ArrayLike = 1.0) -> bool:
        """Take the next values in order; says whether the stream is rejected."""
        gains_1T = self.plan.gains(np.asarray(values, dtype=np.float64).reshape(-1), exposures)[None]
        log_e_1T = _log_e_values(self.plan, gains_1T, self.count, self._early_1L, self._late_1L)
        if log_e_1T.size:
            reached = np.flatnonzero(log_e_1T[0] >= self.plan.threshold)
            if len(reached) and not self.rejected:
                self.count_at_rejection = self.count + int(reached[0]) + 1
            self.count += log_e_1T.size
            self.log_e_value = float(log_e_1T[0, -1])
            self.log_e_value_max = max(self.log_e_value_max, float(log_e_1T.max()))
        return self.rejected


def _log_e_values(
    plan: AnytimePlan, gains_ST: FloatArray, count: int, early_SL: FloatArray, late_SL: FloatArray
) -> FloatArray:
    """ln E_t after each round, [S, T], for streams that go on from `count` rounds; moves the money in place."""
    e_ST = np.empty(gains_ST.shape)
    _play(np.ascontiguousarray(gains_ST), np.asarray(plan.bets), plan.late_share, count, early_SL, late_SL, e_ST)
    return np.log(e_ST)


@njit(cache=True)
def _play(
    gains_ST: FloatArray,
    bets_L: FloatArray,
    late_share: float,
    count: int,
    early_SL: FloatArray,
    late_SL: FloatArray,
    e_ST: FloatArray,
) -> None:
    """W_t = W_{t-1} · f_t and V_t = (V_{t-1} + w_t) · f_t, with f_t = 1 + λμ0 · gain and w_t = 1/(t(t+1)).

    Money below 1e-290 is taken as lost and above 1e290 as 1e290: both only lower E, so the guarantee stands.
    """
    for s in range(gains_ST.shape[0]):
        for t in range(gains_ST.shape[1]):
            step = float(count + t + 1)
            early, late = 0.0, 0.0
            for i in range(bets_L.size):
                factor = 1.0 + bets_L[i] * gains_ST[s, t]
                money = early_SL[s, i] * factor
                early_SL[s, i] = 0.0 if money < 1e-290 else min(money, 1e290)
                late_SL[s, i] = min((late_SL[s, i] + 1.0 / (step * (step + 1.0))) * factor, 1e290)
                early += early_SL[s, i]
                late += late_SL[s, i]
            waiting = 1.0 / (step + 1.0)  # what has not entered yet
            e_ST[s, t] = ((1.0 - late_share) * early + late_share * late) / bets_L.size + late_share * waiting


def log_e_values(values_ST: npt.ArrayLike, plan: AnytimePlan, exposures_ST: npt.ArrayLike = 1.0) -> FloatArray:
    """ln E_t of many streams at once, [S, T]: `AnytimeTest` without the stepping."""
    gains_ST = plan.gains(np.atleast_2d(np.asarray(values_ST, dtype=np.float64)), exposures_ST)
    money_SL = np.ones((len(gains_ST), len(plan.bets)))
    with np.errstate(divide="ignore"):  # all money lost: ln 0
        return _log_e_values(plan, gains_ST, 0, money_SL, np.zeros_like(money_SL))


def stopping_counts(
    values_ST: npt.ArrayLike, plan: AnytimePlan, exposures_ST: npt.ArrayLike = 1.0
) -> npt.NDArray[np.int64]:
    """How many values each stream needed to be rejected, [S]; 0 for streams that never were."""
    reached_ST = log_e_values(values_ST, plan, exposures_ST) >= plan.threshold
    return np.where(reached_ST.any(axis=1), reached_ST.argmax(axis=1) + 1, 0)


# --- planning: what to test, and how long it takes ------------------------------------------------------------------


def mean_upper_bound(values: npt.ArrayLike, value_max: float, confidence: float = 0.99) -> float:
    """An upper confidence bound on the mean that honest `values` in [0, c] were drawn with: a true mean above it has
    probability 1 - confidence at most. It is the smallest mean that the same kind of bet, placed from below, rejects.

    Values must be independent or at least exchangeable: means of whole sequences, say. It tightens with their number.
    """
    x = np.asarray(values, dtype=np.float64).reshape(-1)
    if len(x) == 0 or not 0 < confidence < 1:
        raise ValueError(f"{len(x)} values at confidence {confidence}; expected some, at a confidence in (0, 1)")
    low, high = float(x.mean()), value_max
    for _ in range(50):  # the evidence against a mean grows with the mean: bisect
        middle = 0.5 * (low + high)
        mirrored = AnytimePlan(null_mean=value_max - middle, value_max=value_max, late_share=0.0, bets=LOW_BETS)
        if float(log_e_values(value_max - x, mirrored).max()) >= -math.log1p(-confidence):
            high = middle
        else:
            low = middle
    return high


def growth_rate(values: npt.ArrayLike, plan: AnytimePlan, exposures: npt.ArrayLike = 1.0) -> float:
    """Nats of evidence a value brings, by the best single bet, when values are drawn like these; 0 when none gains."""
    gains_T = plan.gains(np.asarray(values, dtype=np.float64).reshape(-1), exposures)
    return max(0.0, *(float(np.log1p(bet * gains_T).mean()) for bet in plan.bets))


def count_needed(values: npt.ArrayLike, plan: AnytimePlan, exposures: npt.ArrayLike = 1.0) -> float:
    """About how many values like these a typical rejection takes: (ln 1/α + ln L + ln 1/(1 - late)) / growth. It counts
    the portfolio's cost in full, so it is a little pessimistic. inf when no bet gains."""
    rate = growth_rate(values, plan, exposures)
    cost = plan.threshold + math.log(len(plan.bets)) - math.log1p(-plan.late_share)
    return cost / rate if rate > 0 else math.inf


def count_needed_for_power(
    values: npt.ArrayLike,
    plan: AnytimePlan,
    rng: np.random.Generator,
    *,
    exposures: npt.ArrayLike = 1.0,
    power: float = 0.99,
    streams: int = 400,
    count_max: int = 20_000,
) -> float:
    """How many values reject a share `power` of cheats, by streams drawn anew from `values`; inf beyond `count_max`."""
    pool = np.asarray(values, dtype=np.float64).reshape(-1)
    pool_h = np.broadcast_to(np.asarray(exposures, dtype=np.float64), pool.shape)
    guess = count_needed(pool, plan, pool_h)
    if not math.isfinite(guess):
        return math.inf
    length = int(min(count_max, max(16, 2 * guess)))
    while True:
        drawn_ST = rng.integers(len(pool), size=(streams, length))
        counts_S = stopping_counts(pool[drawn_ST], plan, pool_h[drawn_ST])
        needed = np.quantile(np.where(counts_S > 0, counts_S, np.inf), power, method="higher")
        if math.isfinite(needed) or length == count_max:
            return float(needed)
        length = min(count_max, 2 * length)
