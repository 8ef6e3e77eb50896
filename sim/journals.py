"""Why: real nodes write what happens into files of their own, which outlive them; here they become one log of a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journals:
    """The journals of a run's nodes, read as they grow."""

    def __init__(self, paths: dict[str, Path]) -> None:
        """`paths`: by node; a journal need not be there yet."""
        self.paths = paths
        self.records: list[tuple[int, str, int, Record]] = []  # time, node, place in its journal, record
        self.torn = 0  # lines that a dying process left unfinished
        self._read = dict.fromkeys(paths, 0)  # bytes
        self._lines = dict.fromkeys(paths, 0)

    def fresh(self) -> Iterator[Record]:
        """What has been written since the last time, journal by journal."""
        for name, path in self.paths.items():
            if not path.exists() or path.stat().st_size <= self._read[name]:
                continue
            with path.open("rb") as file:
                file.seek(self._read[name])
                text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read[name] += len(whole)
            for line in whole.splitlines():
                try:
                    record: Record = json.loads(line)
                except ValueError:
                    self.torn += 1
                    continue
                self._lines[name] += 1
                self.records.append((record["t_ns"], name, self._lines[name], record))
                yield record

    def merge(self, path: Path) -> list[Record]:
        """All of it as one log, by time, then node, then place; written to `path`."""
        for _ in self.fresh():
            pass
        self.records.sort(key=lambda entry: entry[:3])
        found = [record for *_, record in self.records]
        with path.open("w", encoding="utf-8") as out:
            for record in found:
                out.write(json.dumps(record, separators=(",", ":")) + "\n")
        return found
