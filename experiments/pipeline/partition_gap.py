"""What does the cut lose where no exact table is small enough, and how long does 100 x 100 take?

Question: `partition` is exact with the order given and wherever devices fall into few kinds; beyond, it searches. How
far from the optimum does the search end, and how many seconds do both take?
Method: problems that the exact table can still do are done both ways (random small ones, all devices different; 100
devices of three kinds in three regions, 100 layers), and one of 100 different devices is timed. One thread.
Run: `OMP_NUM_THREADS=1 python experiments/pipeline/partition_gap.py`
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np

from refimpl.pipeline.partition import Chain, Device, Links, NoCut, partition

WISHES = {
    "latency": {"objective": "latency"},
    "throughput, 4 micro-batches": {"objective": "throughput", "micro_batches": 4},
    "throughput, saturated": {"objective": "throughput"},
}


def small(rng: np.random.Generator) -> tuple[Chain, list[Device], Links]:
    """7 different devices, 14 layers, log-normal speeds and hops, memory for about twice the chain."""
    layers, count = 14, 7
    devices = [
        Device(name=f"d{i}", memory_bytes=float(rng.integers(3, 9)), layer_s=float(rng.lognormal(0, 0.7)))
        for i in range(count)
    ]
    latency_s = rng.lognormal(0, 1.0, (count, count))
    return Chain(layer_bytes=(1.0,) * layers), devices, Links(latency_s=latency_s, transfer_s=latency_s * 0.1)


def large(rng: np.random.Generator, kinds: int) -> tuple[Chain, list[Device], Links]:
    """100 devices, 100 layers. Kinds: (memory in layers, seconds a layer, region); 100 kinds: all devices differ."""
    memory = rng.integers(3, 20, kinds)
    layer_s = rng.lognormal(0, 0.6, kinds) * 1e-3
    where = rng.uniform(0, 0.1, (kinds, 2))
    of = np.arange(100) % kinds
    devices = [
        Device(name=f"d{i}", memory_bytes=float(memory[of[i]]), layer_s=float(layer_s[of[i]])) for i in range(100)
    ]
    hop_s = 0.002 + np.linalg.norm(where[:, None] - where[None, :], axis=2)
    return Chain(layer_bytes=(1.0,) * 100), devices, Links(latency_s=hop_s[np.ix_(of, of)])


def both(problem: tuple[Chain, list[Device], Links], wish: dict, seed: int) -> tuple[float, float, float] | None:
    """(searched cycle / exact cycle, seconds of the search, seconds of the exact table)."""
    try:
        began = time.perf_counter()
        exact = partition(*problem, **wish)
        exact_s = time.perf_counter() - began
    except NoCut:
        return None
    assert exact.exact
    began = time.perf_counter()
    found = partition(*problem, **wish, work_max=0, seed=seed)
    return found.cycle_s / exact.cycle_s, time.perf_counter() - began, exact_s


def main() -> None:
    lines = [
        "| problem | objective | cases | optimum found | mean loss | worst loss | search s | exact s |",
        "|" + "---|" * 8,
    ]
    rows = []
    sorts = [("7 devices x 14 layers", 60, small), ("100 x 100, 3 kinds", 4, lambda rng: large(rng, 3))]
    partition(*small(np.random.default_rng(0)), objective="latency", work_max=0)  # compiles
    partition(*small(np.random.default_rng(0)), objective="latency")
    for name, cases, make in sorts:
        for title, wish in WISHES.items():
            rng = np.random.default_rng(7)
            done = [r for r in (both(make(rng), wish, seed) for seed in range(cases)) if r is not None]
            loss = np.array([r[0] for r in done]) - 1
            row = {
                "problem": name,
                "objective": title,
                "cases": len(done),
                "optimum_found": float(np.mean(loss < 1e-9)),
                "loss_mean": float(loss.mean()),
                "loss_max": float(loss.max()),
                "search_s": float(np.median([r[1] for r in done])),
                "exact_s": float(np.median([r[2] for r in done])),
            }
            rows.append(row)
            lines.append(
                f"| {name} | {title} | {len(done)} | {row['optimum_found']:.0%} | {row['loss_mean']:.2%} | "
                f"{row['loss_max']:.2%} | {row['search_s']:.2f} | {row['exact_s']:.2f} |"
            )
            print(lines[-1], flush=True)
    name = "100 x 100, all different"
    for title, wish in WISHES.items():
        problem = large(np.random.default_rng(11), 100)
        times = []
        for order in ("given", "free"):
            began = time.perf_counter()
            partition(*problem, **wish, order=order)
            times.append(time.perf_counter() - began)
        rows.append(
            {"problem": "100 x 100, all different", "objective": title, "given_s": times[0], "free_s": times[1]}
        )
        lines.append(f"| {name} | {title} | 1 | | | | {times[1]:.2f} | {times[0]:.2f} (order given) |")
        print(lines[-1], flush=True)
    here = Path(__file__).with_suffix("")
    here.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    here.with_suffix(".md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
