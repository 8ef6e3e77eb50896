"""The fetching half of relays and clients: follows the newest version, shard by shard, from whoever gives it soonest.

All decisions are cores': by which route (`route.py`: increments or the whole file), which shard next, when again, when
to ask a second relay (`fetch.py`), from whom (`choice.py`). This role carries them out, checks each shard against what
the origin signed, and names the relay of one that is wrong. A version that is overtaken by a newer one is abandoned;
one that does not fit on the disk is left out. What was there before stays as it is, whatever happens.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Blob
from refimpl.shardcast.arrivals import Arrivals
from refimpl.shardcast.carry import CallCarrier, Carrier, NotYet, WrongSize
from refimpl.shardcast.choice import POLICIES, best_rate
from refimpl.shardcast.disk import ShardMismatch, StoreError
from refimpl.shardcast.document import DeltaError, ManifestError
from refimpl.shardcast.fetch import Fetch, FetchPlan, FetchRules
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.job import Job
from refimpl.shardcast.known import Known
from refimpl.shardcast.layout import SHARDS_MAX
from refimpl.shardcast.manifest import Equivocation, Manifest, Stretch, Verify
from refimpl.shardcast.messages import AskShard, News, signed_complaint
from refimpl.shardcast.route import Speeds
from refimpl.shardcast.shelf import Store
from refimpl.work import Hash, Spread
from refimpl.world import CallError, Timeout, World

LOOK_AGAIN_S = 1e-3
"""Least pause before the plan is asked again, so that rounding cannot make it be asked for ever in one instant."""
ASKED_AT_ONCE = 2
"""Sources that are asked for news at the same time: one that keeps it back does not leave us blind."""
COMPLAIN_TO = 3
"""Sources that hear of a wrong shard when the origin's address is not known."""
APPLY_AS_HASH = 5.0
"""What a byte costs that is read, decoded, written and hashed, in bytes hashed (measured, experiments/bench)."""
APPLY_BYTES_PER_S = 300e6
"""Of the target, on one core: what a node reckons with before it begins."""


@dataclass(frozen=True, kw_only=True)
class PullerConfig:
    """Where a node fetches from, and how."""

    sources: tuple[str, ...]  # relays, or the origin
    origin: str  # node to complain to; empty: to the other sources, which pass it on
    origin_key: str  # public key that everything must be signed with
    policy: str = "expected-finish"
    connections: int = 10
    piece_bytes: int | None = None  # of one call; None: a shard is one piece
    stall_s: float = math.inf  # a transfer without a byte for this long is cut off
    increments: bool = True  # take them where they are sooner
    shard_timeout_s: float = 120.0  # of a call for up to 100 MB, longer for more
    news_patience_s: float = 30.0
    news_timeout_s: float = 90.0
    news_interval_s: float = 0.5  # at least, between two questions
    retry_s: float = 2.0


