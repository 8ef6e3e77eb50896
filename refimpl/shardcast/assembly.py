"""One version on its way to its final path: written out of order, checked shard by shard, resumed after a kill.

Everything happens in a hidden folder beside the final one, on the same file system, so that the last step is a rename:

    ROOT/.partial-HEADERID/progress        one record per shard: bytes received, SHA-256 once verified
    ROOT/.partial-HEADERID/payload/NAME    the files, at full length from the start
    ROOT/v00000012-CONTENTID/…             after `finish`: the files and .shardcast.json, all at once

Bytes are written before the record that counts them, so a killed process resumes at the last byte that it had. After a
reboot the page cache is no witness any more: shards that were verified are read and hashed again (not fetched), and
partly received ones start over.

Differs from the original (shardcast 0.3.2): 1) no shard files and no concatenation: shards are written into place;
2) verified before the final path exists, not after; 3) resumable; 4) disk space is reserved before the first byte.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from refimpl.durable import sync_folder
from refimpl.shardcast.disk import (
    PARTIAL,
    ShardMismatch,
    StoreError,
    boot_id,
    check_space,
    full_disk_named,
    place,
    read_blocks,
)
from refimpl.shardcast.manifest import Header, Manifest

MANIFEST_NAME = ".shardcast.json"  # no file of a version can have this name: it begins with a dot
_HEAD = struct.Struct("<8s36s20x")  # magic, boot id
_RECORD = struct.Struct("<Q32s")  # bytes received; SHA-256, zero until verified
_MAGIC = b"SHRDPRG1"
_NOT_VERIFIED = bytes(32)


class Assembly:
    """Opens or resumes the version of `header` under `root`. One process at a time (the lock ends with the process).

    With `sources` (the origin's way in) the payload is these files, linked, or copied where links do not reach or
    `copy` asks for it; without, it is to be received."""

    def __init__(
        self,
        root: Path,
        header: Header,
        *,
        reserve_bytes: int = 0,
        sources: Sequence[Path] | None = None,
        copy: bool = False,
    ) -> None:
        self.root, self.header, self.layout = root, header, header.layout
        self.folder = root / f"{PARTIAL}{header.id[:32]}"
        self.payload = self.folder / "payload"
        self.payload.mkdir(parents=True, exist_ok=True)
        self._progress = os.open(self.folder / "progress", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._files: list[int] = []
        self.adopted = sources is not None
        self._writers: dict[int, ShardWriter] = {}
        ours = False
        try:
            self._lock()
            ours = os.fstat(self._progress).st_size == 0
            if sources is None:
                self._reserve_files(reserve_bytes)
                self._received, self._sha256 = self._read_progress()
            else:
                self._adopt_files(sources, copy)
                sizes = [self.layout.shard_size(index) for index in range(self.layout.shard_count)]
                self._received, self._sha256 = self._write_progress(sizes, [_NOT_VERIFIED] * len(sizes))
        except BaseException:
            self.close()
            if ours:  # nothing to resume: leave nothing behind, least of all on a full disk
                shutil.rmtree(self.folder, ignore_errors=True)
            raise

    # ------------------------------------------------------------------------------------------------- state
    def missing(self) -> list[int]:
        """Shards that are not verified yet, in order."""
        return [index for index, digest in enumerate(self._sha256) if digest == _NOT_VERIFIED]

    def verified(self, index: int) -> bool:
        return self._sha256[index] != _NOT_VERIFIED

    def received(self, index: int) -> int:
        """Bytes of the shard that are on disk, counted from its start, verified or not."""
        return self._received[index]

    def sha256(self, index: int) -> bytes:
        """Of a verified shard; zeros for any other."""
        return self._sha256[index]

    def received_bytes(self) -> int:
        return sum(self._received)

    def read(self, index: int, offset: int, size: int) -> bytes:
        """Bytes of a shard, no further than `received`: what a relay streams on. They are the origin's for sure only
        when the shard is verified."""
        size = min(size, self._received[index] - offset)
        if size <= 0:
            return b""
        return b"".join(self._read_stream(self.layout.shard_offset(index) + offset, size))

    # --------------------------------------------------------------------------------------------- receiving
    def writer(self, index: int) -> ShardWriter:
        """To receive shard `index` from byte `writer.received` on. There is one per shard, shared by all transfers of
        it, so that none writes over what another one has delivered."""
        if index not in self._writers:
            self._writers[index] = ShardWriter(self, index)
        return self._writers[index]

    def cutter(self, index: int) -> ShardCutter:
        """To hash shard `index` from our own content, and to copy it where it is not linked."""
        return ShardCutter(self, index)

    def cut(self) -> Iterator[tuple[int, bytes]]:
        """Read the payload once, front to back; yield (index, SHA-256) as each shard has been hashed."""
        for index in range(self.layout.shard_count):
            shard = hashlib.sha256()
            for piece in self.layout.pieces(self.layout.shard_offset(index), self.layout.shard_size(index)):
                for block in read_blocks(self._files[piece.file], piece.offset, piece.size):
                    shard.update(block)
            self._record(index, self.layout.shard_size(index), shard.digest())
            yield index, shard.digest()

    # -------------------------------------------------------------------------------------------------- the end
    def prepare(self, manifest: Manifest, *, durable: bool = True) -> None:
        """Everything is there and agrees with the manifest: put the manifest beside it. `durable`: on disk before it is
        visible, so that not even a power cut leaves a half. Raises StoreError."""
        if manifest.header != self.header:
            raise StoreError(f"the manifest of version {manifest.version} is not the one that was being assembled")
        for index, (found, expected) in enumerate(zip(self._sha256, manifest.shards_sha256, strict=True)):
            if found == _NOT_VERIFIED:
                raise StoreError(f"shard {index} of version {manifest.version} is not there yet")
            if found != expected:
                self.reset(index)
                raise ShardMismatch(index, expected, found, None)
        with full_disk_named(self.root):
            with open(self.payload / MANIFEST_NAME, "wb") as file:
                file.write(manifest.encode())
                file.flush()
                os.fsync(file.fileno())
            if durable:
                for descriptor in self._files:
                    os.fsync(descriptor)
                sync_folder(self.payload)

    def move(self, manifest: Manifest) -> Path:
        """What was prepared appears at its final path: files and manifest at once."""
        target = self.root / manifest.label
        try:
            os.rename(self.payload, target)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            # the same content is there already (its name is its hash); this copy is not needed
        return target

    def end(self) -> None:
        """It is published: close the files and remove what is left of the work. Never raises."""
        self.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def finish(self, manifest: Manifest, *, durable: bool = True) -> Path:
        """All of it: `prepare`, `move`, `end`."""
        self.prepare(manifest, durable=durable)
        target = self.move(manifest)
        if durable:
            sync_folder(self.root)
        self.end()
        return target

    def mark(self, name: str, content: bytes) -> None:
        """Put a small file of the store's own beside the payload (its name begins with a dot)."""
        with full_disk_named(self.root):
            (self.payload / name).write_bytes(content)

    def reset(self, index: int) -> None:
        """Forget what was received of a shard."""
        self._writers.pop(index, None)
        self._record(index, 0, _NOT_VERIFIED)

    def abandon(self) -> None:
        """Give the version up and free its space. Never raises."""
        self.end()

    def close(self) -> None:
        """Let go of it for now; a later `Assembly` of the same header goes on from here."""
        self._close_files()
        if self._progress >= 0:
            os.close(self._progress)  # and with it the lock
            self._progress = -1

    # ------------------------------------------------------------------------------------------------ inside
    def _lock(self) -> None:
        try:
            fcntl.flock(self._progress, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"version {self.header.version} is being assembled in {self.root} already") from None

    def _reserve_files(self, reserve_bytes: int) -> None:
        paths = [self.payload / name for name in self.layout.names]
        have = sum(path.stat().st_blocks * 512 for path in paths if path.exists())
        check_space(self.root, max(0, self.layout.size_bytes - have), reserve_bytes)
        for path, size in zip(paths, self.layout.sizes_bytes, strict=True):
            self._files.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644))
            with full_disk_named(self.root):
                if size:
                    os.posix_fallocate(self._files[-1], 0, size)  # no surprise in mid-transfer
            os.ftruncate(self._files[-1], size)

    def _adopt_files(self, sources: Sequence[Path], copy: bool) -> None:
        for name, size, source in zip(self.layout.names, self.layout.sizes_bytes, sources, strict=True):
            if source.stat().st_size != size:
                raise StoreError(f"{source} has {source.stat().st_size} bytes, {size} were announced")
            place(source, self.payload / name, copy=copy)
            self._files.append(os.open(self.payload / name, os.O_RDONLY | os.O_CLOEXEC))

    def _read_progress(self) -> tuple[list[int], list[bytes]]:
        count = self.layout.shard_count
        raw = os.pread(self._progress, _HEAD.size + count * _RECORD.size, 0)
        if len(raw) != _HEAD.size + count * _RECORD.size or raw[:8] != _MAGIC:
            return self._write_progress([0] * count, [_NOT_VERIFIED] * count)
        records = [_RECORD.unpack_from(raw, _HEAD.size + i * _RECORD.size) for i in range(count)]
        sha256 = [digest for _, digest in records]
        if _HEAD.unpack_from(raw)[1] == boot_id():
            return [min(r, self.layout.shard_size(i)) for i, (r, _) in enumerate(records)], sha256
        # after a reboot: trust nothing that was not hashed, and hash the rest again
        good = [digest != _NOT_VERIFIED and self._hash(i) == digest for i, digest in enumerate(sha256)]
        return self._write_progress(
            [self.layout.shard_size(i) if ok else 0 for i, ok in enumerate(good)],
            [digest if ok else _NOT_VERIFIED for digest, ok in zip(sha256, good, strict=True)],
        )

    def _write_progress(self, received: list[int], sha256: list[bytes]) -> tuple[list[int], list[bytes]]:
        records = b"".join(_RECORD.pack(r, s) for r, s in zip(received, sha256, strict=True))
        os.pwrite(self._progress, _HEAD.pack(_MAGIC, boot_id()) + records, 0)
        return received, sha256

    def _record(self, index: int, received: int, sha256: bytes) -> None:
        self._received[index], self._sha256[index] = received, sha256
        os.pwrite(self._progress, _RECORD.pack(received, sha256), _HEAD.size + index * _RECORD.size)

    def _hash(self, index: int) -> bytes:
        digest = hashlib.sha256()
        for block in self._read_stream(self.layout.shard_offset(index), self.layout.shard_size(index)):
            digest.update(block)
        return digest.digest()

    def _read_stream(self, offset: int, size: int) -> Iterator[bytes]:
        for piece in self.layout.pieces(offset, size):
            yield from read_blocks(self._files[piece.file], piece.offset, piece.size)

    def _write_stream(self, offset: int, data: memoryview) -> None:
        with full_disk_named(self.root):
            for piece in self.layout.pieces(offset, len(data)):
                part, data = data[: piece.size], data[piece.size :]
                at = piece.offset
                while part:
                    written = os.pwrite(self._files[piece.file], part, at)
                    part, at = part[written:], at + written

    def _close_files(self) -> None:
        for descriptor in self._files:
            os.close(descriptor)
        self._files = []


