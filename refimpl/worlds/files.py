"""Bulk bytes by plain HTTP: ranges of files, sent without passing through this process, received straight into place.

    GET {prefix}/NAME        Range: bytes=A-B        ->  206 and exactly those bytes
    404 no such name   410 gone   416 no such range   425 not here yet   429 too much at once

Names are looked up by the node (`Lookup`); a path from a request never reaches the file system. The receiving side
trusts nothing that a header says: the caller says how many bytes it wants, and anything else is an error.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import re
import socket
import struct
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import urlsplit

from aiohttp import web

from refimpl.world import Refused, Timeout, Unreachable
from refimpl.worlds.http import NAME_LENGTH_MAX, SOURCE_HEADER, HttpWorld

SEND_BYTES = 1 << 20  # handed to sendfile at a time, at first
SEND_BYTES_MAX = 8 << 20  # and to a fast reader
RECEIVE_BYTES = 1 << 20
HAND_OVER_S = 0.25
"""What has come is handed on at least so often, so that a slow transfer is seen to go on."""
CONNECT_S = 10.0
NOT_YET = 425
_RANGE = re.compile(r"bytes=([0-9]{1,15})-([0-9]{0,15})")


Opened = tuple[BinaryIO, int, int]
"""A file that was opened for reading, and bytes [offset, offset + size) of it."""


class Missing(Exception):
    """Nothing to send. Takes the status that says why (404, 410, 425) and a sentence."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


@dataclass(frozen=True)
class Offer:
    """What a name stands for just now, and on what terms it is sent."""

    size_bytes: int
    open: Callable[[int, int], Sequence[Opened]]  # the files with bytes [offset, offset + size); may raise Missing
    transfer: Callable[[], AbstractContextManager[None]]  # entered for as long as it takes; may raise Refused
    pay: Callable[[int], Awaitable[None]]  # waits until so many bytes may be sent
    drips: Callable[[int, float], bool]  # (bytes, seconds) -> the reader is too slow to be served


TakeView = Callable[[memoryview], bool]
"""Keeps the next piece (it is only lent). False: no more is wanted."""


@dataclass(frozen=True)
class Reader:
    """Who asks: by its own word, and by the socket's."""

    name: str
    address: str


Lookup = Callable[[Reader, str], Awaitable[Offer]]
"""`await lookup(client, NAME)`. Raises Missing, or Refused for a client that takes too much."""


def serve_files(world: HttpWorld, prefix: str, lookup: Lookup) -> None:
    """Answer GET (and HEAD) below `prefix` from now on. Call before `world.start`."""

    async def answer(request: web.Request) -> web.StreamResponse:
        address = request.remote or "?"
        reader = Reader(request.headers.get(SOURCE_HEADER, "")[:NAME_LENGTH_MAX] or address, address)
        try:
            offer = await lookup(reader, request.match_info["name"])
            first, size, ranged = _asked_range(request.headers.get("Range"), offer.size_bytes)
            with offer.transfer():
                await offer.pay(size)
                return await _send(request, offer, first, size, ranged)
        except Missing as error:
            return web.Response(status=error.status, text=str(error))
        except Refused as error:
            return web.Response(status=429, text=error.reason)
        except ConnectionResetError:  # the reader has gone, or was cut off
            if request.transport is not None:
                request.transport.abort()
            return web.Response(status=499)

    world.application.router.add_get(prefix + "/{name:.+}", answer)


def _asked_range(header: str | None, size_bytes: int) -> tuple[int, int, bool]:
    """(first byte, number of bytes, whether a part was asked for). Raises Missing(416)."""
    if header is None:
        return 0, size_bytes, False
    match = _RANGE.fullmatch(header)
    if match is None:
        return 0, size_bytes, False  # several ranges, other units: all of it, as the standard allows
    first, last = int(match[1]), int(match[2]) if match[2] else size_bytes - 1
    last = min(last, size_bytes - 1)
    if first > last:
        raise Missing(416, f"bytes {header[6:40]} lie outside {size_bytes} bytes")
    return first, last - first + 1, True


