"""Why: what becomes of a node follows from its random life and the stated faults by one set of rules, whether the node
is simulated or a real process; the rules are here, and do nothing themselves.

A `Course` knows what is to happen when, and what each node should be by now; `Hands` make it so: `sim/life.py` in
virtual time, `sim/driver.py` with real processes. Explicit faults beat random lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Any, NamedTuple, Protocol

from sim.churn import ChurnEvent
from sim.faults import FaultPart
from sim.kernel import to_ns


@dataclass
class Standing:
    """Whether one node should be up, why not, and what ails it."""

    wanted: bool  # what its random life says
    disk_kept: bool = True  # all that happened since it went down has left its disk alone
    faults: dict[int, FaultPart] = field(default_factory=dict)  # in force, by their place in the scenario

    def has(self, kind: str) -> bool:
        """Whether a fault of this kind is in force."""
        return any(fault.kind == kind for fault in self.faults.values())

    @property
    def up(self) -> bool:
        return self.wanted and not self.has("crash")

    @property
    def slowness(self) -> float:
        return prod(fault.slowness or 1.0 for fault in self.faults.values() if fault.kind == "slow")

    @property
    def skew_s(self) -> float:
        return sum(fault.skew_s or 0.0 for fault in self.faults.values() if fault.kind == "clock_skew")


class Hands(Protocol):
    """Who does what the course says."""

    def is_up(self, name: str) -> bool: ...

    def bring_up(self, name: str, standing: Standing, disk_kept: bool) -> None: ...

    def take_down(self, name: str, why: str) -> None: ...

    def ail(self, name: str, standing: Standing) -> None:
        """Let slowness, skew, a hang or a full disk be as `standing` says, on a node that is up."""
        ...

    def strike_lines(self, place: int, fault: FaultPart, struck: Sequence[str], begins: bool) -> None:
        """Lay a fault of kind link or partition on the network, or lift it."""
        ...

    def record(self, kind: str, node: str, **fields: Any) -> None: ...


class Happening(NamedTuple):
    """One thing that is to happen."""

    time_ns: int
    node: str  # "" for a fault
    act: Callable[[], None]
    brings_up: tuple[str, ...] = ()  # nodes that it may start, for whoever wants them ready


class Course:
    """All comings, goings and faults of one run."""

    def __init__(
        self,
        names: Sequence[str],
        churn: Sequence[ChurnEvent],
        faults: Iterable[tuple[FaultPart, Sequence[str]]],
        hands: Hands,
    ) -> None:
        """`faults` come with the nodes that they are on; a node may be named twice, by itself and by its group."""
        random = {event.node for event in churn}
        self.hands, self.churn = hands, churn
        self.faults = [(fault, list(dict.fromkeys(named))) for fault, named in faults]
        self.standing = {name: Standing(wanted=name not in random) for name in names}

    def agenda(self) -> list[Happening]:
        """All that is to happen after the start, in the order in which things of one instant happen: faults as they
        are listed, then lives."""
        found = []
        for place, (fault, struck) in enumerate(self.faults):
            crash = tuple(struck) if fault.kind == "crash" else ()
            found.append(Happening(to_ns(fault.start_s), "", partial(self._lay_on, place)))
            if fault.end_s is not None:
                found.append(Happening(to_ns(fault.end_s), "", partial(self._lift, place), crash))
        for event in self.churn:
            comes = (event.node,) if event.kind != "leave" else ()
            found.append(Happening(event.time_ns, event.node, partial(self._live, event), comes))
        return found

    def settle(self, name: str) -> None:
        """Bring the node up or down, and let the faults in force be what ails it, so that it is as it should be."""
        standing, hands = self.standing[name], self.hands
        is_up = hands.is_up(name)
        if standing.up and not is_up:
            disk_kept, standing.disk_kept = standing.disk_kept, True
            hands.bring_up(name, standing, disk_kept)
        elif is_up and not standing.up:
            hands.take_down(name, "crash" if standing.has("crash") else "leave")
        elif is_up:
            hands.ail(name, standing)

    def _live(self, event: ChurnEvent) -> None:
        standing = self.standing[event.node]
        standing.disk_kept = standing.disk_kept and event.disk_kept
        if event.kind == "restart":
            if self.hands.is_up(event.node):
                self.hands.take_down(event.node, "restart")
        else:
            standing.wanted = event.kind == "join"
        self.settle(event.node)

    def _lay_on(self, place: int) -> None:
        fault, struck = self.faults[place]
        self._tell(place, begins=True)
        for name in struck:
            standing = self.standing[name]
            standing.faults[place] = fault
            if fault.kind == "crash":
                standing.disk_kept = standing.disk_kept and fault.disk_kept
            self.settle(name)

    def _lift(self, place: int) -> None:
        self._tell(place, begins=False)
        for name in self.faults[place][1]:
            del self.standing[name].faults[place]
            self.settle(name)

    def _tell(self, place: int, *, begins: bool) -> None:
        fault, struck = self.faults[place]
        on = struck or list(fault.sites) or list(fault.regions)
        self.hands.record("fault", "", fault=fault.kind, on=on, of=fault.target, begins=begins)
        if fault.kind in ("link", "partition"):
            self.hands.strike_lines(place, fault, struck, begins)
