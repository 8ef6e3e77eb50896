"""One scenario, run in virtual time: nodes on a network, engines on priced devices, and a folder with what happened.

Every kind of run goes this one way; what is particular to a kind is its `Play` (`sim/kinds`).
"""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from refimpl.attacks.names import HONEST
from sim.carrier import FlowCarrier
from sim.checkers import Violation
from sim.device_use import DeviceUse
from sim.explain import FINISHED
from sim.fabric import build, random_lives
from sim.flows import warm_up
from sim.hardware import find_device
from sim.kinds import Play, Tally, begin
from sim.life import Life
from sim.network import Network
from sim.oversight import Oversight
from sim.progress import Progress
from sim.record import EventLog, LogReader
from sim.report import write_report
from sim.scenario import Scenario
from sim.world import Pricer, SimFabric, SimWorld

Prices = Mapping[str, Mapping[str, float]]
"""Node -> sort of work, as its class is called -> seconds that one piece takes; 0 for what is not there."""


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder and figures."""

    folder: Path
    tally: Tally
    figures: dict[str, Any]
    ended: str = FINISHED  # or the sentence that says how it stopped
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it finished and broke no promise."""
        return self.ended == FINISHED and not self.violations


def run_scenario(
    scenario: Scenario,
    *,
    name: str,
    seed: int,
    model_path: str,
    runs: Path,
    say: Callable[[str], None] = print,
    trace: bool | None = None,
    progress: bool = True,
    prices_s: Prices | None = None,
) -> RunResult:
    """Run `scenario` and leave `runs/NAME-SEED/` behind, whether it finished, got stuck or broke (`RunResult.ended`).

    `trace`: whether to draw `trace.json`; None: when there are few enough nodes to look at. `prices_s`: what work
    costs on each node instead of what its device's figures say; a replay uses them again. Raises ScenarioError for
    what cannot be run.
    """
    started_s = time.monotonic()
    with Progress(name, shown=progress) as shown:
        shown.turn_to("getting ready")
        play = begin(scenario, seed, model_path)
        folder = runs / f"{name}-{seed}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "summary.json").unlink(missing_ok=True)  # of an earlier run: there is one when this one is over
        shown.turn_to("preparing the flow solver")
        warm_up(say)
        log = EventLog(folder / "events.jsonl")
        try:
            shown.turn_to("making nodes")
            fabric, network = build(scenario, seed, log)
            over = Oversight(scenario, play, fabric, network, log, trace=trace, folder=folder)
            over.over(lambda: _drive(scenario, seed, fabric, network, play, log, shown, prices_s))
        finally:
            log.close()
        shown.turn_to("checking promises")
        virtual_s = fabric.now_s()
        violations = over.violations()
        recorded = {"scenario": scenario.as_plain(), "name": name, "seed": seed, "model_path": model_path}
        over.leave(recorded | ({} if prices_s is None else {"prices_s": prices_s}))
        carrier = cast(FlowCarrier, fabric.carrier)
        _leave_places(folder, scenario, carrier, [world.name for world in fabric.by_index])
        shown.turn_to("looking for what is left")
        violations += over.leaks()
        more = {"bytes_sent": carrier.bytes_sent, "ended": over.ended, "checks": over.checks(violations)}
        tally, figures = conclude(folder, name, seed, scenario, play, virtual_s=virtual_s, more=more, shown=shown)
    result = RunResult(folder, tally, figures, over.ended, tuple(violations))
    say(tally.table())
    say(f"{figures['events']} events, {time.monotonic() - started_s:.0f} s: {folder}/")
    for violation in violations:
        say(str(violation))
    if not result.ok:
        say(f"{name} with seed {seed} did not keep its promises; `python -m sim why {folder}` says who waited for whom")
    return result


def _pricer(by_work_s: Mapping[str, float]) -> Pricer:
    return lambda work: by_work_s.get(type(work).__name__, 0.0)


