"""Who waits for whom: from each stage's own counters to the one place where a ring stands still.

A ring that hangs has no error to show: every stage waits for its predecessor. But all passes go round in one order, so
each stage's counters (`Progress`) say how far it came, and the first place where they step down is where it hangs: a
link that does not deliver, or a stage that does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """A stage's own count of passes of one epoch."""

    stage: str
    epoch: int
    received: int  # passes received, in order (of stage 0: given to it by the schedule)
    computed: int
    delivered: int  # passes that its successor has confirmed
    busy_s: float = 0.0  # spent computing them


@dataclass(frozen=True, slots=True)
class Blockage:
    """Where passes stop: in a stage, or on the link from `stage` to `to`."""

    stage: str
    to: str | None
    sentence: str


def find_blockage(
    issued: int, progress: Sequence[Progress | None], names: Sequence[str], epoch: int
) -> Blockage | None:
    """The first place, in ring order, that `issued` passes have not got through; None: all came round.

    `progress[s]` is None for a stage that does not answer. A stage that answers for an older epoch has not joined yet.
    """
    if len(progress) != len(names) or not names:
        raise ValueError(f"{len(progress)} reports for {len(names)} stages, expected one each")
    came = issued
    for at, (name, report) in enumerate(zip(names, progress, strict=True)):
        before = names[at - 1]
        if report is None:
            return Blockage(name, None, f"stage {name!r} does not answer; {came} of {issued} passes reached it")
        if report.epoch != epoch:
            return Blockage(name, None, f"stage {name!r} is in epoch {report.epoch}, the ring in epoch {epoch}")
        if report.received < came:
            sentence = f"link {before!r} -> {name!r}: pass {report.received} left {before!r} and did not arrive"
            return Blockage(before, name, sentence)
        if report.computed < came:
            return Blockage(name, None, f"stage {name!r} has pass {report.computed} and does not finish it")
        after = names[(at + 1) % len(names)]
        if report.delivered < came:
            sentence = f"link {name!r} -> {after!r}: {name!r} waits for {after!r} to take pass {report.delivered}"
            return Blockage(name, after, sentence)
        came = report.delivered
    return None
