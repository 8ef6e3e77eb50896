"""Looks at a run's report and trace without a desktop: `report.png` by a headless Chromium, `trace.png` by matplotlib.

python -m sim run adversarial-tiny
python experiments/report/draw.py runs/adversarial-tiny-1 [--out experiments/report] [--from 0.0 --to 0.25]

Perfetto shows the same trace with more comfort; this one needs no browser that may leave the machine. A lane per node
and sort of slice, one above another as in Perfetto; an arrow runs from each sending to its receiving.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from PIL import Image

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-background-networking")
COLOURS = {"compute": "#2a6f97", "serve": "#8d6bb0", "send": "#3a7d44", "receive": "#88b04b", "wait": "#d8c9a8"}
ARROWS_MAX = 1500
HEIGHT_PX = 9000
PALETTE = 64


def screenshot(page: Path, out: Path) -> None:
    """The page as a headless browser shows it, without the empty space below."""
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"none of {', '.join(BROWSERS)} is installed: no screenshot")
    size = f"--window-size=1120,{HEIGHT_PX}"
    command = [browser, *FLAGS, size, f"--screenshot={out}", page.resolve().as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    image = Image.open(out).convert("RGB")
    bottom = (Image.eval(image, lambda level: 255 - level).getbbox() or (0, 0, *image.size))[3]
    image.crop((0, 0, image.width, min(image.height, bottom + 24))).quantize(PALETTE).save(out, optimize=True)


def draw(trace: dict[str, Any], out: Path, start_s: float, end_s: float) -> None:
    """Lanes and arrows between two instants."""
    events = trace["traceEvents"]
    name_of = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    slices = [
        event
        for event in events
        if event["ph"] == "X" and event["ts"] / 1e6 < end_s and (event["ts"] + event["dur"]) / 1e6 > start_s
    ]
    end_s = min(end_s, max((event["ts"] + event["dur"]) / 1e6 for event in slices))
    threads = sorted({(event["pid"], event["tid"]) for event in slices})
    row = {thread: place for place, thread in enumerate(threads)}
    figure, axis = plt.subplots(figsize=(12, 1.2 + 0.13 * len(threads)), layout="constrained")
    bars: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in slices:
        bars[row[event["pid"], event["tid"]], event["cat"]].append((event["ts"] / 1e6, event["dur"] / 1e6))
    for (place, cat), spans in bars.items():
        axis.broken_barh(spans, (place - 0.42, 0.84), facecolors=COLOURS[cat])
    sent = {event["id"]: event for event in events if event["ph"] == "s"}
    arrows = [(sent[event["id"]], event) for event in events if event["ph"] == "f"]
    inside = [(a, b) for a, b in arrows if start_s <= a["ts"] / 1e6 and b["ts"] / 1e6 < end_s]
    for a, b in inside[:ARROWS_MAX]:
        times, places = (a["ts"] / 1e6, b["ts"] / 1e6), (row[a["pid"], a["tid"]], row[b["pid"], b["tid"]])
        axis.plot(times, places, color="#c1440e", lw=0.4, alpha=0.5)
    nodes = sorted({pid for pid, _ in threads})
    middles = [sum(row[t] for t in threads if t[0] == pid) / sum(t[0] == pid for t in threads) for pid in nodes]
    for pid in nodes[1:]:
        axis.axhline(min(row[t] for t in threads if t[0] == pid) - 0.5, color="#999", lw=0.6)
    axis.set_yticks(middles, [name_of[pid] for pid in nodes], fontsize=8)
    axis.set_ylim(len(threads) - 0.4, -0.6)
    axis.set_xlim(start_s, end_s)
    axis.set_xlabel("virtual time (s)")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in COLOURS.values()]
    figure.legend(handles, COLOURS, loc="outside upper center", ncols=len(COLOURS), fontsize=8, frameon=False)
    figure.savefig(out, dpi=100)
    plt.close(figure)
    Image.open(out).convert("RGB").quantize(PALETTE).save(out, optimize=True)
    print(
        f"{out}: {len(slices)} slices on {len(threads)} lanes, {min(len(inside), ARROWS_MAX)} of {len(arrows)} arrows"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the folder of a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--from", dest="start_s", type=float, default=0.0)
    parser.add_argument("--to", dest="end_s", type=float, default=float("inf"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    loaded = json.loads((options.run / "trace.json").read_text(encoding="utf-8"))
    draw(loaded, options.out / "trace.png", options.start_s, options.end_s)
    screenshot(options.run / "report.html", options.out / "report.png")
    print(f"{options.out / 'report.png'}: {(options.out / 'report.png').stat().st_size / 1e3:.0f} kB")
