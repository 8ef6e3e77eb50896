"""The fetching half of relays and clients: follows the newest version, shard by shard, from whoever gives it soonest.

All decisions are the plan's (`fetch.py`) and the policy's (`choice.py`): which shard next, from whom, when again, when
to ask a second relay. This role carries them out, checks each shard against what the origin signed, and names the relay
of one that is wrong. A version that is overtaken by a newer one is abandoned.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from refimpl.journal import Journal, silent
from refimpl.shardcast.choice import ExpectedFinish, MovingAverage, RelayChoice
from refimpl.shardcast.document import ManifestError
from refimpl.shardcast.fetch import Fetch, FetchPlan, FetchRules
from refimpl.shardcast.hoard import Hoard, digest
from refimpl.shardcast.manifest import Verify
from refimpl.shardcast.messages import AskNews, AskShard, Complaint, News
from refimpl.work import Hash
from refimpl.world import CallError, World

LOOK_AGAIN_S = 1e-3
"""Least pause before the plan is asked again, so that rounding cannot make it be asked for ever in one instant."""

POLICIES: dict[str, Callable[[], RelayChoice]] = {
    "published": lambda: MovingAverage(failures="published"),
    "moving-average": MovingAverage,
    "expected-finish": ExpectedFinish,
}


@dataclass(frozen=True, kw_only=True)
class PullerConfig:
    """Where a node fetches from, and how."""

    sources: tuple[str, ...]  # relays, or the origin
    origin: str  # node to complain to
    origin_key: str  # public key that everything must be signed with
    policy: str = "expected-finish"
    connections: int = 10
    shard_timeout_s: float = 120.0
    news_patience_s: float = 30.0
    news_timeout_s: float = 90.0
    news_interval_s: float = 0.5  # at least, between two questions
    retry_s: float = 2.0


class Puller:
    """`run()` until `stop()`. `on_open`, `on_shard` and `on_complete` tell a relay or a client what has come."""

    def __init__(
        self,
        world: World,
        config: PullerConfig,
        verify: Verify,
        *,
        on_open: Callable[[Hoard], None] = lambda hoard: None,
        on_shard: Callable[[Hoard], None] = lambda hoard: None,
        on_complete: Callable[[Hoard], None] = lambda hoard: None,
        journal: Journal = silent,
    ) -> None:
        self.world, self.config, self.verify, self.journal = world, config, verify, journal
        self.on_open, self.on_shard, self.on_complete = on_open, on_shard, on_complete
        self.policy = POLICIES[config.policy]()
        self.hoard: Hoard | None = None
        self.plan: FetchPlan | None = None
        self.stopped = world.signal()
        self._wake = world.signal()

    def stop(self) -> None:
        self.stopped.set()
        self._poke()

    def hear(self) -> None:
        """Somebody announced news: ask now, not at the next round."""
        self._poke()

    async def run(self) -> None:
        self.world.spawn(self._follow(), "news")
        while not self.stopped.is_set():
            wake = self._wake
            wait_s = self._start_fetches()
            await wake.wait(None if math.isinf(wait_s) else wait_s)

    def _poke(self) -> None:
        wake, self._wake = self._wake, self.world.signal()
        wake.set()

    # -------------------------------------------------------------------------------------------------------- news
    async def _follow(self) -> None:
        """Ask one source after another what is new, for as long as this node lives."""
        turn = int(self.world.rng.integers(len(self.config.sources)))
        while not self.stopped.is_set():
            source = self.config.sources[turn % len(self.config.sources)]
            known = self.hoard.header.version if self.hoard is not None else -1
            entries = len(self.hoard.entries) if self.hoard is not None else 0
            final = self.hoard is not None and bool(self.hoard.manifest)
            try:
                news = await self.world.call(
                    source, AskNews(known, entries, final, self.config.news_patience_s), self.config.news_timeout_s
                )
                self._learn(news)
            except (CallError, ManifestError) as error:
                self.journal("no_news", source=source, reason=str(error))
                turn += 1
                await self.stopped.wait(self.config.retry_s)
            if self.hoard is not None and self.hoard.complete:
                turn += 1  # nothing under way: spread the asking
            await self.stopped.wait(self.config.news_interval_s)

    def _learn(self, news: News) -> None:
        """Take what is new. Raises ManifestError when it is not what the origin signed."""
        if news.opening:
            hoard = Hoard.opened(news.opening, self.verify, self.config.origin_key)
            if self.hoard is not None and hoard.header.version <= self.hoard.header.version:
                return
            if self.hoard is not None and not self.hoard.complete:
                self.journal("abandoned", version=self.hoard.header.version, shards=len(self.hoard.shards))
            self.hoard = hoard
            self.plan = FetchPlan(self.policy, FetchRules(connections=self.config.connections, stall_s=math.inf))
            self.on_open(hoard)
        if self.hoard is None or self.plan is None or news.version != self.hoard.header.version:
            return
        fresh = self.hoard.add_entries(news.entries, self.verify)
        if news.manifest and not self.hoard.manifest:
            fresh += self.hoard.finish(news.manifest, self.verify, self.config.origin_key)
        if fresh:
            self.plan.offer((index, size, 0) for index, size in fresh)
        if fresh or news.manifest:
            self.on_shard(self.hoard)
            self._see_whether_complete(self.hoard)
            self._poke()

    # ------------------------------------------------------------------------------------------------------ shards
    def _start_fetches(self) -> float:
        """Start all that the plan wants now; returns seconds until it wants to be asked again."""
        if self.plan is None or self.hoard is None:
            return math.inf
        while True:
            step = self.plan.next(self.world.now(), self.world.rng, self.config.sources)
            if step is None:
                return math.inf
            if not isinstance(step, Fetch):
                return max(LOOK_AGAIN_S, step.until_s - self.world.now())
            self.world.spawn(self._fetch(self.hoard, self.plan, step), "fetch")

    async def _fetch(self, hoard: Hoard, plan: FetchPlan, fetch: Fetch) -> None:
        try:
            reply = await self.world.call(
                fetch.relay, AskShard(hoard.header.id, fetch.index), self.config.shard_timeout_s
            )
        except CallError:
            plan.failed(fetch.ticket, self.world.now(), self.world.rng, offset=0)
            self._poke()
            return
        if not reply.here:
            plan.not_yet(fetch.ticket, self.world.now())
        elif fetch.index in hoard.shards:
            plan.stopped(fetch.ticket)
        else:
            right = await self.world.compute(
                Hash(size_bytes=reply.blob.size_bytes), lambda: hoard.take(fetch.index, reply.blob)
            )
            if right:
                plan.arrived(fetch.ticket, self.world.now())
                self.on_shard(hoard)
                self._see_whether_complete(hoard)
            else:
                plan.corrupt(fetch.ticket, self.world.now(), fetch.relay)
                self.journal("wrong_shard", relay=fetch.relay, index=fetch.index)
                await self._complain(hoard, fetch, reply.blob)
        self._poke()

    async def _complain(self, hoard: Hoard, fetch: Fetch, blob: Any) -> None:
        with contextlib.suppress(CallError):
            complaint = Complaint(fetch.relay, hoard.header.id, fetch.index, digest(blob))
            await self.world.call(self.config.origin, complaint, self.config.news_timeout_s)

    def _see_whether_complete(self, hoard: Hoard) -> None:
        if hoard.complete and hoard is self.hoard:
            self.on_complete(hoard)
