"""The flow engine against its dull twin, against SimGrid, and against what fairness means."""

from __future__ import annotations

import gzip
import heapq
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.flows import FlowEngine
from sim.flows_reference import PlainFlowEngine

SIMGRID = Path(__file__).parent / "data" / "simgrid"
NEAR = 1e-9


# ---------------------------------------------------------------- random scenarios, both engines side by side

Step = tuple[Any, ...]
Transfer = tuple[float, tuple[int, ...], float]  # start, links, bytes

CAPACITIES = st.one_of(st.sampled_from([0.0, 1.0, 2.0, 3.0, 6.0, 10.0]), st.floats(0.1, 100.0))
SIZES = st.one_of(st.sampled_from([0.0, 1.0, 12.0, 60.0]), st.floats(0.01, 1000.0))
WEIGHTS = st.one_of(st.just(1.0), st.sampled_from([0.5, 2.0, 3.0]), st.floats(0.05, 20.0))
BOUNDS = st.one_of(st.just(math.inf), st.sampled_from([0.5, 1.0, 2.0]), st.floats(0.05, 50.0), st.just(0.0))
PAUSES = st.one_of(st.just(0.0), st.floats(0.0, 5.0), st.just(math.inf))  # infinity: until the next finish


@st.composite
def scenarios(draw: st.DrawFn) -> tuple[list[float], list[Step]]:
    capacities = draw(st.lists(CAPACITIES, min_size=1, max_size=7))
    links = st.lists(st.integers(0, len(capacities) - 1), min_size=0, max_size=4, unique=True)
    step = st.one_of(
        st.tuples(st.just("start"), PAUSES, links, SIZES, WEIGHTS, BOUNDS),
        st.tuples(st.just("start"), st.just(0.0), links, SIZES, st.just(1.0), st.just(math.inf)),
        st.tuples(st.just("packet"), PAUSES, links, SIZES, WEIGHTS, BOUNDS),
        st.tuples(st.just("cancel"), PAUSES, st.integers(0, 30)),
        st.tuples(st.just("capacity"), PAUSES, st.integers(0, len(capacities) - 1), CAPACITIES),
        st.tuples(st.just("advance"), PAUSES),
    )
    return capacities, draw(st.lists(step, min_size=1, max_size=25))


