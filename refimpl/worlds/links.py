"""Why: several processes share lines that this machine does not have; here bytes wait their turn, in real time.

A message passes in small pieces. A flow has one piece under way: it takes its turn on each of its links at once, and
the next piece follows when the last link has passed it. So a link gives each of the flows that wait for it equal turns,
and a flow that waits elsewhere leaves its turns to the others: shares come out close to max-min fair without anybody
computing them, which makes this a check on a simulator that does compute them.

    passed = max over links of (max(free of the link, passed before - RUN_UP) + piece / rate)

Pieces are reserved against the instant at which the piece before should have passed, not at which a timer woke: late
timers cost no rate. The run-up stands for what queues before a link would hold: a link that lay idle for a moment,
because its flow waited for a turn elsewhere, makes up for it; never for time before the flow began. Flows that meet on
a crowded link use pieces of one size, some 20 ms of the slowest of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from math import inf

PIECE_S = 0.02
RUN_UP_S = 0.1
PIECE_BYTES_MIN, PIECE_BYTES_MAX = 16, 64 << 10
GIVE_UP_S = 127.0
"""So long a connection is tried over a line that is down: six doubling waits from 1 s (Linux, tcp_syn_retries = 6)."""
SLACK_S = 0.002
"""A flow sleeps only when it is this far ahead of the clock."""


class _Link:
    """A directed link: what it carries, and until when it is promised."""

    __slots__ = ("bytes_per_s", "flows", "free_s")

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_s = 0.0
        self.flows: dict[_Flow, None] = {}


class _Flow:
    """One message's bytes under way."""

    __slots__ = ("begun_s", "bound_bytes_per_s", "links", "narrowest_bytes_per_s", "piece_bytes", "turns")

    def __init__(self, links: Sequence[_Link], bound_bytes_per_s: float, begun_s: float) -> None:
        self.links = links
        self.begun_s = begun_s  # or when it last went on after a stall
        self.bound_bytes_per_s = bound_bytes_per_s
        self.narrowest_bytes_per_s = inf
        self.turns: list[_Link] = []  # the links on which it must wait for turns
        self.piece_bytes = PIECE_BYTES_MAX


class Links:
    """All links of a run. `rate_bytes_per_s(link)` says what a link carries now; 0: nothing, and flows on it stall."""

    def __init__(self, rate_bytes_per_s: Callable[[int], float]) -> None:
        self._rate = rate_bytes_per_s
        self._links: dict[int, _Link] = {}
        self._flows: dict[_Flow, None] = {}
        self._changed = asyncio.Event()

    def changed(self) -> None:
        """Rates are other than they were: from now on the new ones hold."""
        for number, link in self._links.items():
            link.bytes_per_s = self._rate(number)
        self._plan()
        self._changed.set()
        self._changed = asyncio.Event()

    async def carry(
        self, links: Sequence[int], size_bytes: int, bound_bytes_per_s: float, broken: Callable[[], bool]
    ) -> float | None:
        """Take a message over `links`. Returns the instant (of the loop's clock) at which its last byte has left
        them, or None when `broken()` came true first, or the line was down when it began and for `GIVE_UP_S` after."""
        clock = asyncio.get_running_loop().time
        passed_s = clock()
        if not links and bound_bytes_per_s == inf:
            return passed_s
        flow = _Flow([self._link(number) for number in links], bound_bytes_per_s, passed_s)
        for link in flow.links:
            link.flows[flow] = None
        self._flows[flow] = None
        self._plan()
        left = size_bytes
        try:
            while left > 0:
                if broken():
                    return None
                if flow.narrowest_bytes_per_s <= 0.0:
                    if left == size_bytes and clock() - passed_s > GIVE_UP_S:
                        return None
                    await self._stall()
                    if flow.narrowest_bytes_per_s > 0.0:
                        passed_s = flow.begun_s = clock()
                    continue
                piece = min(left, flow.piece_bytes)
                passed_s = self._reserve(flow, piece, passed_s)
                left -= piece
                if (ahead_s := passed_s - clock()) > SLACK_S:
                    await asyncio.sleep(ahead_s)
            return passed_s
        finally:
            for link in flow.links:
                link.flows.pop(flow, None)
            del self._flows[flow]
            self._plan()

    @staticmethod
    def _reserve(flow: _Flow, piece: int, passed_s: float) -> float:
        """When the flow's next piece will have passed, if the one before had at `passed_s`."""
        done_s = passed_s + piece / flow.bound_bytes_per_s
        earliest_s = max(flow.begun_s, passed_s - RUN_UP_S)
        for link in flow.turns:
            link.free_s = max(link.free_s, earliest_s) + piece / link.bytes_per_s
            done_s = max(done_s, link.free_s)
        return done_s

    async def _stall(self) -> None:
        """Until rates change, or it is time to look whether the connection still stands."""
        try:
            async with asyncio.timeout(0.5):
                await self._changed.wait()
        except TimeoutError:
            return

    def _link(self, number: int) -> _Link:
        link = self._links.get(number)
        if link is None:
            link = self._links[number] = _Link(self._rate(number))
        return link

    # ------------------------------------------------------------------------------------------------- who meets whom
    def _plan(self) -> None:
        """On which links each flow takes turns, and in pieces of what size.

        A link is crowded when its flows, each at the rate of its own narrowest link, could ask more than it carries.
        A flow takes turns on its narrowest link and on crowded ones; the others never hold it up.
        """
        for flow in self._flows:
            own = min((link.bytes_per_s for link in flow.links), default=inf)
            flow.narrowest_bytes_per_s = min(own, flow.bound_bytes_per_s)
        met: set[_Flow] = set()
        for flow in self._flows:
            flow.turns = [
                link
                for link in dict.fromkeys(flow.links)
                if link.bytes_per_s == flow.narrowest_bytes_per_s
                or sum(other.narrowest_bytes_per_s for other in link.flows) > link.bytes_per_s
            ]
        for flow in self._flows:
            if flow not in met:
                self._same_pieces(flow, met)

    @staticmethod
    def _same_pieces(start: _Flow, met: set[_Flow]) -> None:
        """All flows that meet `start` on a link where they take turns, directly or through others: one size."""
        group, todo = {start}, [start]
        while todo:
            for link in todo.pop().turns:
                for other in link.flows:
                    if other not in group and link in other.turns and other.narrowest_bytes_per_s > 0:
                        group.add(other)
                        todo.append(other)
        met |= group
        slowest = min((flow.narrowest_bytes_per_s for flow in group if flow.narrowest_bytes_per_s > 0), default=inf)
        piece = int(max(PIECE_BYTES_MIN, min(PIECE_BYTES_MAX, slowest * PIECE_S)))
        for flow in group:
            flow.piece_bytes = piece
