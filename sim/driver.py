"""Makes nodes live for real: starts processes, kills, stops and slows them, and breaks their lines, as `sim/course.py`
says, with wall-clock time for the scenario's.

    crash, leave, restart   SIGKILL; the journal stays, and so does the disk's folder unless the disk is lost
    return                  a process that was started ahead of time begins at the instant
    hang                    SIGSTOP and SIGCONT
    slow, clock_skew        an order to the node: its device sleeps on, its clock runs ahead
    link, partition         an order to the wire
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from refimpl.swarm import SERVICES, SwarmPlan
from sim.children import START_S, Child
from sim.course import Course, Happening, Standing
from sim.fabric import random_lives
from sim.faults import FaultPart
from sim.scenario import Member, Scenario, ScenarioError

AHEAD_S = 60.0
"""A process that is to begin is started so long before: importing and loading takes seconds."""
SETTLE_S = 0.5
"""Services begin so long before the run's first instant: nobody may call one that does not serve yet."""
NODES_MAX = 64  # processes that one machine is asked to run
DRIVER = "(driver)"
NODE = "refimpl.node"  # the module that is a node


def cannot_be_real(scenario: Scenario) -> str | None:
    """Why a scenario cannot run as processes on this machine, in one sentence; None when it can."""
    count = sum(1 for _ in scenario.members())
    if count > NODES_MAX:
        return f"the scenario has {count} nodes; a machine is asked to run {NODES_MAX} processes at most"
    if scenario.network.transport == "lv08":
        return "network.transport is 'lv08', a model of TCP to compare with SimGrid; real lines: 'fair' or 'tcp'"
    for place, fault in enumerate(scenario.faults):
        if fault.kind == "disk_full":
            return f"fault {place} fills a disk; that would fill this machine's, and is only simulated"
        if fault.kind == "slow" and (fault.slowness or 1.0) < 1.0:
            return (
                f"fault {place} has slowness {fault.slowness}; a real device can be made slower (above 1), not faster"
            )
    return None


