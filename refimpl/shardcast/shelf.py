"""Where a version's shards lie, seen by the roles: one port, two stores behind it.

`MemoryStore` holds whole shards as blobs: in the simulator only sizes and content ids, so that 62 GB at ten thousand
nodes cost no memory; in small tests real bytes. `DiskStore` (`disk_store.py`) holds files. A role cannot tell which.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from refimpl.messages import Blob
from refimpl.shardcast.disk import DiskFull, ShardMismatch, StoreError
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest, Stretch

INCREMENT_NAME = "increment"  # the one file of an increment

ReadShard = Callable[[int], Blob]
"""The bytes of shard i (or, in the simulator, their size and id)."""


def increment_layout(size_bytes: int, shard_bytes: int) -> Layout:
    return Layout(names=(INCREMENT_NAME,), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes)


class Shelf(Protocol):
    """The shards of one version at one node, complete or not."""

    header: Header
    resumed: bool  # something of it was here from an earlier process

    def has(self, index: int) -> bool:
        """The shard is here, and was verified."""
        ...

    def received(self, index: int) -> int:
        """Bytes of the shard that are here, from its start, verified or not: a transfer goes on from there."""
        ...

    def write(self, index: int, offset: int, piece: Blob, source: str) -> int:
        """Keep a piece; returns how many of its bytes were new. Raises StoreError for a gap or too much, DiskFull."""
        ...

    def check(self, index: int, sha256: bytes) -> None:
        """All bytes are here: verify. Raises ShardMismatch (and drops them) when they are not what was signed."""
        ...

    def agrees(self, index: int, sha256: bytes) -> bool:
        """Whether a shard that was here before is the one that is expected; it is dropped when not."""
        ...

    def read(self, index: int, offset: int, size: int) -> Blob:
        """Bytes of a shard that is here."""
        ...

    def reset(self, index: int) -> None:
        """Forget what was received of a shard."""
        ...

    def publish(self, manifest: Manifest) -> None:
        """All is here and agrees: make it visible under its final name, in one step. Raises StoreError."""
        ...

    def abandon(self) -> None:
        """Give an unfinished version up and free its space. Never raises."""
        ...


class CutShelf(Shelf, Protocol):
    """An origin's own version: filled by cutting."""

    def cut(self, indices: Sequence[int]) -> list[bytes]:
        """Read these shards from the content; they can be served from now on. Returns the SHA-256 of each."""
        ...


class Store(Protocol):
    """All versions of one run at one node."""

    workers: int  # cores that cut, compare and apply

    def claim_version(self) -> int:
        """A version number that this store never gave before, not even before a crash."""
        ...

    def begin(self, header: Header) -> Shelf:
        """Start or resume a version. Raises DiskFull before anything is fetched when it would not fit."""
        ...

    def adopt(self, header: Header, content: Any) -> CutShelf:
        """Start a version of our own from `content`: paths for files, a `ReadShard` in memory."""
        ...

    def shelf(self, manifest: Manifest) -> Shelf:
        """A version that was published here."""
        ...

    def remove(self, manifest: Manifest) -> list[str]:
        """Free a published version. Never raises: returns what could not be done."""
        ...

    def tidy(self) -> list[str]:
        """Remove what nobody is at work on. Never raises: returns what could not be done."""
        ...

    def make_increments(
        self, base: Manifest, target: CutShelf, stretches: Sequence[Stretch], shard_bytes: int
    ) -> list[tuple[Layout, Any]]:
        """An increment for each stretch of a target of our own: its layout, and the content to `adopt`."""
        ...

    def apply_increments(
        self, increments: Sequence[Manifest], base: Manifest, shelf: Shelf, sha256: Mapping[int, bytes]
    ) -> list[int]:
        """Fill `shelf` with what published increments make out of the base, each shard checked against its `sha256`;
        returns those that came out wrong and have to be fetched. Raises DeltaError when an increment is not one."""
        ...


