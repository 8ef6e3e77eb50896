"""What one node holds of one version: the origin's documents, and shards that were checked against them.

Nothing counts as here that was not checked: an entry by its signature, a shard by its entry, the whole by the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from refimpl.shardcast.manifest import Expected, Header, Manifest, Opening, ShardEntry, Verify
from refimpl.shardcast.shelf import Shelf, Store

Wanted = tuple[int, int, int]
"""A shard that may be fetched: (index, size, bytes that are here already)."""


@dataclass
class Hoard:
    """One version at one node, growing."""

    header: Header
    expected: Expected
    shelf: Shelf
    opening: bytes = b""  # empty when the version was here before this process
    entries: list[bytes] = field(default_factory=list)  # in the order in which they came
    manifest: bytes = b""
    here: set[int] = field(default_factory=set)  # shards that are verified
    published: bool = False

    @classmethod
    def opened(cls, raw: bytes, store: Store, verify: Verify, origin: str) -> Hoard:
        """Begin or resume a version. Raises ManifestError unless `origin` signed its opening, StoreError."""
        header = Opening.decode(raw, verify, origin).header
        return cls(header, Expected(header), store.begin(header), raw)

    @classmethod
    def from_manifest(cls, manifest: Manifest, shelf: Shelf, *, published: bool = False) -> Hoard:
        """A version whose final word is known from the start."""
        hoard = cls(manifest.header, Expected(manifest.header), shelf, manifest=manifest.encode(), published=published)
        hoard.expected.finish(manifest)
        if published:
            hoard.here = set(range(manifest.layout.shard_count))
        return hoard

    def add_entries(self, raws: tuple[bytes, ...], verify: Verify) -> list[Wanted]:
        """Take entries; returns the shards that may be fetched from now on. Raises ManifestError."""
        fresh = []
        for raw in raws:
            entry = ShardEntry.decode(raw, self.header, verify)
            if self.expected.sha256(entry.index) is None:
                fresh.append(entry.index)
                self.entries.append(raw)  # once, though several sources tell of it: their number is what we ask with
            self.expected.add(entry)
        return self._wanted(fresh)

    def finish(self, raw: bytes, verify: Verify, origin: str) -> list[Wanted]:
        """Take the final manifest; returns what may be fetched now and could not before. Raises ManifestError."""
        known = set(self.expected.known())
        self.expected.finish(Manifest.decode(raw, verify, origin))
        self.manifest = raw
        return self._wanted([index for index in range(self.header.layout.shard_count) if index not in known])

    def missing(self) -> list[Wanted]:
        """All shards that may be fetched and are not here."""
        return self._wanted([index for index in self.expected.known() if index not in self.here])

    def check(self, index: int) -> None:
        """All bytes of a shard came. Raises ShardMismatch when they are not what the origin signed."""
        sha256 = self.expected.sha256(index)
        assert sha256 is not None, f"shard {index} was fetched before its hash was known"
        self.shelf.check(index, sha256)
        self.here.add(index)

    def count(self, indices: Iterable[int]) -> None:
        """These shards were made and verified here."""
        self.here.update(index for index in indices if self.shelf.has(index))

    def sha256(self, indices: Iterable[int]) -> dict[int, bytes]:
        """What the origin has said so far of these shards."""
        said = {index: self.expected.sha256(index) for index in indices}
        return {index: sha256 for index, sha256 in said.items() if sha256 is not None}

    @property
    def complete(self) -> bool:
        """All shards are here and the final manifest agrees with them."""
        return bool(self.manifest) and len(self.here) == self.header.layout.shard_count

    @property
    def final(self) -> Manifest:
        assert self.expected.manifest is not None, "the final manifest is not here yet"
        return self.expected.manifest

    def _wanted(self, indices: list[int]) -> list[Wanted]:
        wanted = []
        for index in indices:
            sha256 = self.expected.sha256(index)
            if sha256 is not None and self.shelf.has(index) and self.shelf.agrees(index, sha256):
                self.here.add(index)  # from before a restart
            else:
                wanted.append((index, self.header.layout.shard_size(index), self.shelf.received(index)))
        return wanted