class SideBySide:
    """Does every step in both engines and compares what can be seen."""

    def __init__(self, capacities: list[float]) -> None:
        self.ours, self.plain = FlowEngine(), PlainFlowEngine()
        self.links = [self.ours.add_link(capacity) for capacity in capacities]
        self.plain_links = [self.plain.add_link(capacity) for capacity in capacities]
        self.capacities = list(capacities)
        self.now_s = 0.0
        self.flows: dict[int, dict[str, Any]] = {}  # under way, by number; numbers agree in both
        self.packets: dict[int, dict[str, Any]] = {}  # those that are flows of the twin only

    def do(self, step: Step) -> None:
        kind, pause_s = step[0], step[1]
        if pause_s == math.inf:
            next_s = self.plain.next_event_s()
            pause_s = max(0.0, next_s - self.now_s) if next_s < math.inf else 1.0
        before_s, self.now_s = self.now_s, self.now_s + pause_s
        if self.now_s > before_s or kind == "advance":
            self.advance()
        if kind == "start":
            _, _, links, size, weight, bound = step
            options = {"weight": weight, "rate_bound_bytes_per_s": bound}
            flow = self.ours.start(self.now_s, [self.links[i] for i in links], size, **options)
            assert flow == self.plain.start(self.now_s, [self.plain_links[i] for i in links], size, **options)
            self.flows[flow] = {"links": links, "size": size, "weight": weight, "bound": bound}
        elif kind == "packet":
            _, _, links, size, weight, bound = step
            options = {"weight": weight, "rate_bound_bytes_per_s": bound}
            finish_s = self.ours.packet(self.now_s, [self.links[i] for i in links], size, **options)
            if size == 0:
                assert finish_s == self.now_s
            elif finish_s < math.inf:
                flow = self.plain.start(self.now_s, [self.plain_links[i] for i in links], size, **options)
                assert flow == self.ours._next_flow
                self.packets[flow] = {"links": links, "size": size, "weight": weight, "bound": bound}
                assert finish_s == pytest.approx(self.now_s + size / self.plain.rate(flow))
        elif kind == "cancel" and self.flows:
            flow = sorted(self.flows)[step[2] % len(self.flows)]
            size = self.flows.pop(flow)["size"]
            left, expected = self.ours.cancel(self.now_s, flow), self.plain.cancel(self.now_s, flow)
            assert left == pytest.approx(expected, rel=NEAR, abs=1e-9 * max(size, 1.0))
            assert 0.0 <= left <= size
        elif kind == "capacity":
            if step[3] != self.capacities[step[2]]:  # a packet's end has been told: no change touches it any more
                for flow in [flow for flow, packet in self.packets.items() if step[2] in packet["links"]]:
                    self.plain.cancel(self.now_s, flow)
                    del self.packets[flow]
            self.capacities[step[2]] = step[3]
            self.ours.set_capacity(self.now_s, self.links[step[2]], step[3])
            self.plain.set_capacity(self.now_s, self.plain_links[step[2]], step[3])
        self.compare()

    def advance(self) -> None:
        # what ends within rounding of now may be seen as ended by one engine and not yet by the other
        ours, plain = dict(self.ours.advance(self.now_s)), dict(self.plain.advance(self.now_s))
        alone = {packet[1]: packet for packet in self.ours._packets}
        under_way = alone.keys() | self.ours._slot_of.keys()
        for flow in list(self.packets):
            if flow in plain and flow in alone:
                assert alone[flow][0] == pytest.approx(self.now_s, rel=NEAR, abs=1e-9)
                self.ours._packets.remove(alone[flow])
                heapq.heapify(self.ours._packets)
                self.ours._end_packet(alone[flow])
            elif flow in plain and flow in under_way:
                assert self.ours.cancel(self.now_s, flow) <= 1e-6 * max(self.packets[flow]["size"], 1.0)
            elif flow not in plain and flow not in under_way:
                assert self.plain.cancel(self.now_s, flow) <= 1e-6 * max(self.packets[flow]["size"], 1.0)
            elif flow not in plain:
                continue
            plain.pop(flow, None)
            del self.packets[flow]
        for flow in set(ours) ^ set(plain):
            done = ours if flow in ours else plain
            other = self.plain if flow in ours else self.ours
            assert done[flow] == pytest.approx(self.now_s, rel=NEAR, abs=1e-9)
            left = other.cancel(self.now_s, flow)
            assert left <= 1e-6 * max(self.flows[flow]["size"], 1.0)
            if flow in plain:
                ours[flow] = plain[flow]
            else:
                plain[flow] = ours[flow]
        assert ours.keys() == plain.keys()
        for flow, finish_s in ours.items():
            assert finish_s == pytest.approx(plain[flow], rel=NEAR, abs=1e-9)
            del self.flows[flow]

    def compare(self) -> None:
        finished = {
            flow for flow, f in self.flows.items() if f["size"] == 0 or (not f["links"] and f["bound"] == math.inf)
        }
        rates = {flow: self.ours.rate(flow) for flow in self.flows if flow not in finished}
        for flow, rate in rates.items():
            assert rate == pytest.approx(self.plain.rate(flow), rel=NEAR, abs=1e-12)
        expected_s = self.plain.next_event_s()
        if not self.packets:
            assert self.ours.next_event_s() == pytest.approx(expected_s, rel=NEAR, abs=1e-9)
        known = {**self.flows, **self.packets}
        rates |= {flow: self.plain.rate(flow) for flow in self.packets}
        require_fair(self.capacities, {flow: known[flow] for flow in rates}, rates)
        for i, capacity in enumerate(self.capacities):
            load = sum(rates[flow] for flow in rates if i in known[flow]["links"])
            assert self.ours.link_load(self.links[i]) == pytest.approx(load, rel=NEAR, abs=1e-12)
            assert load <= capacity * (1 + NEAR)
        assert self.ours.active_flows() == sorted(self.flows)


