"""Makes nodes live: brings them up, takes them down and breaks them as the scenario says, at the instants it says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

from simpy.events import Event

from sim.carrier import FlowCarrier
from sim.churn import ChurnEvent
from sim.faults import FaultPart
from sim.kernel import to_ns
from sim.network import Network
from sim.world import Pricer, SimFabric, SimWorld

Start = Callable[[SimWorld, bool], None]
"""Seat a node that has come up: `start(world, disk_kept)`."""


@dataclass
class _Standing:
    """Whether one node should be up, and why not."""

    wanted: bool  # what its random life says
    struck: int = 0  # explicit crashes in force
    disk_kept: bool = True


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
        for place, (fault, struck) in enumerate(faults):
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
        standing.disk_kept = event.disk_kept
        if event.kind == "restart":
            if standing.struck == 0:
                self._down(event.node, "restart")
        else:
            standing.wanted = event.kind == "join"
        self._settle(event.node)

    # ----------------------------------------------------------------------------------------------- stated faults
    def _lay_on(self, fault: FaultPart, struck: Sequence[str], place: int) -> None:
        self.fabric.record("fault", "", fault=fault.kind, on=list(struck) or list(fault.regions), begins=True)
        if fault.kind in ("link", "partition"):
            for name, node in self._targets(struck):
                self.network.apply(self.fabric.now_s(), f"fault {place} {name}", fault.on_network(node))
            self._links_changed()
        for name in struck:
            world = self.fabric.nodes[name]
            if fault.kind == "crash":
                self.standing[name].struck += 1
                self.standing[name].disk_kept = fault.disk_kept
                self._settle(name)
            elif fault.kind == "hang":
                world.hung = True
            elif fault.kind == "slow":
                world.slowness *= fault.slowness or 1.0
            elif fault.kind == "clock_skew":
                world.skew_s += fault.skew_s or 0.0
            elif fault.kind == "disk_full":
                world.disk_full = True

    def _lift(self, fault: FaultPart, struck: Sequence[str], place: int) -> None:
        self.fabric.record("fault", "", fault=fault.kind, on=list(struck) or list(fault.regions), begins=False)
        if fault.kind in ("link", "partition"):
            for name, _ in self._targets(struck):
                self.network.lift(self.fabric.now_s(), f"fault {place} {name}")
            self._links_changed()
        for name in struck:
            world = self.fabric.nodes[name]
            if fault.kind == "crash":
                self.standing[name].struck -= 1
                self._settle(name)
            elif fault.kind == "hang":
                world.wake()
            elif fault.kind == "slow":
                world.slowness /= fault.slowness or 1.0
            elif fault.kind == "clock_skew":
                world.skew_s -= fault.skew_s or 0.0
            elif fault.kind == "disk_full":
                world.disk_full = False

    def _targets(self, struck: Sequence[str]) -> list[tuple[str, int | None]]:
        return [(name, self._index(name)) for name in struck] or [("regions", None)]

    # -------------------------------------------------------------------------------------------------- up and down
    def _settle(self, name: str) -> None:
        """Bring the node up or down so that it is as it should be."""
        standing, world = self.standing[name], self.fabric.nodes[name]
        should = standing.wanted and standing.struck == 0
        if should and not world.alive:
            fresh = self.fabric.node(name, self.prices[name])
            self.fabric.record("up", name, disk_kept=standing.disk_kept)
            self.start(fresh, standing.disk_kept)
        elif world.alive and not should:
            self._down(name, "crash" if standing.struck else "leave")

    def _down(self, name: str, why: str) -> None:
        if self.fabric.nodes[name].alive:
            self.fabric.kill(name)
            self.fabric.record("down", name, why=why)
            self.stopped(name)

    def _index(self, name: str) -> int:
        return self.fabric.nodes[name].index

    def _links_changed(self) -> None:
        cast(FlowCarrier, self.fabric.carrier).links_changed()

    def _schedule(self, instant_s: float, action: Callable[[], None]) -> None:
        def act(_: Event) -> None:
            action()

        self.fabric.kernel.at(0, to_ns(instant_s), act)
