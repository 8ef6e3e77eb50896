"""Figures of rings: tokens/s against the bound, by stages, distance and micro-batches; who was blamed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from refimpl.pipeline.timing import cycle_s

TOLD = ("size", "cuts", "micro_batches", "rows")
OF_ROUND = ("tokens", "seconds", "cycle_s", "seats", "tau_ms", "hop_ms", "bound_tokens_per_s")
LATENCIES_MS = [0.1 * 1.25**step for step in range(36)]
MICRO_BATCHES = range(1, 17)
STAGES = range(1, 13)


class PipelineTally:
    """`sim.kinds.Tally` of rings."""

    def __init__(
        self, name: str, behaviours: Mapping[str, str], devices: Mapping[str, str], nodes: Mapping[str, str]
    ) -> None:
        """`nodes`: the node of each public key."""
        self.name, self.behaviours, self.devices, self._nodes = name, behaviours, devices, nodes
        self.rings: dict[str, dict[str, Any]] = {}
        self._ring_of: dict[str, str] = {}

    def event(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "planned":
            fresh = {"answered": [], "accepted": 0, "rejected": 0, "undecided": 0, "blamed": [], "by_complaint": []}
            told = {key: value for key, value in event.items() if key not in ("t_ns", "kind", "node")}
            self.rings.setdefault(event["ring"], fresh | {"epochs": 0}).update(told)
            self._ring_of[event["node"]] = event["ring"]
        elif kind == "ring up":
            self.rings[self._ring_of[event["node"]]]["epochs"] += 1
        elif kind == "answered":
            ring = self.rings[event["ring"]]
            ring["answered"].append({key: event[key] for key in OF_ROUND})
        elif kind == "checked":
            self._checked(self.rings[event["ring"]], event)
        elif kind == "verdict" and event["culprit"] is not None:
            self.rings[self._ring_of[event["node"]]]["by_complaint"].append(self._nodes[event["culprit"]])

    @staticmethod
    def _checked(ring: dict[str, Any], event: Mapping[str, Any]) -> None:
        outcome = "accepted" if event["accepted"] else "rejected" if event["decided"] else "undecided"
        ring[outcome] += 1
        ring["blamed"] += [name for name in event["blamed"] if name not in ring["blamed"]]

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One entry per ring."""
        rows = []
        for name, ring in self.rings.items():
            batch, rounds = ring["micro_batches"] * ring["rows"], ring["answered"]
            last = rounds[-1] if rounds else dict.fromkeys(OF_ROUND)
            speed, bound = batch / last["cycle_s"] if last["cycle_s"] else None, last["bound_tokens_per_s"]
            seconds, tokens = sum(r["seconds"] for r in rounds), sum(r["tokens"] for r in rounds)
            blamed = sorted({*ring["blamed"], *ring["by_complaint"]})
            rows.append(
                {
                    "ring": name,
                    **{key: ring[key] for key in TOLD},
                    "stages": last["seats"] or [],
                    "devices": [self.devices[stage] for stage in last["seats"] or []],
                    "tau_ms": last["tau_ms"] or [],
                    "hop_ms": last["hop_ms"] or [],
                    "tokens_per_s": speed,  # of the last round, in its steady state
                    "bound_tokens_per_s": bound,
                    "share_of_bound": None if speed is None else speed / bound,
                    "with_prefill_tokens_per_s": tokens / seconds if seconds else None,
                    "rounds": len(rounds),
                    "epochs": ring["epochs"],
                    "answers": {key: ring[key] for key in ("accepted", "rejected", "undecided")},
                    "blamed": blamed,
                    "by_complaint": ring["by_complaint"],
                    "innocent_blamed": [n for n in blamed if self.behaviours[n] in ("honest", "receipt-withheld")],
                }
            )
        return rows

    def figures(self) -> dict[str, Any]:
        rows = self.rows
        shares = [row["share_of_bound"] for row in rows if row["share_of_bound"] is not None]
        guilty = sorted(n for n, b in self.behaviours.items() if b not in ("honest", "receipt-withheld"))
        found = sorted({name for row in rows for name in row["blamed"]})
        return {
            "rings": rows,
            "share_of_bound_least": min(shares) if shares else None,
            "guilty": guilty,
            "guilty_blamed": [name for name in guilty if name in found],
            "innocent_blamed": [name for row in rows for name in row["innocent_blamed"]],
        }

    def table(self) -> str:
        lines = [f"{'ring':22} {'model':12} stages  M x m   tokens/s     bound  share  answers ok/bad/?  blamed"]
        for row in self.rows:
            speed, bound = (_number(row[key]) for key in ("tokens_per_s", "bound_tokens_per_s"))
            share = "-" if row["share_of_bound"] is None else f"{row['share_of_bound']:.0%}"
            answers = "/".join(str(row["answers"][key]) for key in ("accepted", "rejected", "undecided"))
            lines.append(
                f"{row['ring']:22} {row['size']:12} {len(row['stages']):6} {row['micro_batches']:2} x {row['rows']:<3}"
                f" {speed:>9} {bound:>9} {share:>6}  {answers:16}  "
                f"{', '.join(f'{name} ({self.behaviours[name]})' for name in row['blamed']) or 'nobody'}"
            )
        return "\n".join(lines)

    def draw(self, folder: Path) -> None:
        _plot(folder / "rings.png", self)

    def page(self) -> dict[str, Any]:
        figures = self.figures()
        columns = ["ring", "model", "devices", "M x m", "tokens/s", "bound", "answers accepted / rejected", "blamed"]
        rows = [
            [
                row["ring"],
                row["size"],
                ", ".join(row["devices"]),
                f"{row['micro_batches']} x {row['rows']}",
                _number(row["tokens_per_s"]),
                _number(row["bound_tokens_per_s"]),
                f"{row['answers']['accepted']} / {row['answers']['rejected']}",
                ", ".join(row["blamed"]) or "nobody",
            ]
            for row in figures["rings"]
        ]
        least = figures["share_of_bound_least"]
        return {
            "tiles": {
                "rings": str(len(rows)),
                "least share of its bound": "–" if least is None else f"{least:.0%}",
                "guilty stages blamed": f"{len(figures['guilty_blamed'])} of {len(figures['guilty'])}",
                "innocent stages blamed": str(len(figures["innocent_blamed"])),
            },
            "tables": [{"title": "Rings", "columns": columns, "rows": rows, "classes": ["" for _ in rows]}],
            "pictures": [{"title": "Tokens/s", "file": "rings.png", "alt": "tokens/s of each ring and its bound"}],
        }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def _plot(path: Path, tally: PipelineTally) -> None:
    """Tokens/s of each ring and its bound; then its bound over hop latency, micro-batches and stages, and where it is
    (dots)."""
    rows = [row for row in tally.rows if row["tokens_per_s"] is not None]
    figure, panels = plt.subplots(2, 2, figsize=(14, 0.4 * len(rows) + 7.5), layout="constrained")
    (bars, latencies), (batches, stages) = panels
    for at, row in enumerate(rows):
        colour, speed = f"C{at % 10}", row["tokens_per_s"]
        bars.barh(at, speed, color=colour, height=0.6)
        bars.plot([row["bound_tokens_per_s"]] * 2, [at - 0.42, at + 0.42], color="#222", lw=2)
        count, chosen = len(row["tau_ms"]), row["micro_batches"]
        mean_ms = sum(row["hop_ms"]) / count
        for axis, places, line, here in (
            (latencies, LATENCIES_MS, [_bound(row, chosen, hop_ms=ms) for ms in LATENCIES_MS], max(0.1, mean_ms)),
            (batches, MICRO_BATCHES, [_bound(row, number) for number in MICRO_BATCHES], chosen),
            (stages, STAGES, [_bound(row, chosen, stages=number, hop_ms=mean_ms) for number in STAGES], count),
        ):
            axis.plot(places, line, color=colour, lw=1.2)
            axis.plot(here, speed, "o", color=colour)
    labels = [f"{r['ring']}\n{r['size']}, {len(r['stages'])} stages, {r['micro_batches']} x {r['rows']}" for r in rows]
    bars.set_yticks(range(len(rows)), labels, fontsize=8)
    bars.invert_yaxis()
    bars.set_xlabel("tokens/s, all sequences together (bar: measured; black: bound)")
    for axis, label in (
        (latencies, "one hop (ms); dots: measured, at the ring's mean hop"),
        (batches, "micro-batches M, each of the ring's rows"),
        (stages, "stages N; lines: the ring's layers over N equal stages of its mean hop"),
    ):
        axis.set_xscale("log" if axis is latencies else "linear")
        axis.set_yscale("log")
        axis.set_xlabel(label)
        axis.set_ylabel("tokens/s; lines: bound M m / max(M τ, Σ (τ + λ))")
    for axis in panels.flat:
        axis.grid(alpha=0.25)
    figure.suptitle(f"{tally.name}: rings against their bounds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bound(
    row: Mapping[str, Any], micro_batches: int, *, stages: int | None = None, hop_ms: float | None = None
) -> float:
    """M m / C of this ring with other micro-batches, all hops alike, or its work spread over so many equal stages."""
    taus_s, hops_s = [t / 1e3 for t in row["tau_ms"]], [h / 1e3 for h in row["hop_ms"]]
    if stages is not None:
        taus_s = [sum(taus_s) / stages] * stages
    if hop_ms is not None:
        hops_s = [hop_ms / 1e3] * len(taus_s)
    batch: int = micro_batches * row["rows"]
    return batch / cycle_s(taus_s, hops_s, micro_batches)
