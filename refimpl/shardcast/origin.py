"""The origin: cuts a version as it reads it, signs each shard's entry as soon as it is hashed, the manifest last.

Serves like a relay (`serving.py`) and takes `Complaint`s. Shards are on their way while later ones are still being cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import partial

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Message, Ok
from refimpl.shardcast.hoard import Hoard, digest
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest, Opening, Ref, ShardEntry, Verify
from refimpl.shardcast.messages import Complaint
from refimpl.shardcast.serving import ServingConfig, ShardServer
from refimpl.work import Hash
from refimpl.world import World

ReadShard = Callable[[int], Blob]
"""The bytes of shard i (or, in the simulator, their size and id)."""


def virtual_shards(content: str, layout: Layout) -> ReadShard:
    """Shards of a checkpoint that is only a name and a size."""

    def read(index: int) -> Blob:
        identity = hashlib.sha256(f"{content}|{index}".encode()).hexdigest()
        return Blob(layout.shard_size(index), identity)

    return read


class Origin:
    """`serve()`, then `publish` as often as there is something new."""

    def __init__(
        self,
        world: World,
        run_id: str,
        identity: Identity,
        verify: Verify,
        config: ServingConfig,
        journal: Journal = silent,
    ) -> None:
        self.world, self.run_id, self.identity, self.verify, self.journal = world, run_id, identity, verify, journal
        self.server = ShardServer(world, config, journal)
        self.previous: Ref | None = None
        self.complaints: dict[str, int] = {}  # by relay

    def serve(self) -> None:
        self.server.serve()
        self.world.serve({Complaint: self.complain})

    async def publish(self, layout: Layout, read: ReadShard) -> Manifest:
        """Cut, hash, sign and serve one version; returns its manifest once that is out."""
        version = self.previous.version + 1 if self.previous is not None else 0
        header = Header(
            run_id=self.run_id, version=version, layout=layout, origin=self.identity.public_key, previous=self.previous
        )
        sign = self.identity.sign
        hoard = Hoard.opened(Opening.signed(header, sign).encode(), self.verify, self.identity.public_key)
        self.server.hold(hoard)
        self.journal("publishing", version=version, size_bytes=layout.size_bytes, shards=layout.shard_count)
        hashes = []
        for index in range(layout.shard_count):
            blob, sha256 = await self.world.compute(
                Hash(size_bytes=layout.shard_size(index)), partial(self._cut, read, index)
            )
            hashes.append(sha256)
            hoard.add_entries((ShardEntry.signed(header, index, sha256, sign).encode(),), self.verify)
            hoard.take(index, blob)
            self.server.changed()
        manifest = Manifest.signed(header, self._files(layout, hashes), hashes, sign)
        hoard.finish(manifest.encode(), self.verify, self.identity.public_key)
        self.previous = manifest.ref
        self.server.changed()
        self.journal("published", version=version)
        return manifest

    @staticmethod
    def _cut(read: ReadShard, index: int) -> tuple[Blob, bytes]:
        blob = read(index)
        return blob, digest(blob)

    @staticmethod
    def _files(layout: Layout, hashes: list[bytes]) -> list[bytes]:
        """Whole-file hashes of a virtual version: of its shards' hashes, since there are no bytes."""
        return [hashlib.sha256(name.encode() + b"".join(hashes)).digest() for name in layout.names]

    async def complain(self, source: str, message: Complaint) -> Message:
        """Somebody got a wrong shard: noted with its relay's name, for whoever runs the relays."""
        self.complaints[message.relay] = self.complaints.get(message.relay, 0) + 1
        self.journal("complaint", by=source, relay=message.relay, index=message.index)
        return Ok()
