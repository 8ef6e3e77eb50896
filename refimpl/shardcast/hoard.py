"""What one node holds of one version: the origin's documents, and shards that were checked against them.

A shard's bytes are real, or in the simulator only a size and a content id; `digest` hides which. Nothing is in here
that was not checked: an entry by its signature, a shard by its entry, the whole by the manifest.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from refimpl.messages import Blob
from refimpl.shardcast.manifest import Expected, Header, Manifest, Opening, ShardEntry, Verify


def digest(blob: Blob) -> bytes:
    """SHA-256 of the bytes; of a virtual blob, the one that its content id stands for (changed bytes, changed id)."""
    if blob.data is not None:
        return hashlib.sha256(blob.data).digest()
    return (
        bytes.fromhex(blob.content_id)
        if len(blob.content_id) == 64
        else hashlib.sha256(blob.content_id.encode()).digest()
    )


@dataclass
class Hoard:
    """One version at one node, growing."""

    opening: bytes
    header: Header
    expected: Expected
    entries: list[bytes] = field(default_factory=list)  # in the order in which they came
    manifest: bytes = b""
    shards: dict[int, Blob] = field(default_factory=dict)

    @classmethod
    def opened(cls, raw: bytes, verify: Verify, origin: str) -> Hoard:
        """Begin a version. Raises ManifestError unless `origin` signed its opening."""
        header = Opening.decode(raw, verify, origin).header
        return cls(raw, header, Expected(header))

    def add_entries(self, raws: tuple[bytes, ...], verify: Verify) -> list[tuple[int, int]]:
        """Take entries; returns (index, size) of the shards that may be fetched from now on. Raises ManifestError."""
        fresh = []
        for raw in raws:
            entry = ShardEntry.decode(raw, self.header, verify)
            if self.expected.sha256(entry.index) is None:
                fresh.append((entry.index, self.header.layout.shard_size(entry.index)))
            self.expected.add(entry)
            self.entries.append(raw)
        return fresh

    def finish(self, raw: bytes, verify: Verify, origin: str) -> list[tuple[int, int]]:
        """Take the final manifest; returns what may be fetched now and could not before. Raises ManifestError."""
        known = set(self.expected.known())
        self.expected.finish(Manifest.decode(raw, verify, origin))
        self.manifest = raw
        layout = self.header.layout
        return [(index, layout.shard_size(index)) for index in range(layout.shard_count) if index not in known]

    def take(self, index: int, blob: Blob) -> bool:
        """Keep a shard if it is what the origin signed. False: it is not."""
        if blob.size_bytes != self.header.layout.shard_size(index) or digest(blob) != self.expected.sha256(index):
            return False
        self.shards[index] = blob
        return True

    @property
    def complete(self) -> bool:
        """All shards are here and the final manifest agrees with them."""
        return bool(self.manifest) and len(self.shards) == self.header.layout.shard_count
