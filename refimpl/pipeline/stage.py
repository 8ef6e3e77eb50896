"""One stage of a ring: takes a pass from its predecessor, runs its layers, sends it on. It decides nothing.

Takes `JoinRing` (load these layers, empty the caches), `GreetNeighbours`, `Greeting` (the predecessor's handshake),
`Hop`, `AskProgress`, `AskEvidence`, `Forget`. Sends `Greeting` and `Hop` to its successor, `Drawn` to the head if it is
the last, and `ReportTrouble` and `FileComplaint` to the head. The head's own stage is the same object, fed by `feed`.

A formation of the ring is an epoch. What belongs to another epoch is refused, so a stage that was replaced and comes
back can do no harm. Passes are taken ahead of their turn (up to the window) and twice without effect.

Differs from prime-vllm c98e707 and prime-rl 1334cd61a: 1) stages have no scheduler of their own; 2) sends do not wait
for completion; 3) a lost neighbour is survived (`head.py`); 4) no pickle.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np

from refimpl.identity import Identity
from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.pipeline.blame import Commit, Complaint, Receipt
from refimpl.pipeline.formation import Compute, Formation, Parts, no_room, stranger
from refimpl.pipeline.hops import BadHop
from refimpl.pipeline.judge import about
from refimpl.pipeline.messages import (
    VERSION,
    Announce,
    AskEvidence,
    AskProgress,
    Drawn,
    Evidence,
    FileComplaint,
    Forget,
    Greeting,
    GreetNeighbours,
    Hop,
    Joined,
    JoinRing,
    Member,
    ProgressReport,
    ReportTrouble,
    RingPlan,
    Taken,
    hop_of,
    pass_of,
)
from refimpl.pipeline.schedule import Drift, HeldRow, Pass
from refimpl.work import Seconds
from refimpl.world import CallError, Refused, Signal, Timeout, Unreachable, World

EPOCHS_KEPT = 16
"""Evidence of so many formations is kept, where the plan asks for it."""

RINGS_MAX = 4096
"""So many rings a stage remembers, and joins, with one key: it must never join an epoch twice."""


@dataclass(frozen=True, kw_only=True)
class StageConfig:
    """How patient a stage is, and how large it may be."""

    hop_timeout_s: float = 10.0
    attempts: int = 6  # of one hop; waits double from `retry_s`
    retry_s: float = 0.05
    unconfirmed_max: int = 64  # receipts missing before the link counts as troubled
    memory_bytes: int = 1 << 62  # weights and caches may take so much
    silence_s: float = 60.0  # a formation whose head said nothing for so long is anybody's who forms a ring


class Stage:
    """One node's stage. `serve()` once, then `run()` until `stop()`."""

    def __init__(
        self, world: World, config: StageConfig, identity: Identity, parts: Parts, journal: Journal = silent
    ) -> None:
        self.world, self.config, self.identity, self.parts, self.journal = world, config, identity, parts, journal
        self.formation: Formation | None = None
        self._past: dict[tuple[str, int], Formation] = {}  # by ring and epoch, where evidence is kept; oldest first
        self._epochs: dict[str, int] = {}  # by ring, the last epoch that this stage began to join
        self._latest: RingPlan | None = None  # of these
        self._loaded: tuple[tuple[int, ...], Compute] | None = None
        self._warm = False  # commitments have been made before
        self._heard_s = -inf  # when the head, or a pass, last came
        self._awake: Signal = world.signal()
        self._stopped = False
        self._waiting: dict[int, Signal] = {}  # handlers of passes that came early

    def serve(self) -> None:
        """Answer the ring's messages."""
        self.world.serve(
            {
                JoinRing: self._join,
                GreetNeighbours: self._greet,
                Greeting: self._greeted,
                Hop: self._hop,
                AskProgress: self._progress,
                AskEvidence: self._evidence,
                Forget: self._forget,
            }
        )

    def stop(self) -> None:
        """Stop after the pass under way; who waits for a pass that came early waits no more."""
        self._stopped = True
        self._awake.set()
        for waiting in self._waiting.values():
            waiting.set()

    async def run(self) -> None:
        """Compute what arrives, in order, until `stop()`."""
        while not self._stopped:
            ring = self.formation
            if ring is None or ring.halted or not ring.ready:
                await self._awake.wait()
                self._awake = self.world.signal()
                continue
            made, states = ring.ready.popleft()
            await self._compute(ring, made, states)

    # ------------------------------------------------------------------------------------------------- forming a ring
    async def _join(self, source: str, message: JoinRing) -> Message:
        plan = message.plan
        if fault := stranger(source, plan, self.formation, self.world.now() - self._heard_s, self.config.silence_s):
            raise Refused(fault)
        if self.formation is not None and plan == self.formation.plan:  # said twice: the same links, not signed anew
            return Joined(self.formation.compute.memory_bytes)
        await self.join(plan)
        assert self.formation is not None
        return Joined(self.formation.compute.memory_bytes)

    async def join(self, plan: RingPlan) -> None:
        """Be the member that the plan says. Raises `Refused` with the reason."""
        try:
            at = plan.place_of(self.world.name)
        except ValueError as error:
            raise Refused(str(error)) from error
        member = plan.members[at]
        mine = {"version": VERSION, "checkpoint": self.parts.checkpoint, "public_key": self.identity.public_key}
        theirs = {"version": plan.version, "checkpoint": plan.checkpoint, "public_key": member.public_key}
        for field, value in mine.items():
            if theirs[field] != value:
                raise Refused(f"{field}: the plan says {theirs[field]}, stage {self.world.name!r} has {value}")
        room_bytes = self.config.memory_bytes
        if fault := plan.faults() or no_room(plan, member, self.parts.bytes_min(plan, member), room_bytes):
            raise Refused(fault)
        self._enter(plan)
        if self.formation is not None and not self.formation.halted:
            self.formation.halted = f"epoch {plan.epoch} is being formed"  # no pass of the old one on emptied caches
        compute = await self._load(plan, member)
        commit = await self._commit(plan)
        if self._latest is not plan:
            raise Refused(f"epoch {plan.epoch} of ring {plan.ring!r} was overtaken by another while it was joined")
        if self.formation is not None and self.formation.plan.keep_evidence:
            self._past[self.formation.plan.ring, self.formation.plan.epoch] = self.formation
            while len(self._past) > EPOCHS_KEPT:
                del self._past[next(iter(self._past))]
        self.formation = Formation(plan, at, compute, self.identity, commit)
        self._heard_s = self.world.now()
        for waiting in self._waiting.values():
            waiting.set()
        self._waiting.clear()
        self._awake.set()
        self.journal("joined", ring=plan.ring, epoch=plan.epoch, first=member.first, end=member.end)

    def _enter(self, plan: RingPlan) -> None:
        """An epoch of a ring is joined once, with one plan: two formations of it would sign two messages of the same
        number, and who does that is convicted (`settle_equivocation`). Raises `Refused` for one that is used up."""
        last = self._epochs.get(plan.ring)
        if last is not None and plan.epoch <= last:
            raise Refused(f"epoch {plan.epoch} of ring {plan.ring!r} is over, this stage has begun epoch {last} of it")
        if last is None and len(self._epochs) >= RINGS_MAX:
            raise Refused(f"stage {self.world.name!r} has been in {RINGS_MAX} rings and takes part in no other")
        self._epochs[plan.ring] = plan.epoch
        self._latest = plan

    async def _load(self, plan: RingPlan, member: Member) -> Compute:
        """The arithmetic for these layers: kept from the last formation where it is the same, with empty caches."""
        key = (member.first, member.end, plan.micro_batches, plan.rows, plan.capacity_tokens)
        loaded = self._loaded
        if loaded is not None and loaded[0] == key:
            await self.world.compute(Seconds(duration_s=0.0), loaded[1].reset)
            return loaded[1]
        self._loaded = None  # the old layers go before the new ones come
        try:
            compute = await self.world.compute(Seconds(duration_s=0.0), lambda: self.parts.load(plan, member))
        except (ValueError, OSError, RuntimeError, MemoryError) as error:  # torch says RuntimeError for no room
            raise Refused(
                f"stage {self.world.name!r} cannot load layers {member.first}..{member.end - 1}: {error}"
            ) from error
        if compute.dtype != plan.dtype:
            raise Refused(f"dtype: the plan says {plan.dtype}, stage {self.world.name!r} has {compute.dtype}")
        if fault := no_room(plan, member, compute.memory_bytes, self.config.memory_bytes):
            raise Refused(fault)
        self._loaded = (key, compute)
        return compute

    async def _commit(self, plan: RingPlan) -> Commit:
        """The ring's commitments, tried out once: what is compiled on first use (a minute) is compiled now, and not
        in the middle of a hop."""
        commit = self.parts.commit(plan)
        if plan.signed and not self._warm:
            chunk = bytes(plan.hidden * (2 if plan.dtype == "bfloat16" else 4))
            try:
                await self.world.compute(Seconds(duration_s=0.0), lambda: commit(chunk))
            except (ValueError, OSError, RuntimeError) as error:
                raise Refused(f"stage {self.world.name!r} cannot commit as the plan says: {error}") from error
            self._warm = True
        return commit

    async def _greet(self, source: str, message: GreetNeighbours) -> Message:
        ring = self._ring(message.epoch)
        await self.greet(ring)
        return Ok()

    async def greet(self, ring: Formation) -> None:
        """Tell the successor what will come. Raises `Refused`, naming the link, when it does not want that."""
        plan = ring.plan
        if ring.last:
            return
        greeting = Greeting(
            plan.ring, plan.epoch, VERSION, self.parts.checkpoint, ring.member.end, plan.hidden, ring.compute.dtype
        )
        try:
            await self.world.call(ring.successor.name, greeting, self.config.hop_timeout_s)
        except CallError as error:
            raise Refused(f"link {self.world.name!r} -> {ring.successor.name!r}: {error.reason}") from error

    async def _greeted(self, source: str, message: Greeting) -> Message:
        ring = self._ring(message.epoch)
        plan = ring.plan
        expected = {
            "sender": (source, ring.predecessor.name),
            "ring": (message.ring, plan.ring),
            "version": (message.version, VERSION),
            "checkpoint": (message.checkpoint, self.parts.checkpoint),
            "first layer": (message.end, ring.member.first),
            "hidden": (message.hidden, plan.hidden),
            "dtype": (message.dtype, ring.compute.dtype),
        }
        for field, (theirs, ours) in expected.items():
            if theirs != ours:
                raise Refused(f"{field}: {source!r} says {theirs}, {self.world.name!r} expects {ours}")
        return Ok()

    def _ring(self, epoch: int) -> Formation:
        """The formation of this epoch. Raises `Refused` for any other."""
        ring = self.formation
        if ring is None or ring.plan.epoch != epoch:
            now = "no ring" if ring is None else f"epoch {ring.plan.epoch}"
            raise Refused(f"stage {self.world.name!r} is in {now}, the message is of epoch {epoch}")
        return ring

    # ------------------------------------------------------------------------------------------------------- the work
    async def _hop(self, source: str, hop: Hop) -> Message:
        ring = self._ring(hop.epoch)
        if source != ring.predecessor.name or ring.at == 0:
            raise Refused(f"{source!r} is not the predecessor of {self.world.name!r}")
        if hop.states.ndim != 2 or hop.states.shape[1] != ring.plan.hidden or hop.states.dtype != ring.wire_dtype:
            raise Refused(
                f"states are {hop.states.dtype} {hop.states.shape}, expected {ring.wire_dtype} of {ring.plan.hidden}"
            )
        try:
            made = pass_of(hop)
            signed = ring.read(made, hop) if ring.plan.signed else None
            ready = ring.order.arrive(hop.epoch, hop.number, (made, hop.states, signed))
        except (ValueError, Drift, BadHop) as error:
            raise Refused(str(error)) from error
        self._heard_s = self.world.now()
        for item in ready:
            self._take(ring, *item)
        if hop.number >= ring.taken:
            waiting = self._waiting.setdefault(hop.number, self.world.signal())
            await waiting.wait()
            if self.formation is not ring or hop.number >= ring.taken:
                raise Refused(f"epoch {ring.plan.epoch} is over")
        if ring.halted:
            raise Refused(ring.halted)
        return Taken(ring.receipts.get(hop.number, b""))

    def _take(self, ring: Formation, made: Pass, states: np.ndarray, signed: Any) -> None:
        """A pass in its turn: checked against what was signed, then ready to be computed."""
        if not ring.halted:
            try:
                answer = ring.accept(made, states, signed)
            except BadHop as error:
                self._halt(ring, str(error), self._report(ring, ring.predecessor.name, self.world.name, str(error)))
            else:
                if isinstance(answer, Complaint):
                    reason = f"complaint about chunk {answer.chunk} of request {answer.request}"
                    self._halt(ring, reason, self._complain(ring, answer))
                elif isinstance(answer, Receipt):
                    ring.receipts[answer.number] = answer.signature
                    ring.receipts.pop(answer.number - 4 * ring.plan.window, None)
        if not ring.halted:
            ring.ready.append((made, states))
        ring.taken = made.number + 1
        if made.number in self._waiting:
            self._waiting.pop(made.number).set()
        self._awake.set()

    def _halt(self, ring: Formation, reason: str, say: Coroutine[Any, Any, None]) -> None:
        ring.halted = reason
        self.world.spawn(say, "report")

    async def feed(self, made: Pass) -> Any:
        """The head's own stage: compute a pass that it has just decided on. Returns what was made if it is also the
        last stage, else None (it is on its way)."""
        assert self.formation is not None and self.formation.at == 0
        ring = self.formation
        ring.taken = made.number + 1
        return await self._compute(ring, made, None)

    async def _compute(self, ring: Formation, made: Pass, states: np.ndarray | None) -> Any:
        """One pass through the layers, and on its way. Loading and arithmetic errors halt this formation, not the node:
        what came may have been made to cause them."""
        try:
            drawing = ring.rows.obey(made)
            began_s = self.world.now()
            result = await self.world.compute(ring.compute.work(made), lambda: ring.compute.run(made, drawing, states))
            ring.busy_s += self.world.now() - began_s
            if self.formation is not ring or ring.halted:
                return None
            message = self._message(ring, made, drawing, result)
        except ValueError as error:
            self._halt(ring, str(error), self._report(ring, ring.predecessor.name, self.world.name, str(error)))
            return None
        ring.computed = made.number + 1
        if message is None:
            ring.delivered.add(made.number)
            return result
        self.world.spawn(self._send(ring, message, made.number), "send")
        return None

    def _message(self, ring: Formation, made: Pass, drawing: Sequence[HeldRow], result: Any) -> Message | None:
        """What goes on: activations to the successor, or tokens to the head; None in a ring of one."""
        if not ring.last:
            return hop_of(made, result.states, *ring.seal(made, result.states))
        commitments, signature = ring.seal_drawn(made, drawing, result)
        if ring.at == 0:
            return None
        tokens = np.zeros(0, np.int32) if result.tokens is None else result.tokens
        logprobs = np.zeros(0, np.float32) if result.logprobs is None else result.logprobs
        return Drawn(made.epoch, made.number, tokens, logprobs, commitments, signature)

    async def _send(self, ring: Formation, message: Message, number: int) -> None:
        """Deliver one message, again and again until it is taken, the epoch ends or patience does."""
        wait_s, reason, target = self.config.retry_s, "", ring.successor.name
        for _ in range(self.config.attempts):
            try:
                taken = await self.world.call(target, message, self.config.hop_timeout_s)
            except Refused as refusal:
                reason = refusal.reason
                break
            except (Timeout, Unreachable) as error:
                if not reason and isinstance(error, Unreachable):  # the head should look now, not when patience ends
                    self.world.spawn(self._report(ring, self.world.name, target, error.reason), "report")
                reason = error.reason
                await self.world.sleep(wait_s)
                wait_s *= 2
            else:
                ring.confirm(number, taken.signature)
                if ring.plan.signed and ring.unconfirmed() > self.config.unconfirmed_max:
                    reason = f"{ring.unconfirmed()} messages without a receipt"
                    break
                return
            if self.formation is not ring:
                return
        if self.formation is ring:
            await self._report(ring, self.world.name, target, reason)

    # ----------------------------------------------------------------------------------------------------- to the head
    async def _report(self, ring: Formation, sender: str, receiver: str, reason: str) -> None:
        self.journal("trouble", epoch=ring.plan.epoch, sender=sender, receiver=receiver, reason=reason)
        await self._tell_head(ring, ReportTrouble(ring.plan.epoch, sender, receiver, reason))

    async def _complain(self, ring: Formation, complaint: Complaint) -> None:
        self.journal("complaint", epoch=ring.plan.epoch, request=complaint.request, chunk=complaint.chunk)
        await self._tell_head(ring, FileComplaint(ring.plan.epoch, complaint))

    async def _tell_head(self, ring: Formation, message: Message) -> None:
        try:
            await self.world.call(ring.plan.members[0].name, message, self.config.hop_timeout_s)
        except CallError as error:  # the head will notice the missing work by itself
            self.journal("unheard", reason=error.reason)

    async def announce(self, head: str) -> None:
        """Tell a head that this node can be a stage (again). Raises `CallError` when it does not hear or want it."""
        await self.world.call(head, Announce(self.identity.public_key, VERSION), self.config.hop_timeout_s)

    async def _progress(self, source: str, message: AskProgress) -> Message:
        ring = self.formation
        if ring is None:
            return ProgressReport(-1, 0, 0, 0)
        if source == ring.plan.members[0].name:
            self._heard_s = self.world.now()
        return ProgressReport(ring.plan.epoch, ring.taken, ring.computed, ring.delivered.count, ring.busy_s)

    async def _evidence(self, source: str, message: AskEvidence) -> Message:
        return self.evidence(message)

    def evidence(self, message: AskEvidence) -> Evidence:
        """What this stage can show of an epoch. Raises `Refused` where it has nothing of it."""
        ring = self._held(message.ring, message.epoch)
        said = () if ring.sender is None else about(message.requests, ring.sender.said)
        if ring.receiver is None:
            return Evidence(said, (), ())
        exhibits = [e for request in message.requests for e in ring.receiver.defence(request)]
        forgotten = tuple(request for request in message.requests if request in ring.receiver.forgotten)
        return Evidence(said, about(message.requests, ring.receiver.digests()), tuple(exhibits), forgotten)

    def _held(self, ring: str, epoch: int) -> Formation:
        """The formation of this ring and epoch, now or earlier. Raises `Refused` where nothing is kept of it."""
        now = self.formation
        if now is not None and (now.plan.ring, now.plan.epoch) == (ring, epoch):
            return now
        if (ring, epoch) not in self._past:
            raise Refused(f"stage {self.world.name!r} keeps nothing of epoch {epoch} of ring {ring!r}")
        return self._past[ring, epoch]

    async def _forget(self, source: str, message: Forget) -> Message:
        """Not of a sequence that goes on: a complaint would need its bytes."""
        for ring in (self.formation, *self._past.values()):
            if ring is not None and ring.plan.ring == message.ring and ring.receiver is not None:
                for request in message.requests:
                    if not ring.receiver.live(request):
                        ring.receiver.forget(request)
        return Ok()
