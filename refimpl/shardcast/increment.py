"""Increments between versions on disk: made by the origin, applied by a client, checked against the signed manifest.

The increment is a file like any other: it gets a header (with `base` and `target`), shards and a manifest of its own,
and relays carry it without knowing what it is. The client feeds its bytes, in order, to an `IncrementApplier`, which
writes the target's shards into an `Assembly`. A shard that comes out wrong is simply one that is still missing: it is
fetched from a relay instead, and only that one.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.delta import CHUNK_BYTES, IncrementDecoder, encode_increment, plan_chunks
from refimpl.shardcast.disk import ShardMismatch, full_disk_named
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest
from refimpl.shardcast.shelf import INCREMENT_NAME
from refimpl.shardcast.store import VersionStore
from refimpl.shardcast.tensors import spans


def increment_pieces(
    store: VersionStore, base: Manifest, target: Manifest, *, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[bytes]:
    """The increment from `base` to `target`, both in the store, as it is being made."""
    read_base, read_target = partial(store.read, base), partial(store.read, target)
    chunks = plan_chunks(spans(base.layout, read_base), spans(target.layout, read_target), chunk_bytes)
    return encode_increment(read_base, base.layout.size_bytes, read_target, target.layout.size_bytes, chunks)


def write_increment(
    store: VersionStore, base: Manifest, target: Manifest, path: Path, *, chunk_bytes: int = CHUNK_BYTES
) -> int:
    """Write the increment to `path`; returns its size in bytes."""
    size = 0
    with full_disk_named(path.parent), open(path, "wb") as file:
        for piece in increment_pieces(store, base, target, chunk_bytes=chunk_bytes):
            size += file.write(piece)
    return size


def increment_header(base: Manifest, target: Manifest, size_bytes: int, shard_bytes: int) -> Header:
    """The header under which the increment travels."""
    return Header(
        run_id=target.header.run_id,
        version=target.version,
        layout=Layout(names=(INCREMENT_NAME,), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes),
        origin=target.header.origin,
        base=base.ref,
        target=target.ref,
    )


class IncrementApplier:
    """Turns an increment's bytes and the base into verified shards of the target."""

    def __init__(self, store: VersionStore, base: Manifest, target: Manifest, assembly: Assembly) -> None:
        self.bad: list[int] = []  # shards that came out wrong: fetch them
        self._target, self._assembly = target, assembly
        self._at = 0  # in the target's stream
        self._decoder = IncrementDecoder(partial(store.read, base), base.layout.size_bytes, target.layout.size_bytes)

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """The increment's next bytes. Raises DeltaError; what was verified before stays."""
        for piece in self._decoder.feed(data):
            while piece:
                index, offset = divmod(self._at, self._target.layout.shard_bytes)
                size = self._target.layout.shard_size(index)
                part, piece = piece[: size - offset], piece[size - offset :]
                self._at += len(part)
                self._take(index, offset, part, offset + len(part) == size)

    def finish(self) -> None:
        """No more bytes come. Raises DeltaError when the target is not complete."""
        self._decoder.finish()

    def _take(self, index: int, offset: int, part: memoryview, last: bool) -> None:
        if index in self.bad:
            return
        writer = self._assembly.writer(index)
        writer.write(part, "the increment", offset)
        if last:
            try:
                writer.finish(self._target.shards_sha256[index])
            except ShardMismatch:
                self.bad.append(index)
