"""The line that a run shows while it runs: virtual time, speed and the counts that matter, never silent for long.

A thread draws it, since one piece of real model work may keep the simulator's own thread busy for seconds.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from tqdm import tqdm

REDRAW_S = 1.0


class Progress:
    """Shows `done_share()` as a bar, and `figures()` beside it, until it is left.

    On something that is no terminal it prints a plain line now and then instead.
    """

    def __init__(
        self, title: str, now_s: Callable[[], float], done_share: Callable[[], float], counts: Mapping[str, int]
    ) -> None:
        self._title, self._now_s, self._done_share, self._counts = title, now_s, done_share, counts
        self._stop = threading.Event()
        self._started_s = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar = tqdm(
            total=100.0,
            desc=title,
            file=sys.stderr,
            disable=not self._terminal,
            bar_format="{desc} {percentage:3.0f}% |{bar}| {elapsed} {postfix}",
        )
        self._thread = threading.Thread(target=self._draw, name="progress", daemon=True)

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if error is None:
            self._show(1.0)
        self._bar.close()

    def line(self) -> str:
        """The figures as text."""
        virtual_s, wall_s = self._now_s(), max(time.monotonic() - self._started_s, 1e-9)
        counts = "  ".join(f"{name} {count}" for name, count in self._counts.items())
        return f"{virtual_s:.1f} s virtual, {virtual_s / wall_s:.1f} × real time  {counts}"

    def _draw(self) -> None:
        last_s = 0.0
        while not self._stop.wait(REDRAW_S):
            self._show(self._done_share())
            if not self._terminal and time.monotonic() - last_s > 0.9 * REDRAW_S:
                last_s = time.monotonic()
                print(f"{self._title} {100 * self._done_share():3.0f}%  {self.line()}", file=sys.stderr, flush=True)

    def _show(self, share: float) -> None:
        self._bar.n = min(100.0, 100 * share)
        self._bar.set_postfix_str(self.line(), refresh=False)
        self._bar.refresh()
