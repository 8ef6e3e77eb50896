"""What the nodes of a ring say to each other.

`Hop` is the one that counts: it goes round for every token, so what all stages know already is left out of it. Tensors
travel as they are (bfloat16 as its bit patterns); a row of a decode pass costs 8 bytes beside its activations.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from refimpl.messages import Message, wire
from refimpl.pipeline.blame import Commitment, Complaint, Exhibit, SignedDigest
from refimpl.pipeline.schedule import Pass, PassRow

SIZES: dict[str, tuple[int, int]] = {
    "layers": (1, 1 << 12),
    "hidden": (1, 1 << 17),
    "micro_batches": (1, 1 << 10),
    "rows": (1, 1 << 16),
    "capacity_tokens": (2, 1 << 24),
    "window": (1, 1 << 16),
    "chunk_tokens": (1, 1 << 16),
    "top_k": (1, 1 << 15),
    "sampling_top_k": (0, 1 << 31),
}
"""What a plan may ask for: far beyond any ring, and small enough that no product of them overflows."""

VERSION = 2
"""Of these messages and what they mean; stages of different versions do not form a ring."""


@dataclass(frozen=True, kw_only=True)
class Member:
    """One stage's place in the ring."""

    name: str  # node name
    public_key: str
    first: int  # layers first .. end - 1
    end: int


@dataclass(frozen=True, kw_only=True)
class RingPlan:
    """Everything that the members of one formation have in common. The last member's successor is the first."""

    ring: str
    epoch: int
    version: int
    checkpoint: str  # content hash
    layers: int
    hidden: int
    dtype: str  # of weights, caches and activations
    members: tuple[Member, ...]
    micro_batches: int
    rows: int
    capacity_tokens: int
    window: int  # passes on their way at once
    signed: bool  # hops carry signatures and commitments
    keep_evidence: bool  # stages keep what they received until `Forget`
    chunk_tokens: int
    top_k: int
    sampling_temperature: float
    sampling_top_k: int
    sampling_top_p: float

    def place_of(self, name: str) -> int:
        """Index of a member. Raises ValueError for a stranger."""
        for at, member in enumerate(self.members):
            if member.name == name:
                return at
        raise ValueError(f"node {name!r} is no member of ring {self.ring!r}")

    def faults(self) -> str:
        """Why this is no whole, contiguous ring of possible sizes; empty if it is one."""
        for field, (least, most) in SIZES.items():
            if not least <= getattr(self, field) <= most:
                return f"{field} is {getattr(self, field)}, expected {least} to {most}"
        if not self.sampling_temperature >= 0 or not 0 < self.sampling_top_p <= 1:
            return (
                f"temperature {self.sampling_temperature} and top_p {self.sampling_top_p}, expected 0 or more, and "
                "above 0 to 1"
            )
        edges = [0, *(member.end for member in self.members)]
        for at, member in enumerate(self.members):
            if member.first != edges[at] or member.end <= member.first:
                return f"stage {at} holds layers {member.first}..{member.end - 1}, expected from {edges[at]} on"
        if not self.members or edges[-1] != self.layers:
            return f"the stages end at layer {edges[-1]} of {self.layers}"
        if len({member.name for member in self.members}) != len(self.members):
            return "a node is named twice"
        if len({member.public_key for member in self.members}) != len(self.members):
            return "a public key is named twice"
        return ""


@wire
@dataclass(frozen=True)
class JoinRing(Message):
    """Head -> stage: be this member. Answered with `Joined` once the layers are loaded, or refused with the reason."""

    plan: RingPlan


@wire
@dataclass(frozen=True)
class Joined(Message):
    """Stage -> head: ready, with empty caches."""

    memory_bytes: int  # weights and caches held


@wire
@dataclass(frozen=True)
class GreetNeighbours(Message):
    """Head -> stage: all have joined; greet your successor."""

    epoch: int


@wire
@dataclass(frozen=True)
class Greeting(Message):
    """Stage -> successor, before the first token: what I shall send. Refused where the successor expects otherwise."""

    ring: str
    epoch: int
    version: int
    checkpoint: str
    end: int  # the sender's layers end here, the receiver's begin
    hidden: int
    dtype: str


@wire
@dataclass(frozen=True)
class Hop(Message):
    """Stage -> successor: one pass, its header and the activations of its new tokens."""

    epoch: int
    number: int
    micro_batch: int
    first_row: int
    requests: np.ndarray  # int32 [rows]
    past: np.ndarray  # int32 [rows]
    new: np.ndarray  # int32 [rows]; empty: 1 each
    draws: np.ndarray  # uint8 [rows]; empty: all draw
    starts: np.ndarray  # int64 [rows with past 0, 2]: seed, tokens answered before
    ended: np.ndarray  # int32
    moves: np.ndarray  # int32 [n, 2]
    states: np.ndarray  # [new tokens, hidden], float32 or uint16 (bfloat16)
    commitments: tuple[Commitment, ...] = ()
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class Drawn(Message):
    """Last stage -> head: the tokens of a pass's rows that draw, in order."""

    epoch: int
    number: int
    tokens: np.ndarray  # int32 [rows that draw]
    logprobs: np.ndarray  # float32 [rows that draw]
    commitments: tuple[Commitment, ...] = ()  # to the normed states
    signature: bytes = b""


@wire
@dataclass(frozen=True)
class Taken(Message):
    """Answer to `Hop` and `Drawn`: it arrived in order and may be used; signed where the ring is."""

    signature: bytes = b""


