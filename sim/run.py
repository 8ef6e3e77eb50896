"""One scenario, run in virtual time: nodes on a network, engines on priced devices, and a folder with what happened."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from refimpl.attacks.names import HONEST
from refimpl.swarm import SERVICES, Engines, RealEngines, Seat, SwarmPlan, take_seat
from refimpl.testnet.ledger import LedgerRules
from refimpl.workshop import Agreement
from sim import plots, summary
from sim.calibrated import CalibratedEngines
from sim.carrier import FlowCarrier
from sim.checkers import Violation, as_json
from sim.explain import FINISHED
from sim.fabric import build, journal_for, random_lives
from sim.hardware import find_device
from sim.life import Life
from sim.network import Network
from sim.oversight import Oversight
from sim.progress import Progress
from sim.record import EventLog, read_events
from sim.report import write_report
from sim.scenario import Member, Scenario
from sim.world import SimFabric, SimWorld

BOUNDS = {"paper": (38.0, 10.0, 8.0), "deployed": (60.0, 40.0, 40.0)}  # mismatches, mean, median: for drawing


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder and figures."""

    folder: Path
    rows: list[summary.BehaviourRow]
    figures: dict[str, Any]
    ended: str = FINISHED  # or the sentence that says how it stopped
    violations: tuple[Violation, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it finished and broke no promise."""
        return self.ended == FINISHED and not self.violations


def plan_of(scenario: Scenario, seed: int, model_path: str) -> SwarmPlan:
    """What the scenario's nodes agree on."""
    task, verifier, money = scenario.task, scenario.verifier, scenario.ledger
    names = {role: next(m.name for m in scenario.members() if m.group.role == role) for role in SERVICES}
    return SwarmPlan(
        run_seed=seed,
        agreement=Agreement(
            model_path=model_path,
            dtype=scenario.inference.dtype,
            prompts=task.prompts,
            batch=task.batch,
            answer_tokens_max=task.answer_tokens_max,
            temperature=task.temperature,
            top_k=task.top_k,
            top_p=task.top_p,
            proof_mode=verifier.mode,
        ),
        assignments=task.assignments,
        pause_s=task.pause_s,
        heartbeat_s=task.heartbeat_s,
        mode=verifier.mode,
        thresholds=verifier.thresholds,
        validator_batch=verifier.batch,
        stake=money.stake,
        rules=LedgerRules(
            stake_minimum=money.stake_minimum,
            reward_per_unit=money.reward_per_unit,
            penalty=money.penalty,
            rejections_to_eject=money.rejections_to_eject,
        ),
        ledger=names["ledger"],
        orchestrator=names["orchestrator"],
        validator=names["validator"],
    )


def engines_for(scenario: Scenario, plan: SwarmPlan) -> Engines:
    """The real engine, or for large runs its calibrated stand-in."""
    stand_in = scenario.inference.calibrated
    if stand_in is None:
        return RealEngines(plan.agreement)
    return CalibratedEngines(
        size=stand_in.size,
        table=stand_in.table,
        answer_tokens_median=stand_in.answer_tokens_median,
        answer_tokens_sigma=stand_in.answer_tokens_sigma,
    )


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
) -> RunResult:
    """Run `scenario` and leave `runs/NAME-SEED/` behind, whether it finished, got stuck or broke (`RunResult.ended`).

    `trace`: whether to draw `trace.json`; None: when there are few enough nodes to look at.
    """
    started_s = time.monotonic()
    folder = runs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(scenario, seed, model_path)
    engines = engines_for(scenario, plan)
    log = EventLog(folder / "events.jsonl")
    try:
        fabric, network = build(scenario, seed, log)
        over = Oversight(
            scenario, plan, fabric, network, log, dataset_length=engines.problem_count, trace=trace, folder=folder
        )
        over.over(lambda: _drive(scenario, name, seed, fabric, network, plan, engines, log, progress))
    finally:
        log.close()
    violations = over.violations()
    over.leave({"scenario": scenario.model_dump(mode="json"), "name": name, "seed": seed, "model_path": model_path})
    more = {"ended": over.ended, "checks": as_json(violations)}
    _leave_places(folder, scenario, fabric)
    result = conclude(folder, name, seed, scenario, plan, virtual_s=fabric.now_s(), more=more)
    result = dataclasses.replace(result, ended=over.ended, violations=tuple(violations))
    say(summary.table(result.rows))
    say(headline(result.rows))
    say(f"{len(list(read_events(folder / 'events.jsonl')))} events, {time.monotonic() - started_s:.0f} s: {folder}/")
    for violation in violations:
        say(str(violation))
    if not result.ok:
        say(f"{name} with seed {seed} did not keep its promises; `python -m sim why {folder}` says who waited for whom")
    return result


