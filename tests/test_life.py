"""Comings, goings and faults on a small fabric: each does what it says, no more, and lets go of everything."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any

import pytest

from refimpl.messages import Message, wire
from refimpl.work import Seconds
from refimpl.world import CallError, Timeout, Unreachable
from sim.carrier import FlowCarrier
from sim.churn import ChurnEvent
from sim.fabric import build
from sim.faults import FaultPart
from sim.life import Life
from sim.link_faults import LinkFault
from sim.network import Network
from sim.record import EventLog
from sim.scenario import Scenario
from sim.transport import LV08, TCP, Transport
from sim.world import SimFabric, SimWorld

NS = 1_000_000_000


@wire
@dataclass(frozen=True)
class Rap(Message):
    number: int


@wire
@dataclass(frozen=True)
class Load(Message):
    raw: bytes


def pricer(work: Any) -> float:
    return float(work.duration_s)


class Stage:
    """A hub and some nodes that serve `Rap` and `Load`, one node's log of its starts, and a caller."""

    def __init__(self, *nodes: str, churn: tuple[ChurnEvent, ...] = (), faults: tuple[FaultPart, ...] = ()) -> None:
        self.network = Network(borders=True)
        self.fabric = SimFabric(
            run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, self.network, 1), recorder=self
        )  # fmt: skip
        self.names = ("hub", *nodes)
        self.starts: list[tuple[float, str, bool]] = []
        self.stops: list[tuple[float, str]] = []  # by the fabric's log
        for name in self.names:
            self.fabric.node(name, pricer)
            region = "east" if name == "hub" else "west"
            self.network.add_node(name=name, uplink_mbit_s=8.0, downlink_mbit_s=8.0, latency_ms=1.0, region=region)
        self.desk = self.fabric.node("(desk)")
        self.life = Life(
            self.fabric,
            self.network,
            prices=dict.fromkeys(self.names, pricer),
            start=self._start,
        )
        self.churn, self.faults = churn, faults

    def event(self, time_ns: int, kind: str, node: str, **fields: Any) -> None:
        if kind == "down":
            self.stops.append((time_ns / NS, node))

    def _start(self, world: SimWorld, disk_kept: bool) -> None:
        self.starts.append((self.fabric.now_s(), world.name, disk_kept))

        async def answer(source: str, message: Any) -> Message:
            await world.compute(Seconds(duration_s=1.0), lambda: None)
            return Rap(1)

        world.serve({Rap: answer, Load: answer})

    def run(self, until_s: float, *calls: tuple[float, str, float]) -> list[Any]:
        """Run, calling from the hub: (at, target, time-out). Returns (outcome, when) per call."""
        outcomes: list[Any] = [None] * len(calls)

        async def call(place: int, at_s: float, target: str, timeout_s: float) -> None:
            await self.desk.sleep(at_s)
            hub = self.fabric.nodes["hub"]
            try:
                await hub.call(target, Rap(place), timeout_s)
                outcomes[place] = ("ok", self.fabric.now_s())
            except CallError as error:
                outcomes[place] = (type(error).__name__, self.fabric.now_s())

        async def main() -> None:
            faults = [(fault, list(fault.nodes)) for fault in self.faults]
            self.life.begin(self.names, self.churn, faults)
            for place, (at_s, target, timeout_s) in enumerate(calls):
                self.desk.spawn(call(place, at_s, target, timeout_s))
            await self.desk.sleep(until_s)

        self.fabric.run(main(), node="(desk)")
        return outcomes


def event(time_s: float, node: str, kind: str, disk_kept: bool = True) -> ChurnEvent:
    return ChurnEvent(round(time_s * NS), node, kind, disk_kept)  # type: ignore[arg-type]


