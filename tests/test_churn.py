"""Node life: means against theory, independence of order and of other nodes, day and outages, traces, refusals."""

from __future__ import annotations

import math
import random
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from sim.churn import (
    NS,
    ChurnEvent,
    ChurnSpec,
    Diurnal,
    Duration,
    Outage,
    RandomOutages,
    churn_events,
)
from sim.churn_trace import read_trace, write_trace

DURATIONS = [
    Duration(kind="exponential", mean_s=300.0),
    Duration(kind="weibull", mean_s=300.0, shape=0.5),
    Duration(kind="weibull", mean_s=300.0, shape=2.0),
    Duration(kind="lognormal", median_s=200.0, sigma=0.8),
    Duration(kind="fixed", mean_s=300.0),
    Duration(kind="empirical", values_s=(100.0, 250.0, 700.0)),
]
HOUR = Duration(kind="exponential", mean_s=3600.0)


def nodes(count: int, region: str = "here") -> dict[str, str]:
    return {f"node-{i:04d}": region for i in range(count)}


def presence_s(events: list[ChurnEvent], horizon_s: float) -> float:
    """Node-seconds present before the horizon."""
    since: dict[str, int] = {}
    total = 0
    for event in events:
        if event.kind == "join":
            since[event.node] = event.time_ns
        elif event.kind == "leave":
            total += event.time_ns - since.pop(event.node)
    return total / NS + sum(horizon_s - begin / NS for begin in since.values())


# ---- distributions


@pytest.mark.parametrize("duration", DURATIONS, ids=lambda d: f"{d.kind}-{d.shape or d.sigma or ''}")
def test_sampled_mean_is_the_stated_mean(duration: Duration) -> None:
    rng = np.random.default_rng(3)
    draws = np.array([duration.sample(rng) for _ in range(20_000)])
    assert abs(draws.mean() - duration.mean()) <= 4 * draws.std() / math.sqrt(len(draws)) + 1e-9


@pytest.mark.parametrize("duration", DURATIONS, ids=lambda d: f"{d.kind}-{d.shape or d.sigma or ''}")
def test_residual_mean_is_that_of_renewal_theory(duration: Duration) -> None:
    """What is left of a length met at a random instant has mean E X² / (2 E X)."""
    rng = np.random.default_rng(4)
    mean = duration.mean()
    if duration.kind == "weibull":
        shape = duration.shape or 1.0
        second = mean**2 * math.gamma(1 + 2 / shape) / math.gamma(1 + 1 / shape) ** 2
    elif duration.kind == "lognormal":
        second = mean**2 * math.exp(0.8**2)
    elif duration.kind == "empirical":
        second = sum(value**2 for value in duration.values_s or ()) / 3
    else:
        second = mean**2 * {"exponential": 2.0, "fixed": 1.0}[duration.kind]
    draws = np.array([duration.sample_residual(rng) for _ in range(20_000)])
    assert abs(draws.mean() - second / (2 * mean)) < 4 * draws.std() / math.sqrt(len(draws))


def test_weibull_of_shape_below_one_has_many_short_and_few_long_sessions() -> None:
    rng = np.random.default_rng(5)
    draws = np.array([Duration(kind="weibull", mean_s=300.0, shape=0.5).sample(rng) for _ in range(20_000)])
    # median of a Weibull: scale·(ln 2)^(1/k), with scale = mean / Γ(3) = 150
    below = float(np.mean(draws < 150 * math.log(2) ** 2))
    assert abs(below - 0.5) < 4 * 0.5 / math.sqrt(20_000)


# ---- events


def test_events_alternate_and_lie_before_the_horizon() -> None:
    spec = ChurnSpec(session=DURATIONS[1], absence=DURATIONS[0], restart_every=Duration(kind="fixed", mean_s=70.0))
    events = churn_events(spec, nodes(40), 1, 3600.0)
    assert events == sorted(events, key=lambda event: (event.time_ns, event.node))
    for node in nodes(40):
        mine = [event for event in events if event.node == node]
        assert mine[0] == ChurnEvent(0, node, "join", False)
        changes = [event.kind for event in mine if event.kind != "restart"]
        assert all(a != b for a, b in pairwise(changes))
        assert all(a.time_ns < b.time_ns < 3600 * NS for a, b in pairwise(mine))


