"""From events to figures: who was caught, how surely, how soon, and what it had earned.

Rates carry exact 95 % intervals (Clopper-Pearson), since a few dozen submissions say less than they seem to.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
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


def percent(rate: Mapping[str, Any]) -> str:
    """A rate of summary.json with its interval, as the report writes it."""
    if rate["rate"] is None:
        return "–"
    return f"{100 * rate['rate']:.1f} % [{100 * rate['low_95']:.1f}, {100 * rate['high_95']:.1f}]"


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

    def cells(self) -> list[str]:
        """The row as the report writes it."""
        after = _median(sorted(self.until_ejected_s))
        return [
            self.behaviour, str(self.nodes), str(self.judged), str(self.rejected), percent(self.rejection.as_json()),
            "never" if after is None else f"{after:.1f} s", f"{self.earned:.2f}", f"{self.forfeited:.2f}",
            ", ".join(f"{code} {count}" for code, count in sorted(self.codes.items())),
        ]  # fmt: skip


def _median(values: list[float]) -> float | None:
    if not values:
        return None
    middle = len(values) // 2
    return values[middle] if len(values) % 2 else (values[middle - 1] + values[middle]) / 2


class Behaviours:
    """One row per behaviour, honest ones first, from a run's events; `behaviour_of` is by worker's name."""

    def __init__(self, behaviour_of: Mapping[str, str], honest: Iterable[str], reward_per_unit: float) -> None:
        names = list(dict.fromkeys(behaviour_of.values()))
        honest = set(honest)
        self.behaviour_of, self.reward_per_unit = behaviour_of, reward_per_unit
        counts = Counter(behaviour_of.values())
        self._rows = {
            name: BehaviourRow(name, name in honest, counts[name])
            for name in sorted(names, key=lambda name: (name not in honest, names.index(name)))
        }
        self._worker_of: dict[str, str] = {}
        self._since_ns: dict[str, int] = {}
        self._earned: dict[str, float] = {}
        self._gone: set[str] = set()

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        kind = event["kind"]
        if kind == "registered":
            self._worker_of[event["public_key"]] = event["worker"]
            self._since_ns[event["public_key"]] = event["t_ns"]
        elif kind == "judged" and event["public_key"] in self._worker_of:  # else never registered: nobody's behaviour
            self._judged(event, self._row(event["public_key"]))
        elif kind == "ejected":
            key = event["public_key"]
            self._gone.add(key)
            row = self._row(key)
            row.ejected += 1
            row.until_ejected_s.append((event["t_ns"] - self._since_ns[key]) / SECOND_NS)
            row.forfeited += self._earned.pop(key, 0.0)

    def _row(self, key: str) -> BehaviourRow:
        return self._rows[self.behaviour_of[self._worker_of[key]]]

    def _judged(self, event: Mapping[str, Any], row: BehaviourRow) -> None:
        key = event["public_key"]
        if not event["decided"]:
            row.undecided += 1
            return
        row.judged += 1
        row.tokens += event["tokens"]
        if not event["accepted"]:
            row.rejected += 1
            row.codes[event["code"]] = row.codes.get(event["code"], 0) + 1
        elif key not in self._gone:
            self._earned[key] = self._earned.get(key, 0.0) + self.reward_per_unit * event["tokens"]

    def rows(self) -> list[BehaviourRow]:
        """When all events are in."""
        for key, amount in self._earned.items():
            self._row(key).earned += amount
        self._earned.clear()
        return list(self._rows.values())


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
        f"{'slashed after':>14}{'earned':>12}{'forfeited':>11}"
    )
    lines = [head, "─" * len(head)]
    for row in rows:
        median = _median(sorted(row.until_ejected_s))
        after = "never" if median is None else f"{median:.1f} s"
        lines.append(
            f"{row.behaviour:<18}{row.nodes:>6}{row.judged:>12}{row.rejected:>8}  {row.rejection!s:<26}"
            f"{after:>14}{row.earned:>12.2f}{row.forfeited:>11.2f}"
        )
        if row.honest and row is [r for r in rows if r.honest][-1]:
            lines.append("")
    return "\n".join(lines)
