"""What does a stage take, in a process of its own?

Question: is the peak memory of stage i, above that of a bare process with torch imported, at most 1.15 x its weights,
caches and activations?
Method: rings of real processes (`refimpl.pipeline.launch`), full caches: prompts that leave room for a few new tokens,
read in chunks. Peak: `VmHWM` of each process after the answers. Activations: what is alive at the widest place of a
layer in the largest pass, n (2 D + 4 I) numbers (the stream, its norm; gate, up, silu, their product). Two bare
processes: one that has imported torch, and one that has also run one matrix product, attention, norm and activation of
this dtype, so that the kernels' code is paged in (file pages, which the processes of a machine share). What is over is
nearly the same for every model: that code, the modules of the HTTP server and of the signatures, attention's own
buffers; and where hops are signed or tokens drawn at random, what is compiled for that and its compiler. A stage gives
the code back that only its imports ran (`refimpl/pipeline/node.py`), which the bare processes do not: some 40 MB less
than they hold. It is file pages, which the system keeps for whoever needs them, and which all processes share.
Run: `python -m experiments.pipeline.memory [--model DIR] [--cases N ...]`. Results: `memory.md`, `memory.json`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.pipeline.speed import markdown
from refimpl.model.config import ModelConfig
from refimpl.model.weights import random_decoder, save_checkpoint
from refimpl.pipeline.__main__ import arguments_of, node_file, prepared
from refimpl.pipeline.launch import started

PREFILL_TOKENS, CAPACITY_TOKENS, NEW = 128, 1024, 4
KERNELS = """
import torch, torch.nn.functional as F
torch.set_num_threads(1)
x, w = torch.ones(64, 64, dtype=torch.bfloat16), torch.ones(64, 64, dtype=torch.bfloat16)
q = F.rms_norm(F.linear(x, w), (64,), w[0])[None, None]
F.silu(F.scaled_dot_product_attention(q, q, q, is_causal=True)) * q
torch.mv(w, x[0]), torch.mm(w, x[:8].t())
"""
PEAK = "print(next(int(l.split()[1]) for l in open('/proc/self/status') if l.startswith('VmHWM')))"


def bare_bytes(done: str) -> int:
    """Peak of a process that has done this, and nothing else."""
    said = subprocess.run([sys.executable, "-c", f"{done}\n{PEAK}"], capture_output=True, text=True, check=True)
    return int(said.stdout) * 1024


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measured(model: str, stages: int, *, rows: int, more: tuple[str, ...]) -> list[dict[str, Any]]:
    """One ring with `more` options; a row for each stage."""
    bare, paged_in = bare_bytes("import torch"), bare_bytes(KERNELS)
    given = ["--model", model, "--stages", str(stages), "--rows", str(rows), "--new-tokens", str(NEW)]
    options = arguments_of().parse_args([*given, "--capacity-tokens", str(CAPACITY_TOKENS), *more])
    config = ModelConfig.from_pretrained(model)
    rng = np.random.default_rng(0)
    prompts = rng.integers(3, config.vocabulary, (rows, CAPACITY_TOKENS - NEW)).tolist()
    entries, configs = prepared(options, node_file(options), prompts)
    for node in configs:
        node["ring"] |= {"stop_tokens": [], "overdue_s_min": 600.0, "prefill_tokens": PREFILL_TOKENS}
        node["node"]["threads"] = 1
    with started(entries, configs) as children:
        children[0].read()
        children[0].read()
        peaks = [peak_bytes(child.process.pid) for child in children]
    edges = [0, *configs[0]["ring"]["cuts"]]
    found = []
    for at, peak in enumerate(peaks):
        size = config.size(range(edges[at], edges[at + 1]))
        weights = size.weight_bytes
        cache = rows * CAPACITY_TOKENS * size.kv_bytes_per_token
        activations = rows * PREFILL_TOKENS * (2 * config.hidden + 4 * config.intermediate) * 2
        ideal = weights + cache + activations
        found.append(
            {
                "model": Path(model).name,
                "ring": " ".join(more) or "greedy, unsigned",
                "stage": f"{at + 1} of {stages}",
                "layers": f"{edges[at]}..{edges[at + 1] - 1}",
                "weights_mb": weights / 1e6,
                "cache_mb": cache / 1e6,
                "activations_mb": activations / 1e6,
                "sum_mb": ideal / 1e6,
                "peak_above_bare_mb": (peak - bare) / 1e6,
                "ratio": (peak - bare) / ideal,
                "peak_above_paged_in_mb": (peak - paged_in) / 1e6,
                "ratio_paged_in": (peak - paged_in) / ideal,
            }
        )
    return found


def medium_model(folder: Path) -> str:
    """540 MB of random weights."""
    config = ModelConfig(
        family="qwen2",
        layers=24,
        hidden=1024,
        intermediate=2816,
        query_heads=16,
        kv_heads=4,
        head_dim=64,
        vocabulary=512,
        positions_max=2048,
        tied_head=True,
        qkv_bias=True,
        name="random",
    )
    return str(save_checkpoint(random_decoder(config, seed=1, dtype=torch.bfloat16), folder / "random-24x1024"))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--cases", type=int, nargs="*", default=[0, 1, 2, 3], help="which of the four rings")
    options = parser.parse_args()
    file = Path(__file__).with_suffix(".json")
    rows: list[dict[str, Any]] = json.loads(file.read_text()) if file.exists() else []
    with tempfile.TemporaryDirectory() as folder:
        medium = medium_model(Path(folder))
        plain, drawn, signed = (), ("--temperature", "0.7"), ("--signed",)
        cases = [(options.model, plain), (options.model, drawn), (medium, plain), (medium, signed)]
        for model, more in (cases[at] for at in options.cases):
            found = measured(model, 2, rows=8, more=more)
            same = [(row["model"], row["ring"]) == (found[0]["model"], found[0]["ring"]) for row in rows]
            at = same.index(True) if any(same) else len(rows)
            rows[at : at + sum(same)] = found
            print(json.dumps(found), flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
    file.with_suffix(".md").write_text("\n".join(markdown(rows)) + "\n")


if __name__ == "__main__":
    main()
