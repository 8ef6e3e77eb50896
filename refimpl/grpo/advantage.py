"""How much better each answer was than the others to the same prompt: the only signal that GRPO learns from.

A wrong advantage trains anyway, silently, so everything here is done in float64 and in two passes, and everything that
cannot be compared (a reward that is missing, a group of one) gets the advantage 0 and is counted, never guessed.

Differs from the original (prime-rl, April 2025):
1) a group whose rewards are equal up to rounding gets exactly 0, so "advantage != 0" is a safe online filter;
2) missing and non-finite rewards are set aside before the mean is taken.

Shapes: N samples, in groups that share a prompt; groups may be ragged.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


class AdvantageScale(enum.Enum):
    """What the distance from the group's mean is divided by."""

    DEVIATION = "deviation"  # GRPO: the group's standard deviation, with Bessel's correction
    NONE = "none"  # Dr. GRPO (arXiv 2503.20783): nothing, so easy and hard prompts keep their weight


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    scale: AdvantageScale = AdvantageScale.DEVIATION
    epsilon: float = 1e-6  # added to the deviation, as the original does
    deviation_floor: float = 1e-5
    """Rewards closer together than this (times the largest reward, where that exceeds 1) are one reward. Rounding in a
    float32 column is 1e-7, and one token of length reward in a group of 16 is 7e-5: the floor lies between."""

    def __post_init__(self) -> None:
        if not isinstance(self.scale, AdvantageScale):
            raise ValueError(f"scale is {self.scale!r}, expected a member of AdvantageScale")
        if not self.epsilon >= 0 or not self.deviation_floor >= 0:
            raise ValueError(f"epsilon {self.epsilon} and deviation_floor {self.deviation_floor} must not be negative")


@dataclass(frozen=True)
class Advantages:
    """The advantages of one batch, and what there was to compare."""

    values_N: npt.NDArray[np.float64]
    groups: int
    groups_equal: int  # all rewards one: nothing to learn, advantage exactly 0
    groups_too_small: int  # fewer than two rewards left after the missing ones were set aside
    rewards_missing: int  # None, NaN or infinite

    @property
    def kept_N(self) -> npt.NDArray[np.bool_]:
        """The online filter: samples that carry a signal."""
        return self.values_N != 0.0

    @property
    def zero_group_share(self) -> float:
        """Share of groups that carry no signal: the figure to watch when the loss is 0 although rewards vary."""
        return (self.groups_equal + self.groups_too_small) / self.groups if self.groups else 0.0


def group_advantages(
    reward_N: Sequence[float | None] | npt.NDArray[np.floating], config: AdvantageConfig | None = None
) -> npt.NDArray[np.float64]:
    """Advantages of the answers to one prompt, float64 of the same length; 0 for a missing reward.

    Raises ValueError for a group of one, which has nothing to be compared with. A group with fewer than two rewards
    after missing ones are set aside is all zeros.
    """
    config = config or AdvantageConfig()
    if len(reward_N) < 2:
        raise ValueError(f"a group of {len(reward_N)} has nothing to compare: GRPO needs 2 answers to a prompt or more")
    values_N, _ = _group(_as_float64(reward_N), config)
    return values_N


def batch_advantages(
    reward_N: Sequence[float | None] | npt.NDArray[np.floating],
    group_N: Sequence[Hashable],
    config: AdvantageConfig | None = None,
) -> Advantages:
    """Advantages of a batch: mean and deviation are taken per prompt (`group_N`), never over the batch.

    Samples of one group need not stand together. Raises ValueError for a group of one sample.
    """
    config = config or AdvantageConfig()
    if len(reward_N) != len(group_N):
        raise ValueError(f"{len(reward_N)} rewards but {len(group_N)} group labels: one label per reward is needed")
    rewards_N = _as_float64(reward_N)
    members: dict[Hashable, list[int]] = {}
    for index, group in enumerate(group_N):
        members.setdefault(group, []).append(index)
    values_N = np.zeros(len(rewards_N), dtype=np.float64)
    equal = too_small = 0
    for group, indices in members.items():
        if len(indices) < 2:
            raise ValueError(f"group {group!r} has one answer: GRPO needs 2 answers to a prompt or more")
        values_N[indices], present = _group(rewards_N[indices], config)
        too_small += present < 2
        equal += present >= 2 and not values_N[indices].any()
    return Advantages(
        values_N=values_N,
        groups=len(members),
        groups_equal=equal,
        groups_too_small=too_small,
        rewards_missing=int((~np.isfinite(rewards_N)).sum()),
    )


def _as_float64(reward_N: Sequence[float | None] | npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    if isinstance(reward_N, np.ndarray):
        if reward_N.ndim != 1:
            raise ValueError(f"rewards have shape {reward_N.shape}, expected one reward per sample")
        return reward_N.astype(np.float64)
    return np.array([np.nan if reward is None else reward for reward in reward_N], dtype=np.float64)


def _group(reward_N: npt.NDArray[np.float64], config: AdvantageConfig) -> tuple[npt.NDArray[np.float64], int]:
    """(advantages, number of rewards that were there) of one group."""
    present_N = np.isfinite(reward_N)
    values_N = np.zeros(len(reward_N), dtype=np.float64)
    count = int(present_N.sum())
    if count < 2:
        return values_N, count
    kept = reward_N[present_N]
    scale = max(1.0, float(np.abs(kept).max()))
    scaled = kept / scale  # so that squares of huge rewards cannot overflow
    centred = scaled - scaled.mean()  # r - mean(r), the second pass starts from here
    deviation = float(np.sqrt((centred**2).sum() / (count - 1)))  # std(r) = sqrt(Σ(r - mean)² / (n - 1))
    if deviation <= config.deviation_floor:
        return values_N, count
    if config.scale is AdvantageScale.DEVIATION:
        values_N[present_N] = centred * scale / (deviation * scale + config.epsilon)  # A = (r - mean) / (std + ε)
    else:
        values_N[present_N] = centred * scale  # A = r - mean
    return values_N, count