def _drive(
    scenario: Scenario,
    seed: int,
    fabric: SimFabric,
    network: Network,
    play: Play,
    log: EventLog,
    shown: Progress,
    prices_s: Prices | None,
) -> bool:
    """Let every node live and work until the busy ones have done their part (True), or the scenario's time is up."""
    members = {member.name: member for member in scenario.members()}
    left = {member.name for member in members.values() if member.group.role == scenario.rules.busy}
    desk = fabric.node("(the run)", lambda work: 0.0)  # on no network: where the run itself waits
    stop, all_done = desk.signal(), desk.signal()
    log.listen(play.event)

    async def part(world: SimWorld) -> None:
        await play.seat(members[world.name], world, stop)
        left.discard(world.name)
        if not left:
            all_done.set()

    def start(world: SimWorld, disk_kept: bool) -> None:
        if stop.is_set():  # who comes now comes too late
            return
        world.spawn(part(world), members[world.name].group.role)

    async def main() -> bool:
        prices = {
            name: find_device(member.group.device).price if prices_s is None else _pricer(prices_s.get(name, {}))
            for name, member in members.items()
        }
        life = Life(fabric, network, prices=prices, start=start)
        faults = [(fault, scenario.struck(fault)) for fault in scenario.faults]
        life.begin(list(members), random_lives(scenario, seed), faults)
        done = await all_done.wait(scenario.duration_s)
        stop.set()
        busy = (world for world in fabric.by_index if world.name in members and world.alive)
        return done and not any(task.label == scenario.rules.busy for world in busy for task in world.tasks)

    def share() -> float:
        """How far the run is: by work done or by time gone, whichever ends it sooner."""
        return max(play.share(), fabric.now_s() / scenario.duration_s)

    shown.turn_to("", fabric.now_s, share, play.counts)
    with _collector_at_rest():
        return fabric.run(main(), node=desk.name)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """A run makes millions of short-lived objects beside hundreds of thousands that stay. The collector leaves those
    that are there now alone, and looks at the others less often."""
    before = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _leave_places(folder: Path, scenario: Scenario, carrier: FlowCarrier, names: list[str]) -> None:
    """What the report draws beside the events: traffic, and who is where."""
    _write(folder / "traffic.json", carrier.traffic.as_json(names))
    places = [
        {
            "region": member.group.region or "(no region)",
            "role": member.group.role,
            "cheats": member.group.behaviour not in HONEST,
        }
        for member in scenario.members()
    ]
    _write(folder / "places.json", places)


def _write(path: Path, content: Any, indent: int | None = None) -> None:
    path.write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")


def conclude(
    folder: Path,
    name: str,
    seed: int,
    scenario: Scenario,
    play: Play,
    *,
    virtual_s: float,
    more: Mapping[str, Any] | None = None,
    shown: Progress | None = None,
) -> tuple[Tally, dict[str, Any]]:
    """Summary, table, plots and report from the events in `folder`, which are read once. `more` goes into the summary
    as it is."""
    shown = shown or Progress(name, shown=False)
    tally, devices, log = play.tally(name), DeviceUse(), LogReader(folder / "events.jsonl")
    shown.turn_to("reading the log", done_share=log.share)
    for event in log:
        tally.event(event)
        devices.event(event)
    shown.turn_to("writing figures")
    figures = {
        "scenario": name,
        "kind": scenario.kind,
        "seed": seed,
        "title": scenario.title,
        "shows": scenario.shows,
        "virtual_s": virtual_s,
        "events": log.count,
        "events_sha256": log.sha256,
        "nodes": sum(1 for _ in scenario.members()),
        **tally.figures(),
        **(more or {}),
        "plan": play.agreed(),
    }
    _write(folder / "devices.json", devices.as_json())
    _write(folder / "page.json", tally.page())
    _write(folder / "summary.json", figures, indent=2)
    (folder / "table.txt").write_text(tally.table() + "\n", encoding="utf-8")
    shown.turn_to("drawing plots")
    tally.draw(folder)
    shown.turn_to("writing the report")
    write_report(folder)
    return tally, figures
