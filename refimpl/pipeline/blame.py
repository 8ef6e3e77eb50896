"""Who is guilty when a ring's output is wrong: decided from signed bytes alone, so that no innocent is ever blamed.

Each stage commits, per chunk of tokens, to the activations it sends (a TOPLOC proof of the un-normed output of its last
layer; the last stage, of the normed state). The verifier runs the model once and compares boundary by boundary. A stage
whose input was wrong deviates without guilt, so only the first deviating stage can be blamed, and only if its input is
known to have been right. Three things make that known:

1. Every hop message carries a digest of its exact bytes, signed by the sender (`HopDigest`). Unsigned bytes, or bytes
   that do not match, count as not sent: an honest stage never computes on them.
2. The receiver recomputes each commitment from the bytes that arrived. Same bytes, same commitment: this check has no
   noise. If they differ it complains before the chunk is used, and the complaint carries the bytes, whose hash the
   sender signed, so that anyone can settle it (`settle`). So commitments of undisputed boundaries describe the bytes
   that the next stage really had: agreed boundaries chain.
3. A commitment binds only the K largest numbers of a chunk. A stage can change all the others, commit honestly, and let
   its successor deviate. So a stage that is about to be blamed may show its input, signed by its predecessor, and the
   layers are run on exactly that input (`trial`): if its output follows, it is innocent, and the question moves to the
   predecessor. A stage that computed honestly always passes, whatever it was fed.

What is left without a culprit: bytes that one says were sent and the other says were not. That is a soft verdict on the
link (`LinkTrouble`), never a slash. Two colluding neighbours can hide what passes between them, but not what leaves
them: the blame falls on one of the pair, never on a third.

Differs from the original (prime-rl 1334cd61a): 1) there the first stage whose proof fails is blamed as it is, so a
stage that commits honestly and sends something else has its successor slashed; 2) chunks count from the first prompt
token, for a stage that tampers in the prefill only would poison its successor's cache unseen; 3) proofs travel with the
activations, not only in the file at the end.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

CHUNK_TOKENS = 32

Sign = Callable[[bytes], bytes]
Verify = Callable[[str, bytes, bytes], bool]
Commit = Callable[[bytes], bytes]
"""Tensor bytes of one chunk -> the commitment's bytes. Raises ValueError where none exists (inf or NaN)."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One sequence's part of a hop message: which tokens, and the hash of their bytes."""

    request: int
    first_token: int  # place in the sequence, the prompt's first token is 0
    tokens: int
    sha256: bytes

    def content(self) -> bytes:
        return struct.pack("<qqq", self.request, self.first_token, self.tokens) + self.sha256


@dataclass(frozen=True, slots=True)
class Commitment:
    """What a stage says of one chunk of one sequence. `tokens` is below the chunk size only for a sequence's last."""

    request: int
    chunk: int
    tokens: int
    commitment: bytes


@dataclass(frozen=True, slots=True)
class HopDigest:
    """What the sender of one hop message signs."""

    ring: str  # unique to this formation of the ring
    epoch: int
    number: int  # of the pass
    sender: str  # public keys
    receiver: str
    root: bytes  # SHA-256 over the leaves, in their order
    commitments: tuple[Commitment, ...]  # of the chunks that this message completes

    def content(self) -> bytes:
        """The signed bytes: every field, with its length where that varies."""
        names = [name.encode() for name in (self.ring, self.sender, self.receiver)]
        parts = [b"armillary hop digest 1\0", struct.pack("<qq", self.epoch, self.number)]
        parts += [struct.pack("<q", len(name)) + name for name in names] + [self.root]
        for c in self.commitments:
            parts.append(struct.pack("<qqqq", c.request, c.chunk, c.tokens, len(c.commitment)) + c.commitment)
        return b"".join(parts)


