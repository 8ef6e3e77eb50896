"""A relay: fetches like a client (`puller.py`), serves like an origin (`serving.py`), shard by shard as they come."""

from __future__ import annotations

from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.manifest import Verify
from refimpl.shardcast.messages import Announced
from refimpl.shardcast.puller import Puller, PullerConfig
from refimpl.shardcast.serving import ServingConfig, ShardServer, Spoil
from refimpl.world import World


class Relay:
    """`serve()`, then `run()` until `stop()`. Trees of any depth: a relay's sources may be relays."""

    def __init__(
        self,
        world: World,
        pulling: PullerConfig,
        serving: ServingConfig,
        verify: Verify,
        journal: Journal = silent,
        spoil: Spoil | None = None,
    ) -> None:
        self.world, self.journal = world, journal
        self.server = ShardServer(world, serving, journal, spoil)
        self.puller = Puller(
            world,
            pulling,
            verify,
            on_open=self.server.hold,
            on_shard=lambda hoard: self.server.changed(),
            on_complete=self._complete,
            journal=journal,
        )

    def serve(self) -> None:
        self.server.serve()
        self.world.serve({Announced: self.announced})

    def stop(self) -> None:
        self.puller.stop()

    async def run(self) -> None:
        await self.puller.run()

    async def announced(self, source: str, message: Announced) -> Message:
        self.puller.hear()
        return Ok()

    def _complete(self, hoard: Hoard) -> None:
        self.journal("relayed", version=hoard.header.version)
