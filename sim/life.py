"""Makes nodes live in virtual time: brings them up, takes them down and breaks them, as `sim/course.py` says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from simpy.events import Event

from sim.carrier import FlowCarrier
from sim.churn import ChurnEvent
from sim.course import Course, Standing
from sim.faults import FaultPart
from sim.network import Network
from sim.world import Pricer, SimFabric, SimWorld

Start = Callable[[SimWorld, bool], None]
"""Seat a node that has come up: `start(world, disk_kept)`."""


class Life:
    """All comings, goings and faults of one run: `sim.course.Hands` on a fabric."""

    def __init__(
        self,
        fabric: SimFabric,
        network: Network,
        *,
        prices: Mapping[str, Pricer],
        start: Start,
    ) -> None:
        """`prices`: the pricer of each node by name."""
        self.fabric, self.network, self.prices = fabric, network, prices
        self.start = start

    def begin(
        self, names: Sequence[str], churn: Sequence[ChurnEvent], faults: Sequence[tuple[FaultPart, Sequence[str]]]
    ) -> None:
        """Bring up all nodes without a random life, and schedule everything else. `faults` come with their nodes."""
        course = Course(names, churn, faults, self)
        for name in names:
            self.fabric.nodes[name].alive = False
        agenda = course.agenda()
        for happening in agenda:
            if not happening.node:
                self._schedule(0, happening.time_ns, happening.act)
        for name in names:
            course.settle(name)
        for happening in agenda:
            if happening.node:
                self._schedule(self._index(happening.node), happening.time_ns, happening.act)

    # ------------------------------------------------------------------------------------------------------- hands
    def is_up(self, name: str) -> bool:
        return self.fabric.nodes[name].alive

    def bring_up(self, name: str, standing: Standing, disk_kept: bool) -> None:
        world = self.fabric.node(name, self.prices[name])
        self.fabric.record("up", name, disk_kept=disk_kept)
        self.ail(name, standing)
        self.start(world, disk_kept)

    def take_down(self, name: str, why: str) -> None:
        self.fabric.kill(name)
        self.fabric.record("down", name, why=why)

    def ail(self, name: str, standing: Standing) -> None:
        world = self.fabric.nodes[name]
        world.slowness, world.skew_s = standing.slowness, standing.skew_s
        world.disk_full = standing.has("disk_full")
        if standing.has("hang"):
            world.hang()
        else:
            world.wake()

    def strike_lines(self, place: int, fault: FaultPart, struck: Sequence[str], begins: bool) -> None:
        carrier = cast(FlowCarrier, self.fabric.carrier)
        carrier.links_will_change()
        for name, on in fault.on_network({name: self._index(name) for name in struck}):
            if begins:
                self.network.apply(self.fabric.now_s(), f"fault {place} {name}", on)
            else:
                self.network.lift(self.fabric.now_s(), f"fault {place} {name}")
        carrier.links_changed()

    def record(self, kind: str, node: str, **fields: Any) -> None:
        self.fabric.record(kind, node, **fields)

    def _index(self, name: str) -> int:
        return self.fabric.nodes[name].index

    def _schedule(self, node: int, time_ns: int, act: Callable[[], None]) -> None:
        def happen(_: Event) -> None:
            act()

        self.fabric.kernel.at(node, time_ns, happen)
