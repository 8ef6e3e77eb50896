"""How versions travel: a checkpoint folder becomes a SHARDCAST version at the trainer, and weights at the others.

A version's content is two files: the mark (which checkpoint, of which run) and the weights. SHARDCAST's own version
numbers are never used twice; a checkpoint that is published again after a crash gets a new one, with the same mark.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load

from refimpl.grpo.vault import MARK, WEIGHTS
from refimpl.identity import Identity, verify
from refimpl.journal import Journal
from refimpl.shardcast.client import Client
from refimpl.shardcast.disk_store import DiskStore
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import Store
from refimpl.world import Signal, World

MARK_BYTES_MAX = 4096
Tensors = dict[str, torch.Tensor]


class Broadcast:
    """The trainer's origin. `begin()` before anything is published."""

    def __init__(
        self,
        world: World,
        run_id: str,
        identity: Identity,
        serving: ServingConfig,
        store: DiskStore,
        journal: Journal,
        *,
        shard_bytes: int,
    ) -> None:
        self.origin = Origin(world, run_id, identity, verify, serving, store, journal)
        self.store, self.key, self.shard_bytes = store, identity.public_key, shard_bytes
        self.out: set[int] = set()  # checkpoints that are published
        self.journal = journal

    def begin(self) -> None:
        manifests, problems = self.store.found(verify, self.key)
        for problem in problems:
            self.journal("problem", path=str(problem.path), reason=problem.reason)
        self.out = {mark_of(self.store, manifest) for manifest in manifests if manifest.header.base is None}
        self.origin.restore(manifests)  # removes what is too old
        self.origin.serve()

    async def publish(self, version: int, folder: Path) -> None:
        """Broadcast checkpoint `version`; at once where it is out already."""
        if version in self.out:
            return
        files = [folder / MARK, folder / WEIGHTS]
        sizes = tuple(file.stat().st_size for file in files)
        layout = Layout(names=(MARK, WEIGHTS), sizes_bytes=sizes, shard_bytes=self.shard_bytes)
        await self.origin.publish(layout, files)
        self.out.add(version)
        self.journal("out", checkpoint=version)


class Arrivals:
    """What has arrived at a node that generates or checks: the `Weights` of its role, and the tensors themselves."""

    def __init__(
        self, world: World, run_id: str, pulling: PullerConfig, store: DiskStore, journal: Journal, *, keep: int
    ) -> None:
        self.world, self.run_id, self.store, self.journal, self.keep = world, run_id, store, journal, keep
        self._manifests: dict[int, Manifest] = {}  # by checkpoint
        self._arrived = world.signal()
        self.client = Client(
            world, pulling, store, verify, last_version=None, journal=journal, keep=keep, on_version=self._take
        )
        manifests, _ = store.found(verify, pulling.origin_key)
        self.client.restore(manifests)
        for manifest in manifests:
            if manifest.header.base is None:
                self._take(manifest)
        self.client.serve()

    def held(self) -> list[int]:
        return sorted(self._manifests)

    def arrived(self) -> Signal:
        return self._arrived

    def tensors(self, version: int) -> Tensors:
        """The weights of a version that is held. Runs where files may be read: inside `World.compute`."""
        manifest = self._manifests[version]
        name = manifest.layout.names.index(WEIGHTS)
        start = sum(manifest.layout.sizes_bytes[:name])
        whole = content(self.store, manifest)
        return load(whole[start : start + manifest.layout.sizes_bytes[name]])

    def _take(self, manifest: Manifest) -> None:
        version = mark_of(self.store, manifest, run_id=self.run_id)
        self._manifests[version] = manifest
        for old in self.held()[: -self.keep]:
            del self._manifests[old]
        self.journal("weights", checkpoint=version)
        arrived, self._arrived = self._arrived, self.world.signal()
        arrived.set()


def content(store: Store, manifest: Manifest) -> bytes:
    """All bytes of a version that is here."""
    shelf, layout = store.shelf(manifest), manifest.layout
    return b"".join(bytes(shelf.read(i, 0, layout.shard_size(i)).data or b"") for i in range(layout.shard_count))


def mark_of(store: Store, manifest: Manifest, run_id: str | None = None) -> int:
    """The checkpoint that a version says it is. Raises ValueError where it is none of this run."""
    layout = manifest.layout
    size = layout.sizes_bytes[0]
    if layout.names[0] != MARK or size > MARK_BYTES_MAX or size > layout.shard_size(0):
        raise ValueError(f"version {manifest.version} is no checkpoint of a training run: it begins with no mark")
    mark = json.loads(bytes(store.shelf(manifest).read(0, 0, size).data or b""))
    if run_id is not None and mark["run"] != run_id:
        raise ValueError(f"version {manifest.version} belongs to run {mark['run']!r}, this is {run_id!r}")
    return int(mark["checkpoint"])
