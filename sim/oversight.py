"""Why: a run must leave a complete folder whether it finished, got stuck or broke; this watches over it and writes.

It puts the watch and the checkers' facts beside a fabric, turns the ways in which a run can end into a sentence, and
leaves `waits.json`, `trace.json`, `replay.json` and, when something broke, `failure.txt`.
"""

from __future__ import annotations

import dataclasses
import json
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from refimpl.world import TaskFailed
from sim.checkers import Violation, as_json, check
from sim.explain import FINISHED
from sim.kinds import Play
from sim.leaks import LAST
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
NOTHING_HAPPENED = "nothing ever happened"


class Oversight:
    """Over one run of one scenario."""

    def __init__(
        self,
        scenario: Scenario,
        play: Play,
        fabric: SimFabric,
        network: Network,
        log: EventLog,
        *,
        folder: Path,
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
        groups = {member.name: member.group.name for member in scenario.members()}
        wanted = len(groups) <= TRACED_NODES_MAX if trace is None else trace
        self.trace = Trace(lambda s, t, r: network.path(s, t, reply=r).one_way_latency_s) if wanted else None
        fabric.watch = self.watch = Watch(lambda name: groups.get(name, name), self.trace)
        if len(groups) > HEARTBEATS_WATCHED_MAX:  # most of what a large run does, and nobody waits for them
            self.watch.passed_over = frozenset({"Heartbeat"})
        self.view = play.view(fabric, self.watch)
        log.listen(self.view.facts.event)

    def over(self, run: Callable[[], bool]) -> None:
        """Do `run`, which says whether every part was done; when it gets stuck or a task fails, keep the sentence
        instead of raising."""
        all_done = False
        try:
            all_done = run()
        except Stuck as stuck:
            self.ended = f"stuck: {stuck}"
        except TaskFailed as failed:
            self.ended = f"a task failed: {failed}"
            self.failure = traceback.format_exc()
        self.view = dataclasses.replace(self.view, over=True, all_done=all_done)

    def violations(self) -> list[Violation]:
        """What is broken now. Being stuck is, and so is a run in which nothing happened."""
        found = check(self.view)
        if self.ended.startswith("stuck"):
            found.insert(0, Violation("liveness", "run_ends", self.ended))
        if self.ended == FINISHED:
            self.ended = next((v.sentence for v in found if v.sentence.startswith(NOTHING_HAPPENED)), FINISHED)
        return found

    def leave(self, recorded: dict[str, object]) -> None:
        """Write what only the fabric knows. `recorded` is what a replay needs."""
        folder = self.folder
        waits = waits_json(self.fabric, self.watch, self.ended)
        (folder / "waits.json").write_text(json.dumps(waits, indent=1) + "\n", encoding="utf-8")
        (folder / "replay.json").write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
        if self.trace is not None:
            self.trace.write(folder / "trace.json")
            self.watch.trace = self.trace = None
        if self.failure:
            (folder / "failure.txt").write_text(self.failure, encoding="utf-8")

    def leaks(self) -> list[Violation]:
        """Take everything down, and say what is left of it. Comes last: the fabric is of no use after it."""
        if self.ended != FINISHED:  # it stopped in the middle, with reason: what it was at is in `waits.json`
            for world in self.fabric.by_index:
                for task in list(world.tasks):
                    task.kill()
            return []
        return check(self.view, LAST)

    def checks(self, violations: list[Violation]) -> list[dict[str, Any]]:
        """Every promise, and how it was broken, for `summary.json`."""
        return as_json(self.view.checkers + LAST, violations)