def require_fair(capacities: list[float], flows: dict[int, dict[str, Any]], rates: dict[int, float]) -> None:
    """The max-min certificate: each flow is at its bound, or crosses a full link on which none has a larger share."""
    for flow, f in flows.items():
        assert rates[flow] >= 0.0
        if rates[flow] >= f["bound"] * (1 - NEAR):
            assert rates[flow] <= f["bound"] * (1 + NEAR)
            continue
        held = False
        for i in f["links"]:
            sharing = [other for other in flows if i in flows[other]["links"]]
            full = sum(rates[other] for other in sharing) >= capacities[i] * (1 - NEAR)
            largest = max(rates[other] / flows[other]["weight"] for other in sharing)
            held = held or (full and rates[flow] / f["weight"] >= largest * (1 - NEAR) - 1e-15)
        assert held, f"flow {flow} at {rates[flow]} could go faster"


@settings(max_examples=400, deadline=None)
@given(scenarios())
def test_engine_equals_its_dull_twin(scenario: tuple[list[float], list[Step]]) -> None:
    """Rates, loads, finishes and bytes left are those of progressive filling, through starts, cancels and changes."""
    capacities, steps = scenario
    both = SideBySide(capacities)
    for step in steps:
        both.do(step)
    for i, link in enumerate(both.links):  # repair every link: everything with a rate must end
        both.ours.set_capacity(both.now_s, link, 5.0)
        both.plain.set_capacity(both.now_s, both.plain_links[i], 5.0)
        both.capacities[i] = 5.0
    for flow in both.packets:
        both.plain.cancel(both.now_s, flow)
    both.packets.clear()
    while both.plain.next_event_s() < math.inf:
        both.do(("advance", math.inf))
    stuck = {flow for flow, f in both.flows.items() if f["bound"] == 0.0}
    assert set(both.ours.active_flows()) == stuck


@pytest.mark.parametrize("seed", range(3))
def test_large_random_mesh_equals_twin(seed: int) -> None:
    """With hundreds of flows over shared trunks the arrays grow and long chains of shares move; rates stay exact."""
    rng = random.Random(seed)
    nodes, regions = 60, 4
    capacities = [rng.choice([2.0, 5.0, 10.0, 20.0]) * rng.uniform(0.8, 1.2) for _ in range(2 * nodes)]
    capacities += [nodes / regions * rng.uniform(0.5, 4.0) for _ in range(2 * regions)]
    both = SideBySide(capacities)
    for i in range(300):
        s, t = rng.sample(range(nodes), 2)
        links = [s, nodes + t]
        if s % regions != t % regions:
            links[1:1] = [2 * nodes + s % regions, 2 * nodes + regions + t % regions]
        weight = rng.choice([1.0, 1.0, rng.uniform(0.1, 5.0)])
        bound = math.inf if rng.random() < 0.7 else rng.uniform(0.05, 5.0)
        step: Step = ("start", rng.choice([0.0, 0.05, math.inf]), links, rng.lognormvariate(1.0, 1.5), weight, bound)
        if i % 7 == 3:
            step = ("cancel", 0.0, rng.randrange(1000))
        elif i % 11 == 5:
            step = ("capacity", 0.01, rng.randrange(len(capacities)), rng.choice([0.0, 1.0, 7.0]))
        both.do(step)
    assert len(both.flows) > 20


# ---------------------------------------------------------------- single promises


def test_equal_flows_are_treated_alike_and_end_together() -> None:
    engine = FlowEngine()
    link = engine.add_link(10.0)
    lines = [engine.add_link(7.0) for _ in range(7)]
    flows = [engine.start(0.0, (line, link), 30.0) for line in lines]
    assert len({engine.rate(flow) for flow in flows}) == 1
    assert engine.next_event_s() == pytest.approx(21.0, rel=1e-14)
    finished = engine.advance(engine.next_event_s())
    assert [flow for flow, _ in finished] == flows  # equal times: by number
    assert len({finish_s for _, finish_s in finished}) == 1
    assert engine.next_event_s() == math.inf


