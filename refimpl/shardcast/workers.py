"""Independent pieces of work on several cores, their results in order, with bounded memory.

Threads suffice: what an increment costs (numba without the interpreter's lock, numpy, zstd, SHA-256, reading and
writing) runs beside other threads. What comes out is the same for any number of them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")

AHEAD = 2  # results that wait to be taken, for each worker


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def in_order(work: Callable[[T], R], items: Iterable[T], workers: int) -> Iterator[R]:
    """`work(item)` for each item, on so many threads; no more than a few results are ahead of who takes them."""
    if workers <= 1:
        yield from map(work, items)
        return
    with ThreadPoolExecutor(workers, "shardcast") as threads:
        pending: deque[Future[R]] = deque()
        try:
            for item in items:
                pending.append(threads.submit(work, item))
                if len(pending) >= AHEAD * workers:
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()
        finally:
            for future in pending:
                future.cancel()
