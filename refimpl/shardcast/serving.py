"""The serving half of origins and relays: answers `AskNews` and `AskShard` from what the node holds, and announces.

Shards are served one by one as they come, while later ones are still on their way to this node (cut-through): a version
flows down the tree instead of being copied from level to level. Only known shards of known versions have a name here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from refimpl.journal import Journal, silent
from refimpl.messages import Blob, Message
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.limits import Serving, ServingLimits
from refimpl.shardcast.messages import Announced, AskNews, AskShard, News, Shard
from refimpl.world import CallError, Refused, World

NOTHING = Blob(0, "", b"")
Spoil = Callable[[int, Blob], Blob]
"""What a dishonest relay does to a shard on its way out; see `refimpl/attacks/relays.py`."""


@dataclass(frozen=True, kw_only=True)
class ServingConfig:
    """Whom a node tells of news, and on what terms it serves."""

    below: tuple[str, ...] = ()  # nodes that are told as soon as there is something new
    keep: int = 5  # versions
    announce_timeout_s: float = 10.0
    limits: ServingLimits = ServingLimits()
    virtual: bool = False  # blobs are sizes and ids only, so an absent one must be too


class ShardServer:
    """Holds the newest versions and serves them. `changed()` after anything came."""

    def __init__(
        self, world: World, config: ServingConfig, journal: Journal = silent, spoil: Spoil | None = None
    ) -> None:
        self.world, self.config, self.journal, self.spoil = world, config, journal, spoil
        self.hoards: dict[int, Hoard] = {}
        self._news = world.signal()
        self._serving = Serving(config.limits)

    def serve(self) -> None:
        self.world.serve({AskNews: self.tell, AskShard: self.give})

    @property
    def newest(self) -> int:
        return max(self.hoards, default=-1)

    def hold(self, hoard: Hoard) -> None:
        """A version begins here. The oldest beyond `keep` go."""
        self.hoards[hoard.header.version] = hoard
        for version in sorted(self.hoards)[: -self.config.keep]:
            del self.hoards[version]
        for name in self.config.below:
            self.world.spawn(self._announce(name, hoard.header.version), "announce")

    def changed(self) -> None:
        """There are more entries, shards or a manifest than before: whoever waits for news is told."""
        news, self._news = self._news, self.world.signal()
        news.set()

    async def tell(self, source: str, message: AskNews) -> Message:
        if not self._differs(message):
            await self._news.wait(min(max(message.patience_s, 0.0), 60.0))
        version = self.newest
        if version < 0 or version < message.version:
            return News(version, b"", (), b"")
        hoard = self.hoards[version]
        same = version == message.version
        first = max(0, message.entries) if same else 0
        return News(version, b"" if same else hoard.opening, tuple(hoard.entries[first : first + 4096]), hoard.manifest)

    def _differs(self, message: AskNews) -> bool:
        version = self.newest
        if version > message.version:
            return True
        if version != message.version or version < 0:
            return False
        hoard = self.hoards[version]
        return len(hoard.entries) > message.entries or (bool(hoard.manifest) and not message.final)

    async def give(self, source: str, message: AskShard) -> Message:
        hoard = next((h for h in self.hoards.values() if h.header.id == message.header_id), None)
        if hoard is None:
            raise Refused(f"version {message.header_id[:16]!r} is not here; the newest is {self.newest}")
        if not 0 <= message.index < hoard.header.layout.shard_count:
            raise Refused(f"shard {message.index} does not exist among {hoard.header.layout.shard_count}")
        blob = hoard.shards.get(message.index)
        if blob is None:
            return Shard(False, Blob(0, "") if self.config.virtual else NOTHING)
        refusal = self._serving.open(source, self.world.now())
        if refusal is not None:
            raise Refused(refusal)
        wait_s = self._serving.take(source, blob.size_bytes, self.world.now())
        if wait_s > 0:
            await self.world.sleep(wait_s)
        self._serving.close(source, self.world.now())
        return Shard(True, blob if self.spoil is None else self.spoil(message.index, blob))

    async def _announce(self, name: str, version: int) -> None:
        """Tell one node below; one that does not answer will ask by itself."""
        with contextlib.suppress(CallError):
            await self.world.call(name, Announced(version), self.config.announce_timeout_s)
