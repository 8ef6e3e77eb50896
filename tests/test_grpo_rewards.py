"""Length rewards by the published formulas; targets anyone can draw again; the difficulty band exact at its ends."""

from __future__ import annotations

from fractions import Fraction
from itertools import combinations

import numpy as np
import pytest

from refimpl.grpo.rewards import (
    NO_TARGET,
    DifficultyBand,
    LengthConfig,
    LengthReward,
    length_instruction,
    offline_filter,
    pass_at_k,
    target_lengths,
    total_rewards,
)


def reward(kind: LengthReward, task: float, tokens: int, target: int) -> float:
    reward_N, penalty_N = total_rewards([task], [tokens], [target], LengthConfig(kind=kind))
    assert reward_N[0] + penalty_N[0] == pytest.approx(task)
    return float(reward_N[0])


def test_exact_length_reward_oracles() -> None:
    """α = 3e-4: right with 3000 tokens for 2000 → 1 - 0.3; wrong with 12,000 for 2000 → -3."""
    assert reward(LengthReward.EXACT, 1.0, 3000, 2000) == pytest.approx(0.7)
    assert reward(LengthReward.EXACT, 0.0, 12_000, 2000) == pytest.approx(-3.0)
    assert reward(LengthReward.EXACT, 1.0, 1000, 2000) == pytest.approx(0.7), "too short costs as much"


@pytest.mark.parametrize(
    ("task", "tokens", "expected"),
    [(1, 2000, 0.5), (1, 1000, 0.8), (1, 333, 1.0), (1, 4000, 0.0), (0, 100, 0.0), (1, 3000, 0.2)],
)
def test_max_length_reward(task: float, tokens: int, expected: float) -> None:
    """R = r · clip(α (L* - L) + 1/2, 0, 1), with L* = 2000."""
    assert reward(LengthReward.MAX, task, tokens, 2000) == pytest.approx(expected)


@pytest.mark.parametrize(("task", "tokens", "expected"), [(1, 2000, 1), (1, 2001, 0), (0, 5, 0)])
def test_clip_length_reward(task: float, tokens: int, expected: float) -> None:
    assert reward(LengthReward.CLIP, task, tokens, 2000) == expected


def test_no_length_reward() -> None:
    reward_N, penalty_N = total_rewards([1.0, 0.0], [5, 7], [NO_TARGET] * 2, LengthConfig())
    assert reward_N.tolist() == [1.0, 0.0] and not penalty_N.any()
    with pytest.raises(ValueError, match="needs a target"):
        total_rewards([1.0], [5], [NO_TARGET], LengthConfig(kind=LengthReward.EXACT))
    with pytest.raises(ValueError, match="one each"):
        total_rewards([1.0, 1.0], [5], [5], LengthConfig())


def test_targets_can_be_drawn_again() -> None:
    """Pinned: a validator on another machine, of another day, must draw the same."""
    config = LengthConfig(kind=LengthReward.EXACT)
    drawn = target_lengths(4063638511, 8, config)
    assert drawn == [2000, 4000, 2000, 2000, 6000, 10000, 4000, 4000]
    assert target_lengths(4063638511, 3, config) == drawn[:3]
    assert target_lengths(4063638512, 8, config) != drawn
    assert target_lengths(1, 3, LengthConfig()) == [NO_TARGET] * 3


def test_targets_are_even() -> None:
    config = LengthConfig(kind=LengthReward.EXACT)
    counts = np.unique(target_lengths(7, 5000, config), return_counts=True)[1]
    assert len(counts) == 5 and abs(counts - 1000).max() < 120  # 4 standard deviations of a binomial(5000, 1/5)


def test_instruction() -> None:
    assert length_instruction(2000, LengthReward.EXACT) == "Think for 2000 tokens before giving a response."
    assert length_instruction(2000, LengthReward.CLIP) == "Think for maximally 2000 tokens before giving a response."
    assert length_instruction(NO_TARGET, LengthReward.NONE) == ""


@pytest.mark.parametrize("k", [1, 2, 5, 7])
@pytest.mark.parametrize("successes", [0, 1, 3, 7])
def test_pass_at_k_equals_counting_all_subsets(k: int, successes: int) -> None:
    """Unbiased: the share of all k-subsets of the 7 attempts that hold a success."""
    subsets = list(combinations([True] * successes + [False] * (7 - successes), k))
    assert pass_at_k(7, successes, k) == Fraction(sum(any(s) for s in subsets), len(subsets))


def test_pass_at_k_refuses_what_cannot_be_estimated() -> None:
    with pytest.raises(ValueError, match="pass@9"):
        pass_at_k(8, 1, 9)
    with pytest.raises(ValueError, match="is no count"):
        pass_at_k(8, 9, 1)


def test_band_includes_its_ends() -> None:
    """1 of 8 and 4 of 8 are in the published band; 1 of 10 is in a band from 0.1 although 1 - 9/10 < 0.1 in floats."""
    assert 1 - 9 / 10 < 0.1
    assert offline_filter([8] * 9, list(range(9)), DifficultyBand()) == [1, 2, 3, 4]
    assert offline_filter([10] * 11, list(range(11)), DifficultyBand(low=0.1, high=0.8)) == list(range(1, 9))
    assert offline_filter([8] * 9, list(range(9)), DifficultyBand(low=0.5, high=1.0, k=4)) == list(range(1, 9))
    with pytest.raises(ValueError, match="band"):
        DifficultyBand(low=0.6, high=0.5)


@pytest.mark.parametrize("setting", [{"kind": "exact"}, {"alpha": 0.0}, {"targets": ()}, {"targets": (0,)}])
def test_bad_settings_are_refused(setting: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        LengthConfig(**setting)
