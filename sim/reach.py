"""Why: not everybody can call everybody; who can reach whom, and through whom, is decided by a few rules, kept here.

An *open* node can be called by everyone. One behind a *nat* calls out freely, and can be called only through its relay,
or directly where hole punching works. A *relay_only* node sends and receives everything through its relay. A reply goes
back over the connection that its call opened.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from sim.jitter import Jitter

Nat = Literal["open", "nat", "relay_only"]
NATS: tuple[str, ...] = ("open", "nat", "relay_only")
Time = TypeVar("Time", int, float)


class Place(NamedTuple):
    """Where nodes are: those of one place differ only in their access lines."""

    region: str | None
    sites: tuple[str, ...]


@dataclass(slots=True)
class Node:
    """A node's access line, and where it is."""

    name: str
    place: Place
    up: int  # link of the flow engine
    down: int
    latency_s: float
    loss: float
    jitters: tuple[Jitter, ...]
    nat: Nat
    relay: int | None


def hops_between(nodes: Sequence[Node], source: int, target: int, hole_punching: bool) -> list[int] | str:
    """The nodes that a call passes, source and target included; or a sentence why there is no way."""
    s, t = nodes[source], nodes[target]
    hops = [source]
    if source != target and s.nat == "relay_only" and s.relay != target:
        hops.append(_relay_of(nodes, s))
    punched = hole_punching and t.nat == "nat" and s.nat != "relay_only"
    if source != target and t.nat != "open" and t.relay != source and not punched:
        if t.relay is None:
            return f"{t.name} is behind a NAT and has no relay: {s.name} cannot open a connection to it"
        if hops[-1] != t.relay:
            hops.append(_relay_of(nodes, t))
    return [*hops, target]


def _relay_of(nodes: Sequence[Node], node: Node) -> int:
    relay = node.relay
    if relay is None or not 0 <= relay < len(nodes) or nodes[relay].nat != "open":
        raise ValueError(f"relay of {node.name} is {relay}; expected the number of an open node")
    return relay


class ChannelOrder:
    """Keeps the messages of one channel in order: none arrives before one that was sent earlier.

    A channel is any hashable key: (source, target), or (source, target, stream) for transfers that are meant to run
    side by side. Times are in any one unit. Only channels with something still under way are remembered for long.
    """

    def __init__(self) -> None:
        self._latest: dict[object, Any] = {}
        self._prune_at = 1024

    def __len__(self) -> int:
        return len(self._latest)

    def arrival(self, channel: object, arrival: Time, now: Time) -> Time:
        """When a message, sent after all earlier ones of its channel, may be handed over: not before any of them."""
        arrival = max(arrival, self._latest.get(channel, arrival))
        self._latest[channel] = arrival
        if len(self._latest) > self._prune_at:
            self._latest = {key: latest for key, latest in self._latest.items() if latest > now}
            self._prune_at = max(1024, 2 * len(self._latest))
        return arrival
