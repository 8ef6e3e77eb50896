"""The real world: every node its own HTTP server, messages over real sockets, wall-clock time.

A call is `POST /call` with the frame as the body and the caller's name in a header. 200 brings the reply's frame; 502
comes from something on the way (`wire.py`, any proxy) that could not reach the target; any other status is a refusal.
The text says why. Lines can be shaped: a body then leaves and is read in paced pieces, and what has come whole is held
for the latency of both lines (the sender's stands in a header) before anybody sees it. So a call, its answer and a
refusal take the same way, and a long message takes its length and the latency. What a sender says of its line counts
only up to `latency_ms_max`, which who emulates the lines gives: without it, nobody makes a node hold anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextvars import ContextVar
from typing import Any, TypeVar

import aiohttp
from aiohttp import web

from refimpl.messages import FRAME_BYTES_MAX, PREFIX, BadMessage, Message, decode, encode, encode_parts, frame_length
from refimpl.world import Refused, TaskFailure, Timeout, Unreachable
from refimpl.worlds.asyncio_node import AsyncioNode, Line, Supervisor, device_thread
from refimpl.worlds.fine_timer import FineTimer

T = TypeVar("T")

SOURCE_HEADER = "X-Armillary-Source"
LATENCY_HEADER = "X-Armillary-Latency-Ms"  # of the sender's line, where it is shaped
REASON_BYTES_MAX = 2000
NAME_LENGTH_MAX = 200
UNREACHABLE_STATUS = 502
_CALLER: ContextVar[str] = ContextVar("address of the caller", default="")
READ_IDLE_S = 60.0
"""A peer that has begun a frame and sends nothing for so long is given up."""


class HttpWorld(AsyncioNode):
    """One node that serves on its own port. `book` maps node names to base URLs; it may grow while the run goes on."""

    def __init__(
        self,
        name: str,
        *,
        book: Mapping[str, str],
        supervisor: Supervisor,
        run_seed: int = 0,
        started_s: float | None = None,
        device: Any = None,
        line: Line | None = None,
        latency_ms_max: float | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
    ) -> None:
        super().__init__(
            name,
            run_seed=run_seed,
            started_s=time.monotonic() if started_s is None else started_s,
            supervisor=supervisor,
            device=device or device_thread(),
            line=line or Line(),
        )
        self.book = book
        self.latency_ms_max = self.line.latency_ms if latency_ms_max is None else latency_ms_max  # believed of a sender
        self._frame_bytes_max = frame_bytes_max
        self._runner: web.AppRunner | None = None
        self._session: aiohttp.ClientSession | None = None
        self._timer: FineTimer | None = None
        self._transports: set[asyncio.Transport] = set()
        self.url = ""  # known once it listens
        self.application = web.Application(client_max_size=frame_bytes_max)
        self.application.router.add_post("/call", self._serve_call)

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Open the server (port 0: any free one) and return its base URL."""
        self._runner = web.AppRunner(self.application, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, backlog=1024)
        await site.start()
        self.url = f"http://{host}:{self._runner.addresses[0][1]}"
        return self.url

    async def stop(self) -> None:
        """Close the server, the connections and everything the node was doing."""
        self.stop_tasks()
        if self._timer is not None:
            self._timer.close()
        for transport in list(self._transports):  # a dead process does not say goodbye
            transport.abort()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.cleanup()

    # ------------------------------------------------------------------------------------------------- the caller
    async def call(self, target: str, message: Message, timeout_s: float) -> Any:
        if target not in self.book:
            raise Unreachable(f"there is no node {target!r}")
        try:
            parts = encode_parts(message)
        except BadMessage as error:
            raise Refused(str(error)) from error
        # its own task: a caller that gives up must not pull the request out of the callee's hands
        sending = self.start_task(self._post(target, parts))
        sending.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(sending)
        except TimeoutError:
            raise Timeout(f"{target!r} did not answer {type(message).__name__} within {timeout_s:g} s") from None

    async def _post(self, target: str, parts: list[Any]) -> Message:
        if self._session is None:
            # no pool limit, since a node may have many long calls open; no total time-out, the port has its own
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
            self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        length = sum(len(part) for part in parts)
        headers = self._headers() | {SOURCE_HEADER: self.name, "Content-Length": str(length)}
        body = self._paced(parts) if self.paced else b"".join(parts)
        try:
            async with self._session.post(f"{self.book[target]}/call", data=body, headers=headers) as response:
                if response.status == 200:
                    frame = await self._read_frame(response.content)
                else:
                    frame = await response.content.read(REASON_BYTES_MAX)
            await self._held(response.headers)
            if response.status != 200:
                reason = frame.decode("utf-8", "replace")
                if response.status == UNREACHABLE_STATUS:
                    raise Unreachable(reason or f"{target!r} could not be reached")
                raise Refused(reason or f"{target!r} answered with status {response.status}")
            return decode(frame, bytes_max=self._frame_bytes_max)
        except BadMessage as error:
            raise Refused(f"{target!r} sent a bad reply: {error}") from error
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise Unreachable(f"{target!r} was lost: {type(error).__name__}") from error

    # ------------------------------------------------------------------------------------------------- the callee
    @staticmethod
    def address_of_caller() -> str:
        """Whence the call came that the present task answers, as the socket says; its name is its own word."""
        return _CALLER.get()

    async def _serve_call(self, request: web.Request) -> web.StreamResponse:
        source = request.headers.get(SOURCE_HEADER, "")
        if not 0 < len(source) <= NAME_LENGTH_MAX:
            return web.Response(status=400, text=f"header {SOURCE_HEADER} must name the caller")
        if request.transport is not None:
            self._transports.add(request.transport)
        try:
            frame = await self._read_frame(request.content)
            await self._held(request.headers)
            message = decode(frame, bytes_max=self._frame_bytes_max)
        except BadMessage as error:
            return web.Response(status=400, text=str(error)[:REASON_BYTES_MAX], headers=self._headers(text=True))
        _CALLER.set(request.remote or "")
        # its own task, so that a caller that hangs up does not stop the handler
        serving = self.start_task(self.answer(source, message))
        serving.add_done_callback(lambda task: task.cancelled() or task.exception())
        try:
            reply = encode(await asyncio.shield(serving))
        except (Refused, BadMessage) as error:
            return web.Response(status=422, text=str(error)[:REASON_BYTES_MAX], headers=self._headers(text=True))
        if not self.paced:
            return web.Response(body=reply, headers=self._headers())
        response = web.StreamResponse(headers=self._headers() | {"Content-Length": str(len(reply))})
        with contextlib.suppress(ConnectionResetError):  # a caller that has gone wants no answer
            await response.prepare(request)
            async for piece in self._paced([reply]):
                await response.write(piece)
            await response.write_eof()
        return response

    # ------------------------------------------------------------------------------------------------------- bytes
    def _headers(self, *, text: bool = False) -> dict[str, str]:
        """What every message of this node says of itself."""
        kind = {} if text else {"Content-Type": "application/octet-stream"}
        return kind | ({LATENCY_HEADER: f"{self.line.latency_ms:g}"} if self.line.latency_ms else {})

    async def _held(self, headers: Mapping[str, str]) -> None:
        """A message has come whole: wait for the latency of its sender's line and of this one."""
        come_s, theirs_ms = time.monotonic(), 0.0
        if self.latency_ms_max:
            said = headers.get(LATENCY_HEADER, "0")
            try:
                theirs_ms = min(float(said), self.latency_ms_max)
            except ValueError:
                theirs_ms = -1.0
            if not theirs_ms >= 0:
                raise BadMessage(f"header {LATENCY_HEADER} is {said[:40]!r}, expected milliseconds, 0 or more")
        if held_ms := theirs_ms + self.line.latency_ms:
            await self.sleep_until(come_s - self._started_s + held_ms / 1000)

    async def sleep_until(self, instant_s: float) -> None:
        if instant_s <= self.elapsed_s():
            return
        if not self.alive:  # a timer made now would never be closed
            raise asyncio.CancelledError
        self._timer = self._timer or FineTimer()
        await self._timer.until(self._started_s + instant_s)

    async def _paced(self, parts: list[Any]) -> AsyncIterator[bytes]:
        """The bytes of `parts` as this node's uplink lets them go."""
        view, passed_s = memoryview(b"".join(parts)), self.elapsed_s()
        step = self.uplink.piece_bytes
        for at in range(0, len(view), step):
            piece = view[at : at + step]
            passed_s = self.uplink.reserve_next(len(piece), passed_s, self.elapsed_s())
            await self.sleep_until(passed_s)
            yield bytes(piece)

    async def _read_frame(self, stream: aiohttp.StreamReader) -> bytes:
        """Exactly one frame from `stream`, at this node's downlink rate. Raises BadMessage for too few or many."""
        try:
            async with asyncio.timeout(READ_IDLE_S):
                frame = bytearray(await stream.readexactly(PREFIX.size))
            total, passed_s = frame_length(frame, bytes_max=self._frame_bytes_max), self.elapsed_s()
            while len(frame) < total:
                async with asyncio.timeout(READ_IDLE_S):
                    piece = await stream.read(
                        min(self.downlink.piece_bytes if self.paced else 1 << 20, total - len(frame))
                    )
                if not piece:
                    raise BadMessage(f"frame ends after {len(frame)} of {total} bytes")
                frame += piece
                passed_s = self.downlink.reserve_next(len(piece), passed_s, self.elapsed_s())
                await self.sleep_until(passed_s)
            async with asyncio.timeout(READ_IDLE_S):
                if await stream.read(1):
                    raise BadMessage(f"bytes follow a frame of {total} bytes")
        except TimeoutError as error:
            raise BadMessage(f"no byte of a frame came for {READ_IDLE_S:g} s") from error
        except asyncio.IncompleteReadError as error:
            raise BadMessage(f"a frame starts with {PREFIX.size} bytes, only {len(error.partial)} came") from error
        return bytes(frame)


