"""Why: the delay of a packet varies, and by which law decides what time-outs and quorums must bear; so laws have names.

A jitter is a delay in seconds on top of a path's latency, or a factor on that latency. Draws saturate: never negative,
never above a stated limit, so that a jitter wider than its mean cannot send a message back in time.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, expm1, inf, log1p
from statistics import NormalDist
from typing import Literal

from sim.chance import Uniform

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

STANDARD = NormalDist()
SMALLEST = 2.0**-54  # half a step of a uniform number: 0 itself has no z


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

    def sample_s(self, latency_s: float, rng: Uniform) -> float:
        """Seconds to add to a path's latency; for 'latency_factor' this may be below 0, but not below -latency.

        All laws are drawn by inversion, from one uniform number u each.
        """
        kind = self.kind
        if kind == "none":
            return 0.0
        u = rng.random()
        first = self.parameters[0]
        if kind == "exponential":  # -mean · ln(1 - u)
            drawn = -first * log1p(-u)
        elif kind == "uniform":  # low + (high - low) · u
            drawn = first + (self.parameters[1] - first) * u
        elif kind == "normal":  # mean + deviation · z(u), z the inverse of the normal distribution
            drawn = max(0.0, first + self.parameters[1] * _z(u))
        elif kind == "lognormal":  # median · exp(sigma · z(u))
            drawn = first * exp(min(self.parameters[1] * _z(u), 700.0))
        elif kind == "pareto":  # scale · ((1 - u)^(-1/shape) - 1)
            drawn = first * expm1(min(-log1p(-u) / self.parameters[1], 700.0))
        else:
            drawn = latency_s * (exp(min(first * _z(u), 700.0)) - 1.0)
        return min(drawn, self.limit_s)


def _z(u: float) -> float:
    """The standard normal variable below which a share u of all lies."""
    return STANDARD.inv_cdf(max(u, SMALLEST))


NO_JITTER = Jitter()
