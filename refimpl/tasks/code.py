"""Programs as answers: the model writes a function, the function is run on inputs whose outputs it is never shown.

A problem is a chain of list operations in words; the dial is the chain's length. Expected outputs stay with the
verifier (`code_runner` sees the inputs alone), so a program that searches its process for the solution finds nothing.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np

from refimpl.tasks.problem import Split, final_answer, last_fenced_block
from refimpl.tasks.strict_json import same

ENTRY = "solve"
CODE_CHARACTERS_MAX = 20_000

Numbers = list[int]


def _unique(xs: Numbers) -> Numbers:
    return list(dict.fromkeys(xs))


def _running(xs: Numbers) -> Numbers:
    return [sum(xs[: i + 1]) for i in range(len(xs))]


STEPS: tuple[tuple[str, Callable[[Numbers, int], Numbers]], ...] = (
    ("keep only the even numbers", lambda xs, k: [x for x in xs if x % 2 == 0]),
    ("reverse the order", lambda xs, k: xs[::-1]),
    ("square every number", lambda xs, k: [x * x for x in xs]),
    ("sort in ascending order", lambda xs, k: sorted(xs)),
    ("remove duplicates, keeping the first of each", lambda xs, k: _unique(xs)),
    ("replace each number by the sum of itself and all numbers before it", lambda xs, k: _running(xs)),
    ("drop the first {k} numbers", lambda xs, k: xs[k:]),
    ("add {k} to every number", lambda xs, k: [x + k for x in xs]),
    ("keep only numbers greater than {k}", lambda xs, k: [x for x in xs if x > k]),
    ("swap the first and the last number", lambda xs, k: [xs[-1], *xs[1:-1], xs[0]] if len(xs) > 1 else xs),
)
ENDS: tuple[tuple[str, Callable[[Numbers], Any]], ...] = (
    ("the resulting list", lambda xs: xs),
    ("the sum of the resulting list", sum),
    ("the largest number of the resulting list, or 0 if it is empty", lambda xs: max(xs, default=0)),
    ("how many numbers are left", len),
)


def chain(rng: np.random.Generator, level: int, split: Split) -> tuple[str, dict[str, Any]]:
    """Level n is n + 1 steps and a last one. One chain in seven is held out for the test split."""
    while True:
        chosen = rng.integers(0, len(STEPS), level + 1).tolist()
        ks, last = rng.integers(2, 5, level + 1).tolist(), int(rng.integers(len(ENDS)))
        words = "".join(STEPS[step][0].format(k=k) for step, k in zip(chosen, ks, strict=True)) + ENDS[last][0]
        if (zlib.crc32(words.encode()) % 7 == 0) == (split == "test"):
            break
    steps = [(*STEPS[step], k) for step, k in zip(chosen, ks, strict=True)]
    end, finish = ENDS[last]
    numbered = "\n".join(f"{i + 1}. {words.format(k=k)}" for i, (words, _, k) in enumerate(steps))
    prompt = (
        f"Write a Python function `{ENTRY}(xs)` that takes a list of integers, does these steps in order, and returns "
        f"{end}:\n{numbered}\nAnswer with one fenced Python code block."
    )
    inputs: list[Numbers] = [[], [0], [3, 3, 2], *([int(x) for x in rng.integers(-9, 10, n)] for n in (4, 7, 11))]
    cases = []
    for xs in inputs:
        out = list(xs)
        for _, operation, k in steps:
            out = operation(out, k)
        cases.append([[xs], finish(out)])
    return prompt, {"entry": ENTRY, "cases": cases}


def program(answer: str) -> str | None:
    """The program in an answer: the last fenced Python block after the thoughts, or all if it defines the function."""
    text = final_answer(answer)
    found = last_fenced_block(text, "python")
    if found is None and f"def {ENTRY}" in text:
        found = text
    return found if found is not None and len(found) <= CODE_CHARACTERS_MAX else None


def verify(reference: Any, outputs: Any) -> tuple[float, str]:
    """All cases right, in value and type. `outputs`: one {"value": …} or {"error": …} a case, from the runner."""
    cases = reference["cases"]
    if not isinstance(outputs, list) or len(outputs) != len(cases):
        return 0.0, "the program did not finish"
    for number, ((_, expected), output) in enumerate(zip(cases, outputs, strict=True)):
        if not isinstance(output, dict) or "value" not in output:
            error = str(output.get("error", "no output"))[:60] if isinstance(output, dict) else "no output"
            return 0.0, f"case {number}: {error}"
        if not same(output["value"], expected):
            return 0.0, f"case {number}: another value"
    return 1.0, ""