def test_a_node_with_a_random_life_is_there_when_it_says() -> None:
    churn = (
        event(10, "a", "join", False),
        event(20, "a", "leave"),
        event(30, "a", "join"),
        event(35, "a", "restart", False),
    )
    stage = Stage("a", "b", churn=churn)
    outcomes = stage.run(50, (5, "a", 3), (12, "a", 3), (25, "a", 3), (32, "a", 3), (5, "b", 3))
    assert [kind for kind, _ in outcomes] == ["Unreachable", "ok", "Unreachable", "ok", "ok"]
    assert [entry for entry in stage.starts if entry[1] == "a"] == [
        (10.0, "a", False), (30.0, "a", True), (35.0, "a", False),
    ]  # fmt: skip
    assert [at for at, name in stage.stops if name == "a"] == [20.0, 35.0]


def test_a_crash_beats_the_random_life_and_ends_in_what_that_says_by_then() -> None:
    churn = (event(1, "a", "join"), event(12, "a", "leave"), event(14, "a", "join"), event(16, "a", "restart"))
    crash = FaultPart(kind="crash", nodes=("a",), start_s=10, end_s=20, disk_kept=False)
    stage = Stage("a", churn=churn, faults=(crash,))
    stage.run(30)
    assert [at for at, name, _ in stage.starts if name == "a"] == [1.0, 20.0]  # not at 14, not at 16
    gone = FaultPart(kind="crash", nodes=("a",), start_s=10, end_s=20)
    stage = Stage("a", churn=(event(1, "a", "join"), event(12, "a", "leave")), faults=(gone,))
    stage.run(30)
    assert [at for at, name, _ in stage.starts if name == "a"] == [1.0]  # its life says it left meanwhile


def test_two_crashes_that_overlap_end_with_the_later() -> None:
    faults = tuple(FaultPart(kind="crash", nodes=("a",), start_s=s, end_s=e) for s, e in ((10, 30), (20, 40)))
    stage = Stage("a", faults=faults)
    stage.run(50)
    assert [at for at, name, _ in stage.starts if name == "a"] == [0.0, 40.0]


def test_a_hung_node_answers_nothing_and_serves_what_it_heard_when_it_wakes() -> None:
    stage = Stage("a", faults=(FaultPart(kind="hang", nodes=("a",), start_s=10, end_s=30),))
    outcomes = stage.run(60, (12, "a", 5), (13, "a", 30), (40, "a", 5))
    assert [kind for kind, _ in outcomes] == ["Timeout", "ok", "ok"]
    assert 31 < outcomes[1][1] < 33  # after it woke, behind the call whose caller had given up
    assert stage.starts.count((0.0, "a", True)) == 1 and len([s for s in stage.starts if s[1] == "a"]) == 1


def test_a_slow_node_takes_that_many_times_as_long() -> None:
    stage = Stage("a", faults=(FaultPart(kind="slow", nodes=("a",), start_s=10, end_s=30, slowness=5.0),))
    outcomes = stage.run(60, (1, "a", 20), (12, "a", 20), (40, "a", 20))
    times = [at - begun for (_, at), begun in zip(outcomes, (1, 12, 40), strict=True)]
    assert times == [pytest.approx(1.0, abs=0.01), pytest.approx(5.0, abs=0.01), pytest.approx(1.0, abs=0.01)]


def test_a_cut_line_stops_one_way_or_both_and_what_was_under_way_arrives_after_it_is_mended() -> None:
    cut = FaultPart(kind="link", nodes=("a",), start_s=10, end_s=30, working=False, direction="up")
    stage = Stage("a", faults=(cut,))
    # 9.9: asked before the cut, its answer (1 s of work) cannot leave until 30
    outcomes = stage.run(60, (9.9, "a", 60), (15, "a", 5), (40, "a", 5))
    assert outcomes[0] == ("ok", pytest.approx(30.0, abs=0.1))
    assert outcomes[1][0] == "Timeout"  # heard, but its reply has no way back
    assert outcomes[2][0] == "ok"


def test_a_partition_cuts_regions_off_and_heals() -> None:
    stage = Stage("a", faults=(FaultPart(kind="partition", regions=("west",), start_s=10, end_s=30),))
    outcomes = stage.run(60, (5, "a", 5), (12, "a", 5), (15, "a", 30), (40, "a", 5))
    assert [kind for kind, _ in outcomes] == ["ok", "Timeout", "ok", "ok"]
    assert outcomes[1][1] == 17.0  # nobody tells a caller that a line is cut: it waits its time out
    assert 31 < outcomes[2][1] < 34  # what stalled goes on when the border opens, behind the one given up


