"""Why: a life of nodes that was measured somewhere, or drawn once and looked at, is a text file like any other.

One line an event: `time_s,node,event,disk_kept`. What is written is read back to the nanosecond.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from decimal import Decimal, InvalidOperation

from sim.churn import NS, ChurnEvent

TRACE_HEADER = ("time_s", "node", "event", "disk_kept")


def write_trace(events: Iterable[ChurnEvent]) -> str:
    """The events as CSV text; times in seconds with nine decimals, so nothing is lost."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(TRACE_HEADER)
    for event in events:
        seconds, rest = divmod(event.time_ns, NS)
        writer.writerow((f"{seconds}.{rest:09d}", event.node, event.kind, "yes" if event.disk_kept else "no"))
    return out.getvalue()


def read_trace(text: str, file: str = "trace") -> list[ChurnEvent]:
    """Events from CSV text with the columns time_s, node, event (join, leave, restart), disk_kept (yes, no).

    Raises ValueError with file, line, field, value and expectation, also when a node leaves before it joined.
    """
    rows = csv.reader(io.StringIO(text))
    header = tuple(next(rows, ()))
    if header != TRACE_HEADER:
        raise ValueError(f"{file}: line 1 is {','.join(header)!r}; expected {','.join(TRACE_HEADER)!r}")
    events = [_trace_event(row, f"{file}: line {rows.line_num}") for row in rows if row]
    events.sort(key=lambda event: event.time_ns)  # stable: what a file says in one instant stays in its order
    present: set[str] = set()
    for event in events:
        if (event.kind == "join") == (event.node in present):
            state = "is there" if event.node in present else "is not there"
            raise ValueError(f"{file}: {event.node!r} cannot {event.kind} at {event.time_ns / NS:g} s: it {state}")
        if event.kind == "join":
            present.add(event.node)
        elif event.kind == "leave":
            present.remove(event.node)
    events.sort(key=lambda event: (event.time_ns, event.node))
    return events


def _trace_event(row: list[str], place: str) -> ChurnEvent:
    if len(row) != len(TRACE_HEADER):
        raise ValueError(f"{place} has {len(row)} fields; expected {len(TRACE_HEADER)}")
    time_s, node, kind, disk = row
    try:
        time_ns = int((Decimal(time_s) * NS).to_integral_value())
    except (InvalidOperation, OverflowError, ValueError):
        raise ValueError(f"{place}: time_s is {time_s!r}; expected seconds") from None
    if time_ns < 0:
        raise ValueError(f"{place}: time_s is {time_s!r}; expected at least 0")
    if kind not in ("join", "leave", "restart"):
        raise ValueError(f"{place}: event is {kind!r}; expected join, leave or restart")
    if disk not in ("yes", "no"):
        raise ValueError(f"{place}: disk_kept is {disk!r}; expected yes or no")
    return ChurnEvent(time_ns, node, kind, disk == "yes")  # type: ignore[arg-type]
