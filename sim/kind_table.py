"""The kinds of runs: what each asks of a scenario. A new kind is a line here and a module in `sim/kinds/`."""

from __future__ import annotations

from dataclasses import dataclass

from refimpl.attacks.names import BEHAVIOURS, RELAY_BEHAVIOURS, RING_BEHAVIOURS


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of run: who takes part, and which figures are shown of many runs."""

    once: tuple[str, ...]  # roles of exactly one node each
    busy: str  # the role of those who have something to do: without them nothing happens, and the run ends with them
    more: tuple[str, ...] = ()
    holds_model: tuple[str, ...] = ()  # roles whose device must have room for the model
    cheats: tuple[str, ...] = ()  # roles that may behave otherwise than honestly
    behaviours: tuple[str, ...] = BEHAVIOURS
    parts: tuple[str, ...] = ()  # of OPTIONAL_PARTS, those that it uses
    figures: tuple[str, ...]  # paths into summary.json that a sweep shows unless told otherwise

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.once, *self.more, self.busy)))


KINDS: dict[str, Kind] = {
    "swarm": Kind(
        once=("ledger", "orchestrator", "validator"),
        busy="worker",
        holds_model=("worker", "validator"),
        cheats=("worker",),
        parts=("task", "verifier", "ledger"),
        figures=("detection.rate", "false_positives.rate", "virtual_s"),
    ),
    "broadcast": Kind(
        once=("origin",),
        more=("relay",),
        busy="client",
        cheats=("relay",),
        behaviours=RELAY_BEHAVIOURS,
        figures=("first_s", "median_s", "last_s"),
    ),
    "pipeline": Kind(
        once=(),
        more=("stage", "spare"),
        busy="client",
        cheats=("stage",),
        behaviours=RING_BEHAVIOURS,
        figures=("share_of_bound_least", "guilty_blamed", "innocent_blamed"),
    ),
    "training": Kind(
        once=("trainer", "validator"),
        more=("relay", "worker"),
        busy="trainer",
        cheats=("worker",),
        figures=("step_min", "train_min", "broadcast_min", "batch_min", "trainer_wait_min"),
    ),
}
"""Kinds of runs; `sim/kinds/NAME.py` runs one. A scenario is of the kind whose part it has (`[broadcast]`), or of the
first."""
OPTIONAL_PARTS = ("task", "verifier", "ledger")
"""Parts of a scenario that have defaults, and that not every kind of run uses."""
