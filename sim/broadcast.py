"""A broadcast in virtual time: an origin, relays and clients of `refimpl/shardcast`, on the scenario's network.

The checkpoint is virtual (sizes and content ids), so 62 GB to a hundred clients cost no memory, and a changed shard is
still caught. The run ends when every client has every version, or the scenario's time is up.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Coroutine
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from refimpl.identity import Identity, verify
from refimpl.shardcast.client import Client
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.origin import Origin, virtual_shards
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import MemoryStore
from sim.carrier import FlowCarrier
from sim.fabric import build, journal_for, random_lives
from sim.hardware import find_device
from sim.life import Life
from sim.progress import Progress
from sim.record import EventLog, read_events
from sim.scenario import BroadcastPart, Member, Scenario
from sim.world import SimFabric, SimWorld

RUN_ID = "run"
UNLIMITED = ServingLimits(bytes_per_s=1e15, burst_bytes=1e15, transfers_per_client=10_000, transfers=1_000_000)


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


def run_broadcast(
    scenario: Scenario, *, name: str, seed: int, runs: Path, say: Callable[[str], None], progress: bool = True
) -> tuple[Path, dict[str, Any]]:
    """Run it and leave `runs/NAME-SEED/` behind. Returns the folder and the summary."""
    assert scenario.broadcast is not None
    started_s = time.monotonic()
    folder = runs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    log = EventLog(folder / "events.jsonl")
    try:
        fabric, network = build(scenario, seed, log)
        _drive(scenario, scenario.broadcast, name, seed, fabric, network, log, progress)
    finally:
        log.close()
    carrier = cast(FlowCarrier, fabric.carrier)
    figures = summarise(folder, scenario, name, seed, virtual_s=fabric.now_s(), bytes_sent=carrier.bytes_sent)
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    _plot(folder / "completions.png", figures)
    for version in figures["versions"]:
        say(describe(version, figures))
    say(f"{figures['events']} events, {time.monotonic() - started_s:.0f} s: {folder}/")
    return folder, figures


def _drive(
    scenario: Scenario,
    part: BroadcastPart,
    name: str,
    seed: int,
    fabric: SimFabric,
    network: Any,
    log: EventLog,
    progress: bool,
) -> None:
    members = {member.name: member for member in scenario.members()}
    tree = Tree(scenario)
    identity = Identity.from_seed(seed, tree.origin)
    desk = fabric.node("(the run)")
    all_done = desk.signal()
    clients = [member.name for member in members.values() if member.group.role == "client"]
    left = {(client, version) for client in clients for version in range(part.versions)}
    counts = {"up": 0, "complete": 0}
    total = len(left)

    def count(event: dict[str, Any]) -> None:
        if event["kind"] == "complete" and event["node"] in members:
            left.discard((event["node"], event["version"]))
            # a version that was overtaken is not waited for: who has a newer one is done with it
            left.difference_update({(event["node"], v) for v in range(event["version"])})
            counts["complete"] = total - len(left)
            if not left:
                all_done.set()
        elif event["kind"] in ("up", "down"):
            counts["up"] += 1 if event["kind"] == "up" else -1

    log.listen(count)

    def start(world: SimWorld, disk_kept: bool) -> None:
        member = members[world.name]
        world.spawn(_seat(world, member, tree, part, identity), member.group.role)

    async def main() -> None:
        prices = {member.name: find_device(member.group.device).price for member in members.values()}
        life = Life(fabric, network, prices=prices, start=start)
        faults = [(f, [n for named in f.nodes for n in scenario.struck_by(named)]) for f in scenario.faults]
        life.begin(list(members), random_lives(scenario, seed), faults)
        await all_done.wait(scenario.duration_s)

    shown = Progress(name, fabric.now_s, lambda: counts["complete"] / total, counts) if progress else nullcontext()
    with shown:
        fabric.run(main(), node=desk.name)


def _seat(
    world: SimWorld, member: Member, tree: Tree, part: BroadcastPart, identity: Identity
) -> Coroutine[Any, Any, None]:
    """The coroutine that is this node's part."""
    journal = journal_for(world)
    pulling = PullerConfig(
        sources=tree.sources[member.name],
        origin=tree.origin,
        origin_key=identity.public_key,
        policy=part.policy,
        connections=part.connections,
    )
    serving = ServingConfig(below=tree.below[member.name], limits=UNLIMITED, virtual=True)
    if member.group.role == "origin":
        return _publish(Origin(world, RUN_ID, identity, verify, serving, MemoryStore(), journal), world, part)
    if member.group.role == "relay":
        relay = Relay(world, pulling, serving, MemoryStore(), verify, journal)
        relay.serve()
        return relay.run()
    client = Client(world, pulling, MemoryStore(), verify, last_version=part.versions - 1, journal=journal)
    client.serve()
    return client.run()


