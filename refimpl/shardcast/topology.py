"""Where a relay hangs in the tree: relays measure each other, and move to the parent through which data comes fastest.

With cut-through relaying a shard flows down the tree like water through pipes, so what a relay gets is the narrowest
link on its way to the origin. Each relay tells its neighbours its path and that figure; a relay that measures link rate
r to a candidate parent p with rate R_p would get

    R = min(R_p, r)

and takes the parent with the largest R, the shorter path among equals. Loops cannot last: a candidate whose path leads
through the relay itself is no candidate, and a relay that finds itself on its own path (two moved at once, each on old
news) goes back to the origin. It moves only for a clear gain, so that noise in the measurements does not shake the
tree.

Differs from the original (shardcast 0.3.2), where upstreams are fixed by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Position:
    """What a relay says of itself: the relays between it and the origin (its parent first, the origin last, itself not
    in it), the rate at which data reaches it, and how many more children it takes."""

    path: tuple[str, ...]
    rate_bytes_per_s: float
    free_slots: int = 1


ORIGIN_POSITION = Position((), math.inf, free_slots=1 << 30)


@dataclass(frozen=True, kw_only=True)
class TreeRules:
    """When it is worth to move."""

    gain: float = 1.25  # only for this many times the present rate
    depth_max: int = 8  # relays between a relay and the origin


def choose_parent(
    me: str,
    origin: str,
    parent: str | None,
    positions: Mapping[str, Position],
    link_bytes_per_s: Mapping[str, float],
    rules: TreeRules | None = None,
) -> str:
    """The parent to have from now on. `positions`: the last news of each relay that answers (the origin is always
    there); `link_bytes_per_s`: what this relay measured from each of them (no entry: not measured, not chosen)."""
    rules = rules or TreeRules()
    known = {**positions, origin: ORIGIN_POSITION}
    rates = {
        name: min(position.rate_bytes_per_s, link_bytes_per_s[name])
        for name, position in known.items()
        if name in link_bytes_per_s and _fits(me, origin, name, position, parent, rules)
    }
    if not rates:
        return origin
    best = min(rates, key=lambda name: (-rates[name], len(known[name].path), name))
    if parent in rates and rates[best] <= rules.gain * rates[parent]:
        return parent
    return best


def position_below(parent: str, parent_position: Position, link_bytes_per_s: float, free_slots: int) -> Position:
    """What a relay says of itself once it hangs below `parent`."""
    return Position(
        (parent, *parent_position.path), min(parent_position.rate_bytes_per_s, link_bytes_per_s), free_slots
    )


def _fits(me: str, origin: str, name: str, position: Position, parent: str | None, rules: TreeRules) -> bool:
    if name == me or me in position.path or len(position.path) > rules.depth_max:
        return False
    if name != origin and (not position.path or position.path[-1] != origin):
        return False  # it is not connected itself
    return position.free_slots > 0 or name == parent