def test_a_connection_over_a_dead_line_is_given_up_after_two_minutes() -> None:
    dead = FaultPart(kind="link", nodes=("a",), start_s=10, end_s=200, working=False)
    stage = Stage("a", faults=(dead,))
    outcomes = stage.run(400, (20, "a", 300), (100, "a", 300))
    # tried at 20 until 147, when nobody tries any longer; tried at 100 until 227, and the line is whole at 200
    assert outcomes[0] == ("Timeout", 320.0)
    assert outcomes[1] == ("ok", pytest.approx(201.0, abs=0.2))
    assert list(stage.fabric.carrier.under_way()) == []


def test_lost_messages_are_time_outs_and_duplicated_ones_are_served_once() -> None:
    lose = FaultPart(kind="link", nodes=("a",), start_s=1, end_s=20, message_loss=1.0, direction="down")
    double = FaultPart(kind="link", nodes=("a",), start_s=30, end_s=50, message_duplicate=1.0, message_reorder=1.0)
    stage = Stage("a", faults=(lose, double))
    outcomes = stage.run(60, (5, "a", 5), (35, "a", 5))
    assert [kind for kind, _ in outcomes] == ["Timeout", "ok"]
    assert stage.fabric.nodes["a"].busy_ns(60 * NS) == 1 * NS  # one second of work: it was served once


@pytest.mark.parametrize("transport", [TCP, LV08], ids=["tcp", "lv08"])
def test_message_faults_add_to_what_the_path_does(transport: Transport) -> None:
    """A message that is doubled, under loss, keeps its path's bound, its latency and its place in the channel."""

    def arrivals(**fault: float) -> list[tuple[str, float]]:
        network = Network(regions={("e", "w"): 100.0, ("e", "e"): 1.0, ("w", "w"): 1.0}, transport=transport)
        for region in ("e", "w"):
            network.add_node(uplink_mbit_s=1000.0, downlink_mbit_s=1000.0, region=region)
        fabric = SimFabric(run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, network, 1))
        a = fabric.node("a")
        fabric.node("b")
        came: list[tuple[str, float]] = []
        network.apply(0.0, "fault", LinkFault(node=1, direction="down", packet_loss=0.02, **fault))

        async def main() -> None:
            fabric.carrier.send(0, 1, 10_000_000, lambda _: came.append(("large", fabric.now_s())), "Message")
            fabric.carrier.send(0, 1, 100, lambda _: came.append(("small", fabric.now_s())), "Message")
            await a.sleep(500.0)

        fabric.run(main(), node="a")
        return came

    plain, doubled = arrivals(), arrivals(message_duplicate=1.0)
    assert [what for what, _ in plain] == [what for what, _ in doubled] == ["large", "small"]
    assert doubled[0][1] > 0.99 * plain[0][1] > 0.1
    overtaken = arrivals(message_reorder=1.0)
    assert [what for what, _ in overtaken] == ["small", "large"] and overtaken[1][1] > plain[0][1]


def test_a_skewed_clock_is_ahead_and_a_full_disk_is_full() -> None:
    faults = (
        FaultPart(kind="clock_skew", nodes=("a",), start_s=10, end_s=20, skew_s=7.0),
        FaultPart(kind="disk_full", nodes=("a",), start_s=10, end_s=20),
    )
    stage = Stage("a", faults=faults)
    seen: list[tuple[float, bool]] = []

    def look(_: Any) -> None:
        node = stage.fabric.nodes["a"]
        seen.append((node.now(), node.disk_full))

    for at in (5, 15, 25):
        stage.fabric.kernel.at(0, at * NS, look)
    stage.run(30)
    assert seen == [(5.0, False), (22.0, True), (25.0, False)]


