"""`trace.json` is what Perfetto's importer of Chrome's JSON trace format takes: every field of the right sort, slices
of a thread one after another, and every arrow from inside one slice to inside another.

The rules are those of the "Trace Event Format" document of Chromium's trace viewer.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from sim.run import run_scenario
from tests.swarms import troubled

FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "dur": (int, float), "args": dict},
    "s": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "id": int},
    "f": {"name": str, "cat": str, "pid": int, "tid": int, "ts": (int, float), "id": int, "bp": str},
    "M": {"name": str, "pid": int, "tid": int, "args": dict},
    "i": {"name": str, "pid": int, "tid": int, "ts": (int, float), "s": str},
}
METADATA = {
    "process_name": {"name": str},
    "process_sort_index": {"sort_index": int},
    "thread_name": {"name": str},
    "thread_sort_index": {"sort_index": int},
}
ROUNDING_US = 1e-6


def faults_of(trace: dict[str, Any]) -> list[str]:
    """What is wrong with a trace, a sentence each."""
    if set(trace) != {"displayTimeUnit", "otherData", "traceEvents"} or trace["displayTimeUnit"] not in ("ms", "ns"):
        return [f"the outermost object has {sorted(trace)}, unit {trace.get('displayTimeUnit')}"]
    wrong: list[str] = []
    named: set[tuple[str, int]] = set()
    slices: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    flows: dict[str, dict[tuple[str, str, int], dict[str, Any]]] = {"s": {}, "f": {}}
    last_us = 0.0
    for event in trace["traceEvents"]:
        fields = FIELDS.get(event.get("ph"))
        if fields is None:
            wrong.append(f"unknown phase: {event}")
            continue
        sorts = {name: type(value) for name, value in event.items() if name != "ph"}
        if set(sorts) != set(fields) or not all(issubclass(sorts[name], fields[name]) for name in sorts):
            wrong.append(f"fields: {event}")
            continue
        if event["ph"] == "M":
            expected = METADATA.get(event["name"])
            if expected is None or {name: type(value) for name, value in event["args"].items()} != expected:
                wrong.append(f"metadata: {event}")
            named.add((event["name"], event["pid"] if event["name"].startswith("process") else event["tid"]))
            continue
        if event["ts"] < last_us:
            wrong.append(f"time goes back: {event}")
        last_us = event["ts"]
        if ("process_name", event["pid"]) not in named:
            wrong.append(f"a process without a name: {event}")
        if event["ph"] == "X":
            if event["dur"] <= 0 or ("thread_name", event["tid"]) not in named or event["pid"] <= 0:
                wrong.append(f"slice: {event}")
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] in flows:
            key = (event["cat"], event["name"], event["id"])
            if key in flows[event["ph"]] or event.get("bp", "e") != "e":
                wrong.append(f"a flow twice, or not bound to its enclosing slice: {event}")
            flows[event["ph"]][key] = event
            around = slices[event["pid"], event["tid"]][-1:]
            if not around or not around[0]["ts"] <= event["ts"] < around[0]["ts"] + around[0]["dur"]:
                wrong.append(f"a flow outside any slice: {event}")
    for lane in slices.values():
        wrong += [
            f"slices cross: {before} {after}"
            for before, after in pairwise(lane)
            if after["ts"] < before["ts"] + before["dur"] - ROUNDING_US * max(1.0, before["ts"] * 1e-6)
        ]
    for key in flows["s"].keys() ^ flows["f"].keys():
        wrong.append(f"a flow with one end: {key}")
    for key in flows["s"].keys() & flows["f"].keys():
        if flows["f"][key]["ts"] < flows["s"][key]["ts"]:
            wrong.append(f"a flow ends before it starts: {key}")
    tids = {tid: pid for pid, tid in slices}
    wrong += [f"thread {tid} is in two processes" for pid, tid in slices if tids[tid] != pid]
    return wrong


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    runs: Path = tmp_path_factory.mktemp("runs")
    scenario = troubled().model_copy(update={"duration_s": 300.0})
    result = run_scenario(
        scenario, name="t", seed=3, model_path="calibrated", runs=runs, say=lambda line: None, progress=False
    )
    loaded: dict[str, Any] = json.loads((result.folder / "trace.json").read_text(encoding="utf-8"))
    return loaded


def test_the_trace_of_a_swarm_in_trouble_keeps_every_rule_of_the_format(trace: dict[str, Any]) -> None:
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert phases == {"M", "X", "s", "f"} and len(trace["traceEvents"]) > 5000
    assert faults_of(trace) == []


def first(events: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    return next(event for event in events if event["ph"] == phase)


BREAKS: list[tuple[str, Callable[[list[dict[str, Any]]], object]]] = [
    ("fields", lambda events: first(events, "X").pop("dur")),
    ("fields", lambda events: first(events, "X").update(ts="0")),
    ("slice", lambda events: first(events, "X").update(dur=0)),
    ("unknown phase", lambda events: first(events, "X").update(ph="Y")),
    ("a flow with one end", lambda events: events.remove(first(events, "f"))),
    ("a flow outside any slice", lambda events: first(events, "s").update(tid=7)),
    ("time goes back", lambda events: events.append({**first(events, "X"), "ts": 0.0})),
    ("slices cross", lambda events: first(events, "X").update(dur=1e12)),
    ("metadata", lambda events: first(events, "M")["args"].clear()),
    ("a process without a name", lambda events: events.remove(first(events, "M"))),
]


@pytest.mark.parametrize(("sentence", "harm"), BREAKS, ids=[f"{i}-{s}" for i, (s, _) in enumerate(BREAKS)])
def test_the_rules_notice_each_kind_of_harm(
    trace: dict[str, Any], sentence: str, harm: Callable[[list[dict[str, Any]]], object]
) -> None:
    harmed = {**trace, "traceEvents": copy.deepcopy(trace["traceEvents"][:2000])}
    harm(harmed["traceEvents"])
    assert any(found.startswith(sentence) for found in faults_of(harmed))
