"""What a stage holds for one epoch of its ring: its place, its links' machines, its counters. Nothing waits here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from refimpl.identity import Identity, verify
from refimpl.pipeline.blame import (
    Commit,
    Commitment,
    Complaint,
    HopDigest,
    Receipt,
    Sign,
    SignedDigest,
    leaf_of,
    root_of,
)
from refimpl.pipeline.hops import BadHop, Chunks, HopReceiver, HopSender, Row
from refimpl.pipeline.messages import Hop, Member, RingPlan
from refimpl.pipeline.schedule import HeldRow, Pass, PassRow, StageOrder, StageRows
from refimpl.work import Work

DOMAIN = "pipeline"
"""Of all signatures on a ring's links."""

TOKEN_BYTES = 4


class Compute(Protocol):
    """A stage's arithmetic (`refimpl.pipeline.compute`), or a stand-in for it."""

    @property
    def memory_bytes(self) -> int: ...

    @property
    def dtype(self) -> str: ...

    def reset(self) -> None: ...

    def work(self, made: Pass) -> Work: ...

    def run(self, made: Pass, drawing: Sequence[HeldRow], states: np.ndarray | None) -> Any:
        """`states`, `tokens`, `logprobs` of a pass; the last two None where nothing is drawn."""
        ...


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a stage is made of, for a plan: called with the plan when a ring forms."""

    checkpoint: str  # content hash of the weights this node has
    load: Callable[[RingPlan, Member], Compute]
    commit: Callable[[RingPlan], Commit]
    bytes_min: Callable[[RingPlan, Member], int] = lambda plan, member: 0  # of weights and caches, before any is taken
    vocabulary: int = 1 << 31  # token ids are below; a stand-in without a table needs only what travels as int32


class Contiguous:
    """Counts numbers that come in any order: how many are there without a gap from 0."""

    def __init__(self) -> None:
        self.count = 0
        self._early: set[int] = set()

    def add(self, number: int) -> None:
        self._early.add(number)
        while self.count in self._early:
            self._early.remove(self.count)
            self.count += 1


class Formation:
    """One member's view of one formation of the ring."""

    def __init__(self, plan: RingPlan, at: int, compute: Compute, identity: Identity, commit: Commit) -> None:
        self.plan, self.at, self.compute = plan, at, compute
        self.member: Member = plan.members[at]
        self.predecessor: Member = plan.members[at - 1]
        self.successor: Member = plan.members[(at + 1) % len(plan.members)]
        self.last = at == len(plan.members) - 1
        self.wire_dtype = np.dtype(np.uint16 if plan.dtype == "bfloat16" else np.float32)
        self.bytes_per_token = plan.hidden * self.wire_dtype.itemsize
        self.order: StageOrder[Any] = StageOrder(plan.window, plan.epoch)
        self.rows = StageRows(micro_batches=plan.micro_batches, rows=plan.rows, capacity_tokens=plan.capacity_tokens)
        self.rows.epoch = plan.epoch
        self.ready: deque[tuple[Pass, np.ndarray]] = deque()
        self.taken, self.computed, self.delivered = 0, 0, Contiguous()
        self.busy_s = 0.0  # spent computing
        self.halted = ""  # the reason, once this stage must not go on
        self.receipts: dict[int, bytes] = {}
        self.commit = commit
        self.sign: Sign = lambda content: identity.sign(content, domain=DOMAIN)
        self.chunks = Chunks(commit, self.bytes_per_token, plan.chunk_tokens) if plan.signed else None
        self.sender: HopSender | None = None
        self.receiver: HopReceiver | None = None
        if plan.signed:
            mine = self.member.public_key
            self.sender = HopSender(
                ring=plan.ring,
                epoch=plan.epoch,
                sender=mine,
                receiver=self.successor.public_key,
                sign=self.sign,
                bytes_per_token=TOKEN_BYTES if self.last else self.bytes_per_token,
            )
            if at > 0:
                self.receiver = HopReceiver(
                    ring=plan.ring,
                    epoch=plan.epoch,
                    sender=self.predecessor.public_key,
                    receiver=mine,
                    sign=self.sign,
                    verify=verify_link,
                    commit=commit,
                    bytes_per_token=self.bytes_per_token,
                    chunk_tokens=plan.chunk_tokens,
                )

    # ------------------------------------------------------------------------------------------------------ receiving
    def read(self, made: Pass, hop: Hop) -> SignedDigest:
        """The digest that the message's signature must be over: rebuilt from the bytes that came, so that it holds only
        if they are those that were signed. Raises `BadHop` if it does not."""
        leaves = [
            leaf_of(request, first, row.new, data)
            for row, (request, first, data) in zip(made.rows, self.rows_of(made, hop.states), strict=True)
        ]
        digest = HopDigest(
            self.plan.ring,
            made.epoch,
            made.number,
            self.predecessor.public_key,
            self.member.public_key,
            root_of(leaves),
            hop.commitments,
        )
        signed = SignedDigest(digest, hop.signature)
        if not signed.holds(verify_link):
            raise BadHop(f"pass {made.number}: the signature is not the predecessor's over these bytes")
        return signed

    def accept(self, made: Pass, states: np.ndarray, signed: SignedDigest | None) -> Receipt | Complaint | None:
        """Take a pass in its turn: receipt, complaint, or nothing where the ring is not signed. Raises `BadHop`."""
        if self.receiver is None or signed is None:
            return None
        answer = self.receiver.take(signed, self.rows_of(made, states), made.ended, checked=True)
        if not self.plan.keep_evidence and isinstance(answer, Receipt):
            for request in made.ended:
                self.receiver.forget(request)
        return answer

    def rows_of(self, made: Pass, states: np.ndarray) -> list[Row]:
        """Each row's activations as bytes."""
        rows, at = [], 0
        for row in made.rows:
            rows.append((row.request, row.past, states[at : at + row.new].tobytes()))
            at += row.new
        return rows

    # -------------------------------------------------------------------------------------------------------- sending
    def commitments(self, made: Pass, states: np.ndarray) -> tuple[tuple[Commitment, ...], list[Row]]:
        """The commitments to the chunks that this pass completes, and its activations by row."""
        assert self.chunks is not None
        rows = self.rows_of(made, states)
        done: list[Commitment] = []
        for request in made.ended:
            done += self.chunks.close(request)
        for request, _, data in rows:
            done += self.chunks.feed(request, data)
        return tuple(done), rows

    def seal(self, made: Pass, states: np.ndarray) -> tuple[tuple[Commitment, ...], bytes]:
        """(commitments, signature) of the message that carries these activations, empty if the ring is unsigned."""
        if self.sender is None:
            return (), b""
        commitments, rows = self.commitments(made, states)
        return commitments, self.sender.seal(made.number, rows, commitments).signature

    def seal_drawn(self, made: Pass, drawing: Sequence[HeldRow], result: Any) -> tuple[tuple[Commitment, ...], bytes]:
        """The last stage's: it commits to its normed states, and signs the tokens that it drew."""
        if self.sender is None:
            return (), b""
        commitments, _ = self.commitments(made, result.states)
        tokens = [] if result.tokens is None else result.tokens.tolist()
        rows = token_rows(drawing, tokens)
        return commitments, self.sender.seal(made.number, rows, commitments).signature

    def confirm(self, number: int, signature: bytes) -> None:
        """The successor took a message."""
        self.delivered.add(number)
        if self.sender is not None:
            self.sender.confirm(Receipt(number, signature), verify_link)

    def unconfirmed(self) -> int:
        """Taken, but without a receipt that holds."""
        return 0 if self.sender is None else len(self.sender.unconfirmed())