class ShardWriter:
    """Takes one shard's bytes in order, wherever it had stopped, and hashes them on the way."""

    def __init__(self, assembly: Assembly, index: int) -> None:
        self._assembly, self.index = assembly, index
        self.size_bytes = assembly.layout.shard_size(index)
        self.received = assembly.received(index)
        self._offset = assembly.layout.shard_offset(index)
        self._hash = hashlib.sha256()
        self._sources: set[str] = set()
        if self.received:
            self._sources.add("this disk")
            for block in assembly._read_stream(self._offset, self.received):
                self._hash.update(block)

    def write(self, data: bytes | bytearray | memoryview, source: str, offset: int | None = None) -> int:
        """Take `data`, which begins at byte `offset` of the shard (by default where the last piece ended), and return
        how many bytes were new: what another transfer has delivered already is not written again. Raises StoreError
        when there is a gap or too much, or when the shard was dropped meanwhile; DiskFull when the disk is full."""
        if self._assembly.verified(self.index):
            return 0
        self._check_open()
        view = memoryview(data).cast("B")
        start = self.received if offset is None else offset
        if start > self.received:
            raise StoreError(f"shard {self.index} is here up to byte {self.received}, this piece begins at {start}")
        if start + len(view) > self.size_bytes:
            raise StoreError(f"{source} sent more than the {self.size_bytes} bytes of shard {self.index}")
        view = view[self.received - start :]
        if not view:
            return 0
        self._assembly._write_stream(self._offset + self.received, view)
        self._hash.update(view)
        self.received += len(view)
        self._sources.add(source)
        self._assembly._record(self.index, self.received, _NOT_VERIFIED)
        return len(view)

    def finish(self, sha256: bytes) -> None:
        """All bytes are here: verify; once verified, more is no harm. Raises StoreError when bytes are missing (they
        are kept) or the shard was dropped meanwhile, ShardMismatch when they are wrong (they are dropped)."""
        if self._assembly.verified(self.index):
            return
        self._check_open()
        if self.received != self.size_bytes:
            raise StoreError(f"shard {self.index} ended after {self.received} of {self.size_bytes} bytes")
        found = self._hash.digest()
        if found != sha256:
            self._assembly.reset(self.index)
            culprit = next(iter(self._sources)) if len(self._sources) == 1 else None
            raise ShardMismatch(self.index, sha256, found, culprit)
        self._assembly._record(self.index, self.size_bytes, found)
        self._assembly._writers.pop(self.index)

    def _check_open(self) -> None:
        if self._assembly._writers.get(self.index) is not self:
            raise StoreError(f"what was received of shard {self.index} was dropped meanwhile")


class ShardCutter:
    """Takes one shard's bytes from our own content: hashes them, and writes them where they are not linked already."""

    def __init__(self, assembly: Assembly, index: int) -> None:
        self._assembly, self._index = assembly, index
        self._at = assembly.layout.shard_offset(index)
        self._hash = hashlib.sha256()

    def take(self, block: bytes) -> None:
        self._hash.update(block)
        if not self._assembly.adopted:
            self._assembly._write_stream(self._at, memoryview(block))
        self._at += len(block)

    def close(self) -> bytes:
        """The shard is complete: it is ours, hence verified. Returns its SHA-256."""
        self._assembly._record(self._index, self._assembly.layout.shard_size(self._index), self._hash.digest())
        return self._hash.digest()
