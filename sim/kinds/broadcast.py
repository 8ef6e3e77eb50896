"""Why: SHARDCAST as a run: an origin, relays and clients of `refimpl/shardcast`, on the scenario's network.

The checkpoint is virtual (sizes and content ids), so 62 GB to a hundred clients cost no memory, and a changed shard is
still caught. The run ends when every client has the last version, or the scenario's time is up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from refimpl.attacks.relays import SPOILS, TAMPERS
from refimpl.identity import Identity, verify
from refimpl.shardcast.branch import TreeConfig
from refimpl.shardcast.client import Client
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import MemoryStore, room_unless, virtual_shards
from refimpl.world import Signal
from sim.fabric import journal_for
from sim.hardware import find_device
from sim.kinds.broadcast_checks import BroadcastFacts, BroadcastView
from sim.kinds.broadcast_figures import BroadcastTally
from sim.scenario import BroadcastPart, Member, Scenario
from sim.watch import Watch
from sim.world import SimFabric, SimWorld

RUN_ID = "run"
NEIGHBOURS_MAX = 16
"""Relays that one relay may ask and measure."""
UNLIMITED = ServingLimits(bytes_per_s=1e15, burst_bytes=1e15, transfers_per_client=10_000, transfers=1_000_000)


def layout_of(part: BroadcastPart) -> Layout:
    """Of every version."""
    size_bytes, shard_bytes = round(part.size_gb * 1e9), round(part.shard_mb * 1e6)
    return Layout(names=("model.safetensors",), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes)


def content_of(version: int) -> str:
    """What a version is a checkpoint of."""
    return f"version {version}"


def newest_in(store: MemoryStore) -> int:
    """The newest version that is whole there; -1: none."""
    return max((manifest.version for manifest in store.found()), default=-1)


class Tree:
    """Who fetches from whom, by the scenario's groups."""

    def __init__(self, scenario: Scenario) -> None:
        members = list(scenario.members())
        self.origin = next(member.name for member in members if member.group.role == "origin")
        relays = [member.name for member in members if member.group.role == "relay"]
        self.sources: dict[str, tuple[str, ...]] = {}
        for member in members:
            named = [m.name for m in members if m.group.name in member.group.sources]
            default = relays if member.group.role == "client" and relays else [self.origin]
            self.sources[member.name] = tuple(named or default)
        self.below: dict[str, tuple[str, ...]] = {
            member.name: tuple(m.name for m in members if member.name in self.sources[m.name] and m.name != member.name)
            for member in members
        }


