"""Does a ring in virtual time run as fast as the same ring in real processes over slow links?

Question: tokens/s of a small ring, real and simulated: within 10 %?
Method: the tiny model cut over 2 to 4 processes on this machine, lines shaped (`refimpl.worlds.http`: latency, rate),
and the same stages, head, requests and seeds in the simulator (`sim.world`, flow-level network). Compute is real in
both, so the answers must be equal. In virtual time a pass is charged what was measured beforehand, in real rings of one
batch over other hops (`CALIBRATED_HOPS_MS`; nothing of the runs that are predicted goes in): cycle / stages - hop. That
holds layers, framing, HTTP, event loop and timers. A process that has slept is slow at first, the more the longer (its
pages have left the caches), so it is a curve over the time that the stage lay idle; prompt tokens come on top, as
measured in this process. Requests are ragged in prompt and answer, and there are more of them than rows (refills).
Run: `python -m experiments.pipeline.real_vs_simulated [--seeds N] [--cases "a;b"]`. Results: `real_vs_simulated.jsonl`
(cases that are there are not run again), `real_vs_simulated.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.pipeline.speed import report_of
from refimpl.identity import Identity
from refimpl.model.config import ModelConfig
from refimpl.model.weights import load_decoder
from refimpl.pipeline.__main__ import arguments_of, node_file, prepared
from refimpl.pipeline.compute import DTYPES, StageCompute, torch_parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.schedule import Pass, PassRow
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.work import Forward, Several, Work
from sim.carrier import FlowCarrier
from sim.network import Network
from sim.world import SimFabric, SimWorld

MODEL, DTYPE, CAPACITY_TOKENS = "tests/data/tiny-model", "float32", 160
UNSHAPED_MBIT_S = 1e5
CALIBRATED_HOPS_MS, CALIBRATED_TOKENS = (2.0, 6.0, 15.0, 40.0, 80.0), 20
CUTS = {2: (3, 5), 3: (2, 4, 5), 4: (2, 3, 4, 5)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A ring and its lines."""

    stages: int
    hop_ms: float
    uplink_mbit_s: float | None = None
    micro_batches: int
    rows: int
    signed: bool = False


CASES = {
    "one batch, near": Case(stages=2, hop_ms=10, micro_batches=1, rows=4),
    "one batch, far": Case(stages=4, hop_ms=50, micro_batches=1, rows=4),
    "four batches, far": Case(stages=4, hop_ms=50, micro_batches=4, rows=4),
    "four batches, far, signed": Case(stages=4, hop_ms=50, micro_batches=4, rows=4, signed=True),
    "narrow uplinks": Case(stages=3, hop_ms=30, uplink_mbit_s=4, micro_batches=2, rows=32),
    "uplinks are the bottleneck": Case(stages=3, hop_ms=20, uplink_mbit_s=4, micro_batches=6, rows=32),
    "narrow uplinks, one packet a message": Case(stages=3, hop_ms=30, uplink_mbit_s=0.5, micro_batches=2, rows=4),
    "bottleneck, one packet a message": Case(stages=3, hop_ms=20, uplink_mbit_s=0.5, micro_batches=6, rows=4),
}


@dataclasses.dataclass(frozen=True)
class Costs:
    """What was measured: a pass of one token for each row takes `pass_s` at a stage that lay idle for `idle_s`, both
    ascending, in between a straight line; each further token `token_s` of its stage."""

    idle_s: tuple[float, ...]
    pass_s: tuple[float, ...]
    token_s: tuple[float, ...]


def requests_of(case: Case, seed: int) -> list[dict[str, Any]]:
    """Half as many again as there are rows, ragged."""
    rng = np.random.default_rng([seed, case.stages])
    count = case.micro_batches * case.rows * 3 // 2
    return [
        {"id": f"r{at}", "prompt": rng.integers(2, 16, rng.integers(8, 32)).tolist(), "new": int(rng.integers(16, 32)),
         "seed": seed * 100 + at}
        for at in range(count)
    ]  # fmt: skip


