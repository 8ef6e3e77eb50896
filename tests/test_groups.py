"""Groups that count only together, and rejections that cost no stake."""

from __future__ import annotations

import pytest

from refimpl.testnet.ledger import LedgerRules, MemoryLedger
from refimpl.toploc.groups import Groups
from refimpl.toploc.validator import ValidatorConfig

NAME = ("key", 0, 1)


def test_a_group_is_credited_when_its_last_place_is_judged_whatever_the_verdicts() -> None:
    groups: Groups[str] = Groups(3, 10.0)
    assert groups.judged(NAME, 0, "a", 0.0) == ([], [])
    assert groups.judged(NAME, 2, None, 1.0) == ([], []), "a rejected answer is an answer"
    assert groups.judged(NAME, 0, "again", 2.0) == ([], []), "one place does not make another"
    assert groups.judged(NAME, 1, "b", 9.0) == (["a", "again", "b"], [])
    assert groups.overdue(100.0) == []


def test_after_the_grace_what_is_held_is_returned_once_and_later_ones_come_too_late() -> None:
    groups: Groups[str] = Groups(3, 10.0)
    groups.judged(NAME, 0, "a", 5.0)
    groups.judged(("other", 0, 1), 0, "x", 12.0)
    assert groups.overdue(15.0) == []
    assert groups.overdue(15.1) == ["a"]
    assert groups.overdue(16.0) == []
    assert groups.judged(NAME, 1, "b", 16.0) == ([], ["b"])


def test_a_group_says_what_it_expects() -> None:
    with pytest.raises(ValueError, match="groups of 0"):
        Groups(0, 1.0)


def test_a_soft_rejection_costs_pay_and_no_stake() -> None:
    ledger = MemoryLedger(LedgerRules())
    ledger.open_account("k", 1000.0)
    assert ledger.invalidate("k", "s")
    assert not ledger.credit("k", "s", 50.0), "what was invalidated is never paid"
    account = ledger.account("k")
    assert (account.stake, account.earned, account.invalidated, account.rejected) == (1000.0, 0.0, 1, 0)
    assert not account.ejected


def test_soft_words_are_words_of_the_validator() -> None:
    with pytest.raises(ValueError, match="soft has"):
        ValidatorConfig(ledger="l", checkpoint="c", vocabulary=2, answer_tokens_max=1, soft=frozenset({"rude"}))
