"""Why: the swarm of `refimpl/swarm.py` as a run: workers who generate, a validator who judges, and money."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from refimpl.arena.economics import Stakes
from refimpl.attacks.names import HONEST
from refimpl.swarm import SERVICES, Engines, RealEngines, Seat, SwarmPlan, take_seat
from refimpl.testnet.ledger import LedgerRules
from refimpl.workshop import Agreement
from refimpl.world import Signal
from sim.calibrated import CalibratedEngines
from sim.fabric import journal_for
from sim.kinds.swarm_checks import Bounds, SwarmView
from sim.kinds.swarm_facts import SwarmFacts
from sim.kinds.swarm_money import PAY, Money, money, saved_share
from sim.plots import Detections, Scores
from sim.scenario import Member, Scenario
from sim.summary import BehaviourRow, Behaviours, detections, false_positives, percent, table
from sim.watch import Watch
from sim.world import SimFabric, SimWorld

BOUNDS = {"paper": (38.0, 10.0, 8.0), "deployed": (60.0, 40.0, 40.0)}  # mismatches, mean, median: for drawing
RESTS = 20.0
"""A rest between assignments is exponential: one of so many means has a chance of exp(-20), 2e-9."""


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
        margin_max=verifier.margin_max,
        end_probability_min=verifier.end_probability_min,
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


class Swarm:
    """`sim.kinds.Play` of a swarm."""

    def __init__(self, scenario: Scenario, plan: SwarmPlan) -> None:
        self.scenario, self.plan = scenario, plan
        self.counts: Counter[str] = Counter({"up": 0, "batches": 0, "judged": 0, "rejected": 0, "ejected": 0})
        self._working = {member.name for member in scenario.members() if member.group.role == "worker"}
        self._total = max(1, len(self._working) * plan.assignments)

    @cached_property
    def engines(self) -> Any:
        """Made when first asked for: real processes make their own."""
        return engines_for(self.scenario, self.plan)

    def event(self, event: Mapping[str, Any]) -> None:
        kind, counts = event["kind"], self.counts
        if kind == "compute" and event["node"] in self._working:
            counts["batches"] += 1
        elif kind == "judged":
            counts["judged"] += 1
            counts["rejected"] += not event["accepted"]
        elif kind == "ejected":
            counts["ejected"] += 1
        elif kind in ("up", "down"):
            counts["up"] += 1 if kind == "up" else -1

    def share(self) -> float:
        return self.counts["batches"] / self._total

    def seat(self, member: Member, world: SimWorld, stop: Signal) -> Coroutine[Any, Any, None]:
        seat = Seat(
            world=world,
            plan=self.plan,
            engines=self.engines,
            stop=stop,
            behaviour=member.group.behaviour,
            journal=journal_for(world),
        )
        return take_seat(member.group.role, seat)

    def view(self, fabric: SimFabric, watch: Watch) -> SwarmView:
        members = list(self.scenario.members())
        facts = SwarmFacts(
            workers=self._working,
            services={member.name for member in members if member.group.role in SERVICES},
            validator=self.plan.validator,
            dataset_length=self.engines.problem_count,
            batch=self.plan.agreement.batch,
        )
        facts.tap(watch)
        bounds = Bounds(rest_s=RESTS * self.plan.pause_s)
        return SwarmView(fabric=fabric, facts=facts, rules=self.plan.rules, ledger=self.plan.ledger, bounds=bounds)

    def tally(self, name: str) -> SwarmTally:
        engines = self.__dict__.get("engines")  # real processes made their own
        return SwarmTally(self.scenario, self.plan, name, engines if isinstance(engines, RealEngines) else None)

    def agreed(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.plan), "agreement": dataclasses.asdict(self.plan.agreement)}


class SwarmTally:
    """`sim.kinds.Tally` of a swarm: who was caught, how surely, how soon, what it had earned, and whether it pays."""

    def __init__(self, scenario: Scenario, plan: SwarmPlan, name: str, engines: RealEngines | None = None) -> None:
        """`engines`: of the run, which know what work a cheat does; None: nothing is said of money."""
        self.name, self.bounds, self.plan, self._engines = name, BOUNDS[plan.thresholds], plan, engines
        self.behaviour_of = {m.name: m.group.behaviour for m in scenario.members() if m.group.role == "worker"}
        self._behaviours = Behaviours(self.behaviour_of, HONEST, plan.rules.reward_per_unit)
        self._scores, self._detections = Scores(self.behaviour_of), Detections(self.behaviour_of)

    def event(self, event: Mapping[str, Any]) -> None:
        self._behaviours.event(event)
        self._scores.event(event)
        self._detections.event(event)

    @cached_property
    def rows(self) -> list[BehaviourRow]:
        return self._behaviours.rows()

    @cached_property
    def money(self) -> Money | None:
        """None without real engines, or when no honest answer was accepted."""
        honest = [row for row in self.rows if row.honest and row.judged]
        answers = sum(row.judged for row in honest)
        if self._engines is None or not answers or all(row.honest for row in self.rows):
            return None
        tokens = max(1, round(sum(row.tokens for row in honest) / answers))
        pay = self.plan.rules.reward_per_unit * tokens
        if pay <= 0:
            return None
        cheats = [row.behaviour for row in self.rows if not row.honest]
        saved = {name: saved_share(self._engines, name, tokens) for name in cheats}
        return money(self.rows, saved, Stakes(pay=PAY, stake=self.plan.rules.penalty / pay * PAY))

    def figures(self) -> dict[str, Any]:
        return {
            "behaviour_of": self.behaviour_of,
            "detection": detections(self.rows).as_json(),
            "false_positives": false_positives(self.rows).as_json(),
            "behaviours": [row.as_json() for row in self.rows],
            **({"economics": self.money.as_json()} if self.money is not None else {}),
        }

    def table(self) -> str:
        found = f"{table(self.rows)}\n{headline(self.rows)}"
        return found if self.money is None else f"{found}\n\n{self.money.table()}"

    def draw(self, folder: Path) -> None:
        self._scores.plot(folder / "scores.png", HONEST, bounds=self.bounds, title=self.name)
        self._detections.plot(folder / "detections.png", HONEST, title=self.name)

    def page(self) -> dict[str, Any]:
        columns = ["behaviour", "nodes", "submissions", "caught", "rejected [exact 95 %]", "slashed after", "earned"]
        return {
            "tiles": {
                "cheats' submissions rejected": percent(detections(self.rows).as_json()),
                "honest submissions rejected": percent(false_positives(self.rows).as_json()),
            },
            "tables": [
                {
                    "title": "Behaviours",
                    "columns": [*columns, "forfeited", "reasons"],
                    "rows": [row.cells() for row in self.rows],
                    "classes": ["honest" if row.honest else "cheat" for row in self.rows],
                }
            ],
            "pictures": [
                {"title": "Scores", "file": "scores.png", "alt": "score distributions with the thresholds drawn"},
                {"title": "Detections", "file": "detections.png", "alt": "rejected submissions over virtual time"},
            ],
        }


def headline(rows: list[BehaviourRow]) -> str:
    """The two rates that matter most, in two sentences."""
    cheats = [row for row in rows if not row.honest]
    ejected, nodes = sum(row.ejected for row in cheats), sum(row.nodes for row in cheats)
    missed = [row.behaviour for row in cheats if row.judged and row.rejected == 0]
    caught, wronged = detections(rows), false_positives(rows)
    sentence = (
        f"Of the cheats' submissions {caught} were rejected; {ejected} of {nodes} cheating nodes were ejected.\n"
        f"Of the honest submissions {wronged} were rejected (false positives)."
    )
    return sentence + (f"\nNever caught: {', '.join(missed)}." if missed else "")


def begin(scenario: Scenario, seed: int, model_path: str) -> Swarm:
    """The swarm of this scenario."""
    return Swarm(scenario, plan_of(scenario, seed, model_path))
