"""The head of a ring: takes requests, schedules every pass, and never loses what was generated.

Takes `Complete` (a client's prompts), `Drawn` (from the last stage), `FileComplaint` and `ReportTrouble` (from stages),
`Announce` (a node that can be a stage). Sends `JoinRing`, `GreetNeighbours` and `AskProgress` (`ring.py`). It lives on
the node of the first stage and feeds that one itself. The schedule is a pure machine (`schedule.py`).

When a stage is lost, all live sequences are prefilled again, prompt and answer so far, and go on. Requests and tokens
are on disk before anything else happens with them, so a head that dies goes on where it was. When a complaint convicts
a stage, its seat goes to another, and the tokens of chunks that no link has confirmed are drawn again.

Differs from the original (prime-rl 1334cd61a with the testnet's regrouping): 1) there a lost stage ends the group's
work; 2) complaints are settled while the ring runs; 3) the sampler's output goes to the head alone.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from refimpl.journal import Journal, silent
from refimpl.messages import Message, Ok
from refimpl.pipeline.blame import Exhibit, Receipt, Verdict, leaf_of, settle
from refimpl.pipeline.formation import Formation, drawn_digest, token_rows, verify_link
from refimpl.pipeline.judge import about
from refimpl.pipeline.messages import (
    Announce,
    AskEvidence,
    Complete,
    Completed,
    Drawn,
    Evidence,
    FileComplaint,
    ReportTrouble,
    RingPlan,
    Taken,
)
from refimpl.pipeline.requests import Kept, RequestLog
from refimpl.pipeline.ring import Ring, RingConfig
from refimpl.pipeline.schedule import Drift, HeadSchedule, Pass, Request
from refimpl.pipeline.stage import Stage
from refimpl.world import Refused, Signal, World


class RingOver(ValueError):
    """The ring ended before the answers were complete. Takes exactly one argument: the sentence."""


class Head:
    """One ring's head. `serve()` once, then `run()` until `stop()`.

    `stage`: the head's own, not served by itself. `nodes`: name -> public key of all nodes that can be stages, in the
    order in which they are to be used; the first is this one.
    """

    def __init__(
        self,
        world: World,
        config: RingConfig,
        stage: Stage,
        nodes: Mapping[str, str],
        log: RequestLog | None = None,
        journal: Journal = silent,
    ) -> None:
        self.world, self.config, self.stage, self.journal = world, config, stage, journal
        self.log = log or RequestLog()
        self.log.agree(
            {
                "checkpoint": stage.parts.checkpoint,
                "dtype": config.dtype,
                "temperature": config.temperature,
                "top_k": config.sampling_top_k,
                "top_p": config.top_p,
                "stop_tokens": sorted(config.stop_tokens),
            }
        )
        self.ring = Ring(world, config, stage, nodes, journal, self.log.epoch, self.log.begin, self.log.banned)
        self.schedule = HeadSchedule(
            micro_batches=config.micro_batches,
            rows=config.rows,
            capacity_tokens=config.capacity_tokens,
            chunk_tokens=config.prefill_tokens,
        )
        self.verdicts: list[Verdict] = []
        self.drawn: dict[int, list[Exhibit]] = {}  # by epoch, what the last stage signed, where evidence is kept
        self.plans: dict[int, RingPlan] = {}  # by epoch
        self.finished: dict[int, int] = {}  # request -> the epoch in which it was completed
        self.over = ""  # the reason, once this ring cannot go on
        self._awake: Signal = world.signal()
        self._stopped = False
        self._done: dict[int, Signal] = {}
        self._sent_at: dict[int, float] = {}
        self._recent_s: dict[bool, deque[float]] = {kind: deque(maxlen=32) for kind in (False, True)}
        self._round_at: dict[int, float] = {}  # by micro-batch, when its last pass came round
        self._cycles_s: deque[float] = deque(maxlen=1024)
        self._vain = 0  # epochs since a pass came round
        self._keep_chunk = 1
        for kept in self.log.unfinished():
            self._queue(kept)

    def serve(self) -> None:
        """Answer clients and stages."""
        self.world.serve(
            {
                Complete: self._complete,
                Drawn: self._drawn,
                FileComplaint: self._complaint,
                ReportTrouble: self.ring.trouble,
                AskEvidence: self._evidence,
                Announce: self.ring.announce,
            }
        )

    def stop(self) -> None:
        """Stop after what is under way."""
        self._stopped = True
        self._awake.set()
        self.ring.alarm()

    async def run(self) -> None:
        """Form the ring and keep passes going round until `stop()`."""
        self.world.spawn(self._watch(), "watch")
        while not self._stopped:
            if not self.ring.up:
                if await self.ring.form(self.schedule.window):
                    self._begin_epoch()
                continue
            made = self.schedule.next_pass()
            if made is None:
                await self._awake.wait()
                self._awake = self.world.signal()
                continue
            self._sent_at[made.number] = self.world.now()
            result = await self.stage.feed(made)
            if result is not None:
                self._came(made.epoch, made.number, _list(result.tokens), _list(result.logprobs))

    def _begin_epoch(self) -> None:
        """Everything that was live is prefilled again."""
        self.plans[self.ring.epoch] = self.ring.formation.plan
        self._sent_at.clear()
        self._round_at.clear()
        self._vain = min(self._vain + 1, 6) if self.schedule.number else 0
        self.schedule.restart(keep_chunk=self._keep_chunk, epoch=self.ring.epoch)
        self.log.cut({number: len(answer) for number, answer in self.schedule.answers().items()})
        self._keep_chunk = 1

    async def _watch(self) -> None:
        """Look for passes that are overdue."""
        while not self._stopped:
            quiet = await self.ring.quiet(self.config.check_s)
            if self.ring.up and not self._stopped and (not quiet or self._overdue()):
                await self.ring.find_hang(self.schedule.number, self._overdue)
                self._awake.set()

    def cycle_s(self) -> float:
        """Measured cycle: the median time from one decode pass of a micro-batch to its next, coming round."""
        return statistics.median(self._cycles_s) if self._cycles_s else 0.0

    def forget_cycles(self) -> None:
        """Measure cycles from here on: the ring is another, or what it is asked."""
        self._cycles_s.clear()
        self._round_at.clear()

    def _overdue(self) -> bool:
        """Is the oldest pass later than passes of its kind (prefill or decode) are? Each ring that was mended in vain
        is given twice the time, so that a ring that is merely slow is not mended for ever."""
        oldest = next(iter(self.schedule.in_flight.values()), None)
        if oldest is None:
            return False
        recent = self._recent_s[_is_prefill(oldest)]
        usual_s = statistics.median(recent) if recent else self.config.overdue_s_min
        limit_s = (self.config.overdue_s_min + self.config.overdue_factor * usual_s) * 2.0**self._vain
        return self.world.now() - self._sent_at.get(oldest.number, self.world.now()) > limit_s

    # ------------------------------------------------------------------------------------------------------- requests
    async def complete(
        self,
        ids: Sequence[str],
        prompts: Sequence[Sequence[int]],
        max_new_tokens: Sequence[int],
        seeds: Sequence[int],
    ) -> list[Kept]:
        """Answers to these prompts; an id that was asked for before is answered from the record.

        Raises `TooLong` before any work when one of them does not fit a cache row, `OtherRequest` when another request
        has its id, ValueError for one that asks for nothing or has a token that the model does not know, `RingOver`
        when the ring ended first.
        """
        wanted = list(zip(ids, prompts, max_new_tokens, seeds, strict=True))
        if len({request_id for request_id, *_ in wanted}) != len(wanted):
            raise ValueError(f"ids are {list(ids)}, expected each once")
        fresh = [item for item in wanted if not self.log.compare(*item)]
        for item in fresh:
            self.schedule.check(Request(id=0, prompt=tuple(item[1]), max_new_tokens=item[2]))
            if fault := self._foreign(item[1]):
                raise ValueError(f"prompt of request {item[0]!r}: {fault}")
        for item in fresh:
            self._queue(self.log.submit(*item))
        self._awake.set()
        kept = [self.log.requests[request_id] for request_id in ids]
        for request in kept:
            if not request.reason:
                await self._done[request.number].wait()
        if self.over and not all(request.reason for request in kept):
            raise RingOver(self.over)
        return kept

    def _queue(self, kept: Kept) -> None:
        """Go on with a request, or say that it is done where an earlier head drew its last token and got no further."""
        request = Request(
            id=kept.number,
            prompt=kept.prompt,
            max_new_tokens=kept.max_new_tokens,
            seed=kept.seed,
            stop_tokens=self.config.stop_tokens,
            answer=tuple(kept.answer),
        )
        if reason := request.end(request.answer):
            self.log.done(kept.number, reason)
            return
        self._done[kept.number] = self.world.signal()
        self.schedule.submit(request)

    async def _complete(self, source: str, message: Complete) -> Message:
        if len({len(message.ids), len(message.prompts), len(message.max_new_tokens), len(message.seeds)}) != 1:
            raise Refused("ids, prompts, max_new_tokens and seeds must be equally many")
        for request_id, prompt in zip(message.ids, message.prompts, strict=True):
            if fault := _no_row(prompt):
                raise Refused(f"prompt of request {request_id!r} is {fault}")
        prompts = [prompt.tolist() for prompt in message.prompts]
        try:
            kept = await self.complete(message.ids, prompts, message.max_new_tokens, message.seeds)
        except ValueError as error:
            raise Refused(str(error)) from error
        return Completed(
            tuple(np.array(request.answer, np.int32) for request in kept),
            tuple(np.array(request.logprobs, np.float32) for request in kept),
            tuple(request.reason for request in kept),
        )

    # --------------------------------------------------------------------------------------------------------- tokens
    def _foreign(self, tokens: Sequence[int]) -> str:
        """Which of these is no token of the model's; empty if all are. An id outside its table must get no further:
        on the record, it would stop this head, and the next one too."""
        vocabulary = self.stage.parts.vocabulary
        wrong = next((token for token in tokens if not 0 <= token < vocabulary), None)
        return "" if wrong is None else f"token {wrong}, expected 0 to {vocabulary - 1}"

    def _malformed(self, drawn: Drawn) -> str:
        """What is wrong with tokens that came round, whatever pass they are of; empty if nothing is."""
        tokens, logprobs = drawn.tokens, drawn.logprobs
        if fault := _no_row(tokens):
            return f"tokens are {fault}"
        if logprobs.shape != tokens.shape or logprobs.dtype.kind != "f" or not np.isfinite(logprobs).all():
            return f"log-probabilities are {logprobs.dtype} {logprobs.shape}, expected {len(tokens)} finite numbers"
        return self._foreign(tokens.tolist())

    async def _drawn(self, source: str, drawn: Drawn) -> Message:
        if not self.ring.up or drawn.epoch != self.ring.epoch:
            raise Refused(f"epoch {drawn.epoch} is not the ring's")
        formation = self.ring.formation
        if source != formation.plan.members[-1].name or len(formation.plan.members) == 1:
            raise Refused(f"{source!r} is not the last stage")
        if fault := self._malformed(drawn):  # like one that does not fit: not taken, and the ring is mended without it
            raise Refused(f"pass {drawn.number}: {fault}")
        made = self.schedule.in_flight.get(drawn.number)
        signature = b""
        if made is not None and formation.plan.signed:
            signature = self._receipt(formation, made, drawn)
        try:
            self._came(drawn.epoch, drawn.number, drawn.tokens.tolist(), drawn.logprobs.tolist())
        except Drift as error:
            raise Refused(str(error)) from error
        return Taken(signature)

    def _receipt(self, formation: Formation, made: Pass, drawn: Drawn) -> bytes:
        """Check the last stage's signature over its tokens, keep it, confirm it."""
        drawing = [row for row in made.rows if row.draws]
        if len(drawing) != len(drawn.tokens):
            raise Refused(f"pass {drawn.number} brings {len(drawn.tokens)} tokens, expected {len(drawing)}")
        rows = token_rows(drawing, drawn.tokens.tolist())
        signed = drawn_digest(formation.plan, drawn.number, rows, drawn.commitments, drawn.signature)
        if not signed.holds(verify_link):
            raise Refused(f"pass {drawn.number}: the signature is not the last stage's over these tokens")
        if formation.plan.keep_evidence:
            leaves = tuple(leaf_of(request, first, 1, data) for request, first, data in rows)
            shown = [Exhibit(signed, leaves, at, data) for at, (_, _, data) in enumerate(rows)]
            self.drawn.setdefault(drawn.epoch, []).extend(shown or [Exhibit(signed, (), -1, b"")])
        return formation.sign(Receipt.content(signed.digest))

    def _came(self, epoch: int, number: int, tokens: Sequence[int], logprobs: Sequence[float]) -> None:
        """A pass came round: on disk first, then answers that are complete, then the next pass."""
        made = self.schedule.in_flight.get(number) if epoch == self.schedule.epoch else None
        finished = self.schedule.returned(epoch, number, tokens)
        if made is None:
            return
        drawing = [row.request for row in made.rows if row.draws]
        self.log.draw(list(zip(drawing, map(int, tokens), map(float, logprobs), strict=True)))
        self._recent_s[_is_prefill(made)].append(self.world.now() - self._sent_at.pop(number))
        self._vain = 0
        now, last = self.world.now(), self._round_at.get(made.micro_batch)
        if not _is_prefill(made) and last is not None:
            self._cycles_s.append(now - last)
        self._round_at[made.micro_batch] = now
        for end in finished:
            self.log.done(end.request, end.reason)
            self.finished[end.request] = epoch
            self._done[end.request].set()
        self._awake.set()

    def _end(self, reason: str) -> None:
        """This ring cannot go on: its requests stay on the record, unfinished."""
        self.over = reason
        self.journal("over", reason=reason)
        self.stop()
        for done in self._done.values():
            done.set()

    async def _evidence(self, source: str, message: AskEvidence) -> Message:
        """The first stage's own digests, and what the last stage signed: its commitments and the tokens drawn."""
        own = self.stage.evidence(message)
        drawn = self.drawn.get(message.epoch, [])
        digests = {exhibit.signed.digest.number: exhibit.signed for exhibit in drawn}
        wanted = [e for e in drawn if e.row >= 0 and e.leaves[e.row].request in message.requests]
        return Evidence(own.said, about(message.requests, digests.values()), tuple(wanted))

    def remove(self, name: str) -> None:
        """A verdict on a finished answer: this node's key is out for good, and its seat goes to another."""
        self.log.ban(self.ring.nodes[name])
        self.ring.unseat([name])
        self._awake.set()

    # ----------------------------------------------------------------------------------------------------- complaints
    async def _complaint(self, source: str, message: FileComplaint) -> Message:
        """Settle it from its own bytes; whoever is convicted is out, and chunks that no link confirmed are redrawn."""
        if not self.ring.up or message.epoch != self.ring.epoch:
            raise Refused(f"epoch {message.epoch} is not the ring's")
        formation, complaint = self.ring.formation, message.complaint
        keys = [member.public_key for member in formation.plan.members]
        if complaint.complainer not in keys[1:]:
            raise Refused("the complainer has no predecessor in this ring")
        accused = keys[keys.index(complaint.complainer) - 1]
        verdict = settle(
            complaint,
            ring=formation.plan.ring,
            sender=accused,
            verify=verify_link,
            commit=formation.commit,
            bytes_per_token=formation.bytes_per_token,
            chunk_tokens=formation.plan.chunk_tokens,
        )
        self.verdicts.append(verdict)
        self.journal("verdict", on=verdict.on, culprit=verdict.culprit, reason=verdict.reason)
        if verdict.culprit is not None:
            name = formation.plan.members[keys.index(verdict.culprit)].name
            if name == self.world.name:
                self._end(f"the head's own stage is convicted: {verdict.reason}")
                return Ok()
            self._keep_chunk = formation.plan.chunk_tokens
            self.remove(name)
        return Ok()


def _is_prefill(made: Pass) -> bool:
    return any(row.new > 1 for row in made.rows)


def _list(values: np.ndarray | None) -> list[Any]:
    return [] if values is None else values.tolist()


def _no_row(tokens: np.ndarray) -> str:
    """Why this is no row of token ids, whatever their values; empty if it is one."""
    if tokens.ndim == 1 and tokens.dtype.kind in "iu":
        return ""
    return f"{tokens.dtype} {tokens.shape}, expected one row of whole numbers"
