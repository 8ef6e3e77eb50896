"""Why: a simulated run is worth as much as it agrees with a real one; so one scenario is run both ways and compared.

`python -m sim swarm SCENARIO --compare` runs it as real processes, then in virtual time, and compares what was judged
and how, what never was, who came and went, and how long calls and assignments took. The real run goes first: what its
devices took for each sort of work is the price of that work in the simulated one, since the question is whether time
on the network, in queues and in the protocol agrees, not whether this machine is the device that the scenario names.

Times are compared by their medians, calls by who calls whom with what. Counted are those that lie mostly on the network
and take `FLOOR_S` or more: on a busy machine each of a call's four passings from process to process may take 20 ms.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from sim.explain import read_json
from sim.processes import run_processes
from sim.real_checks import read_calls
from sim.record import read_events
from sim.run import Prices, RunResult, run_scenario
from sim.scenario import Scenario

BOUND = 0.10
FLOOR_S = 1.0
NETWORK_SHARE = 0.5
COMING_S = 0.5
"""Comings, goings and faults of the real run may be so late: a process dies at once, and its successor was ready."""

Event = Mapping[str, Any]
Slot = tuple[str, int, int]
"""Worker, assignment, index."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sort of time in both runs."""

    what: str
    simulated_s: list[float]
    real_s: list[float]
    counted: bool

    @property
    def medians_s(self) -> tuple[float, float]:
        return median(self.simulated_s), median(self.real_s)

    @property
    def error(self) -> float:
        """How far the simulated median is from the real one, as a share of the real one."""
        simulated_s, real_s = self.medians_s
        return simulated_s / real_s - 1

    def __str__(self) -> str:
        simulated_s, real_s = self.medians_s
        counts = f"{len(self.simulated_s):>6}{len(self.real_s):>6}"
        return f"{self.what:<44}{counts}{simulated_s:>11.3f}{real_s:>11.3f}{100 * self.error:>+9.1f} %" + (
            "" if self.counted else "  (not counted)"
        )


@dataclass(frozen=True, kw_only=True)
class Likeness:
    """Two runs of one scenario, side by side."""

    simulated: RunResult
    real: RunResult
    rows: list[Row]
    differences: list[str]  # in verdicts, missing work, comings and goings: a sentence each
    bound: float

    @property
    def alike(self) -> bool:
        return not self.differences and not self.apart and any(row.counted for row in self.rows)

    @property
    def apart(self) -> list[Row]:
        """Counted times whose medians are further apart than the bound."""
        return [row for row in self.rows if row.counted and abs(row.error) > self.bound]

    def table(self) -> str:
        """What the terminal shows."""
        head = f"{'time':<44}{'sim n':>6}{'real n':>6}{'sim s':>11}{'real s':>11}{'error':>11}"
        lines = [head, "─" * len(head), *map(str, self.rows), *self.differences]
        counted = sum(row.counted for row in self.rows)
        verdict = f"{counted - len(self.apart)} of {counted} counted medians are within {100 * self.bound:g} %"
        same = "verdicts, missing work, comings and goings are the same"
        return "\n".join([*lines, f"{verdict}; {same if not self.differences else 'the runs differ otherwise'}."])


def compare_worlds(
    scenario: Scenario,
    *,
    name: str,
    seed: int,
    model_path: str,
    runs: Path,
    bound: float = BOUND,
    say: Callable[[str], None] = print,
) -> Likeness:
    """Run `scenario` for real and in virtual time, and compare. Leaves `runs/NAME-real-SEED`, `runs/NAME-sim-SEED`."""
    real = run_processes(scenario, name=f"{name}-real", seed=seed, model_path=model_path, runs=runs, say=say)
    events = list(read_events(real.folder / "events.jsonl"))
    simulated = run_scenario(
        scenario,
        name=f"{name}-sim",
        seed=seed,
        model_path=model_path,
        runs=runs,
        say=say,
        trace=True,
        prices_s=measured_prices(events, [member.name for member in scenario.members()]),
    )
    likeness = compare(scenario, simulated, real, bound)
    say(likeness.table())
    return likeness


def measured_prices(events: Iterable[Event], names: Iterable[str]) -> Prices:
    """What each node's device took in a real run: the median by sort of work; nothing for work that it never did."""
    taken_s: dict[tuple[str, str], list[float]] = defaultdict(list)
    for event in events:
        if event["kind"] == "compute":
            taken_s[event["node"], event["work"]].append((event["end_ns"] - event["start_ns"]) / 1e9)
    prices: dict[str, dict[str, float]] = {name: {} for name in names}
    for (node, work), values in taken_s.items():
        prices.setdefault(node, {})[work] = median(values)
    return prices


