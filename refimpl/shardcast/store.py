"""A node's versions on disk: found again after a restart, served, set aside when bad, removed without drama.

What is visible under its final name is complete and was verified. Everything else is hidden (`.partial-`, `.trash-`,
`.quarantine`) and may be cleaned at any time. Clean-up never raises: it says what it could not do, and tries again the
next time.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from refimpl.shardcast.assembly import MANIFEST_NAME, Assembly
from refimpl.shardcast.disk import PARTIAL, StoreError, read_blocks
from refimpl.shardcast.document import ManifestError
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import MANIFEST_BYTES_MAX, Header, Manifest, Verify

TRASH = ".trash-"
QUARANTINE = ".quarantine"
QUARANTINED_MAX = 3


Reader = Callable[[int, int], memoryview]
"""`read(offset, size)`: these bytes of a version, until it is called again in the same thread."""


class FilePart(NamedTuple):
    """Bytes [offset, offset + size) of a file: what a server hands to the system's sendfile."""

    path: Path
    offset: int
    size: int


def reader_of(paths: Sequence[Path], layout: Layout) -> Reader:
    """Reads these files as one stream, into one buffer per thread: fresh memory costs more than what is put into it."""
    buffers = threading.local()

    def read(offset: int, size: int) -> memoryview:
        if len(getattr(buffers, "bytes", b"")) < size:
            buffers.bytes = bytearray(size)
        view, at = memoryview(buffers.bytes)[:size], 0
        for piece in layout.pieces(offset, size):
            with open(paths[piece.file], "rb", buffering=0) as file:
                at += os.preadv(file.fileno(), [view[at : at + piece.size]], piece.offset)
        if at != size:
            raise StoreError(f"{paths[0].parent} gave {at} of {size} bytes: a file is shorter than it was")
        return view

    return read


@dataclass(frozen=True)
class Problem:
    """Something that clean-up could not do, or had to set aside."""

    path: Path
    reason: str


