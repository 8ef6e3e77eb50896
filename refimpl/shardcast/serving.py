"""The serving half of origins and relays: answers `AskNews` and `AskShard` from what the node holds, and announces.

Shards are served one by one as they come, while later ones are still on their way to this node (cut-through): a version
flows down the tree instead of being copied from level to level. Only known shards of known versions have a name here.
A request for a shard is also a lease on its version: it is not removed under a client that is at work on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Message
from refimpl.shardcast.disk import StoreError
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.limits import Serving, ServingLimits
from refimpl.shardcast.messages import Announced, AskNews, AskShard, News, Piece, tag
from refimpl.shardcast.shelf import Store
from refimpl.shardcast.versions import Holders, Leases, LeaseTerms
from refimpl.world import CallError, Refused, Signal, World

NOTHING = Blob(0, "", b"")
ENTRIES_MAX = 4096  # in one answer
PATIENCE_S_MAX = 60.0
Spoil = Callable[[int, Blob], Blob]
"""What a dishonest relay does to a shard on its way out; see `refimpl/attacks/relays.py`."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Whom a node tells of news, and on what terms it serves."""

    below: tuple[str, ...] = ()  # nodes that are told as soon as there is something new; others ask, and wait here
    keep: int = 5  # versions
    hold_s: float = 0.0  # how long a request for a shard that is on its way is held before it is told "not yet"
    announce_timeout_s: float = 10.0
    limits: ServingLimits = ServingLimits()
    leases: LeaseTerms = field(default_factory=LeaseTerms)
    virtual: bool = False  # blobs are sizes and ids only, so an absent one must be too