@dataclass(frozen=True, slots=True)
class SignedDigest:
    """A digest and its sender's signature."""

    digest: HopDigest
    signature: bytes

    def holds(self, verify: Verify) -> bool:
        return verify(self.digest.sender, self.digest.content(), self.signature)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receiver's signature over a digest: it can never say again that these bytes did not arrive."""

    number: int
    signature: bytes

    @staticmethod
    def content(digest: HopDigest) -> bytes:
        return b"armillary hop receipt 1\0" + hashlib.sha256(digest.content()).digest()

    def holds(self, digest: HopDigest, verify: Verify) -> bool:
        return self.number == digest.number and verify(digest.receiver, self.content(digest), self.signature)


@dataclass(frozen=True, slots=True)
class Exhibit:
    """One hop message as evidence: its signed digest, all leaves, and the bytes of one of them."""

    signed: SignedDigest
    leaves: tuple[Leaf, ...]
    row: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Complaint:
    """ "The commitment that the sender signed is not that of the bytes that it signed", with all of these bytes."""

    complainer: str
    request: int
    chunk: int
    exhibits: tuple[Exhibit, ...]  # the messages that brought the chunk's tokens
    statement: SignedDigest  # where the commitment stands: the last of them, or a later one for a short last chunk
    signature: bytes = b""

    def content(self) -> bytes:
        """What the complainer signs: it stands for this complaint."""
        digest = hashlib.sha256()
        for part in (self.statement.digest.content(), self.statement.signature):
            digest.update(struct.pack("<q", len(part)) + part)
        for exhibit in self.exhibits:
            for part in (exhibit.signed.digest.content(), exhibit.signed.signature, exhibit.data):
                digest.update(struct.pack("<q", len(part)) + part)
            digest.update(struct.pack("<qq", exhibit.row, len(exhibit.leaves)))
            for leaf in exhibit.leaves:
                digest.update(leaf.content())
        name = self.complainer.encode()
        head = struct.pack("<qqq", self.request, self.chunk, len(name)) + name
        return b"armillary complaint 1\0" + head + digest.digest()


@dataclass(frozen=True, slots=True)
class Verdict:
    """`culprit` is a public key; None: nobody can be blamed."""

    on: Literal["sender", "complainer", "none"]
    culprit: str | None
    reason: str


def root_of(leaves: Sequence[Leaf]) -> bytes:
    """SHA-256 over all leaves of a hop message."""
    return hashlib.sha256(b"".join(leaf.content() for leaf in leaves)).digest()


def leaf_of(request: int, first_token: int, tokens: int, data: bytes) -> Leaf:
    """The leaf of one sequence's bytes."""
    return Leaf(request, first_token, tokens, hashlib.sha256(data).digest())


