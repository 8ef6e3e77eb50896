"""How fast shards come from the present sources, so that a parent that delivers too little is noticed.

A transfer may show no progress before it ends, so the answer is an upper bound: all that came since the oldest transfer
that is under way began, and what the ones under way have brought or may bring, over that time. Where nothing is under
way although shards are wanted (the source says "not yet" to all), the time runs from the last one that came.
"""

from __future__ import annotations

from collections import deque

LEAST_S = 2.0
"""Over less time than this nothing is said."""
REMEMBERED = 1000


class Arrivals:
    """Shards that came whole, and since when more have been wanted."""

    def __init__(self, now_s: float) -> None:
        self._wanted_s = now_s
        self._came: deque[tuple[float, int]] = deque(maxlen=REMEMBERED)  # (when, size)

    def wanted(self, now_s: float) -> None:
        """There was nothing to fetch, and now there is."""
        self._wanted_s = now_s

    def came(self, size_bytes: int, now_s: float) -> None:
        """A shard came whole."""
        self._came.append((now_s, size_bytes))

    def throughput(self, oldest_began_s: float, coming_bytes: int, now_s: float) -> tuple[float, float] | None:
        """(bytes, seconds): at most so much came in so long. `oldest_began_s`: when the oldest transfer under way began
        (infinity: none is); `coming_bytes`: what those under way have brought, or may. None: too short to say."""
        last_s = self._came[-1][0] if self._came else self._wanted_s
        since_s = min(oldest_began_s, max(self._wanted_s, last_s))
        if now_s - since_s < LEAST_S:
            return None
        came = sum(size for at_s, size in self._came if at_s > since_s)
        return came + max(coming_bytes, 1), now_s - since_s
