"""A client: follows the newest version until it has all of it, and says when."""

from __future__ import annotations

from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.manifest import Verify
from refimpl.shardcast.messages import Announced
from refimpl.shardcast.puller import Puller, PullerConfig
from refimpl.world import World


class Client:
    """`run()` until `versions` versions are complete (or `stop()`)."""

    def __init__(
        self, world: World, config: PullerConfig, verify: Verify, *, last_version: int, journal: Journal = silent
    ) -> None:
        self.world, self.journal, self.last_version = world, journal, last_version
        self.complete: list[int] = []
        self.puller = Puller(world, config, verify, on_complete=self._complete, journal=journal)

    def serve(self) -> None:
        self.world.serve({Announced: self.announced})

    def stop(self) -> None:
        self.puller.stop()

    async def run(self) -> None:
        await self.puller.run()

    async def announced(self, source: str, message: Announced) -> Message:
        self.puller.hear()
        return Ok()

    def _complete(self, hoard: Hoard) -> None:
        version = hoard.header.version
        if version in self.complete:
            return
        self.complete.append(version)
        self.journal("complete", version=version, size_bytes=hoard.header.layout.size_bytes)
        if version >= self.last_version:
            self.stop()
