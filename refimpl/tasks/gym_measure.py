"""Measures every task of reasoning-gym and writes `gym_table.py`: which are fit to train on, and how hard they get.

    python -m refimpl.tasks.gym_measure            # some minutes; needs reasoning-gym

For each level, from the easiest: problems of some seeds are made, the library's own solution is scored, and so are
answers that know nothing. A level counts if all problems are made in time and all solutions score 1; the dial ends
before the first that does not. A task is left out if no level counts, or if a word without meaning solves it.
"""

from __future__ import annotations

import importlib
import json
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from refimpl.tasks import gym

T = TypeVar("T")
SEEDS, LEVELS_MAX, PROBLEM_CPU_S = 4, 8, 3.0
NONSENSE = "xyzzy"
GUESSES = (
    "", "0", "1", "2", "-1", "yes", "no", "Yes", "No", "True", "False", "true", "A", "[]", "{}", "42", "heads",
    "the answer is 42", "1 2 3 4 5 6 7 8 9",
)  # fmt: skip


class TooSlow(Exception):
    pass


def within(cpu_s: float, fn: Callable[[], T]) -> T:
    """fn(), or TooSlow after so much processor time (not wall time: the machine may be busy)."""

    def stop(*_: Any) -> None:
        raise TooSlow

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    try:
        return fn()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def scores(name: str, level: int, seed: int) -> tuple[float, float, list[float]]:
    """Of the library's solution, of a word without meaning, and of each guess."""
    entry, score = gym._entry(name, level, seed)

    def of(answer: Any) -> float:
        try:
            return float(score(answer, entry))
        except TooSlow:
            raise
        except Exception:
            return 0.0

    return of(entry["answer"]), of(NONSENSE), [of(guess) for guess in GUESSES]


def measure(name: str, levels: int) -> tuple[dict[str, Any] | None, str]:
    """(row of the table, why it ends or is left out)."""
    why, nonsense = "all levels", 0.0
    solved = [0] * len(GUESSES)
    level = 0
    while level < min(levels, LEVELS_MAX):
        results = []
        for seed in range(SEEDS):
            try:
                results.append(within(PROBLEM_CPU_S, partial(scores, name, level, seed)))
            except TooSlow:
                why = f"level {level}: a problem takes more than {PROBLEM_CPU_S:.0f} s"
                break
            except Exception as error:
                why = f"level {level}: {type(error).__name__}: {error}"[:90]
                break
        else:
            if min(own for own, _, _ in results) < gym.SOLVED_AT:
                why = f"level {level}: the library's own solution scores {min(own for own, _, _ in results):.2f}"
        if len(results) < SEEDS or why != "all levels":
            break
        nonsense = max([nonsense, *(word for _, word, _ in results)])
        solved = [n + sum(g[i] >= gym.SOLVED_AT for _, _, g in results) for i, n in enumerate(solved)]
        level += 1
    if nonsense >= gym.SOLVED_AT:
        return None, "any text solves it"
    if not level:
        return None, why
    return {"levels": level, "nonsense": round(nonsense, 3), "guess": round(max(solved) / (level * SEEDS), 2)}, why


def main() -> None:
    factory = importlib.import_module("reasoning_gym.factory")
    importlib.import_module("reasoning_gym")
    rows, out = {}, {}
    for name in sorted(factory.DATASETS):
        levels = 1
        if name in factory.CURRICULA:
            attributes = factory.create_curriculum(name).attributes.values()
            levels = max((len(attribute.levels) for attribute in attributes), default=1)
        row, why = measure(name, levels)
        print(name, row, why, flush=True)
        if row is None:
            out[name] = why
        else:
            rows[name] = row
    write(rows, out)


def write(rows: dict[str, dict[str, Any]], out: dict[str, str]) -> None:
    lines = [
        '"""Tasks of reasoning-gym 0.1.25 as measured; written by `python -m refimpl.tasks.gym_measure`, not by hand.',
        "",
        "levels: settings of the difficulty dial that work. nonsense: the best score of a word without meaning, which",
        "is why partial credit does not train. guess: share of problems that the best constant answer solves.",
        '"""',
        "",
        "from __future__ import annotations",
        "",
        "from typing import NamedTuple",
        "",
        "",
        "class Measured(NamedTuple):",
        "    levels: int",
        "    nonsense: float",
        "    guess: float",
        "",
        "",
        "GYM: dict[str, Measured] = {",
        *(f'    "{name}": Measured({r["levels"]}, {r["nonsense"]}, {r["guess"]}),' for name, r in rows.items()),
        "}",
        "",
        "LEFT_OUT: dict[str, str] = {",
        *(f'    "{name}": {json.dumps(why)},' for name, why in out.items()),
        "}",
        "",
    ]
    (Path(__file__).parent / "gym_table.py").write_text("\n".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
