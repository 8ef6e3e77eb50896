"""One node as a process of its own, under a parent that starts and stops it over its standard streams.

    child -> parent   {"url": "http://127.0.0.1:40123"}          it listens; beside it, what `words` says
    parent -> child   {"book": {name: url}, "started_s": 12.5}   the run begins, at this reading of the monotonic clock
                      with "tell": true, the child says {"begun": true} as soon as it serves, {"done": true} when done
                      with "keys": {name: public key}, these are the nodes' own
    parent -> child   {"slowness": 3.0, "skew_s": 0.0}           so slow is the device, so far ahead the clock, from now
    parent -> child   {"book": {name: url}}                      so is this node reached from now: it was started again
    parent -> child   (end of input)                             stop; also what a child sees when its parent dies
    child exits       0: its part is done; 1: a task failed, and standard error says which

A child that has not been told to begin waits, with all it needs loaded: so a parent can have a dead node's successor
ready, and let it begin at an instant of its choosing.

Several machines: the same lines over any channel; `started_s` is then left out, and each node's clock starts at zero.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any

from refimpl.world import Signal, TaskFailed
from refimpl.worlds.asyncio_node import Line, Supervisor
from refimpl.worlds.http import HttpWorld

Main = Callable[[HttpWorld, Signal], Coroutine[Any, Any, None]]
"""A node's whole part: `main(world, stop)` ends when the part is done or `stop` is set."""


def run_process(
    name: str,
    main: Main,
    *,
    run_seed: int,
    line: Line,
    host: str = "127.0.0.1",
    latency_ms_max: float | None = None,
    words: Mapping[str, str] | None = None,
    keys: dict[str, str] | None = None,
) -> int:
    """Live as node `name` until its part is done or its parent says stop. Returns the exit code. `latency_ms_max`: of
    all lines that the parent emulates; None: this node's own. `words`: said beside the URL. `keys`: filled with what
    the parent says of them before the part begins."""
    make = partial(HttpWorld, name, run_seed=run_seed, line=line, latency_ms_max=latency_ms_max)
    return asyncio.run(_live(make, main, host, words or {}, {} if keys is None else keys))


async def _live(
    make: Callable[..., HttpWorld], main: Main, host: str, words: Mapping[str, str], keys: dict[str, str]
) -> int:
    orders = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(orders), sys.stdin)
    supervisor, book = Supervisor(), {}  # type: tuple[Supervisor, dict[str, str]]
    world = make(book=book, supervisor=supervisor)
    print(json.dumps({"url": await world.start(host), **words}), flush=True)
    stop = world.signal()
    try:
        begin = await orders.readline()
        if not begin:
            return 0
        order = json.loads(begin)
        book.update(order["book"])
        keys.update(order.get("keys", {}))
        world.start_clock(order.get("started_s", time.monotonic()))

        async def listen() -> None:
            while line := await orders.readline():
                order = json.loads(line)
                book.update(order.pop("book", {}))
                if order:
                    world.ail(**order)
            stop.set()

        world.spawn(listen(), "orders")
        if order.get("tell"):
            world.spawn(_tell(), "tell")
        await supervisor.run(main(world, stop))
        if order.get("tell") and not stop.is_set():
            print(json.dumps({"done": True}), flush=True)
    except TaskFailed as failure:
        print(failure, file=sys.stderr, flush=True)
        return 1
    finally:
        await world.stop()
    return 0


async def _tell() -> None:
    """Say that the node has begun: by now its main task has run until it first waits."""
    for _ in range(3):
        await asyncio.sleep(0)
    print(json.dumps({"begun": True}), flush=True)
