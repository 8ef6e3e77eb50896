"""The arena's results as numbers (JSON) and as tables (Markdown)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refimpl.arena.bench import Bench
from refimpl.arena.economics import REFERENCE, Stakes, seconds
from refimpl.arena.judge import Cell, Rate
from refimpl.arena.stats import tokens_to_detect, upper_bound
from refimpl.arena.verifiers import POLICIES, VERIFIERS
from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.honest import HONEST

Results = dict[str, Any]
HOLES = (
    ("signs are not compared", "sign-flipped", "toploc-strict"),
    ("nobody counts the proofs", "proofs-too-few", "toploc-strict"),
    ("what is not in the top K is not bound", "outside-top-k", "projection"),
    ("thresholds with room for 4 bits", "weights-4bit", "toploc-sequence"),
    ("thresholds with room for 8 bits", "weights-8bit", "projection"),
    ("thresholds with room for an 8-bit cache", "kv-8bit", "projection"),
    ("thresholds with room for a changed prompt", "prompt-altered", "toploc-sequence"),
    ("tokens of another model, read once", "cheap-tokens", "sampling-proof"),
    ("tokens of a person, read once", "human-text", "sampling-proof"),
    ("who chose the seed", "wrong-seed", "sampling-proof"),
    ("whether anything was drawn", "greedy", "sampling-proof"),
    ("correct speculative decoding, not by the seed", "draft-corrected", "sampling-proof"),
    ("answers cut short", "cut-early", "termination-calibrated"),
    ("answers cut short with a forged end", "cut-with-end", "termination-seed"),
)
"""What TOPLOC v1 as published leaves open: (the hole, an attack through it, who closes it)."""
PER_ANSWER = ("toploc-paper", "toploc-sequence", "projection", "sampling-proof")


def results(
    bench: Bench, cells: Mapping[str, Cell], limits: Mapping[str, float], measured: Mapping[str, float] | None = None
) -> Results:
    """Everything that tables, plots and baselines are made from. `measured`: shares saved, of `arena.savings`."""
    setting, names = bench.setting, [*VERIFIERS, *POLICIES]
    honest = [cell for name, cell in cells.items() if name in HONEST]
    honest_scores = {name: [s for cell in honest for s in cell.scores[name]] for name in VERIFIERS}
    honest_margins = [margins for cell in honest for margins in cell.margins]
    whole = sum(sum(cell.tokens) for cell in cells.values())
    table: dict[str, Any] = {}
    for behaviour, cell in cells.items():
        rates = {name: cell.rate(name) for name in names}
        table[behaviour] = {
            "answers": len(cell.tokens),
            "tokens": sum(cell.tokens),
            "rejected": {name: [rate.hits, rate.trials] for name, rate in rates.items()},
            "undecided": {name: sum(v is None for v in cell.verdicts[name]) for name in VERIFIERS},
            "score_median": {name: _rounded(np.median(scores)) for name, scores in cell.scores.items()},
            "score_max": {name: _rounded(np.max(scores)) for name, scores in cell.scores.items()},
        }
        if behaviour in ATTACKS:
            attack = ATTACKS[behaviour]
            table[behaviour] |= {
                "kind": attack.kind,
                "saves": attack.saves,
                "expected": list(attack.caught_by),
                "saved_share": _rounded(saved_share(bench, behaviour, len(cell.tokens))),
                "saved_measured": (measured or {}).get(behaviour),
                "tokens_to_detect": {
                    "toploc-paper": _tokens(honest_scores, cell, "toploc-paper"),
                    "toploc-sequence": _tokens(honest_scores, cell, "toploc-sequence"),
                    "projection": _tokens(honest_scores, cell, "projection"),
                    "sampling-proof": _rounded(tokens_to_detect(honest_margins, cell.margins)),
                },
            }
    return {
        "setting": setting.name,
        "tokens_max": setting.tokens_max,
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "limits": {name: _rounded(limit) for name, limit in limits.items()},
        "honest_answers": sum(len(cell.tokens) for cell in honest),
        "false_positives": {name: _honest_rate(honest, name) for name in names},
        "bytes_per_token": {
            name: _rounded(sum(cell.sent_bytes[name] for cell in honest) / max(1, sum(sum(c.tokens) for c in honest)))
            for name in VERIFIERS
        },
        "check_us_per_token": {
            name: _rounded(1e6 * sum(cell.cost_s[name] for cell in cells.values()) / whole) for name in VERIFIERS
        },
        "cells": table,
    }


def saved_share(bench: Bench, behaviour: str, count: int) -> float:
    """1 − the attack's cost over the honest one's, on the reference device."""
    cheat = sum(seconds(batch.work) for batch in bench.batches(behaviour, count))
    honest = sum(seconds(batch.work) for batch in bench.batches("honest", count))
    return 1.0 - cheat / honest


def _tokens(honest: Mapping[str, list[float]], cell: Cell, name: str) -> float | None:
    """As the mean over whole answers would need: a score per answer stands for each of its tokens' blocks of eight."""
    mean = float(np.mean(cell.tokens)) / 8
    right = [np.full(8, score) for score in honest[name] if abs(score) < 1e6]
    wrong = [np.full(8, s) for s, c in zip(cell.scores[name], cell.cheated, strict=True) if c and abs(s) < 1e6]
    if not right or not wrong:
        return None
    blocks = tokens_to_detect(right, wrong)
    return _rounded(blocks * mean) if math.isfinite(blocks) else None


def _honest_rate(honest: Sequence[Cell], name: str) -> dict[str, Any]:
    rates = [cell.rate(name) for cell in honest]
    hits, trials = sum(rate.hits for rate in rates), sum(rate.trials for rate in rates)
    return {"rejected": [hits, trials], "upper_95": _rounded(upper_bound(hits, trials)) if trials else None}


