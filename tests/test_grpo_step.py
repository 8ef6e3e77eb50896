"""The optimizer step: the same however it is split, skipped whole when not finite, and resumed as if never stopped."""

from __future__ import annotations

import copy
import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from refimpl.grpo.loss import LossConfig, Normaliser
from refimpl.grpo.packing import TrainSample
from refimpl.grpo.step import Learner, Policy, StepConfig
from refimpl.model.config import ModelConfig
from refimpl.model.weights import random_decoder

MODEL = ModelConfig(
    family="qwen3",
    layers=2,
    hidden=24,
    intermediate=40,
    query_heads=4,
    kv_heads=2,
    head_dim=6,
    vocabulary=31,
    positions_max=128,
    qk_norm=True,
    tied_head=True,
)
CONFIG = StepConfig(learning_rate=1e-3, warm_up_steps=0, clip_norm=1.0, new_tokens_max=13)


def learner(config: StepConfig = CONFIG, seed: int = 5) -> Learner:
    return Learner(Policy(random_decoder(MODEL, seed=seed, std=0.3)), config)


def samples(seed: int = 0, count: int = 7) -> list[TrainSample]:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        prompt, answer = int(rng.integers(1, 6)), int(rng.integers(1, 14))
        made.append(
            TrainSample(
                prompt=rng.integers(1, 31, prompt).astype(np.int32),
                answer=rng.integers(1, 31, answer).astype(np.int32),
                behaviour=(-3.4 + 0.1 * rng.standard_normal(answer)).astype(np.float32),
                advantage=float(rng.normal()),
            )
        )
    return made


def weights(one: Learner) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in one.parameters])


@pytest.mark.parametrize("normaliser", [Normaliser.TOKENS, Normaliser.SEQUENCES])
@pytest.mark.parametrize(("row_tokens", "micro_cells"), [(18, 18), (18, 40), (40, 80), (120, 120)])
def test_a_step_does_not_depend_on_how_it_is_split(normaliser: Normaliser, row_tokens: int, micro_cells: int) -> None:
    """One sample a pass, several passes, or all in one row: the same loss, norm, metrics and new weights."""
    loss = LossConfig(normaliser=normaliser, entropy_coef=0.01)
    plain = replace(CONFIG, loss=loss)
    whole, split = learner(plain), learner(replace(plain, row_tokens=row_tokens, micro_cells=micro_cells))
    one, other = whole.step(samples()), split.step(samples())
    assert other.loss == pytest.approx(one.loss, abs=1e-6)
    assert other.gradient_norm == pytest.approx(one.gradient_norm, rel=1e-5)
    assert other.means == pytest.approx(one.means, abs=1e-5)
    torch.testing.assert_close(weights(split), weights(whole), rtol=0, atol=2e-5)


def test_scores_are_the_policys_own() -> None:
    """Behaviour log-probabilities taken from the policy itself: every ratio is 1, and twice scored is twice equal."""
    ours = learner()
    first, second = ours.logprobs(samples()), ours.logprobs(samples())
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))
    assert [len(a) for a in first] == [len(s.answer) for s in samples()]
    fresh = [replace(s, behaviour=a) for s, a in zip(samples(), first, strict=True)]
    report = ours.step(fresh)
    assert report.means["ratio"] == pytest.approx(1.0, abs=1e-6) and report.means["behaviour_kl"] < 1e-9
    assert report.means["clipped_low"] == report.means["clipped_high"] == 0.0


def test_logprobs_do_not_touch_the_mode() -> None:
    ours = learner()
    ours.policy.train()
    ours.logprobs(samples())
    assert ours.policy.training


def test_proximal_and_reference_reach_their_tokens() -> None:
    """π_p = π: ratio 1, the mismatch weight is π_p/μ; reference = π: KL 0."""
    ours = learner(replace(CONFIG, loss=LossConfig(kl_coef=0.1, mismatch_cap=1e9)))
    own = ours.logprobs(samples())
    report = ours.step(samples(), proximal=own, reference=own)
    assert report.means["ratio"] == pytest.approx(1.0, abs=1e-6) and report.means["kl"] == pytest.approx(0, abs=1e-9)
    expected = np.concatenate([np.exp(o - s.behaviour) for o, s in zip(own, samples(), strict=True)])
    assert report.means["mismatch_weight"] == pytest.approx(expected.mean(), rel=1e-5)


