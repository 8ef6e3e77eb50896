"""What the article promises and the original never had: who lags gets the increment, and only that."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from refimpl.messages import Blob
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.origin import virtual_shards
from refimpl.shardcast.shelf import MemoryStore
from refimpl.worlds.http import HttpFabric
from sim.hardware import find_device
from tests.shardcast_tree import LAYOUT, Tree
from tests.worlds import sim_fabric

LARGE = Layout(names=("model.safetensors",), sizes_bytes=(500_000_000,), shard_bytes=10_000_000)


def test_who_lags_gets_the_increment_and_a_newcomer_the_whole() -> None:
    tree = Tree(sim_fabric(run_seed=1), increments=1)
    late = tree.clients.pop()

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LARGE, virtual_shards("first", LARGE))
        await wait_until(tree, lambda: 0 in tree.clients[0].complete)
        started_s = late.world.now()
        await tree.origin.publish(LARGE, virtual_shards("second", LARGE))
        await wait_until(tree, lambda: 1 in tree.clients[0].complete)
        assert late.world.now() - started_s < 4.0 / 2  # the whole takes 4 s at 1 Gbit/s
        late.world.spawn(late.run(), "late")
        await wait_until(tree, lambda: 1 in late.complete)

    tree.fabric.run(main())
    applied = {note["node"] for note in tree.of("applied")}
    assert applied == {"relay0", "relay1", "client0"}  # relays, too: the origin's uplink carries no second whole
    hoard = tree.clients[0].puller.hoard
    assert hoard is not None and hoard.complete
    assert hoard.shelf.read(7, 0, 1 << 30).content_id == virtual_shards("second", LARGE)(7).content_id


def test_increments_are_applied_while_later_shards_are_still_being_cut() -> None:
    """The first ones are on their way before the last ones exist; the final manifest still decides."""
    tree = Tree(sim_fabric(run_seed=4), increments=1)
    for world in tree.worlds.values():
        world.price = find_device("CPU 2 cores").price

    async def main() -> None:
        tree.start()
        for version in (0, 1):
            await tree.origin.publish(LARGE, virtual_shards(f"content {version}", LARGE))
            await wait_until(tree, lambda v=version: all(v in client.complete for client in tree.clients))

    tree.fabric.run(main())
    began_s, out_s = tree.of("publishing")[1]["t_s"], tree.of("published")[1]["t_s"]
    applied = [note for note in tree.of("applied") if note["node"].startswith("client")]
    assert began_s < min(note["t_s"] for note in applied) < out_s - 0.3
    for client in ("client0", "client1"):
        assert sum(note["shards"] for note in applied if note["node"] == client) == LARGE.shard_count  # each once
        (complete_s,) = (n["t_s"] for n in tree.of("complete") if n["node"] == client and n["version"] == 1)
        assert complete_s > out_s


def test_a_chain_of_increments_leads_over_the_versions_between() -> None:
    tree = Tree(sim_fabric(run_seed=2), increments=1)
    sleeper = tree.clients.pop()

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LARGE, virtual_shards("content 0", LARGE))
        await wait_until(tree, lambda: all(0 in client.complete for client in tree.clients))
        # one client is brought to version 0 and hears nothing of what comes next
        hold_from_before(sleeper, tree.clients[0].puller.known.held[0])
        for version in (1, 2, 3):
            await tree.origin.publish(LARGE, virtual_shards(f"content {version}", LARGE))
            await wait_until(tree, lambda v=version: all(v in client.complete for client in tree.clients))
        sleeper.world.spawn(sleeper.run(), "wakes")
        await wait_until(tree, lambda: 3 in sleeper.complete)

    tree.fabric.run(main())
    steps = [(note["base"], note["target"]) for note in tree.of("applied") if note["node"] == "client1"]
    assert list(dict.fromkeys(steps)) == sorted(set(steps)) == [(0, 1), (1, 2), (2, 3)]


def test_a_relay_too_goes_on_along_a_chain_after_a_restart() -> None:
    """The version between is kept and served, so that the next increment has its base."""
    tree = Tree(sim_fabric(run_seed=2), increments=1, clients=1)
    sleeper = tree.relays.pop()

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LARGE, virtual_shards("content 0", LARGE))
        await wait_until(tree, lambda: 0 in tree.clients[0].complete)
        hold_from_before(sleeper, tree.clients[0].puller.known.held[0])
        for version in (1, 2):
            await tree.origin.publish(LARGE, virtual_shards(f"content {version}", LARGE))
            await wait_until(tree, lambda v=version: v in tree.clients[0].complete)
        sleeper.puller.journal = few_routes(sleeper.puller.journal)
        sleeper.world.spawn(sleeper.run(), "wakes")
        await wait_until(tree, lambda: 2 in sleeper.puller.known.held)

    tree.fabric.run(main())
    assert [(note["base"], note["target"]) for note in tree.of("route") if note["node"] == "relay1"] == [(0, 1), (1, 2)]
    assert sorted(sleeper.server.hoards) == sorted(sleeper.puller.known.held) == [0, 1, 2]


def few_routes(journal: Any) -> Any:
    """Ends the run when a node begins again and again (virtual time would stand still)."""
    routes: list[int] = []

    def note(kind: str, /, **fields: Any) -> None:
        if kind == "route":
            routes.append(fields["base"])
        assert len(routes) < 10, routes
        journal(kind, **fields)

    return note


def hold_from_before(role: Any, manifest: Manifest) -> None:
    """This version is in the role's store, and it has been told of nothing newer."""
    shelf = role.store.begin(manifest.header)
    for index, sha256 in enumerate(manifest.shards_sha256):
        shelf.write(index, 0, Blob(manifest.layout.shard_size(index), sha256.hex()), "")
        shelf.check(index, sha256)
    role.restore([manifest])


