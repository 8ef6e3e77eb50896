"""The roles of a training run, each wired to the world it runs in: the main path, read this first.

A role is written once against the port. `take_seat` gives it a world and a folder of its own, and the same role then
runs as a process over HTTP (`launch.py`), in one process, or on simulated nodes. What is in its folder outlives it: a
node that was killed is started again with the same seat, and takes its part up where it was.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from refimpl.calls import Patience
from refimpl.grpo.trainer import Trainer, TrainerConfig
from refimpl.grpo.validator import Validator, ValidatorConfig
from refimpl.grpo.worker import Worker, WorkerConfig
from refimpl.identity import verify
from refimpl.journal import Journal, silent
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.training.outfit import Outfit, RealOutfit
from refimpl.training.plan import TrainPlan
from refimpl.training.weights import Arrivals, Broadcast
from refimpl.world import Signal, World


@dataclass(frozen=True, kw_only=True)
class Tempo:
    """How patient roles are with each other. The defaults suit the internet; tests are in more of a hurry."""

    news_patience_s: float = 20.0
    news_interval_s: float = 0.1
    retry_s: float = 1.0
    policy: str = "expected-finish"  # which relay to ask; see refimpl/shardcast/choice.py
    connections: int = 10  # transfers of weights at once
    patience: Patience = field(default_factory=Patience)


@dataclass(frozen=True, kw_only=True)
class Seat:
    """One node's place in the run."""

    world: World
    plan: TrainPlan
    folder: Path  # this node's own; survives it
    stop: Signal  # set when the run is over
    journal: Journal = silent
    tempo: Tempo = field(default_factory=Tempo)
    outfit: Outfit = field(default_factory=RealOutfit)
    settled: Callable[[int], Coroutine[Any, Any, None]] | None = None  # awaited after each version that is published
    found: dict[str, Any] = field(default_factory=dict)  # the roles, by node name: for whoever watches


def _serving(seat: Seat, below: tuple[str, ...]) -> ServingConfig:
    return dataclasses.replace(seat.outfit.serving, below=below, keep=seat.plan.max_age + 4)


def _pulling(seat: Seat, sources: tuple[str, ...]) -> PullerConfig:
    tempo, plan = seat.tempo, seat.plan
    return PullerConfig(
        sources=sources,
        origin=plan.trainer,
        origin_key=plan.identity(plan.trainer).public_key,
        policy=tempo.policy,
        connections=tempo.connections,
        news_patience_s=tempo.news_patience_s,
        news_interval_s=tempo.news_interval_s,
        retry_s=tempo.retry_s,
    )


def _arrivals(seat: Seat) -> Arrivals:
    plan = seat.plan
    pulling = _pulling(seat, plan.relays or (plan.trainer,))
    store, found = seat.outfit.store(seat.world.name, seat.folder, pulling.origin_key)
    return Arrivals(
        seat.world,
        pulling,
        store,
        seat.journal,
        keep=plan.max_age + 3,
        found=found,
        checkpoint_of=partial(seat.outfit.checkpoint_of, plan),
    )


async def trainer(seat: Seat) -> None:
    """Trains until all versions are made, and serves their weights until the run is over."""
    plan, world, outfit = seat.plan, seat.world, seat.outfit
    identity = plan.identity(plan.trainer)
    store, found = outfit.store(world.name, seat.folder, identity.public_key)
    broadcast = Broadcast(
        world,
        plan.run_id,
        identity,
        _serving(seat, plan.relays or (*plan.workers, plan.validator)),
        store,
        seat.journal,
        found=found,
        cut=outfit.cut,
        checkpoint_of=partial(outfit.checkpoint_of, plan),
    )
    config = TrainerConfig(
        pacing=plan.pacing,
        steps=plan.steps,
        validators=frozenset({plan.identity(plan.validator).public_key}),
        online_filter=plan.online_filter,
        denials_to_ban=plan.denials_to_ban,
    )

    async def publish(version: int, checkpoint: Path) -> None:
        await broadcast.publish(version, checkpoint)
        if seat.settled is not None:
            await seat.settled(version)

    with outfit.student(plan) as student:
        records = outfit.records(plan, world.name, seat.folder)
        role = Trainer(world, config, student, records, publish, seat.journal)
        seat.found[world.name] = role
        role.begin()
        broadcast.begin()
        role.serve()
        await role.run()
        seat.journal("finished", version=role.pacer.version, broken_promises=role.broken_promises())
        await seat.stop.wait()


async def relay(seat: Seat) -> None:
    """Passes weights on until the run is over."""
    plan = seat.plan
    pulling = _pulling(seat, (plan.trainer,))
    store, (manifests, _) = seat.outfit.store(seat.world.name, seat.folder, pulling.origin_key)
    serving = _serving(seat, (*plan.workers, plan.validator))
    role = Relay(seat.world, pulling, serving, store, verify, seat.journal)
    role.restore(manifests)
    role.serve()
    seat.world.spawn(role.run(), "relay")
    await seat.stop.wait()
    role.stop()


async def validator(seat: Seat) -> None:
    """Judges files until the run is over."""
    plan, world = seat.plan, seat.world
    arrivals = _arrivals(seat)
    config = ValidatorConfig(trainer=plan.trainer, patience=seat.tempo.patience)
    with seat.outfit.tools(plan, world.name, arrivals) as tools:
        role = Validator(
            world,
            config,
            plan.identity(world.name),
            tools.inspector,
            arrivals,
            seat.journal,
            key_of=seat.outfit.key_of,
        )
        seat.found[world.name] = role
        role.serve()
        world.spawn(arrivals.client.run(), "weights")
        world.spawn(role.run(), "validator")
        try:
            await seat.stop.wait()
        finally:
            role.stop()
            arrivals.client.stop()


async def worker(seat: Seat) -> None:
    """Generates until the run is over, or nobody wants its work."""
    plan, world = seat.plan, seat.world
    arrivals = _arrivals(seat)
    config = WorkerConfig(
        trainer=plan.trainer,
        validator=plan.validator,
        newest=plan.newest,
        in_flight=plan.in_flight,
        patience=seat.tempo.patience,
    )
    with seat.outfit.tools(plan, world.name, arrivals) as tools:
        role = Worker(world, config, plan.identity(world.name), tools.maker, arrivals, seat.journal)
        seat.found[world.name] = role
        world.spawn(arrivals.client.run(), "weights")
        world.spawn(_end(seat, role), "end")
        try:
            await role.run()
        finally:
            arrivals.client.stop()


async def _end(seat: Seat, role: Worker) -> None:
    """A worker that waits for weights when the run is over waits in vain."""
    await seat.stop.wait()
    role.stop()


ROLES: dict[str, Callable[[Seat], Coroutine[Any, Any, None]]] = {
    "trainer": trainer,
    "relay": relay,
    "validator": validator,
    "worker": worker,
}


def role_of(plan: TrainPlan, name: str) -> str:
    """Which part the node `name` has."""
    if name == plan.trainer:
        return "trainer"
    if name == plan.validator:
        return "validator"
    return "relay" if name in plan.relays else "worker"


def nodes_of(plan: TrainPlan) -> list[str]:
    """All nodes of the run, those first that others depend on."""
    return [plan.trainer, *plan.relays, plan.validator, *plan.workers]


def take_seat(seat: Seat) -> Coroutine[Any, Any, None]:
    """The coroutine that is this node's part in the run."""
    return ROLES[role_of(seat.plan, seat.world.name)](seat)