@pytest.mark.parametrize("where", ["advantage", "behaviour", "weights"])
def test_a_step_that_is_not_finite_is_skipped_whole(where: str) -> None:
    ours = learner()
    ours.step(samples())
    bad = samples()
    if where == "advantage":
        bad[3] = replace(bad[3], advantage=float("nan"))
    elif where == "behaviour":
        bad[3] = replace(bad[3], behaviour=np.full_like(bad[3].behaviour, np.nan))
    else:
        broken = ours.parameters[0].detach()[0, 0].clone()
        ours.parameters[0].data[0, 0] = torch.inf
    before, moments = weights(ours), copy.deepcopy(ours.optimizer.state_dict())
    report = ours.step(bad)
    assert not report.applied and (ours.steps_applied, ours.steps_skipped) == (1, 1)
    assert torch.equal(weights(ours), before)
    for number, state in moments["state"].items():
        assert torch.equal(state["exp_avg"], ours.optimizer.state_dict()["state"][number]["exp_avg"])
    if where == "weights":
        ours.parameters[0].data[0, 0] = broken
    assert ours.step(samples()).applied, "the next good step goes on"


def test_warm_up_and_clip() -> None:
    ours = learner(replace(CONFIG, warm_up_steps=4, clip_norm=1e-9))
    rates = [ours.step(samples(seed)).learning_rate for seed in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])
    assert ours.step(samples()).gradient_norm > 1e-3, "the norm is reported as it was before the cut"


def test_the_rate_falls_linearly_to_0_after_its_warm_up() -> None:
    ours = learner(replace(CONFIG, warm_up_steps=2, decay_steps=4))
    rates = [ours.step(samples(seed)).learning_rate for seed in range(7)]
    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.25e-3, 0.0])


def test_the_rate_rises_then_falls_to_nothing_and_stays_there() -> None:
    """Up over 3 steps, the full rate once more, then a fifth less each step: 0 after warm-up + decay steps."""
    ours = learner(replace(CONFIG, warm_up_steps=3, decay_steps=5))
    rates, states = [], [weights(ours)]
    for seed in range(3 + 5 + 2):
        rates.append(ours.step(samples(seed)).learning_rate)
        states.append(weights(ours))
    thirds, fifths = [1 / 3, 2 / 3, 1.0], [1.0, 0.8, 0.6, 0.4, 0.2]
    assert rates[:8] == pytest.approx([1e-3 * share for share in thirds + fifths], rel=1e-12)
    assert rates[8:] == [0.0, 0.0]
    moved = [not torch.equal(one, other) for one, other in itertools.pairwise(states)]
    assert moved == [True] * 8 + [False] * 2, "the reported rate is the one that was applied"


def test_decay_without_warm_up_and_neither() -> None:
    falling, level = learner(replace(CONFIG, decay_steps=2)), learner()
    assert [falling.step(samples()).learning_rate for _ in range(4)] == [1e-3, 0.5e-3, 0.0, 0.0]
    assert [level.step(samples()).learning_rate for _ in range(3)] == [1e-3] * 3


def test_resume_equals_the_uninterrupted_run() -> None:
    """Three steps, saved, loaded into a fresh learner, three more: bit for bit the weights of six steps."""
    config = replace(CONFIG, warm_up_steps=5)
    whole, half = learner(config), learner(config)
    for seed in range(3):
        whole.step(samples(seed))
        half.step(samples(seed))
    file = io.BytesIO()
    torch.save({"state": half.state(), "weights": half.policy.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = learner(config, seed=99)
    resumed.policy.load_state_dict(saved["weights"])
    resumed.load_state(saved["state"])
    for seed in range(3, 6):
        whole.step(samples(seed))
        resumed.step(samples(seed))
    assert resumed.steps_applied == 6 and torch.equal(weights(resumed), weights(whole))


def test_good_answers_become_likelier() -> None:
    """Forty steps on one prompt with one good and three bad answers: the good one goes from unlikely to likely."""
    prompt = np.array([1, 2, 3], dtype=np.int32)
    answers = [np.array(tokens, dtype=np.int32) for tokens in ([4, 5], [6, 7], [8, 9], [4, 9])]
    ours = learner(replace(CONFIG, learning_rate=3e-3))
    advantages = [1.5, -0.5, -0.5, -0.5]

    def batch() -> list[TrainSample]:
        zeros = [np.zeros(2, dtype=np.float32)] * 4
        fresh = [
            TrainSample(prompt=prompt, answer=answer, behaviour=zero, advantage=advantage)
            for answer, zero, advantage in zip(answers, zeros, advantages, strict=True)
        ]
        own = ours.logprobs(fresh)
        return [replace(sample, behaviour=logprob) for sample, logprob in zip(fresh, own, strict=True)]

    before = np.exp([sample.behaviour.sum() for sample in batch()])
    for _ in range(40):
        assert ours.step(batch()).applied
    after = np.exp([sample.behaviour.sum() for sample in batch()])
    assert before[0] < 0.1 and after[0] > 0.8 and (after[1:] < 0.1).all()


@pytest.mark.parametrize(
    "setting",
    [{"temperature": 0.0}, {"learning_rate": 0.0}, {"clip_norm": 0.0}, {"warm_up_steps": -1}, {"decay_steps": -1}],
)
def test_bad_settings_are_refused(setting: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))):
        replace(CONFIG, **setting)


def test_no_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one sample"):
        learner().step([])
