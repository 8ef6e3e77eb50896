"""Why: a component that checks itself believes itself; these stand outside, and judge a run from fabric and events.

Each checker is one function from a `View` to sentences, one per violation, and one line in `CHECKERS`, classed

    crash        something broke
    liveness     something that should happen did not, within a stated bound
    correctness  something happened that must not

`check(view)` runs them all: after every scenario, and on demand during one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import isclose
from typing import Any, Literal

from refimpl.messages import AskAccount
from refimpl.testnet.ledger import LedgerRules, MemoryLedger
from sim.carrier import FlowCarrier
from sim.facts import Facts
from sim.world import SimFabric

SECOND_NS = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What liveness is measured by."""

    progress_s: float = 3600.0  # without progress of an up worker: the patience that it has for one verdict
    in_flight_s: float = 60.0  # an assignment may follow an ejection that it crossed on the way: one call's patience


@dataclass(frozen=True, kw_only=True)
class View:
    """What checkers see."""

    fabric: SimFabric
    facts: Facts
    rules: LedgerRules = field(default_factory=LedgerRules)
    ledger: str = "ledger"  # node name
    bounds: Bounds = Bounds()

    @property
    def now_ns(self) -> int:
        return int(self.fabric.kernel.now)

    def accounts(self) -> dict[str, Any]:
        """The ledger's accounts by public key, as they are in its memory; none while it is down."""
        node = self.fabric.nodes.get(self.ledger)
        handler = node.handlers.get(AskAccount) if node is not None and node.alive else None
        ledger = getattr(getattr(handler, "__self__", None), "ledger", None)
        return ledger.accounts if isinstance(ledger, MemoryLedger) else {}


Check = Callable[[View], Iterator[str]]


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


def workers_get_on(view: View) -> Iterator[str]:
    """Every worker that is up got on within the bound, is done, or is ejected. The bound counts from the last fault or
    change of a service; nothing is demanded of a worker while a fault is on it, on a service or on the network."""
    facts, bound_s = view.facts, view.bounds.progress_s
    if facts.struck[""] > 0:
        return
    for name in sorted(facts.workers):
        world = view.fabric.nodes.get(name)
        at_work = world is not None and world.alive and any(task.label == "worker" for task in world.tasks)
        if not at_work or facts.struck[name] > 0 or facts.key_of.get(name) in facts.ejected_ns:
            continue
        since_ns = max(facts.progress_ns.get(name, 0), facts.calm_ns)
        if view.now_ns - since_ns > bound_s * SECOND_NS:
            idle_s = (view.now_ns - since_ns) / SECOND_NS
            yield f"{name} is up and has not got on for {idle_s:.3f} s; bound {bound_s:g} s"


# ---------------------------------------------------------------------------------------------------- correctness
def judged_once(view: View) -> Iterator[str]:
    """A submission is judged at most once (in one life of the validator: a crash makes it forget)."""
    for submission in view.facts.judged_again:
        yield f"submission {submission[:16]} of {_who(view, view.facts.judged[submission].public_key)} was judged twice"


def ejected_earn_nothing(view: View) -> Iterator[str]:
    """Nothing is credited to an account after its ejection."""
    for key, account in view.accounts().items():
        if key not in view.facts.ejected_ns:
            continue
        if not account.ejected:
            yield f"{_who(view, key)} was ejected, and its account is open"
        elif view.rules.forfeit and (account.earned or account.forfeited != view.facts.forfeited[key]):
            gained = account.earned + account.forfeited - view.facts.forfeited[key]
            yield f"{_who(view, key)} was credited {gained:g} tokens after its ejection"


def ledger_conserves(view: View) -> Iterator[str]:
    """Earned = reward × accepted tokens, and what a stake lost = its penalties, for every account."""
    rules, judged = view.rules, view.facts.judged
    for key, account in view.accounts().items():
        who = _who(view, key)
        unknown = sorted(s for s in account.judged if s not in judged or judged[s].public_key != key)
        if unknown:
            yield f"{who} has {len(unknown)} entries without a validator's verdict; the first: {unknown[0][:16]}"
            continue
        accepted = [judged[s].tokens for s in account.judged if judged[s].accepted]
        if account.accepted != len(accepted) or account.rejected != len(account.judged) - len(accepted):
            found = f"{account.accepted} accepted and {account.rejected} rejected"
            yield f"{who} has {found}; the validator said {len(accepted)} and {len(account.judged) - len(accepted)}"
        due = rules.reward_per_unit * sum(accepted)  # earned = reward × accepted tokens
        got = account.earned + account.forfeited
        if got > due + 1e-6 or (not account.ejected and not isclose(got, due, rel_tol=1e-9, abs_tol=1e-6)):
            yield f"{who} has earned {got:g} tokens; reward × accepted tokens = {due:g}"
        stake = view.facts.stakes.get(key, 0.0)
        lost = min(rules.penalty * account.rejected, stake)  # a stake never goes below nothing
        if not isclose(stake - account.stake, lost, abs_tol=1e-6) or not isclose(account.slashed, lost, abs_tol=1e-6):
            yield f"{who} lost {stake - account.stake:g} tokens of its stake; its penalties are {lost:g}"


def no_work_after_ejection(view: View) -> Iterator[str]:
    """No assignment to an ejected worker, but for one that crossed the ejection on its way."""
    for key, times_ns in view.facts.assigned_late.items():
        ejected_ns = view.facts.ejected_ns[key]
        late = [t for i, t in enumerate(times_ns) if i or t - ejected_ns > view.bounds.in_flight_s * SECOND_NS]
        for time_ns in late:
            yield (
                f"{_who(view, key)} was given work at {time_ns / SECOND_NS:.3f} s; "
                f"it was ejected at {ejected_ns / SECOND_NS:.3f} s"
            )


def problems_follow_the_rule(view: View) -> Iterator[str]:
    """Problems given out, and paid for, are those of the deterministic rule."""
    yield from view.facts.off_rule


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


CHECKERS: tuple[tuple[Literal["crash", "liveness", "correctness"], Check], ...] = (
    ("crash", no_task_failed),
    ("liveness", calls_end_in_time),
    ("liveness", workers_get_on),
    ("correctness", judged_once),
    ("correctness", ejected_earn_nothing),
    ("correctness", ledger_conserves),
    ("correctness", no_work_after_ejection),
    ("correctness", problems_follow_the_rule),
    ("correctness", dead_hold_nothing),
    ("correctness", links_carry_nothing_of_the_dead),
    ("correctness", clock_never_goes_back),
)


@dataclass(frozen=True)
class Violation:
    """One broken promise."""

    category: str
    checker: str
    sentence: str

    def __str__(self) -> str:
        return f"{self.category}: {self.checker}: {self.sentence}"


def check(view: View) -> list[Violation]:
    """All violations so far."""
    return [
        Violation(category, checker.__name__, sentence) for category, checker in CHECKERS for sentence in checker(view)
    ]


def as_json(violations: list[Violation]) -> list[dict[str, Any]]:
    """One entry per checker, for `summary.json`."""
    return [
        {
            "class": category,
            "checker": checker.__name__,
            "promise": " ".join((checker.__doc__ or "").split()),
            "violations": [v.sentence for v in violations if v.checker == checker.__name__],
        }
        for category, checker in CHECKERS
    ]


def _who(view: View, public_key: str) -> str:
    return view.facts.worker_of.get(public_key, f"account {public_key[:16]}")
