"""A scenario as real processes on this machine, over HTTP with shaped lines: same roles, same folder of results.

Every node is a process. They start together when all listen, workers end by themselves, services are then told to stop.
A node that fails, or a run that outlives its time, ends all, and the sentence says which.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from refimpl.swarm import SERVICES, SwarmPlan
from sim.kinds.swarm import begin
from sim.progress import Progress
from sim.regions import region_set
from sim.run import RunResult, conclude
from sim.scenario import Member, Scenario, ScenarioError

NODES_MAX = 64  # processes that one machine is asked to run
START_S = 600.0  # loading a model in many processes at once on a busy machine
POLL_S = 0.1


class SwarmFailed(ScenarioError):
    """A node failed, or the run did not end in time. Takes exactly one argument: the sentence."""


@dataclasses.dataclass
class _Child:
    """One node's process and its files."""

    member: Member
    process: subprocess.Popen[str]
    log: IO[str]
    journal: Path
    url: str = ""

    @property
    def name(self) -> str:
        return self.member.name


def line_of(scenario: Scenario, member: Member) -> dict[str, float]:
    """The node's access line. Between processes, half of the mean distance to the other regions is added to it."""
    group = member.group
    latency_ms = group.latency_ms
    if scenario.network.regions is not None and group.region is not None:
        regions = region_set(scenario.network.regions)
        others = [m.group.region for m in scenario.members() if m.name != member.name and m.group.region is not None]
        if others:
            # a message pays both ends' lines, so each end carries a half of the one-way time, a quarter of the trip
            latency_ms += sum(regions.rtt_ms(group.region, other) for other in others) / len(others) / 4
    return {
        "uplink_mbit_s": group.uplink_mbit_s,
        "downlink_mbit_s": group.downlink_mbit_s,
        "latency_ms": latency_ms,
    }


def run_processes(
    scenario: Scenario,
    *,
    name: str,
    seed: int,
    model_path: str,
    runs: Path,
    timeout_s: float = 3600.0,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Run `scenario` for real and leave `runs/NAME-SEED/` behind. Raises SwarmFailed."""
    members = list(scenario.members())
    if len(members) > NODES_MAX:
        raise ScenarioError(f"{name} has {len(members)} nodes; a machine is asked to run {NODES_MAX} processes at most")
    folder = runs / f"{name}-{seed}"
    (folder / "nodes").mkdir(parents=True, exist_ok=True)
    play = begin(scenario, seed, model_path)
    plan = play.plan
    children: list[_Child] = []
    try:
        say(f"starting {len(members)} processes")
        for member in members:
            children.append(_start(scenario, member, plan, folder, len(members)))
        listening_s = time.monotonic() + START_S
        for child in children:
            _await_url(child, listening_s)
        say("all listen; the run begins")
        started_s = time.monotonic()
        order = json.dumps({"book": {child.name: child.url for child in children}, "started_s": started_s})
        for child in children:
            assert child.process.stdin is not None
            child.process.stdin.write(order + "\n")
            child.process.stdin.flush()
        _await_workers(name, children, plan, started_s, timeout_s)
    finally:
        _stop(children)
    _merge(children, folder / "events.jsonl")
    tally, figures = conclude(folder, name, seed, scenario, play, virtual_s=time.monotonic() - started_s)
    say(tally.table())
    say(f"{time.monotonic() - started_s:.0f} s: {folder}/ (a log and a journal per node in nodes/)")
    return RunResult(folder, tally, figures)


def _start(scenario: Scenario, member: Member, plan: SwarmPlan, folder: Path, processes: int) -> _Child:
    base = folder / "nodes" / member.name
    journal = base.with_suffix(".jsonl")
    journal.unlink(missing_ok=True)
    config = {
        "name": member.name,
        "role": member.group.role,
        "behaviour": member.group.behaviour,
        "line": line_of(scenario, member),
        "journal": str(journal),
        "processes": processes,
        "plan": dataclasses.asdict(plan),
    }
    path = base.with_suffix(".json")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    log = base.with_suffix(".log").open("w", encoding="utf-8")
    process = subprocess.Popen(
        [sys.executable, "-m", "refimpl.node", str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    return _Child(member, process, log, journal)


def _await_url(child: _Child, until_s: float) -> None:
    stdout = child.process.stdout
    assert stdout is not None
    if not select.select([stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
        raise SwarmFailed(f"node {child.name!r} did not listen within {START_S:g} s; {_last_words(child)}")
    line = stdout.readline()
    try:
        child.url = json.loads(line)["url"]
    except (ValueError, KeyError, TypeError):
        raise SwarmFailed(f"node {child.name!r} did not start; its last words: {_last_words(child)}") from None


def _await_workers(name: str, children: list[_Child], plan: SwarmPlan, started_s: float, timeout_s: float) -> None:
    workers = [child for child in children if child.member.group.role not in SERVICES]
    validator = next(child for child in children if child.name == plan.validator)
    expected = max(1, len(workers) * plan.assignments * plan.agreement.batch)
    counts: Counter[str] = Counter({"judged": 0, "working": len(workers)})

    def share() -> float:
        if validator.journal.exists():
            counts["judged"] = validator.journal.read_text(encoding="utf-8").count('"kind":"judged"')
        return counts["judged"] / expected

    with Progress(name, lambda: time.monotonic() - started_s, share, counts):
        while any(child.process.poll() is None for child in workers):
            counts["working"] = sum(child.process.poll() is None for child in workers)
            for child in children:
                code = child.process.poll()
                if code not in (None, 0) or (code == 0 and child not in workers):
                    raise SwarmFailed(f"node {child.name!r} ended with {code}; its last words: {_last_words(child)}")
            if time.monotonic() - started_s > timeout_s:
                busy = ", ".join(child.name for child in workers if child.process.poll() is None)
                raise SwarmFailed(f"after {timeout_s:g} s these workers had not ended: {busy}")
            time.sleep(POLL_S)
    for child in workers:
        if child.process.returncode:
            raise SwarmFailed(f"node {child.name!r} failed; its last words: {_last_words(child)}")


def _stop(children: list[_Child]) -> None:
    """End of input first, then the signals that no process can sleep through. Never raises."""
    for child in children:
        if child.process.stdin is not None:
            with contextlib.suppress(OSError):
                child.process.stdin.close()
    for end in (lambda process: None, lambda process: process.terminate(), lambda process: process.kill()):
        for child in children:
            if child.process.poll() is None:
                end(child.process)
        deadline_s = time.monotonic() + 10.0
        for child in children:
            try:
                child.process.wait(max(0.1, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                continue
    for child in children:
        child.log.close()
        if child.process.stdout is not None:
            child.process.stdout.close()


def _last_words(child: _Child) -> str:
    child.log.flush()
    text = Path(child.log.name).read_text(encoding="utf-8", errors="replace").strip()
    return text[-600:] or "(none)"


def _merge(children: list[_Child], path: Path) -> None:
    """All journals as one log, by time, then node, then place."""
    records: list[tuple[int, str, int, dict[str, Any]]] = []
    for child in children:
        if child.journal.exists():
            for place, line in enumerate(child.journal.read_text(encoding="utf-8").splitlines()):
                record = json.loads(line)
                records.append((record["t_ns"], child.name, place, record))
    records.sort(key=lambda entry: entry[:3])
    with path.open("w", encoding="utf-8") as out:
        for *_, record in records:
            out.write(json.dumps(record, separators=(",", ":")) + "\n")
