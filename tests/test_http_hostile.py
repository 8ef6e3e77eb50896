"""A node on a real port lives on whatever bytes it is sent, and says what was wrong with them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import aiohttp
import pytest

from refimpl.messages import PREFIX, Message, encode, wire
from refimpl.world import Refused
from refimpl.worlds.http import SOURCE_HEADER, HttpFabric, HttpWorld


@wire
@dataclass(frozen=True)
class Knock(Message):
    text: str


FRAME = encode(Knock("hello"))


def serving(fabric: HttpFabric) -> HttpWorld:
    node = fabric.node("target")

    async def back(source: str, message: Knock) -> Message:
        return message

    node.serve({Knock: back})
    return node


async def raw(url: str, data: bytes) -> bytes:
    """Send bytes to the port as they are, and read what comes back until the peer closes or falls silent."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await writer.drain()
    writer.write_eof()
    try:
        return await asyncio.wait_for(reader.read(), 5)
    finally:
        writer.close()


async def post(url: str, body: bytes, source: str = "stranger") -> tuple[int, str]:
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{url}/call", data=body, headers={SOURCE_HEADER: source}) as response,
    ):
        return response.status, await response.text()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "only 0 came"),
        (b"short", "only 5 came"),
        (b"x" * 5000, "a frame starts with b'ARM1'"),
        (FRAME[:-1], f"frame ends after {len(FRAME) - 1} of {len(FRAME)} bytes"),
        (FRAME + b"!", f"bytes follow a frame of {len(FRAME)} bytes"),
        (PREFIX.pack(b"ARM1", 8, 0) + b"\x04\0\0\0Nope", "unknown message type 'Nope'"),
        (PREFIX.pack(b"ARM1", 16, 1 << 40), "at most 65536 were expected"),
        (encode(Knock("y" * 70_000)), "at most 65536 were expected"),
    ],
)
def test_bad_bodies_are_refused_with_a_reason_and_the_node_lives_on(body: bytes, reason: str) -> None:
    fabric = HttpFabric(frame_bytes_max=1 << 16)
    target, caller = serving(fabric), fabric.node("caller")

    async def main() -> None:
        status, text = await post(fabric.book["target"], body)
        assert status == 400 and reason in text, (status, text)
        assert await caller.call("target", Knock("still there"), 20) == Knock("still there")

    fabric.run(main())
    assert not fabric.failures and target.alive is False  # closed by the end of the run


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /call HTTP/1.1\r\nHost: x\r\nContent-Length: 99999\r\n\r\ntoo little",
        b"POST /call HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /../../etc/passwd HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n",
        b"A" * 20_000,
        FRAME,
    ],
)
def test_what_is_not_even_http_does_not_stop_the_node(data: bytes) -> None:
    fabric = HttpFabric()
    serving(fabric)
    caller = fabric.node("caller")

    async def main() -> None:
        answer = await raw(fabric.book["target"], data)
        assert b"200 OK" not in answer
        assert await caller.call("target", Knock("still there"), 20) == Knock("still there")

    fabric.run(main())


def test_a_caller_without_a_name_is_refused() -> None:
    fabric = HttpFabric()
    serving(fabric)
    fabric.node("caller")

    async def main() -> None:
        for name in ("", "n" * 300):
            status, text = await post(fabric.book["target"], FRAME, source=name)
            assert status == 400 and SOURCE_HEADER in text

    fabric.run(main())


def test_a_bad_reply_is_refused_by_the_caller() -> None:
    fabric = HttpFabric(frame_bytes_max=1 << 16)
    node, caller = fabric.node("target"), fabric.node("caller")

    async def too_much(source: str, message: Knock) -> Message:
        return Knock("z" * 70_000)

    node.serve({Knock: too_much})

    async def main() -> None:
        with pytest.raises(Refused, match="sent a bad reply: frame of 70"):
            await caller.call("target", Knock("give"), 20)

    fabric.run(main())
