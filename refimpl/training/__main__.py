"""`python -m refimpl.training`: asynchronous GRPO for real, every node a process on this machine.

Workers generate with the weights they have, a validator checks every file, the trainer steps when a folder is complete,
SHARDCAST carries the weights. Leaves RUNS/train-SEED/: plan.json, summary.json, reward.png, trace.json (opens in
Perfetto), and every node's folder. Run it again with --resume and the same settings, and it goes on where it ended.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
import time
from pathlib import Path

from refimpl.grpo.loss import KlEstimator, Normaliser
from refimpl.grpo.rewards import LengthReward
from refimpl.training.cheats import CHEATS
from refimpl.training.launch import LaunchError, run_node, run_processes, run_rank
from refimpl.training.plan import TrainPlan
from refimpl.training.show import ProgressLine, conclude, describe
from refimpl.worlds.asyncio_node import Line


def options_of(arguments: list[str]) -> argparse.Namespace:
    default = TrainPlan()
    parser = argparse.ArgumentParser(
        prog="python -m refimpl.training",
        description=(__doc__ or "").splitlines()[0],
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=default.steps, help="versions to make")
    parser.add_argument("--lag", type=int, default=default.max_age, help="k: no trained token is older than this")
    parser.add_argument("--workers", type=int, default=len(default.workers))
    parser.add_argument(
        "--processes", type=int, default=default.trainer_processes, help="over which the trainer's model is sharded"
    )
    parser.add_argument("--cheat", choices=sorted(CHEATS), help="what the last worker does instead of its work")
    parser.add_argument("--no-verify", action="store_true", help="the validator looks only whether a file is one")
    parser.add_argument("--model", default=default.model_path, help="checkpoint folder")
    parser.add_argument("--task", default=default.task)
    parser.add_argument("--level", type=int, default=default.level, help="of difficulty")
    parser.add_argument("--lr", type=float, default=default.learning_rate)
    parser.add_argument("--warm-up", type=int, default=default.warm_up_steps, help="steps until that rate")
    parser.add_argument("--kl", type=float, default=default.kl_coef, help="weight of the KL to the first checkpoint")
    parser.add_argument(
        "--kl-estimator", choices=[one.value for one in KlEstimator], default=default.kl_estimator, help="of that KL"
    )
    parser.add_argument(
        "--normaliser",
        "--normalizer",
        choices=[one.value for one in Normaliser],
        default=default.normaliser,
        help="what the summed loss of a step is divided by",
    )
    parser.add_argument("--problems", type=int, default=default.problems_per_unit, help="per unit")
    parser.add_argument("--group", type=int, default=default.group, help="answers to each problem")
    parser.add_argument("--units", type=int, default=default.units_per_step, help="per version")
    parser.add_argument("--tokens", type=int, default=default.new_tokens_max, help="longest answer")
    parser.add_argument(
        "--length-reward",
        choices=[one.value for one in LengthReward],
        default=default.length_reward,
        help="how an answer's length counts, beside its target, which the model is told",
    )
    parser.add_argument("--length-targets", type=int, nargs="+", default=default.length_targets, help="tokens")
    parser.add_argument("--length-alpha", type=float, default=default.length_alpha, help="reward per token")
    parser.add_argument(
        "--deadline-s", type=float, default=default.deadline_s, help="after which a slot is given to another worker"
    )
    parser.add_argument("--filter", action="store_true", help="train only answers that carry a signal")
    parser.add_argument("--latency-ms", type=float, default=0.0, help="one way, added to every message of a node")
    parser.add_argument("--mbit-s", type=float, help="up and down, of every node; default: unshaped")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    parser.add_argument("--resume", action="store_true", help="go on with what is in the folder")
    return parser.parse_args(arguments)


def plan_of(options: argparse.Namespace) -> TrainPlan:
    workers = tuple(f"worker-{number}" for number in range(options.workers))
    return dataclasses.replace(
        TrainPlan(),
        run_seed=options.seed,
        steps=options.steps,
        max_age=options.lag,
        trainer_processes=options.processes,
        workers=workers,
        cheats=((workers[-1], options.cheat),) if options.cheat else (),
        verify=not options.no_verify,
        model_path=options.model,
        task=options.task,
        level=options.level,
        learning_rate=options.lr,
        warm_up_steps=options.warm_up,
        kl_coef=options.kl,
        kl_estimator=options.kl_estimator,
        normaliser=options.normaliser,
        problems_per_unit=options.problems,
        group=options.group,
        units_per_step=options.units,
        new_tokens_max=options.tokens,
        length_reward=options.length_reward,
        length_targets=tuple(options.length_targets),
        length_alpha=options.length_alpha,
        deadline_s=options.deadline_s,
        online_filter=options.filter,
    )


def changed_settings(plan: TrainPlan, path: Path) -> str:
    """What the run that is resumed was begun with, where that is not what `plan` says; empty: nothing. A run's rates
    and rules hang on its plan, the number of steps too: half of one and half of another is neither."""
    now = json.loads(json.dumps(plan.as_json()))
    if not path.is_file():
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(now, indent=2) + "\n", encoding="utf-8")
        partial.rename(path)
    begun = json.loads(path.read_text(encoding="utf-8"))
    names = [name for name in {**now, **begun} if begun.get(name) != now.get(name)]
    return ", ".join(f"{name} = {begun.get(name)!r}, not {now.get(name)!r}" for name in names)


def main(arguments: list[str]) -> int:
    """Exit code 0: done, and all promises kept; 1: not; 2: usage."""
    if len(arguments) == 2 and arguments[0] == "node":
        return run_node(arguments[1])
    if len(arguments) == 2 and arguments[0] == "rank":
        return run_rank(arguments[1])
    options = options_of(arguments)
    try:
        plan = plan_of(options)
        plan.rules, plan.pacing, plan.step  # noqa: B018 - says what is wrong before anything is started
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    folder = options.runs / f"train-{plan.run_seed}"
    if folder.exists() and not options.resume:
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if changed := changed_settings(plan, folder / "plan.json"):
        print(f"{folder} was begun with {changed}: resume it with the same, or begin anew", file=sys.stderr)
        return 2
    started_s = time.monotonic()
    line = Line(uplink_mbit_s=options.mbit_s, downlink_mbit_s=options.mbit_s, latency_ms=options.latency_ms)
    print(f"starting {3 + len(plan.workers)} processes", file=sys.stderr, flush=True)
    try:
        run_processes(plan, folder.resolve(), say=ProgressLine(plan.steps), line=line)
    except LaunchError as error:
        print(error, file=sys.stderr)
        return 1
    summary = conclude(plan, folder, time.monotonic() - started_s)
    print(describe(summary))
    print(f"{folder}/")
    return 0 if not summary["broken_promises"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
