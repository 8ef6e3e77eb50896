"""Many runs of one scenario: values of its fields, times seeds, over all cores; and what can be said with confidence.

    python -m sim sweep adversarial-tiny --set task.temperature=0.6,0.8,1.0 --seeds 5

Each run leaves its own folder, so a sweep that was stopped goes on where it was. Means carry a 95 % t-interval over
seeds. Where a field has two values, they are also compared pair by pair on equal seeds, which says more than two means.
"""

from __future__ import annotations

import contextlib
import copy
import csv
import hashlib
import itertools
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import joblib
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from scipy.stats import t as student_t

from sim.explain import FINISHED
from sim.progress import Progress
from sim.real_models import model_folder, require_use_of
from sim.scenario import ScenarioError, check_raw, read_raw, scenario_path


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % t-interval: mean ± t(0.975, n−1)·s/√n."""

    mean: float
    half_width: float  # nan for a single seed
    count: int

    def __str__(self) -> str:
        spread = "" if np.isnan(self.half_width) else f" ± {self.half_width:.3g}"
        return f"{self.mean:.4g}{spread}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and interval of some values; those that are missing (None) must be left out before."""
    count = len(values)
    if count == 0:
        return Interval(float("nan"), float("nan"), 0)
    half = float("nan")
    if count > 1:
        half = float(student_t.ppf(0.975, count - 1) * np.std(values, ddof=1) / np.sqrt(count))
    return Interval(float(np.mean(values)), half, count)


def parse_setting(text: str) -> tuple[str, list[Any]]:
    """`field.path=v1,v2` -> the path and its values. Raises ScenarioError."""
    path, equals, values = text.partition("=")
    if not equals or not path or not values:
        raise ScenarioError(f"--set {text!r}: field.path=value,value,… was expected")
    return path, [_value(part) for part in values.split(",")]


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text, text)


