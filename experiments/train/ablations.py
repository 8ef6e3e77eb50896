"""What asynchrony, the second clip, the online filter and the verifier are worth: ablations on the tiny model.

    python experiments/train/ablations.py [--only lag clip filter cheats] [--seeds 0 1 2] [--steps 100]

Each run is the plain loop of `refimpl/training/plain.py`, which an asynchronous run equals bit for bit
(tests/test_train_roles.py). A run that is in `ablations.jsonl` is not made again, so the command goes on where it was
stopped; the table and the plots are made of all that is there.

    lag      k = 0, 1, 2, 4, 8
    clip     δ = 4 or none, while every fourth version half of the answers with a negative advantage are said to have
             been sampled by a policy that found each token 30 times less likely: stale, high-ratio negatives
    filter   all answers trained, or only those that carry a signal (and as many of those)
    cheats   every fifth unit inverts its rewards; verifier on or off
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs from a checkout too

from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.rollout import Sample
from refimpl.tasks.problem import Problem
from refimpl.tasks.scorer import own_rewards
from refimpl.tasks.table import find_task
from refimpl.threads import set_threads
from refimpl.training.bench import Bench, MadeUnit
from refimpl.training.cheats import CHEATS
from refimpl.training.plain import Alter, Made, run_plain
from refimpl.training.plan import TrainPlan
from sim.sweep import interval as student_interval

HERE = Path(__file__).parent
RESULTS = HERE / "ablations.jsonl"
HELD_OUT = 700  # problems
LAST = 10  # versions that the final reward is the mean of
STALE_EVERY, STALE_SHARE, STALE_RATIO = 4, 0.5, 30.0
CHEAT_EVERY = 5

SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "lag": {f"k = {k}": {"max_age": k} for k in (0, 1, 2, 4, 8)},
    "clip": {"δ = 4": {"delta": 4.0}, "no δ": {"delta": None}},
    "filter": {"all answers": {"online_filter": False}, "online filter": {"online_filter": True}},
    "cheats": {"verifier on": {"verify": True}, "verifier off": {"verify": False}},
}


def true_reward(batch: Sequence[Sample]) -> float:
    """Mean task reward by the verifier, whatever the rows say."""
    answers = [(problem_of(row.problem_id), row.completion) for row in batch]
    return float(np.mean(own_rewards(answers)))


def problem_of(problem_id: str) -> Problem:
    """A problem's id names all that it was made of."""
    task, seed, level, split, index = problem_id.rsplit("/", 4)
    assert split in ("train", "test")
    return find_task(task).problem(int(index), level=int(level), split=split, seed=int(seed))  # type: ignore[arg-type]


def stale_negatives(seed: int) -> Alter:
    def alter(version: int, batch: list[Sample]) -> list[Sample]:
        if version % STALE_EVERY != STALE_EVERY - 1:
            return batch
        rng = np.random.default_rng([seed, version])
        moved = np.float32(math.log(STALE_RATIO))
        return [
            dataclasses.replace(row, output_logprobs=row.output_logprobs - moved)
            if row.advantage < 0 and rng.random() < STALE_SHARE
            else row
            for row in batch
        ]

    return alter


def some_cheat(plan: TrainPlan) -> Made:
    """Every fifth unit by a worker that inverts its rewards; None where the verifier finds it out."""
    key = plan.identity("cheat").public_key

    def make(bench: Bench, slot: SlotGiven, version: int) -> MadeUnit | None:
        if (slot.folder * plan.units_per_step + slot.place) % CHEAT_EVERY != CHEAT_EVERY - 1:
            return None
        made = CHEATS["rewards-inverted"](bench).make(slot, key, version)
        found = bench.inspect(Offer(key, slot, made.key, made.file))
        return made if found.code == "ok" else None

    return make


def plan_of(ablation: str, setting: str, seed: int, steps: int) -> TrainPlan:
    return TrainPlan(
        run_seed=seed, steps=steps, evaluate_every=steps, evaluate_problems=HELD_OUT, **SETTINGS[ablation][setting]
    )


def digest(plan: TrainPlan) -> str:
    """Rows of another plan are of another experiment."""
    return hashlib.sha256(json.dumps(plan.as_json(), sort_keys=True).encode()).hexdigest()[:12]


