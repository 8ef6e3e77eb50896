"""Increments between versions: made by the origin, applied by a client, checked against the origin's signed entries.

An increment makes a stretch of the target's shards out of the base. It is a file like any other: it gets a header (with
`base`, `target` and `stretch`), shards and a manifest of its own, and relays carry it without knowing what it is. A
version is many such stretches: the first ones travel while later ones are still being compared.

    bytes of an increment = one stream for each shard of the stretch (`delta.py`), then the lengths of the streams

Each shard can therefore be made by itself: comparing spreads over cores by chunks, applying by shards, and what comes
out is the same for any number of them. A shard that comes out wrong is simply one that is still missing: it is fetched
from a relay instead, and only that one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.delta import CHUNK_BYTES, Chunk, IncrementDecoder, encode_header, encode_record, plan_chunks
from refimpl.shardcast.disk import ShardMismatch, full_disk_named
from refimpl.shardcast.document import DeltaError
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Manifest, Stretch
from refimpl.shardcast.store import VersionStore
from refimpl.shardcast.tensors import Read, spans
from refimpl.shardcast.workers import in_order

STEP_BYTES = 1 << 20
_LENGTH = np.dtype("<u8")


class Comparison:
    """A target, which may still be in the making, beside its base."""

    def __init__(
        self, read_base: Read, base: Layout, read_target: Read, target: Layout, *, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.base, self.target, self._read_base, self._read_target = base, target, read_base, read_target
        self._chunks = plan_chunks(spans(base, read_base), spans(target, read_target), chunk_bytes, target.shard_bytes)
        self._starts = [chunk.offset for chunk in self._chunks]

    def chunks(self, shard: int) -> list[Chunk]:
        """Those that make this shard, in order."""
        start = self.target.shard_offset(shard)
        first, stop = (bisect_left(self._starts, at) for at in (start, start + self.target.shard_size(shard)))
        return self._chunks[first:stop]

    def write(self, stretch: Stretch, path: Path, workers: int = 1) -> int:
        """Write the increment for these shards of the target; returns its size in bytes."""
        record = partial(encode_record, self._read_base, self._read_target)
        counts = [len(self.chunks(shard)) for shard in stretch.shards]
        every = in_order(record, (chunk for shard in stretch.shards for chunk in self.chunks(shard)), workers)
        lengths = []
        with full_disk_named(path.parent), open(path, "wb") as file:
            for shard, count in zip(stretch.shards, counts, strict=True):
                length = file.write(encode_header(self.base.size_bytes, self.target.shard_size(shard)))
                for _ in range(count):
                    length += file.write(next(every))
                lengths.append(length)
            file.write(np.array(lengths, _LENGTH).tobytes())
        return sum(lengths) + _LENGTH.itemsize * len(lengths)


class Stream(NamedTuple):
    """Bytes [offset, offset + size) of an increment, which make one shard of the target."""

    increment: Manifest
    shard: int
    offset: int
    size: int


def streams(store: VersionStore, increment: Manifest) -> list[Stream]:
    """What an increment in the store consists of. Raises DeltaError when it is no increment."""
    stretch, size = increment.header.stretch, increment.layout.size_bytes
    assert stretch is not None
    end = size - _LENGTH.itemsize * stretch.length
    if end < 0:
        raise DeltaError(f"an increment of {size} bytes cannot make {stretch.length} shards")
    lengths = np.frombuffer(store.read(increment, end, size - end), _LENGTH).tolist()
    if sum(lengths) != end:
        raise DeltaError(f"an increment's streams have {sum(lengths)} bytes, {end} were expected")
    found, offset = [], 0
    for shard, length in zip(stretch.shards, lengths, strict=True):
        found.append(Stream(increment, shard, offset, length))
        offset += length
    return found


class Applier:
    """Turns increments and their base into verified shards of the target. `sha256`: what each shard must be."""

    def __init__(
        self,
        store: VersionStore,
        base: Manifest,
        sha256: Mapping[int, bytes],
        assembly: Assembly,
        locks: Sequence[AbstractContextManager[object]],
    ) -> None:
        self._store, self._base, self._sha256, self._assembly, self._locks = store, base, sha256, assembly, locks
        self._read_base = store.reader(base)

    def apply(self, increments: Sequence[Manifest], workers: int = 1) -> list[int]:
        """All that these increments make; returns the shards that came out wrong. Raises DeltaError; what was verified
        before stays."""
        todo = [s for each in increments for s in streams(self._store, each) if not self._assembly.verified(s.shard)]
        made = zip(todo, in_order(self._make, todo, workers), strict=True)
        return [stream.shard for stream, good in made if not good]

    def _make(self, stream: Stream) -> bool:
        layout = self._assembly.layout
        decoder = IncrementDecoder(self._read_base, self._base.layout.size_bytes, layout.shard_size(stream.shard))
        with self._locks[stream.shard]:
            writer, at = self._assembly.writer(stream.shard), 0
            for done in range(0, stream.size, STEP_BYTES):
                size = min(STEP_BYTES, stream.size - done)
                for piece in decoder.feed(self._store.read(stream.increment, stream.offset + done, size)):
                    writer.write(piece, "the increment", at)
                    at += len(piece)
            decoder.finish()
            try:
                writer.finish(self._sha256[stream.shard])
            except ShardMismatch:
                return False
        return True
