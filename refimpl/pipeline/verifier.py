"""Checks a ring's finished answers: one replay, boundary by boundary, and a judgement that names at most one stage.

Sends `AskEvidence` to every stage and `Forget` once an answer is judged. Each boundary's commitments are those that its
sender signed: taken from what the receiver kept, or, where it shows nothing, from what the sender kept; two that differ
convict the sender. A boundary of which nobody shows anything is trouble on that link.

The arithmetic (the replay, running one stage on given bytes) comes in as a `Replay`; the decisions are `judge.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from refimpl.pipeline.blame import Commitment, Exhibit, SignedDigest, Verdict, root_of, settle_equivocation
from refimpl.pipeline.formation import TOKEN_BYTES, verify_link
from refimpl.pipeline.judge import Chunk, Judgement, LinkTrouble, NotShown, judge_group
from refimpl.pipeline.messages import AskEvidence, Evidence, Forget, RingPlan
from refimpl.work import Work
from refimpl.world import CallError, World


class Replay(Protocol):
    """The verifier's own model (`refimpl.pipeline.replay`), or a stand-in."""

    def boundaries(self, tokens: Sequence[int]) -> Any:
        """The right activations of every stage's output for one sequence."""
        ...

    def deviates(self, boundaries: Any, stage: int, commitments: Sequence[Commitment]) -> list[bool]:
        """For each commitment: is it not that of the right activations of its chunk?"""
        ...

    def follows(
        self, stage: int, tokens: Sequence[int], fed: bytes | None, sent: bytes | None, stated: Sequence[Commitment]
    ) -> bool:
        """Does what a stage sent (or, for the last, committed to) follow from what it was fed (None: the tokens)?"""
        ...

    def work(self, tokens: Sequence[int]) -> Work:
        """What one replay costs."""
        ...


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One finished answer to check. `request` is its number inside the ring, `epoch` that of its last token."""

    request: int
    epoch: int
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(slots=True)
class _Boundary:
    """What is known of one stage's output, in one epoch."""

    stated: dict[Chunk, Commitment]
    convicted: Verdict | None
    known: bool  # anybody showed anything


