"""A relay: fetches like a client (`puller.py`), serves like an origin (`serving.py`), shard by shard as they come."""

from __future__ import annotations

from collections.abc import Iterable

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.branch import Reparenting, TreeConfig
from refimpl.shardcast.carry import Carrier
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.manifest import Manifest, Verify
from refimpl.shardcast.messages import Announced, Complaint
from refimpl.shardcast.puller import Puller, PullerConfig
from refimpl.shardcast.serving import ServingConfig, ShardServer, Spoil
from refimpl.shardcast.shelf import Store
from refimpl.world import CallError, Refused, World


class Relay:
    """`serve()`, then `run()` until `stop()`. Trees of any depth: a relay's sources may be relays. With a `tree`, its
    first source is its first parent, and it moves when another is better (`branch.py`)."""

    def __init__(
        self,
        world: World,
        pulling: PullerConfig,
        serving: ServingConfig,
        store: Store,
        verify: Verify,
        journal: Journal = silent,
        spoil: Spoil | None = None,
        *,
        identity: Identity | None = None,
        carrier: Carrier | None = None,
        tree: TreeConfig | None = None,
    ) -> None:
        self.world, self.journal, self.store = world, journal, store
        self.server = ShardServer(world, serving, store, journal, spoil)
        self.puller = Puller(
            world,
            pulling,
            store,
            verify,
            identity=identity,
            carrier=carrier,
            on_open=self._open,
            on_change=lambda hoard: self.server.changed(),
            on_complete=self._complete,
            journal=journal,
        )
        self.server.disputed = lambda: self.puller.disputed
        self.reparenting = Reparenting(world, tree, self.puller, self.server, journal) if tree else None

    def serve(self) -> None:
        self.server.serve()
        if self.reparenting is not None:
            self.reparenting.branch.serve()
        self.world.serve({Announced: self.announced, Complaint: self.complain})

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """Serve what is in the store from before, oldest first, whether or not the upstream answers."""
        for manifest in manifests:
            self.server.hold(Hoard.from_manifest(manifest, self.store.shelf(manifest), published=True))
            if manifest.header.base is None:
                self.puller.restore(manifest)

    def stop(self) -> None:
        self.puller.stop()

    async def run(self) -> None:
        if self.reparenting is not None:
            self.world.spawn(self.reparenting.run(), "reparenting")
        await self.puller.run()

    async def announced(self, source: str, message: Announced) -> Message:
        self.puller.hear()
        return Ok()

    async def complain(self, source: str, message: Complaint) -> Message:
        """Passed on towards the origin, which alone judges it."""
        config = self.puller.config
        try:
            await self.world.call(config.origin or self.puller.sources[0], message, config.news_timeout_s)
        except CallError as error:
            raise Refused(f"the complaint could not be passed on: {error.reason}") from error
        return Ok()

    def _open(self, hoard: Hoard) -> None:
        if hoard.header.base is None:
            for older in list(self.server.hoards.values()):
                if not older.complete:
                    self.server.drop(older)  # overtaken before it was whole
        self.server.hold(hoard)

    def _complete(self, hoard: Hoard) -> None:
        version = hoard.header.version
        self.journal("relayed", version=version)
        if version in self.server.hoards:
            self.server.retire()
        else:  # made on the way to a newer one, by a chain of increments: the next of them starts from it
            self.server.hold(hoard)
        held = self.puller.known.held
        for version in set(held) - set(self.server.hoards):
            del held[version]
        self.store.tidy()
