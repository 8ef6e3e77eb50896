"""Which problems a worker must answer: decided by who it is and when it asks, so that it cannot pick easy ones.

Source: PRIME-RL at the INTELLECT-2 commit ("fixed data sampling"). Differs from the original:
1) the counter counts a worker's assignments within a step and never falls back (the original resets it when the step
   endpoint has not moved, and then regenerates the same problems);
2) the paper states the two factors the other way round; `rule="paper"` gives that form.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np

Rule = Literal["code", "paper"]


@dataclass(frozen=True)
class Choice:
    """Problems and sampling seed of one assignment; completion i of the assignment is sampled with seed + i."""

    problem_ids: np.ndarray  # int64 [count], read only
    sampling_seed: int


@lru_cache(maxsize=1 << 14)
def choose_problems(
    address: str, *, step: int, counter: int, dataset_length: int, count: int, rule: Rule = "code"
) -> Choice:
    """Problems of the worker at `address` (hex) for its assignment number `counter` (from 1) of `step`.

    seed = address · counter + step; a PCG64 generator seeded so gives `count` indices with replacement, and then, from
    the same stream, a sampling seed below 2^32.
    """
    if dataset_length < 1:
        raise ValueError(f"the data set has {dataset_length} problems, at least 1 was expected")
    if counter < 1 or step < 0:
        raise ValueError(f"step {step} and counter {counter}: step 0 or more and counter 1 or more were expected")
    factor, addend = (counter, step) if rule == "code" else (step, counter)
    generator = np.random.default_rng(int(address, 16) * factor + addend)
    problem_ids = generator.integers(0, dataset_length, count)
    problem_ids.flags.writeable = False
    return Choice(problem_ids, int(generator.integers(2**32)))
