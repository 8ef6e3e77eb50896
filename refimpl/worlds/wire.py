"""Why: what lies between nodes is no node's own doing; so between real processes stands a process that is the network.

Every node posts its calls here (`/to/TARGET/call`) instead of to the target. The wire holds a message back until its
bytes have had their turns on every link of its path (`links.py`) and its delay is over, then posts it to the target,
and treats the answer alike on the way back. So each direction is delayed once, lines that several processes share are
shared, and a node knows no more of its line than on the internet. What goes over which links with what delay, and what
is cut, is decided by `Rules`; the wire only makes it true.

    parent -> wire   {"at": {name: url or null}}        a node listens there, or is gone
    parent -> wire   {"started_s": 12.5}                the run began at this reading of the monotonic clock
    parent -> wire   {"ask": "open"}                    one line back: the calls that are open, oldest first
    parent -> wire   anything else                      goes to the rules: a fault begins or ends
    wire -> parent   {"url": "http://127.0.0.1:40123"}  it listens

As over a connection: messages of one kind from one node to another keep their order; a call to a dead node comes back
as unreachable after the way back; what a dying node was sending never arrives; a lost message keeps its caller waiting.
Every call leaves a line in a log: who, whom, what, and when it left, came, was answered and was back.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TextIO

import aiohttp
from aiohttp import web

from refimpl.messages import FRAME_BYTES_MAX, BadMessage, name_of
from refimpl.worlds.http import SOURCE_HEADER, UNREACHABLE_STATUS
from refimpl.worlds.links import Links

REFUSAL_BYTES = 64
"""A refusal is a sentence; it is charged like this many bytes."""


class Passage(NamedTuple):
    """What one message meets on its way."""

    links: tuple[int, ...]
    bound_bytes_per_s: float  # of its own, whatever the links carry
    delays_s: tuple[float, ...]  # one for each copy that arrives, after its last byte has left the links; (): lost
    in_order: bool  # False: it may overtake, or be overtaken


class Rules(Protocol):
    """Who reaches whom over what. Names are nodes' names."""

    def refusal(self, source: str, target: str) -> str | None:
        """Why a call cannot even leave; None when it can."""
        ...

    def passage(self, source: str, target: str, kind: str, size_bytes: int, *, reply: bool) -> Passage: ...

    def reset_s(self, source: str, target: str) -> float:
        """After how long `target` learns that `source` is gone."""
        ...

    def rate_bytes_per_s(self, link: int) -> float: ...

    def order(self, order: dict[str, Any], now_s: float) -> None:
        """The parent's word; rates may be others afterwards."""
        ...


@dataclass
class _Call:
    """One call under way, in seconds of the run; -1: not yet."""

    source: str
    target: str
    kind: str
    size_bytes: int
    begun_s: float
    came_s: float = -1.0
    answered_s: float = -1.0
    broken: Callable[[], bool] = field(default=lambda: False, repr=False)

    def where(self) -> str:
        """What holds it up, as far as the network knows."""
        if self.came_s < 0:
            return "the call is on its way"
        return "it came and is not answered" if self.answered_s < 0 else "the answer is on its way"


class Lost(Exception):
    """The other side cannot be reached any more. Takes exactly one argument: the sentence."""


