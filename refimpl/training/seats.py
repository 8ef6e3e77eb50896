"""The roles of a training run, each wired to the world it runs in: the main path, read this first.

A role is written once against the port. `take_seat` gives it a world and a folder of its own, and the same role then
runs as a process over HTTP (`launch.py`), in one process, or on simulated nodes. What is in its folder outlives it: a
node that was killed is started again with the same seat, and takes its part up where it was.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from refimpl.calls import Patience
from refimpl.grpo.trainer import Trainer, TrainerConfig
from refimpl.grpo.validator import Validator, ValidatorConfig
from refimpl.grpo.vault import Vault
from refimpl.grpo.worker import Worker, WorkerConfig
from refimpl.identity import verify
from refimpl.journal import Journal, silent
from refimpl.shardcast.disk_store import DiskStore
from refimpl.shardcast.puller import PullerConfig
from refimpl.shardcast.relay import Relay
from refimpl.shardcast.serving import ServingConfig
from refimpl.training.bench import Bench, BenchInspector, Score
from refimpl.training.cheats import maker_of
from refimpl.training.plain import student_of
from refimpl.training.plan import TrainPlan
from refimpl.training.weights import Arrivals, Broadcast
from refimpl.world import Signal, World


@dataclass(frozen=True, kw_only=True)
class Tempo:
    """How patient roles are with each other. The defaults suit the internet; tests are in more of a hurry."""

    news_patience_s: float = 20.0
    news_interval_s: float = 0.1
    retry_s: float = 1.0
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
    score: Score | None = None  # None: by locked-down processes
    shard_bytes: int = 256 << 10
    settled: Callable[[int], Coroutine[Any, Any, None]] | None = None  # awaited after each version that is published
    found: dict[str, Any] = field(default_factory=dict)  # the roles, by node name: for whoever watches


def _store(seat: Seat) -> DiskStore:
    root = seat.folder / "shardcast"
    root.mkdir(parents=True, exist_ok=True)
    return DiskStore(root, link=True)


def _pulling(seat: Seat, sources: tuple[str, ...]) -> PullerConfig:
    tempo, plan = seat.tempo, seat.plan
    return PullerConfig(
        sources=sources,
        origin=plan.trainer,
        origin_key=plan.identity(plan.trainer).public_key,
        news_patience_s=tempo.news_patience_s,
        news_interval_s=tempo.news_interval_s,
        retry_s=tempo.retry_s,
    )


def _arrivals(seat: Seat) -> Arrivals:
    plan = seat.plan
    return Arrivals(
        seat.world,
        plan.run_id,
        _pulling(seat, plan.relays or (plan.trainer,)),
        _store(seat),
        seat.journal,
        keep=plan.max_age + 3,
    )


async def trainer(seat: Seat) -> None:
    """Trains until all versions are made, and serves their weights until the run is over."""
    plan, world = seat.plan, seat.world
    identity = plan.identity(plan.trainer)
    below = plan.relays or (*plan.workers, plan.validator)
    serving = ServingConfig(below=below, keep=plan.max_age + 4)
    broadcast = Broadcast(
        world, plan.run_id, identity, serving, _store(seat), seat.journal, shard_bytes=seat.shard_bytes
    )
    bench = Bench(plan, score=seat.score)  # to evaluate with
    config = TrainerConfig(
        pacing=plan.pacing,
        steps=plan.steps,
        validators=frozenset({plan.identity(plan.validator).public_key}),
        online_filter=plan.online_filter,
        denials_to_ban=plan.denials_to_ban,
        limits=plan.limits(bench.decoder.config.vocabulary),
    )
    vault = Vault(seat.folder / "run", plan.run_id, keep=plan.max_age + 3)

    async def publish(version: int, checkpoint: Path) -> None:
        await broadcast.publish(version, checkpoint)
        if seat.settled is not None:
            await seat.settled(version)

    role = Trainer(world, config, student_of(plan, bench), vault, publish, seat.journal)
    seat.found[world.name] = role
    try:
        role.begin()
        broadcast.begin()
        role.serve()
        await role.run()
        seat.journal("finished", version=role.pacer.version, broken_promises=role.broken_promises())
        await seat.stop.wait()
    finally:
        bench.close()


async def relay(seat: Seat) -> None:
    """Passes weights on until the run is over."""
    plan = seat.plan
    below = (*plan.workers, plan.validator)
    store = _store(seat)
    pulling = _pulling(seat, (plan.trainer,))
    serving = ServingConfig(below=below, keep=plan.max_age + 4)
    role = Relay(seat.world, pulling, serving, store, verify, seat.journal)
    manifests, _ = store.found(verify, pulling.origin_key)
    role.restore(manifests)
    role.serve()
    seat.world.spawn(role.run(), "relay")
    await seat.stop.wait()
    role.stop()


async def validator(seat: Seat) -> None:
    """Judges files until the run is over."""
    plan = seat.plan
    arrivals = _arrivals(seat)
    bench = Bench(plan, tensors=arrivals.tensors, score=seat.score)
    bench.version = -1
    config = ValidatorConfig(trainer=plan.trainer, patience=seat.tempo.patience)
    role = Validator(seat.world, config, plan.identity(seat.world.name), BenchInspector(bench), arrivals, seat.journal)
    seat.found[seat.world.name] = role
    role.serve()
    seat.world.spawn(arrivals.client.run(), "weights")
    seat.world.spawn(role.run(), "validator")
    try:
        await seat.stop.wait()
    finally:
        role.stop()
        arrivals.client.stop()
        bench.close()


async def worker(seat: Seat) -> None:
    """Generates until the run is over, or nobody wants its work."""
    plan = seat.plan
    arrivals = _arrivals(seat)
    bench = Bench(plan, tensors=arrivals.tensors, score=seat.score)
    bench.version = -1
    config = WorkerConfig(
        trainer=plan.trainer,
        validator=plan.validator,
        newest=plan.newest,
        in_flight=plan.in_flight,
        patience=seat.tempo.patience,
    )
    maker = maker_of(dict(plan.cheats).get(seat.world.name, "honest"), bench)
    role = Worker(seat.world, config, plan.identity(seat.world.name), maker, arrivals, seat.journal)
    seat.found[seat.world.name] = role
    seat.world.spawn(arrivals.client.run(), "weights")
    try:
        await role.run()
    finally:
        arrivals.client.stop()
        bench.close()


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
