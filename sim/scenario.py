"""A scenario is one file, and a bad one is refused before anything runs.

`sim/scenarios/NAME.toml` says which nodes there are, how they are linked, what they do and for how long. The same file
drives the simulator and, where its nodes fit this machine, real processes. Faults, delays and cheats are values on
nodes and links, never options of a component. Every field that has a unit ends in it.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, model_validator

from refimpl.work import ModelSize
from sim.catalogue import CatalogueError, Strict, UnknownDevice, read_toml
from sim.churn import ChurnEvent
from sim.churn_trace import read_trace
from sim.faults import FaultPart
from sim.hardware import OutOfMemory, find_device
from sim.kind_table import KINDS, OPTIONAL_PARTS, Kind
from sim.model_sizes import MODEL_SIZES, known_tables, size_of_checkpoint
from sim.refusals import explain
from sim.regions import Regions, UnknownRegion, region_set
from sim.roofline import forward_memory
from sim.scenario_parts import (
    BroadcastPart,
    LedgerPart,
    ModelPart,
    NetworkPart,
    NodeGroup,
    PipelinePart,
    TaskPart,
    VerifierPart,
)
from sim.training_part import TrainingPart

SCENARIOS = Path(__file__).with_name("scenarios")
CALIBRATED = "calibrated"
"""The model's path where no model runs."""


