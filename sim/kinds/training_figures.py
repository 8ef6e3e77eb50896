"""Why: figures of a training run, from its log alone, each beside the published one where there is one: how long a
broadcast, a batch and a step take, who waits for whom, and how idle each role is.

Versions after the first k + 1 are looked at: the first folders are all generated with the weights of the beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, cast

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from refimpl.grpo.staleness import checkpoint_for
from refimpl.training.plan import TrainPlan
from sim.hardware import find_device
from sim.scenario import Scenario
from sim.training_part import TrainingPart

MIN_S = 60.0
MEANING = {
    "broadcast_min": "broadcast of a version, to the mean worker",
    "first_file_min": "first verified file after a broadcast began",
    "batch_min": "whole verified batch after a broadcast began",
    "train_min": "training step",
    "step_min": "period of a step",
    "trainer_wait_min": "trainer's wait for a batch, per step",
    "check_min": "validator's work on a batch",
    "inference_per_training": "peak FLOP/s of workers over the trainer's",
}
COLOURS = ("#2a6f97", "#c1440e", "#4f772d", "#8a5a9e", "#b08900", "#3d7f7a")


class TrainingTally:
    """`sim.kinds.Tally` of a training run."""

    def __init__(self, scenario: Scenario, plan: TrainPlan, name: str) -> None:
        self.name, self.plan, self.part = name, plan, cast(TrainingPart, scenario.training)
        self.groups = {member.name: member.group for member in scenario.members()}
        self.role_of = {name: group.role for name, group in self.groups.items()}
        self.out_s: dict[int, float] = {}  # checkpoint -> when its last shard was out
        self.began_s: dict[int, float] = {}  # checkpoint -> when the origin began to cut it
        self.arrived_s: dict[int, dict[str, float]] = defaultdict(dict)  # checkpoint -> worker -> when
        self.taken_s: dict[int, list[float]] = defaultdict(list)  # folder -> when files of it were accepted
        self.trained_s: dict[int, float] = {}  # version -> when it was made
        self.busy: dict[str, list[tuple[float, float]]] = defaultdict(list)  # node -> its device at work
        self.folders: dict[str, list[int]] = defaultdict(list)  # worker -> folders that it generated for, in order
        self.counts: dict[str, int] = defaultdict(int)
        self.last: dict[str, Any] = {}
        self.age_max = 0
        self.banned: set[str] = set()
        self._cutting_s = 0.0

    # ---- the log

    def event(self, event: Mapping[str, Any]) -> None:
        kind, node, at_s = event["kind"], event["node"], event["t_ns"] / 1e9
        if kind == "compute" and event["work"] not in ("Hash", "Spread"):
            self.busy[node].append((event["start_ns"] / 1e9, event["end_ns"] / 1e9))
        elif kind == "publishing":
            self._cutting_s = at_s
        elif kind == "out":
            self.began_s.setdefault(event["checkpoint"], self._cutting_s)
            self.out_s.setdefault(event["checkpoint"], at_s)
        elif kind == "weights" and self.role_of.get(node) == "worker":
            self.arrived_s[event["checkpoint"]].setdefault(node, at_s)
        elif kind == "generated":
            self.folders[node].append(event["folder"])
        elif kind == "taken" and event["verdict"] == "accepted":
            self.taken_s[event["folder"]].append(at_s)
        elif kind == "trained":
            self.trained_s[event["version"]], self.last = at_s, dict(event)
            self.age_max = max(self.age_max, event["age_max"])
        elif kind == "over" and "failed a check" in event["reason"]:
            self.banned.add(node)
        if kind in ("denied", "expired", "given_up", "too_late", "version_skipped", "abandoned"):
            self.counts[kind] += 1

    # ---- figures

    @property
    def versions(self) -> list[int]:
        """Versions whose batch was generated with weights that the run itself had made."""
        return [v for v in range(self.plan.max_age + 1, self.part.steps) if v + 1 in self.trained_s]

    def _trainings(self) -> list[tuple[float, float]]:
        return self.busy[self.plan.trainer]

    def _batches(self, pick: Any, since: Mapping[int, float]) -> list[float]:
        """For each version: when `pick` of its files was taken, since its weights' broadcast."""
        return [
            pick(self.taken_s[v]) - since[checkpoint_for(v, self.plan.max_age)]
            for v in self.versions
            if checkpoint_for(v, self.plan.max_age) in since
        ]

    def _waits(self) -> list[float]:
        """Of the trainer, before each version: from the last one's publication to the beginning of its step."""
        trainings = self._trainings()
        return [
            max(0.0, trainings[v][0] - self.out_s[v]) for v in self.versions if v in self.out_s and v < len(trainings)
        ]

    def figures(self) -> dict[str, Any]:
        minutes = self._minutes()
        whole = self._whole()
        return {
            **{name: None if value is None else round(value, 4) for name, value in minutes.items()},
            "inference_per_training": round(self._compute_ratio(), 3),
            "versions": len(self.trained_s),
            "versions_looked_at": len(self.versions),
            "idle_share": {role: round(self._idle(role, *whole), 4) for role in ("trainer", "validator", "worker")},
            "age_max": self.age_max,
            "tokens_per_answer": self._tokens_per_answer(),
            "lost_share": self.last.get("lost_share"),
            "length_bias": self.last.get("length_bias"),
            "banned": sorted(self.banned),
            **{name: self.counts[name] for name in ("denied", "expired", "given_up", "too_late", "version_skipped")},
            "broadcasts_overtaken": self.counts["abandoned"],
            "published": self.beside(minutes),
        }

    def _minutes(self) -> dict[str, float | None]:
        arrivals = {v: mean(at.values()) for v, at in self.arrived_s.items() if at}
        broadcasts = [arrivals[v] - self.began_s[v] for v in arrivals if v and v in self.began_s]
        steps = sorted(self.trained_s.items())
        periods = [late - early for (v, early), (_, late) in pairwise(steps) if v in self.versions]
        checks = [end - start for start, end in self.busy[self.plan.validator]]
        trained = [end - start for start, end in self._trainings()]
        seconds = {
            "broadcast_min": broadcasts,
            "first_file_min": self._batches(min, self.began_s),
            "batch_min": self._batches(max, self.began_s),
            "generation_min": self._batches(max, arrivals),
            "train_min": trained,
            "step_min": periods,
            "trainer_wait_min": self._waits(),
            "check_min": [self.part.units_per_step * mean(checks)] if checks else [],
        }
        return {name: mean(values) / MIN_S if values else None for name, values in seconds.items()}

    def _compute_ratio(self) -> float:
        """Peak FLOP/s of all workers over the trainer's: the split of the hardware, not of what it did."""
        peak = {name: find_device(group.device).peak_flop_per_s for name, group in self.groups.items()}
        return sum(peak[name] for name in self.plan.workers) / peak[self.plan.trainer]

    def _tokens_per_answer(self) -> float | None:
        answers = self.last.get("answers")
        return round(self.last["answer_tokens"] / answers, 1) if answers else None

    def _whole(self) -> tuple[float, float]:
        """From the first step to the last: what comes before is starting up."""
        trainings = self._trainings()
        return (trainings[0][0], trainings[-1][1]) if trainings else (0.0, 0.0)

    def _idle(self, role: str, start_s: float, end_s: float) -> float:
        """Share of that time in which the mean device of a role had nothing to do."""
        nodes = [name for name, of in self.role_of.items() if of == role]
        if end_s <= start_s:
            return 1.0
        busy_s = sum(
            max(0.0, min(end, end_s) - max(start, start_s)) for name in nodes for start, end in self.busy[name]
        )
        return 1.0 - busy_s / len(nodes) / (end_s - start_s)

    def beside(self, minutes: Mapping[str, float | None]) -> list[dict[str, Any]]:
        """Each published figure, the one of this run, and by how much it is off."""
        found = {**minutes, "inference_per_training": self._compute_ratio()}
        return [
            {
                "figure": MEANING[one.figure],
                "name": one.figure,
                "published": one.value,
                "simulated": None if (value := found[one.figure]) is None else round(value, 3),
                "off": None if value is None or not one.value else round(value / one.value - 1, 4),
                "source": one.source,
            }
            for one in self.part.published
        ]

    # ---- what people see

    def table(self) -> str:
        figures = self.figures()
        lines = [
            f"{figures['versions']} versions, k = {self.plan.max_age}; {figures['tokens_per_answer']} tokens an answer",
            f"oldest answer that was trained: {figures['age_max']} versions",
            f"{'minutes':58} {'simulated':>9} {'published':>9} {'off':>7}",
        ]
        for row in figures["published"]:
            off = "" if row["off"] is None else f"{100 * row['off']:+.0f} %"
            lines.append(f"{row['figure']:58} {_number(row['simulated']):>9} {row['published']:>9g} {off:>7}")
        named = {row["name"] for row in figures["published"]}
        for name, meaning in MEANING.items():
            if name not in named:
                lines.append(f"{meaning:58} {_number(figures[name]):>9}")
        idle = ", ".join(f"{role} {100 * share:.0f} %" for role, share in figures["idle_share"].items())
        lines.append(f"idle between the first step and the last: {idle}")
        lines.append(
            f"files denied {figures['denied']}, workers banned {len(figures['banned'])}, slots expired "
            f"{figures['expired']}, given up {figures['given_up']}; broadcasts overtaken "
            f"{figures['broadcasts_overtaken']}, versions skipped by workers {figures['version_skipped']}"
        )
        return "\n".join(lines)

    def draw(self, folder: Path) -> None:
        _plot(folder / "timeline.png", self)

    def page(self) -> dict[str, Any]:
        figures = self.figures()
        rows = [
            [row["figure"], _number(row["simulated"]), f"{row['published']:g}",
             "–" if row["off"] is None else f"{100 * row['off']:+.0f} %", row["source"]]
            for row in figures["published"]
        ]  # fmt: skip
        return {
            "tiles": {
                "a step": f"{_number(figures['step_min'])} min",
                "trainer's wait per step": f"{_number(figures['trainer_wait_min'])} min",
                "idle": ", ".join(f"{role} {100 * share:.0f} %" for role, share in figures["idle_share"].items()),
            },
            "tables": [
                {
                    "title": "Beside the published run",
                    "columns": ["figure", "simulated", "published", "off", "source"],
                    "rows": rows,
                    "classes": ["" for _ in rows],
                }
            ],
            "pictures": [
                {"title": "Timeline", "file": "timeline.png", "alt": "when each role was at work, version by version"}
            ],
        }


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _plot(path: Path, tally: TrainingTally) -> None:
    """A few steps in the middle: training, broadcasts, checks, and each worker's generation; a colour a folder."""
    workers = list(tally.plan.workers)[:24]
    labels = ["training", "broadcast", "checks", *workers]
    figure, axis = plt.subplots(figsize=(11, 1.6 + 0.24 * len(labels)), layout="constrained")
    for folder, (start, end) in enumerate(tally._trainings()):
        _bar(axis, 0, start, end, folder)
    for checkpoint, began in tally.began_s.items():
        arrived = tally.arrived_s.get(checkpoint)
        if arrived:
            row = 1.0 + 0.18 * (checkpoint % 2 * 2 - 1)
            _bar(axis, row, began, max(arrived.values()), checkpoint + tally.plan.max_age, height=0.34)
    for start, end in tally.busy[tally.plan.validator]:
        _bar(axis, 2, start, end, None)
    for row, name in enumerate(workers, start=3):
        for (start, end), folder in zip(tally.busy[name], tally.folders[name], strict=False):
            _bar(axis, row, start, end, folder)
    first, last = _shown(tally)
    axis.set_xlim(first / MIN_S, last / MIN_S)
    axis.set_ylim(len(labels) - 0.4, -0.6)
    axis.set_yticks(range(len(labels)), labels, fontsize=7)
    axis.set_xlabel("minutes; a colour for each folder, a broadcast in that of the first folder that needs it")
    axis.grid(axis="x", alpha=0.25)
    axis.set_title(f"{tally.name}: k = {tally.plan.max_age}, {tally.part.checkpoint_gb:g} GB a version")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _shown(tally: TrainingTally) -> tuple[float, float]:
    """From the third step over four of them, or all where there are fewer."""
    trainings = tally._trainings()
    if not trainings:
        return 0.0, MIN_S
    first = trainings[2][0] if len(trainings) > 5 else trainings[0][0]
    return first - MIN_S, trainings[min(6, len(trainings)) - 1][1] + MIN_S


def _bar(axis: Axes, row: float, start: float, end: float, folder: int | None, height: float = 0.7) -> None:
    colour = "#777777" if folder is None else COLOURS[folder % len(COLOURS)]
    axis.barh(row, (end - start) / MIN_S, left=start / MIN_S, height=height, color=colour, linewidth=0)
