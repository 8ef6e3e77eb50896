"""Why: whether cheating pays in a swarm: what each cheat saves, how often it was caught, and what that costs it.

Per answer, in costs of an honest one (`refimpl/arena/economics.py`): profit = saved - audit · caught · (penalty + pay).
Saved is the roofline's word on one reference device, for answers of the run's mean length; caught is the run's own rate
over *all* submissions that were judged, so the audit rate of a run is 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from refimpl.arena.economics import REFERENCE, Stakes, seconds
from refimpl.swarm import RealEngines
from sim.summary import BehaviourRow

PAY = 1.2  # of an honest answer, in its own costs: what makes honest work worth while


@dataclass(frozen=True)
class _Answer:
    """Of a length; all that pricing looks at."""

    tokens: Any


def saved_share(engines: RealEngines, behaviour: str, tokens: int) -> float:
    """1 - the cheat's cost over the honest one's, for a batch of answers of `tokens` tokens."""
    prompts = [engines.prompt_of(problem) for problem in range(engines.agreement.batch)]
    answers = [_Answer(np.zeros(max(1, tokens), dtype=np.int32)) for _ in prompts]
    cheat, honest = (seconds(engines.worker_engine(name).work(prompts, answers)) for name in (behaviour, "honest"))
    return 1.0 - cheat / honest


@dataclass(frozen=True)
class MoneyRow:
    """One cheat."""

    behaviour: str
    saved: float
    caught: float  # share of its judged submissions
    profit: float  # per answer, audited always
    break_even: float  # audit rate; 0: saves nothing; inf: no rate deters it

    @property
    def verdict(self) -> str:
        if self.saved <= 1e-9:
            return "saves nothing"
        return "pays" if self.profit > 0 else "does not pay"

    def as_json(self) -> dict[str, Any]:
        return {
            "behaviour": self.behaviour,
            "saved_share": round(self.saved, 6),
            "caught_share": round(self.caught, 6),
            "profit_per_answer_costs": round(self.profit, 6),
            "break_even_audit_rate": None if math.isinf(self.break_even) else round(self.break_even, 9),
            "verdict": self.verdict,
        }


@dataclass(frozen=True)
class Money:
    """Every cheat of a run, the one that gains most first."""

    stakes: Stakes
    rows: tuple[MoneyRow, ...]

    def table(self) -> str:
        head = (
            f"{'does cheating pay?':<20}{'saved':>8}{'caught':>9}{'profit an answer':>18}{'break-even audit':>18}"
            "  verdict"
        )
        lines = [head, "─" * len(head)]
        for row in self.rows:
            even = (
                "–" if row.saved <= 1e-9 else "none" if math.isinf(row.break_even) else f"{100 * row.break_even:.3g} %"
            )
            lines.append(
                f"{row.behaviour:<20}{100 * row.saved:>6.1f} %{100 * row.caught:>7.1f} %{row.profit:>18.2f}{even:>18}"
                f"  {row.verdict}"
            )
        paying = [row.behaviour for row in self.rows if row.verdict == "pays"]
        lines.append(
            f"In costs of an honest answer: pay {self.stakes.pay:g}, penalty {self.stakes.stake:.0f} for an answer "
            f"that is caught; saved on a {REFERENCE.name} (roofline); every answer is judged."
        )
        lines.append(f"It pays for: {', '.join(paying)}." if paying else "It pays for none of them.")
        return "\n".join(lines)

    def as_json(self) -> dict[str, Any]:
        stakes = {"pay_costs": self.stakes.pay, "penalty_costs": round(self.stakes.stake, 6)}
        return {**stakes, "attacks": [row.as_json() for row in self.rows]}


def money(rows: Iterable[BehaviourRow], saved: Mapping[str, float], stakes: Stakes) -> Money:
    """Of all cheats that were judged and of which it is known what they save."""
    found = []
    for row in rows:
        if row.honest or not row.judged or row.behaviour not in saved:
            continue
        share, caught = saved[row.behaviour], row.rejected / row.judged
        profit, even = stakes.profit(share, caught, 1.0), stakes.break_even(share, caught)
        found.append(MoneyRow(row.behaviour, share, caught, profit, even))
    return Money(stakes, tuple(sorted(found, key=lambda row: -row.profit)))