# ---------------------------------------------------------------------------------------------------------------- real
def real(case: Case, requests: list[dict[str, Any]]) -> dict[str, Any]:
    """One run of real processes; the head's own report."""
    options = arguments_of().parse_args(
        ["--model", MODEL, "--dtype", DTYPE, "--stages", str(case.stages), "--rows", str(case.rows),
         "--cuts", ",".join(map(str, CUTS[case.stages])), "--micro-batches", str(case.micro_batches),
         "--capacity-tokens", str(CAPACITY_TOKENS), "--latency-ms", str(case.hop_ms),
         *["--signed"] * case.signed]
    )  # fmt: skip
    plan = node_file(options)
    nodes = tuple(dataclasses.replace(node, uplink_mbit_s=case.uplink_mbit_s) for node in plan.nodes)
    plan = dataclasses.replace(plan, nodes=nodes)
    entries, configs = prepared(options, plan, [])
    for config in configs:
        config["requests"] = requests
    return report_of(entries, configs, threads=1, overdue_s_min=60.0)


# ----------------------------------------------------------------------------------------------------------- simulated
def simulated(case: Case, requests: list[dict[str, Any]], costs: Costs) -> dict[str, Any]:
    """The same ring in virtual time."""
    network, config = Network(), ModelConfig.from_pretrained(MODEL)
    fabric = SimFabric(run_seed=0, carrier=lambda kernel: FlowCarrier(kernel, network, 0))
    names = [f"stage{at}" for at in range(case.stages)]
    identities = {name: Identity.from_seed(0, name) for name in names}
    stages = []
    for at, name in enumerate(names):
        world = fabric.node(name)
        network.add_node(
            uplink_mbit_s=case.uplink_mbit_s or UNSHAPED_MBIT_S,
            downlink_mbit_s=UNSHAPED_MBIT_S,
            latency_ms=case.hop_ms / 2,
        )
        world.price = priced(world, costs, at, case.rows)
        parts = torch_parts(MODEL, dtype=DTYPE, device="cpu")
        stages.append(Stage(world, StageConfig(hop_timeout_s=60.0), identities[name], parts))
    ring = RingConfig(
        ring="cli-0",
        layers=config.layers,
        hidden=config.hidden,
        dtype=DTYPE,
        cuts=CUTS[case.stages],
        micro_batches=case.micro_batches,
        rows=case.rows,
        capacity_tokens=CAPACITY_TOKENS,
        signed=case.signed,
        temperature=0.0,
        overdue_s_min=60.0,
    )
    head = Head(stages[0].world, ring, stages[0], {name: identities[name].public_key for name in names})

    async def main() -> dict[str, Any]:
        world = stages[0].world
        head.serve()
        world.spawn(head.run(), "head")
        for stage in stages[1:]:
            stage.serve()
            stage.world.spawn(stage.run(), "stage")
        while not head.ring.up:
            await world.sleep(0.05)
        began_s = world.now()
        kept = await head.complete(*([r[key] for r in requests] for key in ("id", "prompt", "new", "seed")))
        result = {"seconds": world.now() - began_s, "answers": [one.answer for one in kept], "cycle_s": head.cycle_s()}
        head.stop()
        for stage in stages:
            stage.stop()
        return result

    return fabric.run(main())


def priced(world: SimWorld, costs: Costs, at: int, rows: int) -> Callable[[Work], float]:
    """What a pass through stage `at` takes; loading and signing take nothing (the pass's cost holds it)."""

    def price(work: Work) -> float:
        parts = work.parts if isinstance(work, Several) else (work,)
        tokens = sum(part.batch * part.new_tokens for part in parts if isinstance(part, Forward))
        if not tokens:
            return 0.0
        idle_s = max(0.0, world.fabric.now_s() - world.device_free_ns / 1e9)
        return float(np.interp(idle_s, costs.idle_s, costs.pass_s)) + max(0, tokens - rows) * costs.token_s[at]

    return price


# ----------------------------------------------------------------------------------------------------------- measuring
def pass_s(compute: StageCompute, rows: int, past: int, new: int, states: np.ndarray | None, turns: int = 40) -> float:
    """Median seconds of one pass."""
    made = Pass(1, 0, 0, 0, tuple(PassRow(at, past, new, True, 0, 0, (3,) * new) for at in range(rows)))
    spans = []
    for _ in range(turns):
        began = time.perf_counter()
        compute.run(made, made.rows, states)  # type: ignore[arg-type]
        spans.append(time.perf_counter() - began)
    return statistics.median(spans)


