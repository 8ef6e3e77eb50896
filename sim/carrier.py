"""Carries the simulated world's messages over the flow-level network.

A message is a flow over its path's links; when its last byte has left the links, it still needs the path's latency.
Messages of one channel are handed over in the order in which they were sent, as over one connection; a channel is
(source, target, kind of message). Bulk data has no channel: parallel transfers may overtake each other.

A message of one packet that meets no other traffic keeps the rate with which it started, even if somebody comes within
its millisecond or two: its arrival is known at once, and costs one event instead of two. Its bytes still occupy the
links, for whoever comes. On a line so slow that one packet takes longer, packets share like everything else.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from sim.chance import Chance
from sim.kernel import LATE, NEVER_NS, SECOND_NS, Kernel, to_ns
from sim.network import Network, Path
from sim.reach import ChannelOrder
from sim.traffic import Traffic
from sim.world import Arrived

Channel = tuple[int, int, str]

PACKET_BYTES = 1448  # payload of one Ethernet frame with TCP timestamps
PACKET_S_MAX = 0.002  # 1448 bytes at 6 Mbit/s
GIVE_UP_NS = 127 * SECOND_NS
"""So long a connection is tried over a line that is down: six doubling waits from 1 s (Linux, tcp_syn_retries = 6)."""
INFINITY = float("inf")


class _Message:
    """One message under way."""

    __slots__ = (
        "arrival_ns", "arrived", "channel", "delay_s", "held_since_ns", "holder", "left", "links", "source", "target",
    )  # fmt: skip

    def __init__(self, source: int, target: int, delay_s: float, arrived: Arrived, channel: Channel | None) -> None:
        self.source, self.target, self.delay_s, self.arrived, self.channel = source, target, delay_s, arrived, channel
        self.links: tuple[int, ...] = ()
        self.arrival_ns = -1  # not known before its bytes have left the links
        self.left = 0.0  # bytes that are not booked as travelled
        self.holder = 0  # the link that gives it its rate, as last seen
        self.held_since_ns = 0


def _not_before(instant_s: float) -> int:
    """The first nanosecond that, as the engine's float seconds, is not before `instant_s`."""
    instant_ns = int(instant_s * SECOND_NS)
    while instant_ns / SECOND_NS < instant_s:
        instant_ns += 1
    return instant_ns


def _nothing(_: object) -> None:
    """What a lost message does."""


