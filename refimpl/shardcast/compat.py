"""The published package's file layout, so that its clients can pull from our relays and ours from its.

What shardcast 0.3.2 serves is a folder of static files:

    distribution.txt             one line per version, "v{N}: {checksum}|{number of shards}", sorted
    v{N}/shard_{i:05d}.bin       the shards, i from 1
    data1.bin                    any small file: each client times its download before it starts, and fails without it

The checksum is BLAKE3 over the whole file (the package's description and the paper say SHA-256: choose). Shards are not
checked one by one; a version has no content id, no run, no signature. So what comes in this way is only as good as its
one checksum, and the compatibility mode says so.

Reading is strict where the package is lenient: it splits each line at the first colon and takes what it finds.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from refimpl.shardcast.blake3 import Blake3
from refimpl.shardcast.layout import SHARDS_MAX, Layout

DISTRIBUTION_NAME = "distribution.txt"
PROBE_NAME = "data1.bin"
DISTRIBUTION_BYTES_MAX = 1 << 16
VERSIONS_MAX = 5  # as in the package (SHARDCAST_MAX_DISTRIBUTION_FOLDERS)
PORT = 8000

_LINE = re.compile(r"v(0|[1-9][0-9]{0,11}): ([0-9a-f]{64})\|([1-9][0-9]{0,5})")
_SHARD = re.compile(r"/?v(0|[1-9][0-9]{0,11})/shard_([0-9]{5,6})\.bin")


class Hasher(Protocol):
    def update(self, data: bytes | bytearray | memoryview, /) -> None: ...

    def hexdigest(self) -> str: ...


CHECKSUMS: Mapping[str, Callable[[], Hasher]] = {"blake3": Blake3, "sha256": hashlib.sha256}
"""The hash of the whole file, by name: "blake3" is the package's, "sha256" its description's and the paper's."""


class CompatError(ValueError):
    """Not the published layout. Takes the sentence that says why."""


@dataclass(frozen=True)
class Listed:
    """One version in the index."""

    checksum: str  # 64 lower-case hex digits
    shard_count: int

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[0-9a-f]{64}", self.checksum) or not 1 <= self.shard_count <= SHARDS_MAX:
            raise CompatError(f"a listed version has a 32-byte checksum and 1 to {SHARDS_MAX} shards, not {self}")


def parse_distribution(raw: bytes) -> dict[int, Listed]:
    """The index, by version. An empty file lists nothing. Raises CompatError, which names the line."""
    if len(raw) > DISTRIBUTION_BYTES_MAX:
        raise CompatError(f"{DISTRIBUTION_NAME} has {len(raw)} bytes, at most {DISTRIBUTION_BYTES_MAX} were expected")
    if raw and not raw.endswith(b"\n"):
        raise CompatError(f"{DISTRIBUTION_NAME} breaks off in its last line")  # the package rewrites it in place
    found: dict[int, Listed] = {}
    for number, line in enumerate(raw.split(b"\n")[:-1], 1):
        match = _LINE.fullmatch(line.decode("ascii", "replace"))
        if not match:
            raise CompatError(f"{DISTRIBUTION_NAME}, line {number}: {line[:100]!r} is not 'v1: checksum|shards'")
        version = int(match[1])
        if version in found:
            raise CompatError(f"{DISTRIBUTION_NAME}, line {number}: version {version} is listed twice")
        found[version] = Listed(match[2], int(match[3]))
    return found


def render_distribution(versions: Mapping[int, Listed], versions_max: int = VERSIONS_MAX) -> bytes:
    """The index of the newest `versions_max` versions, sorted by number, as the package writes it."""
    kept = sorted(versions)[-versions_max:]
    return "".join(f"v{v}: {versions[v].checksum}|{versions[v].shard_count}\n" for v in kept).encode()


def shard_path(version: int, index: int) -> str:
    """Where shard `index` (from 0, as everywhere here) lies in the layout (from 1, as there)."""
    if version < 0 or not 0 <= index < SHARDS_MAX:
        raise CompatError(f"there is no shard {index} of version {version}")
    return f"v{version}/shard_{index + 1:05d}.bin"


def parse_shard_path(path: str) -> tuple[int, int] | None:
    """(version, index from 0) when `path` is exactly the name of a shard; None for anything else. A server looks the
    pair up in its own index; the path itself never reaches the file system."""
    match = _SHARD.fullmatch(path)
    if not match:
        return None
    version, index = int(match[1]), int(match[2]) - 1
    # one name per shard: "shard_000001.bin" is not another way to write the first one
    return (version, index) if 0 <= index < SHARDS_MAX and path.lstrip("/") == shard_path(version, index) else None


def listed(layout: Layout, checksum: str) -> Listed:
    """How a version of ours is listed there. Raises CompatError when it cannot be: the package knows single files."""
    if len(layout.names) != 1:
        raise CompatError(f"the published layout carries one file per version, this one has {len(layout.names)}")
    return Listed(checksum, layout.shard_count)
