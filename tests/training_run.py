"""A small training run on one fabric: every node with a folder of its own, killed and restarted at will.

The model runs for real; by default time is virtual, so that a busy machine changes nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from refimpl.calls import Patience
from refimpl.tasks.scorer import own_rewards
from refimpl.training.outfit import RealOutfit
from refimpl.training.plan import TrainPlan
from refimpl.training.seats import Seat, Tempo, nodes_of, role_of, take_seat
from refimpl.work import Hash
from tests.paths import TINY_MODEL
from tests.worlds import sim_fabric

QUICK = Tempo(
    news_patience_s=2.0,
    news_interval_s=0.02,
    retry_s=0.1,
    patience=Patience(timeout_s=10.0, attempts=60, wait_s=0.05, wait_s_max=0.5),
)
SECONDS = {"trainer": 1.0, "worker": 0.7, "validator": 0.2, "relay": 0.0}
"""What a step, a unit, a check take in virtual time."""


def small_plan(**changes: Any) -> TrainPlan:
    """Three versions of two units of two problems with five answers each, on the tiny model."""
    fields: dict[str, Any] = {
        "model_path": str(TINY_MODEL), "steps": 3, "units_per_step": 2, "problems_per_unit": 2, "group": 5,
        "warm_up_steps": 2, "learning_rate": 1e-3, "evaluate_every": 0, "max_age": 0, "deadline_s": 5.0,
    }  # fmt: skip
    return TrainPlan(**(fields | changes))


class TrainingRun:
    """`run(main)` with the nodes up; `main` may kill and start them. `notes` is all that they noted."""

    def __init__(self, plan: TrainPlan, folder: Path, fabric: Any = None) -> None:
        self.plan, self.folder = plan, folder
        self.fabric = fabric if fabric is not None else sim_fabric(plan.run_seed)
        self.notes: list[tuple[str, str, dict[str, Any]]] = []
        self.roles: dict[str, Any] = {}
        self.lives: dict[str, int] = {}
        self.desk = self.fabric.node("desk")
        self.stop = self.desk.signal()

    def start(self, name: str) -> None:
        """The node begins, or is back. What it had fetched is lost (a relay, a client); a trainer's disk is not."""
        life = self.lives[name] = self.lives.get(name, -1) + 1
        own = name if name == self.plan.trainer else f"{name}.{life}"
        world = self.fabric.node(name)
        step_s = SECONDS[role_of(self.plan, name)]
        if hasattr(world, "price"):
            world.price = lambda work: 0.001 if isinstance(work, Hash) else step_s

        def note(kind: str, /, **fields: Any) -> None:
            json.dumps(fields)
            self.notes.append((name, kind, fields))

        seat = Seat(
            world=world, plan=self.plan, folder=self.folder / own, stop=self.stop, journal=note, tempo=QUICK,
            outfit=RealOutfit(score=own_rewards), found=self.roles,
        )  # fmt: skip
        world.spawn(take_seat(seat), "seat")

    def kill(self, name: str) -> None:
        self.fabric.kill(name)

    @property
    def trainer(self) -> Any:
        return self.roles[self.plan.trainer]

    async def until(self, condition: Any, patience_s: float = 300.0, look_s: float = 0.05) -> None:
        until_s = self.desk.now() + patience_s
        while not condition():
            assert self.desk.now() < until_s, f"waited {patience_s} s; the last notes: {self.notes[-12:]}"
            await self.desk.sleep(look_s)

    async def finish(self) -> None:
        await self.until(lambda: self.of("finished"))
        self.stop.set()

    def run(self, main: Any) -> None:
        async def body() -> None:
            for name in nodes_of(self.plan):
                self.start(name)
            await main

        self.fabric.run(body())

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        return [
            {"node": node, **values}
            for node, noted, values in self.notes
            if noted == kind and all(values.get(name) == value for name, value in fields.items())
        ]
