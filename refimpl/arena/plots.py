"""The arena's pictures: small PNGs, made from the cells alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from refimpl.arena.economics import AUDITS, Stakes
from refimpl.arena.judge import Cell
from refimpl.arena.report import Results, detection
from refimpl.arena.stats import Separation, roc
from refimpl.attacks.honest import HONEST

SHOWN = ("weights-8bit", "weights-4bit", "kv-8bit", "layers-skipped", "prompt-altered", "wrong-seed", "cheap-tokens")
VERIFIERS_SHOWN = ("toploc-paper", "toploc-sequence", "projection", "sampling-proof")


def draw(folder: Path, found: Results, cells: Mapping[str, Cell], limits: Mapping[str, float]) -> list[Path]:
    """All pictures of one setting; returns their paths."""
    attacks = [name for name in SHOWN if name in cells]
    honest = {v: [s for name, cell in cells.items() if name in HONEST for s in cell.scores[v]] for v in VERIFIERS_SHOWN}
    figures = {}
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharey=True)
    for axis, verifier in zip(axes, VERIFIERS_SHOWN, strict=True):
        _roc(axis, verifier, honest[verifier], cells, attacks)
    axes[0].set_ylabel("detection rate")
    axes[-1].legend(fontsize=6, loc="lower right")
    figures["roc"] = figure
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharey=True)
    for axis, verifier in zip(axes, VERIFIERS_SHOWN, strict=True):
        _distributions(axis, verifier, honest[verifier], cells, attacks, limits.get(verifier, 1.0))
    figures["scores"] = figure
    figures["tokens"] = _tokens(found, attacks)
    figures["profit"] = _profit(found)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{found['setting']}-{name}.png"
        figure.tight_layout()
        figure.savefig(path, dpi=80)
        plt.close(figure)
        paths.append(path)
    return paths


def _roc(axis: Axes, verifier: str, honest: list[float], cells: Mapping[str, Cell], attacks: list[str]) -> None:
    for name in attacks:
        cell = cells[name]
        false, detected, area = roc(honest, _cheated(cell, verifier))
        axis.step(false, detected, where="post", label=f"{name} {area:.2f}", linewidth=1)
    axis.set_title(verifier, fontsize=9)
    axis.set_xlabel("false positives")


def _distributions(
    axis: Axes, verifier: str, honest: list[float], cells: Mapping[str, Cell], attacks: list[str], limit: float
) -> None:
    groups = [honest, *(_cheated(cells[name], verifier) for name in attacks)]
    groups = [[max(s, 1e-5) for s in group if s < 1e6] or [float("nan")] for group in groups]
    axis.boxplot(groups, vert=False, whis=(0, 100), widths=0.6)
    axis.axvline(limit, color="tab:red", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(range(1, len(groups) + 1), ["honest", *attacks], fontsize=7)
    axis.set_title(verifier, fontsize=9)
    axis.set_xlabel("score (line: limit)")


def _tokens(found: Results, attacks: list[str]) -> plt.Figure:
    """Detection against tokens, at 1 % false positives, by attack and verifier; dotted: the longest answer."""
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.2), sharey=True)
    tokens = np.geomspace(8, 10_000, 120)
    for axis, verifier in zip(axes, VERIFIERS_SHOWN, strict=True):
        for place, name in enumerate(attacks):
            apart = found["cells"][name]["separation"].get(verifier)
            if apart is not None:
                one = Separation(**apart)
                m = tokens[tokens >= one.piece]
                axis.plot(m, [one.power(count) for count in m], color=f"C{place}", linewidth=1, label=name)
        axis.axvline(found["tokens_max"], color="grey", linewidth=0.8, linestyle=":")
        axis.axhline(0.99, color="grey", linewidth=0.8, linestyle=":")
        axis.set_xscale("log")
        axis.set_title(verifier, fontsize=9)
        axis.set_xlabel("tokens")
    axes[0].set_ylabel("detected at 1 % false positives")
    axes[0].legend(fontsize=6, loc="lower right")
    return figure


def _profit(found: Results, stakes: Stakes | None = None) -> plt.Figure:
    """Expected profit per answer against the audit rate, under the default policy (full) and the published one."""
    stakes = stakes or Stakes()
    figure, axis = plt.subplots(figsize=(7, 3.6))
    for place, name in enumerate(n for n in SHOWN if n in found["cells"]):
        cell = found["cells"][name]
        for policy, style in (("default", "-"), ("published", ":")):
            caught = detection(cell, policy)
            profit = [stakes.profit(cell["saved_share"] or 0.0, caught, float(audit)) for audit in AUDITS]
            label = name if policy == "default" else None
            axis.plot(AUDITS, profit, style, color=f"C{place}", linewidth=1, label=label)
    axis.axhline(0, color="black", linewidth=0.8)
    axis.set_xscale("log")
    axis.set_ylim(-1, 1)
    axis.set_xlabel("audit rate (full: default policy, dotted: published)")
    axis.set_ylabel("profit per answer, honest costs")
    axis.legend(fontsize=7)
    return figure


def _cheated(cell: Cell, verifier: str) -> list[float]:
    return [score for score, cheats in zip(cell.scores[verifier], cell.cheated, strict=True) if cheats]
