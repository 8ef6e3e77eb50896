"""Why: "it is slow" and "it hangs" have a culprit; this finds, for every call that is open, what holds it up, and saves
where all others spent their time.

`waits.json`: {"ended", "virtual_s", "waits": sums per (waiting group, target group, message), "held_up":
the links that gave transfers their rate, with the sum of the transfers' times, longest first, "open_total", "open": the
oldest open calls with target, since when and the reason, "tasks": what every node was in the middle of, when a run
could not go on}.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from sim.carrier import FlowCarrier
from sim.explain import FINISHED
from sim.watch import OpenCall, Watch
from sim.world import SimFabric

SECOND_NS = 1_000_000_000
OPEN_MAX = 1000
TASKS_MAX = 1000
HELD_SHOWN = 5
HELD_MIN_NS = 1_000_000
"""Links that held transfers for less are not worth a word."""
LOST_AFTER_S = 120.0
"""A message that is on no link and has not come after so long was lost: no delay of a path is near that."""


class Reasons:
    """Says why a call is open, at one instant of a fabric."""

    def __init__(self, fabric: SimFabric) -> None:
        self.fabric = fabric
        self.now_ns = int(fabric.kernel.now)
        self.nothing_left = fabric.kernel.peek() == float("inf")
        carrier = fabric.carrier
        self.carrier = carrier if isinstance(carrier, FlowCarrier) else None
        self.flows: dict[tuple[int, int], int] = {}  # (source, target) -> the oldest flow under way
        self.load: Counter[int] = Counter()  # link -> flows under way over it
        if self.carrier is not None:
            for source, target, flow, links in self.carrier.flows_under_way():
                self.flows.setdefault((source, target), flow)
                self.load.update(links)

    def of(self, call: OpenCall) -> str:
        """What holds the call up."""
        callee = self.fabric.nodes[call.callee.name]
        if not callee.alive:
            return f"{callee.name} is down"
        if callee.hung:
            return f"{callee.name} hangs"
        if call.came_ns < 0:
            return self._on_the_way(call.caller.index, callee.index, "the call", call.begun_ns, reply=False)
        if call.answered_ns >= 0:
            return self._on_the_way(callee.index, call.caller.index, "the answer", call.answered_ns, reply=True)
        if callee.device_free_ns > self.now_ns:
            return f"device of {callee.name} busy until {callee.device_free_ns / SECOND_NS:.3f} s"
        if callee.calls:
            own = min(callee.calls, key=lambda call: call.since_ns)
            since_s = own.since_ns / SECOND_NS
            return f"{callee.name} itself waits for {own.callee.name} to answer {own.kind}, since {since_s:.3f} s"
        return f"{callee.name} serves it and waits for another of its own tasks"

    def _on_the_way(self, source: int, target: int, what: str, left_ns: int, *, reply: bool) -> str:
        names = self.fabric.by_index
        if self.carrier is not None:
            sentence = self.carrier.network.cut_off(source, target, reply=reply)
            if sentence is not None:
                return sentence
        if self.carrier is None or (source, target) not in self.flows:
            way = f"{what} left {names[source].name} for {names[target].name} at {left_ns / SECOND_NS:.3f} s"
            if self.nothing_left or self.now_ns - left_ns > LOST_AFTER_S * SECOND_NS:
                return f"{way} and was lost"
            return f"{way}, all its bytes are off the links, and it has not come yet"
        return self._held_up(self.carrier, self.flows[source, target], source, target, reply)

    def _held_up(self, carrier: FlowCarrier, flow: int, source: int, target: int, reply: bool) -> str:
        """What gives a transfer that is under way its rate: the link that is its max-min bottleneck, or its bound."""
        network, engine = carrier.network, carrier.engine
        if (sentence := network.stalled(network.path(source, target, reply=reply).links)) is not None:
            return sentence
        mbit_s, link = engine.rate(flow) * 8e-6, engine.held_by(flow)
        if not link:
            return f"the rate bound of one transfer (window, loss or the region's single flow), {mbit_s:.4g} Mbit/s"
        count = self.load[link]
        return (
            f"{network.link_name(link)} shared by {count} flow{'s' if count != 1 else ''}, {mbit_s:.4g} Mbit/s for it"
        )


def held_up(fabric: SimFabric, watch: Watch) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """The links that held transfers up the longest, for each (sending group, receiving group); ("", "") is for all."""
    carrier = fabric.carrier
    if not isinstance(carrier, FlowCarrier):
        return {}
    carrier.book_until_now()
    by_pair: dict[tuple[str, str], Counter[int]] = {("", ""): carrier.traffic.held_by_link_ns()}
    for (source, target, link), held_ns in carrier.traffic.held_ns.items():
        if source >= 0:
            pair = (watch.group(fabric.by_index[source].name), watch.group(fabric.by_index[target].name))
            by_pair.setdefault(pair, Counter())[link] += held_ns
    name = carrier.network.link_name
    return {
        pair: [
            {"link": name(link), "held_s": held_ns / SECOND_NS}
            for link, held_ns in links.most_common(HELD_SHOWN)
            if held_ns >= HELD_MIN_NS
        ]
        for pair, links in by_pair.items()
    }


def waits_json(fabric: SimFabric, watch: Watch, ended: str) -> dict[str, Any]:
    """What `waits.json` says of a run at this instant. `ended`: FINISHED, or the sentence with which it stopped."""
    reasons = Reasons(fabric)
    now_ns = reasons.now_ns
    calls = sorted(watch.open.values(), key=lambda call: (call.begun_ns, call.caller.index))
    held = held_up(fabric, watch)
    by_total = sorted(watch.waits.items(), key=lambda item: (-item[1].total_ns, item[0]))
    return {
        "ended": ended,
        "virtual_s": now_ns / SECOND_NS,
        "waits": [
            {
                "waiting": waiting,
                "target": target,
                "message": kind,
                **waits.as_json(),
                "held_up_there": held.get((waiting, target), []),
                "held_up_back": held.get((target, waiting), []),
            }
            for (waiting, target, kind), waits in by_total
        ],
        "held_up": held.get(("", ""), []),
        "open_total": len(calls),
        "open": [
            {
                "waiting": call.caller.name,
                "target": call.callee.name,
                "message": call.kind,
                "since_s": call.begun_ns / SECOND_NS,
                "waited_s": (now_ns - call.begun_ns) / SECOND_NS,
                "reason": reasons.of(call),
            }
            for call in calls[:OPEN_MAX]
        ],
        "tasks": [] if ended == FINISHED else _tasks(fabric),
    }


def _tasks(fabric: SimFabric) -> list[dict[str, str]]:
    """What nodes are in the middle of."""
    doing = [
        {"node": world.name, "task": label}
        for world in fabric.by_index
        for label in sorted(task.label for task in world.tasks)
    ]
    return doing[:TASKS_MAX]
