"""Carries the simulated world's messages over the flow-level network.

A message is a flow over its path's links; when its last byte has left the links, it still needs the path's latency.
Messages of one channel (source, target) arrive in the order in which they were sent, as over one connection.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
from simpy.events import Event

from sim.kernel import LATE, SECOND_NS, Kernel, to_ns
from sim.network import Network

Arrived = Callable[[], None]

NEVER_NS = 1 << 62


class FlowCarrier:
    """`sim.world.Carrier` over a `Network`."""

    def __init__(self, kernel: Kernel, network: Network, rng: np.random.Generator) -> None:
        self.kernel, self.network, self.rng = kernel, network, rng
        self.engine = network.engine
        self.bytes_sent = 0
        self.messages_sent = 0
        self._flows: dict[int, tuple[int, int, float, Arrived]] = {}  # flow -> source, target, delay, arrived
        self._wake_ns = NEVER_NS  # when the next look at the engine is scheduled
        self._settling = False
        self._last_ns: dict[tuple[int, int], int] = {}  # channel -> its latest arrival

    def unreachable(self, source: int, target: int) -> str | None:
        return self.network.unreachable(source, target)

    def send(self, source: int, target: int, size_bytes: int, arrived: Arrived) -> None:
        self.messages_sent += 1
        now_ns = cast(int, self.kernel._now)
        if source == target:
            self.kernel.at(target, now_ns, lambda _: arrived())
            return
        self.bytes_sent += size_bytes
        path = self.network.path(source, target)
        delay_s = self.network.sample_delay_s(path, self.rng)
        flow = self.engine.start(
            now_ns / SECOND_NS,
            path.links,
            size_bytes,
            weight=path.weight,
            rate_bound_bytes_per_s=path.rate_bound_bytes_per_s,
        )
        self._flows[flow] = (source, target, delay_s, arrived)
        if self.engine.is_settled():
            self._schedule_wake()
        elif not self._settling:  # all changes of this instant are solved as one batch, after the last of them
            self._settling = True
            self.kernel.at(0, now_ns, self._settle, LATE)

    def _settle(self, _: Event) -> None:
        self._settling = False
        self._schedule_wake()

    def _schedule_wake(self) -> None:
        next_s = self.engine.next_event_s()
        if next_s == float("inf"):
            return
        wake_ns = max(to_ns(next_s), cast(int, self.kernel._now))
        if wake_ns < self._wake_ns:
            self._wake_ns = wake_ns
            self.kernel.at(0, wake_ns, self._wake)

    def _wake(self, _: Event) -> None:
        now_ns = cast(int, self.kernel._now)
        if now_ns < self._wake_ns:  # a later look had been scheduled first, and this one is for what has ended since
            return
        self._wake_ns = NEVER_NS
        for flow, finish_s in self.engine.advance(now_ns / SECOND_NS):
            entry = self._flows.pop(flow, None)
            if entry is None:
                continue
            source, target, delay_s, arrived = entry
            channel = (source, target)
            arrival_ns = max(to_ns(finish_s + delay_s), now_ns, self._last_ns.get(channel, 0))
            self._last_ns[channel] = arrival_ns
            self.kernel.at(target, arrival_ns, _Arrival(arrived))
        self._schedule_wake()


class _Arrival:
    """A callback that forgets the event it is called with."""

    __slots__ = ("_arrived",)

    def __init__(self, arrived: Arrived) -> None:
        self._arrived = arrived

    def __call__(self, _: Event) -> None:
        self._arrived()
