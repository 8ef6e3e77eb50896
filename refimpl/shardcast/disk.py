"""The few things that SHARDCAST asks of a file system, and the errors that it can give."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PARTIAL = ".partial-"  # hidden and unfinished: may be removed by `VersionStore.clean`
BLOCK_BYTES = 1 << 20  # what is read, written or hashed at a time; the memory that one shard costs


class StoreError(Exception):
    """Something is wrong on this node's disk. Takes the sentence that says what."""


class DiskFull(StoreError):
    """There is no room for the version; what was there before is untouched."""


class ShardMismatch(StoreError):
    """A shard's bytes are not the ones that the origin signed for; its record was set back to nothing received.

    `culprit` is the one source that all bytes came from, or None when several did (the next try should ask one)."""

    def __init__(self, index: int, expected: bytes, found: bytes, culprit: str | None) -> None:
        super().__init__(
            f"shard {index} has SHA-256 {found.hex()[:16]}…, expected {expected.hex()[:16]}…"
            + (f"; all of it came from {culprit}" if culprit else "; it came from several sources")
        )
        self.index, self.expected, self.found, self.culprit = index, expected, found, culprit


def free_bytes(folder: Path) -> int:
    """Bytes that an ordinary user may still write there."""
    stat = os.statvfs(folder)
    return stat.f_bavail * stat.f_frsize


def check_space(folder: Path, needed_bytes: int, reserve_bytes: int = 0) -> None:
    """Raises DiskFull unless `needed_bytes` fit and leave `reserve_bytes` free (1 GB = 10^9 bytes in the message)."""
    available = free_bytes(folder)
    if available < needed_bytes + reserve_bytes:
        raise DiskFull(
            f"{folder} has {available / 1e9:.3f} GB free, {needed_bytes / 1e9:.3f} GB are needed"
            + (f" and {reserve_bytes / 1e9:.3f} GB are kept in reserve" if reserve_bytes else "")
        )


def place(source: Path, target: Path, *, copy: bool = False) -> None:
    """Make `source` appear at `target` in one step, over whatever is there: a link where possible, else a copy."""
    hidden = target.with_name(f"{PARTIAL}{target.name}.{os.getpid()}")
    hidden.unlink(missing_ok=True)
    try:
        with full_disk_named(target.parent):
            if copy or not _linked(source, hidden):
                shutil.copyfile(source, hidden)
            os.replace(hidden, target)
    finally:
        hidden.unlink(missing_ok=True)


def _linked(source: Path, target: Path) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links
        return False
    return True


@contextmanager
def full_disk_named(folder: Path) -> Iterator[None]:
    """Turns the system's "no space left" into a DiskFull that says where."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(f"{folder} is full: {error.strerror}") from error
        raise


def read_blocks(descriptor: int, offset: int, size: int) -> Iterator[bytes]:
    while size:
        block = os.pread(descriptor, min(size, BLOCK_BYTES), offset)
        if not block:
            raise StoreError(f"a file ended {size} bytes early: it was changed under our hands")
        yield block
        offset, size = offset + len(block), size - len(block)


def boot_id() -> bytes:
    """Names the time since the last boot; where the system does not say, every start counts as a new one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36].ljust(36)
    except OSError:
        return os.urandom(36)
