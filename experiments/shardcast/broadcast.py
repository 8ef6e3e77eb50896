"""How long do new weights take: by relays and clients, by the rule that chooses relays, by increments?

All simulated with the real roles (`sim/kinds/broadcast.py`), 62 GB in shards of 500 MB; the bandwidth bound is drawn.

    python experiments/shardcast/broadcast.py grid|policies|increments [--out FOLDER]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from scipy.stats import t as student

sys.path.insert(0, str(Path(__file__).parents[2]))

from refimpl.shardcast.origin import ENCODE_AS_HASH
from refimpl.shardcast.puller import APPLY_AS_HASH, POLICIES
from refimpl.work import Hash, Spread
from sim.hardware import find_device
from sim.run import run_scenario
from sim.scenario import check_raw

SIZE_GB, SHARD_MB, CLIENT_MBIT_S = 62.0, 500.0, 590.0
RELAYS, CLIENTS = (2, 4), (10, 20, 40)
UNEQUAL_RELAYS_MBIT_S = (12_000.0, 6_000.0, 3_000.0, 1_500.0, 1_000.0)
SEEDS, POLICY_CLIENTS = 3, 12
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


def run(
    relays_mbit_s: tuple[float, ...], clients: int, *, seed: int = 1, client: str = "", **broadcast: Any
) -> dict[str, Any]:
    regions = ("oregon", "virginia", "frankfurt", "tokyo")
    part = {"size_gb": SIZE_GB, "shard_mb": SHARD_MB, **broadcast}
    raw = {
        "title": "broadcast", "shows": "completion times", "seed": seed, "duration_s": 200_000.0, "broadcast": part,
        "network": {"regions": "aws", "jitter_ms": 2.0},
        "nodes": [
            group("origin", "origin", 1, 10_000.0, 10_000.0, "virginia"),
            *(group(f"relay{i}", "relay", 1, rate, 12_000.0, regions[i % 4]) for i, rate in enumerate(relays_mbit_s)),
            *(
                group(f"client-{region}", "client", clients // 4 + (i < clients % 4), 100.0, CLIENT_MBIT_S, region,
                      client)
                for i, region in enumerate(regions)
            ),
        ],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        scenario = check_raw(raw, "broadcast")
        result = run_scenario(
            scenario, name="b", seed=seed, model_path="calibrated", runs=Path(folder), say=lambda line: None,
            trace=False, progress=False,
        )  # fmt: skip
    assert result.ok, (result.ended, result.violations)
    return result.figures


def grid() -> tuple[str, Any]:
    raw, rows = [], []
    for relays in RELAYS:
        for clients in CLIENTS:
            figures = run((10_000.0,) * relays, clients)
            found = {key: figures[key] / 60 for key in ("first_s", "median_s", "last_s", "bound_s")}
            raw.append({"relays": relays, "clients": clients, **found})
            rows.append(f"| {relays} | {clients} | " + " | ".join(f"{value:.2f}" for value in found.values()) + " |")
            print(rows[-1], flush=True)
    head = "| relays | clients | first (min) | median | last | optimum of the median |" + "\n|" + " ---: |" * 6
    return f"# Relays and clients\n\n62 GB, relays of 10 Gbit/s, clients of 590 Mbit/s.\n\n{head}\n" + "\n".join(
        rows
    ), raw


def plot_grid(raw: Any, path: Path) -> None:
    figure, axes = plt.subplots(1, len(RELAYS), figsize=(10, 3.6), sharey=True, layout="constrained")
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
        axis.grid(alpha=0.25)
    axes[0].set_ylabel("minutes until 62 GB are there, verified")
    axes[-1].legend(fontsize=7)
    figure.savefig(path, dpi=110)


def policies() -> tuple[str, Any]:
    raw: list[Any] = []
    rows = []
    for policy in POLICIES:
        found = [run(UNEQUAL_RELAYS_MBIT_S, POLICY_CLIENTS, seed=seed, policy=policy) for seed in range(1, SEEDS + 1)]
        figures = {key: [one[key] / 60 for one in found] for key in ("median_s", "last_s")}
        raw.append({"policy": policy, "bound_min": found[0]["bound_s"] / 60, **figures})
        rows.append(f"| {policy} | {interval(figures['median_s'])} | {interval(figures['last_s'])} |")
        print(rows[-1], flush=True)
    head = "| policy | median (min) | last (min) |\n| --- | ---: | ---: |"
    return (
        f"# Which relay to ask\n\n62 GB to {POLICY_CLIENTS} clients of 590 Mbit/s from relays of "
        f"{', '.join(f'{rate / 1000:g}' for rate in UNEQUAL_RELAYS_MBIT_S)} Gbit/s; mean and 95 % interval over "
        f"{SEEDS} seeds; bandwidth-bound optimum of the median {raw[0]['bound_min']:.2f} min.\n\n{head}\n"
        + "\n".join(rows)
    ), raw


def interval(values: list[float]) -> str:
    """Mean and 95 % interval by Student's t."""
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return f"{statistics.mean(values):.2f} ± {half:.2f}"


def increments() -> tuple[str, Any]:
    raw, rows = [], []
    for share, client in ((None, ""), (INCREMENT_SHARE, ""), *((INCREMENT_SHARE, device) for device in OTHER_CLIENTS)):
        extra = {} if share is None else {"increment_share": share}
        figures = run((10_000.0,) * 4, 40, client=client, versions=2, interval_s=1500.0, **extra)
        second = figures["versions"][1]
        found = {key: second[key] / 60 for key in ("first_s", "median_s", "last_s")}
        cores = find_device(client or DEVICES["client"]).cores
        what = "whole files" if share is None else f"increments of {100 * share:g} %, clients with {cores} cores"
        raw.append({"what": what, "bytes_sent": figures["bytes_sent"], **found})
        rows.append(f"| {what} | " + " | ".join(f"{value:.2f}" for value in found.values()) + " |")
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
    parser.add_argument("question", choices=["grid", "policies", "increments"])
    parser.add_argument("--out", type=Path, help="folder for table, figures and plot")
    options = parser.parse_args()
    text, raw = {"grid": grid, "policies": policies, "increments": increments}[options.question]()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / f"{options.question}.md").write_text(text + "\n")
        (options.out / f"{options.question}.json").write_text(json.dumps(raw, indent=2) + "\n")
        if options.question == "grid":
            plot_grid(raw, options.out / "grid.png")


if __name__ == "__main__":
    main()
