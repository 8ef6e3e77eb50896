"""How versions travel: a checkpoint folder becomes a SHARDCAST version at the trainer, and weights at the others.

A version's content is two files: the mark (which checkpoint, of which run) and the weights. SHARDCAST's own version
numbers are never used twice; a checkpoint that is published again after a crash gets a new one, with the same mark.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load

from refimpl.grpo.vault import MARK, WEIGHTS
from refimpl.identity import Identity, verify
from refimpl.journal import Journal
from refimpl.shardcast.client import Client
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import Store
from refimpl.world import Signal, World

MARK_BYTES_MAX = 4096
SHARD_BYTES_MIN, SHARDS = 256 << 10, 64
Tensors = dict[str, torch.Tensor]


Cut = Callable[[int, Path], tuple[Layout, Any]]
"""Checkpoint and its folder -> what the origin publishes of it."""
CheckpointOf = Callable[[Store, Manifest], int]
"""Which checkpoint a version is that is here. Raises ValueError where it is none of this run."""


Found = tuple[list[Manifest], list[Any]]
"""What a store holds from before, oldest first, and what is wrong with the rest."""


class Broadcast:
    """The trainer's origin. `begin()` before anything is published."""

    def __init__(
        self,
        world: World,
        run_id: str,
        identity: Identity,
        serving: ServingConfig,
        store: Store,
        journal: Journal,
        *,
        cut: Cut,
        checkpoint_of: CheckpointOf,
        found: Found,
    ) -> None:
        self.origin = Origin(world, run_id, identity, verify, serving, store, journal)
        self.store, self.cut, self.checkpoint_of, self.found = store, cut, checkpoint_of, found
        self.out: set[int] = set()  # checkpoints that are published
        self.journal = journal

    def begin(self) -> None:
        manifests, problems = self.found
        for problem in problems:
            self.journal("problem", path=str(problem.path), reason=problem.reason)
        self.out = {self.checkpoint_of(self.store, manifest) for manifest in manifests if manifest.header.base is None}
        for version in sorted(self.out):  # a crash may have come between a publication and its entry
            self.journal("out_before", checkpoint=version)
        self.origin.restore(manifests)  # removes what is too old
        self.origin.serve()

    async def publish(self, version: int, folder: Path) -> None:
        """Broadcast checkpoint `version`; at once where it is out already."""
        if version in self.out:
            return
        await self.origin.publish(*self.cut(version, folder))
        self.out.add(version)
        self.journal("out", checkpoint=version)


class Arrivals:
    """What has arrived at a node that generates or checks: the `Weights` of its role."""

    def __init__(
        self,
        world: World,
        pulling: PullerConfig,
        store: Store,
        journal: Journal,
        *,
        keep: int,
        checkpoint_of: CheckpointOf,
        found: Found,
    ) -> None:
        self.world, self.store, self.journal, self.keep = world, store, journal, keep
        self.checkpoint_of = checkpoint_of
        self.manifests: dict[int, Manifest] = {}  # by checkpoint
        self._arrived = world.signal()
        self.client = Client(
            world, pulling, store, verify, last_version=None, journal=journal, keep=keep, on_version=self._take
        )
        manifests, _ = found
        self.client.restore(manifests)
        for manifest in manifests:
            if manifest.header.base is None:
                self._take(manifest)
        self.client.serve()

    def held(self) -> list[int]:
        return sorted(self.manifests)

    def arrived(self) -> Signal:
        return self._arrived

    def _take(self, manifest: Manifest) -> None:
        version = self.checkpoint_of(self.store, manifest)
        self.manifests[version] = manifest
        for old in self.held()[: -self.keep]:
            del self.manifests[old]
        self.journal("weights", checkpoint=version)
        arrived, self._arrived = self._arrived, self.world.signal()
        arrived.set()


def cut_folder(version: int, folder: Path) -> tuple[Layout, list[Path]]:
    """A checkpoint folder as the two files of a version, in some `SHARDS` shards, fewer where they would be small."""
    files = [folder / MARK, folder / WEIGHTS]
    sizes = tuple(file.stat().st_size for file in files)
    shard_bytes = max(SHARD_BYTES_MIN, sum(sizes) // SHARDS)
    return Layout(names=(MARK, WEIGHTS), sizes_bytes=sizes, shard_bytes=shard_bytes), files


def tensors_of(arrivals: Arrivals, version: int) -> Tensors:
    """The weights of a version that is held. Runs where files may be read: inside `World.compute`."""
    manifest = arrivals.manifests[version]
    name = manifest.layout.names.index(WEIGHTS)
    start = sum(manifest.layout.sizes_bytes[:name])
    whole = content(arrivals.store, manifest)
    return load(whole[start : start + manifest.layout.sizes_bytes[name]])


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