async def _send(request: web.Request, offer: Offer, first: int, size: int, ranged: bool) -> web.StreamResponse:
    headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "Content-Length": str(size)}
    if ranged:
        headers["Content-Range"] = f"bytes {first}-{first + size - 1}/{offer.size_bytes}"
    response = web.StreamResponse(status=206 if ranged else 200, headers=headers)
    files = offer.open(first, size)
    try:
        await response.prepare(request)
        if request.method == "HEAD" or not files:
            return response
        transport, loop = request.transport, asyncio.get_running_loop()
        started_s, sent = time.monotonic(), 0
        block = SEND_BYTES
        for file, at, length in files:
            end = at + length
            while at < end:
                count, block_s = min(block, end - at), time.monotonic()
                if transport is None or transport.is_closing():
                    raise ConnectionResetError("the reader has gone")
                await _send_block(loop, transport, file, at, count, offer, started_s, sent)
                at, sent = at + count, sent + count
                if time.monotonic() - block_s < 1.0:
                    block = min(2 * block, SEND_BYTES_MAX)
        await response.write_eof()
        return response
    finally:
        for file, _, _ in files:
            file.close()


async def _send_block(
    loop: asyncio.AbstractEventLoop,
    transport: asyncio.Transport,
    file: object,
    at: int,
    count: int,
    offer: Offer,
    started_s: float,
    sent: int,
) -> None:
    """One block by sendfile; a reader that drips is cut off while it does so."""
    sending = asyncio.ensure_future(loop.sendfile(transport, file, at, count))  # type: ignore[arg-type]
    try:
        while not (await asyncio.wait({sending}, timeout=5.0))[0]:
            if offer.drips(sent, time.monotonic() - started_s):
                transport.abort()
                raise ConnectionResetError("the reader was too slow")
        if await sending < count:
            transport.abort()  # the file is shorter than it was: better no end than a wrong one
            raise ConnectionResetError("a file was cut short under our hands")
    finally:
        if not sending.done():
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