class VersionStore:
    """All versions of one run under `root`."""

    def __init__(self, root: Path, *, reserve_bytes: int = 0) -> None:
        self.root, self.reserve_bytes = root, reserve_bytes
        root.mkdir(parents=True, exist_ok=True)

    def load(self, verify: Verify, origin: str) -> tuple[list[Manifest], list[Problem]]:
        """What is here from before, oldest first. A folder that is not what its signed manifest says is set aside."""
        found, problems = [], []
        for folder in sorted(self.root.glob("v*")):
            try:
                found.append(self._load_one(folder, verify, origin))
            except (OSError, ManifestError, StoreError) as error:
                problems.append(Problem(folder, str(error)))
                self.quarantine(folder, str(error))
        found.sort(key=lambda manifest: (manifest.version, manifest.header.is_increment))
        return found, problems

    def begin(self, header: Header) -> Assembly:
        """Start or resume a version. Raises DiskFull before anything is fetched when it would not fit."""
        return Assembly(self.root, header, reserve_bytes=self.reserve_bytes)

    def folder(self, manifest: Manifest) -> Path:
        return self.root / manifest.label

    def holds(self, manifest: Manifest) -> bool:
        return self.folder(manifest).is_dir()

    def parts(self, manifest: Manifest, index: int, offset: int = 0, size: int | None = None) -> list[FilePart]:
        """Where the bytes of a shard lie. Names come from the signed manifest only, never from a request."""
        layout = manifest.layout
        length = layout.shard_size(index)
        size = length - offset if size is None else size
        if offset < 0 or size < 0 or offset + size > length:
            raise StoreError(f"bytes {offset}..{offset + size} lie outside shard {index} of {length} bytes")
        pieces = layout.pieces(layout.shard_offset(index) + offset, size)
        return [FilePart(self.folder(manifest) / layout.names[p.file], p.offset, p.size) for p in pieces]

    def read(self, manifest: Manifest, offset: int, size: int) -> bytes:
        """Bytes of the version as one stream: the base that an increment is applied to."""
        blocks = []
        for piece in manifest.layout.pieces(offset, size):
            with open(self.folder(manifest) / manifest.layout.names[piece.file], "rb") as file:
                blocks.append(os.pread(file.fileno(), piece.size, piece.offset))
        data = b"".join(blocks)
        if len(data) != size:
            raise StoreError(f"version {manifest.version} on disk is shorter than its manifest says")
        return data

    def reader(self, manifest: Manifest) -> Reader:
        """The same for who reads much."""
        folder = self.folder(manifest)
        return reader_of([folder / name for name in manifest.layout.names], manifest.layout)

    def bad_shards(self, manifest: Manifest) -> list[int]:
        """Read everything again and name the shards that are not what was signed (disks rot)."""
        bad = []
        for index, expected in enumerate(manifest.shards_sha256):
            digest = hashlib.sha256()
            try:
                for path, offset, size in self.parts(manifest, index):
                    with open(path, "rb") as file:
                        for block in read_blocks(file.fileno(), offset, size):
                            digest.update(block)
            except (OSError, StoreError):  # unreadable, or too short
                digest = hashlib.sha256()
            if digest.digest() != expected:
                bad.append(index)
        return bad

    def quarantine(self, folder: Path, reason: str) -> Path | None:
        """Get a bad version off its final path, and keep it (the last three) with the reason. Never raises."""
        ward = self.root / QUARANTINE
        try:
            ward.mkdir(exist_ok=True)
            taken = [int(p.name.split("-", 1)[0]) for p in ward.iterdir() if p.name.split("-", 1)[0].isdigit()]
            number = max(taken, default=0) + 1
            target = ward / f"{number:06d}-{folder.name}"
            os.rename(folder, target)
            (ward / f"{target.name}.txt").write_text(reason + "\n")
            kept = sorted(p for p in ward.iterdir() if p.is_dir())
            for old in kept[:-QUARANTINED_MAX]:
                (ward / f"{old.name}.txt").unlink(missing_ok=True)
                _delete(old)
            return target
        except OSError:
            self._discard(folder)
            return None

    def remove(self, manifest: Manifest) -> list[Problem]:
        """Off its final path at once, its space soon. Never raises."""
        return self._discard(self.folder(manifest))

    def clean(self, keep: Iterable[Header] = ()) -> list[Problem]:
        """Remove what killed processes left, but not what another process is at work on, nor the unfinished versions in
        `keep` (they are resumed). Never raises."""
        kept = {f"{PARTIAL}{header.id[:32]}" for header in keep}
        problems: list[Problem] = []
        try:
            entries = sorted(self.root.iterdir())
        except OSError as error:
            return [Problem(self.root, str(error))]
        for path in entries:
            if path.name.startswith(TRASH):
                problems += _delete(path)
            elif path.name.startswith(PARTIAL) and path.name not in kept:
                problems += _delete_unless_in_use(path)
        return problems

    # ------------------------------------------------------------------------------------------------ inside
    def _load_one(self, folder: Path, verify: Verify, origin: str) -> Manifest:
        with open(folder / MANIFEST_NAME, "rb") as file:
            manifest = Manifest.decode(file.read(MANIFEST_BYTES_MAX + 1), verify, origin)
        if manifest.label != folder.name:
            raise StoreError(f"{folder.name} holds the manifest of {manifest.label}")
        for name, size in zip(manifest.layout.names, manifest.layout.sizes_bytes, strict=True):
            path = folder / name
            if path.is_symlink() or not path.is_file() or path.stat().st_size != size:
                raise StoreError(f"{folder.name}/{name} is not the file of {size} bytes that its manifest names")
        return manifest

    def _discard(self, folder: Path) -> list[Problem]:
        hidden = self.root / f"{TRASH}{folder.name}"
        try:
            if hidden.exists():
                _delete(hidden)
            os.rename(folder, hidden)
        except FileNotFoundError:
            return []
        except OSError as error:
            return [Problem(folder, str(error))]
        return _delete(hidden)


def _delete(path: Path) -> list[Problem]:
    """Remove a file or a folder with all that is in it; go on after what cannot be removed, and name it."""
    problems: list[Problem] = []

    def attempt(remove: Callable[[str], None], where: str) -> None:
        try:
            remove(where)
        except FileNotFoundError:
            pass
        except OSError as error:
            problems.append(Problem(Path(where), str(error)))

    if path.is_dir() and not path.is_symlink():
        for folder, folders, files in os.walk(path, topdown=False):
            for name in files:
                attempt(os.unlink, os.path.join(folder, name))
            for name in folders:
                where = os.path.join(folder, name)
                attempt(os.unlink if os.path.islink(where) else os.rmdir, where)
        attempt(os.rmdir, str(path))
    else:
        attempt(os.unlink, str(path))
    return problems


def _delete_unless_in_use(partial: Path) -> list[Problem]:
    """A process that assembles holds the lock on its progress file; we hold it while we delete."""
    try:
        with open(partial / "progress", "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return _delete(partial)
    except BlockingIOError:
        return []
    except OSError:  # no progress file: killed before it was made
        return _delete(partial)
