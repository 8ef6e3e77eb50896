"""Why: how full a line was, and when, is seen at a glance; this draws a report's curves as plain SVG, no script."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 1000, 108, 4, 18, 22
USED, ROOM, GRID = "#3a7d44", "#c1440e", "#e8ecef"


def curve(
    title: str,
    values: Sequence[float],
    bin_s: float,
    end_s: float,
    unit: str,
    limit: Sequence[float] = (),
    more: str = "",
) -> str:
    """A stepped, filled curve over time under its limit (dashed), with its name and its largest value written on it."""
    if not values:
        return ""
    end_s = max(end_s, 1e-9)
    largest = max(values)
    top = max(largest, max(limit, default=0.0)) or 1.0
    steps = _steps(values, bin_s, end_s, top)
    base = HEIGHT - BOTTOM
    shapes = [f'<line x1="{LEFT}" y1="{base}" x2="{WIDTH - LEFT}" y2="{base}" stroke="{GRID}"/>']
    area = f"{LEFT},{base} {steps} {WIDTH - LEFT},{base}"
    shapes.append(f'<polygon points="{area}" fill="{USED}" fill-opacity=".35" stroke="{USED}"/>')
    if limit:
        line = _steps(limit, bin_s, end_s, top)
        shapes.append(f'<polyline points="{line}" fill="none" stroke="{ROOM}" stroke-dasharray="5 4"/>')
    of = f" of {max(limit):.4g}" if limit else ""
    shapes += [
        f'<text x="{LEFT}" y="14" font-weight="600">{html.escape(title)}</text>',
        f'<text x="{WIDTH - LEFT}" y="14" text-anchor="end">largest {largest:.4g}{of} {html.escape(unit)}'
        f"{html.escape(more)}</text>",
        f'<text x="{LEFT}" y="{HEIGHT - 4}">0 s</text>',
        f'<text x="{WIDTH - LEFT}" y="{HEIGHT - 4}" text-anchor="end">{end_s:.4g} s</text>',
    ]
    return f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(shapes)}</svg>'


def _steps(values: Sequence[float], bin_s: float, end_s: float, top: float) -> str:
    """Two points for each bin: its value from its beginning to its end."""
    points = []
    for place, value in enumerate(values):
        y = HEIGHT - BOTTOM - value / top * (HEIGHT - BOTTOM - TOP)
        for edge_s in (place * bin_s, min((place + 1) * bin_s, end_s)):
            x = LEFT + (WIDTH - 2 * LEFT) * min(edge_s / end_s, 1.0)
            points.append(f"{x:.1f},{y:.1f}")
    return " ".join(points)


def link_curves(traffic: Mapping[str, Any]) -> str:
    """A curve for each link of `traffic.json`: what it carried, under what it could."""
    return "".join(
        curve(
            link["name"],
            link["mbit_s"],
            traffic["bin_s"],
            traffic["end_s"],
            "Mbit/s",
            link["capacity_mbit_s"],
            f"; mean use {100 * link['use']:.1f} %; held transfers for {link['held_s']:.4g} s",
        )
        for link in traffic.get("links", ())
    )


def device_curves(use: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> str:
    """A curve for each class of devices: how many of them were at work. `groups`: the scenario's nodes."""
    at_work: dict[str, list[float]] = {}
    count: dict[str, int] = {}
    for group in groups:
        name = group["device"]
        count[name] = count.get(name, 0) + group.get("count", 1)
        if (busy := use["at_work"].get(group["name"])) is not None:
            sums = at_work.setdefault(name, [0.0] * len(busy))
            at_work[name] = [a + b for a, b in zip(sums, busy, strict=True)]
    drawn = []
    for name, values in at_work.items():
        limit = [float(count[name])] * len(values)
        share = f"; mean use {100 * sum(values) / max(sum(limit), 1e-9):.1f} %"
        title = f"{name} ({count[name]})"
        drawn.append(curve(title, values, use["bin_s"], use["end_s"], "devices at work", limit, share))
    return "".join(drawn)


def checks_table(checks: Sequence[Mapping[str, Any]]) -> str:
    """Each promise that was checked, and how often it was broken, with the first sentences."""
    rows = []
    for check in sorted(checks, key=lambda check: -len(check["violations"])):
        broken = check["violations"]
        verdict = f"{len(broken)} violation{'s' if len(broken) != 1 else ''}" if broken else "passed"
        told = "".join(f"<br>{html.escape(sentence)}" for sentence in broken[:3])
        cells = (
            html.escape(check["checker"]),
            html.escape(check["class"]),
            html.escape(check["promise"]) + told,
            verdict,
        )
        kind = "cheat" if broken else "honest"
        rows.append(f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    if not rows:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("check", "class", "promise", "verdict"))
    return f'<table id="checks" class="words"><tr>{head}</tr>{"".join(rows)}</table>'
