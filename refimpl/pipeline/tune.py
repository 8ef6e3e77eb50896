"""Picks a ring's micro-batches and rows from what its passes are measured to take.

A trial ring of one micro-batch makes a few tokens for so many sequences as a micro-batch may have. What each stage was
busy is tau, what is left of the cycle is the hops; `timing.plan_schedule` decides. With one micro-batch the stages work
one after the other: what they lose to each other where they share a processor does not show.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from refimpl.pipeline.head import Head
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage
from refimpl.pipeline.timing import SchedulePlan, plan_schedule
from refimpl.world import World

WARM_TOKENS, TOKENS = 2, 8
"""Of each sequence, before it is measured, and measured."""

TOLERANCE = 0.03
"""Micro-batches that gain less are not worth their caches."""

IDLE_CHECK_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the passes of a ring take."""

    stages_s: tuple[dict[int, float], ...]  # for each stage, rows -> tau
    hop_s: float  # one way, the mean over the ring's hops


def rows_to_try(batch_max: int, stages: int) -> list[int]:
    """`batch_max` sequences in 1 to 2 x `stages` micro-batches: more never wait for each other."""
    return sorted({max(1, batch_max // micro_batches) for micro_batches in range(1, 2 * stages + 1)})


async def measure(head: Head, rows: Sequence[int]) -> Measured:
    """tau for each of these numbers of rows, and the hop. The ring has one micro-batch, and nothing else to do."""
    tables: list[dict[int, float]] = [{} for _ in head.config.cuts]
    hops_s = []
    for count in rows:
        await _make(head, f"warm-{count}", count, WARM_TOKENS)
        before = await head.ring.counters()
        head.forget_cycles()
        await _make(head, f"run-{count}", count, TOKENS)
        taus_s = []
        for table, was, now in zip(tables, before, await head.ring.counters(), strict=True):
            if was is None or now is None or was.epoch != now.epoch:
                raise ValueError("the ring broke while it was measured: give --micro-batches as a number")
            table[count] = max((now.busy_s - was.busy_s) / TOKENS, 1e-9)
            taus_s.append(table[count])
        hops_s.append(max(0.0, head.cycle_s() - sum(taus_s)) / len(tables))
    return Measured(stages_s=tuple(tables), hop_s=statistics.median(hops_s))


async def _make(head: Head, name: str, count: int, tokens: int) -> None:
    """So many tokens for so many sequences, and rest."""
    ids = [f"{name}-{at}" for at in range(count)]
    await head.complete(ids, [[0]] * count, [tokens] * count, range(count))
    while not head.schedule.idle:
        await head.world.sleep(IDLE_CHECK_S)


def pick(measured: Measured, batch_max: int) -> SchedulePlan:
    """The schedule of most tokens/s for up to `batch_max` sequences."""
    hops_s = [measured.hop_s] * len(measured.stages_s)
    return plan_schedule(measured.stages_s, hops_s, batch_max, tolerance=TOLERANCE)


async def tuned(
    world: World, stage: Stage, config: RingConfig, nodes: Mapping[str, str], batch_max: int
) -> tuple[RingConfig, dict[str, Any]]:
    """`config` with the micro-batches and rows that suit its ring for up to `batch_max` sequences, and what was
    measured, as JSON values. Raises ValueError when the trial ring breaks."""
    trial = replace(
        config,
        ring=f"{config.ring}-trial",
        micro_batches=1,
        rows=batch_max,
        capacity_tokens=max(config.capacity_tokens, TOKENS),
        stop_tokens=frozenset(),
    )
    head = Head(world, trial, stage, nodes)
    head.serve()
    world.spawn(head.run(), "trial head")
    measured = await measure(head, rows_to_try(batch_max, len(config.cuts)))
    head.stop()
    plan = pick(measured, batch_max)
    said = {
        "micro_batches": plan.micro_batches,
        "rows": plan.rows,
        "tokens_per_s": plan.tokens_per_s,
        "gain": plan.gain,
        "hop_s": measured.hop_s,
        "tau_s": {str(rows): [table[rows] for table in measured.stages_s] for rows in measured.stages_s[0]},
    }
    return replace(config, micro_batches=plan.micro_batches, rows=plan.rows), said
