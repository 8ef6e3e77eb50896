"""What a plan chooses of a run, in the plain loop: where it is evaluated, what its loss has, what the model is told."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from refimpl.grpo.loss import KlEstimator, Normaliser
from refimpl.grpo.messages import Offer, SlotGiven
from refimpl.grpo.rewards import LengthReward
from refimpl.grpo.rollout import Sample
from refimpl.model.weights import checkpoint_tensors, load_decoder
from refimpl.tasks.scorer import own_rewards
from refimpl.training.__main__ import options_of, plan_of
from refimpl.training.bench import Bench, greedy_accuracy, packed
from refimpl.training.plain import PlainRun, run_plain
from refimpl.training.plan import TrainPlan
from refimpl.training.prices import step_work
from refimpl.training.show import held_out
from refimpl.work import Backward, Forward, Several
from tests.training_run import small_plan

SLOT = SlotGiven(index=3, folder=0, checkpoint=0, counter=1, place=1)
KEY = "ab" * 32


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


LENGTHS: dict[str, Any] = {"length_reward": "exact", "length_targets": (2, 4), "length_alpha": 0.1}


def test_where_lengths_count_the_model_is_told_each_rows_target() -> None:
    """Worker and validator make the same prompt of the slot; another's instruction is another prompt."""
    plan = small_plan(**LENGTHS, problems_per_unit=4)
    worker, validator = Bench(plan, score=own_rewards), Bench(plan, score=own_rewards)
    rows = list(worker.make(SLOT, KEY, 0).rows)
    assert {row.target_length for row in rows} == {2, 4}
    for row in rows:
        told = f"Think for {row.target_length} tokens before giving a response. "
        asked = row.prompt.removeprefix(told)
        assert asked == worker.problem(int(row.problem_id.rsplit("/", 1)[1]))[0].prompt and asked != row.prompt
        assert row.input_tokens.tolist() == worker.tokenizer(row.prompt, add_special_tokens=False)["input_ids"]
        assert row.length_penalty == pytest.approx(0.1 * abs(len(row.output_tokens) - row.target_length))

    def code_of(rows: list[Sample]) -> str:
        made = packed(rows)
        return validator.inspect(Offer(KEY, SLOT, made.key, made.file)).code

    assert code_of(rows) == "ok"
    without = worker.problem(int(rows[0].problem_id.rsplit("/", 1)[1]))[1]
    tokens = np.asarray(without.prompt, dtype=np.int32)
    assert (
        code_of([dataclasses.replace(rows[0], prompt=without.text, input_tokens=tokens), *rows[1:]]) == "wrong_problem"
    )


def test_a_request_in_words_has_its_instruction_last() -> None:
    bench = Bench(small_plan(task="sums", length_reward="clip"), score=own_rewards)
    problem, question = bench.problem(0, target=2000)
    assert question.text == problem.prompt + " Think for maximally 2000 tokens before giving a response."
    assert bench.problem(0)[1].text == problem.prompt


def test_a_run_with_lengths_learns_and_is_evaluated_with_targets_too() -> None:
    figures = run(steps=2, evaluate_every=2, evaluate_problems=16, **LENGTHS).figures
    assert figures[1]["gradient_norm"] > 0 and 0 <= figures[1]["accuracy"] <= 1


def test_lengths_and_the_loss_are_chosen_on_the_command_line() -> None:
    line = "--length-reward exact --length-targets 2 4 --length-alpha 0.1 --kl 0.2 --kl-estimator k2 --normalizer cells"
    plan = plan_of(options_of(line.split()))
    assert (plan.length_reward, plan.length_targets, plan.length_alpha) == ("exact", (2, 4), 0.1)
    assert plan.rules.length.kind is LengthReward.EXACT
    loss = plan.step.loss
    assert (loss.kl_coef, loss.kl_estimator, loss.normaliser) == (0.2, KlEstimator.K2, Normaliser.CELLS)
    assert plan_of(options_of([])) == TrainPlan(), "the defaults are the plan's"
