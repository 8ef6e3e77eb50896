"""What a node is fetching just now: a version's own shards, or the increments that make them out of an older one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from refimpl.shardcast.fetch import FetchPlan
from refimpl.shardcast.hoard import Hoard, Wanted
from refimpl.shardcast.layout import SHARDS_MAX
from refimpl.shardcast.manifest import Manifest


@dataclass(eq=False)
class Job:
    """One plan for all shards of all payloads. Payloads are the target itself, or (with a `base`) increments, of which
    more may come while the first ones are applied already."""

    target: Hoard
    plan: FetchPlan
    base: Manifest | None = None
    payloads: list[Hoard] = field(default_factory=list)
    received: dict[int, int] = field(default_factory=dict)  # by ticket: bytes so far; written by the transfers
    cut_off: set[int] = field(default_factory=set)  # tickets of transfers that are to end
    told_that_all_lied: bool = False
    applied: set[str] = field(default_factory=set)  # increments, by the ids of their headers

    def offer(self, payload: Hoard, wanted: Iterable[Wanted]) -> None:
        """Shards of this payload may be fetched."""
        if payload not in self.payloads:
            self.payloads.append(payload)
        place = self.payloads.index(payload) * SHARDS_MAX
        self.plan.offer((place + index, size, received) for index, size, received in wanted)

    def find(self, key: int) -> tuple[Hoard, int]:
        """The payload and the index of a shard by its number in the plan."""
        return self.payloads[key // SHARDS_MAX], key % SHARDS_MAX

    def bytes_here(self, key: int) -> int:
        """Bytes of a shard, by its number in the plan, that are here."""
        payload, index = self.find(key)
        return payload.shelf.received(index)

    def knows(self, increment: Manifest) -> bool:
        return any(payload.header.id == increment.header.id for payload in self.payloads)

    def needs(self, increment: Manifest) -> bool:
        """Some of what it makes is not here yet."""
        stretch = increment.header.stretch
        return stretch is not None and any(shard not in self.target.here for shard in stretch.shards)

    def ready(self, shards_max: int) -> list[Hoard]:
        """Increments that can be applied now: all of them is here, and what they must make is known. About `shards_max`
        shards of the target, so that what comes meanwhile does not wait long."""
        found: list[Hoard] = []
        shards = 0
        for payload in self.payloads:
            stretch = payload.header.stretch
            if shards >= shards_max:
                break
            if stretch is None or payload.header.id in self.applied or not payload.complete:
                continue
            if len(self.target.sha256(stretch.shards)) == stretch.length:
                found.append(payload)
                shards += stretch.length
        return found

    @property
    def over(self) -> bool:
        """All increments that there will be are applied: what is missing now has to be fetched."""
        return self.base is not None and bool(self.target.manifest) and len(self.applied) == len(self.payloads)

    def abandon(self) -> None:
        """Let unfinished increments go."""
        if self.base is not None:
            for payload in self.payloads:
                if not payload.published:
                    payload.shelf.abandon()
