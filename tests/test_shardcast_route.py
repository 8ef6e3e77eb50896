"""Increments or the whole file, whichever arrives first: by hand, and against all routes there are."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.shardcast.route import Leg, Speeds, plan_route

SPEEDS = Speeds(download_bytes_per_s=10.0, apply_bytes_per_s=50.0, rtt_s=1.0)
FULL = {1: 1000, 2: 1000, 3: 1000}


def test_one_increment_by_hand() -> None:
    route = plan_route(2, 3, FULL, {(2, 3): 40}, SPEEDS)
    assert route is not None and route.legs == (Leg(2, 3, 40),)
    assert route.finish_s == 1 + 1000 / 50  # applying takes 20 s from the first byte on, the transfer only 4


def test_a_chain_by_hand() -> None:
    """The second increment arrives while the first is applied, and waits for it."""
    route = plan_route(1, 3, FULL, {(1, 2): 40, (2, 3): 300}, SPEEDS)
    assert route is not None and [leg.target for leg in route.legs] == [2, 3]
    assert route.finish_s == max(1 + 4 + 1 + 30, 1 + 20 + 20)


def test_the_whole_file_when_it_is_sooner() -> None:
    fast = Speeds(download_bytes_per_s=1000.0, apply_bytes_per_s=50.0, rtt_s=1.0)
    for speeds, full in ((SPEEDS, False), (fast, True)):
        route = plan_route(2, 3, FULL, {(2, 3): 40}, speeds)
        assert route is not None and (route.legs[0].base is None) is full
    assert plan_route(None, 3, FULL, {(2, 3): 40}, SPEEDS) == plan_route(0, 3, FULL, {}, SPEEDS)


def test_nothing_to_do_and_no_way() -> None:
    done = plan_route(3, 3, FULL, {}, SPEEDS)
    assert done is not None and done.legs == () and done.finish_s == 0.0
    assert plan_route(1, 4, FULL, {}, SPEEDS) is None
    assert plan_route(1, 4, FULL, {(3, 4): 5}, SPEEDS) is None  # an increment to a version of unknown size
    with pytest.raises(ValueError, match="positive"):
        Speeds(download_bytes_per_s=0.0)


def test_fourteen_minutes_fall_below_one() -> None:
    """62 GB at 590 Mbit/s take 14 minutes; an increment of a fiftieth less than one, if four cores apply it at 300 MB/s
    each. One core alone would need longer than the transfer."""
    speeds = Speeds(download_bytes_per_s=590e6 / 8, apply_bytes_per_s=4 * 300e6, rtt_s=0.1)
    whole = plan_route(None, 2, {2: 62 * 10**9}, {}, speeds)
    increment = plan_route(1, 2, {1: 62 * 10**9, 2: 62 * 10**9}, {(1, 2): 62 * 10**9 // 50}, speeds)
    assert whole is not None and whole.finish_s == pytest.approx(840.7, abs=0.1)
    assert increment is not None and increment.finish_s < 60.0
    alone = Speeds(download_bytes_per_s=590e6 / 8, apply_bytes_per_s=300e6, rtt_s=0.1)
    slower = plan_route(1, 2, {1: 62 * 10**9, 2: 62 * 10**9}, {(1, 2): 62 * 10**9 // 50}, alone)
    assert slower is not None and 200.0 < slower.finish_s < 210.0


@settings(max_examples=150, deadline=None)
@given(
    increments=st.dictionaries(
        st.tuples(st.integers(1, 5), st.integers(2, 6)).filter(lambda pair: pair[0] < pair[1]),
        st.integers(1, 900),
        max_size=10,
    ),
    full=st.dictionaries(st.integers(1, 6), st.integers(100, 1000), min_size=6, max_size=6),
    apply_rate=st.sampled_from([20.0, 100.0, 1000.0]),
    have=st.sampled_from([None, 1, 2, 4]),
)
def test_no_other_route_is_sooner(
    increments: dict[tuple[int, int], int], full: dict[int, int], apply_rate: float, have: int | None
) -> None:
    speeds = Speeds(download_bytes_per_s=10.0, apply_bytes_per_s=apply_rate, rtt_s=0.5)
    found = plan_route(have, 6, full, increments, speeds)
    assert found is not None
    best = float("inf")
    for length in range(0, 6):
        for middle in itertools.combinations(range(1, 6), length):
            for start in ({have} if have is not None else set()) | {None}:
                link = done = 0.0
                at, possible = start, True
                for version in [v for v in (*middle, 6) if start is None or v > start]:
                    if at is None:
                        link = done = 0.5 + full[version] / 10.0
                    elif (at, version) in increments:
                        first = link + 0.5
                        link = first + increments[(at, version)] / 10.0
                        done = max(link, max(done, first) + full[version] / apply_rate)
                    else:
                        possible = False
                    at = version
                if possible:
                    best = min(best, done)
    assert found.finish_s == pytest.approx(best)
