"""INTELLECT-2's published steps, simulated, and what would have become of them otherwise.

    python experiments/train/intellect2.py [--only NAME ...] [--runs FOLDER]

Each line of the table is one run of `sim/scenarios/intellect2.toml` (TARGET-SHORT) or `intellect2-long.toml`, with one
thing changed. A run that is in `intellect2.jsonl` is not made again unless its scenario has changed; table and plot are
made of all that is there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from sim.run import run_scenario
from sim.scenario import check_raw, read_raw, scenario_path

HERE = Path(__file__).parent
RESULTS = HERE / "intellect2.jsonl"
CHEAT = "weights-4bit"
Raw = dict[str, Any]
SHOWN = ("step_min", "train_min", "broadcast_min", "batch_min", "generation_min", "trainer_wait_min")


def lag(max_age: int) -> Callable[[Raw], None]:
    def change(raw: Raw) -> None:
        raw["training"]["max_age"] = max_age

    return change


def slow_lines(raw: Raw) -> None:
    for group in raw["nodes"]:
        if group["role"] in ("worker", "validator"):
            group["downlink_mbit_s"] /= 2


def cheats(raw: Raw) -> None:
    """One of nine workers runs the model in 4 bits."""
    next(group for group in raw["nodes"] if group["name"] == "a100-frankfurt")["behaviour"] = CHEAT


def slow_lines_and_lag(raw: Raw) -> None:
    slow_lines(raw)
    lag(1)(raw)


def as_it_was(raw: Raw) -> None:
    """As published."""


RUNS: dict[str, tuple[str, Callable[[Raw], None]]] = {
    "TARGET-SHORT, k = 2": ("intellect2", as_it_was),
    "TARGET-LONG, k = 2": ("intellect2-long", as_it_was),
    "k = 1": ("intellect2", lag(1)),
    "k = 0": ("intellect2", lag(0)),
    "half the bandwidth": ("intellect2", slow_lines),
    "half the bandwidth, k = 1": ("intellect2", slow_lines_and_lag),
    "one of nine workers cheats": ("intellect2", cheats),
}


def scenario_of(name: str) -> Raw:
    file, change = RUNS[name]
    raw = read_raw(scenario_path(file))
    change(raw)
    return raw


def digest(raw: Raw) -> str:
    return hashlib.sha256(json.dumps(raw, sort_keys=True).encode()).hexdigest()[:16]


def done() -> dict[str, dict[str, Any]]:
    """The last run of each name."""
    lines = RESULTS.read_text(encoding="utf-8").splitlines() if RESULTS.is_file() else []
    return {run["name"]: run for run in map(json.loads, lines)}


def one_run(name: str, runs: Path) -> dict[str, Any]:
    raw = scenario_of(name)
    short = name.replace(" ", "-").replace(",", "").replace("=", "")
    scenario = check_raw(raw, short)
    result = run_scenario(scenario, name=short, seed=scenario.seed, model_path="", runs=runs, progress=False)
    keep = ("idle_share", "versions", "denied", "banned", "version_skipped", "broadcasts_overtaken", "age_max")
    kept = {key: result.figures[key] for key in (*SHOWN, *keep, "published", "tokens_per_answer", "check_min")}
    broken = [str(violation) for violation in result.violations]
    return {"name": name, "scenario": digest(raw), "ended": result.ended, "broken": broken, **kept}


def cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}"


def tables(found: dict[str, dict[str, Any]]) -> list[str]:
    lines = ["# INTELLECT-2's steps, simulated", "", "## Beside the published figures", ""]
    for name in [name for name in RUNS if name.startswith("TARGET") and name in found]:
        lines += [
            f"**{name}**",
            "",
            "| minutes | simulated | published | off | source |",
            "| --- | --- | --- | --- | --- |",
        ]
        for row in found[name]["published"]:
            off = "" if row["off"] is None else f"{100 * row['off']:+.0f} %"
            lines.append(
                f"| {row['figure']} | {row['simulated']:.2f} | {row['published']:g} | {off} | {row['source']} |"
            )
        lines.append("")
    lines += ["## What if (minutes)", ""]
    columns = (
        *("step", "training", "broadcast", "batch, since the broadcast began", "batch, since the weights came"),
        *(
            "trainer waits",
            "trainer idle",
            "workers idle",
            "versions",
            "skipped by workers",
            "denied",
            "broken promises",
        ),
    )
    lines += ["| run | " + " | ".join(columns) + " |", "| --- |" + " --- |" * len(columns)]
    for name in [name for name in RUNS if name in found]:
        run = found[name]
        idle = run["idle_share"]
        lines.append(
            f"| {name} | "
            + " | ".join(cell(run[key]) for key in SHOWN)
            + f" | {100 * idle['trainer']:.0f} % | {100 * idle['worker']:.0f} % | {run['versions']} | "
            f"{run['version_skipped']} | {run['denied']} | {len(run['broken'])} |"
        )
    return [*lines, ""]


def plot(found: dict[str, dict[str, Any]]) -> None:
    """A step's period, and what of it the trainer trains and waits."""
    names = [name for name in RUNS if name in found and found[name]["step_min"] is not None]
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.5 * len(names)), layout="constrained")
    for row, name in enumerate(names):
        run, left = found[name], 0.0
        rest = max(0.0, run["step_min"] - run["train_min"] - run["trainer_wait_min"])
        parts = [(run["train_min"], "#2a6f97", "training"), (rest, "#888888", "cutting, hashing")]
        for length, colour, label in [*parts, (run["trainer_wait_min"], "#c1440e", "waiting for a batch")]:
            axis.barh(row, length, left=left, color=colour, label=label if row == 0 else None)
            left += length
        axis.text(left + 0.4, row, f"{run['step_min']:.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set_xlabel("minutes of a step, the trainer's")
    axis.legend(fontsize=8)
    axis.grid(axis="x", alpha=0.25)
    figure.savefig(HERE / "intellect2.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    options = parser.parse_args()
    for name in options.only:
        if done().get(name, {}).get("scenario") == digest(scenario_of(name)):
            continue
        print(f"== {name}", flush=True)
        result = one_run(name, options.runs)
        with RESULTS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result, ensure_ascii=False) + "\n")
    lines = tables(done())
    plot(done())
    (HERE / "intellect2.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