def one_run(ablation: str, setting: str, seed: int, steps: int) -> dict[str, Any]:
    plan = plan_of(ablation, setting, seed, steps)
    started_s, cpu_s = time.monotonic(), time.process_time()
    rewards: list[float] = []
    inject = stale_negatives(seed) if ablation == "clip" else lambda version, batch: batch

    def alter(version: int, batch: list[Sample]) -> list[Sample]:
        rewards.append(true_reward(batch))
        return inject(version, batch)

    figures = run_plain(
        plan,
        score=own_rewards,
        alter=alter,
        make=some_cheat(plan) if ablation == "cheats" else None,
    ).figures
    norms = [step["gradient_norm"] for step in figures if "gradient_norm" in step]
    return {
        "ablation": ablation,
        "setting": setting,
        "seed": seed,
        "steps": steps,
        "plan": digest(plan),
        "reward": float(np.mean(rewards[-LAST:])),
        "accuracy": figures[-1]["accuracy"],
        "gradient_norm_max": max(norms),
        "gradient_norm_median": float(np.median(norms)),
        "rewards": [round(reward, 4) for reward in rewards],
        "norms": [round(norm, 4) for norm in norms],
        "wall_s": round(time.monotonic() - started_s, 1),
        "cpu_s": round(time.process_time() - cpu_s, 1),
    }


def done() -> list[dict[str, Any]]:
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()] if RESULTS.is_file() else []


def interval(values: Sequence[float]) -> tuple[float, float]:
    """(mean, half of the 95 % interval) by Student's t; infinite for one value."""
    found = student_interval(values)
    return found.mean, found.half_width if found.count > 1 else math.inf


def table(ablation: str, runs: list[dict[str, Any]]) -> list[str]:
    lines = [
        f"**{ablation}**",
        "",
        "| setting | seeds | steps | reward, last 10 | held-out accuracy | largest gradient norm |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for setting in SETTINGS[ablation]:
        mine = [run for run in runs if run["ablation"] == ablation and run["setting"] == setting]
        if mine:
            cells = [interval([run[name] for run in mine]) for name in ("reward", "accuracy", "gradient_norm_max")]
            shown = " | ".join(f"{mean:.3f}" + (f" ± {half:.3f}" if half < math.inf else "") for mean, half in cells)
            lines.append(f"| {setting} | {len(mine)} | {mine[0]['steps']} | {shown} |")
    return lines


def plot(ablation: str, runs: list[dict[str, Any]]) -> None:
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    column = "norms" if ablation == "clip" else "rewards"
    for number, setting in enumerate(SETTINGS[ablation]):
        mine = [run[column] for run in runs if run["ablation"] == ablation and run["setting"] == setting]
        if mine:
            length = min(map(len, mine))
            curves = np.array([curve[:length] for curve in mine])
            at = np.arange(1, length + 1)
            axis.plot(at, curves.mean(0), color=f"C{number}", label=setting)
            axis.fill_between(at, curves.min(0), curves.max(0), color=f"C{number}", alpha=0.15)
    axis.set_xlabel("version")
    axis.set_ylabel("gradient norm before it is cut" if ablation == "clip" else "mean sampled reward")
    if ablation == "clip":
        axis.set_yscale("log")
    axis.set_title(f"{ablation}: mean and range over seeds")
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.savefig(HERE / f"{ablation}.png", dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    set_threads(2)
    for ablation in options.only:
        for seed in options.seeds:
            for setting in SETTINGS[ablation]:
                key = (ablation, setting, seed, options.steps)
                if any((run["ablation"], run["plan"]) == (ablation, digest(plan_of(*key))) for run in done()):
                    continue
                result = one_run(*key)
                with RESULTS.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result, ensure_ascii=False) + "\n")
                shown = {name: result[name] for name in ("reward", "accuracy", "gradient_norm_max", "cpu_s", "wall_s")}
                print(ablation, setting, f"seed {seed}", shown, flush=True)
    runs = [
        run
        for run in done()
        if run["plan"] == digest(plan_of(run["ablation"], run["setting"], run["seed"], options.steps))
    ]
    lines: list[str] = []
    for ablation in SETTINGS:
        if any(run["ablation"] == ablation for run in runs):
            lines += [*table(ablation, runs), ""]
            plot(ablation, runs)
    (HERE / "ablations.md").write_text("\n".join(lines), encoding="utf-8")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