def with_setting(raw: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy of a scenario's plain values with one field changed.

    `nodes.NAME.field` changes one group, `nodes.field` (or `links.field`) all. Raises ScenarioError for a path that
    leads nowhere; whether the value is any good is for the scenario's own check to say.
    """
    changed = copy.deepcopy(raw)
    first, *rest = path.split(".")
    if first in ("nodes", "links"):
        if not rest:
            raise ScenarioError(f"--set {path}: {first}.FIELD or {first}.GROUP.FIELD was expected")
        groups = [group for group in changed["nodes"] if len(rest) == 1 or group["name"] == rest[0]]
        if not groups or len(rest) not in (1, 2):
            names = ", ".join(group["name"] for group in changed["nodes"])
            raise ScenarioError(f"--set {path}: no such group of nodes; there are {names}")
        for group in groups:
            group[rest[-1]] = value
        return changed
    place = changed
    for step in (first, *rest)[:-1]:
        place = place.setdefault(step, {})
        if not isinstance(place, dict):
            raise ScenarioError(f"--set {path}: {step} is a value, not a part of the scenario")
    place[(first, *rest)[-1]] = value
    return changed


def figure_of(summary: Mapping[str, Any], path: str) -> float | None:
    """One figure of a summary by its dotted path; None where it has none. Raises ScenarioError for a wrong path."""
    value: Any = summary
    for step in path.split("."):
        if not isinstance(value, Mapping) or step not in value:
            raise ScenarioError(f"--figures {path}: the summary has no {step!r}; it has {', '.join(summary)}")
        value = value[step]
    if value is not None and not isinstance(value, int | float):
        raise ScenarioError(f"--figures {path} is {type(value).__name__}; a number was expected")
    return None if value is None else float(value)


@dataclass(frozen=True)
class Cell:
    """One combination of values and one seed."""

    values: tuple[tuple[str, Any], ...]
    seed: int
    raw: dict[str, Any]
    model: str | None  # a folder or hub id instead of the scenario's own
    key: str  # of the scenario with these values and this model: tells whether a folder's run is this one


def cells_of(
    scenario: str, settings: Sequence[tuple[str, list[Any]]], seeds: int, model: str | None = None
) -> list[Cell]:
    """Every run of the sweep, all checked before any starts."""
    path = scenario_path(scenario)
    raw = read_raw(path)
    first_seed = check_raw(raw, path.name).seed
    cells = []
    for values in itertools.product(*(values for _, values in settings)):
        changed = raw
        for (field, _), value in zip(settings, values, strict=True):
            changed = with_setting(changed, field, value)
        checked = check_raw(changed, f"{path.name} with {', '.join(map(str, values))}" if values else path.name)
        require_use_of(model, checked)
        key = hashlib.sha256(json.dumps([changed, model], sort_keys=True).encode()).hexdigest()[:12]
        chosen = tuple((field, value) for (field, _), value in zip(settings, values, strict=True))
        cells += [Cell(chosen, first_seed + i, changed, model, key) for i in range(seeds)]
    return cells


def kept(summary: Mapping[str, Any]) -> bool:
    """Whether the run finished and broke no promise."""
    return bool(summary.get("ended") == FINISHED and not any(entry["violations"] for entry in summary["checks"]))


def run_cell(cell: Cell, name: str, runs: Path) -> dict[str, Any]:
    """Run one cell, or take its summary where it has been run before, to its end and well."""
    folder_name = f"{name}-{cell.key}"
    done = runs / f"{folder_name}-{cell.seed}" / "summary.json"
    if done.exists():
        with contextlib.suppress(ValueError, KeyError):  # of a run that was stopped while it wrote, or an older one
            summary: dict[str, Any] = json.loads(done.read_text(encoding="utf-8"))
            if kept(summary):
                return summary
    # imported here: in the process that runs it, and not for a sweep that is refused
    from sim.run import run_scenario

    scenario = check_raw(cell.raw, name)
    path = model_folder(scenario, cell.model, at_once=os.cpu_count() or 1)  # one run a core
    result = run_scenario(
        scenario, name=folder_name, seed=cell.seed, model_path=path, runs=runs, say=lambda line: None, progress=False
    )
    return result.figures


def sweep(
    scenario: str,
    settings: Sequence[tuple[str, list[Any]]],
    *,
    seeds: int,
    runs: Path,
    figures: Sequence[str] | None = None,
    jobs: int = -1,
    dask: str | None = None,
    model: str | None = None,
) -> tuple[Path, bool]:
    """Run everything that has not been run, and leave table and plot in a folder of their own. Returns it, and whether
    every run kept its promises (one that did not is in runs.csv, and in no mean)."""
    if seeds < 1:
        raise ScenarioError(f"--seeds is {seeds}; at least 1 was expected")
    if jobs == 0:
        raise ScenarioError("--jobs is 0; a number of processes was expected, or -1 for one a core")
    name = Path(scenario).stem
    cells = cells_of(scenario, settings, seeds, model)
    if figures is None:
        figures = check_raw(cells[0].raw, name).rules.figures
    context: dict[str, Any] = {"backend": "loky", "n_jobs": jobs} if dask is None else {"backend": "dask"}
    workers = contextlib.nullcontext() if dask is None else _client_of(dask)
    folder = runs / f"sweep-{name}"
    folder.mkdir(parents=True, exist_ok=True)
    summaries: list[dict[str, Any]] = []
    counts = Counter({"done": 0, "of": len(cells)})
    with Progress(f"sweep {name}", None, lambda: counts["done"] / len(cells), counts) as shown:
        with workers, joblib.parallel_config(**context):
            calls = (joblib.delayed(run_cell)(cell, name, runs) for cell in cells)
            for summary in joblib.Parallel(return_as="generator")(calls):
                summaries.append(summary)
                counts["done"] += 1
        shown.turn_to("drawing")
        rows = [
            {
                **dict(cell.values),
                "seed": cell.seed,
                "kept": kept(summary),
                **{figure: figure_of(summary, figure) for figure in figures},
            }
            for cell, summary in zip(cells, summaries, strict=True)
        ]
        with (folder / "runs.csv").open("w", newline="", encoding="utf-8") as out:
            writer = csv.DictWriter(out, fieldnames=list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        good = [row for row in rows if row["kept"]]
        text = report(settings, good, figures)
        if len(good) < len(rows):
            text += f"\n{len(rows) - len(good)} of {len(rows)} runs did not keep their promises, and are left out.\n"
        (folder / "table.md").write_text(text, encoding="utf-8")
        _plot(folder / "sweep.png", name, settings, good, figures)
    print(text)
    print(f"{folder}/: table.md, runs.csv, sweep.png")
    return folder, len(good) == len(rows)


def _client_of(address: str) -> contextlib.AbstractContextManager[Any]:
    """Joblib runs on the workers of this Dask scheduler while it is open. Raises ScenarioError when it is not there."""
    try:
        from dask.distributed import Client
    except ImportError:
        raise ScenarioError("--dask needs the package distributed: pip install 'armillary[dask]'") from None
    try:
        client: contextlib.AbstractContextManager[Any] = Client(address)
    except (OSError, ValueError) as error:  # nobody there; no address
        raise ScenarioError(f"--dask {address}: no Dask scheduler was reached: {error}") from None
    return client


def _groups(
    settings: Sequence[tuple[str, list[Any]]], rows: Sequence[Mapping[str, Any]]
) -> list[tuple[tuple[Any, ...], list[Mapping[str, Any]]]]:
    fields = [field for field, _ in settings]
    combinations = list(itertools.product(*(values for _, values in settings)))
    return [(c, [row for row in rows if tuple(row[field] for field in fields) == c]) for c in combinations]


def report(settings: Sequence[tuple[str, list[Any]]], rows: Sequence[Mapping[str, Any]], figures: Sequence[str]) -> str:
    """A Markdown table of means with intervals, and of paired differences where a single field has two values."""
    fields = [field for field, _ in settings]
    lines = ["| " + " | ".join([*fields, "seeds", *figures]) + " |", "|" + " --- |" * (len(fields) + 1 + len(figures))]
    for combination, members in _groups(settings, rows):
        means = [interval([row[figure] for row in members if row[figure] is not None]) for figure in figures]
        lines.append("| " + " | ".join([*map(str, combination), str(len(members)), *map(str, means)]) + " |")
    if len(settings) == 1 and len(settings[0][1]) == 2:
        field, (first, second) = settings[0]
        lines += ["", f"Pair by pair on equal seeds, {field} = {second} minus {first}:", ""]
        for figure in figures:
            by_seed = [
                {row["seed"]: row[figure] for row in rows if row[field] == value and row[figure] is not None}
                for value in (first, second)
            ]
            both = sorted(by_seed[0].keys() & by_seed[1].keys())
            lines.append(f"- {figure}: {interval([by_seed[1][seed] - by_seed[0][seed] for seed in both])}")
    return "\n".join(lines) + "\n"


def _plot(
    path: Path,
    name: str,
    settings: Sequence[tuple[str, list[Any]]],
    rows: Sequence[Mapping[str, Any]],
    figures: Sequence[str],
) -> None:
    """One panel a figure: mean and interval over the values (of all combinations, in order)."""
    groups = _groups(settings, rows)
    labels = [", ".join(map(str, combination)) or name for combination, _ in groups]
    panels, axes = plt.subplots(1, len(figures), figsize=(4.2 * len(figures), 3.6), layout="constrained", squeeze=False)
    for axis, figure in zip(axes[0], figures, strict=True):
        means = [interval([row[figure] for row in members if row[figure] is not None]) for _, members in groups]
        axis.errorbar(
            range(len(groups)), [m.mean for m in means], yerr=[np.nan_to_num(m.half_width) for m in means],
            fmt="o-", capsize=3, color="#2a6f97",
        )  # fmt: skip
        axis.set_xticks(range(len(groups)), labels, rotation=30 if max(map(len, labels)) > 6 else 0)
        axis.set_xlabel(", ".join(field for field, _ in settings))
        axis.set_title(figure, fontsize=10)
        axis.grid(alpha=0.25)
    panels.suptitle(f"{name}: mean over seeds with 95 % interval", fontsize=11)
    panels.savefig(path, dpi=110)
    plt.close(panels)
