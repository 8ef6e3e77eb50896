"""The ledger's node: takes `Register`, `RecordVerdict` and `AskAccount`, answers with `Ok` or `Account`.

Only validators whose keys are in its configuration may record verdicts; names prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from refimpl.identity import is_public_key, verify
from refimpl.journal import Journal, silent
from refimpl.messages import Account, AskAccount, Message, Ok, RecordVerdict, Register, record_bytes
from refimpl.testnet.ledger import AccountState, Ledger, LedgerError
from refimpl.world import Refused, World

T = TypeVar("T")

REGISTRATION = "registration"  # signature domains
RECORD = "record"


@dataclass(frozen=True, kw_only=True)
class RegistryConfig:
    """Who may write to the ledger."""

    validators: frozenset[str]  # public keys


def registration_bytes(public_key: str, stake: float) -> bytes:
    """What a node signs to open its account."""
    return f"{public_key}|{stake!r}".encode()


class Registry:
    """Keeps the ledger. It has no loop: `serve()` and it is there."""

    def __init__(self, world: World, config: RegistryConfig, ledger: Ledger, journal: Journal = silent) -> None:
        self.world, self.config, self.ledger, self.journal = world, config, ledger, journal

    def serve(self) -> None:
        self.world.serve({Register: self.register, RecordVerdict: self.record, AskAccount: self.ask})

    async def register(self, source: str, message: Register) -> Message:
        if not is_public_key(message.public_key):
            raise Refused(f"public key {message.public_key[:80]!r}: 64 lower-case hex digits were expected")
        signed = registration_bytes(message.public_key, message.stake)
        if not verify(message.public_key, signed, message.signature, domain=REGISTRATION):
            raise Refused("the registration is not signed by the key that it names")
        self._or_refuse(lambda: self.ledger.open_account(message.public_key, message.stake))
        self.journal("registered", worker=source, public_key=message.public_key, stake=message.stake)
        return Ok()

    async def record(self, source: str, message: RecordVerdict) -> Message:
        if message.validator_key not in self.config.validators:
            raise Refused(f"{source!r} is not a validator of this ledger")
        if not verify(message.validator_key, record_bytes(message), message.signature, domain=RECORD):
            raise Refused("the record is not signed by the validator that it names")
        key, submission = message.public_key, message.submission_id
        before = self._account(key)
        was_ejected = before.ejected
        if message.accepted:
            self._or_refuse(lambda: self.ledger.credit(key, submission, message.units))
        elif not message.hard:
            if self._or_refuse(lambda: self.ledger.invalidate(key, submission)):
                self.journal("invalidated", public_key=key, submission=submission, code=message.code)
        elif self._or_refuse(lambda: self.ledger.slash(key, submission)):
            account = self._account(key)
            lost = account.forfeited if account.ejected and not was_ejected else 0.0
            self.journal("slashed", public_key=key, submission=submission, code=message.code, stake=account.stake)
            if account.ejected and not was_ejected:
                self.journal("ejected", public_key=key, code=message.code, forfeited=lost)
        return self._public(key)

    async def ask(self, source: str, message: AskAccount) -> Message:
        return self._public(message.public_key)

    def _account(self, public_key: str) -> AccountState:
        return self._or_refuse(lambda: self.ledger.account(public_key))

    def _public(self, public_key: str) -> Account:
        account = self._account(public_key)
        return Account(
            public_key, account.stake, account.earned, account.accepted, account.rejected, ejected=account.ejected
        )

    @staticmethod
    def _or_refuse(entry: Callable[[], T]) -> T:
        try:
            return entry()
        except LedgerError as error:
            raise Refused(str(error)) from error
