"""Why: nodes on the public internet come and go, by their owners' day, in heavy-tailed sessions and sometimes a whole
region at once; a protocol that is only tried on nodes that stay says little. This file says who is there when.

A core: from a spec, a seed and a horizon comes a sorted list of events, before anything runs. Each node draws from a
generator of its own, so the events of one node do not depend on which others exist or in what order they were made.

    node      absent --join--> present --leave--> absent --join--> ...        session, then absence, by distribution
    restart   the process ends and begins anew in one instant, with or without its disk
    day       durations pass faster or slower by local time of day (below)
    outage    a share of a region's nodes leaves together and returns together, disks kept

Time of day: with m(t) = 1 + a·cos(2π(local hour − peak hour)/24), an absence drawn as D ends at t' where
∫ m dt = D (nodes return sooner near the peak), a session where ∫ (2 − m) dt = D (they stay longer near the peak). m
averages to 1 over a day, so mean durations long against a day are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple

import numpy as np
from pydantic import Field, model_validator

from refimpl.world import derive_rng
from sim.catalogue import Strict

NS = 1_000_000_000
DAY_S = 86_400.0
SESSIONS_MAX = 1_000_000  # of one node: more is a spec with durations of nothing

EventKind = Literal["join", "leave", "restart"]


class ChurnEvent(NamedTuple):
    """One change of one node. `disk_kept`: what it wrote before is still there (never at a first join)."""

    time_ns: int
    node: str
    kind: EventKind
    disk_kept: bool


class Duration(Strict):
    """A distribution of lengths of time.

    exponential and fixed: `mean_s`. weibull: `mean_s` and `shape` (peer-to-peer sessions: 0.34 to 0.59, Stutzbach and
    Rejaie 2006). lognormal: `median_s` and `sigma`. empirical: `values_s`, drawn with equal chances.
    """

    kind: Literal["exponential", "weibull", "lognormal", "fixed", "empirical"]
    mean_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    shape: float | None = Field(default=None, gt=0.05, le=50)
    median_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    sigma: float | None = Field(default=None, gt=0, le=5)
    values_s: tuple[float, ...] | None = None

    @model_validator(mode="after")
    def _complete(self) -> Duration:
        needs: dict[str, tuple[str, ...]] = {
            "exponential": ("mean_s",),
            "fixed": ("mean_s",),
            "weibull": ("mean_s", "shape"),
            "lognormal": ("median_s", "sigma"),
            "empirical": ("values_s",),
        }
        given = tuple(f for f in ("mean_s", "shape", "median_s", "sigma", "values_s") if getattr(self, f) is not None)
        if given != needs[self.kind]:
            raise ValueError(f"kind {self.kind!r} needs exactly {', '.join(needs[self.kind])}; got {list(given)}")
        if self.values_s is not None and (not self.values_s or min(self.values_s) <= 0):
            raise ValueError("values_s must hold at least one value, all above 0")
        return self

    def mean(self) -> float:
        """Expected length in seconds. Lognormal: median·exp(σ²/2)."""
        if self.kind == "lognormal":
            assert self.median_s is not None and self.sigma is not None
            return self.median_s * math.exp(self.sigma**2 / 2)
        if self.values_s is not None:
            return sum(self.values_s) / len(self.values_s)
        assert self.mean_s is not None
        return self.mean_s

    def sample(self, rng: np.random.Generator) -> float:
        """One length in seconds."""
        if self.values_s is not None:
            return self.values_s[int(rng.integers(len(self.values_s)))]
        if self.kind == "lognormal":
            assert self.median_s is not None and self.sigma is not None
            return float(self.median_s * math.exp(self.sigma * rng.standard_normal()))
        assert self.mean_s is not None
        if self.kind == "exponential":
            return float(self.mean_s * rng.standard_exponential())
        if self.kind == "weibull":
            return float(self._weibull_scale() * rng.weibull(self.shape or 1.0))
        return self.mean_s

    def sample_residual(self, rng: np.random.Generator) -> float:
        """What is left of a length met at a random instant: U·X*, where X* is drawn by length (density x·f(x)/E X)."""
        share = 1.0 - rng.random()  # in (0, 1]
        if self.values_s is not None:
            weights = np.array(self.values_s) / sum(self.values_s)
            return share * float(rng.choice(self.values_s, p=weights))
        if self.kind == "lognormal":  # the length-biased lognormal has its median at median·exp(σ²)
            assert self.median_s is not None and self.sigma is not None
            return share * self.median_s * math.exp(self.sigma**2 + self.sigma * rng.standard_normal())
        assert self.mean_s is not None
        if self.kind == "exponential":
            return share * self.mean_s * float(rng.gamma(2.0))
        if self.kind == "weibull":  # (X*/scale)^shape ~ Gamma(1 + 1/shape)
            shape = self.shape or 1.0
            return share * self._weibull_scale() * float(rng.gamma(1 + 1 / shape)) ** (1 / shape)
        return share * self.mean_s

    def _weibull_scale(self) -> float:
        assert self.mean_s is not None and self.shape is not None
        return self.mean_s / math.gamma(1 + 1 / self.shape)


class Diurnal(Strict):
    """How much the hour of the day matters: `amplitude` 0 not at all, towards 1 hardly anybody off the peak."""

    amplitude: float = Field(ge=0, lt=1)
    peak_local_h: float = Field(default=21.0, ge=0, lt=24)  # the hour at which most nodes are there
    start_utc_h: float = Field(default=0.0, ge=0, lt=24)  # time of day at which the run begins


class RandomOutages(Strict):
    """Outages that strike each region on its own."""

    every: Duration
    length: Duration
    share: float = Field(gt=0, le=1)  # of the region's nodes


class Outage(Strict):
    """One outage, stated."""

    region: str
    start_s: float = Field(ge=0)
    length_s: float = Field(gt=0)
    share: float = Field(default=1.0, gt=0, le=1)


class ChurnSpec(Strict):
    """Life of a group of nodes.

    initial "online": all join at 0. "stationary": as if the run began long after (each present with the long-run
    probability, its session under way). "arrive": each joins after a draw of `arrival`.
    absence None: who leaves does not return.
    """

    initial: Literal["online", "stationary", "arrive"] = "online"
    arrival: Duration | None = None
    session: Duration
    absence: Duration | None = None
    diurnal: Diurnal | None = None
    restart_every: Duration | None = None  # within a session
    restart_disk_lost: float = Field(default=0.0, ge=0, le=1)  # chance that a restart loses the disk
    return_disk_lost: float = Field(default=0.0, ge=0, le=1)  # chance that a return after an absence does
    outages: tuple[Outage, ...] = ()
    random_outages: RandomOutages | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChurnSpec:
        if (self.initial == "arrive") != (self.arrival is not None):
            raise ValueError("arrival belongs to initial = 'arrive', and is needed there")
        if self.initial == "stationary" and self.absence is None:
            raise ValueError("initial = 'stationary' needs absence: nodes that never return have no long run")
        return self

    def present_share(self) -> float:
        """Long-run share of time that a node is there, outages left out; 0 where nobody returns."""
        if self.absence is None:
            return 0.0
        return self.session.mean() / (self.session.mean() + self.absence.mean())


# ---- events


def churn_events(
    spec: ChurnSpec,
    nodes: Mapping[str, str],
    run_seed: int,
    horizon_s: float,
    utc_offset_h: Mapping[str, float] | None = None,
) -> list[ChurnEvent]:
    """All joins, leaves and restarts before `horizon_s`, sorted by (time, node).

    `nodes` maps a node to its region; `utc_offset_h` a region to its clock (0 where it is missing). Each node depends
    on `run_seed` and its own name and region only.
    """
    horizon_ns = round(horizon_s * NS)
    if horizon_ns <= 0:
        raise ValueError(f"horizon_s is {horizon_s}; expected above 0")
    unknown = sorted({outage.region for outage in spec.outages} - set(nodes.values()))
    if unknown:
        raise ValueError(
            f"outages name regions {unknown} in which there is no node; regions: {sorted(set(nodes.values()))}"
        )
    windows = {region: _outage_windows(spec, region, run_seed, horizon_ns) for region in sorted(set(nodes.values()))}
    events: list[ChurnEvent] = []
    for node, region in nodes.items():
        day = None
        if spec.diurnal is not None and spec.diurnal.amplitude > 0:
            day = _Day(spec.diurnal, (utc_offset_h or {}).get(region, 0.0))
        presences = _presences(spec, node, run_seed, horizon_ns, day)
        if windows[region]:
            presences = _without(presences, _struck(windows[region], node, run_seed))
        events += _node_events(spec, node, run_seed, horizon_ns, presences)
    events.sort(key=lambda event: (event.time_ns, event.node))
    return events


class _Presence(NamedTuple):
    begin_ns: int
    end_ns: int
    disk_kept: bool


class _Day:
    """The clock that runs faster or slower by local hour."""

    def __init__(self, spec: Diurnal, utc_offset_h: float) -> None:
        self.amplitude = spec.amplitude
        self.rate = 2 * math.pi / DAY_S  # ω
        local_s = (spec.start_utc_h + utc_offset_h - spec.peak_local_h) * 3600
        self.phase = self.rate * local_s

    def end_s(self, begin_s: float, duration_s: float, sign: float) -> float:
        """t' with ∫_t^t' (1 + sign·a·cos(ω u + φ)) du = duration. The integral is
        (t' − t) + sign·a/ω·(sin(ω t' + φ) − sin(ω t + φ)), rising, and within 2a/ω of t' − t: Newton's steps, halving
        the bracket where they leave it."""
        swing = sign * self.amplitude / self.rate
        low = max(begin_s, begin_s + duration_s - 2 * abs(swing))
        high = begin_s + duration_s + 2 * abs(swing)
        origin = math.sin(self.rate * begin_s + self.phase)
        guess = begin_s + duration_s
        while high - low > 1e-7:
            angle = self.rate * guess + self.phase
            excess = guess - begin_s + swing * (math.sin(angle) - origin) - duration_s
            if abs(excess) < 1e-7:
                return guess
            low, high = (guess, high) if excess < 0 else (low, guess)
            guess -= excess / (1 + sign * self.amplitude * math.cos(angle))
            if not low < guess < high:
                guess = (low + high) / 2
        return high


def _presences(spec: ChurnSpec, node: str, run_seed: int, horizon_ns: int, day: _Day | None) -> list[_Presence]:
    """The node's sessions before the horizon, outages left out."""
    rng = derive_rng(run_seed, "churn", node)

    def after(begin_ns: int, duration_s: float, sign: float) -> int:
        if day is None:
            return begin_ns + max(1, round(duration_s * NS))
        return max(begin_ns + 1, round(day.end_s(begin_ns / NS, duration_s, sign) * NS))

    begin_ns, first_session_s = 0, spec.session.sample(rng)
    if spec.initial == "arrive":
        assert spec.arrival is not None
        begin_ns = after(0, spec.arrival.sample(rng), +1.0)
    elif spec.initial == "stationary":
        assert spec.absence is not None
        if rng.random() < spec.present_share():
            first_session_s = spec.session.sample_residual(rng)
        else:
            begin_ns = after(0, spec.absence.sample_residual(rng), +1.0)
    presences: list[_Presence] = []
    disk_kept, session_s = False, first_session_s
    while begin_ns < horizon_ns:
        end_ns = after(begin_ns, session_s, -1.0)
        presences.append(_Presence(begin_ns, end_ns, disk_kept))
        if spec.absence is None:
            break
        if len(presences) >= SESSIONS_MAX:
            raise ValueError(f"node {node!r} has over {SESSIONS_MAX} sessions; expected longer sessions or absences")
        begin_ns = after(end_ns, spec.absence.sample(rng), +1.0)
        disk_kept = bool(rng.random() >= spec.return_disk_lost)
        session_s = spec.session.sample(rng)
    return presences


