"""Two pictures of an adversarial run: how far the scores of cheats lie from honest noise, and when they were caught."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

SECOND_NS = 1_000_000_000
HONEST_COLOUR, CHEAT_COLOUR, BOUND_COLOUR = "#2a6f97", "#c1440e", "#222222"


class Scores:
    """Per behaviour, each submission's worst chunk: (mismatches, mean error, median error). A behaviour whose
    submissions were all rejected before anything was compared has none."""

    def __init__(self, behaviour_of: Mapping[str, str]) -> None:
        self.behaviour_of = behaviour_of
        self.scores: dict[str, list[tuple[float, float, float]]] = {}
        self._worker_of: dict[str, str] = {}

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        if event["kind"] == "registered":
            self._worker_of[event["public_key"]] = event["worker"]
        elif event["kind"] == "judged" and event["public_key"] in self._worker_of:
            found = self.scores.setdefault(self.behaviour_of[self._worker_of[event["public_key"]]], [])
            if event["mismatches"]:
                found.append((max(event["mismatches"]), max(event["mean_errors"]), max(event["median_errors"])))

    def plot(self, path: Path, honest: Iterable[str], *, bounds: tuple[float, float, float], title: str) -> None:
        """Distributions of the three scores, with the thresholds drawn."""
        _plot_scores(path, self.scores, set(honest), bounds, title)


def _plot_scores(
    path: Path,
    scores: Mapping[str, list[tuple[float, float, float]]],
    honest: set[str],
    bounds: tuple[float, float, float],
    title: str,
) -> None:
    names = sorted(scores, key=lambda name: (name not in honest, list(scores).index(name)), reverse=True)
    if not names:
        return
    figure, axes = plt.subplots(1, 3, figsize=(13, 0.42 * len(names) + 1.9), sharey=True, layout="constrained")
    labels = ("values that differ (of 128)", "mean error of the others (ulp)", "median error of the others (ulp)")
    for place, (axis, label, bound) in enumerate(zip(axes, labels, bounds, strict=True)):
        for height, name in enumerate(names):
            values = [entry[place] for entry in scores[name]]
            colour = HONEST_COLOUR if name in honest else CHEAT_COLOUR
            if not values:
                axis.text(0.05, height, "rejected before comparison", fontsize=8, va="center", color=colour)
                continue
            spread = [height + 0.32 * (((i * 0.618034) % 1.0) - 0.5) for i in range(len(values))]
            axis.scatter(values, spread, s=9, alpha=0.55, color=colour, linewidths=0)
            axis.plot([sorted(values)[len(values) // 2]] * 2, [height - 0.3, height + 0.3], color=colour, lw=2)
        axis.axvline(bound, color=BOUND_COLOUR, ls="--", lw=1)
        axis.text(bound, len(names) - 0.45, f" bound {bound:g}", fontsize=8, va="bottom")
        axis.set_xlabel(label)
        axis.set_xscale("symlog", linthresh=1)
        axis.set_xlim(left=0)
        axis.grid(axis="x", alpha=0.25)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].set_ylim(-0.7, len(names) + 0.1)
    figure.suptitle(f"{title}: worst chunk of each submission (one dot), honest workers blue, cheats red", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


class Detections:
    """When submissions of each behaviour were rejected."""

    def __init__(self, behaviour_of: Mapping[str, str]) -> None:
        self.behaviour_of = behaviour_of
        self.times_s: dict[str, list[float]] = {}
        self.judged: dict[str, int] = {}
        self.end_s = 0.0
        self._worker_of: dict[str, str] = {}

    def event(self, event: Mapping[str, Any]) -> None:
        """The log's next event."""
        self.end_s = event["t_ns"] / SECOND_NS
        if event["kind"] == "registered":
            self._worker_of[event["public_key"]] = event["worker"]
        elif event["kind"] == "judged" and event["decided"] and event["public_key"] in self._worker_of:
            behaviour = self.behaviour_of[self._worker_of[event["public_key"]]]
            self.judged[behaviour] = self.judged.get(behaviour, 0) + 1
            times_s = self.times_s.setdefault(behaviour, [])
            if not event["accepted"]:
                times_s.append(self.end_s)

    def plot(self, path: Path, honest: Iterable[str], *, title: str) -> None:
        """Rejected submissions over virtual time, one line a behaviour."""
        _plot_detections(path, self.times_s, self.judged, self.end_s, set(honest), title)


def _plot_detections(
    path: Path,
    times: Mapping[str, list[float]],
    judged: Mapping[str, int],
    end_s: float,
    honest: set[str],
    title: str,
) -> None:
    figure, axis = plt.subplots(figsize=(10, 4.6), layout="constrained")
    palette = plt.get_cmap("tab20")
    cheats = [name for name in times if name not in honest]
    for i, name in enumerate(cheats):
        xs, ys = [0.0], [0.0]
        for count, instant in enumerate(sorted(times[name]), 1):
            xs += [instant, instant]
            ys += [ys[-1], 100 * count / judged[name]]
        axis.plot([*xs, end_s], [*ys, ys[-1]], color=palette(i % 20), lw=1.6, label=name)
    false = sorted(t for name in times if name in honest for t in times[name])
    for instant in false:
        axis.axvline(instant, color=HONEST_COLOUR, lw=0.8)
    axis.plot([], [], color=HONEST_COLOUR, lw=0.8, label=f"an honest one rejected ({len(false)})")
    axis.set_xlabel("virtual time (s)")
    axis.set_ylabel("submissions rejected so far (% of the behaviour's)")
    axis.set_ylim(-2, 104)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axis.set_title(f"{title}: when cheats were caught", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