class Puller:
    """`run()` until `stop()`. `on_open`, `on_change` and `on_complete` tell a relay or a client what has come."""

    def __init__(
        self,
        world: World,
        config: PullerConfig,
        store: Store,
        verify: Verify,
        *,
        identity: Identity | None = None,
        carrier: Carrier | None = None,
        on_open: Callable[[Hoard], None] = lambda hoard: None,
        on_change: Callable[[Hoard], None] = lambda hoard: None,
        on_complete: Callable[[Hoard], None] = lambda hoard: None,
        journal: Journal = silent,
    ) -> None:
        self.world, self.config, self.store, self.verify, self.journal = world, config, store, verify, journal
        self.identity = identity or Identity(world.rng.bytes(32))
        self.carrier = carrier or CallCarrier(world, config.shard_timeout_s, config.piece_bytes)
        self.on_open, self.on_change, self.on_complete = on_open, on_change, on_complete
        self.policy = POLICIES[config.policy]()
        self.known = Known(store, verify, config.origin_key)
        self.stopped = world.signal()
        self.trouble = ""  # the last thing that kept a version from being taken
        self.no_room = False  # and it was this node's own disk
        self.disputed = ""  # how the origin contradicted itself: what is here may not be what it means now
        self.answers: dict[str, int] = {}  # by source: the newest version that it knew when it last answered
        self._failed: set[str] = set()  # sources that have failed to answer
        self.sources = config.sources
        self._followers = 0  # counts up whenever the sources change: who follows older ones ends
        self._arrivals = Arrivals(0.0)  # of the present sources
        self._job: Job | None = None
        self._busy = False  # publishing, or applying increments
        self._running = False
        self._progress = (-1, 0, 0)
        self._wake, self._heard = world.signal(), world.signal()

    @property
    def hoard(self) -> Hoard | None:
        """The newest version, complete or not."""
        return self.known.newest

    @property
    def asked(self) -> bool:
        """Since this node began, every source has answered or failed, and one at least has answered."""
        return bool(self.answers) and all(self._has_been_asked(source) for source in self.sources)

    def _has_been_asked(self, source: str) -> bool:
        return source in self.answers or source in self._failed

    def restore(self, manifest: Manifest) -> None:
        """This version is in the store from before."""
        self.known.restore(manifest)

    def progress(self) -> tuple[int, int, int]:
        """Changes whenever something comes: versions held, shards, and the most bytes that were under way since the
        last of these came. Shards that come wrong for ever are no progress."""
        newest = self.hoard
        have, here = self.known.have, len(newest.here) if newest is not None else 0
        under_way = sum(self._job.received.values()) if self._job is not None else 0
        same = self._progress[:2] == (have, here)
        self._progress = have, here, max(under_way, self._progress[2] if same else 0)
        return self._progress

    def stop(self) -> None:
        self.stopped.set()
        self.hear()
        self._poke()

    def hear(self) -> None:
        """Somebody announced news: ask now, not at the next round."""
        heard, self._heard = self._heard, self.world.signal()
        heard.set()

    def use(self, sources: tuple[str, ...]) -> None:
        """Fetch from these from now on. Transfers from others are given up, and go on from where they were."""
        gone, self.sources = set(self.sources) - set(sources), sources
        self._arrivals = Arrivals(self.world.now())
        if self._job is not None:
            for relay in sorted(gone):
                self._job.cut_off.update(self._job.plan.leave(relay, self._job.bytes_here))
        self._followers += 1
        if self._running:
            self._send_followers()
        self._poke()

    def distrusts(self, source: str) -> bool:
        """It has sent a wrong shard of the version that is under way."""
        return self._job is not None and source in self._job.plan.banned

    def throughput(self) -> tuple[float, float] | None:
        """(bytes, seconds): since the oldest transfer that is under way began, or the last shard came, at most so many
        bytes have come. None: nothing has been wanted for long enough to say."""
        job = self._job
        if job is None or not job.plan.left:
            return None
        began_s, coming = job.plan.under_way(whole=self.config.piece_bytes is None)
        return self._arrivals.throughput(began_s, coming, self.world.now())

    async def run(self) -> None:
        self._running = True
        self._send_followers()
        while not self.stopped.is_set():
            wake = self._wake
            wait_s = self._start_fetches()
            await wake.wait(None if math.isinf(wait_s) else wait_s)

    def _poke(self) -> None:
        wake, self._wake = self._wake, self.world.signal()
        wake.set()

    # -------------------------------------------------------------------------------------------------------- news
    def _send_followers(self) -> None:
        first = int(self.world.rng.integers(len(self.sources)))
        for turn in range(min(ASKED_AT_ONCE, len(self.sources))):
            self.world.spawn(self._follow(first + turn, self._followers), "news")

    async def _follow(self, turn: int, followers: int) -> None:
        """Ask one source after another what is new, for as long as this node lives and its sources stay the same. Until
        each has been asked, none is given time to wait for news: the others may know more."""
        while not self.stopped.is_set() and followers == self._followers:
            source, stay = self._whom(turn), self.asked
            spared_s = 0.0 if stay else self.config.news_patience_s
            try:
                question = self.known.question(self.config.news_patience_s - spared_s)
                news = await self.world.call(source, question, self.config.news_timeout_s - spared_s)
                self._learn(news)
                self.answers[source] = news.version
                if news.version < self.known.have:
                    self.journal("behind", source=source, version=news.version)
                    stay = False
            except (CallError, ManifestError, StoreError) as error:
                self.trouble = str(error)
                self.no_room = isinstance(error, StoreError)
                if isinstance(error, Equivocation) and self.trouble != self.disputed:
                    self.disputed = self.trouble
                    self.journal("disputed", source=source, reason=self.trouble)
                self.journal("no_news", source=source, reason=str(error))
                self._failed.add(source)
                stay = False
                await self._heard.wait(self.config.retry_s)
            if not stay or self.known.up_to_date:  # nothing under way: spread the asking
                turn += ASKED_AT_ONCE
            if not self.stopped.is_set():
                await self._heard.wait(self.config.news_interval_s)

    def _whom(self, turn: int) -> str:
        """The source whose turn it is; as long as some have not been asked, the next of these."""
        first = turn % len(self.sources)
        order = self.sources[first:] + self.sources[:first]
        return next((source for source in order if not self._has_been_asked(source)), order[0])

    def _learn(self, news: News) -> None:
        """Take what is new. Raises ManifestError when it is not what the origin signed, StoreError for want of room."""
        before = self.known.newest
        fresh = self.known.learn(news)
        newest = self.known.newest
        if newest is None or self.known.up_to_date:
            return
        if newest is not before:
            self._abandon(before)
            if newest.shelf.resumed:
                self.journal("resumed", version=newest.header.version)
            self.on_open(newest)
        elif self._job is not None and self._job.base is None and self._job.target is newest and fresh:
            if not self._job.plan.left:
                self._arrivals.wanted(self.world.now())
            self._job.offer(newest, fresh)
        self.on_change(newest)
        self._choose_job()
        self._see_what_came()
        self._poke()

    def _abandon(self, hoard: Hoard | None) -> None:
        job, self._job = self._job, None
        if job is not None:
            job.abandon()
        if hoard is not None and not hoard.complete:
            self.journal("abandoned", version=hoard.header.version, shards=len(hoard.here))
            hoard.shelf.abandon()

    # -------------------------------------------------------------------------------------------------------- route
    def _choose_job(self) -> None:
        """Increments or the whole file, whichever is expected first; looked at again whenever there is news."""
        newest, job = self.known.newest, self._job
        if newest is None or newest.published:
            return
        if job is not None and job.base is not None:
            self._add_increments(job)
            return
        leg = self.known.next_leg(self._speeds()) if self.config.increments else None
        if leg is not None and leg.base is not None:
            try:
                target = self.known.open_target(leg.target)
            except (StoreError, ManifestError) as error:
                self.trouble = str(error)
                self.known.give_up_increments(leg.base, leg.target)
            else:
                self.journal("route", base=leg.base, target=leg.target, size_bytes=leg.size_bytes)
                target.missing()  # counts what is here from before
                self._job = Job(target, self._new_plan(), self.known.held[leg.base])
                self._add_increments(self._job)
                return
        if job is None:
            self._job = Job(newest, self._new_plan())
            self._job.offer(newest, newest.missing())

    def _new_plan(self) -> FetchPlan:
        self._arrivals.wanted(self.world.now())
        return FetchPlan(self.policy, FetchRules(connections=self.config.connections, stall_s=self.config.stall_s))

    def _add_increments(self, job: Job) -> None:
        """Those that have become known since, and of which something is needed."""
        assert job.base is not None
        base, target = job.base.version, job.target.header.version
        for manifest in self.known.offers(base, target):
            if job.knows(manifest) or not job.needs(manifest):
                continue
            try:
                payload = Hoard.from_manifest(manifest, self.store.begin(manifest.header))
            except StoreError as error:
                self.trouble = str(error)
                self.known.give_up_increments(base, target)
                return
            job.offer(payload, payload.missing())
            self.on_open(payload)

    def _speeds(self) -> Speeds:
        """What the best relay has delivered so far, by the policy's estimate."""
        rate = best_rate(self.policy, self.sources, self.world.now())
        return Speeds(download_bytes_per_s=rate, apply_bytes_per_s=APPLY_BYTES_PER_S * self.store.workers)

    # ------------------------------------------------------------------------------------------------------- shards
    def _start_fetches(self) -> float:
        """Start all that the plan wants now; returns seconds until it wants to be asked again."""
        job = self._job
        if job is None:
            return math.inf
        now_s = self.world.now()
        for ticket, received in list(job.received.items()):
            if job.plan.knows(ticket):
                job.plan.progress(ticket, received, now_s)
        if self.config.piece_bytes is not None:  # else a transfer shows no progress before it ends
            for ticket in job.plan.overdue(now_s, self.sources):
                if ticket not in job.cut_off:
                    job.cut_off.add(ticket)
                    self._note_slow(job.plan.relay_of(ticket), job.plan.shard_of(ticket), "cut off")
        while True:
            step = job.plan.next(self.world.now(), self.world.rng, self.sources, self.config.origin)
            if job.plan.all_lied and not job.told_that_all_lied:
                job.told_that_all_lied = True
                self.trouble = f"each of {len(self.sources)} sources has sent a wrong shard"
                self.journal("all_lied", version=job.target.header.version)
            if step is None:
                return math.inf
            if not isinstance(step, Fetch):
                return max(LOOK_AGAIN_S, step.until_s - self.world.now())
            self.world.spawn(self._fetch(job, step), "fetch")

    async def _fetch(self, job: Job, fetch: Fetch) -> None:
        """One transfer, from the first byte to its place in the plan's books."""
        (hoard, index), plan = job.find(fetch.index), job.plan
        size = hoard.header.layout.shard_size(index)
        if fetch.offset < hoard.shelf.received(index) and not fetch.hedge:
            hoard.shelf.reset(index)
        at = fetch.offset

        def take(piece: Blob) -> bool:
            """Runs where the bytes arrive, in a thread perhaps. False: nobody wants more."""
            nonlocal at
            if fetch.ticket in job.cut_off or job is not self._job or hoard.shelf.has(index):
                return False
            hoard.shelf.write(index, at, piece, fetch.relay)
            at += piece.size_bytes
            job.received[fetch.ticket] = at - fetch.offset
            return True

        job.received[fetch.ticket] = 0
        ask = AskShard(hoard.header.id, index, fetch.offset, size - fetch.offset)
        try:
            if ask.size:
                await self.carrier.fetch(fetch.relay, ask, take)
            self._took(job, fetch)
        except NotYet:
            if plan.knows(fetch.ticket):
                plan.not_yet(fetch.ticket, self.world.now())
        except ShardMismatch as error:
            culprit = error.culprit
            plan.corrupt(fetch.ticket, self.world.now(), culprit)
            self.journal("wrong_shard", relay=culprit or "", index=index, reason=str(error))
            if culprit in self.sources:
                await self._complain(hoard, culprit, index, error.found)
        except WrongSize as error:
            if plan.knows(fetch.ticket):
                hoard.shelf.reset(index)
                plan.corrupt(fetch.ticket, self.world.now(), fetch.relay)
            self.journal("wrong_shard", relay=fetch.relay, index=index, reason=str(error))
            await self._complain(hoard, fetch.relay, index, b"")
        except (CallError, StoreError) as error:
            self.trouble = str(error)
            if isinstance(error, Timeout):
                self._note_slow(fetch.relay, fetch.index, str(error))
            if plan.knows(fetch.ticket):
                plan.failed(fetch.ticket, self.world.now(), self.world.rng, offset=hoard.shelf.received(index))
        finally:
            job.received.pop(fetch.ticket, None)
            job.cut_off.discard(fetch.ticket)
        self._poke()

    def _took(self, job: Job, fetch: Fetch) -> None:
        """A transfer has ended without an error: the shard is complete, or nobody wanted it any more."""
        (hoard, index), plan = job.find(fetch.index), job.plan
        received, size = hoard.shelf.received(index), hoard.header.layout.shard_size(index)
        if not plan.knows(fetch.ticket):
            return  # its relay is no source any more
        if fetch.ticket in job.cut_off:
            plan.failed(fetch.ticket, self.world.now(), self.world.rng, offset=received)
        elif index in hoard.here or job is not self._job or received < size:
            plan.stopped(fetch.ticket, offset=received)
        else:
            hoard.check(index)
            self.journal("shard", version_id=hoard.header.id[:16], index=index, relay=fetch.relay)
            for other in plan.arrived(fetch.ticket, self.world.now()):
                if other < fetch.ticket:  # it began earlier
                    self._note_slow(plan.relay_of(other), fetch.index, f"overtaken by {fetch.relay}")
            self._arrivals.came(size, self.world.now())
            self.on_change(hoard)
            self._see_what_came()

    def _note_slow(self, relay: str, key: int, what: str) -> None:
        self.journal("slow_relay", relay=relay, index=key % SHARDS_MAX, what=what)

    async def _complain(self, hoard: Hoard, relay: str, index: int, found: bytes) -> None:
        """Say it to the origin, signed; where that is not known, to the other sources, which pass it on."""
        complaint = signed_complaint(self.identity, relay, hoard.header.id, index, found)
        others = [source for source in self.sources if source != relay]
        for whom in [self.config.origin] if self.config.origin else others[:COMPLAIN_TO]:
            with contextlib.suppress(CallError):
                await self.world.call(whom, complaint, self.config.news_timeout_s)

    # ------------------------------------------------------------------------------------------------------ the end
    def _see_what_came(self) -> None:
        job = self._job
        if job is not None and not self._busy and (job.target.complete or job.over or job.ready(1)):
            self._busy = True
            self.world.spawn(self._get_on(job), "finish")

    async def _get_on(self, job: Job) -> None:
        """Apply what increments have come, more of which may be on their way; publish what is complete."""
        try:
            while job is self._job and (increments := job.ready(self.store.workers)):
                await self._apply(job, increments)
            if job is self._job and job.target.complete:
                await self._publish([job.target])
        except (StoreError, DeltaError) as error:
            self.trouble = str(error)
            self.journal("not_taken", version=job.target.header.version, reason=str(error))
            job.target.here = {i for i in job.target.here if job.target.shelf.has(i)}
            self._give_up(job)
            await self.world.sleep(self.config.retry_s)
        finally:
            self._busy = False
        if job is self._job and (job.target.published or job.over):
            if not job.target.published:
                self._give_up(job)
            for relay, count in job.plan.empty_handed().items():
                self.journal("empty_relay", relay=relay, version=job.target.header.version, not_yet=count)
            self._job = None
        self._choose_job()
        self._see_what_came()
        self._poke()

    def _give_up(self, job: Job) -> None:
        """What increments could not make is fetched."""
        if job is self._job:
            self._job = None
        if job.base is not None:
            job.abandon()
            self.known.give_up_increments(job.base.version, job.target.header.version)

    async def _apply(self, job: Job, increments: list[Hoard]) -> None:
        """Base and increments become shards of the target; those that come out wrong are fetched like any others."""
        assert job.base is not None
        await self._publish(increments)
        target, layout = job.target, job.target.header.layout
        shards = [shard for increment in increments for shard in (increment.header.stretch or Stretch(0, 0)).shards]
        work = Spread(Hash(size_bytes=round(APPLY_AS_HASH * layout.shard_size(shards[0]))), len(shards))
        sha256, finals = target.sha256(shards), [increment.final for increment in increments]
        make = partial(self.store.apply_increments, finals, job.base, target.shelf, sha256)
        bad = await self.world.compute(work, make)
        target.count(shards)
        job.applied.update(increment.header.id for increment in increments)
        self.journal("applied", base=job.base.version, target=target.header.version, shards=len(shards), bad=bad)
        self.on_change(target)

    async def _publish(self, hoards: list[Hoard]) -> None:
        fresh = [hoard for hoard in hoards if not hoard.published]

        def publish() -> None:
            for hoard in fresh:
                hoard.shelf.publish(hoard.final)

        await self.world.compute(Hash(size_bytes=0), publish)
        for hoard in fresh:
            hoard.published = True
            if hoard.header.base is None:
                self.known.held[hoard.header.version] = hoard.final
                self.on_complete(hoard)
            self.on_change(hoard)
