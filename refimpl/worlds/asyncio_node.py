"""What the two asyncio worlds share: a node's tasks, signals, its device, the pacing of its line, and the supervisor.

This package alone knows asyncio. `LocalWorld` and `HttpWorld` add only how a message travels.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

import numpy as np

from refimpl.messages import Message
from refimpl.work import Work
from refimpl.world import Handler, Refused, TaskFailed, TaskFailure, derive_rng

T = TypeVar("T")

PACKET_BYTES, PACE_BYTES, PACE_S = 1448, 16 << 10, 0.002
"""A paced line sends pieces of `PACE_S`, a packet at least, so that messages that share it take turns."""

CATCH_UP_S = 0.1
"""A piece is reserved against the instant at which the one before should have passed, if that is no longer ago than
this: timers that fire late cost a line nothing of its rate."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """A node's access line as the emulated worlds shape it. The default is unshaped."""

    uplink_mbit_s: float | None = None
    downlink_mbit_s: float | None = None
    latency_ms: float = 0.0  # one way, added to every message that this node sends or receives

    def __post_init__(self) -> None:
        for field in ("uplink_mbit_s", "downlink_mbit_s"):
            rate = getattr(self, field)
            if rate is not None and rate <= 0:
                raise ValueError(f"Line.{field} is {rate}, a positive rate in Mbit/s was expected")
        if self.latency_ms < 0:
            raise ValueError(f"Line.latency_ms is {self.latency_ms}, 0 or more was expected")


class Pacer:
    """One direction of a line: bytes pass at `mbit_s`, in the order in which their pieces were reserved."""

    def __init__(self, mbit_s: float | None) -> None:
        self.bytes_per_s = None if mbit_s is None else mbit_s * 1e6 / 8
        self._free_at = 0.0

    @property
    def piece_bytes(self) -> int:
        """What one message sends before it is another's turn."""
        return int(min(PACE_BYTES, max(PACKET_BYTES, (self.bytes_per_s or inf) * PACE_S)))

    def reserve_next(self, count: int, passed_s: float, now_s: float) -> float:
        """The same for the piece that follows one which passed, or should have, at `passed_s`."""
        return self.reserve(count, max(passed_s, now_s - CATCH_UP_S))

    def reserve(self, count: int, not_before_s: float) -> float:
        """The instant at which `count` bytes have passed, when they may not start before `not_before_s`."""
        if self.bytes_per_s is None:
            return not_before_s
        self._free_at = max(self._free_at, not_before_s) + count / self.bytes_per_s
        return self._free_at


class AsyncioSignal:
    """`refimpl.world.Signal` on asyncio."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self, timeout_s: float | None = None) -> bool:
        if timeout_s is None:
            await self._event.wait()
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        except TimeoutError:
            return self._event.is_set()
        return True


class Supervisor:
    """Where exceptions end that nobody was left to receive. The first one ends the run."""

    def __init__(self) -> None:
        self.failures: list[TaskFailure] = []
        self._failed: asyncio.Event | None = None

    def report(self, failure: TaskFailure) -> None:
        self.failures.append(failure)
        if self._failed is not None:
            self._failed.set()

    async def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run `main` until it ends or any task fails; a failure is raised as TaskFailed, naming node and task."""
        self._failed = asyncio.Event()
        if self.failures:
            self._failed.set()
        work = asyncio.ensure_future(main)
        alarm = asyncio.ensure_future(self._failed.wait())
        try:
            await asyncio.wait((work, alarm), return_when=asyncio.FIRST_COMPLETED)
            if self.failures:
                raise TaskFailed(str(self.failures[0])) from self.failures[0].error
            return work.result()
        finally:
            for task in (work, alarm):
                task.cancel()
            await asyncio.gather(work, alarm, return_exceptions=True)