def test_finishes_equal_up_to_rounding_are_one_event() -> None:
    """Three bottlenecks of 1/3, 1/7 and 1/11 of a link would end a few roundings apart; they are one instant."""
    engine = FlowEngine()
    flows = []
    for share in (3, 7, 11):
        link = engine.add_link(share * 0.1)
        flows += [engine.start(0.0, (link,), 0.7) for _ in range(share)]
    solves = engine.effort()["solves"]
    finished = engine.advance(engine.next_event_s())
    assert sorted(flow for flow, _ in finished) == flows
    assert engine.effort()["solves"] - solves <= 2  # the batch of starts, then one solve for all that ended


@settings(max_examples=100, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(2, 12))
def test_creation_order_does_not_matter(rng: random.Random, count: int) -> None:
    capacities = [rng.choice([1.0, 2.0, 5.0, rng.uniform(1, 9)]) for _ in range(6)]
    specs = [
        (
            rng.sample(range(6), rng.randint(1, 3)),
            rng.uniform(1, 50),
            rng.choice([1.0, 2.5]),
            rng.choice([0.7, math.inf]),
        )
        for _ in range(count)
    ]
    results = []
    for order in (range(count), rng.sample(range(count), count)):
        engine = FlowEngine()
        links = [engine.add_link(capacity) for capacity in capacities]
        flows = {}
        for i in order:
            path, size, weight, bound = specs[i]
            flows[engine.start(0.0, [links[j] for j in path], size, weight=weight, rate_bound_bytes_per_s=bound)] = i
        rates = {flows[flow]: engine.rate(flow) for flow in flows}
        finish_s = {flows[flow]: at_s for flow, at_s in engine.advance(1e9)}
        results.append((rates, finish_s))
    for part in (0, 1):
        for i in range(count):
            assert results[0][part][i] == pytest.approx(results[1][part][i], rel=1e-12)


def test_link_down_stalls_flows_and_they_resume() -> None:
    engine = FlowEngine()
    link, line = engine.add_link(10.0), engine.add_link(4.0)
    slow, fast = engine.start(0.0, (line, link), 40.0), engine.start(0.0, (link,), 60.0)
    engine.set_capacity(5.0, link, 0.0)
    assert engine.rate(slow) == engine.rate(fast) == 0.0
    assert engine.next_event_s() == math.inf
    assert engine.advance(100.0) == []
    engine.set_capacity(100.0, link, 10.0)
    # at t = 5, 20 and 30 bytes were through
    assert engine.advance(200.0) == [(slow, pytest.approx(105.0)), (fast, pytest.approx(105.0))]


def test_zero_bytes_end_at_once_and_order_is_by_time_then_number() -> None:
    engine = FlowEngine()
    link = engine.add_link(1.0)
    first = engine.start(2.0, (link,), 1.0)
    empty = engine.start(2.0, (link,), 0.0)
    nowhere = engine.start(2.0, (), 5.0)
    assert engine.next_event_s() == 2.0
    assert engine.advance(3.0) == [(empty, 2.0), (nowhere, 2.0), (first, 3.0)]
    assert engine.active_flows() == []


def test_changes_of_one_instant_are_solved_once() -> None:
    engine = FlowEngine()
    link = engine.add_link(10.0)
    flows = [engine.start(1.0, (link,), 5.0) for _ in range(50)]
    engine.cancel(1.0, flows[0])
    engine.set_capacity(1.0, link, 98.0)
    assert not engine.is_settled()
    assert engine.effort()["solves"] == 0
    assert engine.rate(flows[1]) == pytest.approx(2.0)
    assert engine.effort()["solves"] == 1


