"""How much the links and devices were used, in bins of time: small counters that a run keeps for its report."""

from __future__ import annotations

from collections import Counter
from typing import Any

BINS_MAX = 240


class Traffic:
    """Bytes sent, by instant and by node. Bins double in width whenever there are too many, so any run fits."""

    def __init__(self) -> None:
        self.bin_ns = 1_000_000  # 1 ms to begin with
        self._bytes: Counter[int] = Counter()
        self.sent: Counter[int] = Counter()  # bytes by node
        self.received: Counter[int] = Counter()

    def message(self, now_ns: int, source: int, target: int, size_bytes: int) -> None:
        """A message of `size_bytes` starts."""
        place = now_ns // self.bin_ns
        if place >= BINS_MAX:
            self._widen(place)
            place = now_ns // self.bin_ns
        self._bytes[place] += size_bytes
        self.sent[source] += size_bytes
        self.received[target] += size_bytes

    def _widen(self, place: int) -> None:
        while place >= BINS_MAX:
            self.bin_ns, place = 2 * self.bin_ns, place // 2
            self._bytes = self._halved()

    def _halved(self) -> Counter[int]:
        halved: Counter[int] = Counter()
        for place, count in self._bytes.items():
            halved[place // 2] += count
        return halved

    def as_json(self, names: list[str]) -> dict[str, Any]:
        """Mbit/s per bin, and bytes of the busiest nodes; `names` by node number."""
        last = max(self._bytes, default=-1)
        bits = [8 * self._bytes[i] for i in range(last + 1)]
        return {
            "bin_s": self.bin_ns / 1e9,
            "mbit_s": [round(b / 1e6 / (self.bin_ns / 1e9), 6) for b in bits],
            "sent_bytes": {names[i]: count for i, count in self.sent.most_common(20)},
            "received_bytes": {names[i]: count for i, count in self.received.most_common(20)},
            "total_bytes": self.sent.total(),
        }
