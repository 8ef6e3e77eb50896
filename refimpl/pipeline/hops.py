"""Both ends of one link, as pure machines: what is signed, what is checked, what is kept.

The sender keeps each signed digest until the receipt for it came; the receiver keeps the bytes of each sequence until
its verdict is known, for a complaint needs those of one chunk, and a defence all of them
(hidden size x bytes per number for every token).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from refimpl.pipeline.blame import (
    CHUNK_TOKENS,
    Commit,
    Commitment,
    Complaint,
    Exhibit,
    HopDigest,
    Leaf,
    Receipt,
    Sign,
    SignedDigest,
    Verify,
    leaf_of,
    root_of,
)

Row = tuple[int, int, bytes]
"""(request, place of its first token in the sequence, the bytes of its tokens)."""


class BadHop(ValueError):
    """A message that does not count as sent: unsigned, or not the bytes signed. Takes exactly one argument."""


class Chunks:
    """Cuts each sequence's bytes into chunks and commits to each as it fills; `close` commits to a short last one."""

    def __init__(self, commit: Commit, bytes_per_token: int, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self.commit, self.bytes_per_token, self.chunk_tokens = commit, bytes_per_token, chunk_tokens
        self._open: dict[int, tuple[int, bytearray]] = {}  # request -> (chunk, its bytes so far)

    def next_token(self, request: int) -> int:
        """How many tokens of a sequence have been fed."""
        chunk, data = self._open.get(request, (0, bytearray()))
        return chunk * self.chunk_tokens + len(data) // self.bytes_per_token

    def feed(self, request: int, data: bytes) -> list[Commitment]:
        """The chunks that these bytes complete. Raises ValueError where there is nothing that could be committed to."""
        chunk, held = self._open.get(request, (0, bytearray()))
        held += data
        size, done = self.chunk_tokens * self.bytes_per_token, []
        while len(held) >= size:
            done.append(Commitment(request, chunk, self.chunk_tokens, self.commit(bytes(held[:size]))))
            del held[:size]
            chunk += 1
        self._open[request] = (chunk, held)
        return done

    def close(self, request: int) -> list[Commitment]:
        """The sequence has ended: its short last chunk, if there is one."""
        chunk, held = self._open.pop(request, (0, bytearray()))
        if not held:
            return []
        return [Commitment(request, chunk, len(held) // self.bytes_per_token, self.commit(bytes(held)))]


class HopSender:
    """The sending end of one link in one epoch."""

    def __init__(self, *, ring: str, epoch: int, sender: str, receiver: str, sign: Sign, bytes_per_token: int) -> None:
        self.ring, self.epoch, self.sender, self.receiver = ring, epoch, sender, receiver
        self.bytes_per_token = bytes_per_token
        self._sign = sign
        self._sealed: dict[int, SignedDigest] = {}
        self.said: list[SignedDigest] = []  # all of it, to be shown where the receiver shows nothing

    def seal(self, number: int, rows: Sequence[Row], commitments: Sequence[Commitment]) -> SignedDigest:
        """The signed digest of message `number`. Said again, it is the same to the bit; other bytes are refused."""
        leaves = [leaf_of(request, first, len(data) // self.bytes_per_token, data) for request, first, data in rows]
        digest = HopDigest(
            self.ring, self.epoch, number, self.sender, self.receiver, root_of(leaves), tuple(commitments)
        )
        if number in self._sealed:
            if self._sealed[number].digest != digest:
                raise ValueError(f"message {number} was signed with other contents: signing it twice would convict us")
            return self._sealed[number]
        self._sealed[number] = SignedDigest(digest, self._sign(digest.content()))
        self.said.append(self._sealed[number])
        return self._sealed[number]

    def confirm(self, receipt: Receipt, verify: Verify) -> bool:
        """Take the receiver's receipt. False: it is not one for a message that is open."""
        signed = self._sealed.get(receipt.number)
        if signed is None or not receipt.holds(signed.digest, verify):
            return False
        del self._sealed[receipt.number]
        return True

    def unconfirmed(self) -> list[int]:
        """Messages without a receipt: trouble on the link, nobody's proven fault."""
        return sorted(self._sealed)


class HopReceiver:
    """The receiving end of one link in one epoch: refuses, or confirms, or complains."""

    def __init__(
        self,
        *,
        ring: str,
        epoch: int,
        sender: str,
        receiver: str,
        sign: Sign,
        verify: Verify,
        commit: Commit,
        bytes_per_token: int,
        chunk_tokens: int = CHUNK_TOKENS,
    ) -> None:
        self.ring, self.epoch, self.sender, self.receiver = ring, epoch, sender, receiver
        self.bytes_per_token, self.chunk_tokens = bytes_per_token, chunk_tokens
        self._sign, self._verify = sign, verify
        self._chunks = Chunks(commit, bytes_per_token, chunk_tokens)
        self._kept: dict[int, list[Exhibit]] = {}  # by request, of all its tokens, in order
        self.forgotten: set[int] = set()  # of what was kept
        self._digests: list[SignedDigest] = []
        self._expected = 0

    def take(
        self, signed: SignedDigest, rows: Sequence[Row], ended: Sequence[int] = (), *, checked: bool = False
    ) -> Receipt | Complaint:
        """One message, in order; `ended`: sequences that end with it, their short last chunks being due; `checked`: the
        caller has verified the signature.

        A receipt: the bytes may be used. A complaint: the chunk must not be used. Raises `BadHop` for what does not
        count as sent (and nothing is changed).
        """
        leaves = self._check(signed, rows, ended, checked)
        stated = {(c.request, c.chunk): c for c in signed.digest.commitments}
        due: dict[tuple[int, int], Commitment | None] = {}
        for request in ended:
            due |= self._due(request, None)
        for at, (request, _, data) in enumerate(rows):
            self._kept.setdefault(request, []).append(Exhibit(signed, leaves, at, data))
            due |= self._due(request, data)
        self._expected += 1
        self._digests.append(signed)
        faults = [key for key, commitment in sorted(due.items()) if commitment is None or stated.get(key) != commitment]
        if faults:
            return self._complain(*faults[0], signed)
        return Receipt(signed.digest.number, self._sign(Receipt.content(signed.digest)))

    def _due(self, request: int, data: bytes | None) -> dict[tuple[int, int], Commitment | None]:
        """The commitments that must be there now, recomputed from the bytes; None: these bytes have none."""
        chunk = self._chunks.next_token(request) // self.chunk_tokens
        try:
            made = self._chunks.close(request) if data is None else self._chunks.feed(request, data)
        except ValueError:
            return {(request, chunk): None}
        return {(c.request, c.chunk): c for c in made}

    def _due_tokens(self, rows: Sequence[Row], ended: Sequence[int]) -> dict[tuple[int, int], int]:
        """Which chunks this message completes, and of how many tokens each is: counted, before anything is taken."""
        tokens, size = {}, self.chunk_tokens
        for request in ended:
            at = self._chunks.next_token(request)
            if at % size:
                tokens[(request, at // size)] = at % size
        for request, first, data in rows:
            end = first + len(data) // self.bytes_per_token
            tokens |= {(request, chunk): size for chunk in range(first // size, end // size)}
        return tokens

    def _check(
        self, signed: SignedDigest, rows: Sequence[Row], ended: Sequence[int], checked: bool
    ) -> tuple[Leaf, ...]:
        digest = signed.digest
        who = (digest.ring, digest.epoch, digest.sender, digest.receiver)
        if who != (self.ring, self.epoch, self.sender, self.receiver):
            raise BadHop(f"message {digest.number} is not one of this link's, in epoch {self.epoch}")
        if digest.number != self._expected:
            raise BadHop(f"message {digest.number} came where {self._expected} is expected")
        if not checked and not signed.holds(self._verify):
            raise BadHop(f"message {digest.number} does not have its sender's signature")
        leaves = []
        for request, first, data in rows:
            if not data or len(data) % self.bytes_per_token:
                raise BadHop(f"request {request} has {len(data)} bytes, expected a multiple of {self.bytes_per_token}")
            if first != self._chunks.next_token(request):
                raise BadHop(f"request {request} goes on at token {first}, {self._chunks.next_token(request)} is next")
            leaves.append(leaf_of(request, first, len(data) // self.bytes_per_token, data))
        if len({request for request, _, _ in rows}) != len(rows):
            raise BadHop(f"message {digest.number} names a request twice")
        if root_of(leaves) != digest.root:
            raise BadHop(f"the bytes of message {digest.number} are not those that its sender signed")
        stated = {(c.request, c.chunk): c.tokens for c in digest.commitments}
        due = self._due_tokens(rows, ended)
        if len(stated) != len(digest.commitments) or any(n > due.get(key, 0) for key, n in stated.items()):
            raise BadHop(f"message {digest.number} commits to more than has been sent")
        if short := [key for key, n in due.items() if n < self.chunk_tokens and key not in stated]:
            raise BadHop(f"message {digest.number} has no commitment to the last chunk of request {short[0][0]}")
        return tuple(leaves)

    def _complain(self, request: int, chunk: int, statement: SignedDigest) -> Complaint:
        first, end = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
        exhibits = []
        for exhibit in self._kept[request]:
            leaf = exhibit.leaves[exhibit.row]
            if leaf.first_token < end and leaf.first_token + leaf.tokens > first:
                exhibits.append(exhibit)
        complaint = Complaint(self.receiver, request, chunk, tuple(exhibits), statement)
        return replace(complaint, signature=self._sign(complaint.content()))

    def digests(self) -> list[SignedDigest]:
        """All that the predecessor signed, to be shown when accused."""
        return list(self._digests)

    def defence(self, request: int) -> list[Exhibit]:
        """A sequence's whole input as the predecessor signed it, for a trial."""
        return list(self._kept.get(request, ()))

    def live(self, request: int) -> bool:
        """Has this sequence begun, and not ended?"""
        return self._chunks.next_token(request) > 0

    def forget(self, request: int) -> None:
        """The verdict on a sequence is known: its bytes may go."""
        if self._kept.pop(request, None) is not None:
            self.forgotten.add(request)
