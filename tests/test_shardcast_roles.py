"""Origin, relays and clients on simulated nodes and over real sockets: whole, checked, by way of whoever is there."""

from __future__ import annotations

import hashlib
import os

import pytest

from refimpl.attacks.relays import SPOILS, TAMPERS
from refimpl.identity import Identity
from refimpl.messages import Blob
from refimpl.shardcast.choice import POLICIES
from refimpl.shardcast.disk import ShardMismatch
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Equivocation, Header, Manifest, ManifestError, Opening, Ref, ShardEntry
from refimpl.shardcast.messages import News
from refimpl.shardcast.origin import virtual_shards
from refimpl.shardcast.shelf import MemoryStore, digest
from refimpl.worlds.http import HttpFabric
from tests.shardcast_tree import KEY, LAYOUT, Tree
from tests.worlds import sim_fabric


@pytest.mark.parametrize("policy", POLICIES)
def test_every_client_gets_every_version_whole(policy: str) -> None:
    tree = Tree(sim_fabric(run_seed=1), policy=policy)

    async def main() -> None:
        tree.start()
        for version in range(3):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            assert await tree.all_have(version)

    tree.fabric.run(main())
    for client in tree.clients:
        hoard = client.puller.hoard
        assert hoard is not None and hoard.complete and hoard.header.version == 2
        assert hoard.shelf.read(7, 0, 1 << 30).content_id == virtual_shards("content 2", LAYOUT)(7).content_id
    assert not tree.of("wrong_shard") and not tree.of("empty_relay")


def test_shards_travel_while_later_ones_are_still_being_cut() -> None:
    """No shard waits for the version: a client holds the first before the origin has cut the last."""
    tree = Tree(sim_fabric(run_seed=1))
    seen: list[int] = []
    plain = virtual_shards("content", LAYOUT)

    def watched(index: int) -> Blob:
        seen.append(len(tree.clients[0].puller.hoard.here) if tree.clients[0].puller.hoard else 0)
        return plain(index)

    async def main() -> None:
        tree.start()
        tree.worlds["origin"].price = lambda work: 0.2  # cutting a shard takes 0.2 s
        await tree.origin.publish(LAYOUT, watched)
        assert await tree.all_have(0)

    tree.fabric.run(main())
    assert seen[0] == 0 and seen[-1] >= 5


@pytest.mark.parametrize("way", SPOILS)
def test_a_relay_that_spoils_shards_is_named_complained_of_and_routed_around(way: str) -> None:
    tree = Tree(sim_fabric(run_seed=3), spoil={0: way})

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
        assert await tree.all_have(0)

    tree.fabric.run(main())
    wrong = tree.of("wrong_shard")
    assert wrong and {note["relay"] for note in wrong} == {"relay0"}
    # named once by each client, then not asked again for this version; one per transfer that was under way already
    assert len(wrong) <= 2 * 10
    assert set(tree.origin.complaints) == {"relay0"}
    assert all(client.puller.hoard.complete for client in tree.clients if client.puller.hoard)


def test_one_live_relay_is_enough_and_a_dead_origin_takes_nothing_away() -> None:
    tree = Tree(sim_fabric(run_seed=4), relays=3)

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
        desk = tree.worlds["client0"]
        while not all(relay.puller.hoard and relay.puller.hoard.complete for relay in tree.relays):
            await desk.sleep(0.01)
        tree.fabric.kill("origin")
        tree.fabric.kill("relay0")
        tree.fabric.kill("relay1")
        until = desk.now() + 60
        while not all(0 in client.complete for client in tree.clients):
            assert desk.now() < until
            await desk.sleep(0.05)

    tree.fabric.run(main())


def test_what_another_key_signed_reaches_nobody() -> None:
    tree = Tree(sim_fabric(run_seed=5), origin_key=Identity.from_seed(1, "the real one").public_key)

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LAYOUT, virtual_shards("content", LAYOUT))
        assert not await tree.all_have(0, patience_s=5.0)

    tree.fabric.run(main())
    assert all(relay.puller.hoard is None for relay in tree.relays)
    assert "no_news" in {kind for _, kind, _ in tree.notes}


