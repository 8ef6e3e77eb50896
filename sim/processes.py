"""A scenario as real processes on this machine: same roles, same network, same lives and faults, same folder it leaves.

Every node is a process (`sim/children.py`), and so is the network between them (`sim/wire.py`). `sim/driver.py` lets
them live and die as the scenario says, a second of it in a second. Workers end by themselves; services are told to.
The run is over when all workers have done their part, at the scenario's end, when a node failed that nobody killed, or
when nobody has got on for a while and nothing is left that could change it; a sentence says which.

Differs from a simulated run: 1) compute takes the time that this machine takes, not that of the scenario's devices;
2) the memory of nodes cannot be looked at from outside, so that checkers judge by events alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sim.checkers import Violation
from sim.children import SwarmFailed, stop_all
from sim.driver import Driver
from sim.explain import FINISHED
from sim.journals import Journals
from sim.kinds.swarm import RESTS, Swarm, begin
from sim.progress import Progress
from sim.real_checks import check_events, checks_json, waits_of_calls, write_waits
from sim.real_models import require_processes
from sim.run import RunResult, conclude
from sim.scenario import Scenario

__all__ = ["SwarmFailed", "run_processes"]

POLL_S = 0.05
STUCK_S = 120.0
"""Nobody getting on for so long, with nothing on the agenda and idle processors, is being stuck."""
IDLE_SHARE = 0.05
"""Of one core: below it, nobody is at work."""
GETTING_ON = frozenset({"registered", "assigned", "generated", "submitted", "judged", "compute", "ejected", "up"})
OPEN_TOLD = 5


def run_processes(
    scenario: Scenario,
    *,
    name: str,
    seed: int,
    model_path: str,
    runs: Path,
    timeout_s: float = 3600.0,
    stuck_s: float = STUCK_S,
    say: Callable[[str], None] = print,
) -> RunResult:
    """Run `scenario` for real and leave `runs/NAME-SEED/` behind, whether it finished or not (`RunResult.ended`).

    Raises ScenarioError for what cannot be done for real, SwarmFailed when a process did not start.
    """
    require_processes(scenario)
    folder = runs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run: there is one when this one is over
    play = begin(scenario, seed, model_path)
    driver = Driver(scenario, play.plan, seed, folder)
    watch = _Watch(scenario, play, driver, timeout_s, stuck_s)
    with Progress(name) as shown:
        try:
            shown.turn_to(f"starting {len(driver.members)} processes")
            driver.prepare()
            driver.begin()
            shown.turn_to("", driver.now_s, watch.share, play.counts)
            ended, open_calls = watch.until_over()
            virtual_s = driver.now_s()
        finally:
            shown.turn_to("stopping processes")
            stop_all(driver.close())
        events = watch.journals.merge(folder / "events.jsonl")
        violations = check_events(scenario, play.plan, events, ended)
        write_waits(folder, waits_of_calls(folder, scenario, events, open_calls, ended, virtual_s))
        more = {"ended": ended, "checks": checks_json(violations), "torn_lines": watch.journals.torn}
        tally, figures = conclude(folder, name, seed, scenario, play, virtual_s=virtual_s, more=more, shown=shown)
    result = RunResult(folder, tally, figures, ended, tuple(violations))
    _tell(result, virtual_s, violations, say)
    return result


def _tell(result: RunResult, virtual_s: float, violations: list[Violation], say: Callable[[str], None]) -> None:
    say(result.tally.table())
    say(f"{virtual_s:.0f} s: {result.folder}/ (a log and a journal per node in nodes/, every call in calls.jsonl)")
    for violation in violations:
        say(str(violation))
    if not result.ok:
        say(f"{result.ended}; `python -m sim why {result.folder}` says who waited for whom")


class _Watch:
    """Over a run: steps the driver, and knows when it is over and why."""

    def __init__(self, scenario: Scenario, play: Swarm, driver: Driver, timeout_s: float, stuck_s: float) -> None:
        self.scenario, self.play, self.driver = scenario, play, driver
        self.timeout_s, self.stuck_s = timeout_s, stuck_s + RESTS * scenario.task.pause_s
        self.journals = Journals(driver.journals)
        self.left = {member.name for member in scenario.members() if member.group.role == scenario.rules.busy}
        self._got_on_s = 0.0
        self._cpu_s: float | None = 0.0  # at that time

    def share(self) -> float:
        """How far the run is: by work done or by time gone, whichever ends it sooner."""
        return max(self.play.share(), self.driver.now_s() / self.scenario.duration_s)

    def until_over(self) -> tuple[str, list[dict[str, Any]]]:
        """FINISHED or the sentence, and the calls that were open then."""
        driver = self.driver
        while True:
            wait_s = driver.step()
            for event in self.journals.fresh():
                self.play.event(event)
                if event["kind"] in GETTING_ON:
                    self._got_on_s, self._cpu_s = driver.now_s(), self._used_s()
            if (ended := self._over()) is not None:
                open_calls = driver.open_calls()
                if ended != FINISHED and open_calls:
                    ended += "; " + "; ".join(_waiting(call) for call in open_calls[:OPEN_TOLD])
                return ended, open_calls
            time.sleep(min(POLL_S, max(0.0, wait_s)))

    def _over(self) -> str | None:
        driver, now_s = self.driver, self.driver.now_s()
        for name, child in driver.children.items():
            code = child.code
            if child.done:
                self.left.discard(name)
            if code is not None and not (child.done and code == 0):
                return f"a task failed: node {name!r} ended with {code}; its last words: {child.last_words()}"
        if driver.wire.code is not None:
            return f"the network ended with {driver.wire.code}; its last words: {driver.wire.last_words()}"
        if not self.left or now_s >= self.scenario.duration_s:
            return FINISHED
        undone = ", ".join(sorted(self.left)[:OPEN_TOLD]) + (" and others" if len(self.left) > OPEN_TOLD else "")
        if now_s >= self.timeout_s:
            return f"after {self.timeout_s:g} s of wall-clock time these workers had not ended: {undone}"
        if not driver.agenda and now_s - self._got_on_s > self.stuck_s and self._idle(now_s):
            return f"stuck: nobody has got on for {now_s - self._got_on_s:.0f} s, and {undone} had not ended"
        return None

    def _idle(self, now_s: float) -> bool:
        """Whether processors were idle since somebody last got on; where the system does not say, they were not."""
        before_s, used_s = self._cpu_s, self._used_s()
        if before_s is None or used_s is None:
            return False
        return used_s - before_s < IDLE_SHARE * (now_s - self._got_on_s)

    def _used_s(self) -> float | None:
        used = [child.cpu_s() for child in self.driver.children.values() if child.code is None]
        known = [seconds for seconds in used if seconds is not None]
        return sum(known) if len(known) == len(used) else None


def _waiting(call: dict[str, Any]) -> str:
    return (
        f"{call['waiting']} has waited {call['waited_s']:.1f} s for {call['target']} to answer {call['message']}: "
        f"{call['reason']}"
    )
