"""How far may an honest stage be from a replay of its own input, and how near can a cheat come?

Question: an accused stage's layers are run on exactly the bytes that it was fed (`refimpl/pipeline/judge.py`, `trial`).
Which difference still counts as honest? Two rules are compared: one replay (the verifier's own dtype, torch's fused
attention), and the nearest of the replays in every dtype and attention kernel that a ring permits.
Method: some layers of a model, as a stage runs them: two rows, prompts in chunks of 16, then token by token through a
cache, activations sent as bfloat16. Honest: every dtype x kernel. Attacks: those of `refimpl.attacks.ring` that change
what is computed, in every dtype x kernel too (of a model as large as SmolLM2: in one, by turns). Error:
`refimpl.pipeline.replay.difference` of one sequence, in the chunks of the blame matrix.
Run: `python -m experiments.pipeline.trial_noise [--models random,tiny,smollm] [--cuts N]`. Results: `trial_noise.md`;
raw, `runs/trial_noise.jsonl` (a line per cut; those that are there are not run again).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from experiments.pipeline.blame_matrix import random_model
from refimpl.attacks.ring import RING_CHEATS, Cheat
from refimpl.model.config import ModelConfig
from refimpl.model.transformer import Decoder
from refimpl.model.weights import load_decoder
from refimpl.pipeline.compute import DTYPES, StageCompute
from refimpl.pipeline.replay import ARITHMETICS, Arithmetic, difference
from refimpl.pipeline.schedule import Pass, PassRow

ATTACKS = ("layer-skipped", "weights-4bit", "stale-weights", "old-reply", "tampered-below-top-k")
PREFILL_TOKENS = 16


def passes(inputs: list[list[int]], prompts: list[int]) -> Iterator[Pass]:
    """Both rows: prompt in chunks, then one token a pass until the shorter row ends, then the other alone."""
    done, number = [0, 0], 0
    while done != [len(row) for row in inputs]:
        rows = []
        for at, tokens in enumerate(inputs):
            left = (prompts[at] if done[at] < prompts[at] else len(tokens)) - done[at]
            new = min(left, PREFILL_TOKENS if done[at] < prompts[at] else 1)
            if new:
                fed = tuple(tokens[done[at] : done[at] + new])
                rows.append(PassRow(at, done[at], new, False, 0, 0, fed))
        alone = rows[0].request if len(rows) == 1 else 0
        yield Pass(1, number, 0, alone, tuple(rows))
        for row in rows:
            done[row.request] += row.new
        number += 1


def as_a_stage(
    decoder: Decoder, tokens: list[list[int]], prompts: list[int], fed: list[np.ndarray] | None, cheat: Cheat
) -> list[torch.Tensor]:
    """What this stage sends for both sequences, float32 [T, D] each."""
    stage = StageCompute(
        cheat.layers(decoder),
        micro_batches=1,
        rows=2,
        capacity_tokens=max(map(len, tokens)),
        sampling=None,
        dtype="bfloat16",
    )
    memory, sent = cast(Any, SimpleNamespace(history={})), ([], [])  # type: tuple[list, list]
    for made in passes(tokens, prompts):
        states = None
        if fed is not None:
            states = np.concatenate([fed[row.request][row.past : row.past + row.new] for row in made.rows])
        out = cheat.made(memory, made, stage.run(made, (), states).states)
        at = 0
        for row in made.rows:
            sent[row.request].append(out[at : at + row.new])
            at += row.new
    return [as_floats(np.concatenate(parts)) for parts in sent]


def as_floats(states: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(states.view(np.int16).copy()).view(torch.bfloat16).float()


def as_bits(states_TD: torch.Tensor) -> np.ndarray:
    return states_TD.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


@torch.inference_mode()
def measured_cut(model: str, path: Path, seed: int, counts: tuple[int, ...]) -> dict[str, Any]:
    """One stage somewhere in the model: errors[attack][own arithmetic] = for each row, the error to every replay."""
    config = ModelConfig.from_pretrained(path)
    rng = np.random.default_rng([seed, config.layers])
    count = counts[seed % len(counts)]
    first = int(rng.integers(0, config.layers - count))  # never the last layer: what that stage sends is tokens
    small = config.hidden < 256
    lengths, prompts, chunk_tokens = ([23, 17], [9, 4], 8) if small else ([68, 41], [24, 11], 32)
    tokens = [rng.integers(0, config.vocabulary, n).tolist() for n in lengths]
    layers = range(first, first + count)

    def load(arithmetic: Arithmetic, part: range) -> Decoder:
        dtype, kernel = arithmetic
        return load_decoder(path, layers=part, dtype=DTYPES[dtype], device="cpu", attention=kernel)

    fed = None
    if first:
        before = load(ARITHMETICS[0], range(first))
        fed = [as_bits(before(torch.tensor([row]))[0]) for row in tokens]
        del before
    replays = []
    for arithmetic in ARITHMETICS:
        decoder = load(arithmetic, layers)
        inputs = [torch.tensor([row]) for row in tokens] if fed is None else [as_floats(f)[None] for f in fed]
        replays.append([decoder(one)[0].float() for one in inputs])
    errors: dict[str, dict[str, list[list[float]]]] = {}
    for attack in ("honest", *ATTACKS):
        errors[attack] = {}
        few = attack != "honest" and not small  # a large model's attacks: one arithmetic per cut
        for arithmetic in ARITHMETICS[seed % 6 :][:1] if few else ARITHMETICS:
            sent = as_a_stage(load(arithmetic, layers), tokens, prompts, fed, RING_CHEATS[attack])
            errors[attack]["/".join(arithmetic)] = [
                [round(difference(one, replay[row], chunk_tokens), 6) for replay in replays]
                for row, one in enumerate(sent)
            ]
    return {"model": model, "seed": seed, "first": first, "layers": count, "errors": errors}


Rule = Callable[[list[float], str], float]
NAMES = ["/".join(arithmetic) for arithmetic in ARITHMETICS]
RULES: dict[str, Rule] = {
    "one replay, bfloat16": lambda errors, own: errors[NAMES.index("bfloat16/sdpa")],
    "one replay, float32": lambda errors, own: errors[NAMES.index("float32/sdpa")],
    "own arithmetic": lambda errors, own: errors[NAMES.index(own)],
    "nearest of six": lambda errors, own: min(errors),
}


def table(rows: list[dict[str, Any]]) -> str:
    """Honest noise by model and rule, then how near each attack comes under the rule in use."""
    lines = [
        "| model | rule | honest sequences | median | 99 % | largest | smallest of an attack | between them |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model in dict.fromkeys(row["model"] for row in rows):
        for rule in RULES:
            honest = values(rows, model, "honest", rule)
            attack, nearest = min(((a, min(values(rows, model, a, rule))) for a in ATTACKS), key=lambda item: item[1])
            lines.append(
                f"| {model} | {rule} | {len(honest)} | {np.median(honest):.4f} | {np.quantile(honest, 0.99):.4f} | "
                f"{max(honest):.4f} | {nearest:.4f} ({attack}) | {nearest / max(honest):.1f} x |"
            )
    lines += ["", "By layers of the stage, nearest of six:", ""]
    lines += ["| model | layers | honest, largest | " + " | ".join(f"{a}, smallest" for a in ATTACKS) + " |"]
    lines += ["|---" * (3 + len(ATTACKS)) + "|"]
    for model in dict.fromkeys(row["model"] for row in rows):
        for count in sorted({row["layers"] for row in rows if row["model"] == model}):
            mine = [row for row in rows if row["layers"] == count]
            least = [f"{min(values(mine, model, a, 'nearest of six')):.4f}" for a in ATTACKS]
            most = max(values(mine, model, "honest", "nearest of six"))
            lines.append(f"| {model} | {count} | {most:.4f} | {' | '.join(least)} |")
    return "\n".join([*lines, ""])


def values(rows: list[dict[str, Any]], model: str, attack: str, rule: str) -> list[float]:
    """The error of every sequence under a rule."""
    return [
        RULES[rule](errors, own)
        for row in rows
        if row["model"] == model
        for own, sequences in row["errors"][attack].items()
        for errors in sequences
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", default="random,tiny,smollm")
    parser.add_argument("--smollm", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--cuts", type=int, default=60)
    options = parser.parse_args()
    file = Path("runs/trial_noise.jsonl")
    file.parent.mkdir(exist_ok=True)
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    there = {(row["model"], row["seed"]) for row in rows}
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "random": (random_model(Path(folder)), (1, 2, 3, 4, 5, 6)),
            "tiny": (Path("tests/data/tiny-model"), (1, 2, 3, 4)),
            "smollm": (Path(options.smollm), (1, 3, 8, 15, 29)),
        }
        for model in options.models.split(","):
            for seed in range(options.cuts):
                if (model, seed) in there:
                    continue
                rows.append(measured_cut(model, models[model][0], seed, models[model][1]))
                with file.open("a") as out:
                    out.write(json.dumps(rows[-1]) + "\n")
    text = table(rows)
    Path(__file__).with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
