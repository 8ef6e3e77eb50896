"""Where a relay hangs in the tree: relays measure each other, and move to the parent through which data comes fastest.

With cut-through relaying a shard flows down the tree like water through pipes, so what a relay gets is the narrowest
link on its way to the origin. A relay that measures link rate r to a candidate parent p, which says that data reaches
it at rate R_p, would get

    R = min(R_p, r)

and wants the parent with the largest R, the shorter path among equals. It moves only for a clear gain, so that noise in
the measurements does not shake the tree.

Loops are impossible, however old the news is on which relays move, and however many move at once. Every relay has a
rank (epoch, depth) that never gets worse: a newer epoch is better, and in one epoch the smaller depth is. It moves only
below a relay whose rank is better than its own, and is from then on one deeper:

    move below p  ⇔  p is the origin, or rank_p > rank;      rank ← max(rank, (epoch_p, depth_p + 1))

Ranks only rise, so the parent's rank is above the child's for as long as they are together, and a chain of parents
cannot come back to where it began (the feasibility condition of DUAL and Babel, RFC 8966 §2.4, with the depth as
metric). Within an epoch relays can thus only move up. The origin begins a new epoch now and then, which travels down
the tree; who wants a parent that is no better yet stays in the old epoch until that one has the new.

A relay that was started again has forgotten its rank. For such a case each position brings its path as well: a relay
does not move below its own child, and leaves a parent that hangs below itself.

Differs from the original (shardcast 0.3.2), where upstreams are fixed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Rank(NamedTuple):
    """How near the origin, and by how new a word of it."""

    epoch: int
    depth: int  # 0: the origin itself

    def above(self, other: Rank) -> bool:
        """Strictly better."""
        return self.epoch > other.epoch or (self.epoch == other.epoch and self.depth < other.depth)

    @property
    def below(self) -> Rank:
        """What a child may say of itself."""
        return Rank(self.epoch, self.depth + 1)


EPOCH_MAX = 1 << 53
ENDLESS = 1e18
"""The rate at which data reaches the origin, bytes per second."""
NOWHERE = Rank(-1, 0)
"""Of who has only just begun: everybody's is better."""


@dataclass(frozen=True)
class Position:
    """What a node says of itself: its name, the nodes between it and the origin (its parent first, the origin last,
    itself not in it), the rate at which data reaches it, how many more children it takes, and its rank."""

    name: str
    path: tuple[str, ...]
    rate_bytes_per_s: float
    rank: Rank
    free_slots: int = 1

    @property
    def is_origin(self) -> bool:
        return self.rank.depth == 0 and self.rank.epoch >= 0


@dataclass(frozen=True)
class Place:
    """Below whom a relay hangs, and the rank that it has reached."""

    parent: str
    rank: Rank = NOWHERE


@dataclass(frozen=True, kw_only=True)
class TreeRules:
    """When it is worth to move."""

    gain: float = 2.0  # only for this many times the present rate
    depth_max: int = 8  # nodes between a relay and the origin


def choose_parent(
    me: str,
    place: Place,
    positions: Mapping[str, Position],
    link_bytes_per_s: Mapping[str, float],
    rules: TreeRules | None = None,
) -> Place:
    """Where to be from now on. `me`: this relay's name; `positions`: the last news of each node that answers, by the
    address at which it is asked; `link_bytes_per_s`: what was measured from there (no entry: not measured, not chosen).
    Returns `place` unchanged when there is nothing better to be had."""
    rules = rules or TreeRules()
    rates = {
        address: min(position.rate_bytes_per_s, link_bytes_per_s[address])
        for address, position in positions.items()
        if address in link_bytes_per_s and _fits(me, address, position, place, rules)
    }
    allowed = {
        address for address in rates if positions[address].is_origin or positions[address].rank.above(place.rank)
    }
    wanted = _best(rates, positions, place.parent, rules)
    chosen = wanted if wanted in allowed else _best({a: rates[a] for a in allowed}, positions, place.parent, rules)
    if chosen is None:
        return place
    rank = positions[chosen].rank.below
    # who waits for another to rise into a new epoch does not rise before it
    return Place(chosen, rank if chosen == wanted and rank.above(place.rank) else place.rank)


def position_below(me: str, parent: Position, link_bytes_per_s: float, rank: Rank, free_slots: int) -> Position:
    """What a relay says of itself while it hangs below `parent`."""
    rate = min(parent.rate_bytes_per_s, link_bytes_per_s)
    return Position(me, (parent.name, *parent.path), rate, rank, free_slots)


