"""What people see of a training run: a progress line while it goes, a table and a plot when it has ended."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from refimpl.training.plan import TrainPlan
from refimpl.training.seats import nodes_of, role_of
from refimpl.training.watch import idle_shares, overlap_share, read_events, write_trace


class ProgressLine:
    """One line that is written over and over, or on no terminal a line every few seconds."""

    def __init__(self, steps: int, out: TextIO = sys.stderr, every_s: float = 5.0) -> None:
        self.steps, self.out, self.every_s = steps, out, every_s
        self.started_s = self._said_s = time.monotonic()
        self.accuracy: float | None = None
        self.rewards: list[float] = []

    def __call__(self, event: dict[str, Any]) -> None:
        if event["kind"] != "trained":
            return
        self.accuracy = event.get("accuracy", event.get("accuracy_before", self.accuracy))
        self.rewards.append(event["reward_mean"])
        last, now_s = event["version"] == self.steps, time.monotonic()
        if self.out.isatty() or last or now_s - self._said_s >= self.every_s:
            self._said_s = now_s
            end = "\r" if self.out.isatty() and not last else "\n"
            self.out.write(self._line(event, now_s - self.started_s) + end)
            self.out.flush()

    def _line(self, event: dict[str, Any], elapsed_s: float) -> str:
        recent = self.rewards[-10:]
        accuracy = f"  accuracy {self.accuracy:.3f}" if self.accuracy is not None else ""
        left_s = elapsed_s / event["version"] * (self.steps - event["version"])
        return (
            f"version {event['version']:>4}/{self.steps}  reward {sum(recent) / len(recent):.3f}{accuracy}  "
            f"age {event['age_mean']:.1f}  norm {event.get('gradient_norm', 0.0):.2f}  "
            f"{elapsed_s:.0f} s, {left_s:.0f} s left "
        )


def conclude(plan: TrainPlan, folder: Path, wall_s: float) -> dict[str, Any]:
    """Summary, plot and timeline from the nodes' journals; returns the summary."""
    nodes = nodes_of(plan)
    events = read_events(path for name in nodes if (path := folder / name / "events.jsonl").is_file())
    steps = [event for event in events if event["kind"] == "trained"]
    finished = [event for event in events if event["kind"] == "finished"]
    recent = [event["reward_mean"] for event in steps[-10:]]
    idle = idle_shares(events, nodes)
    summary = {
        "seed": plan.run_seed,
        "max_age": plan.max_age,
        "versions": len(steps),
        "wall_s": wall_s,
        "cpu_s": sum(event["cpu_s"] for event in events if event["kind"] == "used"),
        "reward_first": steps[0]["reward_mean"] if steps else None,
        "reward_last_10": sum(recent) / len(recent) if recent else None,
        "accuracy_first": next((event["accuracy_before"] for event in steps if "accuracy_before" in event), None),
        "accuracy": next((event["accuracy"] for event in reversed(steps) if "accuracy" in event), None),
        "accuracies": held_out(steps),
        "rewards": [event["reward_mean"] for event in steps],
        "age_mean": sum(event["age_mean"] for event in steps) / len(steps) if steps else None,
        "age_max": max((event["age_max"] for event in steps), default=None),
        "lost_share": steps[-1]["lost_share"] if steps else None,
        "length_bias": steps[-1]["length_bias"] if steps else None,
        "skipped_steps": steps[-1]["skipped_steps"] if steps else None,
        "denied": sum(event["kind"] == "denied" and event["code"] != "no_weights" for event in events),
        "versions_skipped_by_workers": sum(event["kind"] == "version_skipped" for event in events),
        "idle_share": {one.node: round(one.share, 4) for one in idle},
        "overlap_share": overlap_share(events),
        "broken_promises": finished[-1]["broken_promises"] if finished else ["the run did not end"],
        "plan": plan.as_json(),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    write_trace(folder / "trace.json", events, {name: role_of(plan, name) for name in nodes})
    plot_run(folder / "reward.png", steps, f"{plan.task}, k = {plan.max_age}, seed {plan.run_seed}")
    return summary


def held_out(steps: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """(version, greedy accuracy), of the version that the run began with too, wherever it was measured."""
    first = [(event["version"] - 1, event["accuracy_before"]) for event in steps if "accuracy_before" in event]
    return first + [(event["version"], event["accuracy"]) for event in steps if "accuracy" in event]


def describe(summary: dict[str, Any]) -> str:
    """The summary in a few lines."""

    def number(value: float | None, digits: int = 3) -> str:
        return "none" if value is None else f"{value:.{digits}f}"

    idle = ", ".join(f"{node} {100 * share:.0f} %" for node, share in summary["idle_share"].items())
    promises = summary["broken_promises"]
    return "\n".join(
        (
            f"{summary['versions']} versions in {summary['wall_s']:.0f} s (processor time {summary['cpu_s']:.0f} s)",
            f"mean sampled reward {number(summary['reward_first'])} -> {number(summary['reward_last_10'])} "
            f"(last 10 versions); held-out greedy accuracy {number(summary['accuracy_first'])} -> "
            f"{number(summary['accuracy'])}",
            f"age of what was trained: mean {number(summary['age_mean'], 2)}, largest {summary['age_max']}; lost "
            f"{100 * (summary['lost_share'] or 0):.1f} %, length bias {number(summary['length_bias'], 4)}; "
            f"files denied: {summary['denied']}",
            f"idle: {idle}; two or more busy at once in {100 * summary['overlap_share']:.0f} % of the busy time",
            "promises kept: none older than k, none trained twice, no version left out"
            if not promises
            else "\n".join(promises),
        )
    )


def plot_run(path: Path, steps: Sequence[dict[str, Any]], title: str) -> None:
    """Sampled reward and held-out accuracy over versions."""
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    versions = [event["version"] for event in steps]
    axis.plot(versions, [event["reward_mean"] for event in steps], color="#8ab", lw=1, label="mean sampled reward")
    smooth = [
        sum(e["reward_mean"] for e in steps[max(0, i - 9) : i + 1]) / len(steps[max(0, i - 9) : i + 1])
        for i in range(len(steps))
    ]
    axis.plot(versions, smooth, color="#147", lw=2, label="the same, mean of ten")
    if accuracies := held_out(steps):
        axis.plot(*zip(*accuracies, strict=True), "o-", color="#b41", label="held-out greedy accuracy")
    axis.set_xlabel("version")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", fontsize=8)
    axis.set_title(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
