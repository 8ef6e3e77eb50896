"""What can be said of a run of real processes afterwards: checks on its events, and where its calls spent their time.

The wire saw every call leave, come, be answered and be back (`calls.jsonl`); nodes wrote when their devices worked. So
`waits.json` has the same columns as a simulated run's, and `python -m sim why` reads both.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from refimpl.swarm import SERVICES, SwarmPlan
from sim.checkers import Checkers, Violation, as_json, check
from sim.explain import FINISHED
from sim.kinds.swarm_checks import SwarmView, judged_once, no_work_after_ejection
from sim.kinds.swarm_facts import SwarmFacts
from sim.scenario import Scenario
from sim.watch import Waits

Record = dict[str, Any]

BY_EVENTS: Checkers = (("correctness", judged_once), ("correctness", no_work_after_ejection))
"""Checkers that need the events alone."""


def no_task_failed(ended: str) -> Iterator[str]:
    """No node failed that nobody killed, and the network held."""
    if ended.startswith(("a task failed", "the network ended")):
        yield ended


def run_ends(ended: str) -> Iterator[str]:
    """The run ends by itself, or at the scenario's end."""
    if ended != FINISHED and not any(no_task_failed(ended)):
        yield ended


BY_ENDING: Checkers = (("crash", no_task_failed), ("liveness", run_ends))
"""Checks of the sentence with which the run ended."""


def check_events(scenario: Scenario, plan: SwarmPlan, events: list[Record], ended: str) -> list[Violation]:
    """What is broken, as far as events show it."""
    members = list(scenario.members())
    facts = SwarmFacts(
        workers={member.name for member in members if member.group.role == "worker"},
        services={member.name for member in members if member.group.role in SERVICES},
        validator=plan.validator,
    )
    for event in events:
        facts.event(event)
    view = SwarmView(fabric=cast(Any, None), facts=facts, rules=plan.rules, ledger=plan.ledger)  # nobody looks at it
    found = [Violation(category, checker.__name__, text) for category, checker in BY_ENDING for text in checker(ended)]
    return found + check(view, BY_EVENTS)


def checks_json(violations: list[Violation]) -> list[Record]:
    """One entry per check that was made, for `summary.json`."""
    return as_json(BY_ENDING + BY_EVENTS, violations)


def read_calls(folder: Path) -> Iterator[Record]:
    """Every call of a real run that has ended, in the order of its end."""
    with (folder / "calls.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            if line.endswith("\n"):  # the last one may be cut off
                yield json.loads(line)


def waits_of_calls(
    folder: Path, scenario: Scenario, events: list[Record], open_calls: list[Record], ended: str, virtual_s: float
) -> Record:
    """What `waits.json` says of a real run."""
    group_of = {member.name: member.group.name for member in scenario.members()}
    device: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for event in events:
        if event["kind"] == "compute":
            device[event["node"]].append((event["start_ns"], event["end_ns"]))
    sums: dict[tuple[str, str, str], Waits] = defaultdict(Waits)
    for call in read_calls(folder):
        key = (group_of.get(call["source"], "?"), group_of.get(call["target"], "?"), call["kind"])
        _add(sums[key], call, device[call["target"]])
    by_total = sorted(sums.items(), key=lambda item: (-item[1].total_ns, item[0]))
    return {
        "ended": ended,
        "virtual_s": virtual_s,
        "waits": [
            {"waiting": waiting, "target": target, "message": kind, **waits.as_json()}
            for (waiting, target, kind), waits in by_total
        ],
        "open_total": len(open_calls),
        "open": open_calls,
        "tasks": [],
    }


def _add(waits: Waits, call: Record, device: list[tuple[int, int]]) -> None:
    """One more call: the network has it until it came and from its answer on; the device while it worked meanwhile."""
    begun_ns, ended_ns = call["begun_ns"], call["ended_ns"]
    came_ns = call["came_ns"] if call["came_ns"] is not None else ended_ns
    answered_ns = call["answered_ns"] if call["answered_ns"] is not None else ended_ns
    at_work = ((max(came_ns, start_ns), min(answered_ns, end_ns)) for start_ns, end_ns in device)
    device_ns = sum(end_ns - start_ns for start_ns, end_ns in at_work if end_ns > start_ns)
    total_ns = ended_ns - begun_ns
    waits.count += 1
    waits.failed += call["outcome"] != "answered"
    waits.total_ns += total_ns
    waits.max_ns = max(waits.max_ns, total_ns)
    waits.network_ns += total_ns - (answered_ns - came_ns)
    waits.device_ns += device_ns
    waits.handler_ns += answered_ns - came_ns - device_ns


def write_waits(folder: Path, waits: Record) -> None:
    """Leave `waits.json`."""
    (folder / "waits.json").write_text(json.dumps(waits, indent=1) + "\n", encoding="utf-8")
