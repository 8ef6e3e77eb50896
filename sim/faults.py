"""What goes wrong, as values in the scenario file: who, what, from when, until when.

Explicit faults beat random ones: while a scenario says that a node is down, no random return brings it back, and when
the fault ends the node is what its random life says it should be by then.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field, model_validator

from sim.catalogue import Strict
from sim.link_faults import Direction, Fault, LinkFault, Partition

FaultKind = Literal["crash", "hang", "slow", "link", "partition", "clock_skew", "disk_full"]

NEEDS: dict[str, tuple[str, ...]] = {
    "crash": ("nodes",),
    "hang": ("nodes",),
    "slow": ("nodes", "slowness"),
    "link": (),
    "partition": ("regions",),
    "clock_skew": ("nodes", "skew_s"),
    "disk_full": ("nodes",),
}
"""Fields that each kind must have."""

USES: dict[str, tuple[str, ...]] = {
    "crash": ("nodes", "disk_kept"),
    "hang": ("nodes",),
    "slow": ("nodes", "slowness"),
    "link": (
        "nodes", "sites", "regions", "direction", "working", "bandwidth_factor", "packet_loss", "message_loss",
        "message_duplicate", "message_reorder",
    ),
    "partition": ("regions", "direction"),
    "clock_skew": ("nodes", "skew_s"),
    "disk_full": ("nodes",),
}  # fmt: skip
"""Fields that each kind may have, beside `kind`, `start_s` and `end_s`."""

Target = Literal["nodes", "sites", "regions"]
TARGETS: tuple[Target, ...] = ("nodes", "sites", "regions")


def targets_of(kind: FaultKind) -> tuple[Target, ...]:
    """What a fault of this kind can be on."""
    return TARGETS if kind == "link" else ("regions",) if kind == "partition" else ("nodes",)


class FaultPart(Strict):
    """One fault. `end_s` left out: it lasts.

    crash: the process dies, and is started again at `end_s` (an outage of a service is a crash with an end). hang:
    alive, connections open, and nothing is answered. slow: the device takes `slowness` times as long. link: the access
    lines of `nodes`, the lines of `sites` or the trunks of `regions` lose what the fields say; 'up' is the way out.
    partition: `regions` are cut off. clock_skew: the node's clock is `skew_s` ahead. disk_full: nothing more can be
    written.
    """

    kind: FaultKind
    nodes: tuple[str, ...] = Field((), description="names of nodes, or of groups")
    sites: tuple[str, ...] = Field((), description="link: names in network.sites")
    regions: tuple[str, ...] = Field((), description="partition: regions; link: regions with a trunk")
    start_s: float = Field(ge=0)
    end_s: float | None = None
    disk_kept: bool = Field(True, description="crash: what it had on disk is there when it returns")
    slowness: float | None = Field(None, gt=0)
    skew_s: float | None = None
    direction: Direction = "both"
    working: bool = Field(True, description="link: false cuts it")
    bandwidth_factor: float = Field(1.0, ge=0)
    packet_loss: float = Field(0.0, ge=0, lt=1)
    message_loss: float = Field(0.0, ge=0, le=1)
    message_duplicate: float = Field(0.0, ge=0, le=1)
    message_reorder: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _hangs_together(self) -> FaultPart:
        if self.end_s is not None and self.end_s <= self.start_s:
            raise ValueError(f"end_s is {self.end_s}; expected after start_s, {self.start_s}")
        used = (*USES[self.kind], "start_s", "end_s")
        written = self.model_fields_set - {"kind", *used}
        unused = [field for field in type(self).model_fields if field in written]
        if unused:
            raise ValueError(
                f"a fault of kind {self.kind!r} does not use {', '.join(unused)}; expected {', '.join(used)}"
            )
        for field in NEEDS[self.kind]:
            if not getattr(self, field):
                raise ValueError(f"a fault of kind {self.kind!r} needs {field}")
        known, named = targets_of(self.kind), [target for target in TARGETS if getattr(self, target)]
        if len(named) != 1 or named[0] not in known:
            raise ValueError(
                f"a fault of kind {self.kind!r} is on {' and '.join(named) or 'nothing'}; "
                f"expected {'exactly one of ' if len(known) > 1 else ''}{', '.join(known)}"
            )
        harmless = self.working and self.bandwidth_factor == 1.0
        harmless = harmless and not (self.packet_loss or self.message_loss)
        if self.kind == "link" and harmless and not (self.message_duplicate or self.message_reorder):
            raise ValueError("a fault of kind 'link' changes nothing: working, bandwidth_factor or a loss was expected")
        return self

    @property
    def target(self) -> Target:
        """What it is on."""
        return next(target for target in TARGETS if getattr(self, target))

    def on_network(self, nodes: Mapping[str, int]) -> list[tuple[str, Fault]]:
        """The fault as the network knows it (kinds link and partition), with a name for each part of it. `nodes`:
        those that it is on, by name, with their numbers in the network."""
        if self.kind == "partition":
            return [("regions", Partition(regions=frozenset(self.regions), direction=self.direction))]
        if self.sites:
            return [(f"site {site}", self._on_link(site=site)) for site in dict.fromkeys(self.sites)]
        if self.regions:
            return [(f"trunk of {region}", self._on_link(region=region)) for region in dict.fromkeys(self.regions)]
        return [(name, self._on_link(node=node)) for name, node in nodes.items()]

    def _on_link(self, *, node: int | None = None, site: str | None = None, region: str | None = None) -> LinkFault:
        return LinkFault(
            node=node,
            site=site,
            region=region,
            direction=self.direction,
            working=self.working,
            bandwidth_factor=self.bandwidth_factor,
            packet_loss=self.packet_loss,
            message_loss=self.message_loss,
            message_duplicate=self.message_duplicate,
            message_reorder=self.message_reorder,
        )
