"""Why: what a run leaves behind would, in a longer one, pile up; this looks for it when a run is over.

`at_rest`: when every part is done, all that was told to stop must come to rest by itself. `all_released`: once every
node is taken down, nothing of any of them may be left. Both let virtual time go on, with nothing recorded, so they come
last.
"""

from __future__ import annotations

from collections.abc import Iterator

from simpy.events import Event

from sim.carrier import FlowCarrier
from sim.checkers import Checkers, View
from sim.kernel import Task, to_ns
from sim.watch import Watch
from sim.world import SimFabric

SHOWN_MAX = 20
REST_S = 3600.0
"""How long what was told to stop may take: longer than any of its calls."""
RELEASE_S = 60.0
"""After every node is gone: longer than what is on its way between them."""


def held(fabric: SimFabric) -> Iterator[str]:
    """All that is under way, a sentence each."""
    for world in fabric.by_index:
        serving = fabric.serving.get(world.index, {})
        for label in (task.label for task in world.tasks):
            yield f"{world.name}: the task {label}"
        for call in world.calls:
            yield f"{world.name}: a call of {call.kind} to {call.callee.name}"
        if serving:
            yield f"{world.name}: {len(serving)} slots of calls that it serves"
    names = fabric.by_index
    carrier = fabric.carrier
    if isinstance(carrier, FlowCarrier):
        flows = list(carrier.under_way())
        yield from (f"a {what} from {names[sender].name} to {names[receiver].name}" for what, sender, receiver in flows)
        if not flows and (count := len(carrier.engine.active_flows())) > 0:
            yield f"{count} flows that are nobody's"
    if isinstance(fabric.watch, Watch) and fabric.watch.open:
        yield f"{len(fabric.watch.open)} calls that are still watched"
    if timers := sum(_waits_for_nobody(event) for event in fabric.kernel.scheduled()):
        yield f"{timers} timers of tasks that have ended"


def _waits_for_nobody(event: Event) -> bool:
    """Whether an event that is to come would only wake a task that has ended."""
    owners = [getattr(callback, "__self__", None) for callback in event.callbacks or ()]
    return any(isinstance(owner, Task) and owner.awaited is not event for owner in owners)


def _pass(fabric: SimFabric, longest_s: float) -> list[str]:
    """Let time go on until nothing is held, `longest_s` at most. Returns what is held then."""
    fabric.recorder = None
    step_s, waited_s = 1.0, 0.0
    while (left := list(held(fabric))) and waited_s < longest_s:
        fabric.kernel.halted = False
        fabric.kernel.run_through(int(fabric.kernel.now) + to_ns(step_s))
        waited_s, step_s = waited_s + step_s, 2 * step_s
    return left


def _shown(left: list[str]) -> Iterator[str]:
    yield from left[:SHOWN_MAX]
    if len(left) > SHOWN_MAX:
        yield f"and {len(left) - SHOWN_MAX} more"


def at_rest(view: View) -> Iterator[str]:
    """When every part is done, nodes that were told to stop come to rest: no tasks, calls, slots, flows or timers."""
    if not view.all_done or any(count > 0 for count in view.facts.struck.values()):
        return
    yield from _shown(_pass(view.fabric, REST_S))


def all_released(view: View) -> Iterator[str]:
    """When every node is taken down, nothing is left of any: no tasks, calls, slots, flows or timers."""
    fabric = view.fabric
    for world in list(fabric.by_index):
        if world.alive:
            fabric.kill(world.name)
    yield from _shown(_pass(fabric, RELEASE_S))


LAST: Checkers = (("correctness", at_rest), ("correctness", all_released))
