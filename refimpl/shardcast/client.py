"""A client: follows the newest version until it has all of it, and says when."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.shardcast.carry import Carrier
from refimpl.shardcast.hoard import Hoard
from refimpl.shardcast.manifest import Manifest, Verify
from refimpl.shardcast.messages import Announced
from refimpl.shardcast.puller import Puller, PullerConfig
from refimpl.shardcast.shelf import Store
from refimpl.world import World

KEEP = 2
"""Versions that a client keeps: the newest, and the one that somebody may still have open."""


class Client:
    """`run()` until `last_version` (or a newer one) is complete, or `stop()`. `on_version` is called with each."""

    def __init__(
        self,
        world: World,
        config: PullerConfig,
        store: Store,
        verify: Verify,
        *,
        last_version: int | None,
        journal: Journal = silent,
        keep: int = KEEP,
        identity: Identity | None = None,
        carrier: Carrier | None = None,
        on_version: Callable[[Manifest], None] = lambda manifest: None,
    ) -> None:
        self.world, self.journal, self.store, self.last_version = world, journal, store, last_version
        self.keep, self.on_version = keep, on_version
        self.complete: list[int] = []
        self._increments: list[Manifest] = []
        self.puller = Puller(
            world,
            config,
            store,
            verify,
            identity=identity,
            carrier=carrier,
            on_complete=self._complete,
            on_change=self._changed,
            journal=journal,
        )

    def serve(self) -> None:
        self.world.serve({Announced: self.announced})

    def restore(self, manifests: Iterable[Manifest]) -> None:
        """What is in the store from before, oldest first."""
        for manifest in manifests:
            if manifest.header.base is None:
                self.puller.restore(manifest)
            else:
                self.store.remove(manifest)  # nobody asks a client for it

    @property
    def stopped(self) -> bool:
        return self.puller.stopped.is_set()

    def stop(self) -> None:
        self.puller.stop()

    async def run(self) -> None:
        await self.puller.run()

    async def announced(self, source: str, message: Announced) -> Message:
        self.puller.hear()
        return Ok()

    def _changed(self, hoard: Hoard) -> None:
        if hoard.header.base is not None and hoard.published:
            self._increments.append(hoard.final)

    def _complete(self, hoard: Hoard) -> None:
        version = hoard.header.version
        if version in self.complete:
            return
        self.complete.append(version)
        self.on_version(hoard.final)
        self.journal("complete", version=version, size_bytes=hoard.header.layout.size_bytes)
        held = self.puller.known.held
        for old in [*(held.pop(version) for version in sorted(held)[: -self.keep]), *self._increments]:
            self.store.remove(old)
        self._increments.clear()
        self.store.tidy()
        if self.last_version is not None and version >= self.last_version:
            self.stop()