@pytest.mark.parametrize("seed", range(6))
def test_no_more_than_a_stale_answer_from_some_sources_is_not_the_end_of_asking(seed: int) -> None:
    """Two of three relays know the first version only: it does not pass for the newest, whoever is asked first."""
    tree = Tree(sim_fabric(run_seed=seed), relays=3, clients=1)
    for relay in tree.relays[:2]:
        relay.world.serve(TAMPERS["stale-version"](relay.server))
    client = tree.clients.pop()

    async def main() -> None:
        tree.start()
        for version in (0, 1):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            while not all(version in relay.puller.known.held for relay in tree.relays):
                await client.world.sleep(0.01)
        client.world.spawn(client.run(), "client")
        while not (client.puller.asked and client.puller.known.up_to_date):
            await client.world.sleep(0.001)

    tree.fabric.run(main())
    assert client.puller.known.have == 1
    assert client.puller.answers == {"relay0": 0, "relay1": 0, "relay2": 1}


def test_only_the_origins_own_contradictions_are_disputed() -> None:
    """A relay that answers with an older manifest, or an increment's, is no more than wrong."""
    tree = Tree(sim_fabric(run_seed=7), relays=1, clients=1, increments=1)
    known, verdicts = tree.clients[0].puller.known, []

    async def main() -> None:
        tree.start()
        for version in (0, 1):
            await tree.origin.publish(LAYOUT, virtual_shards(f"content {version}", LAYOUT))
            assert await tree.all_have(version)

    tree.fabric.run(main())
    held = tree.origin.server.hoards
    (increment,) = (hoard.manifest for hoard in tree.origin.server.increments.values())
    same = Manifest.signed(held[1].header, [b"x" * 32] * LAYOUT.shard_count, KEY.sign).encode()
    after = Header(run_id="run", version=2, layout=LAYOUT, origin=KEY.public_key, previous=Ref(1, "0" * 64))
    for news in (
        News(1, b"", (), held[0].manifest),
        News(1, b"", (), increment),
        News(2, b"", (), increment),
        News(1, b"", (), same),
        News(1, b"", (ShardEntry.signed(held[1].header, 3, b"y" * 32, KEY.sign).encode(),), b""),
        News(2, Opening.signed(after, KEY.sign).encode(), (), b""),
    ):
        with pytest.raises(ManifestError) as caught:
            known.learn(news)
        verdicts.append(caught.type is Equivocation)
    assert verdicts == [False, False, False, True, True, True]
    assert known.newest is not None and known.newest.header.version == 1


def test_a_newer_version_is_taken_and_the_unfinished_older_one_abandoned() -> None:
    tree = Tree(sim_fabric(run_seed=6))
    slow = Layout(names=("model.safetensors",), sizes_bytes=(500_000_000,), shard_bytes=5_000_000)

    async def main() -> None:
        tree.start()
        await tree.origin.publish(slow, virtual_shards("old", slow))
        await tree.worlds["origin"].sleep(1.0)  # of the 4 s that it takes
        await tree.origin.publish(LAYOUT, virtual_shards("new", LAYOUT))
        assert await tree.all_have(1)

    tree.fabric.run(main())
    assert {note["node"] for note in tree.of("abandoned")} >= {"client0", "client1"}


def test_real_bytes_over_real_sockets_arrive_as_they_were() -> None:
    content = os.urandom(LAYOUT.size_bytes)

    def read(index: int) -> Blob:
        piece = content[index * LAYOUT.shard_bytes : (index + 1) * LAYOUT.shard_bytes]
        return Blob(len(piece), "", piece)

    tree = Tree(HttpFabric(run_seed=1), virtual=False, spoil={1: "flipped-bit"})

    async def main() -> None:
        tree.start()
        await tree.origin.publish(LAYOUT, read)
        assert await tree.all_have(0)

    tree.fabric.run(main())
    for client in tree.clients:
        hoard = client.puller.hoard
        assert hoard is not None
        whole = b"".join(bytes(hoard.shelf.read(i, 0, 1 << 30).data or b"") for i in range(LAYOUT.shard_count))
        assert hashlib.sha256(whole).digest() == hashlib.sha256(content).digest()
    assert {note["relay"] for note in tree.of("wrong_shard")} <= {"relay1"}


def test_two_transfers_of_one_shard_do_not_blame_the_honest_relay() -> None:
    """The wrong bytes came first, the right ones before they were checked: the first source is named."""
    layout = Layout(names=("x",), sizes_bytes=(10,), shard_bytes=10)
    shelf = MemoryStore().begin(Header(run_id="r", version=1, layout=layout, origin="0" * 64))
    good, bad = Blob(10, "", b"0123456789"), Blob(10, "", b"0123456780")
    assert shelf.write(0, 0, bad, "liar") == 10 and shelf.write(0, 0, good, "honest") == 0
    with pytest.raises(ShardMismatch) as caught:
        shelf.check(0, digest(good))
    assert caught.value.culprit == "liar"
    assert shelf.write(0, 0, good, "honest") == 10
    shelf.check(0, digest(good))
    assert shelf.has(0)