def test_change_stops_where_no_share_moves() -> None:
    """A change spreads from the links it touches to links of larger share, and no further than shares move."""
    engine = FlowEngine()
    low, middle, high, far = (engine.add_link(capacity) for capacity in (2.0, 20.0, 200.0, 2000.0))
    chain = [(low, middle), (low, middle), (middle, high), (high, far), (far,), (far,)]
    for path in chain:
        engine.start(0.0, path, 1e9)
    engine.next_event_s()
    before = engine.effort()
    engine.start(1.0, (far,), 1e9)  # far's share falls from 606 to 454; the flows held lower do not notice
    engine.next_event_s()
    after = engine.effort()
    assert after["moved"] - before["moved"] == 1
    assert after["scans"] - before["scans"] <= 2
    other = FlowEngine()
    pairs = [(other.add_link(5.0), other.add_link(6.0)) for _ in range(200)]
    for pair in pairs:
        other.start(0.0, pair, 1e9)
        other.start(0.0, pair, 1e9)
    other.next_event_s()
    before = other.effort()
    other.start(1.0, pairs[77], 1e9)
    other.next_event_s()
    assert other.effort()["scans"] - before["scans"] <= 8  # of 400 links


def test_solo_flows_are_not_solved_and_leave_nothing() -> None:
    """A message whose narrowest link is its own, with room on the others, costs no solve; then the links are idle."""
    engine = FlowEngine()
    server = engine.add_link(100.0)
    uplinks = [engine.add_link(10.0) for _ in range(12)]
    flows = [engine.start(0.0, (uplink, server), 20.0) for uplink in uplinks[:10]]
    assert engine.is_settled() and engine.effort()["solves"] == 0
    assert engine.link_load(server) == pytest.approx(100.0)
    extra = engine.start(0.0, (uplinks[10], server), 20.0)  # now the server's link is too small for all
    assert not engine.is_settled()
    assert [engine.rate(flow) for flow in [*flows, extra]] == pytest.approx([100 / 11] * 11)
    assert len(engine.advance(10.0)) == 11
    assert engine.link_load(server) == 0.0
    again = engine.start(10.0, (uplinks[11], server), 20.0)
    assert engine.is_settled() and engine.rate(again) == 10.0


def test_a_clock_that_goes_back_and_bad_numbers_are_refused() -> None:
    engine = FlowEngine()
    link = engine.add_link(1.0)
    flow = engine.start(5.0, (link,), 10.0)
    with pytest.raises(ValueError, match="never goes back"):
        engine.start(4.0, (link,), 1.0)
    with pytest.raises(ValueError, match="flow size is -1"):
        engine.start(5.0, (link,), -1.0)
    with pytest.raises(ValueError, match="capacity is inf"):
        engine.add_link(math.inf)
    with pytest.raises(ValueError, match="expected a finite number >= 0"):
        engine.set_capacity(5.0, link, -2.0)
    with pytest.raises(ValueError, match="weight is 0"):
        engine.start(5.0, (link,), 1.0, weight=0.0)
    with pytest.raises(ValueError, match="name one link twice"):
        engine.start(5.0, (link, link), 1.0)
    assert engine.cancel(7.0, flow) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="not under way"):
        engine.cancel(7.0, flow)


def test_bytes_are_conserved() -> None:
    """What a flow's rate carries from its start to its end is its size, through every change of rate."""
    rng = random.Random(5)
    engine = FlowEngine()
    links = [engine.add_link(rng.uniform(1.0, 20.0)) for _ in range(12)]
    sizes: dict[int, float] = {}
    carried: dict[int, float] = {}
    now_s, ended = 0.0, 0
    for step in range(400):
        if step < 150:
            size = rng.lognormvariate(2.0, 1.0)
            flow = engine.start(now_s, rng.sample(links, 3), size, weight=rng.choice([1.0, 3.0]))
            sizes[flow], carried[flow] = size, 0.0
            if step % 10 == 0:
                engine.set_capacity(now_s, rng.choice(links), rng.uniform(0.0, 20.0) * (step % 20 > 0))
        elif step == 150:
            for link in links:
                engine.set_capacity(now_s, link, 10.0)
        next_s = engine.next_event_s()
        if next_s == math.inf:
            break
        pause_s = next_s - now_s if step >= 150 else min(next_s - now_s, rng.uniform(0.0, 0.5))
        for flow in sizes:
            carried[flow] += engine.rate(flow) * pause_s
        now_s = next_s if step >= 150 else now_s + pause_s
        for flow, _ in engine.advance(now_s):
            assert carried[flow] == pytest.approx(sizes.pop(flow), rel=1e-9)
            ended += 1
    assert ended == 150 and not sizes and engine.active_flows() == []


