"""Does reproducible sampling cost more than `torch.multinomial`?

    python -m experiments.bench.sampler [--model models/SmolLM2-135M-Instruct]

Times, in turn (A B C A B C …), on the same logits and with the same filters: our `sample` (which also reports the
log-probability), softmax and `torch.multinomial` behind our cut-offs, and behind the filters of transformers. Also the
verifier's `margins`. Times are CPU time on one thread, which a busy machine stretches less than wall time; medians over
the repetitions; ratios are to the second. Logits are a trained model's where `--model` is found (its own vocabulary),
and two synthetic kinds: *sharp* falls with the logarithm of the rank as language does (p ~ rank^-1.4), *flat* is normal
with deviation 2, whose nucleus holds a large part of the vocabulary: the worst case for every filter. Leaves
`results/sampler.md` and `results/sampler.json`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from refimpl.model.sampler import Sampling, cutoffs, sample, scale
from refimpl.toploc.sampling_proof import margins

RESULTS = Path(__file__).resolve().parent / "results"
TEXT = (
    "The sea covers most of the planet, and yet we know less of its floor than of the face of the moon. "
    "A ship that wants to cross it needs three things: a hull, a wind and a captain who can read the stars. "
)
SAMPLINGS = {
    "no filter": Sampling(temperature=0.8),
    "top-k 50": Sampling(temperature=0.8, top_k=50),
    "top-p 0.95": Sampling(temperature=0.8, top_p=0.95),
    "top-k 50, top-p 0.95, min-p 0.02": Sampling(temperature=0.8, top_k=50, top_p=0.95, min_p=0.02),
}


def synthetic(kind: str, rows: int, vocabulary: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    if kind == "flat":
        return 2 * torch.randn(rows, vocabulary, generator=generator)
    ranks_V = torch.arange(1, vocabulary + 1).float()
    order_BV = torch.rand(rows, vocabulary, generator=generator).argsort(dim=-1)
    return (-1.4 * ranks_V.log())[order_BV] + 0.3 * torch.randn(rows, vocabulary, generator=generator)


def of_model(path: Path, rows: int) -> Tensor:
    """Logits of the last `rows` tokens of a short text."""
    ids_1T = torch.tensor([AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits_TV: Tensor = model(input_ids=ids_1T).logits[0]
    return logits_TV[:: max(1, len(logits_TV) // rows)][:rows].clone()


def multinomial(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    scaled_BV = scale(logits_BV, sampling)
    if sampling.filtered:
        scaled_BV = scaled_BV.masked_fill(scaled_BV < cutoffs(scaled_BV, sampling)[:, None], -torch.inf)
    return torch.multinomial(torch.softmax(scaled_BV, dim=-1), 1)


def transformers_way(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    scaled_BV, none = scale(logits_BV, sampling), torch.LongTensor()
    if sampling.top_k:
        scaled_BV = TopKLogitsWarper(sampling.top_k)(none, scaled_BV)
    if sampling.top_p < 1:
        scaled_BV = TopPLogitsWarper(sampling.top_p)(none, scaled_BV)
    if sampling.min_p:
        scaled_BV = MinPLogitsWarper(sampling.min_p)(none, scaled_BV)
    return torch.multinomial(torch.softmax(scaled_BV, dim=-1), 1)


def in_turn(calls: dict[str, Callable[[], Any]], repetitions: int) -> dict[str, float]:
    """Median CPU seconds of each call, all taken in turn; slow cases end after 2 s, with 5 repetitions at least."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.process_time()
    for repetition in range(repetitions + 2):
        for name, call in calls.items():
            start = time.process_time()
            call()
            if repetition >= 2:
                times[name].append(time.process_time() - start)
        if repetition >= 6 and time.process_time() - began > 2:
            break
    return {name: statistics.median(values) for name, values in times.items()}


def measure(source: str, logits_BV: Tensor, filters: str, repetitions: int) -> dict[str, Any]:
    sampling, batch = SAMPLINGS[filters], len(logits_BV)
    seeds_B, positions_B = torch.arange(batch), torch.arange(batch)
    tokens_B, _ = sample(logits_BV, seeds_B, positions_B, sampling)
    median_s = in_turn(
        {
            "sample": lambda: sample(logits_BV, seeds_B, positions_B, sampling),
            "multinomial": lambda: multinomial(logits_BV, sampling),
            "transformers": lambda: transformers_way(logits_BV, sampling),
            "margins": lambda: margins(logits_BV, tokens_B, seeds_B, positions_B, sampling),
        },
        repetitions,
    )
    return {
        "logits": source,
        "vocabulary": logits_BV.shape[1],
        "batch": batch,
        "filters": filters,
        **{f"{name}_us": value * 1e6 for name, value in median_s.items()},
        "ratio_to_multinomial": median_s["sample"] / median_s["multinomial"],
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| logits | vocabulary | batch | filters | ours, µs | softmax + multinomial, µs | ours / that "
        "| transformers' filters + multinomial, µs | verifier's margins, µs |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        lines.append(
            f"| {r['logits']} | {r['vocabulary']} | {r['batch']} | {r['filters']} | {r['sample_us']:.0f} "
            f"| {r['multinomial_us']:.0f} | {r['ratio_to_multinomial']:.2f} | {r['transformers_us']:.0f} "
            f"| {r['margins_us']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("models/SmolLM2-135M-Instruct"))
    parser.add_argument("--repetitions", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sources = {("sharp", v): synthetic("sharp", 8, v) for v in (49_152, 152_064)}
    sources |= {("flat", v): synthetic("flat", 8, v) for v in (49_152, 152_064)}
    if options.model.exists():
        logits_BV = of_model(options.model, 8)
        sources = {(options.model.name, logits_BV.shape[1]): logits_BV} | sources
    rows = [
        measure(source, logits_BV[:batch].contiguous(), filters, options.repetitions)
        for (source, _), logits_BV in sources.items()
        for batch in (1, 8)
        for filters in SAMPLINGS
    ]
    machine = f"{platform.machine()}, torch {torch.__version__}, one thread, CPU time"
    text = f"# Reproducible sampling beside torch.multinomial\n\n{machine}\n\n{table(rows)}\n"
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sampler.md").write_text(text, encoding="utf-8")
    (RESULTS / "sampler.json").write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    print(text)


if __name__ == "__main__":
    main()
