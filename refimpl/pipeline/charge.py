"""What a pass is charged for, whoever computes it: real layers, or a stand-in for layers that are nowhere."""

from __future__ import annotations

from refimpl.pipeline.schedule import Pass
from refimpl.work import Forward, ModelSize, Seconds, Several, Work


def work_of(made: Pass, size: ModelSize) -> Work:
    """A pass through layers of this size. Rows of one length are priced as one batch."""
    if not made.rows:
        return Seconds(duration_s=0.0)
    parts = [
        Forward(model=size, batch=count, new_tokens=new, past_tokens=past)
        for (past, new), count in _alike(made).items()
    ]
    return parts[0] if len(parts) == 1 else Several(tuple(parts))


def _alike(made: Pass) -> dict[tuple[int, int], int]:
    """Rows by (past, new): rows of one length are priced as one batch."""
    counts: dict[tuple[int, int], int] = {}
    for row in made.rows:
        counts[(row.past, row.new)] = counts.get((row.past, row.new), 0) + 1
    if len(counts) > 1 and len({new for _, new in counts}) == 1:  # a decode pass: one batch, of the mean length
        (_, new), rows = next(iter(counts)), sum(counts.values())
        return {(round(sum(past * count for (past, _), count in counts.items()) / rows), new): rows}
    return counts
