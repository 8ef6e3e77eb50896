"""Why: the delay of a packet varies, and by which law decides what time-outs and quorums must bear; so laws have names.

A jitter is a delay in seconds on top of a path's latency, or a factor on that latency. Draws saturate: never negative,
never above a stated limit, so that a jitter wider than its mean cannot send a message back in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, inf, log1p
from typing import Literal

import numpy as np

Kind = Literal["none", "uniform", "normal", "lognormal", "pareto", "exponential", "latency_factor"]

PARAMETERS: dict[str, tuple[str, ...]] = {
    "none": (),
    "uniform": ("low_s", "high_s"),
    "normal": ("mean_s", "deviation_s"),
    "lognormal": ("median_s", "sigma"),
    "pareto": ("scale_s", "shape"),
    "exponential": ("mean_s",),
    "latency_factor": ("sigma",),
}


@dataclass(frozen=True, slots=True)
class Jitter:
    """A named law with its parameters, in the order of `PARAMETERS`.

    uniform: between low and high. normal: cut off at 0. lognormal: median * exp(sigma * z). pareto: Lomax, i.e. from 0,
    P(delay > x) = (1 + x / scale) ** -shape. latency_factor: the latency times exp(sigma * z), median 1.
    """

    kind: Kind = "none"
    parameters: tuple[float, ...] = ()
    limit_s: float = 10.0  # no draw delays a message by more than this

    def __post_init__(self) -> None:
        names = PARAMETERS.get(self.kind)
        if names is None:
            raise ValueError(f"jitter kind is {self.kind!r}; expected one of {', '.join(PARAMETERS)}")
        if len(self.parameters) != len(names):
            raise ValueError(
                f"jitter {self.kind!r} has parameters {self.parameters}; expected ({', '.join(names) or 'none'})"
            )
        for name, value in zip(names, self.parameters, strict=True):
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} of jitter {self.kind!r} is {value}; expected a finite number, 0 or more")
        if self.kind == "uniform" and self.parameters[0] > self.parameters[1]:
            raise ValueError(
                f"uniform jitter runs from {self.parameters[0]} to {self.parameters[1]} s; expected rising"
            )
        if self.kind == "pareto" and self.parameters[1] == 0.0:
            raise ValueError("shape of jitter 'pareto' is 0; expected above 0")
        if not 0.0 <= self.limit_s < inf:
            raise ValueError(f"limit_s of jitter {self.kind!r} is {self.limit_s}; expected a finite number, 0 or more")

    @property
    def is_none(self) -> bool:
        return self.kind == "none" or all(value == 0.0 for value in self.parameters)

    def sample_s(self, latency_s: float, rng: np.random.Generator) -> float:
        """Seconds to add to a path's latency; for 'latency_factor' this may be below 0, but not below -latency."""
        if self.kind == "exponential":  # the one that large runs use, drawn by inversion: x = -mean·ln(1 - U)
            return float(min(-self.parameters[0] * log1p(-rng.random()), self.limit_s))
        first, second = (*self.parameters, 0.0, 0.0)[:2]
        if self.kind == "none":
            return 0.0
        if self.kind == "uniform":
            drawn = rng.uniform(first, second)
        elif self.kind == "normal":
            drawn = max(0.0, rng.normal(first, second))
        elif self.kind == "lognormal":
            drawn = first * exp(min(second * rng.standard_normal(), 700.0))
        elif self.kind == "pareto":
            drawn = first * rng.pareto(second)
        else:
            drawn = latency_s * (exp(min(first * rng.standard_normal(), 700.0)) - 1.0)
        return float(min(drawn, self.limit_s))


NO_JITTER = Jitter()