def _best(rates: Mapping[str, float], positions: Mapping[str, Position], parent: str, rules: TreeRules) -> str | None:
    """The address of the largest rate, or the parent when that is nearly as good."""
    if not rates:
        return None
    best = min(rates, key=lambda address: (-rates[address], len(positions[address].path), address))
    return parent if parent in rates and rates[best] <= rules.gain * rates[parent] else best


def _fits(me: str, address: str, position: Position, place: Place, rules: TreeRules) -> bool:
    if me == position.name or me in position.path or len(position.path) > rules.depth_max:
        return False
    if not position.is_origin and not position.path:
        return False  # it is not connected itself
    return position.free_slots > 0 or address == place.parent


# ------------------------------------------------------------------------------------------------------ measurements
PROBE_S = 0.05
"""A probe is as large as what came in so long the last time."""
PROBE_BYTES, PROBE_BYTES_MAX = 256 << 10, 16 << 20
MEMORY_S = 120.0
"""For so long a parent that did not deliver is held to what it delivered; twice as long each time that it happens."""


@dataclass
class _Link:
    rtt_s: float | None = None
    probes_bytes_per_s: tuple[float, ...] = ()  # the last three
    probed_s: float = -math.inf
    came_bytes_per_s: float = 0.0
    held_to_bytes_per_s: float = math.inf
    held_until_s: float = -math.inf
    disappointments: int = 0


class LinkRates:
    """What this relay measured of the links from others: by small timed probes, by what came from its parent anyway,
    and by what did not come although it was asked for."""

    def __init__(self) -> None:
        self._of: dict[str, _Link] = {}

    def answered(self, address: str, duration_s: float) -> None:
        """A small question was answered: the round trip is no longer than this."""
        link = self._link(address)
        link.rtt_s = duration_s if link.rtt_s is None else min(link.rtt_s, duration_s)

    def probe_bytes(self, address: str) -> int:
        """How large the next probe should be."""
        rate = max(self._link(address).probes_bytes_per_s, default=0.0)
        return int(min(max(PROBE_S * rate, PROBE_BYTES), PROBE_BYTES_MAX))

    def probed(self, address: str, size_bytes: int, duration_s: float, now_s: float) -> None:
        """So many bytes came in so long: rate = size / (duration − round trip)."""
        link = self._link(address)
        busy_s = max(duration_s - min(link.rtt_s or 0.0, 0.9 * duration_s), 1e-6)
        link.probes_bytes_per_s = (*link.probes_bytes_per_s[-2:], size_bytes / busy_s)
        link.probed_s = now_s

    def came(self, address: str, size_bytes: float, duration_s: float, now_s: float) -> None:
        """While shards were wanted from it, at most so many bytes came in so long. A probe that shares the line with
        ten transfers says too little: the better of both counts; but a line that lets probes through and no shards is
        worth no more than the shards."""
        link = self._link(address)
        link.came_bytes_per_s = size_bytes / duration_s
        if not link.probes_bytes_per_s or link.came_bytes_per_s >= 0.5 * min(link.probes_bytes_per_s):
            return
        if now_s >= link.held_until_s:
            link.disappointments += 1
        link.held_to_bytes_per_s = link.came_bytes_per_s
        link.held_until_s = now_s + MEMORY_S * 2.0 ** min(link.disappointments - 1, 6)

    def quiet(self, address: str) -> None:
        """Nothing is under way from there now."""
        self._link(address).came_bytes_per_s = 0.0

    def rate(self, address: str, now_s: float, *, parent: str) -> float | None:
        """Bytes per second that may be had from there; None: not measured. Measurements disturb each other, and lines
        fill up: of the last three probes the best counts for the parent, for others the worst."""
        link = self._link(address)
        if not link.probes_bytes_per_s:
            return None
        probe = (max if address == parent else min)(link.probes_bytes_per_s)
        rate = max(probe, link.came_bytes_per_s)
        return min(rate, link.held_to_bytes_per_s) if now_s < link.held_until_s else rate

    def rates(self, now_s: float, *, parent: str) -> dict[str, float]:
        """Of all that were measured."""
        found = {address: self.rate(address, now_s, parent=parent) for address in self._of}
        return {address: rate for address, rate in found.items() if rate is not None}

    def oldest(self, addresses: list[str], count: int) -> list[str]:
        """Those whose measurement is oldest."""
        return sorted(addresses, key=lambda address: (self._link(address).probed_s, address))[:count]

    def _link(self, address: str) -> _Link:
        return self._of.setdefault(address, _Link())
