"""Do the same roles on the same tree take the same time for real as in the simulator?

One origin, two relays, eight clients. For real: HTTP over sockets, lines shaped to the given rates, files on disk. In
the simulator: the same scenario, virtual bytes. Median and last completion are compared; the aim is 10 %.

    python experiments/shardcast/real_vs_simulated.py [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from refimpl.identity import Identity, verify
from refimpl.shardcast.client import Client
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.limits import ServingLimits
from refimpl.shardcast.origin import Origin
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.worlds.asyncio_node import Line
from refimpl.worlds.http import HttpFabric
from sim.run import run_scenario
from sim.scenario import check_raw

CLIENTS, RELAYS = 8, 2
CASES: dict[str, dict[str, float]] = {
    # Mbit/s: what holds the clients up is their own line, then the relays' lines, then the origin's
    "clients' lines": {"origin": 20, "relay": 40, "client": 4, "size_mb": 6},
    "relays' lines": {"origin": 20, "relay": 12, "client": 8, "size_mb": 6},
    "origin's line": {"origin": 6, "relay": 40, "client": 8, "size_mb": 6},
}
SHARD_MB, LATENCY_MS, CONNECTIONS = 0.125, 10.0, 4
OPEN = ServingLimits(bytes_per_s=1e12, burst_bytes=1e12, transfers_per_client=1000)


def for_real(case: dict[str, float], seed: int, folder: Path) -> list[float]:
    """Seconds from the beginning of the broadcast to each client's completion, sorted."""
    content = folder / "model.bin"
    content.write_bytes(os.urandom(round(case["size_mb"] * 1e6)))
    fabric, key = HttpFabric(run_seed=seed), Identity.from_seed(seed, "origin")
    relays, clients = [f"relay-{i}" for i in range(RELAYS)], [f"client-{i}" for i in range(CLIENTS)]
    ended: dict[str, float] = {}

    def node(name: str, rate: float) -> Any:
        return fabric.node(name, Line(uplink_mbit_s=rate, downlink_mbit_s=rate, latency_ms=LATENCY_MS))

    def serving(below: list[str]) -> ServingConfig:
        return ServingConfig(below=tuple(below), limits=OPEN, hold_s=1.0)

    def pulling(sources: list[str]) -> PullerConfig:
        return PullerConfig(
            sources=tuple(sources), origin="origin", origin_key=key.public_key, connections=CONNECTIONS,
            piece_bytes=round(SHARD_MB * 1e6),
        )  # fmt: skip

    origin = Origin(node("origin", case["origin"]), "run", key, verify, serving(relays), DiskStore(folder / "origin"))
    origin.serve()
    roles: list[Any] = []
    for name in relays:
        world = node(name, case["relay"])
        relay = Relay(world, pulling(["origin"]), serving(clients), DiskStore(folder / name), verify)
        relay.serve()
        roles.append(relay)
    for name in clients:
        world = node(name, case["client"])

        def complete(manifest: Any, name: str = name, world: Any = world) -> None:
            ended[name] = world.now()

        client = Client(
            world, pulling(relays), DiskStore(folder / name), verify, last_version=1, on_version=complete
        )  # fmt: skip
        client.serve()
        roles.append(client)

    async def main() -> list[float]:
        for role in roles:
            role.world.spawn(role.run(), "pull")
        desk = roles[0].world
        await desk.sleep(1.0)
        started_s = desk.now()
        await origin.publish(*layout_of(content, round(SHARD_MB * 1e6)))
        while len(ended) < CLIENTS:
            await desk.sleep(0.05)
        return sorted(end - started_s for end in ended.values())

    times: list[float] = fabric.run(main())
    for name in clients:
        (version,) = (folder / name).glob("v*")
        assert (version / "model.bin").read_bytes() == content.read_bytes(), f"{name} has other bytes"
    return times


def simulated(case: dict[str, float], seed: int, folder: Path) -> list[float]:
    def group(name: str, role: str, count: int, rate: float) -> dict[str, Any]:
        return {
            "name": name, "role": role, "count": count, "device": "RTX 4090", "latency_ms": LATENCY_MS,
            "uplink_mbit_s": rate, "downlink_mbit_s": rate,
        }  # fmt: skip

    raw = {
        "title": "real against simulated", "shows": "the same tree, simulated", "seed": seed, "duration_s": 600.0,
        "broadcast": {"size_gb": case["size_mb"] / 1e3, "shard_mb": SHARD_MB, "connections": CONNECTIONS},
        "nodes": [
            group("origin", "origin", 1, case["origin"]),
            group("relay", "relay", RELAYS, case["relay"]),
            group("client", "client", CLIENTS, case["client"]),
        ],
    }  # fmt: skip
    scenario = check_raw(raw, "real-vs-simulated")
    result = run_scenario(
        scenario, name="real-vs-simulated", seed=seed, model_path="calibrated", runs=folder, say=lambda line: None,
        trace=False, progress=False,
    )  # fmt: skip
    times: list[float] = result.figures["versions"][0]["times_s"]
    return times


def compared(real_s: float, simulated_s: float) -> str:
    return f"{real_s:.2f} | {simulated_s:.2f} | {100 * (simulated_s / real_s - 1):+.1f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder for the table and the figures")
    options = parser.parse_args()
    rows, raw = [], []
    for what, case in CASES.items():
        for seed in range(1, options.seeds + 1):
            with tempfile.TemporaryDirectory() as made:
                real = for_real(case, seed, Path(made))
            with tempfile.TemporaryDirectory() as made:
                virtual = simulated(case, seed, Path(made))
            raw.append(
                {"held up by": what, "seed": seed, "real_s": real, "simulated_s": virtual, "load": os.getloadavg()}
            )
            medians = statistics.median(real), statistics.median(virtual)
            rows.append(f"| {what} | {seed} | {compared(*medians)} | {compared(real[-1], virtual[-1])} |")
            print(rows[-1], flush=True)
            time.sleep(0.5)
    table = "\n".join(
        [
            "# The same tree for real and simulated",
            "",
            f"One origin, {RELAYS} relays, {CLIENTS} clients; shards of {SHARD_MB} MB, {LATENCY_MS:g} ms on each line, "
            f"{CONNECTIONS} transfers at once; HTTP over shaped lines, files on disk, against the simulator.",
            "",
            "| held up by | seed | median, real (s) | simulated | | last, real (s) | simulated | |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
            *rows,
        ]
    )
    print(table)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "real_vs_simulated.md").write_text(table + "\n")
        (options.out / "real_vs_simulated.json").write_text(json.dumps(raw, indent=2) + "\n")


if __name__ == "__main__":
    main()
