"""The port in virtual time: the same components, thousands of nodes, one process.

`SimFabric` holds the nodes, the kernel and the network; `SimWorld` is one node's view. A message is never encoded here;
it is charged for its exact encoded size, over the same links as everything else.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Mapping
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from simpy.events import PENDING, Event

from refimpl.messages import BadMessage, Message, carries_bulk, size_bytes
from refimpl.work import Hash, Spread, Work
from refimpl.world import Handler, Refused, TaskFailed, TaskFailure, Timeout, Unreachable, derive_rng
from sim.kernel import NEVER_NS, SECOND_NS, Instant, Kernel, Task, happen, steps, to_ns, wait

T = TypeVar("T")


Arrived = Callable[[object], None]
"""What is called when a message has come; what it is handed says nothing."""


class Carrier(Protocol):
    """What the fabric asks of a network."""

    def send(
        self,
        source: int,
        target: int,
        size_bytes: int,
        arrived: Arrived,
        kind: str | None,
        *,
        reply: bool = False,
    ) -> None:
        """Carry a message; call `arrived` when its last byte has come. Messages of one kind from one node to another
        keep their order; those of kind None may overtake."""
        ...

    def reset(self, source: int, target: int, arrived: Arrived) -> None:
        """`target` learns after the path's latency that `source` is gone."""
        ...

    def drop(self, node: int) -> None:
        """The node died: what it was sending stops, what was on its way to it arrives nowhere."""
        ...

    def unreachable(self, source: int, target: int, *, reply: bool = False) -> str | None:
        """A sentence when nothing can go from `source` to `target`, else None."""
        ...


class Recorder(Protocol):
    """Where the fabric's events go."""

    def event(self, time_ns: int, kind: str, node: str, **fields: Any) -> None: ...


class Watcher(Protocol):
    """Who is told of calls and computing; `sim.watch.Watch`."""

    passed_over: frozenset[str]  # kinds of messages that it is not told of

    def call_begun(
        self,
        reply: Event,
        caller: SimWorld,
        callee: SimWorld,
        message: Message,
        size_bytes: int,
        arrived: Arrived,
    ) -> Arrived:
        """A call leaves. Returns what is to be called when it arrives."""
        ...

    def call_came(self, reply: Event, callee: SimWorld) -> None: ...

    def call_answered(
        self, reply: Event, callee: SimWorld, caller: SimWorld, answer: Any, size: int, back: Arrived
    ) -> Arrived:
        """The answer leaves. Returns what is to be called when it is back."""
        ...

    def call_ended(self, reply: Event) -> None: ...

    def computed(self, node: SimWorld, work: str, start_ns: int, end_ns: int) -> None: ...


Pricer = Callable[[Work], float]
"""Seconds that a node's device takes for a piece of work."""


def _channel_of(message: type) -> str | None:
    """The channel that messages of this type keep their order in; None where they may overtake."""
    kind = message.__name__
    return None if carries_bulk(kind) else kind


channel_of: Callable[[type], str | None] = functools.cache(_channel_of)


class Call(Instant):
    """A call under way; it happens when its caller learns how it ended."""

    __slots__ = ("callee", "caller", "kind", "message", "outcome", "since_ns", "timeout_s", "until_ns", "watch")

    def __init__(
        self, caller: SimWorld, callee: SimWorld, message: Message, timeout_s: float, watch: Watcher | None
    ) -> None:
        kernel = caller.fabric.kernel
        super().__init__(kernel)
        self.caller, self.callee, self.message = caller, callee, message
        self.kind = type(message).__name__
        self.timeout_s = timeout_s
        self.since_ns = kernel._now
        self.until_ns = NEVER_NS  # see `Deadlines`
        self.watch = watch  # who is told of it, if anybody
        self.outcome: Message | BaseException | None = None  # what is on its way back

    def come(self, _: object = None) -> None:
        """It has arrived at the callee."""
        self.callee.receive(self)

    def come_back(self, _: object = None) -> None:
        """Its outcome has arrived at the caller."""
        if self._value is PENDING:
            happen(self, isinstance(self.outcome, Message), self.outcome)

    def expire(self, _: object = None) -> None:
        """Its time is over."""
        if self._value is PENDING:
            late = Timeout(f"{self.callee.name!r} did not answer {self.kind} within {self.timeout_s:g} s")
            happen(self, False, late)


