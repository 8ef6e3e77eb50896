"""How many devices were at work, over time, and which were busiest: small counters, filled from a run's log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from sim.traffic import SECOND_NS, Work

BUSIEST = 8
ALL = "all"


class DeviceUse:
    """Work by instant and by node."""

    def __init__(self) -> None:
        self._work = Work()  # of one group: all devices
        self._by_node: Counter[str] = Counter()

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        if event["kind"] != "compute":
            return
        start_ns, end_ns = event["start_ns"], event["end_ns"]
        self._by_node[event["node"]] += end_ns - start_ns
        self._work.add(ALL, start_ns, end_ns)

    def as_json(self) -> dict[str, Any]:
        """Devices at work per bin, and seconds of the busiest; empty when none ever worked."""
        if not self._by_node:
            return {}
        work = self._work
        last = work.end_ns // work.bin_ns
        return {
            "bin_s": work.bin_ns / SECOND_NS,
            "devices": [work.busy_ns[ALL][place] / work.bin_ns for place in range(last + 1)],
            "end_s": work.end_ns / SECOND_NS,
            "busiest_s": {node: busy_ns / SECOND_NS for node, busy_ns in self._by_node.most_common(BUSIEST)},
        }
