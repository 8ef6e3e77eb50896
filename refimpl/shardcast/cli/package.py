"""The published package's layout over HTTP: its clients pull from our relays, and ours from its (`compat.py`).

    GET /distribution.txt   /data1.bin   /v{N}/shard_{i:05d}.bin

A version is listed here once it is whole and verified, never before. In the other direction there is one checksum for
the whole file and nothing for a shard, so a relay that spoils one cannot be named; the file is verified all the same
before it appears. What came is kept when a transfer breaks off: whole shards are not fetched again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from refimpl.shardcast.choice import MovingAverage
from refimpl.shardcast.cli.downloads import open_shard
from refimpl.shardcast.compat import (
    CHECKSUMS,
    DISTRIBUTION_BYTES_MAX,
    DISTRIBUTION_NAME,
    PROBE_NAME,
    CompatError,
    Listed,
    listed,
    parse_distribution,
    parse_shard_path,
    render_distribution,
    shard_path,
)
from refimpl.shardcast.disk import PARTIAL, StoreError, check_space, full_disk_named, read_blocks
from refimpl.shardcast.disk_store import DiskShelf
from refimpl.shardcast.fetch import Fetch, FetchPlan
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.layout import SHARD_BYTES_MAX
from refimpl.shardcast.serving import ShardServer
from refimpl.work import Hash
from refimpl.world import CallError, World
from refimpl.worlds.files import FileReceiver, Missing, Offer, Opened, Reader, WrongLength, serve_files
from refimpl.worlds.http import HttpWorld

PROBE_BYTES = 1 << 16


class PackageServer:
    """Serves what a `ShardServer` holds in the package's layout as well."""

    def __init__(self, world: HttpWorld, server: ShardServer, folder: Path, checksum: str) -> None:
        self._world, self._server, self._folder, self._checksum = world, server, folder, checksum
        self._listed: dict[int, Listed] = {}
        self._at_work: set[int] = set()
        (folder / PROBE_NAME).write_bytes(os.urandom(PROBE_BYTES))
        self._write_index()
        serve_files(world, "", self._lookup)

    def look(self) -> None:
        """Something came or went: list what is whole, forget what is gone."""
        for version in set(self._listed) - set(self._server.hoards):
            del self._listed[version]
            self._write_index()
        for version, hoard in self._server.hoards.items():
            if hoard.published and version not in self._listed and version not in self._at_work:
                self._at_work.add(version)
                self._world.spawn(self._list(version, hoard), "list")

    async def _list(self, version: int, hoard: Hoard) -> None:
        layout = hoard.header.layout
        # a folder has no place in that layout; a version may be removed, or its disk fail, while it is read
        with contextlib.suppress(CompatError, StoreError, OSError):
            listed(layout, "0" * 64)
            work = Hash(size_bytes=layout.size_bytes)
            checksum = await self._world.compute(work, partial(self._whole, hoard))
            if self._server.hoards.get(version) is hoard:
                self._listed[version] = listed(layout, checksum)
                self._write_index()

    def _whole(self, hoard: Hoard) -> str:
        assert isinstance(hoard.shelf, DiskShelf)
        hasher = CHECKSUMS[self._checksum]()
        for index in range(hoard.header.layout.shard_count):
            for file, offset, size in hoard.shelf.open(index, 0, hoard.header.layout.shard_size(index)):
                with file:
                    for block in read_blocks(file.fileno(), offset, size):
                        hasher.update(block)
        return hasher.hexdigest()

    def _write_index(self) -> None:
        """By rename: a reader sees the old index or the new one."""
        hidden = self._folder / f"{PARTIAL}{DISTRIBUTION_NAME}"
        hidden.write_bytes(render_distribution(self._listed))
        os.replace(hidden, self._folder / DISTRIBUTION_NAME)

    async def _lookup(self, reader: Reader, name: str) -> Offer:
        if name in (DISTRIBUTION_NAME, PROBE_NAME):
            path = self._folder / name
            size = path.stat().st_size
            return self._offer(reader, size, lambda offset, count: [(open(path, "rb"), offset, count)])
        found = parse_shard_path(name)
        if found is None:
            raise Missing(404, "there is no such name")
        version, index = found
        hoard = self._server.hoards.get(version)
        if version not in self._listed or hoard is None or index >= hoard.header.layout.shard_count:
            raise Missing(404, "there is no such shard")
        size = hoard.header.layout.shard_size(index)
        return self._offer(reader, size, partial(open_shard, hoard, index))

    def _offer(self, reader: Reader, size: int, opened: Callable[[int, int], Sequence[Opened]]) -> Offer:
        def pay(count: int) -> Awaitable[None]:
            return self._server.pay(reader.name, count, reader.address)

        def transfer() -> AbstractContextManager[None]:
            return self._server.transfer(reader.name, reader.address)

        return Offer(size, opened, transfer, pay, self._server.drips)


@dataclass(frozen=True)
class Pulled:
    """A version of the package's, verified and in place."""

    version: int
    size_bytes: int
    checksum: str