class RingVerifier:
    """Judges the answers of one ring. `plan_of(epoch)` gives the ring's plan in an epoch."""

    def __init__(self, world: World, replay: Replay, *, timeout_s: float = 30.0) -> None:
        self.world, self.replay, self.timeout_s = world, replay, timeout_s

    async def judge(self, plan: RingPlan, answer: Answer, settled: Sequence[Verdict] = ()) -> Judgement:
        """The judgement on one answer of the ring that `plan` describes. `settled`: verdicts on complaints so far."""
        stages = len(plan.members)
        shown = await self.world.gather(*(self._ask(member.name, plan.ring, answer) for member in plan.members))
        boundaries = [self._boundary(plan, answer, stage, shown) for stage in range(stages)]
        convicted = [b.convicted for b in boundaries if b.convicted is not None]
        convicted += self._tokens_verdict(plan, answer, shown[0])
        tokens = (*answer.prompt, *answer.answer[:-1])  # the last token drawn was never fed
        links, expected = [], -(-len(tokens) // plan.chunk_tokens)
        for stage, boundary in enumerate(boundaries):
            if not boundary.known or len(boundary.stated) != expected:
                have = f"{len(boundary.stated)} of {expected} commitments to request {answer.request} are there"
                links.append(LinkTrouble(stage, (stage + 1) % stages, have))
        deviates = None
        if not links and not convicted:
            deviates = await self.world.compute(self.replay.work(tokens), lambda: self._deviates(tokens, boundaries))
        result = judge_group(
            stages,
            deviates=deviates,
            members=[member.public_key for member in plan.members],
            settled=[*settled, *convicted],
            links=links,
            follows=lambda stage: self._follows(plan, answer, tokens, stage, shown, boundaries),
        )
        if result.decided:
            await self.world.gather(*(self._forget(member.name, plan.ring, answer) for member in plan.members[1:]))
        return result

    async def _ask(self, name: str, ring: str, answer: Answer) -> Evidence | None:
        try:
            evidence = await self.world.call(name, AskEvidence(ring, answer.epoch, (answer.request,)), self.timeout_s)
        except CallError:
            return None
        return evidence if isinstance(evidence, Evidence) else None

    async def _forget(self, name: str, ring: str, answer: Answer) -> None:
        try:
            await self.world.call(name, Forget(ring, (answer.request,)), self.timeout_s)
        except CallError:
            return

    def _boundary(self, plan: RingPlan, answer: Answer, stage: int, shown: Sequence[Evidence | None]) -> _Boundary:
        """The commitments that stage `stage` signed for this request, from both ends of its link."""
        sender, after = plan.members[stage].public_key, shown[(stage + 1) % len(plan.members)]
        own = shown[stage]
        received = [] if after is None else _signed_by(sender, plan, answer.epoch, after.received)
        said = [] if own is None else _signed_by(sender, plan, answer.epoch, own.said)
        by_number = {signed.digest.number: signed for signed in received}
        convicted = None
        for signed in said:
            other = by_number.setdefault(signed.digest.number, signed)
            if other.digest != signed.digest and convicted is None:
                convicted = settle_equivocation(other, signed, verify_link)
        stated = {
            (c.request, c.chunk): c
            for _, signed in sorted(by_number.items())
            for c in signed.digest.commitments
            if c.request == answer.request
        }
        return _Boundary(stated, convicted, bool(by_number))

    def _tokens_verdict(self, plan: RingPlan, answer: Answer, head: Evidence | None) -> list[Verdict]:
        """The head publishes the answer, whose tokens the last stage signed: what it did not sign, the head made up."""
        if head is None or len(plan.members) == 1:
            return []
        last = plan.members[-1].public_key
        signed = {}
        for exhibit in head.exhibits:
            leaf = _leaf_of(exhibit, last, plan, answer)
            if leaf is not None and len(exhibit.data) == TOKEN_BYTES:
                signed[leaf.first_token] = int.from_bytes(exhibit.data, "little")
        wrong = [at for at, token in signed.items() if at >= len(answer.answer) or answer.answer[at] != token]
        missing = len(answer.answer) - 1 not in signed  # an epoch's tokens are the last ones
        if not wrong and not missing:
            return []
        what = f"token {wrong[0]} of the answer is not" if wrong else "the last token of the answer is not known as"
        return [Verdict("sender", plan.members[0].public_key, f"{what} the one that the last stage signed")]

    def _deviates(self, tokens: Sequence[int], boundaries: Sequence[_Boundary]) -> list[list[bool]]:
        right = self.replay.boundaries(tokens)
        return [
            self.replay.deviates(right, stage, [b.stated[key] for key in sorted(b.stated)])
            for stage, b in enumerate(boundaries)
        ]

    def _follows(
        self,
        plan: RingPlan,
        answer: Answer,
        tokens: Sequence[int],
        stage: int,
        shown: Sequence[Evidence | None],
        boundaries: Sequence[_Boundary],
    ) -> bool:
        """Run one stage on what its predecessor signed for it. False where it answers and cannot show that; raises
        `NotShown` where it does not answer, or was told to forget: by whom, nobody can say."""
        own = shown[stage]
        if own is None or answer.request in own.forgotten:
            raise NotShown(stage)
        fed = None
        if stage > 0:
            fed = self._signed_bytes(plan, answer, stage - 1, own, len(tokens))
            if fed is None:
                return False
        stated = [boundaries[stage].stated[key] for key in sorted(boundaries[stage].stated)]
        sent = None
        if stage < len(plan.members) - 1:
            sent = self._signed_bytes(plan, answer, stage, shown[stage + 1], len(tokens))
        return self.replay.follows(stage, tokens, fed, sent, stated)

    def _signed_bytes(
        self, plan: RingPlan, answer: Answer, sender: int, evidence: Evidence | None, tokens: int
    ) -> bytes | None:
        """A sequence's whole activations as stage `sender` signed them, from its successor's exhibits; None if they are
        not all there."""
        parts, at = [], 0
        for exhibit in () if evidence is None else evidence.exhibits:
            leaf = _leaf_of(exhibit, plan.members[sender].public_key, plan, answer)
            if leaf is None or leaf.first_token != at:
                return None
            parts.append(exhibit.data)
            at += leaf.tokens
        return b"".join(parts) if at == tokens else None


def _signed_by(key: str, plan: RingPlan, epoch: int, digests: Sequence[SignedDigest]) -> list[SignedDigest]:
    """Those that this stage signed, for this ring and epoch."""
    return [
        signed
        for signed in digests
        if (signed.digest.ring, signed.digest.epoch, signed.digest.sender) == (plan.ring, epoch, key)
        and signed.holds(verify_link)
    ]


def _leaf_of(exhibit: Exhibit, key: str, plan: RingPlan, answer: Answer) -> Any:
    """The exhibit's leaf, if these are bytes that `key` signed for this request; else None."""
    if not _signed_by(key, plan, answer.epoch, [exhibit.signed]) or not 0 <= exhibit.row < len(exhibit.leaves):
        return None
    leaf = exhibit.leaves[exhibit.row]
    if root_of(exhibit.leaves) != exhibit.signed.digest.root or leaf.request != answer.request:
        return None
    return leaf if leaf.sha256 == hashlib.sha256(exhibit.data).digest() else None
