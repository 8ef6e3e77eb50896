"""GPU against CPU, and the GPU's kernels against each other: honest noise, parity of the noise generator, speeds.

Run by check.sh. Writes NAME.json and NAME.md into the results folder, NAME being the device's. With --device cpu it
runs on the CPU alone, which shows that the script works.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from refimpl.arena.verifiers import UNBOUNDED
from refimpl.engine import ProofSettings, TorchEngine
from refimpl.model.noise import gumbel_noise
from refimpl.model.sampler import Sampling
from refimpl.model.weights import load_decoder
from refimpl.tasks.prompts import PROMPTS, prompt_ids
from refimpl.tokenizer import load_tokenizer
from refimpl.toploc.check import verify_proofs
from refimpl.toploc.sampling_proof import clipped, margins

RULE = Sampling(temperature=0.8, top_p=0.95)


def spent(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """(what it gives, seconds)."""
    began = time.perf_counter()
    found = work()
    if device != "cpu":
        torch.cuda.synchronize()
    return found, time.perf_counter() - began


def pair(answers: Any, replays: Any) -> dict[str, float]:
    """Honest noise between a prover's answers and a verifier's replays."""
    chunks, means, equal = [], [], []
    for i, (answer, replay) in enumerate(zip(answers, replays, strict=True)):
        found = verify_proofs(replay.states.cpu(), answer.proofs, mode="published", thresholds=UNBOUNDED)
        chunks += found.chunks
        places = torch.arange(len(answer.tokens), device=replay.tokens.device)
        seeds = torch.full_like(places, 1000 + i)
        margin = margins(replay.logits(), replay.tokens, seeds, places, RULE, "distance").cpu()
        means.append(float(clipped(margin).mean()))
        equal.append(float((margin <= 0).double().mean()))
    mismatches = [chunk.exponent_mismatches for chunk in chunks]
    mantissa = [chunk.mantissa_mean for chunk in chunks]
    return {
        "answers": len(means),
        "mismatches_median": float(np.median(mismatches)),
        "mismatches_max": float(np.max(mismatches)),
        "mantissa_mean_median": float(np.median(mantissa)),
        "mantissa_mean_max": float(np.max(mantissa)),
        "margin_mean": float(np.mean(means)),
        "margin_max": float(np.max(means)),
        "match_rate": float(np.mean(equal)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--prompts", default="instructions")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    device = options.device
    name = torch.cuda.get_device_name() if device != "cpu" else "cpu"
    tokenizer, task = load_tokenizer(options.model), PROMPTS[options.prompts]
    prompts = [prompt_ids(task, i * 37 % task.count, tokenizer) for i in range(options.answers)]
    seeds = [1000 + i for i in range(options.answers)]

    places = torch.arange(8)
    here = gumbel_noise(places * 7, places, 0, 50_000)
    parity = torch.equal(here, gumbel_noise((places * 7).to(device), places.to(device), 0, 50_000).cpu())
    decoder = load_decoder(options.model, dtype=torch.bfloat16, device=device)
    beside = load_decoder(options.model, dtype=torch.bfloat16, device="cpu")
    engines = {
        f"{device} {kernel}": TorchEngine(
            decoder.with_attention(kernel), name="check", proof=ProofSettings(), batch_max=options.answers
        )
        for kernel in ("sdpa", "eager", "split")
    }
    engines["cpu sdpa"] = TorchEngine(beside, name="check", proof=ProofSettings(), batch_max=options.answers)
    few = max(1, options.answers // 4)  # what the CPU is given: it is slow
    rows: dict[str, dict[str, float]] = {}
    speeds: dict[str, float] = {}
    for prover, engine in engines.items():
        count = few if prover == "cpu sdpa" else options.answers
        answers, duration_s = spent(
            lambda engine=engine, count=count: engine.generate(
                prompts[:count], sampling=RULE, seeds=seeds[:count], max_new_tokens=options.tokens
            ),
            prover.split()[0],
        )
        speeds[f"generate, {prover}, tokens/s"] = sum(len(a.tokens) for a in answers) / duration_s
        for verifier, other in engines.items():
            share = few if "cpu sdpa" in (prover, verifier) else options.answers
            tokens = [answer.tokens for answer in answers[:share]]
            replays, duration_s = spent(
                lambda other=other, tokens=tokens: other.replay(prompts[: len(tokens)], tokens), verifier.split()[0]
            )
            speeds[f"replay, {verifier}, tokens/s"] = sum(map(len, [*tokens, *prompts[: len(tokens)]])) / duration_s
            rows[f"{prover} → {verifier}"] = pair(answers[:share], replays)
            print(f"{prover} → {verifier}: {rows[f'{prover} → {verifier}']}", flush=True)
    options.into.mkdir(parents=True, exist_ok=True)
    stem = options.into / re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-").lower()
    content = {"device": name, "torch": torch.__version__, "noise_bits_equal": parity, "pairs": rows, "speeds": speeds}
    stem.with_suffix(".json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    keys = list(next(iter(rows.values())))
    lines = [f"# {name}", "", f"torch {torch.__version__}; seeded noise equal to the CPU's, bit for bit: {parity}.", ""]
    lines += ["| prover → verifier | " + " | ".join(keys) + " |", "| " + " | ".join(["---"] * (1 + len(keys))) + " |"]
    lines += [f"| {pair_} | " + " | ".join(f"{row[key]:.4g}" for key in keys) + " |" for pair_, row in rows.items()]
    lines += ["", "| speed | |", "| --- | --- |", *(f"| {what} | {value:.0f} |" for what, value in speeds.items())]
    stem.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return 0 if parity else 1


if __name__ == "__main__":
    sys.exit(main())
