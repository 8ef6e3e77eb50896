"""Does `make train` teach the tiny model to add, whatever the seed? Rewards, accuracy and time of several runs.

    python experiments/train/make_train.py [--seeds 0 1 2] [--runs runs/make-train] [-- OPTIONS]

OPTIONS are those of `python -m refimpl.training`. A run whose summary is in its folder is not made again; runs of
different plans make no table. Leaves `make_train.md` and `make_train.png`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
ROOT = Path(__file__).parents[2]
ACCURACY_GOAL, REWARD_GOAL, GOAL_S = 0.85, 0.65, 300.0


def summary_of(runs: Path, seed: int, options: list[str]) -> dict[str, Any]:
    path = runs / f"train-{seed}" / "summary.json"
    if not path.is_file():
        command = [sys.executable, "-m", "refimpl.training", "--seed", str(seed), "--runs", str(runs.resolve())]
        status = subprocess.run([*command, *options], cwd=ROOT).returncode
        if status not in (0, 1):  # 1: a promise was broken, and the table says which
            raise SystemExit(f"seed {seed} ended with status {status}")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def smooth(rewards: list[float], width: int = 10) -> list[float]:
    return [sum(part := rewards[max(0, i + 1 - width) : i + 1]) / len(part) for i in range(len(rewards))]


def table(summaries: list[dict[str, Any]]) -> str:
    plan = summaries[0]["plan"]
    answers = plan["units_per_step"] * plan["problems_per_unit"] * plan["group"]
    lines = [
        f"`python -m refimpl.training --seed S`: {plan['steps']} versions of {answers} answers, k = {plan['max_age']}, "
        f"every node a process. Goal: accuracy {ACCURACY_GOAL}, reward {REWARD_GOAL}, {GOAL_S:.0f} s.",
        "",
        "| seed | wall clock, s | processor, s | reward, first | reward, last 10 | accuracy, version 0 "
        "| held-out accuracy | age, mean (max) | lost | idle: trainer, validator, workers | promises |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for one in summaries:
        idle = [one["idle_share"][node] for node in (plan["trainer"], plan["validator"], *plan["workers"])]
        lines.append(
            f"| {one['seed']} | {one['wall_s']:.0f} | {one['cpu_s']:.0f} | {one['reward_first']:.3f} "
            f"| {one['reward_last_10']:.3f} | {one['accuracy_first']:.3f} | {one['accuracy']:.3f} "
            f"| {one['age_mean']:.2f} ({one['age_max']}) "
            f"| {100 * one['lost_share']:.1f} % | {', '.join(f'{100 * share:.0f} %' for share in idle)} "
            f"| {'kept' if not one['broken_promises'] else '; '.join(one['broken_promises'])} |"
        )
    return "\n".join([*lines, ""])


def plot(path: Path, summaries: list[dict[str, Any]]) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    for number, one in enumerate(summaries):
        rewards = smooth(one["rewards"])
        axis.plot(range(1, len(rewards) + 1), rewards, color=f"C{number}", label=f"reward, seed {one['seed']}")
        axis.plot(*zip(*one["accuracies"], strict=True), "o--", color=f"C{number}", ms=3, lw=0.8)
    for goal in (ACCURACY_GOAL, REWARD_GOAL):
        axis.axhline(goal, color="#888", lw=0.8, ls=":")
    axis.set_xlabel("version")
    axis.set_ylim(0, 1)
    axis.grid(alpha=0.25)
    axis.legend(loc="lower right", fontsize=8)
    axis.set_title("mean sampled reward (mean of ten versions); dashed: held-out greedy accuracy")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "make-train")
    parser.add_argument("options", nargs="*", help="of python -m refimpl.training, after --")
    options = parser.parse_args()
    summaries = [summary_of(options.runs, seed, options.options) for seed in options.seeds]
    plans = {json.dumps(one["plan"] | {"run_seed": None}, sort_keys=True) for one in summaries}
    if len(plans) > 1:
        raise SystemExit(f"the runs in {options.runs} are of {len(plans)} different plans; remove those that are old")
    text = table(summaries)
    (HERE / "make_train.md").write_text(text, encoding="utf-8")
    plot(HERE / "make_train.png", summaries)
    print(text)


if __name__ == "__main__":
    main()
