"""SimPy with the three things this simulator needs of its clock and order.

1. Time is an integer of nanoseconds. Ten waits of 0.1 s end at 1.0 s, exactly.
2. Equal times are ordered by (time, priority, node, sequence), and only then by who came first: a run does not depend
   on the order in which nodes were created. `node` is the node on whose behalf an event happens.
3. A coroutine runs as it is: `Task` drives it, hands exceptions on as they are (SimPy's own process copies them from
   their arguments), and says in a sentence when a coroutine awaits something that is not of this world.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Coroutine, Generator, Iterator
from heapq import heapify, heappop, heappush
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, PENDING, URGENT, Event

P = ParamSpec("P")
R = TypeVar("R")

SECOND_NS = 1_000_000_000
NEVER_NS = 1 << 62
LATE = 2
"""Priority of what must see everything else of the same instant: observers, and the solving of a batch of changes."""

BUCKET_NS = 1 << 30
"""Width of a bucket of the far future: a second or so."""
NODE_SHIFT = 44
"""An event's order key is (node << NODE_SHIFT) + sequence."""
CALLED_OFF_MIN = 1024
"""After so many called-off events, and each multiple, it is seen whether dropping them pays."""


def to_ns(duration_s: float) -> int:
    """Whole nanoseconds, rounded up, so that nothing ends before its time."""
    exact = duration_s * SECOND_NS
    whole = int(exact)
    # a float such as 0.1 is not exactly a tenth: what lies within half a picosecond above a whole number is that number
    return whole if exact - whole < 5e-4 else whole + 1


class Kernel(simpy.Environment):
    """A SimPy environment with integer nanoseconds and the documented order of equal times.

    What will happen lies in two places: a heap of what comes soon, and beyond its horizon one unordered list per
    `BUCKET_NS`, which becomes the heap when its time comes. Ten thousand timers of a minute cost the heap nothing.
    """

    _now: int
    _queue: list[Any]

    def __init__(self) -> None:
        super().__init__(initial_time=0)
        self.node = 0
        self.halted = False
        """Set by whoever wants `run_through` to return before the next event."""
        self._horizon_ns = BUCKET_NS  # the heap, `_queue`, holds all that happens before it
        self._far: dict[int, list[Any]] = {}  # by time // BUCKET_NS
        self._buckets: list[int] = []  # a heap of the keys of `_far`
        self._sequence = 0
        self._called_off = 0  # events still to come of which nothing will come
        self._dropped = 0  # of those, how many were taken out

    def schedule(self, event: Event, priority: int = NORMAL, delay: int = 0) -> None:  # type: ignore[override]
        self.schedule_for(self.node, event, priority, delay)

    def schedule_for(self, node: int, event: Event, priority: int = NORMAL, delay: int = 0) -> None:
        """Schedule on behalf of `node`, `delay` nanoseconds from now."""
        if delay.__class__ is not int or delay < 0:
            raise TypeError(f"a delay is an integer of nanoseconds, 0 or more; {delay!r} was given")
        self.call_at(node, self._now + delay, fire, event, priority)

    def at(self, node: int, time_ns: int, callback: Callable[[Event], None], priority: int = NORMAL) -> Event:
        """Run `callback` at `time_ns` on behalf of `node`. Setting the event's `callbacks` to [] calls it off."""
        event = Instant(self)
        event._ok, event._value = True, None
        event.callbacks.append(callback)
        self.schedule_for(node, event, priority, time_ns - self._now)
        return event

    def timer(self, node: int, time_ns: int) -> Instant:
        """An event that happens at `time_ns`, not before now, on behalf of `node`."""
        event = Instant(self)
        event._ok, event._value = True, None
        self.call_at(node, time_ns, fire, event)
        return event

    def call_at(
        self, node: int, time_ns: int, function: Callable[[Any], object], argument: Any, priority: int = NORMAL
    ) -> None:
        """Call `function(argument)` at `time_ns`, not before now, on behalf of `node`. Nothing calls it off."""
        self._sequence = sequence = self._sequence + 1
        entry = (time_ns, priority, (node << NODE_SHIFT) + sequence, function, argument)
        if time_ns < self._horizon_ns:
            heappush(self._queue, entry)
            return
        bucket = time_ns // BUCKET_NS
        far = self._far.get(bucket)
        if far is None:
            self._far[bucket] = [entry]
            heappush(self._buckets, bucket)
        else:
            far.append(entry)

    def scheduled(self) -> Iterator[Event]:
        """The events that are still to come, in no order."""
        for entries in (self._queue, *self._far.values()):
            yield from (entry[4] for entry in entries if entry[3] is fire)

    def call_off(self) -> None:
        """A scheduled event has happened before its time, or nobody waits for it any longer. When most are such, they
        are dropped: a timer of a day that was needed for a second is not kept for a day."""
        self._called_off += 1
        if self._called_off % CALLED_OFF_MIN or 2 * self._called_off < self.pending():
            return
        before = self.pending()
        self._queue[:] = filter(_may_matter, self._queue)
        heapify(self._queue)
        self._far = {bucket: list(filter(_may_matter, entries)) for bucket, entries in self._far.items()}
        self._called_off = 0
        self._dropped += before - self.pending()

    def pending(self) -> int:
        """How many events are still to come."""
        return len(self._queue) + sum(map(len, self._far.values()))

    @property
    def events_handled(self) -> int:
        """How many have happened so far, the one under way included."""
        return self._sequence - self._dropped - self.pending()

    def peek(self) -> float:
        """When the next event happens; infinity when there is none."""
        queue = self._queue if self._queue else self._next_bucket()
        return queue[0][0] if queue else float("inf")

    def _next_bucket(self) -> list[Any]:
        """The heap is used up: make the next bucket the heap. Returns it; empty when nothing is left at all."""
        queue = self._queue
        while self._buckets and not queue:
            bucket = heappop(self._buckets)
            self._horizon_ns = (bucket + 1) * BUCKET_NS
            queue.extend(self._far.pop(bucket))
        heapify(queue)
        return queue

    def step(self) -> None:
        if not self._queue and not self._next_bucket():
            raise EmptySchedule
        self._now, _, key, function, argument = heappop(self._queue)
        self.node = key >> NODE_SHIFT
        function(argument)

    def run_through(self, until_ns: int) -> None:
        """Handle every event up to *and at* `until_ns`, or until `halted`; the clock then stands at `until_ns` unless
        halted or out of events (SimPy's own `run(until=t)` leaves the events at `t` unhandled)."""
        queue = self._queue
        while not self.halted and (queue or self._next_bucket()):
            if self._horizon_ns <= until_ns:  # all that is in the heap is due
                while queue and not self.halted:
                    self._now, _, key, function, argument = heappop(queue)  # as in `step`
                    self.node = key >> NODE_SHIFT
                    function(argument)
            elif queue[0][0] > until_ns:
                self._now = until_ns
                return
            else:
                self.step()


