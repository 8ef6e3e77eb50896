"""Who is blamed: every attack, at every position, in rings of 2 to 5 stages.

Question: how often is the guilty stage named, and is an innocent one ever? Honest noise is in every run: stages compute
in bfloat16 and float32 and with two attention kernels, the verifier in either dtype.
Method: whole rings (`refimpl.attacks.ring_trial`), the real model, signatures, proofs and verifier; in virtual time
over uneven devices and lines that are drawn per run (`ring_world.py`), or with `--world local` by the wall clock. Cuts
and prompts are drawn per run too. A run counts as right when somebody is blamed and all of them are guilty, as wrong
when anybody blamed is innocent. Thresholds of the proofs: preset "paper". Exact 95 % intervals.
Run: `python -m experiments.pipeline.blame_matrix [--model DIR] [--runs N] [--attacks a,b] [--stages 2,3] [--at 1]
[--name X]`. Without --model: a random seven-layer model, made in a temporary folder. Cells are appended to `NAME.jsonl`
as they are done; those that are there are not run again. `NAME.md` is the table.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from experiments.pipeline.ring_world import UnevenFabric
from refimpl.attacks.ring_trial import TrialConfig, TrialResult, try_ring
from refimpl.model.config import ModelConfig
from refimpl.model.weights import random_decoder, save_checkpoint

COMPUTED = ("layer-skipped", "weights-4bit", "stale-weights", "old-reply")
LINKS = ("tampered-send", "tampered-commitment", "tampered-below-top-k")
PAIR = "pair: send tampered + neighbour looks away"
PAIR_BELOW = "pair: below top K + neighbour looks away"
ATTACKS = ("honest", *COMPUTED, *LINKS, "receipt-withheld", "complaint-forged", PAIR, PAIR_BELOW)
NOISE: tuple[dict[str, Any], ...] = (
    {"dtype": "bfloat16"},
    {"dtype": "float32"},
    {"dtype": "bfloat16", "attention": "eager"},
    {"dtype": "float32", "attention": "eager"},
)
NOBODY = ("honest", "receipt-withheld")
"""Nobody is to be blamed for these: the second is a soft verdict on a link."""


def positions(attack: str, stages: int) -> range:
    """Where an attack can be: what is sent on has a successor, what is accused a predecessor."""
    if attack in LINKS or attack in (PAIR, PAIR_BELOW):
        return range(stages - 1)
    if attack in ("complaint-forged", "receipt-withheld"):
        return range(1, stages)
    return range(1) if attack == "honest" else range(stages)


def cheats_of(attack: str, at: int) -> dict[int, str]:
    """Which stages do what."""
    if attack == PAIR:
        return {at: "tampered-send", at + 1: "looks-away"}
    if attack == PAIR_BELOW:
        return {at: "tampered-below-top-k", at + 1: "looks-away"}
    return {at: attack}


def one(
    config: ModelConfig, checkpoint: Path, attack: str, stages: int, at: int, seed: int, world: str = "sim"
) -> TrialResult:
    """One ring."""
    rng = np.random.default_rng([seed, stages, at, sum(map(ord, attack))])
    cuts = (*sorted(int(c) for c in rng.choice(np.arange(1, config.layers), stages - 1, replace=False)), config.layers)
    small = config.hidden < 256
    lengths, new = ([9, 4], (14, 9)) if small else ([24, 11], (44, 30))
    trial = TrialConfig(
        checkpoint=checkpoint,
        layers=config.layers,
        hidden=config.hidden,
        cuts=cuts,
        prompts=tuple(tuple(rng.integers(0, config.vocabulary, n).tolist()) for n in lengths),
        new_tokens=new,
        seed=int(rng.integers(1 << 30)),
        verifier_dtype=("bfloat16", "float32")[int(rng.integers(2))],
        chunk_tokens=8 if small else 32,
        top_k=32 if small else 128,
    )
    options = {stage: NOISE[int(rng.integers(len(NOISE)))] for stage in range(stages + 1)}
    return try_ring(trial, cheats_of(attack, at), options, fabric=UnevenFabric(trial.seed) if world == "sim" else None)


def random_model(folder: Path) -> Path:
    """Seven layers of random weights, large enough to matter."""
    config = ModelConfig(
        family="qwen2",
        layers=7,
        hidden=24,
        intermediate=40,
        query_heads=4,
        kv_heads=2,
        head_dim=6,
        vocabulary=61,
        positions_max=256,
        tied_head=True,
        qkv_bias=True,
        name="random",
    )
    return save_checkpoint(random_decoder(config, seed=3, std=0.25), folder)


def cell(
    config: ModelConfig, checkpoint: Path, attack: str, stages: int, at: int, runs: int, world: str
) -> dict[str, Any]:
    """One cell of the matrix. Seeds of runs that blamed an innocent, or nobody where somebody is guilty, are named."""
    began = time.process_time()
    results = [one(config, checkpoint, attack, stages, at, seed, world) for seed in range(runs)]
    guilty = set() if attack in NOBODY else set(cheats_of(attack, at))
    return {
        "attack": attack,
        "stages": stages,
        "position": at,
        "runs": runs,
        "right": sum(bool(r.blamed) and r.blamed <= guilty for r in results),
        "wrong": sum(bool(r.blamed - guilty) for r in results),
        "wrong_seeds": [seed for seed, r in enumerate(results) if r.blamed - guilty],
        "missed_seeds": [seed for seed, r in enumerate(results) if guilty and not r.blamed],
        "by_complaint": sum(bool(r.by_complaint) for r in results),
        "answers_accepted": sum(r.accepted for r in results),
        "answers_rejected": sum(r.rejected for r in results),
        "answers_undecided": sum(r.undecided for r in results),
        "world": world,
        "cpu_s": round(time.process_time() - began, 1),
    }


def rate(hits: int, runs: int) -> str:
    """Rate with its exact interval."""
    interval = binomtest(hits, runs).proportion_ci(method="exact")
    return f"{hits}/{runs} = {hits / runs:.3f} [{interval.low:.4f}, {interval.high:.4f}]"


def table(rows: list[dict[str, Any]], name: str) -> str:
    """Attack by attack, over all positions and ring sizes; then every cell that did not go as it should."""
    stages = sorted({row["stages"] for row in rows})
    runs = sorted({row["runs"] for row in rows})
    lines = [
        f"Model: {name}. {len(rows)} cells (attack, position, rings of {stages[0]} to {stages[-1]} stages) of "
        f"{runs[0]} to {runs[-1]} runs. Exact 95 % intervals.",
        "",
        "| attack | guilty stage blamed | innocent blamed | by complaint | answers accepted / rejected / undecided |",
        "|---|---|---|---|---|",
    ]
    rows = sorted(rows, key=lambda row: (ATTACKS.index(row["attack"]), row["stages"], row["position"]))
    for attack in dict.fromkeys(row["attack"] for row in rows):
        mine = [row for row in rows if row["attack"] == attack]
        total = {key: sum(row[key] for row in mine) for key in mine[0] if isinstance(mine[0][key], int)}
        right = "nobody to blame" if attack in NOBODY else rate(total["right"], total["runs"])
        answers = " / ".join(str(total[f"answers_{kind}"]) for kind in ("accepted", "rejected", "undecided"))
        lines.append(
            f"| {attack} | {right} | {rate(total['wrong'], total['runs'])} | {total['by_complaint']} | {answers} |"
        )
    all_runs, wrong = sum(row["runs"] for row in rows), sum(row["wrong"] for row in rows)
    lines += [f"| all | | {rate(wrong, all_runs)} | | |", ""]
    short = [row for row in rows if row["wrong"] or (row["attack"] not in NOBODY and row["right"] < row["runs"])]
    if short:
        lines += [
            "Cells short of full marks:",
            "",
            "| attack | stages | position | right | wrong |",
            "|---|---|---|---|---|",
        ]
        lines += [
            f"| {r['attack']} | {r['stages']} | {r['position']} | {r['right']}/{r['runs']} | {r['wrong']} |"
            for r in short
        ]
    return "\n".join([*lines, ""])


def cells(attacks: list[str], stages: list[int], only: int | None) -> Iterator[tuple[str, int, int]]:
    """Every (attack, ring size, position), or of each attack only one position (the nearest it can have)."""
    for attack in attacks:
        for count in stages:
            places = positions(attack, count)
            for at in places if only is None else [min(places, key=lambda place: abs(place - only))]:
                yield attack, count, at


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--stages", default="2,3,4,5")
    parser.add_argument("--at", type=int, help="only this position of the guilty stage")
    parser.add_argument("--world", default="sim", choices=["sim", "local"])
    parser.add_argument("--name", default="blame_matrix")
    options = parser.parse_args()
    torch.set_num_threads(1)
    file = Path(__file__).with_name(f"{options.name}.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = {(row["attack"], row["stages"], row["position"]) for row in rows if row["runs"] >= options.runs}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(options.model) if options.model else random_model(Path(folder))
        config = ModelConfig.from_pretrained(checkpoint)
        for attack, stages, at in cells(
            options.attacks.split(","), [int(n) for n in options.stages.split(",")], options.at
        ):
            if (attack, stages, at) in there:
                continue
            rows.append(cell(config, checkpoint, attack, stages, at, options.runs, options.world))
            print(json.dumps(rows[-1]), flush=True)
            with file.open("a") as out:
                out.write(json.dumps(rows[-1]) + "\n")
    name = "random, 7 layers of 24" if options.model is None else Path(options.model).name
    text = table(rows, name)
    file.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
