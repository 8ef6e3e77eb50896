"""Why: the incremental engine is clever; this is its dull twin, short enough to believe, for tests to compare with.

Progressive filling, from scratch at every change: raise the level of all flows together until a link is full or a flow
is at its bound; fix those; go on with the rest. Same interface as `sim.flows.FlowEngine` as far as the tests need it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def fair_rates(
    capacity: dict[int, float], paths: dict[int, Sequence[int]], weight: dict[int, float], bound: dict[int, float]
) -> dict[int, float]:
    """Weighted max-min fair rates: no flow can gain except by taking from one with no larger rate per weight."""
    spare = dict(capacity)
    rising = dict.fromkeys(sorted(paths))
    rates: dict[int, float] = {}
    while rising:
        weight_on: dict[int, float] = {}
        for flow in rising:
            for link in paths[flow]:
                weight_on[link] = weight_on.get(link, 0.0) + weight[flow]
        levels = {link: max(spare[link], 0.0) / weight_on[link] for link in weight_on}
        level = min(
            min(levels.values(), default=math.inf),
            min((bound[flow] / weight[flow] for flow in rising), default=math.inf),
        )
        full = {link for link in levels if levels[link] <= level * (1 + 1e-14)}
        for flow in list(rising):
            if bound[flow] / weight[flow] <= level * (1 + 1e-14) or any(link in full for link in paths[flow]):
                rates[flow] = level * weight[flow]
                del rising[flow]
                for link in paths[flow]:
                    spare[link] -= rates[flow]
    return rates


@dataclass
class _Flow:
    links: tuple[int, ...]
    left_bytes: float
    weight: float
    bound: float


class PlainFlowEngine:
    """`FlowEngine`, the slow and obvious way."""

    def __init__(self) -> None:
        self._now_s = 0.0
        self._capacity: dict[int, float] = {}
        self._flows: dict[int, _Flow] = {}
        self._rates: dict[int, float] = {}
        self._done: list[tuple[int, float]] = []
        self._next_flow = 0

    def add_link(self, capacity_bytes_per_s: float) -> int:
        self._capacity[len(self._capacity) + 1] = capacity_bytes_per_s
        return len(self._capacity)

    def set_capacity(self, now_s: float, link: int, capacity_bytes_per_s: float) -> None:
        self._move_to(now_s)
        self._capacity[link] = capacity_bytes_per_s
        self._solve()

    def start(
        self,
        now_s: float,
        links: Sequence[int],
        size_bytes: float,
        *,
        weight: float = 1.0,
        rate_bound_bytes_per_s: float = math.inf,
    ) -> int:
        self._move_to(now_s)
        self._next_flow += 1
        if size_bytes == 0 or (not links and rate_bound_bytes_per_s == math.inf):
            self._done.append((self._next_flow, now_s))
        else:
            self._flows[self._next_flow] = _Flow(tuple(links), float(size_bytes), weight, rate_bound_bytes_per_s)
            self._solve()
        return self._next_flow

    def cancel(self, now_s: float, flow: int) -> float:
        self._move_to(now_s)
        if flow not in self._flows:
            self._done = [item for item in self._done if item[0] != flow]
            return 0.0
        left_bytes = self._flows.pop(flow).left_bytes
        self._solve()
        return left_bytes

    def next_event_s(self) -> float:
        return min([finish_s for _, finish_s in self._done] + [self._next_finish_s()])

    def advance(self, now_s: float) -> list[tuple[int, float]]:
        self._move_to(now_s)
        done, self._done = sorted(self._done, key=lambda item: (item[1], item[0])), []
        return done

    def rate(self, flow: int) -> float:
        return self._rates[flow]

    def link_load(self, link: int) -> float:
        return sum(self._rates[flow] for flow in self._flows if link in self._flows[flow].links)

    def _next_finish_s(self) -> float:
        return min(
            (self._now_s + f.left_bytes / self._rates[k] for k, f in self._flows.items() if self._rates[k] > 0),
            default=math.inf,
        )

    def _move_to(self, now_s: float) -> None:
        assert now_s >= self._now_s
        while self._flows and (finish_s := self._next_finish_s()) <= now_s:
            ended = [
                k
                for k, f in self._flows.items()
                if self._rates[k] > 0 and self._now_s + f.left_bytes / self._rates[k] <= finish_s * (1 + 1e-15)
            ]
            self._send_until(finish_s)
            for flow in ended:
                del self._flows[flow]
                self._done.append((flow, finish_s))
            self._solve()
        self._send_until(now_s)

    def _send_until(self, now_s: float) -> None:
        for key, flow in self._flows.items():
            flow.left_bytes = max(0.0, flow.left_bytes - self._rates[key] * (now_s - self._now_s))
        self._now_s = now_s

    def _solve(self) -> None:
        self._rates = fair_rates(
            self._capacity,
            {k: f.links for k, f in self._flows.items()},
            {k: f.weight for k, f in self._flows.items()},
            {k: f.bound for k, f in self._flows.items()},
        )
