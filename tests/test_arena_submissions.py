"""Dishonest submissions before the real validator: the right word, nothing credited twice, nobody else slashed."""

from __future__ import annotations

import pytest

from refimpl.arena.court import BATCH, CHEAT, HONEST, assignment, try_submissions
from refimpl.attacks.submissions import SUBMISSION_ATTACKS
from refimpl.messages import Submission
from refimpl.swarm import RealEngines
from refimpl.workshop import Agreement
from tests.paths import TINY_MODEL


@pytest.fixture(scope="module")
def engines() -> RealEngines:
    return RealEngines(Agreement(model_path=str(TINY_MODEL), prompts="toy", batch=BATCH, answer_tokens_max=48))


@pytest.fixture(scope="module")
def answered(engines: RealEngines) -> tuple[list[Submission], list[Submission]]:
    return assignment(engines, CHEAT), assignment(engines, HONEST)


@pytest.mark.parametrize("attack", SUBMISSION_ATTACKS)
def test_it_meets_the_right_word_and_gains_nothing(
    engines: RealEngines, answered: tuple[list[Submission], list[Submission]], attack: str
) -> None:
    line = SUBMISSION_ATTACKS[attack]
    judged = try_submissions(engines, attack, *answered)
    assert {verdict.code for verdict in judged.verdicts} <= line.codes, [v.reason for v in judged.verdicts]
    assert (judged.credited, judged.credited_twice) == (line.credited, 0)
    assert (CHEAT.public_key in judged.invalidated) == line.soft and not (line.soft and judged.slashed)
    assert HONEST.public_key not in judged.slashed, "what somebody else sends in your name is not your guilt"
    assert all(verdict.reason for verdict in judged.verdicts)


def test_the_second_of_a_pair_is_known(
    engines: RealEngines, answered: tuple[list[Submission], list[Submission]]
) -> None:
    verdicts = try_submissions(engines, "replayed", *answered).verdicts
    assert [verdict.duplicate for verdict in verdicts] == [False] * BATCH + [True] * BATCH


def test_a_soft_word_costs_the_pay_and_not_the_stake(
    engines: RealEngines, answered: tuple[list[Submission], list[Submission]]
) -> None:
    hard = try_submissions(engines, "proof-of-another", *answered)
    soft = try_submissions(engines, "proof-of-another", *answered, soft=frozenset({"mismatch", "drift"}))
    assert {v.code for v in soft.verdicts} == {v.code for v in hard.verdicts} <= {"mismatch", "drift"}
    assert (hard.slashed, hard.invalidated) == (frozenset({CHEAT.public_key}), frozenset())
    assert (soft.slashed, soft.invalidated) == (frozenset(), frozenset({CHEAT.public_key}))
    assert soft.credited == 0
