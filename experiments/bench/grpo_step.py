"""How fast is one step of GRPO beside TRL's, on the same weights and the same batch, and is it the same step?

    python -m experiments.bench.grpo_step --trl-python PATH/TO/VENV/bin/python [--model models/SmolLM2-135M-Instruct]

Each side in a process of its own, taking turns (A B C A B C …), float32. A batch is groups of 16 completions to a
prompt of 16 tokens. TRL runs once with its defaults, which recompute activations ("gradient checkpointing"), and once
without, its fastest. Cases: a random Llama (hidden 128, 4 layers, vocabulary 512) with 64 completions of 64 tokens, the
same with ragged completions (4 to 64 tokens, log-uniform); with `--model` that model instead, 16 completions, in a file
of its own, and only the fastest sides: all stay in memory at once.

    update      log-probabilities with gradient, two-sided clip, backward, gradient norm, AdamW, of a batch that is
                given; TRL's own `GRPOTrainer.compute_loss`
    whole step  the batch is generated first, decoded and rewarded (no answer ends early); TRL's own `train()`. Ours
                once more with what TRL has not: a TOPLOC proof of every 32 tokens

Times are CPU seconds of the process on `--threads` threads, which a busy machine stretches less than wall time; medians
over the repetitions, the first step of each side left out. Loss and gradient norm of that first step are compared.
Without `--trl-python` (and without TRL in this environment) only this side is timed. Leaves `results/grpo_step.md` and
`results/grpo_step.json`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.bench.grpo_whole import (
    ANSWER,
    CLIP_NORM,
    GROUP,
    PROMPT,
    Clock,
    Step,
    learner_of,
    ours_whole,
    train_trl_whole,
    trl_settings,
)

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"


def make_batch(path: Path, count: int, vocabulary: int, ragged: bool, seed: int) -> int:
    """Prompts, completions, behaviour log-probabilities and advantages; returns the number of completion tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(4), np.log(ANSWER), count)).astype(int) if ragged else np.full(count, ANSWER)
    np.savez(
        path,
        prompt=rng.integers(1, vocabulary, (count // GROUP, PROMPT)).repeat(GROUP, axis=0),
        answer=rng.integers(1, vocabulary, (count, ANSWER)),
        length=lengths,
        behaviour=(-np.log(vocabulary) + 0.05 * rng.standard_normal((count, ANSWER))).astype(np.float32),
        advantage=rng.normal(size=count).astype(np.float32),
    )
    return int(lengths.sum())


# --- our side ---------------------------------------------------------------------------------------------------------


def ours(model: Path, batch: dict[str, np.ndarray]) -> Step:
    from refimpl.grpo.packing import TrainSample
    from refimpl.model.weights import load_decoder

    samples = [
        TrainSample(
            prompt=batch["prompt"][i].astype(np.int32),
            answer=batch["answer"][i, :length].astype(np.int32),
            behaviour=batch["behaviour"][i, :length],
            advantage=float(batch["advantage"][i]),
        )
        for i, length in enumerate(batch["length"])
    ]
    learner = learner_of(load_decoder(model, dtype=torch.float32, device="cpu"))

    def step() -> tuple[float, float]:
        report = learner.step(samples)
        return report.loss, report.gradient_norm

    return step


# --- TRL's side, in its own environment -------------------------------------------------------------------------------


def trls(model: Path, batch: dict[str, np.ndarray], checkpointing: bool) -> Step:
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<eos>": 1, "<pad>": 2}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", eos_token="<eos>", pad_token="<pad>"
    )  # fmt: skip
    count = len(batch["length"])
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(**trl_settings(folder, count, checkpointing), num_generations=count)
        trainer = GRPOTrainer(
            model=network,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": ["a"] * 4}),
            processing_class=tokenizer,
        )
    trainer.current_gradient_accumulation_steps = 1
    if checkpointing:  # as its training loop does when it begins
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = trainer.create_optimizer()
    mask = torch.arange(ANSWER) < torch.tensor(batch["length"])[:, None]
    width = int(batch["length"].max())
    inputs = {
        "prompt_ids": torch.tensor(batch["prompt"]),
        "prompt_mask": torch.ones(count, PROMPT, dtype=torch.int64),
        "completion_ids": torch.tensor(batch["answer"])[:, :width],
        "completion_mask": mask.long()[:, :width],
        "advantages": torch.tensor(batch["advantage"]),
        "old_per_token_logps": torch.tensor(batch["behaviour"])[:, :width],
        "num_items_in_batch": mask.sum(),
    }
    network.train()

    def step() -> tuple[float, float]:
        loss = trainer.compute_loss(trainer.model, inputs)
        trainer.accelerator.backward(loss)
        norm = trainer.accelerator.clip_grad_norm_(network.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), float(norm)

    return step


# --- taking turns -----------------------------------------------------------------------------------------------------


def serve(side: str, whole: bool, model: Path, batch: Path, threads: int) -> None:
    """Take one step for each line on stdin; answer with a line of JSON."""
    torch.set_num_threads(threads)
    with np.load(batch) as stored:
        arrays = dict(stored)
    if whole and side.startswith("trl"):
        train_trl_whole(model, arrays, checkpointing=side == "trl-default")
        return
    if side.startswith("trl"):
        step = trls(model, arrays, checkpointing=side == "trl-default")
    else:
        step = ours_whole(model, arrays, proven=side == "ours-proven") if whole else ours(model, arrays)
    for _ in sys.stdin:
        clock = Clock()
        clock.reply(*step())


class Side:
    """One side in a process of its own."""

    def __init__(self, side: str, whole: bool, python: str, model: Path, batch: Path, threads: int) -> None:
        command = [python, str(Path(__file__).resolve()), "--serve", side, "--model", str(model), "--batch", str(batch)]
        self._process = subprocess.Popen(
            [*command, "--threads", str(threads), *(["--whole"] if whole else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )

    def step(self) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith("REPLY "):
                return json.loads(line.removeprefix("REPLY "))
        raise RuntimeError(f"a side ended with status {self._process.wait()}: {self._process.args!r}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def weight_bytes(model: Path) -> int:
    """Size of a checkpoint: steps of large ones are repeated a fifth as often."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def compare(name: str, whole: bool, model: Path, batch: Path, tokens: int, args: argparse.Namespace) -> dict[str, Any]:
    small = weight_bytes(model) < 1e8  # of a large one, only the fastest sides: all stay in memory
    pythons = {"ours": sys.executable} | ({"ours-proven": sys.executable} if whole and small else {})
    if args.trl_python:
        pythons |= {"trl": args.trl_python} | ({"trl-default": args.trl_python} if small else {})
    sides = {side: Side(side, whole, python, model, batch, args.threads) for side, python in pythons.items()}
    times: dict[str, list[float]] = {side: [] for side in sides}
    first: dict[str, dict[str, float]] = {}
    for turn in range(args.repetitions + 1):
        for side, process in sides.items():
            reply = process.step()
            if turn == 0:
                first[side] = reply
            else:
                times[side].append(reply["cpu_s"])
    for process in sides.values():
        process.close()
    what = "whole step" if whole else "update"
    row: dict[str, Any] = {"case": f"{what}, {name}", "tokens": tokens}
    row["seconds"] = {side: statistics.median(spent) for side, spent in times.items()}
    if "trl" in sides:
        row["ratios"] = {
            f"{mine} / {side}": statistics.median(a / b for a, b in zip(times[mine], times[side], strict=True))
            for mine in times
            if mine.startswith("ours")
            for side in times
            if side.startswith("trl")
        }
    if "trl" in sides and not whole:
        row["loss_difference"] = abs(first["ours"]["loss"] - first["trl"]["loss"])
        row["norm_ratio"] = first["ours"]["norm"] / first["trl"]["norm"]
    print(json.dumps(row), flush=True)
    return row


def cases(args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, bool, Path, int, bool]]:
    """(name, whole steps, model, completions, ragged)."""
    from refimpl.model.config import ModelConfig
    from refimpl.model.weights import random_decoder, save_checkpoint

    small = ModelConfig(
        family="llama",
        layers=4,
        hidden=128,
        intermediate=512,
        query_heads=4,
        kv_heads=4,
        head_dim=32,
        vocabulary=512,
        positions_max=512,
        eos_ids=(1,),
    )
    save_checkpoint(random_decoder(small, seed=1), folder / "small")
    name, model, count = "random Llama", folder / "small", 64
    if args.model:
        name, model, count = Path(args.model).name, Path(args.model), 16
    yield f"{name}, {count} x 64", True, model, count, False
    yield f"{name}, {count} x 64", False, model, count, False
    yield f"{name}, {count} x 4..64", False, model, count, True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", help="an interpreter that has TRL")
    parser.add_argument("--model", help="a checkpoint folder to compare on instead")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--serve", choices=("ours", "ours-proven", "trl", "trl-default"), help=argparse.SUPPRESS)
    parser.add_argument("--whole", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--batch", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve, args.whole, Path(args.model), Path(args.batch), args.threads)
        return
    if args.trl_python is None and importlib.util.find_spec("trl") is not None:
        args.trl_python = sys.executable
    if args.trl_python is None:
        print("TRL is not in this environment: only this side is timed (see --trl-python)")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for number, (case, whole, model, count, ragged) in enumerate(cases(args, folder)):
            vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
            batch = folder / f"batch{number}.npz"
            tokens = make_batch(batch, count, vocabulary, ragged, seed=number)
            rows.append(compare(case, whole, model, batch, tokens, args))
    write(rows, args)


def write(rows: list[dict[str, Any]], args: argparse.Namespace) -> None:
    RESULTS.mkdir(exist_ok=True)
    about = f"{platform.machine()}, {args.threads} thread(s), torch {torch.__version__}, {args.repetitions} repetitions"
    stem = f"grpo_step_{Path(args.model).name.lower()}" if args.model else "grpo_step"
    (RESULTS / f"{stem}.json").write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")
    if not args.trl_python:
        return
    lines = [
        "# One step of GRPO, beside TRL 1.16.0",
        "",
        f"CPU seconds, medians, taking turns; {about}. Made by `python -m experiments.bench.grpo_step"
        + (f" --model {args.model}`." if args.model else "`."),
        "",
        "| case | tokens trained | ours | TRL, fastest | TRL, defaults | ours / fastest | ours / defaults "
        "| losses differ by | gradient norms, ratio |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        for mine in [side for side in row["seconds"] if side.startswith("ours")]:
            name = row["case"] + (", with proofs" if mine == "ours-proven" else "")
            spent, apart = row["seconds"], row["ratios"]
            seconds = " | ".join(
                f"{spent[side]:.3f}" if side in spent else "–" for side in (mine, "trl", "trl-default")
            )
            pairs = [f"{mine} / {side}" for side in ("trl", "trl-default")]
            ratios = " | ".join(f"**{apart[pair]:.2f}**" if pair in apart else "–" for pair in pairs)
            same = (
                f"{row['loss_difference']:.1e} | {row['norm_ratio']:.6f}"
                if "norm_ratio" in row
                else "other answers | –"
            )
            lines.append(f"| {name} | {row['tokens']} | {seconds} | {ratios} | {same} |")
    lines.append("")
    (RESULTS / f"{stem}.md").write_text("\n".join(lines))


if __name__ == "__main__":
    main()