def measured_costs(case: Case) -> Costs:
    """Prompt tokens in this process; passes in real rings of one batch, over hops that no case has."""
    torch.set_num_threads(1)
    token_s, curve = [], []
    for first, end in itertools.pairwise((0, *CUTS[case.stages])):
        decoder = load_decoder(MODEL, layers=range(first, end), dtype=DTYPES[DTYPE], device="cpu")
        compute = StageCompute(decoder, micro_batches=1, rows=case.rows, capacity_tokens=CAPACITY_TOKENS, sampling=None)
        short, long = case.rows, case.rows * 24
        fed = [None if first == 0 else np.zeros((n, decoder.config.hidden), np.float32) for n in (short, long)]
        one, many = pass_s(compute, case.rows, 30, 1, fed[0]), pass_s(compute, case.rows, 0, 24, fed[1])
        token_s.append(max(0.0, (many - one) / (long - short)))
    for hop_ms in CALIBRATED_HOPS_MS:
        plain = dataclasses.replace(case, micro_batches=1, hop_ms=hop_ms, uplink_mbit_s=None)
        asked = [{"id": f"c{at}", "prompt": [3] * 8, "new": CALIBRATED_TOKENS, "seed": 0} for at in range(case.rows)]
        cycle_s = real(plain, asked)["cycle_s"]
        cost_s = cycle_s / case.stages - hop_ms / 1e3
        curve.append((cycle_s - cost_s, cost_s))
    curve.sort()
    return Costs(tuple(idle for idle, _ in curve), tuple(cost for _, cost in curve), tuple(token_s))


def compare(name: str, seeds: int, known: dict[tuple[int, int, bool], Costs]) -> dict[str, Any]:
    """One case."""
    case = CASES[name]
    ring = case.stages, case.rows, case.signed
    costs = known[ring] = known.get(ring) or measured_costs(case)
    runs = []
    for seed in range(seeds):
        requests = requests_of(case, seed)
        ours, theirs = simulated(case, requests, costs), real(case, requests)
        assert ours["answers"] == theirs["answers"], f"{name}, seed {seed}: other tokens in virtual time"
        tokens = sum(request["new"] for request in requests)
        runs.append(
            {
                "seed": seed,
                "tokens": tokens,
                "real_tokens_per_s": round(tokens / theirs["seconds"], 2),
                "simulated_tokens_per_s": round(tokens / ours["seconds"], 2),
                "real_cycle_ms": round(theirs["cycle_s"] * 1e3, 2),
                "simulated_cycle_ms": round(ours["cycle_s"] * 1e3, 2),
            }
        )
    curve = [[round(s * 1e3, 2) for s in pair] for pair in zip(costs.idle_s, costs.pass_s, strict=True)]
    return {"case": name, **dataclasses.asdict(case), "pass_ms_after_idle_ms": curve, "runs": runs}


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "Tokens/s of the same requests, real and simulated; the difference is (simulated - real) / real.",
        "",
        "| case | stages | ms a hop | uplink Mbit/s | batches x rows | seed | real | simulated | difference |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    worst = 0.0
    for row in rows:
        for run in row["runs"]:
            off = run["simulated_tokens_per_s"] / run["real_tokens_per_s"] - 1
            worst = max(worst, abs(off))
            lines.append(
                f"| {row['case']} | {row['stages']} | {row['hop_ms']:g} | {row['uplink_mbit_s'] or 'free'} | "
                f"{row['micro_batches']} x {row['rows']} | {run['seed']} | {run['real_tokens_per_s']:.1f} | "
                f"{run['simulated_tokens_per_s']:.1f} | {off:+.1%} |"
            )
    return "\n".join([*lines, "", f"Largest difference: {worst:.1%}.", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", default=";".join(CASES), help="names, with ; between them")
    options = parser.parse_args()
    file = Path(__file__).with_suffix(".jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    known: dict[tuple[int, int, bool], Costs] = {}
    for name in options.cases.split(";"):
        if name not in {row["case"] for row in rows}:
            rows.append(compare(name, options.seeds, known))
            print(json.dumps(rows[-1]), flush=True)
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    text = table(rows)
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
