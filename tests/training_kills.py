"""Does a run of asynchronous training come to its end, and to the right one, whoever dies and whenever?

Trainer, relay, validator and two workers as processes; at seeded random moments one of them is killed (SIGKILL) and
started again. Each round is a run of some versions; at its end everything that the trainer had said it took is trained,
once, in its version's turn, none older than k, and every version was published. Where no version was skipped on its
way, the weights are those of the plain loop, in which nobody dies, to the bit.

    python -m tests.training_kills --kills 20 --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from refimpl.grpo.staleness import violations
from refimpl.grpo.vault import WEIGHTS, Vault
from refimpl.tasks.scorer import own_rewards
from refimpl.training.launch import Crew, Followed
from refimpl.training.plain import run_plain
from refimpl.training.plan import TrainPlan
from refimpl.training.seats import nodes_of, role_of
from refimpl.training.watch import read_events
from tests.paths import TINY_MODEL

WAIT_S = 240.0
LOOK_S = 0.05


@dataclass
class Figures:
    """What happened."""

    kills: Counter[str] = field(default_factory=Counter)  # by role
    rounds: int = 0
    versions: int = 0
    accepted: int = 0  # files
    made_again: int = 0  # versions that a killed trainer had made and not saved
    skipped_with_a_word: int = 0  # versions that a worker left out, and said so
    bit_for_bit: int = 0  # rounds that ended with the weights of the plain loop
    broken: list[str] = field(default_factory=list)


def plan_of(seed: int, steps: int) -> TrainPlan:
    """Small enough for a version a second, with everything that a large run has."""
    return TrainPlan(
        run_seed=seed,
        model_path=str(TINY_MODEL),
        steps=steps,
        units_per_step=4,
        problems_per_unit=4,
        group=8,
        warm_up_steps=2,
        learning_rate=1e-3,
        evaluate_every=0,
        max_age=(2, 0, 1)[seed % 3],
        deadline_s=20.0,
    )


class Round:
    """One run, from its beginning to its last version, and who is killed in it."""

    def __init__(self, plan: TrainPlan, folder: Path) -> None:
        self.plan, self.crew = plan, Crew(plan, folder)
        self.journal, self.folder = Followed(folder / plan.trainer / "events.jsonl"), folder
        self.versions, self.finished = 0, False

    def look(self) -> None:
        for event in self.journal.news():
            if event["kind"] in ("trained", "begun"):
                self.versions = event["version"]
            self.finished |= event["kind"] == "finished"
        broken = self.crew.broken()
        if broken and not self.finished:
            raise SystemExit(broken)

    def until(self, condition: Any) -> None:
        until_s = time.monotonic() + WAIT_S
        while not self.finished and not condition():
            if time.monotonic() > until_s:
                raise SystemExit(f"nothing went on for {WAIT_S:g} s after version {self.versions}; see {self.folder}")
            time.sleep(LOOK_S)
            self.look()

    def kill_one(self, rng: random.Random, figures: Figures, left: int) -> None:
        """Once the run goes on, and a moment later: somebody dies, and is back."""
        before = self.versions
        self.until(lambda: self.versions > before)
        time.sleep(rng.uniform(0.0, 1.0))
        self.look()
        if self.finished or left <= 0:
            return
        names = nodes_of(self.plan)
        victim = rng.choice([self.plan.trainer, *names])  # the trainer has the most to lose
        if self.crew.children[victim].poll() is not None:
            return
        self.crew.kill(victim)
        figures.kills[role_of(self.plan, victim)] += 1
        time.sleep(rng.uniform(0.0, 0.5))
        self.crew.restart(victim)


def run(kills: int, seed: int, steps: int, folder: Path) -> Figures:
    rng, figures = random.Random(seed), Figures()
    while figures.kills.total() < kills:
        plan = plan_of(seed + figures.rounds, steps)
        here = Round(plan, folder / str(figures.rounds))
        here.folder.mkdir()
        figures.rounds += 1
        try:
            here.crew.start_all()
            while not here.finished:
                here.kill_one(rng, figures, kills - figures.kills.total())
        finally:
            here.crew.stop()
        judge(plan, here.folder, figures)
    return figures


def judge(plan: TrainPlan, folder: Path, figures: Figures) -> None:
    """Hold what is left of a run against its promises, by disk and journals."""
    vault = Vault(folder / plan.trainer / "run", plan.run_id, keep=plan.max_age + 3)
    trained, broken = vault.trained(), violations(vault.trained(), plan.max_age)
    events = read_events(folder / name / "events.jsonl" for name in nodes_of(plan))

    def of(kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in events if e["kind"] == kind and all(e[name] == value for name, value in fields.items())]

    accepted = {event["key"] for event in of("taken", verdict="accepted")}
    lost = accepted - {unit.key for unit in trained}
    broken += [f"{key[:16]} was accepted, and never trained" for key in sorted(lost)]
    made = sorted({unit.version + 1 for unit in trained})
    if made != list(range(1, plan.steps + 1)):
        broken.append(f"versions {made} were made, {plan.steps} were asked for")
    published = sorted({event["checkpoint"] for kind in ("out", "out_before") for event in of(kind)})
    if published != list(range(plan.steps + 1)):
        broken.append(f"checkpoints {published} were published, 0 to {plan.steps} were to be")
    broken += [sentence for event in of("finished") for sentence in event["broken_promises"]]
    figures.broken += [f"round {figures.rounds - 1}: {sentence}" for sentence in broken]
    figures.versions += plan.steps
    figures.accepted += len(accepted)
    figures.made_again += len(of("trained")) - plan.steps
    skipped = len(of("version_skipped"))
    figures.skipped_with_a_word += skipped
    if not skipped:
        whole = load_file(vault.folder(plan.steps) / WEIGHTS)
        plain = run_plain(plan, score=own_rewards).weights
        different = [name for name, tensor in plain.items() if not torch.equal(whole[name], tensor)]
        figures.broken += [f"round {figures.rounds - 1}: {name} is not the plain loop's" for name in different[:1]]
        figures.bit_for_bit += not different


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30, help="versions of a round")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="training-kills-"))
    try:
        figures = run(options.kills, options.seed, options.steps, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = json.dumps({"seed": options.seed, "steps": options.steps, **vars(figures)}, indent=2)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 1 if figures.broken else 0


if __name__ == "__main__":
    raise SystemExit(main())
