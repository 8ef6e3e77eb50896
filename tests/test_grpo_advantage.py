"""Advantages: normalised per prompt, two-pass, and 0 wherever there is nothing to compare."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from refimpl.grpo.advantage import AdvantageConfig, AdvantageScale, batch_advantages, group_advantages


def test_sixteen_with_one_success() -> None:
    """The published rule, A = (r - mean)/(std + 1e-6) with Bessel's correction: one success of 16 has std 0.25."""
    advantage_N = group_advantages([1.0] + [0.0] * 15)
    assert advantage_N[0] == pytest.approx(0.9375 / (0.25 + 1e-6), abs=1e-12)
    assert advantage_N[0] == pytest.approx(3.75, abs=2e-5)
    assert advantage_N[1:] == pytest.approx([-0.25] * 15, abs=2e-6)


def test_two_samples_by_hand() -> None:
    """(r - mean)/std, not r - mean/std: rewards 1, 0 have mean 0.5, std sqrt(0.5)."""
    assert group_advantages([1.0, 0.0]) == pytest.approx([0.5 / np.sqrt(0.5), -0.5 / np.sqrt(0.5)], abs=2e-6)


def test_without_deviation_the_distance_stays() -> None:
    config = AdvantageConfig(scale=AdvantageScale.NONE)
    assert group_advantages([1.0, 0.0, 0.0, 0.0, 0.0], config) == pytest.approx([0.8, -0.2, -0.2, -0.2, -0.2])


def test_rounding_residue_is_not_a_signal() -> None:
    """Seven rewards of 0.35 computed in seven ways differ in the last place; that must not become an advantage."""
    residue = [0.35, 0.1 + 0.25, 0.7 / 2, 1.05 / 3, float(np.float32(0.35)), 0.35 + 1e-9, 0.35]
    assert len(set(residue)) > 1
    result = batch_advantages(residue, ["p"] * 7)
    assert not result.values_N.any() and result.groups_equal == 1 and result.zero_group_share == 1.0


def test_one_outlier_is_not_blown_up() -> None:
    """Seven of 0.35 and one 0.95: the largest |advantage| of n answers is (n-1)/sqrt(n)."""
    advantage_N = group_advantages(np.array([0.35] * 7 + [0.95], dtype=np.float32))
    assert advantage_N[-1] == pytest.approx(7 / np.sqrt(8), rel=1e-4)
    assert advantage_N.sum() == pytest.approx(0.0, abs=1e-9)


def test_one_token_of_length_reward_is_a_signal() -> None:
    """The length reward is 3e-4 a token: one token in one answer of 16 must survive the floor."""
    assert group_advantages([1.0 - 3e-4] + [1.0] * 15).any()


def test_groups_are_normalised_alone() -> None:
    """Two prompts of different reward level, interleaved: each has mean 0 and deviation 1 on its own."""
    reward_N = [10.0, 0.1, 11.0, 0.2, 12.0, 0.3]
    result = batch_advantages(reward_N, ["a", "b", "a", "b", "a", "b"])
    assert result.values_N[[0, 2, 4]] == pytest.approx(group_advantages([10.0, 11.0, 12.0]))
    assert result.values_N[[1, 3, 5]] == pytest.approx([-1, 0, 1], abs=2e-5)


def test_missing_rewards_are_set_aside_first() -> None:
    result = batch_advantages([1.0, float("nan"), 0.0, None, float("inf")], [7] * 5)
    assert result.values_N[[0, 2]] == pytest.approx(group_advantages([1.0, 0.0]))
    assert not result.values_N[[1, 3, 4]].any()
    assert result.rewards_missing == 3 and result.groups_too_small == 0


def test_one_reward_left_is_no_group() -> None:
    result = batch_advantages([1.0, None, None, 1.0, 0.0], ["a", "a", "a", "b", "b"])
    assert not result.values_N[:3].any() and result.values_N[3:].all()
    assert result.groups_too_small == 1 and result.groups_equal == 0
    assert result.zero_group_share == 0.5
    assert result.kept_N.tolist() == [False, False, False, True, True]


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(ValueError, match="group of 1"):
        group_advantages([1.0])
    with pytest.raises(ValueError, match="'lonely' has one answer"):
        batch_advantages([1.0, 0.0, 1.0], ["a", "a", "lonely"])


def test_options_are_enums() -> None:
    with pytest.raises(ValueError, match="scale is True"):
        AdvantageConfig(scale=True)  # type: ignore[arg-type]


@given(st.lists(st.floats(-1e300, 1e300) | st.just(float("nan")) | st.none(), min_size=2, max_size=17))
def test_always_finite_and_bounded(rewards: list[float | None]) -> None:
    """Whatever the rewards, an advantage is finite, at most (n-1)/sqrt(n), and the group sums to 0."""
    advantage_N = group_advantages(rewards)
    assert np.isfinite(advantage_N).all()
    assert np.abs(advantage_N).max() <= (len(rewards) - 1) / np.sqrt(len(rewards)) + 1e-9
    assert abs(advantage_N.sum()) < 1e-9
    assert all(a == 0 for a, r in zip(advantage_N, rewards, strict=True) if r is None or r != r)
