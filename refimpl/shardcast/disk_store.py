"""The roles' store on a disk: bounded memory, resumed by shard and byte, published by rename, checked after a reboot.

A version that is published without waiting for the disk (`durable=False`) survives a killed process, but a power cut
may take some of its last bytes. It is therefore marked with the boot that it was written in, and read and hashed again
when the machine has started anew since: what is wrong then is set aside, not served.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from refimpl.durable import sync_folder, write_whole
from refimpl.messages import Blob
from refimpl.shardcast.assembly import Assembly
from refimpl.shardcast.disk import StoreError, boot_id, full_disk_named, read_blocks
from refimpl.shardcast.document import ManifestError
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Header, Manifest, Stretch, Verify
from refimpl.shardcast.shelf import INCREMENT_NAME, CutShelf, Shelf, increment_layout
from refimpl.shardcast.store import Problem, VersionStore, reader_of
from refimpl.shardcast.workers import cores, in_order

if TYPE_CHECKING:
    from refimpl.shardcast.increment import Comparison

BOOT_NAME = ".shardcast.boot"
COUNTER_NAME = ".shardcast.counter"
ORDER_NAME = ".shardcast.order"
SCRATCH = ".partial-increment-"
DURABLE = b"durable"

Opened = tuple[BinaryIO, int, int]
"""A file that was opened for reading, and bytes [offset, offset + size) of it."""


class DiskShelf:
    """One version in files: an `Assembly` while it grows, a folder once it is published.

    Transfers write from several threads at once. Files are closed when the last of them has left (a late writer must
    not find its descriptor in use for another file)."""

    def __init__(
        self, store: VersionStore, header: Header, assembly: Assembly | None, *, durable: bool = False
    ) -> None:
        self.header, self._store, self._durable = header, store, durable
        self._assembly = assembly
        self.resumed = assembly is not None and assembly.received_bytes() > 0
        self._manifest: Manifest | None = None
        self._lock, self._moving = threading.Lock(), threading.Lock()
        self._locks = [threading.Lock() for _ in range(header.layout.shard_count)] if assembly else []
        self._inside = 0
        self._close: Callable[[], object] | None = None

    @classmethod
    def published(cls, store: VersionStore, manifest: Manifest) -> DiskShelf:
        shelf = cls(store, manifest.header, None)
        shelf._manifest = manifest
        return shelf

    @property
    def grows(self) -> bool:
        return self._assembly is not None

    def has(self, index: int) -> bool:
        assembly = self._assembly
        return self._manifest is not None if assembly is None else assembly.verified(index)

    def received(self, index: int) -> int:
        assembly = self._assembly
        if assembly is None:
            return self.header.layout.shard_size(index) if self._manifest else 0
        return assembly.received(index)

    def write(self, index: int, offset: int, piece: Blob, source: str) -> int:
        if piece.data is None:
            raise StoreError("a virtual blob has no bytes to write")
        with self._growing() as assembly:
            if assembly is None:
                return 0
            with self._locks[index]:
                return assembly.writer(index).write(piece.data, source, offset)

    def check(self, index: int, sha256: bytes) -> None:
        with self._growing() as assembly:
            if assembly is not None:
                with self._locks[index]:
                    assembly.writer(index).finish(sha256)

    def agrees(self, index: int, sha256: bytes) -> bool:
        with self._growing() as assembly:
            if assembly is None:
                return self._manifest is not None and self._manifest.shards_sha256[index] == sha256
            if assembly.sha256(index) == sha256:
                return True
            with self._locks[index]:
                assembly.reset(index)
            return False

    def read(self, index: int, offset: int, size: int) -> Blob:
        blocks: list[bytes] = []
        for file, start, length in self.open(index, offset, size):
            with file:
                blocks += read_blocks(file.fileno(), start, length)
        data = b"".join(blocks)
        return Blob(len(data), "", data)

    def open(self, index: int, offset: int, size: int) -> list[Opened]:
        """The files that hold bytes of a shard, to be closed by who reads them. Names come from the signed header,
        never from a request; none is looked for while the version moves to its final path. Raises StoreError when the
        version is not here any more."""
        layout = self.header.layout
        size = min(size, layout.shard_size(index) - offset)
        pieces = layout.pieces(layout.shard_offset(index) + offset, size)
        opened: list[Opened] = []
        with self._moving:
            assembly = self._assembly
            if assembly is None and self._manifest is None:
                raise StoreError(f"version {self.header.version} was given up")
            folder = self._store.folder(self._manifest) if assembly is None else assembly.payload  # type: ignore[arg-type]
            try:
                for piece in pieces:
                    file = open(folder / layout.names[piece.file], "rb")  # noqa: SIM115
                    opened.append((file, piece.offset, piece.size))
            except FileNotFoundError as error:
                for done, _, _ in opened:
                    done.close()
                raise StoreError(f"version {self.header.version} was removed") from error
        return opened

    def reset(self, index: int) -> None:
        with self._growing() as assembly:
            if assembly is not None and not assembly.verified(index):
                with self._locks[index]:
                    assembly.reset(index)

    def publish(self, manifest: Manifest) -> None:
        with self._growing() as assembly:
            if assembly is None:
                return
            assembly.mark(BOOT_NAME, DURABLE if self._durable else boot_id())
            assembly.prepare(manifest, durable=self._durable)
            with self._moving:
                assembly.move(manifest)
                self._manifest, self._assembly = manifest, None
            if self._durable:
                sync_folder(assembly.root)
            self._close = assembly.end

    def abandon(self) -> None:
        with self._lock:
            assembly, self._assembly = self._assembly, None
            if assembly is None:
                return
            self._close = assembly.abandon
            if self._inside == 0:
                self._close_now()

    @contextmanager
    def _growing(self) -> Iterator[Assembly | None]:
        """The assembly, kept open for as long as we are inside; None when the version is published."""
        with self._lock:
            assembly = self._assembly
            if assembly is None and self._manifest is None:
                raise StoreError(f"version {self.header.version} was given up")
            self._inside += 1
        try:
            yield assembly
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._close_now()

    def _close_now(self) -> None:
        close, self._close = self._close, None
        if close is not None:
            close()


class CutDiskShelf(DiskShelf):
    """The origin's version: its files are read once, hashed, and copied or linked on the way."""

    def __init__(
        self,
        store: VersionStore,
        header: Header,
        assembly: Assembly,
        sources: Sequence[Path],
        *,
        durable: bool,
        workers: int,
    ) -> None:
        super().__init__(store, header, assembly, durable=durable)
        self._sources, self._workers = sources, workers
        self.content = reader_of(sources, header.layout)  # the version's stream, whether or not it is cut by now

    def cut(self, indices: Sequence[int]) -> list[bytes]:
        with self._growing() as assembly:
            assert assembly is not None, "a published version is not cut again"
            return list(in_order(partial(self._cut, assembly), indices, min(self._workers, len(indices))))

    def _cut(self, assembly: Assembly, index: int) -> bytes:
        layout, cutter = self.header.layout, assembly.cutter(index)
        for piece in layout.pieces(layout.shard_offset(index), layout.shard_size(index)):
            with open(self._sources[piece.file], "rb", buffering=0) as file:
                for block in read_blocks(file.fileno(), piece.offset, piece.size):
                    cutter.take(block)
        return cutter.close()


