"""The geometry of a version: files laid end to end as one stream, cut into shards of equal size.

A shard may span two files, so a folder of many small files costs no more shards than one file of the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from refimpl.shardcast.document import ManifestError, check_name

SHARD_BYTES = 50_000_000  # the original's default: 62 GB are 1 240 shards
SHARD_BYTES_MAX = 1 << 30
SHARDS_MAX = 65_536
FILES_MAX = 1_024
SIZE_BYTES_MAX = 10**15


class Piece(NamedTuple):
    """Bytes [offset, offset + size) of file number `file`."""

    file: int
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of a version, seen as one stream in this order, and the size that it is cut into."""

    names: tuple[str, ...]
    sizes_bytes: tuple[int, ...]
    shard_bytes: int = SHARD_BYTES

    def __post_init__(self) -> None:
        if not 1 <= len(self.names) <= FILES_MAX or len(self.names) != len(self.sizes_bytes):
            raise ManifestError(f"a version has 1 to {FILES_MAX} files with a size each, not {len(self.names)}")
        for name in self.names:
            check_name(name, "file name")
        if len(set(self.names)) != len(self.names):
            raise ManifestError(f"file names repeat: {sorted(self.names)[:4]}")
        if not 1 <= self.shard_bytes <= SHARD_BYTES_MAX:
            raise ManifestError(f"shard size is {self.shard_bytes} bytes, 1 to {SHARD_BYTES_MAX} was expected")
        if min(self.sizes_bytes) < 0 or not 1 <= self.size_bytes <= SIZE_BYTES_MAX:
            raise ManifestError(f"a version holds 1 to {SIZE_BYTES_MAX} bytes, not {self.size_bytes}")
        if self.shard_count > SHARDS_MAX:
            raise ManifestError(f"{self.shard_count} shards are too many, at most {SHARDS_MAX}: take larger shards")

    @cached_property
    def size_bytes(self) -> int:
        return sum(self.sizes_bytes)

    @property
    def shard_count(self) -> int:
        return -(-self.size_bytes // self.shard_bytes)  # ceil(size / shard size)

    def shard_offset(self, index: int) -> int:
        self._check_index(index)
        return index * self.shard_bytes

    def shard_size(self, index: int) -> int:
        self._check_index(index)
        return min(self.shard_bytes, self.size_bytes - index * self.shard_bytes)

    def pieces(self, offset: int, size: int) -> list[Piece]:
        """Where bytes [offset, offset + size) of the stream lie in the files."""
        if offset < 0 or size < 0 or offset + size > self.size_bytes:
            raise ValueError(f"bytes {offset}..{offset + size} lie outside a version of {self.size_bytes} bytes")
        found, start = [], 0
        for file, file_size in enumerate(self.sizes_bytes):
            first, last = max(offset, start), min(offset + size, start + file_size)
            if first < last:
                found.append(Piece(file, first - start, last - first))
            start += file_size
        return found

    def _check_index(self, index: int) -> None:
        if not 0 <= index < self.shard_count:
            raise ManifestError(f"shard {index} does not exist among {self.shard_count}")