def test_long_run_presence_is_the_share_of_the_means() -> None:
    session, absence = Duration(kind="exponential", mean_s=300.0), Duration(kind="exponential", mean_s=100.0)
    spec = ChurnSpec(initial="stationary", session=session, absence=absence)
    count, horizon_s = 400, 4000.0
    assert spec.present_share() == 0.75
    shares = [
        presence_s(churn_events(spec, {node: "here"}, 2, horizon_s), horizon_s) / horizon_s for node in nodes(count)
    ]
    assert abs(np.mean(shares) - 0.75) < 4 * np.std(shares) / math.sqrt(count)


@pytest.mark.parametrize("time_s", [0.0, 450.0, 1900.0])
def test_a_stationary_start_is_stationary_at_every_instant(time_s: float) -> None:
    """Heavy tails would show a drift if sessions under way were drawn like fresh ones."""
    spec = ChurnSpec(initial="stationary", session=DURATIONS[1], absence=DURATIONS[3])
    count = 4000
    present: set[str] = set()
    for event in churn_events(spec, nodes(count), 6, 2000.0):
        if event.time_ns <= time_s * NS:
            (present.add if event.kind == "join" else present.discard)(event.node)
    share = spec.present_share()
    assert abs(len(present) / count - share) < 4 * math.sqrt(share * (1 - share) / count)


def test_arrivals_follow_their_distribution_and_may_be_for_good() -> None:
    spec = ChurnSpec(initial="arrive", arrival=Duration(kind="exponential", mean_s=50.0), session=DURATIONS[4])
    events = churn_events(spec, nodes(2000), 7, 1e6)
    joins = np.array([event.time_ns / NS for event in events if event.kind == "join"])
    assert len(joins) == 2000 and len(events) == 4000  # nobody returns
    assert abs(joins.mean() - 50.0) < 4 * 50.0 / math.sqrt(2000)
    assert abs(np.var(joins) - 2500.0) < 4 * 2500.0 * math.sqrt(8 / 2000)


def test_restarts_keep_or_lose_the_disk_at_the_stated_rate() -> None:
    spec = ChurnSpec(
        session=Duration(kind="fixed", mean_s=1e5),
        restart_every=Duration(kind="exponential", mean_s=10.0),
        restart_disk_lost=0.3,
    )
    restarts = [event for event in churn_events(spec, nodes(10), 8, 5000.0) if event.kind == "restart"]
    expected = 10 * 500
    assert abs(len(restarts) - expected) < 4 * math.sqrt(expected)
    lost = np.mean([not event.disk_kept for event in restarts])
    assert abs(lost - 0.3) < 4 * math.sqrt(0.21 / len(restarts))


def test_a_return_finds_the_disk_unless_it_was_lost_and_a_first_join_never_does() -> None:
    spec = ChurnSpec(session=DURATIONS[0], absence=DURATIONS[0], return_disk_lost=0.5)
    joins: dict[str, list[bool]] = {}
    for event in churn_events(spec, nodes(300), 9, 5000.0):
        if event.kind == "join":
            joins.setdefault(event.node, []).append(event.disk_kept)
    assert not any(kept[0] for kept in joins.values())
    later = [kept for each in joins.values() for kept in each[1:]]
    assert abs(np.mean(later) - 0.5) < 4 * 0.5 / math.sqrt(len(later))


# ---- determinism


RICH = ChurnSpec(
    initial="stationary",
    session=DURATIONS[1],
    absence=DURATIONS[3],
    diurnal=Diurnal(amplitude=0.6),
    restart_every=DURATIONS[0],
    restart_disk_lost=0.2,
    return_disk_lost=0.2,
    random_outages=RandomOutages(every=HOUR, length=DURATIONS[4], share=0.5),
)


def test_events_do_not_depend_on_the_order_in_which_nodes_were_made() -> None:
    made = {f"n{i}": f"r{i % 3}" for i in range(60)}
    shuffled = list(made.items())
    random.Random(1).shuffle(shuffled)
    assert churn_events(RICH, made, 11, 7200.0) == churn_events(RICH, dict(shuffled), 11, 7200.0)


def test_a_node_lives_the_same_life_whoever_else_is_there() -> None:
    made = {f"n{i}": "r" for i in range(20)}
    alone = churn_events(RICH, {"n7": "r"}, 11, 7200.0)
    assert [event for event in churn_events(RICH, made, 11, 7200.0) if event.node == "n7"] == alone
    assert alone != [event._replace(node="n7") for event in churn_events(RICH, {"n8": "r"}, 11, 7200.0)]
    assert alone != churn_events(RICH, {"n7": "r"}, 12, 7200.0)


