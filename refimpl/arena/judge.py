"""Every verifier on every cell: rates, and what they are made of.

`calibrate` sets limits from honest noise, on answers apart from those judged. `judge` is one cell: one behaviour, all
verifiers. A cell's rate counts answers that were rejected, out of those where the behaviour really cheated (an adaptive
one is honest now and then); no verdict is no detection.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from refimpl.arena.bench import CALIBRATION, Bench, sources
from refimpl.arena.stats import interval, limit_for
from refimpl.arena.verifier import Case, Verifier
from refimpl.arena.verifiers import POLICIES, VERIFIERS, clipped_margins
from refimpl.attacks.honest import HONEST
from refimpl.toploc.anytime import mean_upper_bound
from refimpl.toploc.sampling_proof import CLIP

ROOM = 1.5
"""The anytime test allows this many times the upper bound of the honest mean: other contexts, other noise."""

Limits = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Answers rejected, out of those that count."""

    hits: int
    trials: int

    @property
    def value(self) -> float:
        return self.hits / self.trials if self.trials else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        return interval(self.hits, self.trials)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{100 * self.value:.0f} [{100 * low:.0f}, {100 * high:.0f}]" if self.trials else "–"


@dataclass(kw_only=True)
class Cell:
    """One behaviour before all verifiers."""

    behaviour: str
    tokens: list[int] = field(default_factory=list)
    cheated: list[bool] = field(default_factory=list)
    scores: dict[str, list[float]] = field(default_factory=dict)
    verdicts: dict[str, list[bool | None]] = field(default_factory=dict)
    reasons: dict[str, list[str]] = field(default_factory=dict)
    cost_s: dict[str, float] = field(default_factory=dict)
    sent_bytes: dict[str, int] = field(default_factory=dict)
    values: dict[str, list[np.ndarray]] = field(default_factory=dict)  # of verifiers that give them, per answer
    exposures: list[np.ndarray] = field(default_factory=list)  # of each token, per answer

    @property
    def counts(self) -> list[bool]:
        """Which answers count: those that cheat, and all of an honest worker."""
        return [cheated or self.behaviour in HONEST for cheated in self.cheated]

    def counted(self, verifier: str) -> list[np.ndarray]:
        """The verifier's values of the answers that count."""
        values = self.values.get(verifier, [])
        return [one for one, counts in zip(values, self.counts, strict=False) if counts and len(one)]

    def first(self, count: int) -> Cell:
        """The same for its first answers. Costs and bytes stay those of all."""
        cut = replace(self, tokens=self.tokens[:count], cheated=self.cheated[:count])
        cut.scores = {name: values[:count] for name, values in self.scores.items()}
        cut.verdicts = {name: values[:count] for name, values in self.verdicts.items()}
        return cut

    def rate(self, verifier: str) -> Rate:
        """Of one verifier, or of a policy: rejected if any member rejects."""
        members = POLICIES[verifier].members if verifier in POLICIES else (verifier,)
        rejected = [
            any(self.verdicts[member][i] is False for member in members)
            for i, counts in enumerate(self.counts)
            if counts
        ]
        return Rate(hits=sum(rejected), trials=len(rejected))


def cell_path(bench: Bench, behaviour: str, count: int, limits: Mapping[str, float]) -> Path:
    """Where a judged cell is kept, as long as neither a limit nor the code of its verifiers or its maker changes."""
    content = json.dumps(dict(limits), sort_keys=True).encode()
    content += sources("arena/judge.py", "arena/verifier.py", "arena/verifiers.py", "toploc/*.py", "model/*.py")
    return bench.place(behaviour) / f"{count}-{hashlib.sha256(content).hexdigest()[:16]}.cell"


def commitments(verifier: Verifier, answers: Sequence[Any], edit: Any) -> list[tuple[bytes, ...]]:
    """What each answer sends for `verifier`, after the attack's own edit of it."""
    sent = [verifier.commitments(answer.states) for answer in answers]
    return edit(answers, sent) if edit is not None and verifier.commit is not None else sent


def judge(
    bench: Bench,
    behaviour: str,
    count: int,
    limits: Mapping[str, float],
    verifiers: Mapping[str, Verifier] | None = None,
    first: int = 0,
) -> Cell:
    """One cell. Sequences that are not there yet are made."""
    table = VERIFIERS if verifiers is None else verifiers
    pairs = list(bench.cases(behaviour, count, first))
    answers, cases = [sent for sent, _ in pairs], [case for _, case in pairs]
    cell = Cell(behaviour=behaviour, tokens=[len(a.tokens) for a in answers], cheated=[a.cheated for a in answers])
    cell.exposures = [np.clip(case.opened.exposures, 0.0, 1.0) for case in cases]
    edit = bench.edit(behaviour)
    made: dict[Any, list[tuple[bytes, ...]]] = {}
    if edit is not None:  # where the edit changes nothing, there is nothing to detect
        plain = [VERIFIERS["toploc-strict"].commitments(answer.states) for answer in answers]
        edited = edit(answers, plain)
        cell.cheated = [c and a != b for c, a, b in zip(cell.cheated, plain, edited, strict=True)]
    for name, verifier in table.items():
        if verifier.commit not in made:  # several verifiers may read one commitment
            made[verifier.commit] = commitments(verifier, answers, edit)
        sent = made[verifier.commit]
        findings = [verifier.find(case, own, limits.get(name)) for case, own in zip(cases, sent, strict=True)]
        cell.scores[name] = [finding.score for finding in findings]
        cell.verdicts[name] = [finding.verdict for finding in findings]
        cell.reasons[name] = [finding.reason for finding in findings]
        if any(finding.values is not None for finding in findings):
            cell.values[name] = [np.zeros(0) if f.values is None else np.asarray(f.values, float) for f in findings]
        cell.cost_s[name] = sum(finding.cost_s for finding in findings)
        cell.sent_bytes[name] = sum(len(raw) for own in sent for raw in own)
    return cell


def calibrate(bench: Bench, behaviours: Sequence[str], count: int) -> Limits:
    """Limits of all calibrated verifiers, from honest answers apart from those that are judged."""
    calibrated = {name: verifier for name, verifier in VERIFIERS.items() if verifier.calibrated}
    cells = [judge(bench, name, count, {}, calibrated, first=CALIBRATION) for name in behaviours]
    limits = {
        name: limit_for([score for cell in cells for score in cell.scores[name]], verifier.least)
        for name, verifier in calibrated.items()
        if name != "anytime"
    }
    limits["anytime"] = max(
        honest_mean([case for _, case in bench.cases(name, count, CALIBRATION)]) for name in behaviours
    )
    return limits


def honest_mean(cases: Sequence[Case]) -> float:
    """μ0 of the anytime test: an upper bound (99 %) on the mean clipped margin per exposure, with room."""
    values = np.concatenate([clipped_margins(case) for case in cases])
    exposure = float(np.concatenate([case.opened.exposures for case in cases]).mean())
    return min(ROOM * mean_upper_bound(values, CLIP) / max(exposure, 1e-3), 0.9 * CLIP)
