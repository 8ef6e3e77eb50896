"""Why: rings of `refimpl/pipeline` over named devices and real distances: how fast, against which bound, and who is
blamed when a stage cheats.

The first `stage` of a ring is its head, `spare`s wait for a seat, the `client` asks, checks every answer against its
own replay, and has who is blamed removed before it asks again. The model is a stand-in of its size and price
(`pipeline_standin.py`); everything else is what `python -m refimpl.pipeline` runs. The run ends with the last client.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from refimpl.attacks.ring import RING_CHEATS, CheatingStage
from refimpl.identity import Identity
from refimpl.pipeline.head import Head
from refimpl.pipeline.messages import Complete
from refimpl.pipeline.partition import Device, NoCut, chain_of, partition, uniform_links
from refimpl.pipeline.requests import RequestLog
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import StageConfig
from refimpl.pipeline.timing import cycle_s, plan_schedule
from refimpl.pipeline.verifier import Answer, RingVerifier
from refimpl.work import Forward
from refimpl.world import CallError, Refused, Signal, derive_rng
from sim.carrier import FlowCarrier
from sim.fabric import journal_for
from sim.hardware import find_device
from sim.kinds.pipeline_checks import PipelineFacts, PipelineView
from sim.kinds.pipeline_figures import PipelineTally
from sim.kinds.pipeline_standin import VOCABULARY, StandInReplay, answer_of, parts_of, size_between
from sim.model_sizes import MODEL_SIZES
from sim.scenario import Member, Scenario, ScenarioError
from sim.scenario_parts import PipelinePart, RingPart
from sim.watch import Watch
from sim.world import SimFabric, SimWorld

RETRY_S = 5.0
HEADER_BYTES = 300  # of a hop beside its tensor


@dataclass
class Ring:
    """One ring of the scenario."""

    part: RingPart
    stages: list[str]  # nodes in the ring's order; the first is the head
    spares: list[str]
    cuts: tuple[int, ...]
    config: RingConfig | None = None  # once the network is there

    @property
    def nodes(self) -> list[str]:
        return [*self.stages, *self.spares]


class Pipelines:
    """`sim.kinds.Play` of rings."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.part = cast(PipelinePart, scenario.pipeline)
        self.members = {member.name: member for member in scenario.members()}
        self.keys = {name: Identity.from_seed(seed, name) for name in self.members}
        self.rings = {part.name: self._ring(part) for part in self.part.rings}
        self.heads: dict[str, Head] = {}
        self.counts: Counter[str] = Counter({"answered": 0, "blamed": 0})
        self._fabric: SimFabric | None = None
        self._logs: dict[str, RequestLog] = {}  # on the heads' disks
        self._expected = sum(ring.part.sequences * self.part.rounds for ring in self.rings.values())

    def _ring(self, part: RingPart) -> Ring:
        """Its nodes, and the cut that suits their devices: least time of the slowest stage, in the nodes' order."""
        here = [m for m in self.members.values() if m.group.ring == part.name]
        names = {role: [m.name for m in here if m.group.role == role] for role in ("stage", "spare")}
        size, room = MODEL_SIZES[part.size], part.prompt_tokens + part.answer_tokens
        one = Forward(model=size_between(size, 1, 2), batch=part.rows, new_tokens=1, past_tokens=room // 2)
        devices = []
        for name in names["stage"]:
            device = find_device(self.members[name].group.device)
            devices.append(Device(name=name, memory_bytes=device.usable_bytes, layer_s=device.price(one)))
        chain = chain_of(size, part.sequences, room)
        try:
            found = partition(chain, devices, uniform_links(len(devices)), objective="throughput", order="given")
        except NoCut as error:
            raise ScenarioError(f"ring {part.name}: {error}") from None
        return Ring(part, [stage.device for stage in found.stages], names["spare"], tuple(s.end for s in found.stages))

    def event(self, event: Mapping[str, Any]) -> None:
        if event["kind"] == "answered":
            self.counts["answered"] += event["answers"]
        elif event["kind"] == "removed":
            self.counts["blamed"] += 1

    def share(self) -> float:
        return self.counts["answered"] / self._expected

    # ---------------------------------------------------------------------------------------------------------- plans
    def view(self, fabric: SimFabric, watch: Watch) -> PipelineView:
        self._fabric = fabric
        for ring in self.rings.values():
            self._plan(ring, fabric)
        guilty = {name for name, m in self.members.items() if m.group.behaviour not in ("honest", "receipt-withheld")}
        return PipelineView(
            fabric=fabric,
            facts=PipelineFacts(services=()),
            rings={name: ring.nodes for name, ring in self.rings.items()},
            guilty=guilty,
            rounds=self.part.rounds,
            keys=lambda: {name: key.public_key for name, key in self.keys.items()},
            logs=self._logs,
            right=lambda ring, kept: answer_of(kept.prompt, kept.max_new_tokens, kept.seed, self.rings[ring].cuts),
        )

    def _plan(self, ring: Ring, fabric: SimFabric) -> None:
        """The schedule that suits a ring's stages and hops."""
        part, size = ring.part, MODEL_SIZES[ring.part.size]
        taus_s, hops_s = self._taus_s(ring, ring.stages), self._hops_s(ring, ring.stages, fabric)
        tables = [{part.rows: tau_s} for tau_s in taus_s]
        batches = part.micro_batches or plan_schedule(tables, hops_s, part.sequences, tolerance=0.01).micro_batches
        ring.config = RingConfig(
            ring=part.name,
            layers=size.layers,
            hidden=size.hidden,
            dtype="bfloat16",
            cuts=ring.cuts,
            micro_batches=batches,
            rows=part.rows,
            capacity_tokens=part.prompt_tokens + part.answer_tokens,
            prefill_tokens=part.prompt_tokens,
            signed=True,
            keep_evidence=True,
        )

    def _bound(self, ring: Ring, seats: Sequence[str]) -> dict[str, Any]:
        """What these seats can do at best: M m / C, with C = max(M tau, sum of tau + lambda)."""
        assert ring.config is not None and self._fabric is not None
        taus_s, hops_s = self._taus_s(ring, seats), self._hops_s(ring, seats, self._fabric)
        batches = ring.config.micro_batches
        return {
            "seats": list(seats),
            "tau_ms": [round(tau_s * 1e3, 4) for tau_s in taus_s],
            "hop_ms": [round(hop_s * 1e3, 4) for hop_s in hops_s],
            "bound_tokens_per_s": batches * ring.part.rows / cycle_s(taus_s, hops_s, batches),
        }

    def _taus_s(self, ring: Ring, seats: Sequence[str]) -> list[float]:
        """Time of a decode pass in each stage, in the middle of an answer."""
        part, edges = ring.part, [0, *ring.cuts]
        past = part.prompt_tokens + part.answer_tokens // 2
        return [
            find_device(self.members[name].group.device).price(
                Forward(
                    model=size_between(MODEL_SIZES[part.size], edges[at], edges[at + 1]),
                    batch=part.rows,
                    new_tokens=1,
                    past_tokens=past,
                )
            )
            for at, name in enumerate(seats)
        ]

    def _hops_s(self, ring: Ring, seats: Sequence[str], fabric: SimFabric) -> list[float]:
        """One way from each stage to the next; the last hop brings tokens to the head."""
        if len(seats) == 1:
            return [0.0]
        network, hops = cast(FlowCarrier, fabric.carrier).network, []
        tensor = ring.part.rows * MODEL_SIZES[ring.part.size].hidden * 2
        for at, name in enumerate(seats):
            after = seats[(at + 1) % len(seats)]
            path = network.path(fabric.nodes[name].index, fabric.nodes[after].index)
            size = HEADER_BYTES + (tensor if at < len(seats) - 1 else 8 * ring.part.rows)
            rate = min(self.members[name].group.uplink_mbit_s, self.members[after].group.downlink_mbit_s) * 1e6 / 8
            hops.append(path.one_way_latency_s + size / rate)
        return hops

    # ---------------------------------------------------------------------------------------------------------- nodes
    def seat(self, member: Member, world: SimWorld, stop: Signal) -> Coroutine[Any, Any, None]:
        ring = self.rings[cast(str, member.group.ring)]
        if member.group.role == "client":
            return self._ask(ring, world, stop)
        behaviour = member.group.behaviour
        usable = int(find_device(member.group.device).usable_bytes)
        stage = CheatingStage(
            world,
            StageConfig(memory_bytes=usable, hop_timeout_s=30.0),
            self.keys[world.name],
            parts_of(MODEL_SIZES[ring.part.size], behaviour),
            journal_for(world),
            cheat=RING_CHEATS[behaviour],
        )
        if world.name == ring.stages[0]:
            return self._lead(ring, stage, world, stop)
        return _serve(stage, world, stop)

    async def _lead(self, ring: Ring, stage: CheatingStage, world: SimWorld, stop: Signal) -> None:
        """The head's node."""
        assert ring.config is not None
        journal, part = journal_for(world), ring.part
        batches = ring.config.micro_batches
        journal("planned", ring=part.name, size=part.size, cuts=list(ring.cuts), micro_batches=batches, rows=part.rows)
        nodes = {name: self.keys[name].public_key for name in ring.nodes}
        log = self._logs.setdefault(ring.part.name, RequestLog())
        head = self.heads[ring.part.name] = Head(world, ring.config, stage, nodes, log, journal)
        head.serve()
        world.spawn(head.run(), "head")
        await stop.wait()
        head.stop()
        stage.stop()

    async def _ask(self, ring: Ring, world: SimWorld, stop: Signal) -> None:
        """Ask, check, have who is blamed removed; again."""
        for number in range(self.part.rounds):
            if not await self._round(ring, world, stop, number):
                return

    async def _round(self, ring: Ring, world: SimWorld, stop: Signal, number: int) -> bool:
        journal, part = journal_for(world), ring.part
        rng = derive_rng(self.seed, "prompts", part.name, str(number))
        ids = tuple(f"{number}-{at}" for at in range(part.sequences))
        prompts = tuple(rng.integers(0, VOCABULARY, part.prompt_tokens).astype(np.int32) for _ in ids)
        news = (part.answer_tokens,) * len(ids)
        asked = Complete(ids, prompts, news, tuple(number * 1000 + at for at in range(len(ids))))
        began_s = world.now()
        while True:
            try:
                await world.call(ring.stages[0], asked, self.scenario.duration_s)
                break
            except Refused as refusal:
                journal("unanswered", ring=part.name, round=number, reason=refusal.reason)
                return False
            except CallError as error:
                journal("unanswered", ring=part.name, round=number, reason=error.reason)
                if await stop.wait(RETRY_S):
                    return False
        head = self.heads[part.name]
        journal(
            "answered",
            ring=part.name,
            round=number,
            answers=len(ids),
            tokens=len(ids) * part.answer_tokens,
            seconds=round(world.now() - began_s, 6),
            cycle_s=round(head.cycle_s(), 9),
            **self._bound(ring, head.ring.seats),
        )
        head.forget_cycles()
        while not head.schedule.idle:  # the last commitments come round
            if await stop.wait(0.2):
                return False
        await self._check(ring, world, head, ids, number)
        return True

    async def _check(self, ring: Ring, world: SimWorld, head: Head, ids: tuple[str, ...], number: int) -> None:
        """Judge every answer of a round; who is blamed leaves the ring."""
        journal = journal_for(world)
        replay = StandInReplay(MODEL_SIZES[ring.part.size], ring.cuts, head.config.chunk_tokens)
        blamed: list[str] = []
        for request_id in ids:
            kept = head.log.requests[request_id]
            plan = head.plans[head.finished[kept.number]]
            answer = Answer(request=kept.number, epoch=plan.epoch, prompt=kept.prompt, answer=tuple(kept.answer))
            verdict = await RingVerifier(world, replay).judge(plan, answer)
            names = [plan.members[stage].name for stage in verdict.blamed]
            blamed += [name for name in names if name not in blamed]
            journal(
                "checked",
                ring=ring.part.name,
                round=number,
                request=request_id,
                accepted=verdict.accepted,
                decided=verdict.decided,
                blamed=names,
                paid=[plan.members[stage].name for stage in verdict.paid],
                reason=verdict.reason,
            )
        for name in blamed:
            journal("removed", ring=ring.part.name, stage=name)
            head.remove(name)

    def tally(self, name: str) -> PipelineTally:
        behaviours = {member: m.group.behaviour for member, m in self.members.items()}
        devices = {member: m.group.device for member, m in self.members.items()}
        return PipelineTally(name, behaviours, devices, {key.public_key: node for node, key in self.keys.items()})

    def agreed(self) -> dict[str, Any]:
        return self.part.model_dump(mode="json")


async def _serve(stage: CheatingStage, world: SimWorld, stop: Signal) -> None:
    """Any other node of a ring."""
    stage.serve()
    world.spawn(stage.run(), "stage")
    await stop.wait()
    stage.stop()


def begin(scenario: Scenario, seed: int, model_path: str) -> Pipelines:
    """The rings of this scenario."""
    return Pipelines(scenario, seed)