def test_a_dead_nodes_transfers_break_off_and_everything_of_it_is_released() -> None:
    crash = FaultPart(kind="crash", nodes=("a",), start_s=10)
    stage = Stage("a", "b", faults=(crash,))
    ends: list[tuple[str, float]] = []

    async def send(source: str, target: str) -> None:
        try:
            await stage.fabric.nodes[source].call(target, Load(bytes(20_000_000)), 100.0)  # 20 s of the line
        except (Timeout, Unreachable) as error:
            ends.append((type(error).__name__, stage.fabric.now_s()))

    async def main() -> None:
        stage.life.begin(stage.names, (), [(crash, ["a"])])
        await stage.desk.sleep(5)
        stage.desk.spawn(send("hub", "a"))
        stage.fabric.nodes["a"].spawn(send("a", "b"))
        await stage.desk.sleep(60)

    stage.fabric.run(main(), node="(desk)")
    assert ends == [("Unreachable", pytest.approx(10.0, abs=0.1))]  # the dead one's own call has nobody left to tell
    carrier = stage.fabric.carrier
    assert isinstance(carrier, FlowCarrier)
    dead = stage.fabric.nodes["a"]
    assert not dead.tasks and not dead.calls
    assert carrier.engine.active_flows() == []


def test_a_fault_that_stands_outlives_a_restart_and_leaves_nothing_behind_when_it_ends() -> None:
    """Slow by 5 and 7 s ahead from 10 to 30; restarted at 20: still so after it, whole after 30."""
    faults = (
        FaultPart(kind="slow", nodes=("a",), start_s=10, end_s=30, slowness=5.0),
        FaultPart(kind="clock_skew", nodes=("a",), start_s=10, end_s=30, skew_s=7.0),
        FaultPart(kind="hang", nodes=("b",), start_s=10, end_s=20),
        FaultPart(kind="hang", nodes=("b",), start_s=15, end_s=30),
    )
    stage = Stage("a", "b", churn=(event(0.5, "a", "join"), event(20, "a", "restart")), faults=faults)
    seen: list[tuple[float, float, bool]] = []

    def look(_: Any) -> None:
        a, b = stage.fabric.nodes["a"], stage.fabric.nodes["b"]
        seen.append((a.slowness, a.skew_s, b.hung))

    for at in (15, 25, 35):
        stage.fabric.kernel.at(0, at * NS, look)
    stage.run(40)
    assert seen == [(5.0, 7.0, True), (5.0, 7.0, True), (1.0, 0.0, False)]


def test_a_disk_that_was_lost_stays_lost_whatever_else_happens_while_the_node_is_down() -> None:
    lost = FaultPart(kind="crash", nodes=("a",), start_s=10, end_s=20, disk_kept=False)
    stage = Stage("a", churn=(event(1, "a", "join"), event(12, "a", "leave"), event(15, "a", "join")), faults=(lost,))
    stage.run(30)
    assert [entry for entry in stage.starts if entry[1] == "a"] == [(1.0, "a", True), (20.0, "a", False)]


def test_a_hung_nodes_own_tasks_stand_still_and_go_on_when_it_wakes() -> None:
    stage = Stage("a", faults=(FaultPart(kind="hang", nodes=("a",), start_s=10.5, end_s=30),))
    beats: list[float] = []

    async def beat(world: SimWorld) -> None:
        while True:
            beats.append(stage.fabric.now_s())
            await world.sleep(1.0)

    stage.fabric.kernel.at(0, 5 * NS, lambda _: stage.fabric.nodes["a"].spawn(beat(stage.fabric.nodes["a"])))
    stage.run(32.5)
    assert beats == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 30.0, 31.0, 32.0]