class _Window(NamedTuple):
    begin_ns: int
    end_ns: int
    share: float


def _outage_windows(spec: ChurnSpec, region: str, run_seed: int, horizon_ns: int) -> list[_Window]:
    """Outages of a region: the stated ones, then the drawn ones. At one region only one drawn outage at a time."""
    windows = []
    for stated in spec.outages:
        if stated.region == region:
            begin_ns = round(stated.start_s * NS)
            windows.append(_Window(begin_ns, begin_ns + round(stated.length_s * NS), stated.share))
    if spec.random_outages is not None:
        rng = derive_rng(run_seed, "outages", region)
        begin_ns = max(1, round(spec.random_outages.every.sample(rng) * NS))
        while begin_ns < horizon_ns:
            end_ns = begin_ns + max(1, round(spec.random_outages.length.sample(rng) * NS))
            windows.append(_Window(begin_ns, end_ns, spec.random_outages.share))
            begin_ns = end_ns + max(1, round(spec.random_outages.every.sample(rng) * NS))
    return windows


def _struck(windows: Iterable[_Window], node: str, run_seed: int) -> list[tuple[int, int]]:
    """The times during which the node is down with its region: one draw for each outage; overlaps become one."""
    rng = derive_rng(run_seed, "outage", node)
    hits = sorted((window.begin_ns, window.end_ns) for window in windows if rng.random() < window.share)
    merged: list[tuple[int, int]] = []
    for begin_ns, end_ns in hits:
        if merged and begin_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end_ns, merged[-1][1]))
        else:
            merged.append((begin_ns, end_ns))
    return merged