class Driver:
    """`sim.course.Hands` on processes. `prepare()`, `begin()`, then `step()` until the run is over."""

    def __init__(self, scenario: Scenario, plan: SwarmPlan, seed: int, folder: Path) -> None:
        if (sentence := cannot_be_real(scenario)) is not None:
            raise ScenarioError(sentence)
        self.scenario, self.plan, self.seed = scenario, plan, seed
        self.nodes_folder = folder / "nodes"
        self.members = {member.name: member for member in scenario.members()}
        self.children: dict[str, Child] = {}  # up, or about to be
        self.coming: dict[str, bool] = {}  # of these, those that do not listen yet; whether they find their disk
        self.dying: dict[str, Child] = {}  # killed; to be waited for when there is time
        self.firsts: dict[str, Child] = {}  # ready to begin at the first instant
        self.spares: dict[str, Child] = {}  # ready, or soon, to begin when their nodes come
        self.started_s = 0.0
        faults = [(fault, scenario.struck(fault)) for fault in scenario.faults]
        self.course = Course(list(self.members), random_lives(scenario, seed), faults, self)
        self.agenda: list[Happening] = sorted(self.course.agenda(), key=lambda happening: happening.time_ns)
        shutil.rmtree(self.nodes_folder, ignore_errors=True)  # of an earlier run
        self.nodes_folder.mkdir(parents=True)
        self.journals = {name: self.nodes_folder / f"{name}.jsonl" for name in [DRIVER, *self.members]}
        self._record = self.journals[DRIVER].open("w", encoding="utf-8")
        config = {"scenario": scenario.as_plain(), "seed": seed, "log": str(folder / "calls.jsonl")}
        self.wire = Child("(wire)", "sim.wire", config, self.nodes_folder / "(wire)")

    # ----------------------------------------------------------------------------------------------------- the start
    def prepare(self) -> None:
        """Start all that is to be there at the first instant or soon after, and wait until it listens."""
        for name, standing in self.course.standing.items():
            if standing.up:
                self.firsts[name] = self._start(name)
        self._start_ahead(0.0)
        until_s = time.monotonic() + START_S
        for child in [self.wire, *self.firsts.values(), *self.spares.values()]:
            child.listens(until_s - time.monotonic())

    def begin(self) -> None:
        """The run's first instant."""
        self.started_s = time.monotonic() + SETTLE_S
        self.wire.say({"started_s": self.started_s})
        first = [name for name, member in self.members.items() if member.group.role in SERVICES]
        for name in first:
            self.course.settle(name)
        time.sleep(max(0.0, self.started_s - time.monotonic()))
        for name in self.members:
            if name not in first:
                self.course.settle(name)

    def now_s(self) -> float:
        """Seconds since the first instant."""
        return time.monotonic() - self.started_s

    def close(self) -> list[Child]:
        """No more is to happen. Returns every process that may be left."""
        self._record.close()
        return [*self.children.values(), *self.dying.values(), *self.firsts.values(), *self.spares.values(), self.wire]

    # ------------------------------------------------------------------------------------------------------- the run
    def step(self) -> float:
        """Do all that is due. Returns the seconds until the next thing is."""
        while self.agenda and self.agenda[0].time_ns <= self.now_s() * 1e9:
            self.agenda.pop(0).act()
        for name in list(self.coming):
            if self.children[name].listens():
                self._seat(name)
        for name in [name for name, child in self.dying.items() if child.code is not None]:
            self.dying.pop(name).bury()
        for name, child in self.children.items():
            if name not in self.coming and (said := child.hears()) is not None:
                child.done = child.done or "done" in said
        self._start_ahead(self.now_s())
        return self.agenda[0].time_ns / 1e9 - self.now_s() if self.agenda else float("inf")

    def _start_ahead(self, now_s: float) -> None:
        for happening in self.agenda:
            if happening.time_ns / 1e9 > now_s + AHEAD_S:
                return
            for name in happening.brings_up:
                if name not in self.spares:
                    self.spares[name] = self._start(name)

    def open_calls(self) -> list[dict[str, Any]]:
        """Who waits for whom now, oldest first."""
        self.wire.say({"ask": "open"})
        answer = self.wire.hears(5.0)
        return list(answer["open"]) if answer else []

    # ------------------------------------------------------------------------------------------------------- hands
    def is_up(self, name: str) -> bool:
        return name in self.children

    def bring_up(self, name: str, standing: Standing, disk_kept: bool) -> None:
        if name in self.dying:
            self.dying.pop(name).bury()
        disk = self._disk(name)
        if not disk_kept:
            shutil.rmtree(disk, ignore_errors=True)
        disk.mkdir(exist_ok=True)
        child = self.firsts.pop(name, None) or self.spares.pop(name, None) or self._start(name)
        self.children[name] = child
        self.coming[name] = disk_kept
        if self.children[name].listens():
            self._seat(name)

    def take_down(self, name: str, why: str) -> None:
        child = self.dying[name] = self.children.pop(name)
        child.kill()
        self.wire.say({"at": {name: None}})
        if self.coming.pop(name, None) is None:  # else it never was up
            self.record("down", name, why=why)

    def ail(self, name: str, standing: Standing) -> None:
        child = self.children[name]
        if name in self.coming:
            return  # told when it begins
        child.say({"slowness": standing.slowness, "skew_s": standing.skew_s})
        child.halt(standing.has("hang"))

    def strike_lines(self, place: int, fault: FaultPart, struck: Sequence[str], begins: bool) -> None:
        self.wire.say({"fault": place, "begins": begins})

    def record(self, kind: str, node: str, **fields: Any) -> None:
        event = {"t_ns": max(0, round(self.now_s() * 1e9)), "kind": kind, "node": node, **fields}
        self._record.write(json.dumps(event, separators=(",", ":")) + "\n")
        self._record.flush()

    # -------------------------------------------------------------------------------------------------- one process
    def _disk(self, name: str) -> Path:
        return self.nodes_folder / f"{name}.disk"

    def _start(self, name: str) -> Child:
        member: Member = self.members[name]
        config = {
            "name": name,
            "role": member.group.role,
            "behaviour": member.group.behaviour,
            "journal": str(self.journals[name]),
            "disk": str(self._disk(name)),
            "processes": len(self.members),
            "plan": dataclasses.asdict(self.plan),
        }
        return Child(name, NODE, config, self.nodes_folder / name)

    def _seat(self, name: str) -> None:
        """The node begins; from when it serves on, calls reach it."""
        child = self.children[name]
        self.record("up", name, disk_kept=self.coming.pop(name))
        book = {other: f"{self.wire.url}/to/{other}" for other in self.members} | {name: child.url}
        child.say({"book": book, "started_s": self.started_s, "tell": True})
        if child.hears(START_S) is not None:
            self.wire.say({"at": {name: child.url}})
        standing = self.course.standing[name]
        if standing.faults:
            self.ail(name, standing)
