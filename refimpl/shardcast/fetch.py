"""The order of work of one client: which shard next, from whom, when to try again, when to ask a second relay.

A client says what happens and asks `next`; it gets a `Fetch` to carry out, a `Wait` until something may change, or
`None` when nothing is left to do. Waiting, sockets and files are the role's.

Rules: 1) a shard that failed is tried elsewhere first, after a pause that doubles with jitter (the original: 2, 2, 2,
15 s, for ever); 2) a relay that delivered a wrong shard is not asked again for this version; when all have, the last
resort is asked (the origin), and after a pause the least guilty again, one transfer at a time; 3) a relay that does not
have a shard yet is no failure, it is asked again after a pause; 4) when no shard is left to start, the slowest transfer
is asked for a second time where it is expected clearly sooner, from the byte that it has reached; 5) a transfer that
stalls or drips is named by `overdue`, to be cut off.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from refimpl.shardcast.choice import RelayChoice

CONNECTIONS = 10  # transfers at once, as in the original


@dataclass(frozen=True, slots=True)
class Fetch:
    """Ask `relay` for shard `index` from byte `offset` on. An offset below what is on disk: drop that first."""

    ticket: int
    index: int
    relay: str
    offset: int
    hedge: bool  # a second request for a shard that is under way already


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to start before `until_s` (infinity: not before something is reported)."""

    until_s: float


@dataclass(frozen=True, kw_only=True)
class FetchRules:
    """How patient a client is."""

    connections: int = CONNECTIONS
    retry_s: float = 0.5  # first pause after a failed attempt at a shard; doubles each time
    retry_s_max: float = 15.0
    not_yet_s: float = 0.25  # before a relay is asked again for a shard that it did not have
    not_yet_noted: int = 3  # answers of this kind, and not one shard: that is worth a note
    stall_s: float = 5.0  # a transfer without a byte for this long will never end
    drip: float = 10.0  # nor will one that still needs this many times what another relay would need for the whole
    hedge_gain: float = 0.5  # ask twice when the second is expected within this share of what the first still needs
    hedge_check_s: float = 0.5  # how often that is looked at
    copies_max: int = 2
    forgive_s: float = 5.0  # when all relays are banned: before the least guilty is asked again; doubles each time
    forgive_s_max: float = 120.0


@dataclass
class _Transfer:
    index: int
    relay: str
    size_bytes: int  # still to come when it began
    offset: int
    started_s: float
    last_byte_s: float
    received_bytes: int = 0
    first_byte_s: float | None = None


@dataclass
class _Shard:
    size_bytes: int
    offset: int = 0  # bytes that are on disk already
    failures: int = 0
    avoid: set[str] = field(default_factory=set)  # relays that failed at it since all were tried
    not_yet_until_s: dict[str, float] = field(default_factory=dict)
    tickets: set[int] = field(default_factory=set)
    alone: bool = False  # it came wrong from several relays at once: now from one only, so that it can be named


