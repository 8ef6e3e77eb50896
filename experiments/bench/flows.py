"""How fast is the flow engine beside SimGrid, on the same transfers, and does it say the same?

    python -m experiments.bench.flows --simgrid-python /usr/bin/python3

Makes seeded scenarios (a star of relays and clients; a mesh of unequal nodes behind region trunks), runs each in turn
here and in SimGrid (`simgrid_peer.py`, under the interpreter that has its binding), compares every duration, and leaves
`results/flows.md`, `results/flows.json` and `results/flows.png`. Times are CPU seconds of the simulation alone
(building the platform and compiling with numba excluded; compiling is told apart), medians over the repetitions: a busy
machine stretches wall time, not these. Without `--simgrid-python` only this side is timed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from sim.flows import FlowEngine, warm_up

HERE = Path(__file__).resolve().parent
MBIT = 1e6 / 8
LONG_S = 20  # a case that takes SimGrid longer is run once there
LINES_MBIT_S = (20, 50, 100, 200, 500, 1000)


def star(clients: int, relays: int = 8, seed: int = 11) -> dict[str, Any]:
    """Every client fetches 64 MB from one relay at t = 0; relays carry from 50 to 150 Mbit/s per client."""
    rng = random.Random(seed)
    links: list[float] = []

    def link(bytes_per_s: float) -> int:
        links.append(bytes_per_s)
        return len(links) - 1

    up, down = [], []
    for relay in range(relays):
        up.append(link(clients / relays * (50 + 50 * (relay % 3)) * MBIT))
        down.append(link(1000 * MBIT))
    transfers: list[list[Any]] = []
    for i in range(clients):
        line = rng.choice(LINES_MBIT_S) * rng.uniform(0.8, 1.2) * MBIT
        up.append(link(line))
        down.append(link(line))
        transfers.append([0.0, i % relays, relays + i, 64_000_000, [up[i % relays], down[relays + i]]])
    region = [0] * (relays + clients)
    case = {"name": f"star {clients}", "links": links, "up": up, "down": down, "region": region, "regions": 1}
    return case | {"transfers": transfers, "out": [link(1e12)], "in": [link(1e12)]}


def mesh(flows: int, seed: int = 12) -> dict[str, Any]:
    """Transfers arrive over a minute between random nodes, 20 for every 3 nodes; a tenth to all of a line is uplink."""
    rng = random.Random(seed)
    nodes, regions = flows * 3 // 20, 8 if flows > 2000 else 5
    down_bytes_per_s = [rng.choice(LINES_MBIT_S) * rng.uniform(0.8, 1.2) * MBIT for _ in range(nodes)]
    up_bytes_per_s = [line * rng.choice((0.1, 0.2, 0.5, 1.0)) for line in down_bytes_per_s]
    trunk_bytes_per_s = [nodes / regions * rng.uniform(5, 40) * MBIT for _ in range(regions)]
    links = up_bytes_per_s + down_bytes_per_s + trunk_bytes_per_s + trunk_bytes_per_s
    up, down = list(range(nodes)), list(range(nodes, 2 * nodes))
    out = list(range(2 * nodes, 2 * nodes + regions))
    into = [link + regions for link in out]
    region = [rng.randrange(regions) for _ in range(nodes)]
    transfers: list[list[Any]] = []
    start_s = 0.0
    for _ in range(flows):
        start_s += rng.expovariate(flows / 60)
        source, target = rng.sample(range(nodes), 2)
        size = int(min(max(rng.lognormvariate(15.5, 1.2), 1e3), 1e9))
        a, b = region[source], region[target]
        middle = [] if a == b else [out[a], into[b]]
        transfers.append([start_s, source, target, size, [up[source], *middle, down[target]]])
    case = {"name": f"mesh {flows}", "links": links, "up": up, "down": down, "region": region, "regions": regions}
    return case | {"transfers": transfers, "out": out, "in": into}


def run_ours(case: dict[str, Any]) -> tuple[float, list[float]]:
    """CPU seconds and finish times, through the interface that the simulator uses: one Python call per start."""
    engine = FlowEngine()
    number = [engine.add_link(capacity) for capacity in case["links"]]
    transfers = [(t[0], tuple(number[link] for link in t[4]), t[3]) for t in case["transfers"]]
    finish_s = [math.nan] * len(transfers)
    place: dict[int, int] = {}
    started_s = time.process_time()
    for i, (start_s, path, size) in enumerate(transfers):
        while engine.next_event_s() <= start_s:
            for flow, at_s in engine.advance(engine.next_event_s()):
                finish_s[place[flow]] = at_s
        place[engine.start(start_s, path, size)] = i
    while engine.next_event_s() < math.inf:
        for flow, at_s in engine.advance(engine.next_event_s()):
            finish_s[place[flow]] = at_s
    return time.process_time() - started_s, finish_s


def run_simgrid(case: dict[str, Any], python: str, folder: Path) -> dict[str, Any]:
    """What `simgrid_peer.py` leaves: cpu_s, wall_s, finish_s and SimGrid's version."""
    case_path, out_path = folder / "case.json", folder / "out.json"
    case_path.write_text(json.dumps(case))
    command = [python, str(HERE / "simgrid_peer.py"), str(case_path), str(out_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{python} could not run simgrid_peer.py:\n{done.stderr}")
    peer: dict[str, Any] = json.loads(out_path.read_text())
    return peer


def largest_error(case: dict[str, Any], ours: list[float], theirs: list[float]) -> float:
    """Largest relative difference of a duration."""
    starts = [t[0] for t in case["transfers"]]
    return max(abs((a - s) / (b - s) - 1) for a, b, s in zip(ours, theirs, starts, strict=True))


def solo_cost_us() -> float:
    """CPU time of start, next_event_s and advance for one small message between idle lines of 10 000 nodes."""
    engine, rng, count = FlowEngine(), random.Random(3), 100_000
    up = [engine.add_link(2.5e6) for _ in range(10_000)]
    down = [engine.add_link(12.5e6) for _ in range(10_000)]
    paths = [(rng.choice(up), rng.choice(down)) for _ in range(count)]
    now_s, costs = 0.0, []
    for _ in range(5):
        started_s = time.process_time()
        for path in paths:
            engine.start(now_s, path, 300)
            now_s = engine.next_event_s()
            engine.advance(now_s)
        costs.append((time.process_time() - started_s) / count * 1e6)
    assert engine.effort()["solves"] == 0
    return statistics.median(costs)


def compile_s() -> float:
    """CPU seconds of compiling everything with an empty cache, in a process of its own."""
    code = (
        "import time; from sim.flows import warm_up; started_s = time.process_time(); "
        "warm_up(lambda _: None); print(time.process_time() - started_s)"
    )
    with tempfile.TemporaryDirectory() as cache:
        out = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"NUMBA_CACHE_DIR": cache},
            cwd=HERE.parents[1],
            check=True,
            capture_output=True,
            text=True,
        )
    return float(out.stdout)


