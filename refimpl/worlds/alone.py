"""One node as a program of its own, on any machine: it is told whom it talks to by address, and ends by a signal.

`process.py` is the other way to live: under a parent that hands out the addresses.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from refimpl.world import Signal, TaskFailed
from refimpl.worlds.asyncio_node import Line, Supervisor
from refimpl.worlds.http import HttpWorld

Main = Callable[[HttpWorld, Signal], Coroutine[Any, Any, int]]
"""A node's whole part: `await main(world, stop)` ends when the part is done or `stop` is set; gives the exit code."""
Prepare = Callable[[HttpWorld], None]
"""Called before the node listens: the place to add routes."""


class Addresses(Mapping[str, str]):
    """A book in which every node is known by its URL."""

    def __getitem__(self, name: str) -> str:
        if not name.startswith(("http://", "https://")):
            raise KeyError(name)
        return name.rstrip("/")

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


def run_alone(
    name: str, main: Main, *, prepare: Prepare | None, host: str, port: int, run_seed: int, line: Line | None = None
) -> int:
    """Live as node `name` until its part is done or the process is told to stop (SIGINT, SIGTERM). `prepare` None: the
    node does not listen. Returns the exit code."""
    return asyncio.run(_live(name, main, prepare, host, port, run_seed, line))


async def _live(
    name: str, main: Main, prepare: Prepare | None, host: str, port: int, run_seed: int, line: Line | None
) -> int:
    supervisor = Supervisor()
    world = HttpWorld(name, book=Addresses(), supervisor=supervisor, run_seed=run_seed, line=line)
    stop = world.signal()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        if prepare is not None:
            prepare(world)
            await world.start(host, port)
        return await supervisor.run(main(world, stop))
    except TaskFailed as failure:
        print(failure, file=sys.stderr, flush=True)
        return 1
    finally:
        await world.stop()
