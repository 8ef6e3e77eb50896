"""How a shard's bytes travel to this node: by calls over the port, range by range. (`refimpl/worlds/files.py` carries
them by plain HTTP downloads; both say the same errors, so that the role cannot tell them apart.)"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from refimpl.messages import Blob
from refimpl.shardcast.messages import AskShard
from refimpl.work import Hash
from refimpl.world import World

PIECE_BYTES = 4 << 20
"""What one call asks for: the memory that a transfer costs."""
TIMEOUT_BYTES = 100_000_000
"""A call for more than that may take longer than its time-out, in proportion."""

Take = Callable[[Blob], bool]
"""Keeps the next piece. False: no more is wanted."""


class NotYet(Exception):
    """The relay does not have the shard so far."""


class WrongSize(Exception):
    """The relay sent another number of bytes than it was asked for. Takes the sentence that says so."""


class Carrier(Protocol):
    """Brings bytes from a relay."""

    async def fetch(self, relay: str, ask: AskShard, take: Take) -> None:
        """Hand the bytes asked for to `take`, in order. Raises NotYet, WrongSize, CallError, and what `take` raises."""
        ...


class CallCarrier:
    """By calls, in any world. `piece_bytes`: None where a shard is one piece (virtual blobs are)."""

    def __init__(self, world: World, timeout_s: float, piece_bytes: int | None = PIECE_BYTES) -> None:
        self.world, self.timeout_s, self.piece_bytes = world, timeout_s, piece_bytes

    async def fetch(self, relay: str, ask: AskShard, take: Take) -> None:
        at, end = ask.offset, ask.offset + ask.size
        while at < end:
            size = min(end - at, self.piece_bytes or end - at)
            timeout_s = self.timeout_s * max(1.0, size / TIMEOUT_BYTES)
            reply = await self.world.call(relay, AskShard(ask.header_id, ask.index, at, size), timeout_s)
            if not reply.here:
                raise NotYet
            if reply.blob.size_bytes != size:
                raise WrongSize(f"{relay} sent {reply.blob.size_bytes} bytes where {size} were asked for")
            more = await self.world.compute(Hash(size_bytes=size), partial(take, reply.blob))
            if not more:
                return
            at += size
