"""Dishonest relays and clients against the real roles: caught, named, routed around; nothing wrong reaches anybody."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from refimpl.attacks.names import RELAY_BEHAVIOURS
from refimpl.attacks.relays import SPOILS, TAMPERS, flipped_bit, flood
from refimpl.identity import Identity
from refimpl.messages import Blob, Ok
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.messages import Complaint, complaint_bytes, signed_complaint
from refimpl.shardcast.origin import virtual_shards
from refimpl.world import Refused
from refimpl.worlds.http import HttpFabric
from tests.shardcast_tree import LAYOUT, Tree
from tests.worlds import sim_fabric


def test_the_list_of_names_holds_what_there_is() -> None:
    assert set(RELAY_BEHAVIOURS) == {"honest", *SPOILS, *TAMPERS}


@pytest.mark.parametrize("tamper", TAMPERS)
def test_a_relay_that_lies_is_routed_around_and_noted(tamper: str) -> None:
    tree = Tree(sim_fabric(run_seed=3), relays=3, clients=4)
    bad = tree.relays[0]
    bad.world.serve(TAMPERS[tamper](bad.server))

    async def main() -> None:
        tree.start()
        for version in range(3):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            assert await tree.all_have(version, patience_s=10.0)
            await tree.worlds["origin"].sleep(1.0)

    tree.fabric.run(main())
    for client in tree.clients:
        hoard = client.puller.hoard
        assert hoard is not None and hoard.complete and hoard.header.version == 2
        truth = virtual_shards("content 2", LAYOUT)
        assert all(hoard.shelf.read(i, 0, 1 << 30).content_id == truth(i).content_id for i in range(11))
    if tamper == "equivocates":
        assert {(note["node"], note["relay"]) for note in tree.of("wrong_shard")} == {
            ("client1", "relay0"),
            ("client3", "relay0"),
        }
        assert set(tree.origin.complaints) == {"relay0"} and len(tree.origin.complaints["relay0"]) == 2
    if tamper == "stale-version":
        assert {note["source"] for note in tree.of("behind")} == {"relay0"}
    if tamper == "lies-about-index":
        assert {note["relay"] for note in tree.of("empty_relay")} == {"relay0"}
    if tamper == "slow-drip":
        assert {note["relay"] for note in tree.of("slow_relay")} == {"relay0"}
    if tamper == "forged-version":
        assert {note["source"] for note in tree.of("no_news") if "signature" in note["reason"]} == {"relay0"}


@pytest.mark.parametrize("origin_known", [True, False])
def test_when_all_relays_have_lied_there_is_a_way_out(origin_known: bool) -> None:
    """Each sends wrong shards at first. The origin is asked where it is known; else who lied least, in time."""
    tree = Tree(sim_fabric(run_seed=8), relays=2, clients=2, origin_known=origin_known)
    lies = {"relay0": 30, "relay1": 10}
    for relay in tree.relays:
        relay.server.spoil = partial(_spoil_some, relay.world.name, lies)

    async def main() -> float:
        tree.start()
        await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
        started_s = tree.worlds["origin"].now()
        assert await tree.all_have(0, patience_s=500.0)
        return float(tree.worlds["origin"].now() - started_s)

    took_s = tree.fabric.run(main())
    assert {note["node"] for note in tree.of("all_lied")} == {"client0", "client1"}
    from_origin = {note["node"] for note in tree.of("shard") if note["relay"] == "origin"} & {"client0", "client1"}
    assert from_origin == ({"client0", "client1"} if origin_known else set())
    assert took_s < 5.0 or not origin_known
    for client in tree.clients:
        hoard, truth = client.puller.hoard, virtual_shards("content", LAYOUT)
        assert hoard is not None
        assert all(hoard.shelf.read(i, 0, 1 << 30).content_id == truth(i).content_id for i in range(11))


def _spoil_some(relay: str, lies: dict[str, int], index: int, blob: Blob) -> Blob:
    lies[relay] -= 1
    return flipped_bit(index, blob) if lies[relay] >= 0 else blob


def test_when_all_lie_for_ever_nothing_wrong_arrives_and_it_is_no_progress() -> None:
    """`pull` gives up after its patience, and says this."""
    tree = Tree(sim_fabric(run_seed=9), spoil={0: "flipped-bit", 1: "truncated"}, clients=1, origin_known=False)
    puller = tree.clients[0].puller

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
        assert not await tree.all_have(0, patience_s=60.0)
        before = puller.progress()
        assert not await tree.all_have(0, patience_s=600.0)
        assert puller.progress() == before and not tree.of("complete")

    tree.fabric.run(main())
    assert puller.trouble == "each of 2 sources has sent a wrong shard"
    wrong = len([note for note in tree.of("wrong_shard") if note["node"] == "client0"])
    assert 4 <= wrong <= 40  # they are tried again, ever more rarely


def test_a_relay_that_drips_is_asked_for_the_rest_elsewhere(tmp_path: Path) -> None:
    """From the byte that it had reached: what came so far is kept."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)) * 4000)
    tree = Tree(
        HttpFabric(run_seed=1), virtual=False, clients=1, store=lambda name: DiskStore(tmp_path / name),
        piece_bytes=10_000, stall_s=1.0,
    )  # fmt: skip
    tree.relays[0].world.serve(TAMPERS["slow-drip"](tree.relays[0].server))

    async def main() -> float:
        tree.start()
        layout, files = layout_of(path, 100_000)
        started_s = tree.worlds["origin"].now()
        await tree.origin.publish(layout, files)
        assert await tree.all_have(1, patience_s=50.0)
        return tree.worlds["origin"].now() - started_s

    took_s = tree.fabric.run(main())
    assert {note["relay"] for note in tree.of("slow_relay")} == {"relay0"}
    assert took_s < 25.0  # 103 pieces at 3 s each, ten at a time, would take 30 s
    held = tree.clients[0].puller.known.held[1]
    assert (tmp_path / "client0" / held.label / path.name).read_bytes() == path.read_bytes()


