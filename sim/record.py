"""The run's log: one JSON line per event, in the order of the documented clock.

`events.jsonl` is the source of the figures of a kind of run, its table and its plots (how a run ended, its checks,
bytes sent and curves of links come from elsewhere: `sim/EVENTS.md`). A line is
{"t_ns": integer nanoseconds, "kind": word, "node": name, ...}. It is the same on every run with the same seed.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO


class EventLog:
    """Writes events to a file as they happen, and tells listeners."""

    def __init__(self, path: Path | None = None) -> None:
        self._file: TextIO | None = path.open("w", encoding="utf-8") if path is not None else None
        self._listeners: list[Callable[[dict[str, Any]], None]] = []
        self.counts: Counter[str] = Counter()

    def listen(self, listener: Callable[[dict[str, Any]], None]) -> None:
        """Call `listener` with each event."""
        self._listeners.append(listener)

    def event(self, time_ns: int, kind: str, node: str, **fields: Any) -> None:
        self.counts[kind] += 1
        record = {"t_ns": time_ns, "kind": kind, "node": node, **fields}
        for listener in self._listeners:
            listener(record)
        if self._file is not None:
            self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class LogReader:
    """Goes once through the log of a finished run, and knows its hash and how far it is."""

    def __init__(self, path: Path) -> None:
        self.path, self.count = path, 0
        self._size_bytes, self._read_bytes = max(1, path.stat().st_size), 0
        self._hash = hashlib.sha256()

    def share(self) -> float:
        """How much has been read, 0 to 1."""
        return self._read_bytes / self._size_bytes

    @property
    def sha256(self) -> str:
        """Of the lines that have been read."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Its events. Raises ValueError with file and line for a line that is no event."""
        with self.path.open("rb") as lines:
            for self.count, line in enumerate(lines, 1):
                self._hash.update(line)
                self._read_bytes += len(line)
                try:
                    record = json.loads(line)
                    if not {"t_ns", "kind", "node"} <= record.keys():
                        raise ValueError("t_ns, kind and node were expected")
                except (ValueError, AttributeError) as error:
                    raise ValueError(f"{self.path}, line {self.count}: not an event: {error}") from None
                yield record


def read_events(path: Path) -> Iterator[dict[str, Any]]:
    """Events of a finished run, as `LogReader` reads them."""
    return iter(LogReader(path))
