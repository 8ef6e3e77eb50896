"""How does the cost of a token grow with the stages of a ring, the sequences in it, and their length?

Method: rings in this process (local world, no latency, one micro-batch): the median time from one decode step of the
whole batch to the next, at the end of prompts of that length; and the seconds until the first token. One setting is
varied at a time around 2 stages, 4 sequences, 64 tokens; all settings by turns, the median of the rounds. All stages
share this machine's cores, and only one works at a time: what grows with the stages is what a boundary adds.
Run: `env PYTHONMALLOC=malloc GLIBC_TUNABLES=glibc.malloc.hugetlb=1 python -m experiments.pipeline.growth [--model DIR]
[--rounds N]` (huge pages, as a ring's own processes have them). Results: `growth.json`, `growth.md`, `growth.png`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from experiments.pipeline.speed import Ring, markdown, random_prompts
from refimpl.model.config import ModelConfig

STAGES, BATCHES, LENGTHS = (1, 2, 3, 4, 5), (1, 4, 16, 64), (64, 256, 1024)
NEW_TOKENS, MEASURED = 14, ("ms_per_step", "ms_per_token", "first_token_s")
VARIED = {
    "stages": [(stages, 4, 64) for stages in STAGES],
    "batch": [(2, batch, 64) for batch in BATCHES],
    "length_tokens": [(2, 4, length) for length in LENGTHS],
}


def measured(model: str, varied: str, stages: int, batch: int, length: int) -> dict[str, Any]:
    """One ring, one batch of answers, after a short one that warms it up."""
    prompts = random_prompts(batch, length, ModelConfig.from_pretrained(model).vocabulary)

    async def body(ring: Ring) -> tuple[float, float]:
        await ring.generate([prompt[:8] for prompt in prompts], 3)
        first_s = await ring.generate(prompts, 1)
        ring.head.forget_cycles()
        await ring.generate(prompts, NEW_TOKENS)
        return first_s, ring.head.cycle_s()

    first_s, step_s = Ring(model, stages, rows=batch, capacity_tokens=length + NEW_TOKENS).run(body)
    return {
        "varied": varied,
        "stages": stages,
        "batch": batch,
        "length_tokens": length,
        "ms_per_step": step_s * 1e3,
        "ms_per_token": step_s * 1e3 / batch,
        "first_token_s": first_s,
        "load_average": round(os.getloadavg()[0], 1),
    }


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """A panel for what was varied."""
    figure, panels = plt.subplots(1, len(VARIED), figsize=(11, 3.4))
    for panel, varied in zip(panels, VARIED, strict=True):
        shown = [row for row in rows if row["varied"] == varied]
        panel.plot([row[varied] for row in shown], [row["ms_per_step"] for row in shown], "o-", label="a step")
        panel.plot([row[varied] for row in shown], [row["ms_per_token"] for row in shown], "s--", label="a token")
        if varied != "stages":
            panel.set_xscale("log", base=2)
        panel.set(xlabel=varied.replace("length_tokens", "tokens before"), ylabel="ms", ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.legend()
    figure.suptitle("Decode on one machine, around 2 stages, 4 sequences, 64 tokens")
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="models/SmolLM2-135M-Instruct")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rounds = []
    for _ in range(options.rounds):
        rounds.append(
            [measured(options.model, at, *setting) for at, settings in VARIED.items() for setting in settings]
        )
        print(json.dumps([[row["varied"], row["ms_per_step"]] for row in rounds[-1]]), flush=True)
    rows = [
        same[0] | {key: statistics.median(row[key] for row in same) for key in MEASURED}
        for same in zip(*rounds, strict=True)
    ]
    file = Path(__file__)
    file.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    file.with_suffix(".md").write_text("\n".join(markdown(rows)) + "\n")
    draw(rows, file.with_suffix(".png"))


if __name__ == "__main__":
    main()
