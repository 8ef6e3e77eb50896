"""Why: checkers judge a run from outside; this gathers, as it runs, the little that they need to remember of its log.

Kinds of runs add what theirs need (`sim/kinds/*_facts.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Facts:
    """What has happened so far, whatever the run is about. Tell it of events by `event`."""

    services: Collection[str] = ()  # nodes that everybody depends on

    last_ns: int = 0
    back: list[str] = field(default_factory=list)  # where the clock of the log went back
    struck: Counter[str] = field(default_factory=Counter)  # faults in force, by node ("" for everybody)
    calm_ns: int = 0  # when the last fault, or change of a service, was
    up_ns: dict[str, int] = field(default_factory=dict)  # node -> when it came up; nodes that are down are absent

    def event(self, event: Mapping[str, Any]) -> None:
        """One line of the log."""
        now_ns, kind, node = event["t_ns"], event["kind"], event["node"]
        if now_ns < self.last_ns:
            self.back.append(f"{kind} of {node} at {now_ns} ns comes after an event at {self.last_ns} ns")
        self.last_ns = max(now_ns, self.last_ns)
        if kind == "fault":
            self._fault(event)
        elif kind in ("up", "down"):
            self._up_or_down(event)

    def _fault(self, event: Mapping[str, Any]) -> None:
        shared = event["fault"] == "partition" or event.get("of", "nodes") != "nodes"  # not on single nodes
        everybody = shared or any(name in self.services for name in event["on"])
        for name in [""] if everybody else event["on"]:
            self.struck[name] += 1 if event["begins"] else -1
        self.calm_ns = event["t_ns"]

    def _up_or_down(self, event: Mapping[str, Any]) -> None:
        node = event["node"]
        if event["kind"] == "up":
            self.up_ns[node] = event["t_ns"]
        else:
            self.up_ns.pop(node, None)
        if node in self.services:
            self.calm_ns = event["t_ns"]

    def excused(self, node: str) -> bool:
        """Whether a fault is in force on this node, or on what everybody needs."""
        return self.struck[""] > 0 or self.struck[node] > 0
