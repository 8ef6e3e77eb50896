"""What a plan chooses of a run, in the plain loop: where it is evaluated, what its loss has, what the model is told."""

from __future__ import annotations

from typing import Any

import torch

from refimpl.tasks.scorer import own_rewards
from refimpl.training.bench import Bench, greedy_accuracy
from refimpl.training.plain import PlainRun, run_plain
from refimpl.training.show import held_out
from tests.training_run import small_plan


def run(**changes: Any) -> PlainRun:
    return run_plain(small_plan(**changes), score=own_rewards)


def same_weights(one: PlainRun, other: PlainRun) -> bool:
    return all(torch.equal(tensor, other.weights[name]) for name, tensor in one.weights.items())


def test_a_run_is_evaluated_before_its_first_step_too_and_that_changes_nothing() -> None:
    seen = run(steps=2, evaluate_every=2, evaluate_problems=64)
    bench = Bench(small_plan(), score=own_rewards)
    first = greedy_accuracy(bench, bench.decoder, 64)
    assert 0.2 < first < 0.6, "the tiny model is half taught"
    assert seen.figures[0]["accuracy_before"] == first and "accuracy_before" not in seen.figures[1]
    assert held_out(seen.figures) == [(0, first), (2, seen.figures[1]["accuracy"])]
    unseen = run(steps=2)
    assert held_out(unseen.figures) == []
    assert same_weights(seen, unseen)