class Broadcast:
    """`sim.kinds.Play` of a broadcast."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.part, self.tree = scenario, scenario.weights, Tree(scenario)
        self.identity = Identity.from_seed(seed, self.tree.origin)
        self.counts: Counter[str] = Counter({"up": 0, "complete": 0})
        self.clients: dict[str, Client] = {}  # by node, of its present or last life
        self._stores: dict[str, MemoryStore] = {}  # what is on each node's disk
        self._roles = {member.name: member.group.role for member in scenario.members()}
        clients = [name for name, role in self._roles.items() if role == "client"]
        self._left = {(client, version) for client in clients for version in range(self.part.versions)}
        self._total = len(self._left)

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "complete":
            # a version that was overtaken is not waited for: who has a newer one is done with it
            self._left.difference_update({(event["node"], v) for v in range(event["version"] + 1)})
            self.counts["complete"] = self._total - len(self._left)
        elif event["kind"] in ("up", "down"):
            if event["kind"] == "up" and not event["disk_kept"]:
                self._stores.pop(event["node"], None)
            self.counts["up"] += 1 if event["kind"] == "up" else -1

    def share(self) -> float:
        return self.counts["complete"] / self._total

    def seat(self, member: Member, world: SimWorld, stop: Signal) -> Coroutine[Any, Any, None]:
        journal = journal_for(world)
        pulling = PullerConfig(
            sources=self.tree.sources[member.name],
            origin=self.tree.origin,
            origin_key=self.identity.public_key,
            policy=self.part.policy,
            connections=self.part.connections,
        )
        serving = ServingConfig(below=self.tree.below[member.name], limits=UNLIMITED, hold_s=1.0, virtual=True)
        store = self._store(member, world)
        tree = self._tree(member.name)
        if member.group.role == "origin":
            increments = 0 if self.part.increment_share is None else 1
            origin = Origin(
                world, RUN_ID, self.identity, verify, serving, store, journal, increments=increments, tree=tree
            )
            return self._publish(origin, store, stop)
        if member.group.role == "relay":
            spoil = SPOILS.get(member.group.behaviour)
            relay = Relay(world, pulling, serving, store, verify, journal, spoil, tree=tree)
            return self._relay(relay, store, member.group.behaviour, stop)
        client = Client(world, pulling, store, verify, last_version=self.part.versions - 1, journal=journal)
        self.clients[member.name] = client
        client.serve()
        return self._pull(client, store)

    def _store(self, member: Member, world: SimWorld) -> MemoryStore:
        """The node's disk, with what is on it from an earlier life."""
        need_room = room_unless(lambda: world.disk_full, member.name)
        fresh = MemoryStore(self.part.increment_share, workers=find_device(member.group.device).cores)
        store = self._stores.setdefault(member.name, fresh)
        store.reopen(need_room)
        return store

    def _tree(self, name: str) -> TreeConfig | None:
        """Relays look for better parents where the scenario says so; the neighbours of each are those that follow it
        in the file, in a ring."""
        if self.part.reparent_s is None:
            return None
        relays = [node for node, role in self._roles.items() if role == "relay"]
        place = relays.index(name) + 1 if name in relays else 0
        ring = [node for node in (*relays[place:], *relays[:place]) if node != name]
        every_s = self.part.reparent_s
        return TreeConfig(
            neighbours=tuple(ring[:NEIGHBOURS_MAX]), every_s=every_s, slots=self.part.relay_slots, epoch_s=3 * every_s
        )

    async def _publish(self, origin: Origin, store: MemoryStore, stop: Signal) -> None:
        origin.serve()
        origin.restore(store.found())
        layout = layout_of(self.part)
        while (newest := newest_in(store)) < self.part.versions - 1:
            if newest >= 0:
                await stop.wait(self.part.interval_s)
            await origin.publish(layout, virtual_shards(content_of(store.next_version), layout))
        await stop.wait()

    async def _pull(self, client: Client, store: MemoryStore) -> None:
        client.restore(store.found())
        if newest_in(store) < self.part.versions - 1:  # else it died as it had all
            await client.run()

    async def _relay(self, relay: Relay, store: MemoryStore, behaviour: str, stop: Signal) -> None:
        relay.serve()
        if behaviour in TAMPERS:
            relay.world.serve(TAMPERS[behaviour](relay.server))
        relay.restore(store.found())
        relay.world.spawn(relay.run(), "relay")
        await stop.wait()
        relay.stop()

    def view(self, fabric: SimFabric, watch: Watch) -> BroadcastView:
        services = {name for name, role in self._roles.items() if role == "origin"}
        layout = layout_of(self.part)
        return BroadcastView(
            fabric=fabric,
            facts=BroadcastFacts(services=services),
            clients=self.clients,
            names=tuple(name for name, role in self._roles.items() if role == "client"),
            cut=lambda version: virtual_shards(content_of(version), layout),
        )

    def tally(self, name: str) -> BroadcastTally:
        return BroadcastTally(self.scenario, name)

    def agreed(self) -> dict[str, Any]:
        return {**self.part.model_dump(mode="json"), "layout": dataclasses.asdict(layout_of(self.part))}


def begin(scenario: Scenario, seed: int, model_path: str) -> Broadcast:
    """The broadcast of this scenario."""
    return Broadcast(scenario, seed)
