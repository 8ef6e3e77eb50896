"""What a dishonest relay may do: to a shard on its way out (one function, and one line in `SPOILS`), or to any of its
answers (`TAMPERS`: handlers that are served instead of the honest ones). And what a greedy client may."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable

from refimpl.messages import Blob, Message
from refimpl.shardcast.messages import AskNews, AskShard, News, Piece
from refimpl.shardcast.serving import ShardServer
from refimpl.world import CallError, Handler, Refused, World


def flipped_bit(index: int, blob: Blob) -> Blob:
    """Changes one bit of every shard."""
    if blob.data is None:
        return dataclasses.replace(blob, content_id=hashlib.sha256(blob.content_id.encode()).hexdigest())
    raw = bytearray(blob.data)
    raw[len(raw) // 2] ^= 1
    return Blob(len(raw), blob.content_id, bytes(raw))


def truncated(index: int, blob: Blob) -> Blob:
    """Leaves out the last byte."""
    data = None if blob.data is None else bytes(blob.data[:-1])
    return Blob(blob.size_bytes - 1, blob.content_id, data)


SPOILS: dict[str, Callable[[int, Blob], Blob]] = {"flipped-bit": flipped_bit, "truncated": truncated}


# ------------------------------------------------------------------------------------------- more than a wrong shard
Handlers = dict[type[Message], Handler]


def equivocates(server: ShardServer) -> Handlers:
    """Right bytes for half of those who ask, wrong ones for the others (by the last letter of their name)."""

    async def give(source: str, message: AskShard) -> Message:
        reply = await server.give(source, message)
        if isinstance(reply, Piece) and reply.here and ord(source[-1]) % 2:
            return Piece(True, flipped_bit(message.index, reply.blob))
        return reply

    return {AskShard: give}


def stale_version(server: ShardServer) -> Handlers:
    """Knows of nothing after the first version that it had."""

    async def tell(source: str, message: AskNews) -> Message:
        first = min(server.hoards, default=-1)
        if message.version >= first:
            await server.world.sleep(min(message.patience_s, 60.0))
            return News(first, b"", (), b"")
        hoard = server.hoards[first]
        return News(first, hoard.opening, tuple(hoard.entries), hoard.manifest)

    return {AskNews: tell}


def lies_about_index(server: ShardServer) -> Handlers:
    """Lists everything and has nothing: each shard is "on its way"."""

    async def give(source: str, message: AskShard) -> Message:
        return Piece(False, Blob(0, "", None if server.config.virtual else b""))

    return {AskShard: give}


def forged_version(server: ShardServer) -> Handlers:
    """Announces a version that the origin never made, by altering what it signed for another."""

    async def tell(source: str, message: AskNews) -> Message:
        news = await server.tell(source, message)
        if not isinstance(news, News) or not server.hoards:
            return news
        number = max(news.version, message.version) + 1
        forged = (news.opening or server.hoards[server.newest].opening).replace(
            f'"version":{server.newest}'.encode(), f'"version":{number}'.encode()
        )
        return News(number, forged, (), b"")

    return {AskNews: tell}


def slow_drip(server: ShardServer) -> Handlers:
    """Never breaks off, and never gets done: seconds for each piece."""

    async def give(source: str, message: AskShard) -> Message:
        await server.world.sleep(3.0)
        return await server.give(source, message)

    return {AskShard: give}


TAMPERS: dict[str, Callable[[ShardServer], Handlers]] = {
    "equivocates": equivocates,
    "stale-version": stale_version,
    "forged-version": forged_version,
    "lies-about-index": lies_about_index,
    "slow-drip": slow_drip,
}


async def flood(world: World, relay: str, header_id: str, size_bytes: int, requests: int) -> int:
    """A client that asks for the first shard `requests` times at once; returns how often it was refused."""
    refused = 0

    async def ask() -> None:
        nonlocal refused
        try:
            await world.call(relay, AskShard(header_id, 0, 0, size_bytes), timeout_s=600.0)
        except Refused:
            refused += 1
        except CallError:
            pass

    await world.gather(*(ask() for _ in range(requests)))
    return refused