def test_an_increment_as_large_as_half_the_file_is_not_offered() -> None:
    tree = Tree(sim_fabric(run_seed=3), increments=2, store=lambda name: MemoryStore(0.6))

    async def main() -> None:
        tree.start()
        for version in (0, 1):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            assert await tree.all_have(version)

    tree.fabric.run(main())
    assert tree.of("increment_too_large") and not tree.of("applied")


def weights(step: int) -> bytes:
    """A safetensors file of bf16 weights; each step moves a few per cent of them by one unit in the last place."""
    rng = np.random.default_rng(5)
    bits = (rng.standard_normal(400_009).astype("<f4").view("<u4") >> 16).astype("<u2")
    for _ in range(step):
        bits = bits + (rng.random(len(bits)) < 0.04).astype("<u2")
    header = b'{"w":{"dtype":"BF16","shape":[400009],"data_offsets":[0,800018]}}'
    return struct.pack("<Q", len(header)) + header + bits.tobytes()


@pytest.mark.parametrize("spoil", [None, {0: "flipped-bit"}])
def test_real_increments_between_files_on_disk_are_exact(tmp_path: Path, spoil: dict[int, str] | None) -> None:
    path = tmp_path / "model.safetensors"
    tree = Tree(
        HttpFabric(run_seed=1), virtual=False, increments=1, spoil=spoil, clients=1,
        store=lambda name: DiskStore(tmp_path / name), piece_bytes=50_000,
    )  # fmt: skip

    async def main() -> None:
        tree.start()
        for version in (1, 2, 3):
            path.write_bytes(weights(version))
            layout, files = layout_of(path, 100_000)
            await tree.origin.publish(layout, files)
            assert await tree.all_have(version)
            held = tree.clients[0].puller.known.held[version]
            assert (tmp_path / "client0" / held.label / path.name).read_bytes() == weights(version)

    tree.fabric.run(main())
    assert {(note["base"], note["target"]) for note in tree.of("applied") if note["node"] == "client0"} == {
        (1, 2),
        (2, 3),
    }
    sizes = [note["size_bytes"] for note in tree.of("increment")]
    assert max(sizes) < len(weights(1)) / 15
    # nothing half-done and no increment stays at the client
    assert sorted(p.name[:9] for p in (tmp_path / "client0").iterdir()) == ["v00000002", "v00000003"]


async def wait_until(tree: Tree, condition: Any, patience_s: float = 60.0) -> None:
    world = tree.worlds["origin"]
    until_s = world.now() + patience_s
    while not condition():
        assert world.now() < until_s, tree.notes[-20:]
        await world.sleep(0.02)