def digest(blob: Blob) -> bytes:
    """SHA-256 of the bytes; of a virtual blob, the one that its content id stands for (changed bytes, changed id)."""
    if blob.data is not None:
        return hashlib.sha256(blob.data).digest()
    return (
        bytes.fromhex(blob.content_id)
        if len(blob.content_id) == 64
        else hashlib.sha256(blob.content_id.encode()).digest()
    )


def virtual_shards(content: str, layout: Layout) -> ReadShard:
    """Shards of a checkpoint that is only a name and a size."""

    def read(index: int) -> Blob:
        identity = hashlib.sha256(f"{content}|{index}".encode()).hexdigest()
        return Blob(layout.shard_size(index), identity)

    return read


NeedRoom = Callable[[], None]
"""Called before anything is kept. Raises DiskFull where there is no room."""


def endless() -> None:
    """Room for everything."""


def room_unless(full: Callable[[], bool], name: str) -> NeedRoom:
    """The disk of node `name`, which holds everything except while `full()`."""

    def need_room() -> None:
        if full():
            raise DiskFull(f"the disk of {name} is full")

    return need_room


class MemoryShelf:
    """Whole shards as blobs. A piece of real bytes may be a part of one; a virtual piece is a whole shard."""

    def __init__(self, header: Header, content: ReadShard | None = None, need_room: NeedRoom = endless) -> None:
        self.header, self._layout, self._content, self._need_room = header, header.layout, content, need_room
        self.resumed = False
        self.manifest: Manifest | None = None  # once it is published
        self.blobs: dict[int, Blob] = {}
        self._partial: dict[int, bytearray] = {}
        self._verified: dict[int, bytes] = {}
        self._sources: dict[int, set[str]] = {}

    @property
    def is_own(self) -> bool:
        """It was begun from content of our own, to be cut."""
        return self._content is not None

    @property
    def holds_bytes(self) -> bool:
        """Something of it is here."""
        return bool(self.blobs or self._partial)

    def taken_up(self, need_room: NeedRoom) -> None:
        """Another process goes on with it."""
        self._need_room, self.resumed = need_room, self.manifest is None and self.holds_bytes

    def has(self, index: int) -> bool:
        return index in self._verified

    def received(self, index: int) -> int:
        if index in self.blobs:
            return self.blobs[index].size_bytes
        return len(self._partial.get(index, b""))

    def write(self, index: int, offset: int, piece: Blob, source: str) -> int:
        if index in self.blobs:
            return 0  # the first of two transfers counts, so that the right one is blamed
        self._need_room()
        size, at = self._layout.shard_size(index), self.received(index)
        self._sources.setdefault(index, set()).add(source)
        if offset > at or offset + piece.size_bytes > size:
            raise StoreError(f"{source} sent bytes {offset}..{offset + piece.size_bytes} of shard {index} of {size}")
        if offset == 0 and piece.size_bytes == size:
            self.blobs[index] = piece
            return size - at
        if piece.data is None:
            raise StoreError(f"{source} sent {piece.size_bytes} virtual bytes of shard {index} of {size}")
        fresh = memoryview(piece.data)[at - offset :]
        self._partial.setdefault(index, bytearray()).extend(fresh)
        if at + len(fresh) == size:
            self.blobs[index] = Blob(size, "", bytes(self._partial.pop(index)))
        return len(fresh)

    def check(self, index: int, sha256: bytes) -> None:
        if index in self._verified:
            return
        found = digest(self.blobs[index]) if index in self.blobs else b""
        if found != sha256:
            sources = self._sources.get(index, set())
            self.reset(index)
            raise ShardMismatch(index, sha256, found, next(iter(sources)) if len(sources) == 1 else None)
        self._verified[index] = found

    def agrees(self, index: int, sha256: bytes) -> bool:
        if self._verified.get(index) == sha256:
            return True
        self.reset(index)
        return False

    def read(self, index: int, offset: int, size: int) -> Blob:
        blob = self.blobs[index]
        if offset == 0 and size >= blob.size_bytes:
            return blob
        if blob.data is None:
            raise StoreError("a virtual shard is read whole")
        part = memoryview(blob.data)[offset : offset + size]
        return Blob(len(part), "", part)

    def reset(self, index: int) -> None:
        self.blobs.pop(index, None)
        self._partial.pop(index, None)
        self._verified.pop(index, None)
        self._sources.pop(index, None)

    def publish(self, manifest: Manifest) -> None:
        self._need_room()  # for the manifest
        for index, sha256 in enumerate(manifest.shards_sha256):
            if self._verified.get(index) != sha256:
                raise StoreError(f"shard {index} of version {manifest.version} is not there yet")
        self.manifest = manifest

    def abandon(self) -> None:
        for index in [*self.blobs, *self._partial]:
            self.reset(index)

    def cut(self, indices: Sequence[int]) -> list[bytes]:
        assert self._content is not None, "only what was adopted can be cut"
        for index in indices:
            self.blobs[index] = self._content(index)
            self._verified[index] = digest(self.blobs[index])
        return [self._verified[index] for index in indices]


