"""Why: a picture of who did what when shows at a glance where a run lost its time; this draws it for Perfetto.

`trace.json` is in Chrome's JSON trace format: open it at ui.perfetto.dev. Every node is a process with the lanes
compute, serve, send, receive and wait (several of a lane where things overlap), and an arrow runs from each sending to
its receiving. Times are virtual.

A message is sent from when it was handed to the network until its last byte had left the links, and received from when
its first byte could have come (the path's latency later) until it was handed over; jitter and resends count as sending.
Messages that never arrive are not drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from sim.world import SimWorld

EVENTS_MAX = 200_000
LANES = ("compute", "serve", "send", "receive", "wait")
COMPUTE, SERVE, SEND, RECEIVE, WAIT = range(len(LANES))
NODE_STEP, LANE_STEP = 100_000, 10_000
"""A node's process id is its index + 1 (0 is the idle process to Perfetto); a lane's thread id is process id ·
NODE_STEP + lane · LANE_STEP + number among those of its kind, and so unique in the trace."""

Arrived = Callable[[object], None]
LatencyS = Callable[[int, int, bool], float]
Slice = tuple[int, int, int, int, str, dict[str, Any], int]
"""node, lane, start_ns, end_ns, name, arguments, flow (0: none)"""


def no_latency(source: int, target: int, reply: bool) -> float:
    """For networks whose latency is not known."""
    return 0.0


class Trace:
    """Collects slices while a run runs; `write` draws them."""

    def __init__(self, latency_s: LatencyS = no_latency, events_max: int = EVENTS_MAX) -> None:
        """`latency_s(source, target, reply)`: one way, of the path between two nodes by index."""
        self.latency_s, self.events_max = latency_s, events_max
        self.slices: list[Slice] = []
        self.names: dict[int, str] = {}
        self.cut_ns: int | None = None  # when it was full
        self._flows = 0

    def _add(self, node: SimWorld, lane: int, start_ns: int, end_ns: int, name: str, **more: Any) -> None:
        flow = more.pop("flow", 0)
        self.names.setdefault(node.index, node.name)
        self.slices.append((node.index, lane, start_ns, end_ns, name, more, flow))

    def _is_full(self, now_ns: int) -> bool:
        if len(self.slices) < self.events_max:
            return False
        if self.cut_ns is None:
            self.cut_ns = now_ns
        return True

    def compute(self, node: SimWorld, work: str, start_ns: int, end_ns: int) -> None:
        """The node's device works."""
        if not self._is_full(start_ns):
            self._add(node, COMPUTE, start_ns, end_ns, work)

    def serve(self, node: SimWorld, caller: SimWorld, kind: str, start_ns: int, end_ns: int) -> None:
        """A handler runs."""
        if not self._is_full(end_ns):
            self._add(node, SERVE, start_ns, end_ns, f"{kind} for {caller.name}")

    def wait(self, node: SimWorld, target: SimWorld, kind: str, start_ns: int, end_ns: int, outcome: str) -> None:
        """A caller waited for its answer."""
        if not self._is_full(end_ns):
            self._add(node, WAIT, start_ns, end_ns, f"{kind} at {target.name}", outcome=outcome)

    def message(
        self, source: SimWorld, target: SimWorld, kind: str, size: int, sent_ns: int, arrived: Arrived, reply: bool
    ) -> Arrived:
        """A message leaves; what is returned is called when it has arrived, and goes on to `arrived`."""
        if self._is_full(sent_ns) or source.index == target.index:
            return arrived

        def drawn(_: object) -> None:
            if self._is_full(sent_ns):
                return arrived(None)
            now_ns = source.fabric.kernel._now
            latency_ns = min(int(self.latency_s(source.index, target.index, reply) * 1e9), now_ns - sent_ns)
            self._flows += 1
            to = {"bytes": size, "flow": self._flows}
            self._add(source, SEND, sent_ns, now_ns - latency_ns, f"{kind} to {target.name}", **to)
            self._add(target, RECEIVE, sent_ns + latency_ns, now_ns, f"{kind} from {source.name}", **to)
            return arrived(None)

        return drawn

    # ------------------------------------------------------------------------------------------------ the drawing
    def note(self) -> str:
        """A sentence on what is in the trace, and what is not."""
        if self.cut_ns is None:
            return f"complete: {len(self.slices)} slices"
        return (
            f"cut: {len(self.slices)} slices were kept, the limit is {self.events_max}; most of what happened from "
            f"{self.cut_ns / 1e9:.3f} s on is missing"
        )

    def write(self, path: Path) -> None:
        """Draw everything into `path`."""
        with path.open("w", encoding="utf-8") as out:
            out.write('{"displayTimeUnit":"ns","otherData":' + json.dumps({"note": self.note()}) + ',"traceEvents":[')
            for place, event in enumerate(self.events()):
                out.write(("," if place else "") + "\n" + json.dumps(event, separators=(",", ":")))
            out.write("\n]}\n")

    def events(self) -> Iterator[dict[str, Any]]:
        """The trace's events, names first, then by time."""
        for index, name in sorted(self.names.items()):
            pid = index + 1
            yield _meta("process_name", pid, pid * NODE_STEP, name=name)
            yield _meta("process_sort_index", pid, pid * NODE_STEP, sort_index=index)
        free: dict[tuple[int, int], list[int]] = {}  # lanes of a node that are free again
        busy: dict[tuple[int, int], list[tuple[int, int]]] = {}  # until when others are not
        count: dict[tuple[int, int], int] = {}
        for index, lane, start_ns, end_ns, name, more, flow in sorted(self.slices, key=lambda s: (s[2], s[3], s[:2])):
            key = (index, lane)
            idle, used = free.setdefault(key, []), busy.setdefault(key, [])
            while used and used[0][0] <= start_ns:
                heappush(idle, heappop(used)[1])
            if idle:
                tid = heappop(idle)
            else:
                count[key] = count.get(key, 0) + 1
                tid = (index + 1) * NODE_STEP + lane * LANE_STEP + count[key]
                yield _meta("thread_name", index + 1, tid, name=LANES[lane])
                yield _meta("thread_sort_index", index + 1, tid, sort_index=tid % NODE_STEP)
            heappush(used, (max(end_ns, start_ns + 1), tid))
            where = {"pid": index + 1, "tid": tid, "ts": start_ns / 1e3}
            duration_us = max(end_ns - start_ns, 1) / 1e3
            yield {"ph": "X", "name": name, "cat": LANES[lane], "dur": duration_us, "args": more, **where}
            if flow:
                end = {"ph": "s"} if lane == SEND else {"ph": "f", "bp": "e"}
                yield {**end, "id": flow, "name": "message", "cat": "message", **where}
        if self.cut_ns is not None:
            yield {
                "ph": "i",
                "s": "g",
                "name": f"trace {self.note()}",
                "pid": 1,
                "tid": NODE_STEP,
                "ts": self.cut_ns / 1e3,
            }


def _meta(what: str, pid: int, tid: int, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}
