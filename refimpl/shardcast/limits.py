"""What one client may take from a relay, so that a flood or a slow reader costs the others nothing.

Per client: a token bucket of bytes, and a number of transfers at once. The same per address, some clients' worth of it:
a client's name is its own word, and who makes up names shares what its address may take. For all: a number of transfers
at once, of which no client holds more than its share. Nothing is remembered of a client that has been idle, so the
table stays small.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ServingLimits:
    """A relay's terms."""

    bytes_per_s: float = 250e6  # of one client, in the long run
    burst_bytes: float = 500e6  # what it may take at once after a pause
    transfers_per_client: int = 16  # the original's clients use 10
    clients_per_address: float = 8.0  # what one address may take, in clients: a household or a machine has several
    transfers: int = 1024
    drip_bytes_per_s: float = 20e3  # a reader slower than this over a whole `drip_s` is cut off
    drip_s: float = 30.0


@dataclass
class _Account:
    """Of a client, or of an address: `share` times what a client may take."""

    share: float
    tokens: float
    at_s: float
    transfers: int = 0


_Key = tuple[str, str]  # ("client" or "address", its name)


class Serving:
    """Who takes how much just now. An empty address: it is not known, and not limited."""

    def __init__(self, limits: ServingLimits | None = None) -> None:
        self.limits = limits or ServingLimits()
        self._accounts: dict[_Key, _Account] = {}
        self._transfers = 0

    def open(self, client: str, now_s: float, address: str = "") -> str | None:
        """Begin a transfer. None: go ahead (and `close` it). Else the sentence to refuse with."""
        accounts = self._of(client, address, now_s)
        for (what, _), account in accounts.items():
            if account.transfers >= account.share * self.limits.transfers_per_client:
                whom = "you" if what == "client" else "your address"
                return f"{account.transfers} transfers are open to {whom}, no more are served at once"
        if self._transfers >= self.limits.transfers:
            return f"all {self.limits.transfers} transfers of this relay are in use"
        for account in accounts.values():
            account.transfers += 1
        self._transfers += 1
        return None

    def close(self, client: str, now_s: float, address: str = "") -> None:
        for key, account in self._of(client, address, now_s).items():
            assert account.transfers > 0, "a transfer was closed that was not open"
            account.transfers -= 1
            self._forget_if_idle(key, account)
        self._transfers -= 1

    def take(self, client: str, size_bytes: int, now_s: float, address: str = "") -> float:
        """Book `size_bytes` for this client; returns how long to wait before they may be sent."""
        wait_s = 0.0
        for account in self._of(client, address, now_s).values():
            account.tokens -= size_bytes
            wait_s = max(wait_s, -account.tokens / (account.share * self.limits.bytes_per_s))
        return wait_s

    def drips(self, sent_bytes: int, elapsed_s: float) -> bool:
        """True when a transfer is read so slowly that it is to be cut off."""
        return elapsed_s >= self.limits.drip_s and sent_bytes < self.limits.drip_bytes_per_s * elapsed_s

    def forget_idle(self, now_s: float) -> None:
        """Drop clients and addresses without transfers whose bucket is full again."""
        for key, account in list(self._accounts.items()):
            self._earn(account, now_s)
            self._forget_if_idle(key, account)

    @property
    def accounts(self) -> int:
        """Clients and addresses that are remembered."""
        return len(self._accounts)

    def _of(self, client: str, address: str, now_s: float) -> dict[_Key, _Account]:
        """The accounts that a transfer is booked on, as of now."""
        shares = {("client", client): 1.0}
        if address:
            shares["address", address] = self.limits.clients_per_address
        for key, share in shares.items():
            account = self._accounts.get(key)
            if account is None:
                account = self._accounts[key] = _Account(share, share * self.limits.burst_bytes, now_s)
            self._earn(account, now_s)
        return {key: self._accounts[key] for key in shares}

    def _earn(self, account: _Account, now_s: float) -> None:
        gained = max(0.0, now_s - account.at_s) * account.share * self.limits.bytes_per_s
        account.tokens = min(account.share * self.limits.burst_bytes, account.tokens + gained)
        account.at_s = max(account.at_s, now_s)

    def _forget_if_idle(self, key: _Key, account: _Account) -> None:
        if account.transfers == 0 and account.tokens >= account.share * self.limits.burst_bytes:
            del self._accounts[key]
