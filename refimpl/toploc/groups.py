"""Groups of answers that count only together: whoever may leave out answers may choose its problems.

An assignment is a group: its answers are credited when all its places have been judged, whatever the verdicts. A group
that is not complete within the grace is invalidated softly: what was accepted of it is not paid, and nobody is slashed,
since a line that broke leaves the same picture.

After the protocol's validator daemon (group mode: soft invalidation of an incomplete group after optional grace
minutes). Differs from it: places that were rejected, or got no verdict, count as answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Generic, TypeVar

Entry = TypeVar("Entry")
Name = tuple[str, int, int]  # (key, step, assignment)


@dataclass
class _Group(Generic[Entry]):
    since_s: float
    places: set[int] = field(default_factory=set)
    held: list[Entry] = field(default_factory=list)
    over: bool = False


class Groups(Generic[Entry]):
    """Entries for the ledger that wait for the rest of their groups of `size`."""

    def __init__(self, size: int, grace_s: float) -> None:
        if size < 1 or grace_s < 0:
            raise ValueError(f"groups of {size} with a grace of {grace_s} s; expected 1 or more, and 0 s or more")
        self.size, self.grace_s = size, grace_s
        self._groups: dict[Name, _Group[Entry]] = {}

    def judged(self, name: Name, place: int, entry: Entry | None, now_s: float) -> tuple[list[Entry], list[Entry]]:
        """One more place of a group has a verdict; `entry` is what it is to be credited by, if it was accepted. Returns
        (entries to credit now, entries that came too late)."""
        group = self._groups.setdefault(name, _Group(now_s))
        if group.over:
            return [], [] if entry is None else [entry]
        group.places.add(place)
        if entry is not None:
            group.held.append(entry)
        if len(group.places) < self.size:
            return [], []
        ready, group.held = group.held, []
        return ready, []

    def overdue(self, now_s: float) -> list[Entry]:
        """What is held of groups whose grace is over; they are closed."""
        late: list[Entry] = []
        for group in self._groups.values():
            if not group.over and len(group.places) < self.size and now_s - group.since_s > self.grace_s:
                group.over = True
                late += group.held
                group.held = []
        return late
