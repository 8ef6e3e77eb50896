"""The same run without roles, clocks or messages: the reference that the roles are held against, and what experiments
about learning are made with.

Version s of a run is a function of the seed alone as long as workers take the weights that their slot names and nobody
decides how many units a folder has: who generated what, and when, changes nothing. So this loop, which generates folder
s with the weights of s - k, trains it, and goes on, gives the weights of an asynchronous run bit for bit; with k = 0 it
is the synchronous run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import PartialState

from refimpl.grpo.messages import SlotGiven
from refimpl.grpo.rollout import Sample, decode_rollouts
from refimpl.grpo.staleness import checkpoint_for
from refimpl.grpo.step import Policy
from refimpl.model.weights import checkpoint_tensors, load_decoder
from refimpl.training.bench import Bench, MadeUnit, Score, greedy_accuracy
from refimpl.training.plan import TrainPlan
from refimpl.training.shards import Shards
from refimpl.training.student import Student
from refimpl.workshop import DTYPES

Made = Callable[[Bench, SlotGiven, int], MadeUnit | None]
"""(bench, slot, version) -> a unit; None: it was rejected, and the place is given to an honest worker."""
Alter = Callable[[int, list[Sample]], list[Sample]]
"""(version, batch) -> the batch that is trained in its place: how an experiment injects what it studies."""


@dataclass(frozen=True, kw_only=True)
class PlainRun:
    figures: list[dict[str, Any]]  # one a version
    weights: dict[str, torch.Tensor]
    keys: list[list[str]]  # of the files of each version, by place


def student_of(plan: TrainPlan, bench: Bench | None, state: PartialState | None = None) -> Student:
    """The trainer's own copy of the checkpoint, with its optimizer; and another that stays, where the loss has a KL.
    `bench`: to evaluate with, where that is done. `state`: of the processes that share it; None: this one has it alone.
    """
    decoder = load_decoder(plan.model_path, dtype=DTYPES[plan.dtype])
    reference = None
    if plan.kl_coef:
        first = load_decoder(plan.model_path, dtype=DTYPES[plan.dtype])
        reference = Policy(first) if state is None else Shards(first, state).policy
    return Student(
        decoder,
        plan.step,
        optimizer_steps=plan.optimizer_steps,
        online_filter=plan.online_filter,
        evaluate=None if bench is None else lambda decoder: greedy_accuracy(bench, decoder, plan.evaluate_problems),
        evaluate_every=plan.evaluate_every,
        reference=reference,
        shards=None if state is None else Shards(decoder, state),
    )


def run_plain(
    plan: TrainPlan,
    *,
    score: Score | None = None,
    make: Made | None = None,
    alter: Alter | None = None,
    say: Callable[[dict[str, Any]], None] = lambda figures: None,
) -> PlainRun:
    """Run `plan.steps` versions in this process."""
    weights: dict[int, dict[str, torch.Tensor]] = {}
    bench = Bench(plan, tensors=lambda version: weights[version], score=score)
    try:
        student = student_of(plan, bench)
        bench.version = -1  # its decoder is refilled from `weights`, version 0 too
        figures, keys = [], []
        for version in range(plan.steps):
            weights[version] = _copied(student)
            weights = {v: tensors for v, tensors in weights.items() if v >= version - plan.max_age}
            units = _folder(plan, bench, version, make)
            batch = [row for unit in units for row in _reread(bench, unit)]
            if alter is not None:
                batch = alter(version, batch)
            figures.append(student.learn(batch) | {"version": version + 1})
            keys.append([unit.key for unit in units])
            say(figures[-1])
        return PlainRun(figures=figures, weights=_copied(student), keys=keys)
    finally:
        bench.close()


def _folder(plan: TrainPlan, bench: Bench, folder: int, make: Made | None) -> list[MadeUnit]:
    """The units of a folder, as many as it takes."""
    checkpoint, found, useful, place = checkpoint_for(folder, plan.max_age), [], 0, 0
    while useful < plan.pacing.samples_per_step:
        slot = SlotGiven(0, folder, checkpoint, place + 1, place)
        unit = make(bench, slot, checkpoint) if make is not None else None
        if unit is None:
            unit = bench.make(slot, plan.identity(plan.workers[0]).public_key, checkpoint)
        found.append(unit)
        useful += sum(row.advantage != 0.0 or not plan.online_filter for row in unit.rows)
        place += 1
    return found


def _reread(bench: Bench, unit: MadeUnit) -> Sequence[Sample]:
    """What the file says is what is trained, rounded as the file rounds it."""
    assert unit.file.data is not None
    return decode_rollouts(unit.file.data, bench.plan.limits(bench.decoder.config.vocabulary))


def _copied(student: Student) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in checkpoint_tensors(student.decoder).items()}
