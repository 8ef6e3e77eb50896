"""Exact intervals of rates, limits from honest noise, and how many tokens a score needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

PIECE = 8  # neighbouring tokens that are taken together: they depend on each other
FALSE_POSITIVE_BUDGET = 1e-4  # for one verifier and one answer


def interval(hits: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper–Pearson: the exact two-sided interval of a binomial rate; (0, 1) without trials."""
    if not 0 <= hits <= trials:
        raise ValueError(f"{hits} hits in {trials} trials; expected 0 to the number of trials")
    if trials == 0:
        return 0.0, 1.0
    ci = stats.binomtest(hits, trials).proportion_ci(confidence, method="exact")
    return float(ci.low), float(ci.high)


def upper_bound(hits: int, trials: int, confidence: float = 0.95) -> float:
    """The exact one-sided upper bound: 3/n for no hits in n trials, nearly."""
    return 1.0 if hits == trials else float(stats.beta.ppf(confidence, hits + 1, trials - hits))


def limit_for(scores: Sequence[float], least: float, budget: float = FALSE_POSITIVE_BUDGET) -> float:
    """A limit that honest answers exceed with probability `budget`, if their scores are log-normal; never below the
    largest that was seen, nor below `least`.

    exp(m + z_{1−budget} · s), with m and s of the logarithms. The tail is an assumption: the arena measures what comes
    of it on other answers. Scores below a quarter of `least` count as that.
    """
    x = np.asarray(scores, dtype=np.float64)
    if len(x) < 4 or not np.isfinite(x).all() or least <= 0:
        raise ValueError(f"{len(x)} honest scores and a least of {least}; expected at least 4, finite, and above 0")
    logs = np.log(np.maximum(x, least / 4))
    fitted = math.exp(float(logs.mean()) + float(stats.norm.ppf(1 - budget)) * float(logs.std(ddof=1)))
    if (x < least / 4).mean() > 0.5:  # a heap at nothing and a tail: no log-normal
        fitted = 2 * float(x.max())
    return max(fitted, float(x.max()), least)


def roc(honest: Sequence[float], cheats: Sequence[float]) -> tuple[np.ndarray, np.ndarray, float]:
    """(false-positive rates, detection rates, area) over all limits; scores that are no numbers are left out."""
    h, c = (np.asarray([s for s in scores if not math.isnan(s)], dtype=np.float64) for scores in (honest, cheats))
    if not len(h) or not len(c):
        return np.array([0.0, 1.0]), np.array([0.0, 1.0]), math.nan
    limits = np.unique(np.concatenate([h, c]))[::-1]
    false = np.concatenate([[0.0], (h[None] >= limits[:, None]).mean(1)])
    found = np.concatenate([[0.0], (c[None] >= limits[:, None]).mean(1)])
    return false, found, float(np.trapezoid(found, false))


@dataclass(frozen=True, kw_only=True)
class Separation:
    """How far a verifier's score of cheats lies from honest ones: mean and standard deviation of the means of pieces of
    `piece` neighbouring tokens.

    The mean over m tokens is taken as normal with variance sd² · piece / m, so that a limit with a false-positive rate
    of a detects with probability

        power(m) = Φ((μ1 - μ0 - z_{1-a} · σ0 · r) / (σ1 · r)),   r = √(piece / m).

    An extrapolation where m is larger than an answer.
    """

    honest_mean: float
    honest_sd: float
    cheat_mean: float
    cheat_sd: float
    piece: int

    def power(self, tokens: float, false_positive_rate: float = 0.01) -> float:
        """Share of cheats that are detected by `tokens` tokens."""
        root = math.sqrt(self.piece / max(self.piece, tokens))
        beyond = self.cheat_mean - self.honest_mean - stats.norm.ppf(1 - false_positive_rate) * self.honest_sd * root
        spread = self.cheat_sd * root
        return float(stats.norm.cdf(beyond / spread)) if spread > 0 else float(beyond > 0)

    def tokens(self, false_positive_rate: float = 0.01, power: float = 0.99, tokens_max: int = 100_000) -> float:
        """Tokens that detect with this power; never fewer than a piece, inf beyond `tokens_max`. m is doubled, then
        bisected."""
        least, most = self.piece, self.piece
        while self.power(most, false_positive_rate) < power:
            least, most = most, 2 * most
            if most > tokens_max:
                return math.inf
        while most - least > max(1, least // 20):
            middle = (least + most) // 2
            enough = self.power(middle, false_positive_rate) >= power
            least, most = (least, middle) if enough else (middle, most)
        return float(most)


def separation(
    honest: Sequence[np.ndarray], cheats: Sequence[np.ndarray], tokens_per_value: int = 1
) -> Separation | None:
    """From the values of each answer, in their order, each of which stands for `tokens_per_value` tokens; None where
    one side has fewer than two pieces."""
    size = max(1, PIECE // tokens_per_value)
    sides = []
    for answers in (honest, cheats):
        means = np.array([values[at : at + size].mean() for values in answers for at in range(0, len(values), size)])
        if len(means) < 2:
            return None
        sides.append((float(means.mean()), float(means.std(ddof=1))))
    (low, low_sd), (high, high_sd) = sides
    return Separation(
        honest_mean=low, honest_sd=low_sd, cheat_mean=high, cheat_sd=high_sd, piece=size * tokens_per_value
    )
