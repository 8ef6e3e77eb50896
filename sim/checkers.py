"""Why: a component that checks itself believes itself; these stand outside, and judge a run from fabric and events.

Each checker is one function from a `View` to sentences, one per violation, and one line in a table, classed

    crash        something broke
    liveness     something that should happen did not, within a stated bound
    correctness  something happened that must not

Those of every kind of run are here (`EVERY`), and what must hold when a run is over in `sim/leaks.py`; each kind adds
its own (`sim/kinds/*_checks.py`). `check(view)` runs them all: after every scenario, and on demand during one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from sim.carrier import FlowCarrier
from sim.facts import Facts
from sim.world import SimFabric

SECOND_NS = 1_000_000_000

Category = Literal["crash", "liveness", "correctness"]
Check = Callable[[Any], Iterator[str]]
Checkers = tuple[tuple[Category, Check], ...]


# ---------------------------------------------------------------------------------------------------------- crash
def no_task_failed(view: View) -> Iterator[str]:
    """No exception was left that nobody received."""
    yield from map(str, view.fabric.failures)


# ------------------------------------------------------------------------------------------------------- liveness
def calls_end_in_time(view: View) -> Iterator[str]:
    """Every open call is younger than its time-out."""
    for world in view.fabric.by_index:
        for call in world.calls:
            if view.now_ns > call.until_ns:
                waited_s = (view.now_ns - call.since_ns) / SECOND_NS
                yield (
                    f"{world.name} has waited {waited_s:.3f} s for {call.callee.name} to answer {call.kind}; "
                    f"bound {call.timeout_s:.3f} s"
                )


# ---------------------------------------------------------------------------------------------------- correctness
def dead_hold_nothing(view: View) -> Iterator[str]:
    """A dead node has no tasks, open calls or callers that are being served."""
    for world in view.fabric.by_index:
        serving = view.fabric.serving.get(world.index, {})
        held = {"tasks": len(world.tasks), "open calls": len(world.calls), "callers": len(serving)}
        if not world.alive and any(held.values()):
            yield f"{world.name} is dead and holds " + ", ".join(f"{n} {what}" for what, n in held.items() if n)


def links_carry_nothing_of_the_dead(view: View) -> Iterator[str]:
    """No flow and no channel is left whose sender is dead."""
    carrier = view.fabric.carrier
    if isinstance(carrier, FlowCarrier):
        for what, source, target in carrier.under_way():
            sender, receiver = view.fabric.by_index[source], view.fabric.by_index[target]
            if not sender.alive:
                yield f"{sender.name} is dead and a {what} of it to {receiver.name} is left"


def clock_never_goes_back(view: View) -> Iterator[str]:
    """The log's times never fall."""
    yield from view.facts.back


EVERY: Checkers = (
    ("crash", no_task_failed),
    ("liveness", calls_end_in_time),
    ("correctness", dead_hold_nothing),
    ("correctness", links_carry_nothing_of_the_dead),
    ("correctness", clock_never_goes_back),
)


@dataclass(frozen=True, kw_only=True)
class View:
    """What checkers see. A kind's view has more of it."""

    fabric: SimFabric
    facts: Facts
    checkers: Checkers = EVERY
    over: bool = False  # nothing more will happen: what should have happened by the end must have
    all_done: bool = False  # and every part was done before the time was up

    @property
    def now_ns(self) -> int:
        return int(self.fabric.kernel.now)


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    category: str
    checker: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.category}: {self.checker}: {self.sentence}"


def check(view: View, checkers: Checkers | None = None) -> list[Violation]:
    """All violations so far, of the view's own checkers or of these."""
    return [
        Violation(category, checker.__name__, sentence)
        for category, checker in (view.checkers if checkers is None else checkers)
        for sentence in checker(view)
    ]


def as_json(checkers: Checkers, violations: Iterable[Violation]) -> list[dict[str, Any]]:
    """One entry per checker, for `summary.json`."""
    return [
        {
            "class": category,
            "checker": checker.__name__,
            "promise": " ".join((checker.__doc__ or "").split()),
            "violations": [v.sentence for v in violations if v.checker == checker.__name__],
        }
        for category, checker in checkers
    ]
