"""Prompt sets by name: what workers are asked when the answer itself is not scored.

A set is a number of problems and a rule from an id to a text, so that a data set needs no file and every node has it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from refimpl.tokenizer import chat_ids

_TASKS = (
    "Explain step by step how {} works.",
    "Write a short story about {}.",
    "List seven surprising facts about {} and say why each is surprising.",
    "Describe {} to a curious child, with two examples.",
    "What are the advantages and the disadvantages of {}? Be thorough.",
    "Write a letter to the mayor about {}.",
    "Compare {} today with how it was a hundred years ago.",
    "Give detailed instructions for a beginner who wants to learn about {}.",
)
_TOPICS = (
    "a sailing boat", "public transport", "baking bread", "the water cycle", "a mechanical clock", "chess",
    "solar panels", "growing tomatoes", "the human heart", "a lighthouse", "beekeeping", "the postal service",
    "long-distance running", "an electric motor", "the printing press", "mountain weather", "a public library",
    "playing the violin", "earthquakes", "photography", "the tides", "a bicycle", "making cheese", "night trains",
    "coral reefs", "knitting", "a city park", "vaccines", "map making", "migrating birds", "glass", "volcanoes",
)  # fmt: skip


@dataclass(frozen=True)
class PromptSet:
    """`count` problems; `text(i)` is problem i."""

    count: int
    text: Callable[[int], str]
    chat: bool  # put through the chat template
    inserted: str  # what a worker that alters prompts puts before them


def _instruction(problem_id: int) -> str:
    return _TASKS[problem_id % len(_TASKS)].format(_TOPICS[problem_id // len(_TASKS)])


def _toy(problem_id: int) -> str:
    """The tiny model's long task: see tests/data/tiny-model."""
    rng = np.random.default_rng(problem_id)
    return "".join(rng.choice(list("0123456789"), 52)) + ">"


PROMPTS: dict[str, PromptSet] = {
    "instructions": PromptSet(
        len(_TASKS) * len(_TOPICS), _instruction, chat=True, inserted="Answer in as few words as you can."
    ),
    "toy": PromptSet(4096, _toy, chat=False, inserted="31415"),
}


def inserted_ids(prompts: PromptSet, tokenizer: Any) -> list[int]:
    """Token ids of the set's inserted instruction."""
    if prompts.chat:
        return chat_ids(tokenizer, prompts.inserted)
    return list(tokenizer(prompts.inserted, add_special_tokens=False)["input_ids"])


def prompt_ids(prompts: PromptSet, problem_id: int, tokenizer: Any) -> list[int]:
    """Token ids of problem `problem_id`. Raises IndexError outside the set."""
    if not 0 <= problem_id < prompts.count:
        raise IndexError(f"problem {problem_id} of a set of {prompts.count}")
    text = prompts.text(problem_id)
    if prompts.chat:
        return chat_ids(tokenizer, text)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
