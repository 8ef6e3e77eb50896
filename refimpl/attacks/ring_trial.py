"""One ring, some of whose stages cheat, run for real in one process, verified and judged: who was blamed?

`try_ring` is what the tests and the blame matrix run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from refimpl.attacks.ring import RING_CHEATS, CheatingStage, cheating_parts
from refimpl.identity import Identity
from refimpl.model.weights import content_hash
from refimpl.pipeline.head import Head, RingOver
from refimpl.pipeline.judge import Judgement
from refimpl.pipeline.replay import ReplaySettings, RingReplay
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import StageConfig
from refimpl.pipeline.verifier import Answer, RingVerifier
from refimpl.pipeline.watch import find_blockage
from refimpl.world import Timeout
from refimpl.worlds.local import LocalFabric

LOOKS = 6000
"""At a ring that should come to rest, within its patience."""


@dataclass(frozen=True, kw_only=True)
class TrialConfig:
    """A ring and its requests."""

    checkpoint: Path
    layers: int
    hidden: int
    cuts: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    new_tokens: tuple[int, ...]
    seed: int = 0
    wire: str = "bfloat16"
    verifier_dtype: str = "bfloat16"
    chunk_tokens: int = 32
    top_k: int = 128
    temperature: float = 1.0
    thresholds: Any = ReplaySettings().thresholds
    difference_max: float = ReplaySettings().difference_max
    patience_s: float = 60.0


@dataclass(slots=True)
class TrialResult:
    """What came of it. Stages by index; a spare's index is beyond the last."""

    blamed: set[int] = field(default_factory=set)  # by complaint or by verification
    by_complaint: set[int] = field(default_factory=set)
    accepted: int = 0  # answers
    rejected: int = 0
    undecided: int = 0
    judgements: list[Judgement] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    troubles: list[tuple[str, str]] = field(default_factory=list)  # links that were reported, by node names


async def _ask(head: Head, config: TrialConfig) -> bool:
    """All requests; False: the ring ended first."""
    try:
        await head.complete(
            [f"r{i}" for i in range(len(config.prompts))],
            config.prompts,
            config.new_tokens,
            [config.seed * 1000 + i for i in range(len(config.prompts))],
        )
    except RingOver:
        return False
    return True


def try_ring(
    config: TrialConfig,
    cheats: Mapping[int, str],
    options: Mapping[int, Mapping[str, Any]] | None = None,
    *,
    spares: int = 1,
    fabric: Any = None,
) -> TrialResult:
    """Run the ring with these `cheats` (stage -> name in `RING_CHEATS`). `options`: of `torch_parts` by stage, for
    stages that compute in another dtype or kernel, which is honest noise. `fabric`: the world to run it in (None: this
    process, by the wall clock)."""
    stages = len(config.cuts)
    fabric = LocalFabric(run_seed=config.seed) if fabric is None else fabric
    names = [f"s{i}" for i in range(stages + spares)]
    identities = {name: Identity.from_seed(config.seed, name) for name in names}
    result = TrialResult()

    def journal(kind: str, /, **fields: Any) -> None:
        if kind == "reported":
            result.troubles.append((fields["sender"], fields["receiver"]))

    ring_config = RingConfig(
        ring=f"trial-{config.seed}",
        layers=config.layers,
        hidden=config.hidden,
        dtype=config.wire,
        cuts=config.cuts,
        micro_batches=2,
        rows=max(1, (len(config.prompts) + 1) // 2),
        capacity_tokens=max(len(p) + n for p, n in zip(config.prompts, config.new_tokens, strict=True)),
        prefill_tokens=16,
        signed=True,
        keep_evidence=True,
        chunk_tokens=config.chunk_tokens,
        top_k=config.top_k,
        temperature=config.temperature,
        overdue_s_min=config.patience_s,
    )
    made: list[CheatingStage] = []
    checkpoint = content_hash(config.checkpoint)
    for at, name in enumerate(names):
        cheat = RING_CHEATS[cheats.get(at, "honest")]
        own: dict[str, Any] = {"dtype": config.wire, "wire": config.wire, "device": "cpu", "checkpoint": checkpoint}
        parts = cheating_parts(config.checkpoint, cheat, **(own | dict((options or {}).get(at, {}))))
        stage_config = StageConfig(hop_timeout_s=config.patience_s)
        made.append(CheatingStage(fabric.node(name), stage_config, identities[name], parts, journal, cheat=cheat))
    nodes = {name: identities[name].public_key for name in names}
    head = Head(made[0].world, ring_config, made[0], nodes, journal=journal)
    checker = fabric.node("verifier")

    async def main() -> None:
        head.serve()
        made[0].world.spawn(head.run(), "head")
        for stage in made[1:]:
            stage.serve()
            stage.world.spawn(stage.run(), "stage")
        finished = await _ask(head, config)
        if finished:
            await _rest(head, config.patience_s)
        _complaints(result, head, names)
        if finished:
            await _verify(result, head, RingVerifier(checker, _replay(config)), names)
        head.stop()

    fabric.run(main())
    return result


async def _rest(head: Head, patience_s: float) -> None:
    """Wait until the last chunks' commitments have come round. Raises `Timeout`, saying where they are, when nothing
    moves through `LOOKS` looks: counted, for the clock alone also runs while the machine stands still."""
    before, still = None, 0
    while not head.schedule.idle:
        await head.world.sleep(patience_s / LOOKS)
        counters = await head.ring.counters()
        still = still + 1 if counters == before else 0
        before = counters
        if still > LOOKS:
            where = find_blockage(head.schedule.number, counters, head.ring.seats, head.ring.epoch)
            raise Timeout(f"the ring (up: {head.ring.up}) does not come to rest: {where}; {counters}")


def _replay(config: TrialConfig) -> RingReplay:
    settings = ReplaySettings(
        chunk_tokens=config.chunk_tokens,
        top_k=config.top_k,
        thresholds=config.thresholds,
        difference_max=config.difference_max,
    )
    return RingReplay(
        config.checkpoint,
        config.cuts,
        wire_dtype=config.wire,
        dtype=torch.bfloat16 if config.verifier_dtype == "bfloat16" else torch.float32,
        device="cpu",
        settings=settings,
    )


def _complaints(result: TrialResult, head: Head, names: Sequence[str]) -> None:
    """Who was convicted while the ring ran."""
    keys = {head.ring.nodes[name]: at for at, name in enumerate(names)}
    for verdict in head.verdicts:
        result.reasons.append(verdict.reason)
        if verdict.culprit is not None:
            result.by_complaint.add(keys[verdict.culprit])
    result.blamed |= result.by_complaint


async def _verify(result: TrialResult, head: Head, verifier: RingVerifier, names: Sequence[str]) -> None:
    """Every finished answer, judged."""
    for kept in head.log.requests.values():
        plan = head.plans[head.finished[kept.number]]
        answer = Answer(request=kept.number, epoch=plan.epoch, prompt=kept.prompt, answer=tuple(kept.answer))
        judgement = await verifier.judge(plan, answer)
        result.judgements.append(judgement)
        result.reasons.append(judgement.reason)
        result.blamed |= {names.index(plan.members[stage].name) for stage in judgement.blamed}
        result.accepted += judgement.accepted
        result.rejected += judgement.decided and not judgement.accepted
        result.undecided += not judgement.decided
