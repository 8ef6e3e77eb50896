"""Why: the delay of a packet varies, and by which law decides what time-outs and quorums must bear; so laws have names.

A jitter is a delay in seconds on top of a path's latency, or a factor on that latency. Draws saturate: never negative,
never above a stated limit, so that a jitter wider than its mean cannot send a message back in time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
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


def _none(limit_s: float, latency_s: float, u: float) -> float:
    return 0.0


def _exponential(limit_s: float, mean_s: float, latency_s: float, u: float) -> float:
    drawn_s = -mean_s * log1p(-u)  # -mean · ln(1 - u)
    return drawn_s if drawn_s < limit_s else limit_s


def _uniform(limit_s: float, low_s: float, high_s: float, latency_s: float, u: float) -> float:
    return min(low_s + (high_s - low_s) * u, limit_s)


def _normal(limit_s: float, mean_s: float, deviation_s: float, latency_s: float, u: float) -> float:
    return min(max(0.0, mean_s + deviation_s * _z(u)), limit_s)  # z: the inverse of the normal distribution


def _lognormal(limit_s: float, median_s: float, sigma: float, latency_s: float, u: float) -> float:
    return min(median_s * exp(min(sigma * _z(u), 700.0)), limit_s)


def _pareto(limit_s: float, scale_s: float, shape: float, latency_s: float, u: float) -> float:
    return min(scale_s * expm1(min(-log1p(-u) / shape, 700.0)), limit_s)  # scale · ((1 - u)^(-1/shape) - 1)


def _latency_factor(limit_s: float, sigma: float, latency_s: float, u: float) -> float:
    return min(latency_s * (exp(min(sigma * _z(u), 700.0)) - 1.0), limit_s)


LAWS: dict[str, Callable[..., float]] = {
    "none": _none,
    "uniform": _uniform,
    "normal": _normal,
    "lognormal": _lognormal,
    "pareto": _pareto,
    "exponential": _exponential,
    "latency_factor": _latency_factor,
}
"""(limit, the law's parameters, latency, uniform number) -> seconds."""


@dataclass(frozen=True, slots=True)
class Jitter:
    """A named law with its parameters, in the order of `PARAMETERS`.

    uniform: between low and high. normal: cut off at 0. lognormal: median * exp(sigma * z). pareto: Lomax, i.e. from 0,
    P(delay > x) = (1 + x / scale) ** -shape. latency_factor: the latency times exp(sigma * z), median 1.
    """

    kind: Kind = "none"
    parameters: tuple[float, ...] = ()
    limit_s: float = 10.0  # no draw delays a message by more than this
    draw: Callable[[float, float], float] = field(init=False, repr=False, compare=False)
    """`draw(latency_s, u)`: seconds to add to a path's latency, by inversion, from a uniform number u."""

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
        object.__setattr__(self, "draw", partial(LAWS[self.kind], self.limit_s, *self.parameters))

    @property
    def is_none(self) -> bool:
        return self.kind == "none" or all(value == 0.0 for value in self.parameters)

    def sample_s(self, latency_s: float, rng: Uniform) -> float:
        """Seconds to add to a path's latency; for 'latency_factor' this may be below 0, but not below -latency."""
        return self.draw(latency_s, rng.random())


def _z(u: float) -> float:
    """The standard normal variable below which a share u of all lies."""
    return STANDARD.inv_cdf(max(u, SMALLEST))


NO_JITTER = Jitter()
