"""Why: asynchronous GRPO as a run: trainer, relays, validator and workers of `refimpl/training/seats.py`, at the size
and price of a model that would not fit here.

The model is a stand-in (`training_standin.py`); slots, verdicts, broadcasts and steps are what `make train` runs. The
run ends when the trainer has made all its versions, or the scenario's time is up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from refimpl.grpo.rewards import LengthReward
from refimpl.training.plan import TrainPlan
from refimpl.training.prices import ROW_TOKENS
from refimpl.training.seats import Seat, Tempo, take_seat
from refimpl.work import Backward
from refimpl.world import Signal
from sim import roofline
from sim.calibrated import load_table
from sim.fabric import journal_for
from sim.hardware import OutOfMemory, find_device
from sim.kinds.training_checks import TrainingFacts, TrainingView
from sim.kinds.training_figures import TrainingTally
from sim.kinds.training_standin import StandIns
from sim.model_sizes import MODEL_SIZES
from sim.scenario import CALIBRATED, Member, Scenario, ScenarioError
from sim.training_part import TrainingPart
from sim.watch import Watch
from sim.world import SimFabric, SimWorld

DATASET_LENGTH = 1 << 20
NEWS_S = 2.0
"""Least time between two questions for news of weights; the original asks every 5 s, and its relays every 30."""


def plan_of(scenario: Scenario, seed: int) -> TrainPlan:
    """What the scenario's nodes agree on."""
    part, names = cast(TrainingPart, scenario.training), {}
    for role in ("trainer", "relay", "validator", "worker"):
        names[role] = tuple(member.name for member in scenario.members() if member.group.role == role)
    if not names["worker"]:
        raise ScenarioError("the scenario has no worker: nothing would ever be trained")
    return TrainPlan(
        run_seed=seed,
        model_path=CALIBRATED,
        dataset_length=DATASET_LENGTH,
        steps=part.steps,
        units_per_step=part.units_per_step,
        problems_per_unit=part.problems_per_unit,
        group=part.group,
        new_tokens_max=part.answer_tokens_max,
        temperature=part.temperature,
        length_reward=LengthReward.EXACT.value,
        length_targets=part.length_targets,
        length_alpha=part.length_alpha,
        max_age=part.max_age,
        deadline_s=part.deadline_s,
        online_filter=part.online_filter,
        in_flight=part.in_flight,
        optimizer_steps=part.optimizer_steps,
        thresholds=part.thresholds,
        denials_to_ban=part.denials_to_ban,
        evaluate_every=0,
        trainer=names["trainer"][0],
        relays=names["relay"],
        validator=names["validator"][0],
        workers=names["worker"],
    )


class Training:
    """`sim.kinds.Play` of a training run."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.part = scenario, cast(TrainingPart, scenario.training)
        self.plan = plan_of(scenario, seed)
        self.members = {member.name: member for member in scenario.members()}
        self.counts: Counter[str] = Counter({"versions": 0, "files": 0, "denied": 0, "up": 0})
        self._done: Signal | None = None  # of the trainer's present life
        self._require_memory()

    @cached_property
    def outfit(self) -> StandIns:
        """What all nodes work with; a device's cache decides how many answers it makes at once."""
        size, part, workers = MODEL_SIZES[self.part.size], self.part, self.plan.workers
        longest = part.prompt_tokens + max(part.length_targets)
        at_once = {name: find_device(self.members[name].group.device).batch_max(size, longest) for name in workers}
        behaviours = {name: self.members[name].group.behaviour for name in workers}
        measured = load_table(part.table)
        for name, behaviour in behaviours.items():
            if behaviour not in measured:
                raise ScenarioError(f"{name} behaves {behaviour!r}; table {part.table!r} has nothing measured for that")
        return StandIns(part, self.plan, at_once, behaviours)

    def _require_memory(self) -> None:
        """The model must fit whoever generates, checks and trains. Raises ScenarioError."""
        size, part = MODEL_SIZES[self.part.size], self.part
        most = part.prompt_tokens + part.answer_tokens_max
        whole = Backward(model=size, tokens=most, sequence_tokens=most)
        try:
            for name, member in self.members.items():
                device = find_device(member.group.device)
                if member.group.role == "worker":
                    device.require_memory(roofline.forward_memory(size, 1, most), name)
                elif member.group.role == "validator":
                    rows_at_once = max(1, ROW_TOKENS // most)
                    device.require_memory(roofline.forward_memory(size, rows_at_once, most, most), name)
                elif member.group.role == "trainer":
                    device.require_memory(roofline.backward_memory(whole), name)
        except OutOfMemory as error:
            raise ScenarioError(str(error)) from None

    def event(self, event: Mapping[str, Any]) -> None:
        kind, counts = event["kind"], self.counts
        if kind == "trained":
            counts["versions"] = event["version"]
        elif kind == "taken":
            counts["files"] += 1
        elif kind == "denied":
            counts["denied"] += 1
        elif kind in ("up", "down"):
            counts["up"] += 1 if kind == "up" else -1
        elif kind == "finished" and self._done is not None:
            self._done.set()

    def share(self) -> float:
        return self.counts["versions"] / self.part.steps

    def seat(self, member: Member, world: SimWorld, stop: Signal) -> Coroutine[Any, Any, None]:
        seat = Seat(
            world=world,
            plan=self.plan,
            folder=Path(world.name),  # nothing is written there
            stop=stop,
            journal=journal_for(world),
            tempo=Tempo(news_interval_s=NEWS_S, policy=self.part.policy, connections=self.part.connections),
            outfit=self.outfit,
        )
        return self._lead(seat) if member.group.role == "trainer" else take_seat(seat)

    async def _lead(self, seat: Seat) -> None:
        """The trainer has done its part when all versions are made; it serves them on until the run is over."""
        self._done = seat.world.signal()
        seat.world.spawn(take_seat(seat), "serves weights")
        await self._done.wait()

    def view(self, fabric: SimFabric, watch: Watch) -> TrainingView:
        plan = self.plan
        services = {plan.trainer, plan.validator, *plan.relays}
        disks = self.outfit.disks
        return TrainingView(
            fabric=fabric,
            facts=TrainingFacts(services=services, trainer=plan.trainer),
            steps=plan.steps,
            max_age=plan.max_age,
            trained=lambda: disks[plan.trainer].trained() if plan.trainer in disks else (),
        )

    def tally(self, name: str) -> TrainingTally:
        return TrainingTally(self.scenario, self.plan, name)

    def agreed(self) -> dict[str, Any]:
        return self.part.model_dump(mode="json") | {"answers_at_once": dict(self.outfit.at_once)}


def begin(scenario: Scenario, seed: int, model_path: str) -> Training:
    """The training run of this scenario. Raises ScenarioError for one that would mean something else here."""
    for place, fault in enumerate(scenario.faults):
        struck = scenario.struck(fault)
        trainer = any(member.group.role == "trainer" for member in scenario.members() if member.name in struck)
        if trainer and not fault.disk_kept:
            raise ScenarioError(
                f"fault {place} loses the trainer's disk, and the run with it; expected disk_kept = true"
            )
    return Training(scenario, seed)