def test_a_longer_horizon_only_adds() -> None:
    made = {f"n{i}": f"r{i % 3}" for i in range(30)}
    longer = churn_events(RICH, made, 11, 9000.0)
    assert [e for e in longer if e.time_ns < 4000 * NS] == churn_events(RICH, made, 11, 4000.0)


# ---- time of day


def test_most_nodes_are_there_at_the_local_peak() -> None:
    spec = ChurnSpec(
        initial="stationary", session=HOUR, absence=HOUR, diurnal=Diurnal(amplitude=0.8, peak_local_h=21.0)
    )
    clock = {"tokyo": 9.0, "london": 0.0}
    for region, offset in clock.items():
        present, by_hour, at = 0, np.zeros(24), 0
        for event in churn_events(spec, nodes(700, region), 13, 4 * 86_400.0, clock):
            while at < 96 and event.time_ns >= at * 3600 * NS:
                if at >= 24:
                    by_hour[at % 24] += present
                at += 1
            present += 1 if event.kind == "join" else -1
        swing = by_hour.max() / by_hour.min()
        peak_utc = int(np.argmax(by_hour))
        distance = abs((peak_utc - (21.0 - offset) + 12) % 24 - 12)
        assert swing > 2 and distance <= 2  # the crowd lags the rate by less than one session


def test_a_day_does_not_change_durations_of_many_days() -> None:
    long = Duration(kind="fixed", mean_s=20.25 * 86_400)
    spec = ChurnSpec(session=long, absence=long, diurnal=Diurnal(amplitude=0.9))
    leave = next(e for e in churn_events(spec, {"a": "r"}, 1, 40 * 86_400.0) if e.kind == "leave")
    # at most 2a/ω away: 2 · 0.9 · 86400/2π
    assert abs(leave.time_ns / NS - 20.25 * 86_400) <= 2 * 0.9 * 86_400 / (2 * math.pi)


def test_the_day_solves_its_integral() -> None:
    """∫ (1 − a·cos) from join to leave is the drawn duration (a session), checked by adding up small steps."""
    spec = ChurnSpec(
        session=Duration(kind="fixed", mean_s=30_000.0), diurnal=Diurnal(amplitude=0.7, peak_local_h=18, start_utc_h=5)
    )
    leave = next(e for e in churn_events(spec, {"a": "r"}, 1, 1e6, {"r": 2.0}) if e.kind == "leave")
    end_s = leave.time_ns / NS
    middles = (np.arange(100_000) + 0.5) * end_s / 100_000
    passed = np.sum(1 - 0.7 * np.cos(2 * math.pi * (middles / 3600 + 5 + 2 - 18) / 24)) * end_s / 100_000
    assert passed == pytest.approx(30_000.0, rel=1e-6)


# ---- outages


def test_an_outage_takes_its_share_of_its_region_together() -> None:
    spec = ChurnSpec(
        session=Duration(kind="fixed", mean_s=1e6),
        outages=(Outage(region="south", start_s=100.0, length_s=50.0, share=0.4),),
    )
    made = nodes(1000, "south") | {"far": "north"}
    events = [event for event in churn_events(spec, made, 3, 1000.0) if event.time_ns > 0]
    gone = [event.node for event in events if event.kind == "leave"]
    assert abs(len(gone) / 1000 - 0.4) < 4 * math.sqrt(0.24 / 1000)
    assert {event.time_ns for event in events} == {100 * NS, 150 * NS}
    assert "far" not in gone
    back = [event for event in events if event.kind == "join"]
    assert [event.node for event in back] == gone and all(event.disk_kept for event in back)


def test_who_was_to_join_in_an_outage_joins_after_it_without_a_disk() -> None:
    spec = ChurnSpec(
        initial="arrive",
        arrival=Duration(kind="fixed", mean_s=110.0),
        session=Duration(kind="fixed", mean_s=100.0),
        outages=(Outage(region="r", start_s=100.0, length_s=50.0), Outage(region="r", start_s=140.0, length_s=20.0)),
    )
    assert churn_events(spec, {"a": "r"}, 3, 1000.0) == [
        ChurnEvent(160 * NS, "a", "join", False),
        ChurnEvent(210 * NS, "a", "leave", True),
    ]


