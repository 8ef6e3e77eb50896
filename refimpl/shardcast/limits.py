"""What one client may take from a relay, so that a flood or a slow reader costs the others nothing.

Per client: a token bucket of bytes, and a number of transfers at once. For all: a number of transfers at once, of which
no client holds more than its share. Nothing is remembered of a client that has been idle, so the table stays small.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """A relay's terms."""

    bytes_per_s: float = 250e6  # of one client, in the long run
    burst_bytes: float = 500e6  # what it may take at once after a pause
    transfers_per_client: int = 16  # the original's clients use 10
    transfers: int = 1024
    drip_bytes_per_s: float = 20e3  # a reader slower than this over a whole `drip_s` is cut off
    drip_s: float = 30.0


@dataclass
class _Client:
    tokens: float
    at_s: float
    transfers: int = 0


class Serving:
    """Who takes how much just now."""

    def __init__(self, limits: ServingLimits | None = None) -> None:
        self.limits = limits or ServingLimits()
        self._clients: dict[str, _Client] = {}
        self._transfers = 0

    def open(self, client: str, now_s: float) -> str | None:
        """Begin a transfer. None: go ahead (and `close` it). Else the sentence to refuse with."""
        state = self._state(client, now_s)
        if state.transfers >= self.limits.transfers_per_client:
            return f"{state.transfers} transfers are open to you, no more are served at once"
        if self._transfers >= self.limits.transfers:
            return f"all {self.limits.transfers} transfers of this relay are in use"
        state.transfers += 1
        self._transfers += 1
        return None

    def close(self, client: str, now_s: float) -> None:
        state = self._state(client, now_s)
        assert state.transfers > 0, "a transfer was closed that was not open"
        state.transfers -= 1
        self._transfers -= 1
        if state.transfers == 0 and state.tokens >= self.limits.burst_bytes:
            del self._clients[client]

    def take(self, client: str, size_bytes: int, now_s: float) -> float:
        """Book `size_bytes` for this client; returns how long to wait before they may be sent."""
        state = self._state(client, now_s)
        state.tokens -= size_bytes
        return max(0.0, -state.tokens / self.limits.bytes_per_s)

    def drips(self, sent_bytes: int, elapsed_s: float) -> bool:
        """True when a transfer is read so slowly that it is to be cut off."""
        return elapsed_s >= self.limits.drip_s and sent_bytes < self.limits.drip_bytes_per_s * elapsed_s

    def forget_idle(self, now_s: float) -> None:
        """Drop clients without transfers whose bucket is full again."""
        for client in list(self._clients):
            state = self._state(client, now_s)
            if state.transfers == 0 and state.tokens >= self.limits.burst_bytes:
                del self._clients[client]

    @property
    def clients(self) -> int:
        return len(self._clients)

    def _state(self, client: str, now_s: float) -> _Client:
        state = self._clients.get(client)
        if state is None:
            state = self._clients[client] = _Client(self.limits.burst_bytes, now_s)
        gained = max(0.0, now_s - state.at_s) * self.limits.bytes_per_s
        state.tokens, state.at_s = min(self.limits.burst_bytes, state.tokens + gained), max(state.at_s, now_s)
        return state