@wire
@dataclass(frozen=True)
class AskProgress(Message):
    """Head -> stage: how far are you?"""

    epoch: int


@wire
@dataclass(frozen=True)
class ProgressReport(Message):
    """A stage's own counters (`refimpl.pipeline.watch.Progress`)."""

    epoch: int
    received: int
    computed: int
    delivered: int
    busy_s: float = 0.0  # time spent computing these passes: tau = busy_s / computed


@wire
@dataclass(frozen=True)
class ReportTrouble(Message):
    """Stage -> head: my successor does not take what I send, or sent me what does not count."""

    epoch: int
    sender: str  # node names of the link's ends
    receiver: str
    reason: str


@wire
@dataclass(frozen=True)
class FileComplaint(Message):
    """Receiver -> head: the bytes that arrived are not what their sender committed to, provably."""

    epoch: int
    complaint: Complaint


@wire
@dataclass(frozen=True)
class Announce(Message):
    """A node -> head: I can be a stage (again)."""

    public_key: str
    version: int


@wire
@dataclass(frozen=True)
class AskEvidence(Message):
    """Verifier -> stage: what did you sign, what did your predecessor, and what did it send you of these requests?"""

    ring: str
    epoch: int
    requests: tuple[int, ...]


@wire
@dataclass(frozen=True)
class Evidence(Message):
    """A stage's evidence about one epoch. The head's is about the last stage: the tokens that it drew."""

    said: tuple[SignedDigest, ...]  # its own digests that commit to something of the requests
    received: tuple[SignedDigest, ...]  # its predecessor's
    exhibits: tuple[Exhibit, ...]  # the bytes asked for, as the predecessor signed them
    forgotten: tuple[int, ...] = ()  # of the requests, those whose bytes went when it was told to forget them


@wire
@dataclass(frozen=True)
class Forget(Message):
    """Verifier -> stage: these requests are judged, their bytes may go."""

    ring: str
    requests: tuple[int, ...]


@wire
@dataclass(frozen=True)
class Complete(Message):
    """Client -> head: continue these prompts. Said again with the same ids, it is done once and answered each time."""

    ids: tuple[str, ...]
    prompts: tuple[np.ndarray, ...]  # int32
    max_new_tokens: tuple[int, ...]
    seeds: tuple[int, ...]


@wire
@dataclass(frozen=True)
class Completed(Message):
    """Head -> client: the answers, in the order asked for."""

    answers: tuple[np.ndarray, ...]  # int32
    logprobs: tuple[np.ndarray, ...]  # float32
    reasons: tuple[str, ...]


def hop_of(made: Pass, states: np.ndarray, commitments: tuple[Commitment, ...] = (), signature: bytes = b"") -> Hop:
    """The message that carries a pass to the next stage."""
    rows = made.rows
    new = [row.new for row in rows]
    draws = [row.draws for row in rows]
    none32 = np.zeros(0, np.int32)
    return Hop(
        made.epoch,
        made.number,
        made.micro_batch,
        made.first_row,
        np.array([row.request for row in rows], np.int32),
        np.array([row.past for row in rows], np.int32),
        none32 if all(n == 1 for n in new) else np.array(new, np.int32),
        np.zeros(0, np.uint8) if all(draws) else np.array(draws, np.uint8),
        np.array([(row.seed, row.answered) for row in rows if row.past == 0], np.int64).reshape(-1, 2),
        np.array(made.ended, np.int32),
        np.array(made.moves, np.int32).reshape(-1, 2),
        states,
        commitments,
        signature,
    )


def pass_of(hop: Hop) -> Pass:
    """The header as the stages' machines read it. Raises ValueError with the reason for one that makes no sense."""
    count = len(hop.requests)
    shapes = {
        "past": (hop.past, (count,)),
        "new": (hop.new, (count,) if hop.new.size else (0,)),
        "draws": (hop.draws, (count,) if hop.draws.size else (0,)),
        "moves": (hop.moves, (len(hop.moves), 2)),
        "requests": (hop.requests, (count,)),
        "ended": (hop.ended, (len(hop.ended),)),
    }
    for field, (array, shape) in shapes.items():
        if array.shape != shape or array.dtype.kind not in "iu":
            raise ValueError(f"{field} is {array.dtype} of shape {array.shape}, expected whole numbers of {shape}")
    fresh = int((hop.past == 0).sum())
    if hop.starts.shape != (fresh, 2) or hop.starts.dtype != np.int64:
        raise ValueError(f"starts has shape {hop.starts.shape}, expected [{fresh}, 2] of int64")
    new = hop.new.tolist() if hop.new.size else [1] * count
    draws = hop.draws.tolist() if hop.draws.size else [1] * count
    starts = iter(hop.starts.tolist())
    rows = []
    for request, past, tokens, drawing in zip(hop.requests.tolist(), hop.past.tolist(), new, draws, strict=True):
        seed, answered = next(starts) if past == 0 else (0, 0)
        if past < 0 or tokens < 1:
            raise ValueError(
                f"request {request} has {past} past and {tokens} new tokens, expected 0 or more and 1 or more"
            )
        rows.append(PassRow(request, past, tokens, bool(drawing), answered, seed))
    if hop.states.ndim != 2 or hop.states.shape[0] != sum(new if count else []):
        raise ValueError(f"states have shape {hop.states.shape}, the header counts {sum(new if count else [])} tokens")
    moves = tuple((int(source), int(target)) for source, target in hop.moves.tolist())
    return Pass(hop.epoch, hop.number, hop.micro_batch, hop.first_row, tuple(rows), tuple(hop.ended.tolist()), moves)
