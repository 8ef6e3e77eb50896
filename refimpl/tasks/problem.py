"""One problem and one verdict on an answer: what all tasks have in common."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

Split = Literal["train", "test"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """`reference` is for the verifier alone and never shown to the model: JSON, so that it can cross a pipe."""

    task: str
    problem_id: str  # names task, level, split and index: whoever has it can make the problem again
    prompt: str
    reference: str


@dataclass(frozen=True, kw_only=True)
class Score:
    """`value` from 0 to 1 as the verifier gives it; `solved` is what trains: the task reward is 1 or 0 by it."""

    value: float
    solved: bool
    reason: str  # why not, in a few words; "" when solved

    @property
    def reward(self) -> float:
        return float(self.solved)


Generate = Callable[[np.random.Generator, int, Split], tuple[str, Any]]
"""(rng, level, split) -> (prompt, reference). The reference is any JSON value."""

Verify = Callable[[Any, Any], tuple[float, str]]
"""(reference, answer) -> (value from 0 to 1, reason). The answer is text, or for tasks that run code, what the program
returned. May raise or run for ever on a hostile answer: see `pool`."""


@dataclass(frozen=True, kw_only=True)
class Task:
    name: str
    generate: Generate
    verify: Verify
    levels: int  # the difficulty dial goes from 0 to levels - 1
    solved_at: float  # a value of at least this counts as solved
    solved_means: str  # the same for people
    runs_code: bool = False  # the answer is a program: `verify` is given what it returned, as JSON
    chat: bool = True  # the prompt is a request in words; False: raw text for the tiny model

    def problem(self, index: int, *, level: int = 0, split: Split = "train", seed: int = 0) -> Problem:
        """Problem `index` of this task's endless list; the same whenever and wherever it is made."""
        if not 0 <= level < self.levels:
            raise ValueError(f"level is {level}, task {self.name!r} has levels 0 to {self.levels - 1}")
        if split not in ("train", "test"):
            raise ValueError(f"split is {split!r}, expected 'train' or 'test'")
        key = [int.from_bytes(self.name.encode(), "little"), seed, level, split == "test", index]
        prompt, reference = self.generate(np.random.default_rng(key), level, split)
        return Problem(
            task=self.name,
            problem_id=f"{self.name}/{seed}/{level}/{split}/{index}",
            prompt=prompt,
            reference=json.dumps(reference),
        )


def final_answer(text: str) -> str:
    """What stands after the model's thoughts: all after the last </think>, or all of it."""
    return text.rpartition("</think>")[2].strip()


def last_fenced_block(text: str, language: str) -> str | None:
    """The last closed block of a text that names `language` or none; None where there is none.

    Found by splitting at the fences, so that no text, however odd, takes more than linear time.
    """
    parts = text.split("```")
    for start in range(len(parts) - 2 - (len(parts) + 1) % 2, 0, -2):
        head, _, body = parts[start].partition("\n")
        if head.strip().lower() in ("", language):
            return body
    return None
