"""What a plan chooses of a run, in the plain loop: where it is evaluated, what its loss has, what the model is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from refimpl.grpo.rollout import Sample
from refimpl.model.weights import checkpoint_tensors, load_decoder
from refimpl.tasks.scorer import own_rewards
from refimpl.training.bench import Bench, greedy_accuracy
from refimpl.training.plain import PlainRun, run_plain
from refimpl.training.prices import step_work
from refimpl.training.show import held_out
from refimpl.work import Backward, Forward, Several
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


def test_a_kl_to_the_first_checkpoint_holds_the_policy_near_it() -> None:
    """The first step is from the reference itself: no KL, and no gradient of one. From then on it pulls."""
    free, held = run(steps=3), run(steps=3, kl_coef=2.0)
    assert held.figures[0]["kl"] == 0.0 and held.figures[0]["gradient_norm"] == free.figures[0]["gradient_norm"]
    assert held.figures[2]["kl"] > 0 and held.figures[2]["gradient_norm"] != free.figures[2]["gradient_norm"]
    start = load_decoder(small_plan().model_path)
    moved = [
        sum(float((tensor - other).square().sum()) for tensor, other in zip(*tensors, strict=True))
        for tensors in ((one.weights.values(), checkpoint_tensors(start).values()) for one in (free, held))
    ]
    assert 0 < moved[1] < moved[0]


@pytest.mark.parametrize("estimator", ["k1", "k2"])
def test_the_estimator_of_the_kl_is_the_plans(estimator: str) -> None:
    assert not same_weights(run(steps=2, kl_coef=0.5, kl_estimator=estimator), run(steps=2, kl_coef=0.5))


def test_what_the_loss_is_divided_by_is_the_plans() -> None:
    """In a first step r = 1: the sum is the same, whatever divides it; the Dr. GRPO constant is 20 answers of 4."""
    by_tokens, by_sequences = run(steps=1).figures[0], run(steps=1, normaliser="sequences").figures[0]
    assert by_sequences["loss"] == pytest.approx(by_tokens["loss"] * by_tokens["answer_tokens"] / (20 * 4))
    assert by_tokens["answer_tokens"] < 20 * 4 and by_tokens["loss"] != 0


@pytest.mark.parametrize(
    ("setting", "match"),
    [({"kl_coef": -1.0}, "kl_coef is -1"), ({"kl_estimator": "k4"}, "k4"), ({"normaliser": "x"}, "'x' is not a valid")],
)
def test_a_loss_that_there_is_not_is_refused(setting: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        small_plan(**setting).step  # noqa: B018


def test_a_reference_is_priced() -> None:
    rows = [Sample(input_tokens=np.arange(8), output_tokens=np.arange(4), output_logprobs=np.zeros(4), step=0)] * 10
    size = load_decoder(small_plan().model_path).config.size(range(1))
    alone, with_reference = (step_work(size, rows, 1, reference=given) for given in (False, True))
    assert isinstance(alone, Backward) and isinstance(with_reference, Several)
    assert with_reference.parts[-1] == alone and isinstance(with_reference.parts[0], Forward)
