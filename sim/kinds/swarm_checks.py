"""Why: what a swarm promises beside what every run does: work goes on, verdicts are final, and the money adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import isclose
from typing import Any

from refimpl.messages import AskAccount
from refimpl.testnet.ledger import LedgerRules, MemoryLedger
from sim.checkers import EVERY, SECOND_NS, Checkers, View
from sim.kinds.swarm_facts import SwarmFacts


# ------------------------------------------------------------------------------------------------------- liveness
def something_was_judged(view: SwarmView) -> Iterator[str]:
    """By the end, at least one answer was judged."""
    if view.over and not view.facts.judged:
        yield f"nothing ever happened: no answer was judged in {view.now_ns / SECOND_NS:.3f} s"


def workers_get_on(view: SwarmView) -> Iterator[str]:
    """Every worker that is up got on within the bound, is done, or is ejected. The bound counts from the last fault or
    change of a service; nothing is demanded of a worker while a fault is on it, on a service or on the network. Only
    of a worker that rests (its last assignment is judged) may the bound hold the rest as well."""
    facts, bounds = view.facts, view.bounds
    for name in sorted(facts.workers):
        world = view.fabric.nodes.get(name)
        at_work = world is not None and world.alive and any(task.label == "worker" for task in world.tasks)
        if not at_work or facts.excused(name) or facts.key_of.get(name) in facts.ejected_ns:
            continue
        resting = name in facts.resting
        bound_s = bounds.progress_s + (bounds.rest_s if resting else 0.0)
        since_ns = max(facts.progress_ns.get(name, 0), facts.calm_ns)
        if view.now_ns - since_ns > bound_s * SECOND_NS:
            idle_s = (view.now_ns - since_ns) / SECOND_NS
            what = "rests" if resting else "is up"
            yield f"{name} {what} and has not got on for {idle_s:.3f} s; bound {bound_s:g} s"


# ---------------------------------------------------------------------------------------------------- correctness
def judged_once(view: SwarmView) -> Iterator[str]:
    """A submission is judged at most once (in one life of the validator: a crash makes it forget)."""
    for submission in view.facts.judged_again:
        yield f"submission {submission[:16]} of {_who(view, view.facts.judged[submission].public_key)} was judged twice"


def ejected_earn_nothing(view: SwarmView) -> Iterator[str]:
    """Nothing is credited to an account after its ejection."""
    for key, account in view.accounts().items():
        if key not in view.facts.ejected_ns:
            continue
        if not account.ejected:
            yield f"{_who(view, key)} was ejected, and its account is open"
        elif view.rules.forfeit and (account.earned or account.forfeited != view.facts.forfeited[key]):
            gained = account.earned + account.forfeited - view.facts.forfeited[key]
            yield f"{_who(view, key)} was credited {gained:g} tokens after its ejection"


def ledger_conserves(view: SwarmView) -> Iterator[str]:
    """Earned = reward × accepted tokens, and what a stake lost = its penalties, for every account."""
    rules, judged = view.rules, view.facts.judged
    for key, account in view.accounts().items():
        who = _who(view, key)
        unknown = sorted(s for s in account.judged if s not in judged or judged[s].public_key != key)
        if unknown:
            yield f"{who} has {len(unknown)} entries without a validator's verdict; the first: {unknown[0][:16]}"
            continue
        accepted = [judged[s].tokens for s in account.judged if judged[s].accepted]
        turned_down = account.rejected + account.invalidated
        if account.accepted != len(accepted) or turned_down != len(account.judged) - len(accepted):
            found = f"{account.accepted} accepted and {turned_down} rejected"
            yield f"{who} has {found}; the validator said {len(accepted)} and {len(account.judged) - len(accepted)}"
        due = rules.reward_per_unit * sum(accepted)  # earned = reward × accepted tokens
        got = account.earned + account.forfeited
        if got > due + 1e-6 or (not account.ejected and not isclose(got, due, rel_tol=1e-9, abs_tol=1e-6)):
            yield f"{who} has earned {got:g} tokens; reward × accepted tokens = {due:g}"
        stake = view.facts.stakes.get(key, 0.0)
        lost = min(rules.penalty * account.rejected, stake)  # a stake never goes below nothing
        if not isclose(stake - account.stake, lost, abs_tol=1e-6) or not isclose(account.slashed, lost, abs_tol=1e-6):
            yield f"{who} lost {stake - account.stake:g} tokens of its stake; its penalties are {lost:g}"


def no_work_after_ejection(view: SwarmView) -> Iterator[str]:
    """No assignment to an ejected worker, but for one that crossed the ejection on its way."""
    for key, times_ns in view.facts.assigned_late.items():
        ejected_ns = view.facts.ejected_ns[key]
        late = [t for i, t in enumerate(times_ns) if i or t - ejected_ns > view.bounds.in_flight_s * SECOND_NS]
        for time_ns in late:
            yield (
                f"{_who(view, key)} was given work at {time_ns / SECOND_NS:.3f} s; "
                f"it was ejected at {ejected_ns / SECOND_NS:.3f} s"
            )


def problems_follow_the_rule(view: SwarmView) -> Iterator[str]:
    """Problems given out, and paid for, are those of the deterministic rule."""
    yield from view.facts.off_rule


SWARM: Checkers = (
    ("liveness", something_was_judged),
    ("liveness", workers_get_on),
    ("correctness", judged_once),
    ("correctness", ejected_earn_nothing),
    ("correctness", ledger_conserves),
    ("correctness", no_work_after_ejection),
    ("correctness", problems_follow_the_rule),
)


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What liveness is measured by."""

    progress_s: float = 3600.0  # without progress of a worker at work: the patience that it has for one verdict
    rest_s: float = 0.0  # the longest rest between two assignments
    in_flight_s: float = 60.0  # an assignment may follow an ejection that it crossed on the way: one call's patience


@dataclass(frozen=True, kw_only=True)
class SwarmView(View):
    """What a swarm's checkers see."""

    facts: SwarmFacts
    checkers: Checkers = EVERY + SWARM
    rules: LedgerRules = field(default_factory=LedgerRules)
    ledger: str = "ledger"  # node name
    bounds: Bounds = Bounds()

    def accounts(self) -> dict[str, Any]:
        """The ledger's accounts by public key, as they are in its memory; none while it is down."""
        node = self.fabric.nodes.get(self.ledger)
        handler = node.handlers.get(AskAccount) if node is not None and node.alive else None
        ledger = getattr(getattr(handler, "__self__", None), "ledger", None)
        return ledger.accounts if isinstance(ledger, MemoryLedger) else {}


def _who(view: SwarmView, public_key: str) -> str:
    return view.facts.worker_of.get(public_key, f"account {public_key[:16]}")
