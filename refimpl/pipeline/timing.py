"""How fast a ring can be: the bound on its cycle, and the plan that comes nearest to it.

N stages, M micro-batches of m = B / M sequences each, stage time tau(m), one-way hop time lambda, N hops in a ring. One
more token for all B sequences takes at least

    C = max( M * tau(m),  N * (tau(m) + lambda) )          so tokens/s <= B / C

the first term because each stage sees all M micro-batches, the second because a sequence's next token needs the last
one. `experiments/pipeline` measures real rings against it.

Two limits say when micro-batches pay:
- Decode bound by memory: tau(m) = tau_0 (the weights are read once, for one sequence or many). M = 1 gives
  B / (N (tau_0 + lambda)); no M gives more, at lambda = 0 M = N gives the same, M tau_0 > N (tau_0 + lambda) loses.
- Bound by arithmetic: tau(m) = a m. At lambda = 0, M = 1 gives B / (N a B), M = N gives B / (a B): N times as much.

With stages of unequal times, C = max( M * max_s tau_s, sum_s (tau_s + lambda_s) ).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


def cycle_s(stages_s: Sequence[float], hops_s: Sequence[float], micro_batches: int) -> float:
    """C for stage times tau_s(m) and the hop time after each stage (the last closes the ring; one stage has none)."""
    if not stages_s or len(hops_s) != len(stages_s):
        raise ValueError(
            f"{len(stages_s)} stages and {len(hops_s)} hops: expected as many hops as stages, at least one"
        )
    if micro_batches < 1:
        raise ValueError(f"micro_batches is {micro_batches}, expected at least 1")
    around = sum(stages_s) + (sum(hops_s) if len(stages_s) > 1 else 0.0)
    return max(micro_batches * max(stages_s), around)


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulePlan:
    """A choice of micro-batches and rows, and what the bound says of it."""

    micro_batches: int  # M
    rows: int  # m
    cycle_s: float  # C
    tokens_per_s: float  # M m / C
    gain: float  # tokens/s over the best synchronous schedule (M = 1) in the same memory

    @property
    def batch(self) -> int:
        return self.micro_batches * self.rows


def plan_schedule(
    stages_s: Sequence[Mapping[int, float]], hops_s: Sequence[float], batch_max: int, *, tolerance: float = 0.0
) -> SchedulePlan:
    """The M and m of most tokens/s, from measured stage times.

    `stages_s`: for each stage its table m -> tau(m); rows that every table has are considered. `batch_max`: sequences
    that the caches of the tightest stage hold. Among plans within `tolerance` (a fraction) of the best, the one of the
    fewest micro-batches, then of the shortest cycle: micro-batches that gain nothing are not used.
    """
    if not stages_s or batch_max < 1:
        raise ValueError(f"{len(stages_s)} stages and batch_max {batch_max}: expected at least one of each")
    rows_known = sorted(set.intersection(*(set(table) for table in stages_s)))
    plans = []
    for rows in rows_known:
        times_s = [table[rows] for table in stages_s]
        if rows < 1 or min(times_s) <= 0:
            raise ValueError(f"stage times for {rows} rows are {times_s}, expected rows of 1 or more and times above 0")
        for micro_batches in range(1, batch_max // rows + 1):
            cycle = cycle_s(times_s, hops_s, micro_batches)
            plans.append((micro_batches, rows, cycle, micro_batches * rows / cycle))
            if micro_batches * max(times_s) >= cycle:  # more of them only wait for each other
                break
    if not plans:
        raise ValueError(f"no measured number of rows ({rows_known}) is within batch_max {batch_max}")
    best = max(plan[3] for plan in plans)
    synchronous = max((plan[3] for plan in plans if plan[0] == 1), default=best)
    near = [plan for plan in plans if plan[3] >= best * (1 - tolerance) * (1 - 1e-12)]
    micro_batches, rows, cycle, speed = min(near, key=lambda plan: (plan[0], plan[2], plan[1]))
    return SchedulePlan(
        micro_batches=micro_batches, rows=rows, cycle_s=cycle, tokens_per_s=speed, gain=speed / synchronous
    )
