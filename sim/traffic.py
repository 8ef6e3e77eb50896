"""Why: a run that is slow has a line that is full; this books which link carried how much, when, and held whom up.

Bytes are booked on every link of their path at the time at which they travelled. The booker looks at the flows only
when a bin of time ends: what each has left then is known exactly, and within a bin it does not matter when it moved. A
message of one packet is booked at its start, which costs one addition per link. Bins double in width whenever there are
too many, so any run fits; a virtual day takes some two thousand looks.

    moved over a link in a bin = sum over its flows of (left at the bin's start - left at its end) <= capacity × width

A transfer is held by the link that gives it its max-min share; for how long which link held transfers is added up from
the holder at a transfer's start and at each look.

`traffic.json`: {"bin_s", "end_s", "mbit_s" (all that travelled, per bin), "total_bytes", "sent_bytes" and
"received_bytes" (of the busiest access lines), "links": the links that held transfers up the longest and the most used
ones, each with "name", "held_s" (sum over the transfers that it held), "use" (mean share of its capacity), "mbit_s" and
"capacity_mbit_s" per bin, "devices": {"bin_s", "end_s", "at_work": how many devices of each group worked, per bin}}.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from sim.network import Network

SECOND_NS = 1_000_000_000
BINS_MAX = 240
LINKS_SHOWN = 12
SHOWN_SHARE = 0.05
"""After the first half of them, links are shown that held transfers for this share of the longest, or were so full."""
NODES_SHOWN = 20
PAIRS_MAX = 200_000
"""Of so many (sender, receiver, link) it is known for how long one held up the other two; of more, only the link."""


class Work:
    """How many devices of each group were at work, over time. Work is booked when it is asked for, until it is done."""

    def __init__(self) -> None:
        self.bin_ns = 1_000_000  # 1 ms to begin with
        self.end_ns = 0
        self.busy_ns: dict[str, Counter[int]] = {}  # by group and bin

    def add(self, group: str, start_ns: int, end_ns: int) -> None:
        """A device of this group works from start to end."""
        self.end_ns = max(self.end_ns, end_ns)
        while end_ns // self.bin_ns >= BINS_MAX:
            self.bin_ns *= 2
            for name, busy_ns in self.busy_ns.items():
                halved = self.busy_ns[name] = Counter()
                for place, duration_ns in busy_ns.items():
                    halved[place // 2] += duration_ns
        bins = self.busy_ns.setdefault(group, Counter())
        for place in range(start_ns // self.bin_ns, end_ns // self.bin_ns + 1):
            low_ns, high_ns = place * self.bin_ns, (place + 1) * self.bin_ns
            bins[place] += min(end_ns, high_ns) - max(start_ns, low_ns)

    def as_json(self, end_ns: int) -> dict[str, Any]:
        """Devices at work, per group and bin, until the run's end (or that of work begun before it)."""
        for group in sorted(self.busy_ns)[:1]:
            self.add(group, end_ns, end_ns)
        widths_ns = [
            min(self.bin_ns, self.end_ns - place * self.bin_ns) for place in range(-(-self.end_ns // self.bin_ns))
        ]
        return {
            "bin_s": self.bin_ns / SECOND_NS,
            "end_s": self.end_ns / SECOND_NS,
            "at_work": {
                group: [round(bins[place] / width_ns, 6) for place, width_ns in enumerate(widths_ns)]
                for group, bins in sorted(self.busy_ns.items())
            },
        }


class Transfer(Protocol):
    """What is booked: a message that is a flow."""

    source: int
    target: int
    links: tuple[int, ...]
    left: float  # bytes that are not booked yet
    holder: int  # the link that gives it its rate, as last seen; 0: none
    held_since_ns: int


class Traffic:
    """Bytes by link and time of one network."""

    def __init__(self, network: Network, settle: Callable[[], None] = lambda: None) -> None:
        """`settle` is called before anything is told: it books what has travelled until now."""
        self.network, self._settle = network, settle
        self.bin_ns = 1_000_000  # 1 ms to begin with
        self.until_ns = self.bin_ns  # end of the open bin
        self.held_ns: Counter[tuple[int, int, int]] = Counter()  # (source, target, link); (-1, -1, link) for the rest
        self.end_ns = 0
        self.work = Work()  # of the devices at the links' ends
        self._open: defaultdict[int, float] = defaultdict(float)  # bytes by link in the open bin; link 0: all messages
        self._bins = np.zeros((BINS_MAX, 1))  # [bin, link]

    def add(self, links: tuple[int, ...], size_bytes: float) -> None:
        """So much travelled over these links, in the open bin."""
        carried = self._open
        carried[0] += size_bytes
        for link in links:
            carried[link] += size_bytes

    def book(self, now_ns: int, transfers: Mapping[int, Transfer], *, closing: bool = False) -> None:
        """Close the open bin, and those up to now. To be called at the first change after `until_ns`, before it. When
        `closing`, also what has travelled in the open bin, and for how long transfers have been held."""
        self.end_ns = max(self.end_ns, now_ns)
        if now_ns >= self.until_ns:
            edge_ns = self.until_ns
            self._look(edge_ns, transfers)
            self._flush(edge_ns - 1, edge_ns)
            while now_ns // self.bin_ns >= BINS_MAX:
                self._widen()
            start_ns = now_ns // self.bin_ns * self.bin_ns  # of the bin that is open from now on
            if start_ns > edge_ns:  # nothing has changed in between: all moved evenly
                self._look(start_ns, transfers)
                self._flush(edge_ns, start_ns)
            self.until_ns = start_ns + self.bin_ns
        if closing:
            self._look(now_ns, transfers)
            self._flush(self.until_ns - 1, self.until_ns)
            for transfer in transfers.values():
                self._hold(transfer, now_ns)

    def ended(self, transfer: Transfer, now_ns: int, left: float = 0.0) -> None:
        """A transfer is off its links, with so many bytes that never travelled."""
        self.add(transfer.links, max(0.0, transfer.left - left))
        self._hold(transfer, now_ns)

    # ---------------------------------------------------------------------------------------------------- booking
    def _look(self, at_ns: int, transfers: Mapping[int, Transfer]) -> None:
        lefts, holders = self.network.engine.progress(list(transfers), at_ns / SECOND_NS)
        for transfer, left, holder in zip(transfers.values(), lefts, holders, strict=True):
            if left < transfer.left:
                self.add(transfer.links, transfer.left - left)
                transfer.left = left
            if holder != transfer.holder:
                self._hold(transfer, at_ns)
                transfer.holder = holder

    def _hold(self, transfer: Transfer, now_ns: int) -> None:
        if transfer.holder:
            key = (transfer.source, transfer.target, transfer.holder)
            if len(self.held_ns) >= PAIRS_MAX and key not in self.held_ns:
                key = (-1, -1, transfer.holder)
            self.held_ns[key] += now_ns - transfer.held_since_ns
        transfer.held_since_ns = now_ns

    def _flush(self, start_ns: int, end_ns: int) -> None:
        """What is in the open bin belongs, evenly, to the time from start to end."""
        if not self._open:
            return
        links, carried = np.array(list(self._open)), np.array(list(self._open.values()))
        self._open.clear()
        if (more := int(links.max()) + 1 - self._bins.shape[1]) > 0:
            self._bins = np.pad(self._bins, ((0, 0), (0, more + self._bins.shape[1])))
        first, last = start_ns // self.bin_ns, (end_ns - 1) // self.bin_ns
        if first == last:
            self._bins[first, links] += carried
            return
        edges = np.clip(np.arange(first, last + 2) * self.bin_ns, start_ns, end_ns)
        self._bins[first : last + 1, links] += np.outer(np.diff(edges) / (end_ns - start_ns), carried)

    def _widen(self) -> None:
        self.bin_ns *= 2
        self._bins[: BINS_MAX // 2] = self._bins[0::2] + self._bins[1::2]
        self._bins[BINS_MAX // 2 :] = 0.0

    # -------------------------------------------------------------------------------------------------- questions
    def booked(self, link: int) -> np.ndarray:
        """Bytes over the link per bin, as booked; of link 0: all messages."""
        count = -(-self.end_ns // self.bin_ns)
        return self._bins[:count, link] if link < self._bins.shape[1] else np.zeros(count)

    def room(self, link: int) -> np.ndarray:
        """Bytes that the link could have carried in each bin, with its faults."""
        edges_s = self._edges_s()
        changes = [(when, before, after) for when, of, before, after in self.network.capacity_changes if of == link]
        now = self.network.engine.capacity(link)
        starts = np.array([0.0, *(when for when, _, _ in changes), edges_s[-1]])
        rates = np.array([changes[0][1] if changes else now, *(after for _, _, after in changes)])
        could = np.concatenate(([0.0], np.cumsum(rates * np.diff(starts))))  # by each instant of a change
        room: np.ndarray = np.diff(np.interp(edges_s, starts, could))
        return room

    def _edges_s(self) -> np.ndarray:
        count = -(-self.end_ns // self.bin_ns)
        edges: np.ndarray = np.minimum(np.arange(count + 1) * self.bin_ns, self.end_ns) / SECOND_NS
        return edges

    def held_by_link_ns(self) -> Counter[int]:
        """For how long each link held transfers up; those of now as far as they were booked."""
        by_link: Counter[int] = Counter()
        for (_, _, link), duration_ns in self.held_ns.items():
            by_link[link] += duration_ns
        return by_link

    def as_json(self, names: list[str]) -> dict[str, Any]:
        """What `traffic.json` says; `names` by node number."""
        self._settle()
        widths_s = np.diff(self._edges_s())
        totals = self._bins.sum(axis=0)
        lines = [self.network.access(node) for node in range(len(self.network))]
        sent, received = (
            Counter({names[node]: _at(totals, pair[way]) for node, pair in enumerate(lines)}) for way in (0, 1)
        )
        return {
            "bin_s": self.bin_ns / SECOND_NS,
            "end_s": self.end_ns / SECOND_NS,
            "mbit_s": _mbit_s(self.booked(0), widths_s),
            "total_bytes": round(float(totals[0])),
            "sent_bytes": {name: count for name, count in sent.most_common(NODES_SHOWN) if count},
            "received_bytes": {name: count for name, count in received.most_common(NODES_SHOWN) if count},
            "links": self._links(totals, widths_s),
            "devices": self.work.as_json(self.end_ns),
        }

    def _links(self, totals: np.ndarray, widths_s: np.ndarray) -> list[dict[str, Any]]:
        """Those that held transfers up the longest, then those that were used the most."""
        held_ns = self.held_by_link_ns()
        engine = self.network.engine
        shown = [link for link, _ in held_ns.most_common(LINKS_SHOWN)]
        rest = [link for link in self.network.links() if _at(totals, link) and link not in shown]
        rest.sort(key=lambda link: -totals[link] / max(engine.capacity(link), 1.0))
        rows = []
        least_ns = SHOWN_SHARE * max(held_ns.values(), default=0)
        for place, link in enumerate((shown + rest)[:LINKS_SHOWN]):
            use = _at(totals, link) / max(engine.capacity(link) * widths_s.sum(), 1e-9)
            if place >= LINKS_SHOWN // 2 and held_ns[link] < least_ns and use < SHOWN_SHARE:
                continue
            room = self.room(link)
            carried = carried_within(self.booked(link), room)
            rows.append(
                {
                    "name": self.network.link_name(link),
                    "held_s": held_ns[link] / SECOND_NS,
                    "use": round(float(carried.sum() / max(room.sum(), 1e-9)), 6),
                    "mbit_s": _mbit_s(carried, widths_s),
                    "capacity_mbit_s": _mbit_s(room, widths_s),
                }
            )
        return rows


def carried_within(booked: np.ndarray, room: np.ndarray) -> np.ndarray:
    """What is booked, with no bin above its room: packets are booked at their start, and those for which a bin has no
    room travelled in the next."""
    carried, over = np.empty_like(booked), 0.0
    for place, (in_bin, possible) in enumerate(zip(booked, room, strict=True)):
        carried[place] = min(in_bin + over, possible)
        over += in_bin - carried[place]
    return carried


def _at(totals: np.ndarray, link: int) -> int:
    return round(float(totals[link])) if link < len(totals) else 0


def _mbit_s(in_bin: np.ndarray, widths_s: np.ndarray) -> list[float]:
    return [round(float(mbit_s), 6) for mbit_s in in_bin * 8e-6 / widths_s]
