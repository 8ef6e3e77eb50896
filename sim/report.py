"""`report.html`: one self-contained file about a run, that opens anywhere and asks nothing of the network.

Summary, map of nodes by region, link and device use over time, detections, bottlenecks, promises checked. Everything in
it is made from the run's own files, and every number it shows stands in `summary.json`, `waits.json` or `traffic.json`.
"""

from __future__ import annotations

import base64
import html
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sim.curves import checks_table, device_curves, link_curves

# degrees north, degrees east; of the data centres' cities, and of the middle of each continent
PLACES: dict[str, tuple[float, float]] = {
    "oregon": (45.8, -119.7), "virginia": (39.0, -77.5), "ohio": (40.1, -82.9), "tokyo": (35.7, 139.7),
    "seoul": (37.6, 127.0), "singapore": (1.35, 103.8), "sydney": (-33.9, 151.2), "london": (51.5, -0.1),
    "frankfurt": (50.1, 8.7), "ireland": (53.3, -6.3), "north-america": (39.0, -98.0), "europe": (50.0, 10.0),
    "south-america": (-15.0, -58.0), "asia-pacific": (20.0, 105.0), "japan": (36.0, 138.0), "australia": (-26.0, 134.0),
}  # fmt: skip

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1b1b1b;max-width:1080px;margin:2rem auto;padding:0 1rem}
h1{font-size:1.5rem;margin-bottom:.2rem}h2{font-size:1.1rem;margin-top:2.2rem;border-bottom:1px solid #ddd}
table{border-collapse:collapse;width:100%;font-size:.9rem}th,td{padding:.25rem .6rem;text-align:right}
th:first-child,td:first-child{text-align:left}tr:nth-child(even){background:#f6f7f8}th{border-bottom:2px solid #bbb}
.cheat td:first-child{color:#c1440e}.honest td:first-child{color:#2a6f97}.note{color:#666}
.tiles{display:flex;flex-wrap:wrap;gap:1rem;margin:1rem 0}
.tile{background:#f3f5f7;border-radius:8px;padding:.6rem 1rem;min-width:9rem}
.tile b{display:block;font-size:1.35rem}svg{width:100%;height:auto;background:#fbfcfd;border:1px solid #e3e6e8}
img{max-width:100%}svg.curve{margin:.2rem 0}.words td,.words th{text-align:left;vertical-align:top}
svg text{font:11px system-ui,sans-serif}
"""


def write_report(folder: Path) -> Path:
    """Make `report.html` from the run in `folder`. Returns its path."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    traffic = _optional(folder / "traffic.json")
    waits = _optional(folder / "waits.json")
    places = _optional(folder / "places.json")
    page = _optional(folder / "page.json") or {}
    parts = [
        _head(summary),
        _tiles(summary, page.get("tiles", {})),
        *(_section(table["title"], _table(table)) for table in page.get("tables", ())),
        _section("Where the nodes are", _map(places)),
        _section("Devices at work", _device_use(_optional(folder / "devices.json"))),
        _section("Device classes", _class_use(traffic, _optional(folder / "replay.json"))),
        _section("Bytes on the links", _link_use(traffic)),
        _section("Links that held transfers up, and the fullest", link_curves(traffic) if traffic else ""),
        _section("Who waited for whom", _waits(waits)),
        *(_section(p["title"], _picture(folder / p["file"], p["alt"])) for p in page.get("pictures", ())),
        _section("Promises checked", checks_table(summary.get("checks", ()))),
        f'<p class="note">Seed {summary["seed"]}; events.jsonl has SHA-256 {summary["events_sha256"]}.</p>',
        "</body></html>",
    ]
    path = folder / "report.html"
    path.write_text("\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return path


def _optional(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _head(summary: Mapping[str, Any]) -> str:
    title = html.escape(f"{summary['scenario']}: {summary['title']}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body>'
        f"<h1>{title}</h1><p>{html.escape(summary['shows'])}</p>"
    )


def _section(title: str, body: str) -> str:
    return f"<h2>{html.escape(title)}</h2>\n{body}" if body else ""


def _tiles(summary: Mapping[str, Any], more: Mapping[str, str]) -> str:
    tiles = [
        ("virtual time", f"{summary['virtual_s']:.1f} s"),
        ("nodes", f"{summary['nodes']}"),
        ("events", f"{summary['events']}"),
        *more.items(),
    ]
    if summary.get("ended", "finished") != "finished":
        tiles.insert(0, ("the run", str(summary["ended"])))
    if broken := sum(len(entry["violations"]) for entry in summary.get("checks", ())):
        tiles.insert(0, ("broken promises", f"{broken}"))
    inner = "".join(f'<div class="tile">{html.escape(name)}<b>{html.escape(text)}</b></div>' for name, text in tiles)
    return f'<div class="tiles">{inner}</div>'


def _table(table: Mapping[str, Any]) -> str:
    """A table of `page.json`."""
    rows = "".join(
        f'<tr class="{html.escape(kind)}">' + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>"
        for row, kind in zip(table["rows"], table["classes"], strict=True)
    )
    top = "".join(f"<th>{html.escape(name)}</th>" for name in table["columns"])
    return f"<table><tr>{top}</tr>{rows}</table>"


def _map(places: Any) -> str:
    """Dots on a plain chart of latitude and longitude, as large as there are nodes."""
    if not places:
        return ""
    width, height = 1000, 420

    def xy(north: float, east: float) -> tuple[float, float]:
        return (east + 180) / 360 * width, (75 - north) / 130 * height

    lines = [
        f'<line x1="{x:.0f}" y1="0" x2="{x:.0f}" y2="{height}" stroke="#e8ecef"/>' for x in range(0, width + 1, 83)
    ]
    lines += [
        f'<line x1="0" y1="{y:.0f}" x2="{width}" y2="{y:.0f}" stroke="#e8ecef"/>' for y in range(0, height + 1, 60)
    ]
    counts: dict[str, Counter[str]] = {}
    for place in places:
        counts.setdefault(place["region"], Counter())["cheat" if place["cheats"] else place["role"]] += 1
    dots, unknown = [], []
    for region, kinds in sorted(counts.items()):
        if region not in PLACES:
            unknown.append(f"{region}: {kinds.total()} nodes")
            continue
        x, y = xy(*PLACES[region])
        radius = 5 + 2.2 * kinds.total() ** 0.5 if kinds.total() < 400 else 50
        colour = "#c1440e" if kinds["cheat"] * 2 > kinds.total() else "#2a6f97"
        label = f"{region}: {kinds.total()}" + (f" ({kinds['cheat']} cheat)" if kinds["cheat"] else "")
        dots.append(
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="{radius:.1f}" fill="{colour}" fill-opacity=".55"/>'
            f'<text x="{x + radius + 3:.0f}" y="{y + 4:.0f}">{html.escape(label)}</text>'
        )
    note = f'<p class="note">Not on the map: {html.escape(", ".join(unknown))}.</p>' if unknown else ""
    return f'<svg viewBox="0 0 {width} {height}" role="img">{"".join(lines + dots)}</svg>{note}' if dots else note


def _area(values: Sequence[float], bin_s: float, unit: str, colour: str) -> str:
    """A filled curve over time, with its largest value and its end written on it."""
    if not values:
        return ""
    width, height, top = 1000, 170, max(values) or 1.0
    step = width / len(values)
    points = " ".join(f"{i * step:.1f},{height - 20 - v / top * (height - 40):.1f}" for i, v in enumerate(values))
    end = len(values) * bin_s
    return (
        f'<svg viewBox="0 0 {width} {height}"><polygon points="0,{height - 20} {points} {width},{height - 20}" '
        f'fill="{colour}" fill-opacity=".35" stroke="{colour}"/>'
        f'<text x="4" y="14">largest {top:.4g} {unit}</text><text x="4" y="{height - 5}">0 s</text>'
        f'<text x="{width - 4}" y="{height - 5}" text-anchor="end">{end:.4g} s</text></svg>'
    )


def _device_use(devices: Any) -> str:
    """How many devices were at work, over time; and the busiest."""
    if not devices:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(node)}</td><td>{busy_s:.3f} s</td>"
        f"<td>{100 * busy_s / max(devices['end_s'], 1e-9):.1f} %</td></tr>"
        for node, busy_s in devices["busiest_s"].items()
    )
    table = f"<table><tr><th>busiest devices</th><th>at work</th><th>of the run</th></tr>{rows}</table>"
    return _area(devices["devices"], devices["bin_s"], "devices", "#2a6f97") + table


def _link_use(traffic: Any) -> str:
    if not traffic:
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count / 1e6:.3f}</td>"
        f"<td>{traffic['received_bytes'].get(name, 0) / 1e6:.3f}</td></tr>"
        for name, count in list(traffic["sent_bytes"].items())[:8]
    )
    table = f"<table><tr><th>most sent by</th><th>MB sent</th><th>MB received</th></tr>{rows}</table>"
    total = f"<p>{traffic['total_bytes'] / 1e6:.3f} MB in all.</p>"
    return total + _area(traffic["mbit_s"], traffic["bin_s"], "Mbit/s", "#3a7d44") + table


def _class_use(traffic: Any, replay: Any) -> str:
    """Of each class of devices, how many were at work."""
    if not traffic or not replay or "devices" not in traffic:
        return ""
    return device_curves(traffic["devices"], replay["scenario"]["nodes"])


def _waits(waits: Any) -> str:
    if not waits or not waits.get("waits"):
        return ""
    rows = "".join(
        f"<tr><td>{html.escape(w['waiting'])} → {html.escape(w['target'])}</td><td>{html.escape(w['message'])}</td>"
        f"<td>{w['count']}</td><td>{w['total_s']:.3f}</td><td>{w['mean_s']:.4f}</td><td>{w['max_s']:.3f}</td>"
        f"<td>{w['network_s']:.3f}</td><td>{w['device_s']:.3f}</td></tr>"
        for w in waits["waits"][:10]
    )
    head = "".join(
        f"<th>{name}</th>"
        for name in ("waiting → target", "message", "calls", "total s", "mean s", "max s", "network s", "device s")
    )
    return f"<table>{'<tr>' + head + '</tr>'}{rows}</table>"


def _picture(path: Path, alt: str) -> str:
    if not path.exists():
        return ""
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{data}">'
