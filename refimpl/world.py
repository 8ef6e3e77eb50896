"""The port: all that a protocol component may ask of the world it runs in.

A component (a worker, a validator, a relay, a stage) is written once, as plain `async def` code that is handed a
`World`. The same object then runs over HTTP between processes, in one process with injected latency, or in SimPy's
virtual time. `tests/test_world_contract.py` is one test body run over all of them.

Not in the port, on purpose: cancellation (a loop ends by reading a stop flag), queues, locks, files, threads.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from refimpl.messages import Message
from refimpl.work import Work

T = TypeVar("T")

Handler = Callable[[str, Any], Awaitable[Message]]
"""Answers one call: `await handler(source, message)` gives the reply. It may raise `Refused` to say no with a reason;
any other exception is a bug: it reaches the supervisor, and the caller gets `Refused`."""


class CallError(Exception):
    """A call that brought no reply. Takes exactly one argument: the sentence that says why."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)

    @property
    def reason(self) -> str:
        return str(self.args[0])


class Timeout(CallError):
    """No reply within `timeout_s`. The callee may be at work still; it is never stopped by its caller's time-out."""


class Unreachable(CallError):
    """The target could not be reached, or was lost in mid-call."""


class Refused(CallError):
    """The target answered, and said no: a bad message, no such handler, or a reason of its own."""


@dataclass(frozen=True)
class TaskFailure:
    """An exception that no caller was left to receive, as the supervisor keeps it."""

    node: str
    task: str
    error: BaseException

    def __str__(self) -> str:
        return f"node {self.node!r}, task {self.task!r}: {type(self.error).__name__}: {self.error}"


class TaskFailed(Exception):
    """Raised where a run ends, when a task of some node failed. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


class Signal(Protocol):
    """The one way to wait for another task. Once set it stays set; waiting on a set signal returns at once."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until set. True: it is set. False: `timeout_s` seconds went by first."""
        ...


class World(Protocol):
    """One node's view of the world."""

    @property
    def name(self) -> str:
        """This node's id, unique in the run."""
        ...

    @property
    def rng(self) -> np.random.Generator:
        """Seeded from (run seed, node id): the node's only source of chance."""
        ...

    def now(self) -> float:
        """Seconds since the run began; never goes back."""
        ...

    async def sleep(self, duration_s: float) -> None:
        """Return not before `duration_s` seconds have gone by (at once for 0). Raises ValueError when negative."""
        ...

    async def call(self, target: str, message: Message, timeout_s: float) -> Any:
        """Send `message` to `target` and return its reply, or raise exactly one of `Timeout`, `Unreachable`, `Refused`.

        The callee's handler runs at most once, and is never stopped by this call's time-out.
        """
        ...

    def serve(self, handlers: Mapping[type[Message], Handler]) -> None:
        """Answer messages of these types from now on (adds to what is served). Many calls are served at once."""
        ...

    def spawn(self, coroutine: Coroutine[Any, Any, Any], name: str = "") -> None:
        """Run a task that outlives its parent. Its exception is never lost: it reaches the supervisor, which names the
        node and the task."""
        ...

    async def gather(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        """Run all at once and return their results in order. The first failure, in argument order, is raised after
        all have ended."""
        ...

    def signal(self) -> Signal:
        """A new signal, not set."""
        ...

    async def compute(self, work: Work | Callable[[T], Work], fn: Callable[[], T]) -> T:
        """Run `fn` on this node's device and return its result; takes the time that the world says. A device does one
        piece of work at a time, in the order asked. `work` may be a function of the result, for work whose amount is
        only known once it is done (how many tokens were generated)."""
        ...


def derive_rng(run_seed: int, *purpose: str | int) -> np.random.Generator:
    """A generator for one purpose of one run: equal arguments, equal stream; different purposes, independent streams.

    Strings are turned into numbers by their bytes, never by `hash()`, so the stream does not depend on PYTHONHASHSEED.
    """
    key = [run_seed & 0xFFFFFFFF, (run_seed >> 32) & 0xFFFFFFFF]
    for part in purpose:
        raw = part.encode() if isinstance(part, str) else str(part).encode()
        key.append(len(raw))
        key.extend(int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4))
    return np.random.default_rng(np.random.SeedSequence(key))