class FileReceiver:
    """Downloads of byte ranges, each in a thread of its own while it lasts: socket to `take`, without a detour."""

    def __init__(self, name: str, *, connections: int, stall_s: float) -> None:
        self._name, self._stall_s = name, stall_s
        self._threads = ThreadPoolExecutor(max_workers=connections, thread_name_prefix="receive")
        self._open: dict[tuple[int, str], http.client.HTTPConnection] = {}  # by thread and server
        self._lock = threading.Lock()

    async def get_whole(self, base_url: str, path: str, take: TakeView, *, bytes_max: int) -> int:
        """The same for a server that knows no ranges: all of `path`, which says its length and has at most `bytes_max`.
        Returns the status: 200, or one that says why there is nothing."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._get_whole, base_url, path, take, bytes_max)

    async def get(self, base_url: str, path: str, offset: int, size: int, take: TakeView) -> int:
        """Hand bytes [offset, offset + size) of `path` to `take` (in another thread), until it says False. Returns the
        status: 206, or one that says why there are none. Raises Timeout, Unreachable, Refused, WrongLength."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._get, base_url, path, offset, size, take)

    def close(self) -> None:
        """Close the connections; transfers in mid-flight end with an error."""
        with self._lock:
            for connection in self._open.values():
                if connection.sock is not None:
                    connection.sock.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    # ------------------------------------------------------------------------------------------- in a thread
    def _get(self, base_url: str, path: str, offset: int, size: int, take: TakeView) -> int:
        key = (threading.get_ident(), base_url)
        reused, begun = key in self._open, False

        def taken(piece: memoryview) -> bool:
            nonlocal begun
            begun = True
            return take(piece)

        try:
            return self._exchange(key, path, offset, size, taken)
        except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError) as error:
            self._drop(key)
            if begun or not reused:
                raise Unreachable(f"{base_url} was lost: {type(error).__name__}") from error
        except Exception as error:
            self._drop(key)
            raise _translated(error, base_url, self._stall_s) from error
        try:  # a connection kept from before was closed meanwhile: once more on a new one
            return self._exchange(key, path, offset, size, take)
        except Exception as error:
            self._drop(key)
            raise _translated(error, base_url, self._stall_s) from error

    def _get_whole(self, base_url: str, path: str, take: TakeView, bytes_max: int) -> int:
        key = (threading.get_ident(), base_url)
        try:
            connection = self._connection(key)
            sock = connection.sock  # http.client forgets it where the server will close the connection
            connection.request("GET", path, headers={SOURCE_HEADER: self._name, "Accept-Encoding": "identity"})
            response = connection.getresponse()
            if response.status == 200:
                encoding = response.headers.get("Content-Encoding", "identity")
                if response.length is None or response.length > bytes_max or encoding != "identity":
                    raise WrongLength(f"{base_url}{path} has {response.length} bytes ({encoding}), at most {bytes_max}")
                self._receive(sock, response, response.length, take)
            return response.status
        except WrongLength:
            raise
        except Exception as error:
            raise _translated(error, base_url, self._stall_s) from error
        finally:
            self._drop(key)  # such servers close the connection anyway

    def _receive(self, sock: socket.socket, response: http.client.HTTPResponse, size: int, take: TakeView) -> bool:
        """Hand exactly `size` bytes to `take`. False: it wanted no more.

        The kernel fills a piece before it wakes this thread; every `HAND_OVER_S` it gives what there is."""
        buffer = memoryview(bytearray(max(1, min(RECEIVE_BYTES, size))))
        # what was read together with the headers, and nothing beyond: from here on the buffered reader is empty
        count, left = response.fp.readinto1(buffer[: io.DEFAULT_BUFFER_SIZE]), size
        sock.settimeout(None)
        while count > 0:
            left -= count
            if not take(buffer[:count]):
                return False
            if not left:
                sock.settimeout(self._stall_s)
                return True
            count = self._fill(sock, buffer[:left])
        raise ConnectionAbortedError(f"the connection ended {left} bytes early")

    def _fill(self, sock: socket.socket, buffer: memoryview) -> int:
        """Bytes that came, 0 at the end of the connection. Raises TimeoutError when none came for too long."""
        since_s = time.monotonic()
        while True:
            try:
                return sock.recv_into(buffer, 0, socket.MSG_WAITALL)
            except BlockingIOError:
                if time.monotonic() - since_s > self._stall_s:
                    raise TimeoutError from None

    def _exchange(self, key: tuple[int, str], path: str, offset: int, size: int, take: TakeView) -> int:
        connection = self._connection(key)
        headers = {
            SOURCE_HEADER: self._name,
            "Range": f"bytes={offset}-{offset + size - 1}",
            "Accept-Encoding": "identity",
        }
        sock = connection.sock
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        if response.status != 206:
            text = response.read(2000).decode("utf-8", "replace")
            if response.status in (NOT_YET, 404, 410):
                if response.read():
                    self._drop(key)
                return response.status
            if response.status == 200:
                raise WrongLength(f"{key[1]} answered a range with the whole")
            self._drop(key)
            raise Refused(text or f"{key[1]} answered with status {response.status}")
        _check_range(response, key[1], offset, size)
        if not self._receive(sock, response, size, take):
            self._drop(key)
            return 206
        response.length = 0
        response.read()  # ends the exchange, so that the connection can be used again
        return 206

    def _connection(self, key: tuple[int, str]) -> http.client.HTTPConnection:
        if key not in self._open:
            where = urlsplit(key[1])
            connection = http.client.HTTPConnection(where.hostname or "", where.port or 80, timeout=CONNECT_S)
            connection.connect()
            connection.sock.settimeout(self._stall_s)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(HAND_OVER_S))
            with self._lock:
                self._open[key] = connection
        return self._open[key]

    def _drop(self, key: tuple[int, str]) -> None:
        with self._lock:
            connection = self._open.pop(key, None)
        if connection is not None:
            connection.close()


def _timeval(seconds: float) -> bytes:
    """As the kernel takes it (it counts where a socket blocks, that is, while a body comes)."""
    return struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))


class WrongLength(Exception):
    """The answer holds another number of bytes than was asked for. Takes the sentence that says so."""


def _check_range(response: http.client.HTTPResponse, server: str, offset: int, size: int) -> None:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise WrongLength(f"{server} sent a binary encoded as {encoding[:40]!r}")
    said = response.headers.get("Content-Range", "")
    if not said.startswith(f"bytes {offset}-{offset + size - 1}/") or response.length != size:
        raise WrongLength(
            f"{server} sent {response.length} bytes as {said[:60]!r}, {size} from {offset} were asked for"
        )


def _translated(error: Exception, server: str, stall_s: float) -> Exception:
    """The port's errors for the sockets'; whatever `take` raised stays what it is."""
    if isinstance(error, TimeoutError):
        return Timeout(f"{server} sent nothing for {stall_s:g} s")
    if isinstance(error, (http.client.HTTPException, ConnectionError, socket.gaierror)):
        return Unreachable(f"{server} was lost: {type(error).__name__}")
    if isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError):
        return Unreachable(f"{server} was lost: {error.strerror}")
    return error
