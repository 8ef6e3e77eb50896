"""Why: who is how far from whom decides most of a decentralised run, so distances come from measured tables.

Named sets of regions (round trips, rates of a single flow, shares of nodes) and named mixes of access lines are kept in
`regions.toml` with their source. Whether a published figure is a round trip or one way, bits or bytes, is the usual
mistake; here the field names say it: everything between regions is `rtt_ms`, every rate is `..bit_s`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import exp, log
from pathlib import Path
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError, model_validator

from sim.catalogue import CatalogueError, Confidence, Strict, explain, read_toml

REGIONS_PATH = Path(__file__).with_name("regions.toml")

NORMAL = NormalDist()

Triangle = tuple[tuple[float, ...], ...]


class UnknownRegion(ValueError):
    """A name that no set or mix bears. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class RegionTable(Strict):
    """One set as the file gives it."""

    title: str
    source: str
    date: str
    basis: str
    confidence: Confidence
    note: str = ""
    regions: tuple[str, ...] = Field(min_length=1)
    utc_offset_h: tuple[float, ...]
    rtt_ms: Triangle
    inside_rtt_ms: float | tuple[float, ...]
    single_flow_gbit_s: Triangle | None = None
    node_share: tuple[float, ...] | None = None
    downlink_mbit_s_mean: tuple[float, ...] | None = None
    uplink_mbit_s_mean: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _shapes(self) -> RegionTable:
        count = len(self.regions)
        if len(set(self.regions)) != count:
            raise ValueError(f"regions {list(self.regions)} must differ")
        for field in ("rtt_ms", "single_flow_gbit_s"):
            triangle = getattr(self, field)
            if triangle is not None:
                _require_triangle(field, triangle, count)
        for field in ("utc_offset_h", "inside_rtt_ms", "node_share", "downlink_mbit_s_mean", "uplink_mbit_s_mean"):
            values = getattr(self, field)
            if isinstance(values, tuple) and len(values) != count:
                raise ValueError(f"{field} has {len(values)} values; expected {count}, one for each region")
            numbers = values if isinstance(values, tuple) else () if values is None else (values,)
            if field != "utc_offset_h" and any(number < 0 for number in numbers):
                raise ValueError(f"{field} is {values}; expected no negative value")
        if self.node_share is not None and abs(sum(self.node_share) - 1) > 0.01:
            raise ValueError(f"node_share sums to {sum(self.node_share):.3f}; expected 1")
        return self


def _require_triangle(field: str, triangle: Triangle, count: int) -> None:
    lengths = [len(row) for row in triangle]
    expected = list(range(count - 1, 0, -1))
    if lengths != expected:
        raise ValueError(f"{field} has rows of {lengths} values; expected {expected}: the upper triangle")
    if any(value <= 0 for row in triangle for value in row):
        raise ValueError(f"{field} holds a value of 0 or below; expected above 0")