def test_a_client_that_floods_is_refused_and_costs_the_others_little() -> None:
    times = {}
    for flooded in (False, True):
        tree = Tree(
            sim_fabric(run_seed=5), relays=1, clients=1, limits=ServingLimits(bytes_per_s=12.5e6, burst_bytes=2e6)
        )
        greedy = tree.fabric.node("greedy")
        refused: list[int] = []

        async def main(tree: Tree = tree, greedy: Any = greedy, refused: Any = refused, on: bool = flooded) -> float:
            await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
            relay = tree.relays[0]
            relay.world.spawn(relay.run(), "relay")
            while not (relay.puller.hoard and relay.puller.hoard.complete):
                await greedy.sleep(0.01)

            async def attack() -> None:
                size = LAYOUT.shard_bytes
                refused.append(await flood(greedy, "relay0", relay.puller.hoard.header.id, size, 500))

            if on:
                greedy.spawn(attack(), "flood")
            started_s = greedy.now()
            tree.clients[0].world.spawn(tree.clients[0].run(), "client")
            assert await tree.all_have(0)
            await greedy.sleep(30.0)
            done_s: float = tree.of("complete")[0]["t_s"]
            return done_s - started_s

        times[flooded] = tree.fabric.run(main())
    assert refused and refused[0] >= 500 - 20 - 16  # a burst of twenty shards, and 16 transfers at once
    assert times[True] < 3 * times[False] + 0.05


def test_a_complaint_that_nobody_signed_is_refused() -> None:
    tree = Tree(sim_fabric(run_seed=6), relays=1, clients=1)
    signer = Identity.from_seed(1, "somebody")

    async def main() -> None:
        world = tree.worlds["client0"]
        said = Complaint("relay0", "0" * 64, 3, b"x" * 32, signer.public_key)
        with pytest.raises(Refused, match="not signed"):
            await world.call("origin", Complaint("relay0", "0" * 64, 4, b"", signer.public_key, b"y" * 64), 10.0)
        signature = signer.sign(complaint_bytes(said))
        signed = Complaint(said.relay, said.header_id, said.index, said.received_sha256, said.by, signature)
        assert await world.call("relay0", signed, 10.0) == Ok()  # passed on
        assert await world.call("origin", signed, 10.0) == Ok()

    tree.fabric.run(main())
    assert tree.origin.complaints == {"relay0": {signer.public_key}}  # said twice, counted once


def test_a_complaint_that_cannot_be_passed_on_does_not_end_the_relay() -> None:
    tree = Tree(sim_fabric(run_seed=6), relays=1, clients=1)
    signer = Identity.from_seed(1, "somebody")

    async def main() -> None:
        tree.fabric.kill("origin")
        with pytest.raises(Refused, match="could not be passed on"):
            await tree.worlds["client0"].call("relay0", signed_complaint(signer, "relay0", "0" * 64, 3, b""), 200.0)

    tree.fabric.run(main())


@pytest.mark.parametrize("addresses", [1, 9])
def test_made_up_names_and_many_addresses_hold_few_versions_back(addresses: int) -> None:
    """Every version is asked for under a new name, from one address or from many: the disk does not fill up."""
    tree = Tree(sim_fabric(run_seed=7), relays=1, clients=1, keep=2)
    relay, held = tree.relays[0], []

    async def main() -> None:
        relay.world.spawn(relay.run(), "relay")
        for version in range(9):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            while version not in relay.puller.known.held:
                await tree.worlds["client0"].sleep(0.01)
            relay.server.address_of_caller = lambda at=version % addresses: f"10.0.0.{at}"
            name, hoards = tree.fabric.node(f"name{version}"), list(relay.server.hoards.values())
            for hoard in reversed(hoards):
                await flood(name, "relay0", hoard.header.id, LAYOUT.shard_bytes, 1)
            held.append(len(hoards))

    tree.fabric.run(main())
    assert max(held) == 2 + (2 if addresses == 1 else 3), held


def test_a_version_is_not_removed_under_a_client_that_is_at_work_on_it() -> None:
    tree = Tree(sim_fabric(run_seed=7), relays=1, clients=1, keep=2)
    relay = tree.relays[0]

    async def main() -> None:
        relay.world.spawn(relay.run(), "relay")
        world = tree.worlds["client0"]
        for version in range(5):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            while version not in relay.puller.known.held:
                await world.sleep(0.01)
            if version == 0:
                await flood(world, "relay0", relay.server.hoards[0].header.id, LAYOUT.shard_bytes, 1)
            if version == 3:
                assert sorted(relay.server.hoards) == [0, 2, 3]
                await world.sleep(120.0)  # the lease ends
        assert sorted(relay.server.hoards) == [3, 4]

    tree.fabric.run(main())
