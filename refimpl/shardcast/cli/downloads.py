"""Shards as plain HTTP downloads: `GET /shard/VERSION/INDEX` with a range, sent from the file, received into place."""

from __future__ import annotations

import re
from functools import partial

from refimpl.messages import Blob
from refimpl.shardcast.carry import NotYet, Take, WrongSize
from refimpl.shardcast.disk import StoreError
from refimpl.shardcast.disk_store import DiskShelf
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.messages import AskShard
from refimpl.shardcast.serving import ShardServer
from refimpl.world import Refused
from refimpl.worlds.files import NOT_YET, FileReceiver, Missing, Offer, Opened, Reader, WrongLength, serve_files
from refimpl.worlds.http import HttpWorld

PREFIX = "/shard"
_NAME = re.compile(r"([0-9a-f]{64})/(0|[1-9][0-9]{0,5})")


def serve_downloads(world: HttpWorld, server: ShardServer) -> None:
    """Offer the server's shards for download. Call before the world listens."""

    async def lookup(reader: Reader, name: str) -> Offer:
        match = _NAME.fullmatch(name)
        if match is None:
            raise Missing(404, "a shard is named by its version's id and its index")
        index = int(match[2])
        try:
            hoard = await server.find(reader.name, match[1], index, reader.address)
        except Refused as error:
            raise Missing(410, error.reason) from error
        if hoard is None:
            raise Missing(NOT_YET, f"shard {index} is not here yet")
        return Offer(
            size_bytes=hoard.header.layout.shard_size(index),
            open=partial(open_shard, hoard, index),
            transfer=lambda: server.transfer(reader.name, reader.address),
            pay=lambda size: server.pay(reader.name, size, reader.address),
            drips=server.drips,
        )

    serve_files(world, PREFIX, lookup)


def open_shard(hoard: Hoard, index: int, offset: int, size: int) -> list[Opened]:
    """The files that hold these bytes. Raises Missing when the version has gone since it was looked up."""
    assert isinstance(hoard.shelf, DiskShelf)
    try:
        return hoard.shelf.open(index, offset, size)
    except StoreError as error:
        raise Missing(410, str(error)) from error


class DownloadCarrier:
    """`carry.Carrier` over such downloads."""

    def __init__(self, receiver: FileReceiver) -> None:
        self._receiver = receiver

    async def fetch(self, relay: str, ask: AskShard, take: Take) -> None:
        path = f"{PREFIX}/{ask.header_id}/{ask.index}"

        def taken(view: memoryview) -> bool:
            return take(Blob(len(view), "", view))

        try:
            status = await self._receiver.get(relay, path, ask.offset, ask.size, taken)
        except WrongLength as error:
            raise WrongSize(str(error)) from error
        if status == NOT_YET:
            raise NotYet
        if status != 206:
            raise Refused(f"{relay} has no such shard (any more)")
