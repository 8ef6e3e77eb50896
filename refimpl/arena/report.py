"""The arena's results as numbers (JSON) and as tables (Markdown)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from refimpl.arena.bench import Bench, Sent
from refimpl.arena.economics import REFERENCE, Stakes, seconds
from refimpl.arena.judge import Cell, Rate
from refimpl.arena.stats import PIECE, separation, upper_bound
from refimpl.arena.verifiers import FALSE_POSITIVE_RATE, POLICIES, VERIFIERS
from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.honest import HONEST
from refimpl.toploc.anytime import AnytimePlan, count_needed_for_power
from refimpl.toploc.sampling_proof import CLIP
from refimpl.work import Work

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
BY_MEANS = ("toploc-paper", "toploc-sequence", "projection", "sampling-proof")
"""Verifiers of which tokens to detection are told by the mean of their values."""


def results(
    bench: Bench, cells: Mapping[str, Cell], limits: Mapping[str, float], measured: Mapping[str, float] | None = None
) -> Results:
    """Everything that tables, plots and baselines are made from. `measured`: shares saved, of `arena.savings`."""
    setting, names = bench.setting, [*VERIFIERS, *POLICIES]
    honest = [cell for name, cell in cells.items() if name in HONEST]
    honest_values = {name: [values for cell in honest for values in cell.counted(name)] for name in BY_MEANS}
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
            apart = {
                name: separation(honest_values[name], cell.counted(name), VERIFIERS[name].tokens_per_value)
                for name in BY_MEANS
            }
            needed = {name: _rounded(one.tokens()) if one else None for name, one in apart.items()}
            table[behaviour] |= {
                "kind": attack.kind,
                "saves": attack.saves,
                "expected": list(attack.caught_by),
                "saved_share": _rounded(saved_share(bench, behaviour, len(cell.tokens))),
                "saved_measured": (measured or {}).get(behaviour),
                "separation": {name: asdict(one) for name, one in apart.items() if one},
                "tokens_to_detect": needed | {"anytime": _rounded(_anytime_tokens(cell, limits.get("anytime")))},
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
    """1 − the attack's cost over the honest one's, on the reference device: by a batch's steps (tokens of its longest
    answer), since chance makes answers longer or shorter; by the answer where ending it is the attack."""
    whole_answers = behaviour in ATTACKS and ATTACKS[behaviour].kind == "ending"

    def cost(parts: Iterable[tuple[Work, Sequence[Sent]]]) -> float:
        made = [(seconds(work), sent) for work, sent in parts]
        units = sum(len(sent) if whole_answers else max(len(one.tokens) for one in sent) for _, sent in made)
        return sum(spent for spent, _ in made) / units

    cheats = [(batch.work, batch.sent) for batch in bench.batches(behaviour, count)]
    kept = [sent for batch in bench.batches("honest", min(count, bench.setting.count("honest"))) for sent in batch.sent]
    honest, engine, answers = [], bench.engine("honest"), itertools.cycle(kept)
    for _, batch in cheats:  # as many at once: a batch's size decides what its steps cost
        sent = list(itertools.islice(answers, len(batch)))
        honest.append((engine.work([bench.prompt(one.index) for one in sent], sent), sent))
    return 1.0 - cost(cheats) / cost(honest)


def _anytime_tokens(cell: Cell, null_mean: float | None) -> float:
    """Tokens by which the anytime test has rejected 99 % of such cheats, whatever its answers' lengths."""
    pairs = [
        (margins, exposures)
        for margins, exposures, cheated in zip(
            cell.values.get("sampling-proof", []), cell.exposures, cell.cheated, strict=False
        )
        if cheated and len(margins) == len(exposures)
    ]
    if null_mean is None or not pairs:
        return math.nan
    plan = AnytimePlan(null_mean=null_mean, value_max=CLIP, false_positive_rate=FALSE_POSITIVE_RATE)
    margins, exposures = (np.concatenate(column) for column in zip(*pairs, strict=True))
    return count_needed_for_power(margins, plan, np.random.default_rng(0), exposures=exposures)


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
    lines += ["", "Check: CPU time beside the shared prefill.", ""]
    lines += [_row(["policy", "rejects if any of", "answers audited", "false-positive budget"]), _row(["---"] * 4)]
    for name, policy in POLICIES.items():
        budget = policy.false_positive_budget
        said = "as published" if budget is None else f"{100 * budget:g} % of honest answers audited"
        lines.append(_row([name, ", ".join(policy.members), f"{100 * policy.audit_rate:g} %", said]))
    return lines


def _power(found: Results) -> list[str]:
    columns = (*BY_MEANS, "anytime")
    lines = [
        "", "## Tokens for 99 % detection at 1 % false positives", "",
        "By the mean of the score over so many tokens, taken as normal: an extrapolation beyond an answer, and never "
        f"less than {PIECE} tokens (TOPLOC: a chunk). *anytime*: tokens after which its test has rejected 99 % of "
        f"cheats, at {100 * FALSE_POSITIVE_RATE:g} % false positives over a whole life. Published for DiFR, for "
        "comparison: 300 tokens (4 bits, by tokens), 2 (by activations).", "",
        _row(["attack", *columns]), _row(["---"] * (1 + len(columns))),
    ]  # fmt: skip
    for name, cell in found["cells"].items():
        if name not in HONEST:
            needed = (cell["tokens_to_detect"][v] for v in columns)
            lines.append(_row([name, *("–" if n is None else f"{n:.0f}" for n in needed)]))
    return lines


def _money(found: Results, stakes: Stakes) -> list[str]:
    lines = [
        "", "## Does it pay?", "",
        f"Saved: share of an honest answer's cost on a {REFERENCE.name} (roofline); here: measured on this machine's "
        "CPU, where the attack's code does the smaller work. Break-even: the audit rate above "
        f"which the attack loses, at a stake of {stakes.stake:g} and a pay of {stakes.pay:g} honest answers, under "
        "*published* and *default*. Profit: of an answer, in honest answers, at the rate that *default* audits.", "",
        _row(["attack", "saves", "saved", "here", "break-even, published", "break-even, default", "profit, default"]),
        _row(["---"] * 7),
    ]  # fmt: skip
    for name, cell in found["cells"].items():
        if name not in HONEST:
            saved = cell["saved_share"] or 0.0
            rates = []
            for policy in POLICIES:
                even = stakes.break_even(saved, detection(cell, policy))
                rates.append(
                    "never deterred" if math.isinf(even) else f"{100 * even:.3g} %" if even else "saves nothing"
                )
            here = "–" if cell.get("saved_measured") is None else f"{100 * cell['saved_measured']:.0f} %"
            profit = stakes.profit(saved, detection(cell, "default"), POLICIES["default"].audit_rate)
            lines.append(_row([name, cell["saves"], f"{100 * saved:.0f} %", here, *rates, f"{profit:.2f}"]))
    return lines


def detection(cell: Mapping[str, Any], policy: str) -> float:
    """Rejected, out of all answers: what is saved counts all of them too, where an adaptive cheat is honest now and
    then."""
    return float(cell["rejected"][policy][0]) / cell["answers"] if cell["answers"] else 0.0


def _rate(counts: Sequence[int], bold: bool = False) -> str:
    text = str(Rate(hits=counts[0], trials=counts[1]))
    return f"**{text}**" if bold else text


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
