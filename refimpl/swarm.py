"""The main path, read this first: which roles a swarm has, and how each is wired to the world it runs in.

    ledger         keeps accounts: stake, rewards, slashing                     refimpl/testnet/registry.py
    orchestrator   hands out prompts by a deterministic rule                    refimpl/testnet/orchestrator.py
    worker         generates answers, with a proof of how                       refimpl/testnet/worker.py
    validator      replays answers with the right model, accepts or rejects     refimpl/toploc/validator.py

A role is written once against the port (`refimpl/world.py`). `take_seat` gives it a world, and the same role then runs
as a process over HTTP (`python -m refimpl.node`), or among thousands in the simulator (`python -m sim run`). What a
worker does honestly or not is the engine that it is given (`refimpl/attacks`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from refimpl.attacks.catalogue import engine_of
from refimpl.attacks.honest import HONEST
from refimpl.attacks.names import CHEATS
from refimpl.identity import Identity, address_of
from refimpl.journal import Journal, silent
from refimpl.messages import Submission
from refimpl.testnet.ledger import LedgerRules, MemoryLedger
from refimpl.testnet.liveness import LivenessConfig
from refimpl.testnet.orchestrator import Orchestrator, OrchestratorConfig
from refimpl.testnet.problems import Choice, choose_problems
from refimpl.testnet.registry import Registry, RegistryConfig
from refimpl.testnet.worker import Worker, WorkerConfig
from refimpl.toploc.check import PRESETS
from refimpl.toploc.checker import CheckerConfig, ToplocChecker
from refimpl.toploc.proof import Mode
from refimpl.toploc.sampling_proof import SamplingLimits
from refimpl.toploc.text_check import TextRules
from refimpl.toploc.validator import Validator, ValidatorConfig
from refimpl.workshop import Agreement, Workshop
from refimpl.world import Signal, World

BEHAVIOURS: dict[str, Callable[[Workshop], Any]] = {**HONEST, **{name: engine_of(name) for name in CHEATS}}


@dataclass(frozen=True, kw_only=True)
class SwarmPlan:
    """Everything that the nodes of one swarm have in common. Plain values: it travels as JSON to other processes."""

    run_seed: int
    agreement: Agreement
    assignments: int  # per worker
    pause_s: float = 0.0  # mean rest between a worker's assignments
    heartbeat_s: float = 10.0
    mode: Mode = "strict"
    thresholds: str = "paper"  # a name in `refimpl.toploc.check.PRESETS`
    margin_max: float | None = None  # mean clipped margin of an answer's tokens under its seed; None: not looked at
    end_probability_min: float | None = None  # of an end token; None: endings are not looked at
    validator_batch: int = 8
    stake: float = 1000.0
    rules: LedgerRules = field(default_factory=LedgerRules)
    ledger: str = "ledger"  # node names
    orchestrator: str = "orchestrator"
    validator: str = "validator"


class Engines(Protocol):
    """Where a swarm's engines come from: real ones, or the simulator's stand-ins."""

    checkpoint: str

    @property
    def problem_count(self) -> int: ...

    @property
    def vocabulary(self) -> int: ...

    def worker_engine(self, behaviour: str) -> Any: ...

    def checker(self, plan: SwarmPlan) -> Any: ...

    def prompt_of(self, problem_id: int) -> Any: ...


class RealEngines(Workshop):
    """Engines that run the model."""

    @property
    def vocabulary(self) -> int:
        return self.decoder().config.vocabulary

    def worker_engine(self, behaviour: str) -> Any:
        return self.once(behaviour, BEHAVIOURS[behaviour])

    def checker(self, plan: SwarmPlan) -> Any:
        config, model = CheckerConfig(mode=plan.mode, thresholds=PRESETS[plan.thresholds]), self.decoder().config
        text = TextRules(
            sampling=self.sampling,
            tokens_max=self.agreement.answer_tokens_max,
            ends=frozenset(model.eos_ids),
            end_probability_min=plan.end_probability_min,
            margins=None if plan.margin_max is None else SamplingLimits(score_max=plan.margin_max),
        )

        def seed_of(submission: Submission) -> int:
            return choice_of(plan, self.problem_count, submission).sampling_seed + submission.index

        engine = self.engine(self.decoder())
        return ToplocChecker(engine, config, hidden=model.hidden, text=text if text.asks else None, seed_of=seed_of)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One node's place in the swarm."""

    world: World
    plan: SwarmPlan
    engines: Engines
    stop: Signal  # set when the run is over; workers end by themselves
    behaviour: str = "honest"
    journal: Journal = silent