def fire(event: Event) -> None:
    """A scheduled SimPy event happens, unless it has happened before its time."""
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    if callbacks is None:
        return
    for callback in callbacks:
        callback(event)
    if not event._ok and not hasattr(event, "_defused"):
        raise cast(BaseException, event._value)


def _may_matter(entry: Any) -> bool:
    return entry[3] is not fire or bool(entry[4].callbacks)


class Instant(Event):
    """A SimPy event in half of the memory: a run of ten thousand nodes holds tens of thousands, and makes millions."""

    __slots__ = ("_defused", "_ok", "_value", "callbacks", "env")

    env: Kernel

    def __init__(self, env: Kernel) -> None:
        self.env, self.callbacks, self._value = env, [], PENDING


def steps(function: Callable[P, Generator[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Decorator: this generator of kernel events is a coroutine. `async def` around `wait` would do the same in two
    frames, both of which every event passes on its way to whoever waits."""
    return cast(Any, types.coroutine(function))


@steps
def wait(event: Event) -> Generator[Event, Any, Any]:
    """Await a kernel event inside a coroutine."""
    return (yield event)


def happen(event: Event, ok: bool, value: Any) -> None:
    """Let an event happen here and now, inside the event being handled, instead of scheduling it for this instant."""
    event._ok, event._value = ok, value
    callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
    for callback in callbacks:
        callback(event)


class Host(Protocol):
    """Where a task runs: while it hangs, its tasks stand still."""

    hung: bool

    def stand(self, task: Task, event: Event) -> None: ...


class Task:
    """Drives one coroutine of one node; `on_end(ok, value)` is called, in the same instant, when it ends."""

    __slots__ = ("_coroutine", "_host", "_kernel", "_on_end", "awaited", "label", "node")

    def __init__(
        self,
        kernel: Kernel,
        node: int,
        coroutine: Coroutine[Any, Any, Any],
        on_end: Callable[[Task, bool, Any], None],
        label: str,
        host: Host | None = None,
    ) -> None:
        self._kernel, self.node, self._on_end, self._host = kernel, node, on_end, host
        self._coroutine: Coroutine[Any, Any, Any] | None = coroutine
        self.label = label
        self.awaited: Event | None = None

    def start_soon(self) -> None:
        """Begin in this instant, but not inside the caller."""
        self._kernel.at(self.node, self._kernel._now, self.resume, URGENT)

    def resume(self, event: Event) -> None:
        """Go on with the coroutine until it waits again. Also begins it (with any succeeded event)."""
        coroutine = self._coroutine
        if coroutine is None:  # killed before it began
            return
        if self._host is not None and self._host.hung:
            self._host.stand(self, event)
            return
        first, self.awaited = self.awaited is None, None
        try:
            if event._ok:
                awaited = coroutine.send(None if first else event._value)
            else:
                event._defused = True
                awaited = coroutine.throw(cast(BaseException, event._value))
        except StopIteration as stop:
            self._on_end(self, True, stop.value)
        except Exception as error:
            self._on_end(self, False, error)
        else:
            self.wait_for(awaited)

    def wait_for(self, awaited: object) -> None:
        """The coroutine has asked for this; go on with it when that has happened."""
        if not isinstance(awaited, Event):
            event = Event(self._kernel)
            event._ok = False
            event._value = TypeError(
                f"task {self.label!r} awaited {type(awaited).__name__}, which is not of this world: inside the "
                "simulator only the World's own calls can be awaited (no asyncio, no threads)"
            )
            event.callbacks = cast(Any, None)
            awaited = event
        self.awaited = awaited
        if awaited.callbacks is not None:
            awaited.callbacks.append(self.resume)
        else:  # it has happened already
            self.resume(awaited)

    def kill(self) -> None:
        """End the coroutine where it stands; its `finally` blocks run, its `on_end` does not."""
        awaited, self.awaited = self.awaited, None
        if awaited is not None and awaited.callbacks is not None and self.resume in awaited.callbacks:
            awaited.callbacks.remove(self.resume)
            if awaited.triggered:  # it is on its way
                self._kernel.call_off()
        if self._coroutine is not None:
            self._coroutine.close()
            self._coroutine = None