def settle(
    complaint: Complaint,
    *,
    ring: str,
    sender: str,
    verify: Verify,
    commit: Commit,
    bytes_per_token: int,
    chunk_tokens: int = CHUNK_TOKENS,
) -> Verdict:
    """Who is right, from the complaint alone: nobody needs to have been there.

    `sender` and `ring` are what the ring's formation says of the complainer's predecessor. A complaint whose evidence
    does not hold falls back on the complainer, who signed it; one that nobody signed, on nobody.
    """
    if not verify(complaint.complainer, complaint.content(), complaint.signature):
        return Verdict("none", None, "the complaint is not signed by the one it names")

    def forged(why: str) -> Verdict:
        return Verdict("complainer", complaint.complainer, f"forged complaint: {why}")

    why = _evidence_fault(complaint, ring, sender, verify, bytes_per_token)
    if why:
        return forged(why)
    first = complaint.chunk * chunk_tokens
    leaves = [exhibit.leaves[exhibit.row] for exhibit in complaint.exhibits]
    at = leaves[0].first_token
    if complaint.chunk < 0 or at > first:
        return forged(f"the bytes begin at token {at}, the chunk at token {first}")
    if at + leaves[0].tokens <= first or leaves[-1].first_token >= first + chunk_tokens:
        return forged("it carries messages that have no part in the chunk")
    for leaf in leaves:
        if leaf.first_token != at:
            return forged(f"token {at} is missing among its bytes")
        at += leaf.tokens
    tokens = min(at - first, chunk_tokens)
    skipped = (first - leaves[0].first_token) * bytes_per_token
    data = b"".join(exhibit.data for exhibit in complaint.exhibits)[skipped : skipped + tokens * bytes_per_token]

    key = (complaint.request, complaint.chunk)
    digests = {s.digest.number: s.digest for s in (*(e.signed for e in complaint.exhibits), complaint.statement)}
    stated = [c for digest in digests.values() for c in digest.commitments if (c.request, c.chunk) == key]
    if not stated:
        if tokens == chunk_tokens:
            return Verdict("sender", sender, f"sent all of chunk {complaint.chunk} without a commitment to it")
        return forged("the chunk is not full and no commitment to it was due")
    if len({(c.tokens, c.commitment) for c in stated}) > 1:
        return Verdict("sender", sender, f"signed two different commitments to chunk {complaint.chunk}")
    if stated[0].tokens > tokens:
        return forged(f"it brings {tokens} tokens of a chunk that has {stated[0].tokens}")
    if stated[0].tokens < tokens:
        return Verdict("sender", sender, f"committed to {stated[0].tokens} of the {tokens} tokens that it sent")
    try:
        true = commit(data)
    except ValueError as error:
        return Verdict("sender", sender, f"committed to bytes that have no commitment: {error}")
    if true != stated[0].commitment:
        return Verdict(
            "sender", sender, f"its commitment to chunk {complaint.chunk} is not that of the bytes it signed"
        )
    return forged(f"the commitment to chunk {complaint.chunk} is that of the bytes")


def _evidence_fault(complaint: Complaint, ring: str, sender: str, verify: Verify, bytes_per_token: int) -> str:
    """Why the exhibits are not messages that `sender` signed for the complainer; empty if they are."""
    if not complaint.exhibits:
        return "it carries no evidence"
    signed = [*(exhibit.signed for exhibit in complaint.exhibits), complaint.statement]
    if len({s.digest.epoch for s in signed}) > 1:
        return "it mixes epochs"
    numbers = [exhibit.signed.digest.number for exhibit in complaint.exhibits]
    if numbers != sorted(set(numbers)):
        return "its messages are repeated or out of order"
    for s in signed:
        if (s.digest.ring, s.digest.sender, s.digest.receiver) != (ring, sender, complaint.complainer):
            return f"message {s.digest.number} is not from the predecessor to the complainer in this ring"
        if not s.holds(verify):
            return f"message {s.digest.number} does not have the sender's signature"
    for exhibit in complaint.exhibits:
        digest = exhibit.signed.digest
        if root_of(exhibit.leaves) != digest.root or not 0 <= exhibit.row < len(exhibit.leaves):
            return f"the leaves of message {digest.number} are not those that the sender signed"
        leaf = exhibit.leaves[exhibit.row]
        if leaf.request != complaint.request or leaf.sha256 != hashlib.sha256(exhibit.data).digest():
            return f"the bytes of message {digest.number} are not those that the sender signed"
        if leaf.tokens < 1 or len(exhibit.data) != leaf.tokens * bytes_per_token:
            return f"message {digest.number} has {len(exhibit.data)} bytes for {leaf.tokens} tokens"
    return ""


def settle_equivocation(a: SignedDigest, b: SignedDigest, verify: Verify) -> Verdict:
    """Two signed digests of one message that differ convict their sender: an honest one repeats itself to the bit."""
    same = all(getattr(a.digest, f) == getattr(b.digest, f) for f in ("ring", "epoch", "number", "sender", "receiver"))
    if not (same and a.holds(verify) and b.holds(verify)):
        return Verdict("none", None, "these are not two signed digests of one message")
    if a.digest == b.digest:
        return Verdict("none", None, "the two digests say the same")
    return Verdict("sender", a.digest.sender, f"signed two different digests of message {a.digest.number}")
