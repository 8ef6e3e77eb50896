"""Why: an event loop wakes at whole milliseconds, late by one at worst; a shaped line should hold a message no longer.

On Linux the kernel's timer file (`timerfd_create(2)`) wakes the loop through its selector, like a socket: late by some
0.05 ms where the machine is free. Elsewhere `asyncio.sleep` has to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import heapq
import itertools
import os
import sys
import time
from typing import Any

CLOCK_MONOTONIC, TFD_TIMER_ABSTIME = 1, 1
_LIBC = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
_create: Any = getattr(_LIBC, "timerfd_create", None)
_set: Any = getattr(_LIBC, "timerfd_settime", None)


class _Span(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Span), ("first", _Span))


class FineTimer:
    """Waits of one event loop, on the clock of `time.monotonic`. Made inside the loop; `close()` when done."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._number = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []
        self._closed = False
        fine = _create is not None and _set is not None
        self._file = _create(CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC) if fine else -1
        if self._file >= 0:
            self._loop.add_reader(self._file, self._fire)

    async def until(self, instant_s: float) -> None:
        """Until `time.monotonic()` is there: not before, and hardly after. Cancelled once the timer is closed."""
        if instant_s <= time.monotonic():
            return
        if self._closed:
            raise asyncio.CancelledError
        if self._file < 0:
            while (left_s := instant_s - time.monotonic()) > 0:
                await asyncio.sleep(left_s)
            return
        future = self._loop.create_future()
        heapq.heappush(self._waiting, (instant_s, next(self._number), future))
        if self._waiting[0][2] is future:
            self._arm()
        await future

    def _arm(self) -> None:
        """Have the kernel wake us when the first of the waits is over."""
        due_ns = max(1, int(self._waiting[0][0] * 1e9) + 1)  # 0 would disarm it
        setting = _Setting(first=_Span(*divmod(due_ns, 10**9)))
        if _set(self._file, TFD_TIMER_ABSTIME, ctypes.byref(setting), None) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"timerfd_settime: {os.strerror(error)}")

    def _fire(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._file, 8)
        while self._waiting and (self._waiting[0][0] <= time.monotonic() or self._waiting[0][2].done()):
            _, _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
        if self._waiting:
            try:
                self._arm()
            except OSError as error:  # those that wait should hear of it, for nothing would wake them
                for _, _, future in self._waiting:
                    if not future.done():
                        future.set_exception(error)
                self._waiting.clear()

    def close(self) -> None:
        """No more waits; those that are left are cancelled."""
        self._closed = True
        for _, _, future in self._waiting:
            future.cancel()
        self._waiting.clear()
        if self._file >= 0:
            self._loop.remove_reader(self._file)
            os.close(self._file)
            self._file = -1
