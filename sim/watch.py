"""Why: a run that is slow or stuck is explained by its calls; this sees each call begin, come, be answered and end.

The fabric tells its `watch`, if it has one, and pays one attribute test if it has none. The watch adds up where the
time went (`waits.json`, read by `python -m sim why`), hands every message to whoever taps its type (the checkers), and
draws `trace.json` if it was given a trace.

Where a call's time goes:

    network   until it had come, and from the answer's leaving until it was back
    device    between coming and answer, while the callee's device was at work, for this call or before it
    handler   between coming and answer, otherwise: the callee was waiting itself

A call that brings no answer counts all its time after coming (or all of it, when it never came) in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from simpy.events import Event

from refimpl.messages import Message
from sim.carrier import FlowCarrier
from sim.trace import Trace
from sim.world import SimWorld

SECOND_NS = 1_000_000_000
Arrived = Callable[[object], None]
Tap = Callable[["OpenCall", "Message | BaseException"], None]


class OpenCall:
    """One call that its caller still waits for."""

    __slots__ = ("answered_ns", "begun_ns", "busy_ns", "callee", "caller", "came_ns", "device_ns", "kind", "message")

    def __init__(self, caller: SimWorld, callee: SimWorld, message: Message, begun_ns: int) -> None:
        self.caller, self.callee, self.message, self.begun_ns = caller, callee, message, begun_ns
        self.kind = type(message).__name__
        self.came_ns = -1
        self.answered_ns = -1
        self.busy_ns = 0  # the callee's device had worked so long when the call came
        self.device_ns = 0


class Waits:
    """Where the time of one sort of call went."""

    __slots__ = ("count", "device_ns", "failed", "handler_ns", "max_ns", "network_ns", "total_ns")

    def __init__(self) -> None:
        self.count = self.failed = 0
        self.total_ns = self.max_ns = self.network_ns = self.device_ns = self.handler_ns = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "count": self.count,
            "failed": self.failed,
            "total_s": self.total_ns / SECOND_NS,
            "mean_s": self.total_ns / SECOND_NS / self.count if self.count else 0.0,
            "max_s": self.max_ns / SECOND_NS,
            "network_s": self.network_ns / SECOND_NS,
            "device_s": self.device_ns / SECOND_NS,
            "handler_s": self.handler_ns / SECOND_NS,
        }


class Watch:
    """What the fabric reports to. One per run."""

    def __init__(self, group_of: Callable[[str], str] = str, trace: Trace | None = None) -> None:
        """`group_of(node name)`: nodes of one group are added up together."""
        self.trace = trace
        self.open: dict[Event, OpenCall] = {}
        self.waits: dict[tuple[str, str, str], Waits] = {}
        self.taps: dict[type[Message], Tap] = {}
        self.passed_over: frozenset[str] = frozenset()  # kinds of messages that are not watched
        self._group_of = group_of
        self._groups: dict[str, str] = {}

    def tap(self, kind: type[Message], tap: Tap) -> None:
        """Call `tap(call, answer)` for every answered call whose message is of this type."""
        self.taps[kind] = tap

    # ------------------------------------------------------------------------------------- what the fabric calls
    def call_begun(
        self, reply: Event, caller: SimWorld, callee: SimWorld, message: Message, size_bytes: int, arrived: Arrived
    ) -> Arrived:
        """A call leaves. Returns what is to be called when it arrives."""
        now_ns = caller.fabric.kernel._now
        call = self.open[reply] = OpenCall(caller, callee, message, now_ns)
        if self.trace is not None:
            return self.trace.message(caller, callee, call.kind, size_bytes, now_ns, arrived, False)
        return arrived

    def call_came(self, reply: Event, callee: SimWorld) -> None:
        """A call has reached the node (which may be down, or hang)."""
        call = self.open.get(reply)
        if call is not None and call.came_ns < 0:
            call.callee = callee
            call.came_ns = now_ns = callee.fabric.kernel._now
            call.busy_ns = callee.busy_ns(now_ns)

    def call_answered(
        self, reply: Event, callee: SimWorld, caller: SimWorld, answer: Any, size: int, back: Arrived
    ) -> Arrived:
        """The answer leaves. Returns what is to be called when it is back."""
        call = self.open.get(reply)
        now_ns = callee.fabric.kernel._now
        if call is not None:
            call.answered_ns = now_ns
            call.device_ns = callee.busy_ns(now_ns) - call.busy_ns
            if (tap := self.taps.get(type(call.message))) is not None:
                tap(call, answer)
            if self.trace is not None:
                self.trace.serve(callee, caller, call.kind, max(call.came_ns, 0), now_ns)
        if self.trace is not None:
            return self.trace.message(callee, caller, type(answer).__name__, size, now_ns, back, True)
        return back

    def call_ended(self, reply: Event) -> None:
        """The caller waits no longer: answered, given up, or dead."""
        call = self.open.pop(reply, None)
        if call is None:
            return
        now_ns = call.caller.fabric.kernel._now
        total_ns = now_ns - call.begun_ns
        here_ns = device_ns = 0  # at the callee
        if call.answered_ns >= 0:
            here_ns, device_ns = call.answered_ns - call.came_ns, call.device_ns
        elif call.came_ns >= 0:
            here_ns, device_ns = now_ns - call.came_ns, call.callee.busy_ns(now_ns) - call.busy_ns
        waits = self.waits_of(call)
        waits.count += 1
        waits.failed += not (reply.triggered and reply._ok)
        waits.total_ns += total_ns
        waits.max_ns = max(waits.max_ns, total_ns)
        device_ns = min(device_ns, here_ns)
        waits.network_ns += total_ns - here_ns
        waits.device_ns += device_ns
        waits.handler_ns += here_ns - device_ns
        if self.trace is not None:
            outcome = "answered" if reply.triggered and reply._ok else "failed"
            self.trace.wait(call.caller, call.callee, call.kind, call.begun_ns, now_ns, outcome)

    def computed(self, node: SimWorld, work: str, start_ns: int, end_ns: int) -> None:
        """The node's device has taken on a piece of work."""
        if isinstance(carrier := node.fabric.carrier, FlowCarrier):
            carrier.traffic.work.add(self.group(node.name), start_ns, end_ns)
        if self.trace is not None:
            self.trace.compute(node, work, start_ns, end_ns)

    # ------------------------------------------------------------------------------------------------- questions
    def waits_of(self, call: OpenCall) -> Waits:
        """The sum that this call belongs to: (waiting group, target group, kind of message)."""
        key = (self.group(call.caller.name), self.group(call.callee.name), call.kind)
        waits = self.waits.get(key)
        if waits is None:
            waits = self.waits[key] = Waits()
        return waits

    def group(self, name: str) -> str:
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = self._group_of(name)
        return group
