"""Who holds what: stake, reward per verified unit, slashing, ejection. Arithmetic and decisions only.

`Ledger` is the interface that roles use; `MemoryLedger` keeps it in memory, a database takes it over later. Every
entry is keyed by the submission it is for, so that a verdict delivered twice counts once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class LedgerError(Exception):
    """An entry that the ledger does not take. Takes exactly one argument: the reason."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)


@dataclass(frozen=True, kw_only=True)
class LedgerRules:
    """What honesty earns and cheating costs."""

    stake_minimum: float = 500.0  # tokens; an account with less cannot be opened
    reward_per_unit: float = 0.01  # tokens per verified unit (a unit is one verified answer token)
    penalty: float = 200.0  # tokens slashed per hard rejection (the original validator's default)
    rejections_to_eject: int = 1  # hard rejections after which the account is ejected
    forfeit: bool = True  # an ejected account also loses what it earned and had not claimed

    def __post_init__(self) -> None:
        for name in ("stake_minimum", "reward_per_unit", "penalty"):
            if getattr(self, name) < 0:
                raise ValueError(f"ledger.{name} is {getattr(self, name)}, 0 or more was expected")
        if self.rejections_to_eject < 1:
            raise ValueError(f"ledger.rejections_to_eject is {self.rejections_to_eject}, 1 or more was expected")


@dataclass
class AccountState:
    """One account, as the ledger holds it."""

    public_key: str
    stake: float
    earned: float = 0.0  # rewards it may claim
    forfeited: float = 0.0  # rewards it lost by ejection
    slashed: float = 0.0
    accepted: int = 0
    rejected: int = 0
    invalidated: int = 0  # softly: not paid, and nothing else
    ejected: bool = False
    judged: set[str] = field(default_factory=set)  # ids of submissions that were credited or slashed


class Ledger(Protocol):
    """What a role may ask of a ledger."""

    def open_account(self, public_key: str, stake: float) -> None: ...

    def account(self, public_key: str) -> AccountState: ...

    def credit(self, public_key: str, submission_id: str, units: float) -> bool: ...

    def slash(self, public_key: str, submission_id: str) -> bool: ...

    def invalidate(self, public_key: str, submission_id: str) -> bool: ...


class MemoryLedger:
    """A ledger in memory."""

    def __init__(self, rules: LedgerRules) -> None:
        self.rules = rules
        self.accounts: dict[str, AccountState] = {}

    def open_account(self, public_key: str, stake: float) -> None:
        """Open an account with `stake`; opening it again changes nothing. Raises LedgerError."""
        if stake < self.rules.stake_minimum:
            raise LedgerError(f"a stake of {stake:g} was offered, at least {self.rules.stake_minimum:g} is needed")
        self.accounts.setdefault(public_key, AccountState(public_key, stake))

    def account(self, public_key: str) -> AccountState:
        """The account of `public_key`. Raises LedgerError when there is none."""
        if public_key not in self.accounts:
            raise LedgerError(f"there is no account {public_key[:16]}…")
        return self.accounts[public_key]

    def credit(self, public_key: str, submission_id: str, units: float) -> bool:
        """Pay for verified work. False: this submission was judged before, or the account is ejected."""
        account = self.account(public_key)
        if units < 0:
            raise LedgerError(f"{units} units cannot be credited, 0 or more was expected")
        if submission_id in account.judged:
            return False
        account.judged.add(submission_id)
        account.accepted += 1
        if account.ejected:  # in flight when it was ejected: judged, not paid
            return False
        account.earned += units * self.rules.reward_per_unit
        return True

    def slash(self, public_key: str, submission_id: str) -> bool:
        """Punish a hard rejection: take the penalty (never more than there is), eject when the rules say so."""
        account = self.account(public_key)
        if submission_id in account.judged:
            return False
        account.judged.add(submission_id)
        account.rejected += 1
        taken = min(self.rules.penalty, account.stake)
        account.stake -= taken
        account.slashed += taken
        if account.rejected >= self.rules.rejections_to_eject and not account.ejected:
            account.ejected = True
            if self.rules.forfeit:
                account.forfeited, account.earned = account.forfeited + account.earned, 0.0
        return True

    def invalidate(self, public_key: str, submission_id: str) -> bool:
        """A soft rejection: this submission will never be paid. False: it was judged before."""
        account = self.account(public_key)
        if submission_id in account.judged:
            return False
        account.judged.add(submission_id)
        account.invalidated += 1
        return True
