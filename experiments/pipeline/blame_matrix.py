"""Who is blamed: every attack, at every position, in rings of 2 to 5 stages.

Question: how often is the guilty stage named, and is an innocent one ever? Honest noise is in every run: stages compute
in bfloat16 and float32 and with two attention kernels, the verifier in bfloat16.
Method: real rings in one process (`refimpl.attacks.ring_trial`), real signatures and proofs, uneven cuts and prompts
drawn per run. A run counts as right when somebody is blamed and all of them are guilty, as wrong when anybody blamed is
innocent. Thresholds of the proofs: preset "paper", scaled to the smaller K of small models. Exact 95 % intervals.
Run: `python experiments/pipeline/blame_matrix.py [--model DIR] [--runs N] [--attacks a,b] [--stages 2,3] [--name X]`
Without --model: a random seven-layer model, made in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.stats import binomtest

from refimpl.attacks.ring_trial import TrialConfig, TrialResult, try_ring
from refimpl.model.config import ModelConfig
from refimpl.model.weights import random_decoder, save_checkpoint

COMPUTED = ("layer-skipped", "weights-4bit", "stale-weights", "old-reply")
LINKS = ("tampered-send", "tampered-commitment", "tampered-below-top-k")
PAIR = "pair: send tampered, neighbour looks away"
PAIR_BELOW = "pair: below top K, neighbour looks away"
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
    config: ModelConfig, checkpoint: Path, attack: str, stages: int, at: int, seed: int, small: bool
) -> TrialResult:
    """One ring."""
    rng = np.random.default_rng([seed, stages, at, sum(map(ord, attack))])
    cuts = (*sorted(int(c) for c in rng.choice(np.arange(1, config.layers), stages - 1, replace=False)), config.layers)
    lengths, new = ([9, 4], (14, 9)) if small else ([24, 11], (44, 30))
    trial = TrialConfig(
        checkpoint=checkpoint,
        layers=config.layers,
        hidden=config.hidden,
        cuts=cuts,
        prompts=tuple(prompt(rng, config, n) for n in lengths),
        new_tokens=new,
        seed=int(rng.integers(1 << 30)),
        chunk_tokens=8 if small else 32,
        top_k=32 if small else 128,
    )
    options = {stage: NOISE[int(rng.integers(len(NOISE)))] for stage in range(stages + 1)}
    return try_ring(trial, cheats_of(attack, at), options)


def prompt(rng: np.random.Generator, config: ModelConfig, tokens: int) -> tuple[int, ...]:
    """Random tokens; for the tiny model its own task, digits to be sorted (token 3 is "0", 15 is ">")."""
    if config.vocabulary == 16:
        return (*rng.integers(3, 13, tokens).tolist(), 15)
    return tuple(rng.integers(0, config.vocabulary, tokens).tolist())


def rate(hits: int, runs: int) -> str:
    """Rate with its exact interval."""
    interval = binomtest(hits, runs).proportion_ci(method="exact")
    return f"{hits}/{runs} = {hits / runs:.3f} [{interval.low:.3f}, {interval.high:.3f}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--runs", type=int, default=30)
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--stages", default="2,3,4,5")
    parser.add_argument("--name", default="blame_matrix")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = tempfile.TemporaryDirectory()
    checkpoint = Path(arguments.model) if arguments.model else random_model(Path(folder.name))
    config = ModelConfig.from_pretrained(checkpoint)
    small = config.hidden < 256
    rows = []
    for attack in arguments.attacks.split(","):
        for stages in map(int, arguments.stages.split(",")):
            for at in positions(attack, stages):
                rows.append(cell(config, checkpoint, attack, stages, at, arguments.runs, small))
                print(json.dumps(rows[-1]), flush=True)
    here = Path(__file__).with_name(arguments.name)
    here.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    here.with_suffix(".md").write_text(table(rows, config))
    print(table(rows, config))


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
        name="random, 7 layers of 24",
    )
    return save_checkpoint(random_decoder(config, seed=3, std=0.25), folder)


def cell(config: ModelConfig, checkpoint: Path, attack: str, stages: int, at: int, runs: int, small: bool) -> dict:
    """One cell of the matrix."""
    began = time.process_time()
    results = [one(config, checkpoint, attack, stages, at, seed, small) for seed in range(runs)]
    guilty = set() if attack in NOBODY else set(cheats_of(attack, at))
    return {
        "attack": attack,
        "stages": stages,
        "position": at,
        "runs": runs,
        "right": sum(bool(r.blamed) and r.blamed <= guilty for r in results),
        "wrong": sum(bool(r.blamed - guilty) for r in results),
        "by_complaint": sum(bool(r.by_complaint) for r in results),
        "answers_accepted": sum(r.accepted for r in results),
        "answers_rejected": sum(r.rejected for r in results),
        "answers_undecided": sum(r.undecided for r in results),
        "cpu_s": round(time.process_time() - began, 1),
    }


def table(rows: list[dict], config: ModelConfig) -> str:
    """Attack by attack, over all positions and ring sizes."""
    lines = [
        f"Model: {config.name}. Rates with exact 95 % intervals; all positions, rings of 2 to 5 stages.",
        "",
        "| attack | right stage blamed | innocent blamed | by complaint | answers accepted / rejected / undecided |",
        "|---|---|---|---|---|",
    ]
    for attack in dict.fromkeys(row["attack"] for row in rows):
        mine = [row for row in rows if row["attack"] == attack]
        total = {key: sum(row[key] for row in mine) for key in mine[0] if isinstance(mine[0][key], int)}
        right = "nobody to blame" if attack in NOBODY else rate(total["right"], total["runs"])
        answers = " / ".join(str(total[f"answers_{kind}"]) for kind in ("accepted", "rejected", "undecided"))
        lines.append(
            f"| {attack} | {right} | {rate(total['wrong'], total['runs'])} | {total['by_complaint']} | {answers} |"
        )
    runs, wrong = sum(row["runs"] for row in rows), sum(row["wrong"] for row in rows)
    return "\n".join([*lines, f"| all | | {rate(wrong, runs)} | | |", ""])


if __name__ == "__main__":
    main()
