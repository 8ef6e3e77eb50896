"""The suite that CI runs: have the verifiers become worse than the baseline says?

Seeded, made anew each time (nothing is kept), a few minutes on two cores: the tiny model whole, and of SmolLM2 what the
time allows. A rate is a regression if it is worse than the baseline's by a one-sided exact test (Fisher) at a level of
0.1 %: detection that fell, false positives that rose; those of all honest workers together count as one rate more. The
level is each comparison's own: the suite is seeded, so a rate that nobody has touched is the same rate, and there is no
chance that a thousand comparisons add up. Fewer answers than the baseline had, or a setting, behaviour or verifier that
was not measured, is a regression as well.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy import stats

from refimpl.arena.bench import RECOMPUTED, ROOT, SETTINGS, Bench, load
from refimpl.arena.judge import Cell, Rate, cell_path, judge
from refimpl.arena.verifiers import POLICIES, VERIFIERS
from refimpl.attacks.catalogue import ATTACKS
from refimpl.attacks.honest import HONEST

BASELINE = ROOT / "experiments" / "baselines" / "detection.json"
LIMITS = ROOT / "experiments" / "arena" / "limits.json"
LEVEL = 0.001  # of each comparison
ALL_HONEST = "all honest workers"

Rates = dict[str, dict[str, list[int]]]
"""behaviour -> verifier -> [rejected, of]."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """What of a setting the suite runs."""

    setting: str
    sequences: int
    behaviours: tuple[str, ...]
    recompute: bool = False  # the verifier's own answers are made as well


SUITE = (
    Part(
        setting="tiny",
        sequences=100,
        behaviours=(*(n for n in HONEST if n != "honest-batch1"), *ATTACKS),
        recompute=True,
    ),
    Part(
        setting="smollm2",
        sequences=8,
        behaviours=("honest", "honest-eager", "weights-4bit", "wrong-seed", "cut-early", "proof-copied"),
    ),
)


def measure(part: Part, limits: Mapping[str, float], made: Path | None = None) -> Rates:
    """All rates of one part. Its sequences are made now, or taken from `made`, where `run` has kept them and judged
    them with these limits."""
    setting = SETTINGS[part.setting]
    with tempfile.TemporaryDirectory() as fresh:
        bench = Bench(setting, made or Path(fresh))
        if made is None and part.recompute:
            list(bench.batches(RECOMPUTED, part.sequences))
        cells: dict[str, Cell] = {}
        for name in part.behaviours:
            kept = load(cell_path(bench, name, setting.count(name), limits)) if made else None
            cells[name] = kept.first(part.sequences) if kept else judge(bench, name, part.sequences, limits)
    names = [*VERIFIERS, *POLICIES]
    return {b: {n: [(rate := cell.rate(n)).hits, rate.trials] for n in names} for b, cell in cells.items()}


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """A sentence for each rate that is worse than it was, for one setting."""
    now = {**now, ALL_HONEST: _pooled(now)}
    for behaviour, verifiers in {**before, ALL_HONEST: _pooled(before)}.items():
        honest = behaviour in HONEST or behaviour == ALL_HONEST
        for verifier, old in verifiers.items():
            new = now.get(behaviour, {}).get(verifier)
            if new is None:
                yield f"{behaviour} before {verifier}: not measured any more"
                continue
            if new[1] < old[1]:
                yield f"{behaviour} before {verifier}: only {new[1]} answers count, {old[1]} did"
                continue
            chance = worse(old, new, rises=honest)
            if chance < LEVEL:
                was, came = Rate(hits=old[0], trials=old[1]), Rate(hits=new[0], trials=new[1])
                what = "false positives rose" if honest else "detection fell"
                yield (
                    f"{behaviour} before {verifier}: {what} from {old[0]} of {old[1]} ({was} %) "
                    f"to {new[0]} of {new[1]} ({came} %), p = {chance:.1g}"
                )


def _pooled(rates: Mapping[str, Any]) -> dict[str, list[int]]:
    """The rates of all honest workers together."""
    rows = [verifiers for behaviour, verifiers in rates.items() if behaviour in HONEST]
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [sum(row[name][i] for row in rows if name in row) for i in (0, 1)] for name in names}


def worse(before: list[int], now: list[int], *, rises: bool) -> float:
    """p-value of a change for the worse, `rises` or falls, if the rate is as it was: Fisher's exact test, one-sided."""
    table = [[now[0], now[1] - now[0]], [before[0], before[1] - before[0]]]
    return float(stats.fisher_exact(table, alternative="greater" if rises else "less").pvalue)


def _measured(into: Path, made: Path | None = None, suite: Sequence[Part] = SUITE) -> dict[str, Any]:
    """The suite's rates by setting; written down as JSON and Markdown."""
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    began = time.monotonic()
    found: dict[str, Any] = {}
    for part in suite:
        if not (SETTINGS[part.setting].model_path / "config.json").exists():
            print(f"{part.setting}: left out, {SETTINGS[part.setting].model_path} is not there (`make model`)")
            continue
        found[part.setting] = measure(part, limits.get(part.setting, {}), made)
        print(
            f"{part.setting}: {len(found[part.setting])} behaviours, {time.monotonic() - began:.0f} s since the start"
        )
    into.mkdir(parents=True, exist_ok=True)
    (into / "detection.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    (into / "detection.md").write_text("".join(_tables(found)), encoding="utf-8")
    return found


def _tables(found: Mapping[str, Rates]) -> Iterator[str]:
    names = [*VERIFIERS, *POLICIES]
    for setting, rates in found.items():
        yield f"## {setting}: answers rejected, percent\n\n| behaviour | {' | '.join(names)} |\n"
        yield "| " + " | ".join(["---"] * (1 + len(names))) + " |\n"
        for behaviour, verifiers in rates.items():
            columns = (str(Rate(hits=verifiers[n][0], trials=verifiers[n][1])) for n in names)
            yield f"| {behaviour} | {' | '.join(columns)} |\n"
        yield "\n"


def regress(into: Path, baseline: Path = BASELINE, suite: Sequence[Part] = SUITE) -> int:
    """Measure and compare. Exit code 1, and a line for each regression."""
    if not baseline.exists():
        print(f"{baseline}: there is no baseline; `make regress-accept` records one")
        return 2
    before, now = json.loads(baseline.read_text(encoding="utf-8")), _measured(into, suite=suite)
    wanted = {part.setting for part in suite}
    sentences = [
        f"REGRESSION {setting}: {sentence}"
        for setting, rates in before.items()
        if setting in wanted
        for sentence in (differences(rates, now[setting]) if setting in now else ["not measured any more"])
    ]
    print("\n".join(sentences) if sentences else "no rate is worse than the baseline")
    print(f"tables: {into / 'detection.md'}")
    return 1 if sentences else 0


def accept(into: Path, made: Path | None = None, baseline: Path = BASELINE, suite: Sequence[Part] = SUITE) -> int:
    """Measure, and make that the baseline. Settings that were left out keep theirs. `made`: a run's sequences."""
    before = json.loads(baseline.read_text(encoding="utf-8")) if baseline.exists() else {}
    now = _measured(into, made, suite)
    baseline.parent.mkdir(parents=True, exist_ok=True)
    baseline.write_text(json.dumps(before | now, indent=1) + "\n", encoding="utf-8")
    for setting, rates in now.items():
        for sentence in differences(before.get(setting, {}), rates):
            print(f"accepted {setting}: {sentence}")
    print(f"{baseline}: recorded")
    return 0