class ScenarioError(ValueError):
    """A scenario that cannot be run. Takes exactly one argument: the sentence (one line per fault)."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Scenario(Strict):
    """The whole file."""

    title: str = Field(min_length=1)
    shows: str = Field(min_length=1, description="what a reader learns from running it")
    seed: int = Field(0, ge=0)
    duration_s: float = Field(gt=0, description="virtual time at which the run ends at the latest")
    model: ModelPart | None = None
    broadcast: BroadcastPart | None = None
    pipeline: PipelinePart | None = None
    training: TrainingPart | None = None
    task: TaskPart = TaskPart()
    verifier: VerifierPart = VerifierPart()
    ledger: LedgerPart = LedgerPart()
    network: NetworkPart = NetworkPart()
    faults: tuple[FaultPart, ...] = ()
    life_trace: str | None = Field(None, description="a file of comings and goings, as sim/churn_trace.py reads it")
    nodes: tuple[NodeGroup, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _hangs_together(self) -> Scenario:
        names = [group.name for group in self.nodes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two groups of nodes are called {name!r}; names must differ")
        members = Counter(member.name for member in self.members())
        if (twice := next((name for name, count in members.items() if count > 1), None)) is not None:
            raise ValueError(f"two nodes would be called {twice!r}: one by its group's name, one by its number")
        self._check_roles()
        self._check_parts()
        self._check_sources()
        self._check_places()
        self._check_trace()
        regions = self._regions()
        for group in self.nodes:
            self._check_group(group, regions)
        for place, fault in enumerate(self.faults):
            self._check_fault(place, fault)
        return self

    def _check_roles(self) -> None:
        """Each kind of scenario has its own roles, and needs some of them."""
        named = [name for name in KINDS if getattr(self, name, None) is not None]
        if len(named) > 1 or (self.model is None) != (not self.rules.holds_model):
            parts = ", ".join(f"[{name}]" for name in ("model", *KINDS) if getattr(self, name, None) is not None)
            raise ValueError(
                f"the scenario has {parts or 'neither [model] nor another part'}; {self._parts_expected()}"
            )
        known = self.rules.roles
        for group in self.nodes:
            if group.role not in known:
                raise ValueError(f"{group.name!r} has the role {group.role!r}; a {self.kind} has {', '.join(known)}")
            for source in group.sources:
                if not any(other.name == source and other.role in ("origin", "relay") for other in self.nodes):
                    raise ValueError(f"{group.name} fetches from {source!r}; no origin or relay is called so")
        for role in self.rules.once:
            count = sum(group.count for group in self.nodes if group.role == role)
            if count != 1:
                raise ValueError(f"{count} nodes have the role {role}; expected exactly 1")
        self._check_rings()
        if not any(group.role == self.rules.busy for group in self.nodes):
            raise ValueError(f"no node has the role {self.rules.busy}: nothing would ever happen")

    def _check_rings(self) -> None:
        """Every ring has stages and one client, and every node of a pipeline a ring."""
        rings = {ring.name: Counter[str]() for ring in (self.pipeline.rings if self.pipeline else ())}
        for ring in self.pipeline.rings if self.pipeline else ():
            if ring.size not in MODEL_SIZES:
                raise ValueError(f"ring {ring.name} has size {ring.size!r}; known: {', '.join(MODEL_SIZES)}")
        for group in self.nodes:
            if (group.ring is not None) != bool(rings) or (rings and group.ring not in rings):
                known = ", ".join(rings) or "none: there is no [pipeline]"
                raise ValueError(f"{group.name} is of ring {group.ring!r}; pipeline.rings has {known}")
            if group.ring is not None:
                rings[group.ring][group.role] += group.count
        for name, roles in rings.items():
            if not roles["stage"] or roles["client"] != 1:
                raise ValueError(
                    f"ring {name} has {roles['stage']} stages and {roles['client']} clients; "
                    "expected at least one stage, and one client"
                )

    def _check_parts(self) -> None:
        """What a run does not use is refused rather than passed over."""
        for part in OPTIONAL_PARTS:
            if part in self.model_fields_set and part not in self.rules.parts:
                raise ValueError(f"the scenario has [{part}], which a {self.kind} does not use")
        for group in self.nodes:
            if group.sources and group.role not in ("relay", "client"):
                raise ValueError(
                    f"{group.name} has sources, which only relays and clients use; its role is {group.role}"
                )

    def _check_sources(self) -> None:
        """What is broadcast must come from the origin to every group, over groups that it comes to itself."""
        if self.broadcast is None:
            return
        relays = tuple(group.name for group in self.nodes if group.role == "relay")
        (origin,) = [group.name for group in self.nodes if group.role == "origin"]
        sources = {
            group.name: group.sources or (relays if group.role == "client" and relays else (origin,))
            for group in self.nodes
        }
        reached = {origin}
        while more := {name for name in sources.keys() - reached if reached & set(sources[name])}:
            reached |= more
        for name in sources:
            if name not in reached:
                raise ValueError(
                    f"the origin never reaches {name}, which fetches from {' and '.join(sources[name])}: "
                    f"sources must lead back to {origin}"
                )

    @staticmethod
    def _parts_expected() -> str:
        """Which parts each kind of run wants."""
        wanted = []
        for name, roles in KINDS.items():
            parts = [f"[{name}]"] if name in Scenario.model_fields else []
            wanted.append(f"{' and '.join(parts + (['[model]'] if roles.holds_model else []))} for a {name}")
        return f"expected {', '.join(wanted)}"

    def _check_reach(self, group: NodeGroup) -> None:
        """Services are called by everybody, so they must be reachable; a relay must be an open node."""
        sites = {site.name for site in self.network.sites}
        for site in group.sites:
            if site not in sites:
                raise ValueError(f"{group.name} is in site {site!r}; network.sites has {', '.join(sites) or 'none'}")
        if group.relay is not None and group.nat == "open":
            raise ValueError(f"{group.name} names the relay {group.relay!r} and is open: it would never use it")
        if group.relay is not None:
            relays = [member for member in self.members() if member.name == group.relay]
            if not relays or relays[0].group.nat != "open":
                raise ValueError(f"{group.name} has the relay {group.relay!r}; an open node was expected")
        if group.nat == "relay_only" and group.relay is None:
            raise ValueError(f"{group.name} is relay_only and names no relay: it would be cut off")
        if (
            group.role != self.rules.busy
            and group.nat != "open"
            and group.relay is None
            and not self.network.hole_punching
        ):
            raise ValueError(
                f"{group.name} is a {group.role} behind a NAT without a relay: no {self.rules.busy} could ever call it"
            )

    def _check_memory(self, group: NodeGroup) -> None:
        """A stand-in for a model must be known, and fit the devices that are to run it."""
        if self.model is None or self.model.calibrated is None or group.role not in self.rules.holds_model:
            return
        if self.model.calibrated.size not in MODEL_SIZES:
            known = ", ".join(MODEL_SIZES)
            raise ValueError(f"model.calibrated.size is {self.model.calibrated.size!r}; known: {known}")
        if self.model.calibrated.table not in known_tables():
            known = ", ".join(known_tables())
            raise ValueError(f"model.calibrated.table is {self.model.calibrated.table!r}; known: {known}")
        self._require_memory(group, MODEL_SIZES[self.model.calibrated.size])

    def _require_memory(self, group: NodeGroup, size: ModelSize) -> None:
        """The model must fit the group's device, with the cache of a whole batch."""
        batch = self.task.batch if group.role == self.rules.busy else 1
        try:
            need = forward_memory(size, batch, self.task.answer_tokens_max)
            find_device(group.device).require_memory(need, group.name)
        except OutOfMemory as error:
            raise ValueError(str(error)) from None

    def require_memory(self, model_path: str) -> None:
        """The same for a real model, whose size is known once its folder is there. Raises ScenarioError."""
        if self.model is None or self.model.calibrated is not None:
            return
        try:
            size = size_of_checkpoint(model_path, self.model.dtype)
            for group in self.nodes:
                if group.role in self.rules.holds_model:
                    self._require_memory(group, size)
        except ValueError as error:
            raise ScenarioError(str(error)) from None

    def _check_fault(self, place: int, fault: FaultPart) -> None:
        if fault.start_s >= self.duration_s:
            raise ValueError(f"fault {place} starts at {fault.start_s} s; the run ends at {self.duration_s} s")
        for name in fault.nodes:
            if not self.struck_by(name):
                raise ValueError(f"fault {place} strikes {name!r}; no node or group is called so")
        sites = [site.name for site in self.network.sites]
        for site in fault.sites:
            if site not in sites:
                raise ValueError(f"fault {place} is on site {site!r}; network.sites has {', '.join(sites) or 'none'}")
        trunks = [trunk.region for trunk in self.network.trunks]
        here = {group.region for group in self.nodes}
        for region in fault.regions:
            if fault.kind == "link" and region not in trunks:
                known = ", ".join(trunks) or "none"
                raise ValueError(f"fault {place} is on the trunk of region {region!r}; network.trunks has {known}")
            if region not in here:
                raise ValueError(f"fault {place} cuts off region {region!r}; no node is there")

    def struck_by(self, name: str) -> list[str]:
        """The nodes that `name` means: one node, or all of a group."""
        return [member.name for member in self.members() if name in (member.name, member.group.name)]

    def struck(self, fault: FaultPart) -> list[str]:
        """The nodes that a fault is on, each once."""
        return list(dict.fromkeys(node for name in fault.nodes for node in self.struck_by(name)))

    def _regions(self) -> Regions | None:
        try:
            return region_set(self.network.regions) if self.network.regions is not None else None
        except UnknownRegion as error:
            raise ValueError(str(error)) from None

    def _check_trace(self) -> None:
        """Nodes of a trace must exist, and have no random life beside it."""
        names = {member.name: member.group for member in self.members()}
        for event in self.traced_lives():
            if event.node not in names:
                raise ValueError(f"life_trace {self.life_trace!r} has a node {event.node!r}; no node is called so")
            if names[event.node].life is not None:
                raise ValueError(f"{event.node} is in life_trace and has a life of its own; expected one of them")

    def traced_lives(self) -> list[ChurnEvent]:
        """Comings and goings from the trace file; none without one. Raises ValueError for a file that is none."""
        if self.life_trace is None:
            return []
        try:
            return read_trace(Path(self.life_trace).read_text(encoding="utf-8"), self.life_trace)
        except OSError as error:
            raise ValueError(f"life_trace {self.life_trace!r} cannot be read: {error.strerror}") from None

    def _check_places(self) -> None:
        """Regions that are named beside nodes must have nodes in them."""
        here = {group.region for group in self.nodes}
        for trunk in self.network.trunks:
            if trunk.region not in here:
                raise ValueError(f"network.trunks names region {trunk.region!r}; no node is there")
        for group in self.nodes:
            for outage in group.life.outages if group.life is not None else ():
                if outage.region != group.region:
                    raise ValueError(
                        f"{group.name} is in {group.region!r}; its life has an outage of {outage.region!r}"
                    )

    def _check_group(self, group: NodeGroup, regions: Regions | None) -> None:
        try:
            find_device(group.device)
            if regions is not None:
                if group.region is None:
                    raise ValueError(f"{group.name} has no region; network.regions {self.network.regions!r} wants one")
                regions.index(group.region)
            elif group.region is not None:
                raise ValueError(f"{group.name} is in region {group.region!r}, but network.regions names no set")
        except (UnknownDevice, UnknownRegion) as error:
            raise ValueError(f"{group.name}: {error}") from None
        self._check_reach(group)
        self._check_memory(group)
        if group.role not in self.rules.cheats and group.behaviour != "honest":
            who = " and ".join(f"{role}s" for role in self.rules.cheats) or "nobody in this kind of run"
            raise ValueError(f"{group.name} is a {group.role} that behaves {group.behaviour!r}; only {who} can cheat")
        if group.behaviour not in (known := self.rules.behaviours):
            near = difflib.get_close_matches(group.behaviour, known, n=1, cutoff=0.4)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(
                f"{group.name} behaves {group.behaviour!r}, which is not known.{hint} Known: {', '.join(known)}"
            )

    @property
    def kind(self) -> str:
        """A name in `KINDS`."""
        return next((name for name in KINDS if getattr(self, name, None) is not None), next(iter(KINDS)))

    @property
    def rules(self) -> Kind:
        """What its kind asks of it."""
        return KINDS[self.kind]

    @property
    def weights(self) -> BroadcastPart:
        """What a broadcast sends."""
        assert self.broadcast is not None, f"a {self.kind} broadcasts nothing"
        return self.broadcast

    @property
    def inference(self) -> ModelPart:
        """The model of a scenario that has one."""
        assert self.model is not None, "a broadcast has no model"
        return self.model

    @property
    def model_path(self) -> str | None:
        """The real model's folder or hub id, where there is one."""
        return self.model.path if self.model is not None else None

    def as_plain(self) -> dict[str, Any]:
        """What was written, as JSON can hold it; `check_raw` takes it back."""
        return self.model_dump(mode="json", exclude_unset=True)

    def members(self) -> Iterator[Member]:
        """Every node, in the file's order: NAME for a single one, NAME-0, NAME-1, … for several."""
        for group in self.nodes:
            width = len(str(group.count - 1))
            for i in range(group.count):
                yield Member(group.name if group.count == 1 else f"{group.name}-{i:0{width}d}", group)


