"""The line that a run shows while it runs: virtual time, speed and the counts that matter, never silent for long.

A thread draws it, since one piece of real model work may keep the simulator's own thread busy for seconds; and it goes
on through everything that a run does before and after its virtual time.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from tqdm import tqdm

REDRAW_S = 1.0


def _nothing_done() -> float:
    return 0.0


class Progress:
    """Shows `done_share()` as a bar, and the figures beside it, until it is left.

    On something that is no terminal it prints a plain line now and then instead.
    """

    def __init__(
        self,
        title: str,
        now_s: Callable[[], float] | None = None,
        done_share: Callable[[], float] = _nothing_done,
        counts: Mapping[str, int] | None = None,
        *,
        shown: bool = True,
    ) -> None:
        """`shown`: whether anything is to be seen at all. The others are those of `turn_to`."""
        self._title, self._shown = title, shown
        self.turn_to("", now_s, done_share, counts)
        self._stop = threading.Event()
        self._terminal = shown and sys.stderr.isatty()
        self._bar = tqdm(
            total=100.0,
            desc=title,
            file=sys.stderr,
            leave=False,
            disable=not self._terminal,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} {postfix}",
        )
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def turn_to(
        self,
        doing: str,
        now_s: Callable[[], float] | None = None,
        done_share: Callable[[], float] = _nothing_done,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        """Something else begins: a word for it, its virtual time if it has one, how much of it is done, its counts."""
        self._doing, self._now_s, self._done_share, self._counts = doing, now_s, done_share, counts or {}
        self._started_s = time.monotonic()

    def __enter__(self) -> Progress:
        if self._shown:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        if self._shown:
            self._thread.join()
        if error is None:
            self._show(1.0)
        self._bar.close()

    def line(self) -> str:
        """The figures as text."""
        wall_s = max(time.monotonic() - self._started_s, 1e-9)
        parts = [self._doing] if self._doing else []
        if self._now_s is not None:
            virtual_s = self._now_s()
            parts.append(f"{virtual_s:.1f} s virtual, {virtual_s / wall_s:.1f} × real time")
        else:
            parts.append(f"{wall_s:.0f} s")
        return "  ".join([*parts, *(f"{name} {count}" for name, count in list(self._counts.items()))])

    def _draw(self) -> None:
        while not self._stop.wait(REDRAW_S):
            share = min(1.0, self._done_share())
            self._show(share)
            if not self._terminal:
                print(f"{self._title} {100 * share:3.0f}%  {self.line()}", file=sys.stderr, flush=True)

    def _show(self, share: float) -> None:
        if self._terminal:
            self._bar.n = 100 * share
            self._bar.set_postfix_str(self.line(), refresh=False)
            self._bar.refresh()