class Regions:
    """A set of regions: distances, single-flow rates, shares and clocks, by name."""

    def __init__(self, name: str, table: RegionTable) -> None:
        self.name = name
        self.table = table
        self.names = table.regions
        self._index = {region: i for i, region in enumerate(table.regions)}
        count = len(self.names)
        inside = table.inside_rtt_ms if isinstance(table.inside_rtt_ms, tuple) else (table.inside_rtt_ms,) * count
        self.rtt_ms_matrix = _square(table.rtt_ms, inside)
        self._single_flow = None
        if table.single_flow_gbit_s is not None:
            self._single_flow = _square(table.single_flow_gbit_s, (float("inf"),) * count)

    def __repr__(self) -> str:
        return f"Regions({self.name!r}, {len(self.names)} regions)"

    def index(self, region: str) -> int:
        """Row of the region in the matrices. Raises UnknownRegion with the near and known names."""
        found = self._index.get(region)
        if found is None:
            raise UnknownRegion(_unknown(f"region {region!r} is not in set {self.name!r}", region, self.names))
        return found

    def rtt_ms(self, a: str, b: str) -> float:
        """Round trip between two regions; between two nodes of one region, the stated inside figure."""
        return float(self.rtt_ms_matrix[self.index(a), self.index(b)])

    def single_flow_gbit_s(self, a: str, b: str) -> float | None:
        """Measured rate of one flow between two regions; None where it was not measured (or inside a region)."""
        i, j = self.index(a), self.index(b)
        if self._single_flow is None or i == j:
            return None
        return float(self._single_flow[i, j])

    def utc_offset_h(self, region: str) -> float:
        return float(self.table.utc_offset_h[self.index(region)])

    def node_share(self) -> dict[str, float]:
        """Share of nodes in each region, summing to 1; equal where the source gives none."""
        shares = self.table.node_share or (1.0,) * len(self.names)
        return {region: share / sum(shares) for region, share in zip(self.names, shares, strict=True)}

    def mean_access_mbit_s(self, region: str) -> tuple[float, float] | None:
        """Mean (down, up) of the region's nodes where the source gives them."""
        down, up = self.table.downlink_mbit_s_mean, self.table.uplink_mbit_s_mean
        i = self.index(region)
        return None if down is None or up is None else (down[i], up[i])

    def sample(self, count: int, rng: np.random.Generator) -> list[str]:
        """`count` regions drawn by node share."""
        shares = self.node_share()
        return [str(region) for region in rng.choice(list(shares), size=count, p=list(shares.values()))]


def _square(triangle: Triangle, diagonal: tuple[float, ...]) -> NDArray[np.float64]:
    matrix = np.diag(np.array(diagonal, dtype=np.float64))
    for i, row in enumerate(triangle):
        for offset, value in enumerate(row, start=1):
            matrix[i, i + offset] = matrix[i + offset, i] = value
    return matrix


# ---- access lines


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessLine:
    """One node's line to its region."""

    kind: str
    downlink_mbit_s: float
    uplink_mbit_s: float
    last_mile_rtt_ms: float
    jitter_sigma: float  # of a lognormal factor on the latency
    loss_fraction: float


class Quantiles(Strict):
    """A distribution by some of its percentiles: the logarithm is linear between them in the normal score, the outer
    pieces go on beyond the last one, and `low` and `high` cut it off. With p50 alone it is a constant."""

    p10: float | None = None
    p25: float | None = None
    p50: float
    p75: float | None = None
    p90: float | None = None
    low: float = Field(gt=0)
    high: float = Field(gt=0)

    @model_validator(mode="after")
    def _rising(self) -> Quantiles:
        values = [self.low, *(value for _, value in self.knots()), self.high]
        if values != sorted(values):
            raise ValueError(f"percentiles between low and high must rise; got {values}")
        return self

    def knots(self) -> list[tuple[float, float]]:
        given = ((0.10, self.p10), (0.25, self.p25), (0.50, self.p50), (0.75, self.p75), (0.90, self.p90))
        return [(probability, value) for probability, value in given if value is not None]

    def at(self, probability: float) -> float:
        """The quantile function."""
        if len(self.knots()) == 1:
            return self.p50
        scores = [NORMAL.inv_cdf(p) for p, _ in self.knots()]
        logs = [log(value) for _, value in self.knots()]
        score = NORMAL.inv_cdf(probability)
        piece = min(max(int(np.searchsorted(scores, score)) - 1, 0), len(scores) - 2)
        slope = (logs[piece + 1] - logs[piece]) / (scores[piece + 1] - scores[piece])
        raw = logs[piece] + slope * (score - scores[piece])
        return float(min(max(exp(min(raw, 700.0)), self.low), self.high))


