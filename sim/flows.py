"""Why: a transfer's duration depends on everything else on the wire; this engine says which rates hold when.

Every transfer is a flow over a few directed links. Rates are weighted max-min fair with an optional bound per flow, and
hold from one change to the next, so completion times are exact up to rounding: there is no time step.

Two tiers, one answer:

* **Solo.** A flow whose narrowest link (or own bound) nobody else uses, and whose other links have that much to spare,
  takes exactly that rate and slows nobody. It is a few list look-ups and an entry in a heap of finishing times.
  What is over in a moment, a *packet*, is asked for less: its end is told at its start, and nothing is said at its end.
* **Core** (`sim/flows_core.py`, compiled by numba on first use, then cached on disk). As soon as a flow could disturb
  another, it and every solo flow that it touches, directly or through others, go to the incremental solver.

Clock: float seconds of the caller's choosing, never going back. All starts, cancels and capacity changes of one instant
are solved as one batch, at the next question. `sim/flows_reference.py` is the dull twin that the tests compare with.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from sim.flows_core import (
    CAPACITY,
    DONE,
    DONE_S,
    FIRST,
    HELD_BY,
    MOVED,
    SCANS,
    SHARE,
    SOLVES,
    Core,
    attach,
    change_capacity,
    detach,
    grown,
    load_on,
    new_core,
    run_until,
    solve,
)
from sim.flows_progress import held_at

INFINITY = math.inf


def warm_up(say: Callable[[str], object] = print) -> float:
    """Have the solver compiled before it is needed, and return the seconds that took. Says so when it takes longer than
    a second: some 20 s the first time, about half a second from then on, when it comes from numba's cache on disk."""
    notice = threading.Timer(1.0, say, ("preparing the flow solver (compiled once, then kept on disk) ...",))
    notice.start()
    started_s = time.perf_counter()
    engine = FlowEngine()
    link = engine.add_link(1.0)
    flows = [engine.start(0.0, (link,), 1.0) for _ in range(3)]
    engine.set_capacity(1.0, link, 2.0)
    engine.cancel(1.0, flows[0])
    engine.link_load(link)
    assert len(engine.advance(9.0)) == 2
    notice.cancel()
    return time.perf_counter() - started_s


class _Solo:
    """A flow that disturbs nobody: its rate is fixed until something touches its links."""

    __slots__ = ("bound", "links", "rate", "size_bytes", "start_s", "weight")

    def __init__(
        self, links: Sequence[int], size_bytes: float, rate: float, start_s: float, weight: float, bound: float
    ) -> None:
        self.links = links
        self.size_bytes = size_bytes
        self.rate = rate
        self.start_s = start_s
        self.weight = weight
        self.bound = bound


_Packet = tuple[float, int, Sequence[int], float, float, float]
"""Finish, flow, links, rate, weight, bound."""


