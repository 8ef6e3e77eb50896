"""The toy tasks: small enough that a tiny model learns them in minutes, and that a person can check any answer.

`addition` and `sorting` are raw text, one character a token, as the tiny model was trained on: `12+34=` is answered by
`46`, `3107>` by `0137`. `sums` is the same question in words, for models that chat.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from refimpl.tasks.problem import Split, final_answer

ANSWER_CHARACTERS_MAX = 4096
NUMBER = re.compile(r"-?[0-9][0-9,./]*")
WHOLE = re.compile(r"-?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)")


def held_out(a: int, b: int) -> bool:
    """Pairs that are never trained on: one in eleven. The tiny model's supervised start leaves out the same."""
    return (31 * a + 17 * b) % 11 == 0


def draw_pair(rng: np.random.Generator, digits: int, split: Split) -> tuple[int, int]:
    """Two numbers of `digits` digits, from the split asked for."""
    low, high = 10 ** (digits - 1) if digits > 1 else 0, 10**digits
    while True:
        a, b = (int(n) for n in rng.integers(low, high, 2))
        if held_out(a, b) == (split == "test"):
            return a, b


def addition(rng: np.random.Generator, level: int, split: Split) -> tuple[str, str]:
    """Level 0 is two-digit numbers; each level one digit more."""
    a, b = draw_pair(rng, level + 2, split)
    return f"{a}+{b}=", str(a + b)


def sums(rng: np.random.Generator, level: int, split: Split) -> tuple[str, str]:
    """Level 0 is one-digit numbers; each level one digit more."""
    a, b = draw_pair(rng, level + 1, split)
    return f"What is {a} + {b}? Reply with the number only.", str(a + b)


def sorting(rng: np.random.Generator, level: int, split: Split) -> tuple[str, str]:
    """Level 0 is eight digits to sort; each level eight more. Test lists are those whose digits add up to 0 mod 11."""
    while True:
        digits = rng.integers(0, 10, 8 * (level + 1))
        if (int(digits.sum()) % 11 == 0) == (split == "test"):
            break
    return "".join(map(str, digits)) + ">", "".join(map(str, np.sort(digits)))


def exactly(reference: Any, answer: str) -> tuple[float, str]:
    """The answer is the reference, spaces around it aside: no leading zeros, no other digits (٣ is one too)."""
    given = answer.strip()
    if given == reference:
        return 1.0, ""
    return 0.0, "another answer" if given else "no answer"


def last_number(reference: Any, answer: str) -> tuple[float, str]:
    """The last number of the answer is whole and is the reference: 1,046 is 1046, while 4.5, 1/5 and 2,5 are no 5."""
    numbers = NUMBER.findall(final_answer(answer)[-ANSWER_CHARACTERS_MAX:])
    if not numbers:
        return 0.0, "no number"
    last = numbers[-1].rstrip(",./")  # of the sentence, not of the number
    if not WHOLE.fullmatch(last):
        return 0.0, "no whole number"
    return (1.0, "") if last.replace(",", "") == reference else (0.0, "another number")
