"""What an answer is worth beyond right or wrong, and which problems are worth asking.

Differs from the original (prime-rl, April 2025):
1) target lengths are drawn from the sampling seed of the deterministic problem choice, so a validator can draw them
   again (there, from an unseeded generator: a worker could pick its targets);
2) `length_penalty` is task reward minus reward for every kind, so that a validator can check the sum of the columns;
3) the difficulty band is a parameter (12.5-50 % was published, 10-80 % was configured), and is met exactly at its ends.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

FloatN = npt.NDArray[np.float64]

TARGETS_LONG = (2000, 4000, 6000, 8000, 10_000)  # tokens; the published TARGET-LONG run
TARGETS_SHORT = (1000, 2000, 3000, 4000)
NO_TARGET = -1  # as the rollout file writes it

_TARGET_STREAM = 0x7461726765747321  # "targets!": sets this use of the seed apart from any other


class LengthReward(enum.Enum):
    """How the number of answer tokens L and the target L* change the task reward r."""

    NONE = "none"  # R = r
    EXACT = "exact"  # R = r - α |L - L*|
    MAX = "max"  # R = r · clip(α (L* - L) + 1/2, 0, 1)
    CLIP = "clip"  # R = r where L ≤ L*, else 0


@dataclass(frozen=True, kw_only=True)
class LengthConfig:
    kind: LengthReward = LengthReward.NONE
    alpha: float = 3e-4  # α, reward per token
    targets: tuple[int, ...] = TARGETS_LONG  # L* is drawn from these, one per prompt

    def __post_init__(self) -> None:
        if not isinstance(self.kind, LengthReward):
            raise ValueError(f"kind is {self.kind!r}, expected a member of LengthReward")
        if not self.alpha > 0:
            raise ValueError(f"alpha is {self.alpha}, expected more than 0")
        if not self.targets or min(self.targets) < 1:
            raise ValueError(f"targets are {self.targets}, expected one or more positive token counts")


def total_rewards(
    task_reward_N: Sequence[float] | FloatN, tokens_N: Sequence[int], target_N: Sequence[int], config: LengthConfig
) -> tuple[FloatN, FloatN]:
    """(reward, length penalty) of N answers, with reward = task reward - length penalty.

    `tokens_N`: L, answer tokens, up to and including the end token. `target_N`: L*, or NO_TARGET throughout.
    """
    task_N = np.asarray(task_reward_N, dtype=np.float64)
    length_N, wanted_N = np.asarray(tokens_N, dtype=np.float64), np.asarray(target_N, dtype=np.float64)
    if not task_N.shape == length_N.shape == wanted_N.shape:
        raise ValueError(f"{task_N.shape} task rewards, {length_N.shape} lengths, {wanted_N.shape} targets: one each")
    if config.kind is not LengthReward.NONE and (wanted_N < 0).any():
        raise ValueError(f"length reward {config.kind.value!r} needs a target for every answer, but one has none")
    match config.kind:
        case LengthReward.NONE:
            reward_N = task_N
        case LengthReward.EXACT:
            reward_N = task_N - config.alpha * np.abs(length_N - wanted_N)
        case LengthReward.MAX:
            reward_N = task_N * np.clip(config.alpha * (wanted_N - length_N) + 0.5, 0.0, 1.0)
        case LengthReward.CLIP:
            reward_N = np.where(length_N > wanted_N, 0.0, task_N)
    return reward_N, task_N - reward_N


def target_lengths(sampling_seed: int, prompts: int, config: LengthConfig) -> list[int]:
    """L* of each prompt of a unit; the answers to one prompt share it. `sampling_seed`: the integer below 2^32 that the
    deterministic problem choice draws after the problem indices. The same for whoever knows the seed."""
    if config.kind is LengthReward.NONE:
        return [NO_TARGET] * prompts
    rng = np.random.Generator(np.random.PCG64([sampling_seed, _TARGET_STREAM]))
    return [config.targets[i] for i in rng.integers(0, len(config.targets), prompts)]


def length_instruction(target: int, kind: LengthReward) -> str:
    """The sentence that tells the model its target, or nothing."""
    if kind is LengthReward.NONE:
        return ""
    most = "maximally " if kind is LengthReward.CLIP else ""
    return f"Think for {most}{target} tokens before giving a response."


def pass_at_k(attempts: int, successes: int, k: int) -> Fraction:
    """Chance that at least one of k answers is right, estimated without bias from `successes` in `attempts`:
    1 - C(n - c, k) / C(n, k)  (arXiv 2107.03374, eq. 1), in exact arithmetic."""
    if not 0 <= successes <= attempts:
        raise ValueError(f"{successes} successes in {attempts} attempts is no count")
    if not 1 <= k <= attempts:
        raise ValueError(f"pass@{k} cannot be estimated from {attempts} attempts: k must be from 1 to {attempts}")
    return 1 - Fraction(math.comb(attempts - successes, k), math.comb(attempts, k))


@dataclass(frozen=True, kw_only=True)
class DifficultyBand:
    """Problems to keep: low ≤ pass@k ≤ high, both ends included. k = 1 is the plain solve rate.

    All right or all wrong gives no advantage; nearly so gives one rarely."""

    low: float = 0.125
    high: float = 0.5
    k: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.low <= self.high <= 1:
            raise ValueError(f"the band {self.low} to {self.high} is none: expected 0 ≤ low ≤ high ≤ 1")

    def keeps(self, attempts: int, successes: int) -> bool:
        low, high = (Fraction(str(end)) for end in (self.low, self.high))  # 0.1 is a tenth, not its nearest float
        return low <= pass_at_k(attempts, successes, self.k) <= high


def offline_filter(attempts: Sequence[int], successes: Sequence[int], band: DifficultyBand) -> list[int]:
    """Indices of the problems to keep, in order, from what a base model made of each."""
    if len(attempts) != len(successes):
        raise ValueError(f"{len(attempts)} counts of attempts but {len(successes)} of successes: one each per problem")
    return [i for i, (n, c) in enumerate(zip(attempts, successes, strict=True)) if band.keeps(n, c)]