class AsyncioNode:
    """A node's tasks, clock, chance and device: the half of the port that does not send anything."""

    def __init__(
        self,
        name: str,
        *,
        run_seed: int,
        started_s: float,
        supervisor: Supervisor,
        device: ThreadPoolExecutor,
        line: Line,
    ) -> None:
        self.name = name
        self.rng: np.random.Generator = derive_rng(run_seed, "node", name)
        self.alive = True
        self.line = line
        self.slowness = 1.0  # 1 or more: the device is made so many times slower
        self.skew_s = 0.0  # how far its clock is ahead
        self.computed: Callable[[str, float, float], None] | None = None  # told of work, its start and its end
        self.uplink, self.downlink = Pacer(line.uplink_mbit_s), Pacer(line.downlink_mbit_s)
        self._started_s = started_s
        self._supervisor = supervisor
        self._device = device
        self._handlers: dict[type[Message], Handler] = {}
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def paced(self) -> bool:
        return self.uplink.bytes_per_s is not None or self.downlink.bytes_per_s is not None

    def start_clock(self, started_s: float) -> None:
        """The run begins at this reading of the monotonic clock."""
        self._started_s = started_s

    def now(self) -> float:
        return self.elapsed_s() + self.skew_s

    def elapsed_s(self) -> float:
        """True time since the run began, whatever the node's clock says."""
        return time.monotonic() - self._started_s

    def ail(self, *, slowness: float = 1.0, skew_s: float = 0.0) -> None:
        """From now on the device is so many times slower, and the clock so far ahead. A device cannot be made faster:
        raises ValueError below 1."""
        if slowness < 1:
            raise ValueError(f"slowness of node {self.name!r} is {slowness}; a real device needs 1 or more")
        self.slowness, self.skew_s = slowness, skew_s

    async def sleep(self, duration_s: float) -> None:
        if duration_s < 0:
            raise ValueError(f"node {self.name!r} was to sleep for {duration_s} s; 0 or more was expected")
        until = self.elapsed_s() + duration_s
        await asyncio.sleep(duration_s)
        while (left := until - self.elapsed_s()) > 0:  # the event loop's timer may be early by a clock tick
            await asyncio.sleep(left)

    async def sleep_until(self, instant_s: float) -> None:
        """Until `elapsed_s()` is there."""
        if (left := instant_s - self.elapsed_s()) > 0:
            await asyncio.sleep(left)

    def serve(self, handlers: Mapping[type[Message], Handler]) -> None:
        self._handlers.update(handlers)

    def signal(self) -> AsyncioSignal:
        return AsyncioSignal()

    def start_task(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """A task that dies with this node."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> None:
        label = name or getattr(coroutine, "__qualname__", "a task")

        def ended(task: asyncio.Task[Any]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                self._supervisor.report(TaskFailure(self.name, label, error))

        self.start_task(coroutine).add_done_callback(ended)

    async def gather(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        tasks = [self.start_task(coroutine) for coroutine in coroutines]
        if tasks:
            await asyncio.wait(tasks)
        return [task.result() for task in tasks]

    async def compute(self, work: Work | Callable[[T], Work], fn: Callable[[], T]) -> T:
        result, start_s, end_s = await asyncio.get_running_loop().run_in_executor(self._device, self._timed, fn)
        if self.computed is not None:
            self.computed(type(work(result) if callable(work) else work).__name__, start_s, end_s)
        return result

    def _timed(self, fn: Callable[[], T]) -> tuple[T, float, float]:
        """On the device: `fn`, stretched by the slowness that is in force when it ends, with its start and end."""
        start_s = self.elapsed_s()
        try:
            result = fn()
        finally:
            time.sleep((self.slowness - 1.0) * (self.elapsed_s() - start_s))
        return result, start_s, self.elapsed_s()

    async def answer(self, source: str, message: Message) -> Message:
        """Run this node's handler for `message`. Raises Refused; a bug in the handler also reaches the supervisor."""
        handler = self._handlers.get(type(message))
        if handler is None:
            raise Refused(f"node {self.name!r} serves no {type(message).__name__}")
        try:
            reply = await handler(source, message)
            if not isinstance(reply, Message):
                raise TypeError(f"the handler returned {type(reply).__name__}, a message was expected")
        except Refused:
            raise
        except Exception as error:
            task = f"handler of {type(message).__name__}"
            self._supervisor.report(TaskFailure(self.name, task, error))
            raise Refused(f"node {self.name!r} failed inside its {task}") from error
        return reply

    def stop_tasks(self) -> None:
        """The node is dead: everything it was doing ends here."""
        self.alive = False
        for task in list(self._tasks):
            task.cancel()


def device_thread() -> ThreadPoolExecutor:
    """One device: one piece of work at a time, in the order asked."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")