def stranger(source: str, plan: RingPlan, ring: Formation | None, silent_s: float, silence_s: float) -> str:
    """Why `source` may not send this plan; empty if it may: a plan is its head's to send, and a stage in a ring that is
    alive is that ring's."""
    head = plan.members[0].name if plan.members else ""
    if source != head:
        return f"{source!r} is not the head of this plan, {head!r} is"
    if ring is None or source == ring.plan.members[0].name or silent_s >= silence_s:
        return ""
    theirs = ring.plan.members[0].name
    return f"{ring.member.name!r} is in ring {ring.plan.ring!r}, and heard of its head {theirs!r} {silent_s:.3g} s ago"


def no_room(plan: RingPlan, member: Member, need_bytes: int, have_bytes: int) -> str:
    """Why this stage is too small; empty if it is not."""
    if need_bytes <= have_bytes:
        return ""
    return (
        f"layers {member.first}..{member.end - 1} with caches for {plan.micro_batches} x {plan.rows} rows of "
        f"{plan.capacity_tokens} tokens take {need_bytes} bytes, stage {member.name!r} has {have_bytes}: "
        f"{need_bytes - have_bytes} bytes short"
    )


def token_rows(drawing: Sequence[HeldRow | PassRow], tokens: Sequence[int]) -> list[Row]:
    """Drawn tokens as a link's rows: (request, place in the answer, 4 bytes)."""
    return [
        (row.request, row.answered, int(token).to_bytes(TOKEN_BYTES, "little"))
        for row, token in zip(drawing, tokens, strict=True)
    ]


def drawn_digest(
    plan: RingPlan, number: int, rows: Sequence[Row], commitments: tuple[Commitment, ...], signature: bytes
) -> SignedDigest:
    """The digest that the last stage's signature over these tokens must be of."""
    root = root_of([leaf_of(request, first, 1, data) for request, first, data in rows])
    sender, receiver = plan.members[-1].public_key, plan.members[0].public_key
    return SignedDigest(HopDigest(plan.ring, plan.epoch, number, sender, receiver, root, commitments), signature)


def verify_link(public_key: str, content: bytes, signature: bytes) -> bool:
    """A signature on a ring's link."""
    return verify(public_key, content, signature, domain=DOMAIN)