async def _publish(origin: Origin, world: SimWorld, part: BroadcastPart) -> None:
    origin.serve()
    for version in range(part.versions):
        size_bytes, shard_bytes = round(part.size_gb * 1e9), round(part.shard_mb * 1e6)
        layout = Layout(names=("model.safetensors",), sizes_bytes=(size_bytes,), shard_bytes=shard_bytes)
        await origin.publish(layout, virtual_shards(f"version {version}", layout))
        await world.sleep(part.interval_s)


def summarise(
    folder: Path, scenario: Scenario, name: str, seed: int, *, virtual_s: float, bytes_sent: int
) -> dict[str, Any]:
    """Figures of the run, from its events."""
    part = scenario.broadcast
    assert part is not None
    began_s: dict[int, float] = {}
    ended_s: dict[int, dict[str, float]] = {}
    wrong: list[dict[str, Any]] = []
    events = 0
    for event in read_events(folder / "events.jsonl"):
        events += 1
        if event["kind"] == "publishing":
            began_s.setdefault(event["version"], event["t_ns"] / 1e9)
        elif event["kind"] == "complete":
            ended_s.setdefault(event["version"], {})[event["node"]] = event["t_ns"] / 1e9
        elif event["kind"] == "wrong_shard":
            wrong.append({"by": event["node"], "relay": event["relay"], "index": event["index"]})
    clients = [member for member in scenario.members() if member.group.role == "client"]
    versions = []
    for version, start_s in sorted(began_s.items()):
        times = sorted(end - start_s for end in ended_s.get(version, {}).values())
        versions.append(
            {
                "version": version,
                "complete": len(times),
                "clients": len(clients),
                "first_s": times[0] if times else None,
                "median_s": times[len(times) // 2] if times else None,
                "last_s": times[-1] if times else None,
                "times_s": times,
            }
        )
    return {
        "scenario": name,
        "seed": seed,
        "title": scenario.title,
        "shows": scenario.shows,
        "virtual_s": virtual_s,
        "nodes": sum(1 for _ in scenario.members()),
        "size_gb": part.size_gb,
        "bound_s": bound_s(scenario),
        "bytes_sent": bytes_sent,
        "wrong_shards": wrong,
        "versions": versions,
        **{key: versions[-1][key] if versions else None for key in ("first_s", "median_s", "last_s")},  # of the newest
        "events": events,
        "events_sha256": hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest(),
    }


def bound_s(scenario: Scenario) -> float:
    """No schedule brings the median client its version sooner: its own downlink, the origin's uplink once, and all that
    relays (or the origin, without relays) can send together, shared by all clients."""
    part = scenario.broadcast
    assert part is not None
    members = list(scenario.members())
    bits = 8 * part.size_gb * 1e9
    relays = [m.group.uplink_mbit_s for m in members if m.group.role == "relay"]
    origin = [m.group.uplink_mbit_s for m in members if m.group.role == "origin"]
    downs = sorted(m.group.downlink_mbit_s for m in members if m.group.role == "client")
    senders = sum(relays) or sum(origin)
    return max(
        bits / (downs[(len(downs) - 1) // 2] * 1e6), bits / (sum(origin) * 1e6), bits * len(downs) / 2 / (senders * 1e6)
    )


def describe(version: dict[str, Any], figures: dict[str, Any]) -> str:
    """One version's completions in a sentence."""
    head = f"version {version['version']}: {version['complete']} of {version['clients']} clients have it"
    if not version["complete"]:
        return head
    first, median, last = (version[key] / 60 for key in ("first_s", "median_s", "last_s"))
    rate = 8 * figures["size_gb"] * 1e3 / version["median_s"]
    return (
        f"{head}; first after {first:.2f} min, median {median:.2f} min ({rate:.0f} Mbit/s), last {last:.2f} min; "
        f"bandwidth-bound optimum of the median {figures['bound_s'] / 60:.2f} min"
    )


def _plot(path: Path, figures: dict[str, Any]) -> None:
    """Share of clients that have each version, over minutes since it began."""
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for version in figures["versions"]:
        times = [0.0, *(t / 60 for t in version["times_s"])]
        shares = [100 * i / max(1, version["clients"]) for i in range(len(times))]
        axis.step(times, shares, where="post", label=f"version {version['version']}")
    axis.axvline(figures["bound_s"] / 60, color="#222", ls="--", lw=1, label="bandwidth-bound optimum (median)")
    axis.set_xlabel("minutes since the origin began to cut the version")
    axis.set_ylabel("clients that have it, whole and verified (%)")
    axis.set_ylim(0, 103)
    axis.set_xlim(left=0)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    axis.set_title(f"{figures['scenario']}: {figures['size_gb']:g} GB to {figures['versions'][0]['clients']} clients")
    figure.savefig(path, dpi=110)
    plt.close(figure)
