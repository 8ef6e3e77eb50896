"""Makes nodes live: brings them up, takes them down and breaks them as the scenario says, at the instants it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import cast

from simpy.events import Event

from sim.carrier import FlowCarrier
from sim.churn import ChurnEvent
from sim.faults import FaultPart
from sim.kernel import to_ns
from sim.link_faults import Fault
from sim.network import Network
from sim.world import Pricer, SimFabric, SimWorld

Start = Callable[[SimWorld, bool], None]
"""Seat a node that has come up: `start(world, disk_kept)`."""


@dataclass
class _Standing:
    """Whether one node should be up, and why not."""

    wanted: bool  # what its random life says
    disk_kept: bool = True  # all that happened since it went down has left its disk alone
    faults: dict[int, FaultPart] = field(default_factory=dict)  # in force, by their place in the scenario

    def has(self, kind: str) -> bool:
        """Whether a fault of this kind is in force."""
        return any(fault.kind == kind for fault in self.faults.values())


class Life:
    """All comings, goings and faults of one run."""

    def __init__(
        self,
        fabric: SimFabric,
        network: Network,
        *,
        prices: Mapping[str, Pricer],
        start: Start,
        stopped: Callable[[str], None] = lambda name: None,
    ) -> None:
        """`prices`: the pricer of each node by name. `stopped(name)` is called when a node goes down."""
        self.fabric, self.network, self.prices = fabric, network, prices
        self.start, self.stopped = start, stopped
        self.standing: dict[str, _Standing] = {}

    def begin(
        self, names: Sequence[str], churn: Sequence[ChurnEvent], faults: Sequence[tuple[FaultPart, Sequence[str]]]
    ) -> None:
        """Bring up all nodes without a random life, and schedule everything else. `faults` come with their nodes."""
        random = {event.node for event in churn}
        for name in names:
            self.standing[name] = _Standing(wanted=name not in random)
            self.fabric.nodes[name].alive = False
        for place, (fault, named) in enumerate(faults):
            struck = list(dict.fromkeys(named))  # a node may be named by itself and by its group
            self._schedule(fault.start_s, partial(self._lay_on, fault, struck, place))
            if fault.end_s is not None:
                self._schedule(fault.end_s, partial(self._lift, fault, struck, place))
        for name in names:
            self._settle(name)
        for event in churn:
            self.fabric.kernel.at(self._index(event.node), event.time_ns, partial(self._live, event))

    # ---------------------------------------------------------------------------------------------- random lives
    def _live(self, event: ChurnEvent, _: Event) -> None:
        standing = self.standing[event.node]
        standing.disk_kept = standing.disk_kept and event.disk_kept
        if event.kind == "restart":
            if self.fabric.nodes[event.node].alive:
                self._down(event.node, "restart")
        else:
            standing.wanted = event.kind == "join"
        self._settle(event.node)

    # ----------------------------------------------------------------------------------------------- stated faults
    def _lay_on(self, fault: FaultPart, struck: Sequence[str], place: int) -> None:
        self._tell(fault, struck, begins=True)
        self._links_will_change()
        for name, on in self._on_network(fault, struck):
            self.network.apply(self.fabric.now_s(), f"fault {place} {name}", on)
        self._links_changed()
        for name in struck:
            standing = self.standing[name]
            standing.faults[place] = fault
            if fault.kind == "crash":
                standing.disk_kept = standing.disk_kept and fault.disk_kept
            self._settle(name)

    def _lift(self, fault: FaultPart, struck: Sequence[str], place: int) -> None:
        self._tell(fault, struck, begins=False)
        self._links_will_change()
        for name, _ in self._on_network(fault, struck):
            self.network.lift(self.fabric.now_s(), f"fault {place} {name}")
        self._links_changed()
        for name in struck:
            del self.standing[name].faults[place]
            self._settle(name)

    def _tell(self, fault: FaultPart, struck: Sequence[str], *, begins: bool) -> None:
        on = list(struck) or list(fault.sites) or list(fault.regions)
        self.fabric.record("fault", "", fault=fault.kind, on=on, of=fault.target, begins=begins)

    def _on_network(self, fault: FaultPart, struck: Sequence[str]) -> list[tuple[str, Fault]]:
        if fault.kind not in ("link", "partition"):
            return []
        return fault.on_network({name: self._index(name) for name in struck})

    # -------------------------------------------------------------------------------------------------- up and down
    def _settle(self, name: str) -> None:
        """Bring the node up or down, and let the faults in force be what ails it, so that it is as it should be."""
        standing, world = self.standing[name], self.fabric.nodes[name]
        should = standing.wanted and not standing.has("crash")
        if should and not world.alive:
            world = self.fabric.node(name, self.prices[name])
            disk_kept, standing.disk_kept = standing.disk_kept, True
            self.fabric.record("up", name, disk_kept=disk_kept)
            self._ail(world, standing)
            self.start(world, disk_kept)
        elif world.alive and not should:
            self._down(name, "crash" if standing.has("crash") else "leave")
        elif world.alive:
            self._ail(world, standing)

    @staticmethod
    def _ail(world: SimWorld, standing: _Standing) -> None:
        faults = standing.faults.values()
        world.slowness = prod(fault.slowness or 1.0 for fault in faults if fault.kind == "slow")
        world.skew_s = sum(fault.skew_s or 0.0 for fault in faults if fault.kind == "clock_skew")
        world.disk_full = standing.has("disk_full")
        if standing.has("hang"):
            world.hang()
        else:
            world.wake()

    def _down(self, name: str, why: str) -> None:
        if self.fabric.nodes[name].alive:
            self.fabric.kill(name)
            self.fabric.record("down", name, why=why)
            self.stopped(name)

    def _index(self, name: str) -> int:
        return self.fabric.nodes[name].index

    def _links_will_change(self) -> None:
        cast(FlowCarrier, self.fabric.carrier).links_will_change()

    def _links_changed(self) -> None:
        cast(FlowCarrier, self.fabric.carrier).links_changed()

    def _schedule(self, instant_s: float, action: Callable[[], None]) -> None:
        def act(_: Event) -> None:
            action()

        self.fabric.kernel.at(0, to_ns(instant_s), act)