class DiskStore:
    """All versions of one run under `root`. `link`: an origin's files are linked, not copied; they must then not be
    changed in place afterwards. `workers`: threads that cut, compare and apply (None: as many as there are cores).
    `counter`: a file elsewhere that knows the last version number as well, for an origin that loses its store."""

    def __init__(
        self,
        root: Path,
        *,
        reserve_bytes: int = 0,
        durable: bool = False,
        link: bool = False,
        workers: int | None = None,
        counter: Path | None = None,
    ) -> None:
        self._counters = [root / COUNTER_NAME, *([counter] if counter else [])]
        self.versions = VersionStore(root, reserve_bytes=reserve_bytes)
        self.durable, self.link, self.workers = durable, link, workers or cores()
        self._comparisons: dict[tuple[str, str], Comparison] = {}  # of the last target, by header ids
        self._shelves: dict[str, DiskShelf] = {}  # of what grows, by header id

    @property
    def root(self) -> Path:
        return self.versions.root

    def found(self, verify: Verify, origin: str) -> tuple[list[Manifest], list[Problem]]:
        """What is here from before, oldest first; after a reboot it is read and hashed again."""
        manifests, problems = self.versions.load(verify, origin)
        good = []
        for manifest in manifests:
            mark = self.versions.folder(manifest) / BOOT_NAME
            written = mark.read_bytes() if mark.is_file() else b""
            if written not in (DURABLE, boot_id()):
                bad = self.versions.bad_shards(manifest)
                if bad:
                    reason = f"after a reboot, shards {bad[:8]} are not what was signed"
                    problems.append(Problem(self.versions.folder(manifest), reason))
                    self.versions.quarantine(self.versions.folder(manifest), reason)
                    continue
                mark.write_bytes(boot_id())
            good.append(manifest)
        return good, problems

    def claim_version(self) -> int:
        last = max(_counted(path) for path in self._counters)
        for folder in self.root.glob("v*"):
            digits = folder.name[1:9]
            last = max(last, int(digits) if digits.isdigit() else 0)
        for path in self._counters:
            _count(path, last + 1)
        return last + 1

    def claim_order(self, number: int) -> bool:
        """Take an order to publish. False: this number, or a later one, was taken before, perhaps by a process that has
        ended since."""
        if number <= _counted(self.root / ORDER_NAME):
            return False
        _count(self.root / ORDER_NAME, number)
        return True

    def begin(self, header: Header) -> DiskShelf:
        shelf = self._shelves.get(header.id)
        if shelf is None or not shelf.grows:
            shelf = DiskShelf(self.versions, header, self.versions.begin(header), durable=self.durable)
            self._shelves[header.id] = shelf
        return shelf

    def adopt(self, header: Header, content: Any) -> CutDiskShelf:
        sources = [Path(path) for path in content]
        for source, size in zip(sources, header.layout.sizes_bytes, strict=True):
            if source.stat().st_size != size:
                raise StoreError(f"{source} has {source.stat().st_size} bytes, {size} were announced")
        scratch = sources[0].name.startswith(SCRATCH)
        if self.link or scratch:
            assembly = Assembly(self.root, header, sources=sources)
            if scratch:
                sources[0].unlink()
                sources = [assembly.payload / INCREMENT_NAME]
        else:
            assembly = self.versions.begin(header)
        return CutDiskShelf(self.versions, header, assembly, sources, durable=self.durable, workers=self.workers)

    def shelf(self, manifest: Manifest) -> DiskShelf:
        return DiskShelf.published(self.versions, manifest)

    def remove(self, manifest: Manifest) -> list[str]:
        self._shelves.pop(manifest.header.id, None)
        return [f"{problem.path}: {problem.reason}" for problem in self.versions.remove(manifest)]

    def tidy(self) -> list[str]:
        return [f"{problem.path}: {problem.reason}" for problem in self.versions.clean()]

    def make_increments(
        self, base: Manifest, target: CutShelf, stretches: Sequence[Stretch], shard_bytes: int
    ) -> list[tuple[Layout, Any]]:
        assert isinstance(target, CutDiskShelf)
        comparison, made = self._comparison(base, target), []
        try:
            for stretch in stretches:
                path = self.root / f"{SCRATCH}{base.version}-{target.header.version}-{stretch.first}"
                made.append((increment_layout(comparison.write(stretch, path, self.workers), shard_bytes), [path]))
        except BaseException:
            for left in self.root.glob(f"{SCRATCH}{base.version}-{target.header.version}-*"):
                left.unlink(missing_ok=True)
            raise
        return made

    def _comparison(self, base: Manifest, target: CutDiskShelf) -> Comparison:
        """The plan is made once for all stretches of a target."""
        from refimpl.shardcast.increment import Comparison  # compiled code: a third of a process's start and memory

        key = (target.header.id, base.header.id)
        if key not in self._comparisons:
            self._comparisons = {k: known for k, known in self._comparisons.items() if k[0] == target.header.id}
            read_base = self.versions.reader(base)
            self._comparisons[key] = Comparison(read_base, base.layout, target.content, target.header.layout)
        return self._comparisons[key]

    def apply_increments(
        self, increments: Sequence[Manifest], base: Manifest, shelf: Shelf, sha256: Mapping[int, bytes]
    ) -> list[int]:
        from refimpl.shardcast.increment import Applier  # as above

        assert isinstance(shelf, DiskShelf)
        with shelf._growing() as assembly:
            if assembly is None:
                return []
            try:
                return Applier(self.versions, base, sha256, assembly, shelf._locks).apply(increments, self.workers)
            except FileNotFoundError as error:
                raise StoreError(f"{error.filename} was removed while it was read") from error


def _counted(path: Path) -> int:
    return int(path.read_text()) if path.is_file() else 0


def _count(path: Path, number: int) -> None:
    """On disk before anything follows from it."""
    with full_disk_named(path.parent):
        write_whole(path, str(number).encode(), path.with_name(f"{path.name}.new"))


def layout_of(path: Path, shard_bytes: int) -> tuple[Layout, list[Path]]:
    """A file, or a folder's files (not its subfolders, no hidden ones), as a version. Raises ValueError."""
    if path.is_dir():
        files = sorted(p for p in path.iterdir() if not p.name.startswith("."))
        for file in files:
            if not file.is_file():
                raise ValueError(f"{file} is no plain file; a checkpoint folder holds files only")
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(f"{path} does not exist")
    if not files or not any(file.stat().st_size for file in files):
        raise ValueError(f"{path} has nothing in it to broadcast")
    try:
        layout = Layout(
            names=tuple(file.name for file in files),
            sizes_bytes=tuple(file.stat().st_size for file in files),
            shard_bytes=shard_bytes,
        )
    except ManifestError as error:
        raise ValueError(f"{path}: {error}") from None
    return layout, files