class HttpFabric:
    """Several HTTP nodes in one process, for tests and small runs; `process.py` runs one node in a process."""

    def __init__(self, *, run_seed: int = 0, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self.run_seed = run_seed
        self.nodes: dict[str, HttpWorld] = {}
        self.book: dict[str, str] = {}
        self._frame_bytes_max = frame_bytes_max
        self._supervisor = Supervisor()
        self._device = device_thread()
        self._started_s = time.monotonic()
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def failures(self) -> list[TaskFailure]:
        return self._supervisor.failures

    def node(self, name: str, line: Line | None = None) -> HttpWorld:
        if name in self.nodes and self.nodes[name].alive:
            raise ValueError(f"there is a node {name!r} already")
        self.nodes[name] = HttpWorld(
            name,
            book=self.book,
            supervisor=self._supervisor,
            run_seed=self.run_seed,
            started_s=self._started_s,
            device=self._device,
            line=line,
            frame_bytes_max=self._frame_bytes_max,
        )
        slowest_ms = max(node.line.latency_ms for node in self.nodes.values())
        for node in self.nodes.values():  # all lines are of one emulation
            node.latency_ms_max = slowest_ms
        return self.nodes[name]

    def kill(self, name: str) -> None:
        """The node's process dies: its tasks end and its connections break."""
        task = asyncio.get_running_loop().create_task(self.nodes[name].stop())
        self._closing.add(task)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Open all servers, run until `main` ends (its result) or a task fails (TaskFailed), close everything."""

        async def body() -> T:
            try:
                for name, node in self.nodes.items():
                    self.book[name] = await node.start()
                return await self._supervisor.run(main)
            finally:
                main.close()
                await asyncio.gather(*self._closing, *(node.stop() for node in self.nodes.values()))

        return asyncio.run(body())