class FetchPlan:
    """All transfers of one version to one client."""

    def __init__(self, policy: RelayChoice, rules: FetchRules | None = None) -> None:
        self.policy, self.rules = policy, rules or FetchRules()
        self.banned: dict[str, str] = {}  # relay -> why
        self._not_yet: Counter[str] = Counter()  # by relay: how often it did not have what it was asked for
        self._gave: Counter[str] = Counter()  # shards by relay
        self._wrong: Counter[str] = Counter()  # wrong shards by relay, for as long as this plan lasts
        self._pardoned = ""  # the relay that is asked again although it sent a wrong shard
        self._pardons = 0
        self._none_left_s: float | None = None  # since when all relays have been banned
        self._last_resort, self._resort_works = "", True
        self._shards: dict[int, _Shard] = {}
        self._ready: deque[int] = deque()
        self._later: list[tuple[float, int]] = []  # a heap of (not before, shard): pauses after failures
        self._nowhere: list[tuple[float, int]] = []  # a heap of (not before, shard): no relay had it
        self._relays: list[str] = []
        self._transfers: dict[int, _Transfer] = {}
        self._tickets = 0

    @property
    def left(self) -> int:
        """Shards offered and not yet here."""
        return len(self._shards)

    # --------------------------------------------------------------------------------------------- what happens
    def offer(self, shards: Iterable[tuple[int, int, int]]) -> None:
        """Shards that may be fetched: (index, size, bytes that are here already), each once."""
        for index, size_bytes, offset in shards:
            assert index not in self._shards, f"shard {index} was offered twice"
            self._shards[index] = _Shard(size_bytes, offset)
            self._ready.append(index)

    def knows(self, ticket: int) -> bool:
        """The transfer has begun and not ended."""
        return ticket in self._transfers

    def relay_of(self, ticket: int) -> str:
        """Whom a transfer that is under way comes from."""
        return self._transfers[ticket].relay

    def shard_of(self, ticket: int) -> int:
        """What it brings, by the number under which it was offered."""
        return self._transfers[ticket].index

    def empty_handed(self) -> dict[str, int]:
        """Relays that gave nothing, and said again and again that they would soon: how often."""
        return {
            relay: count
            for relay, count in sorted(self._not_yet.items())
            if count >= self.rules.not_yet_noted and not self._gave[relay]
        }

    def progress(self, ticket: int, received_bytes: int, now_s: float) -> None:
        """So much has arrived on this transfer so far."""
        transfer = self._transfers[ticket]
        if received_bytes > transfer.received_bytes:
            if transfer.first_byte_s is None:
                transfer.first_byte_s = now_s - transfer.started_s
            transfer.received_bytes, transfer.last_byte_s = received_bytes, now_s

    def arrived(self, ticket: int, now_s: float) -> list[int]:
        """The shard is complete and verified. Returns the tickets of other transfers of it: stop them."""
        transfer = self._end(ticket)
        self._gave[transfer.relay] += 1
        self._observe(transfer, transfer.size_bytes, now_s, ok=True)
        self._resort_works |= transfer.relay == self._last_resort
        shard = self._shards.pop(transfer.index, None)
        return sorted(shard.tickets) if shard else []

    def stopped(self, ticket: int, *, offset: int) -> None:
        """A transfer that was no longer needed has ended: neither a success nor a failure of its relay. Where its shard
        is needed all the same (another transfer of it came wrong meanwhile), it is fetched on from `offset`."""
        if ticket in self._transfers:
            transfer = self._end(ticket)
            self.policy.release(transfer.relay)
            shard = self._shards.get(transfer.index)
            if shard is not None and not shard.tickets:
                shard.offset = 0 if shard.alone else offset
                self._ready.append(transfer.index)

    def not_yet(self, ticket: int, now_s: float) -> None:
        """The relay does not have the shard so far."""
        transfer = self._end(ticket)
        self._not_yet[transfer.relay] += 1
        self.policy.release(transfer.relay)
        shard = self._shards.get(transfer.index)
        if shard is not None:
            shard.not_yet_until_s[transfer.relay] = now_s + self.rules.not_yet_s
            self._ready.append(transfer.index)

    def has(self, relay: str, index: int) -> None:
        """The relay says that it has the shard now."""
        shard = self._shards.get(index)
        if shard is not None and shard.not_yet_until_s.pop(relay, None) is not None:
            self._ready.append(index)

    def failed(self, ticket: int, now_s: float, rng: np.random.Generator, *, offset: int) -> None:
        """The transfer broke off; `offset` bytes of its shard are on disk and stay."""
        transfer = self._end(ticket)
        self._observe(transfer, transfer.received_bytes, now_s, ok=False)
        self._resort_works &= transfer.relay != self._last_resort
        shard = self._shards.get(transfer.index)
        if shard is not None:
            pause_s = min(self.rules.retry_s_max, self.rules.retry_s * 2.0 ** min(shard.failures, 30))
            shard.offset, shard.failures = 0 if shard.alone else offset, shard.failures + 1
            shard.avoid.add(transfer.relay)
            heapq.heappush(self._later, (now_s + pause_s * float(rng.uniform(0.5, 1.0)), transfer.index))

    def corrupt(self, ticket: int, now_s: float, culprit: str | None) -> None:
        """The shard came whole and wrong, and was dropped. With a `culprit`, that relay is not asked again; without,
        the shard is fetched again from one relay at a time, so that the next wrong one has a name."""
        transfer = self._end(ticket)
        if culprit is not None:
            self.banned[culprit] = f"sent a wrong shard {transfer.index}"
            self._wrong[culprit] += 1
            if culprit == self._pardoned:
                self._pardoned, self._none_left_s = "", now_s
            self._observe(transfer, 0, now_s, ok=False)
        else:
            self.policy.release(transfer.relay)
        shard = self._shards.get(transfer.index)
        if shard is not None:
            shard.offset, shard.alone = 0, True
            self._ready.append(transfer.index)

    def leave(self, relay: str, received: Callable[[int], int]) -> list[int]:
        """`relay` is no source any more: its transfers count as ended, and say nothing about it. `received`: bytes of a
        shard that are here. Returns their tickets: stop them."""
        tickets = [ticket for ticket, transfer in self._transfers.items() if transfer.relay == relay]
        for ticket in tickets:
            transfer = self._end(ticket)
            self.policy.release(relay)
            shard = self._shards.get(transfer.index)
            if shard is not None and not shard.tickets:
                shard.offset = 0 if shard.alone else received(transfer.index)
                self._ready.append(transfer.index)
        return tickets

    def under_way(self, *, whole: bool) -> tuple[float, int]:
        """(when the oldest transfer that goes on began, bytes that all of them have brought); `whole`: where a transfer
        shows no progress before it ends, as if all had come."""
        began_s = min((transfer.started_s for transfer in self._transfers.values()), default=math.inf)
        brought = (t.size_bytes if whole else t.received_bytes for t in self._transfers.values())
        return began_s, sum(brought)

    # ------------------------------------------------------------------------------------------------ what to do
    def next(
        self, now_s: float, rng: np.random.Generator, relays: Sequence[str], last_resort: str = ""
    ) -> Fetch | Wait | None:
        """What to start now, given the relays that are known to be there. `last_resort`: who is asked when all of them
        have sent wrong shards. None: everything has arrived."""
        if not self._shards:
            return None
        if len(self._transfers) >= self.rules.connections:
            return Wait(math.inf)
        usable = [relay for relay in relays if relay not in self.banned] or self._when_all_lied(
            now_s, relays, last_resort
        )
        if not usable:
            return Wait(self._forgive_at_s if relays else math.inf)
        if self._pardoned in usable and self._transfers:
            return Wait(now_s + self.rules.hedge_check_s)
        for heap in (self._later, self._nowhere):
            while heap and (heap[0][0] <= now_s or (heap is self._nowhere and list(relays) != self._relays)):
                self._ready.append(heapq.heappop(heap)[1])
        self._relays = list(relays)
        while self._ready:
            index = self._ready.popleft()
            shard = self._shards.get(index)
            if shard is None or shard.tickets:
                continue  # it has arrived meanwhile, or another transfer of it goes on
            candidates = self._candidates(shard, usable, now_s)
            if candidates:
                return self._begin(index, self.policy.choose(rng, now_s, candidates, shard.size_bytes), now_s, False)
            heapq.heappush(self._nowhere, (min(shard.not_yet_until_s[relay] for relay in usable), index))
        if self._pardoned:
            return self._wait(now_s)
        return self._hedge(now_s, usable) or self._wait(now_s)

    def overdue(self, now_s: float, relays: Sequence[str]) -> list[int]:
        """Transfers that will not end in reasonable time: cut them off and report them as failed."""
        found = []
        for ticket, transfer in self._transfers.items():
            needed_s = self._needed_s(transfer, now_s)
            others = [relay for relay in relays if relay not in self.banned and relay != transfer.relay]
            best_s = min((self.policy.expected_s(r, now_s, transfer.size_bytes) for r in others), default=math.inf)
            drips = now_s - transfer.started_s >= self.rules.stall_s and needed_s > self.rules.drip * best_s
            if drips or self._stalls(transfer, now_s):
                found.append(ticket)
        return found

    @property
    def all_lied(self) -> bool:
        """Every relay has sent a wrong shard, and none has been forgiven so far."""
        return self._none_left_s is not None and not self._pardoned

    # ---------------------------------------------------------------------------------------------------- inside
    @property
    def _forgive_at_s(self) -> float:
        assert self._none_left_s is not None
        return self._none_left_s + min(self.rules.forgive_s * 2.0 ** min(self._pardons, 30), self.rules.forgive_s_max)

    def _when_all_lied(self, now_s: float, relays: Sequence[str], last_resort: str) -> list[str]:
        """All relays are banned: the last resort, unless it lied as well, and in time the relay that lied least."""
        if not relays:
            return []
        honest = [last_resort] if last_resort and last_resort not in self.banned else []
        self._last_resort = last_resort
        if self._none_left_s is None:
            self._none_left_s = now_s
        if not self._pardoned and now_s >= self._forgive_at_s and not (honest and self._resort_works):
            self._pardoned = min(relays, key=lambda relay: (self._wrong[relay], relay))
            self._pardons += 1
        return [*honest, self._pardoned] if self._pardoned in relays else honest

    def _candidates(self, shard: _Shard, usable: Sequence[str], now_s: float) -> list[str]:
        have = [relay for relay in usable if shard.not_yet_until_s.get(relay, -math.inf) <= now_s]
        fresh = [relay for relay in have if relay not in shard.avoid]
        if have and not fresh:
            shard.avoid.clear()  # all have failed at it: begin anew
        return fresh or have

    def _begin(self, index: int, relay: str, now_s: float, hedge: bool) -> Fetch:
        shard = self._shards[index]
        # a hedge goes on from the byte that the first transfer has reached
        offset = max([shard.offset, *(self._reached(ticket) for ticket in shard.tickets)])
        self._tickets += 1
        shard.tickets.add(self._tickets)
        left = shard.size_bytes - offset
        self._transfers[self._tickets] = _Transfer(index, relay, left, offset, now_s, now_s)
        self.policy.begin(relay, now_s, left)
        return Fetch(self._tickets, index, relay, offset, hedge)

    def _reached(self, ticket: int) -> int:
        return self._transfers[ticket].offset + self._transfers[ticket].received_bytes

    def _hedge(self, now_s: float, usable: Sequence[str]) -> Fetch | None:
        """4) The slowest transfer first, where asking twice pays."""
        best: tuple[float, int, str] | None = None
        for transfer in self._transfers.values():
            shard = self._shards.get(transfer.index)
            if shard is None or shard.alone or len(shard.tickets) >= self.rules.copies_max:
                continue
            needed_s = self._needed_s(transfer, now_s)
            busy = {self._transfers[ticket].relay for ticket in shard.tickets}
            left = transfer.size_bytes - transfer.received_bytes
            for relay in usable:
                if relay not in busy and shard.not_yet_until_s.get(relay, -math.inf) <= now_s:
                    second_s = self.policy.expected_s(relay, now_s, left)
                    saved_s = needed_s - second_s
                    if second_s < self.rules.hedge_gain * needed_s and (best is None or saved_s > best[0]):
                        best = (saved_s, transfer.index, relay)
        return self._begin(best[1], best[2], now_s, True) if best else None

    def _needed_s(self, transfer: _Transfer, now_s: float) -> float:
        """Seconds that a transfer still needs, by its own pace so far."""
        if self._stalls(transfer, now_s):
            return math.inf
        if transfer.received_bytes == 0:
            expected_s = self.policy.expected_s(transfer.relay, now_s, transfer.size_bytes)
            return max(expected_s if math.isfinite(expected_s) else 0.0, now_s - transfer.started_s)
        pace = transfer.received_bytes / max(now_s - transfer.started_s, 1e-9)
        return (transfer.size_bytes - transfer.received_bytes) / pace

    def _stalls(self, transfer: _Transfer, now_s: float) -> bool:
        return now_s - transfer.last_byte_s >= self.rules.stall_s

    def _wait(self, now_s: float) -> Wait:
        """Until a pause ends, or until it is time to look whether asking twice would pay."""
        soonest = min((heap[0][0] for heap in (self._later, self._nowhere) if heap), default=math.inf)
        return Wait(min(soonest, now_s + self.rules.hedge_check_s) if self._transfers else soonest)

    def _end(self, ticket: int) -> _Transfer:
        transfer = self._transfers.pop(ticket)
        shard = self._shards.get(transfer.index)
        if shard is not None:
            shard.tickets.discard(ticket)
        return transfer

    def _observe(self, transfer: _Transfer, received_bytes: int, now_s: float, *, ok: bool) -> None:
        self.policy.observe(
            transfer.relay,
            received_bytes,
            now_s - transfer.started_s,
            ok,
            now_s=now_s,
            first_byte_s=transfer.first_byte_s,
        )
