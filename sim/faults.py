"""What goes wrong, as values in the scenario file: who, what, from when, until when.

Explicit faults beat random ones: while a scenario says that a node is down, no random return brings it back, and when
the fault ends the node is what its random life says it should be by then.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sim.catalogue import Strict
from sim.link_faults import Direction, Fault, LinkFault, Partition

FaultKind = Literal["crash", "hang", "slow", "link", "partition", "clock_skew", "disk_full"]

NEEDS: dict[str, tuple[str, ...]] = {
    "crash": ("nodes",),
    "hang": ("nodes",),
    "slow": ("nodes", "slowness"),
    "link": ("nodes",),
    "partition": ("regions",),
    "clock_skew": ("nodes", "skew_s"),
    "disk_full": ("nodes",),
}
"""Fields that each kind must have."""


class FaultPart(Strict):
    """One fault. `end_s` left out: it lasts.

    crash: the process dies, and is started again at `end_s` (an outage of a service is a crash with an end). hang:
    alive, connections open, and nothing is answered. slow: the device takes `slowness` times as long. link: the access
    line loses what the fields say. partition: `regions` are cut off. clock_skew: the node's clock is `skew_s` ahead.
    disk_full: nothing more can be written.
    """

    kind: FaultKind
    nodes: tuple[str, ...] = Field((), description="names of nodes, or of groups")
    regions: tuple[str, ...] = ()
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
        for field in NEEDS[self.kind]:
            if not getattr(self, field):
                raise ValueError(f"a fault of kind {self.kind!r} needs {field}")
        harmless = self.working and self.bandwidth_factor == 1.0
        harmless = harmless and not (self.packet_loss or self.message_loss)
        if self.kind == "link" and harmless and not (self.message_duplicate or self.message_reorder):
            raise ValueError("a fault of kind 'link' changes nothing: working, bandwidth_factor or a loss was expected")
        return self

    def on_network(self, node: int | None) -> Fault:
        """The fault as the network knows it (kinds link and partition)."""
        if self.kind == "partition":
            return Partition(regions=frozenset(self.regions), direction=self.direction)
        return LinkFault(
            node=node,
            direction=self.direction,
            working=self.working,
            bandwidth_factor=self.bandwidth_factor,
            packet_loss=self.packet_loss,
            message_loss=self.message_loss,
            message_duplicate=self.message_duplicate,
            message_reorder=self.message_reorder,
        )