def _drive(
    scenario: Scenario,
    name: str,
    seed: int,
    fabric: SimFabric,
    network: Network,
    plan: SwarmPlan,
    engines: Any,
    log: EventLog,
    progress: bool,
) -> None:
    """Let every node live and work until the workers have done their part, or the scenario's time is up."""
    members = {member.name: member for member in scenario.members()}
    working = {member.name for member in members.values() if member.group.role not in SERVICES}
    desk = fabric.node("(the run)", lambda work: 0.0)  # on no network: where the run itself waits
    stop, all_done = desk.signal(), desk.signal()
    left = set(working)
    counts = _Counts(working)
    log.listen(counts.event)

    async def part(member: Member, seat: Seat) -> None:
        await take_seat(member.group.role, seat)
        left.discard(member.name)
        if not left:
            all_done.set()

    def start(world: SimWorld, disk_kept: bool) -> None:
        member = members[world.name]
        seat = Seat(
            world=world,
            plan=plan,
            engines=engines,
            stop=stop,
            behaviour=member.group.behaviour,
            journal=journal_for(world),
        )
        world.spawn(part(member, seat), member.group.role)

    async def main() -> None:
        prices = {member.name: find_device(member.group.device).price for member in members.values()}
        life = Life(fabric, network, prices=prices, start=start)
        faults = [(f, [n for name in f.nodes for n in scenario.struck_by(name)]) for f in scenario.faults]
        life.begin(list(members), random_lives(scenario, seed), faults)
        await all_done.wait(scenario.duration_s)
        stop.set()

    total = max(1, len(working) * plan.assignments)

    def share() -> float:
        """How far the run is: by work done or by time gone, whichever ends it sooner."""
        return max(counts["batches"] / total, fabric.now_s() / scenario.duration_s)

    shown = Progress(name, fabric.now_s, share, counts) if progress else nullcontext()
    with shown, _collector_at_rest():
        fabric.run(main(), node=desk.name)


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


class _Counts(Counter[str]):
    """What the progress line shows."""

    def __init__(self, working: set[str]) -> None:
        super().__init__({"up": 0, "batches": 0, "judged": 0, "rejected": 0, "ejected": 0})
        self._working = working

    def event(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "compute" and event["node"] in self._working:
            self["batches"] += 1
        elif kind == "judged":
            self["judged"] += 1
            self["rejected"] += not event["accepted"]
        elif kind == "ejected":
            self["ejected"] += 1
        elif kind in ("up", "down"):
            self["up"] += 1 if kind == "up" else -1


def _leave_places(folder: Path, scenario: Scenario, fabric: SimFabric) -> None:
    """What the report draws beside the events: traffic, and who is where."""
    names = [world.name for world in fabric.by_index]
    traffic = cast(FlowCarrier, fabric.carrier).traffic.as_json(names)
    (folder / "traffic.json").write_text(json.dumps(traffic) + "\n", encoding="utf-8")
    places = [
        {
            "region": member.group.region or "(no region)",
            "role": member.group.role,
            "cheats": member.group.behaviour not in HONEST,
        }
        for member in scenario.members()
    ]
    (folder / "places.json").write_text(json.dumps(places) + "\n", encoding="utf-8")


def conclude(
    folder: Path,
    name: str,
    seed: int,
    scenario: Scenario,
    plan: SwarmPlan,
    *,
    virtual_s: float,
    more: Mapping[str, Any] | None = None,
) -> RunResult:
    """Summary, table and plots from the events in `folder`. `more` goes into the summary as it is."""
    behaviour_of = {m.name: m.group.behaviour for m in scenario.members() if m.group.role == "worker"}
    events = list(read_events(folder / "events.jsonl"))
    rows = summary.behaviour_rows(events, behaviour_of, HONEST, plan.rules.reward_per_unit)
    figures = {
        "scenario": name,
        "seed": seed,
        "title": scenario.title,
        "shows": scenario.shows,
        "virtual_s": virtual_s,
        "behaviour_of": behaviour_of,
        "events": len(events),
        "events_sha256": hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest(),
        "nodes": sum(1 for _ in scenario.members()),
        "detection": summary.detections(rows).as_json(),
        "false_positives": summary.false_positives(rows).as_json(),
        "behaviours": [row.as_json() for row in rows],
        **(more or {}),
        "plan": {**dataclasses.asdict(plan), "agreement": dataclasses.asdict(plan.agreement)},
    }
    (folder / "summary.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    (folder / "table.txt").write_text(summary.table(rows) + "\n" + headline(rows) + "\n", encoding="utf-8")
    plots.plot_scores(
        folder / "scores.png",
        plots.worst_scores(events, behaviour_of),
        HONEST,
        bounds=BOUNDS[plan.thresholds],
        title=name,
    )
    plots.plot_detections(folder / "detections.png", events, behaviour_of, HONEST, name)
    write_report(folder)
    return RunResult(folder, rows, figures)


def headline(rows: list[summary.BehaviourRow]) -> str:
    """The two rates that matter most, in two sentences."""
    cheats = [row for row in rows if not row.honest]
    ejected, nodes = sum(row.ejected for row in cheats), sum(row.nodes for row in cheats)
    missed = [row.behaviour for row in cheats if row.judged and row.rejected == 0]
    caught, wronged = summary.detections(rows), summary.false_positives(rows)
    sentence = (
        f"Of the cheats' submissions {caught} were rejected; {ejected} of {nodes} cheating nodes were ejected.\n"
        f"Of the honest submissions {wronged} were rejected (false positives)."
    )
    return sentence + (f"\nNever caught: {', '.join(missed)}." if missed else "")
