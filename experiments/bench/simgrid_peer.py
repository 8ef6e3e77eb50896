"""Why: the flow engine's times mean something beside those of a simulator that many trust; this runs SimGrid on a case.

    /usr/bin/python3 experiments/bench/simgrid_peer.py CASE.json OUT.json

Runs under the interpreter that has SimGrid's binding (Debian: `apt-get install python3-simgrid`), without any of this
project's packages. CASE.json comes from `flows.py`: links (bytes/s) and transfers (start, source, target, bytes, path),
the source's own link first on the path, the target's own last. Every node hangs on a star whose centre routes for it;
regions are stars of their own, joined by routes over trunk links. OUT.json: finish times, and what the run took.
"""

import json
import sys
import time
from pathlib import Path

import simgrid
from simgrid import Actor, Comm, Engine, LinkInRoute, NetZone, this_actor

PURE = (
    "network/model:CM02",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
    "network/crosstraffic:0",
)


def add_link(zone: NetZone, name: str, capacity: float) -> LinkInRoute:
    link = zone.create_link(name, capacity)
    link.set_latency(0.0)
    link.seal()
    return LinkInRoute(link)


def build(engine: Engine, case: dict) -> list:
    """Hosts by node number. Node n has links 'up'[n] and 'down'[n] and lies in region 'region'[n]."""
    root = NetZone.create_full_zone("root")
    hosts: list = [None] * len(case["region"])
    zones, gates = [], []
    for r in range(case["regions"]):
        zone = NetZone.create_star_zone(f"region{r}")
        zone.set_parent(root)
        gate = zone.create_router(f"gate{r}")
        zones.append(zone)
        gates.append(gate)
    for n, r in enumerate(case["region"]):
        host = zones[r].create_host(f"node{n}", 1e9)
        up = add_link(zones[r], f"up{n}", case["links"][case["up"][n]])
        down = add_link(zones[r], f"down{n}", case["links"][case["down"][n]])
        zones[r].add_route(host.netpoint, None, None, None, [up], False)
        zones[r].add_route(None, host.netpoint, None, None, [down], False)
        hosts[n] = host
    out = [add_link(root, f"out{r}", case["links"][link]) for r, link in enumerate(case["out"])]
    into = [add_link(root, f"in{r}", case["links"][link]) for r, link in enumerate(case["in"])]
    for a, zone in enumerate(zones):
        for b, other in enumerate(zones):
            if a != b:
                root.add_route(zone.netpoint, other.netpoint, gates[a], gates[b], [out[a], into[b]], False)
    for zone in zones:
        zone.seal()
    root.seal()
    return hosts


def main() -> None:
    case = json.loads(Path(sys.argv[1]).read_text())
    engine = Engine(["peer", "--log=root.thresh:error", *(f"--cfg={option}" for option in PURE)])
    hosts = build(engine, case)
    transfers = case["transfers"]
    finish_s = [0.0] * len(transfers)

    def sender() -> None:
        comms = []
        for start_s, source, target, size, _ in transfers:
            if start_s > engine.clock:
                this_actor.sleep_until(start_s)
            comms.append(Comm.sendto_async(hosts[source], hosts[target], int(size)))
        for comm in comms:
            comm.wait()
        for i, comm in enumerate(comms):
            finish_s[i] = comm.finish_time

    Actor.create("sender", hosts[0], sender)
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    engine.run()
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    out = {"simgrid": str(simgrid.simgrid_version), "wall_s": wall_s, "cpu_s": cpu_s, "finish_s": finish_s}
    Path(sys.argv[2]).write_text(json.dumps(out))


main()