def test_two_engines_in_one_process_do_not_meet() -> None:
    """A second simulation in one process gives what the first gave: no counter or state is shared."""

    def run() -> list[tuple[int, float]]:
        engine = FlowEngine()
        links = [engine.add_link(c) for c in (3.0, 5.0, 7.0)]
        for i in range(40):
            engine.start(i * 0.1, [links[i % 3], links[(i + 1) % 3]], 1.0 + i % 5)
        return engine.advance(1e6)

    assert run() == run()


def test_cost_of_many_short_flows_does_not_grow_memory() -> None:
    """Slots, private links and pool pieces are used again."""
    engine = FlowEngine()
    link = engine.add_link(100.0)
    for i in range(3000):
        for _ in range(3):
            engine.start(float(i), (link,), 10.0, rate_bound_bytes_per_s=40.0)
        assert len(engine.advance(i + 0.9)) == 3
    assert len(engine._capacity) <= 5 and len(engine._flow_in) <= 3
    assert engine._core.member_f.shape[1] <= 4096


# ---------------------------------------------------------------- SimGrid


def load(name: str) -> dict[str, Any]:
    return json.loads(gzip.decompress((SIMGRID / f"{name}.json.gz").read_bytes()))


def mesh_flows(case: dict[str, Any], engine: FlowEngine) -> list[Transfer]:
    up, down, out, into = (
        [engine.add_link(c) for c in case[f"{kind}_bytes_per_s"]] for kind in ("uplink", "downlink", "trunk", "trunk")
    )
    region, flows = case["region_of_node"], []
    for f in case["flows"]:
        s, t = f["source"], f["target"]
        middle = () if region[s] == region[t] else (out[region[s]], into[region[t]])
        flows.append((f["start_s"], (up[s], *middle, down[t]), f["bytes"]))
    return flows


def finish_times(engine: FlowEngine, flows: list[Transfer]) -> list[float]:
    place: dict[int, int] = {}
    finish_s = [math.nan] * len(flows)
    for i, (start_s, links, size) in enumerate(flows):
        for flow, at_s in engine.advance(start_s):
            finish_s[place[flow]] = at_s
        place[engine.start(start_s, links, size)] = i
    for flow, at_s in engine.advance(1e9):
        finish_s[place[flow]] = at_s
    return finish_s


@pytest.mark.parametrize("name", ["mesh_2000_pure", pytest.param("mesh_20000_pure", marks=pytest.mark.slow)])
def test_mesh_durations_equal_simgrid(name: str) -> None:
    """In the pure cases every duration is within 1e-9 of SimGrid's."""
    case, engine = load(name), FlowEngine()
    flows = mesh_flows(case, engine)
    ours = finish_times(engine, flows)
    errors = [
        abs((at_s - f["start_s"]) / (f["finish_s"] - f["start_s"]) - 1)
        for at_s, f in zip(ours, case["flows"], strict=True)
    ]
    assert max(errors) < 1e-9
    assert engine.active_flows() == []


@pytest.mark.parametrize("name", ["star_1000_pure", "star_10000_pure"])
def test_star_durations_equal_simgrid(name: str) -> None:
    """In the pure cases every duration is within 1e-9 of SimGrid's."""
    case, engine = load(name), FlowEngine()
    relay = [engine.add_link(c) for c in case["relay_bytes_per_s"]]
    client = [engine.add_link(c) for c in case["client_bytes_per_s"]]
    flows: list[Transfer] = [(0.0, (relay[r], client[i]), case["size"]) for i, r in enumerate(case["relay_of_client"])]
    ours = finish_times(engine, flows)
    assert max(abs(a / b - 1) for a, b in zip(ours, case["finish_s"], strict=True)) < 1e-12