class MemoryStore:
    """A store that lives as long as this object: it may outlive its node, as a disk does (`reopen`, `found`).
    Increments are virtual: their sizes are said beforehand."""

    def __init__(
        self, increment_share: float | None = None, need_room: NeedRoom = endless, *, workers: int = 1
    ) -> None:
        self.increment_share = increment_share  # size of an increment, of what it makes; None: there are none
        self.workers = workers
        self._need_room = need_room
        self._shelves: dict[str, MemoryShelf] = {}  # by header id
        self._version = -1

    @property
    def next_version(self) -> int:
        """The number that the next version will bear."""
        return self._version + 1

    def claim_version(self) -> int:
        self._version += 1
        return self._version

    def reopen(self, need_room: NeedRoom) -> None:
        """A process takes it up, perhaps after another that died. What a dead origin had not cut to the end is of no
        use; what was being fetched is."""
        self._need_room = need_room
        for header_id, shelf in list(self._shelves.items()):
            if shelf.manifest is None and shelf.is_own:
                del self._shelves[header_id]
            else:
                shelf.taken_up(need_room)

    def found(self) -> list[Manifest]:
        """What is here whole, oldest first."""
        manifests = [shelf.manifest for shelf in self._shelves.values() if shelf.manifest is not None]
        return sorted(manifests, key=lambda manifest: (manifest.version, manifest.header.is_increment))

    def begin(self, header: Header) -> MemoryShelf:
        if header.id not in self._shelves:
            self._need_room()
            self._shelves[header.id] = MemoryShelf(header, None, self._need_room)
        return self._shelves[header.id]

    def adopt(self, header: Header, content: Any) -> MemoryShelf:
        self._shelves[header.id] = MemoryShelf(header, content, self._need_room)
        return self._shelves[header.id]

    def shelf(self, manifest: Manifest) -> MemoryShelf:
        return self._shelves[manifest.header.id]

    def remove(self, manifest: Manifest) -> list[str]:
        self._shelves.pop(manifest.header.id, None)
        return []

    def tidy(self) -> list[str]:
        return []

    def make_increments(
        self, base: Manifest, target: CutShelf, stretches: Sequence[Stretch], shard_bytes: int
    ) -> list[tuple[Layout, Any]]:
        assert self.increment_share is not None, "this store was not told how large increments are"
        made = []
        for stretch in stretches:
            size = sum(target.header.layout.shard_size(shard) for shard in stretch.shards)
            size = max(1, round(self.increment_share * size))
            layout = increment_layout(size, shard_bytes)
            content = f"{base.content_id} to {target.header.id} {stretch.first}"
            made.append((layout, virtual_shards(content, layout)))
        return made

    def apply_increments(
        self, increments: Sequence[Manifest], base: Manifest, shelf: Shelf, sha256: Mapping[int, bytes]
    ) -> list[int]:
        for increment in increments:
            assert increment.header.stretch is not None
            for shard in increment.header.stretch.shards:
                if not shelf.has(shard):
                    shelf.reset(shard)
                    blob = Blob(shelf.header.layout.shard_size(shard), sha256[shard].hex())
                    shelf.write(shard, 0, blob, "the increment")
                    shelf.check(shard, sha256[shard])
        return []