@dataclass(frozen=True)
class Member:
    """One node of a scenario."""

    name: str
    group: NodeGroup


def known_scenarios() -> list[str]:
    """Names that `load_scenario` takes."""
    return sorted(path.stem for path in SCENARIOS.glob("*.toml"))


def load_scenario(name: str) -> Scenario:
    """The scenario called `name`, or in the file `name` if that ends in .toml. Raises ScenarioError."""
    return read_scenario(scenario_path(name))


def scenario_path(name: str) -> Path:
    """The file of the scenario called `name`, or the file `name` itself if that ends in .toml. Raises ScenarioError."""
    if name.endswith(".toml"):
        return Path(name)
    if name not in known_scenarios():
        near = difflib.get_close_matches(name, known_scenarios(), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ScenarioError(f"there is no scenario {name!r}.{hint} Known: {', '.join(known_scenarios())}")
    return SCENARIOS / f"{name}.toml"


def read_raw(path: Path) -> dict[str, Any]:
    """A scenario file as plain values, unchecked. Raises ScenarioError when it is missing or no TOML."""
    try:
        return read_toml(path)
    except CatalogueError as error:
        raise ScenarioError(str(error)) from None


def check_raw(raw: dict[str, Any], file: str) -> Scenario:
    """The scenario in plain values. Raises ScenarioError: a line per fault, with file, field, value and expectation."""
    try:
        return Scenario.model_validate(raw)
    except ValidationError as error:
        raise ScenarioError(explain(error, Scenario, raw, file)) from None


def read_scenario(path: Path) -> Scenario:
    """Read and check one file. Raises ScenarioError."""
    return check_raw(read_raw(path), path.name)