class FlowCarrier:
    """`sim.world.Carrier` over a `Network`."""

    def __init__(self, kernel: Kernel, network: Network, seed: int) -> None:
        self.kernel, self.network = kernel, network
        self._chance = Chance(seed)
        self.engine = network.engine
        self.unreachable = network.unreachable
        self.bytes_sent = 0
        self.messages_sent = 0
        self.messages_lost = 0
        self._flows: dict[int, _Message] = {}
        self._begun: list[int] = []  # flows that no link is known to hold yet
        self.traffic = Traffic(network, self.book_until_now)
        self._wake_ns = NEVER_NS  # when the next look at the engine is scheduled
        self._settling = False
        self._channels: dict[Channel, deque[_Message]] = {}  # messages whose bytes, or whose elders', are on the links
        self._order = ChannelOrder()

    def send(
        self, source: int, target: int, size_bytes: int, arrived: Arrived, kind: str | None, *, reply: bool = False
    ) -> None:
        """Start a message; `arrived` is called on behalf of `target` when it has come, if it comes."""
        self.messages_sent += 1
        now_ns = self.kernel._now
        if source == target:
            self.kernel.call_at(target, now_ns, arrived, None)
            return
        self.bytes_sent += size_bytes
        traffic = self.traffic
        if now_ns >= traffic.until_ns:
            traffic.book(now_ns, self._flows)
        network = self.network
        path = network.path(source, target, reply=reply)
        chance, delay_s, jitters = self._chance.of(path.channel, now_ns), path.one_way_latency_s, path.jitters
        if len(jitters) == 1 and not path.loss:
            delay_s += jitters[0].draw(delay_s, chance.random())
        elif jitters or path.loss:
            delay_s = network.sample_delay_s(path, chance, size_bytes)
        channel = None if kind is None else (source, target, kind)
        if network.disturbs_messages:
            fate = network.fate(path, chance)
            if not fate.extra_delay_s:  # lost: its bytes are sent all the same, and nobody waits behind it
                self.messages_lost += 1
                arrived, channel = _nothing, None
            else:
                delay_s += fate.extra_delay_s[0]
                if not fate.in_order:
                    channel = None
                for _ in fate.extra_delay_s[1:]:  # a handler runs at most once: further copies only take bytes
                    self._transmit(path, source, target, size_bytes, delay_s, _nothing, None)
        first = network.transport.latency_first  # the links are taken only after the latency
        if size_bytes <= PACKET_BYTES and not first and channel not in self._channels:
            finish_s = self.engine.packet(
                now_ns / SECOND_NS,
                path.links,
                size_bytes,
                weight=path.weight,
                rate_bound_bytes_per_s=path.rate_bound_bytes_per_s,
                within_s=PACKET_S_MAX,
            )
            if finish_s != INFINITY:
                arrival_ns = to_ns(finish_s + delay_s)
                if channel is not None:
                    arrival_ns = self._order.arrival(channel, arrival_ns, now_ns)
                self.kernel.call_at(target, arrival_ns, arrived, None)
                traffic.add(path.links, size_bytes)
                return
        self._transmit(path, source, target, size_bytes, delay_s, arrived, channel)

    def _transmit(
        self,
        path: Path,
        source: int,
        target: int,
        size_bytes: int,
        delay_s: float,
        arrived: Arrived,
        channel: Channel | None,
    ) -> None:
        """Send as a flow, in its turn within its channel."""
        first = self.network.transport.latency_first
        message = _Message(source, target, 0.0 if first else delay_s, arrived, channel)
        message.links = path.links
        if channel is not None:
            self._channels.setdefault(channel, deque()).append(message)
        if first:
            start_ns = self.kernel._now + to_ns(delay_s)
            self.kernel.call_at(source, start_ns, lambda _: self._begin(message, path, size_bytes), None)
        else:
            self._begin(message, path, size_bytes)

    def _begin(self, message: _Message, path: Path, size_bytes: int) -> None:
        """The message's bytes take the links."""
        self.links_will_change()
        flow = self.engine.start(
            self.kernel._now / SECOND_NS,
            path.links,
            size_bytes,
            weight=path.weight,
            rate_bound_bytes_per_s=path.rate_bound_bytes_per_s,
        )
        self._enter(flow, message, size_bytes)
        self._look_again()

    def _enter(self, flow: int, message: _Message, size_bytes: int) -> None:
        """The message is a flow from now on, whose bytes are booked as they travel."""
        message.left = float(size_bytes)
        message.held_since_ns = self.kernel._now
        self._flows[flow] = message
        self._begun.append(flow)
        if self.network.closes_links and self.network.is_cut(message.links):
            self.kernel.call_at(message.source, self.kernel._now + GIVE_UP_NS, self._give_up, flow)

    def _give_up(self, flow: int) -> None:
        """Its line was down when it began: if it still is, nobody tries any longer."""
        message = self._flows.get(flow)
        if message is not None and self.network.is_cut(message.links):
            message.arrived = _nothing
            self._break_off(flow, message, self.kernel._now)
            self._look_again()

    def reset(self, source: int, target: int, arrived: Arrived) -> None:
        """`target` learns, after the path's latency, that `source` is gone: a dead node sends nothing, but its host or
        the network does, in a packet that waits behind nobody."""
        path = self.network.path(source, target, reply=True)
        self.kernel.call_at(target, self.kernel._now + to_ns(path.one_way_latency_s), arrived, None)

    def drop(self, node: int) -> None:
        """The node died. What it was sending never arrives; what was on its way to it breaks off now, and its sender
        learns so after the path's latency, as over a connection that is reset."""
        now_ns = self.kernel._now
        self.links_will_change()
        for flow, message in list(self._flows.items()):
            if node not in (message.source, message.target):
                continue
            if message.source == node:
                message.arrived = _nothing
            self._break_off(flow, message, now_ns + to_ns(message.delay_s))
        self._look_again()

    def _break_off(self, flow: int, message: _Message, arrival_ns: int) -> None:
        """No more of its bytes travel; it counts as come at `arrival_ns`, whatever that then does."""
        now_ns = self.kernel._now
        self.traffic.ended(message, now_ns, self.engine.cancel(now_ns / SECOND_NS, flow))
        del self._flows[flow]
        self._hand_on(message, arrival_ns)

    def _hand_on(self, message: _Message, arrival_ns: int) -> None:
        """It arrives then, or when its elders have."""
        message.arrival_ns = arrival_ns
        if message.channel is None:
            self.kernel.call_at(message.target, arrival_ns, message.arrived, None)
        else:
            self._in_turn(message.channel)

    def links_will_change(self) -> None:
        """Something beside a message is about to change the engine: what has travelled is booked before."""
        now_ns = self.kernel._now
        if now_ns >= self.traffic.until_ns:
            self.traffic.book(now_ns, self._flows)

    def book_until_now(self) -> None:
        """Book all that has travelled, at the end of a run."""
        self.traffic.book(self.kernel._now, self._flows, closing=True)

    def links_changed(self) -> None:
        """Something beside a message changed the engine: a fault was laid on or lifted."""
        self._look_again()

    def flows_under_way(self) -> Iterator[tuple[int, int, int, tuple[int, ...]]]:
        """(source, target, flow, links) of every message whose bytes are on the links."""
        for flow, message in self._flows.items():
            yield message.source, message.target, flow, message.links

    def under_way(self) -> Iterator[tuple[str, int, int]]:
        """All that is on the links, as ("flow" or "channel", source, target)."""
        for message in self._flows.values():
            yield "flow", message.source, message.target
        for source, target, _ in self._channels:
            yield "channel", source, target

    # ------------------------------------------------------------------------------------------- the engine's events
    def _look_again(self) -> None:
        if self.engine.is_settled():
            self._schedule_wake()
        elif not self._settling:  # all changes of this instant are solved as one batch, after the last of them
            self._settling = True
            self.kernel.call_at(0, self.kernel._now, self._settle, None, LATE)

    def _settle(self, _: object) -> None:
        self._settling = False
        self._schedule_wake()

    def _schedule_wake(self) -> None:
        next_s = self.engine.next_event_s()
        if self._begun:
            self._see_holders()
        if next_s == float("inf"):
            return
        wake_ns = max(_not_before(next_s), self.kernel._now)
        if wake_ns < self._wake_ns:
            self._wake_ns = wake_ns
            self.kernel.call_at(0, wake_ns, self._wake, None)

    def _see_holders(self) -> None:
        """All flows that have begun now have a rate: note the links that give it to them."""
        begun, self._begun = self._begun, []
        for flow in begun:
            if (message := self._flows.get(flow)) is not None:
                message.holder = self.engine.held_by(flow)

    def _wake(self, _: object) -> None:
        now_ns = self.kernel._now
        if now_ns < self._wake_ns:  # scheduled before an earlier look took its place
            return
        self._wake_ns = NEVER_NS
        self._take_finished(now_ns)
        self._schedule_wake()

    def _take_finished(self, now_ns: int) -> None:
        """Send on what has left the links."""
        self.links_will_change()
        for flow, finish_s in self.engine.advance(now_ns / SECOND_NS):
            message = self._flows.pop(flow)
            self.traffic.ended(message, now_ns)
            self._hand_on(message, max(to_ns(finish_s + message.delay_s), now_ns))

    def _in_turn(self, channel: Channel) -> None:
        """Schedule the channel's messages, first to last, as far as their arrivals are known."""
        queue = self._channels[channel]
        now_ns = self.kernel._now
        while queue and queue[0].arrival_ns >= 0:
            message = queue.popleft()
            arrival_ns = self._order.arrival(channel, message.arrival_ns, now_ns)
            self.kernel.call_at(message.target, arrival_ns, message.arrived, None)
        if not queue:
            del self._channels[channel]
