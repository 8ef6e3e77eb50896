"""Port calls per second, end to end (call, network, handler, reply), with ten thousand nodes in virtual time.

python experiments/bench/calls.py [--nodes 10000] [--calls 10]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from refimpl.messages import Heartbeat, Message, Ok
from sim.carrier import FlowCarrier
from sim.network import Network
from sim.world import SimFabric

KEY = "ab" * 32


def measure(nodes: int, calls: int) -> tuple[float, float]:
    """(calls per second, kernel events per call): every node calls one hub about once a virtual minute."""
    network = Network(regions="p2p", jitter_ms=5.0)
    fabric = SimFabric(run_seed=1, carrier=lambda kernel: FlowCarrier(kernel, network, 1))
    hub = fabric.node("hub")
    network.add_node(uplink_mbit_s=10_000.0, downlink_mbit_s=10_000.0, latency_ms=1.0, region="europe")

    async def answer(source: str, message: Any) -> Message:
        return Ok()

    hub.serve({Heartbeat: answer})
    worlds = []
    for i in range(nodes):
        worlds.append(fabric.node(f"node {i}"))
        network.add_node(uplink_mbit_s=20.0, downlink_mbit_s=50.0, latency_ms=12.0, region="north-america")

    async def beat(world: Any) -> None:
        await world.sleep(60 * float(world.rng.random()))
        for done in range(calls):
            await world.call("hub", Heartbeat(KEY, done), 30.0)
            await world.sleep(60.0)

    async def main() -> None:
        await hub.gather(*(beat(world) for world in worlds))

    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    started = time.perf_counter()
    fabric.run(main())
    return nodes * calls / (time.perf_counter() - started), fabric.kernel.events_handled / (nodes * calls)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--calls", type=int, default=10)
    options = parser.parse_args()
    for _ in range(3):
        rate, events = measure(options.nodes, options.calls)
        print(f"{options.nodes} nodes: {rate:,.0f} calls/s, {events:.2f} kernel events a call", flush=True)