class Wire:
    """The server between all nodes."""

    def __init__(self, rules: Rules, log: TextIO) -> None:
        self.rules, self.log = rules, log
        self.links = Links(rules.rate_bytes_per_s)
        self.where: dict[str, str] = {}  # node -> base URL, of those that are up
        self.calls: dict[int, _Call] = {}  # open ones, oldest first
        self._next = 0
        self._started_s = time.monotonic()
        self._turns: dict[tuple[str, str, str], asyncio.Future[None]] = {}  # channel -> its youngest message
        self._tasks: set[asyncio.Task[Any]] = set()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.application = web.Application(client_max_size=FRAME_BYTES_MAX)
        self.application.router.add_post("/to/{target}/call", self._serve)

    async def start(self, host: str = "127.0.0.1") -> str:
        """Open the server; returns its base URL."""
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60)
        self._session = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        self._runner = web.AppRunner(self.application, access_log=None, handle_signals=False)
        await self._runner.setup()
        await web.TCPSite(self._runner, host, 0, backlog=1024).start()
        return f"http://{host}:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Drop everything under way and close."""
        for task in list(self._tasks):
            task.cancel()
        if self._session is not None:
            await self._session.close()
        if self._runner is not None:
            await self._runner.shutdown()
            await self._runner.cleanup()

    def order(self, order: dict[str, Any]) -> dict[str, Any] | None:
        """Do as the parent says. Returns the answer to a question."""
        if "at" in order:
            for name, url in order["at"].items():
                self.where.pop(name, None)
                if url is not None:
                    self.where[name] = url
        elif "started_s" in order:
            self._started_s = order["started_s"]
        elif order.get("ask") == "open":
            return {"open": [self._told(call) for call in self.calls.values()]}
        else:
            self.rules.order(order, self.now())
            self.links.changed()
        return None

    def now(self) -> float:
        return time.monotonic() - self._started_s

    def _told(self, call: _Call) -> dict[str, Any]:
        return {
            "waiting": call.source,
            "target": call.target,
            "message": call.kind,
            "since_s": call.begun_s,
            "waited_s": self.now() - call.begun_s,
            "reason": call.where(),
        }

    # ---------------------------------------------------------------------------------------------------- one call
    async def _serve(self, request: web.Request) -> web.Response:
        source, target = request.headers.get(SOURCE_HEADER, ""), request.match_info["target"]
        begun_s = self.now()
        try:
            frame = await request.read()
            kind = name_of(frame)
        except (BadMessage, web.HTTPRequestEntityTooLarge) as error:
            return web.Response(status=400, text=str(error))
        if (sentence := self.rules.refusal(source, target)) is not None:
            self._note(_Call(source, target, kind, len(frame), begun_s), "cut")
            return web.Response(status=UNREACHABLE_STATUS, text=sentence)
        call = _Call(source, target, kind, len(frame), begun_s)
        call.broken = lambda: request.transport is None or request.transport.is_closing()
        self._next += 1
        number = self._next
        self.calls[number] = call
        # its own task: when the caller hangs up, what has arrived goes on
        carrying = asyncio.ensure_future(self._carry(call, frame))
        self._tasks.add(carrying)
        carrying.add_done_callback(self._tasks.discard)
        carrying.add_done_callback(lambda task: task.cancelled() or task.exception())
        outcome = "failed"
        try:
            status, body = await asyncio.shield(carrying)
            outcome = "answered" if status == 200 else "unreachable" if status == UNREACHABLE_STATUS else "refused"
            if status == 200:
                return web.Response(body=body, content_type="application/octet-stream")
            return web.Response(status=status, text=body.decode("utf-8", "replace"))
        finally:
            del self.calls[number]
            self._note(call, outcome)

    async def _carry(self, call: _Call, frame: bytes) -> tuple[int, bytes]:
        """Status and body for the caller."""
        source, target = call.source, call.target
        url = self.where.get(target)

        def target_gone() -> bool:
            return url is not None and self.where.get(target) != url

        try:
            if not await self._travel(source, target, call.kind, len(frame), False, call.broken, target_gone):
                await self._never(call)
            url = url or self.where.get(target)  # it may have come up meanwhile
            if url is None or target_gone():
                raise Lost(f"node {target!r} is down")
            call.came_s = self.now()
            status, body = await self._post(call, url, frame)
            call.answered_s = self.now()
        except Lost as lost:
            await asyncio.sleep(self.rules.reset_s(target, source))
            return UNREACHABLE_STATUS, str(lost).encode()
        kind, size = (name_of(body), len(body)) if status == 200 else ("Refused", REFUSAL_BYTES)
        if not await self._travel(target, source, kind, size, True, call.broken, lambda: False):
            await self._never(call)
        return status, body

    async def _post(self, call: _Call, url: str, frame: bytes) -> tuple[int, bytes]:
        """Hand a call to its target and wait for the answer. Raises Lost."""
        assert self._session is not None
        headers = {SOURCE_HEADER: call.source, "Content-Type": "application/octet-stream"}
        try:
            async with self._session.post(f"{url}/call", data=frame, headers=headers) as response:
                return response.status, await response.read()
        except (aiohttp.ClientConnectorError, ConnectionRefusedError) as error:
            raise Lost(f"node {call.target!r} is down") from error
        except (aiohttp.ClientError, ConnectionError, OSError) as error:
            raise Lost(f"node {call.target!r} was lost in mid-call") from error

    async def _never(self, call: _Call) -> None:
        """The message was lost: nobody will answer. Waits until the caller hangs up."""
        while not call.broken():
            await asyncio.sleep(1.0)
        raise asyncio.CancelledError

    async def _travel(
        self,
        source: str,
        target: str,
        kind: str,
        size_bytes: int,
        reply: bool,
        broken: Callable[[], bool],
        gone: Callable[[], bool],
    ) -> bool:
        """From `source` to `target`, at the speed of the path. False: lost, or its connection is. Raises Lost when the
        target went away meanwhile."""
        if source == target:
            return True
        passage = self.rules.passage(source, target, kind, size_bytes, reply=reply)
        for _ in passage.delays_s[1:]:  # further copies only take the links: a handler runs at most once
            self._beside(self.links.carry(passage.links, size_bytes, passage.bound_bytes_per_s, broken))
        channel, before, mine = (source, target, kind), None, None
        if passage.in_order:
            before = self._turns.get(channel)
            mine = self._turns[channel] = asyncio.get_running_loop().create_future()
        try:
            passed_s = await self.links.carry(
                passage.links, size_bytes, passage.bound_bytes_per_s, lambda: broken() or gone()
            )
            if gone():
                raise Lost(f"node {target!r} is down")
            if passed_s is None or not passage.delays_s:
                return False
            await asyncio.sleep(max(0.0, passed_s + passage.delays_s[0] - time.monotonic()))
            if before is not None and not before.done():
                await before
            return True
        finally:
            if mine is not None:
                mine.set_result(None)
                if self._turns.get(channel) is mine:
                    del self._turns[channel]

    def _beside(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note(self, call: _Call, outcome: str) -> None:
        times = {"begun": call.begun_s, "came": call.came_s, "answered": call.answered_s, "ended": self.now()}
        record = {
            "source": call.source,
            "target": call.target,
            "kind": call.kind,
            "bytes": call.size_bytes,
            "outcome": outcome,
            **{f"{what}_ns": round(instant_s * 1e9) if instant_s >= 0 else None for what, instant_s in times.items()},
        }
        self.log.write(json.dumps(record, separators=(",", ":")) + "\n")
        self.log.flush()


def run_wire(rules: Rules, log: TextIO) -> int:
    """Be the network until the parent says stop, by closing standard input. Returns the exit code."""
    return asyncio.run(_live(rules, log))


async def _live(rules: Rules, log: TextIO) -> int:
    orders = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    wire = Wire(rules, log)
    print(json.dumps({"url": await wire.start()}), flush=True)
    try:
        while line := await orders.readline():
            answer = wire.order(json.loads(line))
            if answer is not None:
                print(json.dumps(answer), flush=True)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await wire.stop()
    return 0
