"""Why: two runs of one seed must be the same, and when they are not, the first event that differs shows where to look.

`python -m sim diff RUN_A RUN_B` finds it and shows the figures that differ; `python -m sim replay RUN` runs the
scenario that a folder recorded once more, and compares.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from sim.explain import NoRun, read_json

FIGURES_SHOWN = 60
ABSENT = "(absent)"


@dataclass(frozen=True)
class Parting:
    """The first event in which two logs differ; a log that has ended there has no line."""

    index: int  # from 0
    line_a: str | None
    line_b: str | None

    def __str__(self) -> str:
        times_s = [json.loads(line)["t_ns"] / 1e9 for line in (self.line_a, self.line_b) if line is not None]
        a, b = (line if line is not None else "(the log has ended)" for line in (self.line_a, self.line_b))
        return f"The logs part at event {self.index}, {min(times_s):.9f} s of virtual time:\n  A {a}\n  B {b}"


def first_difference(a: Path, b: Path) -> Parting | None:
    """Where two event logs part; None when they are the same to the byte."""
    try:
        with a.open("rb") as lines_a, b.open("rb") as lines_b:
            for index, (line_a, line_b) in enumerate(zip_longest(lines_a, lines_b)):
                if line_a != line_b:
                    texts = (line.decode().rstrip("\n") if line is not None else None for line in (line_a, line_b))
                    return Parting(index, *texts)
    except OSError as error:
        raise NoRun(f"{error.filename}: {error.strerror}; the folder of a run was expected") from None
    return None


def figures_that_differ(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Leaves of two summaries that are not equal: (path, value in A, value in B)."""
    flat_a, flat_b = dict(_leaves(a)), dict(_leaves(b))
    names = list(dict.fromkeys([*flat_a, *flat_b]))
    return [
        (name, flat_a.get(name, ABSENT), flat_b.get(name, ABSENT))
        for name in names
        if flat_a.get(name, ABSENT) != flat_b.get(name, ABSENT)
    ]


def _leaves(value: Any, path: str = "") -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [leaf for key, inner in value.items() for leaf in _leaves(inner, f"{path}.{key}" if path else str(key))]
    if isinstance(value, list):
        return [
            leaf
            for place, inner in enumerate(value)
            for leaf in _leaves(inner, f"{path}[{inner['behaviour'] if _has_name(inner) else place}]")
        ]
    return [(path, value)]


def _has_name(value: Any) -> bool:
    return isinstance(value, dict) and "behaviour" in value


def diff(a: Path, b: Path) -> tuple[bool, str]:
    """Whether two runs are the same, and how they differ."""
    parting = first_difference(a / "events.jsonl", b / "events.jsonl")
    figures = figures_that_differ(read_json(a, "summary.json"), read_json(b, "summary.json"))
    if parting is None and not figures:
        return True, f"{a} and {b} are identical."
    parts = [str(parting) if parting is not None else "The logs are identical."]
    if figures:
        width = max(len(name) for name, *_ in figures[:FIGURES_SHOWN])
        lines = [f"{'figure':<{width}}  {'A':>24}  {'B':>24}"]
        lines += [f"{name:<{width}}  {_short(x):>24}  {_short(y):>24}" for name, x, y in figures[:FIGURES_SHOWN]]
        if len(figures) > FIGURES_SHOWN:
            lines.append(f"({len(figures) - FIGURES_SHOWN} more figures differ)")
        parts.append("\n".join(lines))
    return False, "\n\n".join(parts)


def _short(value: Any) -> str:
    text = f"{value:.9g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else text[:23] + "…"


def replay(folder: Path) -> tuple[bool, str]:
    """Run what `folder` recorded again, and say whether the log is the same."""
    recorded = read_json(folder, "replay.json")
    # imported here: a folder that is no run is refused at once, without waiting for the model's library
    from sim.run import run_scenario
    from sim.scenario import check_raw

    scenario = check_raw(recorded["scenario"], str(folder / "replay.json"))
    name, seed, model = recorded["name"], recorded["seed"], recorded["model_path"]
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        again = run_scenario(
            scenario,
            name=name,
            seed=seed,
            model_path=model,
            runs=Path(scratch),
            say=lambda line: None,
            trace=False,
            prices_s=recorded.get("prices_s"),
        )
        parting = first_difference(folder / "events.jsonl", again.folder / "events.jsonl")
    if parting is None:
        return True, f"{folder}: identical, {read_json(folder, 'summary.json')['events']} events."
    return False, f"{folder}: the run (A) and its replay (B) differ.\n{parting}"