class UplinkRule(Strict):
    """How the uplink follows from the downlink: a ratio of it, or a uniform draw; never above the downlink."""

    rule: Literal["ratio", "uniform"]
    ratio: float | None = Field(default=None, gt=0)
    mbit_s_min: float | None = Field(default=None, gt=0)
    mbit_s_max: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> UplinkRule:
        if self.rule == "ratio" and self.ratio is None:
            raise ValueError("rule 'ratio' needs ratio")
        if self.rule == "uniform" and (self.mbit_s_min is None or self.mbit_s_max is None):
            raise ValueError("rule 'uniform' needs mbit_s_min and mbit_s_max")
        return self

    def draw(self, downlink_mbit_s: float, rng: np.random.Generator) -> float:
        limit = downlink_mbit_s if self.mbit_s_max is None else min(downlink_mbit_s, self.mbit_s_max)
        if self.rule == "ratio":
            assert self.ratio is not None
            return min(limit, self.ratio * downlink_mbit_s)
        assert self.mbit_s_min is not None and self.mbit_s_max is not None
        return min(limit, float(rng.uniform(self.mbit_s_min, self.mbit_s_max)))


Range = tuple[float, float]


class LineKind(Strict):
    """One kind of line in a mix."""

    name: str
    share: float = Field(gt=0, le=1)
    uplink: UplinkRule
    last_mile_rtt_ms: Range
    jitter_sigma: Range
    loss_fraction: Range


class AccessMix(Strict):
    """A named mix of access lines."""

    title: str
    source: str
    date: str
    confidence: Confidence
    downlink_mbit_s: Quantiles
    kind: tuple[LineKind, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _shares(self) -> AccessMix:
        total = sum(kind.share for kind in self.kind)
        if abs(total - 1) > 1e-6:
            raise ValueError(f"shares of the kinds sum to {total:g}; expected 1")
        return self

    def sample(self, rng: np.random.Generator) -> AccessLine:
        """One line. Always takes the same number of draws for a kind, so streams stay aligned."""
        chosen = int(np.searchsorted(np.cumsum([kind.share for kind in self.kind]), rng.random(), side="right"))
        kind = self.kind[min(chosen, len(self.kind) - 1)]
        downlink = self.downlink_mbit_s.at(min(max(rng.random(), 1e-12), 1 - 1e-12))
        return AccessLine(
            kind=kind.name,
            downlink_mbit_s=downlink,
            uplink_mbit_s=kind.uplink.draw(downlink, rng),
            last_mile_rtt_ms=float(rng.uniform(*kind.last_mile_rtt_ms)),
            jitter_sigma=float(rng.uniform(*kind.jitter_sigma)),
            loss_fraction=_log_uniform(kind.loss_fraction, rng),
        )


def _log_uniform(bounds: Range, rng: np.random.Generator) -> float:
    low, high = bounds
    draw = rng.random()
    return float(low * (high / low) ** draw) if low > 0 else float(high * draw)


# ---- loading


class _File(Strict):
    set: dict[str, RegionTable]
    access: dict[str, AccessMix]


def check_regions(raw: Mapping[str, Any], file: str) -> _File:
    """Validate, or raise CatalogueError with file, field, value and expectation."""
    try:
        return _File.model_validate(raw)
    except ValidationError as error:
        raise CatalogueError(explain(error, _File, raw, file)) from None


@lru_cache(maxsize=8)
def _load(path: Path) -> _File:
    return check_regions(read_toml(path), path.name)


@lru_cache(maxsize=32)
def region_set(name: str, path: Path = REGIONS_PATH) -> Regions:
    """The set of that name. Raises UnknownRegion listing the known sets."""
    sets = _load(path).set
    if name not in sets:
        raise UnknownRegion(_unknown(f"region set {name!r} is not known", name, tuple(sets)))
    return Regions(name, sets[name])


@lru_cache(maxsize=32)
def access_mix(name: str, path: Path = REGIONS_PATH) -> AccessMix:
    """The mix of access lines of that name. Raises UnknownRegion listing the known mixes."""
    mixes = _load(path).access
    if name not in mixes:
        raise UnknownRegion(_unknown(f"access mix {name!r} is not known", name, tuple(mixes)))
    return mixes[name]


def _unknown(what: str, name: str, known: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name.lower(), known, n=2, cutoff=0.5)
    hint = f" Did you mean {' or '.join(repr(guess) for guess in near)}?" if near else ""
    return f"{what}.{hint} Known: {', '.join(known)}."
