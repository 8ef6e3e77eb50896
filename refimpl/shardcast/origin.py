"""The origin: cuts a version as it reads it, signs each shard's entry as soon as it is hashed, the manifest last.

Serves like a relay (`serving.py`) and takes `Complaint`s. Shards are on their way while later ones are still being cut.
When it makes increments, a round of shards is cut and compared on all cores, and its increments are out with it: for
those who have a version before, a fiftieth of the bytes is on its way while the next round is being cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.branch import Root, TreeConfig
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.layout import SHARD_BYTES, Layout
from refimpl.shardcast.manifest import (
    Expected,
    Header,
    Manifest,
    Opening,
    Ref,
    ShardEntry,
    Stretch,
    Verify,
    increment_header,
)
from refimpl.shardcast.messages import Complaint, complaint_bytes
from refimpl.shardcast.serving import ServingConfig, ShardServer
from refimpl.shardcast.shelf import CutShelf, Store, virtual_shards
from refimpl.work import Hash, Spread
from refimpl.world import Refused, World

ENCODE_AS_HASH = 5.0
"""What reading two versions and comparing a byte costs, in bytes hashed (both measured, experiments/bench)."""
INCREMENT_SHARE_MAX = 0.5
"""An increment that saves less than half is not worth its name."""
INCREMENTS_MAX = 128
"""Of one version from one base: each is a stretch of its shards."""
STRETCH_BYTES_MIN = 64 << 20
"""So much of a version goes into one increment, unless it has less: many small files help nobody."""
COMPLAINTS_MAX = 100_000

__all__ = ["Origin", "virtual_shards"]


def _shards_of_increment(layout: Layout) -> int:
    return max(-(-layout.shard_count // INCREMENTS_MAX), -(-STRETCH_BYTES_MIN // layout.shard_bytes))


class Origin:
    """`serve()`, then `publish` as often as there is something new. `increments`: from how many of the versions before
    an increment is made."""

    def __init__(
        self,
        world: World,
        run_id: str,
        identity: Identity,
        verify: Verify,
        config: ServingConfig,
        store: Store,
        journal: Journal = silent,
        *,
        increments: int = 0,
        tree: TreeConfig | None = None,
    ) -> None:
        self.world, self.run_id, self.identity, self.verify, self.journal = world, run_id, identity, verify, journal
        self.store, self.increments = store, increments
        self.server = ShardServer(world, config, store, journal)
        self.root = Root(world, tree or TreeConfig(), self.server)
        self.previous: Ref | None = None
        self.complaints: dict[str, set[str]] = {}  # by relay: who complained

    def serve(self) -> None:
        self.server.serve()
        self.root.branch.serve()
        self.world.serve({Complaint: self.complain})

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """Serve what is in the store from before, oldest first."""
        for manifest in manifests:
            self.server.hold(Hoard.from_manifest(manifest, self.store.shelf(manifest), published=True))
            if manifest.header.base is None:
                self.previous = manifest.ref

    async def publish(self, layout: Layout, content: Any) -> Manifest:
        """Cut, hash, sign and serve one version; returns its manifest once that is out. Raises StoreError."""
        header = Header(
            run_id=self.run_id,
            version=self.store.claim_version(),
            layout=layout,
            origin=self.identity.public_key,
            previous=self.previous,
        )
        bases = [hoard.final for _, hoard in sorted(self.server.hoards.items()) if hoard.published]
        count = min(self.increments, self.server.config.keep - 1)  # a base must stay until it was compared
        bases = bases[-count:] if count > 0 else []
        self.journal("publishing", version=header.version, size_bytes=layout.size_bytes, shards=layout.shard_count)
        hoard = await self._cut(header, content, bases[::-1])
        for base in bases:
            sizes = [increment.header.layout.size_bytes for increment in self._made(base, hoard)]
            if sizes:
                self.journal("increment", base=base.version, version=header.version, size_bytes=sum(sizes))
        self.previous = hoard.final.ref
        self.journal("published", version=header.version)
        return hoard.final

    def _made(self, base: Manifest, target: Hoard) -> list[Hoard]:
        between = (base.version, target.header.version)
        return [hoard for (*key, _), hoard in self.server.increments.items() if tuple(key) == between]

    async def _cut(self, header: Header, content: Any, bases: list[Manifest]) -> Hoard:
        """Round by round: some shards are cut, compared with each base, and out. Without bases a round is a shard."""
        shelf = self.store.adopt(header, content)
        hoard = Hoard(header, Expected(header), shelf, Opening.signed(header, self.identity.sign).encode())
        count = _shards_of_increment(header.layout) if bases else 1
        shards = count * -(-self.store.workers // count) if bases else 1
        bases = list(bases)
        try:
            if not bases:
                self.server.hold(hoard)
            for first in range(0, header.layout.shard_count, shards):
                now = range(first, min(first + shards, header.layout.shard_count))
                await self._cut_shards(hoard, shelf, now)
                stretches = [Stretch(at, min(count, now.stop - at)) for at in now[::count]]
                bases = [base for base in bases if await self._offer_increments(base, hoard, shelf, stretches)]
                if hoard.header.version not in self.server.hoards:
                    self.server.hold(hoard)  # with the first increments: so nobody begins to fetch the whole
                self.server.changed()
            await self._sign(hoard, shelf)
        except BaseException:
            self.server.drop(hoard)
            raise
        self.server.changed()
        return hoard

    async def _cut_shards(self, hoard: Hoard, shelf: CutShelf, shards: Sequence[int]) -> None:
        piece = Hash(size_bytes=hoard.header.layout.shard_size(shards[0]))
        work = piece if len(shards) == 1 else Spread(piece, len(shards))
        for shard, sha256 in zip(shards, await self.world.compute(work, partial(shelf.cut, shards)), strict=True):
            hoard.here.add(shard)
            entry = ShardEntry.signed(hoard.header, shard, sha256, self.identity.sign)
            hoard.expected.add(entry)
            hoard.entries.append(entry.encode())

    async def _sign(self, hoard: Hoard, shelf: CutShelf) -> None:
        """The final word: nothing was fetched in vain unless this fails, and nothing is at a final path before it."""
        hashes = [hoard.expected.sha256(index) or b"" for index in range(hoard.header.layout.shard_count)]
        manifest = Manifest.signed(hoard.header, hashes, self.identity.sign)
        await self.world.compute(Hash(size_bytes=0), partial(shelf.publish, manifest))
        hoard.expected.finish(manifest)
        hoard.manifest, hoard.published = manifest.encode(), True

    async def _offer_increments(
        self, base: Manifest, target: Hoard, shelf: CutShelf, stretches: Sequence[Stretch]
    ) -> bool:
        """Make the increments from `base` for these stretches, and serve them. False: they do not save enough."""
        layout = target.header.layout
        shards = sum(stretch.length for stretch in stretches)
        work = Spread(Hash(size_bytes=round(ENCODE_AS_HASH * layout.shard_size(stretches[0].first))), shards)
        make = partial(self.store.make_increments, base, shelf, stretches, min(SHARD_BYTES, layout.shard_bytes))
        made = await self.world.compute(work, make)
        adopted = [
            (layout, self.store.adopt(increment_header(base, target.header, stretch, layout), content))
            for stretch, (layout, content) in zip(stretches, made, strict=True)
        ]
        size_bytes = sum(layout.size_bytes for layout, _ in adopted)
        if size_bytes > INCREMENT_SHARE_MAX * sum(layout.shard_size(i) for s in stretches for i in s.shards):
            for _, increment in adopted:
                increment.abandon()
            self.journal("increment_too_large", base=base.version, size_bytes=size_bytes)
            return False
        for _, increment in adopted:
            hoard = Hoard(increment.header, Expected(increment.header), increment)
            await self._cut_shards(hoard, increment, range(increment.header.layout.shard_count))
            await self._sign(hoard, increment)
            self.server.hold(hoard)
        return True

    async def complain(self, source: str, message: Complaint) -> Message:
        """Somebody got a wrong shard: noted with its relay's name, for whoever runs the relays."""
        if not self.verify(message.by, complaint_bytes(message), message.signature):
            raise Refused("this complaint is not signed by who it says complains")
        by = self.complaints.setdefault(message.relay, set())
        if message.by not in by and sum(map(len, self.complaints.values())) < COMPLAINTS_MAX:
            by.add(message.by)
        self.journal("complaint", by=message.by, relay=message.relay, index=message.index)
        return Ok()