def compare(scenario: Scenario, simulated: RunResult, real: RunResult, bound: float = BOUND) -> Likeness:
    """Two runs that are there."""
    events: list[list[Event]] = [list(read_events(run.folder / "events.jsonl")) for run in (simulated, real)]
    differences = []
    if simulated.ended != real.ended:
        differences.append(f"The simulated run ended: {simulated.ended}. The real run ended: {real.ended}.")
    differences += _verdicts_that_differ(*map(verdicts, events))
    differences += _histories_that_differ(*map(history, events))
    rows = [
        Row(what="an assignment, until its last verdict", simulated_s=a, real_s=b, counted=True)
        for a, b in [tuple(list(assignments_s(log).values()) for log in events)]
        if a and b
    ]
    group_of = {member.name: member.group.name for member in scenario.members()}
    shares = {
        (row["waiting"], row["target"], row["message"]): row["network_s"] / row["total_s"] if row["total_s"] else 0.0
        for row in read_json(simulated.folder, "waits.json")["waits"]
    }
    in_sim, in_real = simulated_calls(simulated.folder, group_of), real_calls(real.folder, group_of)
    for key in sorted(in_sim.keys() & in_real.keys()):
        waiting, target, kind = key
        counted = shares.get(key, 0.0) >= NETWORK_SHARE and median(in_sim[key]) >= FLOOR_S
        what = f"{kind}, {waiting} → {target}"
        rows.append(Row(what=what, simulated_s=in_sim[key], real_s=in_real[key], counted=counted))
    return Likeness(simulated=simulated, real=real, rows=rows, differences=differences, bound=bound)


# ---------------------------------------------------------------------------------------------------- what happened
def verdicts(events: list[Event]) -> dict[Slot, tuple[bool, str]]:
    """(worker, assignment, index) -> (accepted, code), the last one where a validator forgot and judged again."""
    worker_of = {event["public_key"]: event["worker"] for event in events if event["kind"] == "registered"}
    return {
        (worker_of[event["public_key"]], event["counter"], event["index"]): (event["accepted"], event["code"])
        for event in events
        if event["kind"] == "judged"
    }


def _verdicts_that_differ(simulated: dict[Slot, Any], real: dict[Slot, Any]) -> list[str]:
    found = []
    for slot in sorted(simulated.keys() | real.keys()):
        a, b = simulated.get(slot), real.get(slot)
        if a != b:
            worker, counter, index = slot
            say = [("never judged" if v is None else f"{'accepted' if v[0] else 'rejected'}, {v[1]}") for v in (a, b)]
            found.append(f"Answer {index} of assignment {counter} of {worker}: simulated {say[0]}; real {say[1]}.")
    return found


def history(events: list[Event]) -> list[tuple[str, str, float]]:
    """Comings, goings and faults: (what, who, when in seconds), those of one instant in the order of their names."""
    found = []
    for event in events:
        if event["kind"] in ("up", "down"):
            found.append((event["kind"], event["node"], event["t_ns"] / 1e9))
        elif event["kind"] == "fault":
            what = f"{event['fault']} {'begins' if event['begins'] else 'ends'}"
            found.append((what, ", ".join(event["on"]), event["t_ns"] / 1e9))
    return sorted(found, key=lambda entry: entry[:2])


def _histories_that_differ(simulated: list[tuple[str, str, float]], real: list[tuple[str, str, float]]) -> list[str]:
    if [entry[:2] for entry in simulated] != [entry[:2] for entry in real]:
        only = [
            f"{who}: {entry[0]} {entry[1]} at {entry[2]:.2f} s"
            for who, here, there in (("simulated", simulated, real), ("real", real, simulated))
            for entry in here
            if entry[:2] not in [other[:2] for other in there]
        ]
        return ["Comings, goings and faults are not the same; " + ("; ".join(only) or "some happened more often") + "."]
    return [
        f"{what} {who}: simulated at {at_s:.2f} s; real at {real_s:.2f} s."
        for (what, who, at_s), (_, _, real_s) in zip(simulated, real, strict=True)
        if not at_s - 0.01 <= real_s <= at_s + COMING_S
    ]


# ------------------------------------------------------------------------------------------------- how long it took
def assignments_s(events: list[Event]) -> dict[tuple[str, int], float]:
    """From an assignment's leaving the orchestrator to the last verdict on it."""
    given_ns = {(event["worker"], event["counter"]): event["t_ns"] for event in events if event["kind"] == "assigned"}
    worker_of = {event["public_key"]: event["worker"] for event in events if event["kind"] == "registered"}
    last_ns: dict[tuple[str, int], int] = {}
    for event in events:
        if event["kind"] == "judged":
            key = (worker_of[event["public_key"]], event["counter"])
            last_ns[key] = max(last_ns.get(key, 0), event["t_ns"])
    return {key: (instant_ns - given_ns[key]) / 1e9 for key, instant_ns in sorted(last_ns.items()) if key in given_ns}


Calls = dict[tuple[str, str, str], list[float]]
"""(calling group, target's group, kind of message) -> seconds of each answered call."""


def simulated_calls(folder: Path, group_of: Mapping[str, str]) -> Calls:
    """Answered calls of a simulated run, from its trace."""
    slices = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in slices if event["name"] == "process_name"}
    found: Calls = defaultdict(list)
    for event in slices:
        if event.get("cat") == "wait" and event["args"]["outcome"] == "answered":
            kind, _, target = event["name"].partition(" at ")
            found[group_of[names[event["pid"]]], group_of[target], kind].append(event["dur"] / 1e6)
    return found


def real_calls(folder: Path, group_of: Mapping[str, str]) -> Calls:
    """Answered calls of a real run, as the wire saw them."""
    found: Calls = defaultdict(list)
    for call in read_calls(folder):
        if call["outcome"] == "answered":
            key = (group_of[call["source"]], group_of[call["target"]], call["kind"])
            found[key].append((call["ended_ns"] - call["begun_ns"]) / 1e9)
    return found