class FlowEngine:
    """Links, the flows over them, and when each flow ends. See the module for the idea."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._next_flow = 0
        # per link; index 0 is no link
        self._capacity: list[float] = [0.0]
        self._solo_load: list[float] = [INFINITY]  # sum of solo rates; infinity while the core has flows on the link
        self._solo_flows: list[dict[int, None]] = [{}]
        self._core_count: list[int] = [0]
        self._free_links: list[int] = []  # private links of bounds that have ended
        # solo tier
        self._solo: dict[int, _Solo] = {}
        self._solo_heap: list[tuple[float, int]] = []  # (finish, flow); entries of flows that left are skipped
        self._packets: list[_Packet] = []  # a heap
        self._packet_count: list[int] = [0]  # per link
        self._told: set[int] = set()  # packets that have joined the core
        # core tier
        self._core: Core = new_core()
        self._path = np.zeros(64, np.int64)
        self._path_view = memoryview(self._path.data)  # sets one number faster than numpy does
        self._slot_of: dict[int, int] = {}
        self._flow_in: list[int] = []  # slot -> flow
        self._links_in: list[Sequence[int]] = []  # slot -> its links, a private one last if it has a bound
        self._bound_link_in: list[int] = []  # slot -> private link that is its bound, or 0
        self._size_in: list[float] = []  # slot -> bytes when it joined the core
        self._free_slots: list[int] = []
        self._core_next_s = INFINITY
        self._core_dirty = False
        # finished, not yet handed out
        self._done: list[tuple[float, int]] = []

    # ------------------------------------------------------------ links

    def add_link(self, capacity_bytes_per_s: float) -> int:
        """A new link; 0 bytes/s means down: flows on it stall. Returns its number, above 0."""
        if not 0.0 <= capacity_bytes_per_s < INFINITY:
            raise ValueError(
                f"link capacity is {capacity_bytes_per_s} bytes/s; expected a finite number, 0 or more "
                "(a link without a limit needs no link)"
            )
        link = self._free_links.pop() if self._free_links else len(self._capacity)
        if link == len(self._capacity):
            self._capacity.append(0.0)
            self._solo_load.append(0.0)
            self._solo_flows.append({})
            self._packet_count.append(0)
            self._core_count.append(0)
            if link >= self._core.link_f.shape[1]:
                self._core = grown(self._core, links=2 * link, flows=0, width=0, pool=0)
        self._capacity[link] = float(capacity_bytes_per_s)
        self._core.link_f[CAPACITY, link] = capacity_bytes_per_s
        return link

    def capacity(self, link: int) -> float:
        """Bytes/s that the link carries now."""
        return self._capacity[link]

    def set_capacity(self, now_s: float, link: int, capacity_bytes_per_s: float) -> None:
        """From `now_s` on the link carries this much (0: its flows stall until it carries again)."""
        if not 0.0 <= capacity_bytes_per_s < INFINITY:
            raise ValueError(
                f"capacity of link {link} is {capacity_bytes_per_s} bytes/s; expected a finite number >= 0"
            )
        self._move_to(now_s)
        if capacity_bytes_per_s == self._capacity[link]:
            return
        for packet in self._packets_off(link):
            self._end_packet(packet)  # a packet's end has been told, and stays
        for flow in sorted(flow for flow in self._told if link in self._links_in[self._slot_of[flow]]):
            detach(self._core, self._slot_of[flow], self._now_s)
            self._forget(self._slot_of[flow])
        self._leave_solo((link,))
        self._capacity[link] = float(capacity_bytes_per_s)
        change_capacity(self._core, link, float(capacity_bytes_per_s))
        self._core_dirty = True

    # ------------------------------------------------------------ flows

    def start(
        self,
        now_s: float,
        links: Sequence[int],
        size_bytes: float,
        *,
        weight: float = 1.0,
        rate_bound_bytes_per_s: float = INFINITY,
    ) -> int:
        """Begin to send `size_bytes` over all `links` at once. Returns the flow's number: unique, rising by start.

        `weight`: how large a share it takes at a full link. Without bytes, or without links and bound, it ends at once.
        """
        if now_s != self._now_s:
            self._move_to(now_s)
        if not 0.0 <= size_bytes < INFINITY:
            raise ValueError(f"flow size is {size_bytes} bytes; expected a finite number, 0 or more")
        flow = self._next_flow = self._next_flow + 1
        capacity = self._capacity
        rate = rate_bound_bytes_per_s
        for link in links:
            if capacity[link] < rate:
                rate = capacity[link]
        if size_bytes == 0.0 or rate == INFINITY:
            self._done.append((now_s, flow))
            return flow
        load = self._solo_load
        solo = rate > 0.0
        for link in links:
            if load[link] + rate > capacity[link]:
                solo = False
                break
        if solo:
            solo_flows = self._solo_flows
            for link in links:
                load[link] += rate
                solo_flows[link][flow] = None
            self._solo[flow] = _Solo(links, size_bytes, rate, now_s, weight, rate_bound_bytes_per_s)
            heappush(self._solo_heap, (now_s + size_bytes / rate, flow))
            return flow
        if not 0.0 < weight < INFINITY or not rate_bound_bytes_per_s >= 0.0:
            raise ValueError(
                f"flow weight is {weight} and rate bound {rate_bound_bytes_per_s} bytes/s; "
                "expected a finite weight above 0 and a bound of 0 or more"
            )
        self._leave_solo(links)
        self._join_core(flow, links, size_bytes, weight, rate_bound_bytes_per_s)
        return flow

    def packet(
        self,
        now_s: float,
        links: Sequence[int],
        size_bytes: float,
        *,
        weight: float = 1.0,
        rate_bound_bytes_per_s: float = INFINITY,
        within_s: float = INFINITY,
    ) -> float:
        """Begin to send what is so short that whoever comes meanwhile does not change its end. Returns when it ends;
        infinity, and nothing has begun, when it would have to share a link or take longer than `within_s`. Its bytes
        occupy the links like others."""
        if now_s != self._now_s:
            self._move_to(now_s)
        if size_bytes == 0.0:
            return now_s
        capacity, load = self._capacity, self._solo_load
        rate = rate_bound_bytes_per_s
        for link in links:
            if capacity[link] < rate:
                rate = capacity[link]
        if not 0.0 < rate < INFINITY or size_bytes > within_s * rate:
            return INFINITY
        for link in links:
            if load[link] + rate > capacity[link]:
                return INFINITY
        count = self._packet_count
        for link in links:
            load[link] += rate
            count[link] += 1
        flow = self._next_flow = self._next_flow + 1
        finish_s = now_s + size_bytes / rate
        heappush(self._packets, (finish_s, flow, links, rate, weight, rate_bound_bytes_per_s))
        return finish_s

    def cancel(self, now_s: float, flow: int) -> float:
        """Stop a flow, which `advance` then never reports. Returns the bytes it had left; 0 if it had just finished."""
        self._move_to(now_s)
        solo = self._solo.get(flow)
        if solo is not None:
            self._end_solo(flow, solo)
            return max(0.0, solo.size_bytes - solo.rate * (now_s - solo.start_s))
        if flow in self._slot_of:
            slot = self._slot_of[flow]
            left = min(float(detach(self._core, slot, self._now_s)), self._size_in[slot])
            self._core_dirty = True
            self._forget(slot)
            return left
        for i, (_, finished) in enumerate(self._done):
            if finished == flow:
                del self._done[i]
                return 0.0
        raise ValueError(f"flow {flow} is not under way; it was never started, or has been reported or cancelled")

    def next_event_s(self) -> float:
        """When the next flow will end if nothing else happens; infinity when none will."""
        if self._done:
            return min(self._done)[0]
        heap, solo = self._solo_heap, self._solo
        while heap and heap[0][1] not in solo:
            heappop(heap)
        if self._core_dirty:
            self._solve()
        if heap and heap[0][0] < self._core_next_s:
            return heap[0][0]
        return self._core_next_s

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        """Move the clock. Returns (flow, finish time) of all that ended by `now_s` and were not returned before, in the
        order of (finish time, flow number). Flows that end in one instant all carry the same time."""
        if now_s != self._now_s:
            self._move_to(now_s)
        else:
            self._collect(now_s)
        if not self._done:
            return []
        self._done.sort()
        finished = [(flow, finish_s) for finish_s, flow in self._done]
        self._done.clear()
        return finished

    # ------------------------------------------------------------ questions

    def rate(self, flow: int) -> float:
        """Bytes/s at which the flow moves now."""
        if flow in self._solo:
            return self._solo[flow].rate
        if flow not in self._slot_of:
            raise ValueError(f"flow {flow} is not under way")
        if self._core_dirty:
            self._solve()
        slot = self._slot_of[flow]
        return float(self._core.flow_f[slot, 0] * self._core.link_f[SHARE, self._core.flow_i[slot, HELD_BY]])

    def held_by(self, flow: int) -> int:
        """The link that gives the flow its rate: it is full, and no flow on it has a larger share. 0: no link does, but
        the flow's own bound (or it has ended)."""
        if (solo := self._solo.get(flow)) is not None:
            return self._narrowest(solo)
        if self._core_dirty:
            self._solve()
        slot = self._slot_of.get(flow, -1)
        link = int(self._core.flow_i[slot, HELD_BY]) if slot >= 0 else 0
        return link if slot >= 0 and link != self._bound_link_in[slot] else 0

    def progress(self, flows: Sequence[int], at_s: float) -> tuple[list[float], list[int]]:
        """Bytes that each flow has left at `at_s`, and the link that holds it (0 as above). `at_s` may lie ahead of the
        clock, as long as nothing changes before. Flows that have ended have nothing left."""
        if self._core_dirty:
            self._solve()
        left, holders = [0.0] * len(flows), [0] * len(flows)
        in_core = [(place, slot) for place, flow in enumerate(flows) if (slot := self._slot_of.get(flow, -1)) >= 0]
        slots = [slot for _, slot in in_core]
        for (place, slot), bytes_left, link in zip(in_core, *held_at(self._core, slots, at_s), strict=True):
            left[place] = bytes_left
            holders[place] = 0 if link == self._bound_link_in[slot] else link
        for place, flow in enumerate(flows):
            if (solo := self._solo.get(flow)) is not None:
                left[place] = max(0.0, solo.size_bytes - solo.rate * (at_s - solo.start_s))
                holders[place] = self._narrowest(solo)
        return left, holders

    def _narrowest(self, solo: _Solo) -> int:
        """The link that a flow alone is held by; 0 when its own bound is narrower."""
        narrowest = min(solo.links, key=self._capacity.__getitem__, default=0)
        return narrowest if self._capacity[narrowest] <= solo.bound else 0

    def link_load(self, link: int) -> float:
        """Bytes/s that cross the link now."""
        if self._core_count[link] == 0:
            return self._solo_load[link]
        if self._core_dirty:
            self._solve()
        return float(load_on(self._core, link))

    def active_flows(self) -> list[int]:
        """Flows under way (or finished but not yet reported by `advance`), by number; no packets."""
        in_core = [flow for flow in self._slot_of if flow not in self._told]
        return sorted([*self._solo, *in_core, *(flow for _, flow in self._done)])

    def flows_on(self, link: int) -> list[int]:
        """Flows under way on the link, by number."""
        in_core = [flow for flow, slot in self._slot_of.items() if link in self._links_in[slot]]
        return sorted([*self._solo_flows[link], *in_core])

    def is_settled(self) -> bool:
        """Whether the next question is answered without solving: nothing has changed, or only for solo flows."""
        return not self._core_dirty

    def effort(self) -> dict[str, int]:
        """How much work the solver did: solves, links scanned, levels that moved."""
        counters = self._core.counters
        return {"solves": int(counters[SOLVES]), "scans": int(counters[SCANS]), "moved": int(counters[MOVED])}

    # ------------------------------------------------------------ inside

    def _move_to(self, now_s: float) -> None:
        """Bring the clock to `now_s`; what ends by then waits in `_done`."""
        if now_s < self._now_s:
            raise ValueError(f"time {now_s!r} s lies before the engine's clock {self._now_s!r} s; it never goes back")
        if not now_s < INFINITY:
            raise ValueError(f"time is {now_s} s; expected a finite number")
        if now_s > self._now_s:
            if self._core_dirty:
                self._solve()
            self._collect(now_s)
            self._now_s = now_s

    def _collect(self, now_s: float) -> None:
        packets = self._packets
        while packets and packets[0][0] <= now_s:
            self._end_packet(heappop(packets))
        heap = self._solo_heap
        while heap and heap[0][0] <= now_s:
            finish_s, flow = heappop(heap)
            solo = self._solo.get(flow)
            if solo is not None:
                self._end_solo(flow, solo)
                self._done.append((finish_s, flow))
        if self._core_dirty:
            self._solve()
        if self._core_next_s <= now_s:
            count, self._core_next_s = run_until(self._core, now_s)
            slots = self._core.flow_i[:count, DONE].tolist()
            times = self._core.flow_f[:count, DONE_S].tolist()
            for slot, finish_s in zip(slots, times, strict=True):
                if self._flow_in[slot] not in self._told:
                    self._done.append((finish_s, self._flow_in[slot]))
                self._forget(slot)

    def _end_solo(self, flow: int, solo: _Solo) -> None:
        del self._solo[flow]
        load, solo_flows, packets, rate = self._solo_load, self._solo_flows, self._packet_count, solo.rate
        for link in solo.links:
            others = solo_flows[link]
            del others[flow]
            load[link] = load[link] - rate if others or packets[link] else 0.0

    def _end_packet(self, packet: _Packet) -> None:
        load, solo_flows, packets, rate = self._solo_load, self._solo_flows, self._packet_count, packet[3]
        for link in packet[2]:
            packets[link] -= 1
            load[link] = load[link] - rate if packets[link] or solo_flows[link] else 0.0

    def _leave_solo(self, links: Sequence[int]) -> None:
        """Hand every solo flow on these links to the core, and all that share links with them, and so on."""
        waiting = list(links)
        while waiting:
            link = waiting.pop()
            for flow in list(self._solo_flows[link]):
                solo = self._solo[flow]
                self._end_solo(flow, solo)
                left = max(0.0, solo.size_bytes - solo.rate * (self._now_s - solo.start_s))
                self._join_core(flow, solo.links, left, solo.weight, solo.bound)
                waiting.extend(solo.links)
            for packet in self._packets_off(link):
                self._end_packet(packet)
                finish_s, flow, on, rate, weight, bound = packet
                self._told.add(flow)
                self._join_core(flow, on, rate * (finish_s - self._now_s), weight, bound)
                waiting.extend(on)

    def _packets_off(self, link: int) -> list[_Packet]:
        """Take the packets on a link out of the heap."""
        if not self._packet_count[link]:
            return []
        leaving = sorted(packet for packet in self._packets if link in packet[2])
        self._packets = [packet for packet in self._packets if link not in packet[2]]
        heapify(self._packets)
        return leaving

    def _join_core(self, flow: int, links: Sequence[int], size_bytes: float, weight: float, bound: float) -> None:
        bound_link = 0
        if bound < INFINITY:
            bound_link = self.add_link(bound)
            links = (*links, bound_link)
        count = len(links)
        if len(set(links)) != count:
            raise ValueError(f"links {list(links)} of a flow name one link twice; expected each once")
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = len(self._flow_in)
            self._flow_in.append(0)
            self._links_in.append(())
            self._bound_link_in.append(0)
            self._size_in.append(0.0)
        width = (self._core.flow_i.shape[1] - FIRST) // 2
        if slot >= self._core.flow_f.shape[0] or count > width:
            self._core = grown(self._core, links=0, flows=2 * slot, width=count, pool=0)
        if count > len(self._path):
            self._path = np.zeros(2 * count, np.int64)
            self._path_view = memoryview(self._path.data)
        for i in range(count):
            self._path_view[i] = links[i]
        while not attach(self._core, slot, self._path, count, weight, float(size_bytes)):
            self._core = grown(self._core, links=0, flows=0, width=0, pool=2 * self._core.member_f.shape[1])
        self._flow_in[slot] = flow
        self._links_in[slot] = links
        self._bound_link_in[slot] = bound_link
        self._size_in[slot] = size_bytes
        self._slot_of[flow] = slot
        for link in links:
            self._core_count[link] += 1
            self._solo_load[link] = INFINITY
        self._core_dirty = True

    def _forget(self, slot: int) -> None:
        """A flow has left the core: free its slot, its private link, and the links that the core no longer uses."""
        for link in self._links_in[slot]:
            self._core_count[link] -= 1
            if self._core_count[link] == 0:
                self._solo_load[link] = 0.0
        if self._bound_link_in[slot]:
            self._free_links.append(self._bound_link_in[slot])
        del self._slot_of[self._flow_in[slot]]
        self._told.discard(self._flow_in[slot])
        self._links_in[slot] = ()
        self._free_slots.append(slot)

    def _solve(self) -> None:
        self._core_next_s = float(solve(self._core, self._now_s))
        self._core_dirty = False