def _rounded(value: float) -> float | None:
    return float(f"{float(value):.4g}") if math.isfinite(float(value)) else None


# ------------------------------------------------------------------------------------------------------------- Markdown
def markdown(found: Results, command: str, stakes: Stakes | None = None) -> str:
    """The tables, and the command that made them."""
    stakes = stakes or Stakes()
    names = [*VERIFIERS, *POLICIES]
    lines = [
        f"# Arena: {found['setting']}",
        "",
        f"`{command}`: answers of up to {found['tokens_max']} tokens, temperature {found['temperature']}, top-p "
        f"{found['top_p']}; bf16 prover by decoding, bf16 verifier by one prefill. Rates in percent of answers, with "
        "exact 95 % intervals (Clopper–Pearson).",
        "",
        "## Honest noise: rejected",
        "",
        _row(["behaviour", "answers", *names]),
        _row(["---"] * (2 + len(names))),
    ]
    for name, cell in found["cells"].items():
        if name in HONEST:
            lines.append(_row([name, str(cell["answers"]), *(_rate(cell["rejected"][v]) for v in names)]))
    totals = found["false_positives"]
    lines.append(_row(["all", str(found["honest_answers"]), *(_rate(totals[v]["rejected"]) for v in names)]))
    bounds = (f"{100 * totals[v]['upper_95']:.2f}" if totals[v]["upper_95"] is not None else "–" for v in names)
    lines.append(_row(["upper 95 % bound", "", *bounds]))
    lines += ["", "## Attacks: rejected", "", _row(["attack", "answers", *names]), _row(["---"] * (2 + len(names)))]
    for name, cell in found["cells"].items():
        if name not in HONEST:
            cheated = cell["rejected"][names[0]][1]
            marked = (_rate(cell["rejected"][v], bold=v in cell["expected"] or v == "default") for v in names)
            lines.append(_row([name, str(cheated), *marked]))
    lines += ["", "Bold: the verifiers that ought to catch it, and the default policy.", *_holes(found)]
    lines += [*_costs(found), *_power(found)]
    return "\n".join([*lines, *_money(found, stakes)]) + "\n"


def _holes(found: Results) -> list[str]:
    """What published rules miss, beside who catches it."""
    lines = ["", "## Holes of TOPLOC v1 as published, and who closes them", ""]
    lines += [_row(["hole", "attack", "toploc-paper", "toploc-deployed", "closed by", "its rate"]), _row(["---"] * 6)]
    for hole, attack, closer in HOLES:
        if attack in found["cells"]:
            rejected = found["cells"][attack]["rejected"]
            published = (_rate(rejected[name]) for name in ("toploc-paper", "toploc-deployed"))
            lines.append(_row([hole, attack, *published, closer, _rate(rejected[closer], bold=True)]))
    return lines


def _costs(found: Results) -> list[str]:
    lines = [
        "",
        "## What a verifier sends and costs",
        "",
        _row(["verifier", "what it is", "bytes/token", "check µs/token", "needs"]),
    ]
    lines.append(_row(["---"] * 5))
    for name, verifier in VERIFIERS.items():
        sent, cost = found["bytes_per_token"][name], found["check_us_per_token"][name]
        lines.append(_row([name, verifier.says, f"{sent:.1f}", f"{cost:.1f}", verifier.needs]))
    policies = (f"*{name}* = {' or '.join(members)} rejects" for name, members in POLICIES.items())
    return [*lines, "", "Check: CPU time beside the shared prefill. Policies: " + "; ".join(policies) + "."]


def _power(found: Results) -> list[str]:
    lines = [
        "", "## Tokens for 99 % detection at 1 % false positives", "",
        "By the mean of the score over so many tokens, taken as normal: an extrapolation beyond an answer.", "",
        _row(["attack", *PER_ANSWER]), _row(["---"] * (1 + len(PER_ANSWER))),
    ]  # fmt: skip
    for name, cell in found["cells"].items():
        if name not in HONEST:
            needed = (cell["tokens_to_detect"][v] for v in PER_ANSWER)
            lines.append(_row([name, *("–" if n is None else f"{n:.0f}" for n in needed)]))
    return lines


def _money(found: Results, stakes: Stakes) -> list[str]:
    lines = [
        "", "## Does it pay?", "",
        f"Saved: share of an honest answer's cost on a {REFERENCE.name} (roofline); here: measured on this machine's "
        "CPU, where the attack's code does the smaller work. Break-even: the audit rate above "
        f"which the attack loses, at a stake of {stakes.stake:g} and a pay of {stakes.pay:g} honest answers, under "
        "*published* and *default*.", "",
        _row(["attack", "saves", "saved", "here", "break-even, published", "break-even, default"]), _row(["---"] * 6),
    ]  # fmt: skip
    for name, cell in found["cells"].items():
        if name not in HONEST:
            saved = cell["saved_share"] or 0.0
            rates = []
            for policy in POLICIES:
                hits, trials = cell["rejected"][policy]
                even = stakes.break_even(saved, hits / trials if trials else 0.0)
                rates.append(
                    "never deterred" if math.isinf(even) else f"{100 * even:.3g} %" if even else "saves nothing"
                )
            here = "–" if cell.get("saved_measured") is None else f"{100 * cell['saved_measured']:.0f} %"
            lines.append(_row([name, cell["saves"], f"{100 * saved:.0f} %", here, *rates]))
    return lines


def _rate(counts: Sequence[int], bold: bool = False) -> str:
    text = str(Rate(hits=counts[0], trials=counts[1]))
    return f"**{text}**" if bold else text


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