def measure(cases: list[dict[str, Any]], python: str | None, repeat: int) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases:
            ours_s: list[float] = []
            peer: dict[str, Any] = {}
            peer_s: list[float] = []
            finish_s: list[float] = []
            for _ in range(repeat):
                cpu_s, finish_s = run_ours(case)
                ours_s.append(cpu_s)
                if python and (not peer_s or peer_s[0] < LONG_S):
                    peer = run_simgrid(case, python, Path(folder))
                    peer_s.append(peer["cpu_s"])
            row = {"name": case["name"], "flows": len(case["transfers"]), "ours_s": statistics.median(ours_s)}
            if peer:
                row |= {"simgrid": peer["simgrid"], "simgrid_s": statistics.median(peer_s), "simgrid_runs": len(peer_s)}
                row["ratio"] = row["simgrid_s"] / row["ours_s"]
                row["error"] = largest_error(case, finish_s, peer["finish_s"])
            rows.append(row)
            print(line(row), flush=True)
    return rows


def line(row: dict[str, Any]) -> str:
    ours = f"| {row['name']} | {row['ours_s']:.3f} | {row['ours_s'] / row['flows'] * 1e6:.1f} |"
    if "simgrid_s" not in row:
        return f"{ours} – | – | – |"
    return f"{ours} {row['simgrid_s']:.2f} ({row['simgrid_runs']}) | {row['ratio']:.1f} | {row['error']:.1e} |"


def report(rows: list[dict[str, Any]], growth: list[dict[str, Any]], args: argparse.Namespace, out: Path) -> None:
    head = [
        "# The flow engine beside SimGrid",
        "",
        f"    python -m experiments.bench.flows{' --simgrid-python PYTHON' if args.simgrid_python else ''}",
        "",
        "CPU seconds of the simulation alone, median (SimGrid: of so many runs). Error: the largest relative",
        "difference of any transfer's duration.",
        "",
        "| scenario | ours, s | ours, µs a transfer | SimGrid, s (runs) | ratio | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(line, rows),
        "",
        "How it grows (mesh; 3 nodes for every 20 transfers):",
        "",
        "| scenario | ours, s | ours, µs a transfer | SimGrid, s (runs) | ratio | largest error |",
        "| --- | --- | --- | --- | --- | --- |",
        *map(line, growth),
        "",
        f"A small message between idle lines of 10 000 nodes (start, next_event_s, advance): {solo_cost_us():.1f} µs.",
        f"Compiling the solver with an empty cache: {compile_s():.1f} s of CPU, once; then it comes from disk.",
        "",
        f"SimGrid: {next((r['simgrid'] for r in rows if 'simgrid' in r), 'not run')}. Python "
        f"{platform.python_version()}, {os.cpu_count()} cores.",
        "",
        "![time against transfers](flows.png)",
    ]
    (out / "flows.md").write_text("\n".join(head) + "\n")
    (out / "flows.json").write_text(json.dumps({"table": rows, "growth": growth}, indent=1) + "\n")
    plot(growth, out / "flows.png")


def plot(growth: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(5, 3.4))
    for key, label, mark in (("simgrid_s", "SimGrid", "s-"), ("ours_s", "Armillary", "o-")):
        points = [(row["flows"], row[key]) for row in growth if key in row]
        if points:
            axes.loglog(*zip(*points, strict=True), mark, label=label)
    axes.set_xlabel("transfers in the mesh")
    axes.set_ylabel("CPU time, s")
    axes.grid(True, which="both", alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--simgrid-python", help="an interpreter that can import simgrid, e.g. /usr/bin/python3")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--largest", type=int, default=20_000, help="transfers in the largest mesh run in both")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    print(f"solver ready after {warm_up():.1f} s", flush=True)
    cases = [star(1000), star(10_000), mesh(2000), mesh(args.largest)]
    rows = measure(cases, args.simgrid_python, args.repeat)
    sizes = [500, 1000, 2000, 5000, 10_000]
    growth = measure([mesh(size) for size in sizes if size < args.largest], args.simgrid_python, args.repeat)
    growth.append(rows[-1])
    growth += measure([mesh(2 * args.largest), mesh(5 * args.largest)], None, 1)
    report(rows, growth, args, args.out)
    print((args.out / "flows.md").read_text())


if __name__ == "__main__":
    main()
