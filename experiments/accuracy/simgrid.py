"""Do the simulator's completion times equal SimGrid's on the stored reference cases?

    python -m experiments.accuracy.simgrid

Replays `tests/data/simgrid` (its README says how it was made) through `sim.network`: the *pure* cases with plain
max-min fairness, the *lv08* cases with the TCP model of that name. Leaves `results/simgrid.md`.
"""

from __future__ import annotations

import gzip
import heapq
import json
import statistics
import time
from pathlib import Path
from typing import Any

from sim.flows import warm_up
from sim.network import Network
from sim.transport import FAIR, LV08

HERE = Path(__file__).resolve().parent
DATA = HERE.parents[1] / "tests" / "data" / "simgrid"
CASES = ("star_1000_pure", "star_10000_pure", "mesh_2000_pure", "mesh_20000_pure", "star_1000_lv08", "mesh_2000_lv08")
MBIT = 1e6 / 8
UNUSED_MBIT_S = 1.0  # of a line that no transfer crosses

Flow = tuple[float, int, int, float, float]  # start, source, target, bytes, SimGrid's finish


def star(case: dict[str, Any]) -> tuple[Network, list[Flow]]:
    network = Network(transport=LV08 if case["model"] == "lv08" else FAIR)
    relays = [
        network.add_node(uplink_mbit_s=capacity / MBIT, downlink_mbit_s=UNUSED_MBIT_S)
        for capacity in case["relay_bytes_per_s"]
    ]
    clients = [
        network.add_node(uplink_mbit_s=UNUSED_MBIT_S, downlink_mbit_s=capacity / MBIT, latency_ms=latency_s * 1e3)
        for capacity, latency_s in zip(case["client_bytes_per_s"], case["client_latency_s"], strict=True)
    ]
    pairs = zip(case["relay_of_client"], clients, case["finish_s"], strict=True)
    return network, [(0.0, relays[relay], client, case["size"], finish_s) for relay, client, finish_s in pairs]


def mesh(case: dict[str, Any]) -> tuple[Network, list[Flow]]:
    names = [str(r) for r in range(len(case["trunk_bytes_per_s"]))]
    rtt_ms = {(a, b): 0.0 for a in names for b in names}
    network = Network(transport=LV08 if case["model"] == "lv08" else FAIR, regions=rtt_ms)
    for name, capacity in zip(names, case["trunk_bytes_per_s"], strict=True):
        network.add_trunk(name, out_mbit_s=capacity / MBIT, in_mbit_s=capacity / MBIT)
    columns = ("uplink_bytes_per_s", "downlink_bytes_per_s", "access_latency_s", "region_of_node")
    for up, down, latency_s, region in zip(*(case[column] for column in columns), strict=True):
        network.add_node(
            uplink_mbit_s=up / MBIT, downlink_mbit_s=down / MBIT, latency_ms=latency_s * 1e3, region=names[region]
        )
    return network, [(f["start_s"], f["source"], f["target"], f["bytes"], f["finish_s"]) for f in case["flows"]]


def errors(network: Network, flows: list[Flow]) -> list[float]:
    """Relative difference of every duration. In the lv08 model a flow takes its links after the latency."""
    engine = network.engine
    queue: list[tuple[float, int]] = []
    for number, (start_s, source, target, _, _) in enumerate(flows):
        heapq.heappush(queue, (start_s + network.path(source, target).one_way_latency_s, number))
    place: dict[int, int] = {}
    finish_s: dict[int, float] = {}
    while queue:
        now_s, number = heapq.heappop(queue)
        finish_s |= {place[flow]: at_s for flow, at_s in engine.advance(now_s)}
        _, source, target, size, _ = flows[number]
        path = network.path(source, target)
        bound = path.rate_bound_bytes_per_s
        flow = engine.start(now_s, path.links, size, weight=path.weight, rate_bound_bytes_per_s=bound)
        place[flow] = number
    finish_s |= {place[flow]: at_s for flow, at_s in engine.advance(1e9)}
    return [abs((finish_s[number] - f[0]) / (f[4] - f[0]) - 1) for number, f in enumerate(flows)]


def main() -> None:
    warm_up()
    lines = [
        "# Completion times against SimGrid 3.32",
        "",
        "    python -m experiments.accuracy.simgrid",
        "",
        "Relative difference of a transfer's duration.",
        "",
        "| case | transfers | largest | 99 of 100 below | median | here, s of CPU |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name in CASES:
        case = json.loads(gzip.decompress((DATA / f"{name}.json.gz").read_bytes()))
        network, flows = star(case) if name.startswith("star") else mesh(case)
        started_s = time.process_time()
        found = sorted(errors(network, flows))
        took_s = time.process_time() - started_s
        lines.append(
            f"| {name} | {len(flows)} | {found[-1]:.1e} | {found[int(0.99 * len(found))]:.1e} | "
            f"{statistics.median(found):.1e} | {took_s:.2f} |"
        )
        print(lines[-1], flush=True)
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / "simgrid.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