def identity_of(plan: SwarmPlan, name: str) -> Identity:
    """The key of a node of this swarm: made from the run's seed, so that a run can be repeated and everybody knows the
    validator's. Good for experiments; strangers need `Identity.generate()` and a list of the validators' keys."""
    return Identity.from_seed(plan.run_seed, name)


def choice_of(plan: SwarmPlan, problem_count: int, submission: Submission) -> Choice:
    """The problems and the seed that the rule gives for the assignment that a submission names."""
    return choose_problems(
        address_of(submission.public_key),
        step=submission.step,
        counter=submission.counter,
        dataset_length=problem_count,
        count=plan.agreement.batch,
    )


async def ledger(seat: Seat) -> None:
    """Keeps accounts until the run is over."""
    config = RegistryConfig(validators=frozenset({identity_of(seat.plan, seat.plan.validator).public_key}))
    Registry(seat.world, config, MemoryLedger(seat.plan.rules), seat.journal).serve()
    await seat.stop.wait()


async def orchestrator(seat: Seat) -> None:
    """Hands out prompts until the run is over."""
    config = OrchestratorConfig(
        ledger=seat.plan.ledger,
        dataset_length=seat.engines.problem_count,
        batch=seat.plan.agreement.batch,
        assignments=seat.plan.assignments,
        liveness=LivenessConfig(ttl_s=9 * seat.plan.heartbeat_s),  # the original's proportions: 10 s, 90 s, 15 s
        status_pass_s=1.5 * seat.plan.heartbeat_s,
    )
    role = Orchestrator(seat.world, config, seat.journal)
    role.serve()
    seat.world.spawn(role.run(), "orchestrator")
    await seat.stop.wait()
    role.stop()


async def validator(seat: Seat) -> None:
    """Judges submissions until the run is over."""
    plan, engines = seat.plan, seat.engines

    def problem_of(address: str, submission: Submission) -> int | None:
        given = 1 <= submission.counter <= plan.assignments and 0 <= submission.index < plan.agreement.batch
        if submission.step != 0 or not given:
            return None
        return int(choice_of(plan, engines.problem_count, submission).problem_ids[submission.index])

    config = ValidatorConfig(
        ledger=plan.ledger,
        checkpoint=engines.checkpoint,
        vocabulary=engines.vocabulary,
        answer_tokens_max=plan.agreement.answer_tokens_max,
        batch=plan.validator_batch,
    )
    identity = identity_of(plan, seat.world.name)
    checker = engines.checker(plan)
    role = Validator(seat.world, config, identity, checker, engines.prompt_of, problem_of, seat.journal)
    role.serve()
    seat.world.spawn(role.run(), "validator")
    await seat.stop.wait()
    role.stop()


async def worker(seat: Seat) -> None:
    """Works until its assignments are done or it is ejected."""
    plan = seat.plan
    config = WorkerConfig(
        orchestrator=plan.orchestrator,
        validator=plan.validator,
        ledger=plan.ledger,
        checkpoint=seat.engines.checkpoint,
        stake=plan.stake,
        heartbeat_s=plan.heartbeat_s,
        pause_s=plan.pause_s,
    )
    identity = identity_of(plan, seat.world.name)
    engine = seat.engines.worker_engine(seat.behaviour)
    await Worker(seat.world, config, identity, engine, seat.engines.prompt_of, seat.journal).run()


ROLES: dict[str, Callable[[Seat], Coroutine[Any, Any, None]]] = {
    "ledger": ledger,
    "orchestrator": orchestrator,
    "validator": validator,
    "worker": worker,
}
SERVICES = ("ledger", "orchestrator", "validator")  # they serve until they are told to stop; the others end


def take_seat(role: str, seat: Seat) -> Coroutine[Any, Any, None]:
    """The coroutine that is this node's part in the swarm."""
    return ROLES[role](seat)