class ShardServer:
    """Holds the newest versions and serves them. `changed()` after anything came. Where the network can tell,
    `address_of_caller` says whence the call that is being answered came."""

    def __init__(
        self,
        world: World,
        config: ServingConfig,
        store: Store,
        journal: Journal = silent,
        spoil: Spoil | None = None,
    ) -> None:
        self.world, self.config, self.store, self.journal, self.spoil = world, config, store, journal, spoil
        self.hoards: dict[int, Hoard] = {}  # whole versions
        self.increments: dict[tuple[int, int, int], Hoard] = {}  # by base, target and first shard
        self.holders = Holders()
        self.leases = Leases(config.leases)
        self.on_change: Callable[[], None] = lambda: None  # who else wants to know
        self.address_of_caller: Callable[[], str] = lambda: ""
        self.disputed: Callable[[], str] = lambda: ""  # why no news from here can be trusted; empty: it can
        self._by_id: dict[str, Hoard] = {}
        self._news = world.signal()
        self._awaited: dict[tuple[str, int], Signal] = {}  # shards that somebody was told to wait for
        self._serving = Serving(config.limits)

    def serve(self) -> None:
        self.world.serve({AskNews: self.tell, AskShard: self.give})

    @property
    def newest(self) -> int:
        return max(self.hoards, default=-1)

    # ------------------------------------------------------------------------------------------------- what is here
    def hold(self, hoard: Hoard) -> None:
        """A version, or an increment, begins here. The oldest beyond `keep` go, unless somebody is at work on them."""
        header = hoard.header
        self._by_id[header.id] = hoard
        if header.base is not None and header.stretch is not None:
            self.increments[header.base.version, header.version, header.stretch.first] = hoard
        else:
            self.hoards[header.version] = hoard
            self.retire()
            self._announce_all(header.version)
        self.changed()

    def retire(self) -> None:
        """Remove what is old and not leased."""
        stay = self.leases.staying(self.hoards, self.config.keep, self.world.now())
        for version in sorted(set(self.hoards) - stay):
            self.drop(self.hoards[version])
        for key in [key for key in self.increments if key[1] not in self.hoards]:
            self.drop(self.increments[key])

    def drop(self, hoard: Hoard) -> None:
        """Out of the index first, then off the disk."""
        header = hoard.header
        self._by_id.pop(header.id, None)
        if header.base is not None and header.stretch is not None:
            self.increments.pop((header.base.version, header.version, header.stretch.first), None)
        else:
            self.hoards.pop(header.version, None)
        problems = self.store.remove(hoard.final) if hoard.published else []
        if not hoard.published:
            hoard.shelf.abandon()
        self.journal("removed", version=header.version, problems=problems)

    def changed(self) -> None:
        """There are more entries, shards or a manifest than before: whoever waits for news is told."""
        news, self._news = self._news, self.world.signal()
        news.set()
        for header_id, index in list(self._awaited):
            hoard = self._by_id.get(header_id)
            if hoard is None or index in hoard.here:
                self._awaited.pop((header_id, index)).set()
        self.on_change()

    # --------------------------------------------------------------------------------------------------------- news
    async def tell(self, source: str, message: AskNews) -> Message:
        self.holders.report(source, message.have)
        if not self._differs(message):
            await self._news.wait(min(max(message.patience_s, 0.0), PATIENCE_S_MAX))
        if self.disputed():
            raise Refused(self.disputed())
        version = self.newest
        if version < 0 or version < message.version:
            return News(version, b"", (), b"")
        hoard = self.hoards[version]
        same = version == message.version
        first = max(0, message.entries) if same else 0
        offers = self._offers(message)
        between = [self.hoards[v].manifest for v in sorted({h.header.version for h in offers} - {version})]
        return News(
            version,
            b"" if same else hoard.opening,
            # who had the final manifest from the start has no entries to pass on, and nobody needs them
            tuple(hoard.entries[first : first + ENTRIES_MAX]),
            hoard.manifest,
            tuple(offer.manifest for offer in offers),
            tuple(between),
        )

    def _differs(self, message: AskNews) -> bool:
        version = self.newest
        if version > message.version:
            return True
        if version != message.version or version < 0:
            return False
        hoard = self.hoards[version]
        if len(hoard.entries) > message.entries and not message.final:
            return True
        if hoard.manifest and message.final != hoard.final.content_id:
            return True  # it has no final word on this version, or another one
        return message.have < version and bool(self._offers(message))

    def _offers(self, message: AskNews) -> list[Hoard]:
        """Increments that help who holds `have` and that it does not know. They lead through versions whose final word
        is here, up to the newest, which may still be in the making."""
        if message.have < 0:
            return []
        known = set(message.increments)
        return [
            hoard
            for (base, target, _), hoard in sorted(self.increments.items())
            if base >= message.have
            and target in self.hoards
            and (target == self.newest or self.hoards[target].manifest)
            and tag(hoard.header) not in known
        ]

    def _announce_all(self, version: int) -> None:
        for name in self.config.below:
            if (self.holders.version(name) or -1) < version:
                self.world.spawn(self._announce(name, version), "announce")

    async def _announce(self, name: str, version: int) -> None:
        """Tell one node below; one that does not answer will ask by itself."""
        with contextlib.suppress(CallError):
            await self.world.call(name, Announced(version), self.config.announce_timeout_s)

    # ------------------------------------------------------------------------------------------------------- shards
    async def find(self, source: str, header_id: str, index: int, address: str = "") -> Hoard | None:
        """The version, when its shard may be read; None: not yet. Raises Refused for what never was or is gone."""
        holder = address or source
        hoard = self._find(holder, header_id, index)
        if index not in hoard.here and self.config.hold_s > 0:
            await self._awaited.setdefault((header_id, index), self.world.signal()).wait(self.config.hold_s)
            hoard = self._find(holder, header_id, index)
        return hoard if index in hoard.here else None

    def _find(self, holder: str, header_id: str, index: int) -> Hoard:
        hoard = self._by_id.get(header_id)
        if hoard is None:
            raise Refused(f"version {header_id[:16]!r} is not here; the newest is {self.newest}")
        if not 0 <= index < hoard.header.layout.shard_count:
            raise Refused(f"shard {index} does not exist among {hoard.header.layout.shard_count}")
        self.leases.grant(hoard.header.version, holder, self.world.now())
        return hoard

    @contextlib.contextmanager
    def transfer(self, source: str, address: str = "") -> Iterator[None]:
        """One transfer to `source`. Raises Refused when it, or its address, has too many."""
        refusal = self._serving.open(source, self.world.now(), address)
        if refusal is not None:
            raise Refused(refusal)
        try:
            yield
        finally:
            self._serving.close(source, self.world.now(), address)

    async def pay(self, source: str, size_bytes: int, address: str = "") -> None:
        """Wait until `source` may have so many bytes."""
        wait_s = self._serving.take(source, size_bytes, self.world.now(), address)
        if wait_s > 0:
            await self.world.sleep(wait_s)

    def drips(self, sent_bytes: int, elapsed_s: float) -> bool:
        """True when a transfer is read so slowly that it is to be cut off."""
        return self._serving.drips(sent_bytes, elapsed_s)

    async def give(self, source: str, message: AskShard) -> Message:
        address = self.address_of_caller()
        hoard = await self.find(source, message.header_id, message.index, address)
        if hoard is None:
            return Piece(False, Blob(0, "") if self.config.virtual else NOTHING)
        left = hoard.header.layout.shard_size(message.index) - message.offset
        if message.offset < 0 or not 0 < message.size <= left:
            raise Refused(f"bytes {message.offset}+{message.size} lie outside shard {message.index}")
        with self.transfer(source, address):
            await self.pay(source, message.size, address)
            try:
                blob = hoard.shelf.read(message.index, message.offset, message.size)
            except (StoreError, OSError) as error:
                raise Refused(str(error)) from error  # removed since it was looked up, or the disk fails
        return Piece(True, blob if self.spoil is None else self.spoil(message.index, blob))
