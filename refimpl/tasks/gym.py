"""Tasks of the library reasoning-gym (Apache-2.0), by name: `gym/basic_arithmetic`.

The library is optional and slow to import (7 s), so it is imported when the first of its problems is made or scored.
A problem's reference is how to make it again (name, level, seed): the library's entries hold more than JSON can carry.

Its scorers give partial credit for many wrong answers, some for any text at all. `gym_table` says per task what was
measured; solved means a score of 1 (`SOLVED_AT`), and tasks for which even that means nothing are left out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from refimpl.tasks.gym_table import GYM, LEFT_OUT
from refimpl.tasks.problem import Split, Task, final_answer

PREFIX = "gym/"
SOLVED_AT = 0.999  # several scorers reach 1 only to rounding
INSTRUCTION = "Give the final answer alone between <answer> and </answer>."


def gym_task(name: str) -> Task:
    """The task `gym/NAME`. Raises ValueError where it is unknown or left out, with what to do."""
    if name not in GYM:
        raise ValueError(
            f"reasoning-gym task {name!r} is {LEFT_OUT.get(name, 'unknown')}: see refimpl/tasks/gym_table.py"
        )
    return Task(
        name=PREFIX + name,
        generate=_generator(name),
        verify=verify,
        levels=GYM[name].levels,
        solved_at=SOLVED_AT,
        solved_means="reasoning-gym's scorer gives 1; partial credit is not enough",
    )


def _generator(name: str) -> Callable[[np.random.Generator, int, Split], tuple[str, Any]]:
    def generate(rng: np.random.Generator, level: int, split: Split) -> tuple[str, Any]:
        """The test split uses even seeds, training odd ones."""
        seed = 2 * int(rng.integers(1 << 30)) + (split == "train")
        entry, _ = _entry(name, level, seed)
        return f"{entry['question']}\n\n{INSTRUCTION}", {"name": name, "level": level, "seed": seed}

    return generate


def verify(reference: Any, answer: str) -> tuple[float, str]:
    """The library's own scorer on the text between the last <answer> tags, or on the whole answer without them."""
    given = _given(answer)
    if "__" in given:  # several scorers hand the text to sympy, which evaluates it as Python
        return 0.0, "a double underscore"
    entry, score = _entry(reference["name"], reference["level"], reference["seed"])
    value = float(score(given, entry))
    return value, "" if value >= SOLVED_AT else f"a score of {value:.2f}"


def _given(answer: str) -> str:
    text = final_answer(answer)
    _, tag, rest = text.rpartition("<answer>")
    return rest.partition("</answer>")[0].strip() if tag else text


@lru_cache(maxsize=64)
def _entry(name: str, level: int, seed: int) -> tuple[dict[str, Any], Callable[[str, dict[str, Any]], float]]:
    """(the entry, its scorer). All attributes of the library's curriculum are set to `level`, or to their last."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
        importlib.import_module("reasoning_gym")
    except ImportError as error:
        raise ImportError("tasks gym/… need the package reasoning-gym: pip install reasoning-gym==0.1.25") from error
    if name in factory.CURRICULA:
        curriculum = factory.create_curriculum(name)
        curriculum.set_global_level(level)
        config = curriculum.generate_configuration({"seed": seed, "size": 1})
        dataset = factory.DATASETS[name][0](config)
    else:
        dataset = factory.create_dataset(name, seed=seed, size=1)
    return dataset[0], dataset.score_answer
