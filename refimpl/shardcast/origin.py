"""The origin: cuts a version as it reads it, signs each shard's entry as soon as it is hashed, the manifest last.

Serves like a relay (`serving.py`) and takes `Complaint`s. Shards are on their way while later ones are still being cut.
When it makes increments, it first compares the new version with the ones before: for those who have one of them, a
fiftieth of the bytes is on offer at the same moment as the version itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.layout import SHARD_BYTES, Layout
from refimpl.shardcast.manifest import Expected, Header, Manifest, Opening, Ref, ShardEntry, Verify
from refimpl.shardcast.messages import Complaint, complaint_bytes
from refimpl.shardcast.serving import ServingConfig, ShardServer
from refimpl.shardcast.shelf import CutShelf, Store, virtual_shards
from refimpl.work import Hash
from refimpl.world import Refused, World

ENCODE_AS_HASH = 3.0
"""What comparing a byte with its predecessor costs, in bytes hashed (both measured, experiments/bench)."""
INCREMENT_SHARE_MAX = 0.5
"""An increment that saves less than half is not worth its name."""
COMPLAINTS_MAX = 100_000

__all__ = ["Origin", "virtual_shards"]


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
    ) -> None:
        self.world, self.run_id, self.identity, self.verify, self.journal = world, run_id, identity, verify, journal
        self.store, self.increments = store, increments
        self.server = ShardServer(world, config, store, journal)
        self.previous: Ref | None = None
        self.complaints: dict[str, set[str]] = {}  # by relay: who complained

    def serve(self) -> None:
        self.server.serve()
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
        bases = bases[-self.increments :] if self.increments else []
        self.journal("publishing", version=header.version, size_bytes=layout.size_bytes, shards=layout.shard_count)
        hoard = await self._cut(header, content, at_once=not bases)
        for base in reversed(bases):
            await self._offer_increment(base, hoard)
        if bases:
            self.server.hold(hoard)
        self.previous = hoard.final.ref
        self.journal("published", version=header.version)
        return hoard.final

    async def _cut(self, header: Header, content: Any, *, at_once: bool) -> Hoard:
        """`at_once`: each shard may be fetched as soon as it is cut; else nothing is said of the version so far."""
        sign, shelf = self.identity.sign, self.store.adopt(header, content)
        hoard = Hoard(header, Expected(header), shelf, Opening.signed(header, sign).encode())
        try:
            if at_once:
                self.server.hold(hoard)
            for index in range(header.layout.shard_count):
                work = Hash(size_bytes=header.layout.shard_size(index))
                sha256 = await self.world.compute(work, partial(shelf.cut, index))
                hoard.here.add(index)
                entry = ShardEntry.signed(header, index, sha256, sign)
                hoard.expected.add(entry)
                hoard.entries.append(entry.encode())
                self.server.changed()
            await self._sign(hoard, shelf)
        except BaseException:
            self.server.drop(hoard)
            raise
        self.server.changed()
        return hoard

    async def _sign(self, hoard: Hoard, shelf: CutShelf) -> None:
        """The final word: nothing was fetched in vain unless this fails, and nothing is at a final path before it."""
        hashes = [hoard.expected.sha256(index) or b"" for index in range(hoard.header.layout.shard_count)]
        manifest = Manifest.signed(hoard.header, shelf.files_sha256(), hashes, self.identity.sign)
        await self.world.compute(Hash(size_bytes=0), partial(shelf.publish, manifest))
        hoard.expected.finish(manifest)
        hoard.manifest, hoard.published = manifest.encode(), True

    async def _offer_increment(self, base: Manifest, target: Hoard) -> None:
        """Make the increment from `base`, and serve it if it saves enough."""
        final = target.final
        size_bytes = final.layout.size_bytes
        work = Hash(size_bytes=round(ENCODE_AS_HASH * size_bytes))
        make = partial(self.store.make_increment, base, final, min(SHARD_BYTES, final.layout.shard_bytes))
        layout, content = await self.world.compute(work, make)
        header = Header(
            run_id=self.run_id,
            version=final.version,
            layout=layout,
            origin=self.identity.public_key,
            base=base.ref,
            target=final.ref,
        )
        shelf = self.store.adopt(header, content)
        if layout.size_bytes > INCREMENT_SHARE_MAX * size_bytes:
            shelf.abandon()
            self.journal("increment_too_large", base=base.version, size_bytes=layout.size_bytes)
            return
        hoard = Hoard(header, Expected(header), shelf)
        for index in range(layout.shard_count):
            sha256 = await self.world.compute(Hash(size_bytes=layout.shard_size(index)), partial(shelf.cut, index))
            hoard.expected.add(ShardEntry.signed(header, index, sha256, self.identity.sign))
            hoard.here.add(index)
        await self._sign(hoard, shelf)
        self.server.hold(hoard)
        self.journal("increment", base=base.version, version=final.version, size_bytes=layout.size_bytes)

    async def complain(self, source: str, message: Complaint) -> Message:
        """Somebody got a wrong shard: noted with its relay's name, for whoever runs the relays."""
        if not self.verify(message.by, complaint_bytes(message), message.signature):
            raise Refused("this complaint is not signed by who it says complains")
        by = self.complaints.setdefault(message.relay, set())
        if message.by not in by and sum(map(len, self.complaints.values())) < COMPLAINTS_MAX:
            by.add(message.by)
        self.journal("complaint", by=message.by, relay=message.relay, index=message.index)
        return Ok()