class PackagePuller:
    """Our client at the package's servers."""

    def __init__(
        self,
        world: World,
        receiver: FileReceiver,
        sources: Sequence[str],
        out: Path,
        *,
        checksum: str,
    ) -> None:
        self._world, self._receiver, self._sources, self._out = world, receiver, list(sources), out
        self._checksum = checksum
        self.policy = MovingAverage()
        self.trouble = ""  # the last thing that kept a shard from coming
        self._furthest: dict[int, int] = {}  # bytes that ever came of each shard, in one transfer
        self._wake = world.signal()

    @property
    def progress(self) -> int:
        """Rises whenever something comes that never came before, bytes."""
        return sum(self._furthest.copy().values())

    async def newest(self) -> tuple[int, Listed]:
        """The newest version on any of the servers. Raises CallError or CompatError when none lists one."""
        found: dict[int, Listed] = {}
        reason: Exception = CompatError("no server lists a version")
        for source in self._sources:
            raw = bytearray()

            def take(piece: memoryview, raw: bytearray = raw) -> bool:
                raw.extend(piece)
                return True

            try:
                path = f"/{DISTRIBUTION_NAME}"
                if await self._receiver.get_whole(source, path, take, bytes_max=DISTRIBUTION_BYTES_MAX) == 200:
                    found |= parse_distribution(bytes(raw))
            except (CallError, CompatError, WrongLength) as error:
                reason = error
        if not found:
            raise reason
        return max(found), found[max(found)]

    async def pull(self, version: int, what: Listed) -> Pulled:
        """Fetch, verify, put in place. Raises CompatError when the whole is not what the index says (it is dropped),
        DiskFull."""
        folder = self._out.parent / f"{PARTIAL}package-{what.checksum[:32]}"
        folder.mkdir(parents=True, exist_ok=True)
        await self._fetch_all(folder, version, what)
        size, found = await self._world.compute(Hash(size_bytes=0), partial(self._join, folder, what))
        if found != what.checksum:
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            raise CompatError(f"version {version} has checksum {found[:16]}…, the index says {what.checksum[:16]}…")
        os.replace(folder / "joined", self._out)
        folder.rmdir()
        return Pulled(version, size, found)

    async def _fetch_all(self, folder: Path, version: int, what: Listed) -> None:
        plan = FetchPlan(self.policy)
        missing = [index for index in range(what.shard_count) if not (folder / f"{index:06d}").exists()]
        plan.offer((index, 50_000_000, 0) for index in missing)  # their size is not known before they come
        while True:
            wake = self._wake = self._world.signal()
            step = plan.next(self._world.now(), self._world.rng, self._sources)
            if step is None:
                return
            if isinstance(step, Fetch):
                self._world.spawn(self._fetch(folder, version, plan, step), "fetch")
            else:
                await wake.wait(max(0.01, min(1.0, step.until_s - self._world.now())))

    async def _fetch(self, folder: Path, version: int, plan: FetchPlan, fetch: Fetch) -> None:
        hidden = folder / f"{PARTIAL}{fetch.index:06d}-{fetch.ticket}"
        received = 0
        try:
            with full_disk_named(folder), open(hidden, "wb", buffering=0) as file:

                def take(piece: memoryview) -> bool:
                    nonlocal received
                    received += file.write(piece)
                    self._furthest[fetch.index] = max(received, self._furthest.get(fetch.index, 0))
                    return True

                path = f"/{shard_path(version, fetch.index)}"
                status = await self._receiver.get_whole(fetch.relay, path, take, bytes_max=SHARD_BYTES_MAX)
            if status == 200:
                os.replace(hidden, folder / f"{fetch.index:06d}")
                plan.progress(fetch.ticket, received, self._world.now())
                plan.arrived(fetch.ticket, self._world.now())
            else:  # it lists the version, and has it no more
                self.trouble = f"{fetch.relay} answers {status} for {path}"
                plan.failed(fetch.ticket, self._world.now(), self._world.rng, offset=0)
        except (CallError, WrongLength) as error:
            self.trouble = str(error)
            plan.failed(fetch.ticket, self._world.now(), self._world.rng, offset=0)
        finally:
            hidden.unlink(missing_ok=True)
        self._wake.set()

    def _join(self, folder: Path, what: Listed) -> tuple[int, str]:
        """All shards in one file, hashed on the way."""
        hasher, size = CHECKSUMS[self._checksum](), 0
        check_space(folder, sum((folder / f"{index:06d}").stat().st_size for index in range(what.shard_count)))
        with full_disk_named(folder), open(folder / "joined", "wb") as joined:
            for index in range(what.shard_count):
                shard = folder / f"{index:06d}"
                with open(shard, "rb") as file:
                    for block in read_blocks(file.fileno(), 0, shard.stat().st_size):
                        hasher.update(block)
                        size += joined.write(block)
        for index in range(what.shard_count):
            (folder / f"{index:06d}").unlink()
        return size, hasher.hexdigest()
