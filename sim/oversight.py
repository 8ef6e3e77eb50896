"""Why: a run must leave a complete folder whether it finished, got stuck or broke; this watches over it and writes.

It puts the watch and the checkers' facts beside a fabric, turns the ways in which a run can end into a sentence, and
leaves `waits.json`, `trace.json`, `replay.json` and, when something broke, `failure.txt`.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from pathlib import Path

from refimpl.swarm import SERVICES, SwarmPlan
from refimpl.world import TaskFailed
from sim.checkers import Bounds, View, Violation, check
from sim.explain import FINISHED
from sim.facts import Facts
from sim.network import Network
from sim.record import EventLog
from sim.scenario import Scenario
from sim.trace import Trace
from sim.waits import waits_json
from sim.watch import Watch
from sim.world import SimFabric, Stuck

TRACED_NODES_MAX = 200
"""Scenarios of up to so many nodes are traced unless told otherwise."""
HEARTBEATS_WATCHED_MAX = 2000
"""In larger scenarios heartbeats are not among the waits."""
RESTS = 20.0
"""A rest between assignments is exponential: one of so many means has a chance of exp(-20), 2e-9. Part of the bound of
a worker's progress."""


class Oversight:
    """Over one run of one scenario."""

    def __init__(
        self,
        scenario: Scenario,
        plan: SwarmPlan,
        fabric: SimFabric,
        network: Network,
        log: EventLog,
        *,
        folder: Path,
        dataset_length: int,
        trace: bool | None = None,
    ) -> None:
        """`folder`: where the run leaves its files. `trace`: whether to draw one; None: for up to TRACED_NODES_MAX
        nodes."""
        self.folder = folder
        for name in ("trace.json", "failure.txt"):  # of an earlier run: not every run leaves them
            (folder / name).unlink(missing_ok=True)
        self.fabric = fabric
        self.ended = FINISHED
        self.failure = ""
        members = list(scenario.members())
        wanted = len(members) <= TRACED_NODES_MAX if trace is None else trace
        self.trace = Trace(lambda s, t, r: network.path(s, t, reply=r).one_way_latency_s) if wanted else None
        groups = {member.name: member.group.name for member in members}
        fabric.watch = self.watch = Watch(lambda name: groups.get(name, name), self.trace)
        if len(groups) > HEARTBEATS_WATCHED_MAX:  # most of what a large run does, and nobody waits for them
            self.watch.passed_over = frozenset({"Heartbeat"})
        facts = Facts(
            workers={member.name for member in members if member.group.role == "worker"},
            services={member.name for member in members if member.group.role in SERVICES},
            validator=plan.validator,
            dataset_length=dataset_length,
            batch=plan.agreement.batch,
        )
        log.listen(facts.event)
        facts.tap(self.watch)
        bounds = Bounds(progress_s=Bounds.progress_s + RESTS * scenario.task.pause_s)
        self.view = View(fabric=fabric, facts=facts, rules=plan.rules, ledger=plan.ledger, bounds=bounds)

    def over(self, run: Callable[[], object]) -> None:
        """Do `run`; when it gets stuck or a task fails, keep the sentence instead of raising."""
        try:
            run()
        except Stuck as stuck:
            self.ended = f"stuck: {stuck}"
        except TaskFailed as failed:
            self.ended = f"a task failed: {failed}"
            self.failure = traceback.format_exc()

    def violations(self) -> list[Violation]:
        """What is broken now. Being stuck is."""
        found = check(self.view)
        if self.ended.startswith("stuck"):
            found.insert(0, Violation("liveness", "run_ends", self.ended))
        return found

    def leave(self, recorded: dict[str, object]) -> None:
        """Write what only the fabric knows. `recorded` is what a replay needs."""
        folder = self.folder
        waits = waits_json(self.fabric, self.watch, self.ended)
        (folder / "waits.json").write_text(json.dumps(waits, indent=1) + "\n", encoding="utf-8")
        (folder / "replay.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        if self.trace is not None:
            self.trace.write(folder / "trace.json")
        if self.failure:
            (folder / "failure.txt").write_text(self.failure, encoding="utf-8")
        for world in self.fabric.by_index:  # what was under way when the run ended is never gone on with
            for task in list(world.tasks):
                task.kill()
