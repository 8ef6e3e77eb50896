"""Is the engine faster than `transformers.generate`, and how much less than generating does verifying cost?

    python experiments/bench/generate.py [--rounds 5] [--new-tokens 48] [--threads N]

Same weights, same prompts, same greedy choice, ends of text forbidden, side by side: the two take turns, so that a busy
machine is busy for both. A ratio is that of the medians. In bf16 the two round differently, so their tokens part at
near ties. Then the same answers are replayed (one prefill over prompt and answer, which is what a validator does), and
that is compared with generating them with proofs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from refimpl.engine import ProofSettings, TorchEngine, set_threads
from refimpl.model.sampler import Sampling
from refimpl.model.weights import load_decoder
from refimpl.tokenizer import chat_ids, load_tokenizer

MODEL = Path(__file__).parents[2] / "models/SmolLM2-135M-Instruct"
QUESTIONS = (
    "Why is the sky blue?",
    "Write a short poem about rivers and the sea, with four lines.",
    "List three uses of copper.",
    "Explain to a child how a lighthouse works and why sailors needed one before there were satellites.",
    "Who are you?",
    "Compare trains with ships.",
    "Give instructions for baking bread without an oven, step by step.",
    "Describe a walk in the mountains in autumn.",
)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
WANTED = {("bf16", 1): 1.3, ("bf16", 8): 1.0}


def timed(work: Callable[[], Any]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def in_turn(works: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Median seconds of each, after one round that does not count; who goes first changes every round."""
    for work in works:
        work()
    taken: list[list[float]] = [[] for _ in works]
    for round_number in range(rounds):
        order = range(len(works)) if round_number % 2 == 0 else range(len(works) - 1, -1, -1)
        for place in order:
            taken[place].append(timed(works[place]))
    return [statistics.median(times) for times in taken]


class Theirs:
    """transformers, with left padding, as its documentation has it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=dtype).eval()
        self.model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
        width = max(map(len, prompts))
        tokens = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        made = self.model.generate(tokens, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False)
        return list(made[:, width:].tolist())


def ours(engine: TorchEngine, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[list[int]]:
    made = engine.generate(
        prompts,
        sampling=Sampling(temperature=0),
        seeds=[0] * len(prompts),
        max_new_tokens=new_tokens,
        eos_ids=frozenset(),
    )
    return [completion.tokens.tolist() for completion in made]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    options = parser.parse_args()
    threads = set_threads()
    if options.threads:
        torch.set_num_threads(threads := options.threads)
    if not MODEL.is_dir():
        sys.exit(f"{MODEL} is missing: make model")
    tokenizer = load_tokenizer(MODEL)
    asked = [chat_ids(tokenizer, question) for question in QUESTIONS]
    new_tokens = options.new_tokens
    print(f"SmolLM2-135M, {threads} threads, {new_tokens} new tokens, medians of {options.rounds} rounds")
    print(f"{'':12} transformers          ours   ours, proofs   ratio        same tokens")
    for name, dtype in DTYPES.items():
        theirs, decoder = Theirs(dtype), load_decoder(MODEL, dtype=dtype, device="cpu")
        plain, proving = (TorchEngine(decoder, name="smollm2", proof=p) for p in (None, ProofSettings()))
        for batch in (1, 8):
            prompts = asked[:batch]
            same = theirs.generate(prompts, new_tokens) == ours(plain, prompts, new_tokens)
            works = [
                partial(theirs.generate, prompts, new_tokens),
                partial(ours, plain, prompts, new_tokens),
                partial(ours, proving, prompts, new_tokens),
            ]
            peer_s, plain_s, proving_s = in_turn(works, options.rounds)
            rates = [batch * new_tokens / seconds for seconds in (peer_s, plain_s, proving_s)]
            wanted = f"(wanted {WANTED[name, batch]})" if (name, batch) in WANTED else ""
            print(
                f"{name} batch {batch:2}  {rates[0]:6.1f} tokens/s  {rates[1]:6.1f}/s      {rates[2]:6.1f}/s   "
                f"{peer_s / plain_s:5.2f} {wanted:12} {'yes' if same else 'no'}",
                flush=True,
            )
        for batch in (1, 8, 16) if name == "bf16" else ():
            prompts = (asked * 2)[:batch]
            engine = TorchEngine(decoder, name="smollm2", proof=ProofSettings(), batch_max=16)
            answers = ours(engine, prompts, new_tokens)
            generating, verifying = partial(ours, engine, prompts, new_tokens), partial(engine.replay, prompts, answers)
            generate_s, replay_s = in_turn([generating, verifying], options.rounds)
            print(
                f"{name} batch {batch:2}  verifying {replay_s * 1e3:6.0f} ms, generating {generate_s * 1e3:6.0f} ms: "
                f"{replay_s / generate_s:.3f} of the cost, {generate_s / replay_s:.1f} times cheaper",
                flush=True,
            )


if __name__ == "__main__":
    main()
