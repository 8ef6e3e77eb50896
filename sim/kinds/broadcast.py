"""Why: SHARDCAST as a run: an origin, relays and clients of `refimpl/shardcast`, on the scenario's network.

The checkpoint is virtual (sizes and content ids), so 62 GB to a hundred clients cost no memory, and a changed shard is
still caught. The run ends when every client has the last version, or the scenario's time is up.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Coroutine, Mapping
from typing import Any

from refimpl.identity import Identity, verify
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
UNLIMITED = ServingLimits(bytes_per_s=1e15, burst_bytes=1e15, transfers_per_client=10_000, transfers=1_000_000)


def layout_of(part: BroadcastPart) -> Layout:
    """Of every version."""
    size_bytes, shard_bytes = round(part.size_gb * 1e9), round(part.shard_mb * 1e6)
    return Layout(names=("model.safetensors",), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes)


def content_of(version: int) -> str:
    """What a version is a checkpoint of."""
    return f"version {version}"


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
        need_room = room_unless(lambda: world.disk_full, member.name)
        store = MemoryStore(self.part.increment_share, need_room, workers=find_device(member.group.device).cores)
        if member.group.role == "origin":
            increments = 0 if self.part.increment_share is None else 1
            origin = Origin(world, RUN_ID, self.identity, verify, serving, store, journal, increments=increments)
            return self._publish(origin, stop)
        if member.group.role == "relay":
            return _relay(Relay(world, pulling, serving, store, verify, journal), stop)
        client = Client(world, pulling, store, verify, last_version=self.part.versions - 1, journal=journal)
        self.clients[member.name] = client
        client.serve()
        return client.run()

    async def _publish(self, origin: Origin, stop: Signal) -> None:
        origin.serve()
        layout = layout_of(self.part)
        for version in range(self.part.versions):
            if version:
                await stop.wait(self.part.interval_s)
            await origin.publish(layout, virtual_shards(content_of(version), layout))
        await stop.wait()

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


async def _relay(relay: Relay, stop: Signal) -> None:
    relay.serve()
    relay.world.spawn(relay.run(), "relay")
    await stop.wait()
    relay.stop()


def begin(scenario: Scenario, seed: int, model_path: str) -> Broadcast:
    """The broadcast of this scenario."""
    return Broadcast(scenario, seed)