def test_with_simgrids_tcp_model_the_links_are_taken_after_the_latency() -> None:
    """LV08: 13.01 times the latency first, then size / (0.97 · rate): 2 ms · 13.01 + 1e6 / (0.97 · 1e6 byte/s)."""
    network = Network(transport=LV08)
    fabric = SimFabric(run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, network, 1))
    for name in ("a", "b"):
        fabric.node(name)
        network.add_node(uplink_mbit_s=8.0, downlink_mbit_s=80.0, latency_ms=1.0)
    came: list[float] = []

    async def main() -> None:
        fabric.carrier.send(0, 1, 1_000_000, lambda _: came.append(fabric.now_s()), None)
        await fabric.nodes["a"].sleep(10.0)

    fabric.run(main())
    assert came == [pytest.approx(0.002 * 13.01 + 1 / 0.97, rel=1e-6)]


SHARED_LINES = """
title = "Two campuses"
shows = "What a broken line between them does to a transfer."
duration_s = 100.0
[broadcast]
size_gb = 1.0
[network]
regions = "p2p"
sites = [{ name = "campus", uplink_mbit_s = 8.0, downlink_mbit_s = 8.0 }]
trunks = [{ region = "japan", out_mbit_s = 8.0, in_mbit_s = 8.0 }]
[[nodes]]
name = "origin"
role = "origin"
device = "L4"
region = "europe"
sites = ["campus"]
uplink_mbit_s = 800.0
downlink_mbit_s = 800.0
[[nodes]]
name = "client"
count = 2
role = "client"
device = "L4"
region = "japan"
uplink_mbit_s = 800.0
downlink_mbit_s = 800.0
[[faults]]
kind = "link"
start_s = 4.0
end_s = 9.0
"""


def arrival_s(fault: str, source: str, target: str) -> float:
    """When 10 MB that left at 0 s have come (10 s over lines that are whole), less the path's latency."""
    scenario = Scenario.model_validate(tomllib.loads(SHARED_LINES + fault))
    fabric, network = build(scenario, 1, EventLog())
    names = [member.name for member in scenario.members()]
    life = Life(fabric, network, prices=dict.fromkeys(names, pricer), start=lambda world, kept: None)
    came: list[float] = []
    desk = fabric.node("(desk)")
    a, b = fabric.nodes[source].index, fabric.nodes[target].index

    async def main() -> None:
        life.begin(names, (), [(f, [n for name in f.nodes for n in scenario.struck_by(name)]) for f in scenario.faults])
        fabric.carrier.send(a, b, 10_000_000, lambda _: came.append(fabric.now_s()), None)
        await desk.sleep(90)

    fabric.run(main(), node=desk.name)
    return came[0] - network.path(a, b).one_way_latency_s


@pytest.mark.parametrize(
    ("fault", "source", "target", "expected_s"),
    [
        # down from 4 to 9: 4 MB before, 6 MB after
        ('sites = ["campus"]\nworking = false', "origin", "client-0", 15.0),
        ('sites = ["campus"]\nworking = false\ndirection = "up"', "origin", "client-0", 15.0),
        ('sites = ["campus"]\nworking = false\ndirection = "down"', "origin", "client-0", 10.0),
        ('regions = ["japan"]\nworking = false\ndirection = "down"', "origin", "client-0", 15.0),
        ('regions = ["japan"]\nworking = false\ndirection = "up"', "origin", "client-0", 10.0),
        ('regions = ["japan"]\nworking = false\ndirection = "up"', "client-0", "origin", 15.0),
        # at 2 Mbit/s from 4 to 9: 4 MB + 1.25 MB, then 4.75 MB
        ('regions = ["japan"]\nbandwidth_factor = 0.25', "origin", "client-0", 13.75),
        # within the region, nothing of it is on the trunk: 10 MB at 800 Mbit/s
        ('regions = ["japan"]\nworking = false', "client-0", "client-1", 0.1),
        # named by itself and by its group: one fault on the line, not two (800 · 0.005 = 4 Mbit/s)
        ('nodes = ["client-0", "client"]\nbandwidth_factor = 0.005', "origin", "client-0", 12.5),
    ],
)
def test_a_link_fault_is_on_nodes_a_site_or_a_trunk(fault: str, source: str, target: str, expected_s: float) -> None:
    assert arrival_s(fault, source, target) == pytest.approx(expected_s, abs=1e-6)
