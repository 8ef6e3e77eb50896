"""How many devices were at work, over time, and which were busiest: small counters, filled from a run's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

SECOND_NS = 1_000_000_000
BINS_MAX = 240
BUSIEST = 8


class DeviceUse:
    """Work by instant and by node. Bins double in width whenever there are too many, so any run fits."""

    def __init__(self) -> None:
        self.bin_ns = 1_000_000  # 1 ms to begin with
        self.end_ns = 0
        self._busy_ns: Counter[int] = Counter()
        self._by_node: Counter[str] = Counter()

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        if event["kind"] != "compute":
            return
        start_ns, end_ns = event["start_ns"], event["end_ns"]
        self._by_node[event["node"]] += end_ns - start_ns
        self.end_ns = max(self.end_ns, end_ns)
        while end_ns // self.bin_ns >= BINS_MAX:
            self._widen()
        for place in range(start_ns // self.bin_ns, end_ns // self.bin_ns + 1):
            low_ns, high_ns = place * self.bin_ns, (place + 1) * self.bin_ns
            self._busy_ns[place] += min(end_ns, high_ns) - max(start_ns, low_ns)

    def _widen(self) -> None:
        self.bin_ns *= 2
        halved: Counter[int] = Counter()
        for place, busy_ns in self._busy_ns.items():
            halved[place // 2] += busy_ns
        self._busy_ns = halved

    def as_json(self) -> dict[str, Any]:
        """Devices at work per bin, and seconds of the busiest; empty when none ever worked."""
        if not self._by_node:
            return {}
        last = self.end_ns // self.bin_ns
        return {
            "bin_s": self.bin_ns / SECOND_NS,
            "devices": [self._busy_ns[place] / self.bin_ns for place in range(last + 1)],
            "end_s": self.end_ns / SECOND_NS,
            "busiest_s": {node: busy_ns / SECOND_NS for node, busy_ns in self._by_node.most_common(BUSIEST)},
        }
