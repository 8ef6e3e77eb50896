"""Why: a swarm, a broadcast and whatever comes next differ in their roles, promises and figures, and in nothing else.

`sim/run.py` is the one way in which a scenario is run: network, lives and faults, oversight, settling, log, figures,
report. What differs is a `Play`, one file here; `KINDS` in `sim/kind_table.py` has its line (roles, and the part of the
file that calls for it). A kind's module offers `begin(scenario, seed, model_path) -> Play`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

from refimpl.world import Signal
from sim.checkers import View
from sim.scenario import Member, Scenario, ScenarioError
from sim.watch import Watch
from sim.world import SimFabric, SimWorld

WRITE_TO_DISK = ("broadcast",)
"""Kinds with a role that writes to its node's disk: in the others a full one would change nothing."""


class Tally(Protocol):
    """Figures of a run, from its log alone. One pass, and no more memory than the figures need."""

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        ...

    def figures(self) -> dict[str, Any]:
        """This kind's part of `summary.json`."""
        ...

    def table(self) -> str:
        """What the terminal and `table.txt` show."""
        ...

    def draw(self, folder: Path) -> None:
        """The plots."""
        ...

    def page(self) -> dict[str, Any]:
        """This kind's part of the report: {"tiles": {name: text}, "tables": [{"title", "columns", "rows", "classes" of
        the rows}], "pictures": [{"title", "file", "alt"}]}."""
        ...


class Play(Protocol):
    """One run of one kind, while it runs."""

    @property
    def counts(self) -> Mapping[str, int]:
        """For the progress line."""
        ...

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event, as it happens."""
        ...

    def share(self) -> float:
        """How much of the work is done, 0 to 1."""
        ...

    def seat(self, member: Member, world: SimWorld, stop: Signal) -> Coroutine[Any, Any, None]:
        """The part of a node that has come up. Busy roles end by themselves, and the run with the last of them; the
        others end when `stop` is set."""
        ...

    def view(self, fabric: SimFabric, watch: Watch) -> View:
        """What this kind's checkers see; called once, before anything happens."""
        ...

    def tally(self, name: str) -> Tally:
        """Figures of the run called `name`."""
        ...

    def agreed(self) -> dict[str, Any]:
        """What all nodes agree on, for `summary.json`."""
        ...


def begin(scenario: Scenario, seed: int, model_path: str) -> Play:
    """The play of this scenario. Raises ScenarioError when the model fits no device or a fault means nothing."""
    for place, fault in enumerate(scenario.faults):
        if fault.kind == "disk_full" and scenario.kind not in WRITE_TO_DISK:
            raise ScenarioError(
                f"fault {place} fills a disk, but no role of a {scenario.kind} writes to one; "
                f"expected in a run of kind {', '.join(WRITE_TO_DISK)}"
            )
    scenario.require_memory(model_path)
    module = import_module(f"sim.kinds.{scenario.kind}")  # by name: only some kinds need the model's library
    return cast(Play, module.begin(scenario, seed, model_path))
