"""When each node was busy: spans for a timeline that opens in Perfetto, and idle shares for the summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from refimpl.journal import Journal
from refimpl.work import Hash, Work
from refimpl.world import World

T = TypeVar("T")


class Watched:
    """A world that notes when its device was at work; everything else is the world's own."""

    def __init__(self, world: World, label: str, journal: Journal) -> None:
        self._world, self._label, self._journal = world, label, journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world, name)

    async def compute(self, work: Work | Callable[[T], Work], fn: Callable[[], T]) -> T:
        span: list[float] = []

        def timed() -> T:
            span.append(self._world.now())
            try:
                return fn()
            finally:
                span.append(self._world.now())

        result = await self._world.compute(work, timed)
        if len(span) == 2:
            label = "hash" if isinstance(work, Hash) else self._label
            self._journal("busy", what=label, start_s=round(span[0], 6), end_s=round(span[1], 6))
        return result


@dataclass(frozen=True)
class Idle:
    """How much of the run a node's device had nothing to do."""

    node: str
    busy_s: float
    whole_s: float

    @property
    def share(self) -> float:
        return max(0.0, 1.0 - self.busy_s / self.whole_s) if self.whole_s > 0 else 1.0


def read_events(files: Iterable[Path]) -> list[dict[str, Any]]:
    """All nodes' journals as one list, by time. A last line that a killed node did not finish is left out."""
    events = []
    for file in files:
        for line in file.read_bytes().splitlines():
            try:
                events.append(json.loads(line))
            except ValueError:
                continue
    return sorted(events, key=lambda event: (event["t_ns"], event["node"]))


def idle_shares(events: Iterable[dict[str, Any]], nodes: Iterable[str]) -> list[Idle]:
    """Between the trainer's first and last step: what comes before is starting up, and nobody's fault."""
    seen = list(events)
    steps = [event for event in seen if event["kind"] == "busy" and event["what"] == "train"]
    begin_s = min((event["start_s"] for event in steps), default=0.0)
    end_s = max((event["end_s"] for event in steps), default=0.0)
    busy = dict.fromkeys(nodes, 0.0)
    for event in seen:
        if event["kind"] == "busy" and event["node"] in busy:
            busy[event["node"]] += max(0.0, min(event["end_s"], end_s) - max(event["start_s"], begin_s))
    return [Idle(node, spent_s, end_s - begin_s) for node, spent_s in busy.items()]


def overlap_share(events: Iterable[dict[str, Any]]) -> float:
    """Share of the time in which anybody was busy that at least two nodes were busy at once."""
    edges: list[tuple[float, int]] = []
    for event in events:
        if event["kind"] == "busy":
            edges += [(event["start_s"], 1), (event["end_s"], -1)]
    any_s = both_s = last_s = 0.0
    depth = 0
    for at_s, change in sorted(edges):
        any_s += (at_s - last_s) * (depth >= 1)
        both_s += (at_s - last_s) * (depth >= 2)
        depth, last_s = depth + change, at_s
    return both_s / any_s if any_s else 0.0


def write_trace(path: Path, events: Iterable[dict[str, Any]], roles: Mapping[str, str]) -> None:
    """The Chrome trace format: a row of spans for each node, broadcasts below the trainer's, marks for what arrived."""
    order = {node: number for number, node in enumerate(roles, start=1)}
    records: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"{roles[node]} {node}"}}
        for node, pid in order.items()
    ]
    began: dict[int, float] = {}
    for event in events:
        pid, at_us = order.get(event["node"], 0), event["t_ns"] / 1e3
        kind = event["kind"]
        if kind == "busy":
            duration_us = (event["end_s"] - event["start_s"]) * 1e6
            records.append(_span(event["what"], pid, 1, event["start_s"] * 1e6, duration_us))
        elif kind == "publishing":
            began[event["version"]] = at_us
        elif kind == "complete" and event["version"] in began:
            start_us = began[event["version"]]
            records.append(_span(f"weights {event['version']}", pid, 2, start_us, at_us - start_us))
        elif kind in ("taken", "denied", "expired", "version_skipped"):
            records.append({"ph": "i", "name": kind, "pid": pid, "tid": 1, "ts": at_us, "s": "t"})
    path.write_text(json.dumps({"traceEvents": records, "displayTimeUnit": "ms"}) + "\n", encoding="utf-8")


def _span(name: str, pid: int, tid: int, start_us: float, duration_us: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": round(start_us, 3), "dur": round(duration_us, 3)}
