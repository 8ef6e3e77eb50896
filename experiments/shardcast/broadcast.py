"""How long do new weights take: by relays and clients, by the rule that chooses relays, by increments, by a tree that
mends itself?

All simulated with the real roles (`sim/kinds/broadcast.py`); the bandwidth bound is drawn. 62 GB in shards of 500 MB;
for `policies` and `tree`, which are run over seeds, a tenth of it in shards of 50 MB.

    python experiments/shardcast/broadcast.py grid|policies|increments|tree [--out FOLDER]
    python experiments/shardcast/broadcast.py large --clients 10000 [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.ticker import NullFormatter, ScalarFormatter

sys.path.insert(0, str(Path(__file__).parents[2]))

from refimpl.shardcast.choice import POLICIES
from refimpl.shardcast.origin import ENCODE_AS_HASH
from refimpl.shardcast.puller import APPLY_AS_HASH
from refimpl.work import Hash, Spread
from sim.hardware import find_device
from sim.run import RunResult, run_scenario
from sim.scenario import check_raw
from sim.sweep import interval as student_interval

SIZE_GB, SHARD_MB, CLIENT_MBIT_S = 62.0, 500.0, 590.0
RELAYS, CLIENTS = (2, 4, 8), (10, 20, 40, 160)
REGIONS = ("oregon", "virginia", "frankfurt", "tokyo")
SEEDS = 3
TENTH = {"size_gb": 6.2, "shard_mb": 50.0}
POLICY_CLIENTS = 12
POLICY_RELAYS_MBIT_S = (12_000.0, 6_000.0, 3_000.0, 1_500.0, 1_000.0, 300.0)
POLICY_BEHAVIOURS = {4: "slow-drip", 3: "flipped-bit"}
POLICY_FAULTS = [
    {"kind": "crash", "nodes": ["relay5"], "start_s": 10.0 + 20.0 * i, "end_s": 20.0 + 20.0 * i} for i in range(30)
] + [{"kind": "crash", "nodes": ["relay1"], "start_s": 30.0, "end_s": 60.0}]
LARGE_SHARD_MB = 1000.0
OTHER_CLIENTS = ("CPU 2 cores",)  # for their hosts' cores
INCREMENT_SHARE = 0.01  # half as good as the worst that was measured at lr 3e-7 (bench/results/shardcast_delta.md)


DEVICES = {"origin": "H100 SXM", "relay": "L4", "client": "RTX 4090"}


def group(
    name: str, role: str, count: int, up_mbit_s: float, down_mbit_s: float, region: str, device: str = ""
) -> dict[str, Any]:
    return {
        "name": name, "role": role, "count": count, "device": device or DEVICES[role], "region": region,
        "latency_ms": 2.0,
        "uplink_mbit_s": up_mbit_s, "downlink_mbit_s": down_mbit_s,
    }  # fmt: skip


def simulate(
    nodes: list[dict[str, Any]],
    seed: int,
    faults: list[dict[str, Any]],
    *,
    duration_s: float = 200_000.0,
    **broadcast: Any,
) -> RunResult:
    part = {"size_gb": SIZE_GB, "shard_mb": SHARD_MB, **broadcast}
    raw = {
        "title": "broadcast", "shows": "completion times", "seed": seed, "duration_s": duration_s, "broadcast": part,
        "network": {"regions": "aws", "jitter_ms": 2.0}, "nodes": nodes, "faults": faults,
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return run_scenario(
            check_raw(raw, "broadcast"), name="b", seed=seed, model_path="calibrated", runs=Path(folder),
            say=lambda line: None, trace=False, progress=False,
        )  # fmt: skip


def run(
    relays_mbit_s: tuple[float, ...],
    clients: int,
    *,
    seed: int = 1,
    behaviours: dict[int, str] | None = None,
    faults: list[dict[str, Any]] | None = None,
    client: str = "",
    **broadcast: Any,
) -> dict[str, Any]:
    """One level of relays; clients spread over four regions."""
    nodes = [
        group("origin", "origin", 1, 10_000.0, 10_000.0, "virginia"),
        *(
            group(f"relay{i}", "relay", 1, rate, 12_000.0, REGIONS[i % 4])
            | {"behaviour": (behaviours or {}).get(i, "honest")}
            for i, rate in enumerate(relays_mbit_s)
        ),
        *(
            group(f"client-{region}", "client", clients // 4 + (i < clients % 4), 100.0, CLIENT_MBIT_S, region, client)
            for i, region in enumerate(REGIONS)
        ),
    ]
    result = simulate(nodes, seed, faults or [], **broadcast)
    assert result.ok, (result.ended, result.violations)
    return result.figures


def grid(counts: list[int], clients_counts: list[int], before: list[dict[str, Any]]) -> tuple[str, Any]:
    """Rows for these numbers of relays and clients; `before`: rows of an earlier part of the same grid."""
    fresh = {(relays, clients) for relays in counts for clients in clients_counts}
    raw = [point for point in before if (point["relays"], point["clients"]) not in fresh]
    for relays in counts:
        for clients in clients_counts:
            figures = run((10_000.0,) * relays, clients)
            found = {key: figures[key] / 60 for key in ("first_s", "median_s", "last_s", "bound_s")}
            raw.append({"relays": relays, "clients": clients, **found})
            print(raw[-1], flush=True)
    raw.sort(key=lambda point: (point["relays"], point["clients"]))
    rows = [
        f"| {point['relays']} | {point['clients']} | "
        + " | ".join(f"{point[key]:.2f}" for key in ("first_s", "median_s", "last_s", "bound_s"))
        + " |"
        for point in raw
    ]
    head = "| relays | clients | first (min) | median | last | optimum of the median |" + "\n|" + " ---: |" * 6
    return (
        f"# Relays and clients\n\n62 GB, relays of 10 Gbit/s, clients of 590 Mbit/s.\n\n{head}\n" + "\n".join(rows)
    ), raw


def plot_grid(raw: Any, path: Path) -> None:
    figure, axes = plt.subplots(1, len(RELAYS), figsize=(12, 3.6), sharey=True, layout="constrained")
    for axis, relays in zip(axes, RELAYS, strict=True):
        points = [point for point in raw if point["relays"] == relays]
        clients = [point["clients"] for point in points]
        for key, label in (("first_s", "first"), ("median_s", "median"), ("last_s", "last")):
            axis.plot(clients, [point[key] for point in points], "o-", label=label)
        axis.plot(
            clients, [point["bound_s"] for point in points], "k--", lw=1, label="bandwidth-bound optimum (median)"
        )
        axis.set(title=f"{relays} relays of 10 Gbit/s", xlabel="clients of 590 Mbit/s", xscale="log", yscale="log")
        axis.set_xticks(CLIENTS, [str(count) for count in CLIENTS])
        axis.xaxis.set_minor_formatter(NullFormatter())
        for formatted in (axis.yaxis.set_major_formatter, axis.yaxis.set_minor_formatter):
            formatted(ScalarFormatter())
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("minutes until 62 GB are there, verified")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def policies() -> tuple[str, Any]:
    raw: list[Any] = []
    rows = []
    for policy in POLICIES:
        found = [
            run(
                POLICY_RELAYS_MBIT_S, POLICY_CLIENTS, seed=seed, policy=policy, behaviours=POLICY_BEHAVIOURS,
                faults=POLICY_FAULTS, **TENTH,
            )
            for seed in range(1, SEEDS + 1)
        ]  # fmt: skip
        figures = {key: [one[key] for one in found] for key in ("median_s", "last_s")}
        raw.append({"policy": policy, "bound_s": found[0]["bound_s"], **figures})
        rows.append(f"| {policy} | {interval(figures['median_s'])} | {interval(figures['last_s'])} |")
        print(rows[-1], flush=True)
    gained = [
        f"{key.removesuffix('_s')} {interval([a - b for a, b in zip(raw[0][key], raw[-1][key], strict=True)])} s"
        for key in ("median_s", "last_s")
    ]
    head = "| policy | median (s) | last (s) |\n| --- | ---: | ---: |"
    return (
        f"# Which relay to ask\n\n{TENTH['size_gb']} GB to {POLICY_CLIENTS} clients of {CLIENT_MBIT_S:g} Mbit/s from "
        f"relays of {', '.join(f'{rate / 1000:g}' for rate in POLICY_RELAYS_MBIT_S)} Gbit/s: the fourth sends wrong "
        "bytes, the fifth takes 3 s for each shard, the last is down for 10 s out of 20, the second from 30 to 60 s. "
        f"Mean and 95 % interval over {SEEDS} seeds; bandwidth-bound optimum of the median {raw[0]['bound_s']:.1f} s."
        f"\n\n{head}\n" + "\n".join(rows) + "\n\n"
        f"{raw[-1]['policy']} against {raw[0]['policy']}, same seeds: sooner by {', '.join(gained)}."
    ), raw


def plot_policies(raw: Any, path: Path) -> None:
    figure, axis = plt.subplots(figsize=(7, 3.4), layout="constrained")
    for shift, key, label in ((-0.15, "median_s", "median client"), (0.15, "last_s", "last client")):
        for place, point in enumerate(raw):
            seeds = len(point[key])
            axis.plot([place + shift] * seeds, point[key], "o", color="C0" if shift < 0 else "C1", ms=4, alpha=0.6)
        found = [student_interval(point[key]) for point in raw]
        means, halves = [one.mean for one in found], [one.half_width for one in found]
        places = [place + shift for place in range(len(raw))]
        axis.errorbar(places, means, halves, fmt="_", ms=16, color="C0" if shift < 0 else "C1", label=label, capsize=4)
    axis.axhline(raw[0]["bound_s"], color="#222", ls="--", lw=1, label="bandwidth-bound optimum (median)")
    axis.set_xticks(range(len(raw)), [point["policy"] for point in raw])
    axis.set(ylabel=f"seconds until {TENTH['size_gb']} GB are there", ylim=(0, None))
    axis.grid(alpha=0.25, axis="y")
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=110)


def interval(values: list[float]) -> str:
    """Mean and 95 % interval."""
    found = student_interval(values)
    return f"{found.mean:.1f} ± {found.half_width:.1f}"


# --------------------------------------------------------------------------------------------- a tree that mends itself
TREE_FAULT_S = 2.0  # a relay needs 5 s for the whole version
TREE_FAULTS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "what leaves one hub falls to a fiftieth": [
        {"kind": "link", "nodes": ["hub1"], "direction": "up", "bandwidth_factor": 0.02, "start_s": TREE_FAULT_S}
    ],
    "one hub dies": [{"kind": "crash", "nodes": ["hub1"], "start_s": TREE_FAULT_S}],
}
TREE_CLIENTS, TREE_PATIENCE_S = 12, 300.0


def tree() -> tuple[str, Any]:
    """origin → two hubs → two relays below each → clients, half of them at the relays of either hub."""
    raw, rows = [], []
    for what, faults in TREE_FAULTS.items():
        for reparent_s in (None, 5.0):
            found = [one_tree(seed, faults, reparent_s) for seed in range(1, SEEDS + 1)]
            times = [one["versions"][0]["times_s"] for one in found]
            medians, lasts = ([nth(each, place) for each in times] for place in (TREE_CLIENTS // 2, TREE_CLIENTS - 1))
            raw.append({"fault": what, "reparent_s": reparent_s, "median_s": medians, "last_s": lasts})
            how = "fixed" if reparent_s is None else f"relays look every {reparent_s:g} s"
            rows.append(f"| {what} | {how} | {interval_or_never(medians)} | {interval_or_never(lasts)} |")
            print(rows[-1], flush=True)
    head = f"| fault, from {TREE_FAULT_S:g} s on | tree | median client (s) | last client (s) |\n"
    head += "| --- | --- | ---: | ---: |"
    return (
        f"# A tree that mends itself\n\n{TENTH['size_gb']} GB over two hubs (one in Virginia, one in Frankfurt; "
        f"10 Gbit/s) and two relays of 10 Gbit/s below each to {TREE_CLIENTS} clients of {CLIENT_MBIT_S:g} Mbit/s, "
        f"half of them at either pair of relays. Mean and 95 % interval over {SEEDS} seeds; never: not within "
        f"{TREE_PATIENCE_S:g} s.\n\n{head}\n" + "\n".join(rows)
    ), raw


def nth(times_s: list[float], place: int) -> float | None:
    """When so many clients and one more had it; None: never."""
    return times_s[place] if place < len(times_s) else None


def interval_or_never(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    return interval(known) if len(known) == len(values) else f"never, in {len(values) - len(known)} of {len(values)}"


def one_tree(seed: int, faults: list[dict[str, Any]], reparent_s: float | None) -> dict[str, Any]:
    places = ("virginia", "frankfurt")
    nodes = [group("origin", "origin", 1, 10_000.0, 10_000.0, "oregon")]
    for i, place in enumerate(places):
        nodes.append(group(f"hub{i}", "relay", 1, 10_000.0, 10_000.0, place))
        nodes.append(group(f"relay{i}", "relay", 2, 10_000.0, 10_000.0, place) | {"sources": [f"hub{i}"]})
    for i, place in enumerate(places):
        clients = group(f"client{i}", "client", TREE_CLIENTS // 2, 100.0, CLIENT_MBIT_S, place)
        nodes.append(clients | {"sources": [f"relay{i}"]})
    moving = {} if reparent_s is None else {"reparent_s": reparent_s}
    return simulate(nodes, seed, faults, duration_s=TREE_PATIENCE_S, **TENTH, **moving).figures


# ------------------------------------------------------------------------------------------------------------ very many
def large(clients: int) -> tuple[str, Any]:
    """origin → 8 hubs → 64 relays → clients. Few large shards, two at a time, so that it can be computed."""
    nodes = [group("origin", "origin", 1, 100_000.0, 10_000.0, "virginia")]
    for i, region in enumerate(REGIONS):
        nodes.append(group(f"hub-{region}", "relay", 2, 100_000.0, 25_000.0, region))
        nodes.append(
            group(f"relay-{region}", "relay", 16, 100_000.0, 25_000.0, region) | {"sources": [f"hub-{region}"]}
        )
        count = clients // 4 + (i < clients % 4)
        near = group(f"client-{region}", "client", count, 100.0, CLIENT_MBIT_S, region)
        nodes.append(near | {"sources": [f"relay-{region}"]})
    started_s = time.monotonic()
    result = simulate(nodes, 1, [], shard_mb=LARGE_SHARD_MB, connections=2)
    assert result.ok, (result.ended, result.violations)
    wall_s = time.monotonic() - started_s
    memory_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    found = {key: result.figures[key] / 60 for key in ("first_s", "median_s", "last_s", "bound_s")}
    raw = {"clients": clients, **found, "wall_s": wall_s, "memory_mib": memory_mib, "events": result.figures["events"]}
    head = "| clients | first (min) | median | last | optimum of the median | computed in (s) | memory (MiB) |"
    row = (
        f"| {clients} | "
        + " | ".join(f"{value:.2f}" for value in found.values())
        + f" | {wall_s:.0f} | {memory_mib:.0f} |"
    )
    return (
        f"# {clients} clients\n\n62 GB, virtual, in shards of {LARGE_SHARD_MB:g} MB, two at a time: an origin, 8 hubs "
        f"and 64 relays of 100 Gbit/s, clients of {CLIENT_MBIT_S:g} Mbit/s at the 16 relays of their region.\n\n"
        f"{head}\n|{' ---: |' * 7}\n{row}"
    ), raw


def second_version(case: tuple[float | None, str]) -> dict[str, Any]:
    """Minutes to the second version, by increments of this share of it, to clients with this device."""
    share, client = case
    extra = {} if share is None else {"increment_share": share}
    figures = run((10_000.0,) * 4, 40, client=client, versions=2, interval_s=1500.0, **extra)
    cores = find_device(client or DEVICES["client"]).cores
    what = "whole files" if share is None else f"increments of {100 * share:g} %, clients with {cores} cores"
    minutes = {key: figures["versions"][1][key] / 60 for key in ("first_s", "median_s", "last_s")}
    return {"what": what, "bytes_sent": figures["bytes_sent"], **minutes}


def increments() -> tuple[str, Any]:
    raw, rows = [], []
    cases = [(None, ""), (INCREMENT_SHARE, ""), *((INCREMENT_SHARE, device) for device in OTHER_CLIENTS)]
    with ProcessPoolExecutor(len(cases)) as processes:
        for found in processes.map(second_version, cases):
            raw.append(found)
            values = (found[key] for key in ("first_s", "median_s", "last_s"))
            rows.append(f"| {found['what']} | " + " | ".join(f"{value:.2f}" for value in values) + " |")
            print(rows[-1], flush=True)
    head = "| second version by | first (min) | median | last |\n| --- | ---: | ---: | ---: |"
    return (
        f"# The second version\n\n62 GB to 40 clients of 590 Mbit/s over 4 relays; from the moment at which the origin "
        f"begins to cut it, comparing and applying (priced on each node's cores) included.\n\n{head}\n"
        + "\n".join(rows)
        + "\n\n"
        + costs()
    ), raw


def costs() -> str:
    """What each part would take by itself, as the simulator prices it."""
    shards = math.ceil(SIZE_GB * 1e3 / SHARD_MB)

    def seconds(role: str, hashes: float) -> str:
        device = find_device(DEVICES[role])
        piece = Hash(size_bytes=round(hashes * SHARD_MB * 1e6))
        return f"{device.cores} | {device.price(Spread(piece, shards)):.1f} |"

    line_s = 8e3 * INCREMENT_SHARE * SIZE_GB / CLIENT_MBIT_S
    return "\n".join(
        [
            "These run side by side, shard by shard; what follows is each of them alone.",
            "",
            "| part, alone | cores | s |",
            "| --- | ---: | ---: |",
            f"| origin: SHA-256 of the shards | {seconds('origin', 1.0)}",
            f"| origin: comparing ({ENCODE_AS_HASH:g} bytes hashed a byte) | {seconds('origin', ENCODE_AS_HASH)}",
            f"| network: {100 * INCREMENT_SHARE:g} % over a client's line | | {line_s:.1f} |",
            f"| client: applying ({APPLY_AS_HASH:g} bytes hashed a byte) | {seconds('client', APPLY_AS_HASH)}",
            f"| of which SHA-256: the verification | {seconds('client', 1.0)}",
            "",
            f"Disks are not priced: in the median time a client must read {SIZE_GB:g} GB and write as much.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", choices=["grid", "policies", "increments", "tree", "large"])
    parser.add_argument(
        "--relays", type=int, nargs="+", choices=RELAYS, default=list(RELAYS),
        help="of `grid`: compute these, and keep the other rows that are in the folder",
    )  # fmt: skip
    parser.add_argument("--clients", type=int, nargs="+", help="of `grid`, likewise; of `large`, one number")
    parser.add_argument("--out", type=Path, help="folder for table, figures and plot")
    options = parser.parse_args()
    known = options.out / "grid.json" if options.out else None
    before = json.loads(known.read_text()) if known is not None and known.exists() else []
    answers: dict[str, Callable[[], tuple[str, Any]]] = {
        "grid": partial(grid, options.relays, options.clients or list(CLIENTS), before),
        "policies": policies,
        "increments": increments,
        "tree": tree,
        "large": partial(large, (options.clients or [10_000])[0]),
    }
    text, raw = answers[options.question]()
    print(text)
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.question}.md").write_text(text + "\n")
        (options.out / f"{options.question}.json").write_text(json.dumps(raw, indent=2) + "\n")
        plots = {"grid": plot_grid, "policies": plot_policies}
        if options.question in plots:
            plots[options.question](raw, options.out / f"{options.question}.png")


if __name__ == "__main__":
    main()