def _without(presences: Iterable[_Presence], gaps: list[tuple[int, int]]) -> list[_Presence]:
    """The presences with the gaps cut out. The node returns after a gap with its disk, if it had joined before it."""
    pieces: list[_Presence] = []
    for begin_ns, end_ns, disk_kept in presences:
        cursor_ns, kept = begin_ns, disk_kept
        for gap_begin_ns, gap_end_ns in gaps:
            if gap_end_ns <= cursor_ns or gap_begin_ns >= end_ns:
                continue
            if gap_begin_ns > cursor_ns:
                pieces.append(_Presence(cursor_ns, gap_begin_ns, kept))
                kept = True
            cursor_ns = gap_end_ns
        if cursor_ns < end_ns:
            pieces.append(_Presence(cursor_ns, end_ns, kept))
    if pieces:  # a first join never finds a disk, wherever the gaps put it
        pieces[0] = pieces[0]._replace(disk_kept=False)
    return pieces


def _node_events(
    spec: ChurnSpec, node: str, run_seed: int, horizon_ns: int, presences: Iterable[_Presence]
) -> list[ChurnEvent]:
    events: list[ChurnEvent] = []
    rng = derive_rng(run_seed, "restart", node) if spec.restart_every is not None else None
    for begin_ns, end_ns, disk_kept in presences:
        if begin_ns >= horizon_ns:
            break
        events.append(ChurnEvent(begin_ns, node, "join", disk_kept))
        if rng is not None:
            assert spec.restart_every is not None
            time_ns = begin_ns + max(1, round(spec.restart_every.sample(rng) * NS))
            while time_ns < min(end_ns, horizon_ns):
                events.append(ChurnEvent(time_ns, node, "restart", bool(rng.random() >= spec.restart_disk_lost)))
                time_ns += max(1, round(spec.restart_every.sample(rng) * NS))
        if end_ns < horizon_ns:
            events.append(ChurnEvent(end_ns, node, "leave", True))
    return events
