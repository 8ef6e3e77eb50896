"""Why: links break in their own ways, one direction at a time, a little or wholly; each is a value put on a link.

Faults are laid on under a name and lifted under that name, and those in force add up. So a scenario's explicit fault
and a random one on the same link do not undo each other: the link is whole again when the last of them is lifted.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

Direction = Literal["up", "down", "both"]
DIRECTIONS: tuple[str, ...] = ("up", "down", "both")


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkFault:
    """What is wrong with a node's access line, a site's line or a region's trunk; name exactly one of them.

    'up' is the way out of the node, site or region, 'down' the way in.
    """

    node: int | None = None
    site: str | None = None
    region: str | None = None
    direction: Direction = "both"
    working: bool = True  # False: carries nothing; flows on it stall until it works again
    bandwidth_factor: float = 1.0  # of the capacity that is left
    packet_loss: float = 0.0  # slows connections down and delays messages; nothing is lost for good
    message_loss: float = 0.0  # whole messages vanish with this probability
    message_duplicate: float = 0.0  # a message arrives twice
    message_reorder: float = 0.0  # a message is held back, and others may overtake it
    reorder_delay_s: float = 0.1  # for so long at most

    def __post_init__(self) -> None:
        named = [name for name in ("node", "site", "region") if getattr(self, name) is not None]
        if len(named) != 1:
            raise ValueError(f"a link fault names {named or 'nothing'}; expected exactly one of node, site, region")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction of a link fault is {self.direction!r}; expected up, down or both")
        if not 0 <= self.bandwidth_factor < inf:
            raise ValueError(f"bandwidth_factor of a link fault is {self.bandwidth_factor}; expected 0 or more")
        for name in ("packet_loss", "message_loss", "message_duplicate", "message_reorder"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} of a link fault is {getattr(self, name)}; expected 0 to 1")
        if self.packet_loss == 1:
            raise ValueError("packet_loss of a link fault is 1; expected below 1 (a dead link is working = False)")
        if not 0 <= self.reorder_delay_s < inf:
            raise ValueError(f"reorder_delay_s of a link fault is {self.reorder_delay_s}; expected 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class Partition:
    """These regions are cut off from all others: nothing goes out of them ('up'), in ('down'), or both."""

    regions: frozenset[str]
    direction: Direction = "both"

    def __post_init__(self) -> None:
        if not self.regions:
            raise ValueError("a partition names no region; expected at least one")
        if self.direction not in DIRECTIONS:
            raise ValueError(f"direction of a partition is {self.direction!r}; expected up, down or both")

    def cuts(self, source_region: str | None, target_region: str | None) -> bool:
        """Whether it stops what goes from one region to the other."""
        leaves = source_region in self.regions and target_region not in self.regions
        enters = source_region not in self.regions and target_region in self.regions
        return (leaves and self.direction in ("up", "both")) or (enters and self.direction in ("down", "both"))


Fault = LinkFault | Partition


@dataclass(frozen=True, slots=True)
class Condition:
    """One directed link's state: what all faults in force add up to."""

    working: bool = True
    bandwidth_factor: float = 1.0
    packet_loss: float = 0.0
    message_loss: float = 0.0
    message_duplicate: float = 0.0
    message_reorder: float = 0.0
    reorder_delay_s: float = 0.0

    @property
    def disturbs_messages(self) -> bool:
        return self.message_loss > 0 or self.message_duplicate > 0 or self.message_reorder > 0

    def and_also(self, fault: LinkFault) -> Condition:
        """This state with one more fault."""
        return Condition(
            working=self.working and fault.working,
            bandwidth_factor=self.bandwidth_factor * fault.bandwidth_factor,
            packet_loss=either(self.packet_loss, fault.packet_loss),
            message_loss=either(self.message_loss, fault.message_loss),
            message_duplicate=either(self.message_duplicate, fault.message_duplicate),
            message_reorder=either(self.message_reorder, fault.message_reorder),
            reorder_delay_s=max(self.reorder_delay_s, fault.reorder_delay_s if fault.message_reorder > 0 else 0.0),
        )


def either(p: float, q: float) -> float:
    """Probability that at least one of two independent events happens: 1 - (1 - p)(1 - q)."""
    return p + q - p * q


WHOLE = Condition()
