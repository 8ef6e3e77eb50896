"""One scenario, run in virtual time: nodes on a network, engines on priced devices, and a folder with what happened."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from refimpl.attacks.names import HONEST
from refimpl.swarm import SERVICES, RealEngines, Seat, SwarmPlan, take_seat
from refimpl.testnet.ledger import LedgerRules
from refimpl.workshop import Agreement
from refimpl.world import derive_rng
from sim import plots, summary
from sim.carrier import FlowCarrier
from sim.hardware import find_device
from sim.kernel import SECOND_NS
from sim.network import Network
from sim.progress import Progress
from sim.record import EventLog, read_events
from sim.scenario import Member, Scenario
from sim.world import SimFabric, SimWorld

BOUNDS = {"paper": (38.0, 10.0), "deployed": (60.0, 40.0)}  # mismatches and mean error, for drawing


@dataclass(frozen=True)
class RunResult:
    """A finished run: its folder and figures."""

    folder: Path
    rows: list[summary.BehaviourRow]
    figures: dict[str, Any]


def plan_of(scenario: Scenario, seed: int, model_path: str) -> SwarmPlan:
    """What the scenario's nodes agree on."""
    task, verifier, money = scenario.task, scenario.verifier, scenario.ledger
    names = {role: next(m.name for m in scenario.members() if m.group.role == role) for role in SERVICES}
    return SwarmPlan(
        run_seed=seed,
        agreement=Agreement(
            model_path=model_path,
            dtype=scenario.model.dtype,
            prompts=task.prompts,
            batch=task.batch,
            answer_tokens_max=task.answer_tokens_max,
            temperature=task.temperature,
            top_k=task.top_k,
            top_p=task.top_p,
        ),
        assignments=task.assignments,
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


def journal_for(world: SimWorld) -> Callable[..., None]:
    """The node's journal: the fabric's log with the node's name."""

    def journal(kind: str, /, **fields: Any) -> None:
        world.fabric.record(kind, world.name, **fields)

    return journal


def build_fabric(scenario: Scenario, seed: int, log: EventLog) -> SimFabric:
    """The scenario's nodes on its network."""
    network = Network(regions=scenario.network.regions, jitter_ms=scenario.network.jitter_ms)
    fabric = SimFabric(
        run_seed=seed,
        carrier=lambda kernel: FlowCarrier(kernel, network, derive_rng(seed, "network")),
        recorder=log,
    )
    for member in scenario.members():
        group = member.group
        world = fabric.node(member.name, find_device(group.device).price)
        index = network.add_node(
            region=group.region,
            uplink_mbit_s=group.uplink_mbit_s,
            downlink_mbit_s=group.downlink_mbit_s,
            latency_ms=group.latency_ms,
        )
        assert index == world.index
    return fabric


def run_scenario(
    scenario: Scenario, *, name: str, seed: int, model_path: str, runs: Path, say: Callable[[str], None] = print
) -> RunResult:
    """Run `scenario` and leave `runs/NAME-SEED/` behind."""
    started_s = time.monotonic()
    folder = runs / f"{name}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    plan = plan_of(scenario, seed, model_path)
    engines = RealEngines(plan.agreement)
    log = EventLog(folder / "events.jsonl")
    try:
        fabric = build_fabric(scenario, seed, log)
        _drive(scenario, name, fabric, plan, engines, log)
    finally:
        log.close()
    result = conclude(folder, name, seed, scenario, plan, virtual_s=fabric.kernel.now / SECOND_NS)
    say(summary.table(result.rows))
    say(headline(result.rows))
    say(f"{len(list(read_events(folder / 'events.jsonl')))} events, {time.monotonic() - started_s:.0f} s: {folder}/")
    return result


def _drive(scenario: Scenario, name: str, fabric: SimFabric, plan: SwarmPlan, engines: Any, log: EventLog) -> None:
    """Seat every node and run until the workers have ended, or the scenario's time is up."""
    members = list(scenario.members())
    workers = [member for member in members if member.group.role not in SERVICES]
    first = fabric.nodes[members[0].name]
    stop, ended = first.signal(), first.signal()
    left = len(workers)
    counts: Counter[str] = Counter({"batches": 0, "judged": 0, "rejected": 0, "ejected": 0})
    busy = {member.name for member in workers}

    def count(event: dict[str, Any]) -> None:
        if event["kind"] == "compute" and event["node"] in busy:
            counts["batches"] += 1
        elif event["kind"] == "judged":
            counts["judged"] += 1
            counts["rejected"] += not event["accepted"]
        elif event["kind"] == "ejected":
            counts["ejected"] += 1

    log.listen(count)

    def seat(member: Member) -> Coroutine[Any, Any, None]:
        world = fabric.nodes[member.name]
        return take_seat(
            member.group.role,
            Seat(
                world=world,
                plan=plan,
                engines=engines,
                stop=stop,
                behaviour=member.group.behaviour,
                journal=journal_for(world),
            ),
        )

    async def work(member: Member) -> None:
        nonlocal left
        try:
            await seat(member)
        finally:
            left -= 1
            if left == 0:
                ended.set()

    async def main() -> None:
        for member in members:
            world = fabric.nodes[member.name]
            if member.group.role in SERVICES:
                world.spawn(seat(member), member.group.role)
            else:
                world.spawn(work(member), member.group.role)
        await ended.wait(scenario.duration_s)
        stop.set()

    progress = Progress(name, first.now, lambda: counts["batches"] / (len(workers) * plan.assignments), counts)
    with progress:
        fabric.run(main(), node=first.name)


def conclude(folder: Path, name: str, seed: int, scenario: Scenario, plan: SwarmPlan, *, virtual_s: float) -> RunResult:
    """Summary, table and plots from the events in `folder`."""
    behaviour_of = {m.name: m.group.behaviour for m in scenario.members() if m.group.role == "worker"}
    events = list(read_events(folder / "events.jsonl"))
    rows = summary.behaviour_rows(events, behaviour_of, HONEST, plan.rules.reward_per_unit)
    figures = {
        "scenario": name,
        "seed": seed,
        "title": scenario.title,
        "shows": scenario.shows,
        "virtual_s": virtual_s,
        "events": len(events),
        "events_sha256": hashlib.sha256((folder / "events.jsonl").read_bytes()).hexdigest(),
        "nodes": sum(1 for _ in scenario.members()),
        "detection": summary.detections(rows).as_json(),
        "false_positives": summary.false_positives(rows).as_json(),
        "behaviours": [row.as_json() for row in rows],
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
