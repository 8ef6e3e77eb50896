"""`python -m sim why RUN`: who waits for whom, from when, on what link or device. Reads the run's `waits.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FINISHED = "finished"
"""How a run ended that did not stop for a reason."""

ROWS_MAX = 15
OPEN_SHOWN = 20


class NoRun(ValueError):
    """A folder that no run of this simulator left. Takes exactly one argument: the sentence."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """A file of a run's folder. Raises NoRun."""
    path = folder / name
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NoRun(f"{path}: {error.strerror}; the folder of a run was expected, such as runs/NAME-SEED") from None
    except ValueError as error:
        raise NoRun(f"{path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise NoRun(f"{path} holds a {type(content).__name__}; an object was expected")
    return content


def why(folder: Path) -> str:
    """The run's explanation, for a terminal."""
    waits = read_json(folder, "waits.json")
    ended = waits["ended"] if waits["ended"] == FINISHED else f"stopped: {waits['ended']}"
    parts = [f"{folder.name}: {ended}, at {waits['virtual_s']:.3f} s of virtual time", _table(waits["waits"])]
    worst = max(waits["waits"], key=lambda row: row["total_s"], default=None)
    if worst is not None and worst["total_s"] > 0:
        parts.append(_verdict(worst))
    if waits.get("held_up"):
        parts.append(_held_up(waits["held_up"]))
    parts.append(_open(waits))
    if waits["tasks"]:
        parts.append(
            "In the middle of:\n" + "\n".join(f"  {t['node']}: {t['task']}" for t in waits["tasks"][:OPEN_SHOWN])
        )
    return "\n\n".join(parts)


def _verdict(row: dict[str, Any]) -> str:
    """Where most of the waiting was, in a sentence."""
    shares = {
        "on the network": row["network_s"],
        f"for the device of {row['target']}": row["device_s"],
        f"for {row['target']}, which was waiting itself": row["handler_s"],
    }
    where = max(shares, key=lambda name: shares[name])
    share = 100 * shares[where] / row["total_s"]
    sentence = (
        f"Most waiting: {row['waiting']} for {row['target']} to answer {row['message']}, {row['total_s']:.3f} s in "
        f"all; {share:.0f} % of it {where}."
    )
    held = [
        f"from {source} to {target} they were held up the longest by {links[0]['link']} ({links[0]['held_s']:.3f} s)"
        for source, target, links in (
            (row["waiting"], row["target"], row.get("held_up_there")),
            (row["target"], row["waiting"], row.get("held_up_back")),
        )
        if links
    ]
    return sentence + (f" Of their transfers: {'; '.join(held)}." if held and row["network_s"] > 0 else "")


def _held_up(links: list[dict[str, Any]]) -> str:
    """The links that were transfers' bottlenecks."""
    lines = ["Links that held transfers up, by the sum of the transfers' times"]
    return "\n".join(lines + [f"  {link['link']}: {link['held_s']:.3f} s" for link in links])


def _table(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return "Nobody ever waited for anybody."
    head = (
        f"{'waiting → target':<36}{'message':<16}{'calls':>9}{'failed':>8}{'total s':>12}{'mean s':>10}{'max s':>10}"
        f"{'network s':>12}{'device s':>12}{'handler s':>12}"
    )
    lines = [head, "─" * len(head)]
    for row in rows[:ROWS_MAX]:
        who = f"{row['waiting']} → {row['target']}"
        lines.append(
            f"{who:<36}{row['message']:<16}{row['count']:>9}{row['failed']:>8}{row['total_s']:>12.3f}"
            f"{row['mean_s']:>10.4f}{row['max_s']:>10.3f}{row['network_s']:>12.3f}{row['device_s']:>12.3f}"
            f"{row['handler_s']:>12.3f}"
        )
    if len(rows) > ROWS_MAX:
        lines.append(f"({len(rows) - ROWS_MAX} more in waits.json)")
    return "\n".join(lines)


def _open(waits: dict[str, Any]) -> str:
    calls = waits["open"]
    if not calls:
        return "No call was open at the end."
    lines = [f"Calls open at the end: {waits['open_total']}, oldest first"]
    for call in calls[:OPEN_SHOWN]:
        lines.append(
            f"  {call['waiting']} has waited {call['waited_s']:.3f} s for {call['target']} to answer "
            f"{call['message']}, since {call['since_s']:.3f} s: {call['reason']}"
        )
    if waits["open_total"] > OPEN_SHOWN:
        lines.append(f"  ({waits['open_total'] - OPEN_SHOWN} more)")
    chain = chain_of(calls)
    return "\n".join(lines) + (f"\n{chain}" if chain else "")


def chain_of(calls: list[dict[str, Any]]) -> str:
    """The longest chain of nodes that wait for each other, as a sentence; empty when nobody waits in turn."""
    oldest: dict[str, dict[str, Any]] = {}
    for call in calls:  # oldest first
        oldest.setdefault(call["waiting"], call)
    best: list[str] = []
    for start in oldest:
        nodes = [start]
        while nodes[-1] in oldest and nodes.count(nodes[-1]) == 1:
            nodes.append(oldest[nodes[-1]]["target"])
        if len(nodes) > len(best):
            best = nodes
    if len(best) < 3:
        return ""
    told = f"{best[0]} waits for {best[1]}" + "".join(f", which waits for {name}" for name in best[2:])
    if best.count(best[-1]) > 1:
        return f"A circle: {told}."
    last = oldest[best[-2]]
    return f"A chain: {told}: {last['reason']}."
