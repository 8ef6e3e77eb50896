"""Why: who sits where, behind which line, decides what a message meets; this turns two nodes into a path of links.

A path runs: uplink of the source, lines of its sites on the way out (campus, NAT box), trunk out of its region,
border, trunk into the target's region, lines of the target's sites, its downlink. Every line is two directed links of
the flow engine, so small messages and big transfers share the same bytes per second. Nothing is kept per pair of nodes
except a bounded cache: ten thousand nodes cost ten thousand records.

    latency of a path = access latency + half the regions' round trip + access latency, plus jitter per message

Who can be called by whom is in `sim/reach.py`; a path through a relay is one flow over both hops. A node reaches itself
at once, over no link.

Units: what users state is in Mbit/s (1e6 bit) and ms, as the names say; inside, bytes/s and s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, inf, log
from typing import NamedTuple

from sim.chance import Uniform, number_of
from sim.flows import FlowEngine
from sim.jitter import NO_JITTER, Jitter
from sim.link_faults import WHOLE, Condition, Direction, Fault, LinkFault, Partition, either
from sim.reach import NATS, Nat, Node, Place, hops_between
from sim.regions import Regions, region_set
from sim.transport import FAIR, Transport

BYTES_PER_S = 1e6 / 8
"""One Mbit/s."""
BORDER_BYTES_PER_S = 1e15
"""Of a border link: more than anything can send, until a partition closes it."""
PATHS_KEPT = 1 << 17
SHORT_SEGMENTS = 10
"""A message of up to so many segments leaves in one flight (Linux's initial window): each loss costs it a delay."""


class Path(NamedTuple):
    """What a message from one node to another meets."""

    links: tuple[int, ...]  # of the flow engine; empty for a node to itself
    one_way_latency_s: float
    round_trip_s: float
    loss: float  # of one packet
    rate_bound_bytes_per_s: float
    weight: float
    jitters: tuple[Jitter, ...]
    channel: int  # stands for who sends to whom, whatever their numbers


class Middle(NamedTuple):
    """What lies between the access lines of two places."""

    links: tuple[int, ...]
    latency_s: float  # one way
    rate_bound_bytes_per_s: float


class Fate(NamedTuple):
    """What message faults make of one message."""

    extra_delay_s: tuple[float, ...]  # one entry per copy that arrives: () means lost
    in_order: bool  # False: later messages may overtake it


DELIVERED = Fate((0.0,), True)


@dataclass(slots=True)
class _Line:
    """A directed link: what it carries when whole, and its state."""

    name: str
    capacity_bytes_per_s: float  # as stated, before payload efficiency
    faults: dict[str, LinkFault] = field(default_factory=dict)
    condition: Condition = WHOLE
    down_since_s: float = 0.0  # when it last ceased to carry anything


class Network:
    """Nodes, sites, regions and their lines, on one flow engine. Nodes are numbered from 0 in the order added."""

    def __init__(
        self,
        *,
        regions: str | Regions | Mapping[tuple[str, str], float] | None = None,
        jitter_ms: float = 0.0,
        jitter: Jitter = NO_JITTER,
        transport: Transport = FAIR,
        hole_punching: bool = False,
        single_flow_bound: bool = False,
        borders: bool = False,
        engine: FlowEngine | None = None,
    ) -> None:
        """`regions`: a named set, or round trips in ms by pair (one order of a pair is enough).

        `jitter_ms` is short for an exponential jitter of that mean on every path. `single_flow_bound`: no flow beats
        the set's measured single-flow rate. `borders`: give each pair of regions a link of its own, without limit, that
        a partition closes; needed for partitions, costs a little speed.
        """
        if jitter_ms and jitter is not NO_JITTER:
            raise ValueError(f"both jitter_ms = {jitter_ms} and a jitter law were given; expected one of them")
        self.engine = FlowEngine() if engine is None else engine
        self.transport = transport
        self.hole_punching = hole_punching
        self.single_flow_bound = single_flow_bound
        self.borders = borders
        self._regions = region_set(regions) if isinstance(regions, str) else regions
        law = Jitter("exponential", (jitter_ms / 1e3,)) if jitter_ms else jitter
        self._jitters: tuple[Jitter, ...] = () if law.is_none else (law,)
        self._nodes: list[Node] = []
        self._lines: dict[int, _Line] = {}
        self._sites: dict[str, tuple[int, int]] = {}  # name -> link out, link in
        self._trunks: dict[str, tuple[int, int]] = {}
        self._borders: dict[tuple[str, str], int] = {}
        self._faults: dict[str, Fault] = {}
        self._partitions: dict[str, Partition] = {}
        self._down: set[int] = set()  # links that carry nothing
        self._disturbed: set[int] = set()  # links with message faults
        self.disturbs_messages = False  # whether there are any
        self._all_open = True
        self._lossy: set[int] = set()  # links with packet loss of their own
        self.capacity_changes: list[tuple[float, int, float, float]] = []  # when, link, bytes/s before and after
        self._partition_s: dict[str, float] = {}  # since when
        self._paths: dict[int, Path] = {}
        self._places: dict[tuple[str | None, tuple[str, ...]], Place] = {}
        self._middles: dict[tuple[Place, Place], Middle] = {}

    # ------------------------------------------------------------ building

    def __len__(self) -> int:
        return len(self._nodes)

    def add_node(
        self,
        *,
        uplink_mbit_s: float,
        downlink_mbit_s: float,
        name: str | None = None,
        region: str | None = None,
        latency_ms: float = 0.0,
        loss_fraction: float = 0.0,
        jitter: Jitter = NO_JITTER,
        nat: Nat = "open",
        relay: int | None = None,
        sites: Sequence[str] = (),
    ) -> int:
        """A node and its access line. `latency_ms` and `loss_fraction` are one way, of the access line alone."""
        name = f"node {len(self._nodes)}" if name is None else name
        if not 0 <= latency_ms < inf:
            raise ValueError(f"latency_ms of {name} is {latency_ms}; expected a finite number, 0 or more")
        if not 0 <= loss_fraction < 1:
            raise ValueError(f"loss_fraction of {name} is {loss_fraction}; expected 0 or more and below 1")
        if nat not in NATS:
            raise ValueError(f"nat of {name} is {nat!r}; expected one of {', '.join(NATS)}")
        if nat == "relay_only" and relay is None:
            raise ValueError(f"{name} is relay_only and names no relay; expected the number of an open node")
        for site in sites:
            if site not in self._sites:
                raise ValueError(f"{name} is in site {site!r}; expected one of {', '.join(self._sites) or 'none'}")
        if region is not None and self._regions is not None:
            self._rtt_ms(region, region)
        node = Node(
            name=name,
            place=self._places.setdefault((region, tuple(sites)), Place(region, tuple(sites))),
            up=self._add_line(f"uplink of {name}", uplink_mbit_s),
            down=self._add_line(f"downlink of {name}", downlink_mbit_s),
            latency_s=latency_ms / 1e3,
            loss=loss_fraction,
            jitters=() if jitter.is_none else (jitter,),
            nat=nat,
            relay=relay,
        )
        self._all_open = self._all_open and nat == "open"
        self._nodes.append(node)
        return len(self._nodes) - 1

    def add_site(self, name: str, *, uplink_mbit_s: float, downlink_mbit_s: float) -> None:
        """A line that all nodes of a place share on the way out and in: a campus, a data centre, a NAT box."""
        if name in self._sites:
            raise ValueError(f"there are two sites called {name!r}; expected different names")
        up = self._add_line(f"uplink of site {name}", uplink_mbit_s)
        self._sites[name] = (up, self._add_line(f"downlink of site {name}", downlink_mbit_s))

    def add_trunk(self, region: str, *, out_mbit_s: float, in_mbit_s: float) -> None:
        """Lines that everything leaving and entering the region shares. Without them a region has no limit."""
        if region in self._trunks:
            raise ValueError(f"region {region!r} has a trunk already; expected one")
        out = self._add_line(f"trunk out of {region}", out_mbit_s)
        self._trunks[region] = (out, self._add_line(f"trunk into {region}", in_mbit_s))
        self._paths.clear()
        self._middles.clear()

    def _add_line(self, name: str, mbit_s: float) -> int:
        if not 0 < mbit_s < inf:
            raise ValueError(f"{name} has {mbit_s} Mbit/s; expected a finite number above 0")
        link = self.engine.add_link(mbit_s * BYTES_PER_S * self.transport.payload_efficiency)
        self._lines[link] = _Line(name, mbit_s * BYTES_PER_S)
        return link

    def _rtt_ms(self, a: str | None, b: str | None) -> float:
        if self._regions is None or a is None or b is None:
            return 0.0
        if isinstance(self._regions, Regions):
            return self._regions.rtt_ms(a, b)
        rtt_ms = self._regions.get((a, b), self._regions.get((b, a)))
        if rtt_ms is None or not 0 <= rtt_ms < inf:
            raise ValueError(f"the round trip between {a!r} and {b!r} is {rtt_ms} ms; expected a number, 0 or more")
        return rtt_ms

    # ------------------------------------------------------------ paths

    def path(self, source: int, target: int, *, reply: bool = False) -> Path:
        """What a message meets, faults aside. Raises ValueError where the rules of reach allow no path."""
        key = ((source << 24 | target) << 1) | reply
        path = self._paths.get(key)
        if path is None:
            hops = self._hops(source, target, reply)
            if isinstance(hops, str):
                raise ValueError(hops)
            path = self._build(hops)
            if len(self._paths) >= PATHS_KEPT:
                self._paths.clear()
            self._paths[key] = path
        return path

    def unreachable(self, source: int, target: int, *, reply: bool = False) -> str | None:
        """A sentence when `source` cannot open a connection to `target` at all, else None. Over a line that is down or
        a closed border it can; the connection then stalls, and nobody is told."""
        if source == target or self._all_open:
            return None
        hops = self._hops(source, target, reply)
        return hops if isinstance(hops, str) else None

    @property
    def closes_links(self) -> bool:
        """Whether any line or border carries nothing."""
        return bool(self._down or self._partitions)

    def is_cut(self, links: Sequence[int]) -> bool:
        """Whether nothing moves over these links."""
        return any(self.engine.capacity(link) == 0.0 for link in links)

    def cut_off(self, source: int, target: int, *, reply: bool = False) -> str | None:
        """A sentence when nothing moves from `source` to `target` for now, else None."""
        if not self.closes_links:
            return None
        hops = self._hops(source, target, reply)
        if isinstance(hops, str):
            return hops
        for a, b in pairwise(hops):
            here, there = self._nodes[a].place.region, self._nodes[b].place.region
            for name, partition in self._partitions.items():
                if partition.cuts(here, there):
                    return f"partition {name!r} cuts {here} off from {there}, since {self._partition_s[name]:.3f} s"
        for link in self.path(source, target, reply=reply).links if self._down else ():
            if link in self._down:
                return self._is_down(link)
        return None

    def _is_down(self, link: int) -> str:
        return f"{self._lines[link].name} is down, since {self._lines[link].down_since_s:.3f} s"

    def link_name(self, link: int) -> str:
        """What the link is called: 'uplink of NODE', 'downlink of site SITE', 'trunk out of REGION', 'border ...'."""
        return self._lines[link].name

    def links(self) -> list[int]:
        """All links of nodes, sites, trunks and borders, in the order in which they were made."""
        return list(self._lines)

    def access(self, node: int) -> tuple[int, int]:
        """The node's uplink and downlink."""
        return self._nodes[node].up, self._nodes[node].down

    def stalled(self, links: Sequence[int]) -> str | None:
        """A sentence on the first of these links that carries nothing now; None when all do."""
        return next((self._is_down(link) for link in links if self.engine.capacity(link) == 0.0), None)

    def _hops(self, source: int, target: int, reply: bool) -> list[int] | str:
        if self._all_open or source == target:
            return [source, target]
        if reply:
            hops = hops_between(self._nodes, target, source, self.hole_punching)
            return hops if isinstance(hops, str) else hops[::-1]
        return hops_between(self._nodes, source, target, self.hole_punching)

    def _build(self, hops: Sequence[int]) -> Path:
        if hops[0] == hops[-1]:
            return Path((), 0.0, 0.0, 0.0, inf, 1.0, (), 0)
        links: tuple[int, ...] = ()
        latency_s, loss, bound = 0.0, 0.0, inf
        jitters = self._jitters
        for source, target in pairwise(hops):
            s, t = self._nodes[source], self._nodes[target]
            middle = self._middle(s.place, t.place)
            links += (s.up, *middle.links, t.down)
            latency_s += s.latency_s + middle.latency_s + t.latency_s
            loss = either(loss, either(s.loss, t.loss))
            bound = min(bound, middle.rate_bound_bytes_per_s)
            if s.jitters or t.jitters:
                jitters += s.jitters + t.jitters
        if self._lossy:
            for link in links:
                loss = either(loss, self._lines[link].condition.packet_loss)
        transport, weight = self.transport, 1.0
        if loss > 0.0 or transport.window_bytes < inf:
            bound = min(bound, transport.rate_bound_bytes_per_s(2 * latency_s, loss))
        if transport.weight_bytes is not None:
            weight = transport.weight(latency_s, [self._lines[link].capacity_bytes_per_s for link in links])
        channel = number_of(*(self._nodes[hop].name for hop in hops))
        factor = transport.latency_factor
        return Path(links, latency_s * factor, 2 * latency_s, loss, bound, weight, jitters, channel)

    def _middle(self, source: Place, target: Place) -> Middle:
        """What lies between the access lines of two places."""
        middle = self._middles.get((source, target))
        if middle is not None:
            return middle
        links = [self._sites[site][0] for site in source.sites if site not in target.sites]
        a, b, bound = source.region, target.region, inf
        if a != b:
            if a in self._trunks:
                links.append(self._trunks[a][0])
            if self.borders and a is not None and b is not None:
                links.append(self._border(a, b))
            if b in self._trunks:
                links.append(self._trunks[b][1])
        links += [self._sites[site][1] for site in reversed(target.sites) if site not in source.sites]
        if self.single_flow_bound and isinstance(self._regions, Regions) and a is not None and b is not None:
            gbit_s = self._regions.single_flow_gbit_s(a, b)
            bound = inf if gbit_s is None else gbit_s * 1e3 * BYTES_PER_S
        middle = self._middles[source, target] = Middle(tuple(links), self._rtt_ms(a, b) / 2e3, bound)
        return middle

    def _border(self, source: str, target: str) -> int:
        border = self._borders.get((source, target))
        if border is None:
            closed_s = [self._partition_s[name] for name, p in self._partitions.items() if p.cuts(source, target)]
            border = self.engine.add_link(0.0 if closed_s else BORDER_BYTES_PER_S)
            self._borders[source, target] = border
            line = _Line(f"border from {source} to {target}", BORDER_BYTES_PER_S)
            line.down_since_s = min(closed_s, default=0.0)
            self._lines[border] = line
        return border

    # ------------------------------------------------------------ chance

    def sample_delay_s(self, path: Path, rng: Uniform, size_bytes: float = 0.0) -> float:
        """One message's delay after its last byte has left the links: latency, jitter, and resends of what was lost.

        A lost last segment waits for the time-out, doubled each time; a loss before it, in a message short enough to
        leave in one flight, costs a round trip. Losses within long transfers are in the path's rate bound instead.
        """
        delay_s = path.one_way_latency_s
        for jitter in path.jitters:
            delay_s += jitter.sample_s(path.one_way_latency_s, rng)
        if path.loss > 0:
            transport, loss = self.transport, path.loss
            # P(lost k times in a row) = p^k: k = floor(log U / log p)
            lost_in_a_row = int(log(1.0 - rng.random()) / log(loss))
            delay_s += transport.retransmission_s(path.round_trip_s, lost_in_a_row)
            segments = ceil(size_bytes / transport.mss_bytes)
            if 1 < segments <= SHORT_SEGMENTS and rng.random() < 1.0 - (1.0 - loss) ** (segments - 1):
                delay_s += path.round_trip_s
        return max(delay_s, 0.0)

    def fate(self, path: Path, rng: Uniform) -> Fate:
        """What the message faults on the path make of one message; draws nothing where there are none."""
        if not self._disturbed or self._disturbed.isdisjoint(path.links):
            return DELIVERED
        copies, extra_s, in_order = 1, 0.0, True
        for link in path.links:
            condition = self._lines[link].condition
            if rng.random() < condition.message_loss:
                return Fate((), True)
            copies += rng.random() < condition.message_duplicate
            if rng.random() < condition.message_reorder:
                extra_s += condition.reorder_delay_s * rng.random()
                in_order = False
        return Fate((extra_s,) * copies, in_order)

    # ------------------------------------------------------------ faults

    def apply(self, now_s: float, name: str, fault: Fault) -> None:
        """Lay a fault on, under a name; it stays until lifted under that name. Faults on one link add up."""
        if name in self._faults:
            raise ValueError(f"a fault called {name!r} is in force already; expected another name, or lift it first")
        if isinstance(fault, Partition):
            if not self.borders:
                raise ValueError(
                    f"partition {name!r} needs a network built with borders=True, to stop what is under way"
                )
            self._partitions[name], self._partition_s[name] = fault, now_s
            self._close_borders(now_s)
        else:
            for link in self._links_of(fault):
                self._lines[link].faults[name] = fault
                self._reassess(now_s, link)
        self._faults[name] = fault

    def lift(self, now_s: float, name: str) -> None:
        """End the fault of this name. What other faults do stays."""
        fault = self._faults.pop(name, None)
        if fault is None:
            raise ValueError(f"no fault called {name!r} is in force; in force: {', '.join(self._faults) or 'none'}")
        if isinstance(fault, Partition):
            del self._partitions[name]
            self._close_borders(now_s)
        else:
            for link in self._links_of(fault):
                del self._lines[link].faults[name]
                self._reassess(now_s, link)

    def faults(self) -> dict[str, Fault]:
        """All faults in force, by name."""
        return dict(self._faults)

    def set_link_state(
        self,
        now_s: float,
        *,
        working: bool,
        node: int | None = None,
        site: str | None = None,
        region: str | None = None,
        direction: Direction = "both",
    ) -> None:
        """Cut a line by hand, or mend that cut; does nothing when it is so already."""
        name = f"link state of {node if node is not None else site or region}, {direction}"
        if working and name in self._faults:
            self.lift(now_s, name)
        elif not working and name not in self._faults:
            fault = LinkFault(node=node, site=site, region=region, direction=direction, working=False)
            self.apply(now_s, name, fault)

    def _links_of(self, fault: LinkFault) -> list[int]:
        if fault.node is not None:
            if not 0 <= fault.node < len(self._nodes):
                raise ValueError(f"a fault is on node {fault.node}; expected 0 to {len(self._nodes) - 1}")
            pair = (self._nodes[fault.node].up, self._nodes[fault.node].down)
        elif fault.site is not None:
            if fault.site not in self._sites:
                raise ValueError(
                    f"a fault is on site {fault.site!r}; expected one of {', '.join(self._sites) or 'none'}"
                )
            pair = self._sites[fault.site]
        else:
            assert fault.region is not None
            if fault.region not in self._trunks:
                known = ", ".join(self._trunks) or "none"
                raise ValueError(f"a fault is on the trunk of region {fault.region!r}; regions with a trunk: {known}")
            pair = self._trunks[fault.region]
        return [link for link, way in zip(pair, ("up", "down"), strict=True) if fault.direction in (way, "both")]

    def _reassess(self, now_s: float, link: int) -> None:
        """Add up the faults on a link, and let the engine know."""
        line = self._lines[link]
        condition = WHOLE
        for fault in line.faults.values():
            condition = condition.and_also(fault)
        if condition.packet_loss != line.condition.packet_loss:
            self._paths.clear()
        line.condition = condition
        (self._lossy.add if condition.packet_loss > 0 else self._lossy.discard)(link)
        (self._down.discard if condition.working else self._down.add)(link)
        (self._disturbed.add if condition.disturbs_messages else self._disturbed.discard)(link)
        self.disturbs_messages = bool(self._disturbed)
        whole = line.capacity_bytes_per_s * self.transport.payload_efficiency
        self._set_capacity(now_s, link, whole * condition.bandwidth_factor if condition.working else 0.0)

    def _close_borders(self, now_s: float) -> None:
        for (source, target), border in self._borders.items():
            closed = any(partition.cuts(source, target) for partition in self._partitions.values())
            self._set_capacity(now_s, border, 0.0 if closed else BORDER_BYTES_PER_S)

    def _set_capacity(self, now_s: float, link: int, after: float) -> None:
        before = self.engine.capacity(link)
        if after == before:
            return
        if after == 0.0:
            self._lines[link].down_since_s = now_s
        self.capacity_changes.append((now_s, link, before, after))
        self.engine.set_capacity(now_s, link, after)