class Deadlines:
    """Time-outs of calls. Nearly all calls are answered in time, so a deadline is no event, but an entry in a queue of
    all calls of the same patience, which are due in the order in which they began. One event, at the earliest deadline
    of a call that is still open, serves them all."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._queues: dict[float, tuple[int, deque[Call]]] = {}  # by time-out: in nanoseconds, and who has it
        self._armed_ns = NEVER_NS

    def add(self, call: Call) -> None:
        """Let `call` expire if nothing has come of it by its time."""
        found = self._queues.get(call.timeout_s)
        if found is None:
            found = self._queues[call.timeout_s] = (to_ns(call.timeout_s), deque())
        timeout_ns, queue = found
        queue.append(call)
        call.until_ns = until_ns = call.since_ns + timeout_ns
        if until_ns < self._armed_ns:
            self._arm(until_ns)

    def _arm(self, time_ns: int) -> None:
        self._armed_ns = time_ns
        self._kernel.call_at(0, time_ns, self._look, time_ns)

    def _look(self, armed_ns: int) -> None:
        if armed_ns != self._armed_ns:  # an earlier look took its place
            return
        kernel, next_ns = self._kernel, NEVER_NS
        for timeout_s, (_, queue) in list(self._queues.items()):
            while queue and (queue[0].callbacks is None or queue[0].until_ns <= armed_ns):
                call = queue.popleft()
                if call.callbacks is not None:
                    kernel.call_at(call.caller.index, armed_ns, call.expire, None)
            if queue:
                next_ns = min(next_ns, queue[0].until_ns)
            else:
                del self._queues[timeout_s]
        self._armed_ns = NEVER_NS
        if next_ns < NEVER_NS:
            self._arm(next_ns)


class SimSignal:
    """`refimpl.world.Signal` in virtual time."""

    __slots__ = ("_set", "_waiting", "_world")

    def __init__(self, world: SimWorld) -> None:
        self._world = world
        self._set = False
        self._waiting: list[Instant] = []

    def set(self) -> None:
        self._set = True
        waiting, self._waiting = self._waiting, []
        kernel = self._world.fabric.kernel
        for event in waiting:
            kernel.call_at(self._world.index, kernel._now, self._fire, event)

    @staticmethod
    def _fire(event: Instant) -> None:
        if event.callbacks is None:
            return
        if event.triggered:  # its timer is still to come
            event.env.call_off()
        happen(event, True, None)

    def is_set(self) -> bool:
        return self._set

    @steps
    def wait(self, timeout_s: float | None = None) -> Generator[Event, Any, bool]:
        if self._set:
            return True
        kernel = self._world.fabric.kernel
        if timeout_s is None:
            event = Instant(kernel)
        else:  # the event is its own timer; whoever sets the signal makes it happen sooner
            event = kernel.timer(self._world.index, kernel._now + to_ns(timeout_s))
        self._waiting.append(event)
        yield event
        if not self._set:
            self._waiting.remove(event)
        return self._set


class SimWorld:
    """One node of a `SimFabric`. See `refimpl.world.World` for what each method promises."""

    __slots__ = (
        "_device_ns", "_rng", "_stood", "_unheard", "alive", "calls", "device_free_ns", "disk_full", "fabric",
        "handlers", "host_free_ns",
        "hung", "index", "name", "price", "skew_s", "slowness", "tasks",
    )  # fmt: skip

    def __init__(self, fabric: SimFabric, index: int, name: str, price: Pricer) -> None:
        self.fabric, self.index, self.name = fabric, index, name
        self._rng: np.random.Generator | None = None
        self.price = price
        self.alive = True
        self.hung = False  # alive, and answers nothing
        self.slowness = 1.0  # a fault may make the device this many times slower
        self.skew_s = 0.0  # how far its clock is ahead
        self.disk_full = False
        self._unheard: list[Call] = []  # calls that came while it hung
        self._stood: list[tuple[Task, Event]] = []  # its own tasks whose turn came while it hung
        self.handlers: dict[type[Message], Handler] = {}
        self.tasks: dict[Task, None] = {}  # in the order begun: a set's order would differ from run to run
        self.calls: dict[Call, None] = {}  # those that it waits for, in the order begun
        self.device_free_ns = 0  # when the device will have done all that it was asked
        self._device_ns = 0  # all that it was asked
        self.host_free_ns = 0  # the same of its processor, which hashes while the device computes

    @property
    def rng(self) -> np.random.Generator:
        if self._rng is None:
            self._rng = derive_rng(self.fabric.run_seed, "node", self.name)
        return self._rng

    def now(self) -> float:
        return self.fabric.kernel._now / SECOND_NS + self.skew_s

    def busy_ns(self, now_ns: int) -> int:
        """How long the device has worked so far. What is still to do is done without a pause."""
        return self._device_ns - max(0, self.device_free_ns - now_ns)

    async def sleep(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(f"node {self.name!r} was to sleep for {duration_s} s; 0 or more was expected")
        await self._sleep_ns(to_ns(duration_s))

    async def _sleep_ns(self, duration_ns: int) -> None:
        kernel = self.fabric.kernel
        await wait(kernel.timer(self.index, kernel._now + duration_ns))

    @steps
    def call(self, target: str, message: Message, timeout_s: float) -> Generator[Event, Any, Any]:
        fabric = self.fabric
        callee = fabric.nodes.get(target)
        if callee is None:
            raise Unreachable(f"there is no node {target!r}")
        try:
            size = size_bytes(message)
        except KeyError as error:
            raise Refused(f"{type(message).__name__} is not a wire message") from error
        if (sentence := fabric.carrier.unreachable(self.index, callee.index)) is not None:
            raise Unreachable(sentence)
        watch = fabric.watch
        if watch is not None and type(message).__name__ in watch.passed_over:
            watch = None
        call = Call(self, callee, message, timeout_s, watch)
        self.calls[call] = None
        arrived: Arrived = call.come
        if watch is not None:
            arrived = watch.call_begun(call, self, callee, message, size, arrived)
        fabric.deadlines.add(call)
        fabric.carrier.send(self.index, callee.index, size, arrived, channel_of(type(message)))
        try:
            return (yield call)
        finally:
            self.calls.pop(call, None)
            if watch is not None:
                watch.call_ended(call)

    def receive(self, call: Call) -> None:
        """A call has arrived at this node, or at the one that had its name when the call left."""
        if call.watch is not None:
            call.watch.call_came(call, self)
        if not self.alive:
            return self._send_back(call, Unreachable(f"node {self.name!r} is down"))
        if self.hung:
            return self._unheard.append(call)
        handler = self.handlers.get(type(call.message))
        if handler is None:
            return self._send_back(call, Refused(f"node {self.name!r} serves no {call.kind}"))
        coroutine: Any = handler(call.caller.name, call.message)
        try:  # most handlers answer without waiting, and need no task
            awaited = coroutine.send(None)
        except StopIteration as stop:
            return self._answer(call, True, stop.value)
        except Exception as error:
            return self._answer(call, False, error)
        serving = self.fabric.serving.setdefault(self.index, {})
        serving[call] = None

        def ended(task: Task, ok: bool, value: Any) -> None:
            self.tasks.pop(task, None)
            serving.pop(call, None)
            self._answer(call, ok, value)

        task = Task(self.fabric.kernel, self.index, coroutine, ended, f"handler of {call.kind}", self)
        self.tasks[task] = None
        return task.wait_for(awaited)

    def _answer(self, call: Call, ok: bool, value: Any) -> None:
        """The handler has ended: send its reply, its refusal, or a refusal that stands for its bug."""
        if ok and not isinstance(value, Message):
            ok, value = False, TypeError(f"the handler returned {type(value).__name__}, a message was expected")
        if not ok and not isinstance(value, Refused | BadMessage):
            self.fabric.report(TaskFailure(self.name, f"handler of {call.kind}", value))
            value = Refused(f"node {self.name!r} failed inside its handler of {call.kind}")
        self._send_back(call, value)

    def hang(self) -> None:
        """Stand still: connections stay open, nothing is answered, and its own tasks do not go on."""
        self.hung = True

    def stand(self, task: Task, event: Event) -> None:
        """A task's turn came while the node hangs: it is kept until the node wakes."""
        self._stood.append((task, event))

    def wake(self) -> None:
        """Hang no longer: all goes on where it stood, and what came meanwhile is served, in order, as by a process that
        was stopped and continued."""
        if not self.hung:
            return
        self.hung = False
        stood, self._stood = self._stood, []
        for task, event in stood:
            task.resume(event)
        unheard, self._unheard = self._unheard, []
        for call in unheard:
            self.receive(call)

    def _send_back(self, call: Call, outcome: Message | BaseException) -> None:
        if isinstance(outcome, BadMessage):
            outcome = Refused(str(outcome))
        size = size_bytes(outcome) if isinstance(outcome, Message) else 64
        call.outcome, caller = outcome, call.caller
        back: Arrived = call.come_back
        if call.watch is not None:
            back = call.watch.call_answered(call, self, caller, outcome, size, back)
        if isinstance(outcome, Unreachable):
            return self.fabric.carrier.reset(self.index, caller.index, back)
        # over a line that is down or a closed border it stalls, and goes on when that is mended, as over a connection
        channel = channel_of(type(outcome))
        return self.fabric.carrier.send(self.index, caller.index, size, back, channel, reply=True)

    def serve(self, handlers: Mapping[type[Message], Handler]) -> None:
        self.handlers.update(handlers)

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> None:
        def ended(task: Task, ok: bool, value: Any) -> None:
            self.tasks.pop(task, None)
            if not ok:
                self.fabric.report(TaskFailure(self.name, task.label, value))

        self._start(coroutine, ended, name or label_of(coroutine))

    def _start(self, coroutine: Coroutine[Any, Any, Any], ended: Callable[[Task, bool, Any], None], label: str) -> None:
        task = Task(self.fabric.kernel, self.index, coroutine, ended, label, self)
        self.tasks[task] = None
        task.start_soon()

    async def gather(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        if not coroutines:
            return []
        outcomes: list[tuple[bool, Any]] = [(False, None)] * len(coroutines)
        left = len(coroutines)
        all_ended = Instant(self.fabric.kernel)

        def ended_at(place: int) -> Callable[[Task, bool, Any], None]:
            def ended(task: Task, ok: bool, value: Any) -> None:
                nonlocal left
                self.tasks.pop(task, None)
                outcomes[place] = (ok, value)
                left -= 1
                if left == 0:
                    all_ended.succeed()

            return ended

        for place, coroutine in enumerate(coroutines):
            self._start(coroutine, ended_at(place), label_of(coroutine))
        await wait(all_ended)
        for ok, value in outcomes:
            if not ok:
                raise value
        return [value for _, value in outcomes]

    def signal(self) -> SimSignal:
        return SimSignal(self)

    async def compute(self, work: Work | Callable[[T], Work], fn: Callable[[], T]) -> T:
        """`fn` runs at once; its result is there when the device would have had it, after what was asked before.
        Hashing is the processor's work: it waits for other hashing only."""
        now_ns = self.fabric.kernel._now
        try:
            result, error = fn(), None
        except Exception as raised:
            if callable(work):
                raise
            result, error = cast(T, None), raised
        done = work(result) if callable(work) else work
        hashing = isinstance(done, Hash | Spread)
        start_ns = max(now_ns, self.host_free_ns if hashing else self.device_free_ns)
        end_ns = start_ns + to_ns(self.price(done) * self.slowness)
        if hashing:
            self.host_free_ns = end_ns
        else:
            self.device_free_ns, self._device_ns = end_ns, self._device_ns + end_ns - start_ns
        self.fabric.record("compute", self.name, work=type(done).__name__, start_ns=start_ns, end_ns=end_ns)
        if (watch := self.fabric.watch) is not None:
            watch.computed(self, type(done).__name__, start_ns, end_ns)
        await self._sleep_ns(end_ns - now_ns)
        if error is not None:
            raise error
        return result


def label_of(coroutine: Coroutine[Any, Any, Any]) -> str:
    """What a task is called when nobody named it."""
    return getattr(coroutine, "__qualname__", "a task")


class SimFabric:
    """All nodes of one simulated run."""

    def __init__(
        self, *, run_seed: int, carrier: Callable[[Kernel], Carrier], recorder: Recorder | None = None
    ) -> None:
        self.run_seed = run_seed
        self.kernel = Kernel()
        self.carrier = carrier(self.kernel)
        self.recorder = recorder
        self.watch: Watcher | None = None
        self.nodes: dict[str, SimWorld] = {}
        self.by_index: list[SimWorld] = []
        self.failures: list[TaskFailure] = []
        self.serving: dict[int, dict[Call, None]] = {}  # callee -> the calls that it is at
        self.deadlines = Deadlines(self.kernel)

    def now_s(self) -> float:
        """True virtual time, whatever any node's clock says."""
        return self.kernel._now / SECOND_NS

    def record(self, kind: str, node: str, **fields: Any) -> None:
        if self.recorder is not None:
            self.recorder.event(self.kernel._now, kind, node, **fields)

    def report(self, failure: TaskFailure) -> None:
        """A task failed and nobody is left to hear it: the run ends with its name."""
        self.failures.append(failure)
        self.kernel.halted = True

    def node(self, name: str, price: Pricer = lambda work: 0.0) -> SimWorld:
        """A new node, or a killed one back again with nothing of its past (same place in the network)."""
        old = self.nodes.get(name)
        if old is not None:
            if old.alive:
                raise ValueError(f"there is a node {name!r} already")
            world = SimWorld(self, old.index, name, price)
            self.by_index[old.index] = world
        else:
            world = SimWorld(self, len(self.by_index), name, price)
            self.by_index.append(world)
        self.nodes[name] = world
        return world

    def kill(self, name: str) -> None:
        """The node's process dies: its tasks end, calls to it fail with Unreachable, what it held is released."""
        node = self.nodes[name]
        node.alive = False
        for task in list(node.tasks):
            task.kill()
        node.tasks.clear()
        node.calls.clear()
        self.carrier.drop(node.index)
        for call in self.serving.pop(node.index, {}):
            node._send_back(call, Unreachable(f"node {name!r} was lost in mid-call"))

    def run(self, main: Coroutine[Any, Any, T], *, node: str | None = None, until_s: float = float("inf")) -> T:
        """Run until `main` ends (its result), a task fails (TaskFailed), or virtual time passes `until_s`.

        Raises `Stuck`, saying who waits for whom, when nothing can happen any more and `main` has not ended.
        """
        outcome: list[tuple[bool, Any]] = []
        index = self.nodes[node].index if node is not None else 0

        def ended(task: Task, ok: bool, value: Any) -> None:
            outcome.append((ok, value))
            self.kernel.halted = True

        self.kernel.halted = bool(self.failures)
        Task(self.kernel, index, main, ended, "main").start_soon()
        self.kernel.run_through(NEVER_NS if until_s == float("inf") else to_ns(until_s))
        if self.failures:
            raise TaskFailed(str(self.failures[0])) from self.failures[0].error
        if not outcome:
            raise Stuck(self.who_waits())
        ok, value = outcome[0]
        if not ok:
            raise value
        return cast(T, value)

    def who_waits(self) -> str:
        """A sentence per open call: who waits for whom, for what, since when."""
        now_ns = self.kernel._now
        lines = [
            f"{world.name} has waited {(now_ns - call.since_ns) / SECOND_NS:.3f} s for {call.callee.name} to answer "
            f"{call.kind}"
            for world in self.by_index
            for call in world.calls
        ]
        head = f"at {now_ns / SECOND_NS:.3f} s nothing can happen any more and the run has not ended"
        return head + ("".join(f"\n  {line}" for line in lines) or "; no call is open: a signal was never set")


class Stuck(Exception):
    """A run that cannot go on. Takes exactly one argument: who waits for whom."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
