"""Exact intervals of rates, limits from honest noise, and how many tokens a score needs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

PIECE = 8  # neighbouring tokens that are taken together
FALSE_POSITIVE_BUDGET = 1e-4  # for one verifier and one answer: a policy of five stays below 1 in 1000


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


def tokens_to_detect(
    honest: Sequence[np.ndarray],
    cheats: Sequence[np.ndarray],
    *,
    false_positive_rate: float = 0.01,
    power: float = 0.99,
    tokens_max: int = 100_000,
) -> float:
    """Tokens that tell cheats from honest answers at this power and false-positive rate, by the mean of a value per
    token; inf beyond `tokens_max`.

    The mean of m tokens is taken as normal, with the variance that pieces of eight neighbours have (they depend on each
    other): an extrapolation where m is larger than an answer. m is doubled, then bisected.
    """
    pools = [[np.asarray(piece, dtype=np.float64) for piece in pieces if len(piece)] for pieces in (honest, cheats)]
    if not all(pools):
        return math.inf

    (low, low_sd), (high, high_sd) = (_piece_statistics(pool) for pool in pools)
    z_false, z_miss = stats.norm.ppf(1 - false_positive_rate), stats.norm.ppf(power)

    def enough(tokens: int) -> bool:
        root = math.sqrt(max(1, tokens // PIECE))
        return bool(low + z_false * low_sd / root < high - z_miss * high_sd / root)

    least, most = 1, 1
    while not enough(most):
        least, most = most, 2 * most
        if most > tokens_max:
            return math.inf
    while most - least > max(1, least // 20):
        middle = (least + most) // 2
        least, most = (least, middle) if enough(middle) else (middle, most)
    return float(most)


def _piece_statistics(pool: Sequence[np.ndarray]) -> tuple[float, float]:
    """Mean and standard deviation of the means of `PIECE` neighbours."""
    means = np.array([values[at : at + PIECE].mean() for values in pool for at in range(0, len(values), PIECE)])
    return float(means.mean()), float(means.std(ddof=1)) if len(means) > 1 else math.inf
