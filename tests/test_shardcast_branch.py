"""Relays that find their own parent: measured, moved, never in a loop; in the simulator and over real HTTP."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from refimpl.attacks.relays import SPOILS, TAMPERS
from refimpl.identity import verify
from refimpl.messages import Blob
from refimpl.shardcast.branch import TreeConfig
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.messages import AskPosition, AskProbe
from refimpl.shardcast.origin import Origin, virtual_shards
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import MemoryStore
from refimpl.world import Refused
from refimpl.worlds.http import HttpFabric
from sim.link_faults import LinkFault
from tests.shardcast_processes import Process, free_port
from tests.shardcast_tree import KEY
from tests.worlds import sim_fabric

LARGE = Layout(names=("model.safetensors",), sizes_bytes=(1_000_000_000,), shard_bytes=5_000_000)
SMALL = Layout(names=("model.safetensors",), sizes_bytes=(4_000_000,), shard_bytes=50_000)
HUBS, LEAVES = ("hub0", "hub1"), ("leaf0", "leaf1")


class Forest:
    """origin → hub0, hub1; both leaves below hub0, until they think better of it."""

    def __init__(self, fabric: Any, *, every_s: float, spoil: str = "", virtual: bool = True) -> None:
        self.fabric = fabric
        self.moves: list[tuple[str, str, str]] = []  # who, from whom, below whom
        self.worlds = {name: fabric.node(name) for name in ("origin", *HUBS, *LEAVES)}
        served = ServingConfig(virtual=virtual)
        tree = TreeConfig(neighbours=(*HUBS, *LEAVES), every_s=every_s, timeout_s=every_s, epoch_s=3 * every_s, slots=4)
        self.origin = Origin(self.worlds["origin"], "run", KEY, verify, served, MemoryStore(), tree=tree)
        self.origin.serve()
        self.relays: dict[str, Relay] = {}
        for name in (*HUBS, *LEAVES):
            pulling = PullerConfig(
                sources=("origin" if name in HUBS else "hub0",), origin="origin", origin_key=KEY.public_key,
                news_patience_s=1.0, news_interval_s=0.01, retry_s=0.2,
            )  # fmt: skip
            relay = Relay(
                self.worlds[name], pulling, served, MemoryStore(), verify, self._journal(name),
                SPOILS.get(spoil) if name == "hub0" else None, tree=tree,
            )  # fmt: skip
            relay.serve()
            self.relays[name] = relay
        if spoil in TAMPERS:
            self.worlds["hub0"].serve(TAMPERS[spoil](self.relays["hub0"].server))

    def _journal(self, node: str) -> Callable[..., None]:
        def note(kind: str, /, **said: Any) -> None:
            if kind == "moved":
                self.moves.append((node, said["before"], said["parent"]))
                self._must_be_a_tree()

        return note

    def _must_be_a_tree(self) -> None:
        for name in self.relays:
            node, steps = name, 0
            while node != "origin":
                place = self.relays[node].reparenting
                assert place is not None and steps <= len(self.relays), "the tree has a loop"
                node, steps = place.place.parent, steps + 1

    def start(self) -> None:
        for relay in self.relays.values():
            relay.world.spawn(relay.run(), "relay")

    async def all_have(self, version: int, patience_s: float, but: tuple[str, ...] = ()) -> float | None:
        """Seconds until all relays had it; None: they had not."""
        world = self.worlds["origin"]
        started_s = world.now()
        while world.now() < started_s + patience_s:
            if all(version in relay.puller.known.held for name, relay in self.relays.items() if name not in but):
                return float(world.now() - started_s)
            await world.sleep(0.02)
        return None


def slow(fabric: Any, name: str, factor: float) -> None:
    """From now on the node's way out carries so much of what it did."""
    index = fabric.nodes[name].index
    fabric.carrier.links_will_change()
    fabric.network.apply(fabric.now_s(), "slow", LinkFault(node=index, direction="up", bandwidth_factor=factor))
    fabric.carrier.links_changed()


@pytest.mark.parametrize("moving", [False, True])
def test_a_parent_that_becomes_slow_is_left_in_mid_version(moving: bool) -> None:
    """1 GB over lines of 1 Gbit/s; one second in, what leaves hub0 falls to a hundredth. Who stays waits 15 minutes."""
    forest = Forest(sim_fabric(run_seed=1), every_s=2.0 if moving else 10_000.0)

    async def main() -> float | None:
        forest.start()
        desk = forest.worlds["origin"]
        await desk.sleep(20.0)
        desk.spawn(forest.origin.publish(LARGE, virtual_shards("content", LARGE)), "publish")
        await desk.sleep(1.0)
        slow(forest.fabric, "hub0", 0.01)
        return await forest.all_have(0, 400.0)

    took_s = forest.fabric.run(main())
    if moving:
        assert took_s is not None and took_s < 100.0
        assert {who for who, before, _ in forest.moves if before == "hub0"} == set(LEAVES)
    else:
        assert took_s is None and forest.moves == []


def test_a_dead_parent_is_replaced() -> None:
    forest = Forest(sim_fabric(run_seed=2), every_s=1.0)

    async def main() -> float | None:
        forest.start()
        desk = forest.worlds["origin"]
        await desk.sleep(5.0)
        forest.fabric.kill("hub0")
        await forest.origin.publish(SMALL, virtual_shards("content", SMALL))
        return await forest.all_have(0, 60.0, but=("hub0",))

    assert forest.fabric.run(main()) is not None
    assert {(who, before) for who, before, _ in forest.moves} >= {(leaf, "hub0") for leaf in LEAVES}


