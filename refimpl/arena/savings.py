"""What an attack saves, measured here: CPU seconds per token of its answer, beside the honest engine's, in turns.

Only attacks whose code really does the smaller work: a model with fewer layers, one prefill instead of decoding.
Rounded weights are stored in bf16 here and save nothing; two models in lock step do more than a real draft would. For
those the roofline's word (`economics`) is all there is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from refimpl.arena.bench import Bench
from refimpl.arena.economics import seconds
from refimpl.attacks.catalogue import engine_of

MEASURED = ("layers-skipped", "early-exit", "cheap-tokens", "human-text", "repeated-text", "prompt-truncated")
FIRST_SEED = 7_000_000  # of answers that nobody has kept: the honest engine must write them


@dataclass(frozen=True, kw_only=True)
class Saving:
    """One attack. Seconds of CPU per token of an answer; the smallest of several turns."""

    attack: str
    tokens: int
    honest_s: float
    attack_s: float
    estimated: float  # share saved, by the roofline, per token

    @property
    def measured(self) -> float:
        return 1.0 - self.attack_s / self.honest_s


def savings(whole: Bench, batch: int = 8, tokens: int = 64, turns: int = 2) -> Iterator[Saving]:
    """Measured now, honest and all attacks by turns, since a busy machine slows with time."""
    bench = Bench(
        replace(whole.setting, tokens_max=min(tokens, whole.setting.tokens_max), batch=batch), whole.folder.parent
    )
    prompts = [bench.prompt(index) for index in range(batch)]
    seeds = [FIRST_SEED + index for index in range(batch)]
    engines: dict[str, Any] = {"honest": bench.shop.engine(bench.shop.decoder())}
    engines |= {name: engine_of(name)(bench.shop) for name in MEASURED}
    spent_s: dict[str, list[float]] = {name: [] for name in engines}
    priced: dict[str, tuple[int, float]] = {}
    for _ in range(turns):
        for name, engine in engines.items():
            began = time.process_time()
            answers = engine.answer(prompts, seeds)
            took_s, made = time.process_time() - began, sum(len(answer.tokens) for answer in answers)
            spent_s[name].append(took_s / made)
            priced[name] = made, seconds(engine.work(prompts, answers)) / made
    for name in MEASURED:
        made, price = priced[name]
        yield Saving(
            attack=name,
            tokens=made,
            honest_s=min(spent_s["honest"]),
            attack_s=min(spent_s[name]),
            estimated=1.0 - price / priced["honest"][1],
        )


def markdown(found: list[Saving], command: str) -> str:
    """The table: measured beside estimated."""
    lines = [
        f"`{command}`: milliseconds of CPU per token of an answer, batch 8, one thread, smallest of two turns; "
        "estimated: the roofline of the reference device, per token as well.",
        "",
        "| attack | answer tokens | honest, ms/token | attack, ms/token | saved, measured | saved, estimated |",
        "| " + " | ".join(["---"] * 6) + " |",
    ]
    for s in found:
        lines.append(
            f"| {s.attack} | {s.tokens} | {1e3 * s.honest_s:.2f} | {1e3 * s.attack_s:.2f} | {100 * s.measured:.0f} % | "
            f"{100 * s.estimated:.0f} % |"
        )
    return "\n".join(lines) + "\n"
