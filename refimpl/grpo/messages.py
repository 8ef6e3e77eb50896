"""What the roles of training say to each other.

worker -> trainer      AskSlot      may I start a unit?             SlotGiven, Later or RunOver
worker -> validator    Offer        a rollout file for my slot      Judgement
validator -> trainer   Verified     this file passed my checks      Receipt, once it is on the trainer's disk
validator -> trainer   Denied       that one did not                Ok
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from refimpl.messages import Blob, Message, encode, wire

SLOT, OFFER, WORD = "slot", "offer", "word"  # signature domains


@wire
@dataclass(frozen=True)
class AskSlot(Message):
    """Numbers rise with each new question; the same number again gets the same answer, for a reply may be lost. Slots
    that the worker was given and does not name are free again: it has lost them, in a crash perhaps."""

    public_key: str
    number: int
    working: tuple[int, ...]  # indices of slots that it is still at work on, or that are being judged
    patience_s: float  # how long the trainer may hold the question until something may be started
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class SlotGiven(Message):
    """Leave to generate one unit; see `staleness.Slot`."""

    index: int
    folder: int
    checkpoint: int
    counter: int
    place: int


@wire
@dataclass(frozen=True)
class RunOver(Message):
    """Nothing will be trained any more, or nothing of yours: stop."""

    reason: str


@wire
@dataclass(frozen=True)
class Offer(Message):
    """A rollout file. Its key is the SHA-256 of its bytes, and that is what the signature covers, with the slot."""

    public_key: str
    slot: SlotGiven
    key: str
    file: Blob
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class Judgement(Message):
    """Validator -> worker: what became of the file."""

    code: str  # "accepted" and other words of `staleness.Verdict`, or a word of `unit.CODES`
    reason: str
    decided: bool = True  # False: nothing is said about the file, and nobody is to blame


@wire
@dataclass(frozen=True)
class Verified(Message):
    """The file that passed, with what the validator found in it."""

    public_key: str  # the worker's
    slot: SlotGiven
    key: str
    file: Blob
    validator: str  # public key
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class Denied(Message):
    """A file that failed: its slot is free again. `decided` False: the check could not be made, nobody is to blame."""

    public_key: str
    slot: SlotGiven
    code: str
    reason: str
    decided: bool
    validator: str
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class Receipt(Message):
    """`verdict` is a word of `staleness.Verdict`; "accepted" is said after the file is safe on disk."""

    verdict: str


def question_content(question: AskSlot) -> bytes:
    """What a worker signs when it asks."""
    return encode(dataclasses.replace(question, signature=b""))


def offer_content(offer: Offer) -> bytes:
    """What a worker signs with a file: its key stands for its bytes."""
    return encode(offer.slot) + offer.key.encode()


def word_content(word: Verified | Denied) -> bytes:
    """What a validator signs."""
    if isinstance(word, Verified):
        return encode(word.slot) + f"verified|{word.public_key}|{word.key}".encode()
    return encode(dataclasses.replace(word, signature=b""))
