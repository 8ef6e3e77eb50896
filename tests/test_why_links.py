"""`why` names the link that makes a transfer slow, by the max-min share that it gives, and the link that is down."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from refimpl.messages import Blob, Message, Ok, wire
from sim.carrier import FlowCarrier
from sim.explain import FINISHED, why
from sim.link_faults import Fault, LinkFault, Partition
from sim.network import Network
from sim.waits import waits_json
from sim.watch import Watch
from sim.world import SimFabric

NS = 1_000_000_000


@wire
@dataclass(frozen=True)
class Hogshead(Message):
    blob: Blob


class Swarm:
    """a and b in the east, on a campus; c and d in the west; everybody takes loads. Lines of nodes: 80 Mbit/s."""

    def __init__(self, *, campus_mbit_s: float = 800.0, trunk_mbit_s: float = 800.0, loss: float = 0.0) -> None:
        self.network = Network(regions={("e", "e"): 0.0, ("e", "w"): 20.0, ("w", "w"): 0.0}, borders=True)
        self.network.add_site("campus", uplink_mbit_s=campus_mbit_s, downlink_mbit_s=campus_mbit_s)
        self.network.add_trunk("e", out_mbit_s=trunk_mbit_s, in_mbit_s=trunk_mbit_s)
        self.fabric = SimFabric(run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, self.network, 1))
        self.watch = self.fabric.watch = Watch()
        for name, region, sites in (("a", "e", ["campus"]), ("b", "e", ["campus"]), ("c", "w", []), ("d", "w", [])):
            node = self.fabric.node(name)
            node.serve({Hogshead: self.take})
            self.network.add_node(
                name=name, region=region, sites=sites, uplink_mbit_s=80.0, downlink_mbit_s=80.0, loss_fraction=loss
            )

    async def take(self, source: str, load: Hogshead) -> Message:
        return Ok()

    def send(self, source: str, target: str, megabytes: int = 1000) -> None:
        async def call() -> None:
            await self.fabric.nodes[source].call(target, Hogshead(Blob(megabytes * 1_000_000, source + target)), 1e5)

        self.fabric.nodes[source].spawn(call(), "call")

    def waits(self, until_s: float) -> dict[str, Any]:
        self.fabric.kernel.run_through(round(until_s * NS))
        return waits_json(self.fabric, self.watch, FINISHED)

    def reasons(self) -> set[str]:
        return {call["reason"] for call in self.waits(5.0)["open"]}


@pytest.mark.parametrize(
    ("lines", "ways", "expected"),
    [
        # two from the campus to the west, 80 Mbit/s each if nothing else were in the way
        ({"trunk_mbit_s": 60.0}, ["ac", "bd"], {"trunk out of e shared by 2 flows, 30 Mbit/s for it"}),
        ({"trunk_mbit_s": 60.0}, ["ca", "db"], {"trunk into e shared by 2 flows, 30 Mbit/s for it"}),
        ({"campus_mbit_s": 50.0}, ["ac", "bd"], {"uplink of site campus shared by 2 flows, 25 Mbit/s for it"}),
        ({"campus_mbit_s": 50.0}, ["ca", "db"], {"downlink of site campus shared by 2 flows, 25 Mbit/s for it"}),
        ({}, ["ac", "bc"], {"downlink of c shared by 2 flows, 40 Mbit/s for it"}),
        # the busiest link is not the bottleneck: three on the trunk, 100 / 3 each, but a's line gives less to a's two
        (
            {"trunk_mbit_s": 130.0},
            ["ac", "ad", "bd"],
            {"uplink of a shared by 2 flows, 40 Mbit/s for it", "downlink of d shared by 2 flows, 40 Mbit/s for it"},
        ),
        # 0.0199 of packets lost over 20 ms: 1448 · sqrt(3/2) / (0.02 · sqrt(0.0199)) bytes/s
        (
            {"loss": 0.01},
            ["ac"],
            {"the rate bound of one transfer (window, loss or the region's single flow), 5.029 Mbit/s"},
        ),
    ],
)
def test_a_slow_transfer_is_held_up_by_its_max_min_bottleneck(
    lines: dict[str, float], ways: list[str], expected: set[str]
) -> None:
    swarm = Swarm(**lines)
    for source, target in ways:
        swarm.send(source, target)
    assert swarm.reasons() == expected


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (LinkFault(region="e", direction="up", working=False), "trunk out of e is down, since 2.000 s"),
        (LinkFault(site="campus", working=False), "uplink of site campus is down, since 2.000 s"),
        (LinkFault(node=2, direction="down", working=False), "downlink of c is down, since 2.000 s"),
        (LinkFault(site="campus", bandwidth_factor=0.0), "uplink of site campus is down, since 2.000 s"),
        (Partition(regions=frozenset({"w"})), "partition 'cut' cuts e off from w, since 2.000 s"),
    ],
)
def test_a_stalled_transfer_names_the_link_that_is_down_and_since_when(fault: Fault, sentence: str) -> None:
    swarm = Swarm()
    swarm.send("a", "c")
    swarm.fabric.kernel.at(0, 2 * NS, lambda _: swarm.network.apply(2.0, "cut", fault))
    assert swarm.reasons() == {sentence}


def told(swarm: Swarm, folder: Path, until_s: float) -> str:
    folder.mkdir()
    (folder / "waits.json").write_text(json.dumps(swarm.waits(until_s)), encoding="utf-8")
    return why(folder)


def test_why_adds_up_which_links_held_transfers_up_in_a_finished_run(tmp_path: Path) -> None:
    """Two of 100 MB at 30 Mbit/s over the trunk: 26.667 s each; a third has 50 of d's line: 16 s."""
    swarm = Swarm(trunk_mbit_s=60.0)
    swarm.send("a", "c", 100)
    swarm.send("b", "d", 100)
    swarm.send("c", "d", 100)  # with b's on d's line: 50 Mbit/s are left
    text = told(swarm, tmp_path / "run-1", 60.0)
    assert "Links that held transfers up, by the sum of the transfers' times\n  trunk out of e: 53.333 s" in text
    assert "downlink of d: 16.000 s" in text
    assert "they were held up the longest by trunk out of e (26.667 s)" in text
    assert " 0.000 s" not in text.partition("Links that held")[2], "what rounds to nothing is left out"


def nothing(swarm: Swarm) -> None:
    """Nobody sends."""


def one(swarm: Swarm) -> None:
    swarm.send("a", "a", 1)


@pytest.mark.parametrize("calls", [nothing, one])
def test_why_says_nothing_of_links_where_nothing_was_held_up(tmp_path: Path, calls: Callable[[Swarm], None]) -> None:
    swarm = Swarm()
    calls(swarm)
    assert "held" not in told(swarm, tmp_path / "run-1", 1.0)
