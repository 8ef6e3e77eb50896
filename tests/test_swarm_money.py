"""Whether cheating pays, from what a run saw."""

from __future__ import annotations

import math

import pytest

from refimpl.arena.economics import Stakes
from refimpl.swarm import RealEngines
from refimpl.workshop import Agreement
from sim.kinds.swarm_money import money, saved_share
from sim.summary import BehaviourRow
from tests.paths import TINY_MODEL

STAKES = Stakes(pay=1.2, stake=100.0)


def row(behaviour: str, rejected: int, honest: bool = False) -> BehaviourRow:
    return BehaviourRow(behaviour, honest, 1, judged=10, rejected=rejected)


def test_the_cheat_that_gains_most_comes_first_and_the_sentence_names_those_that_pay() -> None:
    rows = [row("honest", 0, honest=True), row("bold", 10), row("shy", 0), row("idle", 0), row("unknown", 0)]
    found = money(rows, {"bold": 0.9, "shy": 0.3, "idle": 0.0}, STAKES)
    assert [one.behaviour for one in found.rows] == ["shy", "idle", "bold"]
    bold = found.rows[-1]
    assert bold.profit == pytest.approx(0.9 - 101.2) and bold.break_even == pytest.approx(0.9 / 101.2)
    assert [one.verdict for one in found.rows] == ["pays", "saves nothing", "does not pay"]
    assert math.isinf(found.rows[0].break_even)
    assert found.table().splitlines()[-1] == "It pays for: shy."
    assert found.as_json()["attacks"][0]["break_even_audit_rate"] is None


def test_savings_are_those_of_a_real_implementation() -> None:
    engines = RealEngines(Agreement(model_path=str(TINY_MODEL), prompts="toy", batch=4, answer_tokens_max=48))
    assert saved_share(engines, "wrong-seed", 40) == pytest.approx(0.0)
    assert saved_share(engines, "weights-4bit", 40) > 0.4, "it would read a quarter of the weights' bytes"
    assert 0.2 < saved_share(engines, "early-exit", 40) < 0.6
    assert saved_share(engines, "best-of-4", 40) == pytest.approx(-3.0)
