"""Real consecutive checkpoints: what a trainer would broadcast, version after version.

    python -m experiments.shardcast.checkpoints --model models/SmolLM2-135M-Instruct --into build/checkpoints/a

fp32 master weights, AdamW (β 0.9 and 0.99), real gradients of next-token loss on English text (the language reference
that comes with Python; for a model with an alphabet of digits, additions), eight optimizer steps per version as in
INTELLECT-2, and after each version the weights cast to bf16 and written as safetensors: v0, v1, v2, …

`start`: where the master weights begin. "grid": on the bf16 checkpoint itself, as a run begins that loads a published
model; hardly anything flips at first, for every weight has half a unit to go. "spread": each master weight somewhere in
its bf16 cell, evenly, as after long training; the share that flips is then the one that lasts. Next-token loss gives
gradients that agree more from step to step than a policy gradient's do, so weights move further: the harder case.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import random
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

STEPS_PER_VERSION = 8


def spread_over_cells(parameters: list[torch.nn.Parameter], generator: torch.Generator) -> None:
    """Move each master weight to a random place within half a bf16 unit of where it is; zeros stay zeros."""
    with torch.no_grad():
        for parameter in parameters:
            bits = parameter.view(torch.int32)  # bf16 keeps the upper 16 of these 32 bits
            noise = torch.randint(-0x7FFF, 0x8000, bits.shape, generator=generator, dtype=torch.int32)
            bits += torch.where(parameter != 0, noise, 0)


def training_text(vocabulary: int, seed: int) -> str:
    """English where the model can read it, additions where it knows digits only."""
    if vocabulary > 100:
        return "\n".join(pydoc_data.topics.topics.values())
    rng = random.Random(seed)
    pairs = [(rng.randrange(10, 100), rng.randrange(10, 100)) for _ in range(5000)]
    return "".join(f"{a}+{b}={a + b}" for a, b in pairs)


def make_checkpoints(
    model_folder: Path, into: Path, *, learning_rate: float, versions: int, start: str, tokens: int = 96, seed: int = 0
) -> list[Path]:
    """v0 … v{versions}; those that are there already are not made again (all or none)."""
    paths = [into / f"v{version}.safetensors" for version in range(versions + 1)]
    if all(path.exists() for path in paths):
        return paths
    into.mkdir(parents=True, exist_ok=True)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    text = training_text(len(tokenizer), seed)
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    generator = torch.Generator().manual_seed(seed)
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.to(torch.bfloat16))
    if start == "spread":
        spread_over_cells(parameters, generator)
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate, betas=(0.9, 0.99), fused=True)
    _save(model, paths[0])
    for path in paths[1:]:
        began_s = time.monotonic()
        for _ in range(STEPS_PER_VERSION):
            at = int(torch.randint(0, len(ids) - tokens, (1,), generator=generator))
            batch = ids[at : at + tokens][None]
            optimizer.zero_grad()
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
        _save(model, path)
        print(f"{path.name}: loss {loss.item():.3f}, {time.monotonic() - began_s:.0f} s", flush=True)
    return paths


def _save(model: torch.nn.Module, path: Path) -> None:
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.named_parameters()}
    hidden = path.with_suffix(".partial")
    save_file(weights, hidden)
    hidden.rename(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument("--learning-rate", type=float, default=3e-7)
    parser.add_argument("--versions", type=int, default=2)
    parser.add_argument("--start", choices=["grid", "spread"], default="spread")
    options = parser.parse_args()
    make_checkpoints(
        options.model,
        options.into,
        learning_rate=options.learning_rate,
        versions=options.versions,
        start=options.start,
    )


if __name__ == "__main__":
    main()
