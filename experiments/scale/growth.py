"""How a simulation's time and memory grow with its nodes: `stress-10k` with fewer nodes, one process a size.

    python experiments/scale/growth.py --nodes 100,300,1000,3000,10000 --virtual-s 3600

Writes growth.md and growth.png beside this file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHILD = """
import json, pathlib, resource, sys, tempfile, time
from sim.run import run_scenario
from sim.scenario import check_raw, read_raw, scenario_path
nodes, virtual_s = int(sys.argv[1]), float(sys.argv[2])
raw = read_raw(scenario_path("stress-10k"))
raw["duration_s"] = virtual_s
for group in raw["nodes"]:
    if "count" in group:
        group["count"] = max(1, round(group["count"] * nodes / 10_000))
import sim.run
fabrics = []
plain = sim.run.build
def watched(*arguments):
    built = plain(*arguments)
    fabrics.append(built[0])
    return built
sim.run.build = watched
drive, cpu_s = sim.run._drive, []
def timed(*arguments):
    begun = time.process_time()
    try:
        return drive(*arguments)
    finally:
        cpu_s.append(time.process_time() - begun)
sim.run._drive = timed
before_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
with tempfile.TemporaryDirectory() as runs:
    started = time.perf_counter()
    run_scenario(check_raw(raw, "growth"), name="growth", seed=1, model_path="calibrated", runs=pathlib.Path(runs),
                 say=lambda line: None, progress=False)
    wall_s = time.perf_counter() - started
fabric = fabrics[0]
print(json.dumps({"nodes": sum(g.get("count", 1) for g in raw["nodes"]), "wall_s": wall_s,
                  "events": fabric.kernel.events_handled, "messages": fabric.carrier.messages_sent, "cpu_s": cpu_s[0],
                  "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "idle_mib": before_mib}))
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="100,300,1000,3000,10000")
    parser.add_argument("--virtual-s", type=float, default=3600.0)
    options = parser.parse_args()
    rows = []
    for nodes in options.nodes.split(","):
        command = [sys.executable, "-c", CHILD, nodes, str(options.virtual_s)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        print(rows[-1], flush=True)
    lines = [
        f"Virtual time {options.virtual_s:g} s of `stress-10k` with fewer nodes; one core. CPU seconds are those of",
        "the simulation itself; the wall time also has what comes before and after: imports, log, plots, report.",
        "",
        "| nodes | kernel events | messages | CPU s | µs per event | wall s, all | peak MiB (idle) |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        each_us = 1e6 * row["cpu_s"] / row["events"]
        lines.append(
            f"| {row['nodes']} | {row['events']} | {row['messages']} | {row['cpu_s']:.1f} | {each_us:.1f} "
            f"| {row['wall_s']:.1f} | {row['peak_mib']:.0f} ({row['idle_mib']:.0f}) |"
        )
    (HERE / "growth.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    events = [row["events"] for row in rows]
    left.loglog(events, [row["cpu_s"] for row in rows], "o-", color="#2a6f97")
    each_s = rows[-1]["cpu_s"] / rows[-1]["events"]
    left.loglog(events, [each_s * count for count in events], "--", color="#888", lw=1, label="linear in events")
    left.set_xlabel("kernel events")
    left.set_ylabel("CPU time (s)")
    left.legend(fontsize=8)
    right.semilogx([row["nodes"] for row in rows], [row["peak_mib"] for row in rows], "o-", color="#3a7d44")
    right.set_xlabel("nodes")
    right.set_ylabel("peak memory (MiB)")
    right.set_ylim(bottom=0)
    for axis in (left, right):
        axis.grid(alpha=0.25)
    figure.suptitle(f"{options.virtual_s:g} virtual seconds, one core", fontsize=11)
    figure.savefig(HERE / "growth.png", dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