@pytest.mark.parametrize("spoil", ["flipped-bit", "lies-about-index"])
def test_a_parent_that_does_not_deliver_is_left_however_well_it_answers(spoil: str) -> None:
    """Wrong shards are had from the origin at once, and the parent is left at the next look."""
    forest = Forest(sim_fabric(run_seed=3), every_s=1.0, spoil=spoil)

    async def main() -> float | None:
        forest.start()
        await forest.worlds["origin"].sleep(5.0)
        await forest.origin.publish(LARGE, virtual_shards("content", LARGE))
        return await forest.all_have(0, 120.0)

    assert forest.fabric.run(main()) is not None
    assert {who for who, before, _ in forest.moves if before == "hub0"} == set(LEAVES)


def test_a_calm_tree_stays_as_it_is() -> None:
    forest = Forest(sim_fabric(run_seed=4), every_s=1.0)

    async def main() -> None:
        forest.start()
        for version in range(3):
            await forest.origin.publish(SMALL, virtual_shards(f"content {version}", SMALL))
            assert await forest.all_have(version, 60.0) is not None
            await forest.worlds["origin"].sleep(20.0)

    forest.fabric.run(main())
    assert forest.moves == []


@pytest.mark.slow
def test_over_real_http_a_slow_parent_is_left_and_a_dead_one_replaced() -> None:
    content = os.urandom(SMALL.size_bytes)

    def read(index: int) -> Blob:
        piece = content[index * SMALL.shard_bytes : (index + 1) * SMALL.shard_bytes]
        return Blob(len(piece), "", piece)

    forest = Forest(HttpFabric(run_seed=1), every_s=0.5, virtual=False)

    async def main() -> None:
        forest.start()
        desk = forest.worlds["origin"]
        await desk.sleep(2.0)
        forest.worlds["hub0"].uplink.bytes_per_s = 20_000.0  # 200 s for each leaf
        await forest.origin.publish(SMALL, read)
        assert await forest.all_have(0, 90.0) is not None
        first = {name: place(forest.relays[name]) for name in LEAVES}
        assert "hub0" not in first.values()
        forest.fabric.kill("hub1")
        forest.worlds["hub0"].uplink.bytes_per_s = None
        await forest.origin.publish(SMALL, read)
        assert await forest.all_have(1, 90.0, but=("hub1",)) is not None

    forest.fabric.run(main())
    for name in LEAVES:
        shelf = forest.relays[name].puller.hoard.shelf  # type: ignore[union-attr]
        whole = b"".join(bytes(shelf.read(i, 0, 1 << 30).data or b"") for i in range(SMALL.shard_count))
        assert hashlib.sha256(whole).digest() == hashlib.sha256(content).digest()


def place(relay: Relay) -> str:
    assert relay.reparenting is not None
    return relay.reparenting.place.parent


def test_places_are_told_and_slots_counted() -> None:
    forest = Forest(sim_fabric(run_seed=5), every_s=1.0)

    async def main() -> None:
        forest.start()
        world = forest.worlds["leaf0"]
        await world.sleep(5.0)
        said = await world.call("hub0", AskPosition(0, False), 5.0)
        assert (said.name, said.path, said.depth) == ("hub0", ("origin",), 1)
        assert said.free_slots == 4 - 1  # leaf1; leaf0 has just said that it is not below any more
        assert 0.5e8 < said.rate_bytes_per_s < 1.3e8  # 1 Gbit/s is 1.25e8
        high = await world.call("origin", AskPosition(700, False), 5.0)
        assert high.epoch == 701  # an origin that was started again goes on from where the others are
        for size in (0, 1 << 40):
            with pytest.raises(Refused, match="probe"):
                await world.call("hub0", AskProbe(size), 5.0)

    forest.fabric.run(main())


@pytest.mark.slow
def test_commands_move_away_from_a_killed_relay_and_from_a_slow_one(tmp_path: Path) -> None:
    """Real processes: a relay below one that is killed, then below one that serves 50 kB/s."""
    model, key = tmp_path / "model.safetensors", tmp_path / "key"
    model.write_bytes(os.urandom(6_000_000))
    ports = [free_port() for _ in range(4)]
    origin_url, killed, slow_url = (f"http://127.0.0.1:{port}" for port in ports[:3])

    def relay(name: str, source: str, port: int, *more: object) -> Process:
        return Process(
            tmp_path / f"{name}.log", "relay", source, "--origin-key", f"{key}.pub", "--store", tmp_path / name,
            "--port", port, "--look-s", 1, *more,
        )  # fmt: skip

    with Process(
        tmp_path / "origin.log", "origin", model, "--run", "r", "--key", key, "--store", tmp_path / "o",
        "--port", ports[0], "--shard-mb", 0.25,
    ) as origin:  # fmt: skip
        origin.wait_for("version 1 is out")
        with (
            relay("killed", origin_url, ports[1]) as first,
            relay("slow", origin_url, ports[2], "--client-mb-s", 0.05) as second,
        ):
            first.wait_for("version 1 is here")
            second.wait_for("version 1 is here")
            with relay(
                "leaf", killed, ports[3], "--neighbour", slow_url, "--neighbour", origin_url, "--origin", origin_url
            ) as under:
                under.wait_for("relay at")
                first.kill()
                assert under.wait_for(r"below (http://\S+) from now on")[1] in (slow_url, origin_url)
                under.wait_for("version 1 is here")
