"""From events to figures: who was caught, how surely, how soon, and what it had earned.

Rates carry exact 95 % intervals (Clopper-Pearson), since a few dozen submissions say less than they seem to.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from scipy.stats import binomtest

SECOND_NS = 1_000_000_000


@dataclass(frozen=True)
class Rate:
    """`hits` of `trials`, with the exact 95 % interval of the rate."""

    hits: int
    trials: int

    @property
    def value(self) -> float | None:
        return self.hits / self.trials if self.trials else None

    @property
    def interval(self) -> tuple[float, float] | None:
        if not self.trials:
            return None
        bounds = binomtest(self.hits, self.trials).proportion_ci(0.95, method="exact")
        return float(bounds.low), float(bounds.high)

    def as_json(self) -> dict[str, Any]:
        low, high = self.interval or (None, None)
        return {"hits": self.hits, "trials": self.trials, "rate": self.value, "low_95": low, "high_95": high}

    def __str__(self) -> str:
        if self.interval is None or self.value is None:
            return "–"
        low, high = self.interval
        return f"{100 * self.value:5.1f} % [{100 * low:.1f}, {100 * high:.1f}]"


@dataclass
class BehaviourRow:
    """What happened to the nodes of one behaviour."""

    behaviour: str
    honest: bool
    nodes: int
    judged: int = 0
    rejected: int = 0
    undecided: int = 0
    tokens: int = 0
    ejected: int = 0
    until_ejected_s: list[float] = dataclasses.field(default_factory=list)  # from registration
    earned: float = 0.0  # what it could claim at the end
    forfeited: float = 0.0  # what it lost by ejection
    codes: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def rejection(self) -> Rate:
        return Rate(self.rejected, self.judged)

    def as_json(self) -> dict[str, Any]:
        times = sorted(self.until_ejected_s)
        return {
            "behaviour": self.behaviour,
            "honest": self.honest,
            "nodes": self.nodes,
            "submissions": self.judged,
            "undecided": self.undecided,
            "tokens": self.tokens,
            "rejected": self.rejection.as_json(),
            "ejected_nodes": self.ejected,
            "until_ejected_s_median": _median(times),
            "earned_tokens": round(self.earned, 6),
            "forfeited_tokens": round(self.forfeited, 6),
            "codes": dict(sorted(self.codes.items())),
        }


def _median(values: list[float]) -> float | None:
    if not values:
        return None
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


def behaviour_rows(
    events: Iterable[Mapping[str, Any]], behaviour_of: Mapping[str, str], honest: Iterable[str], reward_per_unit: float
) -> list[BehaviourRow]:
    """One row per behaviour, honest ones first, from a run's events; `behaviour_of` is by worker's name."""
    names = list(dict.fromkeys(behaviour_of.values()))
    honest = set(honest)
    rows = {
        name: BehaviourRow(name, name in honest, sum(1 for b in behaviour_of.values() if b == name))
        for name in sorted(names, key=lambda name: (name not in honest, names.index(name)))
    }
    worker_of: dict[str, str] = {}
    since_ns: dict[str, int] = {}
    earned: dict[str, float] = {}
    gone: set[str] = set()
    for event in events:
        kind = event["kind"]
        if kind == "registered":
            worker_of[event["public_key"]] = event["worker"]
            since_ns[event["public_key"]] = event["t_ns"]
        elif kind == "judged":
            key = event["public_key"]
            if key not in worker_of:  # never registered: nobody's behaviour
                continue
            row = rows[behaviour_of[worker_of[key]]]
            if not event["decided"]:
                row.undecided += 1
                continue
            row.judged += 1
            row.tokens += event["tokens"]
            if event["accepted"]:
                if key not in gone:
                    earned[key] = earned.get(key, 0.0) + reward_per_unit * event["tokens"]
            else:
                row.rejected += 1
                row.codes[event["code"]] = row.codes.get(event["code"], 0) + 1
        elif kind == "ejected":
            key = event["public_key"]
            gone.add(key)
            row = rows[behaviour_of[worker_of[key]]]
            row.ejected += 1
            row.until_ejected_s.append((event["t_ns"] - since_ns[key]) / SECOND_NS)
            row.forfeited += earned.pop(key, 0.0)
    for key, amount in earned.items():
        rows[behaviour_of[worker_of[key]]].earned += amount
    return list(rows.values())


def false_positives(rows: Iterable[BehaviourRow]) -> Rate:
    """Rejections among all honest submissions."""
    honest = [row for row in rows if row.honest]
    return Rate(sum(row.rejected for row in honest), sum(row.judged for row in honest))


def detections(rows: Iterable[BehaviourRow]) -> Rate:
    """Rejections among all dishonest submissions."""
    cheats = [row for row in rows if not row.honest]
    return Rate(sum(row.rejected for row in cheats), sum(row.judged for row in cheats))


def table(rows: list[BehaviourRow]) -> str:
    """The run's table for a terminal."""
    head = (
        f"{'behaviour':<18}{'nodes':>6}{'submissions':>12}{'caught':>8}  {'rejected [exact 95 %]':<26}"
        f"{'slashed after':>14}{'earned':>9}{'forfeited':>10}"
    )
    lines = [head, "─" * len(head)]
    for row in rows:
        median = _median(sorted(row.until_ejected_s))
        after = "never" if median is None else f"{median:.1f} s"
        lines.append(
            f"{row.behaviour:<18}{row.nodes:>6}{row.judged:>12}{row.rejected:>8}  {row.rejection!s:<26}"
            f"{after:>14}{row.earned:>9.2f}{row.forfeited:>10.2f}"
        )
        if row.honest and row is [r for r in rows if r.honest][-1]:
            lines.append("")
    return "\n".join(lines)
