"""What links carried, when, and whom they held up: exact for transfers, and never more than a link can carry."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.carrier import PACKET_BYTES, FlowCarrier
from sim.flows import FlowEngine
from sim.link_faults import LinkFault
from sim.network import Network
from sim.traffic import BINS_MAX, carried_within
from sim.world import SimFabric

NS = 1_000_000_000
MB = 1_000_000


class Lines:
    """Nodes of 8 Mbit/s (1 MB/s) each way, in two regions with a trunk of 8 Mbit/s out of the first."""

    def __init__(self, nodes: int = 6, trunk_mbit_s: float = 8.0) -> None:
        self.network = Network(regions={("east", "east"): 0.0, ("east", "west"): 0.0, ("west", "west"): 0.0})
        self.network.add_trunk("east", out_mbit_s=trunk_mbit_s, in_mbit_s=80.0)
        self.fabric = SimFabric(run_seed=1, carrier=self._carrier)
        self.names = [f"n{i}" for i in range(nodes)]
        for i, name in enumerate(self.names):
            self.fabric.node(name)
            region = "east" if i % 2 == 0 else "west"
            self.network.add_node(name=name, uplink_mbit_s=8.0, downlink_mbit_s=8.0, region=region)

    def _carrier(self, kernel: Any) -> FlowCarrier:
        self.carrier = FlowCarrier(kernel, self.network, 1)
        return self.carrier

    def at(self, when_s: float, action: Any) -> None:
        self.fabric.kernel.at(0, round(when_s * NS), lambda _: action())

    def send(self, when_s: float, source: int, target: int, size_bytes: int) -> None:
        self.at(when_s, lambda: self.carrier.send(source, target, size_bytes, lambda _: None, None))

    def fault(self, when_s: float, name: str, fault: LinkFault | None) -> None:
        def change() -> None:
            self.carrier.links_will_change()
            if fault is None:
                self.network.lift(self.fabric.now_s(), name)
            else:
                self.network.apply(self.fabric.now_s(), name, fault)
            self.carrier.links_changed()

        self.at(when_s, change)

    def run(self, until_s: float) -> dict[str, Any]:
        self.fabric.kernel.at(0, round(until_s * NS), lambda _: None)
        self.fabric.kernel.run_through(round(until_s * NS))
        return self.carrier.traffic.as_json(self.names)


def link(told: dict[str, Any], name: str) -> dict[str, Any]:
    (row,) = [row for row in told["links"] if row["name"] == name]
    return row


def megabytes(told: dict[str, Any], mbit_s: list[float], start_s: float, end_s: float) -> float:
    """What a curve says went by between two times."""
    edges = np.minimum(np.arange(len(mbit_s) + 1) * told["bin_s"], told["end_s"])
    by = np.concatenate(([0.0], np.cumsum(np.array(mbit_s) / 8 * np.diff(edges))))
    return float(np.interp(end_s, edges, by) - np.interp(start_s, edges, by))


def test_a_transfers_bytes_are_booked_when_they_travelled() -> None:
    """0 -> 1 alone at 1 MB/s from 2 s; 2 -> 3 joins on the trunk at 4 s, both at 0.5 MB/s; the first (3 MB) ends at 6,
    the second (3 MB) goes on at 1 MB/s until 8."""
    lines = Lines()
    lines.send(2.0, 0, 1, 3 * MB)
    lines.send(4.0, 2, 3, 3 * MB)
    told = lines.run(10.0)
    first, second = link(told, "uplink of n0"), link(told, "uplink of n2")
    trunk = link(told, "trunk out of east")
    for row, starts, expected in (
        (first, (0, 2, 4, 6, 10), (0.0, 2.0, 1.0, 0.0)),
        (second, (0, 4, 6, 8, 10), (0.0, 1.0, 2.0, 0.0)),
        (trunk, (0, 2, 4, 6, 8, 10), (0.0, 2.0, 2.0, 2.0, 0.0)),
    ):
        found = [megabytes(told, row["mbit_s"], a, b) for a, b in pairwise(starts)]
        assert found == [pytest.approx(mb, abs=0.07) for mb in expected], row["name"]  # a bin of 0.064 s is shared
        assert megabytes(told, row["capacity_mbit_s"], 0, 10) == pytest.approx(10.0)
    assert megabytes(told, told["mbit_s"], 0, 10) == pytest.approx(6.0)
    assert (told["total_bytes"], told["sent_bytes"]) == (6 * MB, {"n0": 3 * MB, "n2": 3 * MB})
    assert told["received_bytes"] == {"n1": 3 * MB, "n3": 3 * MB}
    assert trunk["use"] == pytest.approx(0.6, abs=1e-5)
    # alone, the first is held by the first of its equal lines, its own; the trunk holds two for 2 s, then one for 2 s
    assert (first["held_s"], trunk["held_s"]) == (pytest.approx(2.0, abs=0.07), pytest.approx(6.0, abs=0.2))


def test_a_transfer_that_breaks_off_is_booked_as_far_as_it_came() -> None:
    lines = Lines()
    lines.send(1.0, 0, 1, 5 * MB)
    lines.at(3.25, lambda: lines.fabric.kill("n1"))
    told = lines.run(10.0)
    assert told["total_bytes"] == pytest.approx(2.25 * MB, abs=1)
    assert megabytes(told, told["mbit_s"], 0, 3.3) == pytest.approx(2.25)


def test_what_is_under_way_at_the_end_is_booked_as_far_as_it_is() -> None:
    lines = Lines()
    lines.send(1.0, 0, 1, 50 * MB)
    told = lines.run(4.5)
    assert told["total_bytes"] == pytest.approx(3.5 * MB, abs=1)
    assert link(told, "uplink of n0")["held_s"] == pytest.approx(3.5)
    assert lines.run(6.5)["total_bytes"] == pytest.approx(5.5 * MB, abs=1), "asked again, later"


def test_capacity_over_time_has_the_faults() -> None:
    lines = Lines()
    lines.send(0.0, 0, 1, 6 * MB)
    lines.fault(2.0, "slow", LinkFault(region="east", bandwidth_factor=0.25))
    lines.fault(6.0, "slow", None)
    trunk = link(lines.run(16.0), "trunk out of east")
    told = lines.carrier.traffic.as_json(lines.names)
    spans = ((0, 2, 2.0), (2, 6, 1.0), (6, 16, 10.0))
    assert [megabytes(told, trunk["capacity_mbit_s"], a, b) for a, b, _ in spans] == [
        pytest.approx(mb, abs=0.1) for _, _, mb in spans
    ]
    assert [megabytes(told, trunk["mbit_s"], a, b) for a, b in ((0, 2), (2, 6), (6, 9), (9, 16))] == [
        pytest.approx(mb, abs=0.1) for mb in (2.0, 1.0, 3.0, 0.0)
    ]


def test_a_day_fits_and_nothing_is_lost_when_bins_widen() -> None:
    lines = Lines()
    for hour in range(24):
        lines.send(3600.0 * hour + 0.3, 0, 1, 10 * MB)
        lines.send(3600.0 * hour + 0.3, 1, 2, 100)
    told = lines.run(86_400.0)
    assert len(told["mbit_s"]) <= BINS_MAX and told["bin_s"] < 2 * 86_400 / BINS_MAX * 2
    assert told["total_bytes"] == 24 * (10 * MB + 100)
    assert megabytes(told, told["mbit_s"], 0, 43_200) == pytest.approx(120.0012, abs=10.1)


jobs = st.lists(
    st.tuples(
        st.integers(0, 4000),
        st.integers(0, 5),
        st.integers(0, 5),
        st.sampled_from([60, 1448, 5000, 200_000, 3_000_000]),
    ),
    min_size=1,
    max_size=25,
)
faults = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 3000), st.integers(1, 3000), st.sampled_from([0.0, 0.3, 2.0])),
    max_size=4,
)


@settings(max_examples=60, deadline=None)
@given(jobs, faults, st.sampled_from([4.0, 8.0, 20.0]))
def test_no_link_carries_more_in_a_bin_than_it_can_and_no_byte_is_lost(
    jobs: list[tuple[int, int, int, int]], faults: list[tuple[int, int, int, float]], trunk_mbit_s: float
) -> None:
    lines = Lines(trunk_mbit_s=trunk_mbit_s)
    for when_ms, source, target, size_bytes in jobs:
        lines.send(when_ms / 1e3, source, target, size_bytes)
    for i, (node, when_ms, length_ms, factor) in enumerate(faults):
        fault = LinkFault(node=node, bandwidth_factor=factor) if factor else LinkFault(region="east", working=False)
        lines.fault(when_ms / 1e3, f"f{i}", fault)
        lines.fault((when_ms + length_ms) / 1e3, f"f{i}", None)
    told = lines.run(400.0)
    traffic = lines.carrier.traffic
    assert told["total_bytes"] == sum(size for _, source, target, size in jobs if source != target)
    packets = sum(size for _, _, _, size in jobs if size <= PACKET_BYTES)
    for number in lines.network.links():
        booked, room = traffic.booked(number), traffic.room(number)
        assert np.all(booked <= room * (1 + 1e-9) + packets + 1e-3), "packets are booked at their start"
        within = carried_within(booked, room)
        assert np.all(within <= room) and within.sum() == pytest.approx(booked.sum(), abs=1e-6)
    for row in told["links"]:
        assert all(used <= can + 1e-6 for used, can in zip(row["mbit_s"], row["capacity_mbit_s"], strict=True))


def test_the_holder_is_the_link_that_is_full_and_gives_no_flow_more() -> None:
    """The max-min certificate, and what `cancel` says is left, for random states."""
    rng = np.random.default_rng(5)
    for _ in range(40):
        engine = FlowEngine()
        links = [engine.add_link(float(c)) for c in rng.integers(1, 50, 9)]
        paths: dict[int, list[int]] = {}
        for _ in range(20):
            path = [links[i] for i in rng.choice(9, rng.integers(1, 4), replace=False)]
            bound = float(rng.choice([np.inf, 1.5]))
            paths[engine.start(0.0, path, 1e6, rate_bound_bytes_per_s=bound)] = path
        flows = list(paths)
        left, holders = engine.progress(flows, 7.0)
        for flow, now_left, holder in zip(flows, left, holders, strict=True):
            rate = engine.rate(flow)
            assert holder == engine.held_by(flow)
            assert now_left == pytest.approx(1e6 - 7.0 * rate)
            if holder:
                assert holder in paths[flow]
                assert engine.link_load(holder) == pytest.approx(engine.capacity(holder))
                assert all(engine.rate(other) <= rate * (1 + 1e-9) for other in engine.flows_on(holder))
            else:
                assert rate == 1.5
        for flow, now_left in zip(flows, left, strict=True):
            assert engine.cancel(7.0, flow) == pytest.approx(now_left)
            break