def test_random_outages_strike_at_their_rate() -> None:
    spec = ChurnSpec(
        session=Duration(kind="fixed", mean_s=1e9),
        random_outages=RandomOutages(
            every=Duration(kind="exponential", mean_s=900.0), length=Duration(kind="fixed", mean_s=100.0), share=1.0
        ),
    )
    horizon_s = 400_000.0
    leaves = [e for e in churn_events(spec, {"a": "r"}, 3, horizon_s) if e.kind == "leave"]
    expected = horizon_s / 1000.0
    assert abs(len(leaves) - expected) < 4 * math.sqrt(expected)


# ---- traces


def test_trace_round_trip() -> None:
    events = churn_events(RICH, {f"n{i}": "r" for i in range(30)}, 21, 7200.0)
    assert len(events) > 100
    assert read_trace(write_trace(events)) == events


@settings(max_examples=50)
@given(times=st.lists(st.integers(0, 10**18), min_size=2, max_size=20, unique=True))
def test_trace_keeps_every_nanosecond(times: list[int]) -> None:
    events = [
        ChurnEvent(t, 'a, "b"', "join" if i % 2 == 0 else "leave", bool(i % 3)) for i, t in enumerate(sorted(times))
    ]
    assert read_trace(write_trace(events)) == events


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ("time,node\n", "mine.csv: line 1 is 'time,node'; expected 'time_s,node,event,disk_kept'"),
        ("1.5,a,join\n", "mine.csv: line 2 has 3 fields; expected 4"),
        ("soon,a,join,no\n", "line 2: time_s is 'soon'; expected seconds"),
        ("nan,a,join,no\n", "line 2: time_s is 'nan'; expected seconds"),
        ("-1,a,join,no\n", "line 2: time_s is '-1'; expected at least 0"),
        ("1,a,arrive,no\n", "line 2: event is 'arrive'; expected join, leave or restart"),
        ("1,a,join,maybe\n", "line 2: disk_kept is 'maybe'; expected yes or no"),
        ("1,a,leave,yes\n", "'a' cannot leave at 1 s: it is not there"),
        ("1,a,join,no\n2,a,join,no\n", "'a' cannot join at 2 s: it is there"),
    ],
)
def test_bad_traces_are_refused(lines: str, sentence: str) -> None:
    text = lines if lines.startswith("time,") else "time_s,node,event,disk_kept\n" + lines
    with pytest.raises(ValueError) as caught:
        read_trace(text, "mine.csv")
    assert sentence in str(caught.value)


# ---- refusals and speed


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"session": {"kind": "weibull", "mean_s": 3.0}}, "kind 'weibull' needs exactly mean_s, shape"),
        ({"session": {"kind": "fixed", "mean_s": -3.0}}, "greater than 0"),
        ({"session": {"kind": "fixed", "mean_s": 3.0}, "initial": "arrive"}, "arrival belongs to initial = 'arrive'"),
        ({"session": {"kind": "fixed", "mean_s": 3.0}, "initial": "stationary"}, "needs absence"),
        ({"session": {"kind": "fixed", "mean_s": 3.0}, "uptime": 0.9}, "Extra inputs"),
    ],
)
def test_bad_specs_are_refused(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as caught:
        ChurnSpec.model_validate(fields)
    assert sentence in str(caught.value)


def test_outage_of_a_region_without_nodes_is_refused() -> None:
    spec = ChurnSpec(session=HOUR, outages=(Outage(region="mars", start_s=1.0, length_s=1.0),))
    with pytest.raises(ValueError, match=r"regions \['mars'\] in which there is no node; regions: \['here'\]"):
        churn_events(spec, nodes(2), 1, 10.0)


def test_ten_thousand_nodes_over_a_day_take_seconds() -> None:
    spec = ChurnSpec(initial="stationary", session=HOUR, absence=HOUR, diurnal=Diurnal(amplitude=0.5))
    began = time.perf_counter()
    events = churn_events(spec, nodes(10_000), 1, 86_400.0)
    # joins at rate m for those away, leaves at 2 − m for those there: m·(2 − m)/2 cycles an hour, on average 1 − a²/2
    # of the 12 without a day's course; a join and a leave each, and half of the nodes join at 0
    expected = 10_000 * (24 * (1 - 0.5**2 / 2) + 0.5)
    assert len(events) == pytest.approx(expected, rel=0.01)
    assert time.perf_counter() - began < 60  # a few seconds on an idle machine
